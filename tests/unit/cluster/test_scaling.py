"""The policy of replica counts: what it wants and why, and what bad data does to it."""

import dataclasses
import json
import math
import random

import pytest

from cluster.acceptance import AcceptanceBook
from cluster.capacity import CapacityModel, WorkloadDemand
from cluster.counts import Ledger, TargetReport, WorkloadCounts
from cluster.scaling import (
    HALF_LIVES_STEPS,
    UP_TOLERANCE,
    AcceptanceMemory,
    Decision,
    Inputs,
    Pool,
    ScalingPolicy,
    decide,
)
from cluster.step_time import guessed_costs
from cluster.traffic import ReportBook, TrafficHistory
from tests.support.scaling_cases import BAD, COSTS, GOOD, FakeReplica, reported, settings, steps

MODEL = CapacityModel(max_num_seqs=8, max_k=3)
LENGTH = 200.0


class Service:
    """A few replicas under the policy, ticking every 10 s; each gets `rate` requests a second."""

    def __init__(self, num_replicas: int = 2, **changes: object) -> None:
        self.policy = ScalingPolicy(settings(**changes), MODEL, max_ongoing_requests=64)
        self.replicas = [FakeReplica(f"r{index}") for index in range(num_replicas)]
        self.now_s, self.ongoing = 0.0, 8.0

    def tick(
        self,
        rate: float = 1.0,
        survival: tuple[float, ...] = GOOD,
        target: int | None = None,
        head: str = "head",
        **changed: dict[str, object],
    ) -> Decision:
        self.now_s += 10.0
        for replica in self.replicas:
            replica.serve("chat", round(10 * rate), survival)
        names = [replica.name for replica in self.replicas]
        pool = Pool(len(names), target or len(names), self.ongoing)
        return self.policy.decide(self.now_s, pool, names, reported(self.replicas, self.now_s, head, **changed))

    def run(self, ticks: int, rate: float = 1.0, survival: tuple[float, ...] = GOOD, **changes: object) -> Decision:
        for _ in range(ticks):
            decision = self.tick(rate, survival, **changes)  # type: ignore[arg-type]
        return decision


# ---- the policy over time


def test_the_number_is_demand_over_planned_capacity() -> None:
    decision = Service(4).run(30, rate=1.5)
    assert decision.demand_tokens_per_s == pytest.approx(4 * 1.5 * 200, rel=0.01)
    assert decision.capacity_tokens_per_s is not None
    assert decision.needed == pytest.approx(1200 / (0.75 * decision.capacity_tokens_per_s), rel=0.01)
    assert decision.target == max(4, math.ceil(decision.needed))
    assert decision.source == "acceptance"
    assert "1200 tokens/s wanted" in decision.reason
    assert json.loads(json.dumps(dataclasses.asdict(decision)))["inputs"]["target"]["num_wanted"] == 4


def test_falling_acceptance_asks_for_more_before_any_queue() -> None:
    service = Service(3, utilisation=0.6)
    before = service.run(30, rate=2.0)
    soon = service.run(2, rate=2.0, survival=BAD)
    after = service.run(4, rate=2.0, survival=BAD)
    for later in (soon, after):  # many steps show it, so it enters at once
        assert later.capacity_tokens_per_s < 0.7 * before.capacity_tokens_per_s
    assert after.target > before.target
    assert service.ongoing == 8.0  # never moved


def test_a_backlog_that_bears_the_fall_out_lifts_the_limit_of_its_change() -> None:
    service = Service(3)
    service.run(30, rate=2.0)
    service.ongoing = 300.0
    decision = service.run(3, rate=2.0, survival=BAD)
    assert decision.capacity_tokens_per_s == decision.measured_capacity_tokens_per_s
    assert "backlog" in decision.reason


def test_steady_traffic_never_moves_the_number() -> None:
    service = Service(2, utilisation=0.75)
    targets = {service.tick(rate=1.0 + 0.1 * (index % 2)).target for index in range(120)}
    assert len(targets) == 1


def test_the_dead_band_keeps_a_replica_that_would_be_needed_again() -> None:
    needed = Service(2).run(30, rate=1.0).needed
    assert needed is not None
    decision = Service(2, utilisation=0.75 * needed / 0.95).run(30, rate=1.0)  # the demand needs 0.95 of one replica
    assert decision.needed == pytest.approx(0.95, abs=0.02)
    assert decision.target == 2
    assert "within the dead band" in decision.reason


def test_starting_replicas_forbid_scaling_down() -> None:
    service = Service(2)
    service.run(30, rate=1.0)
    decision = service.run(71, rate=0.1, target=4)
    assert decision.target == 4
    assert "2 replicas are starting" in decision.reason


def test_missing_data_goes_by_queue_length_and_never_down() -> None:
    service = Service(4)
    service.run(30, rate=1.0)
    names = ["a", "b", "c", "d"]
    decision = service.policy.decide(service.now_s + 100, Pool(4, 4, 2.0), names, {})
    assert (decision.target, decision.source) == (4, "queue_length")
    assert "no replica reports" in decision.reason
    assert service.policy.decide(service.now_s + 120, Pool(4, 4, 160.0), names, {}).target == 10


@pytest.mark.parametrize("costs", [None, guessed_costs(on_gpu=False)])
def test_step_costs_that_nobody_measured_decide_nothing(costs: object) -> None:
    service = Service(2)
    service.replicas = [FakeReplica("a", costs), FakeReplica("b", costs)]  # type: ignore[arg-type]
    decision = service.run(30)
    assert (decision.target, decision.source) == (2, "queue_length")
    assert "knows yet what its steps take" in decision.reason


def test_silent_replicas_count_as_the_others_and_forbid_scaling_down() -> None:
    service = Service(4)
    full = service.run(60, rate=2.0)
    silent = service.replicas.pop()
    for _ in range(60):
        service.now_s += 10.0
        for replica in service.replicas:
            replica.serve("chat", 20)
        names = [*(replica.name for replica in service.replicas), silent.name]
        decision = service.policy.decide(
            service.now_s, Pool(4, 4, 8.0), names, reported(service.replicas, service.now_s)
        )
    assert decision.demand_tokens_per_s == pytest.approx(full.demand_tokens_per_s, rel=0.02)
    assert decision.target >= full.target


def test_a_restart_is_no_drop_and_no_jump() -> None:
    service = Service(2)
    before = service.run(60, rate=2.0)
    service.replicas[0] = FakeReplica("r0")  # its counters are zero again
    assert "r0 restarted" in service.tick(rate=2.0).reason
    after = service.run(2, rate=2.0)
    assert after.demand_tokens_per_s == pytest.approx(before.demand_tokens_per_s, rel=0.1)
    assert after.target == before.target


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workloads": {"chat": [math.nan, 0, 0, 0, 0, [[], [], []]]}}, "must be started"),
        ({"workloads": {"chat": [-5, 0, 0, 0, 0, [[], [], []]]}}, "must be started"),
        ({"workloads": {"chat": [10**9, 0, 0, 0, 0, [[], [], []]]}}, "at a time"),
        ({"workloads": {"chat": [1, 1, 0, 9, 9, [[1], [1], [2]]]}}, "cannot be"),
        ({"workloads": None}, "cannot be read"),
        ({"step_costs": {"drafting_s": math.nan}}, "step costs"),
    ],
)
def test_a_replica_that_reports_nonsense_is_left_out_and_named(fields: dict[str, object], said: str) -> None:
    service = Service(3)
    before = service.run(60, rate=2.0)
    decision = service.run(12, rate=2.0, r0=fields)
    assert decision.source == "acceptance"
    assert decision.demand_tokens_per_s == pytest.approx(before.demand_tokens_per_s, rel=0.1)
    assert "r0 is left out" in decision.reason
    assert said in decision.reason


def test_a_new_head_is_judged_by_its_own_steps() -> None:
    service = Service(3, utilisation=0.6)
    before = service.run(60, rate=2.0)
    decision = service.run(12, rate=2.0, survival=BAD, head="another")
    assert decision.acceptance_length < 0.6 * before.acceptance_length
    assert decision.target > before.target


def test_low_traffic_with_a_new_head_is_judged_within_minutes() -> None:
    service = Service(2, utilisation=0.6)
    before = service.run(60, rate=0.1).capacity_tokens_per_s
    for num_ticks in range(1, 13):  # noqa: B007
        for replica in service.replicas:
            replica.count("chat", WorkloadCounts(1, 1, 0, 40, 20, steps(20, BAD)))
        if service.tick(0.0, head="another").capacity_tokens_per_s < 0.8 * before:
            break
    assert num_ticks <= 9  # 360 steps, 90 independent ones: fewer than MIN_STEPS


def test_scaled_to_zero_and_back() -> None:
    service = Service(1, target={"min": 0, "max": 4}, scale_to_zero=True, idle_s=60.0)
    service.run(30, rate=1.0)
    service.ongoing = 0.0
    decision = service.run(8, rate=0.0)
    assert (decision.target, decision.source) == (0, "idle")
    now_s = service.now_s

    def target(later_s: float, pool: Pool, *running: str) -> int:
        return service.policy.decide(now_s + later_s, pool, running, {}).target

    assert target(5, Pool(0, 0, 0.0)) == 0
    assert target(6, Pool(0, 0, 3.0)) == 1
    for later_s in (16, 26, 36):  # it starts, and its client, told to come again, has no request here meanwhile
        assert target(later_s, Pool(0, 1, 0.0)) == 1
    for later_s, wanted in ((46, 1), (90, 1), (110, 0)):
        assert target(later_s, Pool(1, 1, 0.0), "r0") == wanted


def test_without_scale_to_zero_idleness_leaves_a_replica() -> None:
    service = Service(3)
    service.run(30, rate=1.0)
    service.ongoing = 0.0
    assert service.run(90, rate=0.0).target == 1


def test_queue_length_is_serves_rule_in_both_directions() -> None:
    policy = ScalingPolicy(settings(policy="queue_length", target_ongoing_requests=4.0), MODEL, 64)
    assert policy.decide(0.0, Pool(3, 3, 21.0), ["a"], {}).target == 6
    assert policy.decide(20.0, Pool(3, 3, 4.0), ["a"], {}).target == 1


def test_queue_length_needs_no_drafter() -> None:
    policy = ScalingPolicy(settings(policy="queue_length"), CapacityModel(max_num_seqs=8, max_k=0), 64)
    replica = FakeReplica("a", costs=None)
    for now_s in range(0, 200, 10):
        replica.count("chat", WorkloadCounts(10, 10, 0, 2000, 1000))
        decision = policy.decide(float(now_s), Pool(1, 1, 33.0), ["a"], reported([replica], now_s, head=""))
    assert (decision.target, decision.source) == (3, "queue_length")


def test_a_number_of_requests_that_is_none_breaks_nothing() -> None:
    service = Service(3)
    before = service.run(60, rate=2.0)
    service.ongoing = math.nan
    decision = service.run(2, rate=2.0)
    assert decision.target == before.target
    assert "requests are said to be nan" in decision.reason


def test_capacity_is_planned_with_what_drafts_are_worth_at_the_planned_k() -> None:
    service = Service(3)
    (chat,) = service.run(30, rate=2.0).inputs.workloads
    believed = service.policy.memory.survival("chat")
    assert chat.gains == pytest.approx(believed.gains())
    assert chat.gains != pytest.approx(believed.mean, rel=0.01)
    assert sum(chat.low) < sum(chat.gains) < sum(chat.high)


# ---- one decision


def inputs(
    target: Pool = Pool(4, 4),  # noqa: B008
    survival: tuple[float, ...] = GOOD,
    num_steps: float = 1000.0,
    high: tuple[float, ...] = (),
    **changes: object,
) -> Inputs:
    """6 requests a second."""
    chat = WorkloadDemand("chat", 6.0, LENGTH, 100.0, survival, num_steps, survival if high else (), high)
    usual = {"workloads": (chat,), "costs": COSTS, "history_s": 600.0, "num_reporting": 4, "settled_s": 600.0}
    return Inputs(target, **{**usual, **changes})  # type: ignore[arg-type]


def decided(asked: Inputs, **changes: object) -> Decision:
    return decide(asked, MODEL, settings(**changes))


def capacity_of(survival: tuple[float, ...]) -> float:
    found = decided(inputs(survival=survival)).capacity_tokens_per_s
    assert found is not None
    return found


def test_what_piles_up_while_replicas_start_is_ordered_for_at_once() -> None:
    before_any_queue = decided(inputs(Pool(1, 1, 8.0)))
    planned = 6.0 * LENGTH / (0.75 * capacity_of(GOOD))
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
    found = decided(inputs(Pool(4, 4, 300.0)), start_time_s=0.0)
    assert found.needed == pytest.approx((6.0 * LENGTH + (300 - 4 * 8) * LENGTH / 60.0) / capacity_of(GOOD))


def test_a_need_within_the_tolerance_orders_nothing() -> None:
    just = 6.0 * LENGTH / capacity_of(GOOD)
    for share, more in ((1 + 0.8 * UP_TOLERANCE, 0), (1 + 1.2 * UP_TOLERANCE, 1)):
        asked = decided(inputs(Pool(4, 4)), utilisation=just / (4 * share), start_time_s=0.0)
        assert asked.needed == pytest.approx(4 * share)
        assert asked.target == 4 + more


WIDE_HIGH, NARROW_HIGH = (0.75, 0.55, 0.4), (0.205, 0.042, 0.011)


@pytest.mark.parametrize(
    ("num_steps", "high", "said"),
    [
        (25.0, NARROW_HIGH, "25 steps tell too little"),
        (25.0, WIDE_HIGH, "25 steps tell too little"),
        (1000.0, WIDE_HIGH, "at most 20 % a decision"),
        (1000.0, NARROW_HIGH, ""),
    ],
)
def test_a_fall_enters_as_far_as_its_interval_bears_it_out(
    num_steps: float, high: tuple[float, ...], said: str
) -> None:
    before, now = capacity_of(GOOD), capacity_of(BAD)
    decision = decided(inputs(Pool(6, 6), BAD, num_steps, high, capacity_before=before))
    assert decision.measured_capacity_tokens_per_s == now
    assert now <= decision.capacity_tokens_per_s <= capacity_of(high) + 1e-9
    assert said in decision.reason


def test_queue_length_goes_to_zero_after_idle_s_too() -> None:
    by_queue = settings(policy="queue_length", target={"min": 0, "max": 4}, scale_to_zero=True, idle_s=60.0)
    for num_wanted, idle_s, target in ((1, 59.0, 1), (3, 59.0, 1), (1, 60.0, 0), (0, 5.0, 0)):
        asked = inputs(target=Pool(num_wanted, num_wanted), idle_s=idle_s)
        assert decide(asked, MODEL, by_queue).target == target


def test_bounds_hold_and_are_named() -> None:
    decision = decided(inputs(), target={"min": 1, "max": 2})
    assert decision.target == 2
    assert "bounds 1..2" in decision.reason
    assert decided(inputs(workloads=()), target={"min": 3, "max": 9}).target == 3


def test_drafters_follow_the_targets_in_proportion() -> None:
    bounds = {"target": {"min": 1, "max": 20}, "drafter": {"min": 1, "max": 5}}
    decision = decided(inputs(drafter=Pool(1, 1)), **bounds)
    assert decision.drafter == math.ceil(decision.target / 4)
    unknown = decided(inputs(drafter=Pool(4, 4), num_reporting=0), **bounds)
    assert (unknown.source, unknown.drafter) == ("queue_length", 4), "no fewer on missing data"
    assert decided(inputs()).drafter is None


# ---- capacity


def demand(survival: tuple[float, ...] = GOOD, name: str = "chat", rate: float = 1.0) -> WorkloadDemand:
    return WorkloadDemand(name, rate, LENGTH, 100.0, survival)


def model(**changes: object) -> CapacityModel:
    return dataclasses.replace(MODEL, **changes)  # type: ignore[arg-type]


def test_capacity_is_what_the_step_costs_say() -> None:
    found = MODEL.capacity(COSTS, [demand()])
    # One workload, K = 3 at the full batch: 8 requests, 2.95 tokens a step; a prompt adds 100 tokens to one step.
    step_s = COSTS.seconds(8, 32, 200.0)
    prompt_s = COSTS.seconds(8, 32, 200.0, 100.0) - step_s
    expected = 1 / (step_s / (8 * (1 + sum(GOOD))) + prompt_s / 200)
    assert (found.num_requests, dict(found.depths)) == (8, {"chat": 3})
    assert found.tokens_per_s == pytest.approx(expected, rel=1e-6)


def test_capacity_falls_with_acceptance_and_the_plan_is_at_least_as_good_as_any_pinned_k() -> None:
    assert MODEL.capacity(COSTS, [demand(BAD)]).tokens_per_s < MODEL.capacity(COSTS, [demand()]).tokens_per_s
    for survival in (GOOD, BAD):
        best = MODEL.capacity(COSTS, [demand(survival)]).tokens_per_s
        pinned = [model(pinned_default=k).capacity(COSTS, [demand(survival)]) for k in range(4)]
        assert [found.depths["chat"] for found in pinned] == [0, 1, 2, 3]
        assert best >= max(found.tokens_per_s for found in pinned) - 1e-9


def test_a_tpot_limit_makes_the_batch_smaller() -> None:
    free, tight = (model(max_tpot_ms=limit_ms).capacity(COSTS, [demand()]) for limit_ms in (None, 14.5))
    assert tight.num_requests < free.num_requests
    assert tight.tokens_per_s < free.tokens_per_s
    assert not tight.missed


def test_a_limit_that_nothing_keeps_is_named_and_costs_nothing() -> None:
    found = model(max_tpot_ms=1.0).capacity(COSTS, [demand()])
    assert found.missed == ("chat",)
    assert found.tokens_per_s == pytest.approx(MODEL.capacity(COSTS, [demand()]).tokens_per_s)


def test_many_workloads_are_averaged_and_pinned_ones_kept_apart() -> None:
    many = [demand(name=f"w{index}") for index in range(10)]
    assert model(pinned={"w9": 1}).capacity(COSTS, many).depths["w9"] == 1
    alone = MODEL.capacity(COSTS, [demand()]).tokens_per_s
    assert MODEL.capacity(COSTS, many).tokens_per_s == pytest.approx(alone, rel=0.01)


# ---- what is believed of acceptance


class Reported:
    """Reports of one replica to a memory."""

    def __init__(self, memory: AcceptanceMemory) -> None:
        self._memory, self._ledger, self._counts = memory, Ledger(), steps(0, GOOD)

    def report(self, num_steps: int, survival: tuple[float, ...], head: str = "head") -> float:
        """AL at K_max that is believed after so many further steps."""
        self._counts += steps(num_steps, survival)
        report = TargetReport("r", head=head, workloads={"chat": WorkloadCounts(counts=self._counts)})
        self._memory.absorb(self._ledger.take([report]))
        return 1 + sum(self._memory.survival("chat").mean)


def test_a_collapse_is_believed_within_a_half_life_of_the_shortest_memory() -> None:
    replica = Reported(AcceptanceMemory(3))
    for _ in range(100):
        replica.report(500, GOOD)
    assert replica.report(round(HALF_LIVES_STEPS[-1]), BAD) < 1 + sum(GOOD) - 0.45 * (sum(GOOD) - sum(BAD))
    assert replica.report(2000, BAD) == pytest.approx(1 + sum(BAD), abs=0.15)
    # A memory full of what is over does not come back on the way.
    assert max(replica.report(500, BAD) for _ in range(100)) < 1 + sum(BAD) + 0.2


def test_what_stands_still_is_known_from_the_longest_memory() -> None:
    memory = AcceptanceMemory(3)
    replica = Reported(memory)
    for index in range(100):
        replica.report(500, tuple(value + (0.02 if index % 2 else -0.02) for value in GOOD))
    book = AcceptanceBook(3, half_life_steps=HALF_LIVES_STEPS[1])
    book.add("chat", steps(500_000, GOOD))
    assert memory.survival("chat").num_steps > 2 * book.survival("chat").num_steps


# ---- reports and traffic


def arrived(book: ReportBook, replicas: list[FakeReplica], now_s: float, time_s: float | None = None) -> int | None:
    reports = reported(replicas, now_s if time_s is None else time_s)
    _, counts = book.take(reports, [replica.name for replica in replicas], now_s)
    return None if counts is None else sum(each.num_started for each in counts.values())


def test_only_what_is_new_counts_as_arrived() -> None:
    book, replica = ReportBook(64), FakeReplica("a")
    replica.serve("chat", 50)
    assert arrived(book, [replica], 0.0) == 0, "the past of a replica just met"
    replica.serve("chat", 10)
    assert arrived(book, [replica], 10.0) == 10
    assert arrived(book, [replica], 12.0, time_s=10.0) is None, "the same report again"
    restarted = FakeReplica("a")
    restarted.serve("chat", 7)
    assert arrived(book, [restarted], 20.0) == 7
    restarted.serve("chat", 1000)
    assert arrived(book, [restarted], 500.0) == 0, "when in a long gap they came is not known"


def test_all_arrivals_of_a_replica_that_has_just_begun_are_new() -> None:
    book, old, fresh = ReportBook(64), FakeReplica("old"), FakeReplica("fresh")
    old.serve("chat", 50)
    assert arrived(book, [old], 0.0) == 0
    fresh.serve("chat", 16)
    book.take({}, ["old", "fresh"], 10.0)
    assert arrived(book, [old, fresh], 20.0) == 16


def test_replicas_that_report_fall_silent_and_go() -> None:
    book, replicas = ReportBook(64), [FakeReplica("a"), FakeReplica("b")]
    arrived(book, replicas, 0.0)
    assert (len(book.fresh(10.0, 30.0)), book.num_unusable(10.0, 30.0)) == (2, 0)
    arrived(book, replicas[:1], 40.0)
    assert (len(book.fresh(40.0, 30.0)), book.num_unusable(40.0, 30.0)) == (1, 0), "b is gone"
    assert (len(book.fresh(80.0, 30.0)), book.num_unusable(80.0, 30.0)) == (0, 1)


def add(history: TrafficHistory, num: int, queued: float, now_s: float) -> None:
    history.add({"chat": WorkloadCounts(num, num, 0, num * 200, num * 100)}, queued, now_s)


def test_a_steady_rate_is_averaged_and_a_jump_is_seen_at_once() -> None:
    rng = random.Random(0)
    history = TrafficHistory()
    rates = []
    for index in range(180):
        add(history, sum(rng.random() < 0.2 for _ in range(100)), 0.0, 10.0 * index)
        rates.append(history.rates(10.0 * index)["chat"].requests_per_s)
    assert all(rate == pytest.approx(2.0, rel=0.1) for rate in rates[-90:])
    for index in range(180, 184):
        add(history, 60, 0.0, 10.0 * index)
    assert history.rates(1830.0)["chat"].requests_per_s > 5.0


def test_requests_that_queue_up_have_arrived_too() -> None:
    history = TrafficHistory()
    for index in range(30):
        add(history, 20, 10.0 * max(0, index - 20), 10.0 * index)  # 1 a second more waits since 200 s
    assert history.rates(290.0)["chat"].requests_per_s == pytest.approx(3.0, rel=0.2)


def test_a_trend_is_claimed_beyond_doubt_only() -> None:
    for rise, sign in ((0.0, 0), (0.3, 1), (-0.2, -1)):
        history = TrafficHistory()
        for index in range(90):
            add(history, round(20 + rise * index), 0.0, 10.0 * index)
        trend = history.trend(890.0)
        assert (trend > 0) - (trend < 0) == sign


def test_a_rate_that_climbs_slowly_is_followed() -> None:
    history = TrafficHistory()
    for index in range(240):
        rate = 2.0 + 4.0 * index / 240
        add(history, round(10 * rate), 0.0, 10.0 * index)
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
        add(history, round(10 * counted), queued, 10.0 * index)
        rates.append(history.rates(10.0 * index)["chat"].requests_per_s)
        assert history.trend(10.0 * index) == 0.0
    assert queued == 0.0
    assert all(rate == pytest.approx(2.0, rel=0.1) for rate in rates[60:])
