"""vLLM's CPU worker for a target whose drafter is another process: `peagle.vllm.remote_worker` without a GPU.

Given to vLLM as an import string, `REMOTE_CPU_WORKER` of `peagle.vllm.engine`. A module of its own, because importing
vLLM's CPU worker replaces `torch.Event` in the whole process.
"""

from peagle.vllm.cpu_worker import CPUWorker, SeedSafeModelRunner
from peagle.vllm.remote import RemoteDrafts
from peagle.vllm.remote_worker import RemoteControl


class RemoteCPURunner(RemoteDrafts, SeedSafeModelRunner):
    """vLLM's model runner for CPUs, with a remote drafter."""


class RemoteCPUWorker(RemoteControl, CPUWorker):
    """Drop-in for vLLM's CPU worker."""

    def init_device(self) -> None:
        """vLLM's set-up and the repairs of `CPUWorker`, then the remote drafter."""
        super().init_device()
        RemoteCPURunner.install_remote(self.model_runner)
