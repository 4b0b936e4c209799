"""Which draft tokens the target keeps: plain references of greedy and of sampled acceptance.

What enters: the draft tokens of a batch and what the target says at each of their positions. What leaves: the
tokens every request emits in this step. Nothing here knows how the drafts or the target's figures were made.
The engine has its own fused version; this one is for reading, for offline evaluation and for tests.

Shape letters: B requests, K draft tokens per request (the largest in the batch), V vocabulary.

A request with fewer than K drafts says so in `num_draft_tokens_B`; its later columns are ignored. Row i of the
target (i = 0..K) is its distribution *before* draft i+1 is known to be right: row 0 follows the last committed
token, row i follows draft i. A request with k drafts uses rows 0..k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_TOKEN_ID = -1


@dataclass(frozen=True)
class Accepted:
    """What one verification step emits.

    token_ids_BT: [B, K + 1] int64. The accepted drafts, then one token from the target, then `PADDING_TOKEN_ID`.
    num_accepted_tokens_B: [B] int64, 0..k for a request with k drafts; the step emits one token more.
    """

    token_ids_BT: Tensor
    num_accepted_tokens_B: Tensor


def accept_greedy(
    draft_token_ids_BK: Tensor, target_logits_BTV: Tensor, num_draft_tokens_B: Tensor | None = None
) -> Accepted:
    """Keep drafts while each equals the target's most likely token; then emit the target's own token.

    Args:
        draft_token_ids_BK: [B, K] integers; may have K = 0.
        target_logits_BTV: [B, K + 1, V]; probabilities do as well, only the largest entry counts.
        num_draft_tokens_B: [B] integers in 0..K, the drafts of each request; None means K for all.

    Returns:
        Exactly the tokens that greedy decoding without drafts would emit next.

    Raises:
        ValueError: shapes do not fit together, or a draft token is outside 0..V-1.
    """
    counts_B = _checked_counts(draft_token_ids_BK, target_logits_BTV, num_draft_tokens_B)
    target_token_ids_BT = target_logits_BTV.argmax(dim=-1)
    num_accepted_B = _num_leading_true(draft_token_ids_BK == target_token_ids_BT[:, :-1], counts_B)
    next_token_ids_B = target_token_ids_BT.gather(1, num_accepted_B[:, None])[:, 0]
    return _emit(draft_token_ids_BK, num_accepted_B, next_token_ids_B)


def accept_sampled(
    draft_token_ids_BK: Tensor,
    target_probs_BTV: Tensor,
    draft_probs_BKV: Tensor | None = None,
    num_draft_tokens_B: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Rejection sampling that leaves the target's distribution unchanged (arXiv 2211.17192, Algorithm 1).

    Draft x with draft probability q(x) is kept with probability min(1, p(x) / q(x)). The first rejected draft is
    replaced by a sample of the residual max(p - q, 0), normalised; when all are kept, one more token is sampled
    from the target's last row.

    Args:
        draft_token_ids_BK: [B, K] integers; may have K = 0.
        target_probs_BTV: [B, K + 1, V], each row summing to 1, temperature and top-p/top-k applied already.
        draft_probs_BKV: [B, K, V], the distribution that each draft was *sampled* from. None means that drafts were
            chosen without chance (vLLM's EAGLE drafters take the most likely token): q is then one at the draft
            and zero elsewhere, so x is kept with p(x) and the residual is p without x.
        num_draft_tokens_B: [B] integers in 0..K, the drafts of each request; None means K for all.
        generator: source of chance, on the device of `target_probs_BTV`.

    A draft of probability zero under the drafter could not have been sampled from it, so it is rejected, as in
    vLLM; a draft of probability zero under the target is never kept.

    Raises:
        ValueError: shapes do not fit together, a draft token is outside 0..V-1, or a used row is no distribution.
    """
    counts_B = _checked_counts(draft_token_ids_BK, target_probs_BTV, num_draft_tokens_B)
    num_drafts_max = draft_token_ids_BK.shape[1]
    columns = torch.arange(num_drafts_max + 1, device=counts_B.device)
    _check_distributions("target_probs_BTV", target_probs_BTV, columns <= counts_B[:, None])
    if draft_probs_BKV is not None:
        expected = (draft_token_ids_BK.shape[0], num_drafts_max, target_probs_BTV.shape[2])
        if tuple(draft_probs_BKV.shape) != expected:
            raise ValueError(
                f"draft_probs_BKV has shape {tuple(draft_probs_BKV.shape)}, expected [B, K, V] = {expected}"
            )
        _check_distributions("draft_probs_BKV", draft_probs_BKV, columns[:-1] < counts_B[:, None])

    drafts = draft_token_ids_BK.clamp(min=0)[..., None]  # [B, K, 1]; columns past a request's count hold anything
    target_prob = target_probs_BTV[:, :-1].gather(2, drafts)[..., 0].double()
    draft_prob = (
        torch.ones_like(target_prob) if draft_probs_BKV is None else draft_probs_BKV.gather(2, drafts)[..., 0].double()
    )
    # In float64 a chance of exactly zero is rare, and `<` refuses a draft with target probability zero even then.
    chance = torch.rand(target_prob.shape, dtype=torch.float64, device=target_prob.device, generator=generator)
    kept = (chance * draft_prob < target_prob) & (draft_prob > 0)
    num_accepted_B = _num_leading_true(kept, counts_B)

    residual_BV = _next_token_weights(draft_token_ids_BK, target_probs_BTV, draft_probs_BKV, num_accepted_B, counts_B)
    next_token_ids_B = torch.multinomial(residual_BV, 1, generator=generator)[:, 0]
    return _emit(draft_token_ids_BK, num_accepted_B, next_token_ids_B)


def _next_token_weights(
    draft_token_ids_BK: Tensor,
    target_probs_BTV: Tensor,
    draft_probs_BKV: Tensor | None,
    num_accepted_B: Tensor,
    counts_B: Tensor,
) -> Tensor:
    """[B, V] weights (not normalised) of the token after the accepted drafts: the residual, or the target's row."""
    batch = torch.arange(num_accepted_B.shape[0], device=num_accepted_B.device)
    target_row_BV = target_probs_BTV[batch, num_accepted_B].double()
    if draft_token_ids_BK.shape[1] == 0:
        return target_row_BV
    # Row of the rejected draft; requests that keep all their drafts do not use it, the clamp only keeps it in range.
    column = num_accepted_B.clamp(max=draft_token_ids_BK.shape[1] - 1)
    if draft_probs_BKV is None:
        rejected = draft_token_ids_BK[batch, column].clamp(min=0)
        residual_BV = target_row_BV.scatter(1, rejected[:, None], 0.0)
    else:
        residual_BV = (target_row_BV - draft_probs_BKV[batch, column].double()).clamp(min=0)
    # p <= q everywhere means p = q, where a rejection has probability zero and can only come from rounding.
    use_target_row = (num_accepted_B == counts_B) | (residual_BV.sum(dim=1) <= 0)
    return torch.where(use_target_row[:, None], target_row_BV, residual_BV)


def _num_leading_true(kept: Tensor, counts_B: Tensor) -> Tensor:
    """kept [B, K] bool, counts_B [B] -> [B] int64: how many of a request's first drafts are all kept."""
    in_use = torch.arange(kept.shape[1], device=kept.device) < counts_B[:, None]
    return (kept & in_use).long().cumprod(dim=1).sum(dim=1)


def _emit(draft_token_ids_BK: Tensor, num_accepted_B: Tensor, next_token_ids_B: Tensor) -> Accepted:
    """draft_token_ids_BK [B, K], num_accepted_B [B], next_token_ids_B [B] -> Accepted."""
    batch_size, num_drafts_max = draft_token_ids_BK.shape
    columns = torch.arange(num_drafts_max + 1, device=num_accepted_B.device)
    padded = torch.cat([draft_token_ids_BK.long(), next_token_ids_B.new_full((batch_size, 1), PADDING_TOKEN_ID)], dim=1)
    token_ids_BT = torch.where(columns < num_accepted_B[:, None], padded, PADDING_TOKEN_ID)
    token_ids_BT = token_ids_BT.scatter(1, num_accepted_B[:, None], next_token_ids_B[:, None])
    return Accepted(token_ids_BT=token_ids_BT, num_accepted_tokens_B=num_accepted_B)


def _checked_counts(draft_token_ids_BK: Tensor, target: Tensor, num_draft_tokens_B: Tensor | None) -> Tensor:
    """Check draft_token_ids_BK [B, K] against target [B, K + 1, V]; return the draft counts [B] int64."""
    if draft_token_ids_BK.dim() != 2 or draft_token_ids_BK.is_floating_point():
        raise ValueError(f"draft_token_ids_BK must be [B, K] integers, got shape {tuple(draft_token_ids_BK.shape)}")
    batch_size, num_drafts_max = draft_token_ids_BK.shape
    if target.dim() != 3 or tuple(target.shape[:2]) != (batch_size, num_drafts_max + 1):
        raise ValueError(
            f"the target's rows have shape {tuple(target.shape)}, expected [B, K + 1, V] = "
            f"({batch_size}, {num_drafts_max + 1}, V): one row for each draft and one for the token after them"
        )
    if num_draft_tokens_B is None:
        counts_B = torch.full((batch_size,), num_drafts_max, device=target.device)
    else:
        counts_B = num_draft_tokens_B.to(device=target.device, dtype=torch.int64)
        if tuple(counts_B.shape) != (batch_size,) or bool(((counts_B < 0) | (counts_B > num_drafts_max)).any()):
            raise ValueError(
                f"num_draft_tokens_B must be [B] = [{batch_size}] values in 0..{num_drafts_max}, got {counts_B}"
            )
    in_use = torch.arange(num_drafts_max, device=target.device) < counts_B[:, None]
    outside = in_use & ((draft_token_ids_BK < 0) | (draft_token_ids_BK >= target.shape[2]))
    if bool(outside.any()):
        row, column = (int(index) for index in outside.nonzero()[0])
        token_id = int(draft_token_ids_BK[row, column])
        raise ValueError(f"draft_token_ids_BK[{row}, {column}] = {token_id} is outside 0..{target.shape[2] - 1}")
    return counts_B


def _check_distributions(name: str, probs: Tensor, in_use: Tensor) -> None:
    """Raise ValueError unless every row of probs [B, N, V] that in_use [B, N] marks is a distribution."""
    sums = probs.double().sum(dim=-1)
    wrong = in_use & (((sums - 1).abs() > 1e-3) | (probs < 0).any(dim=-1) | sums.isnan())
    if bool(wrong.any()):
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise ValueError(
            f"{name}[{row}, {column}] is not a distribution: it sums to {float(sums[row, column]):.6g} "
            f"and its smallest entry is {float(probs[row, column].min()):.6g} (apply softmax first?)"
        )
