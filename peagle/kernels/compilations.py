"""Which kernels Triton compiles, as it happens: a drafter that serves should compile none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs


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
