"""The drafter's cache: which requests have rows in it, and in which blocks.

It holds no keys and values: those lie with the pass, by the same block numbers.

A row at position p holds the token p + 1 and the target's hidden state at p, which depends on the tokens 0 .. p. So a
block of the positions [i * bs, (i + 1) * bs) depends on the tokens 0 .. (i + 1) * bs, one more than a target's block.
Its *key* is a chain. The key before the first block is a hash of the head's digest and token 0. The key of block i is a
hash of the key before it and of the tokens i * bs + 1 .. (i + 1) * bs, which are the tokens of its rows.

Life of a block: free -> used by one request, which writes it -> full and *published* under its key: any number of
requests read it, none writes it -> used by none, but kept for its key -> taken for other rows, least recently used
first. **A block that is published or that two requests use is never written.** A request that has to write in the
middle of its published block withdraws it first, and may do so only while nobody else uses it.

A request has the rows of the positions `cache_start` .. `num_rows` - 1. It is *cold* where `cache_start` > 0: the rows
before never reached this cache, so drafts are worse than they could be, and its blocks are of no use to others.

P blocks of T rows, C table rows, N blocks of a request at most, B requests of a call, R rows of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from peagle.drafter.protocol import Int32Array

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
NO_ROW = -1
_KEY_BYTES = 16


def root_key(head_digest: str, first_token_id: int) -> bytes:
    """Key before the first block of a request. Rows of different heads never share a block."""
    return hashlib.blake2b(f"{head_digest} {first_token_id}".encode(), digest_size=_KEY_BYTES).digest()


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a full block from the key before it and the int32 tokens of its rows."""
    return hashlib.blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()


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
        self.is_published_P = np.zeros(num_blocks, np.bool_)
        self.key_of: list[bytes | None] = [None] * num_blocks  # of sealed blocks, also where another is published
        self._block_of: dict[bytes, int] = {}
        self._free_P = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack, its top at _num_free - 1
        self._num_free = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and without users, the next to go first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return self._num_free + len(self._idle)

    def allocate(self, num_blocks: int) -> Int32Array:
        """Blocks for rows of one request each; free ones first, then the least recently used prefixes."""
        assert num_blocks <= self.num_available
        num_old = min(num_blocks, self._num_free)
        self._num_free -= num_old
        blocks = np.empty(num_blocks, np.int32)
        blocks[:num_old] = self._free_P[self._num_free : self._num_free + num_old]
        for i in range(num_old, num_blocks):
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.num_evicted += 1
            blocks[i] = block
        self.num_users_P[blocks] = 1
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """One more request reads these published blocks."""
        self.num_users_P[blocks] += 1
        for block in blocks.tolist():
            self._idle.pop(block, None)

    def release(self, blocks: Int32Array) -> None:
        """One request, which had each of them once and in this order, uses them no more. The last ones are evicted
        first: an end is of no use without its beginning."""
        self.num_users_P[blocks] -= 1
        left = blocks[self.num_users_P[blocks] == 0]
        kept = self.is_published_P[left]
        for block in left[kept][::-1].tolist():
            self._idle[block] = None
        freed = left[~kept]
        for block in freed.tolist():
            self.key_of[block] = None
        self._free_P[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def seal(self, block: int, parent: bytes) -> bytes:
        """The key of a full block with the key `parent` before it. Publishes it, unless another block has its key."""
        key = chain_key(parent, self.tokens_PT[block].tobytes())
        self.key_of[block] = key
        if self._block_of.setdefault(key, block) == block:
            self.is_published_P[block] = True
        return key

    def withdraw(self, block: int) -> bool:
        """Make a used block fit to be written again; False where another request uses it too."""
        if self.num_users_P[block] != 1:
            return False
        self._forget(block)
        return True

    def match(self, root: bytes, tokens: Int32Array) -> Int32Array:
        """The longest run of published whole blocks from position 0 on whose rows hold `tokens` (from token 1 on)."""
        matched: list[int] = []
        key, size = root, self.block_size
        whole = np.ascontiguousarray(tokens, np.int32)
        for first in range(0, len(whole) - size + 1, size):
            key = chain_key(key, whole[first : first + size].tobytes())
            if (block := self._block_of.get(key)) is None:
                break
            matched.append(block)
        return np.asarray(matched, np.int32)

    def _forget(self, block: int) -> None:
        """Take away a block's key, and with it what it is published under."""
        key = self.key_of[block]
        if self.is_published_P[block]:
            assert key is not None
            del self._block_of[key]
            self.is_published_P[block] = False
        self.key_of[block] = None


@dataclasses.dataclass
class Counters:
    """Sums since the engine started. refused: requests of a step without room in the cache, or with a context longer
    than the head allows."""

    cold_starts: int = 0  # requests that began, or began again, without the rows before
    prefix_hit_tokens: int = 0  # rows found by the tokens of a prompt instead
    evicted_requests: int = 0
    evicted_blocks: int = 0
    refused: int = 0
    passes: int = 0
    rows: int = 0  # of passes, mask rows included
    drafts: int = 0


class RequestTable:
    """Requests of one head; a table row is the place of one request. Requests of a step are handled together, in numpy:
    Python loops run only over those that are new, that jump or that fill a block."""

    def __init__(
        self,
        pool: BlockPool,
        head_digest: str,
        counters: Counters,
        *,
        max_num_requests: int,
        max_num_positions: int,
        min_idle_calls: int,
    ) -> None:
        """See `DraftEngine` for the limits."""
        self.pool, self.head_digest, self.counters = pool, head_digest, counters
        self.max_num_positions, self.min_idle_calls = max_num_positions, min_idle_calls
        width = -(-max_num_positions // pool.block_size)
        self.blocks_CN: Int32Array = np.zeros((max_num_requests, width), np.int32)
        """[max_num_requests, width], of valid block numbers throughout; those before `cache_start` mean nothing."""
        self.num_rows_C = np.zeros(max_num_requests, np.int64)
        self.cache_start_C = np.zeros(max_num_requests, np.int64)
        self.first_block_C = np.zeros(max_num_requests, np.int64)  # blocks [first, end) of a table row are its own
        self.end_block_C = np.zeros(max_num_requests, np.int64)
        self.last_call_C = np.full(max_num_requests, -1, np.int64)  # that used the table row; -1: nobody's row
        self._owner_of: list[tuple[int, int]] = [(-1, -1)] * max_num_requests  # session, slot
        self._root_of: list[bytes | None] = [None] * max_num_requests
        self._free_rows = list(range(max_num_requests - 1, -1, -1))
        self._row_of_slot: dict[int, Int64Array] = {}  # by session
        self.call = 0
        """Counts the engine's calls: what one has used is not evicted before the next."""

    def find(self, session: int, slots_B: npt.NDArray[np.integer]) -> Int64Array:
        """Table rows of a session's slots, `NO_ROW` where there is none; those found count as used now."""
        row_of_slot = self._row_of_slot.get(session)
        if row_of_slot is None or not len(slots_B):
            return np.full(len(slots_B), NO_ROW, np.int64)
        if (highest := int(slots_B.max())) >= len(row_of_slot):
            row_of_slot = self._widen(session, highest + 1)
        rows_B = row_of_slot[slots_B]
        self.last_call_C[rows_B if rows_B.min() >= 0 else rows_B[rows_B >= 0]] = self.call
        return rows_B

    def open(self, session: int, slot: int, prompt: Int32Array | None) -> int:
        """A table row for a slot that has none; `NO_ROW` if all are in use.

        prompt: token ids of the positions 0 .. start; None or empty if they are not known. If the cache has all rows
        before `start`, the request has them from now on.
        """
        if not self._free_rows:
            self._evict(lambda: bool(self._free_rows))
        if not self._free_rows:
            return NO_ROW
        row = self._free_rows.pop()
        if slot >= len(self._row_of_slot.get(session, ())):
            self._widen(session, slot + 1)
        self._row_of_slot[session][slot] = row
        self._owner_of[row], self.last_call_C[row] = (session, slot), self.call
        if prompt is not None and len(prompt):
            self._root_of[row] = root_key(self.head_digest, int(prompt[0]))
            self._adopt(row, prompt)
        return row

    def place(
        self, rows_B: Int64Array, start_B: Int64Array, num_valid_B: Int64Array, num_drafts_B: Int64Array
    ) -> BoolArray:
        """Truncate each request to its start and give it blocks up to its last mask row. False where that fails: the
        request then loses its rows."""
        jumps = np.flatnonzero(self.num_rows_C[rows_B] != start_B).tolist()
        if (
            not jumps
            and (start_B + num_valid_B + num_drafts_B <= self.end_block_C[rows_B] * self.pool.block_size).all()
        ):
            return np.ones(len(rows_B), np.bool_)  # as most of the time while drafting: there is room
        cold = [i for i in jumps if self._move(int(rows_B[i]), int(start_B[i]))]
        end_B = start_B + num_valid_B + np.where(num_valid_B > 0, np.maximum(num_drafts_B - 1, 0), 0)
        need_B = self._needed(rows_B, end_B)
        granted_B = end_B <= self.max_num_positions
        total = int(need_B.sum()) if granted_B.all() else int(need_B[granted_B].sum())
        if total > self.pool.num_available:
            self._evict(lambda: self.pool.num_available >= total)
        if total > self.pool.num_available:
            granted_B &= self._fitting(need_B, granted_B)
        if not granted_B.all():
            for row in rows_B[~granted_B].tolist():
                self.counters.refused += 1
                self._close(row)
            need_B = np.where(granted_B, need_B, 0)
        if cold:
            self.counters.cold_starts += int(granted_B[cold].sum())
        self._extend(rows_B, need_B)
        return granted_B

    def block_table(self, rows_B: Int64Array, end_B: Int64Array) -> Int32Array:
        """[B, N] blocks of these requests; N is as wide as the furthest of the positions below `end_B` needs."""
        width = -(-int(end_B.max()) // self.pool.block_size)
        return self.blocks_CN[rows_B, :width]

    def commit(
        self, rows_B: Int64Array, start_B: Int64Array, num_valid_B: Int64Array, tokens_R: npt.NDArray[np.int32]
    ) -> None:
        """The rows have been written by a pass. tokens_R: their tokens, request after request."""
        size, end_B = self.pool.block_size, start_B + num_valid_B
        before_B = np.cumsum(num_valid_B) - num_valid_B
        request_R = np.repeat(np.arange(len(rows_B)), num_valid_B)
        positions_R = np.arange(len(tokens_R)) + (start_B - before_B)[request_R]
        column_R, within_R = np.divmod(positions_R, size)
        self.pool.tokens_PT[self.blocks_CN[rows_B[request_R], column_R], within_R] = tokens_R
        self.num_rows_C[rows_B] = end_B
        first_B, last_B = start_B // size, end_B // size
        for i in np.flatnonzero(last_B > first_B).tolist():
            self._seal(int(rows_B[i]), int(first_B[i]), int(last_B[i]))

    def release(self, session: int, slots: Iterable[int]) -> None:
        """These requests ended; slots without one are passed over. Published blocks stay as long as there is room."""
        row_of_slot = self._row_of_slot.get(session)
        if row_of_slot is None:
            return
        for slot in slots:
            if slot < len(row_of_slot) and (row := int(row_of_slot[slot])) >= 0:
                self._close(row)

    def drop_session(self, session: int) -> None:
        """All requests of a session ended."""
        row_of_slot = self._row_of_slot.get(session)
        if row_of_slot is not None:
            for row in row_of_slot[row_of_slot >= 0].tolist():
                self._close(row)
            del self._row_of_slot[session]

    def _adopt(self, row: int, prompt: Int32Array) -> None:
        """Hold the published rows before the prompt's last token, if they are all there."""
        start, root = len(prompt) - 1, self._root_of[row]
        assert root is not None
        if start % self.pool.block_size:
            return
        blocks = self.pool.match(root, prompt[1:])
        if len(blocks) * self.pool.block_size == start:
            self.pool.hold(blocks)
            self.blocks_CN[row, : len(blocks)] = blocks
            self.end_block_C[row], self.num_rows_C[row] = len(blocks), start
            self.counters.prefix_hit_tokens += start

    def _move(self, row: int, start: int) -> bool:
        """Make `start` the number of a request's rows. True if it begins cold there."""
        size = self.pool.block_size
        if start == 0:
            self._reset(row, 0)
            return False
        if not self.cache_start_C[row] <= start < self.num_rows_C[row]:
            self._reset(row, start)
            return True
        column, within = divmod(start, size)
        if within and not self.pool.withdraw(int(self.blocks_CN[row, column])):
            self._reset(row, start)
            return True
        kept = column + (within > 0)
        self.pool.release(self.blocks_CN[row, kept : self.end_block_C[row]])
        self.end_block_C[row], self.num_rows_C[row] = kept, start
        return False

    def _reset(self, row: int, start: int) -> None:
        """Give back all blocks of a request; its cache starts at `start`, without a row."""
        self.pool.release(self.blocks_CN[row, self.first_block_C[row] : self.end_block_C[row]])
        self.first_block_C[row] = self.end_block_C[row] = start // self.pool.block_size
        self.num_rows_C[row] = self.cache_start_C[row] = start

    def _needed(self, rows_B: Int64Array, end_B: Int64Array) -> Int64Array:
        """Blocks that requests lack for the positions below `end_B`."""
        return np.maximum(-(-end_B // self.pool.block_size) - self.end_block_C[rows_B], 0)

    def _fitting(self, need_B: Int64Array, wanted_B: BoolArray) -> BoolArray:
        """Which of the wanted requests get blocks when there are not enough: those that need the fewest first."""
        order = np.argsort(np.where(wanted_B, need_B, np.iinfo(np.int64).max), kind="stable")
        order = order[: int(wanted_B.sum())]
        fits_B = np.zeros(len(need_B), np.bool_)
        fits_B[order[np.cumsum(need_B[order]) <= self.pool.num_available]] = True
        return fits_B

    def _extend(self, rows_B: Int64Array, need_B: Int64Array) -> None:
        """Take `need_B` more blocks for each request."""
        total = int(need_B.sum())
        if not total:
            return
        before = self.pool.num_evicted
        request_X = np.repeat(np.arange(len(rows_B)), need_B)
        within_X = np.arange(total) - (np.cumsum(need_B) - need_B)[request_X]
        rows_X = rows_B[request_X]
        self.blocks_CN[rows_X, self.end_block_C[rows_X] + within_X] = self.pool.allocate(total)
        self.end_block_C[rows_B] += need_B
        self.counters.evicted_blocks += self.pool.num_evicted - before

    def _seal(self, row: int, first: int, last: int) -> None:
        """The blocks of these columns are full: publish them, if what is before them is known."""
        parent = self._root_of[row] if first == 0 else self.pool.key_of[int(self.blocks_CN[row, first - 1])]
        if parent is None or self.cache_start_C[row]:
            return
        for block in self.blocks_CN[row, first:last].tolist():
            parent = self.pool.seal(block, parent)

    def _evict(self, enough: Callable[[], bool]) -> None:
        """Close the requests used longest ago, none of the last `min_idle_calls` calls, until there is enough."""
        old = np.flatnonzero((self.last_call_C >= 0) & (self.last_call_C <= self.call - self.min_idle_calls))
        for row in old[np.argsort(self.last_call_C[old], kind="stable")].tolist():
            if enough():
                return
            self._close(row)
            self.counters.evicted_requests += 1

    def _close(self, row: int) -> None:
        self._reset(row, 0)
        session, slot = self._owner_of[row]
        self._row_of_slot[session][slot] = NO_ROW
        self._owner_of[row], self._root_of[row], self.last_call_C[row] = (-1, -1), None, -1
        self._free_rows.append(row)

    def _widen(self, session: int, num_slots: int) -> Int64Array:
        """Room for a session's slots below `num_slots`, at least twice as many as before."""
        old = self._row_of_slot.get(session, np.empty(0, np.int64))
        wider = np.full(max(num_slots, 2 * len(old)), NO_ROW, np.int64)
        wider[: len(old)] = old
        self._row_of_slot[session] = wider
        return wider
