"""Demand over time: arrivals and mean lengths of the requests of each workload.

Enters: counter deltas, about once a second, and the number of requests that wait in front of the engines. Leaves: rate
and mean lengths of each workload, and the time without arrivals. No clock of its own; `now_s` is monotonic.

Demand is arrivals times expected length, because output tokens are counted only once they are served, and an overloaded
service serves less than is asked. Requests that wait in front of the engines have arrived too. The rate of a workload
is a mean over one of `WINDOWS_S`: the longest one whose older parts all agree with the newer ones. So a constant rate
is known precisely, and a change is seen at once.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cluster.acceptance import Array
from cluster.counts import MAX_GAP_S, WorkloadCounts

WINDOWS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
BIN_S = 8.0
"""Arrivals that come within this are counted together."""

MAX_DEVIATION = 3.0
"""Standard errors that a rate may lie from an older one and count as the same. Arrivals are taken as Poisson."""

LENGTH_HALF_LIFE = 200
"""Ended requests of a workload after which one counts half in its mean lengths."""

POOLED_REQUESTS = 10
"""Requests that the mean of all workloads counts as for one of them."""


class WorkloadTraffic(NamedTuple):
    """Arrivals of one workload, and mean tokens of its requests."""

    requests_per_s: float
    output_tokens: float
    prompt_tokens: float

    @property
    def tokens_per_s(self) -> float:
        return self.requests_per_s * self.output_tokens


@dataclass(slots=True)
class _Bin:
    """Arrivals counted from `begun_s` to `time_s`, and how many requests waited then."""

    begun_s: float
    time_s: float
    queued: float
    arrived: dict[str, int] = field(default_factory=dict)


class TrafficHistory:
    """The last minutes of traffic; not thread-safe."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque()
        self._ended: dict[str, Array] = {}  # requests, output and prompt tokens; older requests weigh less
        self._started_s = self._busy_s = -math.inf

    def add(self, new: Mapping[str, WorkloadCounts], queued_requests: float, now_s: float) -> None:
        """Add the counts since the last call. The first call only starts the history, because its counts came before
        that; so does the first one after `MAX_GAP_S` without any."""
        if not self._bins or now_s - self._bins[-1].time_s > MAX_GAP_S:
            self._bins.clear()
            self._started_s = self._busy_s = now_s
            new = {}
        if not self._bins or now_s - self._bins[-1].begun_s >= BIN_S:
            self._bins.append(_Bin(now_s, now_s, queued_requests))
        last = self._bins[-1]
        last.time_s, last.queued = now_s, queued_requests
        for name, counts in new.items():
            if counts.num_started:
                last.arrived[name] = last.arrived.get(name, 0) + counts.num_started
            if counts.num_ended:
                ended = np.array([counts.num_ended, counts.num_output_tokens, counts.num_prompt_tokens])
                self._ended[name] = (
                    self._ended.get(name, np.zeros(3)) * 0.5 ** (counts.num_ended / LENGTH_HALF_LIFE) + ended
                )
        if queued_requests > 0 or any(counts.num_started for counts in new.values()):
            self._busy_s = now_s
        while now_s - self._bins[0].time_s > WINDOWS_S[-1] + 2 * BIN_S:
            self._bins.popleft()
            self._ended = {name: ended for name, ended in self._ended.items() if name in self._names()}

    def note_busy(self, now_s: float) -> None:
        """A request waits for the first replica, so no replica has counted it."""
        self._busy_s = now_s

    def history_s(self, now_s: float) -> float:
        """Seconds for which arrivals have been counted."""
        return now_s - self._started_s if self._bins else 0.0

    def idle_s(self, now_s: float) -> float:
        """Seconds without an arrival."""
        return now_s - max(self._busy_s, self._started_s)

    def by_workload(self, now_s: float) -> dict[str, WorkloadTraffic]:
        """The workloads with arrivals; {} while no request of any workload has ended."""
        pooled = sum(self._ended.values(), np.zeros(3))
        if not pooled[0]:
            return {}
        found = {}
        for name in sorted(self._names()):
            own = self._ended.get(name, np.zeros(3)) + pooled * (POOLED_REQUESTS / pooled[0])
            num, output_tokens, prompt_tokens = own.tolist()
            if (rate := self._rate(name, now_s)) > 0:
                found[name] = WorkloadTraffic(rate, max(1.0, output_tokens / num), prompt_tokens / num)
        return found

    def _names(self) -> set[str]:
        return {name for found in self._bins for name in found.arrived}

    def _rate(self, name: str, now_s: float) -> float:
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
        return recent / max(1.0, min(window_s, self.history_s(now_s)))

    def _arrived(self, name: str, now_s: float, newest_s: float, oldest_s: float) -> float:
        """Arrivals between `newest_s` and `oldest_s` ago: those that replicas counted, and their share of the growth of
        the queue in front of the engines."""
        inside = [found for found in self._bins if newest_s <= now_s - found.time_s < oldest_s]
        counted = sum(found.arrived.get(name, 0) for found in inside)
        total = sum(sum(found.arrived.values()) for found in inside)
        if not total:
            return float(counted)
        before = next((found for found in reversed(self._bins) if now_s - found.time_s >= oldest_s), inside[0])
        return counted * max(0.0, 1.0 + (inside[-1].queued - before.queued) / total)
