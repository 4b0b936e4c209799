"""The rows of a pass: laid out, filled with hidden states; and the drafts that they propose.

The rows of a pass stand one request after another, as `peagle.draft` describes them for one: n valid rows at positions
start..start + n - 1, then K - 1 rows of the mask token. With start = 4, n = 2, K = 3 and payload rows 10, 11:

    position    4         5         6       7
    token       next[10]  next[11]  mask    mask
    source      10        11        -1      -1        (-1: the shared hidden state)
    samples               draft 1   draft 2 draft 3

Rejected rows never appear: the next start lies before them.

What torch has no function for is a Triton kernel on GPUs (and under Triton's interpreter); above its launch stands the
same in plain torch for other devices, its twin.

B requests, N rows, R payload rows, D drafts of a request at most, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any, Generic, TypeVar

import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

#: Read once, as Triton does: kernels are interpreted or compiled from the moment they are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ALIGNMENT_BYTES = 16  # of addresses, where a row's size is a multiple of it: rows then move in wide loads
_MAX_BLOCK_H = 2048
Values = TypeVar("Values", npt.NDArray[Any], Tensor)


def uses_kernel(tensor: Tensor) -> bool:
    """Whether work on this tensor goes to a Triton kernel: on a GPU, or anywhere under the interpreter."""
    return INTERPRETED or tensor.is_cuda


# Rows of a pass


@dataclasses.dataclass(frozen=True)
class PassBatch(Generic[Values]):
    """B requests of one pass: integers as arrays of the host, or as tensors of the pass's device. Tensors may hold more
    rows than the batch has, and requests without rows may pad it.

    start_B: position of a request's first row, counted from its first row in the cache, which is overwritten from there
        on.
    num_valid_B: n, rows given: positions start .. start + n - 1. With 0, the request gets no drafts.
    row_offset_B: where they begin among the batch's R rows.
    num_drafts_B: drafts wanted; 0: the rows only enter the cache.
    next_tokens_R: int64, the token after each row.
    addresses_R: int64, where each row's projected hidden state lies (`place_hidden`): on a GPU in its own memory, or in
        pinned memory of the host, which must stay as it is until the drafts are there.
    block_table_BN: cache block of the positions [j * block_size, (j + 1) * block_size) in column j, for all before
        start + n + num_drafts - 1: rows of the mask token take room as well.
    """

    start_B: Values
    num_valid_B: Values
    row_offset_B: Values
    num_drafts_B: Values
    next_tokens_R: Values
    addresses_R: Values
    block_table_BN: Values

    @property
    def num_requests(self) -> int:
        return len(self.start_B)

    def first_requests(self, number: int) -> PassBatch[Values]:
        """These requests, with the same rows."""
        per_request = ("start_B", "num_valid_B", "row_offset_B", "num_drafts_B", "block_table_BN")
        return dataclasses.replace(self, **{name: getattr(self, name)[:number] for name in per_request})

    @property
    def num_rows(self) -> int:
        """Rows of the pass: n of each request, and one of the mask token for each draft after the first."""
        return int((self.num_valid_B + (self.num_drafts_B - 1).clip(min=0)).sum())

    @property
    def max_drafts(self) -> int:
        """Drafts of the request that gets the most."""
        return int(self.num_drafts_B.max())


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one pass; the tail beyond `first_row_B1[-1]` is padding.

    token_ids_N: int64, 0 in the padding. positions_N: int64, 0 in the padding.
    slots_N: int64, place in the flat KV cache; -1 in the padding: the last place, which nobody reads.
    sources_N: int32, row of the payload whose hidden state enters; -1: the shared hidden state (masks and padding).
    sample_rows_BD: int64, row that proposes each draft; -1: no draft wanted at this position. As an index into [N, H],
        -1 is the last row, so one gather needs no clamp; its drafts are to be dropped.
    first_row_B1: int32, request b has rows first_row_B1[b]..first_row_B1[b + 1] - 1.
    context_B: int32, keys that a request has after this pass: start + n + max(K - 1, 0), and start where n is 0.
    """

    token_ids_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    sources_N: Tensor
    sample_rows_BD: Tensor
    first_row_B1: Tensor
    context_B: Tensor


def build_rows(
    batch: PassBatch[Tensor], *, block_size: int, mask_token_id: int, max_drafts: int, num_rows: int
) -> Rows:
    """Lays out the rows of one pass, of one request or more; waits for nothing.

    A request without rows (padding of the batch) has no mask rows either. block_size: positions a cache block.
    mask_token_id: token of the mask rows. max_drafts: D, columns of `sample_rows_BD`, of which no request wants more.
    num_rows: N, at least the rows of all requests together.
    """
    start_B, num_valid_B, block_table_BN = batch.start_B, batch.num_valid_B, batch.block_table_BN
    device = start_B.device
    drafts_B = torch.where(num_valid_B > 0, batch.num_drafts_B, 0).long()
    rows_B = num_valid_B + (drafts_B - 1).clamp(min=0)
    first_B1 = F.pad(rows_B.cumsum(0), (1, 0))
    position_D, index_N = torch.arange(max_drafts, device=device), torch.arange(num_rows, device=device)
    sampled_BD = (first_B1[:-1] + num_valid_B - 1)[:, None] + position_D
    is_row_N = index_N < first_B1[-1]
    request_N = torch.searchsorted(first_B1[1:], index_N, right=True).clamp(max=len(start_B) - 1)
    offset_N = torch.where(is_row_N, index_N - first_B1[request_N], 0)
    is_valid_N = is_row_N & (offset_N < num_valid_B[request_N])
    source_N = torch.where(is_valid_N, batch.row_offset_B[request_N] + offset_N, -1)
    token_N = torch.where(is_valid_N, batch.next_tokens_R[source_N].long(), mask_token_id)
    position_N = start_B[request_N] + offset_N
    slot_N = block_table_BN[request_N, position_N // block_size].long() * block_size + position_N % block_size
    return Rows(
        token_ids_N=torch.where(is_row_N, token_N, 0),
        positions_N=torch.where(is_row_N, position_N, 0),
        slots_N=torch.where(is_row_N, slot_N, -1),
        sources_N=source_N.int(),
        sample_rows_BD=torch.where(position_D < drafts_B[:, None], sampled_BD, -1),
        first_row_B1=first_B1.int(),
        context_B=(start_B + rows_B).int(),
    )


# Hidden states of a pass's rows


def place_hidden(addresses_R: Tensor, sources_N: Tensor, mask_hidden_H: Tensor, out_NH: Tensor) -> Tensor:
    """Writes and returns out_NH: row i is the payload's row sources_N[i], or mask_hidden_H where the source is -1.

    addresses_R: int64, where each row of the payload, H numbers of out_NH's type, begins in memory that out_NH's device
    reaches (its own, or pinned host memory); multiples of `ALIGNMENT_BYTES` where a row's size is. So a captured graph
    reads the rings of several targets where they are. That memory stays as it is until the kernel has run.
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
        addresses_R, sources_N, mask_hidden_H, out_NH, hidden_size,
        BLOCK_H=block, ALIGNMENT=ALIGNMENT_BYTES if hidden_size * out_NH.itemsize % ALIGNMENT_BYTES == 0 else 1,
        num_warps=4,
    )  # fmt: skip
    return out_NH


@triton.jit
def _place_hidden_kernel(
    addresses_R, sources_N, mask_hidden_H, out_NH, hidden_size,
    BLOCK_H: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    source = tl.load(sources_N + row).to(tl.int64)
    if source >= 0:
        address = tl.load(addresses_R + source)
        payload_H = tl.multiple_of(address.to(tl.pointer_type(out_NH.dtype.element_ty)), ALIGNMENT)
        tl.store(out_NH + row * hidden_size + column, tl.load(payload_H + column, mask=is_column), mask=is_column)
    else:
        shared = tl.load(mask_hidden_H + column, mask=is_column)
        tl.store(out_NH + row * hidden_size + column, shared.to(out_NH.dtype.element_ty), mask=is_column)


# Drafts of a pass


_DEPTH, _NUM_LANES, _NUM_WARPS = 4, 2048, 8  # a thread has eight lanes, whole


def best_tokens(logits_NV: Tensor, ids_N: Tensor) -> None:
    """Most likely token of each row (the first of equal ones) into ids_N, int64."""
    if not uses_kernel(logits_NV) or logits_NV.dtype == torch.float64:
        ids_N.copy_(logits_NV.argmax(dim=-1))
        return
    num_rows, vocabulary = logits_NV.shape
    _best_tokens_kernel[(num_rows,)](
        logits_NV, logits_NV.stride(0), ids_N, vocabulary,
        DEPTH=_DEPTH, NUM_LANES=_NUM_LANES, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit
def _best_tokens_kernel(logits_NV, stride, ids_N, vocabulary, DEPTH: tl.constexpr, NUM_LANES: tl.constexpr):
    """One program a row.

    Each lane keeps the maximum and its token of the columns that it reads, DEPTH at a time. Lanes meet once, at the
    end: a reduction over all of them at every block takes longer than the reading.
    """
    row = tl.program_id(0).to(tl.int64)
    depth_D, lane_L = tl.arange(0, DEPTH), tl.arange(0, NUM_LANES)
    best_L = tl.full([NUM_LANES], float("-inf"), tl.float32)
    token_L = tl.zeros([NUM_LANES], tl.int32)
    for start in range(0, vocabulary, DEPTH * NUM_LANES):
        column_DL = start + depth_D[:, None] * NUM_LANES + lane_L[None, :]
        logit_DL = tl.load(logits_NV + row * stride + column_DL, mask=column_DL < vocabulary, other=float("-inf"))
        logit_DL = logit_DL.to(tl.float32)
        greatest_L, place_L = tl.max(logit_DL, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token_L = tl.where(greatest_L > best_L, start + place_L * NUM_LANES + lane_L, token_L)
        best_L = tl.maximum(best_L, greatest_L)
    best = tl.max(best_L, axis=0)
    tl.store(ids_N + row, tl.min(tl.where(best_L == best, token_L, 2147483647), axis=0))
