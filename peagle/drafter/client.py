"""A target's link to one drafter: steps out, drafts back, within a deadline. A failure costs drafts, never a request.

The engine's thread sends and waits. A thread of the link connects and watches the drafter. Where the ring is not
shared, it also carries steps and drafts over TCP: the engine's thread sees no difference.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from peagle.drafter.projection import InputProjection
from peagle.drafter.protocol import (
    FROM_DRAFTER,
    MAX_FRAME_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_REPLY_BYTES,
    NO_DRAFT,
    USER,
    Alive,
    Answer,
    Bye,
    DrafterMessage,
    HeadIndex,
    Hello,
    Int32Array,
    Step,
    StepDescriptor,
    Waker,
    Welcome,
    WireError,
    message_frames,
    read_message,
    set_up_socket,
)
from peagle.drafter.shared_memory import NUM_SLOTS, REACHED, TIMED_OUT, Ring

HELLO_TIMEOUT_S = 10.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
MAX_LATE_S = 60.0
"""Longest time that nothing is sent to a drafter after it was late several times in a row."""
_CHECK_S, _POLL_S = 0.5, 50e-6
_NO_TOKENS = np.zeros(0, np.int32)
_LOST = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_MECHANISM_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_FOREIGN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
logger = logging.getLogger(__name__)


class DrafterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A drafter to connect to. address: "host:port". heads: index -> digest. key: with which it lets targets in."""

    address: Annotated[str, msgspec.Meta(pattern=r"^\S+:\d+$")]
    heads: dict[HeadIndex, str]
    key: str = ""


@dataclasses.dataclass
class LinkStats:
    """Counts since the link was made, as `GET /drafting` names them."""

    steps: int = 0  # sent
    answered: int = 0  # in time
    timeouts: int = 0  # times that the link became late
    skipped: int = 0  # of the engine, in which the link was not up
    connections: int = 0
    service_s: float = 0.0  # of answers in time: from when the drafter saw the step, or it was sent, to its answer
    wait_s: float = 0.0  # of these: what the target waited, its GPU's stream or its host


# The connection


class Connection:
    """A socket that connects to one drafter once. Used by the link's thread only."""

    def __init__(self, context: zmq.Context[Any], drafter: DrafterEntry, waker: Waker) -> None:
        """waker: ends a `receive` that waits. Raises ZMQError for an address that cannot be resolved."""
        self.peer, self._waker = f"drafter {drafter.address}", waker
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1  # a connection that is lost takes its agreement with it
        set_up_socket(self._socket, MAX_REPLY_BYTES)
        if drafter.key:
            self._socket.plain_username, self._socket.plain_password = USER, drafter.key.encode()
        self._monitor = self._socket.get_monitor_socket(_LOST | _FOREIGN | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, waker.fileno()):
            self._poller.register(source, zmq.POLLIN)
        self._socket.connect(f"tcp://{drafter.address}")

    def send(self, frames: list[Any]) -> None:
        """Enqueue a message. Raises ZMQError where the drafter reads nothing."""
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def receive(self, timeout_s: float) -> tuple[DrafterMessage, Sequence[zmq.Frame]] | None:
        """The next message with its raw frames; None when the time is over or the waker was woken.

        Raises WireError when the connection is lost, or the message is none of a drafter's.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1e3)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        if self._socket in ready:  # before the monitor: a drafter's last message is read
            try:
                return read_message(self._socket.recv_multipart(copy=False), FROM_DRAFTER)
            except WireError as error:
                raise WireError(f"{self.peer}: {error}") from error
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH or event["value"] == _MECHANISM_MISMATCH:
                raise WireError(f"{self.peer} refused: its key is missing or another one")
            if event["event"] & _FOREIGN:
                raise WireError(f"{self.peer} does not speak this protocol")
            raise WireError(f"{self.peer} closed the connection, hangs, or nobody listens there")
        return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


@dataclasses.dataclass(eq=False)
class Session:
    """An agreed connection. From `sent` on, fields belong to the thread that sends; `lock` to whoever uses `ring`.

    projections: of the heads, by index, on the device. is_shared: the drafter reads the ring. sent: number of the step
    sent last. num_late: how often it was late since its last answer in time; late_until_s: nothing is sent before, by
    the monotonic clock. is_awaited: whether its answer was waited for. has_request, has_drafts: by request slot,
    whether the drafter has the request, and whether the last answer held drafts that were asked for. descriptors: of
    the last steps, by slot of the ring. waited: steps waited for and not counted yet. enqueued: after the GPU's last
    work on the ring.
    """

    ring: Ring
    is_shared: bool
    projections: Mapping[int, InputProjection]
    device: torch.device
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    is_closed: bool = False
    sent: int = 0
    is_late: bool = False
    num_late: int = 0
    late_until_s: float = 0.0
    is_awaited: bool = True
    has_request: npt.NDArray[np.bool_] = dataclasses.field(init=False)
    has_drafts: npt.NDArray[np.bool_] = dataclasses.field(init=False)
    descriptors: dict[int, StepDescriptor] = dataclasses.field(default_factory=dict)
    waited: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    enqueued: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        self.has_request = np.zeros(self.ring.shape.max_num_requests, bool)
        self.has_drafts = np.ones(self.ring.shape.max_num_requests, bool)
        if self.device.type == "cuda":
            self.enqueued = torch.cuda.Event()
            self.ring.pin(self.device, will_wait=True)

    def descriptor(self, number: int) -> StepDescriptor:
        """The descriptor of one of the steps sent last."""
        return self.descriptors[number % NUM_SLOTS]

    def close(self) -> None:
        """Release whoever waits and let the memory go. Nothing may be sent afterwards."""
        self.ring.set_abort(True)
        with self.lock:
            self.ring.set_abort(True)  # again: a step that began meanwhile may have undone it
            self.is_closed = True
        if self.enqueued is not None:
            self.enqueued.synchronize()
            self.ring.unpin(self.device)


_projections = weakref.WeakValueDictionary[tuple[str, torch.device], InputProjection]()
"""Those on a device, by the head's digest: drafters have the same, and for a wide target one takes 400 MB."""
_making = threading.Lock()  # all links connect at once


def agree(connection: Connection, hello: Hello, device: torch.device) -> Session:
    """Introduce this target to a drafter. Raises WireError with the words of a drafter that refuses, WireError or
    ValueError for a peer that is no drafter, RuntimeError where CUDA refuses the ring or has no memory."""
    connection.send(message_frames(hello))
    end_s, received = time.monotonic() + HELLO_TIMEOUT_S, None
    while received is None:
        if (left_s := end_s - time.monotonic()) <= 0:
            raise WireError(f"{connection.peer} sent no message within {HELLO_TIMEOUT_S:g} s")
        received = connection.receive(left_s)
    welcome, raw = received
    if isinstance(welcome, Bye):
        raise WireError(f"{connection.peer} refused: {welcome.reason}")
    if not isinstance(welcome, Welcome) or len(raw) != len(hello.heads):
        raise WireError(f"{connection.peer} answered the hello with {type(welcome).__name__} and {len(raw)} frames")
    projections = dict[int, InputProjection]()
    for (index, digest), frame in zip(hello.heads.items(), raw, strict=True):
        with _making:
            if (found := _projections.get((digest, device))) is None:
                found = _projections[digest, device] = InputProjection.from_bytes(frame.bytes, device)
        projections[index] = found
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the engine's stream is another one
    name = welcome.shared_memory
    ring = Ring.attach(name, hello.shape) if name else Ring.create(hello.shape)
    return Session(ring, bool(name), projections, device)


def step_frames(step: Step) -> list[Any]:
    """A step over TCP, without the rows that mean nothing: its integers, and its hidden rows in pieces of
    `MAX_FRAME_BYTES`."""
    rows, num_valid_B = step.valid_rows(), step.num_valid_B
    offset_B = (np.cumsum(num_valid_B) - num_valid_B).astype(np.int32)
    descriptor = msgspec.structs.replace(step.descriptor, row_offset_B=offset_B, num_rows=len(rows))
    payload = step.hidden_RH.view(torch.uint8).numpy()[rows].reshape(-1).data
    integers = np.concatenate([step.start_B, num_valid_B, step.next_tokens_R[rows]])
    pieces = [payload[first : first + MAX_FRAME_BYTES] for first in range(0, len(payload), MAX_FRAME_BYTES)]
    return message_frames(descriptor, integers.data, *pieces)


# The link


class Link:
    """To the drafter at `address`. `begin_step` fixes which connection a step of the engine uses.

    connecting   no drafter: the link's thread tries again, ever more slowly
    up           steps are sent, drafts come
    late         a deadline passed: nothing is sent until the drafter has answered all it was sent, and for a time
                 that grows if it is late again
    """

    def __init__(self, drafter: DrafterEntry, hello: Hello, deadline_s: float, device: torch.device) -> None:
        """hello: with what to connect, but for the heads. deadline_s: how long a step waits for its drafts."""
        self.drafter, self.stats = drafter, LinkStats()
        self.problem = ""  # the last thing that went wrong, in words
        self._hello = msgspec.structs.replace(hello, heads=drafter.heads)
        self._deadline_s, self._device = deadline_s, device
        self._session: Session | None = None  # of the link's thread, read by the engine's
        self._current: Session | None = None  # of the engine's step
        self.projections: Mapping[int, InputProjection] = {}
        """Head index -> its input projection, on the device, for which this step can be sent."""
        self._finished: set[int] = set()
        self._stopped, self._waker = threading.Event(), Waker()
        self._thread = threading.Thread(target=self._run, name=f"drafter link {drafter.address}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> str:
        if (session := self._session) is None:
            return "connecting"
        return "late" if session.is_late else "up"

    @property
    def was_late(self) -> bool:
        """Whether it has not answered in time since it was late."""
        return (session := self._session) is not None and session.num_late > 0

    @property
    def is_paused(self) -> bool:
        """Whether nothing is sent for a time because it was late again."""
        return (session := self._session) is not None and session.is_late and session.num_late > 1

    def begin_step(self) -> bool:
        """Use the connection as it is now; whether the step can be sent. Counts one that cannot."""
        if (session := self._session) is not self._current:
            self._current = session
            self._finished.clear()
            self.projections = {} if session is None else session.projections
        if session is None:
            self.stats.skipped += 1
            return False
        self._record_outcomes(session)
        ring = session.ring
        if session.is_late and ring.is_done(session.sent) and time.monotonic() >= session.late_until_s:
            ring.set_abort(False)
            session.is_late, session.is_awaited = False, True
            session.has_drafts[:] = True
        if not session.is_late and not ring.is_free(session.sent + 1):
            self._give_up(session)
        self.stats.skipped += session.is_late
        return not session.is_late

    def send(
        self, descriptor: StepDescriptor, start_B: Tensor, num_valid_B: Tensor, next_tokens_R: Tensor, hidden_RH: Tensor
    ) -> bool:
        """A step, as `StepDescriptor` and `Step` describe it: int32 tensors on the device, and rows projected by
        `projections`. On a GPU everything is enqueued on the current stream. False where the drafter does not get the
        step. The descriptor has no number and no finished slots yet, and prompts of what is new to the target.
        """
        session = self._current
        if session is not None and not session.is_awaited and not session.is_late:
            # So a drafter is at most one step behind: nobody wanted the drafts of that one.
            size = session.descriptor(session.sent).num_requests, session.ring.shape.max_draft_tokens
            self.wait(torch.empty(size, dtype=torch.int64, device=self._device))
        if session is None or session.is_late or session.is_closed:
            return False
        number, prompts = session.sent + 1, self._prompts(session, descriptor)
        descriptor = msgspec.structs.replace(
            descriptor, number=number, finished_slots=tuple(sorted(self._finished)), prompts=prompts
        )
        with session.lock:
            if session.is_closed:
                return False
            session.ring.write_descriptor(descriptor)
            # `Session.close` waits for work on the ring that came before this.
            session.ring.write_tensors(number, start_B, num_valid_B, next_tokens_R, hidden_RH)
            if session.enqueued is not None:
                session.enqueued.record()
        session.descriptors[number % NUM_SLOTS] = descriptor
        session.has_request[descriptor.slots_B] = True
        session.has_drafts[list(prompts)] = True
        self._finished.clear()
        session.sent, session.is_awaited = number, False
        self.stats.steps += 1
        if not session.is_shared:
            self._waker.wake()
        return True

    def _prompts(self, session: Session, descriptor: StepDescriptor) -> dict[int, Int32Array]:
        """Tokens of the step's requests that are new to the target or to the drafter, as far as they are known and
        fit."""
        prompts, room = dict[int, Int32Array](), MAX_PROMPT_TOKENS
        new = set(descriptor.slots_B[~session.has_request[descriptor.slots_B]].tolist())
        for slot in sorted(new | descriptor.prompts.keys()):
            token_ids = descriptor.prompts.get(slot, _NO_TOKENS)
            if len(token_ids) > room:
                token_ids = _NO_TOKENS
            prompts[slot], room = token_ids, room - len(token_ids)
        return prompts

    def wait(self, out_MK: Tensor) -> None:
        """Wait for the drafts of the step sent last and put them into out_MK, int64 [M, K]: 0 all over when they do not
        come in time, or when the link went down since. With a tensor on a GPU its current stream waits, not the
        host."""
        if (session := self._current) is not None and session.sent:
            with session.lock:
                if not session.is_closed:
                    session.ring.wait(session.sent, self._deadline_s, out_MK)
                    if session.enqueued is not None:
                        session.enqueued.record()
                    session.waited.append(session.sent)
                    session.is_awaited = True
                    return
        out_MK.zero_()

    def has_drafts(self, slots_B: Int32Array) -> npt.NDArray[np.bool_]:
        """Whether drafts are to be expected for these requests: the link is up, and the last answer held some for them
        if it was asked for any."""
        if (session := self._session) is not None:
            self._record_outcomes(session)
        if session is None or session.is_late:
            return np.zeros(len(slots_B), bool)
        return session.has_drafts[slots_B]

    def finish_request(self, slot: int) -> None:
        """This request ended: the drafter hears of it with the next step."""
        if (session := self._current) is not None and session.has_request[slot]:
            session.has_request[slot] = False
            self._finished.add(slot)

    def close(self, timeout_s: float = 0.0) -> None:
        """End the connection and the thread, and wait for it this long. Again is no error."""
        self._current = None
        self._stopped.set()
        self._waker.wake()
        self._thread.join(timeout_s)

    def report(self) -> dict[str, Any]:
        """As `GET /drafting` shows it: the drafter's address, its state, the path of the data, the last thing that went
        wrong, and what was counted since the link was made."""
        session = self._session
        return {
            "drafter": self.drafter.address,
            "state": self.state,
            "path": None if session is None else "shared memory" if session.is_shared else "tcp",
            "problem": self.problem,
            "counters": dataclasses.asdict(self.stats),
        }

    def _record_outcomes(self, session: Session) -> None:
        """Count what waits came to meanwhile."""
        while session.waited and (outcome := int(session.ring.slot(session.waited[0]).outcome[0])):
            number = session.waited.popleft()
            if outcome == REACHED:
                self._record_answer(session, number)
            elif outcome == TIMED_OUT:
                self._give_up(session)
            else:  # the connection ends
                session.is_late = True

    def _record_answer(self, session: Session, number: int) -> None:
        descriptor, slot = session.descriptor(number), session.ring.slot(number)
        session.num_late = 0
        self.stats.answered += 1
        self.stats.service_s += 1e-9 * int(slot.service_ns[0])
        self.stats.wait_s += 1e-9 * int(slot.outcome[1])
        has_drafts_B = slot.drafts_BK[: descriptor.num_requests, 0] != NO_DRAFT
        is_asked_B = descriptor.num_drafts_B > 0
        session.has_drafts[descriptor.slots_B[is_asked_B]] = has_drafts_B[is_asked_B]

    def _give_up(self, session: Session) -> None:
        """A deadline passed: steps that are waited for already are let go too."""
        if not session.is_late:
            session.is_late = True
            session.ring.set_abort(True)
            # A drafter that answers just too late would make each step of the target wait for the whole deadline.
            pause_s = min(self._deadline_s * (2.0 ** min(session.num_late, 16) - 1), MAX_LATE_S)
            session.num_late, session.late_until_s = session.num_late + 1, time.monotonic() + pause_s
            self.stats.timeouts += 1
            pause = f" again, and is asked nothing for {pause_s:.3g} s" if pause_s else ""
            self.problem = f"{self.drafter.address} missed a deadline{pause}"

    # The link's thread

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        backoff_s, can_share = MIN_BACKOFF_S, True
        while not self._stopped.is_set():
            connection: Connection | None = None
            session: Session | None = None
            try:
                connection = Connection(context, self.drafter, self._waker)
                hello = self._hello if can_share else msgspec.structs.replace(self._hello, host="")
                can_share = True  # tried again by the next connection
                session = agree(connection, hello, self._device)
                self.stats.connections += 1  # before the link shows as up
                self._session, backoff_s = session, MIN_BACKOFF_S
                self._serve(session, connection)
            except OSError as error:  # the drafter's shared memory cannot be had here: the next hello asks for none
                self.problem, can_share = str(error), False
            except (WireError, zmq.ZMQError, ValueError) as error:
                self.problem = str(error) or type(error).__name__
            except Exception as error:  # a thread that died would leave the link down for good
                logger.exception("drafter link %s", self.drafter.address)
                self.problem = repr(error)
            finally:
                if session is not None:
                    session.close()
                if connection is not None:
                    connection.close()
                self._session = None  # after `problem`: whoever sees the link down can read why
            self._stopped.wait(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        context.term()

    def _serve(self, session: Session, connection: Connection) -> None:
        """Watch the connection, and carry steps where the ring is not shared, until somebody wants it to end.

        Raises WireError or ZMQError when the connection is lost: what happened.
        """
        ring, carried, sent_ns = session.ring, 0, 0
        while not self._stopped.is_set():
            if not session.is_shared and carried < session.sent and ring.is_done(carried):
                carried, sent_ns = carried + 1, time.monotonic_ns()
                while not (ring.is_ready(carried) or self._stopped.wait(_POLL_S)):  # a GPU may still be at it
                    pass
                connection.send(step_frames(ring.read_step(carried)))
            if (received := connection.receive(_CHECK_S)) is None:
                continue
            message, raw = received
            if isinstance(message, Answer) and not session.is_shared:
                shape = session.descriptor(carried).num_requests, ring.shape.max_draft_tokens
                if message.number != carried or [len(frame.buffer) for frame in raw] != [4 * shape[0] * shape[1]]:
                    raise WireError(
                        f"{connection.peer} answered step {message.number}, not {carried} with {shape} drafts"
                    )
                drafts_BK = np.frombuffer(raw[0].buffer, np.int32).reshape(shape)
                ring.write_drafts(carried, drafts_BK, time.monotonic_ns() - sent_ns)
            elif isinstance(message, Bye):
                raise WireError(f"{connection.peer} says good-bye: {message.reason}")
            elif not isinstance(message, Alive):
                raise WireError(f"{connection.peer} sent {type(message).__name__} out of turn")
