"""The target's next-token distributions at the tokens of a batch: labels of the losses.

Rows of the drafter share labels: the label of a row is an index into the N tokens of a batch. `TargetLogits` holds the
logits of all N tokens where they are few enough, else it makes them from the target's last hidden states as they are
asked for, and `walk` visits rows in the order of their labels, so that each is made once. Callers do not see which.

    N = 16,384 tokens in bf16:  V = 49,152 takes 1.6 GB and is held, V = 201,088 takes 6.6 GB and is not

A reduced draft vocabulary takes V_draft of the target's V tokens: distributions are renormalised over them, while the
most likely token stays that of the whole vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

MAX_WHOLE_BYTES = 4 << 30  # logits of a batch that are held whole

#: statistics(logits_UV) -> (log-sum-exp_U, argmax_U), the first in float32 or wider.
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]


def wide_softmax(logits_CV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, exponentials, sums of these [C, 1], log-sum-exp [C, 1]), in float32 or wider."""
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    top_C1 = wide_CV.amax(-1, keepdim=True)
    exponent_CV = (wide_CV - top_C1).exp()
    total_C1 = exponent_CV.sum(-1, keepdim=True)
    return wide_CV, exponent_CV, total_C1, top_C1 + total_C1.log()


def statistics(logits_UV: Tensor) -> tuple[Tensor, Tensor]:
    *_, logsumexp_U1 = wide_softmax(logits_UV)
    return logsumexp_U1.squeeze(-1), logits_UV.argmax(-1)


@dataclasses.dataclass(frozen=True)
class Distributions:
    """The target at U tokens.

    logits_UV, logsumexp_U: over the draft vocabulary. argmax_U: most likely token of the whole vocabulary, an id of the
    target. draft_U: the same as an index into the draft vocabulary, -1 where that lacks it.
    """

    logits_UV: Tensor
    logsumexp_U: Tensor
    argmax_U: Tensor
    draft_U: Tensor


class TargetLogits:
    """What the target says at the N tokens of a batch."""

    def __init__(
        self,
        hidden_NS: Tensor,
        lm_head_VS: Tensor,
        target_ids_V: Tensor | None = None,
        *,
        chunk: int = 4096,
        max_whole_bytes: int = MAX_WHOLE_BYTES,
        statistics: Statistics = statistics,
    ) -> None:
        """hidden_NS: the target's last hidden states (after its norm); lm_head_VS: its output matrix.

        target_ids_V: the target's ids of the draft vocabulary [V_draft]; None, or as many as the target has tokens: all
        in order. chunk: tokens whose logits over the whole vocabulary exist at once while they are made whole.
        """
        num_tokens, vocabulary = hidden_NS.shape[0], lm_head_VS.shape[0]
        reduced = target_ids_V is not None and len(target_ids_V) < vocabulary
        self.target_ids_V = target_ids_V if reduced else None
        self._index_V = _inverse(target_ids_V, vocabulary) if target_ids_V is not None and reduced else None
        self._hidden_NS, self._lm_head_VS, self._statistics = hidden_NS, lm_head_VS, statistics
        self.vocabulary_size = len(target_ids_V) if target_ids_V is not None else vocabulary
        self._whole: Distributions | None = None
        if num_tokens * self.vocabulary_size * hidden_NS.element_size() <= max_whole_bytes:
            self._whole = self._made_whole(chunk)

    @torch.no_grad()
    def at(self, token_U: Tensor | None) -> Distributions:
        """Distributions at tokens as `walk` names them; None: at all N."""
        if token_U is None:
            assert self._whole is not None, "only `walk` of held logits names no tokens"
            return self._whole
        logits_UV = self._hidden_NS[token_U] @ self._lm_head_VS.T
        if self.target_ids_V is None:
            return self._distributions(logits_UV, logits_UV)
        return self._distributions(logits_UV, logits_UV.index_select(1, self.target_ids_V))

    def walk(self, label_R: Tensor, chunk: int) -> Iterator[tuple[slice | Tensor, Tensor | None, Tensor]]:
        """Visits all R rows once, `chunk` or fewer at a time: (which rows, tokens for `at`, index_C into what it says).

        label_R: int64, 0..N-1. Chunks differ by one row at most. Where logits are not held, the host waits for the
        device twice, before the first chunk.
        """
        spans = _spans(len(label_R), chunk)
        if self._whole is not None:
            for start, end in spans:
                yield slice(start, end), None, label_R[start:end]
            return
        sorted_R, order_R = label_R.sort(stable=True)
        token_U, index_R = sorted_R.unique_consecutive(return_inverse=True)
        firsts = index_R[[start for start, _ in spans]].tolist()
        lasts = index_R[[end - 1 for _, end in spans]].tolist()
        for (start, end), first, last in zip(spans, firsts, lasts, strict=True):
            yield order_R[start:end], token_U[first : last + 1], index_R[start:end] - first

    def ids(self, draft_R: Tensor) -> Tensor:
        """Index into the draft vocabulary -> id of the target."""
        return draft_R if self.target_ids_V is None else self.target_ids_V[draft_R]

    def _distributions(self, whole_UV: Tensor, draft_UV: Tensor) -> Distributions:
        logsumexp_U, argmax_U = self._statistics(draft_UV)
        if self._index_V is None:
            return Distributions(draft_UV, logsumexp_U, argmax_U, argmax_U)
        argmax_U = whole_UV.argmax(-1)
        return Distributions(draft_UV, logsumexp_U, argmax_U, self._index_V[argmax_U])

    @torch.no_grad()
    def _made_whole(self, chunk: int) -> Distributions:
        num_tokens = self._hidden_NS.shape[0]
        logits_NV = self._hidden_NS.new_empty(num_tokens, self.vocabulary_size)
        parts = []
        for start, end in _spans(num_tokens, chunk):
            hidden_US, out_UV = self._hidden_NS[start:end], logits_NV[start:end]
            if self.target_ids_V is None:
                whole_UV = torch.mm(hidden_US, self._lm_head_VS.T, out=out_UV)
            else:
                whole_UV = hidden_US @ self._lm_head_VS.T
                torch.index_select(whole_UV, 1, self.target_ids_V, out=out_UV)
            parts.append(self._distributions(whole_UV, out_UV))
        sums, tops, drafts = ([getattr(p, name) for p in parts] for name in ("logsumexp_U", "argmax_U", "draft_U"))
        return Distributions(logits_NV, torch.cat(sums), torch.cat(tops), torch.cat(drafts))


def _inverse(target_ids_V: Tensor, vocabulary: int) -> Tensor:
    """Id of the target [V] -> index into the draft vocabulary, -1 where that lacks it."""
    index_V = target_ids_V.new_full((vocabulary,), -1)
    index_V[target_ids_V] = torch.arange(len(target_ids_V), device=target_ids_V.device)
    return index_V


def _spans(num_rows: int, chunk: int) -> list[tuple[int, int]]:
    """0..num_rows in the fewest spans of at most `chunk`. They are even: a stray single row would recompile kernels."""
    num_spans = -(-num_rows // chunk)
    return [(i * num_rows // num_spans, (i + 1) * num_rows // num_spans) for i in range(num_spans)]
