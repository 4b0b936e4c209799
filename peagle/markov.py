"""Choosing the drafts of one pass from left to right, under a head's `MarkovHead`, at the cost of a small product each.

What the head needs of a draft token (its embedding) and gives to it (a logit) are linear in tables that stand still, so
both products are made once for the whole draft vocabulary:

    logits of depth d = output matrix h_d + silu(previous_VR[token of depth d - 1] + hidden h_d) out_RV

B requests, K drafts, H hidden size, V draft vocabulary, R rank. Drafts are indices into the draft vocabulary here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.model import MarkovHead


@dataclasses.dataclass(frozen=True)
class MarkovTables:
    """previous_VR: what each draft token says to the draft after it. out_RV: what that adds to the logits there."""

    previous_VR: Tensor
    hidden_RH: Tensor
    out_RV: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, head: MarkovHead, embeds_VH: Tensor, logits: Callable[[Tensor], Tensor]) -> MarkovTables:
        """embeds_VH: embeddings of the draft vocabulary, in the type and on the device of the pass. logits: the output
        matrix, [..., H] -> [..., V]."""
        previous_RH, hidden_RH, out_HR = (
            layer.weight.detach().to(embeds_VH) for layer in (head.previous, head.hidden, head.out)
        )
        return cls(F.linear(embeds_VH, previous_RH), hidden_RH, logits(out_HR.T.contiguous()).contiguous())

    def choose(self, normed_BKH: Tensor, logits_BKV: Tensor) -> Tensor:
        """The most likely draft of each depth after the one chosen before it, int64 [B, K].

        normed_BKH: rows of the pass; logits_BKV: the output matrix's for them.
        """
        moved_BKR = F.linear(normed_BKH, self.hidden_RH)
        chosen = [logits_BKV[:, 0].argmax(dim=-1)]
        for depth in range(1, logits_BKV.shape[1]):
            said_BR = F.silu(self.previous_VR[chosen[-1]] + moved_BKR[:, depth])
            chosen.append(torch.addmm(logits_BKV[:, depth], said_BR, self.out_RV).argmax(dim=-1))
        return torch.stack(chosen, dim=1)
