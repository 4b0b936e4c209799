"""A head made ready to be served: its pass with the cache that fits its memory, and how it is offered to targets."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

import torch

from peagle.config import UNNAMED_LAYERS, default_aux_layer_ids, read_target_config
from peagle.drafter.dispatch import tell_compilations
from peagle.drafter.engine import HeadRuntime
from peagle.drafter.forward import ParallelPass, cache_bytes_per_block
from peagle.drafter.head import load_runtime_head, reducer_of
from peagle.drafter.protocol import ServedHead
from peagle.heads import head_digest

logger = logging.getLogger(__name__)

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class DrafterLimits:
    """Sizes of a drafter, each for one head.

    max_num_requests: with rows in the cache. max_num_rows: of one pass, mask rows included. max_depth: K_max; None for
    what the head was trained for. cache_gib: memory of the keys and values. block_size: positions of a cache block.
    max_context: positions that a request may reach; None for what the head's config.json says.
    """

    max_num_requests: int = 256
    max_num_rows: int = 8192
    max_depth: int | None = None
    cache_gib: float = 1.0
    block_size: int = 16
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_requests", "max_num_rows", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("max_depth", "max_context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if not 0 < self.cache_gib < float("inf"):
            raise ValueError(f"cache_gib = {self.cache_gib} must be above 0")


def load_served_head(
    head_dir: str | Path,
    target_dir: str | Path,
    limits: DrafterLimits,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[HeadRuntime, ServedHead]:
    """A head for the engine and for the server, warmed up.

    Raises:
        HeadError: a head that cannot be served or is another target's.
        ValueError: memory that holds not even one request of the longest context.
    """
    drafter = load_runtime_head(head_dir, target_dir, device, dtype)
    config = drafter.config
    max_depth = limits.max_depth or config.num_depths
    max_context = limits.max_context or config.max_position_embeddings
    block_bytes = cache_bytes_per_block(config, limits.block_size, dtype)
    num_blocks = int(limits.cache_gib * _GIB) // block_bytes
    if (needed := -(-(max_context + max_depth) // limits.block_size)) > num_blocks:
        raise ValueError(
            f"cache_gib = {limits.cache_gib} holds {num_blocks} blocks of {limits.block_size} positions, one request "
            f"of max_context = {max_context} takes {needed}: give {needed * block_bytes / _GIB:.3g} GiB, or a smaller "
            "max_context"
        )
    parallel_pass = ParallelPass(
        drafter,
        max_num_requests=limits.max_num_requests,
        max_num_rows=limits.max_num_rows,
        num_blocks=num_blocks,
        block_size=limits.block_size,
        max_depth=max_depth,
        device=device,
        dtype=dtype,
        max_context=max_context + max_depth,
    )
    parallel_pass.warm_up()
    if parallel_pass.device.type == "cuda":
        _warn_of_compilations()
    digest, layer_ids = head_digest(Path(head_dir)), config.aux_layer_ids
    if layer_ids == UNNAMED_LAYERS:
        layer_ids = default_aux_layer_ids(read_target_config(target_dir)["num_hidden_layers"])
    served = ServedHead(
        digest=digest,
        reducer=reducer_of(drafter).to_bytes(),
        hidden_size=config.hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        aux_layer_ids=layer_ids,
        max_depth=max_depth,
    )
    return HeadRuntime(digest, parallel_pass), served


@functools.cache
def _warn_of_compilations() -> None:
    tell_compilations(
        lambda name: logger.warning("kernel %s was compiled after warm-up: targets may have waited", name)
    )
