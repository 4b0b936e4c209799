"""Acceptance of a head on answers of its target: AL and survival for every K from one pass (no decoding).

    peagle evaluate HEAD DIR [DIR2 ...] --target DIR [--against HEAD2] [--out DIR]

Drafts are made at all positions of an answer at once, on the true prefix, and `peagle.evaluate` replays decoding on them.
A folder of answers holds answers at one temperature, which its manifest.json names; `peagle.vllm.generate --prompts`
writes such folders.

Why a walk over a finished text is right. The head drafts the same tokens whatever came after the prefix: vLLM takes
the most likely ones (`draft_sample_method="greedy"`, its default, for requests of any temperature). Greedy decoding
accepts a draft exactly if it is the answer's next token. So does decoding at a temperature: without draft probabilities
vLLM's rejection sampler takes the draft's for 1, accepts draft d with probability p(d), p being the target's
distribution at that temperature, and otherwise samples from p with d left out. The token that comes out is d exactly if
d was accepted, and its distribution is p. An answer sampled from the target without drafts has that distribution too,
and goes on with d with the same probability. `draft_sample_method="probabilistic"` would end this: drafts would be
random, accepted with probability min(1, p / q); the text would not tell, and one would have to average sum(min(p, q)).
(Read in vLLM 0.29: v1/sample/rejection_sampler.py and config/speculative.py, for `rejection_sample_method="standard"`.)

Exact but for two things: the last step of an answer is not credited past its end, and in bfloat16 the target's most
likely token may differ between batch shapes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.cod import next_tokens, row_inputs
from peagle.train.data import Batch, Conversations, PackedBatches, distinct_share, pack
from peagle.train.passes import attend_chains, check_window
from peagle.train.target import Target

# ====================================================================================================
# Which draft tokens the target keeps: plain references of greedy and of sampled acceptance.
#
# What enters: the draft tokens of a batch and what the target says at each of their positions. What leaves: the
# tokens every request emits in this step. Nothing here knows how the drafts or the target's figures were made.
# The engine has its own fused version; this one is for reading, for offline evaluation and for tests.
#
# Shape letters: B requests, K draft tokens per request (the largest in the batch), V vocabulary.
#
# A request with fewer than K drafts says so in `num_draft_tokens_B`; its later columns are ignored. Row i of the
# target (i = 0..K) is its distribution *before* draft i+1 is known to be right: row 0 follows the last committed
# token, row i follows draft i. A request with k drafts uses rows 0..k.

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


# ====================================================================================================
# From drafts that a text confirms to acceptance length and survival, with intervals. Plain numpy.
#
# Enters, of each answer, `accepted_A`: how many draft tokens the head would have had accepted at each anchor A, that is,
# how many of its leading drafts are the answer's own tokens, at most K_max. Decoding at any K only visits some of these
# anchors: it accepts min(accepted, K) tokens, emits one more, and goes on after that one. So one run at K_max gives every
# K, and every policy that changes K on the way.
#
# AL = answer tokens / steps, bonus token counted, pooled over answers (as in arXiv 2602.01469, section 5.1, and vLLM).
# The first token of an answer comes from the prompt's pass and counts for none. Survival S_i is the share of steps whose
# first i drafts were all accepted.
#
# Intervals are 95% percentiles of a bootstrap over answers: answers are drawn with repetition and their counts pooled.
# Tokens of one answer are not independent, answers are. With a handful of answers the interval is too narrow.

NUM_RESAMPLES = 500
PERCENTILES = (2.5, 97.5)


def walk(accepted_A: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    """Tokens accepted in each step of decoding one answer at K = num_draft_tokens."""
    accepted = np.minimum(accepted_A, num_draft_tokens).tolist()
    steps, anchor = [], 0
    while anchor < len(accepted):
        steps.append(accepted[anchor])
        anchor += accepted[anchor] + 1
    return np.array(steps, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Of D answers. tokens_D: answer tokens but the first; steps_DK: decoding steps at K = 1..K_max; survived_DK: steps
    at K_max whose first 1..K_max drafts were all accepted.
    """

    tokens_D: np.ndarray
    steps_DK: np.ndarray
    survived_DK: np.ndarray

    @classmethod
    def of(cls, accepted: Sequence[np.ndarray], num_depths: int) -> Counts:
        """accepted: `accepted_A` of each answer."""
        steps_DK = np.zeros((len(accepted), num_depths), np.int64)
        survived_DK = np.zeros_like(steps_DK)
        for answer, accepted_A in enumerate(accepted):
            for k in range(1, num_depths + 1):
                steps = walk(accepted_A, k)
                steps_DK[answer, k - 1] = len(steps)
            survived_DK[answer] = (steps[:, None] > np.arange(num_depths)).sum(axis=0)
        return cls(np.array([len(one) for one in accepted], np.int64), steps_DK, survived_DK)

    def select(self, chosen: np.ndarray) -> Counts:
        return Counts(self.tokens_D[chosen], self.steps_DK[chosen], self.survived_DK[chosen])


def resamples(num_answers: int, seed: int = 0) -> np.ndarray:
    """How often each answer is drawn in each resample, [resamples, answers]; the same for equal arguments."""
    return np.random.default_rng(seed).multinomial(
        num_answers, np.full(num_answers, 1 / num_answers), size=NUM_RESAMPLES
    )


def interval(values_RK: np.ndarray) -> list[list[float]]:
    """[low, high] of each column over the resamples."""
    return np.percentile(values_RK, PERCENTILES, axis=0).T.round(4).tolist()


def figures(counts: Counts) -> dict[str, Any]:
    """AL for K = 1..K_max and survival at K_max of one group of answers, with 95% intervals (none for one answer)."""
    num_answers, num_depths = counts.steps_DK.shape
    names = [str(k) for k in range(1, num_depths + 1)]
    steps_K = counts.steps_DK.sum(axis=0)
    found: dict[str, Any] = {
        "num_answers": num_answers,
        "num_tokens": int(counts.tokens_D.sum()),
        "acceptance_length": dict(zip(names, (counts.tokens_D.sum() / steps_K).round(4).tolist(), strict=True)),
        "survival": (counts.survived_DK.sum(axis=0) / steps_K[-1]).round(4).tolist(),
    }
    if num_answers > 1:
        weights = resamples(num_answers)
        steps_RK = weights @ counts.steps_DK
        lengths = interval((weights @ counts.tokens_D)[:, None] / steps_RK)
        found["acceptance_length_95"] = dict(zip(names, lengths, strict=True))
        found["survival_95"] = interval((weights @ counts.survived_DK) / steps_RK[:, -1:])
    return found


def ratios(ours: Counts, theirs: Counts, depths: Sequence[int]) -> dict[str, Any]:
    """AL of one head over another's on the same answers at each K, with 95% intervals of the paired bootstrap.

    Raises ValueError when the two did not walk the same answers.
    """
    if not np.array_equal(ours.tokens_D, theirs.tokens_D):
        raise ValueError("ratios: the two heads must be walked over the same answers")
    columns = [k - 1 for k in depths]
    ours_DK, theirs_DK = ours.steps_DK[:, columns], theirs.steps_DK[:, columns]
    # The tokens are the same, so a ratio of lengths is that of steps the other way round.
    found: dict[str, Any] = {"num_answers": len(ours_DK)}
    values = (theirs_DK.sum(axis=0) / ours_DK.sum(axis=0)).round(4).tolist()
    found["ratio"] = {str(k): value for k, value in zip(depths, values, strict=True)}
    if len(ours_DK) > 1:
        weights = resamples(len(ours_DK))
        bounds = interval((weights @ theirs_DK) / (weights @ ours_DK))
        found["ratio_95"] = {str(k): pair for k, pair in zip(depths, bounds, strict=True)}
    return found


def members(groups: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
    """Indices of the answers in each group, groups in alphabetical order; groups: those of each answer."""
    found: dict[str, list[int]] = {}
    for index, names in enumerate(groups):
        for name in names:
            found.setdefault(name, []).append(index)
    return {name: np.array(found[name]) for name in sorted(found)}


def save_traces(path: Any, accepted: Sequence[np.ndarray], answers: Mapping[str, Any], num_depths: int) -> None:
    """Writes what every anchor would accept, so that any policy of K can be replayed: `walk` is the fixed one.

    answers: further arrays, one entry an answer (as `category`). Stored: `accepted` (uint8, all answers end to end),
    `num_anchors` (of each answer), `num_depths`.
    """
    arrays = {name: np.asarray(values) for name, values in answers.items()}
    arrays["accepted"] = np.concatenate([*accepted, np.zeros(0)]).astype(np.uint8)
    arrays["num_anchors"] = np.array([len(one) for one in accepted], np.int32)
    arrays["num_depths"] = np.array(num_depths)
    np.savez_compressed(path, allow_pickle=False, **arrays)


# ====================================================================================================
# How many drafts of a head a finished text would have accepted, at every anchor of it: the input of `peagle.evaluate`.

PACK_TOKENS = 2048
"""Answers are packed into sequences of so many tokens; a longer one is a sequence of its own."""
LOGIT_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a head would have accepted: accepted_A of each answer walked (`peagle.evaluate`), and which answers these are.

    skipped: reason of each answer that is not, by its index. log_probs: [A, K_max] of each answer walked, the drafter's
    log-probability of its draft at each depth, wrong drafts and those behind them too; empty where not asked for.
    """

    accepted: list[np.ndarray]
    walked: list[int]
    skipped: dict[int, str]
    num_depths: int
    log_probs: list[np.ndarray] = dataclasses.field(default_factory=list)


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    data: Conversations,
    num_depths: int | None = None,
    max_tokens: int | None = None,
    with_log_probs: bool = False,
) -> Replay:
    """Drafts at every anchor of every answer.

    num_depths: K_max, by default the head's own. max_tokens: prompt and answer together; longer ones are skipped.
    with_log_probs: takes longer, for the logits of all depths are then needed at every anchor.
    Raises ValueError for a K_max that a P-EAGLE head was not trained for, and for log-probabilities of an EAGLE-3 head,
    whose drafts behind a wrong one depend on it.
    """
    trained = drafter.config.num_depths
    num_depths = num_depths or trained
    if drafter.config.ptd_token_id is not None and num_depths > trained:
        raise ValueError(f"K_max = {num_depths}: the head was trained to draft {trained} tokens in a pass")
    if drafter.config.ptd_token_id is None and with_log_probs:
        raise ValueError("with_log_probs: the head has no mask token (EAGLE-3); give a P-EAGLE head")
    check_window(drafter.config.sliding_window, num_depths)
    skipped = {}
    for index, (length, prompt) in enumerate(zip(data.lengths.tolist(), data.prompt_lengths.tolist(), strict=True)):
        if length - prompt < 2:
            skipped[index] = "fewer than 2 answer tokens"
        elif max_tokens is not None and length > max_tokens:
            skipped[index] = f"more than {max_tokens} tokens"
    walked = [index for index in range(len(data)) if index not in skipped]
    found: dict[int, np.ndarray] = {}
    log_probs: dict[int, np.ndarray] = {}
    for indices, batch in _sequences(data, walked):
        accepted, log_probs_NK = _accepted(drafter, target, batch.to(target.device), num_depths, with_log_probs)
        accepted_N = accepted.cpu().numpy().astype(np.uint8)
        ends = data.lengths[indices].cumsum()
        for index, end in zip(indices, ends.tolist(), strict=True):
            first = end - int(data.lengths[index]) + int(data.prompt_lengths[index]) - 1
            found[index] = accepted_N[first : end - 2]
            if log_probs_NK is not None:
                log_probs[index] = log_probs_NK[first : end - 2].cpu().numpy()
    by_answer = [log_probs[index] for index in walked] if with_log_probs else []
    return Replay([found[index] for index in walked], walked, skipped, num_depths, by_answer)


def _sequences(data: Conversations, indices: list[int]) -> Iterator[tuple[list[int], Batch]]:
    """Packed sequences without padding, and the conversations in them."""
    if not indices:
        return
    packer = PackedBatches(data, num_sequences=1, max_tokens=max(PACK_TOKENS, int(data.lengths.max())), seed=0)
    order = np.array(indices)
    order = order[np.argsort(-data.lengths[order], kind="stable")]
    is_long = data.lengths[order] > PACK_TOKENS
    groups = [[int(index)] for index in order[is_long]]
    for group in [*groups, *pack(data.lengths, PACK_TOKENS, order[~is_long])]:
        whole, num_tokens = packer.assemble([group]), int(data.lengths[group].sum())
        yield group, Batch(*(getattr(whole, field.name)[:, :num_tokens] for field in dataclasses.fields(Batch)))


def _accepted(
    drafter: Drafter, target: Target, batch: Batch, num_depths: int, with_log_probs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """How many leading drafts of each anchor [N] are the document's own tokens; log-probability of each draft [N, K].

    Depth after depth from all anchors at once, in the form of `peagle.train.passes`: attention over the anchors' own rows is
    the same for every depth, and a mask over all rows, which grows with (N * K) ** 2, is never needed. A chain stops to
    count at its first wrong draft; until then its drafts are the true tokens, so EAGLE-3's rows can read those.
    """
    config, document_BN = drafter.config, batch.document_BN
    aux_BNX, _ = target.states(batch.tokens_BN, document_BN, batch.position_BN, config.aux_layer_ids, eager=True)
    last = batch.tokens_BN.shape[1] - 1
    anchor_N = torch.arange(last + 1, device=target.device)
    alive_N = batch.answer_BN[0].roll(-1)  # the first draft is compared with the answer's second token
    alive_N[last] = False
    accepted_N = torch.zeros_like(anchor_N)
    answer_R = alive_N.nonzero().squeeze(1)
    log_probs_NK = torch.zeros(last + 1, num_depths, device=target.device) if with_log_probs else None
    attend = attend_chains(document_BN, config.sliding_window)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        if config.ptd_token_id is None:
            embeds_BNH, hidden_BNH = drafter.embed(next_tokens(batch.tokens_BN)), drafter.reduce(aux_BNX)
        else:
            embeds_BMH, hidden_BMH = row_inputs(drafter, next_tokens(batch.tokens_BN), aux_BNX, 1)
            embeds_BNH, hidden_BNH = embeds_BMH[:, :-1], hidden_BMH[:, :-1]
        for depth in range(num_depths):
            normed_BNH, stream_BNH = drafter(embeds_BNH, hidden_BNH, batch.position_BN + depth, attend)
            label_N = (anchor_N + depth + 2).clamp_max(last)
            alive_N = alive_N & (anchor_N + depth + 2 <= last) & (document_BN[0, label_N] == document_BN[0])
            index_R = answer_R if with_log_probs else alive_N.nonzero().squeeze(1)
            if not len(index_R):
                break
            best = [_best(drafter, part_RH, with_log_probs) for part_RH in normed_BNH[0, index_R].split(LOGIT_ROWS)]
            drafts_R = drafter.target_ids[torch.cat([ids_R for ids_R, _ in best])]
            alive_N[index_R] &= drafts_R == batch.tokens_BN[0, label_N[index_R]]
            accepted_N += alive_N
            if log_probs_NK is not None:
                log_probs_NK[index_R, depth] = torch.cat([log_probs_R for _, log_probs_R in best])
            if config.ptd_token_id is None:
                embeds_BNH, hidden_BNH = drafter.embed(batch.tokens_BN[:, label_N]), stream_BNH
            else:
                embeds_BNH, hidden_BNH = (x[:, -1:].expand_as(embeds_BNH) for x in (embeds_BMH, hidden_BMH))
    return accepted_N, log_probs_NK


def _best(drafter: Drafter, normed_RH: torch.Tensor, with_log_probs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's likeliest token of the draft vocabulary [R], and its log-probability [R], zero where not asked for."""
    logits_RV = drafter.logits(normed_RH)
    ids_R = logits_RV.argmax(-1)
    if not with_log_probs:
        return ids_R, torch.zeros_like(ids_R, dtype=torch.float32)
    return ids_R, (logits_RV.gather(1, ids_R[:, None])[:, 0] - logits_RV.logsumexp(-1)).float()


# ====================================================================================================
# Figures of an evaluation. Needs matplotlib (extra `train`).

PANEL_INCHES = (5.2, 4.2)
DPI = 100
NUM_COLORS = 128
POOLED = ("all", "non-looping", "looping")
LINES = ("-", "--")


def curves(groups: dict[str, Any]) -> list[str]:
    """Groups worth a line: the pooled ones, then the workloads; a workload's looping share is left to the table."""
    walked = [name for name, one in groups.items() if one["num_answers"]]
    pooled = [name for name in POOLED if name in walked]
    return [*pooled, *(name for name in walked if name not in POOLED and not name.endswith(POOLED[1:]))]


def plot_acceptance(document: dict[str, Any], path: str | Path) -> Path:
    """Writes a PNG of the document of `peagle.evaluate`: a row a set of answers, AL by K on the left, survival by depth
    on the right, bands of 95% around all answers pooled; with a second head (dashed, pooled groups only) a row with the
    ratio of AL below each.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    sets, heads = document["sets"], [head["kind"] for head in document["heads"]]
    rows = [(one, part) for one in sets for part in ("lines", "ratios") if part == "lines" or one.get(part)]
    figure = Figure(figsize=(2 * PANEL_INCHES[0], len(rows) * PANEL_INCHES[1]), dpi=DPI, layout="constrained")
    canvas, grid = FigureCanvasAgg(figure), figure.add_gridspec(len(rows), 2)
    for row, (one, part) in enumerate(rows):
        title = f"{Path(one['answers']).name}, temperature {one['temperature']:g}"
        if part == "lines":
            _lengths(figure.add_subplot(grid[row, 0]), one, heads, title)
            _survival(figure.add_subplot(grid[row, 1]), one, title)
        else:
            _ratios(figure.add_subplot(grid[row, :]), one, heads, title)
    canvas.draw()
    # A palette makes the file a third as large.
    Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    return Path(path)


def _lines(one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, figures and line style of each curve: all of the first head, the pooled ones of the second."""
    for name in curves(one["groups"]):
        yield name, one["groups"][name], LINES[0]
    for name in curves(one.get("against", {})):
        if name in POOLED:
            yield name, one["against"][name], LINES[1]


def _colors(names: list[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    greys = dict(zip(POOLED, ("black", "0.35", "0.6"), strict=True))
    workloads = [name for name in names if name not in greys]
    return greys | {name: colormaps["tab20"](index % 20) for index, name in enumerate(workloads)}


def _lengths(axes: Any, one: dict[str, Any], heads: list[str], title: str) -> None:
    colors = _colors(curves(one["groups"]))
    for name, figures, line in _lines(one):
        depths = [int(k) for k in figures["acceptance_length"]]
        label = f"{name} ({figures['num_answers']})" if line == LINES[0] else None
        axes.plot(depths, figures["acceptance_length"].values(), line, color=colors[name], lw=_width(name), label=label)
        if name == "all" and "acceptance_length_95" in figures:
            bounds = zip(*figures["acceptance_length_95"].values(), strict=True)
            axes.fill_between(depths, *bounds, color="0.5", alpha=0.25, lw=0)
    axes.set(xlabel="K (draft tokens)", ylabel="AL (tokens a step, bonus token counted)", title=title, xticks=depths)
    axes.grid(alpha=0.3)
    legend = " (solid), ".join(heads) + (" (dashed)" if len(heads) > 1 else "")
    axes.legend(fontsize=7, ncols=2, title=legend, title_fontsize=8, loc="upper left")


def _survival(axes: Any, one: dict[str, Any], title: str) -> None:
    colors = _colors(curves(one["groups"]))
    for name, figures, line in _lines(one):
        depths = range(1, len(figures["survival"]) + 1)
        axes.plot(depths, figures["survival"], line, color=colors[name], lw=_width(name))
        if name == "all" and "survival_95" in figures:
            axes.fill_between(depths, *zip(*figures["survival_95"], strict=True), color="0.5", alpha=0.25, lw=0)
    axes.set(xlabel="depth", ylabel="survival (share of steps)", ylim=(0, 1), xticks=depths, title=title)
    axes.grid(alpha=0.3)


def _width(name: str) -> float:
    return 2.2 if name == "all" else 1.1


def _ratios(axes: Any, one: dict[str, Any], heads: list[str], title: str) -> None:
    """Ratio of AL by group at each K, with its interval."""
    names = curves(one["groups"])
    depths = list(one["ratios"][names[0]]["ratio"])
    for shift, k in enumerate(depths):
        places = [index + 0.22 * (shift - (len(depths) - 1) / 2) for index in range(len(names))]
        values = [one["ratios"][name]["ratio"][k] for name in names]
        axes.plot(places, values, "o", ms=3, label=f"K = {k}", color=f"C{shift}")
        for place, name in zip(places, names, strict=True):
            if bounds := one["ratios"][name].get("ratio_95", {}).get(k):
                axes.plot([place, place], bounds, "-", lw=1, color=f"C{shift}")
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="ratio of AL", title=f"{title}: {heads[0]} over {heads[1]}, paired 95% intervals")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)


# ====================================================================================================
# Acceptance of a head on answers of its target: AL and survival for every K from one pass (no decoding).
#
#     peagle evaluate HEAD DIR [DIR2 ...] --target DIR [--against HEAD2] [--out DIR]
#
# Drafts are made at all positions of an answer at once, on the true prefix, and `peagle.evaluate` replays decoding on them.
# A folder of answers holds answers at one temperature, which its manifest.json names; `peagle.vllm.generate --prompts`
# writes such folders.
#
# Why a walk over a finished text is right. The head drafts the same tokens whatever came after the prefix: vLLM takes
# the most likely ones (`draft_sample_method="greedy"`, its default, for requests of any temperature). Greedy decoding
# accepts a draft exactly if it is the answer's next token. So does decoding at a temperature: without draft probabilities
# vLLM's rejection sampler takes the draft's for 1, accepts draft d with probability p(d), p being the target's
# distribution at that temperature, and otherwise samples from p with d left out. The token that comes out is d exactly if
# d was accepted, and its distribution is p. An answer sampled from the target without drafts has that distribution too,
# and goes on with d with the same probability. `draft_sample_method="probabilistic"` would end this: drafts would be
# random, accepted with probability min(1, p / q); the text would not tell, and one would have to average sum(min(p, q)).
# (Read in vLLM 0.29: v1/sample/rejection_sampler.py and config/speculative.py, for `rejection_sample_method="standard"`.)
#
# Exact but for two things: the last step of an answer is not credited past its end, and in bfloat16 the target's most
# likely token may differ between batch shapes.

LOOPING = "looping"
RATIO_DEPTHS = (3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Answers:
    """One folder's answers; categories: one each."""

    data: Conversations
    categories: list[str]
    temperature: float = 0.0


def group_names(data: Conversations, categories: list[str]) -> list[list[str]]:
    """Groups that each conversation counts in: all, its category, looping or not, and the category's looping or not."""
    names = []
    for (tokens, prompt), category in zip(data.documents(), categories, strict=True):
        kind = LOOPING if distinct_share(tokens[prompt:].tolist()) < 0.5 else f"non-{LOOPING}"
        names.append(["all", category, kind, f"{category} {kind}"])
    return names


def summarize(found: Replay, groups: list[list[str]]) -> dict[str, Any]:
    """Figures of `peagle.evaluate` by group, and `skipped`: number of the group's answers left out, by reason."""
    counts = Counts.of(found.accepted, found.num_depths)
    by_group = members([groups[index] for index in found.walked])
    summary = {name: figures(counts.select(chosen)) for name, chosen in by_group.items()}
    for index, reason in found.skipped.items():
        for name in groups[index]:
            entry = summary.setdefault(name, {"num_answers": 0, "num_tokens": 0})
            reasons = entry.setdefault("skipped", {})
            reasons[reason] = reasons.get(reason, 0) + 1
    return dict(sorted(summary.items()))


def evaluate(drafter: Drafter, target: Target, data: Conversations, categories: list[str]) -> dict[str, Any]:
    """AL for K = 1..K_max and survival at K_max, by group; categories: one per conversation.

    Returns {group: {"num_answers", "num_tokens", "acceptance_length": {K: AL}, "survival": [S_1..], both with "_95"
    for intervals, "skipped": {reason: number}}}; a group without any answer walked has no figures.
    """
    return summarize(replay(drafter, target, data), group_names(data, categories))


def load_answers(folder: str | Path, max_per_category: int | None = None) -> tuple[Conversations, list[str]]:
    """Answers written by `peagle.vllm.generate --prompts`, and their categories."""
    answers = first_of_each(load_folder(folder), max_per_category)
    return answers.data, answers.categories


def first_of_each(answers: Answers, max_per_category: int | None) -> Answers:
    """The first so many answers of each category; all where None. Raises ValueError below 1."""
    if max_per_category is None:
        return answers
    if max_per_category < 1:
        raise ValueError(f"max_per_category is {max_per_category}: give at least 1")
    seen: dict[str, int] = {}
    chosen = []
    for index, category in enumerate(answers.categories):
        seen[category] = seen.get(category, 0) + 1
        if seen[category] <= max_per_category:
            chosen.append(index)
    return Answers(answers.data.select(chosen), [answers.categories[index] for index in chosen], answers.temperature)


def load_folder(folder: str | Path) -> Answers:
    """Raises ValueError when manifest.json has no categories, or not one for each answer."""
    data = Conversations.load(folder)
    manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    categories = manifest.get("categories")
    if categories is None or len(categories) != len(data):
        count = "no" if categories is None else len(categories)
        raise ValueError(f"{folder}: manifest.json names {count} categories for {len(data)} conversations")
    return Answers(data, categories, float(manifest.get("temperature") or 0.0))


def load_drafter(head_dir: Path, target: Target) -> Drafter:
    """A head on the target's device and in its type."""
    from peagle.checkpoint import build_drafter, load_head

    config, tensors = load_head(head_dir)
    tables = {"embed_VH": target.embed_VS, "lm_head_VH": target.lm_head_VS}
    return build_drafter(config, tensors, **tables, dtype=target.embed_VS.dtype, device=target.device)


def evaluate_folder(
    drafters: list[Drafter], target: Target, answers: Answers, num_depths: int, max_tokens: int | None
) -> tuple[dict[str, Any], Replay]:
    """Figures of one folder: of the first drafter, of the second, and their ratio; and the first one's replay."""
    groups = group_names(answers.data, answers.categories)
    first, *others = [replay(drafter, target, answers.data, num_depths, max_tokens) for drafter in drafters]
    result: dict[str, Any] = {"temperature": answers.temperature, "groups": summarize(first, groups)}
    if others:
        ours, theirs = (Counts.of(one.accepted, num_depths) for one in (first, others[0]))
        depths = [k for k in RATIO_DEPTHS if k <= num_depths]
        result["against"] = summarize(others[0], groups)
        result["ratios"] = {
            name: ratios(ours.select(chosen), theirs.select(chosen), depths)
            for name, chosen in members([groups[index] for index in first.walked]).items()
        }
    return result, first


def table(result: dict[str, Any]) -> str:
    """One line a group: number of answers, AL at each K with the last one's interval, survival, what is skipped."""
    lines = []
    for name, one in result["groups"].items():
        skipped = "".join(f"; skipped {number}: {reason}" for reason, number in one.get("skipped", {}).items())
        line = f"{name:32s} n={one['num_answers']:<4d}"
        if one["num_answers"]:
            lengths = one["acceptance_length"]
            line += " AL " + " ".join(f"{value:.2f}" for value in lengths.values())
            low, high = one.get("acceptance_length_95", {}).get(str(len(lengths)), (math.nan, math.nan))
            line += f" [{low:.2f}, {high:.2f}]  S " + " ".join(f"{share:.2f}" for share in one["survival"])
        lines.append(line + skipped)
    for name, one in result.get("ratios", {}).items():
        cells = [
            f"K={k} {value:.3f} [{', '.join(f'{bound:.3f}' for bound in one.get('ratio_95', {}).get(k, []))}]"
            for k, value in one["ratio"].items()
        ]
        lines.append(f"{name:32s} ratio {'  '.join(cells)}")
    return "\n".join(lines)


def describe(config: DrafterConfig) -> str:
    kind = "EAGLE-3" if config.ptd_token_id is None else "P-EAGLE"
    return f"{kind}, {config.num_hidden_layers} layer{'s' if config.num_hidden_layers > 1 else ''}"


def common_depths(configs: list[DrafterConfig]) -> int:
    """K_max for several heads: the least of the P-EAGLE heads, for EAGLE-3 can go on beyond what it was trained for."""
    limits = [config.num_depths for config in configs if config.ptd_token_id is not None]
    return min(limits) if limits else max(config.num_depths for config in configs)


def load_target(target_dir: str | Path) -> Target:
    """On a GPU in bfloat16, else on the CPU in float32."""
    on_gpu = torch.cuda.is_available()
    return Target(target_dir, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32)


def traces(found: Replay, answers: Answers) -> dict[str, Any]:
    """What `save_traces` stores of each answer beside its anchors."""
    texts = list(answers.data.documents())
    return {
        "category": [answers.categories[index] for index in found.walked],
        "temperature": [answers.temperature] * len(found.walked),
        "distinct_share": [
            distinct_share(tokens[prompt:].tolist()) for tokens, prompt in map(texts.__getitem__, found.walked)
        ],
    }


def evaluate_heads(
    head: Path,
    answers: list[Path],
    target_dir: str,
    *,
    against: Path | None = None,
    num_draft_tokens: int | None = None,
    max_tokens: int | None = None,
    traces_file: Path | None = None,
    out: Path | None = None,
) -> Iterator[str]:
    """Yields a table for each folder of answers; then writes evaluation.json and a figure into `out`, if given.

    against: a second head, for the ratio of AL. num_draft_tokens: K_max, by default what the heads were trained for.
    """
    from peagle.provenance import conditions

    target = load_target(target_dir)
    paths = [head, *([against] if against else [])]
    drafters = [load_drafter(path, target) for path in paths]
    num_depths = num_draft_tokens or common_depths([one.config for one in drafters])
    heads = [
        {"path": str(path), "kind": describe(one.config), "num_depths": one.config.num_depths}
        for path, one in zip(paths, drafters, strict=True)
    ]
    document: dict[str, Any] = {
        "made": conditions(),
        "target": target_dir,
        "heads": heads,
        "num_depths": num_depths,
        "sets": [],
    }
    accepted: list[np.ndarray] = []
    stored: dict[str, list[Any]] = {}
    for folder in answers:
        loaded = load_folder(folder)
        result, found = evaluate_folder(drafters, target, loaded, num_depths, max_tokens)
        document["sets"].append({"answers": str(folder), **result})
        accepted += found.accepted
        for name, values in traces(found, loaded).items():
            stored.setdefault(name, []).extend(values)
        yield f"{folder}: temperature {loaded.temperature:g}, {heads[0]['kind']}\n{table(result)}"
    if traces_file:
        save_traces(traces_file, accepted, stored, num_depths)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        plot_acceptance(document, out / "evaluation.png")
