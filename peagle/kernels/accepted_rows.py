"""What a target's step leaves of each request: how many of its rows stay, and the token after each row.

Enters: the step's rows as the engine laid them out and what was sampled. Leaves: what a drafter on another GPU is sent.
With requests of rows 0..3 (a token and 3 drafts, 2 of them accepted) and 4 (a token), sampled next x and y:

    row           0         1         2     3          4
    input         t         d1        d2    d3         u
    stays         yes       yes       yes   no         yes
    next token    d1        d2        x     anything   y

B requests, R rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.dispatch import check_shape, uses_kernel

BLOCK_ROWS = 1024  # read at a time by a request's program


def accepted_rows(
    first_row_B1: Tensor,
    num_drafts_up_to_B: Tensor | None,
    num_sampled_B: Tensor,
    next_tokens_B: Tensor,
    input_ids_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Valid rows of each request [B] and the token after each row [R], both int32 on the inputs' device.

    Args:
        first_row_B1: int, request b has rows first_row_B1[b] .. first_row_B1[b + 1] - 1, which are all R rows.
        num_drafts_up_to_B: int, drafts verified by the requests 0 .. b together; None where nobody verified any.
        num_sampled_B: int, tokens that each request sampled: accepted drafts and one more, 0 after an unfinished
            prompt chunk. Without drafts all rows stay, whatever it says.
        next_tokens_B: int, the token after each request's last valid row.
        input_ids_R: int, the token of each row.

    The token after a rejected row means nothing; it is an input token or 0. Raises ValueError when shapes do not fit.
    """
    num_requests = len(next_tokens_B)
    check_shape("first_row_B1", first_row_B1, num_requests + 1)
    check_shape("num_sampled_B", num_sampled_B, num_requests)
    check_shape("input_ids_R", input_ids_R, None)
    if num_drafts_up_to_B is not None:
        check_shape("num_drafts_up_to_B", num_drafts_up_to_B, num_requests)
    num_valid_B = torch.empty(num_requests, dtype=torch.int32, device=input_ids_R.device)
    next_tokens_R = torch.empty(len(input_ids_R), dtype=torch.int32, device=input_ids_R.device)
    if num_requests:
        (accepted_rows_triton if uses_kernel(input_ids_R) else accepted_rows_torch)(
            first_row_B1, num_drafts_up_to_B, num_sampled_B, next_tokens_B, input_ids_R, num_valid_B, next_tokens_R
        )
    return num_valid_B, next_tokens_R


def accepted_rows_torch(
    first_row_B1: Tensor,
    num_drafts_up_to_B: Tensor | None,
    num_sampled_B: Tensor,
    next_tokens_B: Tensor,
    input_ids_R: Tensor,
    num_valid_B: Tensor,
    next_tokens_R: Tensor,
) -> None:
    """The twin: the last two are written."""
    num_valid_B.copy_(first_row_B1.diff())
    if num_drafts_up_to_B is not None:
        num_drafts_B = num_drafts_up_to_B.diff(prepend=num_drafts_up_to_B.new_zeros(1))
        num_valid_B -= (num_drafts_B + 1 - num_sampled_B).masked_fill(num_drafts_B == 0, 0)
    next_tokens_R[:-1] = input_ids_R[1:]
    next_tokens_R[-1:] = 0
    last_B = first_row_B1[:-1] + (num_valid_B - 1).clamp(min=0)
    next_tokens_R[last_B.long()] = next_tokens_B.to(next_tokens_R.dtype)


def accepted_rows_triton(
    first_row_B1: Tensor,
    num_drafts_up_to_B: Tensor | None,
    num_sampled_B: Tensor,
    next_tokens_B: Tensor,
    input_ids_R: Tensor,
    num_valid_B: Tensor,
    next_tokens_R: Tensor,
) -> None:
    """One launch, a program for each request."""
    has_drafts = num_drafts_up_to_B is not None
    _accepted_rows_kernel[(len(next_tokens_B),)](
        first_row_B1, num_drafts_up_to_B if has_drafts else num_sampled_B, num_sampled_B, next_tokens_B, input_ids_R,
        num_valid_B, next_tokens_R, len(input_ids_R), HAS_DRAFTS=has_drafts, BLOCK=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


# A step has any number of rows, and views of the engine's buffers begin anywhere: nothing is to be compiled for that.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "first_row_B1", "num_drafts_up_to_B", "num_sampled_B", "next_tokens_B", "input_ids_R", "next_tokens_R",
    ],
)  # fmt: skip
def _accepted_rows_kernel(
    first_row_B1, num_drafts_up_to_B, num_sampled_B, next_tokens_B, input_ids_R, num_valid_B, next_tokens_R,
    num_rows, HAS_DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(first_row_B1 + request).to(tl.int32)
    end = tl.load(first_row_B1 + request + 1).to(tl.int32)
    num_valid = end - first
    if HAS_DRAFTS:
        num_drafts = tl.load(num_drafts_up_to_B + request).to(tl.int32)
        num_drafts -= tl.load(num_drafts_up_to_B + request - 1, mask=request > 0, other=0).to(tl.int32)
        num_sampled = tl.load(num_sampled_B + request).to(tl.int32)
        num_valid -= tl.where(num_drafts > 0, num_drafts + 1 - num_sampled, 0)
    tl.store(num_valid_B + request, num_valid)
    last = first + tl.maximum(num_valid - 1, 0)
    next_token = tl.load(next_tokens_B + request).to(tl.int32)
    for begin in range(first, end, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        after = tl.load(input_ids_R + row + 1, mask=(row < end) & (row + 1 < num_rows), other=0).to(tl.int32)
        tl.store(next_tokens_R + row, tl.where(row == last, next_token, after), mask=row < end)
