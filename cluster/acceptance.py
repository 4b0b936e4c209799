"""Acceptance of each workload by draft position: what is believed, and how surely.

Enters: new steps by head and workload (`cluster.counts.CounterDeltas`). Leaves: cumulative acceptance rates with
intervals, and a snapshot.

The cumulative acceptance rate S_i is the probability that a step accepts its first i drafts: the tokens that draft i
adds to a step on average. So a step at K gives L(K) = 1 + S_1 + ... + S_K tokens.

A step that verifies k drafts and accepts j is a trial of the conditional acceptance rates a_1 .. a_min(j + 1, k): at
j = k the next one is censored. With a P-EAGLE head draft i does not depend on k, so steps at any K inform the same a_i.
Each a_i gets a Beta posterior, and S_i is the product a_1 .. a_i. Its prior counts as `PRIOR_STEPS` trials around the
mean of the head's other workloads together, whose own prior is a published curve. A step counts half after
`half_life_steps` further steps of its workload. Each head has evidence of its own: a change of heads voids nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from cluster.counts import CounterDeltas, Counts
from cluster.request import MAX_NUM_WORKLOADS, TRIAL_SUFFIX
from cluster.step_latency import Array

PUBLISHED_RATES = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""S_1, S_2, ... in the range published for P-EAGLE heads; beyond, the last conditional rate goes on."""

INTERVAL_WIDTH = 1.645
"""Standard deviations on either side: 90 % of a normal distribution."""
PRIOR_STEPS = 40.0
"""Trials of each position that the parent's mean counts as for a workload, and the published curve to the parent."""
DESIGN_EFFECT = 4.0
"""Steps that count as one independent step, because steps of one request resemble each other. In
benchmarks/results/2026-11-21-traces-smollm2-135m.npz the variance of a_i between requests is 3.6 times the binomial one
(median over tasks and positions, quartiles 2.4 and 4.8)."""
MAX_HEADS = 4
"""Heads whose evidence is kept, of MAX_NUM_WORKLOADS of each: those with the latest steps."""


def check_rates(rates: Sequence[float], owner: str) -> None:
    """Raises ValueError naming the `owner` where `rates`, S_1, S_2, ..., are none."""
    for position, (before, rate) in enumerate(pairwise([1.0, *rates]), start=1):
        if not 0.0 <= rate <= before:
            raise ValueError(
                f"the acceptance rate of {owner} at position {position} is {rate}: it must be from 0 to {before}, as "
                "the first i drafts are not accepted more often than the first i - 1"
            )


@dataclass(frozen=True, slots=True)
class AcceptanceRates:
    """S_1 .. S_K_max of a workload: posterior means, and the ends of the central 90 % interval of each. `num_steps`:
    steps of the workload itself that drafted, after forgetting; 0 where only the prior speaks."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: float

    def acceptance_length(self, k: int) -> float:
        """Expected tokens of a step at K = `k`."""
        return 1.0 + sum(self.mean[:k])


class AcceptanceSnapshot(msgspec.Struct):
    """Everything learned. `evidence`: by head and workload, trials and successes of each a_i. Settings are not in
    it."""

    max_draft_tokens: int
    head: str
    trial_head: str
    evidence: dict[str, dict[str, tuple[list[float], list[float]]]]


class AcceptancePosteriors:
    """The posteriors of all workloads, in one process; not thread-safe. `max_draft_tokens`: K_max; counts of positions
    beyond it are left out. `half_life_steps`: verification steps of a workload after which a step of it counts half."""

    def __init__(self, max_draft_tokens: int, *, half_life_steps: float = 4000) -> None:
        self.max_draft_tokens, self._half_life_steps = max_draft_tokens, half_life_steps
        conditionals = np.array(PUBLISHED_RATES) / np.array([1.0, *PUBLISHED_RATES[:-1]])
        self._prior_K: Array = conditionals[np.minimum(np.arange(max_draft_tokens), len(PUBLISHED_RATES) - 1)]
        self.head = self.trial_head = ""
        # By head and workload, those with the latest steps last: trials and successes of each a_i, weighted by age.
        self._evidence: dict[str, dict[str, Array]] = {}
        self._none_2K: Array = np.zeros((2, max_draft_tokens))
        self._rates: dict[tuple[str, str], AcceptanceRates] = {}  # until there is further evidence

    def update(self, deltas: CounterDeltas) -> None:
        """Take in a whole round of reports, so that no replica's steps count as later than another's. Where more
        workloads are active at a time than are kept, the busiest stay."""
        if deltas.head:
            self.head, self.trial_head = deltas.head, deltas.trial_head
        for head, counts_by_workload in deltas.by_head.items():
            evidence = self._evidence[head] = self._evidence.pop(head, {})
            for name, counts in sorted(counts_by_workload.items(), key=lambda item: item[1].num_steps):
                evidence[name] = _age_and_add(evidence.pop(name, self._none_2K), counts, self._half_life_steps)
            for latest_last, most in ((evidence, MAX_NUM_WORKLOADS), (self._evidence, MAX_HEADS)):
                while len(latest_last) > most:
                    del latest_last[next(iter(latest_last))]
        self._rates.clear()

    def find_head(self, workload: str) -> str:
        """The head that drafts for a workload now."""
        return self.trial_head if workload.endswith(TRIAL_SUFFIX) else self.head

    def workloads(self) -> tuple[str, ...]:
        """Workloads distinguished under their current heads, the one whose steps are the latest first."""
        return tuple(
            name
            for head, evidence in reversed(self._evidence.items())
            for name in reversed(evidence)
            if self.find_head(name) == head
        )

    @property
    def num_steps(self) -> float:
        """Steps of all workloads of the head that drafts by default, after forgetting."""
        return sum(map(_count_steps, self._evidence.get(self.head, {}).values()))

    def rates(self, workload: str) -> AcceptanceRates:
        """What is believed of a workload; of an unknown one, what its head's other workloads say together."""
        head = self.find_head(workload)
        if (head, workload) not in self._rates:
            evidence = self._evidence.get(head, {})
            own_2K = evidence.get(workload, self._none_2K)
            # The parent leaves the workload itself out, or it would count twice.
            others_2K = sum((found for name, found in evidence.items() if name != workload), self._none_2K)
            alpha_K, beta_K = _posterior(self._prior_K, others_2K)
            alpha_K, beta_K = _posterior(alpha_K / (alpha_K + beta_K), own_2K)
            self._rates[head, workload] = _describe(alpha_K, beta_K, _count_steps(own_2K))
        return self._rates[head, workload]

    def snapshot(self) -> AcceptanceSnapshot:
        evidence = {
            head: {name: tuple(found_2K.tolist()) for name, found_2K in by_name.items()}
            for head, by_name in self._evidence.items()
        }
        return AcceptanceSnapshot(self.max_draft_tokens, self.head, self.trial_head, evidence)

    def restore(self, snapshot: AcceptanceSnapshot) -> None:
        """Replace everything learned by a snapshot's. Raises ValueError for one of another K_max."""
        if snapshot.max_draft_tokens != self.max_draft_tokens:
            raise ValueError(
                f"the snapshot is of a head with K_max {snapshot.max_draft_tokens}, but the one served drafts "
                f"{self.max_draft_tokens}: start without it"
            )
        self.head, self.trial_head = snapshot.head, snapshot.trial_head
        self._evidence = {
            head: {name: np.array(rows) for name, rows in by_name.items()}
            for head, by_name in snapshot.evidence.items()
        }
        self._rates.clear()


def _age_and_add(earlier_2K: Array, later: Counts, half_life: float) -> Array:
    """Earlier and later steps, each of which weighs 2^(-steps since / half-life).

    The n later steps are taken as evenly mixed: each weighs their mean, (1 - 2^(-n/h)) / (n (1 - 2^(-1/h))). So it does
    not matter how steps are cut into reports, and processes that read at different times agree.
    """
    num_steps, rate, later_2K = later.num_steps, math.log(2) / half_life, np.zeros_like(earlier_2K)
    # Positions beyond K_max are left out: they say nothing about the others.
    for row, counts in zip(later_2K, (later.reached, later.accepted), strict=True):
        row[: len(counts)] = counts[: len(row)]
    weight = math.expm1(-rate * num_steps) / (math.expm1(-rate) * num_steps)
    return math.exp(-rate * num_steps) * earlier_2K + weight * later_2K


def _count_steps(evidence_2K: Array) -> float:
    """Each step that drafts is a trial of a_1."""
    return float(evidence_2K[0, :1].sum())


def _posterior(mean_K: Array, evidence_2K: Array) -> tuple[Array, Array]:
    """Beta parameters of a_1 .. a_K_max: a prior of `PRIOR_STEPS` trials around `mean_K` with the evidence, all of it
    over the design effect."""
    reached_K, accepted_K = evidence_2K
    alpha_K = PRIOR_STEPS * mean_K + accepted_K
    beta_K = PRIOR_STEPS * (1 - mean_K) + np.maximum(reached_K - accepted_K, 0.0)
    return alpha_K / DESIGN_EFFECT, beta_K / DESIGN_EFFECT


def _describe(alpha_K: Array, beta_K: Array, num_steps: float) -> AcceptanceRates:
    """Means and intervals of the products S_i of independent Beta variables.

    Means and variances are exact. The interval is that of a normal distribution of log(S / (1 - S)) with, to first
    order, this variance: it stays within 0..1.
    """
    total_K = alpha_K + beta_K
    mean_K = np.cumprod(alpha_K / total_K)
    # 1 + variance / mean^2 of a product is the product of the factors' own; a Beta's is beta / (alpha (total + 1)).
    log_variance_K = np.cumsum(np.log1p(beta_K / (alpha_K * (total_K + 1))))
    odds_K, factor_K = mean_K / (1 - mean_K), np.exp(INTERVAL_WIDTH * np.sqrt(log_variance_K) / (1 - mean_K))
    low_K, high_K = odds_K / (odds_K + factor_K), odds_K * factor_K / (1 + odds_K * factor_K)
    return AcceptanceRates(tuple(mean_K.tolist()), tuple(low_K.tolist()), tuple(high_K.tolist()), num_steps)
