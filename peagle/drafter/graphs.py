"""The pass on a GPU: CUDA graphs by padded size, integers moved there, drafts written back.

One launch of a pass is: asynchronous copies of its integers, the graph, and the copy of the drafts to pinned memory
with an event behind it. The graph reads hidden states where they lie. The host waits for none of these: torch's
allocator of pinned memory gives none to the next pass that this one still reads.

A graph is made for (rows, requests, drafts of a request at most). A batch runs on the cheapest graph that holds it:
launching kernel by kernel takes the host milliseconds. The requests that pad a batch have no rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.parallel_pass import PassLimits, PendingDrafts
from peagle.drafter.protocol import Int32Array
from peagle.drafter.rows import PassBatch

_MANY_ROWS = 1024  # of a pass: beyond, prompts take any number of rows beside drafts

#: compute(inputs, num_rows, max_drafts) -> drafts [B, max_drafts] on the device, waiting for nothing.
Compute = Callable[[PassBatch[Tensor], int, int], Tensor]
GraphKey = tuple[int, int, int]
"""Rows of a pass, requests, and the most drafts of a request."""


def graph_keys(limits: PassLimits) -> list[GraphKey]:
    """Graphs of which one holds each batch within the limits, so close that padding costs little where requests draft.

    Every row passes the layers, and every draft that the requests of a graph may have the output matrix. The largest
    come first: later ones then find their memory in what the pool has already.
    """

    def sizes(most: int) -> list[int]:
        octaves = (1 << n for n in range(3, most.bit_length()))
        return [*(size for low in octaves for n in range(4, 8) if (size := low * n // 4) < most), most]

    rows, most_drafts = sizes(limits.max_num_rows), limits.max_draft_tokens
    requests = [n for n in (1, 2, 4, *sizes(limits.max_num_requests)) if n <= limits.max_num_requests]
    drafts = {0, *(1 << n for n in range((most_drafts - 1).bit_length())), most_drafts}
    found = {(size, limits.max_num_requests, most_drafts) for size in rows}
    for size, number, most in itertools.product(rows, requests, drafts):
        least = number * max(most, 1)
        is_power = number & (number - 1) == 0
        if least <= size <= min(2 * least, _MANY_ROWS) or (size > _MANY_ROWS and is_power and most in (0, most_drafts)):
            found.add((size, number, most))
    return sorted(found, reverse=True)


class GraphRunner:
    """Launches passes on a GPU, on a stream of its own. Used by one thread at a time."""

    def __init__(
        self, compute: Compute, limits: PassLimits, keys: Sequence[GraphKey] | None, device: torch.device
    ) -> None:
        """keys: of the graphs; None: `graph_keys`."""
        self._keys = graph_keys(limits) if keys is None else keys
        self._compute = compute
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._by_cost_G3 = np.zeros((0, 3), np.int64)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._inputs = empty_inputs(limits, device)
        # Weights and cache were made on the caller's stream.
        torch.cuda.synchronize(device)

    def launch(self, batch: PassBatch[Any]) -> PendingDrafts:
        """Enqueues a pass and the way back of its drafts."""
        holds_G = (self._by_cost_G3 >= (batch.num_rows, batch.num_requests, batch.max_drafts)).all(axis=1)
        with torch.cuda.stream(self._stream):
            move(batch, self._inputs)
            if holds_G.any():
                graph, drafts_BD = self._graphs[tuple(self._by_cost_G3[holds_G.argmax()].tolist())]
                graph.replay()
            else:
                inputs = self._inputs.first_requests(batch.num_requests)
                drafts_BD = self._compute(inputs, batch.num_rows, batch.max_drafts)
            found_BD = drafts_BD[: batch.num_requests].to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.Event()
            event.record(self._stream)

        def wait() -> Int32Array:
            event.synchronize()
            return found_BD.numpy()

        return wait

    def warm_up(self) -> int:
        """Compiles all kernels and captures the graphs; returns how many there are. Until then passes run kernel by
        kernel. Both take longer than a target waits."""
        with torch.cuda.stream(self._stream):
            # Requests without rows: what runs before a capture then reads no payload and writes nothing to the cache.
            self._inputs.num_valid_B.zero_()
            for key in self._keys:
                self._graphs[key] = self._capture(*key)
        self._stream.synchronize()
        by_cost = sorted(self._graphs, key=lambda key: (key[0] + key[1] * key[2], key))
        self._by_cost_G3 = np.array(by_cost, np.int64).reshape(-1, 3)
        return len(self._graphs)

    def _capture(self, num_rows: int, num_requests: int, max_drafts: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of the pass over what lies in its inputs; the pass runs once before, which compiles its kernels."""
        inputs = self._inputs.first_requests(num_requests)
        self._compute(inputs, num_rows, max_drafts)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without `torch.cuda.graph`, which collects garbage and empties the allocator each time. Other threads may go
        # on using the GPU.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        drafts_BD = self._compute(inputs, num_rows, max_drafts)
        graph.capture_end()
        return graph, drafts_BD


def empty_inputs(limits: PassLimits, device: torch.device) -> PassBatch[Tensor]:
    """Places for the largest batch, where a graph finds each."""

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*sizes, dtype=dtype, device=device)

    most, rows = limits.max_num_requests, limits.max_num_rows
    return PassBatch(
        start_B=zeros(most),
        num_valid_B=zeros(most),
        row_offset_B=zeros(most),
        num_drafts_B=zeros(most),
        next_tokens_R=zeros(rows, dtype=torch.int64),
        addresses_R=zeros(rows, dtype=torch.int64),
        block_table_BN=zeros(most, limits.max_blocks),
    )


def move(batch: PassBatch[Any], into: PassBatch[Tensor]) -> None:
    """Copies a batch to the places of the largest one, padded by requests without rows; the host waits for nothing."""
    for field in dataclasses.fields(batch):
        place = getattr(into, field.name)
        value = torch.from_numpy(np.ascontiguousarray(getattr(batch, field.name)))
        if field.name == "num_valid_B":
            value = torch.cat([value, value.new_zeros(len(place) - len(value))])
        place = place[tuple(slice(size) for size in value.shape)]
        place.copy_(value.pin_memory() if place.is_cuda else value, non_blocking=True)
