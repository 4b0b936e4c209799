"""Steps and drafts pass a mailbox in stream order, on a GPU between two processes; a wait ends with its deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from peagle.drafter import mailbox as device_mailbox
from peagle.drafter.mailbox import Mailbox
from peagle.drafter.wait import ABORTED, REACHED, TIMED_OUT
from tests.draft_engine_harness import CONFIG
from tests.transport_harness import SHAPE, DrafterProcess, Target, eventually, make_pool

#: On a CPU the same functions do at once what a GPU does in stream order.
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@contextlib.contextmanager
def pinned_mailbox(device: str) -> Iterator[Mailbox]:
    mailbox = Mailbox.private(SHAPE)
    if device == "cuda":
        device_mailbox.pin(mailbox, torch.device(device), will_wait=True)
    yield mailbox
    if device == "cuda":
        device_mailbox.unpin(mailbox, torch.device(device))


class DeviceTarget(Target):
    """A target whose tensors are on a GPU and whose host never waits for a step."""

    def begin(self, num_rows: int) -> tuple[object, torch.Tensor, list[list[int]]]:
        slots_B = np.arange(len(self.tokens), dtype=np.int32)
        new, self.is_new = self.is_new, set()
        ((link, members_M),) = self.pool.assign(slots_B, np.zeros_like(slots_B), {slot: str(slot) for slot in new})
        assert self._send(link, members_M.tolist(), num_rows, SHAPE.max_depth, 0, new)
        out_MK = torch.full((len(self.tokens), SHAPE.max_depth), 77, dtype=torch.int32, device="cuda")
        link.enqueue_wait(out_MK)
        self.ends = [end + num_rows for end in self.ends]
        return link, out_MK, [self.expected(slot) for slot in range(len(self.tokens))]


@pytest.mark.gpu
def test_drafts_arrive_in_stream_order_while_the_host_runs_ahead() -> None:
    with DrafterProcess() as drafter:
        pool = make_pool(device="cuda")
        pool.set_drafters([{"address": drafter.address, "heads": {0: "digest0"}}])
        eventually(lambda: pool.num_up)
        target = DeviceTarget(pool)
        for sizes in ((5, 1), (3, 2), (1, 1)):
            steps = [target.begin(num_rows) for num_rows in sizes]
            for _, out_MK, expected in steps:
                assert out_MK.tolist() == expected
        pool.close()


@pytest.mark.gpu
def test_a_killed_drafter_releases_the_stream() -> None:
    with DrafterProcess(delay_s=30.0) as drafter:
        pool = make_pool(device="cuda", min_deadline_s=25.0, max_deadline_s=25.0)
        pool.set_drafters([{"address": drafter.address, "heads": {0: "digest0"}}])
        eventually(lambda: pool.num_up)
        _, out_MK, _ = DeviceTarget(pool).begin(3)
        begin_s = time.monotonic()
        drafter.kill()
        assert out_MK.unique().tolist() == [-1]
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"
        pool.close()


@pytest.mark.gpu
def test_a_mailboxes_payload_counts_as_pinned() -> None:
    """So that a pass reads its rows where they lie (`peagle.drafter.graphs`)."""
    with pinned_mailbox("cuda") as mailbox:
        assert mailbox.area(0).payload_RH[:3].is_pinned()


@DEVICES
@pytest.mark.parametrize("aborted", [False, True])
def test_a_wait_ends_with_its_deadline_or_with_the_abort_word(device: str, aborted: bool) -> None:
    with pinned_mailbox(device) as mailbox:
        out_BK = torch.full((2, SHAPE.max_depth), 77, dtype=torch.int32, device=device)
        mailbox.set_abort(aborted)
        begin_s = time.monotonic()
        device_mailbox.enqueue_wait(mailbox, 1, 20.0 if aborted else 0.2, out_BK)
        assert out_BK.unique().tolist() == [-1]
        assert time.monotonic() - begin_s < 12
        assert eventually(lambda: int(mailbox.area(1).outcome[0])) == (ABORTED if aborted else TIMED_OUT)
        mailbox.answer(1, np.full((2, SHAPE.max_depth), 5, np.int32), 0)
        device_mailbox.enqueue_wait(mailbox, 1, 0.2, out_BK)
        assert out_BK.unique().tolist() == [5], "an answer that is there counts even when aborted"
        assert eventually(lambda: int(mailbox.area(1).outcome[0]) == REACHED)


@DEVICES
def test_a_step_from_device_tensors_is_whole_when_it_is_ready(device: str) -> None:
    host_4B = np.array([[0, 1], [0, 0], [0, 3], [1, 1]], np.int32)
    with pinned_mailbox(device) as mailbox:
        for step in range(1, 5):
            hidden_RH = torch.randn(5, CONFIG.hidden_size, dtype=torch.float64, device=device)
            mailbox.write_host_part(step, host_4B, 5)
            two = torch.full((2,), 2, dtype=torch.int32, device=device)
            tokens_R = torch.arange(5, dtype=torch.int32, device=device)
            device_mailbox.enqueue_send(mailbox, step, two, two, tokens_R, hidden_RH)
            eventually(lambda step=step: mailbox.is_ready(step))
            found = mailbox.read_step(step, 0)
            assert torch.equal(found.hidden_RH, hidden_RH.cpu())
            assert (found.next_tokens_R.tolist(), found.start_B.tolist()) == (list(range(5)), [2, 2])
            mailbox.answer(step, np.zeros((2, SHAPE.max_depth), np.int32), 0)
