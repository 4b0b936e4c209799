"""Acceptance of each workload by depth: what is believed, how surely, and from which steps.

Enters: new steps by head and workload (`cluster.counts.News`). Leaves: the survival S_i of a workload with intervals,
or a random draw of it (Thompson sampling), AL at any K, and a snapshot. Never knows: clocks, step times, K in force.

Model (policy-and-apis, D1 and D3). A step that verifies k drafts and accepts j of them is a trial of the conditional
acceptances a_1 .. a_min(j + 1, k): k = j censors the next one. With a P-EAGLE head the draft at depth i does not depend
on k, so trials at any K inform the same a_i, and each gets a Beta posterior of its own; S_i is the product a_1 .. a_i.
Its prior is worth `prior_steps` trials around the mean of all other workloads of the same head together, whose own
prior is a published curve. Older steps count less: half after `half_life_steps` further steps of the same workload.
Each head has evidence of its own, so a change of heads, and a change back, voids nothing.

A step's weight depends on how many came after it and not on how they were cut into reports, so books that poll the same
replicas at different times agree closely.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.counts import Counts, News

Array = NDArray[np.float64]

PUBLISHED_SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""By depth, in the range published for P-EAGLE heads; depths beyond go on with the last conditional acceptance."""

INTERVAL_LEVEL = 0.9
LEAST_CONDITIONAL, MOST_CONDITIONAL = 0.01, 0.99
MAX_HEADS = 4
"""Heads whose evidence is kept, those with the latest steps."""


# ---- AL at one K from acceptance measured at another
#
# 1 + S_1 + ... + S_k is L(k), the tokens of a step at K = k, only at the K that was played. Text that is easy to draft
# is one step at a great K and several at a small one, so the greater K is, the more steps start at hard tokens. Sums of
# survivals measured at 7 give AL 4 to 9 % too low at 2 to 4; sums measured at 3, with deeper conditional acceptances
# from probes, 10 to 18 % too high at 7 (benchmarks/results/2026-11-21-traces-smollm2-135m.npz).
#
# To a lesser K: of the steps at m, the share P(j) = S_j - S_(j+1) accepted j drafts. Were all tokens hard or easy
# whatever the depth, such a run of j + 1 tokens would take (j + 1) / (k + 1) steps at k, and at least one:
#
#     L_split(k) = sum_j P(j) (j + 1) / sum_j P(j) max(1, (j + 1) / (k + 1))
#
# This errs the other way, by 1 to 6 %, so SPLIT_SHARE of it and the rest of the plain sum are taken. To a greater K it
# is the inverse: of the curves whose conditional acceptances are the measured ones times one factor, the one from which
# the former rule gives back the L(m) that was measured. Both rules are this project's own; test_acceptance.py
# holds them against replayed answers of several heads and temperatures.

SPLIT_SHARE = 2 / 3
"""Of the two views of a step's end: 0 where all steps are alike, 1 where tokens are hard or easy at any depth."""

NUM_SECANTS, TOLERANCE = 8, 1e-4


def lengths(survival: Sequence[float], measured_at: int) -> tuple[float, ...]:
    """L(0) .. L(K_max) of S_1 .. S_K_max that were measured at K = `measured_at`; at 0, where nothing can have been
    measured, the plain sums.

    Raises ValueError where `measured_at` is not from 0 to K_max.
    """
    if not 0 <= measured_at <= len(survival):
        raise ValueError(f"measured_at is {measured_at}, outside 0..{len(survival)}")
    curve = [1.0, *survival]
    plain = tuple(accumulate(curve))
    if measured_at == 0:
        return plain
    played = curve[: measured_at + 1]
    less = (_at_lesser(played, k) for k in range(1, measured_at))
    more = (_at_greater(curve[: k + 1], measured_at) for k in range(measured_at + 1, len(curve)))
    return (1.0, *less, plain[measured_at], *more)


def gains(survival: Sequence[float], measured_at: int) -> tuple[float, ...]:
    """L(k) - L(k - 1) for k = 1 .. K_max: what a further draft is worth to traffic at that K. Never rising, 0 to 1, as
    survivals are, so that a plan can rank drafts by them. Raises ValueError as `lengths`."""
    steps = (min(1.0, max(0.0, after - before)) for before, after in pairwise(lengths(survival, measured_at)))
    return tuple(accumulate(steps, min))


def as_drawn(drawn: Sequence[float], mean: Sequence[float], worth: Sequence[float]) -> tuple[float, ...]:
    """Worth of drafts under survivals drawn from a posterior: `worth` moved by the draw's distance from the posterior's
    mean."""
    moved = (min(1.0, max(0.0, w + s - m)) for s, m, w in zip(drawn, mean, worth, strict=False))
    return tuple(accumulate(moved, min))


def _at_lesser(played: Sequence[float], k: int) -> float:
    """L(k) of S_0 .. S_m measured at m > k."""
    ended = [before - after for before, after in zip(played, [*played[1:], 0.0], strict=True)]
    num_steps = sum(share * max(1.0, (j + 1) / (k + 1)) for j, share in enumerate(ended))
    return (1 - SPLIT_SHARE) * sum(played[: k + 1]) + SPLIT_SHARE * sum(played) / num_steps


def _at_greater(curve: Sequence[float], measured_at: int) -> float:
    """L(k) of S_0 .. S_k, of which those up to `measured_at` < k were measured there."""
    observed = sum(curve[: measured_at + 1])
    conditionals = [after / before if before > 0 else 0.0 for before, after in pairwise(curve)]

    def scaled(factor: float) -> list[float]:
        return np.cumprod([1.0, *(factor * each for each in conditionals)]).tolist()  # type: ignore[no-any-return]

    # By secants: what a factor predicts rises with it, almost in a line, and at 1 it is too much.
    (before, excess), factor = (1.0, _at_lesser(curve, measured_at) - observed), 0.9
    for _ in range(NUM_SECANTS):
        more = _at_lesser(scaled(factor), measured_at) - observed
        if abs(more) < TOLERANCE or more == excess:
            break
        next_factor = factor - more * (factor - before) / (more - excess)
        before, excess, factor = factor, more, min(1.0, max(0.0, next_factor))
    return sum(scaled(factor))


# ---- intervals of Beta variables and of products of independent ones

NUM_GRID_POINTS = 513
GRID_HALF_WIDTH = 8.0  # standard deviations
_GRID_G = np.linspace(-GRID_HALF_WIDTH, GRID_HALF_WIDTH, NUM_GRID_POINTS)
_GRID_G.setflags(write=False)


def quantiles(alpha_D: Array, beta_D: Array, probabilities: Sequence[float]) -> list[Array]:
    """For each probability, the values that the Beta(alpha, beta) stay below with it. Parameters > 0.

    Integrates the density of y = logit(x), x^alpha (1 - x)^beta, which is smooth for all parameters; its mode is
    log(alpha / beta), and its variance is less than the sum of 1/p + 1/p^2 over both parameters p. The error is below
    1e-3, and below 1e-2 for parameters under 0.5.
    """
    scale_D = np.sqrt(1 / alpha_D + 1 / alpha_D**2 + 1 / beta_D + 1 / beta_D**2)
    mode_D = np.log(alpha_D / beta_D)
    logit_DG = mode_D[:, None] + scale_D[:, None] * _GRID_G
    density_DG = alpha_D[:, None] * logit_DG - (alpha_D + beta_D)[:, None] * np.logaddexp(0.0, logit_DG)
    density_DG = np.exp(density_DG - density_DG.max(axis=1, keepdims=True))
    # Trapezoids: half of each interval's two ends.
    mass_DG = np.zeros_like(density_DG)
    np.cumsum(density_DG[:, 1:] + density_DG[:, :-1], axis=1, out=mass_DG[:, 1:])
    rows = [np.interp(np.multiply(probabilities, mass_G[-1]), mass_G, _GRID_G) for mass_G in mass_DG]
    position_PD = np.array(rows, float).reshape(len(alpha_D), len(probabilities)).T
    return list(1 / (1 + np.exp(-(mode_D + scale_D * position_PD))))


def product_interval(alpha_D: Array, beta_D: Array, level: float) -> tuple[Array, Array, Array]:
    """Mean, low and high end of x_1 x_2 ... x_d for each d, with independent x_i ~ Beta(alpha_i, beta_i).

    Mean and variance are exact; the interval of probability `level`, as much left out on either side, is that of the
    Beta with the same mean and variance. That is the product's own distribution when alpha_i + beta_i = alpha_{i-1},
    which is how trials thin out with depth when every step plays the same K.
    """
    total_D = alpha_D + beta_D
    mean_D = np.asarray(np.cumprod(alpha_D / total_D), np.float64)
    # 1 + variance / mean^2 of a product is the product of the factors' own, and beta / (alpha (total + 1)) is a Beta's.
    relative_variance_D = np.expm1(np.cumsum(np.log1p(beta_D / (alpha_D * (total_D + 1)))))
    matched_total_D = np.maximum((1 - mean_D) / (mean_D * relative_variance_D) - 1, 1e-3)
    ends = [(1 - level) / 2, (1 + level) / 2]
    low_D, high_D = quantiles(mean_D * matched_total_D, (1 - mean_D) * matched_total_D, ends)
    return mean_D, low_D, high_D


# ---- evidence


@dataclass(slots=True)
class Tally:
    """Steps weighted by age: in all, and trials and successes of each conditional acceptance a_i (index i - 1)."""

    steps: float
    reached_D: Array
    accepted_D: Array

    @classmethod
    def zeros(cls, max_draft_tokens: int) -> "Tally":
        return cls(0.0, np.zeros(max_draft_tokens), np.zeros(max_draft_tokens))

    @classmethod
    def of_counts(cls, counts: Counts, max_draft_tokens: int) -> "Tally":
        """Steps that weigh 1 each. Depths beyond K_max are left out: they tell nothing about the others."""
        tally = cls.zeros(max_draft_tokens)
        tally.steps = float(counts.num_steps)
        depth = min(max_draft_tokens, len(counts.drafted))
        tally.reached_D[:depth] = counts.reached[:depth]
        tally.accepted_D[:depth] = counts.accepted[:depth]
        return tally

    def __add__(self, other: "Tally") -> "Tally":
        """Both together, each step with the weight it has."""
        return Tally(self.steps + other.steps, self.reached_D + other.reached_D, self.accepted_D + other.accepted_D)

    @property
    def depth(self) -> float:
        """Mean K at which these steps were verified, 0 without any.

        A depth is reached where the draft before it was accepted and K goes that far: reached / accepted before is the
        share of steps whose K goes on. K is taken not to depend on what is accepted.
        """
        share = depth = 1.0 if self.reached_D.size and self.reached_D[0] > 0 else 0.0
        for reached, accepted_before in zip(self.reached_D[1:], self.accepted_D, strict=False):
            if accepted_before <= 0:
                break
            share *= min(1.0, float(reached / accepted_before))
            depth += share
        return depth

    def age_and_add(self, later: "Tally", half_life_steps: float) -> None:
        """Add later steps, and let each step weigh 2^(-steps since / half-life).

        The n later steps are taken as evenly mixed: each weighs their mean, (1 - 2^(-n/h)) / (n (1 - 2^(-1/h))), so
        that it does not matter how steps are cut into additions.
        """
        if later.steps <= 0:
            return
        kept = 0.5 ** (later.steps / half_life_steps)
        rate = math.log(2) / half_life_steps
        weight = math.expm1(-rate * later.steps) / (math.expm1(-rate) * later.steps)
        self.steps = kept * self.steps + weight * later.steps
        self.reached_D = kept * self.reached_D + weight * later.reached_D
        self.accepted_D = kept * self.accepted_D + weight * later.accepted_D

    def to_wire(self) -> list[Any]:
        return [self.steps, self.reached_D.tolist(), self.accepted_D.tolist()]

    @classmethod
    def from_wire(cls, value: Any, max_draft_tokens: int) -> "Tally":
        """Inverse of `to_wire`. Raises ValueError for anything else."""
        try:
            steps, reached, accepted = value
            tally = cls(float(steps), np.array(reached, np.float64), np.array(accepted, np.float64))
        except (TypeError, ValueError) as error:
            raise ValueError(f"[steps, reached, accepted] expected, not {value!r:.80}") from error
        if tally.reached_D.shape != (max_draft_tokens,) or tally.accepted_D.shape != (max_draft_tokens,):
            raise ValueError(f"reached and accepted must have {max_draft_tokens} depths: {value!r:.80}")
        # Sums of weighted steps are rounded.
        limit_D = np.concatenate([[tally.steps], tally.accepted_D])[:max_draft_tokens] * (1 + 1e-6)
        is_possible = (tally.accepted_D >= 0) & (tally.accepted_D <= tally.reached_D * (1 + 1e-6))
        # A comparison with NaN is false.
        if not (0 <= tally.steps < math.inf and (is_possible & (tally.reached_D <= limit_D)).all()):
            raise ValueError(f"no steps can have these counts: {value!r:.80}")
        return tally


@dataclass(slots=True)
class Evidence:
    """Tallies of one head: of each workload, the one with the latest steps last, and of the evicted workloads."""

    workloads: "OrderedDict[str, Tally]"
    evicted: Tally

    def total(self) -> Tally:
        return sum(self.workloads.values(), self.evicted)


@dataclass(frozen=True, slots=True)
class Survival:
    """S_1 .. S_K_max of a workload: posterior mean, and the ends of the central 90 % interval of each.

    Attributes:
        num_steps: independent steps of the workload itself, after forgetting and divided by the design effect; 0 where
            only the prior speaks.
        depth: mean K at which the workload's steps (without any: those of all traffic) were verified, 0 without any.
            S_i is the survival at that K: at another, drafts start elsewhere (`lengths`).
    """

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: float
    depth: float = 0.0

    def acceptance_length(self, k: int) -> float:
        """Expected AL at K = `k`. Raises ValueError outside 0..K_max."""
        if not 0 <= k <= len(self.mean):
            raise ValueError(f"k must be from 0 to {len(self.mean)}, not {k}")
        return lengths(self.mean, round(self.depth))[k]

    def gains(self) -> tuple[float, ...]:
        """What each further draft is expected to add to AL, by which to choose K."""
        return gains(self.mean, round(self.depth))


class AcceptanceBook:
    """The posteriors of all workloads, in one process; not thread-safe.

    Args:
        max_draft_tokens: K_max. Counts of depths beyond it are left out.
        half_life_steps: verification steps of a workload after which a step of it counts half.
        prior_steps: trials at each depth that the parent's mean is worth to a workload, and the curve to the parent.
        max_workloads: told apart; the one without steps for longest makes room, and lives on in the parent.
        prior: S_1 .. S_K_max before any step, default a published curve. Conditional acceptances are kept within
            0.01..0.99, so that data can move them.
        design_effect: steps worth one independent step, because steps of one request resemble each other. In
            benchmarks/results/2026-11-21-traces-smollm2-135m.npz the variance of a_i between requests is 3.6 times the
            binomial one (median over tasks and depths, quartiles 2.4 and 4.8).
    """

    def __init__(
        self,
        max_draft_tokens: int,
        *,
        half_life_steps: float = 4000,
        prior_steps: float = 40,
        max_workloads: int = 64,
        prior: Sequence[float] | None = None,
        design_effect: float = 4.0,
    ) -> None:
        self.max_draft_tokens, self._max_workloads = max_draft_tokens, max_workloads
        self._half_life_steps, self._prior_steps = half_life_steps, prior_steps
        self._design_effect = design_effect
        self._prior_D = _conditionals(prior or PUBLISHED_SURVIVAL, max_draft_tokens)
        self.head = ""
        self.heads: dict[str, str] = {}
        self._evidence: OrderedDict[str, Evidence] = OrderedDict()  # by head, the one with the latest steps last
        # By head and workload, until there is further evidence.
        self._posteriors: dict[tuple[str, str], tuple[Array, Array]] = {}
        self._survivals: dict[tuple[str, str], Survival] = {}

    def absorb(self, news: News) -> None:
        """Take in a whole round of reports, so that no replica's steps count as later than another's."""
        self.head, self.heads = news.head, dict(news.heads)
        for head, counts_by_workload in news.by_head.items():
            self._add(head, counts_by_workload)
        self._changed()

    def add(self, workload: str, counts: Counts) -> None:
        """Take further steps of a workload, drafted by its current head."""
        self._add(self.head_of(workload), {workload: counts})
        self._changed()

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

    def survival(self, workload: str) -> Survival:
        """What is believed of a workload; of an unknown one, what the parent says."""
        head = self.head_of(workload)
        if (head, workload) not in self._survivals:
            evidence = self._evidence_of(head)
            own = evidence.workloads.get(workload) or self._no_steps()
            depth = (own if own.steps > 0 else evidence.total()).depth
            self._survivals[head, workload] = self._described(*self._posterior(workload), own.steps, depth)
        return self._survivals[head, workload]

    def overall(self) -> Survival:
        """All workloads of the head that drafts by default, together."""
        total = self._evidence_of(self.head).total()
        return self._described(*self._updated(self._prior_D, total), total.steps, total.depth)

    def sample(self, workload: str, random: random.Random) -> tuple[float, ...]:
        """S_1 .. S_K_max drawn from the posterior, for Thompson sampling."""
        alpha_D, beta_D = self._posterior(workload)
        draws = (random.betavariate(a, b) for a, b in zip(alpha_D.tolist(), beta_D.tolist(), strict=True))
        return tuple(accumulate(draws, lambda survival, draw: survival * draw))

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as a value that JSON can hold. Settings are not in it."""
        return {
            "max_draft_tokens": self.max_draft_tokens,
            "head": self.head,
            "heads": dict(self.heads),
            "evidence": {
                head: {
                    "workloads": {name: tally.to_wire() for name, tally in evidence.workloads.items()},
                    "evicted": evidence.evicted.to_wire(),
                }
                for head, evidence in self._evidence.items()
            },
        }

    def restore(self, snapshot: Any) -> None:
        """Replace everything learned by a snapshot's.

        Raises:
            ValueError: naming what is wrong with the snapshot; the book is then as it was.
        """
        restored: OrderedDict[str, Evidence] = OrderedDict()
        try:
            if snapshot["max_draft_tokens"] != self.max_draft_tokens:
                raise ValueError(
                    f"it is of a head with K_max {snapshot['max_draft_tokens']}, but the one served drafts "
                    f"{self.max_draft_tokens}: start without it"
                )
            heads = {str(workload): str(head) for workload, head in snapshot["heads"].items()}
            for head, found in snapshot["evidence"].items():
                workloads: OrderedDict[str, Tally] = OrderedDict()
                for name, tally in found["workloads"].items():
                    workloads[str(name)] = Tally.from_wire(tally, self.max_draft_tokens)
                restored[str(head)] = Evidence(workloads, Tally.from_wire(found["evicted"], self.max_draft_tokens))
            self.head, self.heads, self._evidence = str(snapshot["head"]), heads, restored
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the snapshot of acceptance cannot be used: {error!r}") from error
        for evidence in restored.values():
            self._make_room(evidence)
        self._changed()

    def _changed(self) -> None:
        self._posteriors.clear()
        self._survivals.clear()

    def _add(self, head: str, counts_by_workload: Mapping[str, Counts]) -> None:
        """Add steps, and keep the busiest where more workloads are active at a time than are told apart."""
        active = {name: counts for name, counts in counts_by_workload.items() if counts.num_steps}
        if not active:
            return
        evidence = self._evidence[head] = self._evidence_of(head)
        self._evidence.move_to_end(head)
        busiest_first = sorted(active, key=lambda name: active[name].num_steps, reverse=True)
        for name in busiest_first[self._max_workloads :]:
            evidence.evicted.age_and_add(Tally.of_counts(active[name], self.max_draft_tokens), self._half_life_steps)
        for name in reversed(busiest_first[: self._max_workloads]):
            tally = evidence.workloads.setdefault(name, self._no_steps())
            tally.age_and_add(Tally.of_counts(active[name], self.max_draft_tokens), self._half_life_steps)
            evidence.workloads.move_to_end(name)
        self._make_room(evidence)
        while len(self._evidence) > MAX_HEADS:
            self._evidence.popitem(last=False)

    def _make_room(self, evidence: Evidence) -> None:
        while len(evidence.workloads) > self._max_workloads:
            evidence.evicted.age_and_add(evidence.workloads.popitem(last=False)[1], self._half_life_steps)

    def _no_steps(self) -> Tally:
        return Tally.zeros(self.max_draft_tokens)

    def _evidence_of(self, head: str) -> Evidence:
        return self._evidence.get(head) or Evidence(OrderedDict(), self._no_steps())

    def _posterior(self, workload: str) -> tuple[Array, Array]:
        """Beta parameters of a_1 .. a_K_max. The parent leaves the workload itself out, or it would count twice."""
        head = self.head_of(workload)
        if (head, workload) not in self._posteriors:
            evidence = self._evidence_of(head)
            own, total = evidence.workloads.get(workload) or self._no_steps(), evidence.total()
            reached_D = np.maximum(total.reached_D - own.reached_D, 0.0)
            accepted_D = np.clip(total.accepted_D - own.accepted_D, 0.0, reached_D)
            alpha_D, beta_D = self._updated(self._prior_D, Tally(0.0, reached_D, accepted_D))
            self._posteriors[head, workload] = self._updated(alpha_D / (alpha_D + beta_D), own)
        return self._posteriors[head, workload]

    def _updated(self, mean_D: Array, evidence: Tally) -> tuple[Array, Array]:
        """A prior of `prior_steps` trials around `mean_D` with the evidence, all of it over the design effect."""
        missed_D = np.maximum(evidence.reached_D - evidence.accepted_D, 0.0)
        alpha_D = self._prior_steps * mean_D + evidence.accepted_D
        beta_D = self._prior_steps * (1 - mean_D) + missed_D
        return alpha_D / self._design_effect, beta_D / self._design_effect

    def _described(self, alpha_D: Array, beta_D: Array, steps: float, depth: float) -> Survival:
        mean, low, high = (tuple(end.tolist()) for end in product_interval(alpha_D, beta_D, INTERVAL_LEVEL))
        return Survival(mean, low, high, steps / self._design_effect, depth)


def _conditionals(survival: Sequence[float], max_draft_tokens: int) -> Array:
    """a_1 .. a_K_max of S_1, S_2, ...; depths beyond repeat the last one."""
    survival_D = np.array(survival)
    conditional_D = np.clip(survival_D / np.concatenate([[1.0], survival_D[:-1]]), LEAST_CONDITIONAL, MOST_CONDITIONAL)
    return np.asarray(conditional_D[np.minimum(np.arange(max_draft_tokens), len(survival) - 1)], np.float64)
