"""A drafter's server: targets connect, one thread takes every step that is ready, drafts for all of them, answers.

The serving thread owns the engine, the socket and all that is known of targets; it waits for nobody. A target whose
hello fits gets a ring; another one is told why not. An error of a target ends its connection, an error of the engine
those of the steps in hand; the server goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from peagle.drafter.engine import DraftEngine
from peagle.drafter.parallel_pass import ParallelPass
from peagle.drafter.protocol import (
    FROM_TARGET,
    MAX_FRAME_BYTES,
    MAX_NUM_HEADS,
    USER,
    Alive,
    Answer,
    Bye,
    DrafterMessage,
    Hello,
    Int32Array,
    ServedHead,
    Step,
    StepDescriptor,
    Welcome,
    WireError,
    check_swap,
    find_mismatch,
    message_frames,
    read_message,
    set_up_socket,
)
from peagle.drafter.shared_memory import Ring, host_identity

logger = logging.getLogger(__name__)

_LINGER_MS = 200  # for the last words of a server that stops
_MAX_SILENCE_S = 30.0  # of a serving thread that is healthy
_ALIVE_S = 0.5  # between messages with which targets that went away are noticed
_CHECK_S = 0.01  # between looks at the socket while all targets share their rings
# Between looks at rings: on a GPU without sleeping for _SPIN_S after the last step, letting other threads run. On a CPU
# seldom: each look takes time from the target's threads.
_SPIN_S, _SLEEP_S = 1.0, 1e-3
_IDLE_S = 60.0  # without a step, after which a target's requests hold no blocks: their rows stay as prefixes
_BLOCK_S = 0.2  # without shared rings: the socket wakes the thread
_SWITCH_INTERVAL_S = 1e-4
_MAX_FAILURES = 3  # passes in a row, after which the drafter counts as broken
_MAX_MESSAGES = 64  # read in one turn


@dataclasses.dataclass
class ServerStats:
    """Counts since the server was made, as `GET /drafting` names them."""

    steps: int = 0  # of targets, answered
    connections: int = 0
    refused_connections: int = 0  # newcomers that were no targets, did not fit, or whose ring CUDA did not take
    dropped: int = 0  # targets dropped for what they sent
    failures: int = 0  # calls of the engine that raised
    busy_s: float = 0.0  # with steps in hand


@dataclasses.dataclass(eq=False)
class Peer:
    """A target that was welcomed. Used by the serving thread only."""

    identity: bytes  # of its connection
    session: int
    hello: Hello
    ring: Ring
    is_shared: bool  # the target writes the ring itself; otherwise its steps come over TCP
    engine_heads: Int32Array  # the target's head index -> the engine's, -1 for none
    num_steps: int = 0  # answered
    seen_ns: int = 0  # when its step was seen
    stepped_s: float = math.inf  # when its last step was answered

    def read_step(self) -> Step | None:
        """The next step, with the engine's heads, if it is there. Raises ValueError or WireError for one that does not
        fit."""
        if not self.ring.is_ready(self.num_steps + 1):
            return None
        self.seen_ns = time.monotonic_ns()
        step = self.ring.read_step(self.num_steps + 1)
        heads_B = self.engine_heads[step.descriptor.heads_B]
        if (heads_B < 0).any():
            raise ValueError(
                f"heads_B {step.descriptor.heads_B.tolist()} names heads beside {sorted(self.hello.heads)}"
            )
        descriptor = msgspec.structs.replace(step.descriptor, heads_B=heads_B)
        return dataclasses.replace(step, descriptor=descriptor, session=self.session)

    def receive_step(self, descriptor: StepDescriptor, raw: Sequence[zmq.Frame]) -> None:
        """Write a step that came over TCP into the ring. Raises WireError or ValueError for one that does not fit."""
        if self.is_shared or descriptor.number != self.num_steps + 1:
            raise WireError(f"step {descriptor.number} came out of turn")
        self.ring.write_received(descriptor, [frame.buffer for frame in raw])


class DrafterServer:
    """`start` it, give `address` to targets, `stop` it. `swap` and `targets` may be used from any thread."""

    def __init__(
        self,
        engine: DraftEngine,
        heads: Mapping[int, ServedHead],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        device: torch.device | str = "cpu",
        key: str = "",
    ) -> None:
        """heads: by the engine's numbers. port: 0 for a free one. device: of the engine. key: up to 255 bytes, which
        targets must name, in clear text, before anything of theirs is read; "" lets in whoever reaches the port.
        Raises ValueError without a head or with one twice, OSError when the port is taken.
        """
        digests = [head.digest for head in heads.values()]
        if not digests or len(set(digests)) < len(digests):
            raise ValueError(f"heads = {digests} must be one or more, each once")
        self.engine, self._heads, self._device = engine, dict(heads), torch.device(device)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = 1  # a message to a target that is gone raises
        self._socket.linger = _LINGER_MS
        set_up_socket(self._socket, MAX_FRAME_BYTES)
        self._authenticator: ThreadAuthenticator | None = None
        if key:
            quiet = logging.getLogger(f"{__name__}.authenticator")
            quiet.setLevel(logging.INFO)  # below, it would log the key
            self._authenticator = ThreadAuthenticator(self._context, log=quiet)
            self._authenticator.start()
            self._authenticator.configure_plain(passwords={USER.decode(): key})
            self._socket.plain_server = 1
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._end(linger=0)
            raise OSError(error.errno, f"{host}:{port}: {error}") from error
        self.address = f"{host}:{str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(':')[2]}"
        self.stats, self.last_error = ServerStats(), ""
        self._peers: dict[bytes, Peer] = {}
        self._swaps: queue.SimpleQueue[tuple[int, ParallelPass, ServedHead, Future[None]]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._failures_in_a_row, self._beat_s = 0, time.monotonic()
        self._last_step_s = self._beat_s
        self._serving = threading.Thread(target=self._serve, name="drafter serve", daemon=True)

    def start(self) -> None:
        """Begin to serve. Threads of this process take turns every 0.1 ms from here on, not every 5, so that a busy one
        does not hold up drafts."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._serving.start()

    def stop(self) -> None:
        """Say good-bye to all targets and end. Again is no error."""
        self._stopped.set()
        if self._serving.ident is None:
            self._end(linger=0)
        else:
            self._serving.join(timeout=10.0)

    def swap(self, index: int, head: ParallelPass, served: ServedHead, timeout_s: float = 60.0) -> None:
        """Put another head (its pass, and how it is offered) into the place `index`, which may be a new one.

        When this returns, the head drafts. Targets that use the old one are told; they connect again once they know the
        new one. Raises ValueError as `check_swap`, and keeps the old head; TimeoutError when the serving thread has not
        come to it yet, and never will.
        """
        done: Future[None] = Future()
        self._swaps.put((index, head, served, done))
        try:
            done.result(timeout_s)
        except TimeoutError:
            if done.cancel():
                raise
            done.result()  # it is under way

    def is_healthy(self) -> bool:
        """Whether the serving thread runs and its passes do not all fail."""
        is_alive = self._serving.is_alive() and time.monotonic() - self._beat_s < _MAX_SILENCE_S
        return is_alive and self._failures_in_a_row < _MAX_FAILURES

    @property
    def targets(self) -> list[str]:
        """Names of the targets that are connected."""
        return [peer.hello.name for peer in list(self._peers.values())]

    # The serving thread

    def _serve(self) -> None:
        checked_s = alive_s = time.monotonic()
        while not self._stopped.is_set():
            self._beat_s = now_s = time.monotonic()
            paths = {peer.is_shared for peer in self._peers.values()}
            if paths != {True} or now_s - checked_s > _CHECK_S:
                self._handle_events()
                checked_s = now_s
            if now_s - alive_s > _ALIVE_S:
                self._send_alive()
                alive_s = now_s
            if steps := self._read_steps():
                self._draft(steps)
                self.stats.busy_s += time.monotonic() - now_s
                self._last_step_s = time.monotonic()
            elif True not in paths:
                self._socket.poll(int(_BLOCK_S * 1e3))
            elif self._device.type == "cuda" and now_s - self._last_step_s < _SPIN_S:
                os.sched_yield()  # time.sleep(0) takes the kernel's timer slack, 50 us and more
            else:
                time.sleep(_SLEEP_S)
        self._handle_events()  # who has just said hello hears it too
        for peer in list(self._peers.values()):
            self._drop(peer, Bye("the drafter ends"))
        self._end()

    def _end(self, linger: int | None = None) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger)

    def _handle_events(self) -> None:
        """Swaps that other threads asked for, and messages."""
        while not self._swaps.empty():
            self._swap(*self._swaps.get())
        for _ in range(_MAX_MESSAGES):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            frames: list[zmq.Frame] = self._socket.recv_multipart(copy=False)
            self._handle_message(frames[0].bytes, frames[1:])

    def _handle_message(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        peer = self._peers.get(identity)
        try:
            message, raw = read_message(frames, FROM_TARGET)
            if peer is not None:
                if not isinstance(message, StepDescriptor):
                    raise WireError(f"{type(message).__name__} came out of turn")
                peer.receive_step(message, raw)
            elif not isinstance(message, Hello):
                raise WireError(f"{type(message).__name__} came where a hello was due")
            elif (reason := find_mismatch(message, self._heads)) is not None:
                self._refuse(identity, reason)
            else:
                self._welcome(identity, message)
        except Exception as error:  # noqa: BLE001 - whatever a target sends, others are served
            if peer is not None:
                self._reject(peer, error)
            else:
                self._refuse(identity, str(error))

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        """Raises RuntimeError where CUDA does not take the ring."""
        ring = Ring.create(hello.shape)
        if self._device.type == "cuda":
            ring.pin(self._device, will_wait=False)
        index_of = {head.digest: index for index, head in self._heads.items()}
        engine_heads = np.full(MAX_NUM_HEADS, -1, np.int32)
        for index, digest in hello.heads.items():
            engine_heads[index] = index_of[digest]
        is_shared = hello.host != "" and hello.host == host_identity()
        self.stats.connections += 1
        peer = self._peers[identity] = Peer(identity, self.stats.connections, hello, ring, is_shared, engine_heads)
        projections = [self._heads[index_of[digest]].projection for digest in hello.heads.values()]
        self._send(peer, Welcome(ring.name if is_shared else ""), *projections)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self.stats.refused_connections += 1
        logger.warning("refused a target: %s", reason)
        self._try_send(identity, Bye(reason))

    def _try_send(self, identity: bytes, message: DrafterMessage, *raw: Any) -> bool:
        """False where the target is gone, or reads nothing."""
        try:
            self._socket.send_multipart([identity, *message_frames(message, *raw)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def _send(self, peer: Peer, message: DrafterMessage, *raw: Any) -> None:
        if not self._try_send(peer.identity, message, *raw):
            logger.info("lost %s", peer.hello.name)
            self._drop(peer, Bye("it is gone"))

    def _send_alive(self) -> None:
        """Not in `_serve`, whose variable would keep the last target and its ring."""
        for peer in list(self._peers.values()):
            self._send(peer, Alive())
            is_idle = time.monotonic() - peer.stepped_s > _IDLE_S and not peer.ring.is_ready(peer.num_steps + 1)
            if is_idle:  # its last requests' end comes with a step
                self.engine.drop_session(peer.session)

    def _read_steps(self) -> list[tuple[Peer, Step]]:
        """The next step of every target that has one ready."""
        steps = []
        for peer in list(self._peers.values()):
            try:
                if (step := peer.read_step()) is not None:
                    steps.append((peer, step))
            except Exception as error:  # noqa: BLE001 - as above
                self._reject(peer, error)
        return steps

    def _draft(self, steps: Sequence[tuple[Peer, Step]]) -> None:
        try:
            answers = self.engine.step([step for _, step in steps])
        except Exception as error:
            # The engine's caches may be in any state: these targets begin anew.
            logger.exception("the engine failed")
            self.last_error, self._failures_in_a_row = repr(error), self._failures_in_a_row + 1
            self.stats.failures += 1
            for peer, _ in steps:
                self._drop(peer, Bye(f"the drafter failed: {error!r:.200}"))
            return
        self._failures_in_a_row = 0
        self.stats.steps += len(steps)
        for (peer, step), drafts_BK in zip(steps, answers, strict=True):
            self._answer(peer, step, drafts_BK)

    def _answer(self, peer: Peer, step: Step, drafts_BK: Int32Array) -> None:
        """Give the drafts of a step; another head of the engine may have more columns than the target's."""
        drafts_BK = drafts_BK[:, : peer.hello.shape.max_draft_tokens]
        peer.num_steps, peer.stepped_s = peer.num_steps + 1, time.monotonic()
        if peer.is_shared:
            peer.ring.write_drafts(step.descriptor.number, drafts_BK, time.monotonic_ns() - peer.seen_ns)
        else:
            self._send(peer, Answer(step.descriptor.number), np.ascontiguousarray(drafts_BK).data)

    def _reject(self, peer: Peer, error: Exception) -> None:
        self.stats.dropped += 1
        logger.warning("dropped %s: %s", peer.hello.name, error)
        self._drop(peer, Bye(str(error)))

    def _drop(self, peer: Peer, last_words: Bye) -> None:
        """Say why, as far as the target listens, and let everything of it go."""
        self.engine.drop_session(peer.session)
        del self._peers[peer.identity]
        self._try_send(peer.identity, last_words)
        if self._device.type == "cuda":
            peer.ring.unpin(self._device)

    def _swap(self, index: int, head: ParallelPass, served: ServedHead, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return  # who asked waits no longer
        try:
            old = check_swap(self._heads, index, served)
            self.engine.swap(index, head)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
            done.set_exception(error)
            return
        self._heads = {**self._heads, index: served}  # other threads read it
        if old is not None:
            for peer in [peer for peer in self._peers.values() if old.digest in peer.hello.heads.values()]:
                self._drop(peer, Bye(f"head {old.digest} was swapped for {served.digest}"))
        done.set_result(None)
