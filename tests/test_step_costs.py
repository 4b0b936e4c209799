"""Cost curves of large batches, which ask the model at a part of their points."""

import numpy as np
import pytest

from cluster.step_costs import MAX_POINTS, CostCurves
from cluster.step_fit import StepShape


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
