"""The loss of drafted tokens against the target, without holding logits of all rows at once.

It is the cross-entropy -sum_v p(v) log q(v) of the target's distribution p and the drafter's q, both over the draft
vocabulary. This is forward KL(p || q) up to the target's own entropy.

`lm_head` is frozen, so the only gradient needed is that of the hidden states, and it is formed chunk by chunk in the
forward pass: at most one chunk of logits [chunk, V] lives. `cross_entropy` turns logits into their gradient in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

#: statistics(logits_UV) -> (log-sum-exp_U, argmax_U), the first in float32 or wider.
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]
#: draft_R -> weight of each row, called once all rows are scored. A draft is the drafter's most likely token, an index
#: into the draft vocabulary.
Weigh = Callable[[Tensor], Tensor]


# ---- labels


def wide_softmax(logits_PV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, exponentials, sums of these [P, 1], log-sum-exp [P, 1]), in float32 or wider."""
    wide_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    top_P1 = wide_PV.amax(-1, keepdim=True)
    exponent_PV = (wide_PV - top_P1).exp()
    total_P1 = exponent_PV.sum(-1, keepdim=True)
    return wide_PV, exponent_PV, total_P1, top_P1 + total_P1.log()


def statistics(logits_UV: Tensor) -> tuple[Tensor, Tensor]:
    *_, logsumexp_U1 = wide_softmax(logits_UV)
    return logsumexp_U1.squeeze(-1), logits_UV.argmax(-1)


@dataclasses.dataclass(frozen=True)
class Distributions:
    """The target at U tokens.

    logits_UV, logsumexp_U: over the draft vocabulary. best_U: index into it of the most likely token of the whole
    vocabulary, -1 where the draft vocabulary lacks that.
    """

    logits_UV: Tensor
    logsumexp_U: Tensor
    best_U: Tensor


class TargetLogits:
    """What the target says at the N tokens of a batch; the label of a drafter's row is an index into them.

    Logits are made from the target's last hidden states as `walk` gets to them. A reduced draft vocabulary takes
    V_draft of the target's V tokens: distributions are renormalised over them, while the most likely token stays that
    of the whole vocabulary.
    """

    def __init__(self, hidden_NS: Tensor, lm_head_VS: Tensor, target_ids_V: Tensor, statistics: Statistics) -> None:
        """hidden_NS: the target's last hidden states (after its norm); lm_head_VS: its output matrix.

        target_ids_V: the target's ids of the draft vocabulary [V_draft]; as many as the target has: all in order.
        """
        self.target_ids_V, self._index_V = target_ids_V, torch.empty(0)
        self.is_reduced = len(target_ids_V) < lm_head_VS.shape[0]
        if self.is_reduced:
            self._index_V = target_ids_V.new_full((lm_head_VS.shape[0],), -1)
            self._index_V[target_ids_V] = torch.arange(len(target_ids_V), device=target_ids_V.device)
        self._hidden_NS, self._lm_head_VS, self._statistics = hidden_NS, lm_head_VS, statistics

    def walk(self, label_R: Tensor, chunk: int) -> Iterator[tuple[Tensor, Distributions, Tensor]]:
        """Visits all R rows once, `chunk` or fewer at a time: (which rows, distributions, index_P of the rows there).

        label_R: int64, 0..N-1. Rows come in the order of their labels, so that the logits of a token are made once, or
        twice where a chunk ends within its rows. Chunks differ by one row at most. The host waits for the device twice,
        before the first chunk.
        """
        spans = _spans(len(label_R), chunk)
        sorted_R, order_R = label_R.sort(stable=True)
        token_U, index_R = sorted_R.unique_consecutive(return_inverse=True)
        firsts = index_R[[start for start, _ in spans]].tolist()
        lasts = index_R[[end - 1 for _, end in spans]].tolist()
        for (start, end), first, last in zip(spans, firsts, lasts, strict=True):
            yield order_R[start:end], self._at(token_U[first : last + 1]), index_R[start:end] - first

    def indices(self, tokens: Tensor) -> Tensor:
        """Indices into the draft vocabulary of the target's ids, any shape; -1 where it lacks a token."""
        return self._index_V[tokens] if self.is_reduced else tokens

    @torch.no_grad()
    def _at(self, token_U: Tensor) -> Distributions:
        whole_UV = self._hidden_NS[token_U] @ self._lm_head_VS.T
        draft_UV = whole_UV.index_select(1, self.target_ids_V) if self.is_reduced else whole_UV
        logsumexp_U, best_U = self._statistics(draft_UV)
        if self.is_reduced:
            best_U = self.indices(whole_UV.argmax(-1))
        return Distributions(draft_UV, logsumexp_U, best_U)


def _spans(num_rows: int, chunk: int) -> list[tuple[int, int]]:
    """0..num_rows in the fewest spans of at most `chunk`. They are even: a stray single row would recompile kernels."""
    num_spans = -(-num_rows // chunk)
    return [(i * num_rows // num_spans, (i + 1) * num_rows // num_spans) for i in range(num_spans)]


# ---- losses


class ChainWeights:
    """Weights of the useful rows of a pass (`chain_lengths` in `peagle.train.cod` says which are useful).

    A row weighs offset_decay ** offset. If an earlier draft of its chain is not the conversation's token there, the row
    weighs `reach` times that, because decoding never gets to such a row.

    What counts is the token and not the target's most likely one: where an answer was sampled and they differ, a chain
    that drafts the latter ends too, and what follows in the conversation is no label for its later drafts.

    Weights are shares of the pass's sum of offset_decay ** offset: they add up to 1 where every draft is right. With
    several workers it is the mean of their sums, as gradients are the mean over them: a row weighs the same everywhere.
    So every worker must make one in the same step.
    """

    def __init__(
        self, offset_R: Tensor, token_N: Tensor, *, num_depths: int, offset_decay: float, reach: float
    ) -> None:
        """offset_R: 0..num_depths - 1, of all useful rows of the pass. token_N: the token behind each position, as an
        index into the draft vocabulary, -1 where it lacks that."""
        self.offset_decay, self.reach = offset_decay, reach
        self._total = (offset_decay ** offset_R.float()).sum()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._total)
            self._total /= dist.get_world_size()
        self._token_N = token_N
        #: drafts found wrong so far, by chain (its anchor, flattened as labels are) and offset
        self._wrong_NK = torch.zeros(len(token_N), num_depths, dtype=torch.int32, device=offset_R.device)

    def weigh(self, label_R: Tensor, offset_R: Tensor, draft_R: Tensor) -> Tensor:
        """weight_R (float32) of some of the rows.

        label_R: 0..N - 1 and offset_R as `peagle.train.cod.label_rows` gives them. draft_R: as `Weigh` has it. Earlier
        offsets of a row's chain must be among these rows, or among those of a call before.
        """
        chain_R = label_R - offset_R - 1
        self._wrong_NK[chain_R, offset_R] = (draft_R != self._token_N[label_R]).int()
        before_R = (self._wrong_NK.cumsum(1) - self._wrong_NK)[chain_R, offset_R]
        return self.offset_decay ** offset_R.float() * torch.where(before_R > 0, self.reach, 1.0) / self._total


def cross_entropy(logits_PV: Tensor, target_UV: Tensor, logsumexp_U: Tensor, index_P: Tensor) -> tuple[Tensor, Tensor]:
    """(loss_P, argmax_P) of one chunk; `logits_PV` becomes the gradient of the loss with respect to it."""
    wide, exponent, total, logsumexp = wide_softmax(logits_PV)
    p = (target_UV[index_P].to(wide.dtype) - logsumexp_U[index_P, None]).exp()
    loss_P, argmax_P = logsumexp.squeeze(-1) - (p * wide).sum(-1), logits_PV.argmax(-1)
    logits_PV.copy_(exponent / total - p)
    return loss_P, argmax_P


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for any number of rows but one size of vocabulary, which lets softmax sums take one pass over it.

    The threshold keeps float32 [chunk, V] terms from being stored because several sums use them: they are made again.
    """
    compiled = torch.compile(function, dynamic=True, options={"realize_reads_threshold": 32})

    def call(*tensors: Tensor) -> Any:
        for tensor in tensors:
            if tensor.ndim == 2:
                torch._dynamo.mark_static(tensor, 1)
        return compiled(*tensors)

    return call


def _score(
    kernel: Callable[..., Any], hidden_PH: Tensor, lm_head_VH: Tensor, target: Distributions, index_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden_PH, most likely token) of one chunk, whose logits die with the call."""
    logits_PV = hidden_PH @ lm_head_VH.T
    loss_P, argmax_P = kernel(logits_PV, target.logits_UV, target.logsumexp_U, index_P)
    return loss_P, logits_PV @ lm_head_VH, argmax_P


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        lm_head_VH: Tensor,
        labels: TargetLogits,
        label_R: Tensor,
        weigh: Weigh,
        chunk: int,
        kernel: Callable[..., Any],
    ) -> tuple[Tensor, ...]:
        ctx.dtype = hidden_RH.dtype
        hidden_RH = hidden_RH.to(lm_head_VH.dtype)
        gradient_RH = torch.empty_like(hidden_RH)
        losses_R = hidden_RH.new_empty(len(label_R), dtype=torch.promote_types(hidden_RH.dtype, torch.float32))
        draft_R, correct_R = torch.empty_like(label_R), torch.empty_like(label_R, dtype=torch.bool)
        for rows, target, index_P in labels.walk(label_R, chunk):
            losses_R[rows], gradient_RH[rows], draft_P = _score(kernel, hidden_RH[rows], lm_head_VH, target, index_P)
            draft_R[rows], correct_R[rows] = draft_P, draft_P == target.best_U[index_P]
            del target  # or two chunks of the target's logits would live while the next is made
        # A row's gradient is linear in its weight, so the weights may wait until every draft is known.
        weight_R = weigh(draft_R)
        ctx.save_for_backward(gradient_RH, weight_R)
        ctx.mark_non_differentiable(correct_R)
        return (losses_R * weight_R).sum(), correct_R

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        gradient_RH, weight_R = ctx.saved_tensors
        gradient_RH = gradient_RH * (weight_R.to(grad_total.dtype) * grad_total)[:, None]
        return gradient_RH.to(ctx.dtype), None, None, None, None, None, None


class ChunkedLoss:
    """Callable holding the (optionally compiled) `cross_entropy`.

    chunk: rows whose logits [chunk, V] live at once, and beside them the logits of at most as many labels.
    """

    def __init__(self, chunk: int = 8192, compiled: bool = False) -> None:
        self.chunk = chunk
        self._kernel = _compiled(cross_entropy) if compiled else cross_entropy
        self._statistics = _compiled(statistics) if compiled else statistics

    def labels(self, hidden_NS: Tensor, lm_head_VS: Tensor, target_ids_V: Tensor) -> TargetLogits:
        """Labels of a batch, for any number of calls. Arguments as `TargetLogits` has them."""
        return TargetLogits(hidden_NS, lm_head_VS, target_ids_V, self._statistics)

    def __call__(
        self, hidden_RH: Tensor, lm_head_VH: Tensor, labels: TargetLogits, label_R: Tensor, weigh: Weigh
    ) -> tuple[Tensor, Tensor]:
        """(weighted sum of the losses, whose gradient goes to the hidden states only; correct_R: the draft is the
        target's most likely token of its whole vocabulary).

        hidden_RH: the drafter's normed rows. lm_head_VH: its output matrix [V_draft, H], which gets no gradient.
        label_R: int64, the token of `labels` whose distribution each row should meet.
        """
        assert lm_head_VH.shape[0] == len(labels.target_ids_V), (lm_head_VH.shape, labels.target_ids_V.shape)
        total, correct_R = _ChunkedLoss.apply(hidden_RH, lm_head_VH, labels, label_R, weigh, self.chunk, self._kernel)
        return total, correct_R
