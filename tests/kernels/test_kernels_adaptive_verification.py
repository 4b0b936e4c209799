"""Tests of `peagle.vllm.adaptive_verification`: its kernels, on a GPU or interpreted, against numpy, and what a runner
asks of it."""

import numpy as np
import pytest
import torch

from cluster.step_allocation import PROBABILITY_LEVELS
from peagle.vllm.adaptive_verification import AdaptiveVerification, DraftProbabilities, choose_drafts
from tests.support.kernel_device import DEVICE, needs_kernel

pytestmark = needs_kernel


def plain_selection(prob_BK: np.ndarray, limit_B: np.ndarray, num_drafts: int) -> list[int]:
    """Drafts of each request, one draft after another: the best that is next of its request."""
    cumulative_BK = np.cumprod(np.nan_to_num(prob_BK).astype(np.float32), axis=1, dtype=np.float32)
    given = [0] * len(limit_B)
    for _ in range(num_drafts):
        left = [b for b in range(len(limit_B)) if given[b] < limit_B[b]]
        best = max(left, key=lambda b: (cumulative_BK[b, given[b]], -b))
        given[best] += 1
    return given


@pytest.mark.parametrize("seed", range(6))
def test_the_best_drafts_of_the_batch_are_chosen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_places, num_requests, k_max = 20, int(rng.integers(1, 18)), int(rng.integers(1, 9))
    prob_SK = rng.random((num_places, k_max)).astype(np.float32)
    if seed % 2:  # many of equal probability
        prob_SK = (prob_SK * 3).round() / 3
    prob_SK[rng.integers(num_places)] = np.nan
    place_B = rng.permutation(num_places)[:num_requests]
    limit_B, rest_B = rng.integers(0, k_max + 1, num_requests), rng.integers(1, 5, num_requests)
    up_to_B1, first_row_B1 = (torch.full((num_places + 1,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    for num_drafts in sorted({0, 1, int(limit_B.sum()) // 2, int(limit_B.sum())} & set(range(int(limit_B.sum()) + 1))):
        admitted_B = torch.full((num_places,), -7, dtype=torch.int32, device=DEVICE)
        choose_drafts(
            torch.from_numpy(prob_SK).to(DEVICE),
            torch.from_numpy(place_B).to(DEVICE),
            *(torch.from_numpy(x).to(DEVICE, torch.int32) for x in (limit_B, rest_B)),
            num_drafts,
            num_drafts + int(rest_B.sum()),
            admitted_B,
            up_to_B1,
            first_row_B1,
        )
        expected = plain_selection(prob_SK[place_B], limit_B, num_drafts)
        assert admitted_B[:num_requests].tolist() == expected
        assert (admitted_B[num_requests:] == -7).all()
        assert up_to_B1[: num_requests + 1].tolist() == [0, *np.cumsum(np.array(expected) + 1)]
        assert first_row_B1[: num_requests + 1].tolist() == [0, *np.cumsum(expected + rest_B)]
        assert (first_row_B1[num_requests + 1 :] == num_drafts + rest_B.sum()).all()


def wait_for_the_host() -> None:
    """What is on its way to the host is there."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_the_runner_is_told_a_step_that_adds_up() -> None:
    query_start_loc = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    probabilities = DraftProbabilities(8, 3, torch.device(DEVICE))
    chosen = AdaptiveVerification(probabilities, query_start_loc, max_logits=100)
    chosen.warm()
    assert chosen.admitted_B is None
    assert probabilities.counts is None
    probabilities.prob_SK[:3] = torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.9, 0.9], [0.5, 0.5, 0.5]])
    chosen.num_drafts = 4
    planned = {"a": [-1] * 3, "b": [-1] * 3, "c": [-1] * 2}
    assert chosen.get_num_tokens({"a": 4, "b": 4, "c": 3, "prompt": 50}, planned) == 4 + 3 + 50
    limit_B, scheduled_B = np.array([3, 3, 2, 0], np.int32), np.array([4, 4, 3, 50], np.int32)
    cu_num_logits_np = np.array([0, 4, 8, 11, 12], np.int32)
    told_B, _ = chosen.compact_batch(limit_B, scheduled_B, cu_num_logits_np)
    assert told_B.tolist() == [3, 2, 2, 50]
    up_to_B1, first_row_B1, num_drafts = chosen.reallocate_drafts(
        ["a", "b", "c", "prompt"], torch.tensor([0, 1, 2, 3], device=DEVICE)
    )
    assert chosen.admitted_B is not None
    wait_for_the_host()
    assert chosen.admitted_B.tolist() == [3, 0, 1, 0]
    assert up_to_B1.tolist() == [0, 4, 5, 7, 8]
    assert first_row_B1.tolist() == [0, 4, 5, 7, 57, 57, 57, 57, 57]
    assert num_drafts == 4
    few = AdaptiveVerification(probabilities, query_start_loc, max_logits=6)
    few.num_drafts = 4
    assert few.get_num_tokens({"a": 4, "b": 4, "c": 3, "prompt": 50}, planned) == 2 + 3 + 50
    assert few.num_drafts == 2


def test_probabilities_are_recorded_and_counted_by_level() -> None:
    probabilities, generator = DraftProbabilities(9, 5, torch.device(DEVICE)), torch.Generator().manual_seed(0)
    prob_BK = torch.rand(6, 5, generator=generator).pow(0.3)
    place_B = torch.tensor([7, 0, 3])
    probabilities.record(prob_BK.to(DEVICE), place_B.to(DEVICE), 4)
    assert probabilities.counts is not None
    wait_for_the_host()
    counts_L, num_requests = probabilities.counts
    cumulative_BK = prob_BK[:3, :4].cumprod(1)
    assert num_requests == 3
    assert counts_L.tolist() == [int((cumulative_BK >= level).sum()) for level in PROBABILITY_LEVELS]
    assert len(set(counts_L.tolist())) > 5
    assert torch.equal(probabilities.prob_SK[place_B, :4].cpu(), prob_BK[:3, :4])
    assert not probabilities.prob_SK[:, 4].any()
    assert not probabilities.prob_SK[[1, 2, 4, 5, 6, 8]].any()
