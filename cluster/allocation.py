"""How many drafts each request of a batch gets in one engine step.

Enters: for every request its survival by depth and the K it may have at most, and the step-time curve. Leaves: depths.
Runs once an engine step, so it is microseconds (`python -m cluster.bench_decision`). Never knows: workloads, vLLM.

A draft at depth i of a request is worth its survival S_i: the chance that it becomes a token. With m drafts in the
step the best ones are the m of greatest survival over all requests, whoever they belong to, and because S_i never
grows with i they are always a prefix of each request's drafts. So one sort and one pass over m finds the greatest

    tokens/s = (requests + sum of the m greatest survivals) / t(requests, requests + m)

This is the budget rule of vLLM's adaptive verification (PR 52228), and the same as admitting a draft while
S_i >= lambda * dt with lambda the rate at the optimum (policy-and-apis.md, D2): the pass tries every threshold, so on
a staircase no iteration is needed. A batch where every request has the same K can be faster than its number of tokens
says, because it runs on a full CUDA graph: each such depth is compared as a whole.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        uniform_depth: the depth at which all run on a full CUDA graph, None where they do not.
    """

    depths: list[int]
    num_tokens: float
    step_s: float
    uniform_depth: int | None

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
        if self.uniform_depth is not None:
            return f"all at K={self.uniform_depth} on the full CUDA graph: {rate}"
        return f"the {sum(self.depths)} likeliest drafts pay at {len(self.depths)} requests: {rate}"


def allocate(
    survivals: Sequence[Sequence[float]],
    max_depths: Sequence[int],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
) -> list[int]:
    """Depth of each request in the next step: the `depths` of `plan_step`."""
    return plan_step(survivals, max_depths, times, context_tokens).depths


def plan_step(
    survivals: Sequence[Sequence[float]],
    max_depths: Sequence[int],
    times: StepCosts | CostCurves,
    context_tokens: float = 0.0,
) -> Allocation:
    """Drafts of each request that give the most tokens per second in the next step.

    Exact for any step times in which a uniform batch costs no more than a ragged one of as many tokens. At a tie the
    step with fewer drafts wins, and the request that comes first gets the draft.

    Args:
        survivals: S_1, S_2, ... of each request. Requests that share one tuple (a workload's) are decided together,
            which is faster; a list or an array is copied into one.
        max_depths: the most drafts a request may get, 0..K_max; its survival has at least as many entries.
        times: step times. A caller that decides at every step keeps one `CostCurves`.
        context_tokens: mean context of the requests.

    Raises:
        SurvivalError: a survival is not usable; the message names the request.
        ValueError: lengths differ, or a `max_depths` is outside 0..K_max.
    """
    if len(survivals) != len(max_depths):
        raise ValueError(f"there are {len(survivals)} survivals but {len(max_depths)} max_depths: give one a request")
    if not survivals:
        return Allocation([], 0.0, 0.0, None)
    curves = CostCurves.of(times)
    groups = _grouped(survivals, max_depths)
    values, counts, owners = _slots(groups, curves.max_draft_tokens)
    num_requests = len(survivals)
    curve = curves.curve(num_requests, context_tokens)

    order = np.argsort(-values, kind="stable")  # stable: a request's own drafts keep their order at equal survival
    by_worth = np.repeat(values[order], counts[order])
    num_tokens = np.empty(by_worth.size + 1)
    num_tokens[0] = num_requests
    np.cumsum(by_worth, out=num_tokens[1:])
    num_tokens[1:] += num_requests
    ragged_s = curve.ragged[: num_tokens.size]
    best = int(np.argmax(num_tokens / ragged_s))
    trimmed = Allocation([], float(num_tokens[best]), float(ragged_s[best]), None)

    uniform = _best_uniform(groups, num_requests, curve, curves.full_graph_depths)
    if uniform is not None and uniform.tokens_per_s > trimmed.tokens_per_s:
        return uniform
    depths = _cut(groups, order, counts, owners, best, num_requests)
    graph = depths[0] if depths[0] in curves.full_graph_depths and len(set(depths)) == 1 else None
    return Allocation(depths, trimmed.num_tokens, trimmed.step_s, graph)


@dataclass(slots=True)
class _Group:
    """Requests with the same survival and limit. `survival` is cut to the limit."""

    survival: tuple[float, ...]
    members: list[int]


def _grouped(survivals: Sequence[Sequence[float]], max_depths: Sequence[int]) -> list[_Group]:
    groups: dict[Hashable, _Group] = {}
    for index, (survival, max_depth) in enumerate(zip(survivals, max_depths, strict=True)):
        whole = survival if type(survival) is tuple else tuple(survival)
        group = groups.get((whole, max_depth))
        if group is not None:
            group.members.append(index)
            continue
        if not 0 <= max_depth <= len(whole):
            raise SurvivalError(
                f"request {index} may get {max_depth} drafts but its survival has {len(whole)} depths: "
                "give a survival for every depth it may get"
            )
        groups[whole, max_depth] = _Group(whole[:max_depth], [index])
    return list(groups.values())


def _slots(
    groups: list[_Group], max_draft_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Every (group, depth) as a slot: its survival, how many requests have it, and the group's index."""
    lengths = [len(group.survival) for group in groups]
    values = np.array([value for group in groups for value in group.survival], dtype=np.float64)
    if max(lengths) > max_draft_tokens:
        raise ValueError(f"max_depths has a {max(lengths)}, above the {max_draft_tokens} drafts of the engine (K_max)")
    owners = np.repeat(np.arange(len(groups)), lengths)
    if values.size:
        grows = values[1:] > values[:-1]
        grows &= owners[1:] == owners[:-1]
        # A NaN makes both comparisons false.
        if grows.any() or not (values.min() >= 0.0 and values.max() <= 1.0):
            for group in groups:
                check_survival(group.survival, f"request {group.members[0]}")
    return values, np.array([len(group.members) for group in groups])[owners], owners


def _best_uniform(groups: list[_Group], num_requests: int, curve: Curve, depths: frozenset[int]) -> Allocation | None:
    """The best full-graph depth that every request may have; None where there is none."""
    deepest = min(len(group.survival) for group in groups)
    best: Allocation | None = None
    for depth in sorted(depths):
        if depth > deepest:
            break
        num_tokens = num_requests + sum(len(group.members) * sum(group.survival[:depth]) for group in groups)
        found = Allocation([depth] * num_requests, num_tokens, curve.uniform[depth], depth)
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def _cut(
    groups: list[_Group],
    order: NDArray[np.int64],
    counts: NDArray[np.int64],
    owners: NDArray[np.int64],
    num_drafts: int,
    num_requests: int,
) -> list[int]:
    """Depths when the first `num_drafts` of the ordered slots are taken, the last slot perhaps by some members only."""
    ends = np.cumsum(counts[order])
    num_whole = int(np.searchsorted(ends, num_drafts, side="right"))
    taken = np.bincount(owners[order[:num_whole]], minlength=len(groups)).tolist()
    depths = [0] * num_requests
    for group, depth in zip(groups, taken, strict=True):
        for index in group.members:
            depths[index] = depth
    if num_whole < len(order):
        left = num_drafts - (int(ends[num_whole - 1]) if num_whole else 0)
        for index in groups[int(owners[order[num_whole]])].members[:left]:
            depths[index] += 1
    return depths


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
