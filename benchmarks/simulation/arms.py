"""The policies of a comparison, how each is tuned, and the two controls.

Enters: a `Bench` to measure on and one with other answers to tune on. Leaves: policies by name and their runs.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.simulation.baselines import (
    Bandit,
    BatchTable,
    BatchWide,
    ByWorkload,
    MovingAverage,
    StepOracle,
    best_table,
    climb,
)
from benchmarks.simulation.comparison import Bench, Load, MakePolicy, figures, ratio, scores, shuffled
from benchmarks.simulation.engine_model import Run
from benchmarks.simulation.learned import Learned
from benchmarks.simulation.traces import acceptance_length, survival
from cluster.depth import Demand, best_depths
from cluster.step_time import StepCosts, StepShape, StepTimes

OURS, ONE = "ours", "ours, one workload"
PLAIN, BY_WORKLOAD, BY_STEP = "no speculation", "best K by workload (oracle)", "each step (oracle)"
TUNING_SEED = 10_000
"""Added to the seeds of the runs that tune, so that no run is measured on what it was tuned on."""


def fixed(k: int) -> str:
    return f"K = {k}"


@dataclass(frozen=True)
class FlatCosts:
    """Every step takes as long, whatever it verifies."""

    seconds_per_step: float
    max_draft_tokens: int
    full_graph_depths: frozenset[int] = frozenset()

    def seconds(self, shape: StepShape) -> float:
        return self.seconds_per_step


@dataclass(frozen=True)
class PlainTimes:
    """Step times of an engine without a drafter, which may hold decoding steps only: a token of a prompt is then timed
    as a request that decodes one."""

    times: StepTimes

    def seconds(self, shape: StepShape) -> float:
        if shape.uniform_depth is None and 0 in self.times.full_graph_depths:
            shape = replace(shape, num_requests=shape.num_tokens, uniform_depth=0)
        return self.times.seconds(shape)


def lengths(bench: Bench, num_requests: int = 1000) -> list[float]:
    """AL at K = 0..K_max of the mix."""
    drawn = bench.traces.draw(bench.mix, num_requests, np.random.default_rng(TUNING_SEED))
    answers = [answer for _, answer in drawn]
    return [acceptance_length(answers, k) for k in range(bench.max_draft_tokens + 1)]


def fixed_depths(max_draft_tokens: int) -> dict[str, MakePolicy]:
    def make(k: int) -> MakePolicy:
        return lambda seed: BatchWide(k)

    return {fixed(k): make(k) for k in range(max_draft_tokens + 1)}


def rivals(tuning: Bench, times: StepCosts) -> dict[str, MakePolicy]:
    """Every policy but the oracle by workload and the engine without a drafter."""
    deepest = tuning.max_draft_tokens
    num_tokens = float(np.mean([len(one.accepted) for one in tuning.traces.answers]))
    context_tokens = tuning.engine.prompt_tokens + num_tokens / 2
    table = best_table(lengths(tuning), times, tuning.engine.max_num_seqs, context_tokens)
    tiers = [*(k for k in (1, 3, 7) if k < deepest), deepest]
    ours: Callable[..., Learned] = functools.partial(Learned, times, deepest, split_share=tuning.split_share)
    return {
        **fixed_depths(deepest),
        "batch-size table": lambda seed: BatchTable(table),
        "moving average": lambda seed: MovingAverage(tiers),
        "bandit (UCB)": lambda seed: Bandit(deepest, "ucb", np.random.default_rng([seed, 3])),
        "bandit (EXP3)": lambda seed: Bandit(deepest, "exp3", np.random.default_rng([seed, 3])),
        OURS: ours,
        ONE: functools.partial(ours, by_workload=False),
        "ours, K of admission as limit": functools.partial(ours, limits=True),
        "ours, at admission only": functools.partial(ours, per_step=False),
        "ours, in the step only": functools.partial(ours, chooses=False),
        "ours, K not corrected": functools.partial(ours, corrects=False),
        BY_STEP: lambda seed: StepOracle(times, deepest),
    }


def tuned_depth(tuning: Bench, load: Load, seeds: Sequence[int]) -> list[float]:
    """Score at each fixed K, from 0, on the answers and seeds kept for tuning."""
    elsewhere = [seed + TUNING_SEED for seed in seeds]
    makes = fixed_depths(tuning.max_draft_tokens).values()
    return [float(np.mean(scores(tuning.runs(make, load, elsewhere), load))) for make in makes]


def best_by_workload(
    bench: Bench, times: StepCosts, load: Load, seeds: Sequence[int], start: int
) -> tuple[dict[str, int], list[Run]]:
    """The fixed K of each workload with the best score on these very seeds, and its runs.

    The better of `start` for all and of what `best_depths` says for the true survivals, then changed one workload at a
    time; a better combination far from both may stay unseen.
    """
    traffic = {seed: bench.traffic(load, seed) for seed in seeds}

    def runs(by_label: Mapping[str, int]) -> list[Run]:
        return [bench.run(ByWorkload(by_label), traffic[seed], seed) for seed in seeds]

    def worth(by_label: Mapping[str, int]) -> float:
        return float(np.mean(scores(runs(by_label), load)))

    same = dict.fromkeys(bench.mix.kinds, start)
    first = max((same, planned(bench, times, load)), key=worth)
    best, _ = climb(first, bench.max_draft_tokens, worth)
    return best, runs(best)


def planned(bench: Bench, times: StepCosts, load: Load) -> dict[str, int]:
    """What `best_depths` gives each workload when it knows the survivals of all answers."""
    num_requests = load.level if load.kind == "closed" else 1.0
    shares = bench.mix.at(0.5)
    demands = [
        Demand(name, num_requests * share, survival(bench.traces.select(kind), bench.max_draft_tokens))
        for (name, kind), share in zip(bench.mix.kinds.items(), shares, strict=True)
        if share
    ]
    return {**dict.fromkeys(bench.mix.kinds, 0), **best_depths(demands, times).depths}


def controls(
    bench: Bench, times: StepCosts, load: Load, seeds: Sequence[int], found: Mapping[str, list[Run]]
) -> dict[str, Any]:
    """Gain of knowing workloads, with true and with shuffled labels, and the K under flat costs."""
    deepest = bench.max_draft_tokens
    ours: Callable[..., Learned] = functools.partial(Learned, split_share=bench.split_share)
    mixed = [bench.run(ours(times, deepest, seed), shuffled(bench.traffic(load, seed), seed), seed) for seed in seeds]
    level = FlatCosts(times.seconds(StepShape(1, 1, 0)), deepest)
    flat = bench.runs(functools.partial(ours, level, deepest), load, seeds, level)
    deep = bench.runs(lambda seed: BatchWide(deepest), load, seeds, level)
    return {
        "gain_by_workload": ratio(scores(found[OURS], load), scores(found[ONE], load)),
        "gain_by_shuffled_workload": ratio(scores(mixed, load), scores(found[ONE], load)),
        "flat_costs": {
            "mean_depth": figures(flat)["mean_depth"],
            "max_draft_tokens": deepest,
            "to_max": ratio(scores(flat, load), scores(deep, load)),
        },
    }
