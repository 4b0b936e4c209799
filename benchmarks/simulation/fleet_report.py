"""Arms compared: GPU hours at equal attainment, time to recover, changes per hour, with intervals.

Enters: runs by arm, setting and seed. Leaves: figures. Intervals are 95 % percentiles of a bootstrap over seeds, all
arms drawn with the same seeds; with five seeds they are somewhat too narrow.

A frontier: an arm's settings in order are a curve of mean attainment and mean GPU hours; the hours at a level of
attainment are the fewest on the straight lines between neighbours. What no setting reaches has none.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.fleet_records import FleetRun
from benchmarks.simulation.fleet_traffic import DURATION_S, MINUTE_S, WARM_S

NUM_RESAMPLES = 2000
LEVELS = (0.90, 0.95, 0.98, 0.99)
RECOVERED, STEADY_MINUTES = 0.9, 5
"""Recovered: at least this share of a minute's arrivals kept the limits, and of each of the minutes that follow."""

Floats = NDArray[np.float64]
Runs = Mapping[str, Sequence[FleetRun]]
"""Runs of one arm by setting, seeds in order; settings in the order of the curve."""


def hours_at(level: float, attainment: Floats, hours: Floats) -> float:
    """GPU hours of a frontier; nan where it does not get there."""
    found = [float(hour) for kept, hour in zip(attainment, hours, strict=True) if kept >= level]
    for left, right in zip(range(len(hours) - 1), range(1, len(hours)), strict=True):
        low, high = attainment[left], attainment[right]
        if (low < level) != (high < level):
            found.append(float(hours[left] + (level - low) / (high - low) * (hours[right] - hours[left])))
    return min(found, default=float("nan"))


def recovery_s(run: FleetRun, low_s: tuple[float, float]) -> float:
    """From the collapse to the first of `STEADY_MINUTES` good minutes, 0 where there is no bad one; to the end of the
    collapse where they never come."""
    first, last = int(low_s[0] // MINUTE_S), int(low_s[1] // MINUTE_S)
    good = []
    for minute in range(first, last):
        num, num_kept = run.minutes.get(minute, (0, 0))
        good.append(num == 0 or num_kept / num >= RECOVERED)
    for start in range(len(good) - STEADY_MINUTES + 1):
        if all(good[start : start + STEADY_MINUTES]):
            return start * MINUTE_S
    return (last - first) * MINUTE_S


def figures(runs: Sequence[FleetRun], low_s: tuple[float, float] | None) -> dict[str, Any]:
    """What is reported of one arm at one setting."""
    measured_h = (DURATION_S - WARM_S) / 3600
    tpot_s = np.concatenate([run.tpot_s for run in runs])
    ttft_s = np.concatenate([run.ttft_s for run in runs])
    found: dict[str, Any] = {
        "attainment": _mean([run.attainment for run in runs]),
        "attainment_by_seed": [round(run.attainment, 4) for run in runs],
        "gpu_hours": _mean([run.gpu_hours for run in runs]),
        "gpu_hours_by_seed": [round(run.gpu_hours, 3) for run in runs],
        "changes_per_hour": _mean([run.num_changes / measured_h for run in runs]),
        "tpot_s": {f"p{share}": round(float(np.percentile(tpot_s, share)), 5) for share in (50, 95, 99)},
        "ttft_s": {f"p{share}": round(float(np.percentile(ttft_s, share)), 3) for share in (50, 95, 99)},
    }
    if low_s is not None:
        found["recovery_s"] = _mean([recovery_s(run, low_s) for run in runs])
        found["recovery_s_by_seed"] = [recovery_s(run, low_s) for run in runs]
    return found


def at_equal_attainment(ours: Runs, rival: Runs) -> list[dict[str, Any]]:
    """Our GPU hours over the rival's at each level that both reach."""
    drawn = _draws(ours)
    found: list[dict[str, Any]] = []
    for level in LEVELS:
        one, other = (_hours(runs, level, None) for runs in (ours, rival))
        if not (np.isfinite(one) and np.isfinite(other)):
            reached = {"ours": bool(np.isfinite(one)), "rival": bool(np.isfinite(other))}
            found.append({"attainment": level, "ratio": None, "reached": reached})
            continue
        ratios = np.array([_hours(ours, level, seeds) / _hours(rival, level, seeds) for seeds in drawn])
        inside = ratios[np.isfinite(ratios)]
        low, high = np.percentile(inside, (2.5, 97.5))
        found.append(
            {
                "attainment": level,
                "gpu_hours": round(one, 3),
                "rival_gpu_hours": round(other, 3),
                "ratio": round(one / other, 4),
                "ratio_95": [round(float(low), 4), round(float(high), 4)],
                "resamples_that_reach": round(len(inside) / len(ratios), 3),
            }
        )
    return found


def as_runs(by_setting: Mapping[str, Any]) -> Runs:
    """Figures of one arm as runs again, with what is compared by seed; settings in the order of their numbers."""
    return {
        setting: [
            FleetRun(num_requests=10_000, num_kept=round(10_000 * kept), gpu_hours=hours)
            for kept, hours in zip(one["attainment_by_seed"], one["gpu_hours_by_seed"], strict=True)
        ]
        for setting, one in sorted(by_setting.items(), key=lambda item: number_in(item[0]))
    }


def number_in(setting: str) -> float:
    """The number of a setting's name."""
    return next(float(word) for word in setting.split() if word[0].isdigit())


def cheapest(by_scenario: Sequence[Runs], level: float) -> str | None:
    """The setting with the fewest GPU hours among those that keep the level in each of these scenarios."""
    best, best_hours = None, float("inf")
    for name in by_scenario[0]:
        means = [np.mean([run.attainment for run in runs[name]]) for runs in by_scenario]
        hours = sum(float(np.mean([run.gpu_hours for run in runs[name]])) for runs in by_scenario)
        if min(means) >= level and hours < best_hours:
            best, best_hours = name, hours
    return best


def call_times(calls: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Microseconds of the policy's calls, all of them and those that decided anew."""
    found = {}
    for name, chosen in (("all", [s for s, _ in calls]), ("decided anew", [s for s, is_new in calls if is_new])):
        if len(chosen) > 1:
            cuts = statistics.quantiles(chosen, n=100)
            found[name] = {"median": round(1e6 * cuts[49], 1), "p99": round(1e6 * cuts[98], 1), "num": len(chosen)}
    return found


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Ratio of means over seeds, and its interval."""
    one, other = np.asarray(values, float), np.asarray(base, float)
    drawn = np.random.default_rng(0).integers(len(one), size=(NUM_RESAMPLES, len(one)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = one[drawn].mean(axis=1) / other[drawn].mean(axis=1)
        mean = one.mean() / other.mean()
    if not np.isfinite(mean):
        return {"ratio": None}
    low, high = np.percentile(ratios[np.isfinite(ratios)], (2.5, 97.5))
    return {"ratio": round(float(mean), 4), "ratio_95": [round(float(low), 4), round(float(high), 4)]}


def _hours(runs: Runs, level: float, seeds: NDArray[np.int64] | None) -> float:
    chosen = {name: list(of) if seeds is None else [of[seed] for seed in seeds.tolist()] for name, of in runs.items()}
    attainment = np.array([np.mean([run.attainment for run in of]) for of in chosen.values()])
    hours = np.array([np.mean([run.gpu_hours for run in of]) for of in chosen.values()])
    return hours_at(level, attainment, hours)


def _draws(runs: Runs) -> NDArray[np.int64]:
    num_seeds = len(next(iter(runs.values())))
    return np.random.default_rng(0).integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))


def _mean(values: Sequence[float]) -> dict[str, Any]:
    drawn = np.random.default_rng(0).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values, float)[drawn].mean(axis=1), (2.5, 97.5))
    return {"mean": round(float(np.mean(values)), 4), "mean_95": [round(float(low), 4), round(float(high), 4)]}
