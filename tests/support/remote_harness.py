"""A real engine whose drafter is another process, for tests that do something to the drafter meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.engine_harness import Result, RunningEngine, float32_kwargs
from tests.support.transport_harness import ROOT, eventually, only_link

PATIENT_S = 60.0  # two cores, shared with other tests
LINK_TIMEOUT_S = 120.0


def check_text(results: Sequence[Result], reference: Sequence[Result]) -> None:
    """Each answer has its length, and is how the target without drafts begins."""
    for result, expected in zip(results, reference, strict=False):
        assert result.tokens[0] == expected.tokens[0][: len(result.tokens[0])]
        assert result.finish_reasons == ["length"]


def num_verified(results: Sequence[Result]) -> int:
    return sum(one.drafting.counts.num_draft_tokens for one in results if one.drafting is not None)


@contextmanager
def drafter_process(head_dir: Path, target_dir: Path) -> Iterator[dict[str, Any]]:
    """A drafter in a process of its own (`benchmarks.drafter`), as a target's `set_drafters` takes it."""
    command = [sys.executable, "-m", "benchmarks.drafter", "--head", str(head_dir), "--target", str(target_dir)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--device", "cpu"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the drafter has ended: see its messages on stderr"
            yield json.loads(line)
        finally:
            process.kill()


class RemoteEngine(RunningEngine):
    """`RunningEngine` with what the service asks of the worker."""

    def __init__(self, target_dir: Path, head_dir: Path, *, k_max: int, is_async: bool, extra: dict[str, Any]) -> None:
        kwargs = float32_kwargs(target_dir, head_dir, extra, k_max, remote_deadline_s=PATIENT_S)
        if is_async:
            kwargs["worker_cls"] = "tests.support.async_remote_worker.AsyncRemoteWorker"
        super().__init__(kwargs, is_async=is_async)

    def report(self) -> dict[str, Any]:
        """Of the pool of links, which the first rank has."""
        return dict(self.call_workers("remote_report")[0])

    def connect(self, drafter: dict[str, Any]) -> None:
        """Use this drafter, and wait until steps can go to it."""
        self.call_workers("set_drafters", [drafter])
        eventually(lambda: only_link(self)["state"] == "up", LINK_TIMEOUT_S)
