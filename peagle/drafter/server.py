"""A drafter's server: targets connect, one thread takes every step that is ready, drafts for all of them, answers.

Enters: an engine, which that thread owns from here on, and the heads as they are offered. Other threads only say hello
to newcomers and sleep; a newcomer that is no target costs nobody else anything. What a target does wrong ends its
connection, what the engine does wrong those of the steps in hand; the server goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peagle.drafter import mailbox as device_mailbox
from peagle.drafter.client import Waker
from peagle.drafter.engine import DraftEngine, StepError
from peagle.drafter.mailbox import MAX_PROMPT_TOKENS, Mailbox, host_identity, sweep
from peagle.drafter.protocol import (
    Hello,
    MessageReader,
    PeerClosed,
    ServedHead,
    WireError,
    check_swap,
    max_step_bytes,
    read_step,
    refusal,
    send_drafts,
    send_message,
)
from peagle.drafter.steps import NO_DRAFT, Int32Array, ServerStats, TargetStep

# ====================================================================================================
# A drafter's connection to one target: the hello answered, then steps read and answered without ever waiting.

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


# ====================================================================================================
# A drafter's server: targets connect, one thread takes every step that is ready, drafts for all of them, answers.
#
# Enters: an engine, which that thread owns from here on, and the heads as they are offered. Other threads only say hello
# to newcomers and sleep; a newcomer that is no target costs nobody else anything. What a target does wrong ends its
# connection, what the engine does wrong those of the steps in hand; the server goes on.

logger = logging.getLogger(__name__)

_MAX_GREETINGS = 16  # newcomers at a time
_CHECK_S = 0.01  # between looks at the control sockets of targets with a mailbox
# How long after its last step the serving thread looks for the next without sleeping, letting other threads run: on a
# GPU longer than a target's step takes.
_GPU_SPIN_S, _SPIN_S = 50e-3, 100e-6
_SLEEP_S, _IDLE_SLEEP_S, _IDLE_AFTER_S = 50e-6, 1e-3, 1.0
_BLOCK_S = 0.2  # without mailboxes: the sockets wake the thread
_SWITCH_INTERVAL_S = 1e-4
_MAX_FAILURES = 3  # passes in a row, after which the drafter counts as broken


class DrafterServer:
    """`start` it, give `address` to targets, `stop` it. `swap` and `report` may be called from any thread."""

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
        """Listens at once, with port 0 on a free one. heads: by the engine's indices.

        device: of the engine; mailboxes are registered with it. key: what targets must name to be let in, "" for
        nothing; it keeps out who does not know it, and hides nothing on the wire.

        Raises ValueError without a head or with one twice, OSError when the port is taken.
        """
        digests = [head.digest for head in heads.values()]
        if not digests or len(set(digests)) < len(digests):
            raise ValueError(f"heads = {digests} must be one or more, each once")
        self._engine, self._heads, self._device, self._key = engine, dict(heads), torch.device(device), key
        self._spin_s = _GPU_SPIN_S if self._device.type == "cuda" else _SPIN_S
        self._listener = socket.create_server((host, port), backlog=64)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.stats, self.last_error = ServerStats(), ""
        self._peers: list[Peer] = []
        self._joining: queue.SimpleQueue[Peer] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._stopped = Waker(), threading.Event()
        self._greeting = threading.Semaphore(_MAX_GREETINGS)
        self._failures_in_a_row, self._beat_s = 0, time.monotonic()
        self._accepting = threading.Thread(target=self._accept, name="drafter accept", daemon=True)
        self._serving = threading.Thread(target=self._serve, name="drafter serve", daemon=True)

    @property
    def heads(self) -> Mapping[int, ServedHead]:
        return dict(self._heads)

    def start(self) -> None:
        """Begin to serve.

        Threads of this process take turns every 0.1 ms from here on, not every 5: a busy thread elsewhere in it must
        not hold up drafts.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        sweep()
        self._accepting.start()
        self._serving.start()

    def stop(self) -> None:
        """Say good-bye to all targets and end. Again is no error."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._waker.wake()
        for thread in (self._accepting, self._serving):
            if thread.ident is not None:
                thread.join(timeout=10.0)
        self._turn_away()

    def swap(self, index: int, head: Any, served: ServedHead, timeout_s: float = 60.0) -> None:
        """Put another head (the engine's runtime of it, and how it is offered) into the place `index`.

        Happens between two passes. Targets that use the old head are told and connect again.

        Raises ValueError as `check_swap`, and keeps the old head; TimeoutError when the serving thread does not come to
        it.
        """
        old = check_swap(self._heads, index, served)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def job() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    self._swap(index, head, old, served)
                    done.set_result(None)
                except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
                    done.set_exception(error)

        self._jobs.put(job)
        self._waker.wake()
        try:
            done.result(timeout_s)
        except TimeoutError:
            done.cancel()
            raise

    def is_healthy(self, max_silence_s: float = 30.0) -> bool:
        """Whether the serving thread runs and its passes do not all fail."""
        alive = self._serving.is_alive() and time.monotonic() - self._beat_s < max_silence_s
        return alive and self._failures_in_a_row < _MAX_FAILURES

    def report(self) -> dict[str, Any]:
        """Plain values for a metrics page."""
        targets = [
            {
                "name": peer.hello.name,
                "path": "tcp" if peer.mailbox is None else "shared memory",
                "heads": {str(index): digest for index, digest in peer.hello.heads.items()},
                "num_steps": peer.num_steps,
            }
            for peer in list(self._peers)
        ]
        heads = {str(index): head.digest for index, head in self._heads.items()}
        counts = {**dataclasses.asdict(self.stats), "last_error": self.last_error}
        return {"address": self.address, "heads": heads, "targets": targets, **counts}

    # Threads that greet.

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError:
                time.sleep(0 if self._stopped.is_set() else 0.05)  # no descriptors left, or the end
                continue
            if not self._greeting.acquire(blocking=False):
                connection.close()
                continue
            name = f"target {peer[0]}:{peer[1]}"
            threading.Thread(target=self._greet, args=(connection, name), name=f"greet {name}", daemon=True).start()

    def _greet(self, connection: socket.socket, name: str) -> None:
        try:
            self._joining.put(greet(connection, name, dict(self._heads), self._device, self._key))
            self._waker.wake()
            if self._stopped.is_set():
                self._serving.join(timeout=10.0)
                self._turn_away()
        except (WireError, OSError, ValueError, RuntimeError) as error:  # the last: CUDA does not take the mailbox
            self.stats.num_refused += 1
            logger.warning("refused %s: %s", name, error)
        finally:
            self._greeting.release()

    def _turn_away(self) -> None:
        """Say good-bye to newcomers that the serving thread, which has ended, did not see."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._joining.get_nowait().close("bye", reason="the drafter ends")

    # The serving thread.

    def _serve(self) -> None:
        last_s = checked_s = time.monotonic()
        while not self._stopped.is_set():
            self._beat_s = now_s = time.monotonic()
            if now_s - checked_s > _CHECK_S or not (self._joining.empty() and self._jobs.empty()):
                self._look_around()
                checked_s = now_s
            if steps := self._collect():
                self._draft(steps)
                self.stats.busy_s += time.monotonic() - now_s
                last_s = time.monotonic()
            else:
                self._pause(now_s - last_s)
        self._look_around()  # who has just been welcomed hears it too
        for peer in list(self._peers):
            self._drop(peer, "bye", reason="the drafter ends")

    def _pause(self, idle_s: float) -> None:
        if any(peer.mailbox is not None for peer in self._peers):
            time.sleep(0 if idle_s < self._spin_s else _SLEEP_S if idle_s < _IDLE_AFTER_S else _IDLE_SLEEP_S)
            return
        poll = select.poll()
        for fd in (self._waker.fileno(), *(peer.connection.fileno() for peer in self._peers)):
            poll.register(fd, select.POLLIN)
        poll.poll(_BLOCK_S * 1e3)

    def _look_around(self) -> None:
        """Newcomers, jobs of other threads, and targets that went away."""
        self._waker.clear()
        while not self._jobs.empty():
            self._jobs.get()()
        while not self._joining.empty():
            self._join(self._joining.get())
        for peer in list(self._peers):
            try:
                peer.check()
            except (WireError, OSError) as error:
                self._lost(peer, error)

    def _join(self, peer: Peer) -> None:
        index_of = {head.digest: index for index, head in self._heads.items()}
        if not set(peer.hello.heads.values()) <= set(index_of):
            peer.close("bye", reason="its head was swapped while it connected")
            return
        self.stats.num_connections += 1
        peer.session = self.stats.num_connections
        peer.engine_heads = {index: index_of[digest] for index, digest in peer.hello.heads.items()}
        self._peers.append(peer)

    def _collect(self) -> list[tuple[Peer, TargetStep]]:
        steps = []
        for peer in list(self._peers):
            try:
                if (step := peer.poll()) is not None:
                    steps.append((peer, step))
            except (PeerClosed, OSError) as error:
                self._lost(peer, error)
            except Exception as error:  # noqa: BLE001 - whatever a target sends, others are served
                self._reject(peer, error)
        return steps

    def _draft(self, steps: Sequence[tuple[Peer, TargetStep]]) -> None:
        answers: list[Int32Array] | None = None
        while steps and answers is None:
            try:
                answers = self._engine.step([step for _, step in steps])
            except StepError as error:  # nothing was done for the others either
                (bad,) = [peer for peer, step in steps if step.session == error.session]
                self._reject(bad, error)
                steps = [one for one in steps if one[0] is not bad]
            except Exception as error:  # its caches may be in any state: the targets begin anew
                logger.exception("the engine failed")
                self.last_error, self._failures_in_a_row = repr(error), self._failures_in_a_row + 1
                self.stats.num_failures += 1
                for peer, _ in steps:
                    self._drop(peer, "bye", reason=f"the drafter failed: {error!r:.200}")
                return
        if answers is None:
            return
        self._failures_in_a_row = 0
        self.stats.num_batches += 1
        self.stats.num_steps += len(steps)
        for (peer, step), drafts_BK in zip(steps, answers, strict=True):
            try:
                peer.answer(step, drafts_BK)
            except OSError as error:
                self._lost(peer, error)

    def _reject(self, peer: Peer, error: Exception) -> None:
        self.stats.num_dropped += 1
        logger.warning("dropped %s: %s", peer.hello.name, error)
        self._drop(peer, "bye", reason=str(error))

    def _lost(self, peer: Peer, error: Exception) -> None:
        logger.info("lost %s: %s", peer.hello.name, error)
        self._drop(peer, "bye", reason=str(error))

    def _drop(self, peer: Peer, kind: str, **fields: str) -> None:
        self._engine.drop_session(peer.session)
        self._peers.remove(peer)
        peer.close(kind, **fields)

    def _swap(self, index: int, head: Any, old: ServedHead, served: ServedHead) -> None:
        self._engine.swap(index, head)
        self._heads[index] = served
        for peer in [peer for peer in self._peers if old.digest in peer.hello.heads.values()]:
            self._drop(peer, "swapped", old=old.digest, new=served.digest)
