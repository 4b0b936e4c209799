"""The comparison as a whole: ours against the others, the controls, and what the command writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.arms import FlatCosts, PlainTimes
from benchmarks.simulation.baselines import BatchWide
from benchmarks.simulation.comparison import Bench, Load, Remembered, interval, mistaken, over_range, ratio, shuffled
from benchmarks.simulation.engine_model import Engine
from benchmarks.simulation.learned import Learned, counts_of
from benchmarks.simulation.traces import Kind, Traces, even, mixes, synthetic
from cluster.acceptance import Counts
from cluster.step_time import StepShape, StepTimes
from tests.measured_times import measured_plain_times, measured_times

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "results" / "2026-11-21-traces-smollm2-135m.npz"
CODE = (0.88, 0.77, 0.66, 0.56, 0.48, 0.40, 0.34)
CHAT = (0.64, 0.39, 0.23, 0.13, 0.08, 0.05, 0.03)
CLOSED = Load.parse("closed:32")


def bench(mix: str = "apps", num_requests: int = 250) -> Bench:
    return Bench(Traces.load(REAL).up_to(7), Remembered(measured_times()), mixes()[mix], Engine(), num_requests)


def test_ours_is_near_the_best_fixed_depth_or_better() -> None:
    """At 32 requests of five workloads; measured 1.04 with five times the requests."""
    one = bench()
    traffic = one.traffic(CLOSED, 0)
    fixed = {k: one.run(BatchWide(k), traffic, 0).tokens_per_s for k in range(8)}
    ours = one.run(Learned(measured_times(), 7, 0), traffic, 0)
    assert ours.tokens_per_s > 0.98 * max(fixed.values())
    depths = {name: ours.drafted_by_label[name] / ours.steps_by_label[name] for name in ours.steps_by_label}
    assert depths["code"] > depths["sampled"] + 2, depths
    assert ours.num_changes / ours.seconds < 1, "K flaps"


def test_traffic_that_cannot_be_told_apart_gets_the_depth_of_its_load() -> None:
    """128 requests under one name, measured at K_max first: survivals measured there do not say what K = 3 would give.
    Taken as if they did, they keep K at 7 and give 0.88 of the best fixed K."""
    one = bench(num_requests=600)
    traffic = one.traffic(Load.parse("closed:128"), 0)
    fixed = {k: one.run(BatchWide(k), traffic, 0).tokens_per_s for k in (2, 3, 4, 7)}
    ours = one.run(Learned(measured_times(), 7, 0, by_workload=False), traffic, 0)
    assert ours.tokens_per_s > 0.96 * max(fixed.values())
    assert fixed[7] < 0.92 * max(fixed.values())


def test_knowing_workloads_pays_and_shuffled_labels_do_not() -> None:
    one = bench("code-chat")
    gains = {"true": [], "shuffled": []}
    for seed in (0, 1):
        traffic = one.traffic(CLOSED, seed)
        alone = one.run(Learned(measured_times(), 7, seed, by_workload=False), traffic, seed).tokens_per_s
        for name, labelled in (("true", traffic), ("shuffled", shuffled(traffic, seed))):
            gains[name].append(one.run(Learned(measured_times(), 7, seed), labelled, seed).tokens_per_s / alone)
    assert min(gains["true"]) > 1.05
    assert max(abs(gain - 1) for gain in gains["shuffled"]) < 0.02


def test_flat_costs_take_the_depth_to_its_maximum() -> None:
    one = bench("code-chat", 100)
    flat = FlatCosts(0.02, 7)
    run = one.run(Learned(flat, 7, 0), one.traffic(Load.parse("closed:8"), 0), 0, flat)
    assert run.mean_depth == 7.0


def test_a_head_with_less_drafts_than_the_table_was_measured_for() -> None:
    one = Bench(Traces.load(REAL).up_to(4), Remembered(measured_times()), mixes()["code-chat"], Engine(), 60)
    run = one.run(Learned(measured_times(), 4, 0), one.traffic(Load.parse("closed:8"), 0), 0)
    assert 0 < run.mean_depth <= 4


def test_shuffling_moves_labels_and_nothing_else() -> None:
    traffic = bench().traffic(CLOSED, 0)
    mixed = shuffled(traffic, 0)
    assert mixed.answers is traffic.answers
    assert sorted(mixed.labels) == sorted(traffic.labels)
    assert mixed.labels != traffic.labels


def test_all_policies_of_a_seed_meet_the_same_requests() -> None:
    one = bench()
    for text in ("closed:8", "poisson:3", "bursty:3"):
        load = Load.parse(text)
        assert one.traffic(load, 1) == one.traffic(load, 1)
        assert one.traffic(load, 1) != one.traffic(load, 2)


@pytest.mark.parametrize(("kind", "spread"), [("poisson", (0.9, 1.1)), ("bursty", (1.5, 4.0))])
def test_arrivals_have_their_rate_and_bursts_are_bursts(kind: str, spread: tuple[float, float]) -> None:
    load = Load.parse(f"{kind}:20")
    arrivals_s = np.array(load.arrivals_s(40_000, np.random.default_rng(0)))
    assert (np.diff(arrivals_s) >= 0).all()
    assert 40_000 / arrivals_s[-1] == pytest.approx(20, rel=0.1)
    per_second = np.bincount(arrivals_s.astype(int))[:-1]
    # The index of dispersion is 1 for Poisson arrivals.
    dispersion = per_second.var() / per_second.mean()
    assert spread[0] < (dispersion if kind == "poisson" else np.sqrt(dispersion)) < spread[1] * 2


@pytest.mark.parametrize(
    "text", ["closed", "closed:0", "closed:2.5", "poisson:-1", "poisson:x", "open:3", "poisson:inf"]
)
def test_loads_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="load"):
        Load.parse(text)


def test_counts_by_depth_are_those_of_the_steps() -> None:
    steps = [(0, 0), (3, 0), (3, 3), (3, 1), (2, 2), (1, 0)]
    ended = [[sum(step == (k, j) for step in steps) for j in range(4)] for k in range(4)]
    assert counts_of(ended) == Counts.from_steps(steps)


def test_prompts_of_a_plain_engine_cost_what_their_tokens_do() -> None:
    times = PlainTimes(measured_plain_times())
    assert times.seconds(StepShape(8, 8, 0)) == measured_plain_times().seconds(StepShape(8, 8, 0))
    assert times.seconds(StepShape(2, 32, None)) == measured_plain_times().seconds(StepShape(32, 32, 0))


def test_ratios_keep_seeds_paired() -> None:
    """Seeds that differ by a factor, a policy that is 5% better in each."""
    base = [100.0, 900.0, 300.0, 500.0, 2000.0]
    better = [1.05 * value for value in base]
    found = ratio(better, base)
    assert found["ratio"] == 1.05
    assert found["ratio_95"] == [1.05, 1.05]
    low, high = interval(base)
    assert low < 500 < 1200 < high


def test_the_range_is_a_mean_over_loads_of_ratios() -> None:
    by_load = [
        {"ours": [110.0, 110.0], "a": [100.0, 100.0], "b": [50.0, 50.0]},
        {"ours": [8.0], "a": [4.0], "b": [10.0]},
    ]
    by_load[1] = {name: values * 2 for name, values in by_load[1].items()}
    everywhere = over_range(by_load, "ours", ["a", "a"])
    assert everywhere["ratio"] == pytest.approx(np.sqrt(1.1 * 2), abs=1e-4)
    each = over_range(by_load, "ours", ["a", "b"])
    assert each["ratio"] == pytest.approx(np.sqrt(1.1 * 0.8), abs=1e-4)
    assert each["worst_load"] == 0.8


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.simulate", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_prints_a_table_and_writes_its_conditions(tmp_path: Path) -> None:
    measured_times().save(tmp_path / "times.json")
    measured_plain_times().save(tmp_path / "plain.json")
    options = ["--mix", "code-chat", "--load", "closed:4", "--seeds", 2, "--num-requests", 24]
    files = ["--step-times", tmp_path / "times.json", "--plain-step-times", tmp_path / "plain.json"]
    done = command("--traces", REAL, *files, *options, "--out", tmp_path / "new" / "out.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "new" / "out.json").read_text())
    assert document["made"]["command"].startswith("python -m benchmarks.simulate --traces")
    assert set(document["traces"]) == {"path", "sha256"}
    assert document["step_times"]["measured"] is True
    assert document["step_times"]["conditions"]["gpu"] == "NVIDIA H200"
    assert document["max_draft_tokens"] == 7, "the lesser of the table's and the traces'"
    (found,) = document["loads"]
    assert found["load"] == "closed:4"
    assert set(found["best_by_workload"]) == {"code", "chat"}
    assert {"no speculation", "K = 0", "K = 7", "ours", "each step (oracle)"} <= set(found["policies"])
    for name, policy in found["policies"].items():
        assert len(policy["tokens_per_s_by_seed"]) == 2
        assert policy["tpot_s"]["p50"] <= policy["tpot_s"]["p95"] <= policy["tpot_s"]["p99"]
        assert f"\n{name} " in done.stdout
    assert found["controls"]["flat_costs"]["mean_depth"] == 7.0
    best = found["best_fixed"]
    assert found["policies"][best]["regret_to_best_fixed"] == 0
    assert set(document["all_loads"]["policies"]) == set(found["policies"])


H200 = ROOT / "configs" / "step_times" / "qwen3-30b-a3b-shape-h200.json"


@pytest.mark.parametrize(("mix", "num", "error"), [("chat", 8, 0.0), ("chat", 64, 0.0), ("both", 64, 0.1)])
def test_ours_on_the_table_of_an_h200_is_not_below_the_best_fixed_depth(mix: str, num: int, error: float) -> None:
    """Measured 1.00, 1.01 and 1.04. Where trimming fell below a graph, for the fit is faster between its few ragged
    batches, chat at 8 requests had 0.90; where prompts in the step were not seen, chat at 64 had 0.93."""
    survivals = {"code": CODE, "chat": CHAT} if mix == "both" else {"chat": CHAT}
    times = StepTimes.load(H200)
    known = mistaken(times, error, 0) if error else times
    workloads = even({name: Kind((name,)) for name in survivals})
    one = Bench(synthetic(survivals, 0), Remembered(times), workloads, Engine(), 14 * num)
    traffic = one.traffic(Load("closed", num), 0)
    fixed = max(one.run(BatchWide(k), traffic, 0).tokens_per_s for k in (3, 5, 7))
    assert one.run(Learned(known, 7, 0, split_share=0.0), traffic, 0).tokens_per_s > 0.98 * fixed


def test_a_mistaken_table_is_off_by_no_more_than_said() -> None:
    times = StepTimes.load(H200)
    pairs = zip(times.points, mistaken(times, 0.1, 0).points, strict=True)
    factors = [mine.median_s / true.median_s for true, mine in pairs]
    assert 0.9 <= min(factors) < 0.92
    assert 1.08 < max(factors) <= 1.1


def test_the_command_simulates_synthetic_acceptance(tmp_path: Path) -> None:
    options = ["--load", "closed:4", "--seeds", 1, "--num-requests", 24, "--no-controls", "--table-error", 0.1]
    done = command("--survival", "a=0.9,0.8", "--survival", "b=0.5,0.2", "--step-times", H200, *options, "--note", "n")
    assert done.returncode == 0, done.stderr
    assert "closed:4: best fixed K = 2" in done.stdout
    refused = command("--survival", "a=0.9,0.8", "--survival", "b=0.5,0.6", "--step-times", H200)
    assert refused.returncode == 1
    assert refused.stderr.startswith("benchmarks.simulate: survival of 'b' must be")


def test_the_command_compares_with_real_runs(tmp_path: Path) -> None:
    results = ROOT / "results" / "2026-11-21-evaluation-smollm2-135m-h200.json"
    done = command("--traces", REAL, "--validate", results, "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    compared = json.loads((tmp_path / "out.json").read_text())["validation"]
    assert max(abs(one["difference"]) for one in compared) < 2e-4
    assert "all                       0  7" in done.stdout


def test_the_command_refuses_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    for arguments, message in (
        (["--step-times", tmp_path / "broken.json"], "broken.json"),
        (["--validate", tmp_path / "broken.json"], "broken.json: has neither 'engine'"),
        ([], "give --step-times FILE"),
        (["--step-times", "x", "--load", "open:1"], "--load"),
    ):
        done = command("--traces", REAL, *arguments)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
