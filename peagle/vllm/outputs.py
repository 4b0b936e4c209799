"""Stream coalescing in the engine's process: a request's tokens go out in chunks, at the rate of a reader.

Enters: the outputs of each step, one for each request that got tokens. Leaves: fewer outputs with the same tokens in
the same order. The process of the engine's client unpacks, detokenizes and counts each output in Python, on the event
loop that also accepts new requests. With hundreds of requests that process is full before the GPU is.

A request's first output goes out at once. So do its last one, and any that holds more than tokens. So does the second
one of a stream: the first token may have no text, as the first bytes of a character have none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput

MAX_BUFFERED_TOKENS = 32
"""Tokens of an output, at least, of a request that is answered as a whole, or whose client asks for longer chunks. The
counts of such a request lag behind its steps by no more."""

STOP_STRING_TOKENS = 8
"""Tokens of an output, at most, of a request with stop strings. The client's process finds these and then tells the
engine to stop; a step with drafts may bring as many tokens behind one."""

MAX_CHUNKS_PER_S = 500
"""Chunks of all streams of a front-end process together, where each has `STREAM_CHUNKS_PER_S`. A chunk costs that
process time, whatever is in it. Where it is full, the first token of a new request waits for hundreds of milliseconds
(benchmarks/streams.py, and the results of benchmarks/headline.py on GPUs)."""

STREAM_CHUNKS_PER_S = 5
"""Chunks that each stream gets, at least, as far as the engine makes tokens."""

RATE_WINDOW_S = 0.25
"""Window over which the rate of tokens is measured."""


class ChunkSize:
    """The least number of tokens of a chunk, by the rate of the last window; 1 up to `MAX_CHUNKS_PER_S` tokens/s for
    each front-end process."""

    def __init__(self) -> None:
        self.tokens_per_chunk = 1
        self._num_tokens, self._since_s = 0, 0.0

    def observe(self, num_tokens: int, buffers: "ValuesView[_Buffer]", now_s: float) -> None:
        """Count a step.

        Args:
            num_tokens: output tokens of the step.
            buffers: of the requests that are being answered.
            now_s: when the step ended, monotonic seconds.
        """
        self._num_tokens += num_tokens
        if (elapsed_s := now_s - self._since_s) < RATE_WINDOW_S:
            return
        rate = self._num_tokens / elapsed_s
        num_front_ends = len({buffer.front_end for buffer in buffers})
        smooth = int(rate / max(1, len(buffers)) / STREAM_CHUNKS_PER_S)
        self.tokens_per_chunk = max(1, min(math.ceil(rate / MAX_CHUNKS_PER_S / max(1, num_front_ends)), smooth))
        self._num_tokens, self._since_s = 0, now_s


_TOKEN_FIELDS = ("request_id", "new_token_ids", "trace_headers")
_OTHERS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _TOKEN_FIELDS)
_others_of = attrgetter(*_OTHERS)
_NOTHING_ELSE = _others_of(EngineCoreOutput("", []))


@dataclass(slots=True)
class _Buffer:
    """Tokens of a request that wait for its next output. It carries at least `least` tokens; with 0, the engine's
    `ChunkSize`, but no more than `most`, and what there is if it `is_second`. front_end: number of the request's
    front-end process."""

    front_end: int
    least: int
    most: float = math.inf
    is_second: bool = True
    token_ids: list[int] = field(default_factory=list)


class OutputCoalescer:
    """Buffers each request's tokens until they fill a chunk. Not thread-safe.

    Args:
        stream_interval: the engine's own least number of tokens of a chunk; 1, vLLM's default, leaves it to
            `ChunkSize`.
    """

    def __init__(self, stream_interval: int = 1) -> None:
        self._stream_interval = stream_interval if stream_interval > 1 else 0
        self._chunk_size = ChunkSize()
        self._buffers: dict[str, _Buffer] = {}

    def coalesce(
        self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any], now_s: float
    ) -> list[EngineCoreOutput]:
        """The outputs of a step that go out now, each with the buffered tokens of its request before its own.

        Args:
            outputs: of the step; their token lists may be changed.
            requests: vLLM's `Request`s that go on, by id.
            now_s: when the step ended, monotonic seconds.
        """
        num_tokens = sum([len(output.new_token_ids) for output in outputs])
        self._chunk_size.observe(num_tokens, self._buffers.values(), now_s)
        found = []
        for output in outputs:
            buffer = self._buffers.get(output.request_id)
            if buffer is None:
                if output.finish_reason is None and (request := requests.get(output.request_id)) is not None:
                    self._buffers[output.request_id] = self._make_buffer(request)
                found.append(output)
                continue
            least: float = buffer.least
            if not least:
                least = 1 if buffer.is_second else min(self._chunk_size.tokens_per_chunk, buffer.most)
                buffer.is_second = False
            if least > 1 or buffer.token_ids:
                buffer.token_ids += output.new_token_ids
                if len(buffer.token_ids) < least and all(map(is_, _others_of(output), _NOTHING_ELSE)):
                    continue
                output.new_token_ids, buffer.token_ids = buffer.token_ids, []
            if output.finish_reason is not None:
                del self._buffers[output.request_id]
            found.append(output)
        return found

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the buffered tokens of aborted requests."""
        for request_id in request_ids:
            self._buffers.pop(request_id, None)

    def _make_buffer(self, request: Any) -> _Buffer:
        params, front_end = request.sampling_params, request.client_index
        if params is None or request.resumable:
            return _Buffer(front_end, 1)
        interval: int = max(params.stream_interval or 0, self._stream_interval)
        if params.stop:
            return _Buffer(front_end, min(interval, STOP_STRING_TOKENS), STOP_STRING_TOKENS)
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            return _Buffer(front_end, MAX_BUFFERED_TOKENS)
        num_parts = max(1, math.ceil(interval / MAX_BUFFERED_TOKENS))
        return _Buffer(front_end, math.ceil(interval / num_parts))
