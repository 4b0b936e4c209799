"""Traffic of a fleet over time: how many requests, of which kind, and when the head or the traffic changes.

Enters: a scenario's name, a mean rate, answers by pool, a random generator. Leaves: the arrivals, the swaps of the
head, and from when to when acceptance is low. Never knows: replicas, policies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.fleet_records import Arrival, Swap
from benchmarks.simulation.traces import Kind, Traces

MINUTE_S = 60.0
DURATION_S, WARM_S = 80 * MINUTE_S, 10 * MINUTE_S
LOW_S, HIGH_S = 25 * MINUTE_S, 55 * MINUTE_S
"""Acceptance collapses at the first and comes back at the second."""

DRIFT_S = (20 * MINUTE_S, 40 * MINUTE_S)
"""The mix drifts between these."""

DIURNAL_SWING = 0.6
BURST_FACTOR, BURST_S, NUM_BURSTS = 2.5, 5 * MINUTE_S, 3

POOLS = {
    "code": Kind(("humaneval", "coding")),
    "chat": Kind(("*",)),
    "sampled": Kind(("*",), temperature=1.0),
}
"""Real answers by pool: HumanEval and coding greedy, all questions greedy, all questions at temperature 1."""

USUAL = {"code": 0.6, "chat": 0.4}
SHIFT_FROM, SHIFT_TO = {"code": 0.9, "sampled": 0.1}, {"code": 0.1, "sampled": 0.9}

SCENARIOS = ("steady", "diurnal", "burst", "collapse of traffic", "collapse of head", "mix shift")
TUNED_ON = ("steady", "diurnal")
"""Those in which acceptance stands still and the rate does not jump."""


@dataclass(frozen=True)
class Scenario:
    """`low_s`: from when to when acceptance is low, None where it never is."""

    name: str
    arrivals: Sequence[Arrival]
    swaps: Sequence[Swap]
    low_s: tuple[float, float] | None


def pools(traces: Traces, num_joined: int = 1) -> dict[str, list[bytes]]:
    """Answers by pool, each made of `num_joined` traced ones. Raises ValueError naming a pool without any."""
    traced = {name: [answer.accepted for answer in traces.select(kind)] for name, kind in POOLS.items()}
    found = {name: [b"".join(part) for part in _parts(of, num_joined)] for name, of in traced.items()}
    for name, answers in found.items():
        if not answers:
            raise ValueError(f"{traces.source}: no answer for the pool {name!r}")
    return found


def _parts(answers: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    """Each answer once, in parts of `size`; what is left over is left out, unless it is all there is."""
    return [answers[at : at + size] for at in range(0, max(1, len(answers) - size + 1), size)] if answers else []


def nothing_confirmed(answer: bytes) -> bytes:
    """A head of which the target accepts no draft, as one trained for another target."""
    return bytes(len(answer))


def _as_is(answer: bytes) -> bytes:
    return answer


def draw(name: str, requests_per_s: float, answers: Mapping[str, Sequence[bytes]], seed: int) -> Scenario:
    """A scenario with this mean rate (of its steady part).

    Raises ValueError for a name that is none.
    """
    if name not in SCENARIOS:
        raise ValueError(f"scenario {name!r} is none of {', '.join(SCENARIOS)}")
    rng = np.random.default_rng([seed, SCENARIOS.index(name)])
    factor, highest = _profile(name, rng)
    arrivals = []
    now_s = 0.0
    while (now_s := now_s + float(rng.exponential(1 / (requests_per_s * highest)))) < DURATION_S:
        if rng.random() * highest >= factor(now_s):
            continue
        shares = _shares(name, now_s)
        label = str(rng.choice(list(shares), p=list(shares.values())))
        # In a collapse of the traffic the same workloads begin to sample at temperature 1.
        is_low = name == "collapse of traffic" and LOW_S <= now_s < HIGH_S
        pool = answers["sampled" if is_low else label]
        arrivals.append(Arrival(now_s, label, pool[int(rng.integers(len(pool)))]))
    swaps = []
    if name == "collapse of head":
        swaps = [Swap(LOW_S, "of another target", nothing_confirmed), Swap(HIGH_S, "sound", _as_is)]
    return Scenario(name, arrivals, swaps, (LOW_S, HIGH_S) if name.startswith("collapse") else None)


def _profile(name: str, rng: np.random.Generator) -> tuple[Callable[[float], float], float]:
    """The rate over time against the mean, and its highest value."""
    if name == "diurnal":
        period_s = DURATION_S - WARM_S
        return lambda now_s: 1 - DIURNAL_SWING * math.cos(2 * math.pi * (now_s - WARM_S) / period_s), 1 + DIURNAL_SWING
    if name == "burst":
        part_s = (DURATION_S - WARM_S) / NUM_BURSTS
        begins = [WARM_S + part_s * (index + float(rng.uniform(0, 0.7))) for index in range(NUM_BURSTS)]

        def bursting(now_s: float) -> float:
            return BURST_FACTOR if any(begin <= now_s < begin + BURST_S for begin in begins) else 1.0

        return bursting, BURST_FACTOR
    return lambda now_s: 1.0, 1.0


def _shares(name: str, now_s: float) -> Mapping[str, float]:
    if name != "mix shift":
        return USUAL
    progress = min(1.0, max(0.0, (now_s - DRIFT_S[0]) / (DRIFT_S[1] - DRIFT_S[0])))
    return {label: (1 - progress) * SHIFT_FROM[label] + progress * SHIFT_TO[label] for label in SHIFT_FROM}
