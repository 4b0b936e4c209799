"""What targets count: drafts by position, requests and tokens of each workload. One record from the scheduler to K.

Enters: verified steps in a target replica. Leaves: `TargetReport`s, each what one replica has counted since it started,
and, out of the reports of many replicas, what is new in each (`DeltaTracker`). The choice of K, autoscaling, heads and
metrics read the same report. Never knows: estimates, clocks, Ray.

Counters only grow while a replica lives, and they travel as they are, never as differences or ratios: a report that is
lost or read twice then loses or adds nothing.
"""

import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from cluster.request import TRIAL_SUFFIX
from cluster.step_latency import StepLatency

MAX_GAP_S = 60.0
"""Counts of a replica that has not reported for longer are not recent: the times of what they count are not known."""


@dataclass(slots=True)
class Counts:
    """Verification steps by draft position; index i - 1 holds position i.

    So accepted / reached estimates the conditional acceptance a_i, and accepted / drafted the cumulative rate S_i, also
    where K differs between steps: a step with fewer than i drafts is in no count of position i.

    Attributes:
        drafted: steps that verified at least i drafts.
        reached: of those, steps whose first i - 1 drafts were accepted: the trials of a_i.
        accepted: of those, steps whose first i drafts were accepted.
    """

    drafted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add_step(self, num_verified: int, num_accepted: int, number: int = 1) -> None:
        """Count one step of one request, or a number of equal ones, in place. A step without drafts counts nowhere."""
        missing = [0] * (num_verified - len(self.drafted))
        for row, num_positions in (
            (self.drafted, num_verified),
            (self.reached, min(num_verified, num_accepted + 1)),
            (self.accepted, num_accepted),
        ):
            row += missing
            for index in range(num_positions):
                row[index] += number

    @property
    def num_steps(self) -> int:
        """Steps that verified at least one draft. Prefill and steps at K = 0 are none."""
        return self.drafted[0] if self.drafted else 0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified. What the drafter proposed beyond K is not counted."""
        return sum(self.drafted)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted, also those that a stop condition cut from the end of the output afterwards."""
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """AL, tokens per verification step: 1 + accepted / steps. 1.0 without steps (K = 0)."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def rows(self) -> tuple[list[int], list[int], list[int]]:
        return self.drafted, self.reached, self.accepted

    def copy(self) -> "Counts":
        return Counts(*(row[:] for row in self.rows))

    def __add__(self, other: "Counts") -> "Counts":
        rows = zip(self.rows, other.rows, strict=True)
        return Counts(*([a + b for a, b in zip_longest(*row, fillvalue=0)] for row in rows))

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came on top of `earlier`, a previous reading of the same counts; ValueError when it is none."""
        rows = zip(self.rows, earlier.rows, strict=True)
        found = Counts(*([a - b for a, b in zip_longest(*row, fillvalue=0)] for row in rows))
        if any(count < 0 for row in found.rows for count in row):
            raise ValueError(f"{earlier} is no earlier reading of {self}")
        num_positions = sum(count > 0 for count in found.drafted)
        return Counts(*(row[:num_positions] for row in found.rows))


@dataclass(slots=True)
class WorkloadCounts:
    """One workload on one replica since the replica started, one sequence of a request (n > 1) being one request.

    Tokens are those of the requests that have ended, finished or aborted; `counts` has the steps of running ones too.
    """

    num_started: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    counts: Counts = field(default_factory=Counts)

    @property
    def num_ended(self) -> int:
        return self.num_finished + self.num_aborted

    @property
    def num_running(self) -> int:
        """Requests in the engine, waiting ones included."""
        return self.num_started - self.num_ended

    def copy(self) -> "WorkloadCounts":
        return replace(self, counts=self.counts.copy())

    @property
    def values(self) -> list[Any]:
        """Values of all fields, `counts` last."""
        return [getattr(self, one.name) for one in fields(self)]

    def __add__(self, other: "WorkloadCounts") -> "WorkloadCounts":
        return WorkloadCounts(*map(operator.add, self.values, other.values))

    def __sub__(self, earlier: "WorkloadCounts") -> "WorkloadCounts":
        """What came on top of `earlier`; ValueError where it is no previous reading of the same counts."""
        found = WorkloadCounts(*map(operator.sub, self.values, earlier.values))
        if min(found.values[:-1]) < 0:
            raise ValueError(f"{earlier} is no earlier reading of {self}")
        return found


@dataclass(frozen=True)
class TargetReport:
    """What one target replica has counted since it started, and what it is doing now.

    Attributes:
        replica: its name, unique among replicas.
        head: digest of the head that drafts; "" without one, or while the replica does not know it yet.
        trial_head: digest of the head that drafts for requests on trial; that of all others where there are none.
        workloads: cumulative counts by workload. One that is missing has ended its counts.
        step_latency: what the scheduler has learned of step times; None before the first step.
        links: to remote drafters (`deployments.replicas.link_reports`).
        num_output_tokens: of all sequences, running ones included.
        weights: of the target: their digest, where heads learn from it, else `model.source`.
        num_queued: sequences that wait in the replica in front of its engine.
        spent: tokens charged to callers, by name.
        uptime_s: seconds for which the replica has counted.
        node: name of its machine.
        devices: of its engine's workers (`peagle.vllm.device`).
    """

    replica: str
    head: str = ""
    trial_head: str = ""
    workloads: Mapping[str, WorkloadCounts] = field(default_factory=dict)
    step_latency: StepLatency | None = None
    links: tuple[Mapping[str, Any], ...] = ()
    num_output_tokens: int = 0
    weights: str = ""
    num_queued: int = 0
    spent: Mapping[str, int] = field(default_factory=dict)
    uptime_s: float = 0.0
    node: str = ""
    devices: tuple[Mapping[str, Any], ...] = ()

    def find_head(self, workload: str) -> str:
        """Digest of the head that drafts for a workload."""
        return self.trial_head if workload.endswith(TRIAL_SUFFIX) else self.head

    @property
    def num_running(self) -> int:
        """Requests in the engine, waiting ones included."""
        return sum(counts.num_running for counts in self.workloads.values())


# ---- differences between reports


@dataclass(slots=True)
class CounterDeltas:
    """What some reports bring that was not counted before.

    Attributes:
        workloads: by workload, whatever head drafted, what came in at most `MAX_GAP_S`: when older counts came is not
            known.
        by_head: steps by head and workload, at least one each. Steps between two reports of which only the second names
            the head are left out, because whose they were is not known.
        tokens, seconds: by replica, new output tokens and the time they took, where it is at most `MAX_GAP_S`.
        head, trial_head: digests of the heads that most of the replicas drafted with; "" where none named one.
    """

    workloads: dict[str, WorkloadCounts] = field(default_factory=dict)
    by_head: dict[str, dict[str, Counts]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    head: str = ""
    trial_head: str = ""


class DeltaTracker:
    """Remembers the last report of each replica, so that everything is counted once.

    A replica whose counters fell has restarted, and everything it reports is new. Steps count for the head that the
    replica named: while a fleet changes heads, both are counted side by side.
    """

    MAX_REPLICAS = 256

    def __init__(self) -> None:
        self._last: OrderedDict[str, TargetReport] = OrderedDict()

    @property
    def last_reports(self) -> list[TargetReport]:
        """The least recent first."""
        return list(self._last.values())

    def update(self, reports: Iterable[TargetReport]) -> CounterDeltas:
        """Take in a round of reports, at most one of each replica."""
        deltas, votes = CounterDeltas(), Counter[str]()
        reports = list(reports)
        for report in reports:
            at_start = TargetReport(report.replica, report.head, report.trial_head)
            last = self._last.get(report.replica, at_start)
            # Single counters may begin anew, when a replica has forgotten a workload and hears of it again.
            shared = report.workloads.keys() & last.workloads.keys()
            if _activity(report, shared) < _activity(last, shared):
                last = at_start
            seconds = report.uptime_s - last.uptime_s
            is_recent = seconds <= MAX_GAP_S
            if is_recent:
                deltas.tokens[report.replica] = max(0, report.num_output_tokens - last.num_output_tokens)
                deltas.seconds[report.replica] = seconds
            for name, total in report.workloads.items():
                counts = counts_since(total, last.workloads.get(name))
                if is_recent:
                    deltas.workloads[name] = deltas.workloads.get(name, WorkloadCounts()) + counts
                head = report.find_head(name)
                if head and counts.counts.num_steps and last.find_head(name) == head:
                    of_head = deltas.by_head.setdefault(head, {})
                    of_head[name] = of_head.get(name, Counts()) + counts.counts
            if report.head:
                votes[report.head] += 1
            self.remember(report)
        if votes:
            # The last that was named wins a tie: the head that a fleet changes to.
            deltas.head = max(reversed(votes), key=votes.__getitem__)
            deltas.trial_head = next(report.trial_head for report in reports if report.head == deltas.head)
        return deltas

    def remember(self, report: TargetReport) -> None:
        """Count only what comes on top of this report of a replica."""
        workloads = {name: counts.copy() for name, counts in report.workloads.items()}
        self._last.pop(report.replica, None)
        self._last[report.replica] = TargetReport(
            report.replica,
            head=report.head,
            trial_head=report.trial_head,
            workloads=workloads,
            num_output_tokens=report.num_output_tokens,
            uptime_s=report.uptime_s,
        )
        while len(self._last) > self.MAX_REPLICAS:
            self._last.popitem(last=False)


def _activity(report: TargetReport, names: Iterable[str]) -> int:
    return sum(report.workloads[name].num_started + report.workloads[name].counts.num_steps for name in names)


def counts_since(counts: WorkloadCounts, earlier: WorkloadCounts | None) -> WorkloadCounts:
    """What came on top of `earlier`; all of it where a counter fell, because it began anew."""
    try:
        return counts - (earlier or WorkloadCounts())
    except ValueError:
        return counts.copy()
