"""Which request goes next: a bounded queue that is fair between callers.

Enters: requests with their caller and weight (sequences), and the bytes of their bodies as they arrive. Leaves: a place
among the running ones, or an `ApiError` that says when to come again.

A place goes to the caller with the fewest running sequences; of several such callers to the one served longest ago.
Never knows: HTTP, Ray, what a request asks. State of one event loop.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from cluster.errors import ApiError
from cluster.request import Caller
from cluster.spending import DAY_S, DaySpending

QUEUE_FULL_RETRY_S = 2.0
UNCOUNTED_BODY_BYTES = 16 * 2**10
"""Size of a body that needs no room in `BodyBudget`: large bodies keep no usual request out. HAProxy holds 4,096
connections at the most, so these bodies are bounded too."""

MAX_RETRY_AFTER_S = 60.0


def busy(message: str, retry_after_s: float, most_s: float = MAX_RETRY_AFTER_S) -> ApiError:
    """There is no room for a request now. `retry_after_s`: when there may be, rounded to 1 to `most_s` seconds."""
    wait_s = int(min(max(-(-retry_after_s // 1), 1), most_s))
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)


@dataclass
class Allowance:
    """A rate per minute, of which up to a minute's worth may be used at once. `per_minute` may change at any time.
    `level`: what is left, in minutes' worth; below zero where a cost is known only afterwards."""

    per_minute: float
    filled_s: float
    level: float = 1.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until 1 is there, or a minute's worth where that is less; 0.0 when it is."""
        self._fill(now_s)
        return max(0.0, (min(1.0 / self.per_minute, 1.0) - self.level) * 60)

    def spend(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self.level -= amount / self.per_minute

    def _fill(self, now_s: float) -> None:
        self.level = min(1.0, self.level + max(0.0, now_s - self.filled_s) / 60)
        self.filled_s = now_s


@dataclass
class _CallerQueue:
    """One caller's requests."""

    name: str
    num_running: int = 0
    weight: int = 0
    last_served: int = 0
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    limit: int | None = None
    rates: dict[str, Allowance] = field(default_factory=dict)

    @property
    def num_queued_sequences(self) -> int:
        """Sequences that wait."""
        return sum(weight for _, weight in self.waiting)

    @property
    def may_start(self) -> bool:
        """Whether the next request is within the caller's limit. One that weighs more runs alone."""
        return self.limit is None or not self.weight or self.weight + self.waiting[0][1] <= self.limit


class Admission:
    """The places of one replica. All but the clocks may be changed at any time.

    Args:
        max_running: sequences that run at a time; a request that weighs more runs alone.
        max_queued: sequences that wait for a place; a request that weighs more waits alone. For a further request the
            last ones of callers with more waiting sequences make room; where they cannot, it is refused.
        clock: monotonic seconds.
        day_clock: seconds since 1970.

    Attributes:
        num_reserved: places of `max_running` that only callers with no running request get. The others may fill the
            rest.
        num_replicas: that share the requests of every caller. Each applies its part of a caller's limits, of running
            requests rounded up.
        spending: what callers have used today, on all replicas.
        spent: tokens by caller on this replica, since it started.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        day_clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.num_reserved = 0
        self.num_replicas = 1
        self.spending = DaySpending()
        self.spent = Counter[str]()
        self._clock, self._day_clock = clock, day_clock
        self._num_served = 0
        self._queues: dict[str, _CallerQueue] = {}

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return sum(queue.num_running for queue in self._queues.values())

    @property
    def num_queued_requests(self) -> int:
        """Requests that wait for one."""
        return sum(len(queue.waiting) for queue in self._queues.values())

    @property
    def num_queued_sequences(self) -> int:
        """Sequences of these."""
        return sum(queue.num_queued_sequences for queue in self._queues.values())

    @asynccontextmanager
    async def hold_places(self, caller: Caller, weight: int = 1) -> AsyncIterator[None]:
        """Hold a place during the `async with`, after waiting for it in the queue. Raises ApiError (429) where that is
        full."""
        queue = self._queue_of(caller)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((turn, weight))
        try:
            self._hand_out_places()
            if not turn.done():
                self._make_room(queue)
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                queue.num_running -= 1
                queue.weight -= weight
            elif (turn, weight) in queue.waiting:
                queue.waiting.remove((turn, weight))
            self._drop_idle(queue)
            self._hand_out_places()

    def count_request(self, caller: Caller) -> None:
        """Count a request against the rate of its caller, whatever becomes of it. Raises ApiError (429), and counts
        nothing, where the caller has used up its own rate, or its tokens of the day."""
        day_s = self._day_clock()
        if caller.tokens_per_day is not None and self.spending.spent(caller.name, day_s) >= caller.tokens_per_day:
            message = f"the caller {caller.name} has used up its {caller.tokens_per_day} tokens a day, until 0:00 UTC"
            raise busy(message, DAY_S - day_s % DAY_S, DAY_S)
        queue = self._queue_of(caller)
        self._drop_idle(queue)  # one without rates
        now_s = self._clock()
        for name, rate in queue.rates.items():
            if wait_s := rate.wait_s(now_s):
                most = _rates_of(caller)[name]
                raise busy(f"the caller {caller.name} has used up its {most:g} {name} a minute", wait_s)
        if "requests" in queue.rates:
            queue.rates["requests"].spend(1.0, now_s)

    def charge_tokens(self, caller: str, num_tokens: int) -> None:
        """Count the tokens of an answer against the budget of the caller of this name, and its rate if it has one."""
        self.spent[caller] += num_tokens
        queue = self._queues.get(caller)
        if queue is not None and (tokens := queue.rates.get("tokens")) is not None:
            tokens.spend(num_tokens, self._clock())

    def _queue_of(self, caller: Caller) -> _CallerQueue:
        queue = self._queues.setdefault(caller.queue, _CallerQueue(caller.queue))
        most = caller.max_running_requests
        queue.limit = None if most is None else -(-most // self.num_replicas)
        now_s = self._clock()
        for name, per_minute in _rates_of(caller).items():
            if per_minute is None:
                queue.rates.pop(name, None)
            else:
                share = per_minute / self.num_replicas
                queue.rates.setdefault(name, Allowance(share, now_s)).per_minute = share
        return queue

    def _hand_out_places(self) -> None:
        """Give the free places to those whose turn it is."""
        while True:
            queues = [queue for queue in self._queues.values() if queue.waiting and queue.may_start]
            if not queues:
                return
            queue = min(queues, key=lambda queue: (queue.weight, queue.last_served))
            turn, weight = queue.waiting[0]
            if turn.cancelled():  # it leaves at this moment
                queue.waiting.popleft()
                continue
            # The heaviest request is not passed over for lighter ones for ever: it waits until it fits.
            num_places = self.max_running - (self.num_reserved if queue.num_running else 0)
            running = sum(queue.weight for queue in self._queues.values())
            if running and running + weight > num_places:
                return
            queue.waiting.popleft()
            self._num_served += 1
            queue.last_served = self._num_served
            queue.num_running += 1
            queue.weight += weight
            turn.set_result(None)

    def _make_room(self, own: _CallerQueue) -> None:
        """Refuse the last requests of callers with more waiting sequences than this one, until its newest fits into the
        queue; so no caller can fill it for the others. Raises ApiError (429), and refuses nobody else, where that is
        not enough."""
        surplus = self.num_queued_sequences - self.max_queued
        if surplus <= 0 or (self.num_queued_requests == 1 and self.max_queued > 0):
            return
        full = busy(
            f"{self.num_running} requests run and {self.num_queued_requests - 1} wait for a place, which is all that "
            "this service takes at a time",
            QUEUE_FULL_RETRY_S,
        )
        weights = {queue.name: queue.num_queued_sequences for queue in self._queues.values()}
        refused: list[tuple[_CallerQueue, tuple[asyncio.Future[None], int]]] = []
        left = {queue.name: list(queue.waiting) for queue in self._queues.values()}
        while surplus > 0:
            name = max((name for name in left if len(left[name]) > 1), key=weights.__getitem__, default=own.name)
            if weights[name] <= weights[own.name]:
                raise full
            refused.append((self._queues[name], last := left[name].pop()))
            weights[name] -= last[1]
            surplus -= last[1]
        for queue, (turn, weight) in refused:
            queue.waiting.remove((turn, weight))
            if not turn.cancelled():
                turn.set_exception(full)

    def _drop_idle(self, queue: _CallerQueue) -> None:
        """Addresses come and go without end: a queue is kept while it has requests, or rates that fill up."""
        is_idle = not (queue.num_running or queue.waiting or queue.rates)
        if is_idle and self._queues.get(queue.name) is queue:
            del self._queues[queue.name]


class BodyBudget:
    """Bytes of request bodies that one replica holds, from their arrival to the end of their answers. `max_bytes`: of
    all bodies, of which one caller may hold half. It may be changed at any time. `setting`: which one it is."""

    def __init__(self, max_bytes: int, setting: str = "limits.max_body_bytes_in_flight") -> None:
        self.max_bytes, self._setting = max_bytes, setting
        self.num_bytes = 0
        self._by_queue: Counter[str] = Counter()

    @contextmanager
    def hold_body(self, caller: Caller) -> Iterator[Callable[[int], None]]:
        """The body of a request of this caller, held during the `with`. Gives a function that counts bytes as they
        arrive, and raises ApiError (429) where they do not fit. The first `UNCOUNTED_BODY_BYTES` are free as long as
        there are no more."""
        num_bytes = num_charged = 0

        def add(number: int) -> None:
            nonlocal num_bytes, num_charged
            num_bytes += number
            if num_bytes > UNCOUNTED_BODY_BYTES:
                self._charge(caller.queue, num_bytes - num_charged)
                num_charged = num_bytes

        try:
            yield add
        finally:
            self._charge(caller.queue, -num_charged)

    def _charge(self, queue: str, num_bytes: int) -> None:
        """Raises ApiError (429), with nothing charged, where they do not fit."""
        share = self.max_bytes // 2
        if num_bytes > 0 and (self.num_bytes + num_bytes > self.max_bytes or self._by_queue[queue] + num_bytes > share):
            raise busy(
                f"this service holds {self.max_bytes} bytes of requests at a time ({self._setting}), "
                f"{share} of one caller, and they are full",
                QUEUE_FULL_RETRY_S,
            )
        self.num_bytes += num_bytes
        self._by_queue[queue] += num_bytes
        if not self._by_queue[queue]:
            del self._by_queue[queue]


def _rates_of(caller: Caller) -> dict[str, float | None]:
    return {"requests": caller.requests_per_minute, "tokens": caller.tokens_per_minute}
