"""What targets count: drafts by depth, requests and tokens of each workload. One record from the scheduler to K.

Enters: verified steps in a target replica. Leaves: `TargetReport`s, each what one replica has counted since it started,
and, out of the reports of many replicas, what is new in each (`Ledger`). The choice of K and autoscaling read the same
report; autoscaling gets it as flat numbers (`MetricsExport`, `from_metrics`). Never knows: estimates, clocks, Ray.

Counters only grow while a replica lives, and they travel as they are, never as differences or ratios: a report that is
lost or read twice then loses or adds nothing.
"""

import hashlib
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from cluster.request import DEFAULT_WORKLOAD
from cluster.step_time import StepCosts

MAX_DEPTH = 64
"""The deepest draft that a report may count."""


@dataclass(slots=True)
class Counts:
    """Verification steps by depth; index i - 1 holds depth i.

    So accepted / reached estimates the conditional acceptance a_i, and accepted / drafted the survival S_i, also where
    K differs between steps: a step with fewer than i drafts is in no count of depth i.

    Attributes:
        drafted: steps that verified at least i drafts.
        reached: of those, steps whose first i - 1 drafts were accepted: the trials of a_i.
        accepted: of those, steps whose first i drafts were accepted.
    """

    drafted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add_step(self, num_verified: int, num_accepted: int) -> None:
        """Count one step of one request in place. A step without drafts counts nowhere."""
        missing = [0] * (num_verified - len(self.drafted))
        for row, num_depths in (
            (self.drafted, num_verified),
            (self.reached, min(num_verified, num_accepted + 1)),
            (self.accepted, num_accepted),
        ):
            row += missing
            for index in range(num_depths):
                row[index] += 1

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

    def copy(self) -> "Counts":
        return Counts(*self.to_wire())

    def __add__(self, other: "Counts") -> "Counts":
        rows = zip(self.to_wire(), other.to_wire(), strict=True)
        return Counts(*([a + b for a, b in zip_longest(*row, fillvalue=0)] for row in rows))

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came on top of `earlier`, a previous reading of the same counts; ValueError when it is none."""
        rows = zip(self.to_wire(), earlier.to_wire(), strict=True)
        found = Counts(*([a - b for a, b in zip_longest(*row, fillvalue=0)] for row in rows))
        found.check()
        num_depths = sum(count > 0 for count in found.drafted)
        return Counts(*(row[:num_depths] for row in found.to_wire()))

    def check(self) -> None:
        """Raises ValueError naming the depth where no steps can have such counts."""
        if not len(self.drafted) == len(self.reached) == len(self.accepted) <= MAX_DEPTH:
            raise ValueError(
                f"drafted, reached and accepted must have one length of at most {MAX_DEPTH}: {self!r:.200}"
            )
        drafted_before, accepted_before = math.inf, math.inf
        rows = zip(self.drafted, self.reached, self.accepted, strict=True)
        for depth, (drafted, reached, accepted) in enumerate(rows, start=1):
            is_possible = 0 <= accepted <= reached <= drafted <= drafted_before and reached <= accepted_before
            if not is_possible or (depth == 1 and reached != drafted):
                raise ValueError(
                    f"drafted {drafted}, reached {reached}, accepted {accepted} at depth {depth} cannot be: a draft is "
                    "accepted only if reached, and reached only if drafted with the draft before it accepted"
                )
            drafted_before, accepted_before = drafted, accepted

    def to_wire(self) -> list[list[int]]:
        """[drafted, reached, accepted] as JSON can hold it."""
        return [self.drafted[:], self.reached[:], self.accepted[:]]

    @classmethod
    def from_wire(cls, value: Any) -> "Counts":
        """Inverse of `to_wire`. Raises ValueError for anything else, and for counts that no steps can have."""
        rows = value if isinstance(value, list | tuple) else ()
        if len(rows) != 3 or not all(isinstance(row, list | tuple) and _are_whole(row) for row in rows):
            raise ValueError(f"counts must be three lists of whole numbers, not {value!r:.80}")
        counts = cls(*(list(row) for row in rows))
        counts.check()
        return counts


def _are_whole(values: Iterable[Any]) -> bool:
    return all(type(value) is int for value in values)


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

    def numbers(self) -> tuple[int, int, int, int, int]:
        """Everything but `counts`, in the order of `NUMBERS`."""
        return self.num_started, self.num_finished, self.num_aborted, self.num_output_tokens, self.num_prompt_tokens

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], counts: Counts) -> "WorkloadCounts":
        """Inverse of `numbers`."""
        started, finished, aborted, output_tokens, prompt_tokens = numbers
        return cls(started, finished, aborted, output_tokens, prompt_tokens, counts)

    def copy(self) -> "WorkloadCounts":
        return self.of_numbers(self.numbers(), self.counts.copy())

    def __add__(self, other: "WorkloadCounts") -> "WorkloadCounts":
        numbers = [mine + theirs for mine, theirs in zip(self.numbers(), other.numbers(), strict=True)]
        return self.of_numbers(numbers, self.counts + other.counts)

    def __sub__(self, earlier: "WorkloadCounts") -> "WorkloadCounts":
        """What came on top of `earlier`; ValueError where it is no previous reading of the same counts."""
        numbers = [mine - theirs for mine, theirs in zip(self.numbers(), earlier.numbers(), strict=True)]
        if min(numbers) < 0:
            raise ValueError(f"{self} does not come after {earlier}")
        return self.of_numbers(numbers, self.counts - earlier.counts)

    def to_wire(self) -> list[Any]:
        """The numbers and the counts as JSON can hold them."""
        return [*self.numbers(), self.counts.to_wire()]

    @classmethod
    def from_wire(cls, value: Any) -> "WorkloadCounts":
        """Inverse of `to_wire`. Raises ValueError for anything else."""
        length = len(NUMBERS)
        numbers = value[:length] if isinstance(value, list | tuple) and len(value) == length + 1 else ()
        if not numbers or not _are_whole(numbers) or min(numbers) < 0:
            raise ValueError(f"a workload's counts must be {', '.join(NUMBERS)} and counts by depth, not {value!r:.80}")
        return cls.of_numbers(numbers, Counts.from_wire(value[length]))


NUMBERS = ("started", "finished", "aborted", "output_tokens", "prompt_tokens")


@dataclass(frozen=True)
class TargetReport:
    """What one target replica has counted since it started, and what it is doing now.

    Attributes:
        replica: its name, unique among replicas.
        head: digest of the head that drafts; "" without one, or while the replica does not know it yet.
        heads: digests by workload where these have heads of their own.
        workloads: cumulative counts by workload. One that is missing has ended its counts.
        context_tokens: mean context of the running requests, 0 where unknown.
        step_costs: what the scheduler has learned of step times; None before the first step.
        links: to remote drafters (`deployments.replicas.link_reports`).
        num_output_tokens: of all sequences, running ones included.
        weights: digest of the target's, where heads learn from it; else "".
    """

    replica: str
    model: str = ""
    head: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    workloads: Mapping[str, WorkloadCounts] = field(default_factory=dict)
    context_tokens: float = 0.0
    step_costs: StepCosts | None = None
    links: tuple[Mapping[str, Any], ...] = ()
    num_output_tokens: int = 0
    weights: str = ""

    def head_of(self, workload: str) -> str:
        """Digest of the head that drafts for a workload."""
        return self.heads.get(workload, self.head)

    @property
    def num_running(self) -> int:
        """Requests in the engine, waiting ones included."""
        return sum(counts.num_running for counts in self.workloads.values())


# ---- differences between reports


@dataclass(slots=True)
class News:
    """What some reports bring that was not counted before.

    Attributes:
        workloads: by workload, whatever head drafted.
        by_head: steps by head and workload. Steps between two reports of which only the second names the head are
            left out, because whose they were is not known.
        restarted: replicas whose counters fell.
        head, heads: that of the ledger after these reports.
    """

    workloads: dict[str, WorkloadCounts] = field(default_factory=dict)
    by_head: dict[str, dict[str, Counts]] = field(default_factory=dict)
    restarted: list[str] = field(default_factory=list)
    head: str = ""
    heads: dict[str, str] = field(default_factory=dict)


class Ledger:
    """Remembers the last report of each replica, so that everything is counted once.

    A replica whose counters fell has restarted, and everything it reports is new. Steps count for the head that the
    replica named: while a fleet changes heads, both are counted side by side. `head` and `heads` (by workload, where
    these have their own) are those that most replicas of the newest round drafted with, "" until one is known.
    """

    MAX_REPLICAS = 256

    def __init__(self) -> None:
        self.head = ""
        self.heads: dict[str, str] = {}
        self._last: OrderedDict[str, TargetReport] = OrderedDict()  # least recently reported first

    def difference(self, report: TargetReport) -> tuple[dict[str, WorkloadCounts], bool]:
        """What `report` adds by workload, and whether its replica has restarted. Changes nothing."""
        last = self._last.get(report.replica)
        if last is None:
            return {name: counts.copy() for name, counts in report.workloads.items()}, False
        shared = report.workloads.keys() & last.workloads.keys()
        # Single counters may begin anew, when a replica has forgotten a workload and hears of it again.
        has_restarted = _activity(report, shared) < _activity(last, shared)
        before = {} if has_restarted else last.workloads
        return {name: _since(counts, before.get(name)) for name, counts in report.workloads.items()}, has_restarted

    def take(self, reports: Iterable[TargetReport]) -> News:
        """Take in a round of reports, at most one of each replica."""
        news, votes = News(), Counter[str]()
        reports = list(reports)
        for report in reports:
            added, has_restarted = self.difference(report)
            last = None if has_restarted else self._last.get(report.replica)
            if has_restarted:
                news.restarted.append(report.replica)
            for name, counts in added.items():
                known = news.workloads.get(name)
                news.workloads[name] = counts if known is None else known + counts
                head = report.head_of(name)
                if head and counts.counts.num_steps and (last is None or last.head_of(name) == head):
                    of_head = news.by_head.setdefault(head, {})
                    of_head[name] = of_head.get(name, Counts()) + counts.counts
            if report.head:
                votes[report.head] += 1
            self._remember(report)
        if votes:
            # The last that was named wins a tie: the head that a fleet changes to.
            self.head = max(reversed(votes), key=votes.__getitem__)
            self.heads = dict(next(report.heads for report in reports if report.head == self.head))
        news.head, news.heads = self.head, dict(self.heads)
        return news

    def to_wire(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        replicas = [
            {
                "replica": report.replica,
                "head": report.head,
                "heads": dict(report.heads),
                "workloads": {name: counts.to_wire() for name, counts in report.workloads.items()},
            }
            for report in self._last.values()
        ]
        return {"head": self.head, "heads": dict(self.heads), "replicas": replicas}

    @classmethod
    def from_wire(cls, value: Any) -> "Ledger":
        """Inverse of `to_wire`. Raises ValueError naming the field."""
        ledger = cls()
        try:
            ledger.head, ledger.heads = str(value["head"]), dict(value["heads"])
            for row in value["replicas"]:
                workloads = {str(name): WorkloadCounts.from_wire(counts) for name, counts in row["workloads"].items()}
                ledger._remember(TargetReport(str(row["replica"]), "", str(row["head"]), dict(row["heads"]), workloads))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the ledger's replicas cannot be read: {error!r}") from error
        return ledger

    def _remember(self, report: TargetReport) -> None:
        workloads = {name: counts.copy() for name, counts in report.workloads.items()}
        self._last.pop(report.replica, None)
        self._last[report.replica] = TargetReport(report.replica, "", report.head, dict(report.heads), workloads)
        while len(self._last) > self.MAX_REPLICAS:
            self._last.popitem(last=False)


def _activity(report: TargetReport, names: Iterable[str]) -> int:
    return sum(report.workloads[name].num_started + report.workloads[name].counts.num_steps for name in names)


def _since(counts: WorkloadCounts, earlier: WorkloadCounts | None) -> WorkloadCounts:
    """What came on top of `earlier`; all of it where a counter fell, because it began anew."""
    if earlier is None:
        return counts.copy()
    try:
        return counts - earlier
    except ValueError:
        return counts.copy()


# ---- the report as flat numbers, in which Serve's custom metrics carry it to the autoscaling policy

MAX_EXPORTED_WORKLOADS = 8
"""Told apart in one replica's metrics; each costs Serve 5 + 3 K_max time series a replica."""

LARGEST_COUNT = 2**53
"""The largest whole number up to which a float, in which Serve carries metrics, holds all."""

SEPARATOR = "|"
PREFIX = "peagle"
HEAD_METRIC = f"{PREFIX}{SEPARATOR}head"
COUNT, COST = "count", "cost"


class MetricsExport:
    """In a replica: its reports as flat numbers that never fall while the replica lives.

    Workloads past the first `max_workloads` are summed under `default`, also when the replica forgets some of them.
    """

    def __init__(self, max_workloads: int = MAX_EXPORTED_WORKLOADS) -> None:
        self._max_workloads = max_workloads
        self._ledger = Ledger()
        self._sums: dict[str, WorkloadCounts] = {}

    def to_metrics(self, report: TargetReport) -> dict[str, float]:
        """Names and numbers for `record_autoscaling_stats`."""
        for name, counts in self._ledger.take([report]).workloads.items():
            is_apart = name in self._sums or len(self._sums) < self._max_workloads
            place = name if is_apart else DEFAULT_WORKLOAD
            self._sums[place] = self._sums.get(place, WorkloadCounts()) + counts
        values: dict[str, float] = {HEAD_METRIC: head_number(report.head)}
        for name, counts in self._sums.items():
            row = [*counts.numbers(), *itertools.chain(*counts.counts.to_wire())]
            values |= {_metric(COUNT, name, str(place)): number for place, number in enumerate(row)}
        own_heads = {name: head for name, head in report.heads.items() if name in self._sums}
        values |= {_metric("head", name): head_number(head) for name, head in own_heads.items()}
        costs = {} if report.step_costs is None else report.step_costs.to_wire()
        return values | {_metric(COST, name): number for name, number in costs.items()}


def from_metrics(replica: str, values: Mapping[str, float]) -> TargetReport:
    """The report that `MetricsExport.to_metrics` made; its heads are numbers as text. Names of others are left alone.

    Raises ValueError naming the entry.
    """
    if HEAD_METRIC not in values:
        raise ValueError(f"{HEAD_METRIC} is missing")
    rows: dict[str, dict[int, int]] = {}
    heads: dict[str, str] = {}
    costs: dict[str, float] = {}
    for name, value in values.items():
        prefix, *parts = name.split(SEPARATOR)
        match parts:
            case _ if prefix != PREFIX:
                continue
            case [field_name, workload, place] if field_name == COUNT and place.isdecimal():
                rows.setdefault(workload, {})[int(place)] = _whole(name, value)
            case ["head", *workload]:
                heads["".join(workload)] = str(_whole(name, value) or "")
            case [field_name, of_cost] if field_name == COST:
                costs[of_cost] = value
            case _:
                raise ValueError(f"{name} is no counter that a replica exports")
    workloads = {}
    for workload, row in rows.items():
        num_depths, rest = divmod(len(row) - len(NUMBERS), 3)
        if sorted(row) != list(range(len(row))) or num_depths < 0 or rest:
            raise ValueError(f"counters of {workload!r} are missing: there are {len(row)} of them")
        flat = [row[place] for place in range(len(row))]
        by_depth = [flat[start : start + num_depths] for start in range(len(NUMBERS), len(flat), num_depths or 1)]
        try:
            counts = Counts.from_wire(by_depth or [[], [], []])
        except ValueError as error:
            raise ValueError(f"{workload!r}: {error}") from None
        workloads[workload] = WorkloadCounts.of_numbers(flat[: len(NUMBERS)], counts)
    step_costs = StepCosts.from_wire(costs) if costs else None
    return TargetReport(replica, "", heads.pop(""), heads, workloads, step_costs=step_costs)


def head_number(head: str) -> int:
    """A head's digest as a number that survives a float; 0 where it is not known."""
    return 0 if not head else int.from_bytes(hashlib.sha256(head.encode()).digest()[:6], "big")


def _metric(*parts: str) -> str:
    return SEPARATOR.join((PREFIX, *parts))


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, no number")
    if value != int(value) or not 0 <= value <= LARGEST_COUNT:
        raise ValueError(f"{name} is {value!r}, no count")
    return int(value)
