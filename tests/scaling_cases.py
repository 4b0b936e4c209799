"""Inputs for the tests of autoscaling: step costs of a formula, and counters of replicas that serve as told."""

from collections.abc import Mapping, Sequence

from cluster.counts import Counts
from cluster.scaling import CounterExport, Reading, WorkloadTotals
from cluster.settings import AutoscalingSettings
from cluster.step_time import Curve, StepCosts

GOOD, BAD = (0.8, 0.64, 0.51), (0.2, 0.04, 0.01)
OUTPUT_TOKENS, PROMPT_TOKENS = 200, 100


def step_costs() -> StepCosts:
    """20 ms, 0.5 ms a token and 1 ms a request."""
    return StepCosts(Curve((1.0, 1001.0), (0.0205, 0.5205)), Curve((1.0, 33.0), (0.001, 0.033)))


def settings(**changes: object) -> AutoscalingSettings:
    raw: dict[str, object] = {"policy": "acceptance", "target": {"min": 1, "max": 20}, "decision_interval_s": 10.0}
    return AutoscalingSettings.model_validate({**raw, **changes})


def steps(num: int, survival: Sequence[float]) -> Counts:
    """Counts of `num` steps at K_max that come out as expected."""
    accepted = [round(num * value) for value in survival]
    return Counts([num] * len(survival), [num, *accepted[:-1]], accepted)


class FakeReplica:
    """Counters of one replica of a test's choosing, exported as a real one exports its own."""

    def __init__(self, name: str) -> None:
        self.name, self.export = name, CounterExport()
        self.totals: dict[str, WorkloadTotals] = {}

    def serve(self, workload: str, num_requests: int, survival: Sequence[float] = GOOD) -> None:
        """Requests that arrive and end."""
        per_request = round(OUTPUT_TOKENS / (1 + sum(survival)))
        more = WorkloadTotals(
            num_requests,
            num_requests,
            num_requests * OUTPUT_TOKENS,
            num_requests * PROMPT_TOKENS,
            steps(num_requests * per_request, survival),
        )
        self.totals[workload] = self.totals.get(workload, WorkloadTotals()).plus(more)

    def reading(self, time_s: float, head: str = "head") -> Reading:
        return Reading(self.name, time_s, self.export.flat(head, self.totals))


def changed(reading: Reading, values: Mapping[str, float]) -> Reading:
    """The reading with other values for some counters."""
    return Reading(reading.replica, reading.time_s, {**reading.values, **values})
