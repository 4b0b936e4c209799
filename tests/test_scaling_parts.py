"""The parts of autoscaling: counters, traffic, capacity, drafters, settings."""

import random

import pytest
from pydantic import ValidationError

from cluster.capacity import CapacityModel, Traffic
from cluster.scaling import Inputs, Pool, WorkloadDemand, decide
from cluster.settings import AutoscalingSettings
from cluster.traffic import CounterBook, CounterExport, Limits, ReadingError, TrafficHistory, WorkloadTotals, parse
from tests.scaling_cases import BAD, GOOD, FakeReplica, settings, step_costs, steps


def model(**changes: object) -> CapacityModel:
    return CapacityModel(step_costs(), **{"max_num_seqs": 8, "max_k": 3, **changes})  # type: ignore[arg-type]


def traffic(survival: tuple[float, ...] = GOOD, name: str = "chat", share: float = 1.0) -> Traffic:
    return Traffic(name, share, survival, 200.0, 100.0)


def test_export_and_parse_are_inverse() -> None:
    replica = FakeReplica("a")
    replica.serve("chat", 3)
    replica.serve("code:v1.2", 5, BAD)
    head, totals = parse(replica.reading(0.0).values)
    assert head
    assert totals == replica.totals
    assert parse(replica.reading(0.0, head="").values)[0] == "", "not known yet, which ends no head's counts"


def test_an_export_never_falls_when_the_replica_forgets_a_workload() -> None:
    export = CounterExport(max_workloads=2)
    chat = WorkloadTotals(5, 4, 40, 10, steps(8, GOOD))
    names = ["chat", "code", "sql"]
    before = export.flat("head", dict.fromkeys(names, chat))
    after = export.flat("head", {"code": chat})
    again = export.flat("head", dict.fromkeys(names, chat))
    assert before["peagle|arrived|default"] == 5
    assert all(after[name] >= value for name, value in before.items())
    assert again["peagle|arrived|code"] == 5
    assert again["peagle|arrived|chat"] == 10  # the forgotten one began anew


def test_a_counter_that_fell_is_counted_from_zero() -> None:
    book = CounterBook(Limits(64, 1e6))
    replica = FakeReplica("a")
    replica.serve("chat", 50)
    assert not book.absorb([replica.reading(0.0)], 0.0).totals  # the past of a replica just met
    replica.serve("chat", 10)
    assert book.absorb([replica.reading(10.0)], 10.0).totals["chat"].num_arrived == 10
    assert not book.absorb([replica.reading(10.0)], 12.0).num_new  # the same reading again
    restarted = FakeReplica("a")
    restarted.serve("chat", 7)
    new = book.absorb([restarted.reading(20.0)], 20.0)
    assert (new.totals["chat"].num_arrived, new.restarted) == (7, ["a"])


def test_arrivals_over_a_long_gap_are_left_out() -> None:
    book = CounterBook(Limits(64, 1e6))
    replica = FakeReplica("a")
    book.absorb([replica.reading(0.0)], 0.0)
    replica.serve("chat", 1000)
    assert not book.absorb([replica.reading(1.0)], 500.0).totals


def test_more_steps_than_an_engine_makes_are_nonsense() -> None:
    book = CounterBook(Limits(64, 10.0))
    replica = FakeReplica("a")
    book.absorb([replica.reading(0.0)], 0.0)
    replica.serve("chat", 5000)
    assert "steps in 10 s" in book.absorb([replica.reading(10.0)], 10.0).nonsense["a"]
    assert book.usable(10.0, 30.0, ["a"]) == (0, 1, 0)


def test_names_of_other_metrics_are_left_alone() -> None:
    values = {**FakeReplica("a").reading(0.0).values, "ongoing": 3.0}
    assert parse(values)[1] == {}
    with pytest.raises(ReadingError, match="head is missing"):
        parse({"peagle|arrived|chat": 1.0})


def arrivals(num: int) -> dict[str, WorkloadTotals]:
    return {"chat": WorkloadTotals(num, num, num * 200, num * 100)}


def test_a_steady_rate_is_averaged_and_a_jump_is_seen_at_once() -> None:
    rng = random.Random(0)
    history = TrafficHistory()
    rates = []
    for index in range(180):
        history.add(arrivals(sum(rng.random() < 0.2 for _ in range(100))), 0.0, 10.0 * index)
        rates.append(history.rates(10.0 * index)["chat"].requests_per_s)
    assert all(rate == pytest.approx(2.0, rel=0.1) for rate in rates[-90:])
    for index in range(180, 184):
        history.add(arrivals(60), 0.0, 10.0 * index)
    assert history.rates(1830.0)["chat"].requests_per_s > 5.0


def test_requests_that_queue_up_have_arrived_too() -> None:
    history = TrafficHistory()
    for index in range(30):
        history.add(arrivals(20), 10.0 * max(0, index - 20), 10.0 * index)  # 1 a second more waits since 200 s
    assert history.rates(290.0)["chat"].requests_per_s == pytest.approx(3.0, rel=0.2)


def test_a_trend_is_claimed_beyond_doubt_only() -> None:
    for rise, sign in ((0.0, 0), (0.3, 1), (-0.2, -1)):
        history = TrafficHistory()
        for index in range(90):
            history.add(arrivals(round(20 + rise * index)), 0.0, 10.0 * index)
        trend = history.trend(890.0)
        assert (trend > 0) - (trend < 0) == sign


def test_capacity_is_what_the_step_times_say() -> None:
    table, found = step_costs(), model().capacity([traffic()])
    # One workload, K = 3 at the full batch: 8 requests, 2.95 tokens a step; a prompt adds 100 tokens to one step.
    step_s = table.seconds(8, 32, 200.0)
    prompt_s = table.seconds(8, 32, 200.0, 100) - step_s
    expected = 1 / (step_s / (8 * (1 + sum(found_survival(3)))) + prompt_s / 200)
    assert (found.num_requests, dict(found.depths)) == (8, {"chat": 3})
    assert found.tokens_per_s == pytest.approx(expected, rel=0.01)


def found_survival(k: int) -> list[float]:
    """The survivals after rounding."""
    return [0.80, 0.64, 0.52][:k]


def test_capacity_falls_with_acceptance_and_the_plan_is_at_least_as_good_as_any_pinned_k() -> None:
    assert model().capacity([traffic(BAD)]).tokens_per_s < model().capacity([traffic()]).tokens_per_s
    for survival in (GOOD, BAD):
        best = model().capacity([traffic(survival)]).tokens_per_s
        pinned = [model(pinned_default=k).capacity([traffic(survival)]) for k in range(4)]
        assert [one.depths["chat"] for one in pinned] == [0, 1, 2, 3]
        assert best >= max(one.tokens_per_s for one in pinned) - 1e-9


def test_a_tpot_limit_makes_the_batch_smaller() -> None:
    free, tight = model().capacity([traffic()]), model(max_tpot_s=0.0145).capacity([traffic()])
    assert tight.num_requests < free.num_requests
    assert tight.tokens_per_s < free.tokens_per_s
    assert tight.meets_limit


def test_a_limit_that_nothing_keeps_is_named_and_costs_nothing() -> None:
    found = model(max_tpot_s=0.001).capacity([traffic()])
    assert found.hopeless == ("chat",)
    assert found.tokens_per_s == pytest.approx(model().capacity([traffic()]).tokens_per_s)


def test_many_workloads_are_averaged_and_pinned_ones_kept_apart() -> None:
    many = [traffic(name=f"w{index}", share=1.0) for index in range(10)]
    assert model(pinned={"w9": 1}).capacity(many).depths["w9"] == 1
    assert model().capacity(many).tokens_per_s == pytest.approx(model().capacity([traffic()]).tokens_per_s, rel=0.01)


def inputs(**changes: object) -> Inputs:
    chat = WorkloadDemand("chat", 6.0, 200.0, 100.0, GOOD, 1000.0)
    raw = {"now_s": 0.0, "target": Pool(4, 4), "workloads": (chat,), "history_s": 600.0, "num_reporting": 4}
    return Inputs(**{**raw, "settled_s": 600.0, **changes})  # type: ignore[arg-type]


def test_queue_length_goes_to_zero_after_idle_s_too() -> None:
    by_queue = settings(policy="queue_length", target={"min": 0, "max": 4}, scale_to_zero=True, idle_s=60.0)
    for num_wanted, idle_s, target in ((1, 59.0, 1), (3, 59.0, 1), (1, 60.0, 0), (0, 5.0, 0)):
        asked = inputs(target=Pool(num_wanted, num_wanted), idle_s=idle_s)
        assert decide(asked, None, by_queue).target == target


def test_bounds_hold_and_are_named() -> None:
    decision = decide(inputs(), model(), settings(target={"min": 1, "max": 2}))
    assert decision.target == 2
    assert "bounds 1..2" in decision.reason
    assert decide(inputs(workloads=()), model(), settings(target={"min": 3, "max": 9})).target == 3


@pytest.mark.parametrize("key", ["utilization", "min_replicas", "deadband"])
def test_unknown_keys_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        AutoscalingSettings.model_validate({"policy": "acceptance", "target": {"max": 2}, key: 1})
