"""Demand over time: arrivals and mean lengths of the requests of each workload.

Enters: counter deltas, about once a second, and the number of requests that wait in front of the engines. Leaves: rate
and mean lengths of each workload, and the time without arrivals. No clock of its own; `now_s` is monotonic.

Demand is arrivals times expected length, because output tokens are counted only once they are served, and an overloaded
service serves less than is asked. Requests that wait in front of the engines have arrived too.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cluster.counts import MAX_GAP_S, WorkloadCounts
from cluster.step_latency import Array

RATE_TIME_S = 60.0
"""Time constant of the mean arrivals. A Poisson rate is known as well as by counting for twice as long."""

LEAST_RATE = 1e-4
"""Requests per second below which a workload counts as gone."""

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


class TrafficHistory:
    """The last minutes of traffic; not thread-safe."""

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}  # requests by workload; older ones weigh less
        self._ended: dict[str, Array] = {}  # requests, output and prompt tokens; older requests weigh less
        self._seconds = self._queued = 0.0  # seconds in which they arrived, weighted likewise; requests that wait
        self._started_s = self._counted_s = self._busy_s = -math.inf

    def add(self, new: Mapping[str, WorkloadCounts], queued_requests: float, now_s: float) -> None:
        """Add the counts since the last call. The first call only starts the history, because its counts came before
        that; so does the first one after `MAX_GAP_S` without any."""
        elapsed_s = now_s - self._counted_s
        if elapsed_s > MAX_GAP_S:
            self._arrived, self._seconds = {}, 0.0
            self._started_s = self._busy_s = now_s
            new, elapsed_s, self._queued = {}, 0.0, queued_requests
        num_started = sum(counts.num_started for counts in new.values())
        share = 0.0
        if num_started:  # the queue's growth counts with the requests that leave it, workload by workload like these
            share, self._queued = max(0.0, 1.0 + (queued_requests - self._queued) / num_started), queued_requests
        kept = math.exp(-elapsed_s / RATE_TIME_S)
        self._seconds = kept * self._seconds + elapsed_s
        for name in {*self._arrived, *new}:
            started = new[name].num_started if name in new else 0
            self._arrived[name] = kept * self._arrived.get(name, 0.0) + share * started
        self._arrived = {name: num for name, num in self._arrived.items() if num > LEAST_RATE * self._seconds}
        for name, counts in new.items():
            if counts.num_ended:
                ended = np.array([counts.num_ended, counts.num_output_tokens, counts.num_prompt_tokens])
                before = self._ended.get(name, np.zeros(3)) * 0.5 ** (counts.num_ended / LENGTH_HALF_LIFE)
                self._ended[name] = before + ended
        if queued_requests > 0 or num_started:
            self._busy_s = now_s
        self._counted_s = now_s
        if self._arrived:
            self._ended = {name: ended for name, ended in self._ended.items() if name in self._arrived}

    def note_busy(self, now_s: float) -> None:
        """A request waits for the first replica, so no replica has counted it."""
        self._busy_s = now_s

    def history_s(self, now_s: float) -> float:
        """Seconds for which arrivals have been counted."""
        return now_s - self._started_s if math.isfinite(self._started_s) else 0.0

    def idle_s(self, now_s: float) -> float:
        """Seconds without an arrival."""
        return now_s - max(self._busy_s, self._started_s)

    def by_workload(self) -> dict[str, WorkloadTraffic]:
        """The workloads with arrivals; {} while no request of any workload has ended."""
        pooled = sum(self._ended.values(), np.zeros(3))
        if not pooled[0]:
            return {}
        found = {}
        for name, arrived in sorted(self._arrived.items()):
            own = self._ended.get(name, np.zeros(3)) + pooled * (POOLED_REQUESTS / pooled[0])
            num, output_tokens, prompt_tokens = own.tolist()
            found[name] = WorkloadTraffic(arrived / self._seconds, max(1.0, output_tokens / num), prompt_tokens / num)
        return found
