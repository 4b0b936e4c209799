"""The step times that stand in for a table: what K they lead to, held against what was measured on an H200 and
on two CPU cores.
"""

import json
from pathlib import Path

import pytest

from benchmarks.depths import SURVIVALS, TIERS
from cluster.depth import CostCurves, Demand, best_depths
from cluster.settings import ClusterSettings, DepthSettings
from cluster.step_time import StepShape, StepTimes, default_step_times
from deployments.telemetry import step_times

REPOSITORY = Path(__file__).resolve().parents[1]
K_MAX = 7
SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
LOADS = (1, 2, 4, 8, 16, 32, 64, 128)


def best_uniform(times: StepTimes, num: int, survival: tuple[float, ...] = SURVIVAL) -> int:
    rates = [num * (1 + sum(survival[:k])) / times.seconds(StepShape.uniform(num, k)) for k in range(K_MAX + 1)]
    return rates.index(max(rates))


def test_on_a_cpu_it_is_deep_at_low_load_and_shallow_above() -> None:
    times = default_step_times(K_MAX)
    assert (times.measured, times.full_graph_depths) == (False, frozenset())
    assert [best_uniform(times, num) for num in (1, 2, 4, 8, 16, 32, 128)] == [7, 6, 6, 4, 4, 3, 3]
    assert best_uniform(times, 8, (0.05, *[0.0] * 6)) == 0
    times.check_fits({"max_draft_tokens": K_MAX, "gpu": "any"})
    with pytest.raises(ValueError, match="max_draft_tokens is 5"):
        times.check_fits({"max_draft_tokens": 5})
    assert default_step_times(0).seconds(StepShape.uniform(8, 0)) > 0


def test_steps_of_the_embedded_model_on_two_cores_are_in_this_proportion() -> None:
    truth, times = StepTimes.load(REPOSITORY / "configs/step_times/smollm2-135m-cpu.json"), default_step_times(K_MAX)
    one = StepShape.uniform(1, 0)
    for num in (1, 2, 4, 8, 16):
        for k in range(K_MAX + 1):
            shape = StepShape.uniform(num, k)
            measured = truth.seconds(shape) / truth.seconds(one)
            assert times.seconds(shape) / times.seconds(one) == pytest.approx(measured, rel=0.16), (num, k)
        rates = [(1 + sum(SURVIVAL[:k])) / truth.seconds(StepShape.uniform(num, k)) for k in range(K_MAX + 1)]
        assert rates[best_uniform(times, num)] >= 0.95 * max(rates), num


def test_on_a_gpu_it_has_room_for_more() -> None:
    times = default_step_times(K_MAX, on_gpu=True)
    assert times.full_graph_depths == {K_MAX}
    assert [best_uniform(times, num) for num in LOADS] == [7, 7, 7, 7, 7, 4, 3, 2]
    off, tiers = (default_step_times(K_MAX, on_gpu=True, full_graph_depths=depths) for depths in ((), TIERS))
    for num in (1, 8, 64):
        assert 1.02 < off.seconds(StepShape.uniform(num, 3)) / tiers.seconds(StepShape.uniform(num, 3)) < 1.15


def test_steps_of_a_dense_model_on_an_h200_are_in_this_proportion() -> None:
    rows = json.loads((REPOSITORY / "results/2026-11-22-remote-8b-one-host-h200x2.json").read_text())["rows"]
    step_ms = {(row["placement"], row["num_requests"]): row["by_workload"]["all"]["step_ms"] for row in rows}
    times = default_step_times(K_MAX, on_gpu=True)
    unit_s = 0.01  # of one request without drafts, in an engine without a drafter
    for num in (1, 8, 32, 64):
        told = times.seconds(StepShape.uniform(num, K_MAX)) / unit_s
        assert told == pytest.approx(step_ms["colocated", num] / step_ms["none", 1], rel=0.1)


@pytest.mark.parametrize(("full_graph_depths", "least"), [(None, 0.77), (TIERS, 0.83)])
def test_what_it_chooses_for_a_model_with_more_room_is_no_disaster(full_graph_depths, least) -> None:
    """Qwen3-30B-A3B's shape on an H200, half code and half chat: tokens/s of the K's chosen over the best single K's,
    and over K = 0, by the table measured there."""
    truth = StepTimes.load(REPOSITORY / "configs/step_times/qwen3-30b-a3b-shape-h200.json")

    def tokens_per_s(num: int, depths: dict[str, int]) -> float:
        tokens = num / 2 * sum(1 + sum(SURVIVALS[name][:k]) for name, k in depths.items())
        uniform = depths["code"] if depths["code"] == depths["chat"] else None
        return tokens / truth.seconds(StepShape(num, round(num / 2 * (2 + sum(depths.values()))), uniform, 256.0))

    curves = CostCurves(default_step_times(K_MAX, on_gpu=True, full_graph_depths=full_graph_depths))
    for num in LOADS:
        plan = best_depths([Demand(name, num / 2, SURVIVALS[name]) for name in ("code", "chat")], curves)
        found = tokens_per_s(num, dict(plan.depths))
        best = max(tokens_per_s(num, {"code": k, "chat": k}) for k in TIERS)
        assert found >= least * best, (num, plan.depths)
        assert found >= 1.5 * tokens_per_s(num, {"code": 0, "chat": 0}), (num, plan.depths)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens must be 0 or more"):
        default_step_times(-1)
    with pytest.raises(ValueError, match=r"full_graph_depths has 9, outside 0\.\.7"):
        default_step_times(K_MAX, on_gpu=True, full_graph_depths=(0, 9))


@pytest.mark.parametrize(
    ("target", "engine", "expected"),
    [
        ({"bundle": {"CPU": 1}}, {}, default_step_times(K_MAX)),
        ({"bundle": {"GPU": 1}}, {}, default_step_times(K_MAX, on_gpu=True)),
        ({"bundle": {"GPU": 1}}, {"enforce_eager": True}, default_step_times(K_MAX, on_gpu=True, full_graph_depths=())),
    ],
)
def test_the_service_takes_the_one_of_its_engine(target, engine, expected) -> None:
    settings = ClusterSettings.model_validate(
        {
            "model": {"id": "m", "source": "/m"},
            "drafter": {"head": "/h", "max_draft_tokens": K_MAX},
            "depth": DepthSettings(policy="adaptive"),
            "target": target,
            "engine": engine,
        }
    )
    found = step_times(settings)
    assert found is not None
    assert found.full_graph_depths == expected.full_graph_depths
    assert found.points == expected.points
