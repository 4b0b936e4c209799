"""Attention over the paged cache: kernel against twin. `test_parallel_pass.py` compares the twin with DraftSession."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.drafter.attention import LaunchPlan, paged_attention
from peagle.drafter.rows import INTERPRETED
from tests.support.kernel_device import DEVICE, needs_kernel, twin

SPLIT = LaunchPlan(block_m=16, block_n=16, num_splits=3, num_warps=4, num_stages=2)
WHOLE = LaunchPlan(block_m=32, block_n=32, num_splits=1, num_warps=4, num_stages=2)
LARGE = LaunchPlan(block_m=128, block_n=64, num_splits=1, num_warps=8, num_stages=2)
PLANS = {"split": SPLIT, "whole": WHOLE, "chosen": None}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests as (start, rows), and the sizes of heads and cache."""

    requests: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_groups: int = 1
    head_size: int = 64
    block_size: int = 16
    num_padding_rows: int = 0
    num_columns: int | None = None
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `paged_attention`. What no row may see is NaN in the cache."""

    tensors: tuple[Tensor, ...]
    scale: float

    @classmethod
    def random(cls, shape: Shape) -> Problem:
        generator = torch.Generator().manual_seed(len(shape.requests))
        contexts = [start + rows for start, rows in shape.requests]
        block_size = shape.block_size
        num_columns = shape.num_columns or -(-max(contexts) // block_size) + 2
        num_requests = len(shape.requests)
        num_blocks = num_requests * num_columns + 1
        table_BN = torch.randperm(num_blocks - 1, generator=generator).view(num_requests, num_columns) + 1
        cache_shape = (2, num_blocks, block_size, shape.num_groups, shape.head_size)
        caches = torch.full(cache_shape, float("nan"), dtype=torch.float32)
        for index, context in enumerate(contexts):
            position = torch.arange(context)
            at = table_BN[index, position // block_size], position % block_size
            values = torch.randn(2, len(position), *cache_shape[3:], generator=generator)
            caches[0][at], caches[1][at] = values[0], values[1]
            table_BN[index, -(-context // block_size) :] = -1
        rows = [rows for _, rows in shape.requests]
        num_rows = sum(rows) + shape.num_padding_rows
        # Queries as they lie in a fused projection: with keys and values behind them.
        fused = torch.randn(num_rows, shape.num_heads + 2 * shape.num_groups, shape.head_size, generator=generator)
        first_row_B1 = torch.tensor([0, *rows]).cumsum(0).int()
        start_B = torch.tensor([start for start, _ in shape.requests], dtype=torch.int32)
        context_B = torch.tensor(contexts, dtype=torch.int32)
        floats = [tensor.to(DEVICE, shape.dtype) for tensor in (fused, *caches)]
        integers = [tensor.int().to(DEVICE) for tensor in (table_BN, first_row_B1, start_B, context_B)]
        return cls((floats[0][:, : shape.num_heads], *floats[1:], *integers), shape.head_size**-0.5)

    def twin(self) -> Tensor:
        return twin(paged_attention)(*self.tensors, scale=self.scale)

    def kernel(self, plan: LaunchPlan | None) -> Tensor:
        return paged_attention(*self.tensors, scale=self.scale, plan=plan)


SHAPES: dict[str, Shape] = {
    "one row": Shape(((0, 1),)),
    "all rejected but one": Shape(((90, 8), (3, 8)), num_heads=3),
    "gqa 3": Shape(((20, 5), (0, 7)), num_heads=9, num_groups=3),
    "gqa 4, head 128": Shape(((40, 15), (70, 2)), num_heads=8, num_groups=2, head_size=128, block_size=32),
    "gqa 8": Shape(((33, 9),), num_heads=16, num_groups=2),
    "gqa 1": Shape(((33, 9), (1, 3)), num_heads=2, num_groups=2, block_size=32),
    "head 8": Shape(((33, 9),), num_heads=4, num_groups=2, head_size=8),
    "head 96": Shape(((33, 9),), num_heads=2, num_groups=1, head_size=96),
    "padding rows": Shape(((33, 3), (5, 2)), num_padding_rows=23),
    "padding requests": Shape(((0, 0), (33, 3), (7, 0), (5, 2), (0, 0)), num_padding_rows=4),
    "only padding": Shape(((0, 0),), num_padding_rows=5),
    "long prompt": Shape(((0, 70),), num_heads=3),
    "second chunk beside decode": Shape(((32, 40), (80, 3), (11, 4)), num_heads=4, num_groups=2),
}  # fmt: skip


@needs_kernel
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *((name, "split") for name in SHAPES),
        *((name, plan) for name in ("gqa 3", "padding requests") for plan in ("whole", "chosen")),
        ("second chunk beside decode", "whole"),
    ],
)
def test_kernel_equals_twin(name: str, plan: str) -> None:
    problem = Problem.random(SHAPES[name])
    torch.testing.assert_close(problem.kernel(PLANS[plan]), problem.twin(), rtol=2e-5, atol=2e-5)


@needs_kernel
def test_a_long_context_is_split() -> None:
    # 1100 keys: more than two parts of 256, with the least that a part must have.
    problem = Problem.random(Shape(((1100, 1), (20, 2)), num_heads=3))
    for num_splits in (5, 32):
        plan = dataclasses.replace(SPLIT, num_splits=num_splits)
        torch.testing.assert_close(problem.kernel(plan), problem.twin(), rtol=2e-5, atol=2e-5)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16 as integers: tested on a GPU")
    for plan in (SPLIT, LARGE, None):
        problem = Problem.random(Shape(((100, 20), (5, 3)), num_groups=2, dtype=dtype))
        # Weights are rounded to the values' type before they meet them: half a step of values up to 4.
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(problem.kernel(plan), problem.twin(), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [None, dataclasses.replace(SPLIT, num_splits=8), LARGE])
def test_a_captured_launch_follows_lengths_that_change_on_the_device(plan: LaunchPlan | None) -> None:
    first = Shape(((900, 3), (20, 9), (0, 0)), num_padding_rows=8, dtype=torch.bfloat16, num_columns=70)
    problem = Problem.random(first)
    problem.kernel(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.kernel(plan)
    for requests in (first.requests, ((3, 1), (1080, 15), (64, 4)), ((0, 0),) * 3):
        num_padding_rows = 20 - sum(rows for _, rows in requests)
        other = Problem.random(dataclasses.replace(first, requests=requests, num_padding_rows=num_padding_rows))
        for tensor, value in zip(problem.tensors, other.tensors, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.testing.assert_close(captured, other.twin(), rtol=0.03, atol=0.03)


@needs_kernel
def test_no_rows() -> None:
    assert Problem.random(Shape(((5, 0), (0, 0)))).kernel(None).shape == (0, 4, 64)
