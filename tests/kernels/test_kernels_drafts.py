"""Tests of `peagle.drafter.rows`: how drafts are found, kernel and twin against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.drafter.rows import best_tokens
from tests.support.kernel_device import DEVICE, needs_kernel, twin


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
def test_best_tokens_are_the_first_of_the_greatest(way: Callable[..., None], dtype: torch.dtype) -> None:
    logits_NV = logits_of(5, 9001, dtype)
    ids_N = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    way(logits_NV, ids_N)
    assert ids_N.tolist()[:2] == [100, 9000]
    torch.testing.assert_close(logits_NV.float().gather(1, ids_N[:, None])[:, 0], logits_NV.float().amax(-1))


@ways(best_tokens)
def test_a_logit_that_is_no_number_gives_a_token_all_the_same(way: Callable[..., None]) -> None:
    logits_NV = logits_of(2, 9001, torch.float32)
    logits_NV[0, 5000] = float("nan")
    ids_N = torch.full((2,), -1, device=DEVICE)
    way(logits_NV, ids_N)
    assert 0 <= int(ids_N[0]) < 9001
