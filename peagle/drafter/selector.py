"""Drafts of one pass chosen from left to right, so that each knows the one before it.

A pass gives every draft position its logits without knowing the other drafts. The selector takes the C most likely
tokens of each position, and adds to their logits how well they follow the token chosen before:

    score(c) = logit(c) + sum_r previous[p, r] * (query(h))[r] * candidate[c, r]

with p the token before, h the position's hidden state, and r = 1..R. The first draft is the most likely token, because
the target's own token before it is known to the pass already (DFlash2's selector, vLLM's `qwen3_dflash2.py`).

B requests, K drafts of each, S = B * K rows that propose drafts, C candidates, V draft vocabulary, R rank.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import triton
import triton.language as tl
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter.rows import uses_kernel

NUM_CANDIDATES = 16
FOLDER = "selector"  # beside the head's own file: vLLM loads every safetensors file of the head's folder itself
_CHUNK = 2048  # logits that one program looks through


@dataclasses.dataclass(frozen=True)
class Selector:
    """previous_VR, candidate_VR: tables by token of the draft vocabulary. query_RH, bias_R: of the hidden state."""

    previous_VR: Tensor
    candidate_VR: Tensor
    query_RH: Tensor
    bias_R: Tensor

    @classmethod
    def load(cls, head: str | Path, device: torch.device) -> Selector | None:
        """The selector of a head's folder, if it has one."""
        path = Path(head) / FOLDER / "model.safetensors"
        if not path.exists():
            return None
        return cls(**{name: value.to(device) for name, value in load_file(path).items()})

    def query(self, normed_SH: Tensor) -> Tensor:
        return F.linear(normed_SH.to(self.query_RH.dtype), self.query_RH, self.bias_R)


def top_candidates(logits_SV: Tensor, values_SC: Tensor, ids_SC: Tensor, scratch_SP: Tensor) -> None:
    """The C greatest logits of each row, greatest first, into values_SC (float32) and ids_SC (int64).

    scratch_SP: int64, P at least C for every 2,048 logits.
    """
    num_rows, vocabulary = logits_SV.shape
    if not uses_kernel(logits_SV):
        values_SC[:], ids_SC[:] = logits_SV.float().topk(NUM_CANDIDATES, dim=-1)
        return
    num_chunks = triton.cdiv(vocabulary, _CHUNK)
    _chunk_candidates[(num_rows, num_chunks)](
        logits_SV, logits_SV.stride(0), scratch_SP, scratch_SP.stride(0), vocabulary,
        CHUNK=_CHUNK, C=NUM_CANDIDATES, num_warps=4,
    )  # fmt: skip
    _merge_candidates[(num_rows,)](
        scratch_SP, scratch_SP.stride(0), values_SC, ids_SC, num_chunks * NUM_CANDIDATES,
        SIZE=triton.next_power_of_2(num_chunks * NUM_CANDIDATES), C=NUM_CANDIDATES, num_warps=4,
    )  # fmt: skip


def scratch_size(vocabulary: int) -> int:
    return triton.cdiv(vocabulary, _CHUNK) * NUM_CANDIDATES


@triton.jit
def _chunk_candidates(logits_SV, stride, keys_SP, keys_stride, vocabulary, CHUNK: tl.constexpr, C: tl.constexpr):
    """A key orders as its logit, and among equal ones the first token is the greatest."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits_SV + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    bits = logit.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (0x7FFFFFFF - column).to(tl.int64)
    tl.store(keys_SP + row * keys_stride + chunk * C + tl.arange(0, C), tl.topk(key, C))


@triton.jit
def _merge_candidates(keys_SP, keys_stride, values_SC, ids_SC, num_keys, SIZE: tl.constexpr, C: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    key = tl.load(keys_SP + row * keys_stride + place, mask=place < num_keys, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.topk(key, C)
    ordered = (best >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    at = row * C + tl.arange(0, C)
    tl.store(values_SC + at, bits.to(tl.float32, bitcast=True))
    tl.store(ids_SC + at, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def choose(
    selector: Selector,
    values_SC: Tensor,
    ids_SC: Tensor,
    query_SR: Tensor,
    drafts_BK: Tensor,
    num_drafts: int,
    offsets_V: Tensor | None,
) -> None:
    """Chooses `num_drafts` drafts of each request into the first columns of drafts_BK, in the target's vocabulary.

    Rows stand one request after another. offsets_V: from each token of the draft vocabulary to the target's.
    """
    num_requests, rank = len(drafts_BK), query_SR.shape[1]
    if not uses_kernel(values_SC):
        shape = num_requests, num_drafts, -1
        values, ids, query = (x[: num_requests * num_drafts].view(shape) for x in (values_SC, ids_SC, query_SR))
        chosen = [ids[:, 0, 0]]
        for k in range(1, num_drafts):
            key_BR = selector.previous_VR[chosen[-1]].float() * query[:, k].float()
            score_BC = values[:, k] + torch.einsum("br,bcr->bc", key_BR, selector.candidate_VR[ids[:, k]].float())
            chosen.append(ids[:, k].gather(1, score_BC.argmax(1, keepdim=True)).squeeze(1))
        tokens_BK = torch.stack(chosen, dim=1)
        drafts_BK[:, :num_drafts] = tokens_BK if offsets_V is None else tokens_BK + offsets_V[tokens_BK]
        return
    _choose[(num_requests,)](
        values_SC, ids_SC, query_SR, selector.previous_VR, selector.candidate_VR, drafts_BK, drafts_BK.stride(0),
        ids_SC if offsets_V is None else offsets_V, num_drafts,
        IS_REDUCED=offsets_V is not None, C=NUM_CANDIDATES, RANK=rank, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_drafts"])
def _choose(
    values_SC, ids_SC, query_SR, previous_VR, candidate_VR, drafts_BK, drafts_stride, offsets_V, num_drafts,
    IS_REDUCED: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    place, rank = tl.arange(0, C), tl.arange(0, RANK)
    token = tl.load(ids_SC + request * num_drafts * C)
    _store_draft(drafts_BK + request * drafts_stride, token, offsets_V, IS_REDUCED)
    for k in range(1, num_drafts):
        row = request * num_drafts + k
        value_C, id_C = tl.load(values_SC + row * C + place), tl.load(ids_SC + row * C + place)
        candidate_CR = tl.load(candidate_VR + id_C[:, None] * RANK + rank[None, :]).to(tl.float32)
        query_R = tl.load(query_SR + row * RANK + rank).to(tl.float32)
        key_R = tl.load(previous_VR + token * RANK + rank).to(tl.float32) * query_R
        score_C = value_C + tl.sum(candidate_CR * key_R[None, :], axis=1)
        best = tl.argmax(score_C, axis=0, tie_break_left=True)
        token = tl.sum(tl.where(place == best, id_C, 0), axis=0)
        _store_draft(drafts_BK + request * drafts_stride + k, token, offsets_V, IS_REDUCED)


@triton.jit
def _store_draft(place, token, offsets_V, IS_REDUCED: tl.constexpr):
    tl.store(place, token + tl.load(offsets_V + token) if IS_REDUCED else token)
