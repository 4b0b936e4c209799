"""The head manager: which head drafts, and what becomes of a candidate.

    propose -> loading -> running (trial) -> promoted (watched, then kept)
                  |            |                    |
               refused      dropped            rolled back

A trial is an A/B comparison: the candidate drafts for a share of the requests. A promoted head takes the place of the
configured one. It is watched, as one that a `user_config` brings: it is compared with the head before it, and rolled
back when it is worse.

Enters: counts of all targets, once a second, and reports of the drafter replicas. Leaves: `DesiredHeads` for the
drafters, `HeadRouting` for the targets, and events for the log. Never knows: Ray, files' contents, the engine.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from cluster.counts import CounterDeltas, Counts
from cluster.request import MAX_NUM_WORKLOADS, base_workload

CANDIDATE = "candidate-"
"""Begins the names of proposed heads."""

# ---- heads: where they are to draft, and where they do


@dataclass(frozen=True)
class HeadRef:
    """A head. name: as drafters find it (`drafter.head`, or a candidate in the cache directory). digest: of its files;
    "" while no drafter has loaded it."""

    name: str
    digest: str = ""


@dataclass(frozen=True)
class DesiredHeads:
    """The desired state of every drafter replica. replacement: drafts in the place of the configured head (of settings
    or `user_config`) with the digest `replaced`; so a `user_config` with another head always wins. candidate: the last
    one, in a spare slot."""

    replaced: str = ""
    replacement: HeadRef | None = None
    candidate: HeadRef | None = None


@dataclass(frozen=True)
class DrafterReport:
    """One drafter replica. address, key: where targets connect to it, and with what. heads: the live one, and the
    candidate if it is loaded; targets name one by its index. refused: why that of the last `user_config` does not
    draft, "" when it does. counters: since its start. configured: the head of settings or `user_config`. desired: the
    state that it was given; problems: why some heads of it do not draft, by name; missing: those whose files are not on
    its node."""

    replica: str
    address: str
    heads: tuple[HeadRef, ...]
    refused: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    configured: HeadRef | None = None
    desired: DesiredHeads = field(default_factory=DesiredHeads)
    problems: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadRouting:
    """Which requests draft with a candidate, for the targets. trial: its digest, "" without one. It drafts for `share`
    of the requests, whose workload then has `TRIAL_SUFFIX`."""

    trial: str = ""
    share: float = 0.0


# ---- proposals, and what becomes of them

ChangeState = Literal["loading", "running", "promoted", "dropped", "rolled back", "refused"]
"""`loading`: drafters read the candidate. `running`: it drafts for a share of the requests. `promoted`: for all of
them. `dropped`: it was not better, or an operator ended the trial. `rolled back`: it was promoted, then worse than
the head before, or an operator said so. `refused`: it cannot be loaded."""


@dataclass(frozen=True)
class HeadProposal:
    """A candidate, for `Router.propose`. source: its directory, which the router reads unless there are `files` (name
    -> content of config.json and the safetensors). parent: digest of the head that it was trained from. provenance:
    shown in `GET /drafting`."""

    source: str
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    parent: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)


INTERNAL = ("is_compared", "evidence", "control", "previous")
"""Fields of a `HeadChange` that nobody is shown."""


@dataclass
class HeadChange:
    """One head in the place of another: a candidate (name, parent and provenance as proposed), or the head of a new
    `user_config`.

    Attributes:
        head, against: digests of the new head and of the one before, "" until the new one is loaded.
        gain, low, high: AL relative to `against`, minus 1, with its interval; None without enough evidence.
        num_steps: verification steps of the new head that were compared.
        begun_s, changed_s: Unix times of the proposal and of the state.
        is_compared: a trial that runs, or a promoted head that is watched.
        evidence, control: since the comparison began, by workload: of the new head and of the one before.
        previous: of a promoted head, the one that drafted before it and drafts again after a roll-back.
    """

    name: str
    parent: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    state: ChangeState = "loading"
    reason: str = ""
    head: str = ""
    against: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    num_steps: int = 0
    begun_s: float = 0.0
    changed_s: float = 0.0
    is_compared: bool = False
    evidence: dict[str, "HeadEvidence"] = field(default_factory=dict)
    control: dict[str, "HeadEvidence"] = field(default_factory=dict)
    previous: HeadRef | None = None

    @property
    def ref(self) -> HeadRef:
        return HeadRef(self.name, self.head)

    @property
    def is_over(self) -> bool:
        """Whether another candidate may be proposed."""
        return self.state not in ("loading", "running")


# ---- the comparison of two heads

TRIAL_ERROR, WATCH_ERROR = 0.005, 0.001
"""Probability that a trial promotes a candidate that is not better; that a watch rolls back a head that is as good."""

MIN_GAIN, MAX_LOSS = 0.01, 0.03
"""A candidate that surely gains less is dropped. A head that surely loses more is rolled back: it is compared with
another time's traffic, which changes within a workload too."""

MAX_TRIAL_REQUESTS, MAX_WATCH_REQUESTS = 5_000, 20_000
"""After as many requests with the new head a trial ends, and the candidate is dropped; a watch ends, and the head
stays."""

MIN_REQUESTS, MIN_STEPS = 8, 100
"""Each head needs as many before the two are compared."""

MAX_EVIDENCE_STEPS = 50_000
"""Beyond it older steps of a head and workload count half: a new head is compared with what this one does of late."""

REQUEST_CORRELATION = 0.4
"""Correlation of accepted drafts between steps of one request: its m steps count as m / (1 + 0.4 (m - 1)) independent
ones. Easy and hard stretches of an answer come together: in the recorded answers of `tests/support/head_traffic.py` it
is 0.14 to 0.44, by task."""

EXPECTED_GAIN = 0.2
"""Standard deviation of true gains, for which the interval is tightest. It holds for every gain."""


@dataclass(slots=True)
class HeadEvidence:
    """Verification steps of a head for a workload, and the number of requests that they belong to."""

    counts: Counts = field(default_factory=Counts)
    num_requests: int = 0

    def add(self, counts: Counts, num_requests: int, max_steps: int | None) -> None:
        self.counts, self.num_requests = self.counts + counts, self.num_requests + num_requests
        if max_steps is not None and self.counts.num_steps > max_steps:
            self.counts = Counts(*([number // 2 for number in row] for row in self.counts.rows))
            self.num_requests //= 2

    @property
    def usual_k(self) -> int:
        """The deepest draft position that at least half of the steps verified."""
        return sum(2 * drafted >= self.counts.num_steps for drafted in self.counts.drafted)

    def acceptance_length(self, k: int) -> tuple[float, float]:
        """At K = `k`, and its variance, from conditional acceptance rates, each that of a binomial."""
        reached = np.array(self.counts.reached[:k])
        rates = (np.array(self.counts.accepted[:k]) + 0.5) / (reached + 1)
        cumulative = rates.cumprod()
        slopes = cumulative[::-1].cumsum()[::-1] / rates
        variance = (slopes**2 * rates * (1 - rates) / (reached + 1)).sum()
        others = self.counts.num_steps / max(1, self.num_requests) - 1  # steps of the same request
        return 1.0 + float(cumulative.sum()), float(variance) * max(1.0, 1 + REQUEST_CORRELATION * others)


class HeadComparison(NamedTuple):
    """AL of a head relative to another, minus 1, and an interval that is valid at any time: it may be looked at after
    each step."""

    gain: float
    low: float
    high: float
    num_steps: int
    num_requests: int


def compare_heads(
    new: Mapping[str, HeadEvidence], old: Mapping[str, HeadEvidence], error: float
) -> HeadComparison | None:
    """Compare each workload with itself; None without enough evidence. error: probability that the interval ever leaves
    out the true gain. It is that of the normal mixture (Robbins 1970; Howard et al. 2021), prior: `EXPECTED_GAIN`."""
    shared = [name for name in new.keys() & old.keys() if min(new[name].num_requests, old[name].num_requests) > 0]
    for head in (old, new):
        num_requests = sum(head[name].num_requests for name in shared)
        num_steps = sum(head[name].counts.num_steps for name in shared)
        if num_requests < MIN_REQUESTS or num_steps < MIN_STEPS:
            return None
    difference = variance = length = 0.0
    for name in shared:
        k = min(new[name].usual_k, old[name].usual_k)
        (new_al, new_variance), (old_al, old_variance) = (head[name].acceptance_length(k) for head in (new, old))
        num_new, num_old = new[name].counts.num_steps, old[name].counts.num_steps
        weight = num_new * num_old / (num_new + num_old)  # little where one head has few steps
        difference += weight * (new_al - old_al)
        variance += weight**2 * (new_variance + old_variance)
        length += weight * old_al
    gain, variance, prior = difference / length, max(variance / length**2, 1e-12), EXPECTED_GAIN**2
    half = math.sqrt(variance * (1 + variance / prior) * (math.log1p(prior / variance) - 2 * math.log(error)))
    return HeadComparison(gain, gain - half, gain + half, num_steps, num_requests)


# ---- the manager

MAX_CHANGES = 32
MAX_HEADS = 16
"""Evidence is kept of as many heads, those that drafted last, and of MAX_NUM_WORKLOADS of each, the latest."""


@dataclass
class HeadState:
    """What outlives a restart of the router.

    Attributes:
        weights: digest or source of the target's weights that the evidence was counted with.
        configured: as drafters report; None before they did.
        replacement: what drafts instead.
        candidate: the last one. Of a trial that is over, requests may still run.
        changes: the newest last.
        evidence: by head and workload, the head that drafted last at the end.
    """

    weights: str
    configured: HeadRef | None
    replacement: HeadRef | None
    candidate: HeadRef | None
    changes: list[HeadChange]
    evidence: dict[str, dict[str, HeadEvidence]]


class HeadManager:
    """Decides which heads draft. Not thread-safe.

    Args:
        num_spare: `drafter.spare_heads`.
        trial_share: of the requests, that a candidate drafts for.
        clock: Unix time, for what is shown.
    """

    def __init__(self, num_spare: int, trial_share: float, clock: Callable[[], float] = time.time) -> None:
        self._num_spare, self._trial_share, self._clock = num_spare, trial_share, clock
        self.state = HeadState("", None, None, None, [], {})
        self._num_running: Mapping[str, int] = {}
        self._num_uncounted: Counter[str] = Counter()
        """Requests by workload that started and have verified nothing yet. Their steps come with a later report."""
        self._num_cold: dict[str, int] = {}  # of the requests that ran when heads last changed, by workload
        self.events: list[str] = []
        """What happened, for the log; the caller takes it out."""

    # ---- what others read

    @property
    def is_ready(self) -> bool:
        """Whether drafters have said what they are configured with: before that nothing is desired."""
        return self.state.configured is not None

    @property
    def desired(self) -> DesiredHeads:
        state, candidate = self.state, self.state.candidate if self._num_spare else None
        if state.replacement is None or state.configured is None:
            return DesiredHeads(candidate=candidate)
        return DesiredHeads(state.configured.digest, state.replacement, candidate)

    @property
    def routing(self) -> HeadRouting:
        candidate = self.state.candidate
        is_running = any(change.state == "running" for change in self.state.changes)
        return HeadRouting("" if candidate is None else candidate.digest, self._trial_share if is_running else 0.0)

    @property
    def live_head(self) -> HeadRef:
        """The head that drafts, trials left out. Raises ValueError before drafters have said what they are configured
        with."""
        if self.state.configured is None:
            raise ValueError("no drafter has said yet which head drafts: try again")
        return self.state.replacement or self.state.configured

    @property
    def names_in_use(self) -> set[str]:
        """Names of heads that draft or are tried, or that a roll-back would bring back."""
        heads = [self.state.replacement, self.state.candidate, *(change.previous for change in self.state.changes)]
        return {head.name for head in heads if head is not None}

    def get_change(self, name: str) -> HeadChange:
        """The newest of a head, as it is now. Raises ValueError for a name that is not known (any more)."""
        for change in reversed(self.state.changes):
            if change.name == name:
                return change
        raise ValueError(f"no head {name!r:.80} was proposed, or it is forgotten")

    def document(self) -> list[dict[str, Any]]:
        """The changes of heads, newest first, as JSON."""
        rows = []
        for change in reversed(self.state.changes):
            row, stands = dataclasses.asdict(change), self._stands(change)
            row |= {"stands": stands, "is_watched": stands and change.is_compared}
            rows.append({name: value for name, value in row.items() if name not in INTERNAL})
        return rows

    # ---- what others say

    def check_free(self) -> None:
        """Raises ValueError with the reason where there can be no trial now."""
        if not self._num_spare:
            raise ValueError(
                "drafters have no slot for a candidate: write drafter.spare_heads: 1, and run `peagle serve` again"
            )
        if not self.is_ready:
            raise ValueError("no drafter has said yet which head drafts: try again")
        if (trial := self._trial()) is not None:
            raise ValueError(f"a trial is under way, of {trial.name}: one at a time")

    def propose(self, name: str, proposal: HeadProposal) -> HeadChange:
        """Begin a trial. Raises ValueError with the reason where there can be none now."""
        self.check_free()
        change = HeadChange(name, proposal.parent, dict(proposal.provenance))
        self.state.candidate = change.ref
        self._set_state(change, "loading", "drafters load it")
        return change

    def roll_back(self) -> HeadChange:
        """End the trial, else roll back the last change that stands: an operator's order. Raises ValueError where there
        is none."""
        for change in reversed(self.state.changes):
            if not change.is_over:
                self._set_state(change, "dropped", "ordered by an operator")
            elif self._stands(change):
                self._undo(change, "ordered by an operator")
            else:
                continue
            return change
        raise ValueError("there is no change of a head to roll back")

    def observe_drafters(self, reports: Sequence[DrafterReport]) -> None:
        """Take in the reports of all drafter replicas, once they agree and have been given the desired state."""
        state = self.state
        if not reports or (configured := reports[0].configured) is None:
            return
        given = reports[0].desired
        if any((report.configured, report.desired) != (configured, given) for report in reports):
            return
        if state.configured is None:  # a router before this one may have decided, and its state is lost
            state.replacement = given.replacement if given.replaced == configured.digest else None
            if state.replacement is not None and not any(self._stands(change) for change in state.changes):
                found = state.replacement
                change = HeadChange(found.name, configured.digest, head=found.digest, previous=configured)
                self._set_state(change, "promoted", "drafters have it; what was known of it is lost")
        elif given != self.desired:
            return
        elif state.configured.digest != configured.digest:
            self._record_new_config(state.configured, configured)
        state.configured = configured
        if (trial := self._trial()) is not None and trial.state == "loading":
            self._record_loading(trial, reports)

    def record_lost(self, name: str) -> None:
        """The files of a head that is to draft are on no node any more: end its trial, or roll it back."""
        if (candidate := self.state.candidate) is not None and candidate.name == name:
            self.state.candidate = None
        for change in self.state.changes:
            if change.name == name and not change.is_over:
                self._set_state(change, "dropped", "its files are lost")
            elif change.name == name and self._stands(change):
                self._undo(change, "its files are lost")

    def record_counts(self, deltas: CounterDeltas, num_running: Mapping[str, int], weights: str = "") -> None:
        """Take in what targets counted since the last time, and decide. num_running: requests by workload. weights:
        those that the targets report, "" where none does."""
        state, self._num_running = self.state, num_running
        if weights not in ("", state.weights):
            if state.weights:
                self._void_evidence()
            state.weights = weights
        cold = {workload for workload, number in self._num_cold.items() if number > 0}
        for name, counted in deltas.workloads.items():
            if (workload := base_workload(name)) in cold:
                self._num_cold[workload] -= counted.num_ended
            self._num_uncounted[name] += counted.num_started
        compared = [change for change in state.changes if change.is_compared]
        for head, by_workload in deltas.by_head.items():
            kept = state.evidence[head] = state.evidence.pop(head, {})
            tables = [kept, *(one.evidence for one in compared if one.head == head)]
            tables += [one.control for one in compared if one.against == head]
            for name, counts in by_workload.items():
                for table in tables if base_workload(name) not in cold else ():
                    found = table[base_workload(name)] = table.pop(base_workload(name), HeadEvidence())
                    found.add(counts, self._num_uncounted[name], MAX_EVIDENCE_STEPS if table is kept else None)
            for table in tables:
                while len(table) > MAX_NUM_WORKLOADS:
                    del table[next(iter(table))]
        for name in {name for by_workload in deltas.by_head.values() for name in by_workload}:
            del self._num_uncounted[name]
        for name, number in self._num_uncounted.items():  # those that ended verified nothing
            self._num_uncounted[name] = min(number, num_running.get(base_workload(name), 0))
        self._num_uncounted = +self._num_uncounted
        while len(state.evidence) > MAX_HEADS:
            del state.evidence[next(iter(state.evidence))]
        for change in compared:
            if change.state == "running" or self._stands(change):
                self._decide(change)

    # ---- decisions

    def _decide(self, change: HeadChange) -> None:
        """Promote or drop a candidate, roll back or keep a promoted head, where the evidence says so."""
        is_trial = change.state == "running"
        old = change.control if is_trial else self.state.evidence.get(change.against, {})
        if (found := compare_heads(change.evidence, old, TRIAL_ERROR if is_trial else WATCH_ERROR)) is None:
            return
        change.gain, change.low, change.high = (round(value, 4) for value in (found.gain, found.low, found.high))
        change.num_steps = found.num_steps
        said = f"AL {found.gain:+.1%} ({found.low:+.1%} to {found.high:+.1%}) over {found.num_requests} requests"
        if not is_trial:
            if found.high < -MAX_LOSS:
                self._undo(change, said)
            elif found.low > -MAX_LOSS or found.num_requests > MAX_WATCH_REQUESTS:
                self._set_state(change, "promoted", f"it stays: {said}")
        elif found.low > 0:
            self._promote(change, said)
        elif found.high < MIN_GAIN or found.num_requests > MAX_TRIAL_REQUESTS:
            self._set_state(change, "dropped", said)

    def _record_loading(self, trial: HeadChange, reports: Sequence[DrafterReport]) -> None:
        """Begin to route requests to a candidate that all drafters have loaded."""
        old = self.live_head
        problems = [report.problems[trial.name] for report in reports if trial.name in report.problems]
        digests = {{head.name: head.digest for head in report.heads}.get(trial.name, "") for report in reports}
        if digests == {old.digest}:
            problems = ["it is the head that drafts already"]
        if problems:
            self.state.candidate = None
            self._set_state(trial, "refused", problems[0])
        elif len(digests) == 1 and "" not in digests:
            trial.head, trial.against = digests.pop(), old.digest
            self.state.candidate = trial.ref
            self._set_state(trial, "running", f"it drafts for {self._trial_share:.0%} of the requests")
            self._begin_comparison(trial)

    def _promote(self, change: HeadChange, reason: str) -> None:
        """Let a candidate draft in the place of the configured head."""
        change.previous, self.state.replacement = self.live_head, change.ref
        self._set_state(change, "promoted", reason)
        self._begin_comparison(change)

    def _record_new_config(self, before: HeadRef, head: HeadRef) -> None:
        """A `user_config` names `head` where `before` was configured."""
        old, self.state.replacement = self.state.replacement or before, None
        if old.digest == head.digest:
            return  # the operator wants what drafts already
        self._drop_trial_against(old.digest, "a user_config changed the head that it was compared with")
        change = HeadChange(head.name, parent=old.digest, head=head.digest, against=old.digest)
        change.previous = old
        self._set_state(change, "promoted", "by a user_config")
        self._begin_comparison(change)

    def _undo(self, change: HeadChange, reason: str) -> None:
        """Roll back a promoted head."""
        self.state.replacement = None if change.previous == self.state.configured else change.previous
        self._num_cold = dict(self._num_running)
        self._set_state(change, "rolled back", reason)
        self._drop_trial_against(change.head, "the head that it was compared with was rolled back")

    def _drop_trial_against(self, head: str, reason: str) -> None:
        if (trial := self._trial()) is not None and trial.against == head:
            self._set_state(trial, "dropped", reason)

    def _begin_comparison(self, change: HeadChange) -> None:
        """Compare from now on. Requests that run now go on without the rows that the drafter had of them, so nothing
        counts until as many have ended."""
        change.is_compared = True
        self._num_cold = dict(self._num_running)

    def _void_evidence(self) -> None:
        """The targets have other weights: a trial begins anew; a watch ends, since it would blame the head for them."""
        self.state.evidence.clear()
        self._num_cold = dict(self._num_running)
        for change in self.state.changes:
            change.evidence, change.control = {}, {}
            if change.is_compared and change.state == "promoted":
                self._set_state(change, "promoted", "it stays: the target is another")

    def _set_state(self, change: HeadChange, state: ChangeState, reason: str) -> None:
        """Note what became of a change, and end its comparison."""
        now_s = round(self._clock(), 1)
        change.state, change.reason = state, reason
        change.is_compared, change.evidence, change.control = False, {}, {}
        change.begun_s, change.changed_s = change.begun_s or now_s, now_s
        if not any(change is known for known in self.state.changes):
            self.state.changes = [*self.state.changes, change][-MAX_CHANGES:]
        self.events.append(f"head {change.name} ({change.head or 'not loaded'}) {state}: {reason}")

    def _trial(self) -> HeadChange | None:
        """The one that is not over."""
        return next((change for change in self.state.changes if not change.is_over), None)

    def _stands(self, change: HeadChange) -> bool:
        """Whether a promoted head drafts where it was put."""
        return change.state == "promoted" and change.ref == (self.state.replacement or self.state.configured)
