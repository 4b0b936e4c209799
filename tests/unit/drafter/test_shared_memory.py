"""A ring hands over what was written into it, in stream order on a GPU, tells when it may be written, ends a wait
with its deadline, and leaves nothing in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import time
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.protocol import DtypeName, Int32Array, StepDescriptor, TargetShape, WireError
from peagle.drafter.shared_memory import ABORTED, NUM_SLOTS, REACHED, TIMED_OUT, Ring
from tests.support.transport_harness import SHAPE as SERVED_SHAPE
from tests.support.transport_harness import DrafterProcess, Target, eventually, make_pool, mapped_rings

SHAPE = TargetShape(
    hidden_size=6, dtype="float32", max_draft_tokens=3, max_num_requests=4, max_num_rows=10, vocab_size=100
)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def write(ring: Ring, number: int, device: str = "cpu", **changes: Any) -> Tensor:
    """A step of slots 3 and 1 with 4 and 2 of 7 rows and a hole between them; its payload."""
    hidden_RH = torch.randn(7, ring.shape.hidden_size, device=device).to(ring.shape.torch_dtype)
    fields: dict[str, Any] = {
        "slots_B": ints(3, 1), "heads_B": ints(0, 2), "num_drafts_B": ints(3, 0), "row_offset_B": ints(0, 5),
        "num_rows": 7, "finished_slots": (1, 2), "prompts": {1: ints(5, 6, 7)}, "number": number,
    }  # fmt: skip
    ring.write_descriptor(StepDescriptor(**(fields | changes)))
    start_B, num_valid_B, tokens_R = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([8, 2], [4, 2], list(range(7)))
    )
    ring.write_tensors(number, start_B, num_valid_B, tokens_R, hidden_RH)
    return hidden_RH


@pytest.mark.parametrize("dtype", typing.get_args(DtypeName))
def test_a_step_and_its_reply_arrive_in_another_view_of_the_memory(dtype: str) -> None:
    ours = Ring.create(dataclasses.replace(SHAPE, dtype=dtype))
    theirs = Ring.attach(ours.name, ours.shape)
    for step in range(1, 2 * NUM_SLOTS + 1):
        assert not theirs.is_ready(step)
        hidden_RH = write(ours, step)
        assert theirs.is_ready(step)
        found = theirs.read_step(step, session=9)
        descriptor = found.descriptor
        assert (found.session, descriptor.number) == (9, step)
        columns = [descriptor.slots_B, descriptor.heads_B, descriptor.row_offset_B, descriptor.num_drafts_B]
        assert [column.tolist() for column in columns] == [[3, 1], [0, 2], [0, 5], [3, 0]]
        assert (found.start_B.tolist(), found.num_valid_B.tolist()) == ([8, 2], [4, 2])
        assert found.next_tokens_R.tolist() == list(range(7))
        assert torch.equal(found.hidden_RH, hidden_RH)
        assert descriptor.finished_slots == (1, 2)
        assert {slot: tokens.tolist() for slot, tokens in descriptor.prompts.items()} == {1: [5, 6, 7]}
        assert not ours.is_done(step)
        theirs.write_drafts(step, np.array([[4, 5, 6], [-1, -1, -1]], np.int32), service_ns=2_000_000)
        assert ours.is_done(step)
        assert ours.slot(step).drafts_BK[:2].tolist() == [[4, 5, 6], [-1, -1, -1]]
        assert ours.service_s(step) == 0.002


def test_a_slot_is_written_again_only_after_its_answer() -> None:
    ring = Ring.create(SHAPE)
    for step in range(1, NUM_SLOTS + 1):
        assert ring.is_free(step)
        write(ring, step)
    assert not ring.is_free(NUM_SLOTS + 1)
    ring.write_drafts(1, np.zeros((2, 3), np.int32), 0)
    assert ring.is_free(NUM_SLOTS + 1)
    assert not ring.is_free(NUM_SLOTS + 2)


def test_a_descriptor_of_another_step_or_size_is_refused() -> None:
    ring = Ring.create(SHAPE)
    write(ring, 3 + NUM_SLOTS)
    with pytest.raises(WireError, match="step 3 is described by"):
        ring.read_step(3)
    write(ring, 3)
    for size in (0, 20, -1):
        ring.slot(3).descriptor_size[0] = size
        with pytest.raises(WireError, match="does not fit"):
            ring.read_step(3)


def test_values_of_rejected_rows_are_not_looked_at() -> None:
    ring = Ring.create(SHAPE)
    write(ring, 1)
    ring.slot(1).integers[4 + 4] = 123_456  # row 4 lies between the requests
    assert ring.read_step(1).next_tokens_R[4] == 123_456


def test_a_ring_of_another_size_or_name_is_refused() -> None:
    ours = Ring.create(SHAPE)
    with pytest.raises(ValueError, match="the two sides differ"):
        Ring.attach(ours.name, dataclasses.replace(SHAPE, max_num_rows=4096))
    with pytest.raises(ValueError, match="is not named"):
        Ring.attach("../../etc/passwd", SHAPE)


def test_the_memory_goes_with_the_last_who_has_it() -> None:
    before = mapped_rings(os.getpid())
    ours = Ring.create(SHAPE)
    name = ours.name
    theirs = Ring.attach(name, SHAPE)
    theirs.set_abort(True)
    assert ours._abort[0]
    assert mapped_rings(os.getpid()) == before + 2
    del ours, theirs
    gc.collect()
    assert mapped_rings(os.getpid()) == before
    with pytest.raises((OSError, ValueError)):
        Ring.attach(name, SHAPE)


# On a device


#: On a CPU the same functions do at once what a GPU does in stream order.
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@contextlib.contextmanager
def pinned_ring(device: str) -> Iterator[Ring]:
    ring = Ring.create(SERVED_SHAPE)
    if device == "cuda":
        ring.pin(torch.device(device), will_wait=True)
    yield ring
    if device == "cuda":
        ring.unpin(torch.device(device))


class StreamTarget(Target):
    """A target whose host, with its tensors on a GPU, never waits for a step."""

    def check_chances(self, drafts_MK: Tensor, prob_MK: Tensor) -> None:
        """Of drafts that came, on a CPU, where they are there: of a random head each has some."""
        if drafts_MK.is_cpu:
            assert prob_MK.gt(0).all()
            assert prob_MK.lt(1).all()

    def begin(self, num_rows: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Where the step's drafts come, and those that must."""
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        new, self.is_new = self.is_new, set()
        ((link, members_M),) = self.pool.assign(slots_B, np.zeros_like(slots_B), new)
        assert self._send(link, members_M.tolist(), num_rows, SERVED_SHAPE.max_draft_tokens, 0, new)
        drafts_MK = self._drafts(link)
        self.ends = [end + num_rows for end in self.ends]
        return drafts_MK, [self.expected(slot) for slot in range(len(self.tokens))]

    def _drafts(self, link: Any) -> torch.Tensor:
        out_MK = torch.full((len(self.tokens), SERVED_SHAPE.max_draft_tokens), 77, device=self.pool.device)
        link.wait(out_MK, prob_MK := out_MK.float())
        self.check_chances(out_MK, prob_MK)
        return out_MK


@DEVICES
def test_drafts_arrive_in_stream_order_while_the_host_runs_ahead(device: str) -> None:
    with DrafterProcess() as drafter:
        pools = [make_pool(device=device) for _ in range(2)]
        target = StreamTarget(pools[0])
        for pool in pools:
            target.pool = pool
            pool.set_drafters([{"address": drafter.address, "heads": {0: "digest0"}}])
            eventually(lambda pool=pool: pool.num_up)
            for sizes in ((5, 1), (3, 2), (1, 1), (2, 1)):
                steps = [target.begin(num_rows) for num_rows in sizes]
                for drafts_MK, expected in steps:
                    assert drafts_MK.tolist() == expected
            for slot in range(3):
                target.restart(slot)
            pool.close()


@pytest.mark.gpu
def test_a_killed_drafter_releases_the_stream() -> None:
    with DrafterProcess(delay_s=30.0) as drafter:
        pool = make_pool(device="cuda", min_deadline_s=25.0, max_deadline_s=25.0)
        pool.set_drafters([{"address": drafter.address, "heads": {0: "digest0"}}])
        eventually(lambda: pool.num_up)
        drafts_MK, _ = StreamTarget(pool).begin(3)
        begin_s = time.monotonic()
        drafter.kill()
        assert drafts_MK.unique().tolist() == [0]
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"
        pool.close()


@DEVICES
@pytest.mark.parametrize("aborted", [False, True])
def test_a_wait_ends_with_its_deadline_or_with_the_abort_word(device: str, aborted: bool) -> None:
    with pinned_ring(device) as ring:
        out_BK = torch.full((2, SERVED_SHAPE.max_draft_tokens), 77, device=device)
        ring.set_abort(aborted)
        begin_s = time.monotonic()
        ring.wait(1, 20.0 if aborted else 0.2, out_BK, prob_BK := out_BK.float())
        assert out_BK.unique().tolist() == [0]
        assert prob_BK.unique().tolist() == [0.0]
        assert time.monotonic() - begin_s < 12
        assert eventually(lambda: int(ring.slot(1).outcome[0])) == (ABORTED if aborted else TIMED_OUT)
        ring.write_drafts(1, np.full((2, SERVED_SHAPE.max_draft_tokens), 5, np.int32), 0)
        ring.wait(1, 0.2, out_BK, prob_BK)
        assert out_BK.unique().tolist() == [5], "an answer that is there counts even when aborted"
        assert eventually(lambda: int(ring.slot(1).outcome[0]) == REACHED)
