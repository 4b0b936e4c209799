"""The pass on a GPU: its integers moved by one copy, CUDA graphs by padded size, drafts written back.

One launch of a pass is: an asynchronous copy of all integers (`PassLayout`), the graph, and the copy of the drafts to
pinned memory with an event behind it. The graph reads hidden states where they lie. The host waits for none of
these: pinned buffers are used in turn, and one is used again only after its event.

A graph is made for (rows, requests, depth), each rounded up to one of few sizes. The requests that pad a batch have no
rows; the rows that pad it are written nowhere. After warm-up a batch without a graph of its size runs on a larger one.
Sizes go up to the most rows that a pass takes: launching kernel by kernel takes the host milliseconds, whatever the
size.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from peagle.drafter.parallel_pass import PassBatch, PassLimits, PendingDrafts, widened
from peagle.drafter.protocol import Int32Array

logger = logging.getLogger(__name__)

NUM_BUFFERS = 4  # passes that may be under way before the host waits for the oldest
_MANY_ROWS = 1024  # of a pass; of more there are graphs for few numbers of requests and depths only
_RECORD = 4  # int32 of a record

PER_REQUEST = ("start_B", "row_offset_B", "num_drafts_B", "cache_start_B", "num_valid_B")
#: compute(inputs, num_rows, depth) -> drafts [B, depth] on the device, waiting for nothing.
Compute = Callable[[PassBatch[Tensor], int, int], Tensor]
Key = tuple[int, int, int]


class PassLayout:
    """Where the integers of a pass lie in one buffer: written by the host, moved by one copy, read in place.

    For n requests, the most of a pass, one part after another:

        columns    5 x n     start, row offset, depth, cache start, valid rows
        records    R x 2     int64: a payload row's address and the token after it
        blocks     B x N     block tables of the batch's own requests, as wide as it uses, to be copied to their place

    Columns and records begin at a multiple of 16 bytes. Their places are those of every batch, so a captured graph
    finds them again.
    """

    def __init__(self, limits: PassLimits) -> None:
        # Columns are rounded up to 16 bytes: Triton compiles a kernel again for a pointer that is not aligned so.
        self._column = -(-limits.max_num_requests // 4) * 4
        self._records = len(PER_REQUEST) * self._column
        self._num_before_blocks = self._records + _RECORD * limits.max_num_rows
        self.num_integers = self._num_before_blocks + limits.max_num_requests * limits.max_blocks

    def pack(self, batch: PassBatch[Any], into: Int32Array) -> slice:
        """Write a batch, padded by requests without rows; returns where its blocks are, the last of what is to be
        moved."""
        columns = into[: self._records].reshape(len(PER_REQUEST), -1)
        for column, name in zip(columns, PER_REQUEST, strict=True):
            column[: batch.num_requests] = getattr(batch, name)
        columns[:, batch.num_requests :] = 0
        num_rows = len(batch.addresses_R)
        records_R2 = into[self._records : self._records + _RECORD * num_rows].view(np.int64).reshape(num_rows, 2)
        records_R2[:, 0], records_R2[:, 1] = batch.addresses_R, batch.next_tokens_R
        first = self._records + _RECORD * num_rows
        blocks = slice(first, first + batch.block_table_BN.size)
        into[blocks] = batch.block_table_BN.reshape(-1)
        return blocks

    def inputs(self, integers: Tensor, num_requests: int, blocks_BN: Tensor) -> PassBatch[Tensor]:
        """Views of what `pack` wrote. blocks_BN: where block tables are copied to."""
        columns = integers[: self._records].view(len(PER_REQUEST), -1)[:, :num_requests]
        records = integers[self._records : self._num_before_blocks].view(torch.int64).view(-1, 2)
        return PassBatch(
            **dict(zip(PER_REQUEST, columns, strict=True)),
            next_tokens_R=records[:, 1],
            block_table_BN=blocks_BN[:num_requests],
            addresses_R=records[:, 0],
        )


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """Sizes that graphs are made for, ascending: rows of a pass, requests, and the most drafts of a request."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def for_limits(cls, limits: PassLimits) -> GraphSizes:
        """Steps of about an eighth, so that padding costs little, and K with the powers of two below it.

        Each doubling of max_num_rows adds eight sizes of rows.
        """
        most = limits.max_num_rows
        octaves = [1 << n for n in range(8, most.bit_length())]
        rows = [*range(8, 64, 8), *range(64, 256, 16), *(size * n // 8 for size in octaves for n in range(8, 16))]
        few = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
        depths = {0, limits.max_draft_tokens, *(1 << n for n in range(limits.max_draft_tokens.bit_length()))}
        return cls(
            rows=(*(size for size in rows if size < most), most),
            requests=(*(size for size in few if size < limits.max_num_requests), limits.max_num_requests),
            depths=tuple(sorted(depth for depth in depths if depth <= limits.max_draft_tokens)),
        )

    def key(self, num_rows: int, num_requests: int, depth: int) -> Key | None:
        """The smallest graph that holds a batch, None where all are too small."""
        found = tuple(
            bisect.bisect_left(sizes, wanted)
            for sizes, wanted in ((self.rows, num_rows), (self.requests, num_requests), (self.depths, depth))
        )
        if found[0] == len(self.rows) or found[1] == len(self.requests) or found[2] == len(self.depths):
            return None
        return self.rows[found[0]], self.requests[found[1]], self.depths[found[2]]

    def full_batches(self) -> list[Key]:
        """Graphs of batches that draft at one of `depths` throughout, where each request has 1 .. depth + 1 rows of its
        own; and for the most requests and drafts all numbers of rows, so that every batch has a graph that holds it.

        Beyond `_MANY_ROWS`, where prompts take any number of rows beside drafts and each graph takes as long to capture
        as a small one: requests by powers of two, K and half of it, because the output matrix runs for all drafts that
        the requests of a graph may have; and the prompts of few requests, which want none.

        The largest come first: later ones then find their memory in what the pool has already.
        """
        if not self.rows:
            return []
        num_small = bisect.bisect_right(self.rows, _MANY_ROWS)
        small, large = self.rows[:num_small], self.rows[num_small:]
        most, deepest = self.requests[-1], self.depths[-1]
        found: set[Key] = {(rows, most, deepest) for rows in self.rows}
        for depth in self.depths:
            before = 0
            for requests in self.requests:
                low, high = (before + 1) * max(depth, 1), requests * (2 * depth if depth else 1)
                first, last = bisect.bisect_left(small, low), bisect.bisect_left(small, high)
                found.update((rows, requests, depth) for rows in small[first : last + 1])
                before = requests
        half = [depth for depth in self.depths if 2 * depth <= deepest + 1][-1:]
        some = [n for n in self.requests if n in (32, 64, 128, 256, 512, most)]
        found.update(itertools.product(large, some, [*half, deepest]))
        found.update((rows, some[0], self.depths[0]) for rows in large)
        return sorted(found, reverse=True)


class _PinnedBuffer:
    """Pinned memory of one launch, and the drafts that its pass writes there."""

    def __init__(self, num_integers: int, limits: PassLimits) -> None:
        self.integers = torch.empty(num_integers, dtype=torch.int32, pin_memory=True)
        self.array = self.integers.numpy()
        self.drafts = torch.empty(limits.max_num_requests * limits.max_draft_tokens, dtype=torch.int32, pin_memory=True)
        self.drafts_array = self.drafts.numpy()
        self.event = torch.cuda.Event()
        self.pending: PendingDrafts | None = None

    def enqueued(self, num_requests: int, depth: int, max_draft_tokens: int) -> PendingDrafts:
        """Drafts on their way into the buffer; taken out when they are asked for or when it is used again."""

        @functools.cache
        def wait() -> Int32Array:
            self.event.synchronize()
            found_BK = self.drafts_array[: num_requests * depth].reshape(num_requests, depth)
            return widened(found_BK, max_draft_tokens)

        self.pending = wait
        return wait


class GraphRunner:
    """Launches passes on a GPU, on a stream of its own. Used by one thread at a time."""

    def __init__(
        self,
        compute: Compute,
        limits: PassLimits,
        sizes: GraphSizes | None,
        device: torch.device,
        batches: Sequence[tuple[int, int]] = (),
    ) -> None:
        """batches: rows and requests of one batch for each kernel that a pass may need."""
        self._batches, self._limits, self.sizes = batches, limits, sizes or GraphSizes.for_limits(limits)
        self._compute, self._device = compute, device
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._graph_for: dict[Key, Key | None] = {}  # after warm-up
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._layout = PassLayout(limits)
        self._buffers = [_PinnedBuffer(self._layout.num_integers, limits) for _ in range(NUM_BUFFERS)]
        self._num_sent = 0
        self._is_warm = False
        with torch.cuda.stream(self._stream):
            self._integers = torch.zeros(self._layout.num_integers, dtype=torch.int32, device=device)
            self._blocks_BN = torch.zeros(limits.max_num_requests, limits.max_blocks, dtype=torch.int32, device=device)
        # Weights and cache were made on the caller's stream.
        torch.cuda.synchronize(device)

    def launch(self, batch: PassBatch[Any]) -> PendingDrafts:
        """Enqueues a pass and the way back of its drafts."""
        key = self._key_for(batch.num_rows, batch.num_requests, batch.depth)
        with torch.cuda.stream(self._stream):
            buffer = self._move(batch)
            if key is None:
                drafts_BK = self._compute(self._inputs(batch.num_requests), batch.num_rows, batch.depth)
            else:
                if key not in self._graphs:
                    self._graphs[key] = self._capture(key)
                graph, drafts_BK = self._graphs[key]
                graph.replay()
            depth = drafts_BK.shape[1]
            wanted = drafts_BK.view(-1)[: batch.num_requests * depth]
            buffer.drafts[: len(wanted)].copy_(wanted, non_blocking=True)
            buffer.event.record(self._stream)
        return buffer.enqueued(batch.num_requests, depth, self._limits.max_draft_tokens)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def warm_up(self) -> int:
        """Captures the graphs of full batches that do not exist yet; returns how many graphs there are.

        From then on none is captured: that, and the compilation before it, takes longer than a target waits. Batches
        of other sizes (prompts beside drafts, fewer drafts than rows allow) run on a graph that holds them.
        """
        with torch.cuda.stream(self._stream):
            # Requests without rows: what runs before a capture then reads no payload and writes nothing to the cache.
            self._integers.zero_()
            for num_rows, num_requests in self._batches:  # passes without rows, to compile
                self._compute(self._inputs(num_requests), num_rows, self._limits.max_draft_tokens)
            for key in self.sizes.full_batches():
                if key not in self._graphs:
                    self._graphs[key] = self._capture(key)
        self._stream.synchronize()
        self._is_warm = True
        self._graph_for.clear()
        return len(self._graphs)

    def _key_for(self, num_rows: int, num_requests: int, depth: int) -> Key | None:
        """The graph to run, None for no graph: of the batch's own size, or after warm-up the cheapest that holds it."""
        key = self.sizes.key(num_rows, num_requests, depth)
        if key is None or not self._is_warm or key in self._graphs:
            return key
        if key not in self._graph_for:
            holds = [size for size in self._graphs if all(have >= want for have, want in zip(size, key, strict=True))]
            # Every row passes the layers, and every draft that a request may have the output matrix.
            self._graph_for[key] = min(holds, key=lambda size: (size[0] + size[1] * size[2], size), default=None)
        return self._graph_for[key]

    def _move(self, batch: PassBatch[Any]) -> _PinnedBuffer:
        """Moves a batch to the GPU, through the buffer that it returns."""
        self._num_sent += 1
        buffer = self._buffers[self._num_sent % NUM_BUFFERS]
        if buffer.pending is not None:
            buffer.pending()
        blocks = self._layout.pack(batch, buffer.array)
        self._integers[: blocks.stop].copy_(buffer.integers[: blocks.stop], non_blocking=True)
        given, width = batch.block_table_BN.shape
        self._blocks_BN[:given, :width].copy_(self._integers[blocks].view(given, width))
        return buffer

    def _inputs(self, num_requests: int) -> PassBatch[Tensor]:
        """Views of the places that `_move` fills."""
        return self._layout.inputs(self._integers, num_requests, self._blocks_BN)

    def _capture(self, key: Key) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of the pass over what lies in its inputs; the pass runs once before, which compiles its kernels.

        Running a batch twice leaves the same cache as running it once.
        """
        num_rows, num_requests, depth = key
        inputs = self._inputs(num_requests)
        self._compute(inputs, num_rows, depth)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without `torch.cuda.graph`, which collects garbage and empties the allocator each time. Other threads may go
        # on using the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        drafts_BK = self._compute(inputs, num_rows, depth)
        graph.capture_end()
        return graph, drafts_BK


@functools.cache
def warn_of_compilations() -> None:
    """Log the name of every kernel that this process compiles from here on.

    A kernel out of Triton's cache on disk counts too: loading it also takes longer than a pass.
    """
    before: Any = knobs.runtime.jit_post_compile_hook

    def hook(**compiled: Any) -> Any:
        name = getattr(compiled.get("fn"), "name", "of unknown name")
        logger.warning("kernel %s was compiled after warm-up: targets may have waited", name)
        return None if before is None else before(**compiled)

    knobs.runtime.jit_post_compile_hook = hook
