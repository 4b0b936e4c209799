"""The rules that ours is compared with do what they are named after."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.baselines import (
    Bandit,
    BatchTable,
    BatchWide,
    ByWorkload,
    MovingAverage,
    StepOracle,
    best_table,
    climb,
)
from benchmarks.simulation.comparison import Bench, Load, Remembered
from benchmarks.simulation.engine_model import Active, Engine
from benchmarks.simulation.traces import Answer, Traces, mixes
from tests.measured_times import measured_times

REAL = Path(__file__).resolve().parents[1] / "results" / "2026-11-21-traces-smollm2-135m.npz"


def requests(num: int, accepted: int = 0, cap: int = 7) -> list[Active]:
    return [Active(i, "qa", Answer("qa", 0.0, 1.0, bytes([accepted] * 99)), 1, cap, 0.0) for i in range(num)]


def test_a_table_gives_k_by_batch_size() -> None:
    policy = BatchTable([(1, 4, 7), (5, 8, 3), (33, 64, 1)])
    found = {num: policy.depths(requests(num), 0.0)[0] for num in (1, 4, 5, 8, 9, 32, 33, 64, 200)}
    # The gap 9..32 and the tail keep the K before them, as in vLLM.
    assert found == {1: 7, 4: 7, 5: 3, 8: 3, 9: 3, 32: 3, 33: 1, 64: 1, 200: 1}
    with pytest.raises(ValueError, match="start at batch size 1"):
        BatchTable([(2, 4, 7)])


def test_the_tuned_table_takes_the_best_k_of_each_size() -> None:
    times = measured_times()
    sure, doubtful = ([1 + sum(p**i for i in range(1, k + 1)) for k in range(8)] for p in (0.95, 0.3))
    assert best_table(sure, times, 128, 256.0) == [(1, 128, 7)]
    table = best_table(doubtful, times, 128, 256.0)
    assert table[0] == (1, 3, 7), "one full graph beats the ragged batch however little is accepted"
    assert table[-1][1:] == (128, 1)


def feed(policy: BatchWide, accepted: Sequence[int], num_requests: int = 1, seconds: float = 0.01) -> None:
    for j in accepted:
        depths = policy.depths(requests(num_requests), 0.0)
        policy.observe(requests(num_requests), depths, [min(j, depths[0])] * num_requests, seconds, 0.0)


def test_a_moving_average_follows_acceptance_with_patience() -> None:
    policy = MovingAverage([1, 3, 7])
    assert policy.standing() == {"batch": 3}
    feed(policy, [7] * 14)
    assert policy.k == 3, "the warm-up and the interval have not passed"
    feed(policy, [7] * 6)
    assert policy.k == 7
    feed(policy, [3] * 40)
    assert policy.k == 7, "3 is not below 3 - 0.75"
    feed(policy, [0] * 40)
    assert policy.k == 1


@pytest.mark.parametrize("rule", ["ucb", "exp3"])
def test_a_bandit_comes_to_prefer_the_best_arm(rule: str) -> None:
    """K = 2 gives 3 tokens in the time in which the others give 2, with 10% noise."""
    rng = np.random.default_rng(0)
    policy = Bandit(4, rule, rng, epoch_steps=4)  # type: ignore[arg-type]  # the parameter is one of the two
    played = []
    for _ in range(40 * 400 if rule == "exp3" else 4 * 400):
        k = policy.depths(requests(1), 0.0)[0]
        played.append(k)
        tokens = 3 if k == 2 else 2
        policy.observe(requests(1), [k], [tokens - 1], 0.01 * float(np.exp(0.1 * rng.standard_normal())), 0.0)
    late = played[len(played) // 2 :]
    assert late.count(2) / len(late) > 0.6
    assert set(played) == set(range(5)), "every arm is tried"


def test_a_bandit_learns_for_each_batch_size_by_itself() -> None:
    policy = Bandit(1, "ucb", np.random.default_rng(0), epoch_steps=1, exploration=0.01)
    for _ in range(50):
        for num, better in ((1, 1), (16, 0)):
            for _ in range(6):
                k = policy.depths(requests(num), 0.0)[0]
                policy.observe(requests(num), [k] * num, [0] * num, 0.01 if k == better else 0.02, 0.0)
    found = {}
    for num in (1, 16):
        feed(policy, [0] * 2, num)
        found[num] = policy.k
    assert found == {1: 1, 16: 0}


def test_the_oracle_of_each_step_verifies_only_what_will_be_accepted() -> None:
    policy = StepOracle(measured_times(), 7)
    assert policy.depths(requests(64, accepted=0), 256.0) == [0] * 64
    mixed = requests(32, accepted=5) + requests(32, accepted=0)
    depths = policy.depths(mixed, 256.0)
    assert set(depths[32:]) == {0}
    assert set(depths[:32]) == {5}


def test_no_policy_beats_the_oracle_of_each_step() -> None:
    bench = Bench(Traces.load(REAL).up_to(7), Remembered(measured_times()), mixes()["code-chat"], Engine(), 150)
    load = Load.parse("closed:32")
    traffic = bench.traffic(load, 0)
    oracle = bench.run(StepOracle(measured_times(), 7), traffic, 0)
    best = max(bench.run(BatchWide(k), traffic, 0).tokens_per_s for k in range(8))
    assert oracle.tokens_per_s > 1.05 * best
    by_label = bench.run(ByWorkload({"code": 5, "chat": 1}), traffic, 0)
    assert best < by_label.tokens_per_s < oracle.tokens_per_s
    assert {name: by_label.drafted_by_label[name] / by_label.steps_by_label[name] for name in ("code", "chat")} == {
        "code": 5.0,
        "chat": 1.0,
    }


def test_the_search_finds_the_best_combination_and_asks_once() -> None:
    asked = []

    def worth(by_label: dict[str, int]) -> float:
        asked.append(tuple(by_label.values()))
        return -float((by_label["a"] - 6) ** 2 + (by_label["b"] - 1) ** 2 + abs(by_label["a"] - by_label["b"]) / 4)

    best, value = climb({"a": 3, "b": 3}, 7, worth)
    assert best == {"a": 6, "b": 1}
    assert value == worth(best)
    assert len(set(asked[:-1])) == len(asked[:-1])
    assert climb({"a": 9, "b": 0}, 7, lambda one: one["b"])[0]["b"] == 7
