"""A mailbox hands over what was written into it, tells when it may be written, and leaves nothing in /dev/shm."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.drafter.mailbox import (
    MAX_PROMPT_TOKENS,
    NUM_AREAS,
    SHARED_DIR,
    Mailbox,
    SharedMemory,
    host_identity,
    mailbox_bytes,
    sweep,
)
from peagle.drafter.steps import DTYPES, Int32Array, TargetShape

SHAPE = TargetShape(hidden_size=6, dtype="float32", max_depth=3, max_num_requests=4, max_num_rows=10, vocab_size=100)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def write(mailbox: Mailbox, step: int, num_rows: int = 7) -> torch.Tensor:
    """A step of slots 3 and 1 with 4 and 2 rows and a hole between them; its payload."""
    hidden_RH = torch.randn(num_rows, mailbox.shape.hidden_size).to(mailbox.shape.torch_dtype)
    host_4B = np.stack([ints(3, 1), ints(0, 2), ints(0, 5), ints(3, 0)])
    mailbox.write_host_part(step, host_4B, num_rows, [1, 2], {1: ints(5, 6, 7)})
    tokens_R = torch.arange(num_rows, dtype=torch.int32)
    mailbox.write_device_part(
        step, torch.tensor([8, 2], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32), tokens_R, hidden_RH
    )
    return hidden_RH


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_step_and_its_reply_arrive_in_another_view_of_the_memory(dtype: str) -> None:
    ours = Mailbox.create(dataclasses.replace(SHAPE, dtype=dtype))
    theirs = Mailbox.attach(ours.memory.name, ours.shape)
    for step in range(1, 2 * NUM_AREAS + 1):
        assert not theirs.is_ready(step)
        hidden_RH = write(ours, step)
        assert theirs.is_ready(step)
        found = theirs.read_step(step, session=9)
        assert (found.session, found.step) == (9, step)
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


def test_a_host_part_is_read_ahead_and_known_again_while_it_stays_equal() -> None:
    mailbox = Mailbox.private(SHAPE)
    host_4B, start_B = np.stack([ints(3, 1), ints(0, 0), ints(0, 5), ints(3, 2)]), torch.tensor([8, 2]).int()
    num_valid_B, host_parts = torch.tensor([4, 2]).int(), []

    def write_device_part(step: int, num_rows: int) -> None:
        tokens_R, hidden_RH = torch.arange(num_rows).int(), torch.zeros(num_rows, SHAPE.hidden_size)
        mailbox.write_device_part(step, start_B, num_valid_B, tokens_R, hidden_RH)

    for step, num_rows in ((1, 7), (2, 7), (3, 8)):
        mailbox.read_ahead(step)  # too early: nothing is there
        mailbox.write_host_part(step, host_4B, num_rows)
        mailbox.read_ahead(step)
        mailbox.area(step).host_4B.fill_(-1)
        write_device_part(step, num_rows)
        found = mailbox.read_step(step, 1)
        assert (found.step, found.slots_B.tolist(), found.depth_B.tolist()) == (step, [3, 1], [3, 2])
        host_parts.append(found.host_part)
        mailbox.answer(step, np.zeros((2, 3), np.int32), 0)
    assert host_parts[0] is host_parts[1]
    assert host_parts[2] is not host_parts[1], "of another number of rows it would have to be checked anew"
    mailbox.write_host_part(4, host_4B, 8)
    num_valid_B[1] = 4
    write_device_part(4, 8)
    with pytest.raises(ValueError, match="reaches beyond the 8 rows"):
        mailbox.read_step(4, 1)


def test_a_step_without_requests_only_tells_who_ended() -> None:
    mailbox = Mailbox.private(SHAPE)
    mailbox.write_host_part(1, np.zeros((4, 0), np.int32), 0, [0, 3])
    nothing = torch.zeros(0, dtype=torch.int32)
    mailbox.write_device_part(1, nothing, nothing, nothing, torch.zeros(0, 6))
    found = mailbox.read_step(1, 0)
    assert (found.num_requests, list(found.finished_slots), found.prompts) == (0, [0, 3], {})


def test_prompts_that_do_not_fit_travel_empty() -> None:
    mailbox = Mailbox.private(dataclasses.replace(SHAPE, vocab_size=2))
    host_4B = np.stack([ints(0, 1), ints(0, 0), ints(0, 1), ints(0, 0)])
    long = np.ones(MAX_PROMPT_TOKENS - 1, np.int32)
    assert mailbox.write_host_part(1, host_4B, 2, (), {0: long, 1: ints(0, 1)}) == 1
    starts = torch.tensor([len(long) - 1, 1], dtype=torch.int32)
    ones = torch.ones(2, dtype=torch.int32)
    mailbox.write_device_part(1, starts, ones, ones, torch.zeros(2, 6))
    assert {slot: len(tokens) for slot, tokens in mailbox.read_step(1, 0).prompts.items()} == {0: len(long), 1: 0}


def test_the_size_is_three_payloads_and_little_else() -> None:
    shape = TargetShape(4096, "bfloat16", 7, 256, 8192, 128_256)
    assert 3 * shape.payload_bytes < mailbox_bytes(shape) < 1.05 * 3 * shape.payload_bytes


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("counts", [9], "says step 9"),
        ("counts", [None, 5], "sizes"),
        ("counts", [None, 2, 7, 2, -1], "sizes"),
        ("host_4B", [3, 3], "names a slot twice"),
        ("host_4B", [4, 1], "slots_B holds 1 .. 4"),
        ("device_part", [-1], "start_B holds -1"),
        ("device_part", [8, 2, 4, 3], "reaches beyond the 7 rows"),
        ("device_part", [8, 2, 4, 2, 100], "next_tokens_R holds 1 .. 100"),
        ("device_part", [8, 1], r"prompts\[1\] is int32 \[3\], not int32 \[0\] or \[2\]"),
        ("finished_B", [9], "finished_slots holds 2 .. 9"),
        ("prompt_lengths_B", [-1], "prompts of"),
        ("prompt_slots_B", [2], "slot 2, which has no rows"),
    ],
)
@pytest.mark.parametrize("num_good", [0, 2], ids=["first", "after good ones"])
def test_a_damaged_step_is_refused_by_name(field: str, value: list[int | None], problem: str, num_good: int) -> None:
    """Also where its host part is otherwise that of the steps before, which is not checked again."""
    mailbox, step = Mailbox.private(SHAPE), num_good + 1
    for good in range(1, step):
        write(mailbox, good)
        mailbox.read_step(good, 0)
    write(mailbox, step)
    getattr(mailbox.area(step), field).view(-1)[: len(value)] = torch.tensor([step if v is None else v for v in value])
    for _ in range(2):
        with pytest.raises(ValueError, match=problem):
            mailbox.read_step(step, 0)


def test_values_of_rejected_rows_are_not_looked_at() -> None:
    mailbox = Mailbox.private(SHAPE)
    write(mailbox, 1)
    mailbox.area(1).device_part[4 + 4] = 123_456  # row 4 lies between the requests
    assert mailbox.read_step(1, 0).next_tokens_R[4] == 123_456


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int8"}, "dtype = 'int8' is none of"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"max_depth": True}, "max_depth = True"),
        ({"max_num_rows": 3}, "max_num_rows = 3 is below max_num_requests = 4"),
    ],
)
def test_a_bad_shape_is_refused_by_name(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(SHAPE, **changes)  # type: ignore[arg-type]


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
    theirs.beat()
    assert ours.silence_s() < 60
    with pytest.raises(FileNotFoundError):
        Mailbox.attach(name, SHAPE)


def test_memory_without_room_is_refused_and_leaves_no_file() -> None:
    before = set(SHARED_DIR.glob("peagle-mailbox-*"))
    with pytest.raises(OSError, match="space"):
        SharedMemory.create(1 << 50)
    assert set(SHARED_DIR.glob("peagle-mailbox-*")) == before


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


def test_the_identity_of_a_host_is_its_boot_and_its_shared_memory() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_identity() == f"{boot}:{SHARED_DIR.stat().st_dev}"
