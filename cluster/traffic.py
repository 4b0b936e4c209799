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
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.request import DEFAULT_WORKLOAD

# ====================================================================================================
# Monotone counters of target replicas, as they travel through Serve's custom metrics, and what is new in each reading.
#
# Enters: in a replica, its totals by workload; at the policy, `Reading`s of all replicas, each a flat mapping of numbers.
# Leaves: in the replica, such a mapping (`CounterExport`); at the policy, `NewCounts`: arrivals, ended requests and
# tokens since the last reading, the acceptance reports, and a line for each replica whose reading makes no sense. Never
# knows: rates, capacity, Ray.
#
# Counters are exported and never ratios, because Serve averages over time what a replica exports. A counter that falls
# means that its replica restarted: everything it shows is then new, as with a replica that began to serve within the last
# minute. One that was there before the policy gives its arrivals from its second reading on: its past may be hours long.

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
    rows = [[by_depth.get(what, {}).get(depth, 0) for depth in range(1, deepest + 1)] for what in _BY_DEPTH]
    try:
        return Counts.from_wire(rows)
    except ValueError as error:
        raise ReadingError(f"{name!r}: {error}") from None


@dataclass
class NewCounts:
    """What some readings bring, by workload (`counts` in `totals` is left empty; acceptance is in `reports`).

    `nonsense`: by replica, what is wrong; `restarted`: replicas whose counters fell."""

    totals: dict[str, WorkloadTotals] = field(default_factory=dict)
    reports: list[TargetReport] = field(default_factory=list)
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
        workloads = {name: WorkloadCounts(counts=total.counts) for name, total in totals.items()}
        new.reports.append(TargetReport(reading.replica, head=head, workloads=workloads))
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


# ====================================================================================================
# Arrivals and lengths of requests over time: what is asked for, whether or not it can be served.
#
# Enters: arrivals, ended requests and tokens by workload as they are counted, and the number of queued requests. Leaves:
# rate and mean lengths of each workload, expected growth, and how long nothing came. Never knows: replicas, acceptance.
# No clock of its own.
#
# Demand is arrivals times expected length, because output tokens are seen only once they are served, and an overloaded
# service gives out what it can; what waits in front of the replicas has arrived too, though none of them has counted it.
# The rate of a workload is that of the longest window whose older part agrees with the newer one, and that with a newer
# one still: a rate that stands still is known well, and one that moves is known at once.

WINDOWS_S = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
BIN_S = 8.0
"""Readings that come within this are counted together. They come every 10 s from each replica."""

MAX_DEVIATION = 3.0
"""Standard errors that a rate may lie from an older one and count as the same. Arrivals are taken as Poisson."""

TREND_WINDOW_S = 300.0
TREND_EVIDENCE = 3.0
"""Standard errors between two windows from which on the rate counts as rising or falling."""

LENGTH_HALF_LIFE = 200
"""Ended requests of a workload after which one counts half in its mean lengths."""

MAX_LENGTHS = 64
"""Workloads whose lengths are remembered after their last arrival left the windows."""

POOLED_REQUESTS = 10
"""Requests that the mean of all workloads is worth to one of them."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One workload. Lengths are means in tokens, None while no request of any workload has ended; `window_s`: the last
    seconds that the rate is the mean of."""

    requests_per_s: float
    window_s: float
    output_tokens: float | None
    prompt_tokens: float | None


@dataclass(slots=True)
class _Bin:
    """Arrivals counted from `begun_s` to `time_s`, and how many requests were queued then."""

    begun_s: float
    time_s: float
    arrived: dict[str, int]
    queued: float


@dataclass(slots=True)
class _Lengths:
    ended: float = 0.0
    output_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, totals: WorkloadTotals) -> None:
        kept = 0.5 ** (totals.num_ended / LENGTH_HALF_LIFE)
        self.ended = self.ended * kept + totals.num_ended
        self.output_tokens = self.output_tokens * kept + totals.num_output_tokens
        self.prompt_tokens = self.prompt_tokens * kept + totals.num_prompt_tokens


@dataclass
class TrafficHistory:
    """The last minutes of traffic; not thread-safe. `now_s` never goes back (`shift_clock`)."""

    _bins: deque[_Bin] = field(default_factory=deque)
    _lengths: dict[str, _Lengths] = field(default_factory=dict)
    _started_s: float | None = None
    _busy_s: float | None = None

    def add(self, new: Mapping[str, WorkloadTotals], queued_requests: float, now_s: float) -> None:
        """Take in what was counted since the last call. After a gap without counts the history begins anew."""
        if self._bins and now_s - self._bins[-1].time_s > MAX_GAP_S:
            self._bins.clear()
            self._started_s = None
        if self._started_s is None:
            self._started_s = self._busy_s = now_s
        arrived = {name: one.num_arrived for name, one in new.items()}
        if self._bins and now_s - self._bins[-1].begun_s < BIN_S:
            last = self._bins[-1]
            last.time_s, last.queued = now_s, queued_requests
            for name, num in arrived.items():
                last.arrived[name] = last.arrived.get(name, 0) + num
        else:
            self._bins.append(_Bin(now_s, now_s, arrived, queued_requests))
        for name, one in new.items():
            if one.num_ended:
                self._lengths.setdefault(name, _Lengths()).add(one)
        if len(self._lengths) > MAX_LENGTHS:
            present = self._names()
            self._lengths = {name: one for name, one in self._lengths.items() if name in present}
        if queued_requests > 0 or any(one.num_arrived for one in new.values()):
            self._busy_s = now_s
        while self._bins and now_s - self._bins[0].time_s > WINDOWS_S[-1] + 2 * BIN_S:
            self._bins.popleft()

    def note_busy(self, now_s: float) -> None:
        """A request waits for the first replica: none has counted it, and until one serves nothing can."""
        self._busy_s = now_s

    def history_s(self, now_s: float) -> float:
        """For how long arrivals have been counted."""
        return 0.0 if self._started_s is None else now_s - self._started_s

    def idle_s(self, now_s: float) -> float:
        """For how long nothing has arrived."""
        return 0.0 if self._busy_s is None else now_s - self._busy_s

    def rates(self, now_s: float) -> dict[str, Rate]:
        """Each workload that had an arrival in the longest window."""
        pooled = _Lengths()
        for one in self._lengths.values():
            pooled.ended += one.ended
            pooled.output_tokens += one.output_tokens
            pooled.prompt_tokens += one.prompt_tokens
        names = {name for one in self._bins for name, num in one.arrived.items() if num}
        return {
            name: Rate(*self._rate(name, now_s), *_means(self._lengths.get(name, _Lengths()), pooled))
            for name in sorted(names)
        }

    def trend(self, now_s: float) -> float:
        """Growth of the rate per second of time, as a share of it; 0 unless it moves beyond doubt."""
        if self.history_s(now_s) < 2 * TREND_WINDOW_S:
            return 0.0
        late, early = (
            sum(self._arrived(name, now_s, start_s, start_s + TREND_WINDOW_S) for name in self._names())
            for start_s in (0.0, TREND_WINDOW_S)
        )
        if abs(late - early) < TREND_EVIDENCE * math.sqrt(late + early) or not late:
            return 0.0
        return (late - early) / max(late, early) / TREND_WINDOW_S

    def shift_clock(self, by_s: float) -> None:
        """The caller's clock was set: every time remembered moves along."""
        for one in self._bins:
            one.begun_s += by_s
            one.time_s += by_s
        self._started_s = None if self._started_s is None else self._started_s + by_s
        self._busy_s = None if self._busy_s is None else self._busy_s + by_s

    def _names(self) -> set[str]:
        return {name for one in self._bins for name in one.arrived}

    def _rate(self, name: str, now_s: float) -> tuple[float, float]:
        """The rate, and the window that it is the mean of."""
        window_s = WINDOWS_S[0]
        recent = self._arrived(name, now_s, 0.0, window_s)
        for longer_s in WINDOWS_S[1:]:
            past_s = min(longer_s, self.history_s(now_s)) - window_s
            if past_s <= 0:
                break
            past = self._arrived(name, now_s, window_s, longer_s)
            # Under equal rates a count of n has variance n; the past says what n to expect, with one more so that
            # an empty past is no certainty.
            expected = (past + recent + 1.0) / (past_s + window_s)
            error = math.sqrt(expected / window_s + expected / past_s)
            if abs(recent / window_s - past / past_s) > MAX_DEVIATION * error:
                break
            recent, window_s = recent + past, window_s + past_s
        known_s = max(1.0, min(window_s, self.history_s(now_s)))
        return recent / known_s, known_s

    def _arrived(self, name: str, now_s: float, newest_s: float, oldest_s: float) -> float:
        """Arrivals between `newest_s` and `oldest_s` ago: those that replicas counted, and a share of what the queue in
        front of them grew by."""
        inside = [one for one in self._bins if newest_s <= now_s - one.time_s < oldest_s]
        counted = sum(one.arrived.get(name, 0) for one in inside)
        total = sum(sum(one.arrived.values()) for one in inside)
        if not total:
            return float(counted)
        before = next((one for one in reversed(self._bins) if now_s - one.time_s >= oldest_s), inside[0])
        return counted * max(0.0, 1.0 + (inside[-1].queued - before.queued) / total)


def _means(own: _Lengths, pooled: _Lengths) -> tuple[float | None, float | None]:
    if pooled.ended <= 0:
        return None, None
    weight = own.ended + POOLED_REQUESTS
    share = POOLED_REQUESTS / pooled.ended
    output_tokens = (own.output_tokens + share * pooled.output_tokens) / weight
    prompt_tokens = (own.prompt_tokens + share * pooled.prompt_tokens) / weight
    return max(1.0, output_tokens), max(0.0, prompt_tokens)
