"""Acceptance of each workload by depth: what is believed, how surely, and from which steps.

Enters: the cumulative counts of every target replica, as often as somebody asks for them. Leaves: the survival S_i of a
workload with intervals, or a random draw of it (Thompson sampling), and a snapshot. Never knows: clocks, step times, K.

Model (policy-and-apis, D1 and D3). A step that verifies k drafts and accepts j of them is a trial of the conditional
acceptances a_1 .. a_min(j + 1, k): k = j censors the next one. With a P-EAGLE head the draft at depth i does not depend
on k, so trials at any K inform the same a_i, and each gets a Beta posterior of its own; S_i is the product a_1 .. a_i.
Its prior is worth `prior_steps` trials around the parent's mean; the parent of a workload is all other workloads
together, and the parent's own prior a published curve. Older steps count less: half after `half_life_steps` further
steps of the same workload. A pause forgets nothing, and no clock is read.

State is shared by being computed again: counts at the replicas only grow, each ingress replica keeps a book of its own
from the same reports, and books that poll at different times agree closely, because a step's weight depends on how many
came after it and not on how they were cut into reports. Nobody owns the estimate. A lost ingress replica takes nothing
along (its successor reads the same counts, or a snapshot); of a lost target replica everything reported stays. A book
that begins late sees each replica's past as one average instead of weighted by age, and agrees with older books after
some half-lives.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from cluster.request import DEFAULT_WORKLOAD
from cluster.settings import Section
from cluster.transfer import SPLIT_SHARE, gains, lengths

# ====================================================================================================
# Quantiles of Beta variables and of products of independent ones, with numpy alone.
#
# Enters: arrays of Beta parameters by depth. Leaves: means and quantiles by depth. Never knows what the variables are.

Array = NDArray[np.float64]

NUM_GRID_POINTS = 513
GRID_HALF_WIDTH = 8.0  # standard deviations
_GRID_G = np.linspace(-GRID_HALF_WIDTH, GRID_HALF_WIDTH, NUM_GRID_POINTS)
_GRID_G.setflags(write=False)


def quantiles(alpha_D: Array, beta_D: Array, probabilities: Sequence[float]) -> list[Array]:
    """For each probability, the values that the Beta(alpha, beta) stay below with it. Parameters > 0.

    Integrates the density of y = logit(x), x^alpha (1 - x)^beta, which is smooth with exponential tails whatever the
    parameters are; its mode is log(alpha / beta), and its variance trigamma(alpha) + trigamma(beta) is less than the
    sum of 1/p + 1/p^2 over both parameters p. The error is below 1e-3, and below 1e-2 for parameters under 0.5.
    """
    scale_D = np.sqrt(1 / alpha_D + 1 / alpha_D**2 + 1 / beta_D + 1 / beta_D**2)
    mode_D = np.log(alpha_D / beta_D)
    logit_DG = mode_D[:, None] + scale_D[:, None] * _GRID_G
    # log(1 + e^y), written so that a large |y| cannot overflow.
    softplus_DG = np.maximum(logit_DG, 0) + np.log1p(np.exp(-np.abs(logit_DG)))
    density_DG = alpha_D[:, None] * logit_DG - (alpha_D + beta_D)[:, None] * softplus_DG
    density_DG = np.exp(density_DG - density_DG.max(axis=1, keepdims=True))
    # Trapezoids: half of each interval's two ends.
    mass_DG = np.zeros_like(density_DG)
    np.cumsum(density_DG[:, 1:] + density_DG[:, :-1], axis=1, out=mass_DG[:, 1:])
    rows = [np.interp(np.multiply(probabilities, mass_G[-1]), mass_G, _GRID_G) for mass_G in mass_DG]
    position_PD = np.array(rows, float).reshape(len(alpha_D), len(probabilities)).T
    return list(1 / (1 + np.exp(-(mode_D + scale_D * position_PD))))


def product_interval(alpha_D: Array, beta_D: Array, level: float) -> tuple[Array, Array, Array]:
    """Mean, low and high end of x_1 x_2 ... x_d for each d, with independent x_i ~ Beta(alpha_i, beta_i).

    Mean and variance are exact; the interval of probability `level`, as much left out on either side, is that of the
    Beta with the same mean and variance. That is the product's own distribution when alpha_i + beta_i = alpha_{i-1},
    which is how trials thin out with depth when every step plays the same K.
    """
    total_D = alpha_D + beta_D
    mean_D = np.asarray(np.cumprod(alpha_D / total_D), np.float64)
    # 1 + variance / mean^2 of a product is the product of the factors' own, and beta / (alpha (total + 1)) is a Beta's.
    relative_variance_D = np.expm1(np.cumsum(np.log1p(beta_D / (alpha_D * (total_D + 1)))))
    matched_total_D = np.maximum((1 - mean_D) / (mean_D * relative_variance_D) - 1, 1e-3)
    ends = [(1 - level) / 2, (1 + level) / 2]
    low_D, high_D = quantiles(mean_D * matched_total_D, (1 - mean_D) * matched_total_D, ends)
    return mean_D, low_D, high_D


# ====================================================================================================
# From the cumulative counts of many target replicas to what is new in each report.
#
# Enters: `Report`s, each what one replica (a source) has counted since its start, with the head it drafts with. Leaves:
# new `Counts` by workload, each step once, and word of a head that takes over. Never knows: estimates, clocks, Ray.

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


# ====================================================================================================
# The form of an acceptance snapshot: plain values that JSON can hold, checked field by field when read.
#
# Enters: a ledger, or a snapshot from a file. Leaves: records, or a ValueError that names the field. Never knows: files.

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TOLERANCE = 1e-6  # relative; sums of weighted steps are rounded


class SavedTally(Section):
    """Weighted steps of a workload: in all, and trials and successes of each a_i."""

    workload: str
    steps: Weight
    reached: list[Weight]
    accepted: list[Weight]


class SavedCounts(Section):
    """A replica's last reading of a workload."""

    workload: str
    drafted: list[int]
    reached: list[int]
    accepted: list[int]


class SavedSource(Section):
    """A replica's last report."""

    source: str
    head: str
    totals: list[SavedCounts]


class SavedBook(Section):
    """Everything an `AcceptanceBook` has learned. Lists of workloads and sources begin with the least recent."""

    format: Literal[1]
    max_draft_tokens: int
    head: str | None
    retired_heads: list[str]
    workloads: list[SavedTally]
    evicted: SavedTally
    sources: list[SavedSource]


def save_sources(ledger: Ledger) -> list[SavedSource]:
    """The last reports that a ledger remembers."""
    return [
        SavedSource(
            source=source,
            head=state.head,
            totals=[
                SavedCounts(
                    workload=name,
                    drafted=list(counts.drafted),
                    reached=list(counts.reached),
                    accepted=list(counts.accepted),
                )
                for name, counts in state.totals.items()
            ],
        )
        for source, state in ledger.sources.items()
    ]


def load_book(snapshot: Any, max_draft_tokens: int, max_source_workloads: int) -> tuple[SavedBook, Ledger]:
    """Read a snapshot, and its ledger.

    Raises:
        ValueError: naming the field, or that the snapshot is of a head with another K_max.
    """
    try:
        saved = SavedBook.model_validate(snapshot)
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(f"{_path(*detail['loc'])}: {detail['msg']}, not {detail.get('input')!r:.80}") from error
    if saved.max_draft_tokens != max_draft_tokens:
        raise ValueError(
            f"snapshot.max_draft_tokens is {saved.max_draft_tokens}, but the head served drafts {max_draft_tokens}: "
            "the snapshot is of another head, start without it"
        )
    _check_tally(saved.evicted, max_draft_tokens, "evicted")
    for index, tally in enumerate(saved.workloads):
        _check_tally(tally, max_draft_tokens, "workloads", index)
    _check_distinct([one.workload for one in saved.workloads], "workloads")
    return saved, _loaded_ledger(saved, max_source_workloads)


def _loaded_ledger(saved: SavedBook, max_source_workloads: int) -> Ledger:
    ledger = Ledger(max_source_workloads)
    ledger.head = saved.head
    ledger.retired.extend(saved.retired_heads)
    _check_distinct([one.source for one in saved.sources], "sources")
    for index, source in list(enumerate(saved.sources))[-MAX_NUM_SOURCES:]:
        _check_distinct([one.workload for one in source.totals], "sources", index, "totals")
        totals: dict[str, Counts] = {}
        for place, one in enumerate(source.totals):
            try:
                totals[one.workload] = Counts(tuple(one.drafted), tuple(one.reached), tuple(one.accepted))
            except ValueError as error:
                raise ValueError(f"{_path('sources', index, 'totals', place)}: {error}") from error
        ledger.sources[source.source] = SourceState(source.head, totals)
    return ledger


def _check_tally(tally: SavedTally, max_draft_tokens: int, *place: str | int) -> None:
    limits = [tally.steps] * max_draft_tokens
    for name in ("reached", "accepted"):
        weights = getattr(tally, name)
        if len(weights) != max_draft_tokens:
            raise ValueError(
                f"{_path(*place, name)} has {len(weights)} depths, but max_draft_tokens is {max_draft_tokens}"
            )
        for index, (weight, limit) in enumerate(zip(weights, limits, strict=True)):
            if weight > limit * (1 + TOLERANCE):
                raise ValueError(
                    f"{_path(*place, name, index)} is {weight}, more than the {limit} trials it is part of"
                )
        limits = weights


def _check_distinct(names: list[str], *place: str | int) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{_path(*place, index)}: {name!r} is there twice")


def _path(*place: str | int) -> str:
    return "snapshot" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)


# ====================================================================================================
# Verification steps of one workload, weighted by age.
#
# Enters: `Counts` of later and later steps. Leaves: sums in which a step weighs half as much for every half-life of steps
# that came after it.


@dataclass(slots=True)
class Tally:
    """Weighted steps: in all, and trials and successes of each conditional acceptance a_i (index i - 1)."""

    steps: float
    reached_D: Array
    accepted_D: Array

    @classmethod
    def zeros(cls, max_draft_tokens: int) -> "Tally":
        """No steps."""
        return cls(0.0, np.zeros(max_draft_tokens), np.zeros(max_draft_tokens))

    @classmethod
    def of_counts(cls, counts: Counts, max_draft_tokens: int) -> "Tally":
        """Steps that weigh 1 each. Depths beyond K_max are left out: they tell nothing about the others."""
        tally = cls.zeros(max_draft_tokens)
        tally.steps = float(counts.num_steps)
        depth = min(max_draft_tokens, len(counts.drafted))
        tally.reached_D[:depth] = counts.reached[:depth]
        tally.accepted_D[:depth] = counts.accepted[:depth]
        return tally

    @classmethod
    def sum(cls, tallies: Sequence["Tally"]) -> "Tally":
        """Several workloads together, each step with the weight it has."""
        return cls(
            sum(one.steps for one in tallies),
            np.sum([one.reached_D for one in tallies], axis=0),
            np.sum([one.accepted_D for one in tallies], axis=0),
        )

    @property
    def depth(self) -> float:
        """Mean K at which these steps were verified, 0 without any.

        A depth is reached where the one before was accepted and K goes that far, so reached / accepted before is the
        share of K that goes on. K is taken not to depend on what is accepted.
        """
        share = found = 1.0 if self.reached_D.size and self.reached_D[0] > 0 else 0.0
        for reached, accepted_before in zip(self.reached_D[1:], self.accepted_D, strict=False):
            if accepted_before <= 0:
                break
            share *= min(1.0, float(reached / accepted_before))
            found += share
        return found

    @classmethod
    def restored(cls, saved: SavedTally) -> "Tally":
        """Inverse of `saved`."""
        return cls(saved.steps, np.array(saved.reached, float), np.array(saved.accepted, float))

    def saved(self, workload: str) -> SavedTally:
        """As a plain record."""
        reached, accepted = self.reached_D.tolist(), self.accepted_D.tolist()
        return SavedTally(workload=workload, steps=self.steps, reached=reached, accepted=accepted)

    def add(self, later: "Tally", half_life_steps: float) -> None:
        """Add later steps, and let each step weigh 2^(-steps since / half-life).

        The n later steps are taken as evenly mixed: each weighs their mean, (1 - 2^(-n/h)) / (n (1 - 2^(-1/h))), so
        that it does not matter how steps are cut into additions.
        """
        if later.steps <= 0:
            return
        kept = 0.5 ** (later.steps / half_life_steps)
        rate = math.log(2) / half_life_steps
        weight = math.expm1(-rate * later.steps) / (math.expm1(-rate) * later.steps)
        self.steps = kept * self.steps + weight * later.steps
        self.reached_D = kept * self.reached_D + weight * later.reached_D
        self.accepted_D = kept * self.accepted_D + weight * later.accepted_D


# ====================================================================================================
# Acceptance of each workload by depth: what is believed, how surely, and from which steps.
#
# Enters: the cumulative counts of every target replica, as often as somebody asks for them. Leaves: the survival S_i of a
# workload with intervals, or a random draw of it (Thompson sampling), and a snapshot. Never knows: clocks, step times, K.
#
# Model (policy-and-apis, D1 and D3). A step that verifies k drafts and accepts j of them is a trial of the conditional
# acceptances a_1 .. a_min(j + 1, k): k = j censors the next one. With a P-EAGLE head the draft at depth i does not depend
# on k, so trials at any K inform the same a_i, and each gets a Beta posterior of its own; S_i is the product a_1 .. a_i.
# Its prior is worth `prior_steps` trials around the parent's mean; the parent of a workload is all other workloads
# together, and the parent's own prior a published curve. Older steps count less: half after `half_life_steps` further
# steps of the same workload. A pause forgets nothing, and no clock is read.
#
# State is shared by being computed again: counts at the replicas only grow, each ingress replica keeps a book of its own
# from the same reports, and books that poll at different times agree closely, because a step's weight depends on how many
# came after it and not on how they were cut into reports. Nobody owns the estimate. A lost ingress replica takes nothing
# along (its successor reads the same counts, or a snapshot); of a lost target replica everything reported stays. A book
# that begins late sees each replica's past as one average instead of weighted by age, and agrees with older books after
# some half-lives.

__all__ = ["AcceptanceBook", "Counts", "Report", "Survival"]

PUBLISHED_SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""By depth, in the range published for P-EAGLE heads; depths beyond go on with the last conditional acceptance."""

INTERVAL_LEVEL = 0.9
MAX_SOURCE_WORKLOADS = 4  # names told apart in one source's reports, as a multiple of max_workloads
LEAST_CONDITIONAL, MOST_CONDITIONAL = 0.01, 0.99


@dataclass(frozen=True, slots=True)
class Survival:
    """S_1 .. S_K_max of a workload: posterior mean, and the ends of the central 90 % interval of each.

    `num_steps`: how many independent steps the evidence of the workload itself is worth, after forgetting and divided
    by the design effect. 0 where only the prior speaks. `depth`: mean K at which the evidence was verified, the
    workload's own where it has any, else that of all traffic; 0 without any. S_i is the survival at that K: at another,
    drafts start elsewhere (`cluster.transfer`, whose `split_share` it is taken with).
    """

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: float
    depth: float = 0.0
    split_share: float = SPLIT_SHARE

    def acceptance_length(self, k: int) -> float:
        """Expected AL at K = `k`. Raises ValueError outside 0..K_max."""
        if not 0 <= k <= len(self.mean):
            raise ValueError(f"k must be from 0 to {len(self.mean)}, not {k}")
        return lengths(self.mean, round(self.depth), self.split_share)[k]

    def gains(self) -> tuple[float, ...]:
        """What each further draft is expected to add to AL, by which to choose K."""
        return gains(self.mean, round(self.depth), self.split_share)


class AcceptanceBook:
    """The posteriors of all workloads, in one process; not thread-safe.

    Args:
        max_draft_tokens: K_max. Counts of depths beyond it are left out.
        half_life_steps: verification steps of a workload after which a step of it counts half.
        prior_steps: trials at each depth that the parent's mean is worth to a workload, and the curve to the parent.
        max_workloads: told apart; the one without steps for longest makes room, and lives on in the parent.
        prior: S_1 .. S_K_max before any step, default a published curve. Conditional acceptances are kept within
            0.01..0.99, so that data can move them.
        design_effect: steps worth one independent step, because steps of one request resemble each other; also for
            trials, the prior's included. In results/2026-11-21-traces-smollm2-135m.npz the variance of a_i between
            requests is 3.6 times the binomial one (median over tasks and depths, quartiles 2.4 and 4.8). There a
            request that accepts more at one depth also does at the next, so intervals of deep S_i are still too narrow.
        split_share: of `cluster.transfer`, 0..1; 0 for an engine with synthetic acceptance.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        *,
        half_life_steps: float = 4000,
        prior_steps: float = 40,
        max_workloads: int = 64,
        prior: Sequence[float] | None = None,
        design_effect: float = 4.0,
        split_share: float = SPLIT_SHARE,
    ) -> None:
        if max_draft_tokens < 0 or max_workloads < 1:
            raise ValueError(
                f"max_draft_tokens must be at least 0 and max_workloads at least 1, not {max_draft_tokens} and "
                f"{max_workloads}"
            )
        for name, value, least in (
            ("half_life_steps", half_life_steps, 1),
            ("prior_steps", prior_steps, 1),
            ("design_effect", design_effect, 1),
        ):
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} must be a number of at least {least}, not {value}")
        if not 0 <= split_share <= 1:
            raise ValueError(f"split_share must be from 0 to 1, not {split_share}")
        self._split_share = split_share
        self._max_draft_tokens, self._max_workloads = max_draft_tokens, max_workloads
        self._half_life_steps, self._prior_steps = half_life_steps, prior_steps
        self._design_effect = design_effect
        self._prior_D = _conditionals(prior, max_draft_tokens)
        self._ledger = Ledger(MAX_SOURCE_WORKLOADS * max_workloads)
        self._forget()

    @property
    def head(self) -> str | None:
        """The head whose acceptance this is, None before the first report."""
        return self._ledger.head

    def workloads(self) -> tuple[str, ...]:
        """Workloads told apart, the one whose steps are the latest first."""
        return tuple(reversed(self._tallies))

    def absorb(self, source: str, head: str, totals: Mapping[str, Counts]) -> None:
        """Take what the target replica `source` has counted since it started, drafting with `head`.

        Only steps not seen before count; a replica that restarted begins anew. A head that takes over from another
        voids everything (`cluster.acceptance.Ledger` has the rules).
        """
        self.absorb_all([Report(source, head, totals)])

    def absorb_all(self, reports: Iterable[Report]) -> None:
        """Take the reports of one round of polling. Better than one by one: no replica's steps then seem the later."""
        new = self._ledger.take(reports)
        if new.reset:
            self._forget()
        self._add(new.counts)

    def add(self, workload: str, counts: Counts) -> None:
        """Take further steps of a workload."""
        self._add({workload: counts})

    def survival(self, workload: str) -> Survival:
        """What is believed of a workload; of an unknown one, what the parent says."""
        return self._survival(workload if workload in self._tallies else None)

    def overall(self) -> Survival:
        """All workloads together."""
        everything = self._everything()
        alpha_D, beta_D = self._updated(self._prior_D, everything)
        return self._described(alpha_D, beta_D, everything.steps, everything.depth)

    def sample(self, workload: str, random: random.Random) -> tuple[float, ...]:
        """S_1 .. S_K_max drawn from the posterior, for Thompson sampling."""
        alpha_D, beta_D = self._posterior(workload if workload in self._tallies else None)
        survival, drawn = 1.0, []
        for alpha, beta in zip(alpha_D.tolist(), beta_D.tolist(), strict=True):
            survival *= random.betavariate(alpha, beta)
            drawn.append(survival)
        return tuple(drawn)

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as a value that JSON can hold. Settings are not in it."""
        tallies = [tally.saved(name) for name, tally in self._tallies.items()]
        return SavedBook(
            format=1,
            max_draft_tokens=self._max_draft_tokens,
            head=self._ledger.head,
            retired_heads=list(self._ledger.retired),
            workloads=tallies,
            evicted=self._evicted.saved(""),
            sources=save_sources(self._ledger),
        ).model_dump()

    def restore(self, snapshot: Any) -> None:
        """Replace everything learned by a snapshot's. Reports absorbed later go on from it.

        Raises:
            ValueError: naming the field of the snapshot; the book is then as it was.
        """
        saved, ledger = load_book(snapshot, self._max_draft_tokens, MAX_SOURCE_WORKLOADS * self._max_workloads)
        self._ledger = ledger
        self._forget()
        for one in saved.workloads:
            self._tallies[one.workload] = Tally.restored(one)
        self._evicted = Tally.restored(saved.evicted)
        self._make_room()
        self._changed()

    def _forget(self) -> None:
        self._tallies: OrderedDict[str, Tally] = OrderedDict()
        self._evicted = Tally.zeros(self._max_draft_tokens)
        self._changed()

    def _changed(self) -> None:
        self._total: Tally | None = None
        self._posteriors: dict[str | None, tuple[Array, Array]] = {}
        self._survivals: dict[str | None, Survival] = {}

    def _add(self, counts_by_workload: Mapping[str, Counts]) -> None:
        """Add steps, and keep the busiest where more workloads are active at a time than are told apart."""
        active = {name: counts for name, counts in counts_by_workload.items() if counts.num_steps}
        busiest_first = sorted(active, key=lambda name: active[name].num_steps, reverse=True)
        for name in busiest_first[self._max_workloads :]:
            self._evicted.add(Tally.of_counts(active[name], self._max_draft_tokens), self._half_life_steps)
        for name in reversed(busiest_first[: self._max_workloads]):
            tally = self._tallies.setdefault(name, Tally.zeros(self._max_draft_tokens))
            tally.add(Tally.of_counts(active[name], self._max_draft_tokens), self._half_life_steps)
            self._tallies.move_to_end(name)
        self._make_room()
        self._changed()

    def _make_room(self) -> None:
        while len(self._tallies) > self._max_workloads:
            self._evicted.add(self._tallies.popitem(last=False)[1], self._half_life_steps)

    def _everything(self) -> Tally:
        if self._total is None:
            self._total = Tally.sum([self._evicted, *self._tallies.values()])
        return self._total

    def _posterior(self, workload: str | None) -> tuple[Array, Array]:
        """Beta parameters of a_1 .. a_K_max. The parent leaves the workload itself out, or it would count twice."""
        if workload not in self._posteriors:
            own = Tally.zeros(self._max_draft_tokens) if workload is None else self._tallies[workload]
            everything = self._everything()
            reached_D = np.maximum(everything.reached_D - own.reached_D, 0.0)
            accepted_D = np.clip(everything.accepted_D - own.accepted_D, 0.0, reached_D)
            alpha_D, beta_D = self._updated(self._prior_D, Tally(0.0, reached_D, accepted_D))
            self._posteriors[workload] = self._updated(alpha_D / (alpha_D + beta_D), own)
        return self._posteriors[workload]

    def _updated(self, mean_D: Array, evidence: Tally) -> tuple[Array, Array]:
        """A prior of `prior_steps` trials around `mean_D` with the evidence, all of it over the design effect."""
        alpha_D = self._prior_steps * mean_D + evidence.accepted_D
        missed_D = np.maximum(evidence.reached_D - evidence.accepted_D, 0.0)
        beta_D = self._prior_steps * (1 - mean_D) + missed_D
        return alpha_D / self._design_effect, beta_D / self._design_effect

    def _survival(self, workload: str | None) -> Survival:
        if workload not in self._survivals:
            own = Tally.zeros(self._max_draft_tokens) if workload is None else self._tallies[workload]
            depth = (own if own.steps > 0 else self._everything()).depth
            self._survivals[workload] = self._described(*self._posterior(workload), own.steps, depth)
        return self._survivals[workload]

    def _described(self, alpha_D: Array, beta_D: Array, steps: float, depth: float) -> Survival:
        mean_D, low_D, high_D = product_interval(alpha_D, beta_D, INTERVAL_LEVEL)
        ends = tuple(mean_D.tolist()), tuple(low_D.tolist()), tuple(high_D.tolist())
        return Survival(*ends, steps / self._design_effect, depth, self._split_share)


def _conditionals(prior: Sequence[float] | None, max_draft_tokens: int) -> Array:
    """a_1 .. a_K_max of survival probabilities."""
    given = PUBLISHED_SURVIVAL if prior is None else tuple(prior)
    if prior is not None and len(given) != max_draft_tokens:
        raise ValueError(f"prior must have one survival for each depth 1..{max_draft_tokens}, not {len(given)}")
    before, found = 1.0, []
    for depth, survival in enumerate(given[:max_draft_tokens], start=1):
        if not 0 < survival <= before:
            raise ValueError(f"prior[{depth - 1}] must be above 0 and at most {before}, not {survival}")
        found.append(min(max(survival / before, LEAST_CONDITIONAL), MOST_CONDITIONAL))
        before = survival
    found += found[-1:] * (max_draft_tokens - len(found))
    return np.array(found, float)
