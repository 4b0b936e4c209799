"""What begins and ends an armed pass: a step comes as assumed or not, in time or not; what is read of it, and what is
answered. Through the words of a mailbox's area, as the drafter uses them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.drafter.armed import (
    ANSWERED,
    CANCELLED,
    REJECTED,
    ArmedPass,
    ArmedWords,
    answer_step,
    armed_words,
    await_step,
    new_flags,
    reset,
)
from peagle.drafter.mailbox import TIMED_OUT, Mailbox
from peagle.drafter.protocol import TargetShape
from tests.support.kernel_device import DEVICE, needs_kernel, twin

SHAPE = TargetShape(hidden_size=2, dtype="float32", max_depth=3, max_num_requests=600, max_num_rows=900, vocab_size=100)
NUMBER, FIRST_ROW, ENOUGH_S = 5, 2, 20.0
WAYS = pytest.mark.parametrize(
    ("wait", "answer"),
    [
        pytest.param(
            twin(await_step),
            twin(answer_step),
            id="twin",
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="tensors are the kernel's"),
        ),
        pytest.param(await_step, answer_step, id="kernel", marks=needs_kernel),
    ],
)
ON_ONE_AND_MANY = pytest.mark.parametrize("num_requests", [1, 3, 300])


@contextlib.contextmanager
def mailbox_here() -> Iterator[Mailbox]:
    mailbox = Mailbox.private(SHAPE)
    if DEVICE == "cuda":
        mailbox.pin(torch.device(DEVICE), will_wait=False)
    try:
        yield mailbox
    finally:
        if DEVICE == "cuda":
            mailbox.unpin(torch.device(DEVICE))


class Case:
    """A step of requests with up to 3, 1 and 2 rows in turn, of which 2, 0 and 1 come; all of them in the mailbox, but
    not ready. Tokens of rows that are not valid are no tokens."""

    def __init__(self, mailbox: Mailbox, num_requests: int, timeout_s: float = ENOUGH_S) -> None:
        self.area, self.flags = mailbox.area(NUMBER), new_flags(pinned=DEVICE == "cuda")
        turn_B = np.arange(num_requests) % 3
        self.most_B, self.valid_B = np.array([3, 1, 2])[turn_B], np.array([2, 0, 1])[turn_B]
        self.start_B, self.offset_B = 7 * np.arange(num_requests), np.cumsum(self.most_B) - self.most_B
        self.num_rows = int(self.most_B.sum())
        self.is_valid_R = np.concatenate(
            [np.arange(most) < valid for most, valid in zip(self.most_B, self.valid_B, strict=True)]
        )
        self.tokens_R = np.where(self.is_valid_R, np.arange(self.num_rows) % 100, [-7, 100][num_requests % 2])
        words = armed_words(mailbox, NUMBER, num_requests)._replace(first_row=FIRST_ROW, num_rows=self.num_rows)
        self.words = reset(self.flags, words, depth=0, timeout_s=timeout_s)
        self.words_W = torch.tensor(self.words, device=DEVICE)
        self.inputs = [torch.full((num_requests + 2,), 55, dtype=torch.int32, device=DEVICE) for _ in range(3)]
        for column, values in zip(self.inputs, (self.start_B, self.offset_B, self.most_B), strict=True):
            column[:num_requests] = torch.from_numpy(values)
        self.records_R2 = torch.full((self.num_rows + 2, 2), 55, device=DEVICE)
        self.records_R2[: self.num_rows, 1] = torch.from_numpy(np.repeat(np.arange(num_requests), self.most_B))

    def write(self, **changes: tuple[int, int]) -> None:
        """The device part, each field's value at one place another."""
        parts = {"start_B": self.start_B, "valid_B": self.valid_B, "tokens_R": self.tokens_R}
        for name, (place, value) in changes.items():
            parts[name] = parts[name].copy()
            parts[name][place] = value
        part = np.concatenate([parts["start_B"], parts["valid_B"], np.full(FIRST_ROW, -9), parts["tokens_R"]])
        self.area.device_part[: len(part)] = part

    def run(self, wait: Any) -> int:
        """The outcome. What lies behind the requests and rows stays."""
        wait(self.words_W, *self.inputs, self.records_R2[:, 1])
        assert [column[-2:].tolist() for column in self.inputs] == [[55, 55]] * 3
        assert self.records_R2[-2:].eq(55).all()
        assert self.records_R2[:, 0].eq(55).all()
        return ArmedWords(*self.words_W.tolist()).status

    @property
    def num_valid_B(self) -> list[int]:
        return self.inputs[2][:-2].tolist()


@WAYS
@ON_ONE_AND_MANY
def test_a_step_that_comes_as_assumed_is_read(wait: Any, answer: Any, num_requests: int) -> None:
    with mailbox_here() as mailbox:
        case = Case(mailbox, num_requests)
        case.write()
        case.area.ready[0] = NUMBER
        assert case.run(wait) == ANSWERED
        assert case.num_valid_B == case.valid_B.tolist()
        tokens_R = case.records_R2[:-2, 1].cpu().numpy()
        assert (tokens_R[case.is_valid_R] == case.tokens_R[case.is_valid_R]).all()
        assert (tokens_R[~case.is_valid_R] == 0).all()


@WAYS
@ON_ONE_AND_MANY
@pytest.mark.parametrize(
    ("name", "value"),
    [("start_B", -1), ("start_B", 10_000), ("valid_B", -1), ("valid_B", 4), ("tokens_R", -1), ("tokens_R", 100)],
)
@pytest.mark.parametrize("at_end", [False, True])
def test_a_step_that_comes_otherwise_is_not_for_this_pass(
    wait: Any, answer: Any, num_requests: int, name: str, value: int, at_end: bool
) -> None:
    with mailbox_here() as mailbox:
        case = Case(mailbox, num_requests)
        valid = np.flatnonzero(case.is_valid_R) if name == "tokens_R" else np.arange(num_requests)
        case.tokens_R %= 100  # so that none of the other rows is what is wrong
        case.write(**{name: (int(valid[-1 if at_end else 0]), value)})
        case.area.ready[0] = NUMBER
        assert case.run(wait) == REJECTED
        assert set(case.num_valid_B) == {0}


@WAYS
def test_a_step_without_a_row_is_not_for_this_pass(wait: Any, answer: Any) -> None:
    with mailbox_here() as mailbox:
        case = Case(mailbox, 3)
        case.valid_B[:] = 0
        case.write()
        case.area.ready[0] = NUMBER
        assert case.run(wait) == REJECTED


@WAYS
@pytest.mark.parametrize(
    ("ready", "cancel", "timeout_s", "expected"),
    [
        (NUMBER, 1, 0.0, ANSWERED),
        (NUMBER - 3, 1, ENOUGH_S, CANCELLED),
        (NUMBER - 3, 1, 0.0, CANCELLED),
        (NUMBER - 3, 0, 3e-7, TIMED_OUT),
    ],
)
def test_what_ends_the_wait(wait: Any, answer: Any, ready: int, cancel: int, timeout_s: float, expected: int) -> None:
    with mailbox_here() as mailbox:
        case = Case(mailbox, 3, timeout_s)
        case.write()
        case.area.ready[0] = ready
        if cancel:
            ArmedPass(case.flags, lambda: None).cancel()
        assert case.run(wait) == expected
        assert case.num_valid_B == (case.valid_B.tolist() if expected == ANSWERED else [0, 0, 0])


@WAYS
@pytest.mark.parametrize("comes", [True, False])
def test_a_word_written_meanwhile_ends_the_wait(wait: Any, answer: Any, comes: bool) -> None:
    with mailbox_here() as mailbox:
        if DEVICE == "cuda":
            Case(mailbox, 3, 0.0).run(wait)  # compiled before the clock runs
        case = Case(mailbox, 3)

        def act() -> None:
            case.write()
            if comes:
                case.area.ready[0] = NUMBER
            else:
                ArmedPass(case.flags, lambda: None).cancel()

        timer = threading.Timer(0.05, act)
        timer.start()
        assert case.run(wait) == (ANSWERED if comes else CANCELLED)
        timer.join()
        assert case.num_valid_B == (case.valid_B.tolist() if comes else [0, 0, 0])


@WAYS
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
@pytest.mark.parametrize("num_requests", [1, 250])
def test_drafts_are_answered_as_wide_as_the_target_wants_them(
    wait: Any, answer: Any, depth: int, num_requests: int
) -> None:
    """Of a pass that is padded to more requests, and drafts fewer or more."""
    with mailbox_here() as mailbox:
        case = Case(mailbox, num_requests)
        case.area.drafts_BK[:] = 77
        drafts_BK = torch.randint(-1, 100, (num_requests + 3, depth), dtype=torch.int32, device=DEVICE)
        answer_after(case, ANSWERED, depth, drafts_BK, answer)
        expected_BK = np.full((num_requests, 3), -1)
        expected_BK[:, : min(depth, 3)] = drafts_BK[:num_requests, :3].cpu()
        assert case.area.drafts_BK[:num_requests].tolist() == expected_BK.tolist()
        assert (case.area.drafts_BK[num_requests:] == 77).all()
        assert case.area.done[0] == NUMBER
        assert case.area.service_ns[0] >= 0
        assert ArmedPass(case.flags, lambda: None).poll() == ANSWERED


@WAYS
@pytest.mark.parametrize("status", [CANCELLED, TIMED_OUT, REJECTED])
def test_a_step_that_was_not_read_is_not_answered(wait: Any, answer: Any, status: int) -> None:
    with mailbox_here() as mailbox:
        case = Case(mailbox, 3)
        case.area.drafts_BK[:], case.area.service_ns[0] = 77, 77
        answer_after(case, status, 3, torch.ones(3, 3, dtype=torch.int32, device=DEVICE), answer)
        assert (case.area.drafts_BK == 77).all()
        assert (case.area.done[0], case.area.service_ns[0]) == (0, 77)
        assert ArmedPass(case.flags, lambda: None).poll() == status


def answer_after(case: Case, status: int, depth: int, drafts_BK: Tensor, answer: Any) -> None:
    answer(torch.tensor(case.words._replace(depth=depth, status=status), device=DEVICE), drafts_BK)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@WAYS
def test_words_of_one_step_say_nothing_to_the_next(wait: Any, answer: Any) -> None:
    """The flags of a pass that was cancelled serve the next one."""
    with mailbox_here() as mailbox:
        case = Case(mailbox, 3)
        ArmedPass(case.flags, lambda: None).cancel()
        assert case.run(wait) == CANCELLED
        answer(case.words_W, torch.ones(3, 3, dtype=torch.int32, device=DEVICE))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        next_case = Case(mailbox, 3, 0.0)
        next_case.flags = case.flags
        next_case.words_W.copy_(torch.tensor(reset(case.flags, next_case.words, depth=0, timeout_s=0.0)))
        assert ArmedPass(case.flags, lambda: None).poll() == 0
        assert next_case.run(wait) == TIMED_OUT


def test_an_outcome_that_does_not_come_is_asked_for_when_the_time_is_over() -> None:
    """As of a GPU that failed: then the host's own wait raises."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    armed = ArmedPass(new_flags(pinned=False), fail)
    assert armed.poll() == 0
    armed._latest_s = 0.0
    with pytest.raises(RuntimeError, match="illegal memory access"):
        armed.poll()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        armed.settle()
