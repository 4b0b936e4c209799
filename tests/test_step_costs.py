"""Cost curves of large batches, which ask the model at a part of their points."""

import numpy as np
import pytest

from cluster.step_time import MAX_POINTS, CostCurves, StepShape


class Counting:
    """Seconds that grow with the tokens, and how often they were asked for."""

    max_draft_tokens = 7
    full_graph_depths = frozenset({7})

    def __init__(self) -> None:
        self.num_asked = 0

    def seconds(self, shape: StepShape) -> float:
        self.num_asked += 1
        return 0.01 + 1e-5 * float(shape.num_tokens)


@pytest.mark.parametrize("num_requests", [1, 2, 12, 128])
def test_a_curve_asks_a_bounded_number_of_times_and_keeps_its_line(num_requests: int) -> None:
    times = Counting()
    curve = CostCurves(times).curve(num_requests, 256.0)
    expected = 0.01 + 1e-5 * (num_requests + np.arange(7 * num_requests + 1))
    assert curve.ragged == pytest.approx(expected)
    assert times.num_asked <= MAX_POINTS + 8


class Graphs(Counting):
    """Full graphs of K = 2 that take 15 ms; every other batch is said to take 12 ms, and 2 us a token."""

    full_graph_depths = frozenset({2})

    def seconds(self, shape: StepShape) -> float:
        return 0.015 if shape.uniform_depth == 2 else 0.012 + 2e-6 * float(shape.num_tokens)


def test_off_the_graphs_no_step_is_faster_than_on_a_graph_that_verifies_no_more() -> None:
    """What is said of batches that nobody measured may be too fast, and then trims below a graph that is known."""
    curve = CostCurves(Graphs()).curve(8, 0.0)
    assert curve.uniform[2] == 0.015
    assert max(curve.ragged[1:16]) < 0.0121
    assert (curve.ragged[16:] == 0.015).all()


class BesidePrompts(Counting):
    """10 ms, and 1 us a token; 20 ms and 30 us for batches that no graph of up to 8 tokens a request holds."""

    def seconds(self, shape: StepShape) -> float:
        self.num_asked += 1
        is_on_graph = shape.longest_tokens is None or shape.longest_tokens <= 8
        return 0.01 + 1e-6 * shape.num_tokens if is_on_graph else 0.02 + 30e-6 * shape.num_tokens


@pytest.mark.parametrize("prompt_tokens", [1, 128, 3000])
def test_beside_prompts_there_are_no_graphs_and_what_the_prompts_take_is_left_out(prompt_tokens: int) -> None:
    times = BesidePrompts()
    curves = CostCurves(times)
    curve = curves.curve(64, 256.0, prompt_tokens)
    assert curve.ragged == pytest.approx(0.02 + 30e-6 * np.arange(64, 8 * 64 + 1))
    assert curve.uniform[3] == curve.ragged[3 * 64]
    assert all(start > 64 * k for k, start in enumerate(curve.graph_from))
    assert curves.curve(64, 256.0).uniform[7] == pytest.approx(0.01 + 1e-6 * 512)
    num_asked = times.num_asked
    assert num_asked < 150
    assert curves.curve(64, 256.0, prompt_tokens) is curve
    assert times.num_asked == num_asked


def test_prompt_tokens_below_0_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_tokens is -1"):
        CostCurves(Counting()).curve(1, 0.0, -1)
