"""The simulated fleet: its engine against the step-by-step model, Serve's rules against Serve, and the comparison."""

import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate_scaling import merged, parse_args
from benchmarks.simulation.baselines import BatchWide
from benchmarks.simulation.engine_model import Engine, Simulation, Traffic
from benchmarks.simulation.fleet import Fleet, remembered_paths
from benchmarks.simulation.fleet_arms import AcceptanceArm, KnowingArm, QueueArm, StaticArm
from benchmarks.simulation.fleet_bench import Bench
from benchmarks.simulation.fleet_engine import Replica, Request, StepSeconds, Trajectory
from benchmarks.simulation.fleet_records import Arm, Arrival, Conditions, FleetRun, Swap
from benchmarks.simulation.fleet_report import at_equal_attainment, cheapest, hours_at, recovery_s
from benchmarks.simulation.fleet_traffic import SCENARIOS, draw, nothing_confirmed
from benchmarks.simulation.serve_rules import DelayedTarget, LookBack
from benchmarks.simulation.traces import Answer, Traces, num_steps
from cluster.acceptance import Counts
from tests.scaling_cases import step_times

K_MAX = 3


def answer(rng: np.random.Generator, good: float = 0.8, num_tokens: int = 120) -> bytes:
    """Drafts confirmed at each anchor, each with the chance `good`."""
    return bytes(min(int(rng.geometric(1 - good)) - 1, K_MAX) for _ in range(num_tokens))


def conditions(**changes: object) -> Conditions:
    raw: dict[str, object] = {
        "max_num_seqs": 8,
        "min_replicas": 1,
        "max_replicas": 8,
        "max_tpot_s": 0.02,
        "max_ttft_s": 2.0,
        "duration_s": 1200.0,
        "measured_from_s": 300.0,
        "start_time_s": 60.0,
        "prompt_tokens": 20,
    }
    return Conditions(**{**raw, **changes})  # type: ignore[arg-type]


def run(arm: Arm, rate: float, swaps: tuple[Swap, ...] = (), initial: int = 2, seed: int = 0) -> FleetRun:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate, round(1200 * rate)))
    arrivals = [Arrival(float(at_s), "chat", answer(rng)) for at_s in times_s if at_s < 1200]
    times = step_times()
    fleet = Fleet(conditions(), times, StepSeconds(times), arm, arrivals, swaps, initial, seed, remembered_paths())
    return fleet.finish()


@pytest.mark.parametrize("k", range(K_MAX + 1))
def test_a_trajectory_has_the_steps_and_the_counts_of_the_answer(k: int) -> None:
    confirmed = answer(np.random.default_rng(k))
    path = Trajectory.of(confirmed, k)
    assert path.num_steps == num_steps(confirmed, k)
    found = [(k, min(confirmed[anchor], k)) for anchor in path.anchors[:-1]]
    assert tuple(path.accepted[-1].tolist()) == Counts.from_steps(found).accepted[:k]


@pytest.mark.parametrize("rate", [0.5, 2.0, 3.5])
@pytest.mark.parametrize("k", [0, 3])
def test_a_replica_is_as_fast_as_the_step_by_step_model(k: int, rate: float) -> None:
    rng = np.random.default_rng(1)
    answers = [answer(rng) for _ in range(300)]
    arrivals_s = np.cumsum(rng.exponential(1 / rate, 300)).tolist()
    traffic = Traffic([Answer("chat", 0.0, 1.0, one) for one in answers], ["chat"] * 300, arrivals_s)
    engine = Engine(max_num_seqs=300, prompt_tokens=20, jitter=0.0)
    stepped = Simulation(engine, step_times(), BatchWide(k), traffic, rng, 0.0).finish()
    replica = Replica("r", StepSeconds(step_times()), remembered_paths(), K_MAX)
    for index, (one, at_s) in enumerate(zip(answers, arrivals_s, strict=True)):
        replica.admit(Request(index, "chat", one, 20, at_s), k, at_s)
    replica.advance(1e9)
    tpot_s = np.mean([(at_s - one.first_token_s) / len(one.answer) for one, at_s in replica.ended])
    assert tpot_s == pytest.approx(np.mean(stepped.tpot_s), rel=0.05)
    replica.count(1e9)
    total = replica.totals()["chat"]
    assert (total.num_arrived, total.num_ended) == (300, 300)
    if k:
        assert total.counts.num_steps == sum(num_steps(one, k) for one in answers)


def test_a_bad_head_is_counted_as_such_and_slows_the_running_request() -> None:
    ends_s = {}
    for swapped in (False, True):
        replica = Replica("r", StepSeconds(step_times()), remembered_paths(), K_MAX)
        replica.admit(Request(0, "chat", bytes([K_MAX] * 120), 20, 0.0), K_MAX, 0.0)
        replica.advance(0.5)
        if swapped:
            replica.change_head(0.5, nothing_confirmed)
        replica.advance(1e9)
        ends_s[swapped] = replica.ended[0][1]
        counts = replica.totals()["chat"].counts
        assert counts.accepted == ((0, 0, 0) if swapped else counts.drafted)
    assert ends_s[True] > 1.5 * ends_s[False]


def test_delays_and_factors_are_serves_own() -> None:
    policy = pytest.importorskip("ray.serve.autoscaling_policy")
    from ray.serve.config import AutoscalingConfig

    for seed in range(20):
        rng = random.Random(seed)
        factor = rng.choice([1.0, 0.3])
        config = AutoscalingConfig(
            min_replicas=0, max_replicas=9, upscale_delay_s=15, downscale_delay_s=60, downscaling_factor=factor
        )
        ours, state, target = DelayedTarget(3, 0, 9, 15.0, 60.0, factor), {}, 3
        wish = 3.0
        for tick in range(400):
            if rng.random() < 0.1:
                wish = rng.uniform(0, 12)
            running = max(1, target - rng.choice([0, 0, 1]))
            scaled = policy._apply_scaling_factors(wish, running, config)
            target, state = policy._apply_delay_logic(max(0, scaled), target, config, state, _now=tick * 2.0)
            target = min(9, max(0, target))
            assert ours.apply(wish, running, 1.0, tick * 2.0) == target, (seed, tick)


def test_the_way_back_from_zero_needs_no_delay() -> None:
    target = DelayedTarget(0, 0, 5, 15.0, 60.0)
    assert target.apply(0.0, 0, 0.0, 0.0) == 0
    assert target.apply(0.0, 0, 2.0, 1.0) == 1


def test_a_look_back_is_late_and_averaged() -> None:
    look = LookBack()
    for index in range(10):
        look.sample(float(index), 6.0 * index)
    assert look.seen == 0.0
    look.deliver()
    assert look.seen == np.mean([4, 5, 6, 7, 8, 9])


def test_every_request_is_answered_and_hours_are_counted() -> None:
    found = run(StaticArm(2), 2.0)
    assert found.gpu_hours == pytest.approx(2 * 900 / 3600)
    assert found.num_requests == sum(num for num, _ in found.minutes.values()) > 1500
    assert found.num_changes == 0
    assert run(StaticArm(2), 2.0).tpot_s == found.tpot_s


def test_too_few_replicas_miss_the_limits_and_more_keep_them() -> None:
    assert run(StaticArm(1), 8.0, initial=1).attainment < 0.2
    assert run(StaticArm(6), 8.0, initial=6).attainment > 0.95


@pytest.mark.parametrize("swapped", [False, True])
def test_our_arm_stands_still_on_steady_traffic_and_moves_when_the_head_fails(swapped: bool) -> None:
    times = step_times()
    swaps = (Swap(600.0, "bad", nothing_confirmed),) if swapped else ()
    arm = AcceptanceArm(conditions(), times, 0.7)
    found = run(arm, 6.0, swaps, initial=3)
    if not swapped:
        assert found.num_changes == 0
        return
    before = [number for at_s, number in found.targets if at_s < 600]
    after = [number for at_s, number in found.targets if 600 <= at_s < 700]
    assert max(after) > (before or [3])[-1]


def test_who_knows_the_collapse_orders_at_its_very_moment() -> None:
    arm = KnowingArm(1.2, 4.0, (600.0, 900.0), conditions().upscale_delay_s)
    found = run(arm, 2.0, initial=2)
    assert [(number, at_s) for at_s, number in found.targets] == [
        (4, pytest.approx(600.0, abs=2.0)),
        (2, pytest.approx(1200.0, abs=2.0)),
    ]


def test_the_right_number_follows_from_the_rate_and_both_capacities() -> None:
    rng = np.random.default_rng(0)
    good, bad = ([Answer(name, at, 1.0, answer(rng, share)) for name in ("coding", "writing")] * 3
                 for share, at in ((0.8, 0.0), (0.2, 1.0)))  # fmt: skip
    bench = Bench(conditions(), step_times(), Traces([*good, *bad], K_MAX), initial=4)
    usual, low = bench.phases("collapse of traffic")
    assert usual.tokens_per_s / usual.capacity.tokens_per_s == pytest.approx(4 * 0.75)
    assert low.capacity.tokens_per_s < usual.capacity.tokens_per_s
    headless = bench.phases("collapse of head")[1]
    assert (headless.tokens_per_s, headless.capacity.acceptance_length) == (usual.tokens_per_s, 1.0)
    assert list(bench.arms("steady")["foreknowledge"]) == []
    joined = Bench(conditions(), step_times(), Traces([*good, *bad], K_MAX), initial=4, num_joined=3)
    assert joined.requests_per_s == pytest.approx(bench.requests_per_s / 3, rel=0.1)
    assert {len(one) for one in joined.answers["code"]} == {360}


def test_a_queue_length_arm_follows_the_load() -> None:
    assert run(QueueArm(2.0), 8.0, initial=1).targets[-1][1] > 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_drawn_alike_for_a_seed_and_has_its_rate(name: str) -> None:
    rng = np.random.default_rng(0)
    answers = {pool: [answer(rng)] for pool in ("code", "chat", "sampled")}
    drawn = draw(name, 2.0, answers, 3)
    assert drawn.arrivals == draw(name, 2.0, answers, 3).arrivals
    assert drawn.arrivals != draw(name, 2.0, answers, 4).arrivals
    assert len(drawn.arrivals) == pytest.approx(2.0 * 4800 * (1.28 if name == "burst" else 1.0), rel=0.1)
    with pytest.raises(ValueError, match="is none of"):
        draw("lull", 2.0, answers, 0)


def test_hours_at_a_level_are_read_off_the_curve() -> None:
    attainment, hours = np.array([0.8, 0.9, 1.0]), np.array([1.0, 2.0, 4.0])
    assert hours_at(0.9, attainment, hours) == 2.0
    assert hours_at(0.95, attainment, hours) == pytest.approx(3.0)
    assert np.isnan(hours_at(0.99, attainment[:2], hours[:2]))


def curve(*points: tuple[float, float]) -> dict[str, list[FleetRun]]:
    return {
        f"s{index}": [FleetRun(num_requests=1000, num_kept=round(1000 * kept), gpu_hours=hours)] * 3
        for index, (kept, hours) in enumerate(points)
    }


def test_equal_attainment_compares_hours_and_says_what_is_out_of_reach() -> None:
    found = at_equal_attainment(curve((0.8, 1.0), (0.96, 2.0)), curve((0.8, 2.0), (1.0, 4.0)))
    by_level = {one["attainment"]: one for one in found}
    assert by_level[0.9]["ratio"] == pytest.approx(1.625 / 3.0, abs=1e-3)
    assert by_level[0.99]["ratio"] is None
    assert by_level[0.99]["reached"] == {"ours": False, "rival": True}


def test_the_cheapest_setting_keeps_the_level_everywhere() -> None:
    steady, burst = curve((0.96, 1.0), (0.99, 2.0), (1.0, 3.0)), curve((0.80, 1.0), (0.97, 2.0), (1.0, 3.0))
    assert cheapest([steady, burst], 0.95) == "s1"
    assert cheapest([steady, burst], 1.01) is None


def test_recovery_is_the_first_of_five_good_minutes() -> None:
    found = FleetRun()
    for minute in range(10, 30):
        found.minutes[minute] = (10, 10 if minute >= 17 and minute != 20 else 0)
    assert recovery_s(found, (600.0, 1800.0)) == 11 * 60.0
    found.minutes = dict.fromkeys(range(10, 30), (10, 0))
    assert recovery_s(found, (600.0, 1800.0)) == 1200.0


def test_arguments_that_contradict_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--traces", "t.npz", "--step-times", "s.json", "--out", str(tmp_path / "o.json")]
    for more, said in ((["--seeds", "0"], "--seeds"), (["--replicas", "9", "--max-replicas", "4"], "--max-replicas")):
        with pytest.raises(SystemExit):
            parse_args([*files, *more])
        assert said in capsys.readouterr().err


def test_a_queue_is_served_first_come_first_served() -> None:
    replica = Replica("r", StepSeconds(step_times()), remembered_paths(), K_MAX)
    rng = np.random.default_rng(0)
    waiting = deque(Request(index, "chat", answer(rng, num_tokens=60), 20, 0.0) for index in range(4))
    while waiting:
        replica.admit(waiting.popleft(), 2, 0.0)
    replica.advance(1e9)
    firsts = [one.first_token_s for one, _ in sorted(replica.ended, key=lambda pair: pair[0].index)]
    assert firsts == sorted(firsts)


def test_parts_are_merged_setting_by_setting_and_compared_again() -> None:
    def part(arm: str, **points: tuple[float, float]) -> dict[str, object]:
        rows = {
            name.replace("_", " "): {"attainment_by_seed": [kept] * 3, "gpu_hours_by_seed": [hours] * 3}
            for name, (kept, hours) in points.items()
        }
        return {"steady": {"arms": {arm: rows}}}

    found = merged(
        [
            part("acceptance", utilisation_0=(0.99, 3.0)),
            part("queue length", target_2=(1.0, 4.0), target_8=(0.8, 2.0)),
            part("acceptance", utilisation_1=(0.85, 1.0)),
        ]
    )["steady"]
    assert list(found["arms"]["acceptance"]) == ["utilisation 0", "utilisation 1"]
    at_90 = found["gpu_hours_at_equal_attainment"]["queue length"][0]
    assert (at_90["gpu_hours"], at_90["rival_gpu_hours"]) == (pytest.approx(1.714, abs=1e-3), 3.0)
