"""The target's side of a mailbox: what a step leaves there, outcomes of a wait for drafts, what is looked at first, and
that a word written meanwhile ends the wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from peagle.drafter.drafts import MAX_VOCABULARY, pack, unpack
from peagle.drafter.mailbox import (
    ABORTED,
    REACHED,
    TIMED_OUT,
    StepWords,
    copy_payload,
    post_step,
    take_drafts,
)
from tests.support.kernel_device import DEVICE, needs_kernel, twin

Take = Callable[[Tensor, Tensor, Tensor], None]
plain_take = twin(take_drafts)
TAKES = [pytest.param(plain_take, id="twin"), pytest.param(take_drafts, id="kernel", marks=needs_kernel)]
POSTS = [pytest.param(twin(post_step), id="twin"), pytest.param(post_step, id="kernel", marks=needs_kernel)]
COPIES = [pytest.param(twin(copy_payload), id="twin"), pytest.param(copy_payload, id="kernel", marks=needs_kernel)]
ENOUGH_NS = 20_000_000_000


def pinned(tensor: Tensor) -> Tensor:
    """Host memory, pinned where a GPU reads it."""
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


def words_of(device: str, **values: int | Tensor) -> Tensor:
    """`StepWords` on the device; addresses by the tensors there, 0 for others."""
    numbers = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in values.items()}
    words = StepWords(*[0] * len(StepWords._fields))._replace(**numbers)
    return torch.tensor(words, dtype=torch.int64, device=device)


class Wait:
    """A wait for the drafts of two requests, which lie in memory for three; those of chance 0 are token ids."""

    def __init__(self, take: Take, done: int = 0, abort: int = 0) -> None:
        self._take = take
        self.done_1, self.abort_1 = (pinned(torch.tensor([value], dtype=torch.int64)) for value in (done, abort))
        self.drafts_BK = pinned(torch.tensor([[5, 6, -1], [-1, -1, -1], [9, 9, 9]], dtype=torch.int32))
        self.outcome_2 = pinned(torch.zeros(2, dtype=torch.int64))
        self.out_BK = torch.full((2, 3), 77, device="cpu" if take is plain_take else DEVICE)
        self.chance_BK = self.out_BK.float()

    def enqueue(self, number: int, timeout_ns: int, num_waiting: int | None = None) -> None:
        words_W = words_of(
            str(self.out_BK.device),
            done=self.done_1,
            abort=self.abort_1,
            drafts=self.drafts_BK,
            outcome=self.outcome_2,
            number=number,
            num_waiting=len(self.out_BK) if num_waiting is None else num_waiting,
            timeout_ns=timeout_ns,
        )
        self._take(words_W, self.out_BK, self.chance_BK)

    def __call__(self, number: int, timeout_ns: int) -> list[list[int]]:
        """The drafts found."""
        self.enqueue(number, timeout_ns)
        return self.out_BK.tolist()


@pytest.mark.parametrize("take", TAKES)
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
def test_outcome(take: Take, done: int, abort: int, timeout_ns: int, expected: int) -> None:
    wait = Wait(take, done, abort)
    drafts_BK = wait(7, timeout_ns)
    assert drafts_BK == ([[5, 6, 0], [0, 0, 0]] if expected == REACHED else [[0, 0, 0]] * 2)
    assert wait.outcome_2[0].item() == expected
    assert (wait.outcome_2[1].item() >= timeout_ns) == (expected == TIMED_OUT or timeout_ns == 0)


@pytest.mark.parametrize("take", TAKES)
def test_more_drafts_than_are_moved_at_once(take: Take) -> None:
    wait = Wait(take, done=1)
    wait.drafts_BK = pinned(torch.arange(-1, 4199, dtype=torch.int32).view(600, 7))
    wait.out_BK = wait.out_BK.new_full((500, 7), 77)
    wait.chance_BK = wait.out_BK.float()
    assert wait(1, 0) == wait.drafts_BK[:500].clamp(min=0).tolist()


@pytest.mark.parametrize("take", TAKES)
def test_drafts_come_with_their_chances(take: Take) -> None:
    wait, ids_BK = Wait(take, done=1), torch.tensor([[5, MAX_VOCABULARY - 1, 0], [7, 8, 9]])
    wait.drafts_BK = pinned(pack(ids_BK, torch.tensor([[0.25, 1.0, 0.0], [0.5, 0.75, 1e-9]])))
    wait.drafts_BK[0, 2] = -1
    assert wait(1, 0) == ids_BK.tolist()
    assert torch.equal(wait.chance_BK.cpu(), unpack(wait.drafts_BK)[1])
    torch.testing.assert_close(wait.chance_BK[:, 0].cpu(), torch.tensor([0.25, 0.5]), rtol=0.0, atol=3e-4)
    wait(2, 0)
    assert not wait.out_BK.any()
    assert not wait.chance_BK.any()


@pytest.mark.parametrize("take", TAKES)
def test_rows_of_others_in_a_buffer_stay(take: Take) -> None:
    wait = Wait(take, done=1)
    wait.enqueue(1, 0, num_waiting=1)
    assert wait.out_BK.tolist() == [[5, 6, 0], [77] * 3]
    assert wait.chance_BK.tolist() == [[0.0] * 3, [77.0] * 3]


def test_sequence_numbers_beyond_32_bits_are_compared_whole() -> None:
    wait = Wait(take_drafts, done=1 << 40)
    wait((1 << 40) + 1, 10)
    assert wait.outcome_2[0].item() == TIMED_OUT
    wait(1 << 40, 10)
    assert wait.outcome_2[0].item() == REACHED


@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("which", ["done", "abort"])
def test_a_word_written_meanwhile_ends_the_wait(take: Take, which: str) -> None:
    if take is take_drafts and DEVICE == "cuda":
        Wait(take, done=1)(1, ENOUGH_NS)  # compiled before the clock runs
    wait = Wait(take)
    written = wait.done_1 if which == "done" else wait.abort_1
    timer = threading.Timer(0.5, lambda: written.fill_(3))  # the wait has begun by then, on a busy machine too
    timer.start()
    wait(3, ENOUGH_NS)
    assert wait.outcome_2[0].item() == (REACHED if which == "done" else ABORTED)
    assert take is not plain_take or wait.outcome_2[1].item() >= 10_000_000
    timer.join()


@pytest.mark.gpu
def test_the_host_goes_on_while_a_wait_holds_the_stream() -> None:
    Wait(take_drafts, done=1)(1, ENOUGH_NS)  # compiled before
    wait, done = Wait(take_drafts, done=1), torch.cuda.Event()
    wait.enqueue(2, ENOUGH_NS)
    done.record()
    time.sleep(0.02)
    assert not done.query(), "the stream did not wait"
    wait.drafts_BK[0, 0] = 8  # as a drafter: the drafts, then the word
    wait.done_1.fill_(2)
    done.synchronize()
    assert wait.outcome_2[0].item() == REACHED
    assert 10_000_000 < wait.outcome_2[1].item() < ENOUGH_NS
    assert wait.out_BK.tolist() == [[8, 6, 0], [0, 0, 0]]


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize(("num_requests", "num_rows"), [(0, 0), (1, 1), (3, 17), (1030, 2500)])
def test_a_step_s_integers_lie_one_after_another_and_nothing_behind_them_changes(
    post: Callable[..., None], num_requests: int, num_rows: int
) -> None:
    ready_1, device_part = (
        pinned(torch.full((size,), -5, dtype=dtype)) for size, dtype in ((1, torch.int64), (9000, torch.int32))
    )
    count = 2 * num_requests + num_rows
    values = torch.arange(count + 3, dtype=torch.int32, device=DEVICE)
    sizes = {"num_requests": num_requests, "num_rows": num_rows}
    post(words_of(DEVICE, device_part=device_part, ready=ready_1, number=1 << 40, **sizes), values)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert device_part.tolist() == [*range(count)] + [-5] * (9000 - count)
    assert ready_1.item() == 1 << 40


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_padded", "hidden_size"), [(0, 1, 6), (1, 8, 6), (7, 16, 1536), (5, 5, 1)])
def test_as_many_rows_travel_as_the_words_say(
    copy: Callable[..., None], dtype: torch.dtype, num_rows: int, num_padded: int, hidden_size: int
) -> None:
    hidden_RH = torch.randn(num_padded, hidden_size, device=DEVICE).to(dtype)
    payload_RH = pinned(torch.full((num_padded + 1, hidden_size), 5.0, dtype=dtype))
    sources_R = torch.arange(num_padded, dtype=torch.int32, device=DEVICE)
    copy(words_of(DEVICE, payload=payload_RH, num_rows=num_rows), hidden_RH, sources_R)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(payload_RH[:num_rows], hidden_RH[:num_rows].cpu())
    assert payload_RH[num_rows:].eq(5).all()


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("hidden_size", [6, 1536, 4100])
def test_more_rows_travel_than_there_are_where_some_stay_empty(copy: Callable[..., None], hidden_size: int) -> None:
    hidden_NH = torch.randn(3, hidden_size, device=DEVICE)
    payload_RH = pinned(torch.full((12, hidden_size), 5.0))
    sources = [0, -1, -1, 1, -1, 2, -1, -1, -1]
    sources_R = torch.tensor([*sources, 1, 1], dtype=torch.int32, device=DEVICE)
    copy(words_of(DEVICE, payload=payload_RH, num_rows=len(sources)), hidden_NH, sources_R)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    expected_RH = torch.full((12, hidden_size), 5.0)
    expected_RH[[0, 3, 5]] = hidden_NH.cpu()
    assert torch.equal(payload_RH, expected_RH)
