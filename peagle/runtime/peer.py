"""A drafter's connection to one target: the hello answered, then steps read and answered without ever waiting."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping

import numpy as np
import torch

from peagle.runtime import device_mailbox
from peagle.runtime.hello import Hello, ServedHead, refusal
from peagle.runtime.mailbox import MAX_PROMPT_TOKENS, Mailbox
from peagle.runtime.shared_memory import host_identity
from peagle.runtime.step_message import max_step_bytes, read_step, send_drafts
from peagle.runtime.steps import NO_DRAFT, Int32Array, TargetStep
from peagle.runtime.wire import MessageReader, WireError, send_message

HELLO_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 0.1  # a target that does not read its replies is dropped: others wait behind it
_MAX_DRAINED_READS = 20


@dataclasses.dataclass(eq=False)
class Peer:
    """A target that was welcomed. Used by the serving thread only.

    mailbox: None where steps come over the socket. session: the server's number for it, set when it joins.
    engine_heads: the target's head index -> the engine's.
    """

    connection: socket.socket
    reader: MessageReader
    hello: Hello
    mailbox: Mailbox | None
    device: torch.device
    session: int = -1
    engine_heads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    num_steps: int = 0
    seen_ns: int = 0
    _known_heads: tuple[bytes, Int32Array | None] = (b"", None)

    def poll(self) -> TargetStep | None:
        """The next step, if it is there. Raises WireError, ValueError or OSError for a peer to be dropped."""
        if self.mailbox is None:
            if (message := self.reader.read()) is None:
                return None
            step = read_step(message, self.session, self.hello.shape)
        else:
            if not self.mailbox.is_ready(self.num_steps + 1):
                self.mailbox.read_ahead(self.num_steps + 1)
                return None
            self.seen_ns = time.monotonic_ns()
            step = self.mailbox.read_step(self.num_steps + 1, self.session)
        translated_B = self._translated(step.heads_B)
        return step if translated_B is None else dataclasses.replace(step, heads_B=translated_B)

    def check(self) -> None:
        """Show that the drafter lives, and see whether the target does. Raises as `poll`."""
        if self.mailbox is not None:
            self.mailbox.beat()
            if (message := self.reader.read()) is not None:
                raise WireError(f"{self.hello.name} sent {message.kind!r:.40} beside its mailbox")

    def answer(self, step: TargetStep, drafts_BK: Int32Array) -> None:
        """Give the drafts of a step, of any number of columns. Raises OSError."""
        columns = self.hello.shape.max_depth
        if drafts_BK.shape[1] < columns:
            drafts_BK = np.pad(drafts_BK, ((0, 0), (0, columns - drafts_BK.shape[1])), constant_values=NO_DRAFT)
        self.num_steps += 1
        if self.mailbox is not None:
            self.mailbox.answer(self.num_steps, drafts_BK[:, :columns], time.monotonic_ns() - self.seen_ns)
            return
        self.connection.settimeout(_REPLY_TIMEOUT_S)
        send_drafts(self.connection, step.step, drafts_BK[:, :columns])
        self.connection.setblocking(False)

    def close(self, kind: str, **fields: str) -> None:
        """Say why, as far as the target listens, and let everything go."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(_REPLY_TIMEOUT_S)
            send_message(self.connection, kind, fields)
        self.connection.close()
        if self.mailbox is not None and self.device.type == "cuda":
            device_mailbox.unpin(self.mailbox, self.device)
        self.mailbox = None

    def _translated(self, heads_B: Int32Array) -> Int32Array | None:
        """The engine's heads; None where they have the same numbers. Mostly those of the step before: looked up."""
        named = heads_B.tobytes()
        if named != self._known_heads[0]:
            if unknown := set(np.unique(heads_B).tolist()) - set(self.engine_heads):
                raise ValueError(f"heads_B names head {min(unknown)}, agreed were {sorted(self.engine_heads)}")
            translated_B = np.array([self.engine_heads[head] for head in heads_B.tolist()], np.int32)
            self._known_heads = (named, None if np.array_equal(translated_B, heads_B) else translated_B)
        return self._known_heads[1]


def greet(
    connection: socket.socket, name: str, heads: Mapping[int, ServedHead], device: torch.device, key: str = ""
) -> Peer:
    """Answer the hello of whoever connected; the connection belongs to the peer afterwards, or is closed.

    Raises WireError or OSError for somebody who is no target or does not fit; who can hear it is told.
    """
    mailbox: Mailbox | None = None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        reader = MessageReader(connection, 0, name)
        hello = _read_hello(connection, reader, heads, key)
        problem = "it runs on another host, or one of the two has no shared memory"
        if hello.host and hello.host == host_identity():
            try:
                mailbox, problem = Mailbox.create(hello.shape), ""
            except OSError as error:
                problem = f"no room for its mailbox in /dev/shm: {error}"
        reducers = {
            head.digest: head.reducer
            for head in heads.values()
            if head.digest in hello.heads.values() and head.digest not in hello.known_reducers
        }
        fields = {
            "mailbox": mailbox.memory.name if mailbox else "",
            "no_mailbox": problem,
            "reducers": {digest: len(data) for digest, data in reducers.items()},
        }
        send_message(connection, "welcome", fields, [memoryview(data) for data in reducers.values()])
        if mailbox is not None and not _attached(reader):
            mailbox.memory.unlink()
            mailbox = None
        if mailbox is not None:
            mailbox.memory.unlink()
            if device.type == "cuda":
                device_mailbox.pin(mailbox, device, will_wait=False)
        connection.setblocking(False)
        max_raw_bytes = 0 if mailbox is not None else max_step_bytes(hello.shape, MAX_PROMPT_TOKENS)
        return Peer(connection, MessageReader(connection, max_raw_bytes, name), hello, mailbox, device)
    except BaseException:
        if mailbox is not None:
            mailbox.memory.unlink()
        connection.close()
        raise


def _read_hello(connection: socket.socket, reader: MessageReader, heads: Mapping[int, ServedHead], key: str) -> Hello:
    """The hello of a target that fits. Raises WireError otherwise, after telling the other side."""
    try:
        hello = Hello.read(reader.read_within(HELLO_TIMEOUT_S))
        if (reason := refusal(hello, heads, key)) is not None:
            raise WireError(reason)
    except WireError as error:
        with contextlib.suppress(OSError):
            connection.settimeout(_REPLY_TIMEOUT_S)
            send_message(connection, "refused", {"reason": str(error)})
            connection.shutdown(socket.SHUT_WR)
            # What lies unread when a socket closes resets it, and the words would be lost.
            for _ in range(_MAX_DRAINED_READS):
                if not connection.recv(1 << 16):
                    break
        raise
    return hello


def _attached(reader: MessageReader) -> bool:
    answer = reader.read_within(HELLO_TIMEOUT_S)
    if answer.kind != "attached":
        raise WireError(f"the welcome was answered with {answer.kind!r:.40}")
    return bool(answer.field("ok", bool))


def _keep_alive(connection: socket.socket) -> None:
    """A target whose host went away is noticed within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
