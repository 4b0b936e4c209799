"""The policy of replica counts: what it wants and why, and what bad data does to it."""

import dataclasses
import json
import math

import pytest

from benchmarks.scaling_replay import replay
from cluster.scaling import Decision, Observation, Pool, ScalingPolicy
from tests.scaling_cases import BAD, GOOD, FakeReplica, changed, settings, step_costs


class Service:
    """A few replicas under the policy, ticking every 10 s; each gets `rate` requests a second."""

    def __init__(self, num_replicas: int = 2, **changes: object) -> None:
        self.policy = ScalingPolicy(settings(**changes), step_costs(), max_k=3, max_num_seqs=8, max_ongoing_requests=64)
        self.replicas = [FakeReplica(f"r{index}") for index in range(num_replicas)]
        self.now_s, self.ongoing = 0.0, 8.0

    def tick(self, rate: float = 1.0, survival: tuple[float, ...] = GOOD, target: int | None = None) -> Decision:
        self.now_s += 10.0
        for replica in self.replicas:
            replica.serve("chat", round(10 * rate), survival)
        return self.decide(target)

    def decide(self, target: int | None = None) -> Decision:
        pool = Pool(len(self.replicas), target or len(self.replicas), self.ongoing)
        names = [replica.name for replica in self.replicas]
        readings = [replica.reading(self.now_s) for replica in self.replicas]
        return self.policy.decide(Observation(self.now_s, pool, names, readings))

    def run(self, ticks: int, rate: float = 1.0, survival: tuple[float, ...] = GOOD) -> Decision:
        for _ in range(ticks):
            decision = self.tick(rate, survival)
        return decision


def test_the_number_is_demand_over_planned_capacity() -> None:
    decision = Service(4).run(30, rate=1.5)
    assert decision.demand_tokens_per_s == pytest.approx(4 * 1.5 * 200, rel=0.01)
    assert decision.capacity_tokens_per_s is not None
    assert decision.needed is not None
    assert decision.needed == pytest.approx(1200 / (0.75 * decision.capacity_tokens_per_s), rel=0.01)
    assert decision.target == max(4, math.ceil(decision.needed))
    assert decision.source == "acceptance"
    assert "1200 tokens/s wanted" in decision.reason


def test_falling_acceptance_asks_for_more_before_any_queue() -> None:
    service = Service(3, utilisation=0.6)
    before = service.run(30, rate=2.0)
    after = service.run(6, rate=2.0, survival=BAD)
    assert before.capacity_tokens_per_s is not None
    assert after.capacity_tokens_per_s is not None
    assert after.capacity_tokens_per_s < 0.7 * before.capacity_tokens_per_s
    assert after.target > before.target
    assert service.ongoing == 8.0  # never moved


def test_a_fall_of_acceptance_that_many_steps_show_enters_at_once() -> None:
    service = Service(3)
    before = service.run(30, rate=2.0).capacity_tokens_per_s
    decision = service.run(2, rate=2.0, survival=BAD)
    assert before is not None
    assert decision.capacity_tokens_per_s is not None
    assert decision.capacity_tokens_per_s < 0.7 * before


def test_a_backlog_that_bears_the_fall_out_lifts_the_clamp() -> None:
    service = Service(3)
    before = service.run(30, rate=2.0).capacity_tokens_per_s
    service.ongoing = 300.0
    decision = service.run(3, rate=2.0, survival=BAD)
    assert before is not None
    assert decision.capacity_tokens_per_s == decision.measured_capacity_tokens_per_s
    assert "backlog" in decision.reason


def test_steady_traffic_never_moves_the_number() -> None:
    service = Service(2, utilisation=0.75)
    targets = {service.tick(rate=1.0 + 0.1 * (index % 2)).target for index in range(120)}
    assert len(targets) == 1


def test_the_dead_band_keeps_a_replica_that_would_be_needed_again() -> None:
    service = Service(2)
    needed = service.run(30, rate=1.0).needed
    assert needed is not None
    wide = Service(2, utilisation=0.75 * needed / 0.95)  # the demand now needs 0.95 of one replica
    decision = wide.run(30, rate=1.0)
    assert decision.needed == pytest.approx(0.95, abs=0.02)
    assert decision.target == 2
    assert "within the dead band" in decision.reason


def test_starting_replicas_forbid_scaling_down() -> None:
    service = Service(2)
    service.run(30, rate=1.0)
    decision = service.tick(rate=0.1, target=4)
    for _ in range(70):
        decision = service.tick(rate=0.1, target=4)
    assert decision.target == 4
    assert "2 replicas are starting" in decision.reason


def test_missing_data_goes_by_queue_length_and_never_down() -> None:
    service = Service(4)
    service.run(30, rate=1.0)
    service.replicas = [FakeReplica("new")] * 4
    service.now_s += 100.0
    pool = Pool(4, 4, 2.0)
    decision = service.policy.decide(Observation(service.now_s, pool, ["a", "b", "c", "d"]))
    assert (decision.target, decision.source) == (4, "queue_length")
    assert "no replica reports" in decision.reason
    busy = Pool(4, 4, 160.0)
    decision = service.policy.decide(Observation(service.now_s + 20, busy, ["a", "b", "c", "d"]))
    assert decision.target == 10


def test_silent_replicas_count_as_the_others_and_forbid_scaling_down() -> None:
    service = Service(4)
    full = service.run(60, rate=2.0)
    silent = service.replicas.pop()
    for _ in range(60):
        service.now_s += 10.0
        for replica in service.replicas:
            replica.serve("chat", 20)
        names = [*(replica.name for replica in service.replicas), silent.name]
        readings = [replica.reading(service.now_s) for replica in service.replicas]
        decision = service.policy.decide(Observation(service.now_s, Pool(4, 4, 8.0), names, readings))
    assert decision.demand_tokens_per_s == pytest.approx(full.demand_tokens_per_s, rel=0.02)
    assert decision.target >= full.target


def test_a_restart_is_no_drop_and_no_jump() -> None:
    service = Service(2)
    before = service.run(60, rate=2.0)
    service.replicas[0] = FakeReplica("r0")  # its counters are zero again
    after = service.run(3, rate=2.0)
    assert after.demand_tokens_per_s == pytest.approx(before.demand_tokens_per_s, rel=0.1)
    assert after.target == before.target


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peagle|arrived|chat": math.nan}, "no number"),
        ({"peagle|arrived|chat": -5.0}, "no count"),
        ({"peagle|arrived|chat": 1e9}, "at a time"),
        ({"peagle|accepted|chat|1": 1e15}, "cannot be"),
        ({"peagle|tokens|chat": 3.0}, "no counter"),
    ],
)
def test_one_replica_reporting_nonsense_is_left_out_and_named(values: dict[str, float], said: str) -> None:
    service = Service(3)
    before = service.run(60, rate=2.0)
    for _ in range(12):
        service.now_s += 10.0
        for replica in service.replicas:
            replica.serve("chat", 20)
        readings = [replica.reading(service.now_s) for replica in service.replicas]
        readings[0] = changed(readings[0], values)
        decision = service.policy.decide(Observation(service.now_s, Pool(3, 3, 8.0), ["r0", "r1", "r2"], readings))
    assert decision.source == "acceptance"
    assert decision.demand_tokens_per_s == pytest.approx(before.demand_tokens_per_s, rel=0.1)
    assert "r0 is left out" in decision.reason
    assert said in decision.reason


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_step_changes_no_number(step_s: float) -> None:
    service = Service(3)
    before = service.run(60, rate=2.0)
    service.now_s += step_s
    decisions = [service.tick(rate=2.0) for _ in range(30)]
    assert min(one.target for one in decisions) >= 3  # never down, whatever the clock says
    assert decisions[-1].target == before.target
    assert decisions[-1].demand_tokens_per_s == pytest.approx(before.demand_tokens_per_s, rel=0.1)


def test_a_new_head_is_judged_by_its_own_steps() -> None:
    service = Service(3, utilisation=0.6)
    before = service.run(60, rate=2.0)
    for _ in range(12):
        service.now_s += 10.0
        for replica in service.replicas:
            replica.serve("chat", 20, BAD)
        readings = [replica.reading(service.now_s, head="another") for replica in service.replicas]
        decision = service.policy.decide(Observation(service.now_s, Pool(3, 3, 8.0), ["r0", "r1", "r2"], readings))
    assert before.acceptance_length is not None
    assert decision.acceptance_length is not None
    assert decision.acceptance_length < 0.6 * before.acceptance_length
    assert decision.target > before.target


def test_scaled_to_zero_and_back() -> None:
    service = Service(1, target={"min": 0, "max": 4}, scale_to_zero=True, idle_s=60.0)
    service.run(30, rate=1.0)
    service.ongoing = 0.0
    decision = service.run(8, rate=0.0)
    assert (decision.target, decision.source) == (0, "idle")
    service.replicas = []
    asleep = service.policy.decide(Observation(service.now_s + 5, Pool(0, 0, 0.0), []))
    assert asleep.target == 0
    woken = service.policy.decide(Observation(service.now_s + 6, Pool(0, 0, 3.0), []))
    assert woken.target == 1
    for later_s in (16, 26, 36):  # it starts, and its client, told to come again, has no request here meanwhile
        assert service.policy.decide(Observation(service.now_s + later_s, Pool(0, 1, 0.0), [])).target == 1
    for later_s, target in ((46, 1), (90, 1), (110, 0)):
        assert service.policy.decide(Observation(service.now_s + later_s, Pool(1, 1, 0.0), ["r0"])).target == target


def test_without_scale_to_zero_idleness_leaves_a_replica() -> None:
    service = Service(3)
    service.run(30, rate=1.0)
    service.ongoing = 0.0
    assert service.run(90, rate=0.0).target == 1


def test_between_decisions_the_last_one_stands() -> None:
    service = Service()
    decision = service.run(30)
    service.now_s += 1.0
    assert service.decide() is decision


def test_queue_length_is_serves_rule_in_both_directions() -> None:
    policy = ScalingPolicy(
        settings(policy="queue_length", target_ongoing_requests=4.0),
        None,
        max_k=3,
        max_num_seqs=32,
        max_ongoing_requests=64,
    )
    assert policy.decide(Observation(0.0, Pool(3, 3, 21.0), ["a"])).target == 6
    assert policy.decide(Observation(20.0, Pool(3, 3, 4.0), ["a"])).target == 1


def test_the_log_replays_to_the_same_decisions_and_a_changed_one_shows() -> None:
    service = Service(2)
    service.run(40, rate=2.0)
    service.run(10, rate=2.0, survival=BAD)
    lines = service.policy.take_log()
    assert not service.policy.take_log()
    found = list(replay(lines))
    assert len(found) == 50
    assert not any(one.differs for one in found)
    assert found[-1].again.source == "acceptance"
    forged = json.loads(lines[-1])
    forged["decision"]["target"] += 1
    assert [one.differs for one in replay([*lines[:-1], json.dumps(forged)])][-1] == ["target"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda lines: lines[1:], "the log's beginning is missing"),
        (lambda lines: [*lines, "{"], "line 12"),
        (lambda lines: ['{"format": "another"}'], "format is 'another'"),
        (lambda lines: [lines[0], lines[1].replace('"num_running"', '"num_ruining"')], "num_running"),
    ],
)
def test_a_log_that_cannot_be_read_is_named(spoil: object, said: str) -> None:
    service = Service(2)
    service.run(10)
    with pytest.raises(ValueError, match=said):
        list(replay(spoil(service.policy.take_log()), "some.log"))  # type: ignore[operator]


def test_without_step_costs_acceptance_cannot_decide() -> None:
    with pytest.raises(ValueError, match="needs step costs"):
        ScalingPolicy(settings(), None, max_k=3, max_num_seqs=8, max_ongoing_requests=8)


def test_a_number_of_requests_that_is_none_breaks_nothing() -> None:
    service = Service(3)
    before = service.run(60, rate=2.0)
    service.ongoing = math.nan
    decision = service.run(2, rate=2.0)
    assert decision.target == before.target
    assert "requests are said to be nan" in decision.reason


def test_a_log_that_nobody_takes_stays_bounded_and_keeps_its_head() -> None:
    service = Service(1)
    service.run(1100)
    lines = service.policy.take_log()
    assert len(lines) == 1001
    assert "format" in json.loads(lines[0])


def test_a_decision_survives_json() -> None:
    decision = Service().run(30)
    assert json.loads(json.dumps(dataclasses.asdict(decision)))["target"] == decision.target
