"""Blocks of the drafter's KV cache: who uses them, which of them answer for a prefix, and which one goes first.

Enters: tokens and block numbers. Leaves: block numbers. Holds no KV: that lies with the pass, by the same numbers.

A row at position p holds the token p + 1 and the target's hidden state at p, which depends on the tokens 0 .. p. So a
block of the positions [i * bs, (i + 1) * bs) depends on the tokens 0 .. (i + 1) * bs, one more than a target's block.
Its *key* is a chain: the key of no block is a hash of the head's digest and token 0, the key of block i is a hash of
the key of block i - 1 and of the tokens i * bs + 1 .. (i + 1) * bs, which are the tokens of its rows.

Life of a block: free -> used by one request, which writes it -> full and *published* under its key, from then on only
read, by any number of requests -> used by none, but kept for its key -> taken for other rows, least recently used
first. **A block that is published or that two requests use is never written.** A request that has to write in the
middle of its published block withdraws it first, and may do so only while nobody else uses it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
_KEY_BYTES = 16


def root_key(head_digest: str, first_token_id: int) -> bytes:
    """Key before the first block of a request. Rows of different heads never share a block."""
    return hashlib.blake2b(f"{head_digest} {first_token_id}".encode(), digest_size=_KEY_BYTES).digest()


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a full block from the key before it and the int32 tokens of its rows."""
    return hashlib.blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()


def blocks_within(limit_bytes: int, bytes_per_block: int) -> int:
    """Blocks that a memory limit holds. Raises ValueError when that is not even one."""
    if bytes_per_block < 1:
        raise ValueError(f"bytes_per_block = {bytes_per_block} must be at least 1")
    if limit_bytes < bytes_per_block:
        raise ValueError(f"a cache of {limit_bytes} bytes holds no block of {bytes_per_block} bytes: raise its limit")
    return limit_bytes // bytes_per_block


class BlockPool:
    """All blocks of one head's cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: the memory limit, see `blocks_within`. block_size: rows of a block.

        A prefix that a target found in its own cache is a whole number of the target's blocks, so `block_size` must
        divide the target's for the drafter to find the same prefix. That the drafter's keys ask for one token more
        costs nothing: for EAGLE heads, vLLM computes the last block that it found once more.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks = {num_blocks} and block_size = {block_size} must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tokens_PT: Int32Array = np.zeros((num_blocks, block_size), np.int32)
        """[num_blocks, block_size], the token of each row; whoever writes a row's KV writes it here too."""
        self.num_evicted = 0
        self._num_users_P = np.zeros(num_blocks, np.int32)
        self._published_P = np.zeros(num_blocks, np.bool_)
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free_P = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack, its top at _num_free - 1
        self._num_free = num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and without users, the next to go first

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return self._num_free + len(self._idle)

    @property
    def num_published(self) -> int:
        return len(self._block_of)

    def take(self, num_blocks: int) -> Int32Array:
        """Blocks for rows of one request each; free ones first, then the least recently used prefixes."""
        if num_blocks > self.num_available:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_available} available")
        num_old = min(num_blocks, self._num_free)
        self._num_free -= num_old
        blocks = np.empty(num_blocks, np.int32)
        blocks[:num_old] = self._free_P[self._num_free : self._num_free + num_old]
        for i in range(num_old, num_blocks):
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self.num_evicted += 1
            blocks[i] = block
        self._num_users_P[blocks] = 1
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """One more request reads these published blocks."""
        self._num_users_P[blocks] += 1
        for block in blocks.tolist():
            self._idle.pop(block, None)

    def release(self, blocks: Int32Array) -> None:
        """One request, which had each of them once and in this order, uses them no more.

        The last ones are evicted first: a prefix is of use without its end, an end is of none without its beginning.
        """
        self._num_users_P[blocks] -= 1
        left = blocks[self._num_users_P[blocks] == 0]
        kept = self._published_P[left]
        for block in left[kept][::-1].tolist():
            self._idle[block] = None
        freed = left[~kept]
        for block in freed.tolist():
            self._key_of[block] = None
        self._free_P[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def key_of(self, block: int) -> bytes | None:
        """Key of a sealed block, also of one that is not the published block of its key; None before it is sealed."""
        return self._key_of[block]

    def seal(self, block: int, parent: bytes) -> bytes:
        """The key of a full block with the key `parent` before it. Publishes it, unless another block has its key."""
        key = chain_key(parent, self.tokens_PT[block].tobytes())
        self._key_of[block] = key
        if self._block_of.setdefault(key, block) == block:
            self._published_P[block] = True
        return key

    def may_write(self, blocks: Int32Array) -> npt.NDArray[np.bool_]:
        """For each block: one request uses it, and it is not published."""
        return (self._num_users_P[blocks] == 1) & ~self._published_P[blocks]

    def withdraw(self, block: int) -> bool:
        """Make a used block fit to be written again; False where another request uses it too."""
        if self._num_users_P[block] != 1:
            return False
        self._forget(block)
        return True

    def match(self, root: bytes, tokens: Int32Array) -> Int32Array:
        """The longest run of published blocks from position 0 on whose rows hold `tokens` (from token 1 on).

        Only whole blocks match. They are not held yet.
        """
        found: list[int] = []
        key, size = root, self.block_size
        whole = np.ascontiguousarray(tokens, np.int32)
        for first in range(0, len(whole) - size + 1, size):
            key = chain_key(key, whole[first : first + size].tobytes())
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return np.asarray(found, np.int32)

    def _forget(self, block: int) -> None:
        """Take away a block's key, and with it what it is published under."""
        key = self._key_of[block]
        if self._published_P[block]:
            assert key is not None
            del self._block_of[key]
            self._published_P[block] = False
        self._key_of[block] = None
