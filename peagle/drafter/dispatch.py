"""Kernel or twin: by the device of a tensor, and by Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton import knobs

# ====================================================================================================
# Kernel or twin: by the device of a tensor, and by Triton's interpreter.

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


# ====================================================================================================
# Which kernels Triton compiles, as it happens: a drafter that serves should compile none.


def _name(compiled: dict[str, Any]) -> str:
    return str(getattr(compiled.get("fn"), "name", "of unknown name"))


def tell_compilations(tell: Callable[[str], None]) -> Callable[[], None]:
    """Calls `tell` with the name of every kernel that this process compiles from here on; returns what ends that.

    A kernel out of Triton's cache on disk counts too: loading it also takes longer than a pass.
    """
    before: Any = knobs.runtime.jit_post_compile_hook

    def hook(**compiled: Any) -> Any:
        tell(_name(compiled))
        return None if before is None else before(**compiled)

    def end() -> None:
        # A hook that was put over this one stays; it goes on calling this one.
        if knobs.runtime.jit_post_compile_hook is hook:
            knobs.runtime.jit_post_compile_hook = before

    knobs.runtime.jit_post_compile_hook = hook
    return end


@contextmanager
def compiled_kernels() -> Iterator[list[str]]:
    """Names of the kernels compiled in the block."""
    names: list[str] = []
    end = tell_compilations(names.append)
    try:
        yield names
    finally:
        end()
