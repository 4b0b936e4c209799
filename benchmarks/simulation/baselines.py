"""Rules for K to compare ours with: none, fixed, by batch size, by a moving average, bandits, and oracles.

Each is a `benchmarks.simulation.engine_model.Policy`. The batch-wide ones give every request the same K; like ours they
draft K_max and trim, for a P-EAGLE pass costs the same whatever K is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from benchmarks.simulation.engine_model import Active, Times
from cluster.depth import allocate
from cluster.step_time import CostCurves, StepCosts, StepShape

BATCH = "batch"


class NoSpeculation:
    """An engine without a drafter; run it on the step times of such an engine."""

    drafts = False

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        return 0

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        return [0] * len(requests)

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        """Learns nothing."""

    def standing(self) -> Mapping[str, int]:
        return {}


class BatchWide(NoSpeculation):
    """One K for the whole batch; a fixed one as it stands."""

    drafts = True

    def __init__(self, k: int) -> None:
        self.k = k

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        return self.k

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        return [self.k] * len(requests)

    def standing(self) -> Mapping[str, int]:
        return {BATCH: self.k}


class BatchTable(BatchWide):
    """K by the number of running requests, as vLLM's `num_speculative_tokens_per_batch_size`: (first, last, K) with
    both ends included; a gap and the tail keep the K before them."""

    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None:
        if not table or table[0][0] != 1:
            raise ValueError(f"table must start at batch size 1, not {list(table)[:1]}")
        super().__init__(table[0][2])
        self._table = sorted(table)

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        for first, _, k in self._table:
            if first > len(requests):
                break
            self.k = k
        return super().depths(requests, context_tokens, prompt_tokens)


def best_table(
    lengths: Sequence[float], times: Times, max_num_requests: int, context_tokens: float
) -> list[tuple[int, int, int]]:
    """The best table that knows AL at each K (`lengths`, from K = 0) and the step times: an operator's careful tuning.

    Takes for each batch size the K with the most tokens a second when every request has it.
    """
    table: list[tuple[int, int, int]] = []
    for num in range(1, max_num_requests + 1):
        rates = [
            num * length / times.seconds(StepShape(num, num * (1 + k), k, context_tokens))
            for k, length in enumerate(lengths)
        ]
        k = int(np.argmax(rates))
        if table and table[-1][2] == k:
            table[-1] = (table[-1][0], num, k)
        else:
            table.append((num, num, k))
    return table


class MovingAverage(BatchWide):
    """SGLang's adaptive steps: an average of accepted drafts, smoothed, picks one of a few tiers.

    After `warmup` steps and then every `interval` steps: up one tier while the average is above tier - 0.5 + up, down
    while it is at most the tier below - 0.5 + down. Defaults are SGLang's (docs, "Adaptive speculative decoding").
    """

    def __init__(
        self,
        tiers: Sequence[int],
        *,
        alpha: float = 0.2,
        interval: int = 5,
        warmup: int = 10,
        up: float = 0.0,
        down: float = -0.25,
    ) -> None:
        self._tiers = sorted(set(tiers))
        self._at = len(self._tiers) // 2
        super().__init__(self._tiers[self._at])
        self._average = float(self.k - 1)
        self._alpha, self._interval, self._warmup, self._up, self._down = alpha, interval, warmup, up, down
        self._num_steps = 0

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        self._average += self._alpha * (sum(accepted) / len(accepted) - self._average)
        self._num_steps += 1
        if self._num_steps <= self._warmup or (self._num_steps - self._warmup) % self._interval:
            return
        while self._at > 0 and self._average <= self._tiers[self._at - 1] - 0.5 + self._down:
            self._at -= 1
        while self._at < len(self._tiers) - 1 and self._average > self._tiers[self._at] - 0.5 + self._up:
            self._at += 1
        self.k = self._tiers[self._at]


class Bandit(BatchWide):
    """Every K is an arm: its reward is the tokens a second of an epoch over the best epoch so far. One bandit for each
    power of two of the batch size, as in Nightjar (arXiv 2512.22420); the two rules are BanditSpec's (2505.15141).

    "ucb": the arm with the greatest mean + exploration * sqrt(ln epochs / times played). "exp3": arms drawn with
    weights that grow exponentially in reward over chance, mixed with a share `exploration` of even ones.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        rule: Literal["ucb", "exp3"],
        rng: np.random.Generator,
        *,
        epoch_steps: int = 16,
        exploration: float = 0.1,
    ) -> None:
        super().__init__(max_draft_tokens)
        self._num_arms = max_draft_tokens + 1
        self._rule, self._rng, self._epoch_steps, self._exploration = rule, rng, epoch_steps, exploration
        self._played: dict[int, np.ndarray] = {}
        self._reward: dict[int, np.ndarray] = {}
        self._best: dict[int, float] = {}
        self._bucket = 0
        self._chance = 1.0
        self._steps, self._tokens, self._seconds = 0, 0, 0.0

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        bucket = len(requests).bit_length()
        if bucket != self._bucket:
            self._bucket, self._steps, self._tokens, self._seconds = bucket, 0, 0, 0.0
            self._choose()
            return
        self._steps += 1
        self._tokens += sum(accepted) + len(accepted)
        self._seconds += seconds
        if self._steps == self._epoch_steps:
            rate = self._tokens / self._seconds
            self._best[bucket] = max(self._best.get(bucket, 0.0), rate)
            self._played[bucket][self.k] += 1
            reward = rate / self._best[bucket]
            # Importance weighting keeps EXP3's estimate unbiased though it sees one arm only.
            self._reward[bucket][self.k] += reward if self._rule == "ucb" else reward / self._chance
            self._steps, self._tokens, self._seconds = 0, 0, 0.0
            self._choose()

    def _choose(self) -> None:
        played = self._played.setdefault(self._bucket, np.zeros(self._num_arms))
        reward = self._reward.setdefault(self._bucket, np.zeros(self._num_arms))
        if self._rule == "exp3":
            weights = np.exp(self._exploration / self._num_arms * (reward - reward.max()))
            chances = (1 - self._exploration) * weights / weights.sum() + self._exploration / self._num_arms
            self.k = int(self._rng.choice(self._num_arms, p=chances))
            self._chance = float(chances[self.k])
        elif not played.all():
            self.k = int(np.argmin(played))
        else:
            bonus = self._exploration * np.sqrt(math.log(played.sum()) / played)
            self.k = int(np.argmax(reward / played + bonus))


class ByWorkload(NoSpeculation):
    """A fixed K for each workload."""

    drafts = True

    def __init__(self, by_label: Mapping[str, int]) -> None:
        self._by_label = dict(by_label)

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        return self._by_label[label]

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        return [one.cap for one in requests]


class StepOracle(NoSpeculation):
    """Knows how many drafts each request will have accepted in this very step, and verifies those that pay.

    It maximises the tokens a second of each step by our own rule, with certainty in place of survival. Nothing that
    only learns gets near it; it shows what better drafter probabilities could at most be worth.
    """

    drafts = True

    def __init__(self, times: StepCosts, max_draft_tokens: int) -> None:
        self._costs, self._max_draft_tokens = CostCurves(times), max_draft_tokens
        self._known = [(1.0,) * j + (0.0,) * (max_draft_tokens - j) for j in range(max_draft_tokens + 1)]

    def admit(self, label: str, num_running: Mapping[str, int], context_tokens: float, now_s: float) -> int:
        return self._max_draft_tokens

    def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
        known = [self._known[min(one.answer.accepted[one.anchor], self._max_draft_tokens)] for one in requests]
        deepest = [self._max_draft_tokens] * len(requests)
        return allocate(known, deepest, self._costs, context_tokens, prompt_tokens)


def climb(
    start: Mapping[str, int], max_draft_tokens: int, worth: Callable[[Mapping[str, int]], float]
) -> tuple[dict[str, int], float]:
    """The K of each workload that no change of one workload by one or two betters, and its worth.

    `worth` is asked once for each combination. Starts at `start`.
    """
    best, known = dict(start), {}

    def of(candidate: Mapping[str, int]) -> float:
        key = tuple(candidate.values())
        if key not in known:
            known[key] = worth(candidate)
        return known[key]

    improved = True
    while improved:
        improved = False
        for name in best:
            for change in (-2, -1, 1, 2):
                candidate = {**best, name: best[name] + change}
                if 0 <= candidate[name] <= max_draft_tokens and of(candidate) > of(best):
                    best, improved = candidate, True
    return best, of(best)
