"""Messages between a target and a drafter over TCP: a JSON object and any number of raw bytes after it.

    magic 4s | protocol version u16 | 0 u16 | JSON bytes u32 | raw bytes u64 | JSON | raw

Enters: sockets, which belong to the caller. Leaves: whole messages or `WireError`; a peer that speaks something else,
sends too much or stops in the middle is named as what it is. Nothing here waits longer than it is told.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peagle.drafter.steps import Int32Array, TargetShape, TargetStep

# ====================================================================================================
# Messages between a target and a drafter over TCP: a JSON object and any number of raw bytes after it.
#
#     magic 4s | protocol version u16 | 0 u16 | JSON bytes u32 | raw bytes u64 | JSON | raw
#
# Enters: sockets, which belong to the caller. Leaves: whole messages or `WireError`; a peer that speaks something else,
# sends too much or stops in the middle is named as what it is. Nothing here waits longer than it is told.

MAGIC = b"PEGL"
PROTOCOL_VERSION = 2
MAX_JSON_BYTES = 1 << 20
_HEAD = struct.Struct("<4sHHIQ")
_MAX_PARTS = 512  # of one sendmsg; Linux takes 1,024


class WireError(Exception):
    """The peer is no drafter or target of this protocol version, or its message is damaged."""


class PeerClosed(WireError):
    """The peer closed the connection between two messages."""


@dataclasses.dataclass(frozen=True)
class Message:
    """kind: what it is; fields: the rest of its JSON; raw: its bytes, valid until the next message is read."""

    kind: str
    fields: dict[str, Any]
    raw: memoryview

    def field(self, name: str, type_: type) -> Any:
        """A field of this type. Raises WireError where it is missing or of another."""
        value = self.fields.get(name)
        if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
            raise WireError(f"message {self.kind!r}: field {name!r} is {value!r:.80}, not of type {type_.__name__}")
        return value


def send_message(connection: socket.socket, kind: str, fields: dict[str, Any], parts: Sequence[memoryview] = ()) -> int:
    """Send one message on a blocking socket; its timeout holds for each piece. Returns its bytes. Raises OSError."""
    # Servers of line protocols answer at a line's end, and can be told apart from silence.
    text = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\r\n"
    raw = [part.cast("B") for part in parts if part.nbytes]
    head = _HEAD.pack(MAGIC, PROTOCOL_VERSION, 0, len(text), sum(map(len, raw)))
    pending = [memoryview(head + text), *raw]
    total = sum(map(len, pending))
    while pending:
        num_sent = connection.sendmsg(pending[:_MAX_PARTS])
        while pending and num_sent >= len(pending[0]):
            num_sent -= len(pending.pop(0))
        if num_sent:
            pending[0] = pending[0][num_sent:]
    return total


class MessageReader:
    """Puts messages together from whatever the socket has, for one connection."""

    def __init__(self, connection: socket.socket, max_raw_bytes: int, peer: str) -> None:
        """max_raw_bytes: of one message; that of the largest seen is kept. peer: what errors call the other side."""
        self._connection, self._max_raw_bytes, self._peer = connection, max_raw_bytes, peer
        # Head and JSON in one, raw bytes in the other, so that these are aligned for whatever they hold.
        self._text, self._raw = bytearray(_HEAD.size), bytearray()
        self._num_read = 0
        self._sizes: tuple[int, int] | None = None  # JSON and raw bytes of the message under way

    def read(self) -> Message | None:
        """The next message, or None as long as the socket has no more of it (non-blocking, or its timeout passed).

        Raises WireError for a peer that ends or sends something else, OSError for a broken connection.
        """
        try:
            if self._sizes is None:
                self._fill(self._text, 0, _HEAD.size)
                self._sizes = self._read_head()
                self._text = _at_least(self._text, _HEAD.size + self._sizes[0])
                self._raw = _at_least(self._raw, self._sizes[1])
            num_text, num_raw = _HEAD.size + self._sizes[0], self._sizes[1]
            self._fill(self._text, 0, num_text)
            self._fill(self._raw, num_text, num_raw)
        except (BlockingIOError, TimeoutError):
            return None
        self._num_read, self._sizes = 0, None
        return self._message(bytes(self._text[_HEAD.size : num_text]), memoryview(self._raw)[:num_raw])

    def read_within(self, timeout_s: float) -> Message:
        """The next message of a blocking socket. Raises WireError when it is not there in time, and as `read`."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._connection.settimeout(left_s)
            if (message := self.read()) is not None:
                return message
        raise WireError(f"{self._peer} sent no whole message within {timeout_s:g} s ({self._num_read} bytes)")

    def _fill(self, buffer: bytearray, num_before: int, num_bytes: int) -> None:
        """Receive until `buffer` has num_bytes; num_before of the message are in front of it."""
        while (begin := self._num_read - num_before) < num_bytes:
            num_new = self._connection.recv_into(memoryview(buffer)[begin:num_bytes])
            if num_new == 0:
                raise self._ended()
            self._num_read += num_new
            if self._sizes is None:
                self._check_magic()

    def _message(self, text: bytes, raw: memoryview) -> Message:
        try:
            fields = json.loads(text)
            return Message(str(fields.pop("kind")), fields, raw)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"{self._peer} sent a message without a JSON object that has a kind") from error

    def _check_magic(self) -> None:
        begin = bytes(self._text[: min(self._num_read, len(MAGIC))])
        if not MAGIC.startswith(begin):
            raise WireError(
                f"{self._peer} does not speak this protocol: it sent {bytes(self._text[: self._num_read])!r}"
            )

    def _read_head(self) -> tuple[int, int]:
        _, version, _, num_text, num_raw = _HEAD.unpack_from(self._text)
        if version != PROTOCOL_VERSION:
            raise WireError(
                f"{self._peer} speaks protocol version {version}, this side {PROTOCOL_VERSION}: run the same release "
                "at the target and at the drafter"
            )
        if num_text > MAX_JSON_BYTES or num_raw > self._max_raw_bytes:
            raise WireError(
                f"{self._peer} announces a message of {num_text} + {num_raw} bytes, at most {MAX_JSON_BYTES} + "
                f"{self._max_raw_bytes} are agreed"
            )
        return num_text, num_raw

    def _ended(self) -> WireError:
        if self._num_read == 0:
            return PeerClosed(f"{self._peer} closed the connection")
        num_all = _HEAD.size + sum(self._sizes) if self._sizes else _HEAD.size
        return WireError(
            f"{self._peer} closed the connection in the middle of a message: {self._num_read} of {num_all} bytes"
        )


def _at_least(buffer: bytearray, num_bytes: int) -> bytearray:
    """The buffer, or a longer one that begins the same; an old one may still be looked at through a message."""
    return buffer if len(buffer) >= num_bytes else buffer + bytearray(num_bytes - len(buffer))


# ====================================================================================================
# A step and its drafts as messages over TCP: what the mailbox is on one host. Only valid rows travel.

_NUM_ARRAYS = 6  # slots, heads, start, num_valid, row_offset, depth


def max_step_bytes(shape: TargetShape, max_prompt_tokens: int) -> int:
    """Raw bytes of the largest step message."""
    numbers = (_NUM_ARRAYS + 3) * shape.max_num_requests + shape.max_num_rows + max_prompt_tokens
    return 4 * numbers + shape.payload_bytes


def send_step(connection: socket.socket, step: TargetStep) -> int:
    """Send a step that has passed `TargetStep.check`. Returns the bytes sent. Raises OSError."""
    rows = step.valid_rows()
    packed_offset_B = (np.cumsum(step.num_valid_B) - step.num_valid_B).astype(np.int32)
    prompts = list(step.prompts.items())
    numbers = np.concatenate(
        [step.slots_B, step.heads_B, step.start_B, step.num_valid_B, packed_offset_B, step.depth_B]
        + [step.next_tokens_R[rows], np.asarray(step.finished_slots, np.int32)]
        + [np.asarray([slot for slot, _ in prompts] + [len(tokens) for _, tokens in prompts], np.int32)]
        + [tokens for _, tokens in prompts],
        dtype=np.int32,
    )
    fields = {
        "step": step.step,
        "num_requests": step.num_requests,
        "num_rows": len(rows),
        "num_finished": len(step.finished_slots),
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(tokens) for _, tokens in prompts),
    }
    runs = _runs(step)
    return send_message(connection, "step", fields, [numbers.data, *runs])


def _runs(step: TargetStep) -> list[memoryview]:
    """The payload's valid rows in order, as few pieces of its memory."""
    bytes_RX = step.hidden_RH.contiguous().view(torch.uint8).numpy()
    pieces: list[tuple[int, int]] = []
    for first, count in zip(step.row_offset_B.tolist(), step.num_valid_B.tolist(), strict=True):
        if pieces and pieces[-1][1] == first:
            pieces[-1] = (pieces[-1][0], first + count)
        else:
            pieces.append((first, first + count))
    return [bytes_RX[first:end].data for first, end in pieces if end > first]


def read_step(message: Message, session: int, shape: TargetShape) -> TargetStep:
    """Inverse of `send_step`; arrays are views of the message. Raises WireError or ValueError for what does not fit."""
    if message.kind != "step":
        raise WireError(f"a target sent {message.kind!r:.40} where a step was due")
    names = ("num_requests", "num_rows", "num_finished", "num_prompts", "num_prompt_tokens")
    sizes = [message.field(name, int) for name in names]
    if min(sizes) < 0:
        raise WireError(f"step: sizes {dict(zip(names, sizes, strict=True))}")
    num_requests, num_rows, num_finished, num_prompts, num_prompt_tokens = sizes
    lengths = [num_requests] * _NUM_ARRAYS + [num_rows, num_finished, num_prompts, num_prompts, num_prompt_tokens]
    num_numbers = sum(lengths)
    if len(message.raw) != 4 * num_numbers + num_rows * shape.row_bytes:
        raise WireError(f"step: {len(message.raw)} raw bytes do not fit {dict(zip(names, sizes, strict=True))}")
    arrays = np.split(np.frombuffer(message.raw, np.int32, num_numbers), np.cumsum(lengths)[:-1])
    prompt_lengths = arrays[9]
    if num_prompts and (prompt_lengths.min() < 0 or prompt_lengths.sum() != num_prompt_tokens):
        raise WireError(f"step: prompts of {prompt_lengths.tolist()} tokens are not {num_prompt_tokens} together")
    tokens = np.split(arrays[10], np.cumsum(prompt_lengths)[:-1]) if num_prompts else []
    if num_rows:
        hidden_RH = torch.frombuffer(message.raw, dtype=shape.torch_dtype, offset=4 * num_numbers)
    else:
        hidden_RH = torch.empty(0, dtype=shape.torch_dtype)
    slots_B, heads_B, start_B, num_valid_B, row_offset_B, depth_B = arrays[:_NUM_ARRAYS]
    found = TargetStep(
        session=session,
        step=message.field("step", int),
        slots_B=slots_B,
        heads_B=heads_B,
        start_B=start_B,
        num_valid_B=num_valid_B,
        row_offset_B=row_offset_B,
        depth_B=depth_B,
        next_tokens_R=arrays[6],
        hidden_RH=hidden_RH.view(num_rows, shape.hidden_size),
        finished_slots=arrays[7].tolist(),
        prompts=dict(zip(arrays[8].tolist(), tokens, strict=True)),
    )
    found.check(shape)
    return found


def drafts_of(message: Message, step: int, num_requests: int, shape: TargetShape) -> Int32Array:
    """[B, K] of the reply to a step. Raises WireError for a reply to another step or of another size."""
    if message.field("step", int) != step or len(message.raw) != 4 * num_requests * shape.max_depth:
        raise WireError(
            f"a reply to step {message.fields['step']} with {len(message.raw)} bytes, to step {step} wanted"
        )
    return np.frombuffer(message.raw, np.int32).reshape(num_requests, shape.max_depth)


def send_drafts(connection: socket.socket, step: int, drafts_BK: Int32Array) -> None:
    """The reply to a step. Raises OSError."""
    send_message(connection, "drafts", {"step": step}, [np.ascontiguousarray(drafts_BK).data])


# ====================================================================================================
# How a target and a drafter introduce themselves: what the target says, and whether the drafter's heads fit it.
#
#     target                                      drafter
#     hello: shape, layers, heads by digest  ->
#                                            <-   refused: why, in words
#                                            <-   welcome: mailbox or none, reducers (raw, in the order named)
#     attached: whether it has the mailbox   ->   (only where a mailbox was named)
#
# Heads are named by digest; the numbers of a target's heads are its own, the drafter translates them.

MAX_REDUCER_BYTES = 1 << 30
MAX_PAYLOAD_BYTES = 1 << 32
MAX_NUM_HEADS = 63  # a bit each in a word of 64, the sign left out: `peagle.vllm.remote`


@dataclasses.dataclass(frozen=True)
class Hello:
    """name: of the target, for people. aux_layer_ids: the tapped layers. heads: index -> digest. host: of
    `host_identity`. known_reducers: digests of heads whose reducer the target has already. key: of the drafter, ""
    where it asks for none."""

    name: str
    shape: TargetShape
    aux_layer_ids: tuple[int, ...]
    heads: Mapping[int, str]
    host: str
    known_reducers: tuple[str, ...] = ()
    key: str = dataclasses.field(default="", repr=False)

    def fields(self) -> dict[str, object]:
        return {
            "name": self.name,
            "shape": dataclasses.asdict(self.shape),
            "aux_layer_ids": list(self.aux_layer_ids),
            "heads": {str(index): digest for index, digest in self.heads.items()},
            "host": self.host,
            "known_reducers": list(self.known_reducers),
            "key": self.key,
        }

    @classmethod
    def read(cls, message: Message) -> Hello:
        """Inverse of `fields`. Raises WireError, naming the field, for anything else."""
        if message.kind != "hello":
            raise WireError(f"the first message is {message.kind!r:.40}, not a hello")
        try:
            found = cls(
                name=message.field("name", str),
                shape=TargetShape(**message.field("shape", dict)),
                aux_layer_ids=tuple(int(layer) for layer in message.field("aux_layer_ids", list)),
                heads={int(index): str(digest) for index, digest in message.field("heads", dict).items()},
                host=message.field("host", str),
                known_reducers=tuple(str(digest) for digest in message.field("known_reducers", list)),
                key=message.field("key", str),
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"hello: {error}") from error
        if any(not 0 <= index < MAX_NUM_HEADS for index in found.heads):
            raise WireError(f"hello: heads = {sorted(found.heads)} must be numbered 0 .. {MAX_NUM_HEADS - 1}")
        return found


@dataclasses.dataclass(frozen=True)
class ServedHead:
    """A head as a drafter offers it.

    digest: of `peagle.heads.head_digest`. reducer: its `Reducer` as bytes. max_depth: the most drafts it is run for.
    """

    digest: str
    reducer: bytes
    hidden_size: int
    dtype: str
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    max_depth: int


def refusal(hello: Hello, heads: Mapping[int, ServedHead], key: str = "") -> str | None:
    """Why these heads cannot draft for this target; None where they can. key: the drafter's secret, "" for none."""
    if key and not hmac.compare_digest(hello.key.encode(), key.encode()):
        return "the drafter's key is missing or another one: name it beside the drafter's address"
    by_digest = {head.digest: head for head in heads.values()}
    if not hello.heads:
        return "the target names no head"
    if (num_bytes := hello.shape.payload_bytes) > MAX_PAYLOAD_BYTES:
        return f"a step of max_num_rows = {hello.shape.max_num_rows} has {num_bytes} bytes, at most {MAX_PAYLOAD_BYTES}"
    for index, digest in hello.heads.items():
        head = by_digest.get(digest)
        if head is None:
            return f"head {index} of the target is {digest}, this drafter has {', '.join(sorted(by_digest))}"
        wanted = (hello.shape.hidden_size, hello.shape.dtype, hello.shape.vocab_size, hello.aux_layer_ids)
        served = (head.hidden_size, head.dtype, head.vocab_size, head.aux_layer_ids)
        for name, ours, theirs in zip(
            ("hidden_size", "dtype", "vocab_size", "aux_layer_ids"), served, wanted, strict=True
        ):
            if ours != theirs:
                return f"head {digest}: {name} is {ours} at the drafter and {theirs} at the target"
        if hello.shape.max_depth > head.max_depth:
            return (
                f"head {digest}: the target asks for up to {hello.shape.max_depth} drafts, this drafter gives "
                f"{head.max_depth}: start it with a larger --max-depth"
            )
    return None


def check_swap(heads: Mapping[int, ServedHead], index: int, served: ServedHead) -> ServedHead:
    """The head that `served` may replace.

    Raises ValueError for an index without a head, a head that is served under another already, or one that targets of
    the old one cannot feed.
    """
    old = heads.get(index)
    if old is None:
        raise ValueError(f"there is no head {index} to swap, only {sorted(heads)}")
    if served.digest in {other.digest for i, other in heads.items() if i != index}:
        raise ValueError(f"head {served.digest} is served under another number already")
    for name in ("hidden_size", "dtype", "vocab_size", "aux_layer_ids"):
        if getattr(served, name) != getattr(old, name):
            raise ValueError(
                f"head {served.digest} does not fit the targets: its {name} is {getattr(served, name)}, that of head "
                f"{old.digest} {getattr(old, name)}"
            )
    return old
