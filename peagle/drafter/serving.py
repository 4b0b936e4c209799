"""Heads made ready to be served by a drafter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from peagle.checkpoint import build_drafter, check_head_fits, load_head
from peagle.config import HeadError, read_target_config, resolve_aux_layer_ids
from peagle.drafter.parallel_pass import ParallelPass, PassLimits
from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import ServedHead
from peagle.heads import head_digest, target_table
from peagle.model import Drafter, RMSNorm

_GIB = 1 << 30
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class DrafterLimits:
    """Sizes of a drafter, each for one head."""

    max_num_requests: int = 256  # of one pass
    max_num_rows: int = 8192  # of one pass, mask rows included
    max_draft_tokens: int | None = None  # K_max; None for what the head was trained for
    cache_gib: float = 1.0  # memory of the keys and values
    block_size: int = 16  # positions of a cache block
    max_context: int | None = None  # positions that a request may reach; None for what the head's config.json says


def load_runtime_head(
    head_dir: str | Path, target_dir: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """A head with the tables that it shares with the target, read from the target's checkpoint; frozen.

    Raises HeadError for a damaged head, an EAGLE-3 head, or another target's; ValueError for a target without a usable
    config.json or without the tables that the head needs.
    """
    config, tensors = load_head(head_dir)
    if not config.is_parallel:
        raise HeadError(
            f"head {head_dir} has no mask token (ptd_token_id), so it is an EAGLE-3 head: a remote drafter runs "
            "P-EAGLE heads only, which propose all their tokens in one pass; run this head in the target's own engine"
        )
    check_head_fits(config, read_target_config(target_dir))
    embed_VH = None if _EMBEDDING in tensors else target_table(Path(target_dir), _EMBEDDING)
    lm_head_VH = None if _OUTPUT in tensors else target_table(Path(target_dir), _OUTPUT)
    drafter = build_drafter(config, tensors, embed_VH=embed_VH, lm_head_VH=lm_head_VH, dtype=dtype, device=device)
    return drafter.requires_grad_(False)


def input_projection(drafter: Drafter) -> InputProjection:
    """The part of a drafter that runs at the target, in the drafter's type and on its device (weights shared)."""
    config = drafter.config
    norms = [norm for norm in drafter.fc_norm if isinstance(norm, RMSNorm)] if config.fc_norm else []
    return InputProjection(
        drafter.fc.weight.detach(),
        input_norm_X=drafter.input_norm.weight.detach() if config.norm_before_fc else None,
        fc_norm_CS=torch.stack([norm.weight.detach() for norm in norms]) if norms else None,
        eps=config.rms_norm_eps,
    )


def load_served_head(
    head_dir: str | Path,
    target_dir: str | Path,
    limits: DrafterLimits,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[ParallelPass, ServedHead]:
    """A head for the engine and for the server, warmed up. Raises HeadError for a head that cannot be served or is
    another target's, ValueError where memory holds not even one request of the longest context."""
    drafter = load_runtime_head(head_dir, target_dir, device, dtype)
    config = drafter.config
    max_draft_tokens = limits.max_draft_tokens or config.num_depths
    max_context = limits.max_context or config.max_position_embeddings
    heads_size = config.num_key_value_heads * config.head_dim
    block_bytes = 2 * config.num_hidden_layers * limits.block_size * heads_size * dtype.itemsize  # keys and values
    num_blocks = int(limits.cache_gib * _GIB) // block_bytes
    if (needed := -(-(max_context + max_draft_tokens) // limits.block_size)) > num_blocks:
        raise ValueError(
            f"cache_gib = {limits.cache_gib} holds {num_blocks} blocks of {limits.block_size} positions, one request "
            f"of max_context = {max_context} takes {needed}: give {needed * block_bytes / _GIB:.3g} GiB, or a smaller "
            "max_context"
        )
    parallel_pass = ParallelPass(
        drafter,
        limits=PassLimits(
            max_num_requests=limits.max_num_requests,
            max_num_rows=limits.max_num_rows,
            max_blocks=needed,
            num_blocks=num_blocks,
            block_size=limits.block_size,
            max_draft_tokens=max_draft_tokens,
        ),
        digest=head_digest(Path(head_dir)),
    )
    parallel_pass.warm_up()
    served = ServedHead(
        digest=parallel_pass.digest,
        projection=input_projection(drafter).to_bytes(),
        hidden_size=config.hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        aux_layer_ids=resolve_aux_layer_ids(config.aux_layer_ids, read_target_config(target_dir)["num_hidden_layers"]),
        max_draft_tokens=max_draft_tokens,
    )
    return parallel_pass, served
