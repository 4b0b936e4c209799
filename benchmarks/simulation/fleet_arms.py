"""Who decides the number of replicas of a simulated fleet: our policy, Serve's queue length, nobody, a prophet."""

import math
import time
from dataclasses import dataclass

from benchmarks.simulation.fleet_records import Conditions, View
from benchmarks.simulation.serve_rules import queue_length_wish
from cluster.scaling import Decision, Observation, Pool, ScalingPolicy
from cluster.settings import AutoscalingSettings
from cluster.step_time import StepTimes


def settings(conditions: Conditions, utilisation: float) -> AutoscalingSettings:
    """The section `autoscaling` that stands for these conditions."""
    return AutoscalingSettings.model_validate(
        {
            "policy": "acceptance",
            "target": {"min": conditions.min_replicas, "max": conditions.max_replicas},
            "utilisation": utilisation,
            "max_tpot_ms": 1000 * conditions.max_tpot_s,
            "start_time_s": conditions.start_time_s,
            "upscale_delay_s": conditions.upscale_delay_s,
            "downscale_delay_s": conditions.downscale_delay_s,
            "target_ongoing_requests": float(conditions.max_num_seqs),
        }
    )


class AcceptanceArm:
    """The very object that the service asks. `seconds`: what each call took, and whether it decided anew."""

    reads_counters = True
    downscaling_factor = 1.0

    def __init__(self, conditions: Conditions, times: StepTimes, utilisation: float) -> None:
        seqs = conditions.max_num_seqs
        self.policy = ScalingPolicy(
            settings(conditions, utilisation), times, max_num_seqs=seqs, max_ongoing_requests=seqs
        )
        self.seconds: list[tuple[float, bool]] = []
        self._last: Decision | None = None

    def wish(self, view: View) -> float:
        pool = Pool(view.num_running, view.target, view.num_requests, view.num_queued)
        observation = Observation(view.now_s, pool, view.running, view.readings)
        start_s = time.perf_counter()
        decision = self.policy.decide(observation)
        self.seconds.append((time.perf_counter() - start_s, decision is not self._last))
        self._last = decision
        return float(decision.target)


@dataclass(frozen=True)
class QueueArm:
    """Serve's own policy."""

    target_ongoing_requests: float
    downscaling_factor: float = 1.0
    reads_counters: bool = False

    def wish(self, view: View) -> float:
        return queue_length_wish(view.num_requests, view.num_running, view.target, self.target_ongoing_requests)


@dataclass(frozen=True)
class StaticArm:
    """A fixed number."""

    num_replicas: int
    downscaling_factor: float = 1.0
    reads_counters: bool = False

    def wish(self, view: View) -> float:
        return float(self.num_replicas)


@dataclass(frozen=True)
class KnowingArm:
    """Knows when acceptance collapses and comes back, and how many replicas (a fraction) each phase needs; wishes so
    early that Serve's delay has passed at the very moment of the collapse. A bound for policies that must notice."""

    usual: float
    low: float
    low_s: tuple[float, float]
    upscale_delay_s: float
    downscaling_factor: float = 1.0
    reads_counters: bool = False

    def wish(self, view: View) -> float:
        is_low = self.low_s[0] - self.upscale_delay_s <= view.now_s < self.low_s[1]
        return float(math.ceil(self.low if is_low else self.usual))
