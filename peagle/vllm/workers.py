"""vLLM's CPU workers with what this package changes, given to vLLM as import strings (`peagle.vllm.engine_settings`).

`CPUWorker` samples by `peagle.vllm.coupling`, with and without drafts. vLLM's own sampling on a CPU has two faults.
With drafts it expands temperature, top-k and top-p of requests to rows by a kernel whose result is dropped unless it is
int64 (`utils.cpu_triton_utils._expand_kernel_impl`). And it rewinds a seeded request's random generator by an offset,
which CPU generators do not have. On a GPU this module is not imported: vLLM's CPU worker replaces `torch.Event` in the
whole process.
"""

from typing import Any

from vllm.v1.sample import sampler
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.worker import cpu_worker

from peagle.vllm.coupling import CoupledModelRunner
from peagle.vllm.cpu_drafting import ChunkedProposer, PassSkipper
from peagle.vllm.device import describe_device
from peagle.vllm.remote import RemoteControl
from peagle.vllm.remote_cpu import RemoteDrafts


def run_uncompiled() -> None:
    """Let sampling run without TorchInductor in this process: vLLM compiles one small function at its first use, while
    requests wait."""
    function = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(function, "_torchdynamo_orig_callable", function)


class CPURunner(PassSkipper, CoupledModelRunner):
    """vLLM's V1 runner with coupled sampling; with a colocated drafter, if the engine has a head."""

    def set_up_drafter(self) -> None:
        if self.speculative_config is not None and self.speculative_config.method == "eagle3":
            self.drafter = ChunkedProposer(self)


class RemoteCPURunner(RemoteDrafts, CoupledModelRunner):
    """The same with a remote drafter."""


class CPUWorker(cpu_worker.CPUWorker):
    """Drop-in for vLLM's class of the same name."""

    runner_class: type[CPURunner | RemoteCPURunner] = CPURunner
    describe_device = describe_device

    def init_device(self) -> None:
        """Build vLLM's model runner, then change how it samples."""
        super().init_device()
        run_uncompiled()
        runner: Any = self.model_runner
        self.runner_class.install(runner)
        runner.set_up_drafter()
        if self.vllm_config.speculative_config is not None:
            # vLLM leaves out min_p and logit_bias beside speculation. Requests with them have K = 0 here.
            runner.input_batch.logitsprocs = LogitsProcessors(
                kind(self.vllm_config, runner.device, False) for kind in BUILTIN_LOGITS_PROCESSORS
            )


class RemoteCPUWorker(RemoteControl, CPUWorker):
    """`CPUWorker` for a target with a remote drafter."""

    runner_class = RemoteCPURunner
