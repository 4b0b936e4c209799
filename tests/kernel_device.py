"""Where a kernel's test runs: on a GPU, or on the CPU under Triton's interpreter (tests/test_kernels.py)."""

from __future__ import annotations

import pytest
import torch

from peagle.drafter.rows import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernel = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a kernel: run by tests/test_kernels.py under the interpreter"
)
