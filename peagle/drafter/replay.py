"""The usual step of a target on a GPU in few launches: all rows of the batch, reduced by one head, go to one drafter,
whose drafts the stream waits for.

One CUDA graph is: the reducer's norms and `fc`, the rows into the mailbox's payload, the rest of the request, the wait
for the drafts. It knows of no session: what differs from step to step lies in `StepWords`, which a copy brings to the
GPU before it. A graph is made for (reducer, rows), rows rounded up to one of the target's own sizes, at first use, and
goes with its reducer.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.drafter.mailbox import StepWords, copy_payload, post_step, take_drafts
from peagle.drafter.protocol import Reducer, TargetShape


class StepReplayer:
    """Of one engine, used by its thread, in the order of its stream; without a GPU it does the same at once.

    integers: where starts, valid rows and next tokens of a step are to be, int32 one after another.
    sources_R: int32, where the target's row of each row that travels is to be, -1 for none: its place stays empty.
    drafts_BK, chance_BK: int64 and float32, where drafts and their chances come; the next step overwrites them.
    tap_views: places in the buffer of `take_taps` where the target may leave each layer's hidden states itself; none
    before its first call.
    """

    tap_views: Sequence[Tensor] = ()

    def __init__(self, shape: TargetShape, sizes: Sequence[int], device: torch.device) -> None:
        """sizes: numbers of the target's rows to have graphs of, ascending; at least one."""
        self._sizes, self._dtype, self._device = sizes, shape.torch_dtype, device
        self.integers = torch.zeros(2 * shape.max_num_requests + shape.max_num_rows, dtype=torch.int32, device=device)
        self.sources_R = torch.zeros(shape.max_num_rows, dtype=torch.int32, device=device)
        self.drafts_BK = torch.zeros(shape.max_num_requests, shape.max_depth, dtype=torch.int64, device=device)
        self.chance_BK = torch.zeros_like(self.drafts_BK, dtype=torch.float32)
        self._words_W = torch.zeros(len(StepWords._fields), dtype=torch.int64, device=device)
        self._taps_RX: Tensor | None = None
        self._graphs: weakref.WeakKeyDictionary[Reducer, dict[int, torch.cuda.CUDAGraph]] = weakref.WeakKeyDictionary()
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def holds(self, num_rows: int) -> bool:
        """Whether there is a size for so many rows of the target."""
        return num_rows <= self._sizes[-1]

    def take_taps(self, aux: Sequence[Tensor], num_rows: int) -> Tensor:
        """The first rows of each layer's tapped hidden states, side by side in a buffer: returns all of it."""
        if self._taps_RX is None:
            self._taps_RX = aux[0].new_zeros(self._sizes[-1], sum(layer.shape[-1] for layer in aux))
            self.tap_views = self._taps_RX.split([layer.shape[-1] for layer in aux], dim=-1)
        if aux[0].data_ptr() != self._taps_RX.data_ptr():
            torch.cat([layer[:num_rows] for layer in aux], dim=-1, out=self._taps_RX[:num_rows])
        return self._taps_RX

    def prepare(self, reducer: Reducer, aux: Sequence[Tensor], num_rows: int) -> Callable[[Tensor], None]:
        """What hands over a step that `holds`, given its words (`Mailbox.words`), and waits for the drafts. The step's
        numbers are in `integers` and `sources_R`. Before another step is prepared, this one is run or given up.

        num_rows: of the target; more may travel, as the words say.
        """
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        taps_RX = self.take_taps(aux, num_rows)[:size]
        launch: Callable[[], None] = functools.partial(self._hand_over, reducer, taps_RX)
        if self._device.type == "cuda":
            graphs = self._graphs.setdefault(reducer, {})
            if size not in graphs:
                graphs[size] = self._capture(reducer, taps_RX)
            launch = graphs[size].replay

        def run(words_W: Tensor) -> None:
            self._words_W.copy_(words_W, non_blocking=True)
            launch()

        return run

    def _hand_over(self, reducer: Reducer, taps_RX: Tensor) -> None:
        copy_payload(self._words_W, reducer.reduce(taps_RX).to(self._dtype), self.sources_R)
        post_step(self._words_W, self.integers)
        take_drafts(self._words_W, self.drafts_BK, self.chance_BK)

    def _capture(self, reducer: Reducer, taps_RX: Tensor) -> torch.cuda.CUDAGraph:
        """On a stream of its own, in the order of the engine's: with it goes the workspace of matrix products, which
        replays use. Without `torch.cuda.graph`, which collects garbage, and while other threads use the GPU; the
        mailbox's kernels are compiled by then (`Mailbox.pin`)."""
        engine_stream, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(engine_stream)
        with torch.cuda.stream(self._stream):
            reducer.reduce(taps_RX)  # loads its kernels
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._hand_over(reducer, taps_RX)
            graph.capture_end()
        engine_stream.wait_stream(self._stream)
        return graph
