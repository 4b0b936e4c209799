"""Drafts across the requests of a step, and the choice of K in plain cases, against every combination."""

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest

from cluster.depth import CostCurves, Demand, Objective, SurvivalError, allocate, best_depths, plan_step
from cluster.step_time import StepShape, default_step_times
from tests.step_tables import MS, Table, convex_table, flat, jagged_table, step_s, survival

CODE = (0.9, 0.8, 0.7, 0.6, 0.5)
CHAT = (0.5, 0.2, 0.1, 0.0, 0.0)


def step_rate(table: Table, survivals: Sequence[Sequence[float]], depths: Sequence[int]) -> float:
    num_tokens = len(depths) + sum(sum(one[:k]) for one, k in zip(survivals, depths, strict=True))
    return num_tokens / step_s(table, [1] * len(depths), depths)


@pytest.mark.parametrize("make_table", [convex_table, jagged_table])
def test_allocate_is_the_optimum(make_table):
    for seed in range(100):
        rng = random.Random(seed)
        table = make_table(rng, 5)
        known = [survival(rng, 5) for _ in range(4)]
        survivals = [rng.choice(known) for _ in range(4)]
        limits = rng.choice([[5] * 4, [rng.randint(0, 5) for _ in range(4)]])
        found = plan_step(survivals, limits, table)
        assert all(0 <= k <= limit for k, limit in zip(found.depths, limits, strict=True))
        best = max(step_rate(table, survivals, k) for k in product(*(range(limit + 1) for limit in limits)))
        assert step_rate(table, survivals, found.depths) == pytest.approx(best, rel=1e-9), seed
        assert found.tokens_per_s == pytest.approx(best, rel=1e-9), seed


def test_no_draft_pays():
    table = Table(5, base_s=0.0, per_token_s=1 * MS)  # a token costs the same wherever it stands
    found = plan_step([CODE] * 3, [5] * 3, table)
    assert found.depths == [0, 0, 0]
    assert found.reason == "no draft pays at 3 requests: 1000 tokens/s expected"
    plan = best_depths([Demand("code", 3, CODE), Demand("chat", 2, CHAT)], table)
    assert plan.depths == {"code": 0, "chat": 0}
    assert plan.reason == "no draft pays at 5 requests: 1000 tokens/s"


def test_full_graph_makes_all_drafts_cheaper_than_some():
    """A draft at depth 4 or 5 of chat is never accepted, yet leaving it out costs the full graph."""
    table = Table(5, per_token_s=0.1 * MS, full_graph_depths=frozenset({5}), off_graph=1.3)
    found = plan_step([CHAT, CODE], [5, 5], table)
    assert (found.depths, found.graph_depth) == ([5, 5], 5)
    assert found.reason.startswith("all on the full CUDA graph of K=5")
    plan = best_depths([Demand("chat", 1, CHAT), Demand("code", 1, CODE)], table)
    assert (plan.depths, plan.graph_depth) == ({"chat": 5, "code": 5}, 5)

    cheap_trim = Table(5, per_token_s=0.1 * MS, full_graph_depths=frozenset({5}), off_graph=1.0)
    assert plan_step([CHAT, CODE], [5, 5], cheap_trim).depths == [3, 5]
    # One request that may not have 5 drafts keeps the batch off the graph.
    assert plan_step([CHAT, CODE], [4, 5], table).graph_depth is None


def test_graph_of_a_depth_between():
    tiered = Table(5, 4 * MS, 1 * MS, full_graph_depths=frozenset({2}), off_graph=2.0)
    found = plan_step([CODE, CODE], [5, 5], tiered)
    assert (found.depths, found.graph_depth) == ([2, 2], 2)
    assert allocate([CODE, CODE], [5, 5], Table(5, 4 * MS, 1 * MS)) == [4, 4]


def test_engine_that_pads_runs_shallow_requests_on_the_tier():
    shape = {"full_graph_depths": frozenset({3, 5}), "off_graph": 1.5, "capture_sizes": {3: [8, 16]}}
    table = Table(5, 10 * MS, 0.5 * MS, padding_tokens=2, **shape)
    found = plan_step([CODE, CODE], [5, 2], table)  # 8 tokens in the graph, 7 used
    assert (found.depths, found.graph_depth) == ([3, 2], 3)
    assert found.step_s == pytest.approx(table.seconds(StepShape.uniform(2, 3)))
    plan = best_depths([Demand("code", 1, CODE), Demand("other", 1, CODE, max_depth=2)], table)
    assert (plan.depths, plan.graph_depth) == ({"code": 3, "other": 2}, 3)
    # Too far from full: 8 - 5 tokens.
    assert plan_step([CODE, CODE], [5, 0], table).graph_depth is None
    assert plan_step([CODE, CODE], [5, 2], Table(5, 10 * MS, 0.5 * MS, **shape)).graph_depth is None
    # The smallest graph of depth 3 has 16 tokens: too many to fill up.
    large = {**shape, "capture_sizes": {3: [16]}}
    assert plan_step([CODE, CODE], [5, 2], Table(5, 10 * MS, 0.5 * MS, padding_tokens=2, **large)).graph_depth is None


def test_deep_position_of_a_sure_request_outranks_the_first_of_a_doubtful_one():
    sure, doubtful = (0.99, 0.98, 0.97, 0.96, 0.95), (0.3, 0.1, 0.0, 0.0, 0.0)
    table = Table(5, base_s=10 * MS, per_token_s=2 * MS)
    assert allocate([doubtful, sure, doubtful], [5, 5, 5], table) == [0, 5, 0]
    assert allocate([doubtful, sure, doubtful], [5, 2, 5], table) == [0, 2, 0]


def test_staircase_is_filled_to_its_edge():
    table = Table(5, 10 * MS, 1 * MS, sizes=[8, 64])
    assert sum(allocate([CODE] * 4, [5] * 4, table)) == 4  # 8 tokens; the next graph has 64
    assert allocate([CODE] * 4, [5] * 4, flat(5)) == [5] * 4


def test_ties_take_fewer_drafts_and_first_requests():
    useless = (0.5, 0.0, 0.0, 0.0, 0.0)
    assert allocate([useless] * 2, [5, 5], flat(5)) == [1, 1]
    assert best_depths([Demand("a", 2, useless)], flat(5)).depths == {"a": 1}
    assert allocate([CODE] * 4, [5] * 4, Table(5, 10 * MS, 1 * MS, sizes=[6, 64])) == [1, 1, 0, 0]
    assert allocate([], [], flat(5)) == []


def test_more_load_never_deepens():
    for seed in range(100):
        rng = random.Random(seed)
        table, survivals = convex_table(rng, 7), [survival(rng, 7) for _ in range(3)]
        depth, deepest = 7, [7, 7, 7]
        for num in (1, 2, 3, 4, 8, 16, 32, 64):
            plan = best_depths([Demand("a", num, survivals[0])], table)
            assert plan.depths["a"] <= depth, (seed, num)
            depth = plan.depths["a"]
            found = allocate([one for one in survivals for _ in range(num)], [7] * 3 * num, table)
            now = [max(found[index * num : (index + 1) * num]) for index in range(3)]
            assert all(k <= before for k, before in zip(now, deepest, strict=True)), (seed, num)
            deepest = now


def test_no_drafter_and_no_drafts_allowed():
    assert allocate([(), ()], [0, 0], Table(0)) == [0, 0]
    assert allocate([CODE, CODE], [0, 0], Table(5)) == [0, 0]
    assert best_depths([Demand("a", 3, ())], Table(0)).depths == {"a": 0}


def test_unmeasured_default_is_shallow_under_load():
    published = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
    curves = CostCurves(default_step_times(7))
    depths = [max(allocate([published] * num, [7] * num, curves)) for num in (1, 4, 8, 16, 64)]
    assert depths == [7, 6, 4, 4, 3]


@pytest.mark.parametrize(
    ("survivals", "max_depths", "error", "message"),
    [
        ([CODE, (0.9, math.nan)], [5, 2], SurvivalError, "survival of request 1 at depth 2 is nan"),
        ([(1.2,)], [1], SurvivalError, "survival of request 0 at depth 1 is 1.2: it must be a probability"),
        ([CODE, (0.5, -0.1)], [5, 2], SurvivalError, "survival of request 1 at depth 2 is -0.1"),
        ([(0.5, 0.6)], [2], SurvivalError, "survival of request 0 grows from 0.5 to 0.6 at depth 2"),
        ([CODE, (0.5,)], [5, 2], SurvivalError, "request 1 may get 2 drafts but its survival has 1 depths"),
        ([CODE], [6], ValueError, r"max_depths goes from 6 to 6, outside 0\.\.5"),
        ([CODE], [-1], ValueError, r"max_depths goes from -1 to -1, outside 0\.\.5"),
        ([CODE], [5, 5], ValueError, "there are 1 survivals but 2 max_depths"),
    ],
)
def test_unusable_batches(survivals, max_depths, error, message):
    with pytest.raises(error, match=message):
        allocate(survivals, max_depths, Table(5))


def test_unusable_demands_and_tables():
    with pytest.raises(SurvivalError, match="survival of workload 'a' at depth 1 is nan"):
        Demand("a", 1, (math.nan,))
    with pytest.raises(SurvivalError, match="'a' may get 3 drafts but its survival has 1 depths"):
        Demand("a", 1, (0.5,), max_depth=3)
    with pytest.raises(ValueError, match="num_requests of 'a' is nan"):
        Demand("a", math.nan, CODE)
    with pytest.raises(ValueError, match="needs at least one demand"):
        best_depths([], Table(5))
    with pytest.raises(ValueError, match="a workload stands twice"):
        best_depths([Demand("a", 1, CODE)] * 2, Table(5))
    with pytest.raises(ValueError, match="max_depth of 'a' is 5, above the engine's K_max 3"):
        best_depths([Demand("a", 1, CODE)], Table(3))
    with pytest.raises(ValueError, match=r"the step-time table says 0\.0 s for StepShape\(num_requests=1"):
        allocate([CODE], [5], Table(5, base_s=0.0, per_token_s=0.0))
    for context in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match=f"context_tokens is {context}"):
            allocate([CODE], [5], Table(5), context)
    for objective in ({"kind": "speed"}, {"max_tpot_s": 0.0}, {"weight": math.nan}, {"max_tpot_s": math.nan}):
        name = next(iter(objective))
        with pytest.raises(ValueError, match=name):
            Objective(**objective)
