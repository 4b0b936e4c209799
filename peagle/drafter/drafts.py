"""Drafts as a remote drafter sends them, and how they are found: of each row of logits the most likely token.

A draft travels as one int32, from 0 on: the token and the drafter's chance of it, given the drafts before it. -1
(`NO_DRAFT`) is no draft.

    bits 0 .. 19     token id in the target's vocabulary
    bits 20 .. 30    chance, rounded to steps of 1/2047; 0 from a drafter on a CPU

Where code needs a number for no draft, it is token 0 with chance 0.

N rows of logits, M sampled rows of a pass, V draft vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.drafter.protocol import NO_DRAFT, Int32Array
from peagle.drafter.rows import uses_kernel

TOKEN_BITS = 20
MAX_VOCABULARY = 1 << TOKEN_BITS
CHANCE_STEPS = (1 << 31 - TOKEN_BITS) - 1

_TOKEN_BITS, _TOKEN_MASK = tl.constexpr(TOKEN_BITS), tl.constexpr(MAX_VOCABULARY - 1)
_CHANCE_STEPS, _CHANCE_STEP = tl.constexpr(CHANCE_STEPS), tl.constexpr(1.0 / CHANCE_STEPS)
_DEPTH, _NUM_LANES, _NUM_WARPS = 4, 2048, 8  # a thread has eight lanes, whole
_FLOOR = tl.constexpr(-3.0e38)


def pack(ids: Tensor, chance: Tensor) -> Tensor:
    """Drafts of these tokens, as they travel. A chance that is no number is 0."""
    steps = (chance.float().nan_to_num(0.0) * CHANCE_STEPS + 0.5).int()
    return steps << TOKEN_BITS | ids.int()


def unpack(drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids, int64, and chances, float32, of drafts as they travel; 0 and 0 where there is none."""
    found = drafts.clamp(min=0)
    return (found & MAX_VOCABULARY - 1).long(), (found >> TOKEN_BITS).float() * (1.0 / CHANCE_STEPS)


def token_ids(drafts: Int32Array) -> Int32Array:
    """Token ids of drafts as they travel, on the host; `NO_DRAFT` stays."""
    ids: Int32Array = drafts & np.int32(MAX_VOCABULARY - 1)
    ids[drafts < 0] = NO_DRAFT
    return ids


@triton.jit
def unpack_in_kernel(draft):
    """As `unpack`."""
    found = tl.maximum(draft, 0)
    return (found & _TOKEN_MASK).to(tl.int64), (found >> _TOKEN_BITS).to(tl.float32) * _CHANCE_STEP


def best_tokens(logits_NV: Tensor, ids_N: Tensor, chance_N: Tensor) -> None:
    """Most likely token of each row (the first of equal ones) into ids_N, int64, its probability into chance_N,
    float32."""
    if not _fits_kernel(logits_NV):
        best_N, ids = logits_NV.max(dim=-1)
        ids_N.copy_(ids)
        chance_N.copy_((best_N.float() - logits_NV.float().logsumexp(dim=-1)).exp())
        return
    num_rows, vocabulary = logits_NV.shape
    _best_tokens_kernel[(num_rows,)](
        logits_NV, logits_NV.stride(0), ids_N, chance_N, vocabulary,
        DEPTH=_DEPTH, NUM_LANES=_NUM_LANES, num_warps=_NUM_WARPS,
    )  # fmt: skip


def best_drafts(logits_MV: Tensor, target_ids_V: Tensor, sampled_M: Tensor, out_M: Tensor) -> None:
    """The draft of each row as it travels into out_M, int32: `best_tokens`, packed; `NO_DRAFT` where sampled_M is below
    0. target_ids_V: int32, token of the target for each of the draft vocabulary, below `MAX_VOCABULARY`."""
    num_rows, vocabulary = logits_MV.shape
    if not _fits_kernel(logits_MV):
        ids_M, chance_M = sampled_M.new_empty(num_rows), logits_MV.new_empty(num_rows, dtype=torch.float32)
        best_tokens(logits_MV, ids_M, chance_M)
        out_M.copy_(torch.where(sampled_M < 0, NO_DRAFT, pack(target_ids_V[ids_M], chance_M)))
        return
    _best_drafts_kernel[(num_rows,)](
        logits_MV, logits_MV.stride(0), target_ids_V, sampled_M, out_M, vocabulary,
        DEPTH=_DEPTH, NUM_LANES=_NUM_LANES, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _fits_kernel(logits: Tensor) -> bool:
    """Kernels have no float64."""
    return uses_kernel(logits) and logits.dtype != torch.float64


@triton.jit
def _best_of_row(logits_V, vocabulary, DEPTH: tl.constexpr, NUM_LANES: tl.constexpr):
    """Most likely token, the first of equal ones, and its chance.

    Each lane keeps the maximum, its token and the sum of the columns that it reads, DEPTH at a time. Lanes meet once,
    at the end: a reduction over all of them at every block takes longer than the reading.
    """
    depth_D, lane_L = tl.arange(0, DEPTH), tl.arange(0, NUM_LANES)
    # Finite, so that a lane that has read nothing has a sum of 0 and not of no number.
    best_L = tl.full([NUM_LANES], _FLOOR, tl.float32)
    token_L = tl.zeros([NUM_LANES], tl.int32)
    total_L = tl.zeros([NUM_LANES], tl.float32)
    for start in range(0, vocabulary, DEPTH * NUM_LANES):
        column_DL = start + depth_D[:, None] * NUM_LANES + lane_L[None, :]
        logit_DL = tl.load(logits_V + column_DL, mask=column_DL < vocabulary, other=float("-inf")).to(tl.float32)
        greatest_L, place_L = tl.max(logit_DL, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token_L = tl.where(greatest_L > best_L, start + place_L * NUM_LANES + lane_L, token_L)
        new_L = tl.maximum(best_L, greatest_L)
        total_L = total_L * tl.exp(best_L - new_L) + tl.sum(tl.exp(logit_DL - new_L[None, :]), axis=0)
        best_L = new_L
    best = tl.max(best_L, axis=0)
    token = tl.min(tl.where(best_L == best, token_L, 2147483647), axis=0)
    return token, 1.0 / tl.sum(total_L * tl.exp(best_L - best), axis=0)


@triton.jit
def _best_tokens_kernel(logits_NV, stride, ids_N, chance_N, vocabulary, DEPTH: tl.constexpr, NUM_LANES: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    token, chance = _best_of_row(logits_NV + row * stride, vocabulary, DEPTH, NUM_LANES)
    tl.store(ids_N + row, token)
    tl.store(chance_N + row, chance)


@triton.jit
def _best_drafts_kernel(
    logits_MV, stride, target_ids_V, sampled_M, out_M, vocabulary, DEPTH: tl.constexpr, NUM_LANES: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    draft = -1
    if tl.load(sampled_M + row) >= 0:
        token, chance = _best_of_row(logits_MV + row * stride, vocabulary, DEPTH, NUM_LANES)
        # What is no number is the other one of a maximum.
        steps = (tl.maximum(chance, 0.0) * _CHANCE_STEPS + 0.5).to(tl.int32)
        draft = (steps << _TOKEN_BITS) | tl.load(target_ids_V + token)
    tl.store(out_M + row, draft)
