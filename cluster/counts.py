"""From the cumulative counts of many target replicas to what is new in each report.

Enters: `Report`s, each what one replica (a source) has counted since its start, with the head it drafts with. Leaves:
new `Counts` by workload, each step once, and word of a head that takes over. Never knows: estimates, clocks, Ray.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.drafting import DEFAULT_WORKLOAD

MAX_NUM_SOURCES = 256
MAX_NUM_RETIRED_HEADS = 16
HEAD_PATIENCE_REPORTS = 3
"""Reports of one source with an earlier head, none with the current one between, until the earlier head is current."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Verification steps by depth; index i - 1 holds depth i, and missing depths count as 0.

    Attributes:
        drafted: steps that verified at least i drafts.
        reached: of those, steps whose first i - 1 drafts were accepted: the trials of the conditional acceptance a_i.
        accepted: of those, steps whose first i drafts were accepted.

    Raises:
        ValueError: not integers, or no steps can have such counts.
    """

    drafted: tuple[int, ...] = ()
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("drafted", "reached", "accepted"):
            counts = getattr(self, name)
            if not isinstance(counts, tuple) or any(type(count) is not int for count in counts):
                raise ValueError(f"{name} must be a tuple of integers, not {counts!r:.80}")
            if len(counts) != len(self.drafted):
                raise ValueError(f"{name} has {len(counts)} depths, but drafted has {len(self.drafted)}")
        before = None
        for depth, row in enumerate(zip(self.drafted, self.reached, self.accepted, strict=True), start=1):
            drafted, reached, accepted = row
            possible = 0 <= accepted <= reached <= drafted
            possible &= reached == drafted if before is None else drafted <= before[0] and reached <= before[2]
            if not possible:
                raise ValueError(
                    f"drafted {drafted}, reached {reached}, accepted {accepted} at depth {depth} cannot be: a draft is "
                    "accepted only if reached, and reached only if drafted with the draft before it accepted"
                )
            before = row

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[int, int]]) -> "Counts":
        """Counts of `steps`, each (drafts verified, drafts accepted of them)."""
        steps = list(steps)
        depths = range(1, max((verified for verified, _ in steps), default=0) + 1)
        return cls(
            tuple(sum(verified >= depth for verified, _ in steps) for depth in depths),
            tuple(sum(verified >= depth and accepted >= depth - 1 for verified, accepted in steps) for depth in depths),
            tuple(sum(accepted >= depth for _, accepted in steps) for depth in depths),
        )

    @property
    def num_steps(self) -> int:
        """Steps that verified at least one draft."""
        return self.drafted[0] if self.drafted else 0

    @property
    def max_depth(self) -> int:
        """The deepest depth that any step verified, 0 without steps."""
        return sum(count > 0 for count in self.drafted)

    def __add__(self, other: "Counts") -> "Counts":
        return self._combined(other, 1)

    def __sub__(self, earlier: "Counts") -> "Counts":
        """What came on top of `earlier`, a previous reading of the same counts; ValueError when it is none."""
        return self._combined(earlier, -1)

    def _combined(self, other: "Counts", sign: int) -> "Counts":
        length = max(len(self.drafted), len(other.drafted))

        def combined(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            mine, theirs = (one + (0,) * (length - len(one)) for one in (mine, theirs))
            return tuple(a + sign * b for a, b in zip(mine, theirs, strict=True))

        return Counts(
            combined(self.drafted, other.drafted),
            combined(self.reached, other.reached),
            combined(self.accepted, other.accepted),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What one target replica (`source`) has counted for each workload since it started, drafting with `head`.

    A replica that swaps its head starts its counts anew. Both names are compared for equality only. A `head` of "" is
    not known yet: the replica has just started and has not heard of its drafters.
    """

    source: str
    head: str
    totals: Mapping[str, Counts]


@dataclass(slots=True)
class SourceState:
    """The head a source reported last, and the last reading of each of its workloads. A source that leaves one out has
    ended its counts; if it comes back they begin anew."""

    head: str
    totals: dict[str, Counts]


@dataclass(slots=True)
class New:
    """What some reports bring. `reset`: another head took over, and what was counted before is void."""

    reset: bool = False
    counts: dict[str, Counts] = field(default_factory=dict)


class Ledger:
    """Remembers each source's last report, so that every step is counted once.

    A source that vanishes and comes back goes on from where it was. The least recently heard of more than
    `MAX_NUM_SOURCES` is forgotten. Of one source, `max_workloads` names are told apart, those it reports first and of
    these the busiest; the rest are counted as `default`.
    """

    def __init__(self, max_workloads: int) -> None:
        self.head: str | None = None
        self.retired: deque[str] = deque(maxlen=MAX_NUM_RETIRED_HEADS)
        self.sources: OrderedDict[str, SourceState] = OrderedDict()
        self._max_workloads = max_workloads
        self._num_strays: dict[str, int] = {}

    def take(self, reports: Iterable[Report]) -> New:
        """What is new in `reports`, in their order. Reports of an earlier head than the current bring nothing, nor do
        those of an unknown one: a target that starts must not end what the others have learned."""
        new = New()
        for report in filter(lambda one: one.head, reports):
            last = self.sources.pop(report.source, SourceState(report.head, {}))
            totals = self._bounded(report.totals, last)
            if report.head == self.head:
                self._num_strays.clear()
            elif self._takes_over(report, last):
                new.reset |= self.head is not None
                new.counts.clear()
                self._switch_to(report.head)
            has_restarted = _num_steps(totals, totals) < _num_steps(last.totals, totals)
            # Counters that went on over a swap of the head: whose the steps since the last report are is not known.
            is_mixed = report.head != last.head and not has_restarted
            before = {} if has_restarted else last.totals
            self.sources[report.source] = SourceState(report.head, totals)
            if report.head == self.head and not is_mixed:
                for workload, counts in totals.items():
                    _add(new.counts, workload, _since(counts, before.get(workload)))
            while len(self.sources) > MAX_NUM_SOURCES:
                self._num_strays.pop(self.sources.popitem(last=False)[0], None)
        return new

    def _takes_over(self, report: Report, last: SourceState) -> bool:
        """Whether the report's head, not the current one, becomes it.

        While replicas are replaced one by one, both heads report for a while, and the estimates must not be reset at
        each report: a head seen for the first time takes over, and an earlier one only when a source goes back to it,
        or when nobody reports the current head any more.
        """
        if report.head not in self.retired or last.head == self.head:
            return True
        self._num_strays[report.source] = self._num_strays.get(report.source, 0) + 1
        return self._num_strays[report.source] >= HEAD_PATIENCE_REPORTS

    def _switch_to(self, head: str) -> None:
        if head in self.retired:
            self.retired.remove(head)
        if self.head is not None:
            self.retired.append(self.head)
        self.head = head
        self._num_strays.clear()

    def _bounded(self, totals: Mapping[str, Counts], last: SourceState) -> dict[str, Counts]:
        """`totals` with the names past the limit summed under `default`. A name stays on its side of the limit from
        one report to the next: one that changed sides would have its past counted twice."""
        names = set(last.totals)
        bounded: dict[str, Counts] = {}
        for name, counts in sorted(totals.items(), key=lambda item: item[1].num_steps, reverse=True):
            if name not in names and len(names) >= self._max_workloads:
                name = DEFAULT_WORKLOAD
            names.add(name)
            _add(bounded, name, counts)
        return bounded


def _num_steps(totals: Mapping[str, Counts], names: Iterable[str]) -> int:
    return sum(totals[name].num_steps for name in names if name in totals)


def _add(sums: dict[str, Counts], name: str, counts: Counts) -> None:
    sums[name] = sums[name] + counts if name in sums else counts


def _since(counts: Counts, earlier: Counts | None) -> Counts:
    """What came on top of `earlier`; all of `counts` where a counter went down, because it began anew."""
    if earlier is None:
        return counts
    if counts == earlier:
        return Counts()
    try:
        return counts - earlier
    except ValueError:
        return counts
