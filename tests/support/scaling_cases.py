"""Inputs for the tests of autoscaling: step latency of a formula, and reports of replicas that serve as told."""

from collections.abc import Sequence

from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.settings import AutoscalingSettings
from cluster.step_latency import StepLatency
from tests.support.step_tables import latency_of

GOOD, BAD = (0.8, 0.64, 0.51), (0.2, 0.04, 0.01)
OUTPUT_TOKENS, PROMPT_TOKENS = 200, 100
LATENCY = latency_of(0.02, request_s=0.001, row_s=0.0005, prompt_row_s=0.0005, num_steps=1000)
"""20 ms, 0.5 ms a row and 1 ms a request."""


def settings(**changes: object) -> AutoscalingSettings:
    raw: dict[str, object] = {"policy": "acceptance", "target": {"min": 1, "max": 20}}
    return AutoscalingSettings.model_validate({**raw, **changes})


def steps(num: int, rates: Sequence[float]) -> Counts:
    """Counts of `num` steps at K_max that come out as expected."""
    accepted = [round(num * value) for value in rates]
    return Counts([num] * len(rates), [num, *accepted[:-1]], accepted)


class FakeReplica:
    """Counts of one replica of a test's choosing, reported as a real one reports its own."""

    def __init__(self, name: str, latency: StepLatency | None = LATENCY, started_s: float = 0.0) -> None:
        self.name, self._latency, self._started_s = name, latency, started_s
        self.num_queued = 0
        self.workloads: dict[str, WorkloadCounts] = {}

    def serve(self, workload: str, num_requests: int, rates: Sequence[float] = GOOD) -> None:
        """Requests that arrive and end."""
        per_request = round(OUTPUT_TOKENS / (1 + sum(rates)))
        num_tokens = num_requests * OUTPUT_TOKENS, num_requests * PROMPT_TOKENS
        counts = steps(num_requests * per_request, rates)
        self.count(workload, WorkloadCounts(num_requests, num_requests, 0, *num_tokens, counts))

    def count(self, workload: str, more: WorkloadCounts) -> None:
        self.workloads[workload] = self.workloads.get(workload, WorkloadCounts()) + more

    def start(self, workload: str, num_requests: int) -> None:
        """Requests that arrive and go on."""
        self.count(workload, WorkloadCounts(num_requests))

    def report(self, now_s: float, head: str = "head") -> TargetReport:
        return TargetReport(
            self.name,
            head=head,
            workloads=self.workloads,
            step_latency=self._latency,
            num_queued=self.num_queued,
            uptime_s=now_s - self._started_s,
        )
