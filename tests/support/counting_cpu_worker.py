"""A CPU worker that counts the passes its drafter really runs. Test-only; everything else is as a user gets it."""

from typing import Any

from peagle.vllm.cpu_drafting import ChunkedProposer
from peagle.vllm.workers import CPURunner, CPUWorker


class CountingProposer(ChunkedProposer):
    """Counts calls of the drafter's pass by the number of requests in it."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.passes: list[int] = []

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        self.passes.append(len(kwargs["next_token_ids"]))
        return super().propose(*args, **kwargs)


class CountingCPURunner(CPURunner):
    def set_up_drafter(self) -> None:
        self.drafter = CountingProposer(self)


class CountingCPUWorker(CPUWorker):
    runner_class = CountingCPURunner

    def passes(self) -> list[int]:
        """Requests of each pass since the start."""
        return list(self.model_runner.drafter.passes)
