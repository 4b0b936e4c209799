"""A target's links to its drafters: steps out, drafts back, within a deadline.

Whatever goes wrong costs drafts, never a request.

`LinkPool` gives each request its drafter, a `Link` is the way to one of them. An engine's step is

    for link, members_M in pool.assign(slots_B, heads_B, new_slots):
        link.announce(StepPlan(...))                  # as soon as the host knows the step
    link.send(starts, valid rows, next tokens, rows)  # reduced by `link.reducers`
    link.wait()  or  link.enqueue_wait(out_MK, chance_MK)  # on the host, or in the order of a GPU's stream

One thread (the engine's) does this; a thread of each link connects, watches the drafter and, where the mailbox is not
shared, carries steps and drafts over TCP: whoever sends and waits sees no difference.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from peagle.drafter.drafts import token_ids
from peagle.drafter.mailbox import NUM_AREAS, REACHED, TIMED_OUT, Mailbox, host_identity
from peagle.drafter.protocol import (
    FROM_DRAFTER,
    MAX_REPLY_BYTES,
    NO_DRAFT,
    USER,
    Alive,
    Answer,
    Attached,
    Bye,
    DrafterMessage,
    HeadIndex,
    Hello,
    Int32Array,
    Reducer,
    Refused,
    StepPlan,
    Swapped,
    TargetShape,
    Waker,
    Welcome,
    WireError,
    frames_of,
    read_drafts,
    read_message,
    set_up,
    step_frames,
)

HELLO_TIMEOUT_S = 10.0
MAX_SILENCE_S = 10.0  # of a drafter with a step in hand, before the connection counts as lost
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
DEFAULT_MIN_DEADLINE_S, DEFAULT_MAX_DEADLINE_S = 0.05, 1.0
_CHECK_S, _POLL_S = 0.5, 50e-6
_NUM_QUICK_READS, _HOST_POLL_S = 50, 0.3e-3  # seldom where the host waits: the drafter may need its cores
_CLOSE_S = 2.0
_NO_TOKENS = np.zeros(0, np.int32)
_LOST = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_FOREIGN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Deadlines:
    """How long an answer may take, from how long answers took: exponential averages of seconds and of rows.

    A step with more rows than the average may take as much longer, so that a chunk of a long prompt does not look like
    a drafter that hangs.
    """

    min_s: float
    max_s: float
    average_s: float | None = None
    average_rows: float = 1.0

    WEIGHT = 0.1  # of the newest answer
    NUM_PASSES = 3  # expected passes that a target waits: its own, and one each of others in front and of bad luck

    def add(self, service_s: float, num_rows: int) -> None:
        """An answer to a step of num_rows rows took service_s seconds."""
        if self.average_s is None:
            self.average_s, self.average_rows = service_s, max(1.0, num_rows)
            return
        self.average_s += self.WEIGHT * (service_s - self.average_s)
        self.average_rows += self.WEIGHT * (max(1.0, num_rows) - self.average_rows)

    def deadline_s(self, num_rows: int) -> float:
        """Seconds to wait for the answer to a step of num_rows rows: the longest allowed as long as none is known."""
        if self.average_s is None:
            return self.max_s
        expected_s = self.average_s * max(1.0, num_rows / self.average_rows)
        return min(max(self.NUM_PASSES * expected_s, self.min_s), self.max_s)


@dataclasses.dataclass
class LinkStats:
    """Counts since the link was made.

    Of the answers that came in time, last_service_s, sum_service_s: from when the drafter saw the step (over TCP: from
    when it was sent) to its answer; sum_wait_s: what the target waited, its GPU's stream or its host.
    """

    num_steps: int = 0  # sent
    num_answered: int = 0  # in time
    num_timeouts: int = 0
    num_skipped: int = 0  # not sent, because the link was not up
    num_connections: int = 0
    num_bytes: int = 0  # sent and received over TCP
    num_cut_prompts: int = 0  # new requests whose tokens did not fit
    last_service_s: float = 0.0
    sum_service_s: float = 0.0
    sum_wait_s: float = 0.0


# The connection


class HeadSwapped(Exception):
    """The drafter put another head in the place of one of ours. Arguments: the digests of the two."""


class Connection:
    """A socket that connects to one drafter once. Used by the link's thread only."""

    def __init__(self, context: zmq.Context[Any], address: str, key: str, waker: Waker) -> None:
        """key: of the drafter, "" for none. waker: ends a `receive` that waits.

        Raises ZMQError for an address that cannot be resolved.
        """
        self.peer, self._waker = f"drafter {address}", waker
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1  # a connection that is lost takes its agreement with it
        set_up(self._socket, MAX_REPLY_BYTES)
        if key:
            self._socket.plain_username, self._socket.plain_password = USER, key.encode()
        self._monitor = self._socket.get_monitor_socket(_LOST | _FOREIGN | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, waker.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._is_known = False
        self.last_message_s = time.monotonic()
        self._socket.connect(f"tcp://{address}")

    def send(self, frames: list[Any]) -> int:
        """Enqueue a message; returns its bytes. Raises ZMQError where the drafter reads nothing."""
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        return sum(memoryview(frame).nbytes for frame in frames)

    def receive(self, timeout_s: float) -> tuple[DrafterMessage, Sequence[zmq.Frame]] | None:
        """The next message with its raw frames; None when the time is over or the waker was woken.

        Raises WireError when the connection is lost, or the message is none of a drafter's.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1e3)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._socket in ready:  # before the monitor: what a drafter says last is read
            try:
                received = read_message(self._socket.recv_multipart(copy=False), FROM_DRAFTER)
            except WireError as error:
                raise WireError(f"{self.peer}: {error}") from error
            self._is_known, self.last_message_s = True, time.monotonic()
            return received
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH or event["value"] == _MECHANISM_MISMATCH:
                raise WireError(f"{self.peer} refused: its key is missing or another one")
            if event["event"] & _FOREIGN:
                raise WireError(f"{self.peer} does not speak this protocol")
            raise WireError(
                f"{self.peer} " + ("closed the connection" if self._is_known else "refused: nobody listens")
            )
        return None

    def receive_within(self, timeout_s: float) -> tuple[DrafterMessage, Sequence[zmq.Frame]]:
        """The next message. Raises WireError when it is not there in time, and as `receive`."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if (received := self.receive(left_s)) is not None:
                return received
        raise WireError(f"{self.peer} sent no message within {timeout_s:g} s")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@dataclasses.dataclass(eq=False)
class Session:
    """An agreed connection. From `sent` on, fields belong to the thread that sends; `lock` to whoever uses `mailbox`.

    heads: index -> digest. reducers: of these, by digest, on the host where they came with the welcome. is_shared: one
    host, so that the drafter reads the mailbox. is_unwanted: other heads are wanted, so the connection is to end.
    sent: number of the step sent last. known: by slot, whether the drafter has the request. has_drafts: by slot,
    whether the last answer held drafts, if any were asked for. num_rows: of the last steps, by area. waited: steps
    whose drafts a GPU waits for. enqueued: after the GPU's last work on the mailbox.
    """

    mailbox: Mailbox
    is_shared: bool
    no_mailbox_reason: str
    heads: Mapping[int, str]
    reducers: Mapping[str, Reducer]
    device: torch.device
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    is_closed: bool = False
    is_unwanted: bool = False
    sent: int = 0
    is_late: bool = False
    known: npt.NDArray[np.bool_] = dataclasses.field(init=False)
    has_drafts: npt.NDArray[np.bool_] = dataclasses.field(init=False)
    num_rows: list[int] = dataclasses.field(default_factory=lambda: [0] * NUM_AREAS)
    waited: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    enqueued: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.known = np.zeros(self.mailbox.shape.max_num_requests, bool)
        self.has_drafts = np.ones(self.mailbox.shape.max_num_requests, bool)
        if self.device.type == "cuda":
            self.enqueued = torch.cuda.Event()
            self.mailbox.pin(self.device, will_wait=True)

    def close(self) -> None:
        """Release whoever waits and let the memory go. Nothing may be sent afterwards."""
        self.mailbox.set_abort(True)
        with self.lock:
            self.mailbox.set_abort(True)  # again: a step that began meanwhile may have taken it back
            self.is_closed = True
        if self.enqueued is not None:
            self.enqueued.synchronize()
            self.mailbox.unpin(self.device)


def introduce(connection: Connection, hello: Hello, known: Mapping[str, Reducer], device: torch.device) -> Session:
    """Agree with a drafter. known: reducers that the target has already, by digest.

    Raises WireError with the words of a drafter that refuses, WireError or ValueError for a peer that is no drafter,
    RuntimeError where CUDA refuses the mailbox.
    """
    connection.send(frames_of(msgspec.structs.replace(hello, known_reducers=tuple(known))))
    welcome, raw = connection.receive_within(HELLO_TIMEOUT_S)
    if isinstance(welcome, Refused):
        raise WireError(f"{connection.peer} refused: {welcome.reason}")
    if not isinstance(welcome, Welcome) or len(raw) != len(welcome.reducers):
        raise WireError(f"{connection.peer} answered the hello with {type(welcome).__name__} and {len(raw)} frames")
    reducers = dict(known)
    for digest, frame in zip(welcome.reducers, raw, strict=True):
        reducers[digest] = Reducer.from_bytes(frame.bytes)
        if reducers[digest].hidden_size != hello.shape.hidden_size:
            raise WireError(f"the reducer of head {digest} leaves {reducers[digest].hidden_size} columns")
    if missing := set(hello.heads.values()) - set(reducers):
        raise WireError(f"{connection.peer} sent no reducer of {', '.join(sorted(missing))}")
    mailbox, problem = None, welcome.no_mailbox_reason
    if welcome.mailbox:
        try:
            mailbox = Mailbox.attach(welcome.mailbox, hello.shape)
        except (OSError, ValueError) as error:
            problem = str(error)
        connection.send(frames_of(Attached(mailbox is not None)))
    return Session(
        mailbox=mailbox or Mailbox.private(hello.shape),
        is_shared=mailbox is not None,
        no_mailbox_reason=problem,
        heads=dict(hello.heads),
        # The known ones too: the target may forget them before it has a use for these.
        reducers={digest: reducers[digest] for digest in hello.heads.values()},
        device=device,
    )


# The link


class Link:
    """To the drafter at `address`. `begin_step` fixes which connection a step of the engine uses.

    connecting   no drafter: the link's thread tries again, ever more slowly
    up           steps are sent, drafts come
    late         a deadline passed: nothing is sent until the drafter has answered all it was sent
    closed
    """

    def __init__(
        self,
        address: str,
        key: str,
        hello: Hello,
        deadlines: Deadlines,
        device: torch.device,
        reducers: dict[str, Reducer],
    ) -> None:
        """key, hello: with what to connect. reducers: by digest, filled here, kept by the caller for all its links."""
        self.address, self._key, self.stats = address, key, LinkStats()
        self.problem = ""  # the last thing that went wrong, in words
        self._hello, self._deadlines, self._device, self._reducers = hello, deadlines, device, reducers
        self._session: Session | None = None  # of the link's thread, read by the engine's
        self._current: Session | None = None  # of the engine's step
        self._finished: set[int] = set()
        self._announced: Session | None = None  # whose next step's rest is to be sent
        self._sent_s = 0.0
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
        return "late" if session.is_late else "up"

    @property
    def heads(self) -> Mapping[int, str]:
        """index -> digest, as wanted."""
        return self._hello.heads

    @property
    def served_heads(self) -> Mapping[int, str]:
        """Heads for which this step can be sent: index -> digest."""
        return {} if self._current is None else self._current.heads

    @property
    def reducers(self) -> Mapping[int, Reducer]:
        """Head index -> what reduces hidden states for it, on the device: put there at first use, by this thread."""
        if (session := self._current) is None:
            return {}
        for digest in session.reducers.keys() - self._reducers.keys():
            self._reducers[digest] = session.reducers[digest].to(self._device)
        return {index: self._reducers[digest] for index, digest in session.heads.items()}

    def begin_step(self) -> bool:
        """Take up the connection as it is now; whether steps can be sent."""
        if (session := self._session) is not self._current:
            self._current = session
            self._finished.clear()
        if session is None:
            return False
        self._settle_device_waits(session)
        mailbox = session.mailbox
        if session.is_late and mailbox.is_done(session.sent):
            mailbox.set_abort(False)
            session.is_late = False
            session.has_drafts[:] = True
            # No more than it was waited for: a drafter that became slower gets more time by and by, one hang little.
            late_s = min(mailbox.service_s(session.sent), self._deadline_s(session, session.sent))
            self._deadlines.add(late_s, session.num_rows[session.sent % NUM_AREAS])
        if not session.is_late and not mailbox.is_free(session.sent + 1):
            self._give_up(session)
        return not session.is_late

    def announce(self, plan: StepPlan) -> bool:
        """Tell the drafter what it can prepare for; `send` follows. False where it does not get the step (no drafts,
        then).

        The plan's prompts are those of requests that are new to the target, those of other drafters may be among them.

        Raises:
            ValueError: more requests or rows than the shape that was agreed on, which is the caller's mistake.
        """
        session = self._current
        if session is None or session.is_late or session.is_closed:
            self.stats.num_skipped += 1
            return False
        if self._announced is session:  # a step that never ran: the drafter may have prepared for it
            session.is_unwanted = True
            self._waker.wake()
            return False
        shape = self._hello.shape
        if plan.num_requests > shape.max_num_requests or plan.num_rows > shape.max_num_rows:
            raise ValueError(
                f"{plan.num_requests} requests, {plan.num_rows} rows; agreed were {shape.max_num_requests}, "
                f"{shape.max_num_rows}"
            )
        prompts: dict[int, Int32Array] = {}
        if plan.prompts or not session.known[plan.slots_B].all():
            slots, new = set(plan.slots_B.tolist()), plan.slots_B[~session.known[plan.slots_B]].tolist()
            prompts = {slot: token_ids for slot, token_ids in plan.prompts.items() if slot in slots}
            prompts |= {slot: prompts.get(slot, _NO_TOKENS) for slot in new}
        number = session.sent + 1
        plan = dataclasses.replace(plan, number=number, finished_slots=sorted(self._finished), prompts=prompts)
        with session.lock:
            if session.is_closed:
                return False
            self.stats.num_cut_prompts += session.mailbox.write_host_part(plan)
        session.num_rows[number % NUM_AREAS] = plan.num_rows + int(plan.depth_B.sum())
        if prompts:
            session.known[plan.slots_B] = True
            session.has_drafts[list(prompts)] = True
        self._finished.clear()
        self._announced = session
        return True

    def send(self, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor) -> bool:
        """The rest of the step that was announced, as in `TargetStep`; False where the connection ended meanwhile.

        On a GPU everything is enqueued on the current stream.
        """
        return self._send(
            lambda mailbox, number: mailbox.write_device_part(number, start_B, num_valid_B, next_tokens_R, hidden_RH)
        )

    def _send(self, write: Callable[[Mailbox, int], None]) -> bool:
        """write: enqueues or does what hands over the rest of the step of this number."""
        session, self._announced = self._announced, None
        if session is None or session is not self._current:
            return False
        number = session.sent + 1
        with session.lock:
            if session.is_closed:
                return False
            # `Session.close` waits for work on the mailbox that came before this.
            write(session.mailbox, number)
            if session.enqueued is not None:
                session.enqueued.record()
        session.sent, self._sent_s = number, time.monotonic()
        self.stats.num_steps += 1
        if not session.is_shared:
            self._waker.wake()
        return True

    def wait(self) -> Int32Array | None:
        """Token ids of the drafts of the step sent last, [M, K], `NO_DRAFT` where there are none; None when they do not
        come in time."""
        session = self._current
        if session is None or session.is_late or session.sent == 0:
            return None
        mailbox, number, begin_s = session.mailbox, session.sent, time.monotonic()
        end_s, num_reads = self._sent_s + self._deadline_s(session, number), 0
        while not mailbox.is_done(number):
            if mailbox.is_aborted():
                return None
            if time.monotonic() > end_s:
                self._give_up(session)
                return None
            if (num_reads := num_reads + 1) > _NUM_QUICK_READS:
                time.sleep(_HOST_POLL_S)
        return token_ids(self._answered(session, number, time.monotonic() - begin_s))

    def enqueue_wait(self, out_MK: Tensor, chance_MK: Tensor) -> None:
        """Let the current stream wait for the drafts of the step sent last and put them into out_MK, int64 [M, K], and
        their chances into chance_MK, float32.

        0 all over when they do not come in time, or when the link went down since.
        """
        if (session := self._current) is not None and session.sent:
            with session.lock:
                if not session.is_closed:
                    deadline_s = self._deadline_s(session, session.sent)
                    session.mailbox.enqueue_wait(session.sent, deadline_s, out_MK, chance_MK)
                    if session.enqueued is not None:
                        session.enqueued.record()
                    session.waited.append(session.sent)
                    return
        out_MK.zero_()
        chance_MK.zero_()

    def has_drafts(self, slots_B: Int32Array) -> npt.NDArray[np.bool_]:
        """Whether drafts are to be expected for these requests: the link is up, and the last answer held some for them
        if it was asked for any."""
        session = self._session
        if session is None or session.is_late:
            return np.zeros(len(slots_B), bool)
        return session.has_drafts[slots_B]

    def finish(self, slots: Iterable[int]) -> None:
        """These requests ended: the drafter hears of it with the next step."""
        if (session := self._current) is not None:
            ended = [slot for slot in slots if session.known[slot]]
            session.known[ended] = False
            self._finished.update(ended)

    def want(self, heads: Mapping[int, str], key: str = "") -> None:
        """Ask for other heads, or with another key: the connection is made anew, unless it has these."""
        with self._hello_lock:
            if (heads, key) == (self._hello.heads, self._key):
                return
            self._hello, self._key = msgspec.structs.replace(self._hello, heads=dict(heads)), key
        if (session := self._session) is not None:
            session.is_unwanted = True
            self._waker.wake()

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
            "path": None if session is None else "shared memory" if session.is_shared else "tcp",
            "no_mailbox_reason": "" if session is None else session.no_mailbox_reason,
            "problem": self.problem,
            "average_pass_s": self._deadlines.average_s,
            **dataclasses.asdict(self.stats),
        }

    def _settle_device_waits(self, session: Session) -> None:
        """Learn what became of the waits that a GPU did meanwhile."""
        while session.waited and (outcome := int(session.mailbox.area(session.waited[0]).outcome[0])):
            number = session.waited.popleft()
            if outcome == REACHED:
                self._answered(session, number, 1e-9 * int(session.mailbox.area(number).outcome[1]))
            elif outcome == TIMED_OUT:
                self._give_up(session)

    def _deadline_s(self, session: Session, number: int) -> float:
        return self._deadlines.deadline_s(session.num_rows[number % NUM_AREAS])

    def _answered(self, session: Session, number: int, wait_s: float) -> Int32Array:
        """Count an answer that came in time, and take its drafts, as they travel."""
        area, stats = session.mailbox.area(number), self.stats
        service_s = session.mailbox.service_s(number)
        stats.num_answered += 1
        stats.last_service_s = service_s
        stats.sum_service_s += service_s
        stats.sum_wait_s += wait_s
        self._deadlines.add(service_s, session.num_rows[number % NUM_AREAS])
        num_requests = int(area.counts[1])
        drafts_MK, is_asked_M = session.mailbox.read_drafts(number, num_requests), area.host_4B[2, :num_requests] > 0
        session.has_drafts[area.host_4B[0, :num_requests][is_asked_M]] = drafts_MK[is_asked_M, 0] != NO_DRAFT
        return drafts_MK

    def _give_up(self, session: Session) -> None:
        """A deadline passed: steps that are waited for already are let go too."""
        if not session.is_late:
            session.is_late = True
            session.mailbox.set_abort(True)
            self.stats.num_timeouts += 1
            self.problem = f"{self.address} missed a deadline"

    # The link's thread

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        backoff_s = MIN_BACKOFF_S
        while not self._stopped.is_set():
            connection: Connection | None = None
            try:
                connection = Connection(context, self.address, self._key, self._waker)
                session = introduce(connection, self._hello, dict(self._reducers), self._device)
                try:
                    if not self._take_up(session):
                        continue
                    backoff_s = MIN_BACKOFF_S
                    self._serve(session, connection)
                    continue
                finally:
                    session.close()
            except HeadSwapped as swap:
                self._swap(*swap.args)
                continue
            except (WireError, zmq.ZMQError, OSError, ValueError) as error:
                self.problem = str(error) or type(error).__name__
            except Exception as error:  # a thread that died would leave the link down for good
                logger.exception("drafter link %s", self.address)
                self.problem = repr(error)
            finally:
                if connection is not None:
                    connection.close()
                self._session = None  # after `problem`: whoever sees the link down can read why
            self._stopped.wait(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        context.term()

    def _take_up(self, session: Session) -> bool:
        """False where other heads are wanted meanwhile."""
        with self._hello_lock:  # who wants others from here on finds the session, and ends it
            if session.heads != self._hello.heads:
                return False
            self.stats.num_connections += 1  # before the link shows as up
            self._session = session
        return True

    def _swap(self, old: str, new: str) -> None:
        # Before the new heads show: with them, a link that is up has a session that knows them.
        self.problem, self._session = f"head {old} was swapped for {new}", None
        with self._hello_lock:
            heads = {i: new if digest == old else digest for i, digest in self._hello.heads.items()}
            self._hello = msgspec.structs.replace(self._hello, heads=heads)

    def _serve(self, session: Session, connection: Connection) -> None:
        """Watch the connection, and carry steps where the mailbox is not shared, until somebody wants it to end.

        Raises HeadSwapped, or WireError or ZMQError when the connection is lost: what happened.
        """
        number = 1
        while not (self._stopped.is_set() or session.is_unwanted):
            if not session.is_shared and session.sent >= number:
                self._carry(session, connection, number)
                number += 1
            elif (received := connection.receive(_CHECK_S)) is not None:
                self._act_on(connection, received[0])
            is_waiting = session.sent > 0 and not session.mailbox.is_done(session.sent)
            self._check_silence(connection, is_waiting)

    def _carry(self, session: Session, connection: Connection, number: int) -> None:
        """Send a step once it is ready, and put its answer into the mailbox."""
        mailbox = session.mailbox
        while not mailbox.is_ready(number):  # a GPU may still be at it
            if self._stopped.wait(_POLL_S):
                return
        begin_ns = time.monotonic_ns()
        step = mailbox.read_step(number, 0)
        self.stats.num_bytes += connection.send(step_frames(step))
        connection.last_message_s = time.monotonic()  # silence counts from here on
        while not (self._stopped.is_set() or session.is_unwanted):
            if (received := connection.receive(_CHECK_S)) is None:
                self._check_silence(connection, True)
                continue
            message, raw = received
            if isinstance(message, Answer):
                drafts_BK = read_drafts(message, raw, number, step.num_requests, mailbox.shape.max_depth)
                self.stats.num_bytes += drafts_BK.nbytes
                mailbox.answer(number, drafts_BK, time.monotonic_ns() - begin_ns)
                return
            self._act_on(connection, message)

    def _act_on(self, connection: Connection, message: DrafterMessage) -> None:
        if isinstance(message, Swapped):
            raise HeadSwapped(message.old, message.new)
        if isinstance(message, Bye):
            raise WireError(f"{connection.peer} says good-bye: {message.reason}")
        if not isinstance(message, Alive):
            raise WireError(f"{connection.peer} sent {type(message).__name__} out of turn")

    def _check_silence(self, connection: Connection, is_waiting: bool) -> None:
        silence_s = time.monotonic() - connection.last_message_s
        if is_waiting and silence_s > MAX_SILENCE_S:
            raise WireError(f"{connection.peer} gave no sign of life for {silence_s:.0f} s")


# The pool


class DrafterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drafter to connect to. address: "host:port". heads: index -> digest. key: with which it lets targets in."""

    address: Annotated[str, msgspec.Meta(pattern=r"^\S+:\d+$")]
    heads: dict[HeadIndex, str]
    key: str = ""


def _read_entry(drafter: Any) -> DrafterEntry:
    try:
        return msgspec.convert(drafter, DrafterEntry, strict=False)
    except msgspec.ValidationError as error:
        shown = {**drafter, "key": "..."} if isinstance(drafter, Mapping) else drafter
        raise ValueError(f"the drafter {shown!r:.200} cannot be used: {error}") from error


class LinkPool:
    """A target's drafters: which one each request belongs to, as they come, go and fail. For the engine's thread only.

    A request stays with the drafter of its first step, which holds its cache; that one is chosen by rendezvous hash
    over those that serve. Requests of a lost drafter go to another and begin cold there; those of a drafter that is
    drained stay until they end.
    """

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
        """Without drafters yet. use_shared_memory: False takes TCP also on one host."""
        self.device = torch.device(device)
        self._deadlines = Deadlines(min_deadline_s, max_deadline_s)
        self._hello = Hello(name, shape, tuple(aux_layer_ids), {}, host_identity() if use_shared_memory else "")
        self._reducers: dict[str, Reducer] = {}
        self._links: dict[int, Link] = {}  # by a number that is never used again
        self._draining: set[int] = set()
        self._num_made = 0
        self._link_of = np.full(shape.max_num_requests, -1, np.int64)  # by slot
        self._key_of: dict[int, str] = {}
        # The groups of the last step and what they follow from; None: `_link_of` or the links may have changed since.
        self._last: tuple[object, list[tuple[Link, npt.NDArray[np.int64]]]] | None = None

    def set_drafters(self, drafters: Iterable[Any]) -> None:
        """The drafters to use from now on; does not wait for them. Those that are not named any more are drained.

        drafters: the fields of `DrafterEntry` each. On a GPU their mailboxes are registered with CUDA as they connect,
        so CUDA graphs are captured before.

        Raises ValueError naming the drafter and its wrong field; nothing has changed then.
        """
        self._last = None
        wanted = {entry.address: entry for entry in map(_read_entry, drafters)}
        number_of = {link.address: number for number, link in self._links.items()}
        for address, entry in wanted.items():
            if (number := number_of.get(address)) is not None:
                self._links[number].want(entry.heads, entry.key)
                self._draining.discard(number)
                continue
            hello = msgspec.structs.replace(self._hello, heads=entry.heads)
            deadlines = dataclasses.replace(self._deadlines)
            self._links[self._num_made] = Link(address, entry.key, hello, deadlines, self.device, self._reducers)
            self._num_made += 1
        self._draining |= {number for address, number in number_of.items() if address not in wanted}
        self._close_drained()

    def assign(
        self, slots_B: Int32Array, heads_B: Int32Array, new_slots: Mapping[int, str] | None = None
    ) -> list[tuple[Link, npt.NDArray[np.int64]]]:
        """Begin a step: for each link that takes part, the positions 0 .. B - 1 of its requests, in their order.

        new_slots: ids of requests that are new to the target. Requests are in no group while their drafter is late or
        none serves their head.
        """
        if new_slots:
            self.finish(slot for slot in new_slots if self._link_of[slot] >= 0)
            self._key_of.update(new_slots)
            self._last = None
        usable = {number: link for number, link in self._links.items() if link.begin_step()}
        states = {number: (link.state, link.served_heads) for number, link in self._links.items()}
        reasons = (slots_B.tobytes(), heads_B.tobytes(), list(usable), states)
        if self._last is not None and self._last[0] == reasons:
            return self._last[1]
        links_B = self._link_of[slots_B]
        connected = [number for number, (state, _) in states.items() if state != "connecting"]
        self._forget_reducers()
        for i in np.flatnonzero(~_is_one_of(links_B, connected)).tolist():
            slot, head = int(slots_B[i]), int(heads_B[i])
            links_B[i] = self._link_of[slot] = self._choose(self._key_of.get(slot, f"{slot}"), head, usable)
        groups = []
        for number, link in usable.items():
            is_served_B = _is_one_of(heads_B, link.served_heads)
            if len(members_M := np.flatnonzero((links_B == number) & is_served_B)):
                groups.append((link, members_M))
            # The link's heads changed: next time the request goes to another one.
            self._link_of[slots_B[(links_B == number) & ~is_served_B]] = -1
        self._last = (reasons, groups) if (self._link_of[slots_B] == links_B).all() else None
        return groups

    def finish(self, slots: Iterable[int]) -> None:
        """These requests ended or were aborted."""
        for slot in slots:
            self._last = None
            if (link := self._links.get(int(self._link_of[slot]))) is not None:
                link.finish([slot])
            self._link_of[slot] = -1
            self._key_of.pop(slot, None)
        self._close_drained()

    @property
    def num_up(self) -> int:
        """Links that take steps now."""
        return sum(link.state == "up" for link in self._links.values())

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
        serving = [n for n, link in usable.items() if n not in self._draining and head in link.served_heads]
        return max(serving, key=lambda number: rank(key, self._links[number].address), default=-1)

    def _forget_reducers(self) -> None:
        """Of heads that were swapped for others, or that nobody serves any more."""
        links = self._links.values()
        used = {digest for link in links for heads in (link.heads, link.served_heads) for digest in heads.values()}
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


def rank(key: str, address: str) -> bytes:
    """Of a drafter for a request: the highest gets it."""
    return hashlib.blake2b(f"{key}\n{address}".encode(), digest_size=8).digest()
