"""Demand over time, from the targets' reports: which replicas report, arrivals, lengths of requests.

Enters: `TargetReport`s as JSON holds them, and the number of queued requests. Leaves: new counts, rate and mean lengths
of each workload, and the time without arrivals. Never knows: acceptance, capacity, Ray. No clock of its own; `now_s` is
monotonic.

Demand is arrivals times expected length, because output tokens are counted only once they are served, and an overloaded
service serves less than is asked. Requests queued in front of the replicas have arrived too. The rate of a workload is
the mean over the longest window of `WINDOWS_S` up to which each older part agrees with the newer ones: a constant rate
is known precisely, and a change is seen at once.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.counts import CounterDeltas, DeltaTracker, TargetReport, WorkloadCounts

MAX_GAP_S = 60.0
"""Arrivals since a report older than this are left out, because their times are not known."""


class ReportBook:
    """The last good report of each replica. `max_ongoing_requests`: the most that Serve gives to a replica at a time; a
    report of more than twice as many is nonsense."""

    def __init__(self, max_ongoing_requests: int) -> None:
        self._max_ongoing_requests = max_ongoing_requests
        self._tracker = DeltaTracker()
        self._begun_s: dict[str, float] | None = None
        self._taken_s: dict[str, float] = {}
        self._reports: dict[str, TargetReport] = {}
        self.nonsense: dict[str, str] = {}
        """By replica that last reported nonsense: what is wrong."""

    def take(
        self, documents: Mapping[str, Any], running: Collection[str], now_s: float
    ) -> tuple[CounterDeltas, dict[str, WorkloadCounts] | None]:
        """New counts for acceptance, and arrivals and ends by workload (None without a new report). `documents`: by
        replica its newest report, as `TargetReport.to_wire`; one that was read before is no news.

        All arrivals of a replica that began to serve within the last minute are new; a replica older than the policy
        counts from its second report on, because its first one may cover hours. Replicas that are not `running` are
        forgotten."""
        first_s = -math.inf if self._begun_s is None else now_s
        self._begun_s = {name: (self._begun_s or {}).get(name, first_s) for name in running}
        for known in (self._taken_s, self._reports, self.nonsense):
            for name in known.keys() - set(running):
                del known[name]
        reports: list[TargetReport] = []
        arrived: dict[str, WorkloadCounts] = {}
        for replica in (name for name in running if name in documents):
            try:
                report = TargetReport.from_wire(documents[replica])
                if replica in self._reports and report.time_s <= self._reports[replica].time_s:
                    continue
                if not 0 <= report.num_running <= 2 * self._max_ongoing_requests:
                    raise ValueError(
                        f"{report.num_running} requests at a time: a replica holds at most {self._max_ongoing_requests}"
                    )
            except ValueError as error:
                self.nonsense[replica] = str(error)
                continue
            if now_s - self._taken_s.get(replica, self._begun_s.get(replica, -math.inf)) <= MAX_GAP_S:
                for name, counts in self._tracker.difference(report)[0].items():
                    arrived[name] = arrived[name] + counts if name in arrived else counts
            self._taken_s[replica], self._reports[replica] = now_s, report
            self.nonsense.pop(replica, None)
            reports.append(report)
        return self._tracker.update(reports), arrived if reports else None

    def fresh(self, now_s: float, max_age_s: float) -> list[TargetReport]:
        """Last reports, at most so old."""
        return [
            report
            for name, report in self._reports.items()
            if name not in self.nonsense and now_s - self._taken_s[name] <= max_age_s
        ]

    def num_unusable(self, now_s: float, max_age_s: float) -> int:
        """Replicas that report nonsense, or whose last report is older than `max_age_s`."""
        return len(self.nonsense.keys() | self._reports.keys()) - len(self.fresh(now_s, max_age_s))


# ====================================================================================================
# Rates and lengths.

WINDOWS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
BIN_S = 8.0
"""Reports that come within this are counted together. They come every 10 s from each replica."""

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
    """Arrivals of one workload, a mean over the last `window_s`. `lengths`: mean output and prompt tokens of a request,
    None while no request of any workload has ended."""

    requests_per_s: float
    window_s: float
    lengths: tuple[float, float] | None


@dataclass(slots=True)
class _Bin:
    """Arrivals counted from `begun_s` to `time_s`, and how many requests were queued then."""

    begun_s: float
    time_s: float
    queued: float
    arrived: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Lengths:
    """Sums over ended requests; older ones weigh less."""

    ended: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, ended: float, output_tokens: float, prompt_tokens: float, kept: float = 1.0) -> None:
        self.ended = self.ended * kept + ended
        self.output_tokens = self.output_tokens * kept + output_tokens
        self.prompt_tokens = self.prompt_tokens * kept + prompt_tokens


class TrafficHistory:
    """The last minutes of traffic; not thread-safe."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque()
        self._lengths: dict[str, _Lengths] = {}
        self._started_s: float | None = None
        self._busy_s: float | None = None

    def add(self, new: Mapping[str, WorkloadCounts], queued_requests: float, now_s: float) -> None:
        """Take in the counts since the last call. After `MAX_GAP_S` without counts the history begins anew."""
        if self._bins and now_s - self._bins[-1].time_s > MAX_GAP_S:
            self._bins.clear()
            self._started_s = None
        if self._started_s is None:
            self._started_s = self._busy_s = now_s
        if not self._bins or now_s - self._bins[-1].begun_s >= BIN_S:
            self._bins.append(_Bin(now_s, now_s, queued_requests))
        last = self._bins[-1]
        last.time_s, last.queued = now_s, queued_requests
        for name, counts in new.items():
            if counts.num_started:
                last.arrived[name] = last.arrived.get(name, 0) + counts.num_started
            if counts.num_ended:
                kept = 0.5 ** (counts.num_ended / LENGTH_HALF_LIFE)
                lengths = self._lengths.setdefault(name, _Lengths())
                lengths.add(counts.num_ended, counts.num_output_tokens, counts.num_prompt_tokens, kept)
        if len(self._lengths) > MAX_LENGTHS:
            present = self._names()
            self._lengths = {name: lengths for name, lengths in self._lengths.items() if name in present}
        if queued_requests > 0 or any(counts.num_started for counts in new.values()):
            self._busy_s = now_s
        while self._bins and now_s - self._bins[0].time_s > WINDOWS_S[-1] + 2 * BIN_S:
            self._bins.popleft()

    def note_busy(self, now_s: float) -> None:
        """A request waits for the first replica, so no replica has counted it."""
        self._busy_s = now_s

    def history_s(self, now_s: float) -> float:
        """Seconds for which arrivals have been counted."""
        return 0.0 if self._started_s is None else now_s - self._started_s

    def idle_s(self, now_s: float) -> float:
        """Seconds without an arrival."""
        return 0.0 if self._busy_s is None else now_s - self._busy_s

    def rates(self, now_s: float) -> dict[str, Rate]:
        """Each workload that had an arrival in the longest window."""
        pooled = _Lengths()
        for lengths in self._lengths.values():
            pooled.add(lengths.ended, lengths.output_tokens, lengths.prompt_tokens)
        return {
            name: Rate(*self._rate(name, now_s), _means(self._lengths.get(name, _Lengths()), pooled))
            for name in sorted(self._names())
        }

    def trend(self, now_s: float) -> float:
        """Relative growth of the rate per second; 0 unless it changes by `TREND_EVIDENCE` standard errors."""
        if self.history_s(now_s) < 2 * TREND_WINDOW_S:
            return 0.0
        late, early = (
            sum(self._arrived(name, now_s, start_s, start_s + TREND_WINDOW_S) for name in self._names())
            for start_s in (0.0, TREND_WINDOW_S)
        )
        if abs(late - early) < TREND_EVIDENCE * math.sqrt(late + early) or not late:
            return 0.0
        return (late - early) / max(late, early) / TREND_WINDOW_S

    def _names(self) -> set[str]:
        return {name for found in self._bins for name in found.arrived}

    def _rate(self, name: str, now_s: float) -> tuple[float, float]:
        """The rate per second, and the seconds over which it is a mean."""
        window_s = WINDOWS_S[0]
        recent = self._arrived(name, now_s, 0.0, window_s)
        for longer_s in WINDOWS_S[1:]:
            past_s = min(longer_s, self.history_s(now_s)) - window_s
            if past_s <= 0:
                break
            past = self._arrived(name, now_s, window_s, longer_s)
            # A Poisson count of n has variance n; one more request keeps an empty past uncertain.
            expected = (past + recent + 1.0) / (past_s + window_s)
            error = math.sqrt(expected / window_s + expected / past_s)
            if abs(recent / window_s - past / past_s) > MAX_DEVIATION * error:
                break
            recent, window_s = recent + past, window_s + past_s
        known_s = max(1.0, min(window_s, self.history_s(now_s)))
        return recent / known_s, known_s

    def _arrived(self, name: str, now_s: float, newest_s: float, oldest_s: float) -> float:
        """Arrivals between `newest_s` and `oldest_s` ago: those that replicas counted, and their share of the growth of
        the queue in front of the replicas."""
        inside = [found for found in self._bins if newest_s <= now_s - found.time_s < oldest_s]
        counted = sum(found.arrived.get(name, 0) for found in inside)
        total = sum(sum(found.arrived.values()) for found in inside)
        if not total:
            return float(counted)
        before = next((found for found in reversed(self._bins) if now_s - found.time_s >= oldest_s), inside[0])
        return counted * max(0.0, 1.0 + (inside[-1].queued - before.queued) / total)


def _means(own: _Lengths, pooled: _Lengths) -> tuple[float, float] | None:
    if pooled.ended <= 0:
        return None
    weight = own.ended + POOLED_REQUESTS
    share = POOLED_REQUESTS / pooled.ended
    output_tokens = (own.output_tokens + share * pooled.output_tokens) / weight
    prompt_tokens = (own.prompt_tokens + share * pooled.prompt_tokens) / weight
    return max(1.0, output_tokens), max(0.0, prompt_tokens)
