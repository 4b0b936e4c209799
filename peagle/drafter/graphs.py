"""The pass on a GPU: its integers moved by one copy, CUDA graphs by padded size, drafts written back.

One launch of a pass is: an asynchronous copy of all integers (`PassLayout`), the graph, and the copy of the drafts to
pinned memory with an event behind it. The graph reads hidden states where they lie. The host waits for none of
these: pinned buffers are used in turn, and one is used again only after its event.

A graph is made for (rows, requests, drafts of a request at most). A batch runs on the cheapest graph that holds it. The
requests that pad a batch have no rows; the rows that pad it are written nowhere. Sizes go up to the most rows that a
pass takes: launching kernel by kernel takes the host milliseconds, whatever the size.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.parallel_pass import PassBatch, PassLimits, PendingDrafts
from peagle.drafter.protocol import Int32Array

NUM_BUFFERS = 4  # passes that may be under way before the host waits for the oldest
_MANY_ROWS = 1024  # of a pass; of more there are graphs for few numbers of requests and drafts only
_RECORD = 4  # int32 of a record

PER_REQUEST = ("start_B", "row_offset_B", "num_drafts_B", "num_valid_B")
#: compute(inputs, num_rows, max_drafts) -> drafts [B, max_drafts] on the device, waiting for nothing.
Compute = Callable[[PassBatch[Tensor], int, int], Tensor]
GraphKey = tuple[int, int, int]
"""Rows of a pass, requests, and the most drafts of a request."""


class PassLayout:
    """Where the integers of a pass lie in one buffer: written by the host, moved by one copy, read in place.

    For n requests, the most of a pass, one part after another:

        columns    4 x n     start, row offset, drafts, valid rows
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


def graph_keys(limits: PassLimits) -> list[GraphKey]:
    """Graphs so close that padding costs little, of which one holds each batch within the limits.

    Rows grow by about an eighth, drafts are K and the powers of two below it. There are graphs of batches that draft
    alike, where each request has 1 .. drafts + 1 rows of its own; and for the most requests and drafts all numbers of
    rows. Beyond `_MANY_ROWS`, where prompts take any number of rows beside drafts and each graph takes as long to
    capture as a small one: few numbers of requests, K and half of it, because the output matrix runs for all drafts
    that the requests of a graph may have; and the prompts of few requests, which want none.

    The largest come first: later ones then find their memory in what the pool has already.
    """
    octaves = [1 << n for n in range(8, limits.max_num_rows.bit_length())]
    rows = [*range(8, 64, 8), *range(64, 256, 16), *(size * n // 8 for size in octaves for n in range(8, 16))]
    requests = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
    rows = [*(size for size in rows if size < limits.max_num_rows), limits.max_num_rows]
    requests = [*(size for size in requests if size < limits.max_num_requests), limits.max_num_requests]
    most_drafts = limits.max_draft_tokens
    drafts = sorted({0, most_drafts, *(1 << n for n in range((most_drafts - 1).bit_length()))})
    num_small = bisect.bisect_right(rows, _MANY_ROWS)
    small, large = rows[:num_small], rows[num_small:]
    found = {(size, requests[-1], most_drafts) for size in rows}
    for most, (before, number) in itertools.product(drafts, itertools.pairwise([0, *requests])):
        first = bisect.bisect_left(small, (before + 1) * max(most, 1))
        last = bisect.bisect_left(small, number * max(2 * most, 1))
        found.update((size, number, most) for size in small[first : last + 1])
    half = max(number for number in drafts if 2 * number <= most_drafts + 1)
    some = [number for number in requests if number in (32, 64, 128, 256, 512, requests[-1])]
    found.update(itertools.product(large, some, (half, most_drafts)))
    found.update((size, some[0], 0) for size in large)
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

    def enqueued(self, num_requests: int, max_drafts: int) -> PendingDrafts:
        """Drafts on their way into the buffer; taken out when they are asked for or when it is used again."""

        @functools.cache
        def wait() -> Int32Array:
            self.event.synchronize()
            return self.drafts_array[: num_requests * max_drafts].reshape(num_requests, max_drafts).copy()

        self.pending = wait
        return wait


class GraphRunner:
    """Launches passes on a GPU, on a stream of its own. Used by one thread at a time."""

    def __init__(
        self,
        compute: Compute,
        limits: PassLimits,
        keys: Sequence[GraphKey] | None,
        device: torch.device,
    ) -> None:
        """keys: of the graphs; None: `graph_keys`."""
        self._keys = graph_keys(limits) if keys is None else keys
        self._compute, self._device = compute, device
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._by_cost_G3 = np.zeros((0, 3), np.int64)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._layout = PassLayout(limits)
        self._buffers = [_PinnedBuffer(self._layout.num_integers, limits) for _ in range(NUM_BUFFERS)]
        self._num_sent = 0
        with torch.cuda.stream(self._stream):
            self._integers = torch.zeros(self._layout.num_integers, dtype=torch.int32, device=device)
            self._blocks_BN = torch.zeros(limits.max_num_requests, limits.max_blocks, dtype=torch.int32, device=device)
        # Weights and cache were made on the caller's stream.
        torch.cuda.synchronize(device)

    def launch(self, batch: PassBatch[Any]) -> PendingDrafts:
        """Enqueues a pass and the way back of its drafts."""
        holds_G = (self._by_cost_G3 >= (batch.num_rows, batch.num_requests, batch.max_drafts)).all(axis=1)
        with torch.cuda.stream(self._stream):
            buffer = self._move(batch)
            if holds_G.any():
                graph, drafts_BD = self._graphs[tuple(self._by_cost_G3[holds_G.argmax()].tolist())]
                graph.replay()
            else:
                drafts_BD = self._compute(self._inputs(batch.num_requests), batch.num_rows, batch.max_drafts)
            max_drafts = drafts_BD.shape[1]
            wanted = drafts_BD.view(-1)[: batch.num_requests * max_drafts]
            buffer.drafts[: len(wanted)].copy_(wanted, non_blocking=True)
            buffer.event.record(self._stream)
        return buffer.enqueued(batch.num_requests, max_drafts)

    def warm_up(self) -> int:
        """Compiles all kernels and captures the graphs; returns how many there are. Until then passes run kernel by
        kernel. Both take longer than a target waits."""
        with torch.cuda.stream(self._stream):
            # Requests without rows: what runs before a capture then reads no payload and writes nothing to the cache.
            self._integers.zero_()
            for key in self._keys:
                self._graphs[key] = self._capture(key)
        self._stream.synchronize()
        # Every row passes the layers, and every draft that a request may have the output matrix.
        by_cost = sorted(self._graphs, key=lambda key: (key[0] + key[1] * key[2], key))
        self._by_cost_G3 = np.array(by_cost, np.int64).reshape(-1, 3)
        return len(self._graphs)

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

    def _capture(self, key: GraphKey) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of the pass over what lies in its inputs; the pass runs once before, which compiles its kernels."""
        num_rows, num_requests, max_drafts = key
        inputs = self._inputs(num_requests)
        self._compute(inputs, num_rows, max_drafts)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without `torch.cuda.graph`, which collects garbage and empties the allocator each time. Other threads may go
        # on using the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        drafts_BD = self._compute(inputs, num_rows, max_drafts)
        graph.capture_end()
        return graph, drafts_BD
