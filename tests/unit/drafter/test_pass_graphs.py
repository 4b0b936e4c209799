"""The pass on a GPU: a packed batch read back, graphs against eager launches and against the sessions; padding, areas
and the way back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from peagle.drafter import armed, graphs
from peagle.drafter.armed import ANSWERED, CANCELLED, REJECTED, ArmedPass, armed_words
from peagle.drafter.drafts import token_ids
from peagle.drafter.graphs import NUM_AREAS, GraphRunner, GraphSizes, PassLayout
from peagle.drafter.mailbox import TIMED_OUT, Mailbox
from peagle.drafter.parallel_pass import PER_REQUEST, ParallelPass, PassBatch
from peagle.drafter.protocol import TargetShape
from tests.support.head_factory import CONFIG, random_drafter
from tests.support.pass_requests import MAX_DEPTH, STEPS, SWITCHES, Requests, Step
from tests.support.transport_harness import eventually

SIZES = GraphSizes(rows=(8, 16, 32), requests=(2, 3), depths=(1, MAX_DEPTH))
NO_GRAPHS = GraphSizes(rows=(), requests=(), depths=())


def on_gpu(name: str = "plain", num_requests: int = 3) -> Requests:
    return Requests(random_drafter(SWITCHES[name]).float().cuda(), num_requests)


def runner_of(parallel_pass: ParallelPass) -> GraphRunner:
    assert parallel_pass._runner is not None
    return parallel_pass._runner


@pytest.mark.gpu
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("sizes", [NO_GRAPHS, SIZES, None], ids=["eager", "few sizes", "all sizes"])
def test_drafts_equal_the_sessions(name: str, sizes: GraphSizes | None) -> None:
    requests = on_gpu(name)
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        assert token_ids(parallel_pass.run(requests.batch(steps, num_pieces=1 + number % 3))).tolist() == expected
    assert (len(runner_of(parallel_pass)._graphs) > 0) == (sizes is not NO_GRAPHS)


@pytest.mark.gpu
def test_padded_requests_and_rows_touch_nothing() -> None:
    """Graphs for three requests and 32 rows, replayed with one request of few rows, between steps of the others."""
    requests = on_gpu()
    sizes = GraphSizes(rows=(64,), requests=(3,), depths=(MAX_DEPTH,))
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for steps in STEPS:
        for step in steps:
            assert token_ids(parallel_pass.run(requests.batch([step]))).tolist() == [requests.expected(step)]
    assert len(runner_of(parallel_pass)._graphs) == 1


@pytest.mark.gpu
def test_launches_may_overtake_their_answers() -> None:
    """More passes under way than there are areas; each answer is the one of its own pass, whenever it is asked for."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    steps = [Step(0, position, 1, 1 + position % MAX_DEPTH) for position in range(3 * NUM_AREAS)]
    pinned = [requests.batch([step], num_rejected=0) for step in steps]
    pending = [parallel_pass.launch(batch) for batch in pinned]
    expected = [[requests.expected(step)] for step in steps]
    assert [token_ids(drafts()).tolist() for drafts in reversed(pending)] == expected[::-1]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [NO_GRAPHS, SIZES, None], ids=["eager", "few sizes", "all sizes"])
def test_what_was_sent_ahead_drafts_as_the_whole_batch_does(sizes: GraphSizes | None) -> None:
    """At once, after other passes and after more that were sent ahead and never launched than there are areas."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps, num_pieces=1 + number % 2)
        batch = dataclasses.replace(batch, hidden=[piece.cpu().pin_memory() for piece in batch.hidden])
        unknown = np.full_like(batch.next_tokens_R, -99)
        early = dataclasses.replace(batch, num_valid_B=unknown[: len(steps)], next_tokens_R=unknown)
        ahead = parallel_pass.send_ahead(early)
        assert ahead is not None
        if number % 3 == 1:
            assert token_ids(parallel_pass.run(batch)).tolist() == expected
        if number % 3 == 2:
            for _ in range(NUM_AREAS + 1):
                parallel_pass.send_ahead(dataclasses.replace(early, block_table_BN=early.block_table_BN[::-1]))
        assert token_ids(parallel_pass.launch(batch, ahead)()).tolist() == expected


@pytest.mark.gpu
def test_after_warm_up_no_batch_compiles_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Triton makes kernels of their own for sizes of 1 and multiples of 16, which a prompt may or may not have."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    parallel_pass.warm_up()
    batches = [[Step(0, 0, length, depth)] for length in (1, 12, 15, 16, 17, 31) for depth in (0, 1, 3, MAX_DEPTH)]
    batches += [[Step(0, 31, 1, 1), Step(1, 0, length, 5), Step(2, 0, 2, 0)] for length in (1, 9, 16, 40)]
    graphs.warn_of_compilations()
    for steps in batches:
        batch = requests.batch(steps, num_pieces=1 + len(steps) // 2)
        pinned = [piece.cpu().pin_memory() for piece in batch.hidden]
        parallel_pass.run(dataclasses.replace(batch, hidden=pinned))
    assert "was compiled after warm-up" not in caplog.text


@pytest.mark.gpu
def test_in_bfloat16_most_drafts_are_those_of_float32() -> None:
    """Rounding may change some; a wrong row or position changes nearly all, whose chance of being right is 0.01."""
    requests = on_gpu()
    requests.drafter.bfloat16()
    requests = Requests(requests.drafter, 3)
    parallel_pass = requests.new_pass("cuda")
    found, expected = [], []
    for steps in STEPS:
        expected += [requests.expected(step) for step in steps]
        found += token_ids(parallel_pass.run(requests.batch(steps))).tolist()
    same = np.array(found) == np.array(expected)
    assert same[np.array(expected) >= 0].mean() > 0.7


# Passes that wait for their step, also without a GPU: there they run when the host looks


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Armed:
    """A pass with steps in a mailbox, three areas in turn."""

    def __init__(self, device: str, mailbox: Mailbox, requests: Requests) -> None:
        self.mailbox, self.requests, self.number = mailbox, requests, 0
        self.parallel_pass = requests.new_pass(device)
        self.parallel_pass.warm_up()

    def arm(self, steps: list[Step]) -> tuple[ArmedPass, PassBatch, int | None]:
        """The next step's pass, the batch that it is to run, and what was sent ahead of it."""
        self.number += 1
        batch = self.requests.batch(steps)
        (hidden_RH,) = batch.hidden
        payload_RH = self.mailbox.area(self.number).payload_RH[: len(hidden_RH)].fill_(float("nan"))
        most_B = np.diff(batch.row_offset_B, append=len(hidden_RH)).astype(np.int32)
        request_R = np.repeat(np.arange(len(steps), dtype=np.int32), most_B)
        early = dataclasses.replace(batch, num_valid_B=most_B, next_tokens_R=request_R, hidden=[payload_RH])
        ahead = self.parallel_pass.send_ahead(early)
        one = self.parallel_pass.arm(early, ahead, armed_words(self.mailbox, self.number, len(steps)))
        assert one is not None
        assert one.poll() == 0
        return one, batch, ahead

    def come(self, batch: PassBatch, first_start: int = 0) -> None:
        """Write the step, its first request's start so much later."""
        start_B, num_valid_B, tokens_R = (
            torch.from_numpy(values.copy()) for values in (batch.start_B, batch.num_valid_B, batch.next_tokens_R)
        )
        start_B[0] += first_start
        self.mailbox.write_device_part(self.number, start_B, num_valid_B, tokens_R, batch.hidden[0])

    def check_answer(self, steps: list[Step]) -> None:
        """Each request has the drafts of its session, in a row of the target's width."""
        expected = [[*self.requests.expected(step), -1] for step in steps]
        assert self.mailbox.is_done(self.number)
        assert token_ids(self.mailbox.read_drafts(self.number, len(steps))).tolist() == expected

    def check_launch(self, steps: list[Step], batch: PassBatch, ahead: int | None) -> None:
        """The usual way goes on where the armed pass has left everything."""
        assert not self.mailbox.is_done(self.number)
        payload_RH = self.mailbox.area(self.number).payload_RH[: len(batch.next_tokens_R)].copy_(batch.hidden[0])
        drafts_BK = self.parallel_pass.launch(dataclasses.replace(batch, hidden=[payload_RH]), ahead)()
        assert token_ids(drafts_BK).tolist() == [self.requests.expected(step) for step in steps]


@contextlib.contextmanager
def armed_on(device: str) -> Iterator[Armed]:
    requests = on_gpu() if device == "cuda" else Requests(random_drafter(CONFIG).float(), 3)
    mailbox = Mailbox.private(TargetShape(requests.reducer.hidden_size, "float32", MAX_DEPTH + 1, 3, 64, 99))
    if device == "cuda":
        mailbox.pin(torch.device(device), will_wait=False)
    yield Armed(device, mailbox, requests)
    if device == "cuda":
        torch.cuda.synchronize()
        mailbox.unpin(torch.device(device))


@DEVICES
def test_an_armed_pass_answers_its_step_as_a_launch_does(device: str) -> None:
    with armed_on(device) as case:
        for steps in STEPS:
            one, batch, _ = case.arm(steps)
            case.come(batch)
            assert eventually(one.poll) == ANSWERED
            case.check_answer(steps)
            if device == "cuda":
                assert case.mailbox.service_s(case.number) > 0
            # Running a batch twice leaves the same cache as running it once.
            assert token_ids(case.parallel_pass.run(batch)).tolist() == [case.requests.expected(step) for step in steps]


@DEVICES
@pytest.mark.parametrize("end", [CANCELLED, REJECTED, TIMED_OUT])
def test_an_armed_pass_that_does_not_answer_leaves_everything(
    device: str, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each step that comes as assumed; the same memory serves them all."""
    if end == TIMED_OUT:
        # On a GPU the kernel's own time is over long before the host's, which so is not what ends it.
        monkeypatch.setattr(armed if device == "cpu" else graphs, "TIMEOUT_S", 0.05)
    with armed_on(device) as case:
        for steps in STEPS:
            one, batch, ahead = case.arm(steps)
            if end == REJECTED:
                case.come(batch, first_start=1)
            found = one.settle() if end == CANCELLED else eventually(one.poll)
            assert found == end
            case.check_launch(steps, batch, ahead)


@DEVICES
def test_a_step_that_came_first_is_answered_although_it_is_called_off(device: str) -> None:
    with armed_on(device) as case:
        one, batch, _ = case.arm(STEPS[0])
        case.come(batch)
        eventually(lambda: device == "cpu" or case.mailbox.is_done(1))
        assert one.settle() == ANSWERED
        case.check_answer(STEPS[0])


# Without a GPU


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_a_packed_batch_drafts_as_the_batch_does(num_padding: int, ahead: bool) -> None:
    """ahead: its valid rows and tokens are packed and moved after the rest."""
    requests = Requests(random_drafter(CONFIG).float(), 3)
    parallel_pass = requests.new_pass(max_num_requests=3 + num_padding)
    layout = PassLayout(parallel_pass.limits)
    # What an earlier batch left must not matter.
    buffer = np.full(layout.num_integers, -12345, np.int32)
    blocks_BN = torch.full((3 + num_padding, parallel_pass.limits.max_blocks), -12345, dtype=torch.int32)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps, num_pieces=1 + number % 2)
        addresses = [piece[row].data_ptr() for piece in batch.hidden for row in range(len(piece))]
        padded = len(steps) + num_padding
        unknown = np.full_like(batch.next_tokens_R, -99)
        early = dataclasses.replace(batch, num_valid_B=unknown[: len(steps)], next_tokens_R=unknown) if ahead else batch
        blocks = layout.pack(early, np.array(addresses, np.int64), buffer)
        moved = torch.full((layout.num_integers,), -777, dtype=torch.int32)
        moved[: blocks.stop] = torch.from_numpy(buffer[: blocks.stop])
        if ahead:
            last = layout.pack_last(batch, buffer)
            moved[last] = torch.from_numpy(buffer[last])
        given, width = batch.block_table_BN.shape
        blocks_BN[:given, :width] = moved[blocks].view(given, width)
        inputs = layout.inputs(moved, padded, blocks_BN)
        found_BK = parallel_pass._compute(inputs, int(batch.rows_B().sum()) + 5, MAX_DEPTH)
        assert token_ids(found_BK[: len(steps)].cpu().numpy()).tolist() == expected
        assert (found_BK[len(steps) :] == -1).all(), "a request that pads the batch drafted"


@pytest.mark.parametrize("num_requests", [1, 2, 3, 6])
def test_places_begin_at_16_bytes_and_end_within_the_buffer(num_requests: int) -> None:
    limits = dataclasses.replace(Requests(random_drafter(CONFIG), 6).new_pass().limits, max_blocks=5)
    layout, blocks_BN = PassLayout(limits), torch.zeros(6, 5, dtype=torch.int32)
    buffer = torch.zeros(layout.num_integers, dtype=torch.int32)
    inputs = layout.inputs(buffer, num_requests, blocks_BN)
    for tensor in (*(getattr(inputs, name) for name in PER_REQUEST), inputs.addresses_R):
        assert (tensor.data_ptr() - buffer.data_ptr()) % 16 == 0
    assert inputs.block_table_BN.shape == (num_requests, 5)
    assert len(inputs.addresses_R) == len(inputs.next_tokens_R) == limits.max_payload_rows
