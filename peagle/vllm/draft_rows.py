"""Rows of P-EAGLE's one pass over a batch of vLLM's V2 model runner, laid out by one kernel on the GPU. For a remote
drafter: what of the target's rows is sent (`accepted_rows`).

Enters: the runner's state after sampling, on the GPU: the target's rows, numbers of sampled and rejected tokens.
Leaves: tokens, positions, cache slots, sources of hidden states, and the rows that propose drafts.

    q target rows at positions c .. c + q - 1, r of them rejected, n = q - r, D drafts; Q rows of the pass:
    Q - n - D + 1 unused rows | n rows at c .. c + n - 1: the next tokens | D - 1 mask rows at c + n .. c + n + D - 2

When the host plans a pass, it does not know yet what was rejected. There are three layouts:

| layout | Q | used for |
| --- | --- | --- |
| uniform | the same for all (`stride`) | uniform full CUDA graphs, with any attention |
| ragged | q + D - 1, which the host knows | passes whose attention the host plans |
| packed | n + D - 1, which only the GPU knows | packed full CUDA graphs |

In the packed layout the host sets the number of rows by a forecast of rejections. If they do not suffice, all requests
lose their last mask rows, the first requests of the batch one more. Rows of the target are never left out.

Unused rows come first: FlashAttention aligns the last row with the last key, so used row i attends to keys up to c + i,
and the number of keys, c + n + D - 1, is exact. If that exceeds the longest sequence, the last mask rows are unused.

B requests, N target rows, R rows of the pass, S places of requests in the runner, C columns of the block table.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

BLOCK_ROWS = 64
"""Rows of a program, the same for each batch: another size would be another kernel, compiled while requests wait."""


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """Buffers at fixed addresses, as CUDA graphs need them; a pass uses the first rows and requests.

    token_ids_R: int32. positions_R: int64; 0 in unused rows.
    slots_GR: int64, place in the flat KV cache of each cache group; -1: not to be written.
    sources_R: int64, 1 + target row whose hidden state enters; 0: the shared hidden state of the mask rows.
    sample_rows_BD: int64, flat: row that proposes draft d of request b at b * D + d. If that row was left out, the
        request's last row.
    first_row_B1: int32. context_B: int32, keys of a request; 0 beyond the batch.
    """

    token_ids_R: Tensor
    positions_R: Tensor
    slots_GR: Tensor
    sources_R: Tensor
    sample_rows_BD: Tensor
    first_row_B1: Tensor
    context_B: Tensor

    @classmethod
    def empty(
        cls, max_requests: int, max_rows: int, num_drafts: int, num_groups: int, device: torch.device
    ) -> DraftRows:
        """Buffers of zeros; slots are -1."""

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        return cls(
            token_ids_R=zeros(max_rows, dtype=torch.int32),
            positions_R=zeros(max_rows),
            slots_GR=zeros(num_groups, max_rows) - 1,
            sources_R=zeros(max_rows),
            sample_rows_BD=zeros(max_requests * num_drafts),
            first_row_B1=zeros(max_requests + 1, dtype=torch.int32),
            context_B=zeros(max_requests, dtype=torch.int32),
        )


@dataclasses.dataclass(frozen=True)
class TargetRows:
    """The runner's state after sampling.

    first_row_B1: int32. input_ids_N: int32. positions_N: int64. place_B: int, a request's index in the S-tensors.
    num_sampled_B, num_rejected_B: int32, both 0 where a prompt is not finished.
    last_sampled_S, next_prefill_S: the newest token, and the next of the prompt where a prompt is not finished.
    """

    first_row_B1: Tensor
    input_ids_N: Tensor
    positions_N: Tensor
    place_B: Tensor
    num_sampled_B: Tensor
    num_rejected_B: Tensor
    last_sampled_S: Tensor
    next_prefill_S: Tensor

    @classmethod
    def from_batch(
        cls, batch: InputBatch, sampled: Tensor, rejected: Tensor, last: Tensor, next_prefill: Tensor
    ) -> TargetRows:
        """From the arguments of vLLM's `propose`."""
        return cls(
            first_row_B1=batch.query_start_loc,
            input_ids_N=batch.input_ids[: batch.num_tokens],
            positions_N=batch.positions,
            place_B=batch.idx_mapping,
            num_sampled_B=sampled,
            num_rejected_B=rejected,
            last_sampled_S=last,
            next_prefill_S=next_prefill,
        )


def write_rows(
    target: TargetRows,
    block_table_BC: Tensor,
    out: DraftRows,
    *,
    group: int,
    num_drafts: int,
    stride: int,
    is_packed: bool,
    max_query_len: int,
    num_rows: int,
    block_size: int,
    mask_token_id: int,
    max_model_len: int,
) -> None:
    """Lay out the rows of one pass, for one cache group.

    Args:
        block_table_BC: cache block of positions [j * block_size, (j + 1) * block_size) in column j; block 0 is never
            written.
        stride: rows of each request, at least q + D - 1, in the uniform layout; else 0.
        is_packed: the packed layout.
        max_query_len: the largest q, known to the host.
        num_rows: rows that run, padding included; at least the target's.
    """
    num_requests = len(target.place_B)
    most_rows = stride or max_query_len + num_drafts - 1
    _write_rows_kernel[(num_requests + 1, triton.cdiv(most_rows, BLOCK_ROWS))](
        target.first_row_B1, target.input_ids_N, target.positions_N, target.place_B,
        target.num_sampled_B, target.num_rejected_B, target.last_sampled_S, target.next_prefill_S, block_table_BC,
        out.token_ids_R, out.positions_R, out.slots_GR[group], out.sources_R,
        out.sample_rows_BD, out.first_row_B1, out.context_B, len(out.context_B), len(out.sample_rows_BD), num_rows,
        block_table_BC.stride(0), stride, int(is_packed), num_drafts, mask_token_id,
        BLOCK_SIZE=block_size, MAX_MODEL_LEN=max_model_len, BLOCK=BLOCK_ROWS,
    )  # fmt: skip


def accepted_rows(target: TargetRows, max_query_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is sent to a remote drafter beside the target's hidden states.

    Args:
        max_query_len: the largest q, known to the host.

    Returns:
        int32: position of each request's first row [B]; number of its rows that are accepted [B]; the token after each
        row [N], undefined after a rejected row.
    """
    num_requests = len(target.place_B)
    sizes = num_requests, num_requests, len(target.input_ids_N)
    out = torch.empty(sum(sizes), dtype=torch.int32, device=target.input_ids_N.device)
    _accepted_rows_kernel[(num_requests, triton.cdiv(max_query_len, BLOCK_ROWS))](
        target.first_row_B1, target.input_ids_N, target.positions_N, target.place_B,
        target.num_sampled_B, target.num_rejected_B, target.last_sampled_S, target.next_prefill_S,
        out, BLOCK=BLOCK_ROWS,
    )  # fmt: skip
    start_B, num_valid_B, next_tokens_N = out.split(sizes)
    return start_B, num_valid_B, next_tokens_N


@triton.jit
def _accepted_rows_kernel(
    first_row_B1, input_ids_N, positions_N, place_B,
    num_sampled_B, num_rejected_B, last_sampled_S, next_prefill_S,
    out, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, i): block i of request b."""
    request, num_requests = tl.program_id(0), tl.num_programs(0)
    num_valid_B, next_tokens_N = out + num_requests, out + 2 * num_requests
    first, end = tl.load(first_row_B1 + request), tl.load(first_row_B1 + request + 1)
    num_valid = end - first - tl.load(num_rejected_B + request)
    newest = _newest_token(request, place_B, num_sampled_B, last_sampled_S, next_prefill_S)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = first + offset
    given = tl.load(input_ids_N + row + 1, mask=row < end - 1, other=0).to(tl.int32)
    token = tl.where(offset == num_valid - 1, newest, given)
    tl.store(next_tokens_N + row, token, mask=row < end)
    if tl.program_id(1) == 0:
        tl.store(out + request, tl.load(positions_N + first).to(tl.int32))
        tl.store(num_valid_B + request, num_valid)


@triton.jit
def _newest_token(request, place_B, num_sampled_B, last_sampled_S, next_prefill_S):
    """The token after a request's last row that stays."""
    place = tl.load(place_B + request)
    newest = tl.load(last_sampled_S + place).to(tl.int32)
    if tl.load(num_sampled_B + request) == 0:
        newest = tl.load(next_prefill_S + place).to(tl.int32)
    return newest


@triton.jit(do_not_specialize=["num_rows", "stride", "is_packed", "num_drafts"])  # each value is a kernel to compile
def _write_rows_kernel(
    target_row_B1, input_ids_N, target_positions_N, place_B,
    num_sampled_B, num_rejected_B, last_sampled_S, next_prefill_S, block_table_BC,
    token_ids_R, positions_R, slots_R, sources_R, sample_rows_BD, first_row_B1, context_B,
    max_requests, max_drafts, num_rows, table_stride, stride, is_packed, num_drafts, mask_token_id,
    BLOCK_SIZE: tl.constexpr, MAX_MODEL_LEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, i): block i of request b; the last b: everything beyond the batch."""
    request = tl.program_id(0)
    num_requests = tl.num_programs(0) - 1
    start = tl.load(target_row_B1 + request)
    first, num_masks = request * stride, num_drafts - 1
    if stride == 0:
        first = start + request * num_masks
    if is_packed != 0:
        before, all_rejected = 0, 0
        for i in range(0, num_requests, BLOCK):
            other = i + tl.arange(0, BLOCK)
            rejected = tl.load(num_rejected_B + other, mask=other < num_requests, other=0)
            before += tl.sum(tl.where(other < request, rejected, 0))
            all_rejected += tl.sum(rejected)
        wanted = tl.load(target_row_B1 + num_requests) - all_rejected + num_requests * num_masks
        excess = tl.maximum(wanted - num_rows, 0)
        each, more = excess // num_requests, excess % num_requests
        first -= before + request * each + tl.minimum(request, more)
        num_masks -= each + tl.where(request < more, 1, 0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if request == num_requests:
        if tl.program_id(1) == 0:
            for i in range(first, num_rows, BLOCK):
                row = i + tl.arange(0, BLOCK)
                tl.store(token_ids_R + row, 0, mask=row < num_rows)
                tl.store(positions_R + row, 0, mask=row < num_rows)
                tl.store(slots_R + row, -1, mask=row < num_rows)
                tl.store(sources_R + row, 0, mask=row < num_rows)
            for i in range(num_requests, max_requests + 1, BLOCK):
                index = i + tl.arange(0, BLOCK)
                tl.store(first_row_B1 + index, first, mask=index <= max_requests)
                tl.store(context_B + index, 0, mask=index < max_requests)
            for i in range(num_requests * num_drafts, max_drafts, BLOCK):
                index = i + tl.arange(0, BLOCK)
                tl.store(sample_rows_BD + index, 0, mask=index < max_drafts)
    else:
        query_len = tl.load(target_row_B1 + request + 1) - start
        num_valid = query_len - tl.load(num_rejected_B + request)
        context = tl.load(target_positions_N + start).to(tl.int32)
        num_used = tl.minimum(num_valid + num_masks, MAX_MODEL_LEN - context)
        num_slots = tl.where(is_packed != 0, num_valid, query_len) + num_masks
        num_slots = tl.where(stride > 0, stride, num_slots)
        num_unused = num_slots - num_used
        newest = _newest_token(request, place_B, num_sampled_B, last_sampled_S, next_prefill_S)

        index = offset - num_unused
        is_used = (index >= 0) & (offset < num_slots)
        is_valid = is_used & (index < num_valid)
        given = tl.load(input_ids_N + start + index + 1, mask=is_valid & (index < num_valid - 1), other=0)
        token = tl.where(index == num_valid - 1, newest, given)
        token = tl.where(is_used, tl.where(is_valid, token, mask_token_id), 0)
        position = tl.where(is_used, context + index, 0)
        block_id = tl.load(block_table_BC + request * table_stride + position // BLOCK_SIZE, mask=is_used, other=0)
        slot = tl.where(block_id > 0, block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        row, is_row = first + offset, offset < num_slots
        tl.store(token_ids_R + row, token, mask=is_row)
        tl.store(positions_R + row, position.to(tl.int64), mask=is_row)
        tl.store(slots_R + row, slot, mask=is_row)
        tl.store(sources_R + row, tl.where(is_valid, 1 + start + index, 0).to(tl.int64), mask=is_row)
        if tl.program_id(1) == 0:
            tl.store(first_row_B1 + request, first)
            tl.store(context_B + request, context + num_used)
            for draft in range(num_drafts):
                sampled = num_unused + tl.minimum(num_valid - 1 + draft, num_used - 1)
                tl.store(sample_rows_BD + request * num_drafts + draft, (first + sampled).to(tl.int64))
