"""Which rows of a batch travel to a drafter, and by whose head they are reduced."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from peagle.drafter.protocol import Reducer, TargetShape
from peagle.vllm.remote import EngineBatch, SampledRows, StepSender, _reduce, _rows_of
from peagle.vllm.request_args import HEAD_KEY, head_of

CPU = torch.device("cpu")
NUM_ROWS = [3, 1, 4, 2]
NUM_VALID = [2, 1, 4, 1]
AUX = [torch.arange(20, dtype=torch.float32).view(10, 2) + 100 * layer for layer in range(3)]


def batch(num_sent: list[int] | None = None) -> EngineBatch:
    """Four requests of 3, 1, 4 and 2 rows, of which `NUM_VALID` stay and travel."""
    ends = np.cumsum(NUM_ROWS).astype(np.int32)
    some = np.zeros(4, np.int32)
    return EngineBatch(
        request_ids=list("abcd"),
        requests={},
        heads_B=some,
        depth_B=some,
        wanted_B=np.ones(4, bool),
        row_offset_B=ends - np.array(NUM_ROWS, np.int32),
        num_rows_B=np.array(NUM_ROWS, np.int32),
        num_sent_B=np.array(num_sent or NUM_VALID, np.int32),
        prompt_of=lambda _: np.zeros(0, np.int32),
    )


def test_rejected_rows_stay_behind() -> None:
    rows = _rows_of(batch(), np.arange(4), CPU)
    assert rows.index is not None
    assert rows.index.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert (rows.num_rows, rows.offset_M.tolist()) == (8, [0, 2, 3, 7])


def test_rows_of_some_requests_are_gathered() -> None:
    rows = _rows_of(batch(), np.array([2, 0]), CPU)
    assert rows.index is not None
    assert rows.index.tolist() == [4, 5, 6, 7, 0, 1]
    assert rows.offset_M.tolist() == [0, 4]


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 0], [3]])
def test_each_row_is_reduced_by_its_requests_head(members: list[int]) -> None:
    """Heads 0 and 1 alternate; every row is compared with what its own head makes of it."""
    torch.manual_seed(0)
    reducers = {head: Reducer(torch.randn(5, 6)) for head in (0, 1)}
    members_M = np.array(members)
    heads_M = (members_M % 2).astype(np.int32)
    rows = _rows_of(batch(), members_M, CPU)
    hidden_RH = _reduce(reducers, heads_M, rows, AUX)
    aux_RX = torch.cat(AUX, dim=-1)
    expected = []
    for request in members:
        offset = int(np.cumsum([0, *NUM_ROWS])[request])
        of_request = aux_RX[offset : offset + NUM_VALID[request]]
        expected.append(reducers[request % 2].reduce(of_request))
    torch.testing.assert_close(hidden_RH, torch.cat(expected))


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [3, 1]])
def test_rows_of_chosen_steps_come_from_where_the_gpu_put_them(members: list[int]) -> None:
    """Of 3, 1, 4 and 2 places, where the target has 2, 1, 1 and 2 rows: what is in the others means nothing."""
    torch.manual_seed(0)
    sources_R = torch.tensor([0, 1, -1, 2, 3, -1, -1, -1, 4, 5], dtype=torch.int32)
    reducers, aux = {0: Reducer(torch.randn(5, 6))}, [layer[:6] for layer in AUX]
    rows = _rows_of(batch(NUM_ROWS), np.array(members), CPU)
    hidden_RH = _reduce(reducers, np.zeros(len(members), np.int32), rows, aux, sources_R)
    places = [np.arange(sum(NUM_ROWS[:request]), sum(NUM_ROWS[: request + 1])) for request in members]
    wanted_R = sources_R[np.concatenate(places)].long()
    assert rows.offset_M.tolist() == [sum(map(len, places[:index])) for index in range(len(members))]
    expected_NH = reducers[0].reduce(torch.cat(aux, dim=-1))
    torch.testing.assert_close(hidden_RH[wanted_R >= 0], expected_NH[wanted_R[wanted_R >= 0]])


class OneLink:
    """A pool with one drafter, which takes a step or not."""

    def __init__(self, takes_steps: bool = True) -> None:
        self.state, self.takes_steps, self.reducers = "up", takes_steps, {0: Reducer(torch.randn(5, 6))}
        self.num_waits = 0

    def finish(self, slots: list[int]) -> None:
        """Nobody to tell."""

    def assign(self, slots_B: Any, *_: Any) -> list[tuple[Any, Any]]:
        return [(self, np.arange(len(slots_B)))] if self.state == "up" else []

    def announce(self, *_: Any) -> bool:
        return self.takes_steps

    def send(self, *_: Any) -> bool:
        return True

    def wait(self) -> None:
        self.num_waits += 1


def send(pool: OneLink, num_steps: int = 1, sender: StepSender | None = None) -> StepSender:
    """Steps without drafts."""
    sender = sender or StepSender(pool, TargetShape(5, "float32", 3, 8, 16, 100), CPU)
    names = {name: object() for name in "abcd"}
    for _ in range(num_steps):
        sender.begin(dataclasses.replace(batch(), requests=names))
        per_request_B = torch.zeros(4, dtype=torch.int32)
        assert sender.send(SampledRows(per_request_B, per_request_B, torch.arange(10, dtype=torch.int32), AUX)) == []
    return sender


@pytest.mark.parametrize("head", [2**31, 2**62, -(2**40)])
def test_a_head_that_no_engine_can_have_stops_nobody(head: int) -> None:
    assert np.array([head_of({HEAD_KEY: head})], dtype=np.int32)[0] in (-1, 2**31 - 1)
