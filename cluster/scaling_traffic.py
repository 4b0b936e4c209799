"""Arrivals and lengths of requests over time: what is asked for, whether or not it can be served.

Enters: arrivals, ended requests and tokens by workload as they are counted, and the number of queued requests. Leaves:
rate and mean lengths of each workload, expected growth, and how long nothing came. Never knows: replicas, acceptance.
No clock of its own.

Demand is arrivals times expected length, because output tokens are seen only once they are served, and an overloaded
service gives out what it can; what waits in front of the replicas has arrived too, though none of them has counted it.
The rate of a workload is that of the longest window whose older part agrees with the newer one, and that with a newer
one still: a rate that stands still is known well, and one that moves is known at once.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.scaling_counters import MAX_GAP_S, WorkloadTotals

WINDOWS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
BIN_S = 8.0
"""Readings that come within this are counted together. They come every 10 s from each replica."""

MAX_DEVIATION = 3.0
"""Standard errors that a rate may lie from an older one and count as the same. Arrivals are taken as Poisson."""

TREND_WINDOW_S = 300.0
TREND_EVIDENCE = 3.0
"""Standard errors between two windows from which on the rate counts as rising or falling."""

LENGTH_HALF_LIFE = 200
"""Ended requests of a workload after which one counts half in its mean lengths."""

MAX_LENGTHS = 64
"""Workloads whose lengths are remembered after their last arrival left the windows."""

POOLED_REQUESTS = 10
"""Requests that the mean of all workloads is worth to one of them."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One workload. Lengths are means in tokens, None while no request of any workload has ended; `window_s`: the last
    seconds that the rate is the mean of."""

    requests_per_s: float
    window_s: float
    output_tokens: float | None
    prompt_tokens: float | None


@dataclass(slots=True)
class _Bin:
    """Arrivals counted from `begun_s` to `time_s`, and how many requests were queued then."""

    begun_s: float
    time_s: float
    arrived: dict[str, int]
    queued: float


@dataclass(slots=True)
class _Lengths:
    ended: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, totals: WorkloadTotals) -> None:
        kept = 0.5 ** (totals.num_ended / LENGTH_HALF_LIFE)
        self.ended = self.ended * kept + totals.num_ended
        self.output_tokens = self.output_tokens * kept + totals.num_output_tokens
        self.prompt_tokens = self.prompt_tokens * kept + totals.num_prompt_tokens


@dataclass
class TrafficHistory:
    """The last minutes of traffic; not thread-safe. `now_s` never goes back (`shift_clock`)."""

    _bins: deque[_Bin] = field(default_factory=deque)
    _lengths: dict[str, _Lengths] = field(default_factory=dict)
    _started_s: float | None = None
    _busy_s: float | None = None

    def add(self, new: Mapping[str, WorkloadTotals], queued_requests: float, now_s: float) -> None:
        """Take in what was counted since the last call. After a gap without counts the history begins anew."""
        if self._bins and now_s - self._bins[-1].time_s > MAX_GAP_S:
            self._bins.clear()
            self._started_s = None
        if self._started_s is None:
            self._started_s = self._busy_s = now_s
        arrived = {name: one.num_arrived for name, one in new.items()}
        if self._bins and now_s - self._bins[-1].begun_s < BIN_S:
            last = self._bins[-1]
            last.time_s, last.queued = now_s, queued_requests
            for name, num in arrived.items():
                last.arrived[name] = last.arrived.get(name, 0) + num
        else:
            self._bins.append(_Bin(now_s, now_s, arrived, queued_requests))
        for name, one in new.items():
            if one.num_ended:
                self._lengths.setdefault(name, _Lengths()).add(one)
        if len(self._lengths) > MAX_LENGTHS:
            present = self._names()
            self._lengths = {name: one for name, one in self._lengths.items() if name in present}
        if queued_requests > 0 or any(one.num_arrived for one in new.values()):
            self._busy_s = now_s
        while self._bins and now_s - self._bins[0].time_s > WINDOWS_S[-1] + 2 * BIN_S:
            self._bins.popleft()

    def note_busy(self, now_s: float) -> None:
        """A request waits for the first replica: none has counted it, and until one serves nothing can."""
        self._busy_s = now_s

    def history_s(self, now_s: float) -> float:
        """For how long arrivals have been counted."""
        return 0.0 if self._started_s is None else now_s - self._started_s

    def idle_s(self, now_s: float) -> float:
        """For how long nothing has arrived."""
        return 0.0 if self._busy_s is None else now_s - self._busy_s

    def rates(self, now_s: float) -> dict[str, Rate]:
        """Each workload that had an arrival in the longest window."""
        pooled = _Lengths()
        for one in self._lengths.values():
            pooled.ended += one.ended
            pooled.output_tokens += one.output_tokens
            pooled.prompt_tokens += one.prompt_tokens
        names = {name for one in self._bins for name, num in one.arrived.items() if num}
        return {
            name: Rate(*self._rate(name, now_s), *_means(self._lengths.get(name, _Lengths()), pooled))
            for name in sorted(names)
        }

    def trend(self, now_s: float) -> float:
        """Growth of the rate per second of time, as a share of it; 0 unless it moves beyond doubt."""
        if self.history_s(now_s) < 2 * TREND_WINDOW_S:
            return 0.0
        late, early = (
            sum(self._arrived(name, now_s, start_s, start_s + TREND_WINDOW_S) for name in self._names())
            for start_s in (0.0, TREND_WINDOW_S)
        )
        if abs(late - early) < TREND_EVIDENCE * math.sqrt(late + early) or not late:
            return 0.0
        return (late - early) / max(late, early) / TREND_WINDOW_S

    def shift_clock(self, by_s: float) -> None:
        """The caller's clock was set: every time remembered moves along."""
        for one in self._bins:
            one.begun_s += by_s
            one.time_s += by_s
        self._started_s = None if self._started_s is None else self._started_s + by_s
        self._busy_s = None if self._busy_s is None else self._busy_s + by_s

    def _names(self) -> set[str]:
        return {name for one in self._bins for name in one.arrived}

    def _rate(self, name: str, now_s: float) -> tuple[float, float]:
        """The rate, and the window that it is the mean of."""
        window_s = WINDOWS_S[0]
        recent = self._arrived(name, now_s, 0.0, window_s)
        for longer_s in WINDOWS_S[1:]:
            past_s = min(longer_s, self.history_s(now_s)) - window_s
            if past_s <= 0:
                break
            past = self._arrived(name, now_s, window_s, longer_s)
            # Under equal rates a count of n has variance n; the past says what n to expect, with one more so that
            # an empty past is no certainty.
            expected = (past + recent + 1.0) / (past_s + window_s)
            error = math.sqrt(expected / window_s + expected / past_s)
            if abs(recent / window_s - past / past_s) > MAX_DEVIATION * error:
                break
            recent, window_s = recent + past, window_s + past_s
        known_s = max(1.0, min(window_s, self.history_s(now_s)))
        return recent / known_s, known_s

    def _arrived(self, name: str, now_s: float, newest_s: float, oldest_s: float) -> float:
        """Arrivals between `newest_s` and `oldest_s` ago: those that replicas counted, and a share of what the queue in
        front of them grew by."""
        inside = [one for one in self._bins if newest_s <= now_s - one.time_s < oldest_s]
        counted = sum(one.arrived.get(name, 0) for one in inside)
        total = sum(sum(one.arrived.values()) for one in inside)
        if not total:
            return float(counted)
        before = next((one for one in reversed(self._bins) if now_s - one.time_s >= oldest_s), inside[0])
        return counted * max(0.0, 1.0 + (inside[-1].queued - before.queued) / total)


def _means(own: _Lengths, pooled: _Lengths) -> tuple[float | None, float | None]:
    if pooled.ended <= 0:
        return None, None
    weight = own.ended + POOLED_REQUESTS
    share = POOLED_REQUESTS / pooled.ended
    output_tokens = (own.output_tokens + share * pooled.output_tokens) / weight
    prompt_tokens = (own.prompt_tokens + share * pooled.prompt_tokens) / weight
    return max(1.0, output_tokens), max(0.0, prompt_tokens)
