"""The rows of one parallel pass over a batch: tokens, positions, cache slots, sources of hidden states, sampled rows.

Enters: per request what the target reports of its last step. Leaves: N rows, one request after another, as
`peagle.draft` describes them for one: n valid rows at positions start..start + n - 1, then K - 1 rows of the mask
token. With start = 4, n = 2, K = 3 and payload rows 10, 11:

    position    4         5         6       7
    token       next[10]  next[11]  mask    mask
    source      10        11        -1      -1        (-1: the shared hidden state)
    samples               draft 1   draft 2 draft 3

Rejected rows never appear: the next start lies before them. B requests, N rows, R payload rows, K drafts at most;
`block_table_BN` has as many columns as a request may have cache blocks.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.attention_plan import MIN_BLOCK_REQUESTS
from peagle.kernels.dispatch import check_shape, uses_kernel

#: Elements of the table (row of the block, request) that one program searches.
SEARCHED_ELEMENTS = 2048


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

    @classmethod
    def empty(cls, num_requests: int, num_rows: int, max_depth: int, device: torch.device | str) -> Rows:
        """Tensors without values, to be given to `build_rows` as `out`."""
        return cls(
            token_ids_N=torch.empty(num_rows, dtype=torch.int64, device=device),
            positions_N=torch.empty(num_rows, dtype=torch.int64, device=device),
            slots_N=torch.empty(num_rows, dtype=torch.int64, device=device),
            sources_N=torch.empty(num_rows, dtype=torch.int32, device=device),
            sample_rows_BK=torch.empty(num_requests, max_depth, dtype=torch.int64, device=device),
            first_row_B1=torch.empty(num_requests + 1, dtype=torch.int32, device=device),
            context_B=torch.empty(num_requests, dtype=torch.int32, device=device),
        )


def build_rows(
    start_B: Tensor,
    num_valid_B: Tensor,
    row_offset_B: Tensor,
    depth_B: Tensor,
    next_tokens_R: Tensor,
    block_table_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    max_depth: int,
    num_rows: int,
    out: Rows | None = None,
) -> Rows:
    """Lays out the rows of one pass.

    Args:
        start_B: int, position of a request's first row.
        num_valid_B: int, n: rows given for it; with none (padding of the batch) it has no mask rows either.
        row_offset_B: int, its first row in the payload.
        depth_B: int, K: drafts wanted; 0: the rows only enter the cache. Taken as max_depth where it is greater.
        next_tokens_R: int, the token after each payload row; any stride.
        block_table_BN: int, cache block of positions [j * block_size, (j + 1) * block_size) in column j; -1: none.
        block_size: positions a cache block.
        mask_token_id: token of the mask rows.
        max_depth: columns of `sample_rows_BK`.
        num_rows: N. All requests together must have no more rows; rows beyond N are left out, also from the samples.
        out: tensors to write, as `Rows.empty` makes them.

    Raises ValueError when shapes do not fit together.
    """
    num_requests = start_B.shape[0] if start_B.dim() == 1 else -1
    for name, tensor in (("num_valid_B", num_valid_B), ("row_offset_B", row_offset_B), ("depth_B", depth_B)):
        check_shape(name, tensor, num_requests)
    check_shape("start_B", start_B, num_requests)
    check_shape("next_tokens_R", next_tokens_R, None)
    check_shape("block_table_BN", block_table_BN, num_requests, None)
    if out is None:
        out = Rows.empty(num_requests, num_rows, max_depth, start_B.device)
    check_shape("out.token_ids_N", out.token_ids_N, num_rows)
    check_shape("out.sample_rows_BK", out.sample_rows_BK, num_requests, max_depth)
    build = build_rows_triton if uses_kernel(start_B) and num_requests else build_rows_torch
    build(
        start_B, num_valid_B, row_offset_B, depth_B, next_tokens_R, block_table_BN, out,
        block_size=block_size, mask_token_id=mask_token_id,
    )  # fmt: skip
    return out


def build_rows_torch(
    start_B: Tensor,
    num_valid_B: Tensor,
    row_offset_B: Tensor,
    depth_B: Tensor,
    next_tokens_R: Tensor,
    block_table_BN: Tensor,
    out: Rows,
    *,
    block_size: int,
    mask_token_id: int,
) -> None:
    """The twin of `build_rows_triton`: the same tensors from plain torch."""
    num_requests, max_depth = out.sample_rows_BK.shape
    num_rows, num_payload_rows = len(out.token_ids_N), len(next_tokens_R)
    valid_B = num_valid_B.long().clamp(min=0)
    drafts_B = torch.where(valid_B > 0, depth_B.long().clamp(0, max_depth), 0)
    rows_B = valid_B + (drafts_B - 1).clamp(min=0)
    first_B1 = torch.cat([rows_B.new_zeros(1), rows_B.cumsum(0)])
    out.first_row_B1.copy_(first_B1.clamp(max=num_rows))
    out.context_B.copy_(start_B.long() + rows_B)
    depths_K = torch.arange(max_depth, device=start_B.device)
    sampled_BK = (first_B1[:-1] + valid_B - 1)[:, None] + depths_K
    sampled_BK[(depths_K >= drafts_B[:, None]) | (sampled_BK >= num_rows)] = -1
    out.sample_rows_BK.copy_(sampled_BK)
    if num_requests == 0:
        for tensor, padding in _padding(out):
            tensor.fill_(padding)
        return
    index_N = torch.arange(num_rows, device=start_B.device)
    is_row_N = index_N < first_B1[-1]
    request_N = torch.searchsorted(first_B1[1:], index_N, right=True).clamp(max=num_requests - 1)
    offset_N = index_N - first_B1[request_N]
    is_valid_N = is_row_N & (offset_N < valid_B[request_N])
    source_N = row_offset_B.long()[request_N] + offset_N
    in_payload_N = is_valid_N & (source_N >= 0) & (source_N < num_payload_rows)
    source_N = torch.where(in_payload_N, source_N, -1)
    given_N = torch.cat([next_tokens_R.long(), next_tokens_R.new_zeros(1, dtype=torch.int64)])[source_N]
    position_N = start_B.long()[request_N] + offset_N
    column_N, num_columns = position_N // block_size, block_table_BN.shape[1]
    padded_BN = torch.nn.functional.pad(block_table_BN.long(), (0, 1), value=-1)
    block_N = padded_BN[request_N, column_N.clamp(0, num_columns)]
    slot_N = block_N * block_size + position_N % block_size
    token_N = torch.where(is_valid_N, given_N, mask_token_id)
    out.token_ids_N.copy_(torch.where(is_row_N, token_N, 0))
    out.positions_N.copy_(torch.where(is_row_N, position_N, 0))
    out.slots_N.copy_(torch.where(is_row_N & (block_N >= 0), slot_N, -1))
    out.sources_N.copy_(source_N)


def _padding(out: Rows) -> list[tuple[Tensor, int]]:
    return [(out.token_ids_N, 0), (out.positions_N, 0), (out.slots_N, -1), (out.sources_N, -1)]


def build_rows_triton(
    start_B: Tensor,
    num_valid_B: Tensor,
    row_offset_B: Tensor,
    depth_B: Tensor,
    next_tokens_R: Tensor,
    block_table_BN: Tensor,
    out: Rows,
    *,
    block_size: int,
    mask_token_id: int,
) -> None:
    """One launch: programs of some rows each, and a last one for what is kept per request."""
    num_requests, max_depth = out.sample_rows_BK.shape
    num_rows = len(out.token_ids_N)
    block_requests = max(MIN_BLOCK_REQUESTS, triton.next_power_of_2(num_requests))
    block_rows = max(1, min(128, SEARCHED_ELEMENTS // block_requests))
    _build_rows_kernel[(triton.cdiv(num_rows, block_rows) + 1,)](
        start_B, num_valid_B, row_offset_B, depth_B, next_tokens_R, block_table_BN,
        out.token_ids_N, out.positions_N, out.slots_N, out.sources_N,
        out.sample_rows_BK, out.first_row_B1, out.context_B,
        num_requests, len(next_tokens_R), next_tokens_R.stride(0), num_rows, block_table_BN.stride(0),
        block_table_BN.shape[1], block_size, mask_token_id, max_depth,
        BLOCK_B=block_requests, BLOCK_N=block_rows, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_rows", "max_depth"])  # each special value is a kernel to compile
def _build_rows_kernel(
    start_B, num_valid_B, row_offset_B, depth_B, next_tokens_R, block_table_BN,
    token_ids_N, positions_N, slots_N, sources_N, sample_rows_BK, first_row_B1, context_B,
    num_requests, num_payload_rows, tokens_stride, num_rows, table_stride, num_columns,
    block_size, mask_token_id, max_depth,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Every program sums up the requests' rows for itself: they are few, and no program waits for another."""
    request = tl.arange(0, BLOCK_B)
    is_request = request < num_requests
    valid = tl.maximum(tl.load(num_valid_B + request, mask=is_request, other=0).to(tl.int32), 0)
    drafts = tl.load(depth_B + request, mask=is_request, other=0).to(tl.int32)
    drafts = tl.where(valid > 0, tl.minimum(tl.maximum(drafts, 0), max_depth), 0)
    rows = valid + tl.maximum(drafts - 1, 0)
    end = tl.cumsum(rows, axis=0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        start = tl.load(start_B + request, mask=is_request, other=0).to(tl.int32)
        tl.store(context_B + request, start + rows, mask=is_request)
        tl.store(first_row_B1 + request + 1, tl.minimum(end, num_rows), mask=is_request)
        tl.store(first_row_B1 + request, 0, mask=request == 0)
        for depth in range(max_depth):
            sampled = end - rows + valid - 1 + depth
            sampled = tl.where((depth < drafts) & (sampled < num_rows), sampled, -1)
            tl.store(sample_rows_BK + request * max_depth + depth, sampled.to(tl.int64), mask=is_request)
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
