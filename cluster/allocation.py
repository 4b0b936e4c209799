"""How many drafts each request of a batch gets in one engine step.

Enters: for every request its survival by depth and the K it may have at most, and the step-time curve. Leaves: depths.
Runs once an engine step, so it is microseconds (`python -m cluster.bench_decision`). Never knows: workloads, vLLM.

A draft at depth i of a request is worth its survival S_i: the chance that it becomes a token. With m drafts in the
step the best ones are the m of greatest survival over all requests, whoever they belong to, and because S_i never
grows with i they are always a prefix of each request's drafts. So one sort and one pass over m finds the greatest

    tokens/s = (requests + sum of the m greatest survivals) / t(requests, requests + m)

This is the budget rule of vLLM's adaptive verification (PR 52228), and the same as admitting a draft while
S_i >= lambda * dt with lambda the rate at the optimum (policy-and-apis.md, D2): the pass tries every threshold, so on
a staircase no iteration is needed. A batch where every request has the same K, or nearly so if the engine pads it, can
be faster than its number of tokens says, because it runs on a full CUDA graph: each such depth is compared as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cluster.step_costs import CostCurves, Curve, StepCosts


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
