"""One training pass of a drafter: from a batch and the target's states to gradients.

A pass adds gradients to the drafter's parameters and reports what it saw; the trainer around it (`peagle.train`) owns
optimizer, schedule and files. `ParallelPass` trains P-EAGLE (paper section 3), `peagle.unroll.UnrolledPass` EAGLE-3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from peagle import masks
from peagle.cod import Rows, chain_lengths, sample_rows
from peagle.data import Batch
from peagle.losses import ChainWeights, ChunkedLoss
from peagle.mask_table import MaskTable
from peagle.model import Drafter
from peagle.parallel import compiled_draft_rows, draft_rows, label_rows
from peagle.partition import PackedSequence, Partition
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


def chain_weights(loss: LossRecipe, offset_R: Tensor, num_labels: int, num_depths: int) -> ChainWeights:
    """Weights of the useful rows of a pass, as the recipe asks; offset_R: of all of them."""
    return ChainWeights(
        offset_R, num_labels=num_labels, num_depths=num_depths, offset_decay=loss.offset_decay, reach=loss.reach
    )


def row_weights(
    loss: LossRecipe, label_R: Tensor, offset_R: Tensor, num_labels: int, num_depths: int
) -> Callable[[Tensor], Tensor]:
    """`chain_weights` for a pass whose loss is asked for in one call."""
    return chain_weights(loss, offset_R, num_labels, num_depths).of(label_R, offset_R)


class ParallelPass:
    """P-EAGLE: all depths of the kept chains in one pass under the COD mask, or a sequence at a time in S segments."""

    def __init__(self, recipe: Recipe, random: torch.Generator, *, compiled: bool) -> None:
        """random: on the device of the batches. compiled: torch.compile, for a GPU.

        Raises ValueError for sequences too long for dense masks (`peagle.mask_table`).
        """
        self.recipe, self.random = recipe, random
        self.score = ChunkedLoss(recipe.loss.name, recipe.loss.chunk, compiled)
        batch, num_depths = recipe.batch, recipe.drafter.num_depths
        blocks = compiled and recipe.attention == "flex"
        self._partition = self._table = None
        if batch.num_segments > 1:
            self._partition = Partition(batch.num_segments, batch.partition, block_mask=blocks, compiled=compiled)
        elif not blocks:
            self._table = MaskTable(batch.max_tokens, num_depths, random.device)
        self._draft_rows = compiled_draft_rows(blocks) if compiled else draft_rows

    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> Report:
        cod, num_depths = self.recipe.cod, drafter.config.num_depths
        chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_depths)
        rows = sample_rows(chain_BN, num_depths, cod.ratio, generator=self.random, floor=cod.floor)
        position_BT = batch.position_BN.gather(1, rows.anchor_BT) + rows.offset_BT
        losses = _Losses(self, drafter, rows, chain_BN, states)
        if self._partition is None:
            losses(self._normed(drafter, batch, states, rows, position_BT).flatten(0, 1)).backward()
        else:
            num_rows = rows.anchor_BT.shape[1]
            for b in range(len(chain_BN)):
                one = slice(b, b + 1)
                sequence = PackedSequence(
                    batch.tokens_BN[one], batch.document_BN[one], states.aux_BNX[one], rows.of(b), position_BT[one]
                )
                self._partition.backward(drafter, sequence, functools.partial(losses, first=b * num_rows))
        return losses.report()

    def _normed(self, drafter: Drafter, batch: Batch, states: States, rows: Rows, position_BT: Tensor) -> Tensor:
        window, device = drafter.config.sliding_window, batch.tokens_BN.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            mask: Tensor | BlockMask
            if self._table is None:
                mask = masks.block(rows, batch.document_BN, window=window)
            else:
                mask = self._table.dense(rows, batch.document_BN, window)
            return self._draft_rows(drafter, batch.tokens_BN, states.aux_BNX, position_BT, mask)


class _Losses:
    """The loss of one pass, of all its rows at once or of some at a time; remembers what it saw for the report."""

    def __init__(self, of: ParallelPass, drafter: Drafter, rows: Rows, chain_BN: Tensor, states: States) -> None:
        assert drafter.lm_head is not None
        self._score, self._lm_head_VH = of.score, drafter.lm_head.weight
        self._useful_T, self._label_T, self._offset_T = label_rows(rows, chain_BN)
        useful_offset_R = self._offset_T[self._useful_T]
        self._weights = chain_weights(of.recipe.loss, useful_offset_R, chain_BN.numel(), drafter.config.num_depths)
        self._labels = self._score.labels(states.last_BNS.flatten(0, 1), states.lm_head_VS, drafter.target_ids)
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, normed_RH: Tensor, index_R: Tensor | None = None, first: int = 0) -> Tensor:
        """Sum of the weighted losses of rows, numbered `first` + index_R within B * T; none: all of them."""
        useful_R, label_R, offset_R = self._useful_T, self._label_T, self._offset_T
        if index_R is not None:
            at_R = first + index_R
            useful_R, label_R, offset_R = useful_R[at_R], label_R[at_R], offset_R[at_R]
        chosen = useful_R.nonzero().squeeze(1)
        label_R, offset_R = label_R[chosen], offset_R[chosen]
        weigh = self._weights.of(label_R, offset_R)
        scored = self._score(normed_RH[chosen], self._lm_head_VH, self._labels, label_R, weigh)
        if index_R is None:
            del self._labels  # logits of a batch need not live beside the gradients of the drafter
        self._seen.append((scored.total.detach(), scored.correct_R, offset_R))
        return scored.total

    def report(self) -> Report:
        totals, correct, offsets = zip(*self._seen, strict=True)
        return Report(torch.stack(totals).sum(), torch.cat(correct), torch.cat(offsets))
