"""One pass over a batch and a paged cache, against one `DraftSession` for each request."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from triton import knobs

from peagle.config import DrafterConfig
from peagle.drafter.graphs import GraphKey, empty_inputs, graph_keys, move
from peagle.drafter.parallel_pass import PassLimits
from peagle.model import Drafter
from tests.support.head_factory import CONFIG, random_drafter
from tests.support.pass_requests import MAX_DEPTH, STEPS, SWITCHES, Requests, Step, run

LIMITS = PassLimits(
    max_num_requests=128, max_num_rows=4096, max_blocks=64, num_blocks=512, block_size=16,
    max_draft_tokens=7,
)  # fmt: skip


def reduced(config: DrafterConfig) -> Drafter:
    """A random drafter with a draft vocabulary of every third token."""
    drafter = random_drafter(dataclasses.replace(config, draft_vocab_size=33))
    drafter.target_ids = torch.arange(33) * 3 + 1
    return drafter


@pytest.mark.parametrize("name", [*SWITCHES, "reduced"])
def test_drafts_equal_the_sessions(name: str) -> None:
    drafter = reduced(CONFIG) if name == "reduced" else random_drafter(SWITCHES[name])
    requests = Requests(drafter, 3)
    parallel_pass = requests.new_pass()
    for steps in STEPS:
        found = run(parallel_pass, requests.batch(steps))
        assert found.dtype == np.int32
        assert found.tolist() == [requests.expected(step) for step in steps]


def test_a_float32_drafter_on_a_cpu_multiplies_by_onednn() -> None:
    requests = Requests(random_drafter(CONFIG).float(), 3)
    parallel_pass = requests.new_pass()
    assert "forward" in vars(parallel_pass._drafter.lm_head)
    for steps in STEPS:
        assert run(parallel_pass, requests.batch(steps)).tolist() == [requests.expected(step) for step in steps]


def test_a_request_without_rows_gets_no_drafts() -> None:
    requests = Requests(random_drafter(CONFIG), 2)
    steps = [Step(0, 0, 0, 5), Step(1, 0, 6, 2)]
    found = run(requests.new_pass(), requests.batch(steps))
    assert found.tolist() == [[-1] * MAX_DEPTH, requests.expected(steps[1])]


def test_graphs_hold_every_batch_and_pad_drafting_ones_little() -> None:
    keys = graph_keys(LIMITS)
    assert {key[2] for key in keys} == {0, 1, 2, 4, 7}
    for num_rows, num_requests, most in itertools.product((1, 8, 9, 63, 1000, 1025, 4096), (1, 3, 65, 128), range(8)):
        wanted = num_rows, num_requests, most
        holding = [key for key in keys if all(have >= want for have, want in zip(key, wanted, strict=True))]
        assert holding
        if num_requests * most <= num_rows <= 1000:
            assert min(holding)[0] - num_rows <= max(8, num_rows / 4)


# ---- on a GPU by graphs, against eager launches and the sessions; and the batches that graphs pad


ONE = [(64, 3, MAX_DEPTH)]
"""A size with requests and rows that pad the batches: they must touch nothing."""
FEW = list(itertools.product((8, 16, 32), (2, 3), (1, MAX_DEPTH)))


def on_gpu(name: str = "plain", num_requests: int = 3) -> Requests:
    return Requests(random_drafter(SWITCHES[name]).float().cuda(), num_requests)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("keys", [[], ONE, FEW, None], ids=["eager", "padding", "few sizes", "all sizes"])
def test_on_a_gpu_drafts_equal_the_sessions(name: str, keys: list[GraphKey] | None) -> None:
    requests = on_gpu(name)
    parallel_pass = requests.new_pass("cuda", graph_keys=keys)
    assert (parallel_pass.warm_up() > 0) == (keys != [])
    for steps in STEPS:
        expected = [requests.expected(step) for step in steps]
        assert run(parallel_pass, requests.batch(steps)).tolist() == expected


@pytest.mark.gpu
def test_launches_may_overtake_their_answers() -> None:
    requests = on_gpu()
    parallel_pass = requests.new_pass("cuda")
    parallel_pass.warm_up()
    steps = [Step(0, position, 1, 1 + position % MAX_DEPTH) for position in range(12)]
    pinned = [requests.batch([step], num_rejected=0) for step in steps]
    pending = [parallel_pass.launch(batch) for batch in pinned]
    expected = [requests.expected(step)[: step.depth] for step in steps]  # in the order of the passes
    # An answer is as wide as its graph, and padded.
    found = [drafts()[0].tolist() for drafts in reversed(pending)][::-1]
    assert [drafts[: step.depth] for step, drafts in zip(steps, found, strict=True)] == expected


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
        found += run(parallel_pass, requests.batch(steps)).tolist()
    same = np.array(found) == np.array(expected)
    assert same[np.array(expected) >= 0].mean() > 0.7


# Without a GPU


@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_a_batch_at_the_places_of_the_largest_drafts_as_it_does(num_padding: int) -> None:
    requests = Requests(random_drafter(CONFIG).float(), 3)
    parallel_pass = requests.new_pass(max_num_requests=3 + num_padding)
    inputs = empty_inputs(parallel_pass.limits, torch.device("cpu"))
    for place in (inputs.start_B, inputs.num_drafts_B, inputs.num_valid_B, inputs.next_tokens_R):
        place.fill_(7)  # what an earlier batch left must not matter
    for steps in STEPS:
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps)
        move(batch, inputs)
        padded = inputs.first_requests(len(steps) + num_padding)
        found_BK = parallel_pass.compute(padded, batch.num_rows + 5, MAX_DEPTH)
        assert found_BK[: len(steps)].cpu().numpy().tolist() == expected
        assert (found_BK[len(steps) :] == -1).all(), "a request that pads the batch drafted"
