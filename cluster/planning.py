"""Which K each workload gets on a replica: the optimum over all workloads together.

Enters: what each workload asks for (`Demand`) and the step times. Leaves: a `Plan` with its reason. Pure: no memory,
no clock. Never knows: requests, posteriors, HTTP.

Formulas: `cluster.depth`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product

import numpy as np

from cluster.demand import Demand, Plan
from cluster.sharing import Assignment, Depths, Sharing
from cluster.step_costs import CostCurves, StepCosts

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
