"""Waiting for a word: outcomes, what is looked at first, and that a word written meanwhile ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.drafter.mailbox import (
    ABORTED,
    REACHED,
    TIMED_OUT,
    wait_for_word,
)
from peagle.drafter.rows import INTERPRETED
from tests.kernel_device import DEVICE, needs_kernel, twin

Wait = Callable[[Tensor, int, Tensor, Tensor, int], None]
plain_wait = twin(wait_for_word)
WAITS = [
    pytest.param(plain_wait, id="twin"),
    pytest.param(wait_for_word, id="kernel", marks=needs_kernel),
]
ENOUGH_NS = 20_000_000_000


def words(*values: int) -> list[Tensor]:
    """Words of host memory, each int64 [1]; pinned where a GPU reads them."""
    made = [torch.tensor([value], dtype=torch.int64) for value in values]
    return [word.pin_memory() for word in made] if DEVICE == "cuda" else made


def status_of(wait: Wait) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device="cpu" if wait is plain_wait else DEVICE)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("word", "abort", "timeout_ns", "expected"),
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
def test_outcome(wait: Wait, word: int, abort: int, timeout_ns: int, expected: int) -> None:
    (word_1, abort_1), status_2 = words(word, abort), status_of(wait)
    wait(word_1, 7, abort_1, status_2, timeout_ns)
    assert status_2[0].item() == expected
    assert (status_2[1].item() >= timeout_ns) == (expected == TIMED_OUT or timeout_ns == 0)


def test_sequence_numbers_beyond_32_bits_are_compared_whole() -> None:
    (word_1, abort_1), status_2 = words(1 << 40, 0), status_of(wait_for_word)
    wait_for_word(word_1, (1 << 40) + 1, abort_1, status_2, 10)
    assert status_2[0].item() == TIMED_OUT
    wait_for_word(word_1, 1 << 40, abort_1, status_2, 10)
    assert status_2[0].item() == REACHED


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("which", ["word", "abort"])
def test_a_word_written_meanwhile_ends_the_wait(wait: Wait, which: str) -> None:
    if wait is wait_for_word and DEVICE == "cuda":
        wait(*words(1), 1, *words(0), status_of(wait), ENOUGH_NS)  # compiled before the clock runs
    (word_1, abort_1), status_2 = words(0, 0), status_of(wait)
    written = word_1 if which == "word" else abort_1
    timer = threading.Timer(0.05, lambda: written.fill_(3))
    timer.start()
    wait(word_1, 3, abort_1, status_2, ENOUGH_NS)
    assert status_2[0].item() == (REACHED if which == "word" else ABORTED)
    assert wait is not plain_wait or status_2[1].item() >= 10_000_000
    timer.join()


@pytest.mark.gpu
def test_the_host_goes_on_while_a_wait_holds_the_stream() -> None:
    (word_1, abort_1), status_2 = words(1, 0), status_of(wait_for_word)
    wait_for_word(word_1, 1, abort_1, status_2, ENOUGH_NS)  # compiled before
    done = torch.cuda.Event()
    wait_for_word(word_1, 2, abort_1, status_2, ENOUGH_NS)
    done.record()
    time.sleep(0.02)
    assert not done.query(), "the stream did not wait"
    word_1.fill_(2)
    done.synchronize()
    assert status_2[0].item() == REACHED
    assert 10_000_000 < status_2[1].item() < ENOUGH_NS


@needs_kernel
def test_dispatch_follows_the_status() -> None:
    (word_1, abort_1), status_2 = words(0, 0), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    wait_for_word(word_1, 1, abort_1, status_2, 30)
    # The interpreter's clock counts reads, so 30 of them show that the kernel ran.
    assert not INTERPRETED or status_2.tolist() == [TIMED_OUT, 30]
