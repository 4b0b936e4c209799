"""One training pass of a drafter: from a batch and the target's states to gradients.

A pass adds gradients to the drafter's parameters and reports what it saw; the trainer around it (`peagle.train`) owns
optimizer, schedule and files. `ParallelPass` trains P-EAGLE (paper section 3), `peagle.unroll.UnrolledPass` EAGLE-3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from peagle import masks
from peagle.cod import chain_lengths, sample_rows
from peagle.data import Batch
from peagle.losses import ChainWeights, ChunkedLoss
from peagle.model import Drafter
from peagle.parallel import compiled_draft_rows, draft_rows, labelled_rows
from peagle.recipe import LossRecipe, Recipe


@dataclasses.dataclass(frozen=True)
class States:
    """What the target says about a batch. aux_BNX: tapped hidden states; last_BNS: input of its output matrix."""

    aux_BNX: Tensor
    last_BNS: Tensor
    lm_head_VS: Tensor


@dataclasses.dataclass(frozen=True)
class Report:
    """loss: mean over useful rows, detached. correct_R: draft is the target's most likely token; offset_R: 0..K-1."""

    loss: Tensor
    correct_R: Tensor
    offset_R: Tensor


class Pass(Protocol):
    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> Report:
        """Adds the gradients of the batch's mean loss to the drafter's parameters."""
        ...


def row_weights(
    loss: LossRecipe, label_R: Tensor, offset_R: Tensor, num_labels: int, num_depths: int
) -> Callable[[Tensor], Tensor]:
    """Weights of all useful rows of a pass, as `ChainWeights` gives them to one call of `ChunkedLoss`."""
    settings = {"offset_decay": loss.offset_decay, "reach": loss.reach}
    weights = ChainWeights(offset_R, num_labels=num_labels, num_depths=num_depths, **settings)
    return weights.of(label_R, offset_R)


class ParallelPass:
    """P-EAGLE: all depths of the kept chains in one pass under the COD mask."""

    def __init__(self, recipe: Recipe, random: torch.Generator, *, compiled: bool) -> None:
        self.recipe, self.random = recipe, random
        self.score = ChunkedLoss(recipe.loss.name, recipe.loss.chunk, compiled)
        self._block_mask = compiled and recipe.attention == "flex"
        self._draft_rows = compiled_draft_rows(self._block_mask) if compiled else draft_rows

    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> Report:
        recipe, device = self.recipe, batch.tokens_BN.device.type
        num_depths = drafter.config.num_depths
        chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_depths)
        rows = sample_rows(chain_BN, num_depths, recipe.cod.ratio, generator=self.random, floor=recipe.cod.floor)
        position_BT = batch.position_BN.gather(1, rows.anchor_BT) + rows.offset_BT
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            mask = (masks.block if self._block_mask else masks.dense)(rows, batch.document_BN)
            normed_BTH = self._draft_rows(drafter, batch.tokens_BN, states.aux_BNX, position_BT, mask)
        index_R, label_R, offset_R = labelled_rows(rows, chain_BN)
        weigh = row_weights(recipe.loss, label_R, offset_R, chain_BN.numel(), num_depths)
        labels = self.score.labels(states.last_BNS.flatten(0, 1), states.lm_head_VS, drafter.target_ids)
        assert drafter.lm_head is not None
        scored = self.score(normed_BTH.flatten(0, 1)[index_R], drafter.lm_head.weight, labels, label_R, weigh)
        del labels  # the logits of a batch need not live beside the gradients of the drafter
        scored.total.backward()
        return Report(scored.total.detach(), scored.correct_R, offset_R)
