"""A plain model of what the rows in a request table's blocks were made of.

The model's "KV" of a row is the tuple of all that a real row's KV depends on. If a block is ever written while others
read it, given to two requests, found under a wrong key or left stale, some request reads a wrong tuple.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from peagle.drafter.kvcache import NO_ROW, BlockPool, Counters, RequestTable
from peagle.drafter.protocol import Int32Array

BLOCK = 4
DEPTH = 3


def ids(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def make_table(num_blocks: int, *, max_num_requests: int = 32) -> RequestTable:
    return RequestTable(
        BlockPool(num_blocks, BLOCK),
        "head",
        Counters(),
        max_num_requests=max_num_requests,
        max_num_positions=40 * BLOCK,
    )


@dataclasses.dataclass
class Request:
    """What the model knows of one slot: tokens 0 .. num_rows of which the rows were given to the table."""

    tokens: list[int]
    num_rows: int


class Model:
    """Runs steps on a table and keeps what every row of every block was made of."""

    def __init__(self, table: RequestTable) -> None:
        self.table, self.pool = table, table.pool
        self.contents: dict[tuple[int, int], object] = {}  # (block, row in it) -> what its KV depends on
        self.cold_reads = 0

    def step(self, session: int, work: dict[int, tuple[Request, int, int, int]], prompts: dict[int, Int32Array]) -> int:
        """work: slot -> (request, start, number of rows, depth). Returns how many requests got blocks."""
        table = self.table
        table.release(session, prompts)
        slots = ids(*work)
        rows = table.find(session, slots)
        for i in np.flatnonzero(rows == NO_ROW).tolist():
            rows[i] = table.open(session, int(slots[i]), prompts.get(int(slots[i])))
        plan = [work[slot] for slot in slots.tolist()]
        opened = rows != NO_ROW
        rows, plan = rows[opened], [item for item, has_row in zip(plan, opened, strict=True) if has_row]
        start, num_valid, depth = (np.array([item[i] for item in plan], np.int64) for i in (1, 2, 3))
        granted = table.place(rows, start, num_valid, depth)
        rows, start, num_valid, depth = (values[granted] for values in (rows, start, num_valid, depth))
        plan = [item for item, has_blocks in zip(plan, granted, strict=True) if has_blocks]
        if not plan:
            return 0
        for row, (request, first, count, masks) in zip(rows.tolist(), plan, strict=True):
            self.write(row, request, first, count, masks)
        tokens = [token for request, first, count, _ in plan for token in request.tokens[first + 1 : first + count + 1]]
        table.commit(rows, start, num_valid, np.array(tokens, np.int32))
        for row, (request, first, count, _) in zip(rows.tolist(), plan, strict=True):
            request.num_rows = first + count
            self.read(row, request)
        return len(plan)

    def write(self, row: int, request: Request, start: int, num_valid: int, depth: int) -> None:
        num_masks = max(depth - 1, 0) if num_valid else 0
        for position in range(start, start + num_valid + num_masks):
            block, place = self.address(row, position)
            assert self.pool.num_users_P[block] == 1, f"position {position} is in a block of two requests"
            assert not self.pool.is_published(block), f"position {position} is in a block that others read"
            real = position < start + num_valid
            content = (self.table.origin_C[row], *request.tokens[: position + 2]) if real else ("mask", row)
            self.contents[block, place] = content

    def address(self, row: int, position: int) -> tuple[int, int]:
        """Block of a position of a request, and the place in it."""
        column, place = divmod(position - int(self.table.origin_C[row]), BLOCK)
        return int(self.table.blocks_CN[row, column]), place

    def read(self, row: int, request: Request) -> None:
        first = int(self.table.origin_C[row])
        assert self.table.end_C[row] == request.num_rows
        self.cold_reads += first > 0
        for position in range(first, request.num_rows):
            assert self.contents[self.address(row, position)] == (first, *request.tokens[: position + 2])

    def check_counts(self) -> None:
        """Every block is used as often as tables name it, and is free, kept or used."""
        table, users = self.table, np.zeros(self.pool.num_blocks, int)
        for row in np.flatnonzero(table.num_blocks_C):
            np.add.at(users, table.blocks_CN[row, : table.num_blocks_C[row]], 1)
        assert (users == self.pool.num_users_P).all()
        assert self.pool.num_available == (users == 0).sum()
