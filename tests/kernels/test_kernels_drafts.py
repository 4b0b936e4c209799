"""Tests of `peagle.drafter.rows`: how drafts are found and how they travel, kernels and twins against torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.protocol import NO_DRAFT
from peagle.drafter.rows import (
    MAX_VOCABULARY,
    PROB_STEPS,
    best_tokens,
    pack,
    unpack,
)
from tests.support.kernel_device import DEVICE, needs_kernel, twin
from tests.support.pass_requests import token_ids


def ways(function: Callable[..., None]) -> pytest.MarkDecorator:
    kernel = pytest.param(function, id="kernel", marks=needs_kernel)
    return pytest.mark.parametrize("way", [pytest.param(twin(function), id="twin"), kernel])


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def logits_of(num_rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    logits_NV = (4 * torch.randn(num_rows, vocabulary)).to(DEVICE, dtype)
    logits_NV[0, 100] = logits_NV[0, 8000] = 50.0  # two of equal probability, in different blocks
    logits_NV[1, vocabulary - 1] = 60.0
    return logits_NV


@ways(best_tokens)
@DTYPES
def test_best_tokens_and_their_probabilities(way: Callable[..., None], dtype: torch.dtype) -> None:
    logits_NV = logits_of(5, 9001, dtype)
    ids_N = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    prob_N = torch.zeros(5, device=DEVICE)
    way(logits_NV, ids_N, prob_N)
    assert ids_N.tolist()[:2] == [100, 9000]
    expected_N, _ = logits_NV.float().softmax(-1).max(-1)
    torch.testing.assert_close(prob_N, expected_N, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits_NV.float().gather(1, ids_N[:, None])[:, 0], logits_NV.float().amax(-1))


@ways(best_tokens)
def test_a_logit_that_is_no_number_gives_a_token_all_the_same(way: Callable[..., None]) -> None:
    logits_NV = logits_of(2, 9001, torch.float32)
    logits_NV[0, 5000] = float("nan")
    ids_N = torch.full((2,), -1, device=DEVICE)
    way(logits_NV, ids_N, prob_N := torch.zeros(2, device=DEVICE))
    assert 0 <= int(ids_N[0]) < 9001
    assert int(pack(ids_N, prob_N)[0]) >= 0


def test_a_draft_travels_with_its_probability() -> None:
    ids = torch.tensor([0, 1, 49_151, MAX_VOCABULARY - 1]).repeat_interleave(PROB_STEPS + 1)
    probability = (torch.arange(PROB_STEPS + 1) / PROB_STEPS).repeat(4)
    drafts = pack(ids, probability)
    assert drafts.dtype == torch.int32
    assert int(drafts.min()) == 0
    found_ids, found_prob = unpack(drafts)
    assert torch.equal(found_ids, ids)
    torch.testing.assert_close(found_prob, probability, rtol=1e-6, atol=0.0)
    assert float(found_prob.max()) <= 1.0
    assert token_ids(drafts.numpy()).tolist() == ids.tolist()


def test_no_draft_stays_no_draft_on_the_host_and_is_token_0_of_no_probability_on_a_gpu() -> None:
    drafts = torch.tensor([[5, NO_DRAFT], [MAX_VOCABULARY - 1, NO_DRAFT]], dtype=torch.int32)
    found = token_ids(drafts.numpy())
    assert found.dtype == np.int32
    assert found.tolist() == drafts.tolist()
    assert [column.tolist() for column in unpack(drafts)] == [[[5, 0], [MAX_VOCABULARY - 1, 0]], [[0.0] * 2] * 2]
    assert int(pack(torch.tensor([7]), torch.tensor([float("nan")]))) == 7
