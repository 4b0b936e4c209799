"""What all runs of a comparison of autoscalers share, and the arms compared.

Enters: the command's settings, step times, acceptance traces. Leaves: arms by name and setting, and a run of one arm on
one scenario and seed. Never knows: figures, files.

The mean rate is such that a number of replicas at 75 % of the capacity predicted for the usual mix would serve it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.fleet import Fleet, remembered_paths
from benchmarks.simulation.fleet_arms import AcceptanceArm, KnowingArm, QueueArm, StaticArm
from benchmarks.simulation.fleet_engine import StepSeconds
from benchmarks.simulation.fleet_records import Arm, Conditions, FleetRun
from benchmarks.simulation.fleet_traffic import HIGH_S, LOW_S, POOLS, USUAL, draw, pools
from benchmarks.simulation.traces import Traces, survival
from cluster.capacity import Capacity, CapacityModel, Traffic
from cluster.step_time import StepTimes
from cluster.transfer import gains

OURS, QUEUE, GENTLE, STATIC = "acceptance", "queue length", "queue length, factor 0.3", "static"
KNOWING = "foreknowledge"
ARMS = (OURS, QUEUE, GENTLE, STATIC, KNOWING)
UTILISATIONS = (0.9, 0.75, 0.65, 0.55, 0.45, 0.35)
KNOWING_UTILISATIONS = (0.9, 0.75, 0.65, 0.55)
TARGET_SHARES = {1.0: (0.25, 0.125, 0.0625), 0.3: (0.75, 0.5, 0.375, 0.25, 0.125)}
"""`target_ongoing_requests` as shares of the requests that an engine runs at a time, by downscaling factor. With a
factor of 1 greater ones swing so much that they keep fewer limits and take more hours."""

USUAL_UTILISATION = 0.75

MakeArm = Callable[[], Arm]


@dataclass(frozen=True)
class Phase:
    """What stands still between two collapses: tokens per second asked for, and what a replica gives."""

    tokens_per_s: float
    capacity: Capacity


class Bench:
    """Everything that all runs share. `initial`: replicas at the start, from which the rate follows; `num_joined`:
    answers that make one answer of a request."""

    def __init__(
        self, conditions: Conditions, times: StepTimes, traces: Traces, initial: int, num_joined: int = 1
    ) -> None:
        self.conditions, self.times, self.initial = conditions, times, initial
        self.answers = pools(traces, num_joined)
        self.seconds, self.paths = StepSeconds(times), remembered_paths()
        self._model = CapacityModel(times, max_num_seqs=conditions.max_num_seqs, max_tpot_s=conditions.max_tpot_s)
        deepest = traces.max_draft_tokens
        self._worth = {name: gains(survival(traces.select(kind), deepest), deepest) for name, kind in POOLS.items()}
        self._lengths = {name: float(np.mean([len(one) + 1 for one in of])) for name, of in self.answers.items()}
        self.capacities = {name: self._capacity({name: 1.0}) for name in POOLS}
        usual = self.capacities["usual mix"] = self._capacity(USUAL)
        mean_tokens = sum(share * self._lengths[name] for name, share in USUAL.items())
        self.requests_per_s = initial * USUAL_UTILISATION * usual.tokens_per_s / mean_tokens

    def arms(self, scenario: str, utilisations: Sequence[float] = UTILISATIONS) -> dict[str, dict[str, MakeArm]]:
        """Arms by name and setting; `utilisations` are those of ours."""
        seqs, first = self.conditions.max_num_seqs, max(1, self.initial - 1)
        targets = {factor: [round(share * seqs, 1) for share in of] for factor, of in TARGET_SHARES.items()}
        most = self.conditions.max_replicas
        static = sorted({min(most, n) for n in (*range(first, first + 4), 2 * self.initial, 3 * self.initial)})
        knowing = KNOWING_UTILISATIONS if scenario.startswith("collapse") else ()
        return {
            OURS: {f"utilisation {one:g}": self._ours(one) for one in utilisations},
            QUEUE: {f"target {one:g}": _queue(one, 1.0) for one in targets[1.0]},
            GENTLE: {f"target {one:g}": _queue(one, 0.3) for one in targets[0.3]},
            STATIC: {f"{one} replicas": _static(one) for one in static},
            KNOWING: {f"utilisation {one:g}": self._knowing(scenario, one) for one in knowing},
        }

    def run(self, scenario: str, make: MakeArm, seed: int) -> tuple[FleetRun, Arm]:
        drawn = draw(scenario, self.requests_per_s, self.answers, seed)
        arm = make()
        initial = arm.num_replicas if isinstance(arm, StaticArm) else self.initial
        fleet = Fleet(
            self.conditions, self.times, self.seconds, arm, drawn.arrivals, drawn.swaps, initial, seed, self.paths
        )
        return fleet.finish(), arm

    def phases(self, scenario: str) -> tuple[Phase, Phase]:
        """Of a collapse: before and after it, and while it lasts."""
        asked = {name: self.requests_per_s * share * self._lengths[name] for name, share in USUAL.items()}
        usual = Phase(sum(asked.values()), self.capacities["usual mix"])
        if scenario == "collapse of traffic":
            return usual, Phase(self.requests_per_s * self._lengths["sampled"], self.capacities["sampled"])
        undrafted = {name: (0.0,) * len(worth) for name, worth in self._worth.items()}
        return usual, Phase(usual.tokens_per_s, self._capacity(USUAL, undrafted))

    def _capacity(self, shares: Mapping[str, float], worth: Mapping[str, tuple[float, ...]] | None = None) -> Capacity:
        worth = worth or self._worth
        return self._model.capacity(
            Traffic(name, share * self._lengths[name], worth[name], self._lengths[name], self.conditions.prompt_tokens)
            for name, share in shares.items()
        )

    def _ours(self, utilisation: float) -> MakeArm:
        return lambda: AcceptanceArm(self.conditions, self.times, utilisation)

    def _knowing(self, scenario: str, utilisation: float) -> MakeArm:
        usual, low = (
            phase.tokens_per_s / (utilisation * phase.capacity.tokens_per_s) for phase in self.phases(scenario)
        )
        return lambda: KnowingArm(usual, low, (LOW_S, HIGH_S), self.conditions.upscale_delay_s)


def _queue(target: float, factor: float) -> MakeArm:
    return lambda: QueueArm(target, factor)


def _static(number: int) -> MakeArm:
    return lambda: StaticArm(number)
