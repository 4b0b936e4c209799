"""Where a kernel's test runs: on a GPU, or on the CPU under Triton's interpreter (tests/kernels/test_kernels.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.drafter import attention, rows, shared_memory
from peagle.drafter.rows import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_kernel = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="needs a kernel: run by test_kernels.py under the interpreter"
)


def twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its plain code in place of the kernel, wherever its tensors are."""

    def plain(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for module in (rows, attention, shared_memory):
                patch.setattr(module, "uses_kernel", lambda *_: False)
            return function(*arguments, **options)

    return plain
