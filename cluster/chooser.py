"""K of each workload over time: the optimum, changed only when it is worth it, and a few requests that look deeper.

Enters: the posteriors of all workloads, the load of a replica, and the time. Leaves: a `Choice` for one request, with
its reason. State of one ingress replica, bounded by the workloads that have load or a posterior; no clock and no
generator of its own. Never knows: HTTP, Ray, the engine.

Formulas: `cluster.depth`.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, Protocol

from cluster.allocation import check_survival
from cluster.demand import THROUGHPUT, Demand, Objective
from cluster.planning import best_assignment, best_beside, sharing_groups
from cluster.sharing import Assignment, Sharing, check_tiers
from cluster.step_costs import CostCurves, StepCosts
from cluster.transfer import as_drawn

MIN_PROBABILITY = 0.8
"""A change must be an improvement in this share of draws from the posteriors."""

NUM_DRAWS = 20

MAX_DRAWN = 8
"""Workloads whose posteriors are drawn from for one change: those with the most requests."""

PATIENCE = 3.0
"""After this many dwells without a change, a third of `min_gain` suffices for one."""

NOTHING_MEASURED = "nothing measured yet, so K rests on the low end of the prior"

FREE_PROBE_FACTOR = 4.0
"""How much more often a request probes where that adds no time to a step."""

Known = Mapping[str, tuple[float, ...]]  # survivals by workload

MAX_PROBE_LOSS = 0.005
"""The share of a replica's tokens that probes may cost, at the most."""


class Posterior(Protocol):
    """What is needed of `cluster.acceptance.Survival`."""

    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def low(self) -> tuple[float, ...]: ...
    @property
    def num_steps(self) -> float: ...
    def gains(self) -> tuple[float, ...]: ...


class Book(Protocol):
    """What is needed of `cluster.acceptance.AcceptanceBook`."""

    def workloads(self) -> Sequence[str]: ...
    def survival(self, workload: str) -> Posterior: ...
    def overall(self) -> Posterior: ...
    def sample(self, workload: str, random: random.Random) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class Load:
    """Mean number of running requests by workload on one replica, and their mean context (0: unknown)."""

    num_requests: Mapping[str, float] = field(default_factory=dict)
    context_tokens: float = 0.0

    def __post_init__(self) -> None:
        for workload, num in self.num_requests.items():
            if not 0 <= num < math.inf:
                raise ValueError(f"num_requests of {workload!r} is {num}: a load is a finite number, 0 or more")


@dataclass(frozen=True)
class Choice:
    """K of one request.

    Attributes:
        k: drafts verified per step.
        source: `learned` from acceptance and load; `default`: nothing has been measured yet; `probe`: deeper than the
            K in force, to see what lies there.
        reason: why, in words.
        survival: S_1 .. S_max_depth on which the choice rests.
        expected_tpot_s: seconds per output token at this K under this load.
    """

    k: int
    source: Literal["learned", "default", "probe"]
    reason: str
    survival: tuple[float, ...]
    expected_tpot_s: float


@dataclass(frozen=True)
class _Standing:
    """What a workload has: its choice, and how often its requests probe."""

    choice: Choice
    probe: Choice
    probe_share: float


class DepthChooser:
    """Chooses K per workload for the requests of one ingress replica. Not thread-safe.

    All workloads are planned together, at most every `replan_s`. The plan replaces what is in force when it is better
    by `min_gain` (a third of it, once nothing changed for `PATIENCE` dwells), better in `MIN_PROBABILITY` of draws
    from the posteriors, and `min_dwell_s` have passed since the last change; or, after that time, when it meets TPOT
    limits that are missed. A workload without a K gets the best beside the others at once.

    While less than `min_steps` independent steps have been measured of any traffic, K rests on the low end of the
    prior's interval instead of its mean, and is at least 1, because at 0 nothing would be measured. A workload without
    steps of its own is judged like all traffic together.

    Args:
        times: step times of the engines.
        max_depth: the most drafts a request gets, 0..K_max.
        min_gain: relative gain in tokens per second for which K changes.
        min_dwell_s: seconds between changes.
        tiers: depths to choose from besides 0; None: all.
        probe_share: share of requests that are verified to `max_depth` where K is less. `FREE_PROBE_FACTOR` times as
            many where that adds no time; fewer where their cost would exceed `MAX_PROBE_LOSS`.
        objectives: by workload; others want throughput, without a limit, at weight 1.
        replan_s: seconds for which a plan is used.
        min_steps: see above.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        times: StepCosts | CostCurves,
        max_depth: int,
        *,
        min_gain: float = 0.03,
        min_dwell_s: float = 2.0,
        tiers: Collection[int] | None = None,
        probe_share: float = 0.01,
        objectives: Mapping[str, Objective] = MappingProxyType({}),
        replan_s: float = 0.5,
        min_steps: float = 50.0,
    ) -> None:
        if not 0 <= max_depth <= times.max_draft_tokens:
            raise ValueError(f"max_depth is {max_depth}, outside 0..{times.max_draft_tokens} (K_max)")
        check_tiers(tiers, times.max_draft_tokens)
        if not 0 <= probe_share <= 1 / FREE_PROBE_FACTOR:
            raise ValueError(f"probe_share is {probe_share}, outside 0..{1 / FREE_PROBE_FACTOR}")
        for name, value in {
            "min_gain": min_gain,
            "min_dwell_s": min_dwell_s,
            "replan_s": replan_s,
            "min_steps": min_steps,
        }.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: it is a finite number, 0 or more")
        self._curves = CostCurves.of(times)
        self._max_depth = max_depth
        self._min_gain, self._min_dwell_s, self._replan_s = min_gain, min_dwell_s, replan_s
        self._tiers = None if tiers is None else frozenset(tiers)
        self._probe_share = probe_share
        self._objectives = dict(objectives)
        self._min_steps = min_steps
        self._depths: dict[str, int] = {}
        self._standing: dict[str, _Standing] = {}
        self._planned_s = self._changed_s = -math.inf

    @property
    def depths(self) -> Mapping[str, int]:
        """K in force by workload, without probes."""
        return MappingProxyType(self._depths)

    def use(self, times: StepCosts | CostCurves) -> None:
        """Plan with other step times from the next plan on, e.g. corrected ones.

        Raises:
            ValueError: their K_max is not that of the times before.
        """
        if times.max_draft_tokens != self._curves.max_draft_tokens:
            raise ValueError(
                f"the step times are for K_max {times.max_draft_tokens}, those before for "
                f"{self._curves.max_draft_tokens}: make a new DepthChooser"
            )
        self._curves = CostCurves.of(times)

    def decide(self, workload: str, book: Book, load: Load, now_s: float, random: random.Random) -> Choice:
        """K of the next request of a workload.

        Args:
            workload: of the request.
            book: posteriors of all workloads.
            load: what runs on a replica; a mean over about a second, not an instant.
            now_s: monotonic. After a jump back the dwell starts anew; a jump forward ends it.
            random: for probes and draws from the posteriors.

        Raises:
            SurvivalError, ValueError: the posterior, the load or the time is not usable. What is in force stays.
        """
        if not math.isfinite(now_s):
            raise ValueError(f"now_s is {now_s}: the time is a finite number of seconds")
        if now_s < self._planned_s:
            self._planned_s, self._changed_s = -math.inf, min(self._changed_s, now_s)
        if workload not in self._standing or now_s - self._planned_s >= self._replan_s:
            self._replan(workload, book, load, now_s, random)
        standing = self._standing[workload]
        if standing.probe_share > 0 and random.random() < standing.probe_share:
            return standing.probe
        return standing.choice

    def _replan(self, workload: str, book: Book, load: Load, now_s: float, random: random.Random) -> None:
        numbers = {workload: 1.0} | {name: num for name, num in load.num_requests.items() if num > 0}
        posteriors = {name: book.survival(name) for name in numbers}
        is_cold = (
            any(posterior.num_steps < self._min_steps for posterior in posteriors.values())
            and book.overall().num_steps < self._min_steps
        )
        demands, believed = [], {}
        for name, num in numbers.items():
            # The ends of intervals are taken depth by depth, and may cross by a rounding.
            survival = tuple(accumulate(posteriors[name].low, min)) if is_cold else posteriors[name].mean
            believed[name] = survival[: self._max_depth]
            check_survival(believed[name], f"workload {name!r}")
            worth = believed[name] if is_cold else posteriors[name].gains()[: self._max_depth]
            demands.append(Demand(name, num, worth, self._objectives.get(name, THROUGHPUT), self._max_depth))
        depths, standing = {}, {}
        for group in sharing_groups(demands):
            sharing = Sharing(group, self._curves, load.context_tokens, self._tiers)
            assignment, kept = self._settled(sharing, group, believed, book, now_s, random)
            if is_cold:
                assignment = tuple(k or levels[:2][-1] for k, levels in zip(assignment, sharing.levels, strict=True))
            plan = sharing.plan(assignment, kept)
            for index, (demand, k) in enumerate(zip(group, assignment, strict=True)):
                reason = f"{NOTHING_MEASURED}; {plan.reason}" if is_cold else plan.reason
                name, tpot_s = demand.workload, plan.tpot_s[demand.workload]
                choice = Choice(k, "default" if is_cold else "learned", reason, believed[name], tpot_s)
                standing[name] = self._with_probe(choice, demand, sharing, assignment, index)
                depths[name] = k
        if not self._depths or any(self._depths.get(name, k) != k for name, k in depths.items()):
            self._changed_s = now_s
        known = {name: self._depths[name] for name in book.workloads() if name in self._depths}
        self._depths, self._standing, self._planned_s = known | depths, standing, now_s

    def _settled(
        self,
        sharing: Sharing,
        group: Sequence[Demand],
        believed: Known,
        book: Book,
        now_s: float,
        random: random.Random,
    ) -> tuple[Assignment, str]:
        """The assignment in force from here on, and why it is kept, where it is not the best one."""
        best = best_assignment(sharing)
        now = best_beside(sharing, self._depths, best)
        elapsed_s = now_s - self._changed_s
        if best == now:
            return now, ""
        gain = sharing.worth_per_s(best) / sharing.worth_per_s(now) - 1.0
        relief = sharing.excess(now) / sharing.excess(best) - 1.0
        if elapsed_s < self._min_dwell_s:
            return now, f"kept, for K changed {elapsed_s:.1f} s ago"
        needed = self._min_gain / (1.0 if elapsed_s < PATIENCE * self._min_dwell_s else 3.0)
        if relief > needed:
            return best, ""
        if relief < 0 or gain <= needed:
            return now, f"kept, for a change would gain only {max(gain, 0.0):.1%}"
        changed = [demand for demand, k, other in zip(group, best, now, strict=True) if k != other]
        changed = sorted(changed, key=lambda demand: -demand.num_requests)[:MAX_DRAWN]
        expected = {one.workload: one.survival for one in changed}
        num_better = 0
        for _ in range(NUM_DRAWS):
            draws = {name: as_drawn(book.sample(name, random), believed[name], one) for name, one in expected.items()}
            drawn = sharing.with_survivals(draws)
            num_better += drawn.worth_per_s(best) > drawn.worth_per_s(now)
        if num_better < MIN_PROBABILITY * NUM_DRAWS:
            return now, f"kept, for a gain of {gain:.1%} is not certain"
        return best, ""

    def _with_probe(
        self, choice: Choice, demand: Demand, sharing: Sharing, depths: Assignment, index: int
    ) -> _Standing:
        k, deepest = choice.k, self._max_depth
        if k >= deepest or self._probe_share == 0:
            return _Standing(choice, choice, 0.0)
        step_s = sharing.step_s_with_probe(depths, index, deepest)
        loss = step_s / sharing.step_s(depths) - 1.0
        share = FREE_PROBE_FACTOR * self._probe_share
        if loss > 1e-9:
            share = min(self._probe_share, MAX_PROBE_LOSS / (loss * sharing.num_requests))
        reason = f"probe: {share:.2g} of requests go to K={deepest} to see what lies beyond K={k}"
        tpot_s = step_s / (1.0 + sum(demand.survival))
        return _Standing(choice, Choice(deepest, "probe", reason, choice.survival, tpot_s), share)
