"""What a run starts with: an untrained drafter and its training pass, as the recipe asks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoint import load_head
from peagle.config import DrafterConfig, HeadError
from peagle.data import PackedBatches
from peagle.draft_vocabulary import answer_token_counts, frequent_tokens
from peagle.model import Drafter, initialize
from peagle.passes import ParallelPass, Pass
from peagle.recipe import Recipe
from peagle.target import Target
from peagle.unroll import UnrolledPass

logger = logging.getLogger(__name__)


def new_drafter(recipe: Recipe, target: Target, batches: PackedBatches, random: torch.Generator) -> Drafter:
    """A drafter of the recipe's shape on the target's device, sharing the target's tables.

    Untrained, but for the tensors of the head that it starts from, where the recipe names one.
    """
    wanted = recipe.drafter
    shape: dict[str, Any] = {"aux_layer_ids": tuple(wanted.aux_layer_ids)} if wanted.aux_layer_ids else {}
    vocabulary = None
    if wanted.draft_vocab_size is not None:
        counts = answer_token_counts(batches.data, target.config["vocab_size"])
        vocabulary = frequent_tokens(counts, wanted.draft_vocab_size, always=_end_tokens(target.config))
        shape["draft_vocab_size"] = wanted.draft_vocab_size
    config = DrafterConfig.for_target(
        target.config,
        num_layers=wanted.num_layers,
        num_depths=wanted.num_depths,
        ptd_token_id=wanted.ptd_token_id,
        fc_norm=wanted.fc_norm,
        norm_before_residual=wanted.norm_before_residual,
        sliding_window=wanted.sliding_window,
        **shape,
    )
    drafter = Drafter(config).to(target.device)
    drafter.share_target(target.embed_VS, target.lm_head_VS, vocabulary)
    if wanted.trainable_embedding:
        drafter.own_embedding()
    sample = next(batches()).to(target.device)
    aux_BNX, _ = target.states(sample.tokens_BN, sample.document_BN, sample.position_BN, config.aux_layer_ids)
    initialize(drafter, aux_BNX[sample.document_BN >= 0], random)
    if wanted.start_from is not None:
        start_from(drafter, wanted.start_from)
    return drafter


@torch.no_grad()
def start_from(drafter: Drafter, head_dir: str | Path) -> list[str]:
    """Overwrites the drafter's own tensors by those of equal name and shape of a head, of whichever kind.

    An EAGLE-3 head of one layer gives a P-EAGLE drafter its first layer, fc and norms. Returns the names taken; logs
    them, what is left as drawn, and settings in which the two differ though the tensors fit. Raises HeadError when the
    head cannot be read or nothing fits.
    """
    config, tensors = load_head(head_dir)
    own = drafter.trainable()
    taken = [name for name, one in own.items() if name in tensors and tensors[name].shape == one.shape]
    if not taken:
        raise HeadError(
            f"drafter.start_from: no tensor of {head_dir} has name and shape of one of this drafter's (its hidden_size "
            f"is {config.hidden_size}, the drafter's {drafter.config.hidden_size}): leave start_from out"
        )
    for name in taken:
        own[name].copy_(tensors[name])
    drawn = [name for name in own if name not in taken]
    logger.info("started from %s: %s; as drawn: %s", head_dir, ", ".join(taken), ", ".join(drawn) or "none")
    for name in ("aux_layer_ids", "norm_before_residual", "norm_output", "fc_norm", "rope_theta"):
        theirs, ours = getattr(config, name), getattr(drafter.config, name)
        if theirs != ours:
            logger.warning("started from a head with %s = %s, this drafter has %s", name, theirs, ours)
    return taken


def _end_tokens(target: dict[str, Any]) -> list[int]:
    """End-of-text tokens that the target's config.json names: one, several or none."""
    ends = target.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def new_pass(recipe: Recipe, random: torch.Generator, *, compiled: bool) -> Pass:
    """random: where conditional drop-token sampling draws from; compiled: torch.compile (GPU)."""
    if recipe.drafter.method == "eagle3":
        return UnrolledPass(recipe, compiled=compiled)
    return ParallelPass(recipe, random, compiled=compiled)
