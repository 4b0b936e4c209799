"""The choice of K: which drafts a step verifies, and which K each workload gets.

Enters: survivals, load and step costs. Leaves: drafts of each request of one step (`allocate`, in the scheduler), K of
each workload of a replica (`best_depths`), and K of the next request, held steady over time (`DepthChooser`, in the
router). Never knows: HTTP, Ray, vLLM. No clock and no random generator of its own.

**Worth of a draft.** S_i is the survival of depth i, L(k) = 1 + S_1 + ... + S_k the expected tokens of a step at K = k
(policy-and-apis.md, D1). The sum holds at the K at which S was measured. To compare one K with another, what each
further draft adds to L (`cluster.acceptance.gains`) stands for S_i, also where single steps are trimmed: S_i itself
would verify too many, which costs up to 5 % of the tokens in `benchmarks.simulate_depths`.

**Throughput** (D2; goodput in SmartSpec, arXiv 2406.14066). With b_c requests of workload c at K = k_c in a step,

    R = sum_c b_c L_c(k_c) / t(b, n),   b = sum_c b_c,   n = sum_c b_c (1 + k_c)

In one step each draft is decided by itself: with m drafts the best ones are the m of greatest survival over all
requests, so one sort and one pass over m finds the optimum for any t (the global ranking of vLLM's adaptive
verification, PR 52228). Across workloads a depth is a lump of b_c tokens: up to `MAX_ENUMERATED` assignments are all
compared; beyond, the best K for all is improved by changes of one or two workloads.

**Several workloads.** Weights w_c count tokens. Workloads whose objective is `latency` enter by the harmonic mean of L,
the others by the sum:

    worth = sum_{c: throughput} w_c b_c L_c + W^2 / sum_{c: latency} (w_c b_c / L_c),   W = sum_{c: latency} w_c b_c

and worth / t is maximised: R with throughput alone, the least mean TPOT_c = t / L_c with latency alone. The sum of the
two is this project's own.

**Limits.** TPOT_c = t / L_c(k_c) <= limit_c comes before worth. Where nothing meets every limit, the greatest
TPOT_c / limit_c is made as small as it can be.

**Prompts.** What a prompt itself takes is left out (`cluster.step_time.StepCosts.curve`), because each request has one,
whatever its K.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, product
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cluster.acceptance import AcceptanceBook, as_drawn
from cluster.request import Drafting, Source
from cluster.step_time import StepCosts
from peagle.schema import Section

Floats = NDArray[np.float64]
Depths = NDArray[np.int64]
"""Assignments of K to workloads, one a row."""


class SurvivalError(ValueError):
    """A survival cannot be used: not a number, outside 0..1, growing with depth, or too short."""


def check_survival(survival: Sequence[float], owner: str, max_k: int = 0) -> None:
    """Raises SurvivalError naming the `owner` where `survival`, S_1, S_2, ..., is none, or shorter than `max_k`."""
    if len(survival) < max_k:
        raise SurvivalError(f"{owner} may get {max_k} drafts but its survival has {len(survival)} depths")
    for depth, value in enumerate(survival, start=1):
        if not 0.0 <= value <= 1.0:
            raise SurvivalError(f"survival of {owner} at depth {depth} is {value}: it must be a probability, 0 to 1")
    for depth, (before, value) in enumerate(pairwise(survival), start=2):
        if value > before:
            raise SurvivalError(
                f"survival of {owner} grows from {before} to {value} at depth {depth}: "
                "the first i drafts cannot all be accepted more often than the first i - 1"
            )


# ---- the drafts of one step


def allocate(
    survivals: Sequence[Sequence[float]],
    max_ks: Sequence[int],
    costs: StepCosts,
    context_tokens: float = 0.0,
    prompt_tokens: float = 0.0,
) -> tuple[list[int], float]:
    """Drafts of each request that give the most tokens per second in the next step, exact for any step times; and how
    many tokens per second.

    The drafter's pass counts as paid. At a tie the step with fewer drafts wins, and the request that comes first.

    Args:
        survivals: S_1, S_2, ... of each request, at least as many as its `max_ks`, the most drafts that it gets.
        context_tokens: mean context of the requests.
        prompt_tokens: of other requests' prompts that run in the same step.

    Raises:
        SurvivalError: a survival is not usable; the message names the request.
        ValueError: lengths differ.
    """
    if not survivals:
        return [], 0.0
    groups: dict[tuple[tuple[float, ...], int], list[int]] = {}
    for index, key in enumerate(zip(map(tuple, survivals), max_ks, strict=True)):
        groups.setdefault(key, []).append(index)
    values: list[float] = []
    owners: list[list[int]] = []
    for (survival, max_k), members in groups.items():
        check_survival(survival, f"request {members[0]}", max_k)
        values += survival[:max_k]
        owners += [members] * max_k
    # Stable: a request's own drafts keep their order at equal worth.
    order = np.argsort(-np.array(values), kind="stable")
    counts = np.array([len(members) for members in owners], np.int64)
    added = np.repeat(np.array(values)[order], counts[order])
    num_tokens = len(survivals) + np.concatenate([[0.0], np.cumsum(added)])
    seconds = costs.curve(len(survivals), len(added), context_tokens, prompt_tokens, is_drafted=True)
    rates = num_tokens / seconds
    num_left = int(rates.argmax())
    rate, depths = float(rates[num_left]), [0] * len(survivals)
    for slot in order.tolist():
        for index in owners[slot][:num_left]:
            depths[index] += 1
        num_left -= min(num_left, len(owners[slot]))
        if not num_left:
            break
    return depths, rate


WORTH_LEVELS = (0.02, *(round(0.05 * number, 2) for number in range(1, 20)), 0.98)
"""At which the drafts of a batch are counted whose worth is known one by one (`best_total`)."""


def best_total(counts: Sequence[float], num_requests: int, max_total: int, seconds: Floats) -> tuple[int, float]:
    """How many drafts of a batch give the most tokens per second in the next step, where the best are verified; and how
    many tokens per second.

    Args:
        counts: of the batch's drafts, how many are worth each of `WORTH_LEVELS` or more. A draft's worth is the chance
            that it and all before it are accepted.
        max_total: the most drafts.
        seconds: of a step with 0 .. `max_total` drafts.
    """
    levels = (*WORTH_LEVELS, 1.0)
    known = np.minimum([0.0, *reversed(counts), max_total], max_total)
    worth = [(low + high) / 2 for low, high in zip((0.0, *levels), levels, strict=False)]
    gained = np.concatenate([[0.0], np.cumsum(np.diff(known) * worth[::-1])])
    rates = (num_requests + np.interp(np.arange(max_total + 1), known, gained)) / seconds
    best = int(rates.argmax())
    return best, float(rates[best])


# ---- K of each workload on a replica


class Objective(Section):
    """What a workload wants. For one workload alone both kinds are the same choice; among several, `latency` counts a
    workload that accepts little as much as one that accepts much."""

    kind: Literal["throughput", "latency"] = Field(
        default="throughput", description="Most tokens/s of all requests together, or least mean TPOT."
    )
    max_tpot_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Limit of the mean time per output token."
    )
    weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Weight of this workload's tokens relative to others'."
    )


THROUGHPUT = Objective()


@dataclass(frozen=True)
class Demand:
    """One workload on one replica.

    Attributes:
        num_requests: mean number of its requests in a step, above 0; a fraction where traffic is thin.
        survival: S_1, S_2, ... at least `max_k` long.
        min_k, max_k: the fewest and the most drafts that its requests may get; equal where K is pinned.
    """

    workload: str
    num_requests: float
    survival: Sequence[float]
    max_k: int
    objective: Objective = THROUGHPUT
    min_k: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.num_requests < math.inf:
            raise ValueError(f"num_requests of {self.workload!r} is {self.num_requests}: it is a positive number")
        if not 0 <= self.min_k <= self.max_k:
            raise ValueError(f"K of {self.workload!r} is to be from {self.min_k} to {self.max_k}, which cannot be")
        check_survival(self.survival, f"workload {self.workload!r}", self.max_k)

    def pinned(self, k: int) -> "Demand":
        return replace(self, min_k=k, max_k=k)


@dataclass(frozen=True)
class Plan:
    """K of each workload, and what is expected of it.

    Attributes:
        depths: K by workload.
        tokens_per_s: output tokens per second of the replica.
        tpot_s: time per output token by workload: step_s / L(K).
        meets_limits: every `max_tpot_ms` is met.
    """

    depths: Mapping[str, int]
    tokens_per_s: float
    step_s: float
    tpot_s: Mapping[str, float]
    meets_limits: bool
    reason: str = field(compare=False)


MAX_ENUMERATED = 4096
"""Assignments up to which all are compared; beyond, there is a search. 4 workloads at K_max = 7 have 4096."""

MAX_PAIRED = 12
"""Workloads of which two may change together in one improvement: those with the most requests."""

MIN_SHARED = 1.5
"""Mean requests a step from which workloads count as sharing steps. A mean of readings of 1 may lie a little above 1,
and one request at a time must not be planned as two."""


def best_depths(demands: Sequence[Demand], costs: StepCosts, context_tokens: float = 0.0) -> Plan:
    """K of each workload that makes the most of a replica's time within the limits of TPOT; at a tie, fewer drafts.

    With fewer than `MIN_SHARED` requests in a step, workloads do not share steps, and each is decided alone.

    Raises:
        ValueError: there is no demand, or a workload stands twice.
    """
    names = [demand.workload for demand in demands]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"best_depths needs at least one demand, and each workload once, not {names}")
    groups = [SharedSteps(group, costs, context_tokens) for group in sharing_groups(demands)]
    plans = [steps.plan(best_assignment(steps)) for steps in groups]
    if len(plans) == 1:
        return plans[0]
    total = sum(demand.num_requests for demand in demands)
    alone = [(demand.num_requests / total, plan) for demand, plan in zip(demands, plans, strict=True)]
    return Plan(
        depths={name: k for plan in plans for name, k in plan.depths.items()},
        tokens_per_s=sum(share * plan.tokens_per_s for share, plan in alone),
        step_s=sum(share * plan.step_s for share, plan in alone),
        tpot_s={name: tpot_s for plan in plans for name, tpot_s in plan.tpot_s.items()},
        meets_limits=all(plan.meets_limits for plan in plans),
        reason="; ".join(f"{name} alone: {plan.reason}" for name, plan in zip(names, plans, strict=True)),
    )


def sharing_groups(demands: Sequence[Demand]) -> list[Sequence[Demand]]:
    """Workloads that share steps: all in one group, or each alone where most steps have a single request."""
    total = sum(demand.num_requests for demand in demands)
    return [demands] if total >= MIN_SHARED else [[demand] for demand in demands]


class SharedSteps:
    """Workloads that share the steps of one replica, and what an assignment of K to them is worth.

    A fractional number of requests is a mix of the two whole numbers around it; below 1 it counts as 1, because a step
    that runs has a request. `shares`: of each workload in the requests.
    """

    def __init__(self, demands: Sequence[Demand], costs: StepCosts, context_tokens: float = 0.0) -> None:
        self.demands = demands
        total = sum(demand.num_requests for demand in demands)
        self.num_requests = max(1.0, total)
        self.shares: Floats = np.array([demand.num_requests / total for demand in demands])
        self._lengths = np.ones((len(demands), 1 + max(demand.max_k for demand in demands)))
        for row, demand in zip(self._lengths, demands, strict=True):
            row[1 : demand.max_k + 1] += np.cumsum(demand.survival[: demand.max_k])
        weights = self.shares * self.num_requests * [demand.objective.weight for demand in demands]
        is_latency = np.array([demand.objective.kind == "latency" for demand in demands])
        self._throughput_weights = np.where(is_latency, 0.0, weights)
        self._latency_weights = np.where(is_latency, weights, 0.0)
        self._limits_s: Floats = np.array([demand.objective.max_tpot_ms or math.inf for demand in demands]) / 1e3
        below, deepest = math.floor(self.num_requests), self._lengths.shape[1] - 1
        sizes = ((below, 1.0 - self.num_requests + below), (below + 1, self.num_requests - below))
        self._curves = [(n, part, costs.curve(n, n * deepest, context_tokens)) for n, part in sizes if part > 1e-9]

    def with_survivals(self, survivals: Mapping[str, Sequence[float]]) -> "SharedSteps":
        """The same with other survivals for the workloads named."""
        other = copy.copy(self)
        other._lengths = self._lengths.copy()
        for row, demand in zip(other._lengths, self.demands, strict=True):
            if (survival := survivals.get(demand.workload)) is not None:
                row[1 : demand.max_k + 1] = 1.0 + np.cumsum(survival[: demand.max_k])
        return other

    def step_s(self, depths: Depths) -> Floats:
        """Expected seconds of a step of each assignment; between two whole numbers of drafts, those of the greater."""
        return self._seconds(depths @ self.shares)

    def step_s_with_probe(self, depths: Sequence[int], index: int, k: int) -> float:
        """Expected seconds of a step in which one request of the demand at `index` is verified to `k` instead."""
        mean = float(self.shares @ depths) + (k - depths[index]) / self.num_requests
        return float(self._seconds(np.array([mean]))[0])

    def _seconds(self, mean_depths: Floats) -> Floats:
        seconds = np.zeros(len(mean_depths))
        for num_requests, part, curve in self._curves:
            num_drafts = np.ceil(num_requests * mean_depths - 1e-9).astype(np.int64)
            seconds += part * curve[np.minimum(num_drafts, len(curve) - 1)]
        return seconds

    def lengths(self, depths: Depths) -> Floats:
        """L of each workload, by assignment."""
        lengths: Floats = self._lengths[np.arange(len(self.demands)), depths]
        return lengths

    def worth(self, depths: Depths) -> Floats:
        """Of the tokens of a step, by assignment."""
        lengths = self.lengths(depths)
        worth: Floats = lengths @ self._throughput_weights
        if (latency_weight := self._latency_weights.sum()) > 0:
            worth = worth + latency_weight**2 / (1.0 / lengths @ self._latency_weights)
        return worth

    def score(self, depths: Sequence[int]) -> tuple[float, float]:
        """The greatest TPOT / limit of any workload (1.0 where every limit is met), and worth per second."""
        excess, worth_per_s = self._scores(np.array([depths]))
        return float(excess[0]), float(worth_per_s[0])

    def _scores(self, depths: Depths) -> tuple[Floats, Floats]:
        step_s = self.step_s(depths)
        excess = (step_s[:, None] / self.lengths(depths) / self._limits_s).max(axis=1)
        return np.where(excess > 1.0 + 1e-9, excess, 1.0), self.worth(depths) / step_s

    def best_of(self, depths: Depths) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The best of some assignments, and its rank (less is better): excess over limits, -worth per second, drafts.
        Rounded, so that differences in the last digits do not decide."""
        excess, worth_per_s = self._scores(depths)
        scale = self._scores(np.zeros((1, len(self.demands)), np.int64))[1]
        ranks = np.column_stack([excess, -worth_per_s / scale, depths @ self.shares]).round(10)
        best = int(np.lexsort(ranks.T[::-1])[0])
        return tuple(depths[best].tolist()), tuple(ranks[best].tolist())

    def plan(self, depths: Sequence[int], kept: str = "") -> Plan:
        """The plan of an assignment. `kept`: why it stays although another one is better, in words."""
        row = np.array([depths])
        lengths, step_s = self.lengths(row)[0], float(self.step_s(row)[0])
        tpots_s = step_s / lengths
        excess, _ = self.score(depths)
        rate = self.num_requests * float(self.shares @ lengths) / step_s
        undrafted = self.num_requests / float(self.step_s(0 * row)[0])
        how = kept or ("each draft worth its time" if any(depths) else "no draft pays")
        reason = f"{how} at {self.num_requests:.3g} request{'s' * (self.num_requests != 1)}: {rate:.0f} tokens/s"
        reason += f", {undrafted:.0f} without drafts" if any(depths) else ""
        if excess > 1.0:
            worst = int(np.argmax(tpots_s / self._limits_s))
            reason += (
                f"; no K meets {1e3 * self._limits_s[worst]:.3g} ms per token of {self.demands[worst].workload}, "
                f"the fastest gives {1e3 * tpots_s[worst]:.3g} ms"
            )
        elif np.isfinite(self._limits_s).any():
            reason += "; within the TPOT limits"
        names = [demand.workload for demand in self.demands]
        return Plan(
            depths=dict(zip(names, depths, strict=True)),
            tokens_per_s=rate,
            step_s=step_s,
            tpot_s=dict(zip(names, tpots_s.tolist(), strict=True)),
            meets_limits=excess == 1.0,
            reason=reason,
        )


def best_assignment(steps: SharedSteps, max_enumerated: int = MAX_ENUMERATED) -> tuple[int, ...]:
    """The best K of each workload: of all assignments where there are at most `max_enumerated`, else of a search."""
    ranges = [range(demand.min_k, demand.max_k + 1) for demand in steps.demands]
    if math.prod(map(len, ranges)) <= max_enumerated:
        return steps.best_of(np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(ranges)))[0]
    lows, highs = np.array([(ks[0], ks[-1]) for ks in ranges]).T
    uniform = np.clip(np.arange(highs.max() + 1)[:, None], lows, highs)
    # Several starts, because with limits and staircases an improvement may end where only larger changes lead on.
    starts = (uniform, lows[None], highs[None])
    return min((_improved(steps, *steps.best_of(start), ranges) for start in starts), key=lambda found: found[1])[0]


def _improved(
    steps: SharedSteps, depths: tuple[int, ...], rank: tuple[float, ...], ranges: Sequence[range]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """An assignment and its rank, after changes of one or two workloads until none improves it."""
    while len(neighbours := _neighbours(steps, depths, ranges)):
        better, better_rank = steps.best_of(neighbours)
        if better_rank >= rank:
            break
        depths, rank = better, better_rank
    return depths, rank


def _neighbours(steps: SharedSteps, depths: tuple[int, ...], ranges: Sequence[range]) -> Depths:
    """Assignments that differ in one workload, or in two by one draft each."""
    changes = [{index: k} for index, ks in enumerate(ranges) for k in ks if k != depths[index]]
    busiest = np.argsort(-steps.shares, kind="stable")[:MAX_PAIRED].tolist()
    for a, b in combinations(busiest, 2):
        for k_a, k_b in product((depths[a] - 1, depths[a] + 1), (depths[b] - 1, depths[b] + 1)):
            if k_a in ranges[a] and k_b in ranges[b]:
                changes.append({a: k_a, b: k_b})
    found = np.tile(np.array(depths), (len(changes), 1))
    for row, change in zip(found, changes, strict=True):
        for index, k in change.items():
            row[index] = k
    return found


# ---- K over time: the optimum, changed only when it is worth it, and a few requests that look deeper

REPLAN_S = 0.5  # a plan is used for so long
MIN_DWELL_S = 2.0  # between changes of K
MIN_STEPS = 50.0
MIN_GAIN = 0.03
"""Relative gain in tokens per second for which K changes."""

MIN_PROBABILITY = 0.8
"""A change must be an improvement in this share of draws from the posteriors."""

NUM_DRAWS = 20
MAX_DRAWN = 8
"""Workloads whose posteriors are drawn from for one change: those with the most requests."""

PATIENCE = 3.0
"""After this many dwells without a change, a third of `min_gain` suffices for one."""

NOTHING_MEASURED = "nothing measured yet, so K rests on the low end of the prior"

MAX_PROBE_LOSS = 0.005
"""The share of a replica's tokens that probes may cost, at the most."""


@dataclass(frozen=True)
class Choice:
    """What the requests of a workload get: `drafting`, or where its K is 0, `probe` in `probe_share` of them."""

    drafting: Drafting
    probe_share: float = 0.0
    probe: Drafting | None = None

    def draw(self, random: random.Random) -> Drafting:
        if self.probe is not None and random.random() < self.probe_share:
            return self.probe
        return self.drafting

    def of(self, workload: str) -> "Choice":
        """The same for another workload."""
        probe = None if self.probe is None else replace(self.probe, workload=workload)
        return Choice(replace(self.drafting, workload=workload), self.probe_share, probe)


class DepthChooser:
    """Chooses K per workload. Not thread-safe.

    All workloads are planned together, at most every `REPLAN_S`. The plan replaces what is in force when it is better
    by `MIN_GAIN` (a third of it, once nothing changed for `PATIENCE` dwells), better in `MIN_PROBABILITY` of draws
    from the posteriors, and `MIN_DWELL_S` have passed since the last change; or, after that time, when it meets TPOT
    limits that are missed. A workload without a K gets the best beside the others at once.

    While less than `MIN_STEPS` independent steps have been measured of any traffic, K rests on the low end of the
    prior's interval instead of its mean, and is at least 1, because at 0 nothing would be measured. A workload without
    steps of its own is judged like all traffic together.

    Args:
        costs: of the engines; may be replaced at any time.
        max_k: the most drafts a request gets.
        probe_share: share of requests that are verified to `max_k` where K is 0; fewer where their cost would exceed
            `MAX_PROBE_LOSS`. Of the others the scheduler verifies all drafts of a step in many.
        objectives: by workload; others want throughput, without a limit, at weight 1.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_k: int,
        *,
        probe_share: float = 0.01,
        objectives: Mapping[str, Objective] = MappingProxyType({}),
    ) -> None:
        self.costs = costs
        self._max_k, self._probe_share = max_k, probe_share
        self._objectives = dict(objectives)
        self.depths: dict[str, int] = {}
        """K in force by workload, without probes."""
        self._choices: dict[str, Choice] = {}
        self._planned: Demand | None = None
        self._planned_s = self._changed_s = -math.inf

    def choices(
        self,
        workloads: Set[str],
        book: AcceptanceBook,
        num_requests: Mapping[str, float],
        context_tokens: float,
        now_s: float,
        random: random.Random,
    ) -> Mapping[str, Choice]:
        """The choices of all workloads that are planned, and of `workloads`. A choice is `learned`, or `default` while
        nothing is measured, and its survival is what each draft is expected to add to AL (`cluster.acceptance.gains`).
        Its probes carry no survival, because they must be verified to their end.

        Args:
            book: posteriors of all workloads.
            num_requests: running on a replica, by workload; a mean over about a second, not an instant.
            context_tokens: their mean context, 0 where unknown.
            now_s: monotonic. After a jump back the dwell starts anew; a jump forward ends it.
            random: for draws from the posteriors.

        Raises:
            SurvivalError, ValueError: the posterior, the load or the time is not usable. What is in force stays.
        """
        if not math.isfinite(now_s):
            raise ValueError(f"now_s is {now_s}: the time is a finite number of seconds")
        if now_s < self._planned_s:
            self._planned_s, self._changed_s = -math.inf, min(self._changed_s, now_s)
        if not workloads <= self._choices.keys() or now_s - self._planned_s >= REPLAN_S:
            others = dict.fromkeys(workloads - num_requests.keys(), 1.0)
            self._replan({**others, **num_requests}, context_tokens, book, now_s, random)
        return self._choices

    def choice_beside(self, workload: str, book: AcceptanceBook, context_tokens: float) -> Choice:
        """What one request of a workload gets that sends hardly any, beside the requests that are planned, at their K.

        In the plan a hundredth of a request would count with whole drafts.

        Raises:
            SurvivalError: the posterior is not usable.
        """
        survival = book.survival(workload).gains()[: self._max_k]
        demand = Demand(workload, 1.0, survival, self._max_k, self._objectives.get(workload, THROUGHPUT))
        is_shared = self._planned is not None and 1.0 + self._planned.num_requests >= MIN_SHARED
        steps = SharedSteps(
            [demand, self._planned] if self._planned and is_shared else [demand], self.costs, context_tokens
        )
        depths = best_assignment(steps)
        plan = steps.plan(depths)
        decision = Drafting(workload, depths[0], "learned", plan.reason, tuple(survival), plan.tpot_s[workload])
        return self._with_probe(decision, steps, depths, 0) if 0 == decision.k < self._max_k else Choice(decision)

    def _replan(
        self,
        load: Mapping[str, float],
        context_tokens: float,
        book: AcceptanceBook,
        now_s: float,
        random: random.Random,
    ) -> None:
        numbers = {name: num for name, num in load.items() if num}
        posteriors = {name: book.survival(name) for name in numbers}
        is_cold = (
            any(posterior.num_steps < MIN_STEPS for posterior in posteriors.values())
            and book.overall().num_steps < MIN_STEPS
        )
        demands, believed = [], {}
        for name, num in numbers.items():
            # The ends of intervals are taken depth by depth, and may cross by a rounding.
            survival = tuple(accumulate(posteriors[name].low, min)) if is_cold else posteriors[name].mean
            believed[name] = survival[: self._max_k]
            check_survival(believed[name], f"workload {name!r}", self._max_k)
            worth = believed[name] if is_cold else posteriors[name].gains()[: self._max_k]
            objective = self._objectives.get(name, THROUGHPUT)
            demands.append(
                Demand(name, num, worth, self._max_k, objective, min_k=min(1, self._max_k) if is_cold else 0)
            )
        choices = {}
        for group in sharing_groups(demands):
            steps = SharedSteps(group, self.costs, context_tokens)
            assignment, kept = self._settled(steps, context_tokens, believed, book, now_s, random)
            plan = steps.plan(assignment, kept)
            reason = f"{NOTHING_MEASURED}; {plan.reason}" if is_cold else plan.reason
            for index, demand in enumerate(group):
                name = demand.workload
                source: Source = "default" if is_cold else "learned"
                decision = Drafting(name, assignment[index], source, reason, tuple(demand.survival), plan.tpot_s[name])
                choices[name] = Choice(decision)
                if 0 == decision.k < self._max_k and self._probe_share > 0:
                    choices[name] = self._with_probe(decision, steps, assignment, index)
        depths = {name: choice.drafting.k for name, choice in choices.items()}
        total = sum(numbers.values())
        mean_k = round(sum(num * depths[name] for name, num in numbers.items()) / total)
        added = sum(demand.num_requests * sum(demand.survival[: depths[demand.workload]]) for demand in demands) / total
        self._planned = Demand("", total, (min(1.0, added / max(1, mean_k)),) * mean_k, mean_k, min_k=mean_k)
        if not self.depths or any(self.depths.get(name, k) != k for name, k in depths.items()):
            self._changed_s = now_s
        known = {name: self.depths[name] for name in book.workloads() if name in self.depths}
        self.depths, self._choices, self._planned_s = known | depths, choices, now_s

    def _settled(
        self,
        steps: SharedSteps,
        context_tokens: float,
        believed: Mapping[str, Sequence[float]],
        book: AcceptanceBook,
        now_s: float,
        random: random.Random,
    ) -> tuple[tuple[int, ...], str]:
        """The assignment in force from now on, and in words why it is kept, where it is not the best one."""
        best = best_assignment(steps)
        beside = [
            demand.pinned(max(demand.min_k, self.depths[demand.workload])) if demand.workload in self.depths else demand
            for demand in steps.demands
        ]
        now = best_assignment(SharedSteps(beside, self.costs, context_tokens))
        if best == now:
            return now, ""
        elapsed_s = now_s - self._changed_s
        if elapsed_s < MIN_DWELL_S:
            return now, f"kept, for K changed {elapsed_s:.1f} s ago"
        (excess_best, worth_best), (excess_now, worth_now) = steps.score(best), steps.score(now)
        gain, relief = worth_best / worth_now - 1.0, excess_now / excess_best - 1.0
        needed = MIN_GAIN / (1.0 if elapsed_s < PATIENCE * MIN_DWELL_S else 3.0)
        if relief > needed:
            return best, ""
        if relief < 0 or gain <= needed:
            return now, f"kept, for a change would gain only {max(gain, 0.0):.1%}"
        changed = [demand for demand, k, other in zip(steps.demands, best, now, strict=True) if k != other]
        changed = sorted(changed, key=lambda demand: -demand.num_requests)[:MAX_DRAWN]
        num_better = 0
        for _ in range(NUM_DRAWS):
            draws = {
                demand.workload: as_drawn(
                    book.sample(demand.workload, random), believed[demand.workload], demand.survival
                )
                for demand in changed
            }
            drawn = steps.with_survivals(draws)
            num_better += drawn.score(best)[1] > drawn.score(now)[1]
        if num_better < MIN_PROBABILITY * NUM_DRAWS:
            return now, f"kept, for a gain of {gain:.1%} is not certain"
        return best, ""

    def _with_probe(self, decision: Drafting, steps: SharedSteps, depths: tuple[int, ...], index: int) -> Choice:
        """A decision for K = 0, and the share of the workload's requests that probe."""
        step_s = steps.step_s_with_probe(depths, index, self._max_k)
        loss = step_s / float(steps.step_s(np.array([depths]))[0]) - 1.0
        share = min(self._probe_share, MAX_PROBE_LOSS / max(1e-9, loss * steps.num_requests))
        reason = f"probe: {share:.2g} of requests go to K={self._max_k} to see what is accepted"
        tpot_s = step_s / (1.0 + sum(steps.demands[index].survival))
        probe = Drafting(decision.workload, self._max_k, "probe", reason, expected_tpot_s=tpot_s)
        return Choice(decision, share, probe)
