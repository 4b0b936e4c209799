"""Where a kernel's test runs: on a GPU, or on the CPU under Triton's interpreter (tests/kernels/test_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from peagle.drafter import attention, rows, shared_memory
from peagle.drafter.rows import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernel = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED,
    reason="needs a kernel: run by test_kernels.py under the interpreter",
)


def twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its plain code in place of the kernel, wherever its tensors are."""

    def plain(*arguments: Any, **options: Any) -> Any:
        with (
            mock.patch.object(rows, "uses_kernel", return_value=False),
            mock.patch.object(attention, "uses_kernel", return_value=False),
            mock.patch.object(shared_memory, "uses_kernel", return_value=False),
        ):
            return function(*arguments, **options)

    return plain
