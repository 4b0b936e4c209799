"""One step of a target as its drafter reads it: checked, whichever way it came.

B requests, R rows of the payload, H hidden size.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from torch import Tensor

from peagle.drafter.protocol import MAX_NUM_HEADS, Int32Array, StepDescriptor, TargetShape


@dataclasses.dataclass(frozen=True)
class Step:
    """Request b has `num_valid_B[b]` rows at the positions from `start_B[b]` on; they lie in the payload from row
    `row_offset_B[b]` of the descriptor on. Other rows of the payload (rejected drafts, padding) mean nothing.

    num_valid_B: may be 0: nothing new, nothing to draft from.
    next_tokens_R: the token *after* each row's position.
    hidden_RH: the target's projected hidden states, on the host, pinned where a GPU drafts; valid until the step is
        answered.
    session: the connection; slots of different sessions are different requests.
    """

    descriptor: StepDescriptor
    start_B: Int32Array
    num_valid_B: Int32Array
    next_tokens_R: Int32Array
    hidden_RH: Tensor
    session: int = 0

    def valid_rows(self) -> npt.NDArray[np.int64]:
        """Payload rows that belong to a request, request by request."""
        return valid_rows(self.descriptor.row_offset_B, self.num_valid_B)


def valid_rows(row_offset_B: npt.NDArray[np.integer], num_valid_B: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Rows row_offset_B[b] .. row_offset_B[b] + num_valid_B[b] - 1 of each request, one request after another."""
    before_B = np.cumsum(num_valid_B) - num_valid_B
    shift_R = np.repeat(row_offset_B - before_B, num_valid_B)
    return np.arange(len(shift_R)) + shift_R


def check_descriptor(descriptor: StepDescriptor, shape: TargetShape) -> None:
    """Raise ValueError, naming the field, unless all values fit `shape`: what comes from a peer is checked here.

    A wrong row or token would be a wild read on the drafter's GPU.
    """
    num_rows, num_requests = descriptor.num_rows, descriptor.num_requests
    if not 0 <= num_rows <= shape.max_num_rows:
        raise ValueError(f"num_rows = {num_rows} is outside 0 .. {shape.max_num_rows}")
    limits = {
        "slots_B": shape.max_num_requests - 1,
        "heads_B": MAX_NUM_HEADS - 1,
        "num_drafts_B": shape.max_draft_tokens,
    }
    for name, high in {**limits, "row_offset_B": num_rows}.items():
        column_B: Int32Array = getattr(descriptor, name)
        if len(column_B) != num_requests:
            raise ValueError(f"{name} has {len(column_B)} values for {num_requests} requests")
        check_range(name, column_B, high)
    if num_requests and np.bincount(descriptor.slots_B).max() > 1:
        raise ValueError(f"slots_B {descriptor.slots_B.tolist()} names a slot twice")
    if descriptor.finished_slots:
        check_range("finished_slots", np.asarray(descriptor.finished_slots, np.int32), shape.max_num_requests - 1)
    for slot, token_ids in descriptor.prompts.items():
        if slot not in descriptor.slots_B:
            raise ValueError(f"prompts has slot {slot}, which has no rows in this step")
        check_range(f"prompts[{slot}]", token_ids, shape.vocab_size - 1)


def check_tensors(step: Step, shape: TargetShape) -> None:
    """As `check_descriptor`, of the rest of a step whose descriptor fits."""
    descriptor, num_rows = step.descriptor, len(step.next_tokens_R)
    check_range("start_B", step.start_B, 2**31 - 1 - shape.max_num_rows - shape.max_draft_tokens)
    check_range("num_valid_B", step.num_valid_B, num_rows)
    if (descriptor.row_offset_B + step.num_valid_B > num_rows).any():
        raise ValueError(f"row_offset_B + num_valid_B reaches beyond the {num_rows} rows of the step")
    if not _is_in_range(step.next_tokens_R, shape.vocab_size - 1):  # those of rejected rows may be anything
        check_range("next_tokens_R", step.next_tokens_R[step.valid_rows()], shape.vocab_size - 1)
    for slot, token_ids in descriptor.prompts.items():
        num_expected = int(step.start_B[descriptor.slots_B == slot][0]) + 1
        if len(token_ids) not in (0, num_expected):
            raise ValueError(f"prompts[{slot}] has {len(token_ids)} tokens, not 0 or {num_expected}, start + 1")


def _is_in_range(values: Int32Array, high: int) -> bool:
    """Whether all are in 0 .. high; a negative int32, read without its sign, is above every `high`."""
    return not values.size or int(values.view(np.uint32).max()) <= high


def check_range(name: str, values: Int32Array, high: int) -> None:
    if not _is_in_range(values, high):
        raise ValueError(f"{name} holds {values.min()} .. {values.max()}, outside 0 .. {high}")
