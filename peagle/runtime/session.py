"""A target's connection to one drafter, from hello to loss: made, watched and served by the link's own thread.

On one host the drafter reads the mailbox itself; the thread sleeps on the control socket, so that a dead drafter (its
socket closes with it) releases whoever waits at once. Across hosts the mailbox is private and the thread carries its
steps and replies over the socket: whoever sends and waits sees no difference.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from peagle.runtime import device_mailbox
from peagle.runtime.head import Reducer
from peagle.runtime.hello import MAX_REDUCER_BYTES, Hello
from peagle.runtime.mailbox import NUM_AREAS, Mailbox
from peagle.runtime.stats import LinkStats
from peagle.runtime.step_message import drafts_of, send_step
from peagle.runtime.wire import Message, MessageReader, WireError, send_message

HELLO_TIMEOUT_S = 10.0
MAX_SILENCE_S = 10.0  # of a drafter with a step in hand, before the connection counts as lost
_CHECK_S = 0.5
_POLL_S = 50e-6


class Refused(Exception):
    """The drafter is one, but will not draft for this target; the text is its reason."""


class Swapped(Exception):
    """The drafter put another head in the place of one of ours: `old`, `new` are digests."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(f"head {old} was swapped for {new}")
        self.old, self.new = old, new


class Waker:
    """Wakes a thread that sleeps in `select`. The descriptor lives as long as anybody knows the waker."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


@dataclasses.dataclass(eq=False)
class Session:
    """An agreed connection. From `sent` on, fields belong to the thread that sends; `lock` to whoever uses `mailbox`.

    heads: index -> digest. reducers: of these, by digest, on the host where they came with the welcome. shared: one
    host, so that the drafter reads the mailbox. waker: woken when a step is sent over TCP and when the link closes.
    sent: number of the step sent last. known: by slot, whether the drafter has the request. num_rows: of the last
    steps, by area. waited: steps whose drafts a GPU waits for. enqueued: after its last work on the mailbox.
    """

    connection: socket.socket
    reader: MessageReader
    mailbox: Mailbox
    shared: bool
    heads: Mapping[int, str]
    reducers: Mapping[str, Reducer]
    device: torch.device
    waker: Waker
    peer: str
    stats: LinkStats
    no_mailbox_reason: str = ""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    closed: bool = False
    sent: int = 0
    late: bool = False
    known: npt.NDArray[np.bool_] = dataclasses.field(init=False)
    num_rows: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_AREAS)
    waited: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    enqueued: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.known = np.zeros(self.mailbox.shape.max_num_requests, bool)
        self.mailbox.beat()
        if self.device.type == "cuda":
            self.enqueued = torch.cuda.Event()
            device_mailbox.pin(self.mailbox, self.device, will_wait=True)

    def close(self) -> None:
        """Release whoever waits and let the memory go. Nothing may be sent afterwards."""
        self.mailbox.set_abort(True)
        with self.lock:
            self.mailbox.set_abort(True)  # again: a step that began meanwhile may have taken it back
            self.closed = True
        self.connection.close()
        if self.enqueued is not None:
            self.enqueued.synchronize()
            device_mailbox.unpin(self.mailbox, self.device)

    def hang_up(self) -> None:
        """Let the connection end: the thread that serves it will see that. From any thread."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def serve(self, stopped: threading.Event) -> None:
        """Watch the connection, and carry steps where the mailbox is not shared, until `stopped`.

        Raises Swapped, or WireError or OSError when the connection is lost: what happened.
        """
        step = 1
        while not stopped.is_set():
            self._wait(self.connection, self.waker)
            while not stopped.is_set() and not self.shared and self.sent >= step:
                self._carry(step, stopped)
                step += 1
            self.take_messages()
            waiting = self.sent > 0 and not self.mailbox.is_done(self.sent)
            if self.shared and waiting and (silence_s := self.mailbox.silence_s()) > MAX_SILENCE_S:
                raise WireError(f"{self.peer} gave no sign of life for {silence_s:.0f} s")

    def take_messages(self) -> Message | None:
        """Read what the drafter said: a reply is returned, news are raised."""
        self.connection.setblocking(False)
        while (message := self.reader.read()) is not None:
            if message.kind == "drafts":
                return message
            if message.kind == "swapped":
                raise Swapped(message.field("old", str), message.field("new", str))
            if message.kind == "bye":
                raise WireError(f"{self.peer} says good-bye: {message.fields.get('reason', '')}")
            raise WireError(f"{self.peer} sent an unknown message {message.kind!r:.40}")
        return None

    def _carry(self, step: int, stopped: threading.Event) -> None:
        """Send a step once it is ready, and put its reply into the mailbox."""
        while not self.mailbox.is_ready(step):  # a GPU may still be at it
            if stopped.wait(_POLL_S):
                return
        begin_ns = time.monotonic_ns()
        found = self.mailbox.read_step(step, 0)
        self.connection.settimeout(MAX_SILENCE_S)
        self.stats.num_bytes += send_step(self.connection, found)
        while (message := self.take_messages()) is None:
            self._wait(self.connection)
            if stopped.is_set():
                return
            if time.monotonic_ns() - begin_ns > MAX_SILENCE_S * 1e9:
                raise WireError(f"{self.peer} did not answer for {MAX_SILENCE_S:g} s")
        drafts_BK = drafts_of(message, step, found.num_requests, self.mailbox.shape)
        self.stats.num_bytes += drafts_BK.nbytes
        self.mailbox.answer(step, drafts_BK, time.monotonic_ns() - begin_ns)

    def _wait(self, *sources: socket.socket | Waker) -> None:
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        if any(fd == self.waker.fileno() for fd, _ in poll.poll(_CHECK_S * 1e3)):
            self.waker.clear()


def connect(
    address: str, hello: Hello, known: Mapping[str, Reducer], device: torch.device, waker: Waker, stats: LinkStats
) -> Session:
    """Introduce a target to the drafter at "host:port". known: reducers that the target has already, by digest.

    Raises Refused with the drafter's words, WireError or ValueError for a peer that is no drafter, OSError where nobody
    is, RuntimeError where CUDA refuses the mailbox.
    """
    host, _, port = address.rpartition(":")
    peer = f"drafter {address}"
    connection = socket.create_connection((host, int(port)), timeout=HELLO_TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        reader = MessageReader(connection, MAX_REDUCER_BYTES, peer)
        hello = dataclasses.replace(hello, known_reducers=tuple(known))
        send_message(connection, "hello", hello.fields())
        welcome = reader.read_within(HELLO_TIMEOUT_S)
        if welcome.kind == "refused":
            raise Refused(f"{peer} refused: {welcome.field('reason', str)}")
        if welcome.kind != "welcome":
            raise WireError(f"{peer} answered the hello with {welcome.kind!r:.40}")
        # The known ones too: the target may forget them before it has a use for these.
        found = _reducers(welcome, hello)
        reducers = {digest: known.get(digest) or found[digest] for digest in hello.heads.values()}
        name = welcome.field("mailbox", str)
        mailbox, problem = _attach(name, hello)
        if name:
            send_message(connection, "attached", {"ok": mailbox is not None, "reason": problem})
        return Session(
            connection=connection,
            reader=MessageReader(connection, hello.shape.max_num_requests * hello.shape.max_depth * 4, peer),
            mailbox=mailbox or Mailbox.private(hello.shape),
            shared=mailbox is not None,
            heads=dict(hello.heads),
            reducers=reducers,
            device=device,
            waker=waker,
            peer=peer,
            stats=stats,
            no_mailbox_reason=problem or str(welcome.fields.get("no_mailbox", "")),
        )
    except BaseException:
        connection.close()
        raise


def _reducers(welcome: Message, hello: Hello) -> dict[str, Reducer]:
    """By digest, cut from the welcome's raw part by the sizes that it names."""
    sizes = welcome.field("reducers", dict)
    if any(not isinstance(size, int) or size < 0 for size in sizes.values()):
        raise WireError(f"welcome: sizes of reducers {sizes!r:.80}")
    if sum(sizes.values()) != len(welcome.raw):
        raise WireError(f"welcome: reducers of {sum(sizes.values())} bytes are named, {len(welcome.raw)} came")
    found, begin = {}, 0
    for digest, size in sizes.items():
        found[digest] = Reducer.from_bytes(bytes(welcome.raw[begin : begin + size]))
        begin += size
        if found[digest].hidden_size != hello.shape.hidden_size:
            raise WireError(f"welcome: the reducer of head {digest} leaves {found[digest].hidden_size} columns")
    if missing := set(hello.heads.values()) - set(found) - set(hello.known_reducers):
        raise WireError(f"welcome: no reducer of {', '.join(sorted(missing))}")
    return found


def _attach(name: str, hello: Hello) -> tuple[Mailbox | None, str]:
    if not name:
        return None, ""
    try:
        return Mailbox.attach(name, hello.shape), ""
    except (OSError, ValueError) as error:
        return None, str(error)
