"""A drafter in a process of its own (`benchmarks.drafter`), for tests that use, stop and kill it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class DrafterProcess:
    """Runs from the constructor on; `entry` is what a target's `set_drafters` takes."""

    def __init__(self, head_dirs: Sequence[Path], target_dir: Path, *options: str, port: int = 0) -> None:
        heads = [part for head_dir in head_dirs for part in ("--head", str(head_dir))]
        command = [sys.executable, "-m", "benchmarks.drafter", *heads, "--target", str(target_dir), "--device", "cpu"]
        self._process = subprocess.Popen(
            [*command, "--port", str(port), *options],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        try:
            ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
            line = self._process.stdout.readline() if ready else ""
            assert line, f"no drafter after {START_TIMEOUT_S} s, or it ended: see its messages on stderr"
        except BaseException:
            self.kill()
            raise
        self._said = json.loads(line)

    @property
    def entry(self) -> dict[str, Any]:
        return {"address": self._said["address"], "heads": self._said["heads"]}

    @property
    def port(self) -> int:
        return int(self._said["address"].rpartition(":")[2])

    def freeze(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; again is no error."""
        self._process.kill()
        self._process.wait(timeout=120)
        if self._process.stdout is not None:
            self._process.stdout.close()
