"""The target's side of a ring: what a step leaves there, outcomes of a wait for drafts, what is looked at first, and
that a word written meanwhile ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.drafter.protocol import TargetShape
from peagle.drafter.shared_memory import ABORTED, REACHED, TIMED_OUT, Ring, Slot, publish_step, wait_for_drafts
from tests.support.kernel_device import DEVICE, needs_kernel, twin

Wait = Callable[..., None]
plain_wait = twin(wait_for_drafts)
WAITS = [pytest.param(plain_wait, id="twin"), pytest.param(wait_for_drafts, id="kernel", marks=needs_kernel)]
PUBLISHERS = [pytest.param(twin(publish_step), id="twin"), pytest.param(publish_step, id="kernel", marks=needs_kernel)]
ENOUGH_NS = 20_000_000_000


RINGS: list[Ring] = []
"""As long as memory is registered with CUDA it must not be freed: the next mapping may lie there."""


def new_slot(max_num_requests: int, max_draft_tokens: int) -> Slot:
    """Of a ring, pinned where a GPU reads it; it lives as long as the tests."""
    ring = Ring.create(TargetShape(1, "float32", max_draft_tokens, max_num_requests, 9000, 100))
    RINGS.append(ring)
    if DEVICE == "cuda":
        ring.pin(torch.device(DEVICE), will_wait=False)
    return ring.slot(0)


DRAFTS_BK = torch.tensor([[5, 6, -1], [-1, -1, -1], [9, 9, 9]], dtype=torch.int32)


class WaitCase:
    """A wait for the drafts of the first requests."""

    def __init__(
        self, wait: Wait, done: int = 0, abort: int = 0, drafts_BK: Tensor = DRAFTS_BK, num_waiting: int = 2
    ) -> None:
        self._wait, self.slot, other = wait, new_slot(*drafts_BK.shape), new_slot(1, 1)
        self.done_1, self.abort_1, self.outcome_2 = self.slot.done, other.done, self.slot.outcome
        self.done_1[0], self.abort_1[0] = done, abort
        self.slot.drafts_BK[:] = drafts_BK.numpy()
        device = "cpu" if wait is plain_wait else DEVICE
        self.out_BK = torch.full((num_waiting, drafts_BK.shape[1]), 77, device=device)

    def enqueue(self, number: int, timeout_ns: int) -> None:
        self._wait(self.slot, self.abort_1, number, timeout_ns, self.out_BK)

    def __call__(self, number: int, timeout_ns: int) -> list[list[int]]:
        """The drafts found."""
        self.enqueue(number, timeout_ns)
        return self.out_BK.tolist()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("done", "abort", "timeout_ns", "expected"),
    [
        (7, 0, ENOUGH_NS, REACHED),
        (8, 0, ENOUGH_NS, REACHED),
        (7, 1, 0, REACHED),
        (6, 1, ENOUGH_NS, ABORTED),
        (6, 1, 0, ABORTED),
        (6, 0, 500, TIMED_OUT),
        (6, 0, 0, TIMED_OUT),
        (-1, 0, 100, TIMED_OUT),
    ],
)
def test_outcome(wait: Wait, done: int, abort: int, timeout_ns: int, expected: int) -> None:
    case = WaitCase(wait, done, abort)
    drafts_BK = case(7, timeout_ns)
    assert drafts_BK == ([[5, 6, 0], [0, 0, 0]] if expected == REACHED else [[0, 0, 0]] * 2)
    assert case.outcome_2[0] == expected
    assert (case.outcome_2[1] >= timeout_ns) == (expected == TIMED_OUT or timeout_ns == 0)


@pytest.mark.parametrize("wait", WAITS)
def test_more_drafts_than_are_moved_at_once(wait: Wait) -> None:
    drafts_BK = torch.arange(-1, 4199, dtype=torch.int32).view(600, 7)
    case = WaitCase(wait, done=1, drafts_BK=drafts_BK, num_waiting=500)
    assert case(1, 0) == drafts_BK[:500].clamp(min=0).tolist()


def test_sequence_numbers_beyond_32_bits_are_compared_whole() -> None:
    case = WaitCase(wait_for_drafts, done=1 << 40)
    case((1 << 40) + 1, 10)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert case.outcome_2[0] == TIMED_OUT
    case(1 << 40, 10)
    assert case.outcome_2[0] == REACHED


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("which", ["done", "abort"])
def test_a_word_written_meanwhile_ends_the_wait(wait: Wait, which: str) -> None:
    if wait is wait_for_drafts and DEVICE == "cuda":
        WaitCase(wait, done=1)(1, ENOUGH_NS)  # compiled before the clock runs
    case = WaitCase(wait)
    written = case.done_1 if which == "done" else case.abort_1
    timer = threading.Timer(0.5, lambda: written.fill(3))  # the wait has begun by then, on a busy machine too
    timer.start()
    case(3, ENOUGH_NS)
    assert case.outcome_2[0] == (REACHED if which == "done" else ABORTED)
    assert wait is not plain_wait or case.outcome_2[1] >= 10_000_000
    timer.join()


@pytest.mark.gpu
def test_the_host_goes_on_while_a_wait_holds_the_stream() -> None:
    WaitCase(wait_for_drafts, done=1)(1, ENOUGH_NS)  # compiled before
    case, done = WaitCase(wait_for_drafts, done=1), torch.cuda.Event()
    case.enqueue(2, ENOUGH_NS)
    done.record()
    time.sleep(0.02)
    assert not done.query(), "the stream did not wait"
    case.slot.drafts_BK[0, 0] = 8  # as a drafter: the drafts, then the word
    case.done_1[0] = 2
    done.synchronize()
    assert case.outcome_2[0] == REACHED
    assert 10_000_000 < case.outcome_2[1] < ENOUGH_NS
    assert case.out_BK.tolist() == [[8, 6, 0], [0, 0, 0]]


@pytest.mark.parametrize("publish", PUBLISHERS)
@pytest.mark.parametrize("count", [0, 1, 23, 4560])
def test_a_step_s_integers_lie_one_after_another_and_nothing_behind_them_changes(
    publish: Callable[..., None], count: int
) -> None:
    slot = new_slot(3, 3)
    slot.integers[:] = -5
    publish(slot, 1 << 40, torch.arange(count, dtype=torch.int32, device=DEVICE))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert slot.integers.tolist() == [*range(count)] + [-5] * (len(slot.integers) - count)
    assert slot.ready[0] == 1 << 40
