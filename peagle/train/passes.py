"""One training pass of a drafter: from a batch and the target's states to gradients. Names of tensors end in their
shape, whose letters `peagle/__init__.py` lists.

`PEaglePass` trains P-EAGLE (paper section 3), `Eagle3Pass` EAGLE-3 by its training-time test: the drafter is unrolled
on its own hidden states (arXiv 2503.01840, section 3.2).

The unroll. A chain starts at an anchor a (`peagle.train.cod`). Its row at step k, in the place of P-EAGLE's offset k,
is what vLLM computes when it drafts the chain's token k + 1 after the tokens up to a + 1:

    step    position    embedding of    hidden state                              proposes
    0       a           token a + 1     target's at a, through fc                 token a + 2
    k       a + k       token a + k + 1 drafter's own residual stream, step k-1   token a + k + 2

It sees what vLLM's KV cache holds by then: rows of step 0 at anchors <= a of its document, then its own chain's rows of
steps 1..k. All anchors take step k together, and gradients flow back through all steps.

Chains read the true tokens. These are the drafted ones as far as drafts are right, and no draft behind a wrong one is
ever used.

Compiled, a step's attention is one FlexAttention over the rows of all steps so far, under the rule of P-EAGLE's mask
(`peagle.train.masks`). Plain, it is causal attention over the rows of step 0, joined by log-sum-exp with the at most
K - 1 keys of the own chain, one dot product each: no mask over all rows is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from peagle.checkpoint import check_head, load_head, without_tables
from peagle.config import UNNAMED_LAYERS, DrafterConfig, HeadError, resolve_aux_layer_ids
from peagle.model import Drafter, initialize
from peagle.train.cod import CodRows, attend_under, chain_lengths, draft_rows, label_rows, next_tokens, sample_rows
from peagle.train.data import Batch, PackedBatches, answer_token_counts, frequent_tokens
from peagle.train.losses import ChainWeights, ChunkedLoss
from peagle.train.masks import AttentionMask
from peagle.train.partition import PackedSequence, Partition
from peagle.train.recipe import Recipe
from peagle.train.target import Target

logger = logging.getLogger(__name__)

#: What chains see: document ids [B, N] (plain torch, any device), or `block_masks` (compiled functions, GPU).
ChainMask = Tensor | tuple[BlockMask, ...]

#: Fields of a drafter's configuration that `start_from` does not compare: vocabulary, depths and the number of layers.
_FREE_TO_DIFFER = {
    "vocab_size", "draft_vocab_size", "ptd_token_id", "num_depths", "num_depths_is_known", "num_hidden_layers"
}  # fmt: skip
_TILE = 1024  # queries whose scores exist at once where no kernel avoids them


@dataclasses.dataclass(frozen=True)
class States:
    """What the target says about a batch. aux_BNX: auxiliary hidden states; last_BNS: input of its output matrix."""

    aux_BNX: Tensor
    last_BNS: Tensor
    lm_head_VS: Tensor


def seen_by_drafter(batch: Batch, states: States, joined_share: float, step: int) -> tuple[Batch, States]:
    """In a share of the steps, counted from 0, all sequences as one document; in the others the batch as it is."""
    # The first step is joined: both forms compile before training is timed.
    if math.floor(step * joined_share) == math.floor((step - 1) * joined_share):
        return batch, states
    joined, order_N = batch.joined()
    aux_BNX, last_BNS = (x.flatten(0, 1)[order_N][None] for x in (states.aux_BNX, states.last_BNS))
    return joined, States(aux_BNX, last_BNS, states.lm_head_VS)


@dataclasses.dataclass(frozen=True)
class PassReport:
    """loss: the useful rows' weighted losses (`ChainWeights`) together, with one worker their mean, detached.
    correct_R: draft is the target's most likely token; offset_R: 0..K-1."""

    loss: Tensor
    correct_R: Tensor
    offset_R: Tensor


class PassLosses:
    """The loss of one pass, of all its rows at once or of some at a time; remembers what it saw for the report."""

    def __init__(
        self,
        recipe: Recipe,
        score: ChunkedLoss,
        drafter: Drafter,
        rows: CodRows,
        chain_BN: Tensor,
        tokens_BN: Tensor,
        states: States,
    ) -> None:
        self._score, self._lm_head_VH = score, drafter.lm_head.weight
        self._useful_T, self._label_T, self._offset_T = label_rows(rows, chain_BN)
        self._labels = score.labels(states.last_BNS.flatten(0, 1), states.lm_head_VS, drafter.target_ids)
        self._weights = ChainWeights(
            self._offset_T[self._useful_T],
            self._labels.indices(next_tokens(tokens_BN).flatten()),
            num_depths=drafter.config.num_depths,
            offset_decay=recipe.loss.offset_decay,
            reach=recipe.loss.reach,
        )
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, normed_RH: Tensor, index_R: Tensor | None = None, first: int = 0) -> Tensor:
        """Sum of the weighted losses of the rows numbered `first` + index_R within B * T; index_R None: of all rows."""
        useful_R, label_R, offset_R = self._useful_T, self._label_T, self._offset_T
        if index_R is not None:
            at_R = first + index_R
            useful_R, label_R, offset_R = useful_R[at_R], label_R[at_R], offset_R[at_R]
        chosen = useful_R.nonzero().squeeze(1)
        label_R, offset_R = label_R[chosen], offset_R[chosen]
        weigh = functools.partial(self._weights.weigh, label_R, offset_R)
        total, correct_R = self._score(normed_RH[chosen], self._lm_head_VH, self._labels, label_R, weigh)
        self._seen.append((total.detach(), correct_R, offset_R))
        return total

    def report(self) -> PassReport:
        totals, correct, offsets = zip(*self._seen, strict=True)
        return PassReport(torch.stack(totals).sum(), torch.cat(correct), torch.cat(offsets))


class PEaglePass:
    """P-EAGLE: all depths of the kept chains in one pass under the COD mask, or a sequence at a time in S segments."""

    def __init__(self, recipe: Recipe, random: torch.Generator, *, compiled: bool) -> None:
        """random: where rows are drawn from."""
        self.recipe, self.random = recipe, random
        self.score = ChunkedLoss(recipe.loss.chunk, compiled)
        self._compiled = compiled
        self._partition: Partition | None = None
        if recipe.batch.num_segments > 1:
            self._partition = Partition(recipe.batch.num_segments, compiled=compiled)
        self._draft_rows = torch.compile(draft_rows, dynamic=False, fullgraph=True) if compiled else draft_rows

    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> PassReport:
        """Adds the gradients of the batch's weighted mean loss to the drafter's parameters."""
        num_depths = drafter.config.num_depths
        chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_depths)
        rows = sample_rows(chain_BN, num_depths, self.recipe.cod.ratio, generator=self.random)
        position_BT = batch.position_BN.gather(1, rows.anchor_BT) + rows.offset_BT
        losses = PassLosses(self.recipe, self.score, drafter, rows, chain_BN, batch.tokens_BN, states)
        if self._partition is None:
            losses(self._normed(drafter, batch, states, rows, position_BT).flatten(0, 1)).backward()
            return losses.report()
        num_rows = rows.anchor_BT.shape[1]
        for b in range(len(chain_BN)):
            at = slice(b, b + 1)
            sequence = PackedSequence(
                batch.tokens_BN[at], batch.document_BN[at], states.aux_BNX[at], rows.select(b), position_BT[at]
            )
            self._partition.backward(drafter, sequence, functools.partial(losses, first=b * num_rows))
        return losses.report()

    def _normed(self, drafter: Drafter, batch: Batch, states: States, rows: CodRows, position_BT: Tensor) -> Tensor:
        device = batch.tokens_BN.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            attention_mask = AttentionMask.from_rows(rows, batch.document_BN)
            # A BlockMask's attention must run compiled.
            mask = attention_mask.block() if self._compiled else attention_mask.dense()
            return self._draft_rows(drafter, batch.tokens_BN, states.aux_BNX, position_BT, mask)


class Eagle3Pass:
    """EAGLE-3: `num_depths` steps from every anchor. No row is dropped; `cod` of the recipe does not apply."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        """Raises ValueError for more than one segment (gradients tie the steps together)."""
        if recipe.batch.num_segments > 1:
            raise ValueError(
                f"batch.num_segments = {recipe.batch.num_segments}: method eagle3 has no segments, write 1"
            )
        self.recipe = recipe
        self.score = ChunkedLoss(recipe.loss.chunk, compiled)
        self._block_mask = compiled
        self._draft_rows = torch.compile(unrolled_rows, dynamic=False, fullgraph=True) if compiled else unrolled_rows

    def __call__(self, drafter: Drafter, batch: Batch, states: States) -> PassReport:
        """Adds the gradients of the batch's weighted mean loss to the drafter's parameters."""
        device, num_depths = batch.tokens_BN.device.type, drafter.config.num_depths
        chain_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_depths)
        rows = all_rows(chain_BN, num_depths)
        losses = PassLosses(self.recipe, self.score, drafter, rows, chain_BN, batch.tokens_BN, states)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            mask = block_masks(batch.document_BN, num_depths) if self._block_mask else batch.document_BN
            normed_BTH = self._draft_rows(drafter, batch.tokens_BN, states.aux_BNX, batch.position_BN, mask)
        losses(normed_BTH.flatten(0, 1)).backward()
        return losses.report()


def block_masks(document_BN: Tensor, num_depths: int, tile: int = 128) -> tuple[BlockMask, ...]:
    """What each step's N rows see of the rows of all steps so far."""
    num_tokens = document_BN.shape[1]
    rows = all_rows(document_BN, num_depths)
    attention_mask = AttentionMask.from_rows(rows, document_BN)
    row_T = torch.arange(rows.anchor_BT.shape[1], device=document_BN.device)
    ends = range(num_tokens, len(row_T) + 1, num_tokens)
    return tuple(attention_mask.select(row_T[:end], num_tokens).block(tile) for end in ends)


def all_rows(like_BN: Tensor, num_depths: int) -> CodRows:
    """Rows of an unroll, T = K * N: all N anchors of step 0, then of step 1, and so on."""
    batch, num_tokens = like_BN.shape
    index_T = torch.arange(num_depths * num_tokens, device=like_BN.device).expand(batch, -1)
    return CodRows(index_T % num_tokens, index_T // num_tokens, num_tokens)


def unrolled_rows(drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor, position_BN: Tensor, mask: ChainMask) -> Tensor:
    """Normed hidden states [B, K * N, H] in the order of `all_rows`, each chain on the true tokens.

    aux_BNX: the target's auxiliary hidden states [B, N, C * S]. Chains near the end of a document read tokens behind
    it; no loss looks at those rows, and no other row sees them.
    """
    attend, hidden_BNH = ChainAttention(mask), drafter.project_inputs(aux_BNX)
    last = tokens_BN.shape[1] - 1
    anchor_N = torch.arange(last + 1, device=tokens_BN.device)
    normed = []
    for step in range(drafter.config.num_depths):
        embeds_BNH = drafter.embed(tokens_BN[:, (anchor_N + step + 1).clamp_max(last)])
        normed_BNH, hidden_BNH = drafter(embeds_BNH, hidden_BNH, position_BN + step, attend)
        normed.append(normed_BNH)
    return torch.cat(normed, dim=1)


class ChainAttention:
    """Attention of one unroll; it keeps the keys and values of the steps it has seen, and so serves one unroll only."""

    def __init__(self, mask: ChainMask) -> None:
        self._mask = mask
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._anchor_N: Tensor | None = None

    def keep(self, index_R: Tensor, anchor_R: Tensor) -> None:
        """From here on only some chains take steps: `index_R` of those that took the last one, which begin at the
        anchors `anchor_R`, ascending. With document ids as mask."""
        self._anchor_N = anchor_R
        for steps in self._held.values():
            steps[1:] = [(k_BGND[:, :, index_R], v_BGND[:, :, index_R]) for k_BGND, v_BGND in steps[1:]]

    def __call__(self, layer_index: int, q_BAND: Tensor, k_BGND: Tensor, v_BGND: Tensor) -> Tensor:
        steps = self._held.setdefault(layer_index, [])
        steps.append((k_BGND, v_BGND))
        (first_k, first_v), *own = steps
        if isinstance(self._mask, Tensor):
            return join(*_plain_attention(self._mask, q_BAND, first_k, first_v, self._anchor_N), q_BAND, own)
        k_BGTD, v_BGTD = (torch.cat(parts, dim=2) for parts in zip(*steps, strict=True))
        return attend_under(self._mask[len(own)])(layer_index, q_BAND, k_BGTD, v_BGTD)


def join(out_BAND: Tensor, lse_BAN: Tensor, q_BAND: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over a first set of keys, its output and log-sum-exp given, and over one more key a query and step.

    own: keys and values [B, G, N, D] of the chain's steps 1..k; query n sees key n of each.
    """
    if not own:
        return out_BAND
    num_groups, scale = own[0][0].shape[1], q_BAND.shape[-1] ** -0.5
    q_BGMND = q_BAND.unflatten(1, (num_groups, -1)).to(lse_BAN.dtype)
    scores = [(q_BGMND * k_BGND[:, :, None]).sum(-1).flatten(1, 2) * scale for k_BGND, _ in own]
    first, *others = torch.stack([lse_BAN, *scores]).softmax(dim=0).unbind(0)
    joined_BAND = first[..., None] * out_BAND
    for weight_BAN, (_, v_BGND) in zip(others, own, strict=True):
        weight_BGMN = weight_BAN.unflatten(1, (num_groups, -1))
        joined_BAND = joined_BAND + (weight_BGMN[..., None] * v_BGND[:, :, None]).flatten(1, 2)
    return joined_BAND.to(out_BAND.dtype)


def _plain_attention(
    document_BN: Tensor, q_BAND: Tensor, k_BGND: Tensor, v_BGND: Tensor, anchor_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: output, and log-sum-exp [B, A, N] in float32 or wider.

    anchor_N: of each query, ascending; None: one query an anchor.
    """
    q_BGMND = q_BAND.unflatten(1, (k_BGND.shape[1], -1)) * q_BAND.shape[-1] ** -0.5
    key_N = torch.arange(k_BGND.shape[2], device=q_BAND.device)
    anchor_N = key_N if anchor_N is None else anchor_N
    outs, sums = [], []
    for q_tile, tile_N in zip(q_BGMND.split(_TILE, dim=-2), anchor_N.split(_TILE), strict=True):
        end = int(tile_N[-1]) + 1
        visible = (tile_N[:, None] >= key_N[:end]) & (document_BN[:, tile_N, None] == document_BN[:, None, :end])
        scores = q_tile @ k_BGND[:, :, None, :end].mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1).to(v_BGND.dtype) @ v_BGND[:, :, None, :end])
    return torch.cat(outs, dim=-2).flatten(1, 2), torch.cat(sums, dim=-1).flatten(1, 2)


def drafter_config(recipe: Recipe, target: dict[str, Any]) -> DrafterConfig:
    """The drafter's configuration by the recipe; target: the target's `config.json`. One that starts from a head has
    that head's `aux_layer_ids` and `norm_before_residual`, because its tensors mean nothing with others."""
    shape = recipe.drafter.model_dump(exclude={"method", "start_from"}, exclude_none=True)
    if recipe.drafter.start_from is not None:
        head = check_head(recipe.drafter.start_from)
        shape["norm_before_residual"] = head.norm_before_residual
        shape["aux_layer_ids"] = resolve_aux_layer_ids(head.aux_layer_ids, target["num_hidden_layers"])
    return DrafterConfig.for_target(target, **shape)


def new_drafter(recipe: Recipe, target: Target, batches: PackedBatches, random: torch.Generator) -> Drafter:
    """A drafter of the recipe's shape on the target's device, sharing the target's tables."""
    wanted, vocabulary = recipe.drafter, None
    if wanted.draft_vocab_size is not None:
        counts = answer_token_counts(batches.data, target.config["vocab_size"])
        ends = target.config.get("eos_token_id")  # one, several or none
        always = ends if isinstance(ends, list) else [] if ends is None else [ends]
        vocabulary = frequent_tokens(counts, wanted.draft_vocab_size, always)
    drafter = Drafter(drafter_config(recipe, target.config)).to(target.device)
    drafter.share_target(target.embed_VS, target.lm_head_VS, vocabulary)
    sample = next(batches()).to(target.device)
    aux_BNX, _ = target.states(sample.tokens_BN, sample.position_BN, drafter.config.aux_layer_ids)
    initialize(drafter, aux_BNX[sample.document_BN >= 0], random)
    if wanted.start_from is not None:
        start_from(drafter, wanted.start_from)
    return drafter


@torch.no_grad()
def start_from(drafter: Drafter, head_dir: str | Path) -> list[str]:
    """Overwrites the drafter's own tensors by those of equal name and shape of a head; returns their names.

    Logs them, what is left as drawn, what of the head is left, and settings in which the two differ though the tensors
    fit. Raises HeadError when the head cannot be read or nothing fits.
    """
    config, stored = load_head(head_dir)
    tensors = without_tables(config, stored)
    own = drafter.trainable()
    taken = [name for name, value in own.items() if name in tensors and tensors[name].shape == value.shape]
    if not taken:
        raise HeadError(
            f"drafter.start_from: no tensor of {head_dir} has name and shape of one of this drafter's (its hidden_size "
            f"is {config.hidden_size}, the drafter's {drafter.config.hidden_size}): leave start_from out"
        )
    for name in taken:
        own[name].copy_(tensors[name])
    drawn = [name for name in own if name not in taken]
    said = [", ".join(names) or "none" for names in (taken, drawn, [name for name in stored if name not in taken])]
    logger.info("started from %s: %s; as drawn: %s; of the head not taken: %s", head_dir, *said)
    for name, theirs in vars(config).items():
        ours = getattr(drafter.config, name)
        if theirs not in (ours, UNNAMED_LAYERS) and name not in _FREE_TO_DIFFER:
            logger.warning("started from a head with %s = %s, this drafter has %s", name, theirs, ours)
    return taken
