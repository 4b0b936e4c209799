"""What a run starts with: an untrained drafter and its training pass, as the recipe asks."""

from __future__ import annotations

from typing import Any

import torch

from peagle.config import DrafterConfig
from peagle.data import PackedBatches
from peagle.draft_vocabulary import answer_token_counts, frequent_tokens
from peagle.model import Drafter, initialize
from peagle.passes import ParallelPass, Pass
from peagle.recipe import Recipe
from peagle.target import Target
from peagle.unroll import UnrolledPass


def new_drafter(recipe: Recipe, target: Target, batches: PackedBatches, random: torch.Generator) -> Drafter:
    """An untrained drafter of the recipe's shape on the target's device, sharing the target's tables."""
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
        **shape,
    )
    drafter = Drafter(config).to(target.device)
    drafter.share_target(target.embed_VS, target.lm_head_VS, vocabulary)
    if wanted.trainable_embedding:
        drafter.own_embedding()
    sample = next(batches()).to(target.device)
    aux_BNX, _ = target.states(sample.tokens_BN, sample.document_BN, sample.position_BN, config.aux_layer_ids)
    initialize(drafter, aux_BNX[sample.document_BN >= 0], random)
    return drafter


def _end_tokens(target: dict[str, Any]) -> list[int]:
    """End-of-text tokens that the target's config.json names: one, several or none."""
    ends = target.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def new_pass(recipe: Recipe, random: torch.Generator, *, compiled: bool) -> Pass:
    """random: where conditional drop-token sampling draws from; compiled: torch.compile (GPU)."""
    if recipe.drafter.method == "eagle3":
        return UnrolledPass(recipe, compiled=compiled)
    return ParallelPass(recipe, random, compiled=compiled)
