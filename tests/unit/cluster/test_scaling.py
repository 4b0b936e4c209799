"""The policy of replica counts: what it wants and why, and what bad data does to it."""

import math
import random
from typing import Any

import pytest

from cluster.counts import CounterDeltas, DeltaTracker, WorkloadCounts
from cluster.k_policy import KPolicy
from cluster.request import TRIAL_SUFFIX, KRules
from cluster.scaling import Decision, Pool, ScalingPolicy, replica_capacity
from cluster.step_latency import guessed_latency
from cluster.traffic import TrafficHistory, WorkloadTraffic
from tests.support.scaling_cases import BAD, GOOD, LATENCY, FakeReplica, settings


def k_policy() -> KPolicy:
    """Of engines that run 8 requests at a time."""
    return KPolicy(KRules(3, 3, 3), max_num_seqs=8)


class Service:
    """A few replicas and their router, which decides every 10 s; each replica gets `rate` requests a second."""

    def __init__(self, num_replicas: int = 2, **changes: object) -> None:
        self.policy, self.k_policy = ScalingPolicy(settings(**changes)), k_policy()
        self.replicas = [FakeReplica(f"r{index}") for index in range(num_replicas)]
        self.now_s, self.num_running = 0.0, num_replicas

    def decide(self, target: Pool, drafter: Pool | None = None, head: str = "h") -> Decision:
        """A round of reports, and a decision."""
        reports = [replica.report(self.now_s, head) for replica in self.replicas]
        deltas = self.k_policy.observe(reports, self.now_s)
        self.policy.observe(deltas, reports, self.now_s)
        return self.policy.decide(self.now_s, target, drafter, self.k_policy)

    def run(self, ticks: int, rate: float = 1.0, rates: Any = GOOD, wanted: int = 0, head: str = "h") -> Decision:
        """`wanted`: replicas that Serve wants, else those that run."""
        for _ in range(ticks):
            self.now_s += 10.0
            for replica in self.replicas:
                replica.serve("chat", round(10 * rate), rates)
            decision = self.decide(Pool(self.num_running, wanted or self.num_running), head=head)
        return decision


# ---- the policy over time


def test_the_number_is_demand_over_planned_capacity() -> None:
    decision = Service(4).run(30, rate=1.5)
    assert decision.demand_tokens_per_s == pytest.approx(4 * 1.5 * 200, rel=0.01)
    assert decision.needed == pytest.approx(1200 / (0.75 * decision.capacity_tokens_per_s), rel=0.01)
    assert decision.target == max(4, math.ceil(decision.needed))
    assert decision.source == "acceptance"
    assert "1200 tokens/s wanted" in decision.reason


def test_falling_acceptance_asks_for_more_before_any_queue() -> None:
    service = Service(3, utilisation=0.6)
    before = service.run(30, rate=2.0)
    soon = service.run(2, rate=2.0, rates=BAD)
    after = service.run(4, rate=2.0, rates=BAD)
    for later in (soon, after):
        assert later.capacity_tokens_per_s < 0.7 * before.capacity_tokens_per_s
    assert after.target > before.target
    assert after.ongoing_requests == 0


def test_steady_traffic_never_moves_the_number() -> None:
    service = Service(2, utilisation=0.75)
    targets = {service.run(1, rate=1.0 + 0.1 * (index % 2)).target for index in range(120)}
    assert targets - {None} == {2}


def test_starting_replicas_forbid_scaling_down_as_long_as_they_may_come() -> None:
    service = Service(2, start_time_s=400.0)
    service.run(30, rate=1.0)
    decision = service.run(71, rate=0.1, wanted=4)
    assert decision.target == 4
    assert "2 replicas are starting" in decision.reason
    assert service.run(20, rate=0.1, wanted=4).target < 4, "there is no room for them"


def test_missing_data_leaves_the_target_to_the_queue_and_takes_no_drafter_away() -> None:
    service = Service(4, target={"min": 1, "max": 20}, drafter={"min": 1, "max": 20})
    service.run(30, rate=1.0)
    service.replicas, service.now_s = [], service.now_s + 100
    decision = service.decide(Pool(4, 4), Pool(9, 9))
    assert (decision.target, decision.source, decision.drafter) == (None, "queue_length", 9)
    assert "only 0 of 4 replicas report, so by queue length and never down" in decision.reason


def test_few_verified_steps_and_a_step_latency_that_nobody_measured_decide_nothing() -> None:
    service = Service(2)
    service.run(30)
    few = service.run(1, rate=0.1, head="a new head")  # its first steps are those between two reports of it
    assert "tell too little of acceptance" in few.reason
    assert service.run(6, head="a new head").source == "acceptance"
    for name, rules in {"another": KRules(3, 0, 0), "a third": KRules(3, 3, 0, {}, False)}.items():
        service.k_policy.rules = rules
        assert service.run(1, rate=0.1, head=name).source == "acceptance", "where nothing is to be drafted"
    for latency in (None, guessed_latency(on_gpu=False)):
        service = Service(2)
        service.replicas = [FakeReplica("a", latency), FakeReplica("b", latency)]
        unmeasured = service.run(30)
        assert "knows yet what its steps take" in unmeasured.reason
        assert [(each.target, each.source) for each in (few, unmeasured)] == [(None, "queue_length")] * 2


def test_silent_replicas_count_as_the_others_and_forbid_scaling_down() -> None:
    service = Service(4)
    full = service.run(60, rate=2.0)
    del service.replicas[-1]
    decision = service.run(60, rate=2.0)
    assert decision.demand_tokens_per_s == pytest.approx(full.demand_tokens_per_s, rel=0.02)
    assert decision.target >= (full.target or 0)


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_restart_of_the_router_waits_for_data_and_then_says_the_same(is_saved: bool) -> None:
    """Hours of counts are no arrivals, and where the posteriors were saved no step is needed again."""
    service = Service(3)
    before = service.run(60, rate=2.0)
    saved = service.k_policy.tracker.last_reports, service.k_policy.posteriors.snapshot()
    service.policy, service.k_policy = ScalingPolicy(settings()), k_policy()
    if is_saved:
        service.k_policy.restore(*saved)
    assert [service.run(1, rate=2.0).source for _ in range(4)] == [*["queue_length"] * 3, "acceptance"]
    after = service.run(3, rate=2.0)
    assert after.needed == pytest.approx(before.needed, rel=0.05)
    assert after.target == before.target


def test_scaled_to_zero_and_back() -> None:
    service = Service(1, target={"min": 0, "max": 4}, idle_s=60.0)
    service.run(30, rate=1.0)
    decision = service.run(8, rate=0.0)
    assert (decision.target, decision.source) == (0, "idle")
    service.replicas = []

    def target(seconds: float, pool: Pool) -> int | None:
        service.now_s += seconds
        return service.decide(pool).target

    assert target(5, Pool(0, 0)) == 0
    service.policy.traffic.note_busy(service.now_s)
    assert target(1, Pool(0, 0)) is None, "the queue asks for at least one"
    for _ in range(3):  # it starts, and its client, told to come again, has no request here meanwhile
        assert target(10, Pool(0, 1)) is None
    service.replicas = [FakeReplica("r1", started_s=service.now_s)]
    assert [target(seconds, Pool(1, 1)) for seconds in (10, 44, 20)] == [1, 1, 0]


def test_a_request_that_runs_keeps_the_last_target() -> None:
    service = Service(1, target={"min": 0, "max": 4}, idle_s=60.0)
    service.run(30, rate=1.0)
    service.replicas[0].start("chat", 1)
    assert service.run(30, rate=0.0).target == 1


def test_queue_length_is_left_to_serve_and_drafters_follow_its_number() -> None:
    service = Service(3, policy="queue_length", target={"min": 1, "max": 8}, drafter={"min": 1, "max": 4})
    service.run(4)
    decision = service.decide(Pool(3, 6), Pool(2, 2))
    assert (decision.target, decision.source, decision.drafter) == (None, "queue_length", 3)
    assert "never down" not in decision.reason


# ---- one decision


def test_what_piles_up_while_replicas_start_is_ordered_for_at_once() -> None:
    service = Service(2, utilisation=1.0, start_time_s=0.0)
    calm = service.run(30, rate=1.0)
    for replica in service.replicas:
        replica.start("chat", 60)
    piled_up = service.run(6, rate=1.0)
    assert piled_up.needed > 1.5 * calm.needed
    assert "until the backlog is gone" in piled_up.reason
    slow = Service(1, start_time_s=180.0).run(30, rate=3.0)
    quick = Service(1, start_time_s=0.0).run(30, rate=3.0)
    assert (slow.needed or 0) > (quick.needed or 9) * 1.5


def test_requests_that_wait_in_front_of_the_engines_have_arrived() -> None:
    service = Service(2)
    before = service.run(30)
    for _ in range(6):
        for replica in service.replicas:
            replica.num_queued += 10
        after = service.run(1)
    assert after.ongoing_requests > 50
    assert (after.demand_tokens_per_s or 0) > 1.9 * (before.demand_tokens_per_s or 9)


def test_bounds_hold_and_are_named() -> None:
    decision = Service(2, target={"min": 1, "max": 2}).run(30, rate=6.0)
    assert decision.target == 2
    assert "bounds 1..2" in decision.reason
    assert Service(3, target={"min": 3, "max": 9}).run(200, rate=0.0).target == 3


def test_drafters_follow_the_targets_in_proportion() -> None:
    decision = Service(3, target={"min": 1, "max": 20}, drafter={"min": 1, "max": 5}).run(30, rate=6.0)
    assert (decision.target or 0) > 4
    assert decision.drafter == math.ceil((decision.target or 0) / 4)
    assert Service(2).run(30).drafter is None


# ---- capacity


def test_capacity_is_what_the_step_latency_says() -> None:
    service = Service(1)
    service.run(100)
    capacity, length = replica_capacity(service.k_policy, {"chat": WorkloadTraffic(1.0, 200.0, 100.0)})
    # One workload, K = 3 at the full batch: 8 requests, 2.95 tokens a step; a prompt adds 100 tokens to one step.
    step_s = LATENCY.seconds(8, 32)
    prompt_s = LATENCY.seconds(8, 32, 100.0) - step_s
    assert length == pytest.approx(1 + sum(GOOD), rel=0.01)
    assert capacity == pytest.approx(1 / (step_s / (8 * length) + prompt_s / 200), rel=1e-6)
    shared = {"chat": WorkloadTraffic(1.0, 200.0, 100.0), "other": WorkloadTraffic(1.0, 200.0, 100.0)}
    assert replica_capacity(service.k_policy, shared)[0] == pytest.approx(capacity, rel=0.01)
    service.k_policy.rules = KRules(3, 3, 3, {"chat": 0}, is_adaptive=True)
    found = {replica_capacity(service.k_policy, {name: shared["chat"]}) for name in ("chat", f"chat{TRIAL_SUFFIX}")}
    assert len(found) == 1, "a trial has the K of its workload"


# ---- arrivals


def test_only_what_was_counted_in_the_last_minute_has_arrived() -> None:
    tracker, replica = DeltaTracker(), FakeReplica("a")

    def arrived(now_s: float) -> int | None:
        counts = tracker.update([replica.report(now_s)]).workloads.get("chat")
        return None if counts is None else counts.num_started

    replica.serve("chat", 50)
    assert arrived(3600.0) is None, "an hour of a replica just met"
    replica.serve("chat", 10)
    assert arrived(3610.0) == 10
    replica.serve("chat", 1000)
    assert arrived(4000.0) is None, "when in a long gap they came is not known"
    replica = FakeReplica("a", started_s=4000.0)
    replica.serve("chat", 7)
    assert arrived(4010.0) == 7, "all of a replica that has just started"


def add(history: TrafficHistory, num: int, now_s: float) -> None:
    history.add({"chat": WorkloadCounts(num, num, 0, num * 200, num * 100)}, 0.0, now_s)


def test_a_steady_rate_is_averaged_and_a_jump_is_seen_within_a_minute() -> None:
    rng = random.Random(0)
    history = TrafficHistory()
    rates = []
    for index in range(180):
        add(history, sum(rng.random() < 0.2 for _ in range(100)), 10.0 * index)
        rates.append(history.by_workload().get("chat", (0.0, 0.0, 0.0)))
    assert all(rate == pytest.approx((2.0, 200.0, 100.0), rel=0.2) for rate in rates[-90:])
    for index in range(180, 186):
        add(history, 60, 10.0 * index)
    assert history.by_workload()["chat"].requests_per_s > 4.0


def test_after_a_gap_the_history_begins_anew() -> None:
    history = TrafficHistory()
    for index in range(20):
        add(history, 20, 10.0 * index)
    assert history.history_s(190.0) == 190.0
    add(history, 5000, 900.0)
    assert (history.history_s(905.0), history.by_workload()) == (5.0, {})
    history.add(CounterDeltas().workloads, 0.0, 910.0)
    assert history.idle_s(910.0) == 10.0
