"""The choice of K: its formulas, and the names under which the rest of the cluster uses it.

`allocate` trims the requests of one engine step (in the scheduler, with the batch it really has), `best_depths` finds
K per workload for a replica, `DepthChooser` holds K steady over time and probes (in the ingress).

**Worth of a draft.** S_i is the survival of depth i, L(k) = 1 + S_1 + ... + S_k the expected tokens of a step at K = k
(policy-and-apis.md, D1). P-EAGLE drafts K_max in one pass whatever K is, so drafting does not depend on K and only
verification does; t(requests, tokens) covers both, and K = 0 still pays the drafter.

That sum holds at the K at which S was measured. To compare one K with another, what each further draft adds to L is
taken from `cluster.transfer`, and stands for S_i in what follows; trimming within one step rests on S_i itself.

**Throughput** (D2; goodput in SmartSpec, arXiv 2406.14066). With b_c requests of workload c at K = k_c in a step,

    R = sum_c b_c L_c(k_c) / t(b, n),   b = sum_c b_c,   n = sum_c b_c (1 + k_c)

At the optimum, with lambda = R, depth i of workload c is admitted where S_c,i >= lambda dt, dt being the time that its
tokens add. Dinkelbach's iteration finds lambda where t is convex. Here t is a staircase with a jump, so every threshold
is tried instead: the drafts in the order of their worth per token are a path, and R is computed at each of its points
(the global ranking of vLLM's adaptive verification, PR 52228, with workloads in place of single drafts). A K that all
workloads share may run on a full CUDA graph at another price, and is compared as a whole: K = 0, K_max and what lies
between. Across the requests of one step (`allocate`) this is the exact optimum. Across workloads one depth is a lump of
b_c tokens: up to `cluster.depth.MAX_ENUMERATED` assignments are all compared, and beyond, the best point of the path
is improved by changes of one or two workloads; tests/test_planning.py holds its distance from the optimum.

**Several workloads.** Weights w_c count tokens. A workload whose objective is `latency` enters by the harmonic mean of
L, the others by the sum:

    worth = sum_{c: throughput} w_c b_c L_c + W^2 / sum_{c: latency} (w_c b_c / L_c),   W = sum_{c: latency} w_c b_c

and worth / t is maximised. With throughput alone this is R; with latency alone it is the least mean time per output
token, since TPOT_c = t / L_c; for one workload both are the same, since t / L = b / R. The sum of the two is this
project's own.

**Limits.** TPOT_c = t / L_c(k_c) <= limit_c comes before worth. Where nothing meets every limit, the greatest
TPOT_c / limit_c is made as small as it can be.

**Hardly more than one request in a step**: workloads then do not meet in a step, and each is decided alone.

**Prompts.** A step that takes in prompts runs off the full graphs, so K pays differently there. K is chosen for steps
that only decode, and `allocate` trims the others. What a prompt itself takes is left out: each request has one,
whatever its K, and tokens / (decoding + a constant for each token) is greatest where tokens / decoding is.
"""

import copy
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise, product
from types import MappingProxyType
from typing import Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.step_time import CostCurves, StepCosts
from cluster.step_time import StepCostsCurve as Curve
from cluster.transfer import as_drawn

# ====================================================================================================
# What workloads ask of a replica, and the plan that answers: the records of the choice of K.
#
# Formulas: `cluster.depth`.


@dataclass(frozen=True)
class Objective:
    """What a workload wants.

    Attributes:
        kind: `throughput`: the most tokens per second of all requests together. `latency`: the least mean TPOT. For
            one workload alone the two are the same choice; among several, `latency` counts a workload that accepts
            little as much as one that accepts much.
        max_tpot_s: limit of the mean time per output token, seconds.
        weight: worth of this workload's tokens against others'.
    """

    kind: Literal["throughput", "latency"] = "throughput"
    max_tpot_s: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("throughput", "latency"):
            raise ValueError(f"objective kind is {self.kind!r}: it is throughput or latency")
        if self.max_tpot_s is not None and not 0 < self.max_tpot_s < math.inf:
            raise ValueError(f"max_tpot_s is {self.max_tpot_s}: a limit is a positive number of seconds, or None")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight is {self.weight}: it is a positive number")


THROUGHPUT = Objective()


@dataclass(frozen=True)
class Demand:
    """One workload on one replica.

    Attributes:
        workload: its name.
        num_requests: mean number of its requests in a step, above 0; a fraction where traffic is thin.
        survival: S_1, S_2, ... at least `max_depth` long.
        objective: what it wants.
        max_depth: the most drafts its requests may get; None: as many as `survival` has.
    """

    workload: str
    num_requests: float
    survival: Sequence[float]
    objective: Objective = THROUGHPUT
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.num_requests < math.inf:
            raise ValueError(f"num_requests of {self.workload!r} is {self.num_requests}: it is a positive number")
        if not 0 <= self.deepest <= len(self.survival):
            raise SurvivalError(
                f"{self.workload!r} may get {self.deepest} drafts but its survival has {len(self.survival)} depths"
            )
        check_survival(self.survival, f"workload {self.workload!r}")

    @property
    def deepest(self) -> int:
        """The most drafts a request of it may get."""
        return len(self.survival) if self.max_depth is None else self.max_depth


@dataclass(frozen=True)
class Plan:
    """K of each workload.

    Attributes:
        depths: K by workload.
        tokens_per_s: expected output tokens per second of the replica.
        step_s: expected seconds of a step.
        tpot_s: expected time per output token by workload, seconds: step_s / L(K).
        worth_per_s: lambda, what the plan makes of a second (tokens per second times weights). A further draft pays
            where weight * S_i is above lambda times the time it adds.
        graph_depth: the depth of the full CUDA graph that runs the steps, None where none does.
        meets_limits: every `max_tpot_s` is met.
        reason: why, in words.
    """

    depths: Mapping[str, int]
    tokens_per_s: float
    step_s: float
    tpot_s: Mapping[str, float]
    worth_per_s: float
    graph_depth: int | None
    meets_limits: bool
    reason: str = field(compare=False)


# ====================================================================================================
# What an assignment of K to workloads that share a replica's steps is worth, and how long a step then takes.
#
# Enters: demands and cost curves. Leaves: worth, limits and times of assignments, many at a time. Searches nothing
# (`cluster.depth` does). Formulas: `cluster.depth`.

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


# ====================================================================================================
# How many drafts each request of a batch gets in one engine step.
#
# Enters: for every request its survival by depth and the K it may have at most, and the step-time curve. Leaves: depths.
# Runs once an engine step, so it is microseconds (`python -m benchmarks.decision`). Never knows: workloads, vLLM.
#
# A draft at depth i of a request is worth its survival S_i: the chance that it becomes a token. With m drafts in the
# step the best ones are the m of greatest survival over all requests, whoever they belong to, and because S_i never
# grows with i they are always a prefix of each request's drafts. So one sort and one pass over m finds the greatest
#
#     tokens/s = (requests + sum of the m greatest survivals) / t(requests, requests + m)
#
# This is the budget rule of vLLM's adaptive verification (PR 52228), and the same as admitting a draft while
# S_i >= lambda * dt with lambda the rate at the optimum (policy-and-apis.md, D2): the pass tries every threshold, so on
# a staircase no iteration is needed. A batch where every request has the same K, or nearly so if the engine pads it, can
# be faster than its number of tokens says, because it runs on a full CUDA graph: each such depth is compared as a whole.


class SurvivalError(ValueError):
    """A survival cannot be used: not a number, outside 0..1, growing with depth, or too short."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Drafts of each request in one step, in the order the requests were given.

    Attributes:
        depths: K of each request for this step.
        num_tokens: expected tokens of the step, one for each request and the drafts expected to be accepted.
        step_s: seconds of the step.
        graph_depth: the depth of the full CUDA graph that runs the step, None where none does.
    """

    depths: list[int]
    num_tokens: float
    step_s: float
    graph_depth: int | None

    @property
    def tokens_per_s(self) -> float:
        """Expected output tokens per second of the engine while it runs such steps."""
        return self.num_tokens / self.step_s

    @property
    def reason(self) -> str:
        """Why, in words."""
        rate = f"{self.tokens_per_s:.0f} tokens/s expected"
        if not any(self.depths):
            return f"no draft pays at {len(self.depths)} requests: {rate}"
        if self.graph_depth is not None:
            return f"all on the full CUDA graph of K={self.graph_depth}: {rate}"
        return f"the {sum(self.depths)} likeliest drafts pay at {len(self.depths)} requests: {rate}"


def allocate(
    survivals: Sequence[Sequence[float]],
    max_depths: Sequence[int],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
    prompt_tokens: int = 0,
) -> list[int]:
    """Depth of each request in the next step: the `depths` of `plan_step`."""
    return plan_step(survivals, max_depths, times, context_tokens, prompt_tokens).depths


def plan_step(
    survivals: Sequence[Sequence[float]],
    max_depths: Sequence[int],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
    prompt_tokens: int = 0,
) -> Allocation:
    """Drafts of each request that give the most tokens per second in the next step.

    Exact for any step times in which a batch on a full graph costs no more than one of as many tokens off it. At a tie
    the step with fewer drafts wins, and the request that comes first gets the draft.

    Args:
        survivals: S_1, S_2, ... of each request. Requests that share one tuple (a workload's) are decided together,
            which is faster; a list or an array is copied into one.
        max_depths: the most drafts a request may get, 0..K_max; its survival has at least as many entries.
        times: step times. A caller that decides at every step keeps one `CostCurves`.
        context_tokens: mean context of the requests.
        prompt_tokens: tokens of other requests' prompts that run in the same step; no full graph holds them.

    Raises:
        SurvivalError: a survival is not usable; the message names the request.
        ValueError: lengths differ, or a `max_depths` is outside 0..K_max.
    """
    if len(survivals) != len(max_depths):
        raise ValueError(f"there are {len(survivals)} survivals but {len(max_depths)} max_depths: give one a request")
    if not survivals:
        return Allocation([], 0.0, 0.0, None)
    curves = CostCurves.of(times)
    batch = _Batch(survivals, max_depths, curves.max_draft_tokens)
    curve = curves.curve(len(survivals), context_tokens, prompt_tokens)

    order = np.argsort(-batch.values, kind="stable")  # stable: a request's own drafts keep their order at equal worth
    num_tokens = np.empty(batch.num_drafts + 1)
    num_tokens[0] = 0.0
    np.cumsum(np.repeat(batch.values[order], batch.counts[order]), out=num_tokens[1:])
    num_tokens += len(survivals)
    ragged_s = curve.ragged[: num_tokens.size]
    best = int((num_tokens / ragged_s).argmax())
    depth = batch.best_graph(curve, curves.full_graph_depths)
    if depth is not None:
        graph_tokens = batch.tokens_at(depth)
        if graph_tokens / curve.uniform[depth] > num_tokens[best] / ragged_s[best]:
            return Allocation(batch.capped(depth), graph_tokens, curve.uniform[depth], depth)
    depths = batch.cut(order, best)
    deepest = max(depths)
    if best >= curve.graph_from[deepest]:
        return Allocation(depths, float(num_tokens[best]), curve.uniform[deepest], deepest)
    return Allocation(depths, float(num_tokens[best]), float(ragged_s[best]), None)


class _Batch:
    """The drafts of a batch as slots: one for each depth of each group of requests with the same survival and limit.

    `values`: survival of each slot; `counts`: how many requests have it; `owners`: its group.
    """

    def __init__(self, survivals: Sequence[Sequence[float]], max_depths: Sequence[int], max_draft_tokens: int) -> None:
        groups: dict[tuple[tuple[float, ...], int], list[int]] = {}
        for index, key in enumerate(zip(map(tuple, survivals), max_depths, strict=True)):
            members = groups.get(key)
            if members is None:
                groups[key] = [index]
            else:
                members.append(index)
        self.num_requests = len(survivals)
        self.members = list(groups.values())
        lengths = [max_depth for _, max_depth in groups]
        if min(lengths) < 0 or max(lengths) > max_draft_tokens:
            raise ValueError(
                f"max_depths goes from {min(lengths)} to {max(lengths)}, outside 0..{max_draft_tokens} (K_max)"
            )
        flat: list[float] = []
        for survival, max_depth in groups:
            flat += survival[:max_depth]
        self._lengths = lengths
        if len(flat) != sum(lengths):
            _refuse(groups)
        self.values = np.array(flat, dtype=np.float64)
        self.owners = np.repeat(np.arange(len(lengths)), lengths)
        self.counts = np.array([len(members) for members in self.members])[self.owners]
        self.num_drafts = int(self.counts.sum())
        starts = np.cumsum(lengths) - lengths
        self._depths = np.arange(len(flat)) - starts[self.owners]
        self._slots: list[float] = np.bincount(self._depths, weights=self.counts).tolist()
        self._worths: list[float] = np.bincount(self._depths, weights=self.values * self.counts).tolist()
        if flat:
            grows = self.values[1:] > self.values[:-1]
            # A NaN makes both comparisons false.
            if (grows & (self._depths[1:] > 0)).any() or not (self.values.min() >= 0.0 and self.values.max() <= 1.0):
                _refuse(groups)

    def best_graph(self, curve: Curve, depths: frozenset[int]) -> int | None:
        """The depth of the best full graph that can run the batch; None where none can."""
        found = [depth for depth in sorted(depths) if sum(self._slots[:depth]) >= curve.graph_from[depth]]
        return max(found, key=lambda depth: self.tokens_at(depth) / curve.uniform[depth], default=None)

    def tokens_at(self, depth: int) -> float:
        """Expected tokens with every request at `depth`, or at what it may have where that is less."""
        return self.num_requests + sum(self._worths[:depth])

    def capped(self, depth: int) -> list[int]:
        """Every request at `depth`, or at what it may have."""
        depths = [0] * self.num_requests
        for members, length in zip(self.members, self._lengths, strict=True):
            for index in members:
                depths[index] = min(length, depth)
        return depths

    def cut(self, order: NDArray[np.int64], num_drafts: int) -> list[int]:
        """Depths when the first `num_drafts` drafts in the order of slots are taken; of the last slot perhaps only
        what its first members have."""
        ends = np.cumsum(self.counts[order])
        num_whole = int(ends.searchsorted(num_drafts, side="right"))
        taken = np.bincount(self.owners[order[:num_whole]], minlength=len(self.members)).tolist()
        depths = [0] * self.num_requests
        for members, depth in zip(self.members, taken, strict=True):
            if depth:
                for index in members:
                    depths[index] = depth
        if num_whole < len(order):
            left = num_drafts - (int(ends[num_whole - 1]) if num_whole else 0)
            for index in self.members[int(self.owners[order[num_whole]])][:left]:
                depths[index] += 1
        return depths


def _refuse(groups: Mapping[tuple[tuple[float, ...], int], list[int]]) -> NoReturn:
    """Raise the error of the first group that has one."""
    for (survival, max_depth), members in groups.items():
        if max_depth > len(survival):
            raise SurvivalError(
                f"request {members[0]} may get {max_depth} drafts but its survival has {len(survival)} depths: "
                "give a survival for every depth it may get"
            )
        check_survival(survival[:max_depth], f"request {members[0]}")
    raise AssertionError("every group is usable")


def check_survival(survival: Sequence[float], owner: str) -> None:
    """Refuse a survival that is no survival.

    Args:
        survival: S_1, S_2, ... by depth.
        owner: whose it is, for the message.

    Raises:
        SurvivalError: an entry is not a number, outside 0..1, or greater than the one before.
    """
    for depth, value in enumerate(survival, start=1):
        if not 0.0 <= value <= 1.0:
            raise SurvivalError(f"survival of {owner} at depth {depth} is {value}: it must be a probability, 0 to 1")
    for depth, (before, value) in enumerate(pairwise(survival), start=2):
        if value > before:
            raise SurvivalError(
                f"survival of {owner} grows from {before} to {value} at depth {depth}: "
                "the first i drafts cannot all be accepted more often than the first i - 1"
            )


# ====================================================================================================
# Which K each workload gets on a replica: the optimum over all workloads together.
#
# Enters: what each workload asks for (`Demand`) and the step times. Leaves: a `Plan` with its reason. Pure: no memory,
# no clock. Never knows: requests, posteriors, HTTP.
#
# Formulas: `cluster.depth`.

MAX_ENUMERATED = 4096
"""Assignments up to which all are compared; beyond, there is a search. 4 workloads at K_max = 7 have 4096."""

MAX_STEP_TIMES = 24
"""Lengths of a step for which the search asks what limits of TPOT need."""

MIN_SHARED = 1.5
"""Requests in a step from which workloads are taken to meet there. A mean of readings that each say 1 comes near 1 from
above, and one request at a time must not be planned as two."""

MAX_PAIRED = 12
"""Workloads of which two may change together in one improvement: those with the most requests."""


def best_depths(
    demands: Sequence[Demand],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
    tiers: Collection[int] | None = None,
) -> Plan:
    """K of each workload that makes the most of a replica's time within the limits of TPOT.

    Where no K meets every limit, the plan has the least excess (the greatest TPOT / limit of any workload is as small
    as can be) and its reason says so. At a tie the plan with fewer drafts wins. With fewer than `MIN_SHARED` requests
    in a step, workloads do not share steps, and each is decided alone.

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
    sharings = [Sharing(group, curves, context_tokens, tiers) for group in sharing_groups(demands)]
    plans = [sharing.plan(best_assignment(sharing)) for sharing in sharings]
    if len(plans) == 1:
        return plans[0]
    total = sum(demand.num_requests for demand in demands)
    alone = [(demand.num_requests / total, plan) for demand, plan in zip(demands, plans, strict=True)]
    return Plan(
        depths={name: k for plan in plans for name, k in plan.depths.items()},
        tokens_per_s=sum(share * plan.tokens_per_s for share, plan in alone),
        step_s=sum(share * plan.step_s for share, plan in alone),
        tpot_s={name: tpot_s for plan in plans for name, tpot_s in plan.tpot_s.items()},
        worth_per_s=sum(share * plan.worth_per_s for share, plan in alone),
        graph_depth=None,
        meets_limits=all(plan.meets_limits for plan in plans),
        reason="; ".join(f"{name} alone: {plan.reason}" for name, plan in zip(names, plans, strict=True)),
    )


def sharing_groups(demands: Sequence[Demand]) -> list[Sequence[Demand]]:
    """Which workloads share steps: all of them, or none where most steps have a single request."""
    total = sum(demand.num_requests for demand in demands)
    return [demands] if total >= MIN_SHARED else [[demand] for demand in demands]


def best_assignment(sharing: Sharing, max_enumerated: int = MAX_ENUMERATED) -> Assignment:
    """The best assignment where there are at most `max_enumerated`, all of which are then compared; else the best that
    a search finds.

    The search takes the best of all thresholds and uniform depths and improves it while a change of one workload, or
    of two by one level each, improves it.
    """
    if math.prod(len(levels) for levels in sharing.levels) <= max_enumerated:
        grid = np.meshgrid(*sharing.levels, indexing="ij")
        return _best_of(sharing, np.stack(grid, axis=-1).reshape(-1, len(sharing.levels)))[0]
    found, rank = _best_of(sharing, _candidates(sharing))
    while len(neighbours := _neighbours(sharing, found)):
        better, better_rank = _best_of(sharing, neighbours)
        if better_rank >= rank:
            break
        found, rank = better, better_rank
    return found


def best_beside(sharing: Sharing, fixed: Mapping[str, int], start: Assignment) -> Assignment:
    """The assignment that keeps the depths in `fixed` and gives each other workload, one after another, what is best
    beside them, beginning from `start`."""
    depths = tuple(fixed.get(name, k) for name, k in zip(sharing.names, start, strict=True))
    for index, name in enumerate(sharing.names):
        if name not in fixed:
            options = np.array([depths] * len(sharing.levels[index]))
            options[:, index] = sharing.levels[index]
            depths, _ = _best_of(sharing, options)
    return depths


def _best_of(sharing: Sharing, depths: Depths) -> tuple[Assignment, tuple[float, ...]]:
    """The best of some assignments, and its rank."""
    ranks = sharing.ranks(depths)
    rows = np.arange(len(ranks))
    for column in ranks.T:
        rows = rows[column[rows] == column[rows].min()]
    return tuple(depths[rows[0]].tolist()), tuple(ranks[rows[0]].tolist())


def _candidates(sharing: Sharing) -> Depths:
    """Every depth that all workloads can have, and every threshold on the worth of a draft; these also with every
    workload at least as deep as its limit asks, for steps of various lengths."""
    common = set.intersection(*(set(levels) for levels in sharing.levels))
    uniform = [np.full(len(sharing.names), k) for k in sorted(common)]
    path = _path(sharing)
    limited = np.maximum(path[:, None], sharing.least_depths(MAX_STEP_TIMES)[None]).reshape(-1, len(sharing.names))
    return np.concatenate([np.array(uniform), path, limited])


def _path(sharing: Sharing) -> Depths:
    """From no drafts to all, the draft that is worth most coming next."""
    found = []
    depths: Depths = np.zeros(len(sharing.names), np.int64)
    places = [0] * len(sharing.names)
    deeper: Depths = np.array([levels[1] if len(levels) > 1 else 0 for levels in sharing.levels])
    while True:
        found.append(depths.copy())
        index = int(np.argmax(sharing.gains(depths, deeper)))
        levels = sharing.levels[index]
        if depths[index] == levels[-1]:  # the greatest gain is -inf: all are at their deepest
            return np.array(found)
        places[index] += 1
        depths[index] = levels[places[index]]
        deeper[index] = levels[min(places[index] + 1, len(levels) - 1)]


def _neighbours(sharing: Sharing, depths: Assignment) -> Depths:
    """What one change of one workload makes of an assignment, or a change of two by one level each."""
    changes: list[tuple[int, int, int, int]] = []
    for index, levels in enumerate(sharing.levels):
        changes += [(index, k, index, k) for k in levels if k != depths[index]]
    busiest = np.argsort(-sharing.shares, kind="stable")[:MAX_PAIRED].tolist()
    beside = {index: _beside(sharing.levels[index], depths[index]) for index in busiest}
    for a, b in combinations(busiest, 2):
        changes += [(a, k_a, b, k_b) for k_a, k_b in product(beside[a], beside[b])]
    found: Depths = np.tile(np.array(depths), (len(changes), 1))
    if changes:
        rows = np.arange(len(changes))
        first, k_first, second, k_second = np.array(changes).T
        found[rows, first] = k_first
        found[rows, second] = k_second
    return found


def _beside(levels: Sequence[int], k: int) -> list[int]:
    """The levels just below and just above one."""
    place = levels.index(k)
    return [*levels[max(0, place - 1) : place], *levels[place + 1 : place + 2]]


# ====================================================================================================
# K of each workload over time: the optimum, changed only when it is worth it, and a few requests that look deeper.
#
# Enters: the posteriors of all workloads, the load of a replica, and the time. Leaves: a `Choice` for one request, with
# its reason. State of one ingress replica, bounded by the workloads that have load or a posterior; no clock and no
# generator of its own. Never knows: HTTP, Ray, the engine.
#
# Formulas: `cluster.depth`.

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


# ====================================================================================================
# The choice of K: its formulas, and the names under which the rest of the cluster uses it.
#
# `allocate` trims the requests of one engine step (in the scheduler, with the batch it really has), `best_depths` finds
# K per workload for a replica, `DepthChooser` holds K steady over time and probes (in the ingress).
#
# **Worth of a draft.** S_i is the survival of depth i, L(k) = 1 + S_1 + ... + S_k the expected tokens of a step at K = k
# (policy-and-apis.md, D1). P-EAGLE drafts K_max in one pass whatever K is, so drafting does not depend on K and only
# verification does; t(requests, tokens) covers both, and K = 0 still pays the drafter.
#
# That sum holds at the K at which S was measured. To compare one K with another, what each further draft adds to L is
# taken from `cluster.transfer`, and stands for S_i in what follows; trimming within one step rests on S_i itself.
#
# **Throughput** (D2; goodput in SmartSpec, arXiv 2406.14066). With b_c requests of workload c at K = k_c in a step,
#
#     R = sum_c b_c L_c(k_c) / t(b, n),   b = sum_c b_c,   n = sum_c b_c (1 + k_c)
#
# At the optimum, with lambda = R, depth i of workload c is admitted where S_c,i >= lambda dt, dt being the time that its
# tokens add. Dinkelbach's iteration finds lambda where t is convex. Here t is a staircase with a jump, so every threshold
# is tried instead: the drafts in the order of their worth per token are a path, and R is computed at each of its points
# (the global ranking of vLLM's adaptive verification, PR 52228, with workloads in place of single drafts). A K that all
# workloads share may run on a full CUDA graph at another price, and is compared as a whole: K = 0, K_max and what lies
# between. Across the requests of one step (`allocate`) this is the exact optimum. Across workloads one depth is a lump of
# b_c tokens: up to `cluster.depth.MAX_ENUMERATED` assignments are all compared, and beyond, the best point of the path
# is improved by changes of one or two workloads; tests/test_planning.py holds its distance from the optimum.
#
# **Several workloads.** Weights w_c count tokens. A workload whose objective is `latency` enters by the harmonic mean of
# L, the others by the sum:
#
#     worth = sum_{c: throughput} w_c b_c L_c + W^2 / sum_{c: latency} (w_c b_c / L_c),   W = sum_{c: latency} w_c b_c
#
# and worth / t is maximised. With throughput alone this is R; with latency alone it is the least mean time per output
# token, since TPOT_c = t / L_c; for one workload both are the same, since t / L = b / R. The sum of the two is this
# project's own.
#
# **Limits.** TPOT_c = t / L_c(k_c) <= limit_c comes before worth. Where nothing meets every limit, the greatest
# TPOT_c / limit_c is made as small as it can be.
#
# **Hardly more than one request in a step**: workloads then do not meet in a step, and each is decided alone.
#
# **Prompts.** A step that takes in prompts runs off the full graphs, so K pays differently there. K is chosen for steps
# that only decode, and `allocate` trims the others. What a prompt itself takes is left out: each request has one,
# whatever its K, and tokens / (decoding + a constant for each token) is greatest where tokens / decoding is.

__all__ = [
    "Allocation",
    "Choice",
    "CostCurves",
    "Demand",
    "DepthChooser",
    "Load",
    "Objective",
    "Plan",
    "StepCosts",
    "SurvivalError",
    "allocate",
    "best_depths",
    "plan_step",
]
