"""When the engine's process sends a request's tokens: no more often than a reader gets to see them.

Enters: the outputs of each step, one for each request that got tokens. Leaves: fewer outputs with the same tokens in
the same order. The process that owns the engine client unpacks, detokenizes and counts each output in Python, on the
event loop that also takes in new requests; with hundreds of requests that, and not the GPU, is what is full. It makes a
chunk only of `SamplingParams.stream_interval` tokens anyway, so what is no chunk yet may as well wait here.

A request's first output goes out at once, and so do its last and any with more in it than tokens.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput

from peagle.vllm.acceptance import OUTPUTS_HEADER

MAX_HELD_TOKENS = 32
"""That make an output, of whole answers too, of which nobody sees a part: the counts of a request follow its steps by
no more, however long the chunks that its client asks for."""

STOP_STRING_TOKENS = 8
"""Stop strings are found in the client's process, from which the engine then hears that it is to stop: no more than a
step with drafts may bring behind one."""

_HELD_FIELDS = ("request_id", "new_token_ids", "trace_headers")
_OTHERS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _HELD_FIELDS)
_others_of = attrgetter(*_OTHERS)
_NOTHING_ELSE = _others_of(EngineCoreOutput("", []))


@dataclass(slots=True)
class _HeldBack:
    """Of a request with an output before and one to come. `least`: tokens that an output carries at least."""

    least: int
    num_outputs: int = 0
    token_ids: list[int] = field(default_factory=list)


class OutputCoalescer:
    """Holds back a request's tokens until they are as many as its reader gets at a time.

    A request that is aborted takes with it what is held of it (`forget`). Not thread-safe.

    Args:
        stream_interval: the engine's own least number of tokens of a chunk.
    """

    def __init__(self, stream_interval: int = 1) -> None:
        self._stream_interval = stream_interval
        self._held: dict[str, _HeldBack] = {}

    def due(self, outputs: Iterable[EngineCoreOutput], requests: Mapping[str, Any]) -> list[EngineCoreOutput]:
        """The outputs of a step that go out now, each with the tokens held of its request in front of its own.

        `requests`: vLLM's `Request`s that go on, by id.
        """
        found = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                if output.finish_reason is None and (request := requests.get(output.request_id)) is not None:
                    self._held[output.request_id] = _HeldBack(self._least(request))
                found.append(output)
                continue
            if held.least > 1:
                held.token_ids += output.new_token_ids
                held.num_outputs += 1
                if len(held.token_ids) < held.least and all(map(is_, _others_of(output), _NOTHING_ELSE)):
                    continue
                output.new_token_ids = held.token_ids
                if held.num_outputs > 1:
                    output.trace_headers = {**(output.trace_headers or {}), OUTPUTS_HEADER: str(held.num_outputs)}
                held.token_ids, held.num_outputs = [], 0
            if output.finish_reason is not None:
                del self._held[output.request_id]
            found.append(output)
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def _least(self, request: Any) -> int:
        params = request.sampling_params
        if params is None or request.resumable:
            return 1
        stream_interval: int = max(params.stream_interval or 1, self._stream_interval)
        if params.stop:
            return min(stream_interval, STOP_STRING_TOKENS)
        if params.output_kind == RequestOutputKind.FINAL_ONLY:
            return MAX_HELD_TOKENS
        num_parts = math.ceil(stream_interval / MAX_HELD_TOKENS)
        return math.ceil(stream_interval / num_parts)
