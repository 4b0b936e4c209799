"""Drafts of a step by the table of an H200, whose few ragged batches say little of those between them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.depth import CostCurves, allocate
from cluster.step_time import StepCostsCurve as Curve
from cluster.step_time import StepTimes

H200 = StepTimes.load(Path(__file__).resolve().parents[1] / "configs/step_times/qwen3-30b-a3b-shape-h200.json")
CODE = (0.88, 0.77, 0.66, 0.56, 0.48, 0.40, 0.34)
CHAT = (0.64, 0.39, 0.23, 0.13, 0.08, 0.05, 0.03)


def rate(curve: Curve, depths: Sequence[int], survival: Sequence[float]) -> float:
    return len(depths) * (1 + sum(survival[: depths[0]])) / curve.uniform[depths[0]]


@pytest.mark.parametrize("num_requests", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("survival", [CODE, CHAT])
def test_a_measured_table_with_few_ragged_batches_does_not_trim_below_the_best_graph(
    num_requests: int, survival: Sequence[float]
) -> None:
    """Few ragged batches were measured on the H200; between them the fit was faster than full graphs, and 8 requests of
    K = 7 were trimmed to K = 2: 0.88 of the tokens."""
    curves = CostCurves(H200)
    depths = allocate([survival] * num_requests, [7] * num_requests, curves, 320.0)
    assert min(depths) == max(depths)
    curve = curves.curve(num_requests, 320.0)
    best = max(rate(curve, [k] * num_requests, survival) for k in range(8))
    assert rate(curve, depths, survival) > 0.999 * best


def test_prompts_in_the_step_trim_what_only_a_graph_makes_worth_its_time() -> None:
    limits, survivals = [7] * 64, [CODE, CHAT] * 32
    assert set(allocate(survivals, limits, H200, 320.0)) == {7}
    beside = allocate(survivals, limits, H200, 320.0, prompt_tokens=128)
    assert set(beside[::2]) == {7}
    assert set(beside[1::2]) == {4, 5}
    # With few requests nothing is trimmed: beside a prompt's tokens their drafts cost next to nothing.
    assert set(allocate(survivals[:8], limits[:8], H200, 320.0, prompt_tokens=128)) == {7}
