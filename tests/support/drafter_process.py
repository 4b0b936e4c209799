"""A drafter in a process of its own (`benchmarks.drafter`), for tests that use it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class DrafterProcess:
    """Runs from the constructor on; `entry` is what a target's `set_drafters` takes."""

    def __init__(self, head_dir: Path, target_dir: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.drafter", "--head", str(head_dir), "--target", str(target_dir)]
        self._process = subprocess.Popen(
            [*command, "--device", "cpu"],
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

    def kill(self) -> None:
        """kill -9; again is no error."""
        self._process.kill()
        self._process.wait(timeout=120)
        if self._process.stdout is not None:
            self._process.stdout.close()
