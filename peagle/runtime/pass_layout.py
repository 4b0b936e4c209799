"""Where the integers of a pass lie in one buffer: written by the host, moved by one copy, read by the pass in place.

For n requests, those that pad the batch included, one area after another, each from a multiple of 16 bytes on:

    columns    5 x n     start, valid rows, row offset, depth, cache start
    blocks     n x N     block tables, N columns wide whatever the batch uses; or, where that is much to move, as many
                         columns as it uses, to be copied to their place on the device (`blocks_apart`)
    records    R x 2     int64: a payload row's address and the token after it

Places follow from n alone, so a captured graph finds them again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.runtime.pass_batch import Int32Array, PassBatch, PassInputs, PassLimits

PER_REQUEST = ("start_B", "num_valid_B", "row_offset_B", "depth_B", "cache_start_B")
MAX_BLOCKS_IN_PLACE = 1 << 14  # 64 KiB: some 3 us over the bus, less than another copy takes to launch
_RECORD = 4  # int32 of a record


class PassLayout:
    """Of passes within these limits."""

    def __init__(self, limits: PassLimits) -> None:
        self._limits = limits
        self.num_integers = self._records_at(limits.max_num_requests) + _RECORD * limits.max_payload_rows

    def blocks_apart(self, num_requests: int) -> bool:
        """Whether the block tables of so many requests travel narrow, and are copied to their place afterwards."""
        return num_requests * self._limits.max_blocks > MAX_BLOCKS_IN_PLACE

    def pack(self, batch: PassBatch, addresses_R: npt.NDArray[np.int64], into: Int32Array, num_requests: int) -> int:
        """Write a batch, padded to num_requests by such without rows; returns how many integers are to be moved.

        addresses_R: int64, of the payload's rows. Block tables that travel narrow are [batch's requests, its width].
        """
        given, width = batch.num_requests, _aligned(num_requests)
        columns = into[: len(PER_REQUEST) * width].reshape(len(PER_REQUEST), width)
        for column, name in zip(columns, PER_REQUEST, strict=True):
            column[:given] = getattr(batch, name)
        columns[:, given:] = 0
        blocks, first = batch.block_table_BN, columns.size
        if self.blocks_apart(num_requests):
            into[first : first + blocks.size] = blocks.reshape(-1)
        else:
            room = into[first : first + num_requests * self._limits.max_blocks].reshape(num_requests, -1)
            room[:given, : blocks.shape[1]] = blocks
        first, num_rows = self._records_at(num_requests), len(batch.next_tokens_R)
        records = into[first : first + _RECORD * num_rows].view(np.int64).reshape(num_rows, 2)
        records[:, 0] = addresses_R
        records[:, 1] = batch.next_tokens_R
        return first + _RECORD * num_rows

    def narrow_blocks(self, integers: Tensor, num_requests: int, given: int, width: int) -> Tensor:
        """[given, width] block tables that travelled narrow, where they arrived."""
        first = len(PER_REQUEST) * _aligned(num_requests)
        return integers[first : first + given * width].view(given, width)

    def inputs(self, integers: Tensor, num_requests: int, blocks_apart_BN: Tensor) -> PassInputs:
        """Views of what `pack` wrote. blocks_apart_BN: where block tables that travelled narrow are copied to."""
        width, max_blocks = _aligned(num_requests), self._limits.max_blocks
        first = len(PER_REQUEST) * width
        columns = integers[:first].view(len(PER_REQUEST), width)[:, :num_requests]
        if self.blocks_apart(num_requests):
            blocks_BN = blocks_apart_BN[:num_requests]
        else:
            blocks_BN = integers[first : first + num_requests * max_blocks].view(num_requests, max_blocks)
        first = self._records_at(num_requests)
        records = integers[first : first + _RECORD * self._limits.max_payload_rows].view(torch.int64).view(-1, 2)
        return PassInputs(
            **dict(zip(PER_REQUEST, columns, strict=True)),
            next_tokens_R=records[:, 1],
            block_table_BN=blocks_BN,
            addresses_R=records[:, 0],
        )

    def _records_at(self, num_requests: int) -> int:
        return len(PER_REQUEST) * _aligned(num_requests) + _aligned(num_requests * self._limits.max_blocks)


def _aligned(num_integers: int) -> int:
    """Rounded up to 16 bytes: Triton compiles a kernel again for a pointer that is not aligned so."""
    return -(-num_integers // 4) * 4
