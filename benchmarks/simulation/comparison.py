"""Policies of K compared on the same requests: runs by seed, intervals, regret, and the controls.

Everything is paired: for a load and a seed all policies get the same requests at the same times. What is tuned (the
best fixed K, the batch table) is tuned on one half of the answers and measured on the other. Intervals are 95%
percentiles of a bootstrap over seeds, of the mean, or of a ratio of means with the seeds kept paired; with five seeds
they are somewhat too narrow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from benchmarks.simulation.engine_model import Engine, Policy, Run, Simulation, Times, Traffic
from benchmarks.simulation.traces import Mix, Traces
from cluster.step_time import StepPoint, StepShape, StepTimes, rounded_context
from cluster.transfer import SPLIT_SHARE

NUM_RESAMPLES = 2000
BURST_SHARE, BURST_FACTOR, BURST_S = 0.2, 4.0, 5.0
"""Bursty traffic: a fifth of the time, 5 s on average at a stretch, four times the mean rate; the rest in between."""

MakePolicy = Callable[[int], Policy]
"""A fresh policy for a seed."""


@dataclass(frozen=True)
class Load:
    """How requests arrive. `level`: clients of a closed loop, or requests a second."""

    kind: Literal["closed", "poisson", "bursty"]
    level: float

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Reads `closed:8`, `poisson:2.5` or `bursty:2.5`."""
        kind, _, level = text.partition(":")
        try:
            value = float(level)
        except ValueError:
            value = -1.0
        if kind not in ("closed", "poisson", "bursty") or not 0 < value < float("inf"):
            raise ValueError(f"load must be closed:NUM, poisson:RATE or bursty:RATE, not {text!r}")
        if kind == "closed" and not value.is_integer():
            raise ValueError(f"load: a closed loop has a whole number of clients, not {level}")
        return cls(kind, value)  # type: ignore[arg-type]  # checked against the literals above

    def __str__(self) -> str:
        return f"{self.kind}:{self.level:g}"

    def arrivals_s(self, num_requests: int, rng: np.random.Generator) -> list[float]:
        """Times of arrival; none for a closed loop."""
        if self.kind == "closed":
            return []
        if self.kind == "poisson":
            return list(accumulate(rng.exponential(1 / self.level, num_requests).tolist()))
        quiet = self.level * (1 - BURST_SHARE * BURST_FACTOR) / (1 - BURST_SHARE)
        now_s, arrivals, bursting = 0.0, list[float](), False
        while len(arrivals) < num_requests:
            stretch_s = rng.exponential(BURST_S if bursting else BURST_S * (1 - BURST_SHARE) / BURST_SHARE)
            expected = (self.level * BURST_FACTOR if bursting else quiet) * stretch_s
            arrivals += sorted((now_s + stretch_s * rng.random(rng.poisson(expected))).tolist())
            now_s, bursting = now_s + stretch_s, not bursting
        return arrivals[:num_requests]


class Remembered:
    """Step times that are asked once for each shape, the context rounded as for decisions (`rounded_context`)."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._known: dict[tuple[float, float, int | None, int, int | None], float] = {}

    def seconds(self, shape: StepShape) -> float:
        context_tokens = rounded_context(shape.context_tokens)
        key = shape.num_requests, shape.num_tokens, shape.uniform_depth, context_tokens, shape.longest_tokens
        if key not in self._known:
            self._known[key] = self._times.seconds(replace(shape, context_tokens=float(context_tokens)))
        return self._known[key]


def mistaken(times: StepTimes, share: float, seed: int) -> StepTimes:
    """The table with each measurement off by a chance factor between 1 - share and 1 + share."""
    rng = np.random.default_rng([seed, 4])
    factors = rng.uniform(1 - share, 1 + share, len(times.points)).tolist()
    points = [
        StepPoint(one.shape, one.median_s * factor, one.p95_s * factor, one.num_steps)
        for one, factor in zip(times.points, factors, strict=True)
    ]
    return StepTimes(
        points,
        max_draft_tokens=times.max_draft_tokens,
        full_graph_depths=times.full_graph_depths,
        capture_sizes=times.capture_sizes,
        padding_tokens=times.padding_tokens,
        measured=False,
    )


@dataclass(frozen=True)
class Bench:
    """Conditions shared by all runs. `num_requests` None: enough for the load. `warmup`: share of the requests that
    start before measuring does. `split_share`: of `cluster.transfer`, what ours takes acceptance for."""

    traces: Traces
    times: Times
    mix: Mix
    engine: Engine
    num_requests: int | None = None
    warmup: float = 0.25
    split_share: float = SPLIT_SHARE

    @property
    def max_draft_tokens(self) -> int:
        """K_max of the traces."""
        return self.traces.max_draft_tokens

    def traffic(self, load: Load, seed: int) -> Traffic:
        rng = np.random.default_rng([seed, 0])
        concurrency = int(load.level) if load.kind == "closed" else None
        num = self.num_requests or (max(64, 6 * concurrency) if concurrency else 400)
        drawn = self.traces.draw(self.mix, num, rng)
        labels, answers = [label for label, _ in drawn], [answer for _, answer in drawn]
        return Traffic(answers, labels, load.arrivals_s(num, rng), concurrency)

    def run(self, policy: Policy, traffic: Traffic, seed: int, times: Times | None = None) -> Run:
        """Jitter follows the seed, so that all policies meet the same."""
        rng = np.random.default_rng([seed, 1])
        return Simulation(self.engine, times or self.times, policy, traffic, rng, self.warmup).finish()

    def runs(self, make: MakePolicy, load: Load, seeds: Sequence[int], times: Times | None = None) -> list[Run]:
        return [self.run(make(seed), self.traffic(load, seed), seed, times) for seed in seeds]


def shuffled(traffic: Traffic, seed: int) -> Traffic:
    """The same requests under each other's labels: what a policy learns by workload then means nothing."""
    order = np.random.default_rng([seed, 2]).permutation(len(traffic.labels))
    return Traffic(traffic.answers, [traffic.labels[i] for i in order], traffic.arrivals_s, traffic.concurrency)


def interval(values: Sequence[float], base: Sequence[float] | None = None) -> list[float]:
    """[low, high] of the mean over seeds, or of its ratio to the base's mean, both drawn with the same seeds."""
    drawn = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    means = np.asarray(values, float)[drawn].mean(axis=1)
    if base is not None:
        means = means / np.asarray(base, float)[drawn].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return [round(float(low), 4), round(float(high), 4)]


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    return {"ratio": round(float(np.mean(values) / np.mean(base)), 4), "ratio_95": interval(values, base)}


def rates(runs: Sequence[Run]) -> list[float]:
    return [run.tokens_per_s for run in runs]


def speeds(runs: Sequence[Run]) -> list[float]:
    """Tokens a second of one request while it decodes: one over the mean TPOT."""
    return [1 / float(np.mean(run.tpot_s)) for run in runs]


def scores(runs: Sequence[Run], load: Load) -> list[float]:
    """What policies are compared by. A closed loop is always busy, so its tokens a second tell. Where requests arrive
    by themselves an engine that keeps up gives out as many as arrive, and the speed of a request tells."""
    return rates(runs) if load.kind == "closed" else speeds(runs)


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """What is reported of a policy at a load; TPOT in seconds, percentiles over the requests of all seeds."""
    tpot_s = np.concatenate([run.tpot_s for run in runs])
    ttft_s = np.concatenate([run.ttft_s for run in runs])
    seconds = sum(run.seconds for run in runs)
    labels = sorted({label for run in runs for label in run.steps_by_label})
    return {
        "tokens_per_s": round(float(np.mean(rates(runs))), 2),
        "tokens_per_s_95": interval(rates(runs)),
        "tokens_per_s_by_seed": [round(rate, 2) for rate in rates(runs)],
        "request_tokens_per_s": round(float(np.mean(speeds(runs))), 3),
        "acceptance_length": round(
            sum(run.num_decoded for run in runs) / sum(run.num_request_steps for run in runs), 4
        ),
        "mean_depth": round(sum(run.num_drafted for run in runs) / sum(run.num_request_steps for run in runs), 3),
        "mean_depth_by_workload": {
            label: round(
                sum(run.drafted_by_label.get(label, 0) for run in runs)
                / max(1, sum(run.steps_by_label.get(label, 0) for run in runs)),
                3,
            )
            for label in labels
        },
        "tpot_s": {f"p{share}": round(float(np.percentile(tpot_s, share)), 6) for share in (50, 95, 99)},
        "ttft_s": {f"p{share}": round(float(np.percentile(ttft_s, share)), 6) for share in (50, 95, 99)},
        "changes_per_hour": round(3600 * sum(run.num_changes for run in runs) / seconds, 1),
        "simulated_s": round(seconds, 2),
    }


def over_range(by_load: Sequence[Mapping[str, Sequence[float]]], name: str, bases: Sequence[str]) -> dict[str, Any]:
    """Ratio of a policy to the base of each load, as geometric mean over the loads, and its worst load.

    by_load: score by seed, by policy, of each load; bases: the policy compared with at each load.
    """
    logs = np.array(
        [np.log(np.asarray(found[name]) / np.asarray(found[base])) for found, base in zip(by_load, bases, strict=True)]
    )
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(NUM_RESAMPLES, logs.shape[1]))
    low, high = np.percentile(np.exp(logs[:, drawn].mean(axis=(0, 2))), (2.5, 97.5))
    return {
        "ratio": round(float(np.exp(logs.mean())), 4),
        "ratio_95": [round(float(low), 4), round(float(high), 4)],
        "worst_load": round(float(np.exp(logs.mean(axis=1)).min()), 4),
    }
