"""Losses of drafted tokens against the target, without holding logits of all rows at once.

p is the target's distribution, q the drafter's, both over the draft vocabulary:

    soft        cross-entropy -sum_v p(v) log q(v): forward KL(p || q) up to the target's own entropy
    hard        cross-entropy -log q(y) to the target's most likely token y; none where the draft vocabulary lacks y
    reverse_kl  KL(q || p)
    tv          total variation distance 1/2 sum_v |q(v) - p(v)|: one minus the probability that rejection sampling
                accepts a token drafted from q (Leviathan et al., arXiv 2211.17192, section 3.2). Its gradient fades
                where q puts no weight yet, so it is for a head that another loss has started (compare LK losses, arXiv
                2602.23881)

`lm_head` is frozen, so the only gradient needed is that of the hidden states, and it is formed chunk by chunk in the
forward pass: at most one chunk of logits [chunk, V] lives. A kernel turns logits into their gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.train.target import MAX_WHOLE_BYTES, Distributions, TargetLogits, statistics, wide_softmax

#: Weight of each row, or a function correct_R (bool) -> weight_R that is called once all rows are scored.
Weigh = Tensor | Callable[[Tensor], Tensor]


class Scored(NamedTuple):
    """total: weighted sum of losses_R, the only one with a gradient, and that only to the hidden states.

    losses_R: unweighted. argmax_R: drafts, as ids of the target. correct_R: the draft is the target's most likely token
    of its whole vocabulary. outside_R: the draft vocabulary lacks that token, so no draft can be correct.
    """

    total: Tensor
    losses_R: Tensor
    argmax_R: Tensor
    correct_R: Tensor
    outside_R: Tensor


def plain_losses(name: str, logits_RV: Tensor, target_RV: Tensor, draft_R: Tensor) -> Tensor:
    """Plain twin of `ChunkedLoss`: loss of each row from logits of drafter and target over the draft vocabulary.

    draft_R: the target's most likely token as an index into it, or -1.
    """
    log_q, log_p = logits_RV.log_softmax(-1), target_RV.log_softmax(-1)
    if name == "soft":
        return -(log_p.exp() * log_q).sum(-1)
    if name == "hard":
        return torch.where(draft_R < 0, 0, -log_q.gather(-1, draft_R.clamp_min(0)[:, None]).squeeze(-1))
    if name == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    assert name == "tv", name
    return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)


class ChainWeights:
    """Weights of the useful rows of a pass: offset_decay ** offset, times `reach` behind a wrong draft of the chain.

    Decoding stops at the first wrong draft, so it never gets to what a chain proposes behind one. Weights are shares of
    the pass's sum of offset_decay ** offset: they add up to 1 where every draft is right, `reach` takes from that and
    leaves the weights of other rows alone.
    """

    def __init__(
        self, offset_R: Tensor, *, num_labels: int, num_depths: int, offset_decay: float = 1.0, reach: float = 1.0
    ) -> None:
        """offset_R: 0..num_depths - 1, of all useful rows of the pass."""
        self.offset_decay, self.reach = offset_decay, reach
        self._total = (offset_decay ** offset_R.float()).sum()
        #: drafts found wrong so far, by chain (its anchor, flattened as labels are) and offset
        self._wrong_AK = torch.zeros(num_labels, num_depths, dtype=torch.int32, device=offset_R.device)

    def of(self, label_R: Tensor, offset_R: Tensor) -> Callable[[Tensor], Tensor]:
        """correct_R -> weight_R (float32) of some of the rows, for one call of `ChunkedLoss`.

        label_R: 0..num_labels - 1 and offset_R as `peagle.train.cod.labelled_rows` gives them. Earlier offsets of a
        row's chain must be among these rows, or among those of a call before.
        """

        def weigh(correct_R: Tensor) -> Tensor:
            chain_R = label_R - offset_R - 1
            self._wrong_AK[chain_R, offset_R] = (~correct_R).int()
            before_R = (self._wrong_AK.cumsum(1) - self._wrong_AK)[chain_R, offset_R]
            return self.offset_decay ** offset_R.float() * torch.where(before_R > 0, self.reach, 1.0) / self._total

        return weigh


def _gathered(target_UV: Tensor, logsumexp_U: Tensor, index_C: Tensor, like: Tensor) -> Tensor:
    """Log-probabilities of the target for each row of a chunk."""
    return target_UV[index_C].to(like.dtype) - logsumexp_U[index_C, None]


# Kernels: (loss_C, argmax_C) of one chunk; `logits_CV` becomes the gradient of the loss with respect to it.


def _soft(logits_CV: Tensor, target_UV: Tensor, logsumexp_U: Tensor, _: Tensor, index_C: Tensor) -> Any:
    wide, exponent, total, logsumexp = wide_softmax(logits_CV)
    p = _gathered(target_UV, logsumexp_U, index_C, wide).exp()
    loss_C, argmax_C = logsumexp.squeeze(-1) - (p * wide).sum(-1), logits_CV.argmax(-1)
    logits_CV.copy_(exponent / total - p)
    return loss_C, argmax_C


def _hard(logits_CV: Tensor, _: Tensor, __: Tensor, draft_U: Tensor, index_C: Tensor) -> Any:
    wide, exponent, total, logsumexp = wide_softmax(logits_CV)
    draft_C1 = draft_U[index_C, None]
    known, hit = draft_C1 >= 0, torch.arange(wide.shape[1], device=wide.device) == draft_C1
    loss_C1 = torch.where(known, logsumexp - wide.gather(1, draft_C1.clamp_min(0)), 0)
    argmax_C = logits_CV.argmax(-1)
    logits_CV.copy_(torch.where(known, exponent / total - hit.to(wide.dtype), 0))
    return loss_C1.squeeze(-1), argmax_C


def _reverse_kl(logits_CV: Tensor, target_UV: Tensor, logsumexp_U: Tensor, _: Tensor, index_C: Tensor) -> Any:
    wide, exponent, total, logsumexp = wide_softmax(logits_CV)
    q, ratio = exponent / total, wide - logsumexp - _gathered(target_UV, logsumexp_U, index_C, wide)
    loss_C1, argmax_C = (q * ratio).sum(-1, keepdim=True), logits_CV.argmax(-1)
    logits_CV.copy_(q * (ratio - loss_C1))
    return loss_C1.squeeze(-1), argmax_C


def _tv(logits_CV: Tensor, target_UV: Tensor, logsumexp_U: Tensor, _: Tensor, index_C: Tensor) -> Any:
    wide, exponent, total, _lse = wide_softmax(logits_CV)
    q = exponent / total
    excess = q - _gathered(target_UV, logsumexp_U, index_C, wide).exp()
    side = 0.5 * excess.sign()
    loss_C, argmax_C = 0.5 * excess.abs().sum(-1), logits_CV.argmax(-1)
    logits_CV.copy_(q * (side - (q * side).sum(-1, keepdim=True)))
    return loss_C, argmax_C


KERNELS = {"soft": _soft, "hard": _hard, "reverse_kl": _reverse_kl, "tv": _tv}


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
    kernel: Callable[..., Any], hidden_CH: Tensor, lm_head_VH: Tensor, target: Distributions, index_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: loss, gradient of hidden_CH, most likely token. Its logits die with the call."""
    logits_CV = hidden_CH @ lm_head_VH.T
    loss_C, argmax_C = kernel(logits_CV, target.logits_UV, target.logsumexp_U, target.draft_U, index_C)
    return loss_C, logits_CV @ lm_head_VH, argmax_C


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
        draft_R, target_R = torch.empty_like(label_R), torch.empty_like(label_R)
        outside_R = torch.empty_like(label_R, dtype=torch.bool)
        for rows, token_U, index_C in labels.walk(label_R, chunk):
            target = labels.at(token_U)
            scored = _score(kernel, hidden_RH[rows], lm_head_VH, target, index_C)
            losses_R[rows], gradient_RH[rows], draft_R[rows] = scored
            target_R[rows], outside_R[rows] = target.argmax_U[index_C], target.draft_U[index_C] < 0
            del target  # or two chunks of the target's logits would live while the next is made
        argmax_R = labels.ids(draft_R)
        correct_R = argmax_R == target_R
        # A row's gradient is linear in its weight, so the weights may wait until every draft is known.
        weight_R = weigh if isinstance(weigh, Tensor) else weigh(correct_R)
        ctx.save_for_backward(gradient_RH, weight_R)
        ctx.mark_non_differentiable(losses_R, argmax_R, correct_R, outside_R)
        return (losses_R * weight_R).sum(), losses_R, argmax_R, correct_R, outside_R

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        gradient_RH, weight_R = ctx.saved_tensors
        gradient_RH = gradient_RH * (weight_R.to(grad_total.dtype) * grad_total)[:, None]
        return gradient_RH.to(ctx.dtype), None, None, None, None, None, None


class ChunkedLoss:
    """Callable holding one of the losses and its (optionally compiled) kernel.

    chunk: rows whose logits [chunk, V] live at once. The labels' logits of as many tokens live beside them, or, where
    they take at most `max_whole_bytes`, those of the whole batch.
    """

    def __init__(
        self, name: str, chunk: int = 8192, compiled: bool = False, max_whole_bytes: int = MAX_WHOLE_BYTES
    ) -> None:
        """Raises ValueError for a name that is none of KERNELS."""
        if name not in KERNELS:
            raise ValueError(f"loss.name = {name!r}: must be one of {', '.join(KERNELS)}")
        self.chunk, self._max_whole_bytes = chunk, max_whole_bytes
        self._kernel = _compiled(KERNELS[name]) if compiled else KERNELS[name]
        self._statistics = _compiled(statistics) if compiled else statistics

    def labels(self, hidden_NS: Tensor, lm_head_VS: Tensor, target_ids_V: Tensor | None = None) -> TargetLogits:
        """Labels of a batch, for any number of calls. Arguments as `TargetLogits` has them."""
        return TargetLogits(
            hidden_NS,
            lm_head_VS,
            target_ids_V,
            chunk=self.chunk,
            max_whole_bytes=self._max_whole_bytes,
            statistics=self._statistics,
        )

    def __call__(
        self, hidden_RH: Tensor, lm_head_VH: Tensor, labels: TargetLogits, label_R: Tensor, weigh: Weigh
    ) -> Scored:
        """hidden_RH: the drafter's normed rows. lm_head_VH: its output matrix [V_draft, H], which gets no gradient.

        label_R: int64, the token of `labels` whose distribution each row should meet.
        """
        assert lm_head_VH.shape[0] == labels.vocabulary_size, (lm_head_VH.shape, labels.vocabulary_size)
        return Scored(*_ChunkedLoss.apply(hidden_RH, lm_head_VH, labels, label_R, weigh, self.chunk, self._kernel))
