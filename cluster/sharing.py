"""What an assignment of K to workloads that share a replica's steps is worth, and how long a step then takes.

Enters: demands and cost curves. Leaves: worth, limits and times of assignments, many at a time. Searches nothing
(`cluster.planning` does). Formulas: `cluster.depth`.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.demand import Demand, Plan
from cluster.step_costs import CostCurves

Assignment = tuple[int, ...]
"""K of each demand, in order."""

Depths = NDArray[np.int64]
"""Assignments, one a row."""

Floats = NDArray[np.float64]


class Sharing:
    """Workloads that share the steps of one replica.

    A number of requests that is no whole number is read as a mix of the two whole numbers around it; one below 1 as 1,
    because a step that runs has a request.

    Attributes:
        names: of the workloads, in the order of the demands.
        levels: the depths that each may have, 0 among them, ascending.
        shares: of each workload in the requests.
        num_requests: in a step, at least 1.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        curves: CostCurves,
        context_tokens: float = 0.0,
        tiers: Collection[int] | None = None,
    ) -> None:
        self.names = [demand.workload for demand in demands]
        self.levels = [_levels(demand, curves.max_draft_tokens, tiers) for demand in demands]
        total = sum(demand.num_requests for demand in demands)
        self.num_requests = max(1.0, total)
        self.shares: Floats = np.array([demand.num_requests / total for demand in demands])
        self._places = np.arange(len(demands))
        self._deepest = [demand.deepest for demand in demands]
        self._lengths: Floats = np.ones((len(demands), curves.max_draft_tokens + 1))
        for row, demand in zip(self._lengths, demands, strict=True):
            row[1 : demand.deepest + 1] += np.cumsum(demand.survival[: demand.deepest])
        weights = self.shares * self.num_requests * [demand.objective.weight for demand in demands]
        is_latency = np.array([demand.objective.kind == "latency" for demand in demands])
        self._throughput_weights = np.where(is_latency, 0.0, weights)
        self._latency_weights = np.where(is_latency, weights, 0.0)
        self._latency_weight = float(self._latency_weights.sum())
        self._limits_s: Floats = np.array([demand.objective.max_tpot_s or math.inf for demand in demands])
        below = math.floor(self.num_requests)
        sizes = [(below, 1.0 - self.num_requests + below), (below + 1, self.num_requests - below)]
        self._curves = [(b, part, curves.curve(b, context_tokens)) for b, part in sizes if part > 1e-9]
        self._uniform_s: Floats = np.sum([part * np.array(curve.uniform) for _, part, curve in self._curves], axis=0)

    def with_survivals(self, survivals: Mapping[str, Sequence[float]]) -> "Sharing":
        """The same workloads with other survivals for those named, as long as theirs or longer."""
        other = copy.copy(self)
        other._lengths = self._lengths.copy()
        for name, survival in survivals.items():
            index = self.names.index(name)
            deepest = self._deepest[index]
            other._lengths[index, 1 : deepest + 1] = 1.0 + np.cumsum(survival[:deepest])
        return other

    def ranks(self, depths: Depths) -> Floats:
        """Three columns for each assignment, the first that differs decides and smaller is better: excess over the
        limits, worth per second (negated, against that without drafts), drafts per request. Rounded, so that a
        difference in the last digits is none."""
        undrafted = self._evaluate(np.zeros((1, len(self.names)), np.int64))[1]
        excess, worth_per_s = self._evaluate(depths)
        return np.column_stack([excess, -worth_per_s / undrafted, depths @ self.shares]).round(10)

    def worth_per_s(self, depths: Assignment) -> float:
        """Worth of the tokens of a step over its seconds."""
        return float(self._evaluate(np.array([depths]))[1][0])

    def excess(self, depths: Assignment) -> float:
        """The greatest TPOT / limit of any workload, 1.0 where every limit is met."""
        return float(self._evaluate(np.array([depths]))[0][0])

    def gains(self, depths: Depths, deeper: Depths) -> Floats:
        """What each workload alone adds to the worth of a step per draft, going from `depths` to `deeper` (one K a
        workload); -inf where these are the same."""
        before, after = self._lengths[self._places, depths], self._lengths[self._places, deeper]
        added = self._throughput_weights * (after - before)
        if self._latency_weight:
            inverse = float((self._latency_weights / before).sum())
            changed = inverse + self._latency_weights * (1.0 / after - 1.0 / before)
            added = added + self._latency_weight**2 * (1.0 / changed - 1.0 / inverse)
        num_drafts = self.shares * (deeper - depths)
        gains: Floats = np.full(len(added), -np.inf)
        np.divide(added, num_drafts, out=gains, where=num_drafts > 0)
        return gains

    def least_depths(self, max_rows: int) -> Depths:
        """The least depths with which every limit is met if a step takes a given time, for at most `max_rows` times
        among those where these depths change; no rows without limits."""
        limited = [index for index, limit_s in enumerate(self._limits_s) if math.isfinite(limit_s)]
        rates = {index: self._lengths[index, self.levels[index]] * self._limits_s[index] for index in limited}
        if not limited:
            return np.empty((0, len(self.names)), np.int64)
        steps_s = np.unique(np.concatenate(list(rates.values())))
        steps_s = steps_s[np.linspace(0, len(steps_s) - 1, min(max_rows, len(steps_s))).astype(np.int64)]
        found: Depths = np.zeros((len(steps_s), len(self.names)), np.int64)
        for index, reached_s in rates.items():
            places = np.searchsorted(reached_s, steps_s * (1 - 1e-12))
            found[:, index] = np.array(self.levels[index])[np.minimum(places, len(reached_s) - 1)]
        return found

    def step_s(self, depths: Assignment) -> float:
        """Expected seconds of a step."""
        return float(self._step_s(np.array([depths]))[0])

    def step_s_with_probe(self, depths: Assignment, index: int, depth: int) -> float:
        """Expected seconds of a step in which one request of the demand at `index` is verified to `depth` instead."""
        if self.num_requests <= 1.0:
            return float(self._uniform_s[depth])
        mean = float(self.shares @ depths) + (depth - depths[index]) / self.num_requests
        mean_depths, deepest = np.array([min(mean, len(self._uniform_s) - 1.0)]), np.array([max(depth, *depths)])
        return float(self._mixed_s(mean_depths, deepest)[0])

    def plan(self, depths: Assignment, kept: str = "") -> Plan:
        """An assignment as a plan. `kept`: why it is this one, where it is not the best."""
        lengths = self._lengths[self._places, depths]
        step_s = self.step_s(depths)
        graph = self._graph_of(depths)
        rate = self.num_requests * float(self.shares @ lengths) / step_s
        tpots_s = step_s / lengths
        excess = self.excess(depths)
        return Plan(
            depths=dict(zip(self.names, depths, strict=True)),
            tokens_per_s=rate,
            step_s=step_s,
            tpot_s=dict(zip(self.names, tpots_s.tolist(), strict=True)),
            worth_per_s=self.worth_per_s(depths),
            graph_depth=graph,
            meets_limits=excess == 1.0,
            reason=self._reason(depths, graph, rate, kept) + self._limit_reason(tpots_s, excess),
        )

    def _reason(self, depths: Assignment, graph: int | None, rate: float, kept: str) -> str:
        undrafted = self.num_requests / float(self._uniform_s[0])
        if not any(depths):
            return f"{kept or 'no draft pays'} at {self.num_requests:.3g} requests: {rate:.0f} tokens/s"
        how = "each draft worth its time" if graph is None else f"all on the full CUDA graph of K={graph}"
        return f"{kept or how} at {self.num_requests:.3g} requests: {rate:.0f} tokens/s, {undrafted:.0f} without drafts"

    def _limit_reason(self, tpots_s: Floats, excess: float) -> str:
        if not np.isfinite(self._limits_s).any():
            return ""
        if excess == 1.0:
            return "; within the TPOT limits"
        worst = int(np.argmax(tpots_s / self._limits_s))
        limit_ms, fastest_ms = 1e3 * self._limits_s[worst], 1e3 * tpots_s[worst]
        return f"; no K meets {limit_ms:.3g} ms per token of {self.names[worst]}, the fastest gives {fastest_ms:.3g} ms"

    def _evaluate(self, depths: Depths) -> tuple[Floats, Floats]:
        """Excess over the limits, and worth per second, of each assignment."""
        lengths = self._lengths[self._places, depths]
        step_s = self._step_s(depths)
        worth: Floats = lengths @ self._throughput_weights
        if self._latency_weight:
            worth = worth + self._latency_weight**2 / (1.0 / lengths @ self._latency_weights)
        excess = (step_s[:, None] / lengths / self._limits_s).max(axis=1)
        return np.where(excess > 1.0 + 1e-9, excess, 1.0), worth / step_s

    def _step_s(self, depths: Depths) -> Floats:
        """Expected seconds of a step of each assignment."""
        is_uniform = (depths == depths[:, :1]).all(axis=1)
        mixed_s = self._mixed_s(depths @ self.shares, depths.max(axis=1))
        return np.where(is_uniform, self._uniform_s[depths[:, 0]], mixed_s)

    def _mixed_s(self, mean_depths: Floats, deepest: NDArray[np.int64]) -> Floats:
        """Seconds of a step of several depths, by drafts per request and the deepest of them; between two whole numbers
        of drafts, those of the greater."""
        seconds: Floats = np.zeros(len(mean_depths))
        for num_requests, part, curve in self._curves:
            num_drafts = np.ceil(num_requests * mean_depths - 1e-9).astype(np.int64)
            is_on_graph = num_drafts >= np.array(curve.graph_from)[deepest]
            seconds += part * np.where(is_on_graph, np.array(curve.uniform)[deepest], curve.ragged[num_drafts])
        return seconds

    def _graph_of(self, depths: Assignment) -> int | None:
        """The depth of the full graph on which the assignment runs."""
        deepest = max(depths)
        num_requests, _, curve = self._curves[0]
        num_drafts = math.ceil(num_requests * float(self.shares @ depths) - 1e-9)
        return deepest if num_drafts >= curve.graph_from[deepest] else None


def _levels(demand: Demand, max_draft_tokens: int, tiers: Collection[int] | None) -> list[int]:
    """Depths that a workload may have, 0 among them, ascending."""
    if demand.deepest > max_draft_tokens:
        raise ValueError(
            f"max_depth of {demand.workload!r} is {demand.deepest}, above the engine's K_max {max_draft_tokens}"
        )
    check_tiers(tiers, max_draft_tokens)
    return [k for k in range(demand.deepest + 1) if k == 0 or tiers is None or k in tiers]


def check_tiers(tiers: Collection[int] | None, max_draft_tokens: int) -> None:
    """Refuse a tier that is no depth, with a ValueError."""
    for tier in tiers or ():
        if not 0 <= tier <= max_draft_tokens:
            raise ValueError(f"tiers has a {tier}: a tier is a depth, 0 to {max_draft_tokens}")
