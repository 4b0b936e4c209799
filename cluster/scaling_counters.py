"""Monotone counters of target replicas, as they travel through Serve's custom metrics, and what is new in each reading.

Enters: in a replica, its totals by workload; at the policy, `Reading`s of all replicas, each a flat mapping of numbers.
Leaves: in the replica, such a mapping (`CounterExport`); at the policy, `NewCounts`: arrivals, ended requests and
tokens since the last reading, the acceptance reports, and a line for each replica whose reading makes no sense. Never
knows: rates, capacity, Ray.

Counters are exported and never ratios, because Serve averages over time what a replica exports. A counter that falls
means that its replica restarted: everything it shows is then new, as with a replica that began to serve within the last
minute. One that was there before the policy gives its arrivals from its second reading on: its past may be hours long.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.acceptance import Report
from cluster.counts import Counts
from cluster.drafting import DEFAULT_WORKLOAD

MAX_EXPORTED_WORKLOADS = 8
"""Told apart in one replica's export; each costs Serve 4 + 3 K_max time series a replica."""

MAX_GAP_S = 60.0
"""Arrivals since a reading longer ago are left out: when in between they came is not known."""

SPEED_MARGIN = 10.0
LARGEST_COUNT = 2**53  # the largest that a float, in which Serve carries metrics, holds exactly
SEPARATOR = "|"
HEAD = f"peagle{SEPARATOR}head"
_BY_WORKLOAD = ("arrived", "ended", "output_tokens", "prompt_tokens")
_BY_DEPTH = ("drafted", "reached", "accepted")


class ReadingError(ValueError):
    """A reading that no replica can have."""


@dataclass(frozen=True)
class WorkloadTotals:
    """One workload on one replica since it started. `num_ended` of the `num_arrived` requests are finished or aborted,
    and the tokens are theirs; `counts` has the steps of running requests too."""

    num_arrived: int = 0
    num_ended: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    counts: Counts = field(default_factory=Counts)

    def numbers(self) -> tuple[int, int, int, int]:
        return self.num_arrived, self.num_ended, self.num_output_tokens, self.num_prompt_tokens

    def plus(self, other: "WorkloadTotals", sign: int = 1) -> "WorkloadTotals":
        """Sum, or with `sign` -1 what came on top of `other`; ValueError where no steps can make the difference."""
        counts = self.counts + other.counts if sign > 0 else self.counts - other.counts
        arrived, ended, output, prompt = (a + sign * b for a, b in zip(self.numbers(), other.numbers(), strict=True))
        return WorkloadTotals(arrived, ended, output, prompt, counts)


@dataclass(frozen=True)
class Reading:
    """What one replica exported at `time_s` of its own clock. The clock tells readings apart and nothing else."""

    replica: str
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Limits:
    """What a replica can do at most: requests it holds at a time, and verification steps per second of all its
    requests together. A reading of twice the first, or of `SPEED_MARGIN` times the second (a table may come from a
    slower machine), is nonsense."""

    max_ongoing_requests: int
    max_steps_per_s: float


def head_number(head: str) -> int:
    """A head's digest as a number that survives a float; 0 where it is not known yet."""
    return 0 if not head else int.from_bytes(hashlib.sha256(head.encode()).digest()[:6], "big")


class CounterExport:
    """In a replica: its totals as flat, always growing numbers for `record_autoscaling_stats`.

    Workloads past the first `max_workloads` are summed under `default`. Totals of a workload that vanish or fall (the
    replica's own bookkeeping made room) are gone on with, so the export never falls while the replica lives.
    """

    def __init__(self, max_workloads: int = MAX_EXPORTED_WORKLOADS) -> None:
        self._max_workloads = max_workloads
        self._last: dict[str, WorkloadTotals] = {}
        self._sums: dict[str, WorkloadTotals] = {}

    def flat(self, head: str, totals: Mapping[str, WorkloadTotals]) -> dict[str, int]:
        """Names and numbers to export. `head`: the head's digest."""
        for name, total in totals.items():
            new = _since(total, self._last.get(name))
            place = name if name in self._sums or len(self._sums) < self._max_workloads else DEFAULT_WORKLOAD
            self._sums[place] = self._sums.get(place, WorkloadTotals()).plus(new)
        self._last = dict(totals)
        values = {HEAD: head_number(head)}
        for name, total in self._sums.items():
            numbers = zip(_BY_WORKLOAD, total.numbers(), strict=True)
            values |= {SEPARATOR.join(("peagle", what, name)): number for what, number in numbers}
            for what in _BY_DEPTH:
                by_depth = enumerate(getattr(total.counts, what), start=1)
                values |= {SEPARATOR.join(("peagle", what, name, str(depth))): count for depth, count in by_depth}
        return values


def parse(values: Mapping[str, float]) -> tuple[str, dict[str, WorkloadTotals]]:
    """The head's number, as text ("" where it is not known yet), and totals by workload of an export. Names of others
    are left alone.

    Raises ReadingError naming the entry.
    """
    numbers: dict[str, dict[str, int]] = {}
    depths: dict[str, dict[str, dict[int, int]]] = {}
    for name, value in values.items():
        what, workload, depth = _place(name)
        if what and depth:
            depths.setdefault(workload, {}).setdefault(what, {})[depth] = _count(name, value)
        elif what:
            numbers.setdefault(workload, {})[what] = _count(name, value)
    if HEAD not in values:
        raise ReadingError(f"{HEAD} is missing")
    if missing := [name for name, of in numbers.items() if len(of) < len(_BY_WORKLOAD)]:
        raise ReadingError(f"counters of {missing[0]!r} are missing: each of {', '.join(_BY_WORKLOAD)} is exported")
    totals = {}
    for name, of in numbers.items():
        arrived, ended, output, prompt = (of[what] for what in _BY_WORKLOAD)
        totals[name] = WorkloadTotals(arrived, ended, output, prompt, _counts(name, depths.get(name, {})))
    return str(_count(HEAD, values[HEAD]) or ""), totals


@functools.lru_cache(maxsize=4096)
def _place(name: str) -> tuple[str, str, int]:
    """Counter, workload and depth (0: not by depth) of a name; three blanks for a name that is no counter of ours."""
    kind, *parts = name.split(SEPARATOR)
    if kind != "peagle" or name == HEAD:
        return "", "", 0
    if len(parts) == 2 and parts[0] in _BY_WORKLOAD:
        return parts[0], parts[1], 0
    if len(parts) == 3 and parts[0] in _BY_DEPTH and parts[2].isdigit() and int(parts[2]) > 0:
        return parts[0], parts[1], int(parts[2])
    raise ReadingError(f"{name} is no counter that a replica exports")


def _count(name: str, value: float) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ReadingError(f"{name} is {value!r}, no number")
    if value != int(value) or not 0 <= value <= LARGEST_COUNT:
        raise ReadingError(f"{name} is {value!r}, no count")
    return int(value)


def _counts(name: str, by_depth: Mapping[str, Mapping[int, int]]) -> Counts:
    deepest = max((max(of) for of in by_depth.values()), default=0)
    if deepest > 64:
        raise ReadingError(f"{name!r} counts depth {deepest}: K_max is at most 64")
    rows = [tuple(by_depth.get(what, {}).get(depth, 0) for depth in range(1, deepest + 1)) for what in _BY_DEPTH]
    try:
        return Counts(*rows)
    except ValueError as error:
        raise ReadingError(f"{name!r}: {error}") from None


@dataclass
class NewCounts:
    """What some readings bring, by workload (`counts` in `totals` is left empty; acceptance is in `reports`).

    `nonsense`: by replica, what is wrong; `restarted`: replicas whose counters fell."""

    totals: dict[str, WorkloadTotals] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    nonsense: dict[str, str] = field(default_factory=dict)
    restarted: list[str] = field(default_factory=list)
    num_new: int = 0


@dataclass
class _Source:
    time_s: float
    totals: dict[str, WorkloadTotals]
    taken_s: float


class CounterBook:
    """At the policy: the last good reading of each replica. `now_s` is the caller's monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sources: dict[str, _Source] = {}
        self._nonsense: dict[str, tuple[float, str]] = {}
        self._begun_s: dict[str, float] | None = None

    def note_running(self, running: Iterable[str], now_s: float) -> None:
        """The replicas that serve now, told at every tick: those not among the first have begun since."""
        first_s = -math.inf if self._begun_s is None else now_s
        self._begun_s = {name: (self._begun_s or {}).get(name, first_s) for name in running}

    def absorb(self, readings: Iterable[Reading], now_s: float) -> NewCounts:
        """What is new; a reading seen before brings nothing, and a nonsensical one only its complaint."""
        new = NewCounts()
        for reading in readings:
            source = self._sources.get(reading.replica)
            known = self._nonsense.get(reading.replica)
            if (source is not None and source.time_s == reading.time_s) or (known and known[0] == reading.time_s):
                continue
            try:
                self._take(reading, source, now_s, new)
            except ReadingError as error:
                self._nonsense[reading.replica] = reading.time_s, str(error)
                new.nonsense[reading.replica] = str(error)
        return new

    def _take(self, reading: Reading, source: _Source | None, now_s: float, new: NewCounts) -> None:
        head, totals = parse(reading.values)
        has_restarted = source is not None and _fell(totals, source.totals)
        before = {} if source is None or has_restarted else source.totals
        added = {name: _added(total, before.get(name)) for name, total in totals.items()}
        num_steps = sum(steps for _, steps in added.values())
        self._check(totals, num_steps, None if source is None else now_s - source.taken_s)
        if has_restarted:
            new.restarted.append(reading.replica)
        since_s = source.taken_s if source is not None else (self._begun_s or {}).get(reading.replica, -math.inf)
        if now_s - since_s <= MAX_GAP_S:
            for name, (one, _) in added.items():
                new.totals[name] = new.totals[name].plus(one) if name in new.totals else one
        new.reports.append(Report(reading.replica, head, {name: total.counts for name, total in totals.items()}))
        new.num_new += 1
        self._sources[reading.replica] = _Source(reading.time_s, totals, now_s)
        self._nonsense.pop(reading.replica, None)

    def _check(self, totals: Mapping[str, WorkloadTotals], num_steps: int, elapsed_s: float | None) -> None:
        """Raises ReadingError for what no replica can have done."""
        ongoing = sum(total.num_arrived - total.num_ended for total in totals.values())
        most = 2 * self._limits.max_ongoing_requests
        if any(total.num_ended > total.num_arrived for total in totals.values()) or ongoing > most:
            raise ReadingError(f"{ongoing} requests at a time: a replica holds at most {most // 2}")
        if elapsed_s is None:
            return
        # A minute more than between the readings: what was counted may have waited to be sent.
        possible = SPEED_MARGIN * self._limits.max_steps_per_s * (max(0.0, elapsed_s) + 60.0)
        if num_steps > possible:
            raise ReadingError(f"{num_steps} steps in {elapsed_s:.0f} s: a replica makes at most {possible:.0f}")

    def usable(self, now_s: float, stale_after_s: float, running: Iterable[str]) -> tuple[int, int, int]:
        """Of the `running` replicas: how many report, how many report nonsense or fell silent, how many never spoke.
        Replicas that run no longer are forgotten."""
        names = set(running)
        self._sources = {name: one for name, one in self._sources.items() if name in names}
        self._nonsense = {name: one for name, one in self._nonsense.items() if name in names}
        fresh = {name for name, one in self._sources.items() if abs(now_s - one.taken_s) <= stale_after_s}
        unusable = (self._nonsense.keys() | self._sources.keys()) - (fresh - self._nonsense.keys())
        return len(fresh - unusable), len(unusable), len(names - fresh - unusable)

    def shift_clock(self, by_s: float) -> None:
        """The caller's clock was set: every time remembered moves along."""
        for source in self._sources.values():
            source.taken_s += by_s
        self._begun_s = None if self._begun_s is None else {name: at_s + by_s for name, at_s in self._begun_s.items()}


def _fell(totals: Mapping[str, WorkloadTotals], earlier: Mapping[str, WorkloadTotals]) -> bool:
    """Whether any counter is below what it was. A workload that is missing has fallen too."""
    for name, before in earlier.items():
        now = totals.get(name, WorkloadTotals())
        if any(a < b for a, b in zip(now.numbers(), before.numbers(), strict=True)):
            return True
        if now.counts.num_steps < before.counts.num_steps:
            return True
    return False


def _added(total: WorkloadTotals, earlier: WorkloadTotals | None) -> tuple[WorkloadTotals, int]:
    """What came on top of `earlier`, without steps by depth, and how many steps; all of it where a counter fell."""
    numbers, num_steps = total.numbers(), total.counts.num_steps
    if earlier is not None and all(a >= b for a, b in zip(numbers, earlier.numbers(), strict=True)):
        arrived, ended, output, prompt = (a - b for a, b in zip(numbers, earlier.numbers(), strict=True))
        numbers = arrived, ended, output, prompt
        if num_steps >= earlier.counts.num_steps:
            num_steps -= earlier.counts.num_steps
    return WorkloadTotals(*numbers), num_steps


def _since(total: WorkloadTotals, earlier: WorkloadTotals | None) -> WorkloadTotals:
    """What came on top of `earlier`; all of `total` where a counter fell."""
    if earlier is None:
        return total
    if any(a < b for a, b in zip(total.numbers(), earlier.numbers(), strict=True)):
        return total
    try:
        return total.plus(earlier, -1)
    except ValueError:  # the steps began anew, as with another head
        return replace(replace(total, counts=Counts()).plus(replace(earlier, counts=Counts()), -1), counts=total.counts)
