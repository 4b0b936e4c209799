"""Tests of `peagle.drafter.selector`: candidates and the choice among them, kernels and twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.drafter.selector import NUM_CANDIDATES, Selector, choose, scratch_size, top_candidates
from tests.support.kernel_device import DEVICE, needs_kernel, twin


def ways(function: Callable[..., None]) -> pytest.MarkDecorator:
    kernel = pytest.param(function, id="kernel", marks=needs_kernel)
    return pytest.mark.parametrize("way", [pytest.param(twin(function), id="twin"), kernel])


def candidates_of(way: Callable[..., Any], logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocabulary = logits_SV.shape
    values_SC = torch.zeros(num_rows, NUM_CANDIDATES, device=DEVICE)
    ids_SC = torch.zeros(num_rows, NUM_CANDIDATES, dtype=torch.int64, device=DEVICE)
    way(logits_SV, values_SC, ids_SC, torch.zeros(num_rows, scratch_size(vocabulary), dtype=torch.int64, device=DEVICE))
    return values_SC, ids_SC


@ways(top_candidates)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [17, 9001])
def test_candidates_are_the_greatest_logits_in_order(
    way: Callable[..., Any], dtype: torch.dtype, vocabulary: int
) -> None:
    torch.manual_seed(0)
    logits_SV = (4 * torch.randn(5, vocabulary)).to(DEVICE, dtype)
    logits_SV[0, 3] = 60.0
    values_SC, ids_SC = candidates_of(way, logits_SV)
    torch.testing.assert_close(values_SC, logits_SV.float().topk(NUM_CANDIDATES).values)
    torch.testing.assert_close(logits_SV.float().gather(1, ids_SC), values_SC)
    assert int(ids_SC[0, 0]) == 3
    assert all(len(set(row)) == NUM_CANDIDATES for row in ids_SC.tolist())


@ways(choose)
@pytest.mark.parametrize("is_reduced", [False, True])
def test_each_draft_is_the_candidate_that_best_follows_the_one_before(
    way: Callable[..., Any], is_reduced: bool
) -> None:
    torch.manual_seed(0)
    num_requests, k, vocabulary, rank, hidden = 3, 5, 200, 256, 64
    tables = torch.randn(vocabulary, rank) / 16, torch.randn(vocabulary, rank), torch.randn(rank, hidden) / 8
    selector = Selector(*(x.to(DEVICE) for x in (*tables, torch.randn(rank))))
    logits_SV = torch.randn(num_requests * k, vocabulary, device=DEVICE)
    values_SC, ids_SC = candidates_of(twin(top_candidates), logits_SV)
    query_SR = selector.query(torch.randn(num_requests * k, hidden, device=DEVICE))
    drafts_BK = torch.full((num_requests, 7), -1, device=DEVICE)
    offsets_V = torch.arange(vocabulary, device=DEVICE) * 2 if is_reduced else None
    way(selector, values_SC, ids_SC, query_SR, drafts_BK, k, offsets_V)
    scale = 3 if is_reduced else 1
    moved = 0
    for request in range(num_requests):
        token = int(ids_SC[request * k, 0])
        assert drafts_BK[request, 0] == token * scale
        for place in range(1, k):
            row = request * k + place
            key_R = selector.previous_VR[token] * query_SR[row]
            scores_C = values_SC[row] + selector.candidate_VR[ids_SC[row]] @ key_R
            token = int(ids_SC[row, scores_C.argmax()])
            assert drafts_BK[request, place] == token * scale
            moved += token != int(ids_SC[row, 0])
    assert moved
    assert (drafts_BK[:, k:] == -1).all()
