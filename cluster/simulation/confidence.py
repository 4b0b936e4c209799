"""What a drafter's own probabilities say of its drafts: loading them, calibrating them, and how good they are.

Enters: traces of `peagle.bench.draft_confidence`, with the log-probability of every draft. Leaves: survivals by step,
to allocate by, and figures of their quality. Never knows: step times.

Calibration is a logistic regression for each depth i, of "draft i is accepted" among steps whose first i - 1 were, on
the log-odds of draft i; perhaps with a constant for each workload. Its running product is S_1 .. S_K_max of that step.
Beside it stands what the scheduler has today: one conditional acceptance by workload and depth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.simulation.traces import Kind, Traces
from cluster.transfer import gains

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOG_PROB_RANGE = (-12.0, -1e-4)
"""Log-probabilities are stored in 16 bits, so a log-odds near certainty is noise beyond about 9."""
RIDGE = 1.0
PRIOR_STEPS = 2.0
"""Steps that a workload's acceptance starts with, at the rate of all workloads."""
NUM_NEWTON_STEPS = 12


def workloads() -> dict[str, Kind]:
    """All of the dev questions as six workloads of greedy requests, and one of sampled ones."""
    return {
        "code": Kind(("humaneval", "coding")),
        "chat": Kind(("writing", "roleplay", "humanities")),
        "questions": Kind(("qa", "rag")),
        "reasoning": Kind(("math", "math_reasoning", "reasoning", "stem", "extraction")),
        "summarization": Kind(("summarization",)),
        "translation": Kind(("translation",)),
        "sampled": Kind(("*",), temperature=1.0),
    }


@dataclass(frozen=True)
class Steps:
    """Decoding steps of any requests. workload_N: index; accepted_N: 0..K_max; log_odds_NK: of the drafts."""

    workload_N: Ints
    accepted_N: Ints
    log_odds_NK: Floats

    def __len__(self) -> int:
        return len(self.accepted_N)


@dataclass(frozen=True)
class Scored:
    """One answer. accepted_A, log_odds_AK: at each of its anchors."""

    workload: int
    accepted_A: Ints
    log_odds_AK: Floats

    def walk(self, k: int) -> list[int]:
        """Anchors that decoding at K = k visits."""
        anchors, anchor = [], 0
        while anchor < len(self.accepted_A):
            anchors.append(anchor)
            anchor += min(int(self.accepted_A[anchor]), k) + 1
        return anchors


@dataclass(frozen=True)
class Pool:
    """Answers by workload; `names` of the workloads, in the order of their indices."""

    names: tuple[str, ...]
    answers: tuple[Scored, ...]
    max_draft_tokens: int

    def steps(self, visited: Sequence[tuple[int, int]]) -> Steps:
        """visited: (answer, anchor) of each step."""
        answers = [self.answers[answer] for answer, _ in visited]
        return Steps(
            np.array([one.workload for one in answers]),
            np.array([one.accepted_A[anchor] for one, (_, anchor) in zip(answers, visited, strict=True)]),
            np.array([one.log_odds_AK[anchor] for one, (_, anchor) in zip(answers, visited, strict=True)]),
        )

    def walked(self) -> Steps:
        """The steps of decoding every answer at K_max."""
        return self.steps([(i, at) for i, one in enumerate(self.answers) for at in one.walk(self.max_draft_tokens)])

    def shuffled(self, rng: np.random.Generator) -> "Pool":
        """The same acceptance, beside log-odds of anchors drawn from all answers: a drafter that says nothing."""
        all_NK = np.concatenate([one.log_odds_AK for one in self.answers])
        drawn_NK, start, answers = all_NK[rng.permutation(len(all_NK))], 0, []
        for one in self.answers:
            answers.append(Scored(one.workload, one.accepted_A, drawn_NK[start : start + len(one.accepted_A)]))
            start += len(one.accepted_A)
        return Pool(self.names, tuple(answers), self.max_draft_tokens)

    def halves(self, rng: np.random.Generator) -> tuple["Pool", "Pool"]:
        """Two disjoint sets with half of each workload, drawn at random.

        Raises ValueError naming a workload of fewer than two answers."""
        parts: tuple[list[Scored], list[Scored]] = ([], [])
        for index, name in enumerate(self.names):
            mine = [one for one in self.answers if one.workload == index]
            if len(mine) < 2:
                raise ValueError(f"workload {name!r} has {len(mine)} answers: halves need at least 2")
            for place, which in enumerate(rng.permutation(len(mine)).tolist()):
                parts[place % 2].append(mine[which])
        first, second = (Pool(self.names, tuple(part), self.max_draft_tokens) for part in parts)
        return first, second


def load(paths: Sequence[Path], kinds: Mapping[str, Kind], min_distinct_share: float = 0.0) -> Pool:
    """The answers of some files; those of no workload, or that repeat themselves more than allowed, are left out.

    Raises ValueError naming the file that cannot be used, or a workload without answers."""
    names, found, depths = tuple(kinds), list[Scored](), set[int]()
    for path in paths:
        traces = Traces.load(path)
        depths.add(traces.max_draft_tokens)
        for answer, log_odds_AK in zip(traces.answers, _log_odds(path, traces), strict=True):
            mine = [index for index, name in enumerate(names) if kinds[name].holds(answer)]
            if mine and answer.distinct_share >= min_distinct_share:
                accepted_A = np.frombuffer(answer.accepted, np.uint8).astype(np.int64)
                found.append(Scored(mine[0], accepted_A, log_odds_AK))
    if len(depths) != 1:
        raise ValueError(f"traces of different K_max cannot be taken together: {sorted(depths)}")
    for index, name in enumerate(names):
        if all(one.workload != index for one in found):
            raise ValueError(f"workload {name!r} has no answer in {', '.join(map(str, paths))}")
    return Pool(names, tuple(found), depths.pop())


def _log_odds(path: Path, traces: Traces) -> list[Floats]:
    with np.load(path, allow_pickle=False) as stored:
        if "log_probs" not in stored.files:
            raise ValueError(f"traces {path}: has no array 'log_probs'; write it with peagle.bench.draft_confidence")
        log_probs_NK = stored["log_probs"].astype(np.float64)
    num_anchors = [len(one.accepted) for one in traces.answers]
    if log_probs_NK.shape != (sum(num_anchors), traces.max_draft_tokens):
        expected = sum(num_anchors), traces.max_draft_tokens
        raise ValueError(f"traces {path}: log_probs has shape {log_probs_NK.shape}, not {expected}")
    if not (log_probs_NK <= 1e-6).all():  # also false for what is no number
        raise ValueError(f"traces {path}: log_probs must be numbers, at most 0")
    log_probs_NK = log_probs_NK.clip(*LOG_PROB_RANGE)
    log_odds_NK = log_probs_NK - np.log(-np.expm1(log_probs_NK))
    return np.split(log_odds_NK, np.cumsum(num_anchors)[:-1])


class Estimate(Protocol):
    """conditional_NK: the chance that draft i is accepted where those before it are."""

    def conditional(self, workload_N: Ints, log_odds_NK: Floats) -> Floats: ...


@dataclass(frozen=True)
class ByWorkload:
    """What the scheduler has: acceptance_WK by workload and depth, the same in every step."""

    acceptance_WK: Floats

    @classmethod
    def fit(cls, steps: Steps, num_workloads: int) -> "ByWorkload":
        depths = np.arange(steps.log_odds_NK.shape[1])
        reached_NK, accepted_NK = steps.accepted_N[:, None] >= depths, steps.accepted_N[:, None] > depths
        pooled_K = (accepted_NK.sum(axis=0) + 1) / (reached_NK.sum(axis=0) + 2)
        rows = []
        for index in range(num_workloads):
            mine = steps.workload_N == index
            number_K = reached_NK[mine].sum(axis=0) + PRIOR_STEPS
            rows.append((accepted_NK[mine].sum(axis=0) + PRIOR_STEPS * pooled_K) / number_K)
        return cls(np.array(rows))

    def conditional(self, workload_N: Ints, log_odds_NK: Floats) -> Floats:
        return self.acceptance_WK[workload_N]

    def carried(self) -> "ByWorkload":
        """What a further draft adds at each K (`cluster.transfer.gains`), where this was counted at K_max."""
        worth_WK = np.array([gains(row, len(row)) for row in self.acceptance_WK.cumprod(axis=1).tolist()])
        before_WK = np.column_stack([np.ones(len(worth_WK)), worth_WK[:, :-1]])
        return ByWorkload(np.divide(worth_WK, before_WK, out=np.zeros_like(worth_WK), where=before_WK > 0))


@dataclass(frozen=True)
class Calibrated:
    """Logistic in the drafter's log-odds. weights_KF: for each depth the slope, the constant, and (F = 2 + W) what each
    workload adds to it."""

    weights_KF: Floats

    @classmethod
    def fit(cls, steps: Steps, num_workloads: int = 0) -> "Calibrated":
        """num_workloads: 0 leaves workloads out."""
        rows = []
        for depth in range(steps.log_odds_NK.shape[1]):
            reached = steps.accepted_N >= depth
            features_MF = _features(steps.workload_N[reached], steps.log_odds_NK[reached, depth], num_workloads)
            rows.append(_logistic(features_MF, steps.accepted_N[reached] > depth))
        return cls(np.array(rows))

    def conditional(self, workload_N: Ints, log_odds_NK: Floats) -> Floats:
        num_workloads = self.weights_KF.shape[1] - 2
        columns = [
            _features(workload_N, log_odds_N, num_workloads) @ weights_F
            for log_odds_N, weights_F in zip(log_odds_NK.T, self.weights_KF, strict=True)
        ]
        return np.asarray(_sigmoid(np.stack(columns, axis=1)))


def _features(workload_N: Ints, log_odds_N: Floats, num_workloads: int) -> Floats:
    of_workload_NW = workload_N[:, None] == np.arange(num_workloads)
    return np.column_stack([log_odds_N, np.ones(len(log_odds_N)), of_workload_NW])


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(0.5 * (1 + np.tanh(values / 2)))


def _logistic(features_MF: Floats, outcomes_M: NDArray[np.bool_]) -> Floats:
    """Weights by Newton's method. The ridge holds all but slope and constant, and those two a little."""
    ridge_F = np.full(features_MF.shape[1], RIDGE)
    ridge_F[:2] = 1e-3
    weights_F = np.zeros(features_MF.shape[1])
    for _ in range(NUM_NEWTON_STEPS):
        chance_M = _sigmoid(features_MF @ weights_F)
        gradient_F = features_MF.T @ (outcomes_M - chance_M) - ridge_F * weights_F
        curvature_FF = (features_MF * (chance_M * (1 - chance_M))[:, None]).T @ features_MF + np.diag(ridge_F)
        step_F = np.linalg.solve(curvature_FF, gradient_F)
        weights_F = weights_F + step_F * min(1.0, 4.0 / max(float(np.abs(step_F).max()), 1e-9))
    return weights_F


def survival(estimate: Estimate, workload_N: Ints, log_odds_NK: Floats) -> Floats:
    """S_1 .. S_K_max of each step."""
    return np.asarray(estimate.conditional(workload_N, log_odds_NK).cumprod(axis=1))


def known(accepted_N: Ints, max_draft_tokens: int) -> Floats:
    """Survival with certainty: what the step will accept."""
    return np.asarray((accepted_N[:, None] > np.arange(max_draft_tokens)).astype(np.float64))


def quality(estimate: Estimate, steps: Steps) -> dict[str, dict[str, float]]:
    """AUC, Brier score and log-loss, over all depths together: of each draft that was reached (`conditional`), and of
    every draft, for the event that it and all before it are accepted (`survival`)."""
    depths = np.arange(steps.log_odds_NK.shape[1])
    reached_NK, accepted_NK = steps.accepted_N[:, None] >= depths, steps.accepted_N[:, None] > depths
    conditional_NK = estimate.conditional(steps.workload_N, steps.log_odds_NK)
    return {
        "conditional": _scores(conditional_NK[reached_NK], accepted_NK[reached_NK]),
        "survival": _scores(conditional_NK.cumprod(axis=1).ravel(), accepted_NK.ravel()),
    }


def _scores(chance_M: Floats, outcomes_M: NDArray[np.bool_]) -> dict[str, float]:
    clipped_M = chance_M.clip(1e-6, 1 - 1e-6)
    log_loss = -np.where(outcomes_M, np.log(clipped_M), np.log1p(-clipped_M)).mean()
    brier = float(((chance_M - outcomes_M) ** 2).mean())
    return {"auc": auc(chance_M, outcomes_M), "brier": brier, "log_loss": float(log_loss)}


def auc(chance_M: Floats, outcomes_M: NDArray[np.bool_]) -> float:
    """The chance that an accepted draft was given more than one that was not; ties count half."""
    _, place_M, counts = np.unique(chance_M, return_inverse=True, return_counts=True)
    rank_M = (np.cumsum(counts) - (counts - 1) / 2)[place_M]
    num_true, num_false = int(outcomes_M.sum()), int((~outcomes_M).sum())
    if not num_true or not num_false:
        raise ValueError("AUC needs accepted and rejected drafts")
    return float((rank_M[outcomes_M].sum() - num_true * (num_true + 1) / 2) / (num_true * num_false))
