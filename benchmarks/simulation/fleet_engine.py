"""One replica of a simulated fleet: continuous batching over real acceptance traces, from event to event.

Enters: requests with the answers they will give and their K; step times. Leaves: when each one gets its first token and
when it ends, and the replica's counters. Never knows: other replicas, policies.

All running requests make their steps together, so the replica counts steps (a real number) and a request that needs s
of them ends when the count has grown by s: no loop over steps, and an hour of a fleet takes a second. A request's
number of steps is that of the real engine on that answer at its K (`Trajectory`). The time of a step follows the
batch, its tokens and its mean context; a prompt delays it by what its tokens add to a step. `engine_model` has every
step; tests/test_simulate_scaling.py compares the two.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.engine_model import Times
from cluster.acceptance import Counts
from cluster.step_time import StepShape, rounded_context
from cluster.traffic import WorkloadTotals


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The steps of one answer, or of its rest, at a fixed K. `anchors[s]`: tokens given after s steps;
    `accepted[s, d]`: of the first s steps, those that accepted more than d drafts."""

    k: int
    anchors: tuple[int, ...]
    accepted: NDArray[np.int32]

    @classmethod
    def of(cls, confirmed: bytes, k: int) -> "Trajectory":
        anchors, found = [0], []
        while anchors[-1] < len(confirmed):
            found.append(min(confirmed[anchors[-1]], k))
            anchors.append(anchors[-1] + found[-1] + 1)
        rows = np.array(found, np.int32)[:, None] > np.arange(k)[None, :]
        accepted = np.zeros((len(anchors), k), np.int32)
        np.cumsum(rows, axis=0, out=accepted[1:])
        return cls(k, tuple(anchors), accepted)

    @property
    def num_steps(self) -> int:
        return len(self.anchors) - 1


@dataclass(eq=False)
class Request:
    """A request of the fleet. `answer`: drafts that a sound head would have accepted at each anchor
    (`benchmarks.simulation.traces`); `confirmed`: those of the head that drafted, by default the same; `base`: the anchor
    at which `path` begins."""

    index: int
    label: str
    answer: bytes
    prompt_tokens: int
    arrived_s: float
    k: int = 0
    confirmed: bytes = b""
    base: int = 0
    path: Trajectory | None = None
    first_token_s: float = 0.0
    ends_at: float = 0.0
    begun_at: float = 0.0
    counted: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens, the first one included."""
        return len(self.answer) + 1

    @property
    def context_tokens(self) -> float:
        return self.prompt_tokens + self.num_tokens / 2


class StepSeconds:
    """Step times by batch, asked once for each."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._known: dict[tuple[int, int, int | None, int], float] = {}

    def __call__(self, num_requests: int, num_tokens: int, uniform: int | None, context_tokens: float) -> float:
        key = num_requests, num_tokens, uniform, rounded_context(context_tokens)
        seconds = self._known.get(key)
        if seconds is None:
            seconds = self._known[key] = self._times.seconds(
                StepShape(num_requests, num_tokens, uniform, float(key[3]))
            )
        return seconds


@dataclass
class _Sums:
    """Counters of one workload."""

    arrived: int = 0
    ended: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    accepted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    reached: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def totals(self) -> WorkloadTotals:
        rows = (tuple(one.tolist()) for one in (self.drafted, self.reached, self.accepted))
        return WorkloadTotals(self.arrived, self.ended, self.output_tokens, self.prompt_tokens, Counts(*rows))


def _sound(answer: bytes) -> bytes:
    return answer


PathOf = Callable[[bytes, int], Trajectory]


class Replica:
    """One engine. Times of calls must not go back. `path_of`: the trajectory of an answer at a K."""

    def __init__(self, name: str, seconds: StepSeconds, path_of: PathOf, max_draft_tokens: int) -> None:
        self.name = name
        self._seconds, self._path_of, self._max_draft_tokens = seconds, path_of, max_draft_tokens
        self._running: dict[int, Request] = {}
        self._joining: dict[int, Request] = {}
        self._ends: list[tuple[float, int]] = []
        self._joins: list[tuple[float, int]] = []
        self._steps = 0.0
        self._now_s = 0.0
        self._free_s = 0.0
        self._num_tokens = 0
        self._context = 0.0
        self._depths: dict[int, int] = {}
        self._sums: dict[str, _Sums] = {}
        self._confirm: Callable[[bytes], bytes] = _sound
        self.ended: list[tuple[Request, float]] = []

    @property
    def num_ongoing(self) -> int:
        return len(self._running) + len(self._joining)

    def num_running_by_label(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for request in self._running.values():
            found[request.label] = found.get(request.label, 0) + 1
        return found

    def admit(self, request: Request, k: int, now_s: float) -> None:
        """Take a request in with this K."""
        self.advance(now_s)
        request.confirmed = self._confirm(request.answer)
        request.k = k
        self._sum(request.label).arrived += 1
        b = len(self._running)
        step_s = self._step_s() if b else 0.0
        prompt_s = self._seconds(b + 1, self._num_tokens + request.prompt_tokens, None, self._mean_context(request))
        self._free_s = max(now_s, self._free_s) + prompt_s - step_s
        # It waits for the step under way, half of one on average, and then for the one that holds its prompt.
        heapq.heappush(self._joins, (self._free_s + 1.5 * step_s, request.index))
        self._joining[request.index] = request

    def next_event_s(self) -> float:
        """When a request joins the batch or ends next; inf when none will."""
        at_s = self._joins[0][0] if self._joins else np.inf
        if self._ends:
            ends_s = max(self._now_s, self._free_s) + (self._ends[0][0] - self._steps) * self._step_s()
            at_s = min(at_s, max(ends_s, self._now_s))
        return float(at_s)

    def advance(self, now_s: float) -> None:
        """Everything up to now; requests that ended are appended to `ended` with the time."""
        while (at_s := self.next_event_s()) <= now_s:
            self._pass(at_s)
            if self._joins and self._joins[0][0] <= at_s:
                self._join(self._joining.pop(heapq.heappop(self._joins)[1]), at_s)
            else:
                ends_at, index = heapq.heappop(self._ends)
                self._steps = max(self._steps, ends_at)
                self._end(self._running.pop(index), at_s)
        self._pass(now_s)

    def change_head(self, now_s: float, confirm: Callable[[bytes], bytes]) -> None:
        """From now on drafts are confirmed as `confirm` says; counters of steps begin anew."""
        self.advance(now_s)
        self._confirm = confirm
        for request in self._joining.values():
            request.confirmed = confirm(request.answer)
        for request in self._running.values():
            self._count(request)
            request.base = self._anchor(request)
            request.confirmed = confirm(request.answer)
            request.path = Trajectory.of(request.confirmed[request.base :], request.k)
            request.begun_at, request.counted = self._steps, 0
            request.ends_at = self._steps + request.path.num_steps
        self._ends = [(one.ends_at, one.index) for one in self._running.values()]
        heapq.heapify(self._ends)
        for sums in self._sums.values():
            sums.drafted, sums.reached, sums.accepted = (np.zeros_like(sums.drafted) for _ in range(3))

    def count(self, now_s: float) -> None:
        """Count the steps made so far, those of running requests too."""
        self.advance(now_s)
        for request in self._running.values():
            self._count(request)

    def totals(self) -> dict[str, WorkloadTotals]:
        """The counters at the last `count`."""
        return {label: sums.totals() for label, sums in self._sums.items()}

    def steps(self) -> dict[str, NDArray[np.int64]]:
        """By workload: rows drafted, reached and accepted, by depth, at the last `count`."""
        return {label: np.array([sums.drafted, sums.reached, sums.accepted]) for label, sums in self._sums.items()}

    def _sum(self, label: str) -> _Sums:
        if label not in self._sums:
            zeros = (np.zeros(self._max_draft_tokens, np.int64) for _ in range(3))
            self._sums[label] = _Sums(0, 0, 0, 0, *zeros)
        return self._sums[label]

    def _pass(self, now_s: float) -> None:
        """Let time pass without an event."""
        if self._running:
            worked_s = now_s - max(self._now_s, min(self._free_s, now_s))
            self._steps += worked_s / self._step_s()
        self._now_s = now_s

    def _step_s(self) -> float:
        b = len(self._running)
        uniform = next(iter(self._depths)) if len(self._depths) == 1 else None
        return self._seconds(b, self._num_tokens, uniform, self._context / b)

    def _mean_context(self, request: Request) -> float:
        return (self._context + request.context_tokens) / (len(self._running) + 1)

    def _join(self, request: Request, now_s: float) -> None:
        request.first_token_s = now_s
        request.path = self._path_of(request.confirmed, request.k)
        request.begun_at, request.counted = self._steps, 0
        request.ends_at = self._steps + request.path.num_steps
        self._running[request.index] = request
        heapq.heappush(self._ends, (request.ends_at, request.index))
        self._change(request, 1)

    def _end(self, request: Request, now_s: float) -> None:
        self._count(request, is_over=True)
        self._change(request, -1)
        sums = self._sum(request.label)
        sums.ended += 1
        sums.output_tokens += request.num_tokens
        sums.prompt_tokens += request.prompt_tokens
        self.ended.append((request, now_s))

    def _change(self, request: Request, sign: int) -> None:
        self._num_tokens += sign * (1 + request.k)
        self._context += sign * request.context_tokens
        count = self._depths.get(request.k, 0) + sign
        if count:
            self._depths[request.k] = count
        else:
            del self._depths[request.k]
        if not self._running:
            self._context = 0.0

    def _done(self, request: Request) -> int:
        assert request.path is not None
        return min(int(self._steps - request.begun_at + 1e-9), request.path.num_steps)

    def _anchor(self, request: Request) -> int:
        """Tokens after the first one that a running request has given."""
        assert request.path is not None
        return min(request.base + request.path.anchors[self._done(request)], len(request.answer))

    def _count(self, request: Request, *, is_over: bool = False) -> None:
        """Add the steps since the last count."""
        path = request.path
        assert path is not None
        done = path.num_steps if is_over else self._done(request)
        num, k = done - request.counted, path.k
        if num <= 0 or k == 0:
            request.counted = max(done, request.counted)
            return
        accepted = path.accepted[done] - path.accepted[request.counted]
        sums = self._sum(request.label)
        sums.drafted[:k] += num
        sums.accepted[:k] += accepted
        sums.reached[0] += num
        sums.reached[1:k] += accepted[:-1]
        request.counted = done
