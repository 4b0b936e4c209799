"""Microseconds that a choice of K takes on this machine.

    python -m benchmarks.decision [--step-times FILE.json] [--out FILE.json]

- `allocate`: one engine step, by batch; requests of 4 workloads, or each with a survival of its own.
- `new curve`: what the first step of a batch size costs besides, when `CostCurves` asks the table for its times.
- `decide`: one request, while the plan of the last half second holds.
- `plan`: one request that finds the plan too old, by number of workloads.

Without --step-times the table is `default_step_times`; what a decision takes hardly depends on the numbers in it.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count
from operator import mul
from pathlib import Path

from cluster.acceptance import AcceptanceBook, Counts
from cluster.depth import CostCurves, DepthChooser, Load, allocate
from cluster.step_time import StepTimes, default_step_times

BATCHES = (1, 8, 64, 256)
NUM_WORKLOADS = (1, 4, 16, 64)
CONTEXT_TOKENS = 1024.0
NUM_REPEATS = 300


def microseconds(call: Callable[[], object], num_repeats: int = NUM_REPEATS) -> dict[str, float]:
    """Median and 99th percentile of single calls, after ten that do not count."""
    taken = []
    for repeat in range(num_repeats + 10):
        start_ns = time.perf_counter_ns()
        call()
        if repeat >= 10:
            taken.append((time.perf_counter_ns() - start_ns) / 1e3)
    return {"median": round(statistics.median(taken), 1), "p99": round(statistics.quantiles(taken, n=100)[98], 1)}


def survival(max_draft_tokens: int, rng: random.Random) -> tuple[float, ...]:
    return tuple(accumulate((rng.uniform(0.3, 0.95) for _ in range(max_draft_tokens)), mul))


def bench_allocate(times: StepTimes, rng: random.Random) -> dict[str, dict[str, float]]:
    found = {}
    deepest = times.max_draft_tokens
    shared = [survival(deepest, rng) for _ in range(4)]
    for batch in BATCHES:
        curves = CostCurves(times)
        kinds: dict[str, Sequence[tuple[float, ...]]] = {
            "4 workloads": [shared[index % 4] for index in range(batch)],
            "each its own": [survival(deepest, rng) for _ in range(batch)],
        }
        for kind, survivals in kinds.items():
            found[f"allocate, batch {batch}, {kind}"] = microseconds(
                partial(allocate, survivals, [deepest] * batch, curves, CONTEXT_TOKENS)
            )
        found[f"new curve, batch {batch}"] = microseconds(partial(new_curve, times, batch), 30)
    return found


def bench_decide(times: StepTimes, rng: random.Random) -> dict[str, dict[str, float]]:
    found = {}
    deepest = times.max_draft_tokens
    for num_workloads in NUM_WORKLOADS:
        book = AcceptanceBook(deepest)
        for index in range(num_workloads):
            book.add(f"w{index}", counts(survival(deepest, rng), 2000))
        load = Load({f"w{index}": 64 / num_workloads for index in range(num_workloads)}, CONTEXT_TOKENS)
        chooser = DepthChooser(times, deepest)
        found[f"decide, {num_workloads} workloads"] = microseconds(partial(chooser.decide, "w0", book, load, 0.0, rng))
        found[f"plan, {num_workloads} workloads"] = microseconds(
            partial(plan_anew, chooser, book, load, count(1), rng), 50
        )
    return found


def new_curve(times: StepTimes, batch: int) -> None:
    CostCurves(times).curve(batch, CONTEXT_TOKENS)


def plan_anew(
    chooser: DepthChooser, book: AcceptanceBook, load: Load, clock: Iterator[int], rng: random.Random
) -> None:
    """Decide a second later, when no plan holds any more."""
    chooser.decide("w0", book, load, float(next(clock)), rng)


def counts(of: Sequence[float], num_steps: int) -> Counts:
    """Counts of `num_steps` steps at K_max that come out as expected."""
    accepted = tuple(round(num_steps * value) for value in of)
    return Counts((num_steps,) * len(of), (num_steps, *accepted[:-1]), accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-times", type=Path, help="table of `calibrate` (default: default_step_times(7))")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    times = StepTimes.load(args.step_times) if args.step_times else default_step_times(7)
    rng = random.Random(0)
    found = {**bench_allocate(times, rng), **bench_decide(times, rng)}
    print("\n".join(f"{name:40s} {of['median']:9.1f} us   p99 {of['p99']:9.1f}" for name, of in found.items()))
    if args.out:
        document = {
            "max_draft_tokens": times.max_draft_tokens,
            "step_times": str(args.step_times or "default_step_times"),
            "machine": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "microseconds": found,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
