"""A ring hands over what was written into it, in stream order on a GPU, tells when it may be written, ends a wait
with its deadline, and leaves nothing in memory."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import typing

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.protocol import DtypeName, WireError
from peagle.drafter.shared_memory import NUM_SLOTS, Ring
from tests.support.transport_harness import SHAPE as SERVED_SHAPE
from tests.support.transport_harness import (
    DrafterProcess,
    Target,
    connected,
    entry,
    eventually,
    make_pool,
    mapped_rings,
)
from tests.unit.drafter.test_drafter_protocol import SHAPE, step, write


def write_step(ring: Ring, number: int) -> Tensor:
    """A step of three requests, of whose ten rows the third and the fourth are rejected; its payload."""
    return write(ring, step(number=number), [4, 1, 0], [2, 3, 0])


@pytest.mark.parametrize("dtype", typing.get_args(DtypeName))
def test_a_step_and_its_reply_arrive_in_another_view_of_the_memory(dtype: str) -> None:
    ours = Ring.create(dataclasses.replace(SHAPE, dtype=dtype))
    theirs = Ring.attach(ours.name, ours.shape)
    for number in range(1, 2 * NUM_SLOTS + 1):
        assert not theirs.is_ready(number)
        hidden_RH = write_step(ours, number)
        assert theirs.is_ready(number)
        found = theirs.read_step(number)
        descriptor = found.descriptor
        assert descriptor.number == number
        columns = [descriptor.slots_B, descriptor.heads_B, descriptor.row_offset_B, descriptor.num_drafts_B]
        assert [column.tolist() for column in columns] == [[2, 0, 3], [0, 0, 1], [1, 5, 9], [3, 0, 1]]
        assert (found.start_B.tolist(), found.num_valid_B.tolist()) == ([4, 1, 0], [2, 3, 0])
        assert found.next_tokens_R.tolist() == list(range(10))
        assert torch.equal(found.hidden_RH, hidden_RH)
        assert descriptor.finished_slots == (0, 1)
        assert {slot: tokens.tolist() for slot, tokens in descriptor.prompts.items()} == {0: [7, 8], 3: []}
        assert not ours.is_done(number)
        theirs.write_drafts(number, np.array([[4, 5, 6], [-1, -1, -1]], np.int32), service_ns=2_000_000)
        assert ours.is_done(number)
        assert ours.slot(number).drafts_BK[:2].tolist() == [[4, 5, 6], [-1, -1, -1]]
        assert ours.slot(number).service_ns[0] == 2_000_000


def test_a_slot_is_written_again_only_after_its_answer() -> None:
    ring = Ring.create(SHAPE)
    for number in range(1, NUM_SLOTS + 1):
        assert ring.is_free(number)
        write_step(ring, number)
    assert not ring.is_free(NUM_SLOTS + 1)
    ring.write_drafts(1, np.zeros((2, 3), np.int32), 0)
    assert ring.is_free(NUM_SLOTS + 1)
    assert not ring.is_free(NUM_SLOTS + 2)


def test_a_descriptor_of_another_step_or_size_is_refused() -> None:
    ring = Ring.create(SHAPE)
    write_step(ring, 3 + NUM_SLOTS)
    with pytest.raises(WireError, match="step 3 is described by"):
        ring.read_step(3)
    write_step(ring, 3)
    for size in (0, 20, -1):
        ring.slot(3).descriptor_size[0] = size
        with pytest.raises(WireError, match="does not fit"):
            ring.read_step(3)


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


class StreamTarget(Target):
    """A target whose host, with its tensors on a GPU, never waits for a step."""

    def begin(self, num_rows: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Where the step's drafts come, and those that must."""
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        new, self.is_new = self.is_new, set()
        ((link, members_M),) = self.pool.assign(slots_B, np.zeros_like(slots_B))
        assert self._send(link, members_M.tolist(), num_rows, SERVED_SHAPE.max_draft_tokens, 0, new)
        drafts_MK = torch.full((len(self.tokens), SERVED_SHAPE.max_draft_tokens), 77, device=self.pool.device)
        link.wait(drafts_MK)
        self.ends = [end + num_rows for end in self.ends]
        return drafts_MK, [self.expected(slot) for slot in range(len(self.tokens))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_arrive_in_stream_order_while_the_host_runs_ahead(device: str) -> None:
    """On a CPU the same functions do at once what a GPU does in stream order."""
    with DrafterProcess() as drafter:
        pools = [make_pool(device=device) for _ in range(2)]
        target = StreamTarget(pools[0])
        for pool in pools:
            target.pool = pool
            pool.set_drafters([entry(drafter.address)])
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
        pool = connected(drafter.address, device="cuda", max_deadline_s=25.0)
        drafts_MK, _ = StreamTarget(pool).begin(3)
        begin_s = time.monotonic()
        drafter.kill()
        assert drafts_MK.unique().tolist() == [0]
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"
        pool.close()
