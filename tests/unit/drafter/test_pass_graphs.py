"""The pass on a GPU: a packed batch read back, graphs against eager launches and against the sessions; padding, buffers
and the way back."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from triton import knobs

from peagle.drafter.graphs import NUM_BUFFERS, PER_REQUEST, GraphKey, PassLayout
from tests.support.head_factory import CONFIG, random_drafter
from tests.support.pass_requests import MAX_DEPTH, STEPS, SWITCHES, Requests, Step, run, token_ids

FEW = list(itertools.product((8, 16, 32), (2, 3), (1, MAX_DEPTH)))


def on_gpu(name: str = "plain", num_requests: int = 3) -> Requests:
    return Requests(random_drafter(SWITCHES[name]).float().cuda(), num_requests)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("keys", [[], FEW, None], ids=["eager", "few sizes", "all sizes"])
def test_drafts_equal_the_sessions(name: str, keys: list[GraphKey] | None) -> None:
    requests = on_gpu(name)
    parallel_pass = requests.new_pass("cuda", graph_keys=keys)
    assert (parallel_pass.warm_up() > 0) == (keys != [])
    for steps in STEPS:
        expected = [requests.expected(step) for step in steps]
        assert token_ids(run(parallel_pass, requests.batch(steps))).tolist() == expected


@pytest.mark.gpu
def test_padded_requests_and_rows_touch_nothing() -> None:
    """Graphs for three requests and 32 rows, replayed with one request of few rows, between steps of the others."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda", graph_keys=[(64, 3, MAX_DEPTH)])
    assert parallel_pass.warm_up() == 1
    for steps in STEPS:
        for step in steps:
            assert token_ids(run(parallel_pass, requests.batch([step]))).tolist() == [requests.expected(step)]


@pytest.mark.gpu
def test_launches_may_overtake_their_answers() -> None:
    """More passes under way than there are buffers; each answer is of its own pass, whenever it is asked for."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    parallel_pass.warm_up()
    steps = [Step(0, position, 1, 1 + position % MAX_DEPTH) for position in range(3 * NUM_BUFFERS)]
    pinned = [requests.batch([step], num_rejected=0) for step in steps]
    pending = [parallel_pass.launch(batch) for batch in pinned]
    expected = [requests.expected(step)[: step.depth] for step in steps]
    assert [token_ids(drafts())[0].tolist() for drafts in reversed(pending)] == expected[::-1]


@pytest.mark.gpu
def test_after_warm_up_no_batch_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton makes kernels of their own for sizes of 1 and multiples of 16, which a prompt may or may not have."""
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    parallel_pass.warm_up()
    batches = [[Step(0, 0, length, depth)] for length in (1, 12, 15, 16, 17, 31) for depth in (0, 1, 3, MAX_DEPTH)]
    batches += [[Step(0, 31, 1, 1), Step(1, 0, length, 5), Step(2, 0, 2, 0)] for length in (1, 9, 16, 40)]
    compiled: list[object] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **made: compiled.append(made.get("fn")))
    for steps in batches:
        run(parallel_pass, requests.batch(steps))
    assert not compiled


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
        found += token_ids(run(parallel_pass, requests.batch(steps))).tolist()
    same = np.array(found) == np.array(expected)
    assert same[np.array(expected) >= 0].mean() > 0.7


# Without a GPU


@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_a_packed_batch_drafts_as_the_batch_does(num_padding: int) -> None:
    requests = Requests(random_drafter(CONFIG).float(), 3)
    parallel_pass = requests.new_pass(max_num_requests=3 + num_padding)
    layout = PassLayout(parallel_pass.limits)
    # What an earlier batch left must not matter.
    buffer = np.full(layout.num_integers, -12345, np.int32)
    blocks_BN = torch.full((3 + num_padding, parallel_pass.limits.max_blocks), -12345, dtype=torch.int32)
    for steps in STEPS:
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps)
        padded = len(steps) + num_padding
        blocks = layout.pack(batch, buffer)
        moved = torch.full((layout.num_integers,), -777, dtype=torch.int32)
        moved[: blocks.stop] = torch.from_numpy(buffer[: blocks.stop])
        given, width = batch.block_table_BN.shape
        blocks_BN[:given, :width] = moved[blocks].view(given, width)
        inputs = layout.inputs(moved, padded, blocks_BN)
        found_BK = parallel_pass.compute(inputs, batch.num_rows + 5, MAX_DEPTH)
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
    assert len(inputs.addresses_R) == len(inputs.next_tokens_R) == limits.max_num_rows
