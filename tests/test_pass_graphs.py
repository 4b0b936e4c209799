"""The pass on a GPU: graphs against eager launches and against the sessions; padding, areas and the way back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from peagle.drafter import pass_batch as pass_layout
from peagle.drafter.graphs import compiled_kernels
from peagle.drafter.parallel_pass import ParallelPass
from peagle.drafter.graphs import NUM_AREAS, GraphRunner, GraphSizes
from tests.head_factory import random_drafter
from tests.pass_requests import MAX_DEPTH, STEPS, SWITCHES, Requests, Step

pytestmark = pytest.mark.gpu

SIZES = GraphSizes(rows=(8, 16, 32), requests=(2, 3), depths=(1, MAX_DEPTH))
NO_GRAPHS = GraphSizes(rows=(), requests=(), depths=())


def on_gpu(name: str = "plain", num_requests: int = 3) -> Requests:
    return Requests(random_drafter(SWITCHES[name]).float().cuda(), num_requests)


def runner_of(parallel_pass: ParallelPass) -> GraphRunner:
    assert parallel_pass._runner is not None
    return parallel_pass._runner


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("sizes", [NO_GRAPHS, SIZES, None], ids=["eager", "few sizes", "all sizes"])
def test_drafts_equal_the_sessions(name: str, sizes: GraphSizes | None) -> None:
    requests = on_gpu(name)
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        assert parallel_pass.run(requests.batch(steps, num_pieces=1 + number % 3)).tolist() == expected
    assert (runner_of(parallel_pass).num_graphs > 0) == (sizes is not NO_GRAPHS)


def test_padded_requests_and_rows_touch_nothing() -> None:
    """Graphs for three requests and 32 rows, replayed with one request of few rows, between steps of the others."""
    requests = on_gpu()
    sizes = GraphSizes(rows=(64,), requests=(3,), depths=(MAX_DEPTH,))
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for steps in STEPS:
        for step in steps:
            assert parallel_pass.run(requests.batch([step])).tolist() == [requests.expected(step)]
    assert runner_of(parallel_pass).num_graphs == 1


def test_launches_may_overtake_their_answers() -> None:
    """More passes under way than there are areas; each answer is the one of its own pass, whenever it is asked for."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    steps = [Step(0, position, 1, 1 + position % MAX_DEPTH) for position in range(3 * NUM_AREAS)]
    pinned = [requests.batch([step], num_rejected=0) for step in steps]
    pending = [parallel_pass.launch(batch) for batch in pinned]
    expected = [[requests.expected(step)] for step in steps]
    assert [one.wait().tolist() for one in reversed(pending)] == expected[::-1]
    assert all(one.ready() for one in pending)


def test_hidden_rows_in_pinned_memory_and_on_the_gpu() -> None:
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    steps = STEPS[0]
    expected = [requests.expected(step) for step in steps]
    batch = requests.batch(steps)
    assert isinstance(batch.hidden_RH, torch.Tensor)
    for hidden_RH in (batch.hidden_RH.cpu().pin_memory(), batch.hidden_RH.cpu(), batch.hidden_RH.cuda()):
        assert parallel_pass.run(dataclasses.replace(batch, hidden_RH=hidden_RH)).tolist() == expected


@pytest.mark.parametrize("num_pieces", [1, 3])
@pytest.mark.parametrize("max_blocks_in_place", [0, pass_layout.MAX_BLOCKS_IN_PLACE])
def test_rows_are_read_where_they_lie_in_pinned_memory(
    num_pieces: int, max_blocks_in_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's batches are padded to three requests, and some pieces are not pinned, or lie unaligned."""
    monkeypatch.setattr(pass_layout, "MAX_BLOCKS_IN_PLACE", max_blocks_in_place)
    requests = on_gpu()
    sizes = GraphSizes(rows=(64,), requests=(3,), depths=(MAX_DEPTH,))
    parallel_pass = requests.new_pass("cuda", graph_sizes=sizes)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps, num_pieces=num_pieces)
        pieces = [piece.cpu().pin_memory() for piece in batch.pieces]
        if number % 3 == 1:
            pieces[0] = pieces[0].clone()
        if number % 3 == 2:
            room = torch.empty(pieces[0].numel() + 1).pin_memory()[1:].view(pieces[0].shape)
            pieces[0] = room.copy_(pieces[0])
        assert parallel_pass.run(dataclasses.replace(batch, hidden_RH=pieces)).tolist() == expected
    assert runner_of(parallel_pass).num_graphs == 1


def test_a_payload_of_another_type_is_converted() -> None:
    requests = on_gpu()
    batch = requests.batch(STEPS[0])
    assert isinstance(batch.hidden_RH, torch.Tensor)
    batch = dataclasses.replace(batch, hidden_RH=batch.hidden_RH.double().cpu())
    assert requests.new_pass("cuda").run(batch).tolist() == [requests.expected(step) for step in STEPS[0]]


def test_warming_up_leaves_nothing_to_capture_and_changes_no_draft() -> None:
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    num_graphs = parallel_pass.warm_up()
    assert num_graphs == len(GraphSizes.of(parallel_pass.limits).full_batches())
    for steps in ([Step(0, 0, 3, 5), Step(1, 0, 1, 5), Step(2, 0, 6, 5)], [Step(0, 3, 1, 5), Step(1, 1, 2, 5)]):
        assert parallel_pass.run(requests.batch(steps)).tolist() == [requests.expected(step) for step in steps]
    assert runner_of(parallel_pass).num_graphs == num_graphs
    # A prompt beside drafts is no full batch: it runs on a graph that holds it, rather than wait for a capture.
    steps = [Step(2, 6, 33, 0), Step(0, 4, 2, 5)]
    runner = runner_of(parallel_pass)
    assert runner.sizes.key(33 + 2 + 4, 2, 5) not in runner._graphs
    assert runner._key_for(33 + 2 + 4, 2, 5) in runner._graphs
    assert parallel_pass.run(requests.batch(steps)).tolist() == [requests.expected(step) for step in steps]
    assert parallel_pass.warm_up() == num_graphs


def test_after_warm_up_no_batch_compiles_a_kernel() -> None:
    """Triton makes kernels of their own for sizes of 1 and multiples of 16, which a prompt may or may not have."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    parallel_pass.warm_up()
    batches = [[Step(0, 0, length, depth)] for length in (1, 12, 15, 16, 17, 31) for depth in (0, 1, 3, MAX_DEPTH)]
    batches += [[Step(0, 31, 1, 1), Step(1, 0, length, 5), Step(2, 0, 2, 0)] for length in (1, 9, 16, 40)]
    with compiled_kernels() as names:
        for steps in batches:
            batch = requests.batch(steps, num_pieces=1 + len(steps) // 2)
            pinned = [piece.cpu().pin_memory() for piece in batch.pieces]
            parallel_pass.run(dataclasses.replace(batch, hidden_RH=pinned))
    assert not names


def test_in_bfloat16_most_drafts_are_those_of_float32() -> None:
    """Rounding may change some; a wrong row or position changes nearly all, whose chance of being right is 0.01."""
    requests = on_gpu()
    requests.drafter.bfloat16()
    requests = Requests(requests.drafter, 3)
    parallel_pass = requests.new_pass("cuda")
    found, expected = [], []
    for steps in STEPS:
        expected += [requests.expected(step) for step in steps]
        found += parallel_pass.run(requests.batch(steps)).tolist()
    same = np.array(found) == np.array(expected)
    assert same[np.array(expected) >= 0].mean() > 0.7
