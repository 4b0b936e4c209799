"""Loss of drafted tokens against the target, without holding logits of all rows at once.

The target's distribution p is the label: forward KL(p || q) up to the target's own entropy, i.e. soft cross-entropy
-sum_v p(v) log q(v). Its gradient with respect to a logit is q - p. `lm_head` is frozen, so the only gradient needed is
that of the hidden states, and it is formed chunk by chunk in the forward pass: at most one chunk of logits [chunk, V]
lives.
The target's own logits [N, V] of the batch's tokens are held whole: rows share them as labels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TargetLogits:
    """The target's logits of every token of a batch, flattened: logits_NV, log-sum-exp_N (float32) and argmax_N."""

    logits_NV: Tensor
    logsumexp_N: Tensor
    argmax_N: Tensor

    @classmethod
    def of(cls, hidden_NS: Tensor, lm_head_VS: Tensor, chunk: int = 4096) -> TargetLogits:
        """hidden_NS: the target's last hidden states (after its norm); lm_head_VS: its output matrix."""
        logits_NV = hidden_NS.new_empty(hidden_NS.shape[0], lm_head_VS.shape[0])
        sums, tops = [], []
        for start in range(0, hidden_NS.shape[0], chunk):
            part = torch.mm(hidden_NS[start : start + chunk], lm_head_VS.T, out=logits_NV[start : start + chunk])
            sums.append(part.float().logsumexp(-1))
            tops.append(part.argmax(-1))
        return cls(logits_NV, torch.cat(sums), torch.cat(tops))


def soft_cross_entropy(logits_RV: Tensor, target_RV: Tensor, weight_R: Tensor) -> Tensor:
    """Plain twin of `ChunkedSoftCrossEntropy`: sum of weight * -sum_v softmax(target) log softmax(logits)."""
    losses_R = -(target_RV.float().softmax(-1) * logits_RV.float().log_softmax(-1)).sum(-1)
    return (weight_R * losses_R).sum()


def _chunk(logits: Tensor, target: Tensor, target_lse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: loss per row, weighted gradient of the logits, most likely token per row."""
    wide = logits.float()
    top, argmax = wide.max(-1)
    exponent = (wide - top[:, None]).exp()
    total = exponent.sum(-1)
    probability = (target.float() - target_lse[:, None]).exp()
    loss = top + total.log() - (probability * wide).sum(-1)
    gradient = (exponent / total[:, None] - probability) * weight[:, None]
    return loss, gradient.to(logits.dtype), argmax


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        lm_head_VH: Tensor,
        target: TargetLogits,
        label_R: Tensor,
        weight_R: Tensor,
        chunk: int,
        step: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = hidden_RH.shape[0]
        hidden_RH = hidden_RH.to(lm_head_VH.dtype)
        gradient_RH = torch.empty_like(hidden_RH)
        losses_R = hidden_RH.new_empty(num_rows, dtype=torch.float32)
        argmax_R = label_R.new_empty(num_rows)
        for start in range(0, num_rows, chunk):
            rows = slice(start, start + chunk)
            label, weight = label_R[rows], weight_R[rows]
            logits = hidden_RH[rows] @ lm_head_VH.T
            loss, gradient, argmax = step(logits, target.logits_NV[label], target.logsumexp_N[label], weight)
            torch.mm(gradient, lm_head_VH, out=gradient_RH[rows])
            losses_R[rows], argmax_R[rows] = loss, argmax
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(losses_R, argmax_R)
        return (losses_R * weight_R).sum(), losses_R, argmax_R

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient_RH,) = ctx.saved_tensors
        return gradient_RH * grad_loss, None, None, None, None, None, None


class ChunkedSoftCrossEntropy:
    """Callable holding the (optionally compiled) chunk kernel.

    chunk: rows whose logits [chunk, V] live at once, with their gradient and the labels beside them.
    """

    def __init__(self, chunk: int = 8192, compiled: bool = False) -> None:
        self.chunk = chunk
        self._step = torch.compile(_chunk, dynamic=True) if compiled else _chunk

    def __call__(
        self, hidden_RH: Tensor, lm_head_VH: Tensor, target: TargetLogits, label_R: Tensor, weight_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_RH: drafter's normed rows. label_R: index into `target` of the distribution each row should meet.

        weight_R: float32. Returns (weighted sum of losses, losses_R, argmax_R); only the sum carries a gradient, and
        only to hidden_RH.
        """
        return _ChunkedSoftCrossEntropy.apply(hidden_RH, lm_head_VH, target, label_R, weight_R, self.chunk, self._step)
