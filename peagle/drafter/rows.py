"""What happens to the rows of a pass outside its matrix products: laid out, filled with hidden states, normed, rotated.

The rows of a pass stand one request after another, as `peagle.draft` describes them for one: n valid rows at positions
start..start + n - 1, then K - 1 rows of the mask token. With start = 4, n = 2, K = 3 and payload rows 10, 11:

    position    4         5         6       7
    token       next[10]  next[11]  mask    mask
    source      10        11        -1      -1        (-1: the shared hidden state)
    samples               draft 1   draft 2 draft 3

Rejected rows never appear: the next start lies before them. `accepted_rows` runs at the target and says which rows of
its step are valid, and the token after each.

Every function of the pass has a Triton kernel for GPUs (and for Triton's interpreter), and above its launch the same in
plain torch for other devices, its twin. Sums of kernels are in float32, roundings are those of the twins.

B requests, N rows, R payload rows, K drafts at most, H hidden size, I width of the MLP, A query heads and G key heads
of D = 2F numbers, P positions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from peagle.model import rms_norm

#: Read once, as Triton does: kernels are interpreted or compiled from the moment they are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MIN_BLOCK_REQUESTS = 64  # lanes for requests, here and in the attention: each width is a kernel to compile
ALIGNMENT_BYTES = 16  # of addresses, where a row's size is a multiple of it: rows then move in wide loads
_SEARCHED_ELEMENTS = 2048  # of the table (row of the block, request) that one program searches
_MAX_BLOCK_H = 2048
_ROTATED_ELEMENTS = 2048  # of one program
_GATED_ELEMENTS = 1024


def uses_kernel(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to a Triton kernel: on a GPU, or anywhere under the interpreter."""
    return INTERPRETED or tensor.is_cuda


# Rows of a pass


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one pass; the tail beyond `first_row_B1[-1]` is padding.

    token_ids_N: int64, 0 in the padding. positions_N: int64, 0 in the padding.
    slots_N: int64, place in the flat KV cache; -1: not to be written (padding, or beyond the block table).
    sources_N: int32, row of the payload whose hidden state enters; -1: the shared hidden state (masks and padding).
    sample_rows_BK: int64, row that proposes each draft; -1: no draft wanted at this depth. As an index into [N, H], -1
        is the last row, so one gather needs no clamp; its drafts are to be dropped.
    first_row_B1: int32, request b has rows first_row_B1[b]..first_row_B1[b + 1] - 1.
    context_B: int32, keys that a request has after this pass: start + n + K - 1.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    sources_N: Tensor
    sample_rows_BK: Tensor
    first_row_B1: Tensor
    context_B: Tensor


def build_rows(
    start_B: Tensor,
    num_valid_B: Tensor,
    row_offset_B: Tensor,
    num_drafts_B: Tensor,
    next_tokens_R: Tensor,
    block_table_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    max_draft_tokens: int,
    num_rows: int,
) -> Rows:
    """Lays out the rows of one pass.

    Args:
        start_B: int, position of a request's first row.
        num_valid_B: int, n: rows given for it; with none (padding of the batch) it has no mask rows either.
        row_offset_B: int, its first row in the payload.
        num_drafts_B: int, K: drafts wanted; 0: the rows only enter the cache. At most max_draft_tokens count.
        next_tokens_R: int, the token after each payload row; any stride.
        block_table_BN: int, cache block of positions [j * block_size, (j + 1) * block_size) in column j; -1: none.
        block_size: positions a cache block.
        mask_token_id: token of the mask rows.
        max_draft_tokens: columns of `sample_rows_BK`.
        num_rows: N. All requests together must have no more rows; rows beyond N are left out, also from the samples.
    """
    num_requests, num_payload_rows, device = len(start_B), len(next_tokens_R), start_B.device
    if not uses_kernel(start_B) or not num_requests:
        valid_B = num_valid_B.long().clamp(min=0)
        drafts_B = torch.where(valid_B > 0, num_drafts_B.long().clamp(0, max_draft_tokens), 0)
        rows_B = valid_B + (drafts_B - 1).clamp(min=0)
        first_B1 = torch.cat([rows_B.new_zeros(1), rows_B.cumsum(0)])
        context_B = (start_B.long() + rows_B).int()
        depths_K = torch.arange(max_draft_tokens, device=device)
        sampled_BK = (first_B1[:-1] + valid_B - 1)[:, None] + depths_K
        sampled_BK[(depths_K >= drafts_B[:, None]) | (sampled_BK >= num_rows)] = -1
        index_N = torch.arange(num_rows, device=device)
        is_row_N = index_N < first_B1[-1]
        request_N = torch.searchsorted(first_B1[1:], index_N, right=True).clamp(max=max(num_requests - 1, 0))
        if not num_requests:  # the padding then reads a request without rows
            valid_B = start_B = row_offset_B = valid_B.new_zeros(1)
            block_table_BN = block_table_BN.new_zeros(1, 0)
        offset_N = index_N - first_B1[request_N]
        is_valid_N = is_row_N & (offset_N < valid_B[request_N])
        source_N = row_offset_B.long()[request_N] + offset_N
        in_payload_N = is_valid_N & (source_N >= 0) & (source_N < num_payload_rows)
        source_N = torch.where(in_payload_N, source_N, -1)
        given_N = torch.cat([next_tokens_R.long(), next_tokens_R.new_zeros(1, dtype=torch.int64)])[source_N]
        position_N = start_B.long()[request_N] + offset_N
        column_N, num_columns = position_N // block_size, block_table_BN.shape[1]
        padded_BN = F.pad(block_table_BN.long(), (0, 1), value=-1)
        block_N = padded_BN[request_N, column_N.clamp(0, num_columns)]
        slot_N = block_N * block_size + position_N % block_size
        token_N = torch.where(is_valid_N, given_N, mask_token_id)
        return Rows(
            token_ids_N=torch.where(is_row_N, token_N, 0),
            positions_N=torch.where(is_row_N, position_N, 0),
            slots_N=torch.where(is_row_N & (block_N >= 0), slot_N, -1),
            sources_N=source_N.int(),
            sample_rows_BK=sampled_BK,
            first_row_B1=first_B1.clamp(max=num_rows).int(),
            context_B=context_B,
        )
    out = Rows(
        token_ids_N=torch.empty(num_rows, dtype=torch.int64, device=device),
        positions_N=torch.empty(num_rows, dtype=torch.int64, device=device),
        slots_N=torch.empty(num_rows, dtype=torch.int64, device=device),
        sources_N=torch.empty(num_rows, dtype=torch.int32, device=device),
        sample_rows_BK=torch.empty(num_requests, max_draft_tokens, dtype=torch.int64, device=device),
        first_row_B1=torch.empty(num_requests + 1, dtype=torch.int32, device=device),
        context_B=torch.empty(num_requests, dtype=torch.int32, device=device),
    )
    # One launch: programs of some rows each, and a last one for what is kept per request.
    block_requests = max(MIN_BLOCK_REQUESTS, triton.next_power_of_2(num_requests))
    block_rows = max(1, min(128, _SEARCHED_ELEMENTS // block_requests))
    _build_rows_kernel[(triton.cdiv(num_rows, block_rows) + 1,)](
        start_B, num_valid_B, row_offset_B, num_drafts_B, next_tokens_R, block_table_BN,
        out.token_ids_N, out.positions_N, out.slots_N, out.sources_N,
        out.sample_rows_BK, out.first_row_B1, out.context_B,
        num_requests, num_payload_rows, next_tokens_R.stride(0), num_rows, block_table_BN.stride(0),
        block_table_BN.shape[1], block_size, mask_token_id, max_draft_tokens,
        BLOCK_B=block_requests, BLOCK_N=block_rows, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "max_draft_tokens"]
)  # each special value is a kernel to compile
def _build_rows_kernel(
    start_B, num_valid_B, row_offset_B, num_drafts_B, next_tokens_R, block_table_BN,
    token_ids_N, positions_N, slots_N, sources_N, sample_rows_BK, first_row_B1, context_B,
    num_requests, num_payload_rows, tokens_stride, num_rows, table_stride, num_columns,
    block_size, mask_token_id, max_draft_tokens,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Every program sums up the requests' rows for itself: they are few, and no program waits for another."""
    request = tl.arange(0, BLOCK_B)
    is_request = request < num_requests
    valid = tl.maximum(tl.load(num_valid_B + request, mask=is_request, other=0).to(tl.int32), 0)
    drafts = tl.load(num_drafts_B + request, mask=is_request, other=0).to(tl.int32)
    drafts = tl.where(valid > 0, tl.minimum(tl.maximum(drafts, 0), max_draft_tokens), 0)
    rows = valid + tl.maximum(drafts - 1, 0)
    end = tl.cumsum(rows, axis=0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        start = tl.load(start_B + request, mask=is_request, other=0).to(tl.int32)
        tl.store(context_B + request, start + rows, mask=is_request)
        tl.store(first_row_B1 + request + 1, tl.minimum(end, num_rows), mask=is_request)
        tl.store(first_row_B1 + request, 0, mask=request == 0)
        for depth in range(max_draft_tokens):
            sampled = end - rows + valid - 1 + depth
            sampled = tl.where((depth < drafts) & (sampled < num_rows), sampled, -1)
            tl.store(sample_rows_BK + request * max_draft_tokens + depth, sampled.to(tl.int64), mask=is_request)
    else:
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        before = end[None, :] <= row[:, None]
        owner = tl.sum(before.to(tl.int32), axis=1)
        offset = row - tl.sum(tl.where(before, rows[None, :], 0), axis=1)
        is_row = row < tl.sum(rows, axis=0)
        is_valid = is_row & (offset < tl.load(num_valid_B + owner, mask=is_row, other=0).to(tl.int32))
        source = tl.load(row_offset_B + owner, mask=is_row, other=0).to(tl.int32) + offset
        in_payload = is_valid & (source >= 0) & (source < num_payload_rows)
        token = tl.load(next_tokens_R + source * tokens_stride, mask=in_payload, other=0).to(tl.int64)
        token = tl.where(is_row & ~is_valid, mask_token_id, token)
        position = tl.where(is_row, tl.load(start_B + owner, mask=is_row, other=0).to(tl.int32) + offset, 0)
        column = position // block_size
        has_column = is_row & (column >= 0) & (column < num_columns)
        block = tl.load(block_table_BN + owner.to(tl.int64) * table_stride + column, mask=has_column, other=-1)
        slot = block.to(tl.int64) * block_size + position % block_size
        is_stored = row < num_rows
        tl.store(token_ids_N + row, token, mask=is_stored)
        tl.store(positions_N + row, position.to(tl.int64), mask=is_stored)
        tl.store(slots_N + row, tl.where(block >= 0, slot, -1), mask=is_stored)
        tl.store(sources_N + row, tl.where(in_payload, source, -1), mask=is_stored)


# Hidden states of a pass's rows


def place_hidden(addresses_R: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> Tensor:
    """Writes and returns out_NH: row i is the payload's row sources_N[i], or mask_hidden_H where the source is -1.

    addresses_R: int64, where each row of the payload, H numbers of out_NH's type, begins in memory that out_NH's device
    reaches (its own, or pinned host memory); multiples of `ALIGNMENT_BYTES` where a row's size is. Whoever calls keeps
    that memory until the kernel has run; only rows that a source names are read. So a captured graph reads the
    rings of several targets where they are.
    """
    num_rows, hidden_size = out_NH.shape
    if not num_rows:
        return out_NH
    if not uses_kernel(out_NH):  # addresses of host memory
        row_bytes = out_NH.shape[1] * out_NH.itemsize
        for row_H, source in zip(out_NH, sources_N.tolist(), strict=True):
            if source < 0:
                row_H.copy_(mask_hidden_H)
            else:
                row = (ctypes.c_char * row_bytes).from_address(int(addresses_R[source]))
                row_H.copy_(torch.frombuffer(row, dtype=out_NH.dtype))
        return out_NH
    block = min(_MAX_BLOCK_H, triton.next_power_of_2(hidden_size))
    _place_hidden_kernel[(num_rows, triton.cdiv(hidden_size, block))](
        addresses_R, sources_N, mask_hidden_H, out_NH, addresses_R.stride(0), hidden_size,
        BLOCK_H=block, ALIGNMENT=ALIGNMENT_BYTES if hidden_size * out_NH.itemsize % ALIGNMENT_BYTES == 0 else 1,
        num_warps=4,
    )  # fmt: skip
    return out_NH


@triton.jit
def _place_hidden_kernel(
    addresses_R, sources_N, mask_hidden_H, out_NH, address_stride, hidden_size,
    BLOCK_H: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    source = tl.load(sources_N + row).to(tl.int64)
    if source >= 0:
        address = tl.load(addresses_R + source * address_stride)
        payload_H = tl.multiple_of(address.to(tl.pointer_type(out_NH.dtype.element_ty)), ALIGNMENT)
        tl.store(out_NH + row * hidden_size + column, tl.load(payload_H + column, mask=is_column), mask=is_column)
    else:
        shared = tl.load(mask_hidden_H + column, mask=is_column)
        tl.store(out_NH + row * hidden_size + column, shared.to(out_NH.dtype.element_ty), mask=is_column)


# What a target's step leaves of each request


def accepted_rows(
    first_row_B1: Tensor,
    num_drafts_up_to_B: Tensor | None,
    num_sampled_B: Tensor,
    next_tokens_B: Tensor,
    input_ids_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Valid rows of each request [B] and the token after each row [R], both int32 on the inputs' device.

    With requests of rows 0..3 (a token and 3 drafts, 2 of them accepted) and 4 (a token), sampled next x and y:

        row           0         1         2     3          4
        input         t         d1        d2    d3         u
        stays         yes       yes       yes   no         yes
        next token    d1        d2        x     anything   y

    Args:
        first_row_B1: int, request b has rows first_row_B1[b] .. first_row_B1[b + 1] - 1, which are all R rows.
        num_drafts_up_to_B: int, drafts verified by the requests 0 .. b together; None where nobody verified any.
        num_sampled_B: int, tokens that each request sampled: accepted drafts and one more, 0 after an unfinished
            prompt chunk. Without drafts all rows stay, whatever it says.
        next_tokens_B: int, the token after each request's last valid row.
        input_ids_R: int, the token of each row.

    The token after a rejected row means nothing; it is an input token or 0.
    """
    num_valid_B = first_row_B1.diff().int()
    if num_drafts_up_to_B is not None:
        num_drafts_B = num_drafts_up_to_B.diff(prepend=num_drafts_up_to_B.new_zeros(1))
        num_valid_B -= (num_drafts_B + 1 - num_sampled_B).masked_fill(num_drafts_B == 0, 0)
    next_tokens_R = F.pad(input_ids_R[1:].int(), (0, min(1, len(input_ids_R))))
    last_B = first_row_B1[:-1] + (num_valid_B - 1).clamp(min=0)
    next_tokens_R[last_B.long()] = next_tokens_B.int()
    return num_valid_B, next_tokens_R


# What a pass does to each row between its matrix products; the twins are the formulas of `peagle.model`


def first_rows(
    token_ids_N: Tensor,
    hidden_NH: Tensor,
    embed_VH: Tensor,
    mask_token_id: int,
    mask_embedding_H: Tensor,
    input_norm_H: Tensor,
    hidden_norm_H: Tensor,
    eps: float,
    norm_before_residual: bool,
) -> tuple[Tensor, Tensor]:
    """What the first layer reads [N, 2H], normed embeddings beside normed hidden states, and its residual stream
    [N, H]: the hidden states, normed with `norm_before_residual`. The mask token has an embedding of its own.
    """
    if not _fits_kernel(hidden_NH):
        embeds_NH = F.embedding(token_ids_N, embed_VH)
        embeds_NH = torch.where((token_ids_N == mask_token_id)[:, None], mask_embedding_H, embeds_NH)
        normed_NH = rms_norm(hidden_NH, hidden_norm_H, eps)
        both_N2H = torch.cat([rms_norm(embeds_NH, input_norm_H, eps), normed_NH], dim=-1)
        return both_N2H, normed_NH if norm_before_residual else hidden_NH
    num_rows, size = hidden_NH.shape
    both_N2H = hidden_NH.new_empty(num_rows, 2 * size)
    stream_NH = torch.empty_like(hidden_NH) if norm_before_residual else hidden_NH
    first_rows_kernel[(num_rows, 2)](
        token_ids_N, hidden_NH, embed_VH, mask_embedding_H, input_norm_H, hidden_norm_H, both_N2H, stream_NH,
        size, mask_token_id, eps, KEEPS_NORMED=norm_before_residual, **_row_sizes(size),
    )  # fmt: skip
    return both_N2H, stream_NH


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


def add_norm(stream_NH: Tensor, added_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream with what a block adds to it, and its norm, both [N, H]."""
    if not _fits_kernel(stream_NH):
        stream_NH = stream_NH + added_NH
        return stream_NH, rms_norm(stream_NH, weight_H, eps)
    (num_rows, size), sum_NH = stream_NH.shape, torch.empty_like(stream_NH)
    normed_NH = torch.empty_like(stream_NH)
    add_norm_kernel[(num_rows,)](stream_NH, added_NH, weight_H, sum_NH, normed_NH, size, eps, **_row_sizes(size))
    return sum_NH, normed_NH


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


def rotate_heads(
    heads_NHD: Tensor,
    num_queries: int,
    num_groups: int,
    positions_N: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries [N, A, D] and keys [N, G, D], rotated by position.

    heads_NHD: [N, A + 2G, D], queries, keys and values of each row. cos_PF, sin_PF: float32, by position. norms: [D]
    of queries and of keys, where both are normed first (Qwen 3).
    """
    if not _fits_kernel(heads_NHD):
        cos_N1F, sin_N1F = cos_PF[positions_N, None], sin_PF[positions_N, None]

        def rotated(x_NAD: Tensor) -> Tensor:
            first, second = x_NAD.chunk(2, dim=-1)
            both = torch.cat([first * cos_N1F - second * sin_N1F, second * cos_N1F + first * sin_N1F], dim=-1)
            return both.to(x_NAD.dtype)

        q_NAD, k_NGD = heads_NHD[:, : num_queries + num_groups].split((num_queries, num_groups), dim=1)
        if norms is not None:
            q_NAD, k_NGD = rms_norm(q_NAD, norms[0], eps), rms_norm(k_NGD, norms[1], eps)
        return rotated(q_NAD), rotated(k_NGD)
    (num_rows, _, head_size), num_heads = heads_NHD.shape, num_queries + num_groups
    out_NHD = heads_NHD.new_empty(num_rows, num_heads, head_size)
    block_f = triton.next_power_of_2(head_size // 2)
    block_a = max(1, min(triton.next_power_of_2(num_heads), _ROTATED_ELEMENTS // (2 * block_f)))
    q_norm_D, k_norm_D = norms or (cos_PF, cos_PF)  # the latter are not read
    rotate_kernel[(num_rows, triton.cdiv(num_heads, block_a))](
        heads_NHD, positions_N, cos_PF, sin_PF, q_norm_D, k_norm_D, out_NHD,
        num_heads, num_queries, heads_NHD.stride(0), eps,
        HAS_NORM=norms is not None, HALF=head_size // 2, BLOCK_F=block_f, BLOCK_A=block_a, num_warps=4,
    )  # fmt: skip
    return out_NHD[:, :num_queries], out_NHD[:, num_queries:]


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


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """[N, 2I], gate beside up -> silu(gate) * up [N, I]."""
    if not _fits_kernel(gate_up_N2I):
        gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
        return F.silu(gate_NI) * up_NI
    num_rows, size = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out_NI = gate_up_N2I.new_empty(num_rows, size)
    grid = (num_rows, triton.cdiv(size, _GATED_ELEMENTS))
    silu_mul_kernel[grid](gate_up_N2I, out_NI, size, BLOCK=_GATED_ELEMENTS, num_warps=4)
    return out_NI


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


def _fits_kernel(rows: Tensor) -> bool:
    """Whether a kernel is to run on these rows; kernels have no float64, and a launch without programs fails."""
    return uses_kernel(rows) and rows.dtype != torch.float64 and len(rows) > 0


def _row_sizes(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
