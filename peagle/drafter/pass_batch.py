"""What one parallel pass is given: its requests, their rows and their cache blocks, checked before anything runs.

A wrong block or token would be a wild write or read on a GPU, which ends the process; here it is a ValueError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# ====================================================================================================
# What one parallel pass is given: its requests, their rows and their cache blocks, checked before anything runs.
#
# A wrong block or token would be a wild write or read on a GPU, which ends the process; here it is a ValueError.

Int32Array = npt.NDArray[np.int32]
_PER_REQUEST = ("start_B", "num_valid_B", "row_offset_B", "depth_B", "cache_start_B")


@dataclasses.dataclass(frozen=True)
class PassLimits:
    """The most that one pass takes.

    max_num_rows: rows of the pass, those of the mask token included. max_payload_rows: rows given, rejected ones
    included. max_blocks: columns of a block table that a request uses. max_depth: K.
    """

    max_num_requests: int
    max_num_rows: int
    max_payload_rows: int
    max_blocks: int
    num_blocks: int
    block_size: int
    max_depth: int
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ValueError(f"{field.name} = {value} must be at least 1")


@dataclasses.dataclass(frozen=True)
class PassBatch:
    """B requests of one pass; every array is int32 in host memory.

    start_B: position of a request's first row. What the cache holds from there on is overwritten.
    num_valid_B: n, rows given: positions start .. start + n - 1. With 0, the request gets no drafts.
    row_offset_B: where they begin in the payload.
    depth_B: drafts wanted, 0 .. max_depth; 0: the rows only enter the cache.
    cache_start_B: first position that is in the cache at all: 0, or later after a cold start; at most start.
    next_tokens_R: the token after each payload row.
    hidden_RH: reduced hidden states of the payload, one tensor or several whose rows follow each other. They may lie in
        pinned host memory, which is read until the drafts are there.
    block_table_BN: cache block of the positions [j * block_size, (j + 1) * block_size) in column j. A request needs
        blocks for the positions cache_start .. start + n + depth - 2: rows of the mask token take room as well.
    """

    start_B: Int32Array
    num_valid_B: Int32Array
    row_offset_B: Int32Array
    depth_B: Int32Array
    next_tokens_R: Int32Array
    hidden_RH: Tensor | Sequence[Tensor]
    block_table_BN: Int32Array
    cache_start_B: Int32Array

    @property
    def num_requests(self) -> int:
        return len(self.start_B)

    @property
    def pieces(self) -> list[Tensor]:
        """The tensors of the payload, without the empty ones."""
        pieces = [self.hidden_RH] if isinstance(self.hidden_RH, Tensor) else list(self.hidden_RH)
        return [piece for piece in pieces if len(piece)]

    def drafts_B(self) -> Int32Array:
        """Drafts that each request gets: `depth_B`, but 0 without rows."""
        if self.num_valid_B.all():
            return self.depth_B
        return np.where(self.num_valid_B > 0, self.depth_B, 0).astype(np.int32)

    def rows_B(self) -> Int32Array:
        """Rows that each request takes in the pass: n, and one of the mask token for each draft after the first."""
        return (self.num_valid_B + np.maximum(self.drafts_B() - 1, 0)).astype(np.int32)

    def num_rows(self) -> int:
        """Rows that the pass has for them together."""
        return int(self.num_valid_B.sum() + np.maximum(self.drafts_B() - 1, 0).sum())

    def check(self, limits: PassLimits) -> None:
        """Raise ValueError, naming the field, for a batch that the pass cannot take."""
        self._check_shapes(limits)
        _in_range("start_B", self.start_B, 0, limits.max_blocks * limits.block_size - 1)
        _in_range("num_valid_B", self.num_valid_B, 0, limits.max_num_rows)
        _in_range("depth_B", self.depth_B, 0, limits.max_depth)
        _in_range("row_offset_B", self.row_offset_B, 0, len(self.next_tokens_R))
        if np.any((self.cache_start_B < 0) | (self.cache_start_B > self.start_B)):
            raise ValueError("cache_start_B must be in 0 .. start_B: rows before it are not in the cache")
        if np.any(self.row_offset_B + self.num_valid_B > len(self.next_tokens_R)):
            raise ValueError(f"row_offset_B + num_valid_B reaches beyond the {len(self.next_tokens_R)} payload rows")
        if (num_rows := int(self.rows_B().sum())) > limits.max_num_rows:
            raise ValueError(f"the batch has {num_rows} rows, more than max_num_rows = {limits.max_num_rows}: split it")
        self._check_blocks(limits)
        self._check_tokens(limits)

    def _check_shapes(self, limits: PassLimits) -> None:
        num_requests, num_payload_rows = len(self.start_B), len(self.next_tokens_R)
        if not 1 <= num_requests <= limits.max_num_requests:
            raise ValueError(f"{num_requests} requests, outside 1 .. max_num_requests = {limits.max_num_requests}")
        if num_payload_rows > limits.max_payload_rows:
            raise ValueError(
                f"the payload has {num_payload_rows} rows, more than max_payload_rows = {limits.max_payload_rows}"
            )
        for name in (*_PER_REQUEST, "next_tokens_R", "block_table_BN"):
            array = getattr(self, name)
            shape = {"next_tokens_R": (num_payload_rows,), "block_table_BN": (num_requests, *array.shape[1:2])}
            if array.dtype != np.int32 or array.shape != shape.get(name, (num_requests,)):
                wanted = list(shape.get(name, (num_requests,)))
                raise ValueError(f"{name} is {array.dtype} {list(array.shape)} and must be int32 {wanted}")
        for piece in self.pieces:
            if piece.dim() != 2 or piece.shape[1] != limits.hidden_size or not torch.is_floating_point(piece):
                raise ValueError(
                    f"hidden_RH is {piece.dtype} {list(piece.shape)} and must be floating, [R, {limits.hidden_size}]"
                )
        if (num_hidden := sum(len(piece) for piece in self.pieces)) != num_payload_rows:
            raise ValueError(f"hidden_RH has {num_hidden} rows, next_tokens_R has {num_payload_rows}")

    def _check_blocks(self, limits: PassLimits) -> None:
        width = self.block_table_BN.shape[1]
        needed_B = -(-(self.start_B + self.rows_B()) // limits.block_size)
        if np.any(needed_B > width) or width > limits.max_blocks:
            raise ValueError(
                f"block_table_BN has {width} columns; the batch needs {int(needed_B.max())} of {limits.block_size} "
                f"positions, and the pass takes at most {limits.max_blocks}"
            )
        table = self.block_table_BN
        if table.size and (int(table.min()) < 0 or int(table.max()) >= limits.num_blocks):
            columns = np.arange(width)
            used = (columns >= self.cache_start_B[:, None] // limits.block_size) & (columns < needed_B[:, None])
            wrong = used & ((table < 0) | (table >= limits.num_blocks))
            if wrong.any():
                request, column = (int(index) for index in np.argwhere(wrong)[0])
                raise ValueError(
                    f"block_table_BN[{request}, {column}] = {int(table[request, column])} is in use and no block of "
                    f"0 .. {limits.num_blocks - 1}"
                )

    def _check_tokens(self, limits: PassLimits) -> None:
        tokens = self.next_tokens_R
        if not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) < limits.vocab_size):
            return
        for request, (first, num_valid) in enumerate(zip(self.row_offset_B, self.num_valid_B, strict=True)):
            _in_range(
                f"next_tokens_R of request {request}", tokens[first : first + num_valid], 0, limits.vocab_size - 1
            )


@dataclasses.dataclass(frozen=True)
class PassInputs:
    """A batch on the pass's device. Tensors of the payload may be longer than the batch's, and requests without rows
    may pad it.

    payload_RH: the rows of the payload, or addresses_R: where each of them lies (`place_hidden_at`); the other is None.
    """

    start_B: Tensor
    num_valid_B: Tensor
    row_offset_B: Tensor
    depth_B: Tensor
    cache_start_B: Tensor
    next_tokens_R: Tensor
    block_table_BN: Tensor
    payload_RH: Tensor | None = None
    addresses_R: Tensor | None = None

    @classmethod
    def on_cpu(cls, batch: PassBatch, hidden_size: int, dtype: torch.dtype) -> PassInputs:
        """The arrays themselves, nothing copied, where the payload is one tensor of the pass's type."""
        pieces = [piece.to(dtype) for piece in batch.pieces] or [torch.empty(0, hidden_size, dtype=dtype)]
        names = (*_PER_REQUEST, "next_tokens_R", "block_table_BN")
        arrays = {name: torch.from_numpy(np.ascontiguousarray(getattr(batch, name))) for name in names}
        return cls(**arrays, payload_RH=pieces[0] if len(pieces) == 1 else torch.cat(pieces))


def _in_range(name: str, values: Int32Array, low: int, high: int) -> None:
    if values.size and (values.min() < low or values.max() > high):
        raise ValueError(f"{name} holds {values.min()} .. {values.max()}, outside {low} .. {high}")


# ====================================================================================================
# Where the integers of a pass lie in one buffer: written by the host, moved by one copy, read by the pass in place.
#
# For n requests, those that pad the batch included, one area after another, each from a multiple of 16 bytes on:
#
#     columns    5 x n     start, valid rows, row offset, depth, cache start
#     blocks     n x N     block tables, N columns wide whatever the batch uses; or, where that is much to move, as many
#                          columns as it uses, to be copied to their place on the device (`blocks_apart`)
#     records    R x 2     int64: a payload row's address and the token after it
#
# Places follow from n alone, so a captured graph finds them again.

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
