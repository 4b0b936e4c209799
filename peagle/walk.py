"""From drafts that a text confirms to acceptance length and survival, with intervals. Plain numpy.

Enters, of each answer, `accepted_A`: how many draft tokens the head would have had accepted at each anchor A, that is,
how many of its leading drafts are the answer's own tokens, at most K_max. Decoding at any K only visits some of these
anchors: it accepts min(accepted, K) tokens, emits one more, and goes on after that one. So one run at K_max gives every
K, and every policy that changes K on the way.

AL = answer tokens / steps, bonus token counted, pooled over answers (as in arXiv 2602.01469, section 5.1, and vLLM).
The first token of an answer comes from the prompt's pass and counts for none. Survival S_i is the share of steps whose
first i drafts were all accepted.

Intervals are 95% percentiles of a bootstrap over answers: answers are drawn with repetition and their counts pooled.
Tokens of one answer are not independent, answers are. With a handful of answers the interval is too narrow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
