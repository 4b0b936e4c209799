"""Runs the kernels' tests through Triton's interpreter, which must be chosen before Triton is imported: in one process
of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    files = sorted(map(str, TESTS.glob("test_kernels_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parents[1], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "needs a kernel" not in done.stdout, "the interpreter was not on:\n" + done.stdout
