"""The drafter's cache: which requests have rows in it, and in which blocks. Keys and values lie with the pass.

A row at position p holds the token p + 1 and the target's hidden state at p, which depends on the tokens 0 .. p. So a
block of the positions [i * bs, (i + 1) * bs) depends on the tokens 0 .. (i + 1) * bs, one more than a target's block.
Its *key* is a chain. The key before the first block is a hash of the head's digest and token 0. The key of block i is a
hash of the key before it and of the tokens i * bs + 1 .. (i + 1) * bs, which are the tokens of its rows.

Life of a block: free -> used by one request, which writes it -> full and *published* under its key: any number of
requests read it, none writes it -> used by none, but kept for its key -> taken for other rows, least recently used
first. **A block that is published or that two requests use is never written.**

A request has the rows of the positions `origin` .. `end` - 1, in its blocks from the first place of the first block on.
It is *cold* where `origin` > 0: the rows before never reached this cache, so drafts are worse than they could be, and
its blocks are of no use to others. Attention depends on distances alone, so the pass counts positions from `origin` on.

P blocks of T rows, C table rows, N blocks of a request at most, B requests of a call, R rows of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from peagle.drafter.protocol import Int32Array, valid_rows

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
NO_ROW = -1
FIRST_ROWS = 256  # of a table, which grows with the targets' requests
_KEY_BYTES = 16


def chain_key(parent: bytes, tokens: Int32Array) -> bytes:
    """Key of a full block from the key before it and the tokens of its rows. Before the first block of a request it is
    that of its head and token 0: rows of different heads never share a block."""
    return hashlib.blake2b(parent + tokens.astype(np.int32).tobytes(), digest_size=_KEY_BYTES).digest()


class BlockPool:
    """All blocks of one head's cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: the memory limit. block_size: rows of a block; it must divide that of the targets for the drafter
        to find the prefixes that they find in their own caches.
        """
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tokens_PT: Int32Array = np.zeros((num_blocks, block_size), np.int32)
        """[num_blocks, block_size], the token of each row; whoever writes a row's KV writes it here too."""
        self.num_evicted = 0
        self.num_users_P = np.zeros(num_blocks, np.int32)
        self.key_of: list[bytes | None] = [None] * num_blocks  # of full blocks, also where another is published
        self._block_of: dict[bytes | None, int] = {}
        self._unused = OrderedDict.fromkeys(range(num_blocks))  # without users, the next to be taken first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._unused)

    def is_published(self, block: int) -> bool:
        return self._block_of.get(self.key_of[block]) == block

    def allocate(self, num_blocks: int) -> Int32Array:
        """Blocks for rows of one request each; free ones first, then the least recently used prefixes."""
        blocks = [self._unused.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            if self.is_published(block):
                del self._block_of[self.key_of[block]]
                self.num_evicted += 1
            self.key_of[block] = None
        self.num_users_P[blocks] = 1
        return np.array(blocks, np.int32)

    def hold(self, blocks: Int32Array) -> None:
        """One more request reads these published blocks."""
        self.num_users_P[blocks] += 1
        for block in blocks.tolist():
            self._unused.pop(block, None)

    def release(self, blocks: Int32Array) -> None:
        """One request, which had each of them once and in this order, uses them no more. The last ones are taken first:
        an end is of no use without its beginning."""
        self.num_users_P[blocks] -= 1
        for block in blocks[self.num_users_P[blocks] == 0][::-1].tolist():
            self._unused[block] = None
            if not self.is_published(block):
                self._unused.move_to_end(block, last=False)

    def publish(self, block: int, parent: bytes) -> bytes:
        """The key of a full block with the key `parent` before it, under which it is published unless another is."""
        key = self.key_of[block] = chain_key(parent, self.tokens_PT[block])
        self._block_of.setdefault(key, block)
        return key

    def match(self, root: bytes, tokens: Int32Array) -> list[int]:
        """The longest run of published whole blocks from position 0 on whose rows hold `tokens` (from token 1 on)."""
        matched: list[int] = []
        key, size = root, self.block_size
        for first in range(0, len(tokens) - size + 1, size):
            key = chain_key(key, tokens[first : first + size])
            if (block := self._block_of.get(key)) is None:
                break
            matched.append(block)
        return matched


@dataclasses.dataclass
class Counters:
    """Sums since the engine started. refused: requests of a step without room in the cache, or with a context longer
    than the head allows."""

    cold_starts: int = 0  # requests that began, or began again, without the rows before
    prefix_hit_tokens: int = 0  # rows found by the tokens of a prompt instead
    evicted_blocks: int = 0
    refused: int = 0
    passes: int = 0
    rows: int = 0  # of passes, mask rows included
    drafts: int = 0


class RequestTable:
    """Requests of one head; a table row is the place of one request. Requests of a step are handled together, in numpy:
    Python loops run only over those that are new, that jump or that fill a block."""

    def __init__(self, pool: BlockPool, head_digest: str, counters: Counters, max_num_positions: int) -> None:
        self.pool, self.head_digest, self.counters = pool, head_digest, counters
        self.max_num_positions = max_num_positions
        self.blocks_CN: Int32Array = np.zeros((FIRST_ROWS, -(-max_num_positions // pool.block_size)), np.int32)
        """[C, N], of valid block numbers throughout; the first `num_blocks_C` are the request's own."""
        self.num_blocks_C, self.origin_C, self.end_C = np.zeros((3, FIRST_ROWS), np.int64)
        self.row_of: dict[tuple[int, int], int] = {}
        """Session and slot -> table row of a request."""
        self._root_of: dict[int, bytes] = {}
        self._free_rows = list(range(FIRST_ROWS))

    def find(self, session: int, slots_B: Int32Array) -> Int64Array:
        """Table rows of a session's slots, `NO_ROW` where there is none."""
        return np.array([self.row_of.get((session, slot), NO_ROW) for slot in slots_B.tolist()], np.int64)

    def open(self, session: int, slot: int, prompt: Int32Array | None) -> int:
        """A table row for a slot that has none. prompt: token ids of the positions 0 .. start; None or empty if they
        are not known. The request has the rows before `start` if the cache has all."""
        if not self._free_rows:  # one more target has come
            num_rows = len(self.blocks_CN)
            self._free_rows = list(range(num_rows, 2 * num_rows))
            for name in ("blocks_CN", "num_blocks_C", "origin_C", "end_C"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        row = self.row_of[session, slot] = self._free_rows.pop()
        if prompt is None or not len(prompt):
            return row
        root = self._root_of[row] = chain_key(self.head_digest.encode(), prompt[:1])
        start, blocks = len(prompt) - 1, self.pool.match(root, prompt[1:])
        if len(blocks) * self.pool.block_size == start:
            self.pool.hold(np.array(blocks, np.int32))
            self.blocks_CN[row, : len(blocks)] = blocks
            self.num_blocks_C[row], self.end_C[row] = len(blocks), start
            self.counters.prefix_hit_tokens += start
        return row

    def place(
        self, rows_B: Int64Array, start_B: Int64Array, num_valid_B: Int64Array, num_drafts_B: Int64Array
    ) -> BoolArray:
        """Let each request's rows end at its start, and give it blocks up to its last mask row. False where that fails:
        the request then loses its rows. Those that need the fewest blocks come first."""
        jumps = np.flatnonzero(self.end_C[rows_B] != start_B).tolist()
        cold = [i for i in jumps if self._move(int(rows_B[i]), int(start_B[i]))]
        end_B = start_B + num_valid_B + np.where(num_valid_B, np.maximum(num_drafts_B - 1, 0), 0)
        num_blocks_B = -(-(end_B - self.origin_C[rows_B]) // self.pool.block_size)
        need_B = np.maximum(num_blocks_B - self.num_blocks_C[rows_B], 0)
        granted_B: BoolArray = end_B <= self.max_num_positions
        need_B[~granted_B] = 0
        if need_B.any():
            order = np.argsort(need_B, kind="stable")
            granted_B[order] &= np.cumsum(need_B[order]) <= self.pool.num_available
            need_B[~granted_B] = 0
            self._extend(rows_B, need_B)
        for i in np.flatnonzero(~granted_B).tolist():
            self.counters.refused += 1
            self._reset(int(rows_B[i]), 0)
        self.counters.cold_starts += int(granted_B[cold].sum())
        return granted_B

    def block_table(self, rows_B: Int64Array, end_B: Int64Array) -> Int32Array:
        """[B, N] blocks of these requests; N is as wide as the furthest needs for its rows before `end_B`."""
        return self.blocks_CN[rows_B, : -(-int(end_B.max()) // self.pool.block_size)]

    def commit(
        self, rows_B: Int64Array, start_B: Int64Array, num_valid_B: Int64Array, tokens_R: npt.NDArray[np.int32]
    ) -> None:
        """The rows have been written by a pass. tokens_R: their tokens, request after request."""
        size, first_B = self.pool.block_size, start_B - self.origin_C[rows_B]
        column_R, within_R = np.divmod(valid_rows(first_B, num_valid_B), size)
        self.pool.tokens_PT[self.blocks_CN[np.repeat(rows_B, num_valid_B), column_R], within_R] = tokens_R
        self.end_C[rows_B] = start_B + num_valid_B
        full_B, now_full_B = first_B // size, (first_B + num_valid_B) // size
        for i in np.flatnonzero(now_full_B > full_B).tolist():
            self._publish(int(rows_B[i]), int(full_B[i]), int(now_full_B[i]))

    def release(self, session: int, slots: Iterable[int]) -> None:
        """These requests ended; slots without one are passed over. Published blocks stay as long as there is room."""
        for slot in slots:
            if (row := self.row_of.pop((session, slot), NO_ROW)) != NO_ROW:
                self._reset(row, 0)
                self._root_of.pop(row, None)
                self._free_rows.append(row)

    def drop_session(self, session: int) -> None:
        """All requests of a session ended."""
        self.release(session, [slot for owner, slot in self.row_of if owner == session])

    def _move(self, row: int, start: int) -> bool:
        """Let a request's rows end at `start`, where it has whole blocks up to there; else it begins anew. True if it
        begins cold."""
        kept, within = divmod(start - int(self.origin_C[row]), self.pool.block_size)
        if within or kept < 0 or start > self.end_C[row]:
            self._reset(row, start)
            return start > 0
        self.pool.release(self.blocks_CN[row, kept : self.num_blocks_C[row]])
        self.num_blocks_C[row], self.end_C[row] = kept, start
        return kept == 0 and start > 0

    def _reset(self, row: int, start: int) -> None:
        """Give back all blocks of a request, which has no row before `start`."""
        self.pool.release(self.blocks_CN[row, : self.num_blocks_C[row]])
        self.num_blocks_C[row], self.end_C[row], self.origin_C[row] = 0, start, start

    def _extend(self, rows_B: Int64Array, need_B: Int64Array) -> None:
        """Take `need_B` more blocks for each request."""
        before = self.pool.num_evicted
        column_X = valid_rows(self.num_blocks_C[rows_B], need_B)
        self.blocks_CN[np.repeat(rows_B, need_B), column_X] = self.pool.allocate(len(column_X))
        self.num_blocks_C[rows_B] += need_B
        self.counters.evicted_blocks += self.pool.num_evicted - before

    def _publish(self, row: int, first: int, last: int) -> None:
        """The blocks of these columns are full: publish them, if what is before them is known."""
        parent = self._root_of.get(row) if first == 0 else self.pool.key_of[int(self.blocks_CN[row, first - 1])]
        if parent is None or self.origin_C[row]:
            return
        for block in self.blocks_CN[row, first:last].tolist():
            parent = self.pool.publish(block, parent)
