"""The pass on a GPU: inputs packed and moved by few copies, CUDA graphs by padded size, drafts written back.

One launch of a pass is: an asynchronous copy of all integers, one of each part of the payload, one small copy within
the GPU (block tables, which have a fixed place there), the graph, and the copy of the drafts to pinned memory with an
event behind it. Where many rows of the payload were rejected, a kernel reads the others in place, from pinned memory,
instead of a copy of them all. The host waits for none of these: pinned areas are used in turn, and one is used again
only after its event.

A graph is made for (rows, requests, depth), each rounded up to one of few sizes. The requests that pad a batch have no
rows; the rows that pad it are written nowhere. Batches of more rows than the largest size, long prompts mostly, run
without a graph: there a launch costs little beside the work.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.kernels.hidden_rows import place_hidden
from peagle.runtime.pass_batch import Int32Array, PassBatch, PassInputs, PassLimits
from peagle.runtime.pending import PendingDrafts, widened

NUM_AREAS = 4  # passes that may be under way before the host waits for the oldest
#: To copy rejected rows of so many bytes, at 25 to 50 GB/s, takes longer than to launch the kernel that skips them.
MIN_SAVED_BYTES = 1 << 20
_PER_REQUEST = ("start_B", "num_valid_B", "row_offset_B", "depth_B", "cache_start_B")

#: compute(inputs, num_rows, depth) -> drafts [B, depth] on the device, waiting for nothing.
Compute = Callable[[PassInputs, int, int], Tensor]
Key = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class GraphSizes:
    """Sizes that graphs are made for, ascending: rows of a pass, requests, and the most drafts of a request."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, limits: PassLimits, max_graph_rows: int = 1024) -> GraphSizes:
        """Steps of about an eighth, so that padding costs little, and K with the powers of two below it."""
        most = min(max_graph_rows, limits.max_num_rows)
        rows = [*range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_graph_rows + 1, 64)]
        few = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 1025, 32)]
        depths = {0, limits.max_depth, *(1 << n for n in range(limits.max_depth.bit_length()))}
        return cls(
            rows=(*(size for size in rows if size < most), most),
            requests=(*(size for size in few if size < limits.max_num_requests), limits.max_num_requests),
            depths=tuple(sorted(depth for depth in depths if depth <= limits.max_depth)),
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
        """Graphs of batches that draft at one of `depths` throughout: each request has 1 .. depth + 1 rows of its own.

        The largest come first: later ones then find their memory in what the pool has already.
        """
        found: set[Key] = set()
        for depth in self.depths:
            before = 0
            for requests in self.requests:
                low, high = (before + 1) * max(depth, 1), requests * (2 * depth if depth else 1)
                first = bisect.bisect_left(self.rows, low)
                last = min(bisect.bisect_left(self.rows, high), len(self.rows) - 1)
                found.update((rows, requests, depth) for rows in self.rows[first : last + 1])
                before = requests
        return sorted(found, reverse=True)


class _Area:
    """Pinned memory of one launch, and the drafts that its pass writes there."""

    def __init__(self, num_integers: int, limits: PassLimits) -> None:
        self.integers = torch.empty(num_integers, dtype=torch.int32, pin_memory=True)
        self.array = self.integers.numpy()
        self.drafts = torch.empty(limits.max_num_requests * limits.max_depth, dtype=torch.int32, pin_memory=True)
        self.event = torch.cuda.Event()
        self.pending: _Enqueued | None = None


class _Enqueued(PendingDrafts):
    """Drafts that come into an area; they are taken out when they are asked for or when the area is used again."""

    def __init__(self, area: _Area, num_requests: int, depth: int, max_depth: int) -> None:
        self._area, self._shape, self._max_depth = area, (num_requests, depth), max_depth
        self._drafts_BK: Tensor | None = None

    def ready(self) -> bool:
        return self._drafts_BK is not None or self._area.event.query()

    def wait(self) -> Tensor:
        if self._drafts_BK is None:
            self._area.event.synchronize()
            num_requests, depth = self._shape
            self._drafts_BK = widened(
                self._area.drafts[: num_requests * depth].view(num_requests, depth), self._max_depth
            )
        return self._drafts_BK


class GraphRunner:
    """Launches passes on a GPU, on a stream of its own. Used by one thread at a time."""

    def __init__(
        self,
        compute: Compute,
        limits: PassLimits,
        sizes: GraphSizes | None,
        device: torch.device,
        dtype: torch.dtype,
        batches: Sequence[tuple[int, int]] = (),
    ) -> None:
        """batches: rows and requests of one batch for each kernel that a pass may need."""
        self._batches = batches
        self.limits, self.sizes = limits, sizes or GraphSizes.of(limits)
        self._compute, self._device = compute, device
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.min_saved_bytes = MIN_SAVED_BYTES
        num_integers = len(_PER_REQUEST) * _aligned(limits.max_num_requests) + 2 * _aligned(limits.max_payload_rows)
        table_size = limits.max_num_requests * limits.max_blocks
        self._areas = [_Area(num_integers + table_size, limits) for _ in range(NUM_AREAS)]
        self._num_launches = 0
        self._is_warm = False
        with torch.cuda.stream(self._stream):
            self._integers = torch.zeros(num_integers + table_size, dtype=torch.int32, device=device)
            self._table_BN = torch.zeros(limits.max_num_requests, limits.max_blocks, dtype=torch.int32, device=device)
            self._payload_RH = torch.zeros(limits.max_payload_rows, limits.hidden_size, dtype=dtype, device=device)
        # Weights and cache were made on the caller's stream.
        torch.cuda.synchronize(device)

    @property
    def num_graphs(self) -> int:
        """Graphs that exist."""
        return len(self._graphs)

    def launch(self, batch: PassBatch) -> PendingDrafts:
        """Enqueues a pass and the way back of its drafts."""
        area = self._areas[self._num_launches % NUM_AREAS]
        self._num_launches += 1
        if area.pending is not None:
            area.pending.wait()
        num_requests, depth = batch.num_requests, int(batch.drafts_B().max())
        num_rows = int(batch.rows_B().sum())
        key = self.sizes.key(num_rows, num_requests, depth)
        if self._is_warm and key not in self._graphs:
            key = None
        with torch.cuda.stream(self._stream):
            self._send(batch, area, num_requests if key is None else key[1])
            if key is None:
                drafts_BK = self._compute(self._inputs(num_requests), num_rows, depth)
            else:
                drafts_BK = self._replay(key)
            depth = drafts_BK.shape[1]
            wanted = drafts_BK[:num_requests].flatten()
            area.drafts[: len(wanted)].copy_(wanted, non_blocking=True)
            area.event.record(self._stream)
        area.pending = _Enqueued(area, num_requests, depth, self.limits.max_depth)
        return area.pending

    def warm_up(self) -> int:
        """Captures the graphs of full batches that do not exist yet; returns how many graphs there are.

        From then on none is captured: that, and the compilation before it, takes longer than a target waits. Batches
        of other sizes (prompts beside drafts, fewer drafts than rows allow) run without a graph.
        """
        with torch.cuda.stream(self._stream):
            # Requests without rows: what runs before a capture then writes nothing to the cache.
            self._integers.zero_()
            # Compiles the gather from pinned memory.
            pinned_RH = torch.zeros(1, self.limits.hidden_size, dtype=self._payload_RH.dtype, pin_memory=True)
            self._gather_payload([pinned_RH], [1], 0)
            for num_rows, num_requests in self._batches:  # passes without rows, to compile
                self._compute(self._inputs(num_requests), num_rows, self.limits.max_depth)
            for key in self.sizes.full_batches():
                if key not in self._graphs:
                    self._graphs[key] = self._capture(key)
        self._stream.synchronize()
        self._is_warm = True
        return len(self._graphs)

    def _send(self, batch: PassBatch, area: _Area, num_requests: int) -> None:
        """Moves a batch to the GPU, its requests padded to num_requests by such without rows."""
        kept: list[Int32Array] | None = None
        if self._saves(batch):
            batch, kept = batch.compacted()
        kept_at, table_at = self._pack(batch, kept or [], area.array, num_requests)
        num_given, width = batch.block_table_BN.shape
        used = table_at + num_given * width
        self._integers[:used].copy_(area.integers[:used], non_blocking=True)
        self._table_BN[:num_given, :width].copy_(self._integers[table_at:used].view(num_given, width))
        if kept is None:
            self._copy_payload(batch.pieces)
        else:
            self._gather_payload(batch.pieces, [len(rows) for rows in kept], kept_at)

    def _saves(self, batch: PassBatch) -> bool:
        """Whether a kernel had better take the rows that stay, which it can from pinned memory."""
        num_rejected = len(batch.next_tokens_R) - int(batch.num_valid_B.sum())
        num_bytes = num_rejected * self._payload_RH.stride(0) * self._payload_RH.itemsize
        return num_bytes >= max(self.min_saved_bytes, 1) and all(piece.is_pinned() for piece in batch.pieces)

    def _copy_payload(self, pieces: list[Tensor]) -> None:
        if any(piece.is_cuda for piece in pieces):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        first = 0
        for piece in pieces:
            place = self._payload_RH[first : first + len(piece)]
            # A copy that also converts would wait: between devices only bytes move without the host.
            place.copy_(piece if piece.dtype == place.dtype else piece.to(self._device, non_blocking=True), True)
            first += len(piece)

    def _gather_payload(self, pieces: list[Tensor], num_kept: list[int], kept_at: int) -> None:
        """Rows of pinned pieces; those of each piece are listed in the integers, one piece after another."""
        first = 0
        for piece, num_rows in zip(pieces, num_kept, strict=True):
            sources = self._integers[kept_at + first : kept_at + first + num_rows]
            # No source is -1, so what stands for the shared hidden state is not read.
            place_hidden(piece, sources, self._payload_RH[0], self._payload_RH[first : first + num_rows])
            first += num_rows

    @staticmethod
    def _pack(batch: PassBatch, kept: list[Int32Array], into: Int32Array, num_requests: int) -> tuple[int, int]:
        """Per-request integers, padded, then next tokens, rows that stay, block tables; where the last two begin."""
        first, width, begins = 0, _aligned(num_requests), []
        for name in _PER_REQUEST:
            array = getattr(batch, name)
            into[first : first + len(array)] = array
            into[first + len(array) : first + width] = 0
            first += width
        for parts in ([batch.next_tokens_R], kept, [batch.block_table_BN.reshape(-1)]):
            begins.append(first)
            for array in parts:
                into[first : first + len(array)] = array
                first += len(array)
            first = _aligned(first)
        return begins[1], begins[2]

    def _inputs(self, num_requests: int) -> PassInputs:
        """Views of the places that `_send` fills."""
        width = _aligned(num_requests)
        first = len(_PER_REQUEST) * width
        columns = self._integers[:first].view(len(_PER_REQUEST), width)[:, :num_requests]
        return PassInputs(
            **dict(zip(_PER_REQUEST, columns, strict=True)),
            next_tokens_R=self._integers[first : first + self.limits.max_payload_rows],
            block_table_BN=self._table_BN[:num_requests],
            payload_RH=self._payload_RH,
        )

    def _replay(self, key: Key) -> Tensor:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        graph, drafts_BK = self._graphs[key]
        graph.replay()
        return drafts_BK

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


def _aligned(num_integers: int) -> int:
    """Rounded up to 16 bytes: Triton compiles a kernel again for a pointer that is not aligned so."""
    return -(-num_integers // 4) * 4
