"""The measurement of the losses: all ways agree, and a wrong one is not measured."""

import pytest
from torch import Tensor

from benchmarks.losses import Inputs, chunked, gradient, measure, reference
from peagle.train.losses import KERNELS, ChunkedLoss


@pytest.mark.parametrize("name", KERNELS)
def test_ways_agree_and_a_wrong_one_is_refused(name: str) -> None:
    x = Inputs.draw(num_tokens=100, vocabulary=300, width=16, device="cpu")
    expected_RH = reference(name, x)
    right = chunked(ChunkedLoss(name, 64, max_whole_bytes=0))
    assert gradient(right, x).abs().max() > 1e-5
    assert measure(right, x, expected_RH, repeats=1)["gradient_error"] < 1e-4

    def wrong(x: Inputs, hidden_RH: Tensor) -> Tensor:
        return right(x, hidden_RH.roll(1, dims=0))

    with pytest.raises(ValueError, match="gradient is off"):
        measure(wrong, x, expected_RH, repeats=1)
