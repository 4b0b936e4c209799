"""Messages between targets and drafters come out as they went in, and what does not fit is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from peagle.drafter.protocol import (
    FROM_DRAFTER,
    FROM_TARGET,
    MAX_PAYLOAD_BYTES,
    PROTOCOL,
    Answer,
    Hello,
    Int32Array,
    Reducer,
    Step,
    TargetShape,
    TargetStep,
    WireError,
    frames_of,
    read_drafts,
    read_message,
    read_step,
    refusal,
    step_frames,
)
from peagle.drafter.serving import reducer_of
from tests.support.head_factory import random_drafter
from tests.support.pass_requests import SWITCHES
from tests.support.transport_harness import SHAPE as SERVED_SHAPE
from tests.support.transport_harness import served_head

SHAPE = TargetShape(hidden_size=6, dtype="bfloat16", max_depth=3, max_num_requests=4, max_num_rows=10, vocab_size=100)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def step(**changes: Any) -> TargetStep[Int32Array]:
    made = TargetStep(
        slots_B=ints(2, 0, 3), heads_B=ints(0, 0, 1), depth_B=ints(3, 0, 1), row_offset_B=ints(1, 5, 9),
        start_B=ints(4, 1, 0), num_valid_B=ints(2, 3, 0),
        next_tokens_R=np.arange(10, dtype=np.int32), hidden_RH=torch.randn(10, 6).bfloat16(),
        prompts={0: ints(7, 8), 3: ints()}, finished_slots=[0, 1], number=5,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def arrived(frames: list[Any]) -> list[zmq.Frame]:
    return [zmq.Frame(bytes(frame)) for frame in frames]


def read(frames: list[Any], shape: TargetShape = SHAPE) -> TargetStep[Int32Array]:
    header, raw = read_message(arrived(frames), FROM_TARGET)
    assert isinstance(header, Step)
    return read_step(header, raw, 3, shape)


def through_the_wire(sent: TargetStep[Int32Array]) -> TargetStep[Int32Array]:
    return read(step_frames(sent))


def test_only_valid_rows_of_a_step_travel() -> None:
    sent = step()
    found = through_the_wire(sent)
    for name in ("slots_B", "heads_B", "start_B", "num_valid_B", "depth_B"):
        assert getattr(found, name).tolist() == getattr(sent, name).tolist()
    assert found.row_offset_B.tolist() == [0, 2, 5]
    assert found.next_tokens_R.tolist() == [1, 2, 5, 6, 7]
    assert torch.equal(found.hidden_RH, sent.hidden_RH[[1, 2, 5, 6, 7]])
    assert (found.session, found.number, list(found.finished_slots)) == (3, 5, [0, 1])
    assert {slot: tokens.tolist() for slot, tokens in found.prompts.items()} == {0: [7, 8], 3: []}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 50)), max_size=4))
def test_every_step_comes_out_as_it_went_in(requests: list[tuple[int, int, int, int]]) -> None:
    """Requests as (rejected rows before, valid rows, drafts wanted, start)."""
    offsets, num_rows = [], 0
    for rejected, valid, *_ in requests:
        offsets.append(num_rows + rejected)
        num_rows += rejected + valid
    columns = [ints(*(request[i] for request in requests)) for i in range(4)]
    sent = TargetStep(
        ints(*range(len(requests))), ints(*(0 for _ in requests)), columns[2], ints(*offsets), columns[3], columns[1],
        next_tokens_R=np.arange(num_rows, dtype=np.int32), hidden_RH=torch.randn(num_rows, 6).bfloat16(),
    )  # fmt: skip
    found = through_the_wire(sent)
    for b in range(len(requests)):
        theirs, ours = (slice(one.row_offset_B[b], one.row_offset_B[b] + one.num_valid_B[b]) for one in (found, sent))
        assert torch.equal(found.hidden_RH[theirs], sent.hidden_RH[ours])
        assert found.next_tokens_R[theirs].tolist() == sent.next_tokens_R[ours].tolist()
    assert found.start_B.tolist() == sent.start_B.tolist()
    assert found.depth_B.tolist() == sent.depth_B.tolist()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"next_tokens_R": bytes(16)}, r"a step of \[3, 3, 3, 3, 3\] requests and 4 rows"),
        ({"num_valid_B": bytes(12), "next_tokens_R": b""}, "0 rows have 0 bytes, not 60"),
        ({"depth_B": bytes(8)}, r"a step of \[3, 3, 2, 3, 3\] requests"),
        ({"slots_B": bytes(11)}, "buffer size must be a multiple of element size"),
        ({"start_B": "3"}, r"Expected `bytes`|Invalid base64"),
        ({"prompts": {2: bytes(4)}}, r"prompts\[2\] has 1 tokens"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    frames = step_frames(step())
    header = msgspec.msgpack.decode(frames[1]) | changes
    with pytest.raises((WireError, ValueError), match=problem):
        read([PROTOCOL, msgspec.msgpack.encode(header), *frames[2:]])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slots_B": ints(2, 2, 3)}, "names a slot twice"),
        ({"slots_B": ints(2, 0, 4)}, r"slots_B holds 0 .. 4, outside 0 .. 3"),
        ({"depth_B": ints(4, 0, 1)}, "depth_B holds 0 .. 4"),
        ({"start_B": ints(-1, 1, 0)}, "start_B holds -1"),
        ({"next_tokens_R": np.full(10, 100, np.int32)}, "next_tokens_R holds 100"),
        ({"finished_slots": [9]}, "finished_slots holds 9"),
        ({"prompts": {1: ints(1)}}, "slot 1, which has no rows"),
        ({"prompts": {2: ints(1)}}, r"prompts\[2\] has 1 tokens, not 0 or 5, start \+ 1"),
        ({"prompts": {0: ints(1, 100)}}, r"prompts\[0\] holds 1 .. 100"),
    ],
)
def test_a_value_that_does_not_fit_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        through_the_wire(step(**changes))


def test_more_than_was_agreed_is_refused() -> None:
    with pytest.raises(WireError, match="5 rows are more than the agreed 4"):
        read(step_frames(step()), dataclasses.replace(SHAPE, max_num_rows=4))


def test_an_answer_to_another_step_or_of_another_size_is_refused() -> None:
    drafts_BK = np.arange(6, dtype=np.int32).reshape(2, 3)
    message, raw = read_message(arrived(frames_of(Answer(5), drafts_BK.data)), FROM_DRAFTER)
    assert isinstance(message, Answer)
    assert read_drafts(message, raw, 5, 2, 3).tolist() == drafts_BK.tolist()
    for number, num_requests in ((6, 2), (5, 3)):
        with pytest.raises(WireError, match="an answer to step 5"):
            read_drafts(message, raw, number, num_requests, 3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": "int8"}, r"Invalid enum value 'int8' - at `\$.shape.dtype`"),
        ({"hidden_size": 0}, r"Expected `int` >= 1 - at `\$.shape.hidden_size`"),
        ({"max_depth": True}, r"Expected `int`, got `bool` - at `\$.shape.max_depth`"),
        ({"max_num_rows": 3}, "max_num_rows = 3 is below max_num_requests = 4"),
    ],
)
def test_a_bad_shape_of_a_hello_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    fields = msgspec.to_builtins(HELLO) | {"shape": dataclasses.asdict(SHAPE) | changes}
    with pytest.raises(WireError, match=problem):
        read_message(arrived([PROTOCOL, msgspec.msgpack.encode(fields)]), FROM_TARGET)


HELLO = Hello("target", SERVED_SHAPE, served_head(0).aux_layer_ids, {0: "digest0"}, "host")


def test_a_hello_comes_out_as_it_went_in() -> None:
    assert read_message(arrived(frames_of(HELLO)), FROM_TARGET)[0] == HELLO


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": {}}, "names no head"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_num_rows=2**30)}, f"at most {MAX_PAYLOAD_BYTES}"),
        ({"heads": {0: "digest0", 1: "other"}}, "head 1 of the target is other, this drafter has digest0"),
        ({"aux_layer_ids": (1, 2)}, "aux_layer_ids is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, vocab_size=8)}, "vocab_size is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_depth=50)}, "asks for up to 50 drafts"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_by_field(changes: dict[str, Any], reason: str) -> None:
    answer = refusal(msgspec.structs.replace(HELLO, **changes), {0: served_head(0)})
    assert answer is not None
    assert reason in answer


# The reducer


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reducer_travels_and_equals_the_drafter(name: str, dtype: torch.dtype) -> None:
    drafter = random_drafter(SWITCHES[name]).to(dtype)
    data = reducer_of(drafter).to_bytes()
    reducer = Reducer.from_bytes(data)
    aux_RX = torch.randn(5, drafter.config.fc_input_size, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    with torch.no_grad():
        torch.testing.assert_close(reducer.reduce(aux_RX), drafter.reduce(aux_RX), rtol=tolerance, atol=tolerance)
    assert (reducer.dtype, reducer.fc_HX.shape) == (dtype, (32, 96))
    assert reducer.eps == drafter.config.rms_norm_eps
    assert len(data) < reducer.fc_HX.nbytes + 4096, "more than fc and its norms travels"


FC, EPS = torch.randn(4, 12), torch.tensor([1e-5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no reducer"),
        (b"GET / HTTP/1.1\r\n\r\n", "18 bytes are no reducer"),
        (save({"fc_HX": FC, "eps": EPS})[:-8], "bytes are no reducer"),
        (save({"fc_HX": FC}), r"eps is \[\], not one number"),
        (save({"fc_HX": FC, "eps": EPS + 1}), "not one number between 0 and 1"),
        (save({"input_norm_X": FC[0].clone(), "eps": EPS}), "not fc_HX and its norms"),
        (save({"fc_HX": FC, "lm_head": FC.clone(), "eps": EPS}), "'lm_head': 'torch.float32'"),
        (save({"fc_HX": FC, "input_norm_X": FC[0].double(), "eps": EPS}), "in one type"),
        (save({"fc_HX": FC[0].clone(), "eps": EPS}), r"fc_HX has shape \[12\]"),
        (save({"fc_HX": FC, "input_norm_X": FC[0, :11].clone(), "eps": EPS}), r"has shape \[11\], not \[12\]"),
        (save({"fc_HX": FC, "fc_norm_CS": FC.clone(), "eps": EPS}), r"has shape \[4, 12\], not \[C, S\]"),
    ],
)
def test_a_damaged_reducer_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reducer.from_bytes(data)
