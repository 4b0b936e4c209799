"""How soon autoscaling believes a collapse, how much it orders then, and what it must not take for one."""

import json

import pytest

from cluster.acceptance import AcceptanceBook
from cluster.capacity import CapacityModel
from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.scaling import (
    HALF_LIVES_STEPS,
    UP_TOLERANCE,
    AcceptanceMemory,
    Decision,
    Inputs,
    Observation,
    Pool,
    WorkloadDemand,
    decide,
)
from cluster.traffic import CounterBook, Limits, TrafficHistory, WorkloadTotals
from tests.scaling_cases import BAD, GOOD, FakeReplica, settings, step_costs, steps
from tests.test_scaling import Service

WIDE_HIGH, NARROW_HIGH = (0.75, 0.55, 0.4), (0.205, 0.042, 0.011)
LENGTH = 200.0


def report(head: str, counts: Counts) -> TargetReport:
    return TargetReport("r", head=head, workloads={"chat": WorkloadCounts(counts=counts)})


class Replica:
    """Reports of one replica to a memory."""

    def __init__(self, memory: AcceptanceMemory) -> None:
        self._memory, self._counts = memory, steps(0, GOOD)

    def report(self, num_steps: int, survival: tuple[float, ...], head: str = "head") -> float:
        """AL at K_max that is believed after so many further steps."""
        self._counts += steps(num_steps, survival)
        self._memory.absorb_all([report(head, self._counts)])
        return 1 + sum(self._memory.survival("chat").mean)


def test_a_collapse_is_believed_within_a_half_life_of_the_shortest_memory() -> None:
    replica = Replica(AcceptanceMemory(3))
    for _ in range(100):
        replica.report(500, GOOD)
    assert replica.report(round(HALF_LIVES_STEPS[-1]), BAD) < 1 + sum(GOOD) - 0.45 * (sum(GOOD) - sum(BAD))
    assert replica.report(2000, BAD) == pytest.approx(1 + sum(BAD), abs=0.15)


def test_a_memory_full_of_what_is_over_does_not_come_back_on_the_way() -> None:
    replica = Replica(AcceptanceMemory(3))
    for _ in range(100):
        replica.report(500, GOOD)
    replica.report(2500, BAD)
    lengths = [replica.report(500, BAD) for _ in range(100)]
    assert max(lengths) < 1 + sum(BAD) + 0.2


def test_what_stands_still_is_known_from_the_longest_memory() -> None:
    memory = AcceptanceMemory(3)
    replica = Replica(memory)
    for index in range(100):
        replica.report(500, tuple(one + (0.02 if index % 2 else -0.02) for one in GOOD))
    book = AcceptanceBook(3, half_life_steps=HALF_LIVES_STEPS[1])
    book.add("chat", steps(500_000, GOOD))
    assert memory.survival("chat").num_steps > 2 * book.survival("chat").num_steps


def test_a_new_head_has_a_memory_of_its_own() -> None:
    memory = AcceptanceMemory(3)
    Replica(memory).report(50_000, GOOD)
    memory.absorb_all([report("another", steps(10, BAD))])
    assert memory.survival("chat").num_steps < 10


def inputs(
    target: Pool,
    survival: tuple[float, ...] = GOOD,
    num_steps: float = 1000.0,
    high: tuple[float, ...] = (),
    capacity_before: float | None = None,
) -> Inputs:
    """6 requests a second."""
    chat = WorkloadDemand("chat", 6.0, LENGTH, 100.0, survival, num_steps, survival if high else (), high)
    return Inputs(
        0.0,
        target,
        workloads=(chat,),
        history_s=600.0,
        num_reporting=4,
        settled_s=600.0,
        capacity_before=capacity_before,
    )


def decided(asked: Inputs, **changes: object) -> Decision:
    return decide(asked, CapacityModel(step_costs(), max_num_seqs=8, max_k=3), settings(**changes))


def capacity_of(survival: tuple[float, ...]) -> float:
    found = decided(inputs(Pool(4, 4), survival=survival)).capacity_tokens_per_s
    assert found is not None
    return found


def test_what_piles_up_while_replicas_start_is_ordered_for_at_once() -> None:
    before_any_queue = decided(inputs(Pool(1, 1, 8.0)))
    planned = 6.0 * LENGTH / (0.75 * capacity_of(GOOD))
    assert before_any_queue.needed is not None
    assert before_any_queue.needed > 1.5 * planned
    assert "until the backlog is gone" in before_any_queue.reason
    # A start without delay leaves no time for anything to pile up.
    assert decided(inputs(Pool(1, 1, 8.0)), start_time_s=0.0).needed == pytest.approx(planned)


def test_a_backlog_that_ordered_replicas_will_have_worked_off_orders_no_more() -> None:
    alone = decided(inputs(Pool(3, 3, 150.0, 60.0)))
    assert alone.target > 1 + 6.0 * LENGTH / (0.75 * capacity_of(GOOD))
    again = decided(inputs(Pool(3, alone.target, 150.0, 60.0)))
    assert again.target == alone.target
    # Four have room enough to be done with as much before a fifth could serve.
    assert decided(inputs(Pool(4, 4, 100.0))).target == 4


def test_a_backlog_is_worked_off_by_full_replicas() -> None:
    found = decided(inputs(Pool(4, 4, 72.0)), start_time_s=0.0, drain_s=10.0)
    mu = capacity_of(GOOD)
    assert found.needed == pytest.approx((6.0 * LENGTH + (72 - 4 * 8) * LENGTH / 10.0) / mu)


def test_a_need_within_the_tolerance_orders_nothing() -> None:
    just = 6.0 * LENGTH / capacity_of(GOOD)
    for share, more in ((1 + 0.8 * UP_TOLERANCE, 0), (1 + 1.2 * UP_TOLERANCE, 1)):
        asked = decided(inputs(Pool(4, 4)), utilisation=just / (4 * share), start_time_s=0.0)
        assert asked.needed == pytest.approx(4 * share)
        assert asked.target == 4 + more


@pytest.mark.parametrize(
    ("num_steps", "high", "said"),
    [
        (25.0, NARROW_HIGH, ""),
        (25.0, WIDE_HIGH, "25 steps tell too little"),
        (1000.0, WIDE_HIGH, "at most 20 % a decision"),
        (1000.0, NARROW_HIGH, ""),
    ],
)
def test_a_fall_enters_as_far_as_its_interval_bears_it_out(
    num_steps: float, high: tuple[float, ...], said: str
) -> None:
    before, now = capacity_of(GOOD), capacity_of(BAD)
    asked = inputs(Pool(6, 6), survival=BAD, num_steps=num_steps, high=high, capacity_before=before)
    decision = decided(asked)
    assert decision.measured_capacity_tokens_per_s == now
    assert decision.capacity_tokens_per_s is not None
    assert now <= decision.capacity_tokens_per_s <= capacity_of(high) + 1e-9
    assert said in decision.reason
    assert ("tell too little" in decision.reason or "on the way" in decision.reason) is bool(said)


def test_low_traffic_with_a_new_head_is_judged_within_minutes() -> None:
    service = Service(2, utilisation=0.6)
    before = service.run(60, rate=0.1).capacity_tokens_per_s
    for num_ticks in range(1, 13):  # noqa: B007
        service.now_s += 10.0
        for replica in service.replicas:
            replica.totals["chat"] = replica.totals["chat"].plus(WorkloadTotals(1, 1, 40, 20, steps(20, BAD)))
        readings = [replica.reading(service.now_s, head="another") for replica in service.replicas]
        decision = service.policy.decide(Observation(service.now_s, Pool(2, 2, 2.0), ["r0", "r1"], readings))
        assert before is not None
        assert decision.capacity_tokens_per_s is not None
        if decision.capacity_tokens_per_s < 0.8 * before:
            break
    assert num_ticks <= 9  # 360 steps, 90 independent ones: fewer than MIN_STEPS


def test_all_arrivals_of_a_replica_that_has_just_begun_are_new() -> None:
    book = CounterBook(Limits(64, 1e6))
    old, fresh = FakeReplica("old"), FakeReplica("fresh")
    old.serve("chat", 50)
    book.note_running(["old"], 0.0)
    assert not book.absorb([old.reading(0.0)], 0.0).totals
    fresh.serve("chat", 16)
    for now_s in (10.0, 20.0):
        book.note_running(["old", "fresh"], now_s)
    assert book.absorb([fresh.reading(20.0)], 20.0).totals["chat"].num_arrived == 16


def arrived(history: TrafficHistory, rate: float, queued: float, now_s: float) -> None:
    num = round(10 * rate)
    history.add({"chat": WorkloadTotals(num, num, num * 200, num * 100)}, queued, now_s)


def test_a_rate_that_climbs_slowly_is_followed() -> None:
    history = TrafficHistory()
    for index in range(240):
        rate = 2.0 + 4.0 * index / 240
        arrived(history, rate, 0.0, 10.0 * index)
        found = history.rates(10.0 * index)["chat"]
        if index > 60:
            here = found.requests_per_s * (1 + history.trend(10.0 * index) * found.window_s / 2)
            assert here == pytest.approx(rate, rel=0.15)


def test_a_queue_that_fills_and_empties_moves_no_rate() -> None:
    history = TrafficHistory()
    queued, rates = 0.0, []
    for index in range(240):
        counted = 2.0 + (-1.0 if 100 <= index < 120 else 2.0 if 120 <= index < 130 else 0.0)
        queued += 10.0 * (2.0 - counted)
        arrived(history, counted, queued, 10.0 * index)
        rates.append(history.rates(10.0 * index)["chat"].requests_per_s)
        assert history.trend(10.0 * index) == 0.0
    assert queued == 0.0
    assert all(rate == pytest.approx(2.0, rel=0.1) for rate in rates[60:])


def test_capacity_is_planned_with_what_drafts_are_worth_at_the_planned_k() -> None:
    service = Service(3)
    service.run(30, rate=2.0)
    logged = json.loads(service.policy.take_log()[-1])["inputs"]["workloads"][0]
    believed = service.policy.memory.survival("chat")
    assert logged["gains"] == pytest.approx(list(believed.gains()))
    assert logged["gains"] != pytest.approx(list(believed.mean), rel=0.01)
    assert sum(logged["low"]) < sum(logged["gains"]) < sum(logged["high"])
