"""`peagle.vllm.adaptive` against vLLM's own estimator, which reads logits where ours reads probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_device import DEVICE, needs_kernel

pytestmark = needs_kernel
adaptive = pytest.importorskip("peagle.vllm.adaptive")

NUM_SLOTS, K_MAX, VOCAB = 6, 5, 97


def make_estimator() -> adaptive.OnlineAcceptanceEstimator:
    found = adaptive.OnlineAcceptanceEstimator(NUM_SLOTS, K_MAX, torch.device(DEVICE))
    found.slope.fill_(0.7)
    found.intercepts.copy_(torch.linspace(-0.5, 0.5, K_MAX))
    return found


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")  # vLLM's kernels are not there without
def test_predictions_are_those_that_vllm_makes_of_the_logits() -> None:
    generator, num_requests = torch.Generator().manual_seed(0), 4
    logits = (torch.randn(num_requests * K_MAX, VOCAB, generator=generator) * 4).to(DEVICE)
    logits[3, 7] = 60.0  # certain: its log odds are clamped
    slot_B = torch.tensor([5, 0, 3, 1], device=DEVICE)
    theirs, ours = make_estimator(), make_estimator()
    theirs.predict(
        logits,
        slot_B.repeat_interleave(K_MAX),
        torch.arange(K_MAX, device=DEVICE).repeat(num_requests),
        torch.zeros(num_requests, K_MAX, device=DEVICE),
        torch.zeros(NUM_SLOTS, device=DEVICE),
    )
    probability_BK = logits.softmax(-1).max(-1).values.view(num_requests, K_MAX)
    adaptive.predict_acceptance(ours, probability_BK, slot_B, K_MAX)
    torch.testing.assert_close(ours.predictions, theirs.predictions, atol=1e-3, rtol=0)
    is_sure = theirs.features > 10  # there, a float's probability has few digits left
    torch.testing.assert_close(ours.features[~is_sure], theirs.features[~is_sure], atol=1e-2, rtol=1e-2)
    assert (ours.features[is_sure] > 9).all()
    assert not ours.features[[2, 4]].any()


def test_predictions_are_a_logistic_of_the_log_odds() -> None:
    estimator, slot_B = make_estimator(), torch.tensor([5, 0, 3], device=DEVICE)
    probability_BK = torch.rand(3, K_MAX, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    adaptive.predict_acceptance(estimator, probability_BK, slot_B, K_MAX)
    torch.testing.assert_close(estimator.features[slot_B], probability_BK.logit())
    expected_BK = torch.sigmoid(0.7 * probability_BK.logit() + estimator.intercepts)
    torch.testing.assert_close(estimator.predictions[slot_B], expected_BK)
    assert not estimator.predictions[[1, 2, 4]].any()


def test_only_what_was_drafted_is_written_and_no_number_is_no_chance() -> None:
    estimator = make_estimator()
    estimator.features.fill_(7.0)
    probability_BK = torch.tensor([[0.5, float("nan"), 0.9, 0.9, 0.9]], device=DEVICE)
    adaptive.predict_acceptance(estimator, probability_BK, torch.tensor([2], device=DEVICE), 2)
    assert estimator.features[2].tolist() == [0.0, -40.0, 7.0, 7.0, 7.0]
    assert estimator.features[0].tolist() == [7.0] * K_MAX


def test_admitted_drafts_are_those_of_the_rows_of_logits() -> None:
    rows_B1 = torch.tensor([0, 4, 5, 8, 9], dtype=torch.int32, device=DEVICE)
    assert adaptive.count_admitted(SimpleNamespace(cu_num_logits=rows_B1)).tolist() == [3, 0, 2, 0]


def test_a_pause_ends_with_what_was_there() -> None:
    runner = SimpleNamespace(adaptive_verification=1, speculator=SimpleNamespace(acceptance_estimator=2))
    with adaptive.paused(runner):
        assert runner.adaptive_verification is None
        assert runner.speculator.acceptance_estimator is None
    assert (runner.adaptive_verification, runner.speculator.acceptance_estimator) == (1, 2)
    with adaptive.paused(SimpleNamespace(adaptive_verification=None, speculator=None)):
        pass
