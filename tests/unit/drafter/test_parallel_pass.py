"""One pass over a batch and a paged cache, against one `DraftSession` for each request."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from peagle.config import DrafterConfig
from peagle.drafter.graphs import graph_keys
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
