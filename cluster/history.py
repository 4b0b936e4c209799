"""What the live page remembers: an hour of points, events, and what each replica said last. It ends with the router.

Enters: the replicas' reports with their counter deltas, about once a second; samples of the front ends' histograms and
the K of each workload, once a point. Leaves: a part of `GET /drafting`. `now_s` is monotonic, times of points and
events are Unix times.

The speed-up by drafts is an estimate. Tokens, verified drafts and accepted drafts are counted. The step
latency model gives the times at the load of each second: for steps with these drafts, and for the more steps that the
same tokens take without drafts. Prompts are left out of both.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cluster.counts import CounterDeltas, Counts, TargetReport
from cluster.heads import DrafterReport
from cluster.step_latency import Array, StepLatency

POINT_S, MAX_POINTS, RECENT_POINTS = 15.0, 240, 20
"""Seconds of a point. Points that are kept, an hour. Points that the headline is about, five minutes."""

MAX_EVENTS, SHOWN_KS = 40, 4
"""Events of one kind that are kept, so that frequent ones push out no rare ones. Workloads that an event names."""

MIN_TIMED_STEPS = 50
"""Steps of running engines from which the step latency model says what drafts bring."""

RATE_S, GONE_S = 5.0, 5.0
"""Time constant of a replica's tokens per second. Silence of one that is gone: Serve leaves a replica out for a moment
while it hands it a `user_config`."""

DECAY = 0.5 ** (1 / 8)
"""Weight of older latencies in those shown now, a point: they count half after two minutes."""

HISTOGRAMS = {
    "peagle_time_to_first_token_seconds_bucket": "ttft_s",
    "peagle_time_per_output_token_seconds_bucket": "tpot_s",
}
ANSWERS, KV_CACHE = "peagle_answers_total", "vllm:kv_cache_usage_perc"
SHOWN = ("node", "devices", "num_running", "num_queued")
"""What a row shows of a target's report."""

SERIES = ("tokens_per_s", "speed_up", "num_running", "num_queued", "num_failed", "ttft_s", "tpot_s", "kv_cache")


def decoded(tokens: float, counts: Counts, load: float, latency: StepLatency) -> Array:
    """What engines decoded in some time, at a mean of `load` requests in a step.

    A request's step gives one token and its accepted drafts. The drafter's pass runs in each engine step in which some
    request has drafts, and requests get drafts independently of each other.

    Returns:
        [5]: output tokens; steps of requests that verified drafts; accepted drafts; seconds of the engine's steps;
        seconds of the steps that give these tokens without drafts. Both are 0 before steps were timed.
    """
    found = np.array([tokens, counts.num_steps, counts.num_accepted_tokens, 0.0, 0.0])
    steps, load = max(tokens - found[2], found[1]), max(1.0, load)
    if not steps or latency.num_steps < MIN_TIMED_STEPS:
        return found
    share = 1.0 - (1.0 - found[1] / steps) ** load
    step_s = undrafted_s = latency.seconds(load, load)
    if share:
        drafted_s = latency.seconds(load, load * (1.0 + counts.num_draft_tokens / steps / share))
        step_s += share * (drafted_s - undrafted_s)
    found[3:] = step_s * steps / load, undrafted_s * (steps + found[2]) / load
    return found


def speed_up(record: Array) -> float | None:
    return float(record[4] / record[3]) if record[3] else None


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile of a histogram, as Prometheus estimates it; None when empty. buckets: count up to each bound."""
    finite = sorted(buckets)[:-1]  # the last one is infinity
    total = max(buckets.values(), default=0.0)
    if total <= 0 or not finite:
        return None
    return float(np.interp(share * total, [0.0, *(buckets[end] for end in finite)], [0.0, *finite]))


class ServiceHistory:
    """Not thread-safe. `clock`: Unix time."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._points: deque[tuple[dict[str, float | None], Array]] = deque(maxlen=MAX_POINTS)
        self._events: dict[str, deque[dict[str, Any]]] = {}
        self._replicas: dict[str, dict[str, Any]] = {}  # rows of the document
        self._ks: dict[str, int] = {}
        self._began_s: float | None = None
        self._now, self._readings = np.zeros(5), list[tuple[int, int]]()  # of the point that has begun
        self._counters: dict[tuple[str, ...], float] = {}
        self._recent: dict[tuple[str, str], dict[float, float]] = {}  # by "ttft_s" or "tpot_s", and workload; "": all

    def add_event(self, kind: str, text: str) -> None:
        event = {"time_s": round(self._clock(), 1), "kind": kind, "text": text}
        self._events.setdefault(kind, deque(maxlen=MAX_EVENTS)).append(event)

    def observe_replicas(
        self, deployment: str, reports: Sequence[TargetReport | DrafterReport], num_ready: int, now_s: float
    ) -> None:
        """Note who reports, who is new, and who is gone: those that were heard of longest ago, of as many as run no
        more. One of the `num_ready` that run may be silent."""
        for report in reports:
            if report.replica not in self._replicas:
                row = {"replica": report.replica, "deployment": deployment, "tokens_per_s": 0.0, "kv_cache": None}
                self._replicas[report.replica] = row
                self.add_event("replica", f"{deployment} {report.replica} runs ({num_ready} running)")
            shown = {name: getattr(report, name, None) for name in SHOWN}
            self._replicas[report.replica] |= {**shown, "heard_s": now_s}
        names = [name for name, row in self._replicas.items() if row["deployment"] == deployment]
        for name in sorted(names, key=lambda name: self._replicas[name]["heard_s"])[: max(0, len(names) - num_ready)]:
            if now_s - self._replicas[name]["heard_s"] >= GONE_S:
                del self._replicas[name]
                self.add_event("replica", f"{deployment} {name} is gone ({num_ready} running)")

    def observe(
        self, reports: Sequence[TargetReport], deltas: CounterDeltas, load: float, latency: StepLatency, now_s: float
    ) -> None:
        """Take in a round of targets' reports, after `observe_replicas`. `load`: mean requests of a replica's step."""
        if self._began_s is None:  # what the first reports count has come at times that are not known
            self._began_s = now_s
            return
        for name, seconds in deltas.seconds.items():
            if (row := self._replicas.get(name)) is not None and seconds > 0:
                weight, rate = 1.0 - math.exp(-seconds / RATE_S), deltas.tokens[name] / seconds
                row["tokens_per_s"] = _rounded(row["tokens_per_s"] + weight * (rate - row["tokens_per_s"]))
        counts = sum((found.counts for found in deltas.workloads.values()), Counts())
        self._now += decoded(sum(deltas.tokens.values()), counts, load, latency)
        self._readings.append((sum(r.num_running for r in reports), sum(r.num_queued for r in reports)))

    def add_point(
        self, samples: Iterable[tuple[str, Mapping[str, str], float]], ks: Mapping[str, int], now_s: float
    ) -> None:
        """End a point. What no target has reported meanwhile is None. `samples`: name, labels and value of each, as
        Prometheus has them. `ks`: K by workload."""
        point = self._add_samples(samples)
        if self._readings and self._began_s is not None and now_s > self._began_s:
            running, queued = np.mean(self._readings, axis=0).tolist()
            tokens_per_s = float(self._now[0]) / (now_s - self._began_s)
            point |= dict(zip(SERIES, (tokens_per_s, speed_up(self._now), running, queued), strict=False))
            self._began_s = now_s
        self._points.append((point, self._now))
        self._now, self._readings = np.zeros(5), []
        known = sorted(self._ks.keys() & ks.keys())
        changed = [f"{name} {self._ks[name]} to {ks[name]}" for name in known if self._ks[name] != ks[name]]
        if changed:
            others = f" and {len(changed) - SHOWN_KS} more" if len(changed) > SHOWN_KS else ""
            self.add_event("k", f"K of {', '.join(changed[:SHOWN_KS])}{others}")
        self._ks = dict(ks)

    def _add_samples(self, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> dict[str, float | None]:
        """Medians of the streams that ended since the last point, answers that failed, and the fullest KV cache."""
        grown: dict[tuple[str, str], dict[float, float]] = {}
        counters: dict[tuple[str, ...], float] = {}
        for name, labels, value in samples:
            if name == KV_CACHE and labels["replica"] in self._replicas:
                self._replicas[labels["replica"]]["kv_cache"] = _rounded(value)
            elif name in HISTOGRAMS or (name == ANSWERS and labels["status"] >= "500"):
                key, end = (labels["replica"], name, *labels.values()), float(labels.get("le", "inf"))
                before = self._counters.get(key, 0.0)
                counters[key] = value
                for workload in {"", labels["workload"]}:
                    counts = grown.setdefault((HISTOGRAMS.get(name, ANSWERS), workload), {})
                    counts[end] = counts.get(end, 0.0) + value - (before if before <= value else 0.0)
        kept = {key: value for key, value in self._counters.items() if key[0] in self._replicas}
        self._counters = kept | counters  # a replica may be missing for a moment
        if counters:
            older = self._recent
            self._recent = {
                found: {end: count + DECAY * older.get(found, {}).get(end, 0.0) for end, count in counts.items()}
                for found, counts in grown.items()
            }
        if not self._points:
            grown = {}  # counted before the router started
        caches = [row["kv_cache"] for row in self._replicas.values() if row["kv_cache"] is not None]
        return {
            "time_s": round(self._clock()),
            **{name: quantile(grown.get((name, ""), {}), 0.5) for name in HISTOGRAMS.values()},
            "num_failed": sum(grown.get((ANSWERS, ""), {}).values()),
            "kv_cache": max(caches, default=None),
        }

    # ---- what is shown

    def times(self, workload: str = "", share: float = 0.5) -> dict[str, float | None]:
        """A quantile of TTFT and TPOT of the newest streams of a workload, or of all."""
        return {name: _rounded(quantile(self._recent.get((name, workload), {}), share)) for name in HISTOGRAMS.values()}

    def document(self, now_s: float) -> dict[str, Any]:
        """As JSON: the newest event first, the newest point last."""
        records = [*(record for _, record in self._points), self._now]
        newest = records[-RECENT_POINTS:]
        if not any(record[0] for record in newest):
            newest = records
        recent = np.sum(newest, axis=0)
        events = [event for kept in self._events.values() for event in kept]
        return {
            "speed": {
                "speed_up": _rounded(speed_up(recent)),
                "acceptance_length": _rounded(1.0 + recent[2] / recent[1]) if recent[1] else None,
                "tokens": float(recent[0]),
                "minutes": len(newest) * POINT_S / 60,
                "p50": self.times(),
                "p95": self.times(share=0.95),
            },
            "replicas": [
                {**row, "silent_s": round(now_s - row["heard_s"], 1)} for _, row in sorted(self._replicas.items())
            ],
            "history": {
                "time_s": [point["time_s"] for point, _ in self._points],
                **{name: [_rounded(point.get(name)) for point, _ in self._points] for name in SERIES},
            },
            "events": sorted(events, key=lambda event: float(event["time_s"]))[::-1],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
