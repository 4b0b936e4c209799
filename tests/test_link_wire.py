"""Messages over TCP arrive whole or not at all, and what is no message is said to be none."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from peagle.drafter.protocol import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    MessageReader,
    PeerClosed,
    WireError,
    drafts_of,
    max_step_bytes,
    read_step,
    refusal,
    send_drafts,
    send_message,
    send_step,
)
from peagle.drafter.steps import TargetShape, TargetStep
from tests.transport_harness import SHAPE as SERVED_SHAPE
from tests.transport_harness import served_head

Pair = tuple[socket.socket, socket.socket]
SHAPE = TargetShape(hidden_size=6, dtype="bfloat16", max_depth=3, max_num_requests=4, max_num_rows=10, vocab_size=100)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_come_out_as_they_went_in_however_they_are_cut(pair: Pair) -> None:
    ours, theirs = pair
    theirs.setblocking(False)
    reader = MessageReader(theirs, 1000, "peer")
    parts = [memoryview(np.arange(50, dtype=np.int32).data), memoryview(b""), memoryview(b"xyz")]
    sink = socket.socketpair()
    send_message(sink[0], "a", {"x": 1}, parts)
    send_message(sink[0], "b", {})
    data = sink[1].recv(10_000)
    found: list[tuple[str, dict[str, object], bytes]] = []
    for i in range(len(data)):
        ours.send(data[i : i + 1])
        if (message := reader.read()) is not None:
            found.append((message.kind, message.fields, bytes(message.raw)))
    assert found == [("a", {"x": 1}, np.arange(50, dtype=np.int32).tobytes() + b"xyz"), ("b", {}, b"")]
    for end in sink:
        end.close()


def test_a_large_message_of_many_parts_passes_a_small_socket_buffer(pair: Pair) -> None:
    ours, theirs = pair
    parts = [memoryview(bytes([i % 251]) * 5000) for i in range(1500)]
    sender = threading.Thread(target=send_message, args=(ours, "big", {}, parts))
    sender.start()
    message = MessageReader(theirs, 10_000_000, "peer").read_within(10)
    sender.join()
    assert bytes(message.raw) == b"".join(parts)


def _head(num_text_bytes: int, num_raw_bytes: int) -> bytes:
    return struct.pack("<4sHHIQ", b"PEGL", PROTOCOL_VERSION, 0, num_text_bytes, num_raw_bytes)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak this protocol: it sent b'HTTP/1.1 400"),
        (b"\x00\x01", "does not speak this protocol"),
        (
            struct.pack("<4sHHIQ", b"PEGL", 7, 0, 2, 0),
            f"version 7, this side {PROTOCOL_VERSION}: run",
        ),
        (_head(2, 1 << 40), "announces a message of 2 [+] 1099511627776 bytes"),
        (_head(1 << 30, 0), "announces a message of"),
        (_head(2, 0) + b"[]", "without a JSON object that has a kind"),
        (_head(2, 0) + b"{}", "without a JSON object that has a kind"),
        (_head(2, 0) + b"\xff\xff", "without a JSON object that has a kind"),
        (_head(9, 0) + b"{", "in the middle of a message: 21 of 29 bytes"),
        (b"PEG", "in the middle of a message: 3 of 20 bytes"),
    ],
)
def test_what_is_no_message_is_named(pair: Pair, data: bytes, problem: str) -> None:
    ours, theirs = pair
    ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=problem):
        MessageReader(theirs, 100, "peer").read_within(5)


def test_an_end_between_messages_and_silence_are_told_apart(pair: Pair) -> None:
    ours, theirs = pair
    with pytest.raises(WireError, match=r"sent no whole message within 0\.05 s"):
        MessageReader(theirs, 100, "peer").read_within(0.05)
    ours.close()
    with pytest.raises(PeerClosed, match="closed the connection$"):
        MessageReader(theirs, 100, "peer").read_within(5)


def test_a_field_of_another_type_is_named() -> None:
    message = Message("hello", {"x": True}, memoryview(b""))
    for name in ("x", "y"):
        with pytest.raises(WireError, match=f"field '{name}'"):
            message.field(name, int)


def step(**changes: object) -> TargetStep:
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    made = TargetStep(
        session=0, step=5, slots_B=ints(2, 0, 3), heads_B=ints(0, 0, 1), start_B=ints(4, 1, 0),
        num_valid_B=ints(2, 3, 0), row_offset_B=ints(1, 5, 9), depth_B=ints(3, 0, 1),
        next_tokens_R=np.arange(10, dtype=np.int32), hidden_RH=torch.randn(10, 6).bfloat16(),
        finished_slots=[0, 1], prompts={0: ints(7, 8), 3: ints()},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_only_valid_rows_of_a_step_travel(pair: Pair) -> None:
    ours, theirs = pair
    sent = step()
    num_bytes = send_step(ours, sent)
    message = MessageReader(theirs, max_step_bytes(SHAPE, 100), "peer").read_within(5)
    assert num_bytes < 20 + 200 + 4 * 40 + 5 * SHAPE.row_bytes
    found = read_step(message, 3, SHAPE)
    for name in ("slots_B", "heads_B", "start_B", "num_valid_B", "depth_B"):
        assert getattr(found, name).tolist() == getattr(sent, name).tolist()
    assert found.row_offset_B.tolist() == [0, 2, 5]
    assert found.next_tokens_R.tolist() == [1, 2, 5, 6, 7]
    assert torch.equal(found.hidden_RH, sent.hidden_RH[[1, 2, 5, 6, 7]])
    assert (found.session, found.step, list(found.finished_slots)) == (3, 5, [0, 1])
    assert {slot: tokens.tolist() for slot, tokens in found.prompts.items()} == {0: [7, 8], 3: []}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_rows": 4}, "raw bytes do not fit"),
        ({"num_rows": -1}, "sizes"),
        ({"num_requests": "3"}, "field 'num_requests' is '3'"),
        ({"num_prompts": 1, "num_finished": 4}, "prompts of"),
    ],
)
def test_a_step_message_that_contradicts_itself_is_refused(pair: Pair, fields: dict[str, object], problem: str) -> None:
    ours, theirs = pair
    send_step(ours, step())
    message = MessageReader(theirs, max_step_bytes(SHAPE, 100), "peer").read_within(5)
    message.fields.update(fields)
    with pytest.raises(WireError, match=problem):
        read_step(message, 3, SHAPE)


def test_a_reply_to_another_step_or_of_another_size_is_refused(pair: Pair) -> None:
    ours, theirs = pair
    drafts_BK = np.arange(6, dtype=np.int32).reshape(2, 3)
    send_drafts(ours, 5, drafts_BK)
    message = MessageReader(theirs, 100, "peer").read_within(5)
    assert drafts_of(message, 5, 2, SHAPE).tolist() == drafts_BK.tolist()
    for number, num_requests in ((6, 2), (5, 3)):
        with pytest.raises(WireError, match="a reply to step 5"):
            drafts_of(message, number, num_requests, SHAPE)


HELLO = Hello("target", SERVED_SHAPE, served_head(0).aux_layer_ids, {0: "digest0"}, "host")


def test_a_hello_that_fits_is_not_refused() -> None:
    assert refusal(HELLO, {4: served_head(0), 1: served_head(1)}) is None


def test_a_drafter_with_a_key_lets_in_who_names_it_and_nobody_else() -> None:
    heads = {0: served_head(0)}
    assert refusal(dataclasses.replace(HELLO, key="secret"), heads, "secret") is None
    assert refusal(dataclasses.replace(HELLO, key="secret"), heads) is None
    for wrong in ("", "secret2", "Schlüssel"):
        reason = refusal(dataclasses.replace(HELLO, key=wrong), heads, "secret")
        assert reason is not None
        assert "key is missing or another one" in reason
    assert "secret" not in repr(dataclasses.replace(HELLO, key="secret"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": {}}, "names no head"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_num_rows=2**30)}, "max_num_rows = 1073741824 has"),
        ({"heads": {0: "digest0", 1: "other"}}, "head 1 of the target is other, this drafter has digest0"),
        ({"aux_layer_ids": (1, 2)}, "aux_layer_ids is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, hidden_size=8)}, "hidden_size is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, dtype="bfloat16")}, "dtype is float64 at the drafter"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, vocab_size=8)}, "vocab_size is"),
        ({"shape": dataclasses.replace(SERVED_SHAPE, max_depth=50)}, "asks for up to 50 drafts"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_by_field(changes: dict[str, object], reason: str) -> None:
    answer = refusal(dataclasses.replace(HELLO, **changes), {0: served_head(0)})  # type: ignore[arg-type]
    assert answer is not None
    assert reason in answer


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"shape": {"hidden_size": 1}}, "hello: .*missing"),
        ({"shape": {**dataclasses.asdict(SERVED_SHAPE), "dtype": "int4"}}, "dtype = 'int4'"),
        ({"heads": {"x": "y"}}, "hello: "),
        ({"heads": {"1000000000": "y"}}, r"heads = \[1000000000\] must be numbered"),
        ({"aux_layer_ids": None}, "field 'aux_layer_ids'"),
        ({"key": 7}, "field 'key'"),
    ],
)
def test_a_hello_with_a_bad_field_is_refused_by_name(fields: dict[str, object], problem: str) -> None:
    assert Hello.read(Message("hello", HELLO.fields(), memoryview(b""))) == HELLO
    with pytest.raises(WireError, match=problem):
        Hello.read(Message("hello", HELLO.fields() | fields, memoryview(b"")))
