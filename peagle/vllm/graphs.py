"""Full CUDA graphs for batches that verify fewer than K_max drafts.

vLLM captures full graphs for decode batches of exactly 1 + K_max tokens a request and sends every other batch to its
piecewise graphs. Here a *tier* is a depth k with full graphs of its own, of 1 + k tokens a request. A batch runs on a
tier if none of its requests has more tokens than the tier gives it; rows at the end that no request needs are padding,
exactly as vLLM pads missing requests: their KV slot is -1, no query points at them, and nothing is sampled from them.

Enters: shapes. Leaves: graph keys (vLLM's `BatchDescriptor`), one choice per step. Holds no tensor and starts nothing;
`peagle.vllm.graph_worker` puts it into vLLM's model runner.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from peagle.vllm.engine import GRAPHS_KEY

ALL_COUNTS_UP_TO = 8
"""Every batch of up to so many requests gets graphs of exactly its size: there a row of padding costs most."""

COUNTS_PER_DOUBLING = 4
"""Graphs between n and 2 n requests: a batch is padded by at most a quarter, and by an eighth on average."""


@dataclass(frozen=True)
class GraphSettings:
    """What the engine's `additional_config[GRAPHS_KEY]` says.

    Attributes:
        depths: tiers, ascending; K_max is always one of them. Empty: vLLM's own graphs, only counted.
        max_padding_tokens: a batch that fits no tier exactly is padded onto one by at most so many tokens.
    """

    depths: tuple[int, ...]
    max_padding_tokens: int

    @classmethod
    def from_config(cls, additional_config: Any, max_draft_tokens: int) -> "GraphSettings":
        """Settings of an engine with K_max = `max_draft_tokens`.

        Raises:
            ValueError: they are missing, a key is unknown, or a value is out of range; the message says which.
        """
        found = additional_config.get(GRAPHS_KEY) if isinstance(additional_config, Mapping) else None
        if not isinstance(found, Mapping):
            raise ValueError(f"additional_config[{GRAPHS_KEY!r}] must be set with this worker: use engine_kwargs()")
        if unknown := sorted(set(found) - {"depths", "max_padding_tokens"}):
            raise ValueError(f"additional_config[{GRAPHS_KEY!r}] has unknown keys {unknown}")
        depths, max_padding_tokens = found.get("depths", ()), found.get("max_padding_tokens", 0)
        for depth in depths:
            if type(depth) is not int or not 0 <= depth <= max_draft_tokens:
                raise ValueError(f"full_graph_depths: {depth!r} is not an integer in 0..{max_draft_tokens} (K_max)")
        if type(max_padding_tokens) is not int or max_padding_tokens < 0:
            raise ValueError(f"max_graph_padding_tokens must be an integer of at least 0, not {max_padding_tokens!r}")
        tiers = tuple(sorted({*depths, max_draft_tokens})) if depths else ()
        return cls(tiers, max_padding_tokens)


@dataclass(frozen=True)
class StepShape:
    """A batch: requests, the most tokens that one of them has, and tokens of all together."""

    num_requests: int
    max_query_len: int
    num_tokens: int


def request_counts(query_len: int, max_requests: int, max_tokens: int) -> tuple[int, ...]:
    """Batch sizes, in requests, for which a tier of `query_len` tokens a request gets a graph; ascending.

    Every size up to `ALL_COUNTS_UP_TO`, then `COUNTS_PER_DOUBLING` for each doubling, and the largest that fits. vLLM's
    own list has a graph for each 8 or 16 tokens, which for several tiers is a minute of capturing.
    """
    largest = min(max_requests, max_tokens // query_len)
    counts, start = list(range(1, ALL_COUNTS_UP_TO + 1)), ALL_COUNTS_UP_TO
    while start < largest:
        counts.extend(start + start * part // COUNTS_PER_DOUBLING for part in range(1, COUNTS_PER_DOUBLING + 1))
        start *= 2
    fitting = [count for count in counts if count < largest]
    return (*fitting, largest) if largest > 0 else ()


class GraphTable:
    """The captured full graphs of all tiers, and which of them a batch runs on."""

    def __init__(
        self,
        settings: GraphSettings,
        max_requests: int,
        max_tokens: int,
    ) -> None:
        self.max_padding_tokens = settings.max_padding_tokens
        self._counts: dict[int, tuple[int, ...]] = {}
        # By tier: the captured batch size for 0, 1, 2, ... requests.
        self._rounded: dict[int, list[int]] = {}
        for query_len in (1 + depth for depth in settings.depths):
            counts = request_counts(query_len, max_requests, max_tokens)
            rounded = [0]
            for count in counts:
                rounded.extend([count] * (count + 1 - len(rounded)))
            self._counts[query_len] = counts
            self._rounded[query_len] = rounded

    def descriptors(self) -> Iterator[BatchDescriptor]:
        """Keys of all graphs."""
        for query_len, counts in self._counts.items():
            for count in counts:
                yield BatchDescriptor(num_tokens=count * query_len, num_reqs=count, uniform=True)

    def choose(self, shape: StepShape) -> BatchDescriptor | None:
        """The graph for `shape`, None if it is better off where vLLM sends it.

        A batch whose requests all have exactly a tier's tokens takes that tier. Any other takes the graph with the
        fewest tokens that holds it, if that adds at most `max_padding_tokens`.
        """
        exact = shape.num_tokens == shape.num_requests * shape.max_query_len
        best: BatchDescriptor | None = None
        for query_len, rounded in self._rounded.items():
            if query_len < shape.max_query_len or shape.num_requests >= len(rounded):
                continue
            count = rounded[shape.num_requests]
            graph = BatchDescriptor(num_tokens=count * query_len, num_reqs=count, uniform=True)
            if exact and query_len == shape.max_query_len:
                return graph
            if best is None or graph.num_tokens < best.num_tokens:
                best = graph
        if best is None or best.num_tokens - shape.num_tokens > self.max_padding_tokens:
            return None
        return best


class TieredDispatcher(CudagraphDispatcher):
    """vLLM's dispatcher with keys for every tier.

    The caller announces the shape of its batch with `expecting`; without one, everything is as in vLLM.
    """

    def __init__(self, vllm_config: VllmConfig, settings: GraphSettings) -> None:
        super().__init__(vllm_config)
        self._settings = settings
        self._table: GraphTable | None = None
        self._shape: StepShape | None = None

    @contextmanager
    def expecting(self, shape: StepShape | None) -> Iterator[None]:
        """Dispatch calls inside are about a batch of `shape`."""
        self._shape = shape
        try:
            yield
        finally:
            self._shape = None

    def initialize_cudagraph_keys(self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1) -> None:
        """vLLM's keys and those of the tiers.

        Raises:
            ValueError: in this mode vLLM captures no full graphs for decode batches, or none at all.
        """
        super().initialize_cudagraph_keys(cudagraph_mode, uniform_decode_query_len)
        if cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not cudagraph_mode.separate_routine():
            raise ValueError(
                f"full_graph_depths is set, but vLLM settled on cudagraph_mode {cudagraph_mode.name}: set "
                "compilation_config.cudagraph_mode to FULL_AND_PIECEWISE (its default) and enforce_eager to false"
            )
        max_tokens = self.compilation_config.max_cudagraph_capture_size
        max_requests = self.vllm_config.scheduler_config.max_num_seqs
        self._table = GraphTable(self._settings, max_requests, max_tokens or 0)
        # vLLM's keys for K_max are finer than a tier's; a batch would never be sent there.
        full = self.cudagraph_keys[CUDAGraphMode.FULL]
        full.difference_update([key for key in full if key.uniform])
        for descriptor in self._table.descriptors():
            self.add_cudagraph_key(CUDAGraphMode.FULL, descriptor)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: Set[CUDAGraphMode] | None = None,
        invalid_modes: Set[CUDAGraphMode] | None = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The tier's graph where the announced shape has one and full graphs are allowed, else vLLM's own choice."""
        allowed = set(valid_modes or CUDAGraphMode.valid_runtime_modes()) - set(invalid_modes or ())
        if self._shape is not None and self._table is not None and self.keys_initialized:
            graph = self._table.choose(self._shape)
            if graph is not None and CUDAGraphMode.FULL in allowed:
                return CUDAGraphMode.FULL, graph
        choice: tuple[CUDAGraphMode, BatchDescriptor] = super().dispatch(
            num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes, invalid_modes
        )
        return choice

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """vLLM's list, largest first, in an order that all ranks share: capture runs collectives."""
        return [
            (mode, sorted(descriptors, key=lambda d: (d.num_tokens, d.num_active_loras, d.num_reqs or 0), reverse=True))
            for mode, descriptors in super().get_capture_descs()
        ]
