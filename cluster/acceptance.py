"""Acceptance of each workload by draft position: what is believed, and how surely.

Enters: new steps by head and workload (`cluster.counts.CounterDeltas`). Leaves: cumulative acceptance rates with
intervals, and a snapshot.

The cumulative acceptance rate S_i is the chance that a step accepts its first i drafts: the tokens that draft i adds to
a step on average. So a step at K gives L(K) = 1 + S_1 + ... + S_K tokens.

A step that verifies k drafts and accepts j of them is a trial of the conditional acceptance rates a_1 .. a_min(j + 1, k):
at j = k the next one is censored. With a P-EAGLE head draft i does not depend on k, so steps at any K inform the same
a_i. Each a_i gets a Beta posterior, and S_i is the product a_1 .. a_i. Its prior is worth `prior_steps` trials around the
mean of the head's other workloads together, whose own prior is a published curve. A step counts half after
`half_life_steps` further steps of its workload. Each head has evidence of its own: a change of heads voids nothing.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.counts import CounterDeltas, Counts

Array = NDArray[np.float64]

PUBLISHED_RATES = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""S_1, S_2, ... in the range published for P-EAGLE heads; beyond, the last conditional rate goes on."""

INTERVAL_WIDTH = 1.645
"""Standard deviations on either side: 90 % of a normal distribution."""
LEAST_CONDITIONAL, MOST_CONDITIONAL = 0.01, 0.99
MAX_HEADS = 4
"""Heads whose evidence is kept, those with the latest steps."""


class RatesError(ValueError):
    """Rates cannot be used: not a number, outside 0..1, growing with the position, or too few."""


def check_rates(rates: Sequence[float], owner: str, max_k: int = 0) -> None:
    """Raises RatesError naming the `owner` where `rates`, S_1, S_2, ..., are none, or fewer than `max_k`."""
    if len(rates) < max_k:
        raise RatesError(f"{owner} may get {max_k} drafts but has acceptance rates of {len(rates)} positions")
    before = 1.0
    for position, rate in enumerate(rates, start=1):
        if not 0.0 <= rate <= 1.0:
            raise RatesError(f"the acceptance rate of {owner} at position {position} is {rate}, not from 0 to 1")
        if rate > before:
            raise RatesError(
                f"the acceptance rate of {owner} grows from {before} to {rate} at position {position}: "
                "the first i drafts cannot all be accepted more often than the first i - 1"
            )
        before = rate


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """S_1 .. S_K_max of a workload: posterior means, and the ends of the central 90 % interval of each. `num_steps`:
    independent steps of the workload itself, after forgetting; 0 where only the prior speaks."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: float

    def acceptance_length(self, k: int) -> float:
        """Expected tokens of a step at K = `k`. Raises ValueError outside 0..K_max."""
        if not 0 <= k <= len(self.mean):
            raise ValueError(f"k must be from 0 to {len(self.mean)}, not {k}")
        return 1.0 + sum(self.mean[:k])


class WeightedCounts(msgspec.Struct):
    """Steps weighted by age: in all, and trials and successes of each conditional rate a_i (index i - 1)."""

    steps: float
    reached: list[float]
    accepted: list[float]

    @classmethod
    def zeros(cls, max_draft_tokens: int) -> "WeightedCounts":
        return cls(0.0, [0.0] * max_draft_tokens, [0.0] * max_draft_tokens)

    def age_and_add(self, steps: float, reached: Sequence[float], accepted: Sequence[float], half_life: float) -> None:
        """Add later steps, and let each step weigh 2^(-steps since / half-life).

        The n later steps are taken as evenly mixed: each weighs their mean, (1 - 2^(-n/h)) / (n (1 - 2^(-1/h))). So it
        does not matter how steps are cut into reports, and processes that read at different times agree.
        """
        if steps <= 0:
            return
        kept, rate = 0.5 ** (steps / half_life), math.log(2) / half_life
        weight = math.expm1(-rate * steps) / (math.expm1(-rate) * steps)
        self.steps = kept * self.steps + weight * steps
        # Positions beyond K_max are left out: they say nothing about the others.
        for row, later in ((self.reached, reached), (self.accepted, accepted)):
            row[:] = [kept * old + weight * new for old, new in zip(row, [*later, *[0.0] * len(row)], strict=False)]

    def check(self, max_draft_tokens: int) -> None:
        """Raises ValueError where no steps can have these counts."""
        before, is_possible = self.steps, 0 <= self.steps < math.inf
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            # Sums of weighted steps are rounded.
            is_possible &= 0 <= accepted <= reached * (1 + 1e-6) <= before * (1 + 2e-6)
            before = accepted
        if len(self.reached) != max_draft_tokens or not is_possible:
            raise ValueError(f"no steps can have these counts of {max_draft_tokens} positions: {self!r:.200}")


class HeadEvidence(msgspec.Struct):
    """Of one head: each workload's steps, the workload with the latest ones last, and those of evicted workloads."""

    workloads: dict[str, WeightedCounts]
    evicted: WeightedCounts


class AcceptanceSnapshot(msgspec.Struct):
    """Everything learned, the head with the latest steps last. Settings are not in it."""

    max_draft_tokens: int
    head: str
    heads: dict[str, str]
    evidence: dict[str, HeadEvidence]


class AcceptancePosteriors:
    """The posteriors of all workloads, in one process; not thread-safe.

    Args:
        max_draft_tokens: K_max. Counts of positions beyond it are left out.
        half_life_steps: verification steps of a workload after which a step of it counts half.
        prior_steps: trials of each position that the parent's mean is worth to a workload, and the curve to the parent.
        max_workloads: told apart; the one without steps for longest makes room, and lives on in the parent.
        prior: S_1 .. S_K_max before any step. Conditional rates are kept within 0.01..0.99, so that data can move them.
        design_effect: steps worth one independent step, because steps of one request resemble each other. In
            benchmarks/results/2026-11-21-traces-smollm2-135m.npz the variance of a_i between requests is 3.6 times the
            binomial one (median over tasks and positions, quartiles 2.4 and 4.8).
    """

    def __init__(
        self,
        max_draft_tokens: int,
        *,
        half_life_steps: float = 4000,
        prior_steps: float = 40,
        max_workloads: int = 64,
        prior: Sequence[float] = PUBLISHED_RATES,
        design_effect: float = 4.0,
    ) -> None:
        self.max_draft_tokens, self._max_workloads = max_draft_tokens, max_workloads
        self._half_life_steps, self._prior_steps = half_life_steps, prior_steps
        self._design_effect = design_effect
        conditionals = np.array(prior) / np.array([1.0, *prior[:-1]])
        positions = np.minimum(np.arange(max_draft_tokens), len(prior) - 1)
        self._prior_K: Array = np.clip(conditionals, LEAST_CONDITIONAL, MOST_CONDITIONAL)[positions]
        self.head = ""
        self.heads: dict[str, str] = {}
        self._evidence: OrderedDict[str, HeadEvidence] = OrderedDict()
        self._rates: dict[tuple[str, str], AcceptanceRates] = {}  # until there is further evidence

    def update(self, deltas: CounterDeltas) -> None:
        """Take in a whole round of reports, so that no replica's steps count as later than another's."""
        self.head, self.heads = deltas.head, dict(deltas.heads)
        for head, counts_by_workload in deltas.by_head.items():
            self._add(head, counts_by_workload)
        self._rates.clear()

    def head_of(self, workload: str) -> str:
        """The head that drafts for a workload now."""
        return self.heads.get(workload, self.head)

    def workloads(self) -> tuple[str, ...]:
        """Workloads told apart under their current heads, the one whose steps are the latest first."""
        return tuple(
            name
            for head, evidence in reversed(self._evidence.items())
            for name in reversed(evidence.workloads)
            if self.head_of(name) == head
        )

    def rates(self, workload: str) -> AcceptanceRates:
        """What is believed of a workload; of an unknown one, what its head's other workloads say together."""
        head = self.head_of(workload)
        if (head, workload) not in self._rates:
            evidence = self._evidence_of(head)
            own = evidence.workloads.get(workload) or WeightedCounts.zeros(self.max_draft_tokens)
            # The parent leaves the workload itself out, or it would count twice.
            others = [counts for name, counts in evidence.workloads.items() if name != workload]
            alpha_K, beta_K = self._posterior(self._prior_K, [*others, evidence.evicted])
            self._rates[head, workload] = self._describe(
                self._posterior(alpha_K / (alpha_K + beta_K), [own]), own.steps
            )
        return self._rates[head, workload]

    def total_rates(self) -> AcceptanceRates:
        """All workloads of the head that drafts by default, together."""
        evidence = self._evidence_of(self.head)
        every = [*evidence.workloads.values(), evidence.evicted]
        return self._describe(self._posterior(self._prior_K, every), sum(counts.steps for counts in every))

    def snapshot(self) -> AcceptanceSnapshot:
        return AcceptanceSnapshot(self.max_draft_tokens, self.head, dict(self.heads), dict(self._evidence))

    def restore(self, snapshot: AcceptanceSnapshot) -> None:
        """Replace everything learned by a snapshot's. Raises ValueError naming what is wrong with it; nothing has
        changed then."""
        if snapshot.max_draft_tokens != self.max_draft_tokens:
            raise ValueError(
                f"the snapshot is of a head with K_max {snapshot.max_draft_tokens}, but the one served drafts "
                f"{self.max_draft_tokens}: start without it"
            )
        for evidence in snapshot.evidence.values():
            for counts in (*evidence.workloads.values(), evidence.evicted):
                counts.check(self.max_draft_tokens)
        self.head, self.heads, self._evidence = snapshot.head, snapshot.heads, OrderedDict(snapshot.evidence)
        for evidence in self._evidence.values():
            self._evict(evidence)
        self._rates.clear()

    def _add(self, head: str, counts_by_workload: Mapping[str, Counts]) -> None:
        """Add steps. Where more workloads are active at a time than are told apart, the busiest are kept."""
        active = [(name, counts) for name, counts in counts_by_workload.items() if counts.num_steps]
        if not active:
            return
        evidence = self._evidence[head] = self._evidence_of(head)
        self._evidence.move_to_end(head)
        active.sort(key=lambda item: item[1].num_steps)
        for index, (name, counts) in enumerate(active):
            if len(active) - index > self._max_workloads:
                known = evidence.evicted
            else:
                is_known = name in evidence.workloads
                known = evidence.workloads.pop(name) if is_known else WeightedCounts.zeros(self.max_draft_tokens)
                evidence.workloads[name] = known
            known.age_and_add(counts.num_steps, counts.reached, counts.accepted, self._half_life_steps)
        self._evict(evidence)
        while len(self._evidence) > MAX_HEADS:
            self._evidence.popitem(last=False)

    def _evict(self, evidence: HeadEvidence) -> None:
        while len(evidence.workloads) > self._max_workloads:
            gone = evidence.workloads.pop(next(iter(evidence.workloads)))
            evidence.evicted.age_and_add(gone.steps, gone.reached, gone.accepted, self._half_life_steps)

    def _evidence_of(self, head: str) -> HeadEvidence:
        return self._evidence.get(head) or HeadEvidence({}, WeightedCounts.zeros(self.max_draft_tokens))

    def _posterior(self, mean_K: Array, evidence: Sequence[WeightedCounts]) -> tuple[Array, Array]:
        """Beta parameters of a_1 .. a_K_max: a prior of `prior_steps` trials around `mean_K` with the evidence, all of
        it over the design effect."""
        reached_K = np.sum([counts.reached for counts in evidence], axis=0)
        accepted_K = np.sum([counts.accepted for counts in evidence], axis=0)
        alpha_K = self._prior_steps * mean_K + accepted_K
        beta_K = self._prior_steps * (1 - mean_K) + np.maximum(reached_K - accepted_K, 0.0)
        return alpha_K / self._design_effect, beta_K / self._design_effect

    def _describe(self, posterior: tuple[Array, Array], steps: float) -> AcceptanceRates:
        """Means and intervals of the products S_i of independent Beta variables.

        Mean and variance are exact. The interval is that of a normal distribution of log(S / (1 - S)) with the same
        mean and, to first order, variance: it stays within 0..1.
        """
        alpha_K, beta_K = posterior
        total_K = alpha_K + beta_K
        mean_K = np.cumprod(alpha_K / total_K)
        # 1 + variance / mean^2 of a product is the product of the factors' own; a Beta's is beta / (alpha (total + 1)).
        relative_variance_K = np.expm1(np.cumsum(np.log1p(beta_K / (alpha_K * (total_K + 1)))))
        logit_K = np.log(mean_K / (1 - mean_K))
        half_K = INTERVAL_WIDTH * np.sqrt(np.log1p(relative_variance_K)) / (1 - mean_K)
        low_K, high_K = (1 / (1 + np.exp(-(logit_K + side * half_K))) for side in (-1, 1))
        means, lows, highs = (tuple(end.tolist()) for end in (mean_K, low_K, high_K))
        return AcceptanceRates(means, lows, highs, steps / self._design_effect)
