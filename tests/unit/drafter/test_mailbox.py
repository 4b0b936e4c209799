"""A mailbox hands over what was written into it, in stream order on a GPU, tells when it may be written, ends a wait
with its deadline, and leaves nothing in /dev/shm."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.mailbox import (
    ABORTED,
    MAX_PROMPT_TOKENS,
    NUM_AREAS,
    REACHED,
    SHARED_DIR,
    TIMED_OUT,
    Mailbox,
    SharedMemory,
    sweep,
)
from peagle.drafter.protocol import DtypeName, Int32Array, TargetShape, TargetStep
from tests.support.transport_harness import SHAPE as SERVED_SHAPE
from tests.support.transport_harness import (
    DrafterProcess,
    Target,
    device_part,
    eventually,
    make_pool,
    named_mailboxes,
    plan_of,
)

SHAPE = TargetShape(hidden_size=6, dtype="float32", max_depth=3, max_num_requests=4, max_num_rows=10, vocab_size=100)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def new_step(
    number: int, host_4B: Int32Array, device_2B: list[list[int]], hidden_RH: Tensor, **more: Any
) -> TargetStep:
    """As a target has it. host_4B: slots, heads, depths, row offsets; device_2B: starts, valid rows."""
    start_B, num_valid_B = (torch.tensor(values, dtype=torch.int32, device=hidden_RH.device) for values in device_2B)
    tokens_R = torch.arange(len(hidden_RH), dtype=torch.int32, device=hidden_RH.device)
    return TargetStep(*host_4B, start_B, num_valid_B, tokens_R, hidden_RH, number=number, **more)


def put(mailbox: Mailbox, step: TargetStep) -> int:
    """The whole step; how many prompts did not fit."""
    num_cut = mailbox.write_host_part(plan_of(step))
    mailbox.write_device_part(step.number, *device_part(step))
    return num_cut


def write(mailbox: Mailbox, number: int, num_rows: int = 7) -> Tensor:
    """A step of slots 3 and 1 with 4 and 2 rows and a hole between them; its payload."""
    hidden_RH = torch.randn(num_rows, mailbox.shape.hidden_size).to(mailbox.shape.torch_dtype)
    host_4B = np.stack([ints(3, 1), ints(0, 2), ints(3, 0), ints(0, 5)])
    step = new_step(number, host_4B, [[8, 2], [4, 2]], hidden_RH, finished_slots=[1, 2], prompts={1: ints(5, 6, 7)})
    put(mailbox, step)
    return hidden_RH


@pytest.mark.parametrize("dtype", typing.get_args(DtypeName))
def test_a_step_and_its_reply_arrive_in_another_view_of_the_memory(dtype: str) -> None:
    ours = Mailbox.create(dataclasses.replace(SHAPE, dtype=dtype))
    theirs = Mailbox.attach(ours.memory.name, ours.shape)
    for step in range(1, 2 * NUM_AREAS + 1):
        assert not theirs.is_ready(step)
        hidden_RH = write(ours, step)
        assert theirs.is_ready(step)
        found = theirs.read_step(step, session=9)
        assert (found.session, found.number) == (9, step)
        columns = [found.slots_B, found.heads_B, found.row_offset_B, found.depth_B, found.start_B, found.num_valid_B]
        assert [column.tolist() for column in columns] == [[3, 1], [0, 2], [0, 5], [3, 0], [8, 2], [4, 2]]
        assert found.next_tokens_R.tolist() == list(range(7))
        assert torch.equal(found.hidden_RH, hidden_RH)
        assert list(found.finished_slots) == [1, 2]
        assert {slot: tokens.tolist() for slot, tokens in found.prompts.items()} == {1: [5, 6, 7]}
        assert not ours.is_done(step)
        theirs.answer(step, np.array([[4, 5, 6], [-1, -1, -1]], np.int32), service_ns=2_000_000)
        assert ours.is_done(step)
        assert ours.read_drafts(step, 2).tolist() == [[4, 5, 6], [-1, -1, -1]]
        assert ours.service_s(step) == 0.002


def test_an_area_is_written_again_only_after_its_answer() -> None:
    mailbox = Mailbox.private(SHAPE)
    for step in range(1, NUM_AREAS + 1):
        assert mailbox.is_free(step)
        write(mailbox, step)
    assert not mailbox.is_free(NUM_AREAS + 1)
    mailbox.answer(1, np.zeros((2, 3), np.int32), 0)
    assert mailbox.is_free(NUM_AREAS + 1)
    assert not mailbox.is_free(NUM_AREAS + 2)


def test_prompts_that_do_not_fit_travel_empty() -> None:
    mailbox = Mailbox.private(dataclasses.replace(SHAPE, vocab_size=2))
    long = np.ones(MAX_PROMPT_TOKENS - 1, np.int32)
    host_4B = np.stack([ints(0, 1), ints(0, 0), ints(0, 0), ints(0, 1)])
    starts = [[len(long) - 1, 1], [1, 1]]
    step = new_step(1, host_4B, starts, torch.zeros(2, 6), prompts={0: long, 1: ints(0, 1)})
    assert put(mailbox, step) == 1
    assert {slot: len(tokens) for slot, tokens in mailbox.read_step(1, 0).prompts.items()} == {0: len(long), 1: 0}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("counts", [9], "says step 9"),
        ("counts", [None, 5], "sizes"),
        ("counts", [None, 2, 7, 2, -1], "sizes"),
        ("host_4B", [3, 3], "names a slot twice"),
        ("device_part", [-1], "start_B holds -1"),
        ("device_part", [8, 2, 4, 3], "reaches beyond the 7 rows"),
        ("device_part", [8, 2, 4, 2, 100], "next_tokens_R holds 1 .. 100"),
        ("prompt_lengths_B", [-1], "prompts of"),
    ],
)
@pytest.mark.parametrize("num_good", [0, 2], ids=["first", "after good ones"])
def test_a_damaged_step_is_refused_by_name(field: str, value: list[int | None], problem: str, num_good: int) -> None:
    """Also where its host part is otherwise that of the steps before, which is not checked again."""
    mailbox, number = Mailbox.private(SHAPE), num_good + 1
    for good in range(1, number):
        write(mailbox, good)
        mailbox.read_step(good, 0)
    write(mailbox, number)
    getattr(mailbox.area(number), field).reshape(-1)[: len(value)] = [number if v is None else v for v in value]
    for _ in range(2):
        with pytest.raises(ValueError, match=problem):
            mailbox.read_step(number, 0)


def test_values_of_rejected_rows_are_not_looked_at() -> None:
    mailbox = Mailbox.private(SHAPE)
    write(mailbox, 1)
    mailbox.area(1).device_part[4 + 4] = 123_456  # row 4 lies between the requests
    assert mailbox.read_step(1, 0).next_tokens_R[4] == 123_456


def test_a_mailbox_of_another_size_or_name_is_refused() -> None:
    ours = Mailbox.create(SHAPE)
    with pytest.raises(ValueError, match="the two sides differ in its layout"):
        Mailbox.attach(ours.memory.name, dataclasses.replace(SHAPE, max_num_rows=4096))
    with pytest.raises(ValueError, match="is not named"):
        Mailbox.attach("../../etc/passwd", SHAPE)
    ours.memory.unlink()
    with pytest.raises(ValueError, match="is not named"):
        Mailbox.attach("", SHAPE)


def test_the_name_is_gone_as_soon_as_both_have_it() -> None:
    ours = Mailbox.create(SHAPE)
    name = ours.memory.name
    assert (SHARED_DIR / name).exists()
    theirs = Mailbox.attach(name, SHAPE)
    assert not (SHARED_DIR / name).exists()
    theirs.set_abort(True)
    assert ours.is_aborted()
    with pytest.raises(FileNotFoundError):
        Mailbox.attach(name, SHAPE)


def test_memory_without_room_is_refused_and_leaves_no_file() -> None:
    before = named_mailboxes()
    with pytest.raises(OSError, match="space"):
        SharedMemory.create(1 << 50)
    assert named_mailboxes() == before


MAKER = """
import sys, time
from peagle.drafter.mailbox import SharedMemory
memory = SharedMemory.create(4096)
print(memory.name, flush=True)
time.sleep(60)
"""


def test_a_dead_makers_file_is_swept_and_a_living_ones_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        path = SHARED_DIR / maker.stdout.readline().strip()
        _make_old(path)
        sweep()
        assert path.exists()
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        assert path.exists(), "this is what kill -9 in the middle of a hello leaves"
        sweep()
        assert not path.exists()


def _make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3600,) * 2)


# On a device


#: On a CPU the same functions do at once what a GPU does in stream order.
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@contextlib.contextmanager
def pinned_mailbox(device: str) -> Iterator[Mailbox]:
    mailbox = Mailbox.private(SERVED_SHAPE)
    if device == "cuda":
        mailbox.pin(torch.device(device), will_wait=True)
    yield mailbox
    if device == "cuda":
        mailbox.unpin(torch.device(device))


class StreamTarget(Target):
    """A target whose host, with its tensors on a GPU, never waits for a step."""

    def check_chances(self, drafts_MK: Tensor, chance_MK: Tensor) -> None:
        """Of drafts that came, on a CPU, where they are there: of a random head each has some."""
        if drafts_MK.is_cpu:
            assert chance_MK.gt(0).all()
            assert chance_MK.lt(1).all()

    def begin(self, num_rows: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Where the step's drafts come, and those that must."""
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        new, self.is_new = self.is_new, set()
        ((link, members_M),) = self.pool.assign(slots_B, np.zeros_like(slots_B), {slot: str(slot) for slot in new})
        assert self._send(link, members_M.tolist(), num_rows, SERVED_SHAPE.max_depth, 0, new)
        drafts_MK = self._drafts(link)
        self.ends = [end + num_rows for end in self.ends]
        return drafts_MK, [self.expected(slot) for slot in range(len(self.tokens))]

    def _drafts(self, link: Any) -> torch.Tensor:
        out_MK = torch.full((len(self.tokens), SERVED_SHAPE.max_depth), 77, device=self.pool.device)
        link.enqueue_wait(out_MK, chance_MK := out_MK.float())
        self.check_chances(out_MK, chance_MK)
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
    with pinned_mailbox(device) as mailbox:
        out_BK = torch.full((2, SERVED_SHAPE.max_depth), 77, device=device)
        mailbox.set_abort(aborted)
        begin_s = time.monotonic()
        mailbox.enqueue_wait(1, 20.0 if aborted else 0.2, out_BK, chance_BK := out_BK.float())
        assert out_BK.unique().tolist() == [0]
        assert chance_BK.unique().tolist() == [0.0]
        assert time.monotonic() - begin_s < 12
        assert eventually(lambda: int(mailbox.area(1).outcome[0])) == (ABORTED if aborted else TIMED_OUT)
        mailbox.answer(1, np.full((2, SERVED_SHAPE.max_depth), 5, np.int32), 0)
        mailbox.enqueue_wait(1, 0.2, out_BK, chance_BK)
        assert out_BK.unique().tolist() == [5], "an answer that is there counts even when aborted"
        assert eventually(lambda: int(mailbox.area(1).outcome[0]) == REACHED)


@DEVICES
def test_a_step_from_device_tensors_is_whole_when_it_is_ready(device: str) -> None:
    host_4B = np.array([[0, 1], [0, 0], [1, 1], [0, 3]], np.int32)
    with pinned_mailbox(device) as mailbox:
        for number in range(1, 5):
            hidden_RH = torch.randn(5, SERVED_SHAPE.hidden_size, dtype=torch.float64, device=device)
            step = new_step(number, host_4B, [[2, 2], [2, 2]], hidden_RH)
            put(mailbox, step)
            eventually(lambda number=number: mailbox.is_ready(number))
            found = mailbox.read_step(number, 0)
            assert torch.equal(found.hidden_RH, hidden_RH.cpu())
            assert (found.next_tokens_R.tolist(), found.start_B.tolist()) == (list(range(5)), [2, 2])
            mailbox.answer(number, np.zeros((2, SERVED_SHAPE.max_depth), np.int32), 0)
