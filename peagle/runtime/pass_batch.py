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
