"""Kernel or twin: by the device of a tensor, and by Triton's interpreter."""

from __future__ import annotations

import os

from torch import Tensor

#: Read once, as Triton does: kernels are interpreted or compiled from the moment they are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def uses_kernel(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to a Triton kernel: on a GPU, or anywhere under the interpreter."""
    return INTERPRETED or tensor.is_cuda


def check_shape(name: str, tensor: Tensor, *sizes: int | None) -> None:
    """Raises ValueError, with the tensor's name, unless its shape is `sizes`, where None stands for any size."""
    fits = tensor.dim() == len(sizes) and all(
        want is None or have == want for have, want in zip(tensor.shape, sizes, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name} has shape {list(tensor.shape)} and must have [{wanted}]")
