"""How long a drafter's answer may take, from how long its answers took. Pure."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peagle.drafter import mailbox as device_mailbox
from peagle.drafter.head import Reducer
from peagle.drafter.mailbox import NUM_AREAS, Mailbox, host_identity
from peagle.drafter.protocol import (
    MAX_NUM_HEADS,
    MAX_REDUCER_BYTES,
    Hello,
    Message,
    MessageReader,
    WireError,
    drafts_of,
    send_message,
    send_step,
)
from peagle.drafter.steps import NO_DRAFT, Int32Array, LinkStats, TargetShape
from peagle.drafter.wait import REACHED, TIMED_OUT

# ====================================================================================================
# How long a drafter's answer may take, from how long its answers took. Pure.

_WEIGHT = 0.1  # of the newest answer in the averages
_NUM_PASSES = 3  # expected passes that a target waits: its own, and one each of others in front and of bad luck


@dataclasses.dataclass
class PassTimes:
    """Averages over answers: exponential, of seconds and of rows.

    A pass costs a fixed part and a part by rows, so a step with more rows than the average may take as much longer
    (an upper bound), which keeps a chunk of a long prompt from looking like a drafter that hangs.
    """

    min_deadline_s: float
    max_deadline_s: float
    average_s: float | None = None
    average_rows: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.min_deadline_s <= self.max_deadline_s < math.inf:
            raise ValueError(
                f"min_deadline_s = {self.min_deadline_s} and max_deadline_s = {self.max_deadline_s} must be above 0, "
                "finite and in this order"
            )

    def add(self, service_s: float, num_rows: int) -> None:
        """An answer to a step of num_rows rows took service_s seconds."""
        if self.average_s is None:
            self.average_s, self.average_rows = service_s, max(1.0, num_rows)
            return
        self.average_s += _WEIGHT * (service_s - self.average_s)
        self.average_rows += _WEIGHT * (max(1.0, num_rows) - self.average_rows)

    def deadline_s(self, num_rows: int) -> float:
        """Seconds to wait for the answer to a step of num_rows rows: the longest allowed as long as none is known."""
        if self.average_s is None:
            return self.max_deadline_s
        expected_s = self.average_s * max(1.0, num_rows / self.average_rows)
        return min(max(_NUM_PASSES * expected_s, self.min_deadline_s), self.max_deadline_s)


# ====================================================================================================
# A target's connection to one drafter, from hello to loss: made, watched and served by the link's own thread.
#
# On one host the drafter reads the mailbox itself; the thread sleeps on the control socket, so that a dead drafter (its
# socket closes with it) releases whoever waits at once. Across hosts the mailbox is private and the thread carries its
# steps and replies over the socket: whoever sends and waits sees no difference.

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


# ====================================================================================================
# A target's way to one drafter: sends steps, waits for drafts until a deadline, and never raises into the engine.
#
#     connecting   no drafter: the link's thread tries again, ever more slowly
#     up           steps are sent, drafts come
#     late         a deadline passed: nothing is sent until the drafter has answered all it was sent
#     closed
#
# One thread (the engine's) sends and waits; the link's own thread connects and watches. Whatever goes wrong costs drafts,
# never a request.

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
_NUM_QUICK_READS, _SLEEP_S = 50, 50e-6
_NO_TOKENS = np.zeros(0, np.int32)
logger = logging.getLogger(__name__)


class Link:
    """To the drafter at `address`. `begin_step` fixes which connection a step of the engine uses."""

    def __init__(
        self, address: str, hello: Hello, times: PassTimes, device: torch.device, reducers: dict[str, Reducer]
    ) -> None:
        """hello: what to say at connecting. reducers: by digest, filled here, kept by the caller for all its links."""
        self.address, self.stats = address, LinkStats()
        self.problem = ""  # the last thing that went wrong, in words
        self._hello, self._times, self._device, self._reducers = hello, times, device, reducers
        self._session: Session | None = None  # of the link's thread, read by the engine's
        self._current: Session | None = None  # of the engine's step
        self._finished: set[int] = set()
        self._last_requests, self._sent_s = 0, 0.0
        self._stopped, self._hello_lock = threading.Event(), threading.Lock()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"drafter link {address}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        if self._stopped.is_set():
            return "closed"
        if (session := self._session) is None:
            return "connecting"
        return "late" if session.late else "up"

    @property
    def is_connected(self) -> bool:
        """Up or late: the drafter may still hold its requests."""
        return self._session is not None

    @property
    def heads(self) -> Mapping[int, str]:
        """index -> digest, as wanted."""
        return self._hello.heads

    @property
    def served(self) -> Mapping[int, str]:
        """Heads for which this step can be sent: index -> digest."""
        return {} if self._current is None else self._current.heads

    def begin_step(self) -> bool:
        """Take up the connection as it is now; whether steps can be sent."""
        if (session := self._session) is not self._current:
            self._current = session
            self._finished.clear()
        if session is None:
            return False
        self._harvest(session)
        if session.late and session.mailbox.is_done(session.sent):
            session.mailbox.set_abort(False)
            session.late = False
            # As far as it was waited for: who is slower for good gets more time by and by, one hang changes little.
            late_s = min(session.mailbox.service_s(session.sent), self._deadline_s(session))
            self._times.add(late_s, session.num_rows[session.sent % NUM_AREAS])
        if not session.late and not session.mailbox.is_free(session.sent + 1):
            self._give_up(session)
        return not session.late

    @property
    def reducers(self) -> Mapping[int, Reducer]:
        """Head index -> what reduces hidden states for it, on the device: put there at first use, by this thread."""
        if (session := self._current) is None:
            return {}
        for digest in session.reducers.keys() - self._reducers.keys():
            self._reducers[digest] = session.reducers[digest].to(self._device)
        return {index: self._reducers[digest] for index, digest in session.heads.items()}

    def send(
        self,
        slots_M: Int32Array,
        heads_M: Int32Array,
        depth_M: Int32Array,
        row_offset_M: Int32Array,
        start_M: Tensor,
        num_valid_M: Tensor,
        next_tokens_R: Tensor,
        hidden_RH: Tensor,
        *,
        prompts: Mapping[int, Int32Array] | None = None,
    ) -> bool:
        """Hand a step's M requests to the drafter; False where it does not get them (no drafts, then).

        Fields as in `TargetStep`; numpy is what the host knows, tensors are int32 and the shape's dtype, on the device.
        On a GPU everything is enqueued on the current stream. prompts: of requests that are new to the target, those of
        other drafters may be among them.

        Raises:
            ValueError: more requests or rows than the shape that was agreed on, which is the caller's mistake.
        """
        session = self._current
        if session is None or session.late or session.closed:
            self.stats.num_skipped += 1
            return False
        shape, num_rows = self._hello.shape, len(next_tokens_R)
        if len(slots_M) > shape.max_num_requests or num_rows > shape.max_num_rows:
            raise ValueError(
                f"{len(slots_M)} requests, {num_rows} rows; agreed were {shape.max_num_requests}, {shape.max_num_rows}"
            )
        finished, slots = sorted(self._finished), slots_M.tolist()
        told = {slot: tokens for slot, tokens in (prompts or {}).items() if slot in slots}
        new = told | {slot: told.get(slot, _NO_TOKENS) for slot in slots_M[~session.known[slots_M]].tolist()}
        step, host_4B = session.sent + 1, np.stack([slots_M, heads_M, row_offset_M, depth_M])
        with session.lock:
            if session.closed:
                return False
            self.stats.num_cut_prompts += session.mailbox.write_host_part(step, host_4B, num_rows, finished, new)
            if self._device.type == "cuda":
                device_mailbox.enqueue_send(session.mailbox, step, start_M, num_valid_M, next_tokens_R, hidden_RH)
                assert session.enqueued is not None
                session.enqueued.record()
            else:
                session.mailbox.write_device_part(step, start_M, num_valid_M, next_tokens_R, hidden_RH)
        session.sent, self._sent_s = step, time.monotonic()
        session.num_rows[step % NUM_AREAS], self._last_requests = num_rows + int(depth_M.sum()), len(slots_M)
        session.known[slots_M] = True
        self._finished.clear()
        self.stats.num_steps += 1
        if not session.shared:
            self._waker.wake()
        return True

    def wait_host(self) -> Int32Array | None:
        """Drafts of the step sent last, [M, K], `NO_DRAFT` where there are none; None when they do not come in time."""
        session = self._current
        if session is None or session.late or session.sent == 0:
            return None
        mailbox, step, begin_s = session.mailbox, session.sent, time.monotonic()
        end_s, num_reads = self._sent_s + self._deadline_s(session), 0
        while not mailbox.is_done(step):
            if mailbox.is_aborted():
                return None
            if time.monotonic() > end_s:
                self._give_up(session)
                return None
            if (num_reads := num_reads + 1) > _NUM_QUICK_READS:
                time.sleep(_SLEEP_S)
        self._answered(session, step, time.monotonic() - begin_s)
        return mailbox.read_drafts(step, self._last_requests)

    def enqueue_wait(self, out_MK: Tensor) -> None:
        """Let the current stream wait for the drafts of the step sent last and put them into out_MK, int32 [M, K].

        `NO_DRAFT` all over when they do not come in time, or when the link went down since.
        """
        if (session := self._current) is not None and session.sent:
            with session.lock:
                if not session.closed:
                    assert session.enqueued is not None
                    device_mailbox.enqueue_wait(session.mailbox, session.sent, self._deadline_s(session), out_MK)
                    session.enqueued.record()
                    session.waited.append(session.sent)
                    return
        out_MK.fill_(NO_DRAFT)

    def finish(self, slots: Iterable[int]) -> None:
        """These requests ended: the drafter hears of it with the next step."""
        if (session := self._current) is not None:
            ended = [slot for slot in slots if session.known[slot]]
            session.known[ended] = False
            self._finished.update(ended)

    def want(self, heads: Mapping[int, str], key: str = "") -> None:
        """Ask for other heads, or with another key: the connection is made anew, unless it has these."""
        with self._hello_lock:
            if (before := self._hello) == (wanted := dataclasses.replace(before, heads=dict(heads), key=key)):
                return
            self._hello = wanted
        if (session := self._session) is not None:
            session.hang_up()

    def close(self, timeout_s: float = 0.0) -> None:
        """End the connection and the thread, and wait for it this long. Again is no error."""
        self._current = None
        self._stopped.set()
        self._waker.wake()
        self._thread.join(timeout_s)

    def report(self) -> dict[str, Any]:
        """Plain values for a metrics page."""
        session = self._session
        return {
            "address": self.address,
            "heads": {str(index): digest for index, digest in self.heads.items()},  # read before the state: see `_swap`
            "state": self.state,
            "path": None if session is None else "shared memory" if session.shared else "tcp",
            "no_mailbox_reason": "" if session is None else session.no_mailbox_reason,
            "problem": self.problem,
            "average_pass_s": self._times.average_s,
            **dataclasses.asdict(self.stats),
        }

    def _harvest(self, session: Session) -> None:
        """Learn what became of the waits that a GPU did meanwhile."""
        while session.waited and (outcome := int(session.mailbox.area(session.waited[0]).outcome[0])):
            step = session.waited.popleft()
            if outcome == REACHED:
                self._answered(session, step, 1e-9 * int(session.mailbox.area(step).outcome[1]))
            elif outcome == TIMED_OUT:
                self._give_up(session)

    def _deadline_s(self, session: Session) -> float:
        return self._times.deadline_s(session.num_rows[session.sent % NUM_AREAS])

    def _answered(self, session: Session, step: int, wait_s: float) -> None:
        service_s = session.mailbox.service_s(step)
        self.stats.answered(service_s, wait_s)
        self._times.add(service_s, session.num_rows[step % NUM_AREAS])

    def _give_up(self, session: Session) -> None:
        """A deadline passed: steps that are waited for already are let go too."""
        if not session.late:
            session.late = True
            session.mailbox.set_abort(True)
            self.stats.num_timeouts += 1
            self.problem = f"{self.address} missed a deadline"

    def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while not self._stopped.is_set():
            try:
                known = dict(self._reducers)
                session = connect(self.address, self._hello, known, self._device, self._waker, self.stats)
                try:
                    if not self._take_up(session):
                        continue
                    backoff_s = MIN_BACKOFF_S
                    session.serve(self._stopped)
                finally:
                    session.close()
            except Swapped as swap:
                self._swap(swap)
                continue
            except (Refused, WireError, OSError, ValueError) as error:
                self.problem = str(error) or type(error).__name__
            except Exception as error:  # a thread that died would leave the link down for good
                logger.exception("drafter link %s", self.address)
                self.problem = repr(error)
            finally:
                self._session = None  # after `problem`: whoever sees the link down can read why
            self._stopped.wait(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _take_up(self, session: Session) -> bool:
        """False where other heads are wanted meanwhile."""
        with self._hello_lock:  # who wants others from here on finds the session, and hangs it up
            if session.heads != self._hello.heads:
                return False
            self.stats.num_connections += 1  # before the link shows as up
            self._session = session
        return True

    def _swap(self, swap: Swapped) -> None:
        # Before the new heads show: with them, a link that is up has a session that knows them.
        self.problem, self._session = str(swap), None
        with self._hello_lock:
            heads = {i: swap.new if digest == swap.old else digest for i, digest in self._hello.heads.items()}
            self._hello = dataclasses.replace(self._hello, heads=heads)


# ====================================================================================================
# A target's drafters: which one each request belongs to, as they come, go and fail.
#
# A request stays with the drafter of its first step, which holds its cache. The choice is by rendezvous hash over those
# that serve: when a drafter is added or lost, only the requests that it gets or had are chosen anew. Requests of a lost
# drafter go to another and begin cold there; those of a drafter that is drained stay until they end.

_CLOSE_S = 2.0
DEFAULT_MIN_DEADLINE_S, DEFAULT_MAX_DEADLINE_S = 0.05, 1.0


@dataclasses.dataclass(frozen=True)
class KnownDrafter:
    """heads: index -> digest. key: what it lets targets in with, "" for nothing."""

    heads: dict[int, str]
    key: str = dataclasses.field(default="", repr=False)


def read_drafters(drafters: object) -> dict[str, KnownDrafter]:
    """By address, of `[{"address": "host:port", "heads": {index: digest}, "key": text}]`; the key may be left out.

    Raises ValueError, naming the entry and the field, for anything else.
    """
    if not isinstance(drafters, Sequence) or isinstance(drafters, str | bytes):
        raise ValueError(f"drafters is a {type(drafters).__name__}, not a list")
    found: dict[str, KnownDrafter] = {}
    for i, entry in enumerate(drafters):
        if not isinstance(entry, Mapping) or set(entry) - {"key"} != {"address", "heads"}:
            raise ValueError(f"drafters[{i}] must have the fields address, heads and, if it has one, key; no others")
        address, heads, key = entry["address"], entry["heads"], entry.get("key", "")
        if not isinstance(key, str):
            raise ValueError(f"drafters[{i}].key is a {type(key).__name__}, not text")
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"drafters[{i}].address = {address!r:.80} must be host:port")
        if address in found:
            raise ValueError(f"drafters[{i}].address = {address} is there twice")
        if not isinstance(heads, Mapping) or not heads:
            raise ValueError(f"drafters[{i}].heads = {heads!r:.80} must give the digest of one head or more by index")
        for index, digest in heads.items():
            number = str(index)
            is_number = number.isascii() and number.isdigit() and int(number) < MAX_NUM_HEADS
            if not is_number or not isinstance(digest, str) or not digest:
                raise ValueError(
                    f"drafters[{i}].heads: {index!r}: {digest!r:.40} must be a head's number, "
                    f"0 .. {MAX_NUM_HEADS - 1}, and its digest"
                )
        found[address] = KnownDrafter({int(index): digest for index, digest in heads.items()}, key)
    return found


class LinkPool:
    """Used by the engine's thread only."""

    def __init__(
        self,
        shape: TargetShape,
        *,
        aux_layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        name: str = "target",
        min_deadline_s: float = DEFAULT_MIN_DEADLINE_S,
        max_deadline_s: float = DEFAULT_MAX_DEADLINE_S,
        use_shared_memory: bool = True,
    ) -> None:
        """Without drafters yet. use_shared_memory: False takes TCP also on one host.

        Raises ValueError for deadlines out of order.
        """
        self.device = torch.device(device)
        self._times = PassTimes(min_deadline_s, max_deadline_s)
        self._hello = Hello(name, shape, tuple(aux_layer_ids), {}, host_identity() if use_shared_memory else "")
        self._reducers: dict[str, Reducer] = {}
        self._links: dict[int, Link] = {}  # by a number that is never used again
        self._draining: set[int] = set()
        self._num_made = 0
        self._link_of = np.full(shape.max_num_requests, -1, np.int64)  # by slot
        self._key_of: dict[int, str] = {}

    def set_drafters(self, drafters: object) -> None:
        """The drafters to use from now on, see `read_drafters`; does not wait for them. On a GPU their mailboxes are
        registered with CUDA as they connect, so CUDA graphs are captured before.

        Those that are not named any more are drained. Raises ValueError, and changes nothing, for a bad list.
        """
        wanted = read_drafters(drafters)
        number_of = {link.address: number for number, link in self._links.items()}
        for address, one in wanted.items():
            if (number := number_of.get(address)) is not None:
                self._links[number].want(one.heads, one.key)
                self._draining.discard(number)
                continue
            hello = dataclasses.replace(self._hello, heads=one.heads, key=one.key)
            times = dataclasses.replace(self._times)
            self._links[self._num_made] = Link(address, hello, times, self.device, self._reducers)
            self._num_made += 1
        self._draining |= {number for address, number in number_of.items() if address not in wanted}
        self._close_drained()

    def assign(
        self, slots_B: Int32Array, heads_B: Int32Array, new_slots: Mapping[int, str] | Collection[int] = ()
    ) -> list[tuple[Link, npt.NDArray[np.int64]]]:
        """Begin a step: for each link that takes part, the positions 0 .. B - 1 of its requests.

        new_slots: requests that are new to the target, with their ids where they have some. Requests are in no group
        while their drafter is late or none serves their head.
        """
        if new_slots:
            keys = new_slots if isinstance(new_slots, Mapping) else {slot: f"{slot}" for slot in new_slots}
            self.finish(slot for slot in keys if self._link_of[slot] >= 0)
            self._key_of.update(keys)
        usable = {number: link for number, link in self._links.items() if link.begin_step()}
        links_B = self._link_of[slots_B]
        connected = [number for number, link in self._links.items() if link.is_connected]
        self._forget_reducers()
        for i in np.flatnonzero(~_is_one_of(links_B, connected)).tolist():
            slot, head = int(slots_B[i]), int(heads_B[i])
            key = self._key_of.setdefault(slot, f"{slot}")
            links_B[i] = self._link_of[slot] = self._choose(key, head, usable)
        groups = []
        for number, link in usable.items():
            served_B = _is_one_of(heads_B, link.served)
            if len(members_M := np.flatnonzero((links_B == number) & served_B)):
                groups.append((link, members_M))
            self._link_of[slots_B[(links_B == number) & ~served_B]] = -1  # its heads changed: another one's, next time
        return groups

    def finish(self, slots: Iterable[int]) -> None:
        """These requests ended or were aborted."""
        for slot in slots:
            if (link := self._links.get(int(self._link_of[slot]))) is not None:
                link.finish([slot])
            self._link_of[slot] = -1
            self._key_of.pop(slot, None)
        self._close_drained()

    @property
    def num_up(self) -> int:
        """Links that take steps now."""
        return sum(link.state == "up" for link in self._links.values())

    def live_heads(self) -> set[int]:
        """Heads with a link that takes steps now, if only of requests that it has already."""
        return {head for link in self._links.values() if link.state == "up" for head in link.heads}

    def report(self) -> dict[str, Any]:
        """Plain values: the links and how many requests each has."""
        numbers, counts = np.unique(self._link_of, return_counts=True)
        num_requests = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        links = [
            {**link.report(), "draining": number in self._draining, "num_requests": num_requests.get(number, 0)}
            for number, link in self._links.items()
        ]
        return {"num_up": self.num_up, "links": links}

    def close(self) -> None:
        for link in self._links.values():
            link.close(_CLOSE_S)
        self._links.clear()

    def _choose(self, key: str, head: int, usable: Mapping[int, Link]) -> int:
        """Number of the link with the highest hash, of those that serve the head and stay; -1 without one."""
        serving = [n for n, link in usable.items() if n not in self._draining and head in link.served]
        return max(serving, key=lambda number: _rank(key, self._links[number].address), default=-1)

    def _forget_reducers(self) -> None:
        """Of heads that were swapped for others, or that nobody serves any more."""
        used = {digest for link in self._links.values() for of in (link.heads, link.served) for digest in of.values()}
        for digest in self._reducers.keys() - used:
            del self._reducers[digest]

    def _close_drained(self) -> None:
        for number in [number for number in self._draining if not np.any(self._link_of == number)]:
            self._draining.discard(number)
            self._links.pop(number).close()


def _is_one_of(values_B: npt.NDArray[Any], numbers: Iterable[int]) -> npt.NDArray[np.bool_]:
    """As `np.isin`, which takes ten times as long for a few numbers."""
    found_B = np.zeros(len(values_B), bool)
    for number in numbers:
        found_B |= values_B == number
    return found_B


def _rank(key: str, address: str) -> bytes:
    return hashlib.blake2b(f"{key}\n{address}".encode(), digest_size=8).digest()
