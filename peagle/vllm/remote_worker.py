"""vLLM's GPU worker for a target whose drafter is another process, and what it has in common with the CPU's.

Given to vLLM as an import string, `REMOTE_GPU_WORKER` of `peagle.vllm.engine`. Without drafters, which come by
`set_drafters`, a target serves as without speculation.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.worker import gpu_model_runner

from peagle.vllm.graph_worker import GraphTiers, GraphWorker
from peagle.vllm.remote import RemoteDrafts


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
