"""Attention of a pass's rows over a paged KV cache.

A request's rows stand at positions start, start + 1, ...; each sees the keys of its request up to its own position.
The cache of a layer is [num_blocks, block_size, G, D]; column j of `block_table_BN` is the block of positions
[j * block_size, (j + 1) * block_size).

The kernel works on tiles of rows times the query heads that share a key head, so that keys are read once for a request
that decodes. Where tiles and key heads do not fill the GPU, the context is split: parts are weighted together by a
second kernel, as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/). How many parts a request really uses
follows from its context, on the device.

N rows, A query heads, G key and value heads, D head size, B requests.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter.rows import uses_kernel

MIN_KEYS_PER_SPLIT = 256  # fewer keys cost more in partial results than the split saves
MAX_SPLITS = 32
_COMBINED_ELEMENTS = 4096  # of partial results that one program of the second kernel weights together
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """Sizes of one launch: rows times query heads of a tile, keys read at a time, parts of the context at most."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


def plan_for(
    num_rows: int,
    num_requests: int,
    num_heads: int,
    num_groups: int,
    head_size: int,
    *,
    element_bytes: int,
    max_context: int,
    num_sms: int,
) -> LaunchPlan:
    """Sizes for a batch of about equal requests; every distinct plan is a kernel to compile, so plans are few.

    element_bytes: of queries and keys. max_context: positions of the block table. num_sms: multiprocessors of the GPU.
    """
    ratio = num_heads // num_groups
    rows_each = triton.cdiv(num_rows, max(num_requests, 1))
    # What a tile keeps in registers is bounded: larger tiles would spill. float32 has no tensor cores here.
    most = 32 if element_bytes > 2 else (128 if head_size <= 128 else 64)
    block_m = min(most, max(16, triton.next_power_of_2(rows_each * ratio)))
    block_m = max(block_m, triton.next_power_of_2(ratio))
    num_tiles = max(num_requests, 1) * triton.cdiv(rows_each, block_m // ratio)
    # Two programs fit a multiprocessor; twice as many even out contexts of different lengths.
    num_splits = min(4 * num_sms // (num_tiles * num_groups), triton.cdiv(max_context, MIN_KEYS_PER_SPLIT), MAX_SPLITS)
    # A power of two: every number of splits is a kernel of its own to compile.
    num_splits = 1 << max(num_splits, 1).bit_length() - 1
    small = head_size * element_bytes <= 256
    return LaunchPlan(
        block_m=block_m,
        block_n=64 if small else 32,
        num_splits=num_splits,
        num_warps=8 if block_m >= 128 or not small else 4,
        num_stages=3 if small else 2,
    )


def paged_attention(
    q_NAD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    first_row_B1: Tensor,
    start_B: Tensor,
    context_B: Tensor,
    *,
    scale: float,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """Attention of N rows, [N, A, D] of q's type; zeros in rows beyond first_row_B1[-1].

    q_NAD: rotated queries. k_cache, v_cache: [num_blocks, block_size, G, D], of the same strides, with the rows' own
    keys and values. block_table_BN: int. first_row_B1, context_B: int, as in `peagle.drafter.rows.Rows`. start_B:
    int, position of a request's first row. scale: factor of the scores. plan: sizes of the launch, for tests.
    """
    (num_rows, num_heads, head_size), (num_requests, num_columns) = q_NAD.shape, block_table_BN.shape
    block_size, num_groups = k_cache.shape[1], k_cache.shape[2]
    assert k_cache.stride() == v_cache.stride()
    if not uses_kernel(q_NAD):  # torch's own attention, request by request; reads lengths on the host
        starts, ends = start_B.tolist(), context_B.tolist()
        out = torch.zeros_like(q_NAD, memory_format=torch.contiguous_format)
        for request, (begin, end) in enumerate(itertools.pairwise(first_row_B1.tolist())):
            if begin == end:
                continue
            blocks = block_table_BN[request, : math.ceil(ends[request] / block_size)].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[: ends[request]].transpose(0, 1) for cache in (k_cache, v_cache)
            )
            key_U = torch.arange(ends[request], device=q_NAD.device)
            row_T1 = starts[request] + torch.arange(end - begin, device=q_NAD.device)[:, None]
            visible_TU = key_U <= row_T1
            attended_1ATD = F.scaled_dot_product_attention(
                q_NAD[begin:end].transpose(0, 1)[None], keys[None], values[None],
                attn_mask=visible_TU, scale=scale, enable_gqa=True,
            )  # fmt: skip
            out[begin:end] = attended_1ATD[0].transpose(0, 1)
        return out
    out = torch.empty(num_rows, num_heads, head_size, dtype=q_NAD.dtype, device=q_NAD.device)
    if num_rows == 0:
        return out
    if plan is None:
        num_sms = torch.cuda.get_device_properties(q_NAD.device).multi_processor_count if q_NAD.is_cuda else 1
        plan = plan_for(
            num_rows, num_requests, num_heads, num_groups, head_size,
            element_bytes=q_NAD.element_size(), max_context=num_columns * block_size, num_sms=num_sms,
        )  # fmt: skip
    # One launch, or two where the context is split; the grid follows from shapes alone.
    ratio, splits, block_d = num_heads // num_groups, plan.num_splits, max(16, triton.next_power_of_2(head_size))
    partial, lse = out, out  # not touched without splits
    if splits > 1:
        partial = torch.empty(splits, num_rows, num_heads, head_size, dtype=torch.float32, device=out.device)
        lse = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=out.device)
    common = dict(
        BLOCK_Q=plan.block_m // ratio, HEAD=head_size, BLOCK_D=block_d, BLOCK_N=plan.block_n, NUM_SPLITS=splits,
        # Lanes that look for a row's request, of which there is one more than requests.
        BLOCK_B=max(64, triton.next_power_of_2(num_requests + 1)),
        MIN_TILES=MIN_KEYS_PER_SPLIT // plan.block_n,
    )  # fmt: skip
    # A request begins a tile of its own; so does the padding, which is written as zeros.
    num_tiles = num_rows // common["BLOCK_Q"] + num_requests + 1
    attention_kernel[(num_tiles, num_groups, splits)](
        q_NAD, k_cache, v_cache, block_table_BN, first_row_B1, start_B, context_B, out, partial, lse,
        num_requests, num_rows, scale * _LOG2_E,
        q_NAD.stride(0), q_NAD.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table_BN.stride(0),
        RATIO=ratio, BLOCK_M=plan.block_m, BLOCK_SIZE=block_size, **common,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        block_a = max(1, min(triton.next_power_of_2(num_heads), _COMBINED_ELEMENTS // (block_s * block_d)))
        combine_kernel[(num_rows, triton.cdiv(num_heads, block_a))](
            partial, lse, out, first_row_B1, start_B, context_B,
            num_requests, num_rows, num_heads, out.stride(0), out.stride(1),
            BLOCK_S=block_s, BLOCK_A=block_a, **common, num_warps=4,
        )  # fmt: skip
    return out


# The attention's kernels. Row tiles: BLOCK_M = BLOCK_Q rows times RATIO query heads of one key head, row by row. Tiles
# are numbered such that request b begins with tile first_row[b] // BLOCK_Q + b; the padding after the last row counts
# as request B. Scores are in powers of two: the scale holds log2(e).


@triton.jit
def _key_span(
    row, rows_end, first, start, context,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Keys of the tile whose first row is `row`: (end, keys of a split, splits used).

    Both kernels call this, so they agree on who wrote what.
    """
    end = tl.minimum(start + tl.minimum(row + BLOCK_Q, rows_end) - first, context)
    num_tiles = tl.cdiv(tl.maximum(end, 0), BLOCK_N)
    tiles_each = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), MIN_TILES)
    return end, tiles_each * BLOCK_N, tl.maximum(tl.cdiv(num_tiles, tiles_each), 1)


@triton.jit(do_not_specialize=["num_requests", "num_rows"])  # each special value is a kernel to compile
def attention_kernel(
    q_NAD, k_cache, v_cache, block_table, first_row, start_B, context_B, out, partial, lse,
    num_requests, num_rows, scale,
    q_stride_n, q_stride_a, out_stride_n, out_stride_a, block_stride, slot_stride, group_stride, table_stride,
    RATIO: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one key head, one part of the context. Tiles run last to first: late ones see more keys."""
    tile, group, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.arange(0, BLOCK_B)
    begins = tl.load(first_row + index, mask=index <= num_requests, other=1 << 30) // BLOCK_Q + index
    request = tl.sum((begins <= tile).to(tl.int32), axis=0) - 1
    first = tl.load(first_row + request).to(tl.int32)
    tile_row = first + (tile - first // BLOCK_Q - request) * BLOCK_Q
    is_padding = request == num_requests
    rows_end = tl.load(first_row + request + 1, mask=request < num_requests, other=num_rows).to(tl.int32)
    if (tile_row >= rows_end) | (is_padding & (split > 0)):
        return
    part = tl.arange(0, BLOCK_M)
    row, head = (tile_row + part // RATIO).to(tl.int64), group * RATIO + part % RATIO
    column = tl.arange(0, BLOCK_D)
    kept = ((part < BLOCK_Q * RATIO) & (row < rows_end))[:, None] & (column < HEAD)[None, :]
    out_at = out + (row * out_stride_n + head * out_stride_a)[:, None] + column[None, :]
    if is_padding:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=kept)
        return
    start = tl.load(start_B + request).to(tl.int32)
    high, keys_each, used = _key_span(
        tile_row, rows_end, first, start, tl.load(context_B + request).to(tl.int32),
        BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_TILES,
    )  # fmt: skip
    if split >= used:
        return
    q = tl.load(q_NAD + (row * q_stride_n + head * q_stride_a)[:, None] + column[None, :], mask=kept, other=0.0)
    position = start + (row - first).to(tl.int32)
    table = block_table + request.to(tl.int64) * table_stride
    # Running sums over the keys: weighted values, weights, greatest score.
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin = split * keys_each
    for tile_key in range(begin, tl.minimum(begin + keys_each, high), BLOCK_N):
        key = tile_key + tl.arange(0, BLOCK_N)
        exists = key < high
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0)
        at = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE).to(tl.int64) * slot_stride
        at = (at + group * group_stride)[:, None] + column[None, :]
        read = exists[:, None] & (column < HEAD)[None, :]
        k = tl.load(k_cache + at, mask=read, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen no key yet has -inf at the top, from which nothing may be subtracted.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(v_cache + at, mask=read, other=0.0)
        weight = weight * shrink + tl.sum(share, axis=1)
        total = total * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        top = new_top
    mean = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    if used == 1:
        tl.store(out_at, mean.to(out.dtype.element_ty), mask=kept)
    elif NUM_SPLITS > 1:
        at = (split.to(tl.int64) * num_rows + row) * (tl.num_programs(1) * RATIO) + head
        tl.store(partial + at[:, None] * HEAD + column[None, :], mean, mask=kept)
        tl.store(lse + at, top + tl.log2(weight), mask=(part < BLOCK_Q * RATIO) & (row < rows_end))


@triton.jit(do_not_specialize=["num_requests", "num_rows"])
def combine_kernel(
    partial, lse, out, first_row, start_B, context_B,
    num_requests, num_rows, num_heads, out_stride_n, out_stride_a,
    BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
):  # fmt: skip
    """Weights the parts of one row's context together, for some heads. Rows of one part are finished already."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK_B)
    ends = tl.load(first_row + index + 1, mask=index < num_requests, other=1 << 30)
    request = tl.sum((ends <= row).to(tl.int32), axis=0)
    if request >= num_requests:
        return
    first = tl.load(first_row + request).to(tl.int32)
    _, _, used = _key_span(
        first + (row - first) // BLOCK_Q * BLOCK_Q, tl.load(first_row + request + 1).to(tl.int32), first,
        tl.load(start_B + request).to(tl.int32), tl.load(context_B + request).to(tl.int32),
        BLOCK_Q, BLOCK_N, NUM_SPLITS, MIN_TILES,
    )  # fmt: skip
    if used == 1:
        return
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A)
    at = (split.to(tl.int64)[:, None] * num_rows + row) * num_heads + head[None, :]
    has_part = (split < used)[:, None] & (head < num_heads)[None, :]
    score = tl.load(lse + at, mask=has_part, other=float("-inf"))
    top = tl.max(score, axis=0)
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[None, :])
    read = has_part[:, :, None] & (column < HEAD)[None, None, :]
    mean = tl.load(partial + at[:, :, None] * HEAD + column[None, None, :], mask=read, other=0.0)
    whole = tl.sum(weight, axis=0)
    value = tl.sum(mean * weight[:, :, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)[:, None]
    out_at = out + row.to(tl.int64) * out_stride_n + head[:, None] * out_stride_a + column[None, :]
    tl.store(out_at, value.to(out.dtype.element_ty), mask=(head < num_heads)[:, None] & (column < HEAD)[None, :])
