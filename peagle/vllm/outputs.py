"""When the engine's process sends a request's tokens: no more often than a reader gets to see them.

Enters: the outputs of each step, one for each request that got tokens. Leaves: fewer outputs with the same tokens in
the same order. The process that owns the engine client unpacks, detokenizes and counts each output in Python, makes a
chunk of a stream of it, and does so on the event loop that also takes in new requests; with hundreds of requests that,
and not the GPU, is what is full.

A request's first output goes out at once, and so do its last and any with more in it than tokens.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput

MAX_HELD_TOKENS = 32
"""That make an output of a whole answer, of which nobody sees a part, and of a stream whose client asks for longer
chunks: the counts of such a request follow its steps by no more. Those of a stream at the pace follow by a chunk."""

STOP_STRING_TOKENS = 8
"""Stop strings are found in the client's process, from which the engine then hears that it is to stop: no more than a
step with drafts may bring behind one."""

MAX_CHUNKS_PER_S = 300
"""Of all streams of an engine together, where each has `STREAM_CHUNKS_PER_S`. A chunk costs vLLM's API process
time, whatever is in it; where that process is full, the first token of a new request waits for hundreds of milliseconds
(benchmarks/streams.py, and the results of benchmarks/headline.py on GPUs)."""

STREAM_CHUNKS_PER_S = 5
"""What the reader of a stream gets at least, as far as the engine makes tokens."""

PACE_WINDOW_S = 0.25
"""Over which the rate is taken."""


class StreamPace:
    """How many tokens a chunk of a stream carries at least, by the rate of the last window; 1 up to `MAX_CHUNKS_PER_S`
    tokens a second."""

    def __init__(self) -> None:
        self.tokens_per_chunk = 1
        self._num_tokens, self._since_s = 0, 0.0

    def observe(self, num_tokens: int, num_requests: int, now_s: float) -> None:
        """A step's output tokens and the requests that get some. `now_s`: when it ended, monotonic seconds."""
        self._num_tokens += num_tokens
        if (elapsed_s := now_s - self._since_s) < PACE_WINDOW_S:
            return
        rate = self._num_tokens / elapsed_s
        smooth = int(rate / max(1, num_requests) / STREAM_CHUNKS_PER_S)
        self.tokens_per_chunk = max(1, min(math.ceil(rate / MAX_CHUNKS_PER_S), smooth))
        self._num_tokens, self._since_s = 0, now_s


_HELD_FIELDS = ("request_id", "new_token_ids", "trace_headers")
_OTHERS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _HELD_FIELDS)
_others_of = attrgetter(*_OTHERS)
_NOTHING_ELSE = _others_of(EngineCoreOutput("", []))


@dataclass(slots=True)
class _HeldBack:
    """Of a request with an output before and one to come. An output carries at least `least` tokens; with 0, what the
    pace says, but no more than `most`."""

    least: int
    most: float = math.inf
    token_ids: list[int] = field(default_factory=list)


class OutputCoalescer:
    """Holds back a request's tokens until they are as many as its reader gets at a time.

    A request that is aborted takes with it what is held of it (`forget`). Not thread-safe.

    Args:
        stream_interval: the engine's own least number of tokens of a chunk; 1, vLLM's default, leaves it to the pace.
    """

    def __init__(self, stream_interval: int = 1) -> None:
        self._stream_interval = stream_interval if stream_interval > 1 else 0
        self._pace = StreamPace()
        self._held: dict[str, _HeldBack] = {}

    def due(
        self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any], now_s: float
    ) -> list[EngineCoreOutput]:
        """The outputs of a step that go out now, each with the tokens held of its request in front of its own.

        `requests`: vLLM's `Request`s that go on, by id. `now_s`: when the step ended, monotonic seconds.
        """
        self._pace.observe(sum([len(output.new_token_ids) for output in outputs]), len(self._held), now_s)
        found = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                if output.finish_reason is None and (request := requests.get(output.request_id)) is not None:
                    self._held[output.request_id] = self._rule(request)
                found.append(output)
                continue
            least = held.least or min(self._pace.tokens_per_chunk, held.most)
            if least > 1 or held.token_ids:
                held.token_ids += output.new_token_ids
                if len(held.token_ids) < least and all(map(is_, _others_of(output), _NOTHING_ELSE)):
                    continue
                output.new_token_ids, held.token_ids = held.token_ids, []
            if output.finish_reason is not None:
                del self._held[output.request_id]
            found.append(output)
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def _rule(self, request: Any) -> _HeldBack:
        """What of this request waits, as its parameters say."""
        params = request.sampling_params
        if params is None or request.resumable:
            return _HeldBack(1)
        interval: int = max(params.stream_interval or 0, self._stream_interval)
        if params.stop:
            return _HeldBack(min(interval, STOP_STRING_TOKENS), STOP_STRING_TOKENS)
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            return _HeldBack(MAX_HELD_TOKENS)
        num_parts = max(1, math.ceil(interval / MAX_HELD_TOKENS))
        return _HeldBack(math.ceil(interval / num_parts))
