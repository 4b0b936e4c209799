"""Which K each workload gets on a replica: the optimum over all workloads together.

Enters: what each workload asks for (`Demand`) and the step times. Leaves: a `Plan` with its reason. Pure: no memory,
no clock. Never knows: requests, posteriors, HTTP.

Formulas: `cluster.depth`.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from cluster.demand import Demand, Plan
from cluster.step_costs import CostCurves, StepCosts

MAX_PAIRED = 12
"""Workloads of which two may change together in one improvement: those with the most requests."""

Assignment = tuple[int, ...]
"""K of each demand, in order."""


def best_depths(
    demands: Sequence[Demand],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
    tiers: Collection[int] | None = None,
) -> Plan:
    """K of each workload that makes the most of a replica's time within the limits of TPOT.

    Where no K meets every limit, the plan has the least excess (the greatest TPOT / limit of any workload is as small
    as can be) and its reason says so. With at most one request in a step, workloads do not share steps, and each is
    decided alone.

    Args:
        demands: the workloads that share the replica, each name once.
        times: step times.
        context_tokens: mean context of the requests.
        tiers: the depths that may be chosen besides 0; None: every depth.

    Raises:
        SurvivalError, ValueError: a demand is not usable; the message names the workload.
    """
    if not demands:
        raise ValueError("best_depths needs at least one demand")
    names = [demand.workload for demand in demands]
    if len(set(names)) != len(names):
        raise ValueError(f"a workload stands twice in the demands: {sorted(names)}")
    curves = CostCurves.of(times)
    groups = sharing_groups(demands)
    if len(groups) == 1:
        sharing = Sharing(demands, curves, context_tokens, tiers)
        return sharing.plan(sharing.best())
    total = sum(demand.num_requests for demand in demands)
    alone = [(demand.num_requests / total, best_depths([demand], curves, context_tokens, tiers)) for demand in demands]
    return Plan(
        depths={name: k for _, plan in alone for name, k in plan.depths.items()},
        tokens_per_s=sum(share * plan.tokens_per_s for share, plan in alone),
        step_s=sum(share * plan.step_s for share, plan in alone),
        tpot_s={name: tpot_s for _, plan in alone for name, tpot_s in plan.tpot_s.items()},
        worth_per_s=sum(share * plan.worth_per_s for share, plan in alone),
        uniform_depth=None,
        meets_limits=all(plan.meets_limits for _, plan in alone),
        reason="; ".join(f"{name} alone: {plan.reason}" for name, (_, plan) in zip(names, alone, strict=True)),
    )


def sharing_groups(demands: Sequence[Demand]) -> list[Sequence[Demand]]:
    """Which workloads share steps: all of them, or none where there is at most one request in a step."""
    total = sum(demand.num_requests for demand in demands)
    return [demands] if total > 1.0 else [[demand] for demand in demands]


class Sharing:
    """Workloads that share the steps of one replica, and what an assignment of depths to them is worth.

    A number of requests that is no whole number is read as a mix of the two whole numbers around it; one below 1 as 1,
    because a step that runs has a request.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        curves: CostCurves,
        context_tokens: float = 0.0,
        tiers: Collection[int] | None = None,
    ) -> None:
        self._names = [demand.workload for demand in demands]
        self._graphs = curves.full_graph_depths
        self._levels = [_levels(demand, curves.max_draft_tokens, tiers) for demand in demands]
        self._places = np.arange(len(demands))
        self._lengths = np.ones((len(demands), curves.max_draft_tokens + 1))
        for row, demand in zip(self._lengths, demands, strict=True):
            row[1 : demand.deepest + 1] += np.cumsum(demand.survival[: demand.deepest])
        self._deepest = [demand.deepest for demand in demands]
        total = sum(demand.num_requests for demand in demands)
        self.num_requests = max(1.0, total)
        self._shares = np.array([demand.num_requests / total for demand in demands])
        weights = self._shares * self.num_requests * [demand.objective.weight for demand in demands]
        is_latency = np.array([demand.objective.kind == "latency" for demand in demands])
        self._throughput_weights = np.where(is_latency, 0.0, weights)
        self._latency_weights = np.where(is_latency, weights, 0.0)
        self._limits_s = np.array([demand.objective.max_tpot_s or math.inf for demand in demands])
        below = math.floor(self.num_requests)
        sizes = [(below, 1.0 - self.num_requests + below), (below + 1, self.num_requests - below)]
        self._curves = [(b, part, curves.curve(b, context_tokens)) for b, part in sizes if part > 1e-9]
        self._uniform_s = sum(part * np.array(curve.uniform) for _, part, curve in self._curves)

    def best(self) -> Assignment:
        """The best assignment found: the best of all thresholds and uniform depths, improved while a change of one
        workload, or of two by one level each, improves it."""
        found, rank = self._best_of(self._candidates())
        while True:
            neighbours = list(self._neighbours(found))
            if not neighbours:
                return found
            better, better_rank = self._best_of(neighbours)
            if better_rank >= rank:
                return found
            found, rank = better, better_rank

    def best_beside(self, fixed: Mapping[str, int], best: Assignment) -> Assignment:
        """The assignment that keeps the depths in `fixed` and gives each other workload what is best beside them,
        beginning from its depth in `best`."""
        depths = tuple(fixed.get(name, k) for name, k in zip(self._names, best, strict=True))
        for index, name in enumerate(self._names):
            if name not in fixed:
                depths, _ = self._best_of([_with(depths, index, k) for k in self._levels[index]])
        return depths

    def worth_per_s(self, depths: Assignment) -> float:
        """Worth of the tokens of a step over its seconds (`cluster.depth`, "Several workloads")."""
        return float(self._evaluate([depths])[1][0])

    def excess(self, depths: Assignment) -> float:
        """The greatest TPOT / limit of any workload, 1.0 where every limit is met."""
        return float(self._evaluate([depths])[0][0])

    def step_s(self, depths: Assignment) -> float:
        """Expected seconds of a step."""
        return float(self._step_s(np.array([depths]))[0])

    def with_survivals(self, survivals: Mapping[str, Sequence[float]]) -> "Sharing":
        """The same workloads with other survivals for those named, as long as theirs or longer."""
        other = copy.copy(self)
        other._lengths = self._lengths.copy()
        for name, survival in survivals.items():
            index = self._names.index(name)
            deepest = self._deepest[index]
            other._lengths[index, 1 : deepest + 1] = 1.0 + np.cumsum(survival[:deepest])
        return other

    def step_s_with_probe(self, depths: Assignment, index: int, depth: int) -> float:
        """Expected seconds of a step in which one request of the demand at `index` is verified to `depth` instead."""
        if self.num_requests <= 1.0:
            return float(self._uniform_s[depth])
        mean = float(self._shares @ depths) + (depth - depths[index]) / self.num_requests
        return float(self._ragged_s(np.array([min(mean, len(self._uniform_s) - 1)]))[0])

    def plan(self, depths: Assignment) -> Plan:
        """An assignment as a plan."""
        lengths = self._lengths[self._places, depths]
        step_s = self.step_s(depths)
        excess, worth_per_s = (float(column[0]) for column in self._evaluate([depths]))
        graph = depths[0] if len(set(depths)) == 1 and depths[0] in self._graphs else None
        rate = self.num_requests * float(self._shares @ lengths) / step_s
        tpots_s = step_s / lengths
        worst = int(np.argmax(tpots_s / self._limits_s))
        missed = (self._names[worst], float(tpots_s[worst]), float(self._limits_s[worst])) if excess > 1.0 else None
        return Plan(
            depths=dict(zip(self._names, depths, strict=True)),
            tokens_per_s=rate,
            step_s=step_s,
            tpot_s=dict(zip(self._names, tpots_s.tolist(), strict=True)),
            worth_per_s=worth_per_s,
            uniform_depth=graph,
            meets_limits=missed is None,
            reason=self._reason(depths, graph, rate, missed),
        )

    def _reason(
        self, depths: Assignment, graph: int | None, rate: float, missed: tuple[str, float, float] | None
    ) -> str:
        undrafted = self.num_requests / float(self._uniform_s[0])
        if not any(depths):
            reason = f"no draft pays at {self.num_requests:.3g} requests: {rate:.0f} tokens/s"
        elif graph is not None:
            reason = f"all at K={graph} on the full CUDA graph: {rate:.0f} tokens/s, {undrafted:.0f} without drafts"
        else:
            reason = f"each draft worth its time: {rate:.0f} tokens/s, {undrafted:.0f} without drafts"
        if missed is not None:
            name, tpot_s, limit_s = missed
            reason += f"; no K meets {limit_s * 1e3:.3g} ms per token of {name}, the fastest gives {tpot_s * 1e3:.3g}"
        elif np.isfinite(self._limits_s).any():
            reason += "; within the TPOT limits"
        return reason

    def _evaluate(self, assignments: Sequence[Assignment]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Excess over the limits, and worth per second, of each assignment."""
        depths = np.array(assignments)
        lengths = self._lengths[self._places, depths]
        step_s = self._step_s(depths)
        excess = (step_s[:, None] / lengths / self._limits_s).max(axis=1)
        return np.where(excess > 1.0 + 1e-9, excess, 1.0), self._worth(lengths) / step_s

    def _worth(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Worth of the tokens of a step, by AL of each workload."""
        worth = lengths @ self._throughput_weights
        if self._latency_weights.any():
            worth = worth + self._latency_weights.sum() ** 2 / (1.0 / lengths @ self._latency_weights)
        return np.asarray(worth)

    def _step_s(self, depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Expected seconds of a step of each assignment."""
        is_uniform = (depths == depths[:, :1]).all(axis=1)
        return np.where(is_uniform, self._uniform_s[depths[:, 0]], self._ragged_s(depths @ self._shares))

    def _ragged_s(self, mean_depths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of a step by drafts per request; between two whole numbers of drafts, those of the greater."""
        parts = (
            part * curve.ragged[np.ceil(num_requests * mean_depths - 1e-9).astype(np.int64)]
            for num_requests, part, curve in self._curves
        )
        return np.sum(list(parts), axis=0)

    def _best_of(self, assignments: Sequence[Assignment]) -> tuple[Assignment, tuple[float, float, float]]:
        """The best assignment and its rank, smaller where better: the limits first, then worth, then fewer drafts.
        Ranks are rounded, so that a difference in the last digits is no improvement."""
        excess, worth_per_s = self._evaluate(assignments)
        undrafted = self._evaluate([(0,) * len(self._names)])[1]
        num_drafts = np.array(assignments) @ self._shares
        ranks = np.stack([excess, -worth_per_s / undrafted, num_drafts]).round(10)
        best = int(np.lexsort(ranks[::-1])[0])
        excess_best, worth_best, drafts_best = ranks[:, best].tolist()
        return assignments[best], (excess_best, worth_best, drafts_best)

    def _candidates(self) -> list[Assignment]:
        """Every depth that all workloads can have, and every threshold on the worth of a draft: the path on which the
        draft that is worth most comes next."""
        common = set.intersection(*(set(levels) for levels in self._levels))
        found = [(k,) * len(self._names) for k in sorted(common)]
        depths = (0,) * len(self._names)
        while True:
            found.append(depths)
            deeper = [
                next((k for k in levels if k > now), None) for levels, now in zip(self._levels, depths, strict=True)
            ]
            steps = [_with(depths, index, k) for index, k in enumerate(deeper) if k is not None]
            if not steps:
                return found
            added = np.array(steps) @ self._shares - self._shares @ depths
            worth = self._worth(self._lengths[self._places, np.array(steps)])
            here = self._worth(self._lengths[self._places, np.array([depths])])
            depths = steps[int(np.argmax((worth - here) / added))]

    def _neighbours(self, depths: Assignment) -> Iterator[Assignment]:
        for index, levels in enumerate(self._levels):
            yield from (_with(depths, index, k) for k in levels if k != depths[index])
        busiest = np.argsort(-self._shares, kind="stable")[:MAX_PAIRED].tolist()
        for a, b in combinations(busiest, 2):
            for k_a, k_b in product(_beside(self._levels[a], depths[a]), _beside(self._levels[b], depths[b])):
                yield _with(_with(depths, a, k_a), b, k_b)


def _with(depths: Assignment, index: int, k: int) -> Assignment:
    return (*depths[:index], k, *depths[index + 1 :])


def _beside(levels: Sequence[int], k: int) -> list[int]:
    """The levels just below and just above one."""
    place = levels.index(k)
    return [*levels[max(0, place - 1) : place], *levels[place + 1 : place + 2]]


def _levels(demand: Demand, max_draft_tokens: int, tiers: Collection[int] | None) -> list[int]:
    """Depths that a workload may have, 0 among them, ascending."""
    if demand.deepest > max_draft_tokens:
        raise ValueError(
            f"max_depth of {demand.workload!r} is {demand.deepest}, above the engine's K_max {max_draft_tokens}"
        )
    for tier in tiers or ():
        if not 0 <= tier <= max_draft_tokens:
            raise ValueError(f"tiers has a {tier}: a tier is a depth, 0 to {max_draft_tokens}")
    return [k for k in range(demand.deepest + 1) if k == 0 or tiers is None or k in tiers]
