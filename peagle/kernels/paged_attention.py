"""Attention of a pass's rows over a paged KV cache, and writing rows into it.

A request's rows stand at positions start, start + 1, ...; each sees the keys of its request from `cache_start` (0, or
where a cold start began) up to its own position, with a sliding window the nearest of them. The cache of a layer is
[num_blocks, block_size, G, D]; column j of `block_table_BN` is the block of positions [j * block_size,
(j + 1) * block_size), and every block from `cache_start` on must be there. Keys beyond the table do not exist.

The kernel works on tiles of rows times the query heads that share a key head, so that keys are read once for a request
that decodes. Where tiles and key heads do not fill the GPU, the context is split: parts are weighted together by a
second kernel, as in Flash-Decoding (https://pytorch.org/blog/flash-decoding/). How many parts a request really uses
follows from its context, on the device; with one, nothing is left for the second kernel.

N rows, A query heads, G key and value heads, D head size, B requests.
"""

from __future__ import annotations

import itertools
import math

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.attention_plan import MIN_KEYS_PER_SPLIT, Plan, block_requests, plan_for
from peagle.kernels.dispatch import check_shape, uses_kernel
from peagle.kernels.paged_kernels import attention_kernel, combine_kernel, write_kv_kernel

#: Elements of partial results that one program of the second kernel weights together.
COMBINED_ELEMENTS = 4096
LOG2_E = math.log2(math.e)


def paged_attention(
    q_NAD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    first_row_B1: Tensor,
    start_B: Tensor,
    context_B: Tensor,
    cache_start_B: Tensor,
    *,
    block_size: int,
    scale: float,
    sliding_window: int | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """Attention of N rows, of which `first_row_B1` says whose they are; keys and values are in the cache already.

    Args:
        q_NAD: rotated queries, any strides but 1 in the last dimension.
        k_cache, v_cache: [num_blocks, block_size, G, D], of the same strides.
        block_table_BN: int, blocks of each request.
        first_row_B1, context_B: int, as in `peagle.kernels.batch_rows.Rows`.
        start_B: int, position of a request's first row.
        cache_start_B: int, first position that it has in the cache; at most start.
        scale: factor of the scores, 1 / sqrt(D).
        sliding_window: keys that a row sees at most, its own included.
        out: [N, A, D] to write.
        plan: sizes of the launch, for tests and measurements; of no effect on the twin.

    Returns [N, A, D] of q's type; zeros in rows beyond first_row_B1[-1].
    Raises ValueError when shapes do not fit together.
    """
    num_rows, num_heads, head_size = q_NAD.shape
    num_groups = k_cache.shape[2] if k_cache.dim() == 4 else 1
    num_requests = block_table_BN.shape[0]
    check_shape("k_cache", k_cache, None, block_size, num_groups, head_size)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("first_row_B1", first_row_B1, num_requests + 1)
    for name, tensor in (("start_B", start_B), ("context_B", context_B), ("cache_start_B", cache_start_B)):
        check_shape(name, tensor, num_requests)
    if num_heads % num_groups:
        raise ValueError(f"q_NAD has {num_heads} heads, which {num_groups} heads of k_cache do not divide")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window = {sliding_window} must be at least 1")
    if k_cache.stride() != v_cache.stride() or q_NAD.stride(-1) != 1 or k_cache.stride(-1) != 1:
        raise ValueError("k_cache and v_cache must have the same strides, and heads contiguous as those of q_NAD")
    if out is None:
        out = torch.empty(num_rows, num_heads, head_size, dtype=q_NAD.dtype, device=q_NAD.device)
    check_shape("out", out, num_rows, num_heads, head_size)
    if uses_kernel(q_NAD):
        attend = paged_attention_triton
    else:
        attend = paged_attention_torch
    attend(
        q_NAD, k_cache, v_cache, block_table_BN, first_row_B1, start_B, context_B, cache_start_B, out,
        scale=scale, sliding_window=sliding_window, plan=plan,
    )  # fmt: skip
    return out


def paged_attention_torch(
    q_NAD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    first_row_B1: Tensor,
    start_B: Tensor,
    context_B: Tensor,
    cache_start_B: Tensor,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    plan: Plan | None = None,
) -> None:
    """The twin: torch's own attention, request by request. Reads lengths on the host: for CPUs and for tests."""
    block_size, num_columns = k_cache.shape[1], block_table_BN.shape[1]
    first_row = first_row_B1.tolist()
    starts, ends, lows = start_B.tolist(), context_B.tolist(), cache_start_B.tolist()
    out[first_row[-1] :] = 0
    for request, (begin, end) in enumerate(itertools.pairwise(first_row)):
        if begin == end:
            continue
        low, start = lows[request], starts[request]
        if sliding_window is not None:
            low = max(low, start - sliding_window + 1)
        blocks = block_table_BN[request, low // block_size : math.ceil(ends[request] / block_size)].long().clamp(min=0)
        first_key = low // block_size * block_size
        keys, values = (cache[blocks].flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache))
        num_keys = min(ends[request], num_columns * block_size) - first_key
        keys, values = keys[:, :, :num_keys], values[:, :, :num_keys]
        if low > first_key:  # never written: a NaN there would pass through a weight of zero
            keys[:, :, : low - first_key] = 0
            values[:, :, : low - first_key] = 0
        key_U = torch.arange(first_key, first_key + num_keys, device=q_NAD.device)
        row_T1 = torch.arange(start, start + end - begin, device=q_NAD.device)[:, None]
        visible_TU = (key_U <= row_T1) & (key_U >= low)
        if sliding_window is not None:
            visible_TU &= key_U > row_T1 - sliding_window
        q_1ATD = q_NAD[begin:end].transpose(0, 1)[None]
        attended_1ATD = F.scaled_dot_product_attention(
            q_1ATD, keys, values, attn_mask=visible_TU, scale=scale, enable_gqa=True
        )
        out[begin:end] = attended_1ATD[0].transpose(0, 1)


def paged_attention_triton(
    q_NAD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BN: Tensor,
    first_row_B1: Tensor,
    start_B: Tensor,
    context_B: Tensor,
    cache_start_B: Tensor,
    out: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    plan: Plan | None = None,
) -> None:
    """One launch, or two where the context is split; the grid follows from shapes alone."""
    (num_rows, num_heads, head_size), num_groups = q_NAD.shape, k_cache.shape[2]
    num_requests, num_columns = block_table_BN.shape
    if num_rows == 0:
        return
    if plan is None:
        num_sms = torch.cuda.get_device_properties(q_NAD.device).multi_processor_count if q_NAD.is_cuda else 1
        plan = plan_for(
            num_rows, num_requests, num_heads, num_groups, head_size,
            element_bytes=q_NAD.element_size(), max_context=num_columns * k_cache.shape[1], num_sms=num_sms,
        )  # fmt: skip
    ratio, splits, block_d = num_heads // num_groups, plan.num_splits, max(16, triton.next_power_of_2(head_size))
    partial, lse = out, out  # not touched without splits
    if splits > 1:
        partial = torch.empty(splits, num_rows, num_heads, head_size, dtype=torch.float32, device=out.device)
        lse = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=out.device)
    common = dict(
        BLOCK_SIZE=k_cache.shape[1], BLOCK_Q=plan.block_m // ratio, HEAD=head_size, BLOCK_D=block_d,
        BLOCK_N=plan.block_n, BLOCK_B=block_requests(num_requests), NUM_SPLITS=splits,
        MIN_TILES=MIN_KEYS_PER_SPLIT // plan.block_n, HAS_WINDOW=sliding_window is not None,
    )  # fmt: skip
    # A request begins a tile of its own; so does the padding, which is written as zeros.
    num_tiles = num_rows // common["BLOCK_Q"] + num_requests + 1
    attention_kernel[(num_tiles, num_groups, splits)](
        q_NAD, k_cache, v_cache, block_table_BN, first_row_B1, start_B, context_B, cache_start_B, out, partial, lse,
        num_requests, num_rows, num_columns, sliding_window or 0, scale * LOG2_E,
        q_NAD.stride(0), q_NAD.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table_BN.stride(0),
        RATIO=ratio, BLOCK_M=plan.block_m, PHASED=plan.phased, **common,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        block_a = max(1, min(triton.next_power_of_2(num_heads), COMBINED_ELEMENTS // (block_s * block_d)))
        combine_kernel[(num_rows, triton.cdiv(num_heads, block_a))](
            partial, lse, out, first_row_B1, start_B, context_B, cache_start_B,
            num_requests, num_rows, num_columns, sliding_window or 0, num_heads, out.stride(0), out.stride(1),
            BLOCK_S=block_s, BLOCK_A=block_a, **common, num_warps=4,
        )  # fmt: skip


def write_kv(k_NGD: Tensor, v_NGD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_N: Tensor) -> None:
    """Writes rows into the cache of one layer: row i at slot slots_N[i], nowhere where that is negative.

    k_NGD, v_NGD: rotated keys, and values; any strides but 1 in the last dimension. k_cache, v_cache: [num_blocks,
    block_size, G, D]; slot s is place s % block_size of block s // block_size. Values take the cache's type. Raises
    ValueError when shapes do not fit together.
    """
    num_rows, num_groups, head_size = k_NGD.shape
    check_shape("v_NGD", v_NGD, num_rows, num_groups, head_size)
    check_shape("k_cache", k_cache, None, None, num_groups, head_size)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("slots_N", slots_N, num_rows)
    if k_cache.stride() != v_cache.stride() or any(x.stride(-1) != 1 for x in (k_NGD, v_NGD, k_cache)):
        raise ValueError("k_cache and v_cache must have the same strides, and all heads must be contiguous")
    if num_rows:
        (write_kv_triton if uses_kernel(k_NGD) else write_kv_torch)(k_NGD, v_NGD, k_cache, v_cache, slots_N)


def write_kv_torch(k_NGD: Tensor, v_NGD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_N: Tensor) -> None:
    """The twin: picks the rows that have a slot, whose number the host must know."""
    kept = slots_N >= 0
    slot = slots_N[kept].long()
    block, place = slot // k_cache.shape[1], slot % k_cache.shape[1]
    k_cache[block, place] = k_NGD[kept].to(k_cache.dtype)
    v_cache[block, place] = v_NGD[kept].to(v_cache.dtype)


def write_kv_triton(k_NGD: Tensor, v_NGD: Tensor, k_cache: Tensor, v_cache: Tensor, slots_N: Tensor) -> None:
    """One launch, a program a row."""
    num_rows, num_groups, head_size = k_NGD.shape
    write_kv_kernel[(num_rows,)](
        k_NGD, v_NGD, k_cache, v_cache, slots_N, k_cache.shape[1], num_groups,
        k_NGD.stride(0), k_NGD.stride(1), v_NGD.stride(0), v_NGD.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        HEAD=head_size, BLOCK_D=triton.next_power_of_2(head_size), BLOCK_G=triton.next_power_of_2(num_groups),
        num_warps=4,
    )  # fmt: skip
