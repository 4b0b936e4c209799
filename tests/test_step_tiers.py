"""Ragged steps of an engine with full graphs for several depths: told by those, held against a run on a GPU.

The table was calibrated before that run and on the same GPU.
"""

import json
import math
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.depths import SURVIVALS
from benchmarks.load import PROMPT_TOKENS
from cluster.step_time import StepPoint, StepShape, StepTimes

REPOSITORY = Path(__file__).resolve().parents[1]
TIERS = (0, 1, 2, 3, 5, 7)
MEAN_ANSWER_TOKENS = 256


def truth(num_requests: float, num_tokens: float) -> float:
    """Seconds of a step on a full graph."""
    return 0.005 + 0.0003 * num_requests + 0.00002 * num_tokens


def tiers_table(ratio: float, outlier: float = 1.0) -> StepTimes:
    """Batches of 1 to 64 at every tier, and of two depths, `ratio` as long; one of them is `outlier` off."""
    points = []
    for num in (1, 2, 4, 8, 16, 32, 64):
        for depth in TIERS:
            seconds = truth(num, num * (1 + depth)) - (0.002 if depth == 0 else 0.0)  # without the drafter's pass
            points.append(StepPoint(StepShape.uniform(num, depth, 300.0), seconds, seconds, 30))
        for low, high in ((0, 1), (1, 2), (2, 3), (3, 5), (5, 7)) if num > 1 else ():
            num_tokens = num + num // 2 * (low + high)
            seconds = truth(num, num_tokens) * ratio * (outlier if (num, high) == (64, 7) else 1.0)
            points.append(StepPoint(StepShape(num, num_tokens, None, 300.0), seconds, seconds, 30))
    return StepTimes(points, max_draft_tokens=7, full_graph_depths=TIERS, capture_sizes={}, padding_tokens=0)


def test_a_ragged_step_is_a_multiple_of_what_full_graphs_take() -> None:
    times = tiers_table(ratio=1.1)
    for num, num_tokens in ((2, 9), (8, 40), (64, 400)):
        assert times.seconds(StepShape(num, num_tokens, None)) == pytest.approx(1.1 * truth(num, num_tokens), rel=0.02)
    # On its own full graph a batch takes what was measured there.
    assert times.seconds(StepShape.uniform(64, 5)) == pytest.approx(truth(64, 64 * 6))


def test_ragged_steps_are_never_told_as_faster_than_full_graphs() -> None:
    times = tiers_table(ratio=0.8)
    assert times.seconds(StepShape(64, 400, None)) == pytest.approx(truth(64, 400), rel=0.02)


def test_one_wrong_point_changes_no_step_beyond_it() -> None:
    """Prompts beside 64 decodes at K = 7: more tokens than anything that was measured."""
    right, wrong = tiers_table(ratio=1.05), tiers_table(ratio=1.05, outlier=1.4)
    for num_tokens in (200, 448, 640, 900):
        shape = StepShape(64, num_tokens, None, 0.0, PROMPT_TOKENS)
        assert wrong.seconds(shape) == pytest.approx(right.seconds(shape), rel=0.01)
        assert right.seconds(shape) == pytest.approx(1.05 * truth(64, num_tokens), rel=0.03)


@pytest.mark.parametrize("num_requests", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_mean_steps_of_a_run_on_a_gpu_are_told_by_its_table(num_requests: int, k: int) -> None:
    """A closed load on an H200, K pinned: some steps take in the prompts of requests that begin, by chance."""
    times = StepTimes.load(REPOSITORY / "configs/step_times/qwen3-30b-a3b-shape-h200.json")
    rows = json.loads((REPOSITORY / "results/2026-11-22-depths-h200x2.json").read_text())["rows"]
    found_ms = mean(
        one["step_ms"]
        for row in rows
        if (row["engine"], row["arm"], row["num_requests"]) == ("tiers", str(k), num_requests)
        for one in row["by_workload"].values()
    )
    # Each workload has as many answers, so its requests run the longer the less it accepts.
    steps_of_an_answer = mean(MEAN_ANSWER_TOKENS / (1 + sum(survival[:k])) for survival in SURVIVALS.values())
    prompts_a_step = num_requests / steps_of_an_answer
    told_s = math.exp(-prompts_a_step) * times.seconds(StepShape.uniform(num_requests, k, 256.0))
    for number in range(1, 12):
        share = math.exp(-prompts_a_step) * prompts_a_step**number / math.factorial(number)
        num_tokens = num_requests * (1 + k) + number * PROMPT_TOKENS
        told_s += share * times.seconds(StepShape(num_requests, num_tokens, None, 256.0, PROMPT_TOKENS))
    assert 1e3 * told_s == pytest.approx(found_ms, rel=0.04)
