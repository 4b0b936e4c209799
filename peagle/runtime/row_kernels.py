"""The Triton kernels of `peagle.runtime.row_ops`, which explains what they compute and launches them.

Sums are in float32 and roundings are those of the twins: what a twin holds in the type of its rows is rounded to that
type here as well.
"""

import triton
import triton.language as tl


@triton.jit
def _times(x, y):
    """Product in the type of both, rounded once; Triton's interpreter has no arithmetic of bfloat16."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _normed(x, weight_H, column, is_column, size, eps, BLOCK: tl.constexpr):
    """x / rms(x) * weight for one row, in float32 but rounded to the weight's type where the twin rounds."""
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_H + column, mask=is_column, other=0.0)
    return _times(wide.to(weight.dtype), weight)


@triton.jit
def first_rows_kernel(
    token_ids_N, hidden_NH, embed_VH, mask_embedding_H, input_norm_H, hidden_norm_H, both_N2H, stream_NH,
    size, mask_token_id, eps, KEEPS_NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row; the second program of a row takes its hidden state, the first its embedding."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < size
    if tl.program_id(1) == 0:
        token = tl.load(token_ids_N + row).to(tl.int64)
        if token == mask_token_id:
            embed = tl.load(mask_embedding_H + column, mask=is_column, other=0.0)
        else:
            embed = tl.load(embed_VH + token * size + column, mask=is_column, other=0.0)
        normed = _normed(embed, input_norm_H, column, is_column, size, eps, BLOCK)
        tl.store(both_N2H + row * 2 * size + column, normed, mask=is_column)
    else:
        hidden = tl.load(hidden_NH + row * size + column, mask=is_column, other=0.0)
        normed = _normed(hidden, hidden_norm_H, column, is_column, size, eps, BLOCK)
        tl.store(both_N2H + (row * 2 + 1) * size + column, normed, mask=is_column)
        if KEEPS_NORMED:
            tl.store(stream_NH + row * size + column, normed, mask=is_column)


@triton.jit
def add_norm_kernel(stream_NH, added_NH, weight_H, sum_NH, normed_NH, size, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    is_column = column < size
    stream = tl.load(stream_NH + at + column, mask=is_column, other=0.0)
    added = tl.load(added_NH + at + column, mask=is_column, other=0.0)
    total = (stream.to(tl.float32) + added.to(tl.float32)).to(stream.dtype)
    tl.store(sum_NH + at + column, total, mask=is_column)
    normed = _normed(total, weight_H, column, is_column, size, eps, BLOCK)
    tl.store(normed_NH + at + column, normed, mask=is_column)


@triton.jit
def _half(weight_D, column, HALF: tl.constexpr):
    return tl.load(weight_D + column, mask=column < HALF, other=0.0)


@triton.jit
def rotate_kernel(
    heads_NHD, positions_N, cos_PF, sin_PF, q_norm_D, k_norm_D, out_NHD,
    num_heads, num_queries, stride_n, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, queries and keys; a head is its first and its second half, F numbers each."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_A + tl.arange(0, BLOCK_A))[:, None]
    column = tl.arange(0, BLOCK_F)[None, :]
    kept = (head < num_heads) & (column < HALF)
    at = heads_NHD + row * stride_n + head * (2 * HALF) + column
    first, second = tl.load(at, mask=kept, other=0.0), tl.load(at + HALF, mask=kept, other=0.0)
    if HAS_NORM:
        wide, other = first.to(tl.float32), second.to(tl.float32)
        mean = (tl.sum(wide * wide, axis=1) + tl.sum(other * other, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        is_query = head < num_queries
        low = tl.where(is_query, _half(q_norm_D, column, HALF), _half(k_norm_D, column, HALF))
        high = tl.where(is_query, _half(q_norm_D + HALF, column, HALF), _half(k_norm_D + HALF, column, HALF))
        first = _times((wide * scale).to(first.dtype), low)
        second = _times((other * scale).to(second.dtype), high)
    angle = tl.load(positions_N + row).to(tl.int64) * HALF + column
    cos = tl.load(cos_PF + angle, mask=column < HALF, other=0.0)
    sin = tl.load(sin_PF + angle, mask=column < HALF, other=0.0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    out = out_NHD + row * num_heads * (2 * HALF) + head * (2 * HALF) + column
    tl.store(out, (first * cos - second * sin).to(out_NHD.dtype.element_ty), mask=kept)
    tl.store(out + HALF, (second * cos + first * sin).to(out_NHD.dtype.element_ty), mask=kept)


@triton.jit
def silu_mul_kernel(gate_up_N2I, out_NI, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    gate = tl.load(gate_up_N2I + row * 2 * size + column, mask=is_column, other=0.0)
    up = tl.load(gate_up_N2I + (row * 2 + 1) * size + column, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    gated = _times((wide / (1.0 + tl.exp(-wide))).to(gate.dtype), up)
    tl.store(out_NI + row * size + column, gated, mask=is_column)
