"""Messages between a target and a drafter over TCP: a JSON object and any number of raw bytes after it.

    magic 4s | protocol version u16 | 0 u16 | JSON bytes u32 | raw bytes u64 | JSON | raw

Enters: sockets, which belong to the caller. Leaves: whole messages or `WireError`; a peer that speaks something else,
sends too much or stops in the middle is named as what it is. Nothing here waits longer than it is told.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

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
