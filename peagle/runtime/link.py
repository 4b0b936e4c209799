"""A target's way to one drafter: sends steps, waits for drafts until a deadline, and never raises into the engine.

    connecting   no drafter: the link's thread tries again, ever more slowly
    up           steps are sent, drafts come
    late         a deadline passed: nothing is sent until the drafter has answered all it was sent
    closed

One thread (the engine's) sends and waits; the link's own thread connects and watches. Whatever goes wrong costs drafts,
never a request.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.kernels.wait import REACHED, TIMED_OUT
from peagle.runtime import device_mailbox
from peagle.runtime.head import Reducer
from peagle.runtime.hello import Hello
from peagle.runtime.mailbox import NUM_AREAS
from peagle.runtime.pass_times import PassTimes
from peagle.runtime.session import Refused, Session, Swapped, Waker, connect
from peagle.runtime.stats import LinkStats
from peagle.runtime.steps import NO_DRAFT, Int32Array
from peagle.runtime.wire import WireError

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
