"""Adaptive verification: the drafts of a batch that are most likely accepted are verified, by the drafter's own
probabilities.

The scheduler decides how many drafts a step verifies, B, and the most of each request. The GPU decides which: the
drafts are made there while the host plans the step. The probability of a draft is the drafter's, given the drafts
before it. Its cumulative probability is the product of its own and of all before it. The B drafts of the greatest
cumulative probability are verified. Both are properties of the distribution and not of a drawn token, so the output
keeps the target's distribution.

`AdaptiveVerification` replaces vLLM's `AdaptiveVerificationManager` in the runner, in steps with a draft budget. With
vLLM's rule the engine makes 0.95 times the tokens/s (docs/performance.md).

B requests, S places of requests in the runner, K drafts at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from cluster.step_allocation import PROBABILITY_LEVELS

MAX_DRAFTS = 4096
"""Most drafts of a step: one program reads all of them."""


class DraftProbabilities:
    """Probabilities of the newest drafts of an engine's requests."""

    def __init__(self, max_requests: int, k_max: int, device: torch.device) -> None:
        self.prob_SK = torch.zeros(max_requests, k_max, dtype=torch.float32, device=device)
        """By the runner's place of a request: probability of each draft, given the ones before it."""
        self._levels_L = torch.tensor(PROBABILITY_LEVELS, dtype=torch.float32, device=device)
        self._counts_L = torch.zeros(len(PROBABILITY_LEVELS), dtype=torch.int32, device=device)
        self.counts: tuple[Tensor, int] | None = None
        """Drafts of the newest batch that reach each of `PROBABILITY_LEVELS`, on their way to the host, and its number
        of requests."""

    def record(self, prob_BK: Tensor, place_B: Tensor, depth: int) -> None:
        """Record the first `depth` probabilities of a batch's requests."""
        num_requests, k_max = len(place_B), prob_BK.shape[1]
        _record_kernel[(len(PROBABILITY_LEVELS),)](
            prob_BK, place_B, self.prob_SK, self._levels_L, self._counts_L, num_requests, depth,
            K=k_max, COLUMNS=triton.next_power_of_2(k_max), ROWS=triton.next_power_of_2(num_requests), num_warps=8,
        )  # fmt: skip
        self.counts = self._counts_L.to("cpu", non_blocking=True), num_requests


class AdaptiveVerification:
    """Replaces vLLM's `AdaptiveVerificationManager` in steps whose drafts are chosen. It has the methods that the
    runner calls in a step: `add_request`, then `get_num_tokens`, `compact_batch` and `reallocate_drafts`."""

    def __init__(self, probabilities: DraftProbabilities, query_start_loc: Tensor, max_logits: int) -> None:
        """query_start_loc: the runner's buffer [max_requests + 1], int32. max_logits: rows of logits that vLLM verifies
        in one part; it would split more rows by the host's view of the requests."""
        max_requests, device = len(probabilities.prob_SK), query_start_loc.device
        self.probabilities, self._max_logits = probabilities, max_logits
        self.num_drafts = 0
        """B of the step that is prepared next."""
        self.admitted_B: Tensor | None = None
        """Drafts of each request of the step that was prepared last, int32, on their way to the host."""
        self._query_start_loc = query_start_loc
        self._up_to_B1 = torch.zeros(max_requests + 1, dtype=torch.int32, device=device)
        self._admitted_B = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def warm(self) -> None:
        """Compile the kernels of every number of requests, before requests wait for them."""
        sizes = [1 << power for power in range(len(self._admitted_B).bit_length())]
        for size in [*(size for size in sizes if size < len(self._admitted_B)), len(self._admitted_B)]:
            place_B = torch.arange(size, device=self._admitted_B.device)
            self.num_drafts, self._limit_B, self._rest_B = 0, np.zeros(size, np.int32), np.ones(size, np.int32)
            self.reallocate_drafts([""] * size, place_B)
            self.probabilities.record(self.probabilities.prob_SK[:size].clone(), place_B, 1)
        self.admitted_B = self.probabilities.counts = None

    def add_request(self, req_idx: int) -> None:
        """A new request has no drafts in its first step."""

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Rows of the step. Arguments: what the scheduler planned of each request."""
        num_planned = sum(map(len, draft_tokens.values()))
        assert self.num_drafts <= num_planned, (self.num_drafts, num_planned)
        self.num_drafts = max(0, min(self.num_drafts, self._max_logits - len(num_tokens_per_req)))
        return sum(num_tokens_per_req.values()) - num_planned + self.num_drafts

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray[Any, Any],
        num_scheduled_tokens: np.ndarray[Any, Any],
        cu_num_logits_np: np.ndarray[Any, Any],
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Rows of each request for the host's view: their sum is right, and no request has more than was planned."""
        self._limit_B = num_draft_tokens_per_req
        self._rest_B = num_scheduled_tokens - num_draft_tokens_per_req
        # As many of each depth as there may be, one depth after another.
        depth_D = np.arange(1 + self.probabilities.prob_SK.shape[1])
        up_to_D = np.minimum(self._limit_B[:, None], depth_D).sum(axis=0)
        depth = int(up_to_D.searchsorted(self.num_drafts, side="right")) - 1
        given_B = np.minimum(self._limit_B, depth)
        given_B[(self._limit_B > depth).nonzero()[0][: self.num_drafts - up_to_D[depth]]] += 1
        return self._rest_B + given_B, cu_num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: Tensor) -> tuple[Tensor, Tensor, int]:
        """(rows of logits before each request and in all [B + 1], rows of the step before each request
        [max_requests + 1], B)."""
        num_requests = len(req_ids)
        # Each row begins where memory is aligned: the kernel is compiled again for a pointer that is not.
        planned_np = np.zeros((2, -(-num_requests // 4) * 4), np.int32)
        planned_np[:, :num_requests] = self._limit_B, self._rest_B
        planned = async_tensor_h2d(planned_np, device=self._admitted_B.device)
        choose_drafts(
            self.probabilities.prob_SK,
            idx_mapping,
            planned[0],
            planned[1],
            self.num_drafts,
            int(self._rest_B.sum()) + self.num_drafts,
            self._admitted_B,
            self._up_to_B1,
            self._query_start_loc,
        )
        self.admitted_B = self._admitted_B[:num_requests].to("cpu", non_blocking=True)
        return self._up_to_B1[: num_requests + 1], self._query_start_loc, self.num_drafts


def choose_drafts(
    prob_SK: Tensor,
    place_B: Tensor,
    limit_B: Tensor,
    rest_B: Tensor,
    num_drafts: int,
    num_rows: int,
    admitted_B: Tensor,
    up_to_B1: Tensor,
    first_row_B1: Tensor,
) -> None:
    """Choose the `num_drafts` best drafts of a batch; one program. At an equal cumulative probability, those of earlier
    requests.

    Args:
        prob_SK: of each draft of the requests at these places, given the ones before it; NaN counts as 0.
        limit_B, rest_B: int32, drafts that a request may have, and its rows that are no drafts.
        num_drafts: at most the sum of limit_B.
        num_rows: of the step, `num_drafts` and the sum of rest_B.
        admitted_B: int32, gets the drafts of each request.
        up_to_B1: int32, gets the rows of logits before each request, and in all: one more than its drafts each.
        first_row_B1: int32, gets the rows before each request; behind the last one `num_rows`.
    """
    num_requests, k_max = len(place_B), prob_SK.shape[1]
    _choose_kernel[(1,)](
        prob_SK, place_B, limit_B, rest_B, admitted_B, up_to_B1, first_row_B1,
        num_requests, len(first_row_B1), num_drafts, num_rows,
        K=k_max, COLUMNS=triton.next_power_of_2(k_max), ROWS=triton.next_power_of_2(num_requests), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_depths"])
def _record_kernel(
    prob_BK, place_B, prob_SK, levels_L, counts_L, num_requests, num_depths,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a level of cumulative probability; the first one also records."""
    level = tl.program_id(0)
    request, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_request = request < num_requests
    place = tl.load(place_B + request, mask=is_request, other=0)
    is_draft = is_request[:, None] & (depth[None, :] < num_depths) & (depth[None, :] < K)
    probability = tl.load(prob_BK + request[:, None] * K + depth[None, :], mask=is_draft, other=0.0)
    if level == 0:
        tl.store(prob_SK + place[:, None] * K + depth[None, :], probability, mask=is_draft)
    cumulative = tl.where(is_draft, tl.cumprod(tl.where(probability == probability, probability, 0.0), axis=1), -1.0)
    tl.store(counts_L + level, tl.sum((cumulative >= tl.load(levels_L + level)).to(tl.int32)))


@triton.jit(do_not_specialize=["num_requests", "num_drafts", "num_rows"])
def _choose_kernel(
    prob_SK, place_B, limit_B, rest_B, admitted_B, up_to_B1, first_row_B1,
    num_requests, num_places, num_drafts, num_rows,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Finds the cumulative probability of the last verified draft bit by bit: floats from 0 on have the order of their
    bits."""
    request, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_request = request < num_requests
    place = tl.load(place_B + request, mask=is_request, other=0)
    limit = tl.load(limit_B + request, mask=is_request, other=0)
    may_be = (depth[None, :] < limit[:, None]) & (depth[None, :] < K)
    probability = tl.load(prob_SK + place[:, None] * K + depth[None, :], mask=may_be, other=0.0)
    cumulative = tl.cumprod(tl.where(probability == probability, probability, 0.0), axis=1)
    bits = tl.where(may_be, cumulative.to(tl.int32, bitcast=True), -1)
    least = 0
    for index in range(31):
        higher = least | (1 << (30 - index))
        least = tl.where(tl.sum((bits >= higher).to(tl.int32)) >= num_drafts, higher, least)
    num_better = tl.sum((bits > least).to(tl.int32))
    # Among equal drafts the first are chosen. Those of one request are adjacent, and after its better ones.
    equal = tl.reshape((bits == least).to(tl.int32), [ROWS * COLUMNS])
    is_chosen = tl.reshape((tl.cumsum(equal, axis=0) <= num_drafts - num_better) & (equal > 0), [ROWS, COLUMNS])
    admitted = tl.sum(((bits > least) | is_chosen).to(tl.int32), axis=1)
    rows = admitted + tl.load(rest_B + request, mask=is_request, other=0)
    tl.store(admitted_B + request, admitted, mask=is_request)
    tl.store(up_to_B1 + 1 + request, tl.cumsum(admitted + 1, axis=0), mask=is_request)
    tl.store(first_row_B1 + 1 + request, tl.cumsum(rows, axis=0), mask=is_request)
    tl.store(up_to_B1, 0)
    tl.store(first_row_B1, 0)
    for start in range(num_requests + 1, num_places, ROWS):
        tl.store(first_row_B1 + start + request, num_rows, mask=start + request < num_places)
