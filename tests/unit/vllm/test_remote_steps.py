"""Which slots requests have at a drafter, which rows of a step travel to it, and by whose head they are projected."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams

from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import StepDescriptor, TargetShape
from peagle.vllm.remote import EngineStep, RequestSlots, StepSender
from peagle.vllm.remote_cpu import accepted_rows
from peagle.vllm.request_args import HEAD_KEY, read_head

CPU = torch.device("cpu")
NUM_ROWS = [3, 1, 4, 2]
NUM_VALID = [2, 1, 4, 1]
AUX = [torch.arange(20, dtype=torch.float32).view(10, 2) + 100 * layer for layer in range(3)]
WEIGHTS = torch.arange(60, dtype=torch.float32).view(2, 5, 6) % 7 - 3
"""Small whole numbers: sums are exact, however many rows a product has."""
PROJECTIONS = {head: InputProjection(WEIGHTS[head]) for head in (0, 1)}


class OneDrafter:
    """A pool with one drafter, which gets the requests at `members`: what it was sent."""

    state = "up"
    projections = PROJECTIONS

    def __init__(self, members: list[int]) -> None:
        self.members = members

    def finish_requests(self, slots: list[int]) -> None:
        """Nobody to tell."""

    def assign(self, *_: Any) -> list[tuple[Any, Any]]:
        return [(self, np.array(self.members))]

    def send(self, descriptor: StepDescriptor, *tensors: Tensor) -> bool:
        self.descriptor, (self.start_M, self.num_valid_M, self.tokens_R, self.hidden_RH) = descriptor, tensors
        return True


def send(members: list[int], num_sent: list[int], num_heads: int) -> OneDrafter:
    """A step of four requests of 3, 1, 4 and 2 rows, of which `NUM_VALID` stay; their heads go round."""
    pool, ends = OneDrafter(members), np.cumsum(NUM_ROWS).astype(np.int32)
    step = EngineStep(
        request_ids=list("abcd"),
        requests={name: object() for name in "abcd"},
        heads_B=(np.arange(4) % num_heads).astype(np.int32),
        num_drafts_B=np.zeros(4, np.int32),
        wanted_B=np.ones(4, bool),
        row_offset_B=ends - np.array(NUM_ROWS, np.int32),
        num_sent_B=np.array(num_sent, np.int32),
        read_prompt=lambda _: np.zeros(0, np.int32),
        start_B=torch.arange(4, dtype=torch.int32),
        num_valid_B=torch.tensor(NUM_VALID, dtype=torch.int32),
        next_tokens_R=torch.arange(10, dtype=torch.int32),
        aux=AUX,
    )
    assert StepSender(pool, TargetShape(5, "float32", 3, 8, 16, 100), CPU).send(step) == [], "nobody wants drafts"
    return pool


@pytest.mark.parametrize(
    ("members", "num_sent", "rows", "offsets"),
    [
        ([0, 1, 2, 3], NUM_VALID, [0, 1, 3, 4, 5, 6, 7, 8], [0, 2, 3, 7]),
        ([0, 1, 2, 3], NUM_ROWS, list(range(10)), [0, 3, 4, 8]),  # a whole step, as it stands
        ([2, 0], NUM_VALID, [4, 5, 6, 7, 0, 1], [0, 4]),
        ([3], NUM_VALID, [8], [0]),
    ],
)
@pytest.mark.parametrize("num_heads", [1, 2])
def test_rejected_rows_and_rows_of_others_stay_behind_and_each_is_projected_for_its_head(
    members: list[int], num_sent: list[int], rows: list[int], offsets: list[int], num_heads: int
) -> None:
    found = send(members, num_sent, num_heads)
    assert found.descriptor.row_offset_B.tolist() == offsets
    assert found.descriptor.num_rows == len(rows)
    assert (found.tokens_R.tolist(), found.start_M.tolist()) == (rows, members)
    aux_RX, heads_R = torch.cat(AUX, dim=-1), np.repeat(np.arange(4) % num_heads, NUM_ROWS)
    expected = [PROJECTIONS[heads_R[row]].project(aux_RX[row][None])[0] for row in rows]
    torch.testing.assert_close(found.hidden_RH, torch.stack(expected))


@pytest.mark.parametrize("head", [2**31, 2**62, -(2**40)])
def test_a_head_that_no_engine_can_have_stops_nobody(head: int) -> None:
    assert np.array([read_head(SamplingParams(extra_args={HEAD_KEY: head}))], dtype=np.int32)[0] in (-1, 2**31 - 1)


# On a CPU: what a step leaves of each request


@pytest.mark.parametrize(
    ("num_rows", "num_drafts", "num_sampled", "num_valid"),
    [
        ((4, 1, 4, 4), (3, 0, 3, 3), (3, 1, 1, 4), [3, 1, 1, 4]),  # decoding
        ((1, 1, 1), None, (1, 1, 1), [1, 1, 1]),  # without drafts
        ((9, 8, 40, 2), (0, 7, 0, 1), (1, 8, 0, 1), [9, 8, 40, 1]),  # prompts beside drafts
        ((205, 3), (0, 2), (0, 2), [205, 2]),  # a long chunk
        ((1,), (0,), (1,), [1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_accepted_rows_follow_the_rule_and_their_tokens_are_tokens(
    num_rows: tuple[int, ...],
    num_drafts: tuple[int, ...] | None,
    num_sampled: tuple[int, ...],
    num_valid: list[int],
    dtype: torch.dtype,
) -> None:
    """Of each request: its rows, how many of them verify drafts, the tokens it sampled, and the rows that stay."""
    first_B1 = torch.tensor([0, *num_rows], dtype=dtype).cumsum(0, dtype=dtype)
    up_to_B = None if num_drafts is None else torch.tensor(num_drafts, dtype=dtype).cumsum(0, dtype=dtype)
    next_tokens_B = 10_000 + torch.arange(len(num_rows), dtype=dtype)
    input_ids_R = torch.arange(1, sum(num_rows) + 1, dtype=dtype)
    num_valid_B, next_tokens_R = accepted_rows(
        first_B1, up_to_B, torch.tensor(num_sampled, dtype=dtype), next_tokens_B, input_ids_R
    )
    assert num_valid_B.tolist() == num_valid
    for request, (first, count) in enumerate(zip(first_B1.tolist(), num_valid, strict=False)):
        expected = [*range(first + 2, first + 1 + count), 10_000 + request]
        assert next_tokens_R[first : first + count].tolist() == expected
    assert int(next_tokens_R.min()) >= 0, "a rejected row's token is none"


# ---- slots of requests at a drafter


def test_a_request_keeps_its_slot_while_it_waits() -> None:
    slots, requests = RequestSlots(3), {name: object() for name in "abc"}
    first = slots.update(["a", "b"], requests)
    assert sorted(first.slots_B.tolist()) == [0, 1]
    assert (first.new, first.finished) == ([0, 1], [])
    second = slots.update(["c", "a"], requests)  # b waits, such as after preemption
    assert second.new == [0]
    third = slots.update(["b", "a", "c"], requests)
    assert third.slots_B.tolist() == [first.slots_B[1], first.slots_B[0], second.slots_B[0]]
    assert (third.new, third.finished) == ([], [])


def test_without_a_free_slot_the_longest_waiting_request_loses_its_own() -> None:
    slots, requests = RequestSlots(2), {name: object() for name in "abcd"}
    slot_of_a = int(slots.update(["a"], requests).slots_B[0])
    slots.update(["b"], requests)
    change = slots.update(["b", "c"], requests)
    assert change.finished == [slot_of_a]
    assert slots.update(["a", "c"], requests).new == [0]
