"""Which outputs of the engine's process wait for the next, and that no token is lost or comes twice."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from peagle.vllm.outputs import (
    MAX_BUFFERED_TOKENS,
    MAX_CHUNKS_PER_S,
    RATE_WINDOW_S,
    STOP_STRING_TOKENS,
    STREAM_CHUNKS_PER_S,
    ChunkSize,
    OutputCoalescer,
    _Buffer,
)

DELTA = RequestOutputKind.DELTA


class Engine:
    """Requests that get tokens 0, 1, 2, ..., and what goes out of them. Its clock stands still unless it is moved."""

    def __init__(self, *names: str, interval: int = 1, is_resumable: bool = False, **sampling: Any) -> None:
        params = SamplingParams(**{"stream_interval": 6, "output_kind": DELTA, **sampling})
        self.requests: dict[str, Any] = {
            name: SimpleNamespace(sampling_params=params, resumable=is_resumable, client_index=index)
            for index, name in enumerate(names)
        }
        self.coalescer = OutputCoalescer(interval)
        self.made = dict.fromkeys(names, 0)
        self.sent: list[EngineCoreOutput] = []
        self.now_s = 0.0

    def step(self, name: str = "a", num_tokens: int = 2, **more: Any) -> list[int] | None:
        """The tokens that go out, None where none do."""
        first = self.made[name]
        self.made[name] += num_tokens
        output = EngineCoreOutput(name, list(range(first, self.made[name])), **more)
        if output.finish_reason is not None:
            del self.requests[name]
        due = self.coalescer.coalesce([output], self.requests, self.now_s)
        self.sent += due
        return due[0].new_token_ids if due else None


def test_tokens_go_out_by_the_chunk_after_the_first_and_before_the_last() -> None:
    engine = Engine("a")
    assert [engine.step() for _ in range(6)] == [[0, 1], None, None, [2, 3, 4, 5, 6, 7], None, None]
    assert engine.step(num_tokens=1, finish_reason=FinishReason.LENGTH) == [8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("sampling", "interval", "least"),
    [
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, 1, MAX_BUFFERED_TOKENS),
        ({"output_kind": RequestOutputKind.FINAL_ONLY, "stop": ["x"]}, 1, 6),
        ({"output_kind": RequestOutputKind.FINAL_ONLY, "stop": ["x"], "stream_interval": None}, 1, 1),
        ({"output_kind": RequestOutputKind.CUMULATIVE}, 1, 6),
        ({"stream_interval": None}, 4, 4),
        ({"stream_interval": None}, 1, 1),
        ({"stream_interval": 3}, 9, 9),
        ({"stream_interval": 2 * MAX_BUFFERED_TOKENS + 2}, 1, math.ceil((2 * MAX_BUFFERED_TOKENS + 2) / 3)),
        ({"stream_interval": 20, "stop": ["x"]}, 1, 8),
        ({"is_resumable": True}, 1, 1),
    ],
)
def test_how_much_waits(sampling: dict[str, Any], interval: int, least: int) -> None:
    engine = Engine("a", interval=interval, **sampling)
    engine.step(num_tokens=1)
    assert [engine.step(num_tokens=1) is not None for _ in range(least)] == [False] * (least - 1) + [True]


@pytest.mark.parametrize(
    ("tokens_per_s", "num_requests", "expected"),
    [
        (MAX_CHUNKS_PER_S, 1, 1),
        (20 * MAX_CHUNKS_PER_S, 16, 20),
        (20 * MAX_CHUNKS_PER_S, 20 * MAX_CHUNKS_PER_S // (12 * STREAM_CHUNKS_PER_S), 12),
        (20 * MAX_CHUNKS_PER_S, 10 * MAX_CHUNKS_PER_S, 1),
        (1000 * MAX_CHUNKS_PER_S, 128, 1000 * MAX_CHUNKS_PER_S // (128 * STREAM_CHUNKS_PER_S)),
        (20 * MAX_CHUNKS_PER_S, 0, 20),
    ],
)
def test_each_stream_has_its_chunks_a_second(tokens_per_s: int, num_requests: int, expected: int) -> None:
    pace, buffers = ChunkSize(), {number: _Buffer(0, 1) for number in range(num_requests)}.values()
    pace.observe(tokens_per_s, buffers, 1.0)
    assert pace.tokens_per_chunk == expected
    pace.observe(tokens_per_s, buffers, 1.0 + RATE_WINDOW_S / 2)
    assert pace.tokens_per_chunk == expected, "a window is not over"
    pace.observe(0, buffers, 1e6)
    assert pace.tokens_per_chunk == 1, "after a pause nothing is left of it"


@pytest.mark.parametrize(
    ("sampling", "least"),
    [({}, 12), ({"stop": ["x"]}, STOP_STRING_TOKENS), ({"stream_interval": 3}, 3), ({"stream_interval": 1}, 1)],
)
def test_streams_under_way_follow_the_pace_unless_their_client_says(sampling: dict[str, Any], least: int) -> None:
    engine = Engine("a", "load", **{"stream_interval": None, **sampling})
    for name in ("a", "load", "a"):
        engine.step(name, 1)
    engine.now_s = 1.0
    engine.step("load", 12 * 2 * MAX_CHUNKS_PER_S - 9)  # two front-end processes have a request each
    sizes = [len(tokens) for _ in range(40) if (tokens := engine.step("a", 1)) is not None]
    assert sizes[1:] == [least] * (len(sizes) - 1)
    assert len(sizes) >= 3


def test_the_second_output_of_a_stream_does_not_wait() -> None:
    engine = Engine("load", "a", stream_interval=None)
    engine.step("load", 1)
    engine.now_s = 1.0
    engine.step("load", 100 * MAX_CHUNKS_PER_S)
    assert [engine.step("a", 4) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], None]


LOGPROBS = LogprobsLists(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1))


@pytest.mark.parametrize(
    "more",
    [
        {"new_logprobs": LOGPROBS},
        {"events": [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)]},
        {"num_nans_in_logits": 3},
        {"finish_reason": FinishReason.STOP, "stop_reason": "x"},
        {"finish_reason": FinishReason.ERROR},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_holds_more_than_tokens_goes_out_as_it_is_behind_what_waited(more: dict[str, Any]) -> None:
    engine = Engine("a")
    engine.step()
    engine.step(trace_headers={"traceparent": "00-1"})
    assert engine.step(num_tokens=1, **more, trace_headers={"traceparent": "00-1"}) == [2, 3, 4]
    for name, value in more.items():
        assert getattr(engine.sent[-1], name) is value
    assert engine.sent[-1].trace_headers == {"traceparent": "00-1"}
    if "finish_reason" not in more:
        assert [engine.step(), engine.step()] == [None, None]
