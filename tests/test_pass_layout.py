"""A batch packed into one buffer and read back by the pass, as on a GPU, drafts what the batch itself does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from peagle.drafter import pass_batch as pass_layout
from peagle.drafter.pass_batch import PassLayout
from tests.head_factory import CONFIG, random_drafter
from tests.pass_requests import MAX_DEPTH, STEPS, Requests


@pytest.mark.parametrize("num_padding", [0, 1, 3])
@pytest.mark.parametrize("max_blocks_in_place", [0, pass_layout.MAX_BLOCKS_IN_PLACE], ids=["apart", "in place"])
def test_a_packed_batch_drafts_as_the_batch_does(
    num_padding: int, max_blocks_in_place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_layout, "MAX_BLOCKS_IN_PLACE", max_blocks_in_place)
    requests = Requests(random_drafter(CONFIG).float(), 3)
    parallel_pass = requests.new_pass(max_num_requests=3 + num_padding)
    layout = PassLayout(parallel_pass.limits)
    # What an earlier batch left must not matter.
    buffer = np.full(layout.num_integers, -12345, np.int32)
    blocks_BN = torch.full((3 + num_padding, parallel_pass.limits.max_blocks), -12345, dtype=torch.int32)
    for number, steps in enumerate(STEPS):
        expected = [requests.expected(step) for step in steps]
        batch = requests.batch(steps, num_pieces=1 + number % 2)
        addresses = [piece[row].data_ptr() for piece in batch.pieces for row in range(len(piece))]
        padded = len(steps) + num_padding
        used = layout.pack(batch, np.array(addresses, np.int64), buffer, padded)
        moved = torch.full((layout.num_integers,), -777, dtype=torch.int32)
        moved[:used] = torch.from_numpy(buffer[:used])
        assert layout.blocks_apart(padded) == (max_blocks_in_place == 0)
        if layout.blocks_apart(padded):
            given, width = batch.block_table_BN.shape
            blocks_BN[:given, :width] = layout.narrow_blocks(moved, padded, given, width)
        inputs = layout.inputs(moved, padded, blocks_BN)
        found_BK = parallel_pass._compute(inputs, batch.num_rows() + 5, MAX_DEPTH)
        assert found_BK[: len(steps)].tolist() == expected
        assert (found_BK[len(steps) :] == -1).all(), "a request that pads the batch drafted"


@pytest.mark.parametrize("num_requests", [1, 2, 3, 6])
def test_places_begin_at_16_bytes_and_end_within_the_buffer(num_requests: int) -> None:
    limits = dataclasses.replace(Requests(random_drafter(CONFIG), 6).new_pass().limits, max_blocks=5)
    layout, blocks_BN = PassLayout(limits), torch.zeros(6, 5, dtype=torch.int32)
    buffer = torch.zeros(layout.num_integers, dtype=torch.int32)
    inputs = layout.inputs(buffer, num_requests, blocks_BN)
    tensors = [getattr(inputs, name) for name in (*pass_layout.PER_REQUEST, "block_table_BN")]
    assert inputs.addresses_R is not None
    for tensor in (*tensors, inputs.addresses_R):
        assert (tensor.data_ptr() - buffer.data_ptr()) % 16 == 0
    assert inputs.block_table_BN.shape == (num_requests, 5)
    assert len(inputs.addresses_R) == len(inputs.next_tokens_R) == limits.max_payload_rows
