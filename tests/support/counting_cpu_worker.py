"""A CPU worker that counts the passes its drafter really runs. Test-only; everything else is as a user gets it."""

from typing import Any

from peagle.vllm.remote import ChunkedProposer
from peagle.vllm.workers import CPUWorker


class CountingProposer(ChunkedProposer):
    """Counts calls of the drafter's pass by the number of requests in it."""

    passes: list[int]

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.append(len(kwargs["next_token_ids"]))
        return super().propose(*args, **kwargs)


class CountingCPUWorker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        CountingProposer.install(self.model_runner)
        self.model_runner.drafter.passes = []

    def passes(self) -> list[int]:
        """Requests of each pass since the start."""
        return list(self.model_runner.drafter.passes)
