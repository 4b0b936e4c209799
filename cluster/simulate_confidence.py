"""How much better K could be chosen if the scheduler knew the drafter's own probabilities of the drafts in hand.

    python -m cluster.simulate_confidence --traces FILE.npz [FILE2.npz ...] --step-times TABLE.json [TABLE2.json ...]
        --out FILE.json

Traces come from `peagle.bench.draft_confidence`. For each seed the answers of each workload are halved: survivals are
fitted on one half (on the steps of decoding at K_max, and on those that the rule fitted so visits: what plays better
there is taken) and everything is measured on the other. At each number of requests in a step `allocate` is told

    workload              what it is told today: survival by workload
    confidence            survival by step, from the drafter's log-odds
    confidence, workload  the same with a constant for each workload
    ..., long run         the same, for the most tokens a second of the run in place of the step's
    ..., rank only        the number of drafts as by workload; which ones, by confidence
    shuffled              confidence, workload, with log-odds of other steps: a control, which must gain nothing
    oracle                what the step will accept; `oracle, long run` likewise

`break_even_ms` is what each step may take longer before the gain over `workload` is gone. All stand beside every fixed
K, of which the best is picked in hindsight, on the very requests measured. The first table is also taken as if ragged
batches cost what uniform ones on full graphs do ("graph prices": a bound, which nobody measured), and as if only
uniform steps on full graphs could be chosen ("graphs only": nothing interpolated).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.simulate import file_conditions, made
from cluster.simulation.comparison import interval, ratio
from cluster.simulation.confidence import (
    ByWorkload,
    Calibrated,
    Estimate,
    Floats,
    Pool,
    Steps,
    known,
    load,
    quality,
    survival,
    workloads,
)
from cluster.simulation.confidence_play import (
    ByTable,
    Costs,
    Decide,
    GraphPriced,
    GraphsOnly,
    Played,
    draws,
    fixed,
    informed,
    play,
    ranked,
)
from cluster.step_costs import StepCosts
from cluster.step_time import StepTimes

LOADS = (1, 2, 4, 8, 16, 32, 64, 128)
REQUEST_STEPS, MIN_STEPS = 3000, 60
"""Steps of requests in a run, and steps of the engine, whichever is more."""
WORKLOAD, CONFIDENCE, BOTH, SHUFFLED, ORACLE = "workload", "confidence", "confidence, workload", "shuffled", "oracle"
LONG_RUN, RANK_ONLY = ", long run", ", rank only"
AS_IF: dict[str, Callable[[StepCosts], StepCosts]] = {"graph prices": GraphPriced.of, "graphs only": GraphsOnly.of}


def fit(name: str, steps: Steps, num_workloads: int) -> Estimate:
    if name == WORKLOAD:
        return ByWorkload.fit(steps, num_workloads)
    return Calibrated.fit(steps, 0 if name == CONFIDENCE else num_workloads)


def tables(estimate: Estimate, pool: Pool) -> list[Floats]:
    """Survival at every anchor of every answer."""
    return [survival(estimate, np.full(len(one.accepted_A), one.workload), one.log_odds_AK) for one in pool.answers]


class Bench:
    """One seed and one number of requests: who plays on which half, from the same draws."""

    def __init__(self, train: Pool, test: Pool, costs: Costs, num_requests: int, seed: int) -> None:
        self._train, self._test, self._costs = train, test, costs
        self._num_steps = max(REQUEST_STEPS // num_requests, MIN_STEPS)
        rng = np.random.default_rng([seed, num_requests])
        self._drawn = {id(pool): draws(pool, num_requests, rng) for pool in (train, test)}
        self._starts = rng.random(num_requests)
        self._shuffling = rng
        self._estimates: dict[str, Estimate] = {}
        self._rates: dict[str, float] = {}

    def _play(self, pool: Pool, decide: Decide) -> Played:
        return play(pool, self._drawn[id(pool)], self._starts, self._num_steps, decide)

    def _decide(self, name: str, pool: Pool, rate: float | None = None) -> Decide:
        before = ByTable(tables(self._estimates[WORKLOAD], pool), self._costs)
        if name == WORKLOAD:
            return before.by_workload
        if name == ORACLE:
            now = [known(one.accepted_A, pool.max_draft_tokens) for one in pool.answers]
        elif name == SHUFFLED:
            now = tables(self._estimates[BOTH], pool.shuffled(self._shuffling))
        else:
            now = tables(self._estimates[name], pool)
        return informed(before, ByTable(now, self._costs), self._costs, rate)

    def _candidates(self, name: str) -> list[Estimate]:
        """Fitted on the steps of decoding at K_max; by workload also as `cluster.transfer` carries it to a lesser K."""
        first = fit(name, self._train.walked(), len(self._train.names))
        return [first, first.carried()] if isinstance(first, ByWorkload) else [first]

    def learn(self) -> None:
        """Of each arm the estimate that plays best on this half, and the rates at which two of them play."""
        train = self._train
        for name in (WORKLOAD, CONFIDENCE, BOTH):
            played: list[tuple[float, Estimate]] = []
            for candidate in self._candidates(name):
                self._estimates[name] = candidate
                run = self._play(train, self._decide(name, train))
                played += [(run.tokens_per_s, candidate)]
                if len(played) == 1:
                    again = fit(name, train.steps(run.visited), len(train.names))
            self._estimates[name] = again
            played += [(self._play(train, self._decide(name, train)).tokens_per_s, again)]
            self._estimates[name] = max(played, key=lambda one: one[0])[1]
        for name in (BOTH, ORACLE):
            self._rates[name] = self._play(train, self._decide(name, train)).tokens_per_s

    def runs(self) -> dict[str, Played]:
        """Every arm on the half that nothing was fitted on."""
        self.learn()
        test, costs = self._test, self._costs
        found = {f"K = {k}": self._play(test, fixed(k, costs)) for k in range(test.max_draft_tokens + 1)}
        for name in (WORKLOAD, CONFIDENCE, BOTH, SHUFFLED, ORACLE):
            found[name] = self._play(test, self._decide(name, test))
        for name in (BOTH, ORACLE):
            found[name + LONG_RUN] = self._play(test, self._decide(name, test, self._rates[name]))
        before, now = (ByTable(tables(self._estimates[name], test), costs) for name in (WORKLOAD, BOTH))
        found[BOTH + RANK_ONLY] = self._play(test, ranked(before, now, costs))
        return found


def value(pools: Sequence[tuple[Pool, Pool]], costs: Costs, num_requests: int) -> dict[str, Any]:
    """Every arm at one number of requests, over seeds."""
    runs = [Bench(train, test, costs, num_requests, seed).runs() for seed, (train, test) in enumerate(pools)]
    rates = {name: [one[name].tokens_per_s for one in runs] for name in runs[0]}
    best = max((name for name in rates if name.startswith("K = ")), key=lambda name: float(np.mean(rates[name])))
    arms = {}
    for name in rates:
        played = [one[name] for one in runs]
        request_steps = sum(len(one.visited) for one in played)
        num_steps = request_steps / num_requests
        seconds = sum(one.seconds for one in played)
        spare_s = sum(one.num_tokens / rate - one.seconds for one, rate in zip(played, rates[WORKLOAD], strict=True))
        arms[name] = {
            "tokens_per_s": round(float(np.mean(rates[name])), 2),
            "tokens_per_s_95": interval(rates[name]),
            "to_best_fixed": ratio(rates[name], rates[best]),
            "to_workload": ratio(rates[name], rates[WORKLOAD]),
            "mean_depth": round(sum(one.num_drafts for one in played) / request_steps, 3),
            "empty_steps": round(sum(one.num_empty_steps for one in played) / num_steps, 4),
            "step_ms": round(1000 * seconds / num_steps, 3),
            "break_even_ms": round(1000 * spare_s / num_steps, 3),
        }
        if not name.startswith("K = "):
            expected = sum(one.expected_tokens for one in played) / sum(one.num_tokens for one in played)
            arms[name]["expected_over_realised_tokens"] = round(expected, 4)
    return {"num_requests": num_requests, "best_fixed": best, "arms": arms}


def calibration(pools: Sequence[tuple[Pool, Pool]]) -> dict[str, Any]:
    """Quality on the held-out half of each estimate, fitted on steps at K_max of the other; means over seeds."""
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for seed, (train, test) in enumerate(pools):
        steps, held_out = train.walked(), test.walked()
        rng = np.random.default_rng([seed, 1])
        for name in (WORKLOAD, CONFIDENCE, BOTH):
            found.setdefault(name, []).append(quality(fit(name, steps, len(train.names)), held_out))
        mixed, mixed_out = train.shuffled(rng).walked(), test.shuffled(rng).walked()
        found.setdefault(SHUFFLED, []).append(quality(fit(BOTH, mixed, len(train.names)), mixed_out))
    return {
        name: {
            event: {
                metric: {
                    "value": round(float(np.mean([one[event][metric] for one in seeds])), 4),
                    "interval_95": interval([one[event][metric] for one in seeds]),
                }
                for metric in seeds[0][event]
            }
            for event in seeds[0]
        }
        for name, seeds in found.items()
    }


def weights(pool: Pool) -> list[dict[str, float]]:
    """Slope and constant by depth of the calibration without workloads, on all answers."""
    fitted = Calibrated.fit(pool.walked())
    return [{"slope": round(float(row[0]), 3), "constant": round(float(row[1]), 3)} for row in fitted.weights_KF]


def line(found: dict[str, Any]) -> str:
    shown = (WORKLOAD, CONFIDENCE, BOTH, BOTH + LONG_RUN, BOTH + RANK_ONLY, SHUFFLED, ORACLE, ORACLE + LONG_RUN)
    cells = [f"{name} {found['arms'][name]['to_workload']['ratio']:.3f}" for name in shown[1:]]
    first = found["arms"][WORKLOAD]
    return (
        f"{found['num_requests']:4d} requests, best fixed {found['best_fixed']}, workload {first['tokens_per_s']:.0f} "
        f"tok/s, {first['to_best_fixed']['ratio']:.3f} of it; over workload: {'; '.join(cells)}"
    )


def report(args: argparse.Namespace) -> dict[str, Any]:
    pool = load(args.traces, workloads(), args.min_distinct_share)
    pools = [pool.halves(np.random.default_rng([seed, 0])) for seed in range(args.seeds)]
    document: dict[str, Any] = {
        "made": made("cluster.simulate_confidence"),
        "traces": [file_conditions(path) for path in args.traces],
        "num_answers": {
            name: sum(one.workload == index for one in pool.answers) for index, name in enumerate(pool.names)
        },
        "num_anchors": sum(len(one.accepted_A) for one in pool.answers),
        "min_distinct_share": args.min_distinct_share,
        "num_seeds": args.seeds,
        "calibration": calibration(pools),
        "calibration_by_depth": weights(pool),
        "step_times": [],
    }
    print(json.dumps(document["calibration"], indent=1), flush=True)
    for path, as_if in [*((path, None) for path in args.step_times), *((args.step_times[0], name) for name in AS_IF)]:
        times = StepTimes.load(path)
        if as_if and not times.full_graph_depths:
            continue
        costs = Costs.of(AS_IF[as_if](times) if as_if else times, times.context_tokens)
        deepest = max(point.shape.num_requests for point in times.points)
        one: dict[str, Any] = {**file_conditions(path), "as_if": as_if, "loads": []}
        print(path, one["as_if"] or "", flush=True)
        for num_requests in args.requests:
            if num_requests <= deepest:  # beyond, the table would be extrapolated
                one["loads"].append(value(pools, costs, num_requests))
                print(line(one["loads"][-1]), flush=True)
        document["step_times"].append(one)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    parser.add_argument("--step-times", type=Path, nargs="+", required=True, help="tables of peagle.vllm.calibrate")
    parser.add_argument("--requests", type=int, nargs="+", default=LOADS, help="requests in a step")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--min-distinct-share", type=float, default=0.0, help="leave out answers that repeat themselves"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.seeds < 1 or min(args.requests) < 1:
        parser.error("--seeds and --requests must be at least 1")
    try:
        document = report(args)
    except ValueError as error:
        sys.exit(f"cluster.simulate_confidence: {error}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
