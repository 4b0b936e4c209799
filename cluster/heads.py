"""Which head drafts: a candidate's trial beside the current head, and the way back from a head that turned out worse.

Whoever has a candidate (the learner, an operator) hands a `HeadProposal` to the router, as `Router.propose`, and reads
what became of it, a `HeadTrial`, from `Router.trial`. Enters also: counts of all targets
(`cluster.counts.CounterDeltas`) and what drafters say. Leaves: `HeadOrders` for the drafters, `HeadRouting` for the
targets, and what happened, for the log. Never knows: Ray, files' contents, the engine.
A trial and the watch after a change compare two heads alike: AL of each workload with itself, by an interval that may
be looked at all the time. A candidate is promoted when it is better for sure, and not when it is only not worse: each
change costs the drafter its cache, and a rule that lets equal heads through would let them drift.
"""

import copy
import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.counts import CounterDeltas, Counts

TrialState = Literal["loading", "running", "promoted", "dropped", "taken back", "refused"]
"""Of a candidate. `loading`: drafters read it. `running`: it drafts for a share of the requests. `promoted`: it drafts
for all requests of its workloads, and is watched. The others are final: `dropped` was not better, or ended by an
operator; `taken back` was promoted and then fell below the head before it; `refused` cannot be loaded."""


@dataclass(frozen=True)
class HeadProposal:
    """A candidate head, for `Router.propose`.

    Attributes:
        source: its directory, as `drafter.head` may name one. Read by the router, which hands the files to drafters on
            other nodes. With `files` a name for the log.
        files: name -> content of config.json and the safetensors, where the router cannot read `source`.
        workloads: whose requests it is for; () for those of all workloads that have no head of their own.
        parent: digest of the head that it was trained from, "" where there is none.
        provenance: where it comes from, as JSON can hold it: numbers of requests and tokens, figures of the offline
            gate. Shown as it is in `GET /drafting`, and kept with the head.
    """

    source: str
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    workloads: tuple[str, ...] = ()
    parent: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadTrial:
    """What became of a proposal, as `Router.trial(name)` says it.

    Attributes:
        name: of the candidate, unique; `Router.propose` returns it.
        workloads, parent, provenance: as proposed.
        state: see `TrialState`. reason: of the state, in words.
        head: the candidate's digest, as counts and reports name it; "" until a drafter has loaded it.
        against: digest of the head that it is compared with, "" until then.
        gain: acceptance length over that of `against` minus 1, with `low` and `high`, an interval that may be looked at
            at any time; None before there is enough evidence.
        num_steps: verification steps with the candidate that were compared.
        begun_s, changed_s: Unix times of the proposal and of the state.
    """

    name: str
    workloads: tuple[str, ...]
    parent: str
    provenance: Mapping[str, Any]
    state: TrialState
    reason: str = ""
    head: str = ""
    against: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    num_steps: int = 0
    begun_s: float = 0.0
    changed_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether another candidate may be proposed."""
        return self.state not in ("loading", "running")


# ---- what is counted of two heads, and how sure a difference is

TRIAL_SUFFIX = "/trial"
"""Behind the name of a workload: its requests that draft with the candidate. No tag can have it."""


def base_workload(workload: str) -> str:
    """The workload that a request belongs to, whatever head drafts."""
    return workload.removesuffix(TRIAL_SUFFIX)


WATCH_MARGIN = 0.03
"""A head is taken back when its AL is lower by more than this share, for sure: it is compared with the head before it,
and traffic within a workload changes too."""

WATCH_ERROR = 0.001
"""Chance that a watch takes back a head that is as good as the one before."""

TRIAL_ERROR = 0.005
"""Chance that a trial promotes a candidate that is not better."""

MIN_GAIN = 0.01
"""A candidate that does not gain this much, for sure, is dropped."""

MAX_TRIAL_REQUESTS, MAX_WATCH_REQUESTS = 5_000, 20_000
"""With the new head. A trial is then over and the candidate dropped; a watch is over and the head stays."""

MIN_REQUESTS, MIN_STEPS = 8, 100
"""Of each head, before the two are compared."""

MAX_SAMPLE_STEPS = 50_000
"""Of a head and workload; beyond it, older steps count half."""

REQUEST_SIMILARITY = 0.4
"""Correlation of accepted drafts between steps of one request: n steps, m a request, are worth n / (1 + 0.4 (m - 1))
independent ones. An allowance: steps of easy and of hard stretches of an answer come together."""

EXPECTED_GAIN = 0.2
"""Standard deviation of true gains, for which the interval is tightest. It holds for every gain."""


@dataclass(slots=True)
class Sample:
    """Steps of a head for a workload, and the requests that they are of."""

    counts: Counts = field(default_factory=Counts)
    num_requests: int = 0

    def add(self, counts: Counts, num_requests: int) -> None:
        self.counts, self.num_requests = self.counts + counts, self.num_requests + num_requests
        if self.counts.num_steps > MAX_SAMPLE_STEPS:
            rows = ([count // 2 for count in row] for row in self.counts.rows)
            self.counts, self.num_requests = Counts(*rows), self.num_requests // 2

    @property
    def depth(self) -> int:
        """Up to which at least half of the steps verified drafts: the usual K."""
        return sum(2 * drafted >= self.counts.num_steps for drafted in self.counts.drafted)

    def length(self, k: int) -> tuple[float, float]:
        """AL at K = `k`, at most `depth`, from conditional acceptances, and its variance."""
        reached = self.counts.reached[: self.depth]
        shares = [(a + 0.5) / (r + 1) for a, r in zip(self.counts.accepted, reached, strict=False)]
        survival = list(itertools.accumulate(shares, operator.mul))
        alike = 1 + REQUEST_SIMILARITY * (self.counts.num_steps / max(1, self.num_requests) - 1)
        variance = sum(
            (sum(survival[depth:k]) / share) ** 2 * share * (1 - share) / (num + 1)
            for depth, (share, num) in enumerate(zip(shares[:k], reached, strict=False))
        )
        return 1.0 + sum(survival[:k]), max(1.0, alike) * variance


Samples = dict[str, Sample]
"""By workload."""


@dataclass(frozen=True)
class Gain:
    """AL of one head over that of another, minus 1, with an interval that holds at all times together: it may be looked
    at after each step."""

    mean: float
    low: float
    high: float
    num_steps: int
    num_requests: int


def gain_of(new: Samples, old: Samples, error: float) -> Gain | None:
    """What `new` gains over `old`, each workload compared with itself; None without enough evidence. `error`: chance
    that the interval ever leaves out the truth.

    The interval is that of the normal mixture (Robbins 1970; Howard et al. 2021) over a prior of `EXPECTED_GAIN`.
    """
    shared = [name for name in new.keys() & old.keys() if min(new[name].num_requests, old[name].num_requests) > 0]
    for samples in (new, old):
        num_requests = sum(samples[name].num_requests for name in shared)
        if num_requests < MIN_REQUESTS or sum(samples[name].counts.num_steps for name in shared) < MIN_STEPS:
            return None
    difference = variance = length = 0.0
    for name in shared:
        k = min(new[name].depth, old[name].depth)
        (new_length, new_variance), (old_length, old_variance) = new[name].length(k), old[name].length(k)
        num_new, num_old = new[name].counts.num_steps, old[name].counts.num_steps
        weight = num_new * num_old / (num_new + num_old)  # of a workload of which one head has few steps, little
        difference += weight * (new_length - old_length)
        variance += weight**2 * (new_variance + old_variance)
        length += weight * old_length
    mean, variance = difference / length, max(variance / length**2, 1e-12)
    prior = EXPECTED_GAIN**2
    half = math.sqrt(variance * (1 + variance / prior) * (math.log1p(prior / variance) - 2 * math.log(error)))
    num_steps = sum(new[name].counts.num_steps for name in shared)
    return Gain(mean, mean - half, mean + half, num_steps, sum(new[name].num_requests for name in shared))


class Duel:
    """The evidence on two heads, by digest.

    `num_cold`: requests by workload that run when a head or its connections change. They go on without the rows that
    the drafter had of them, so nothing counts until as many requests have ended.
    """

    def __init__(self, new: str, old: str, before: Samples, num_cold: Mapping[str, int]) -> None:
        """`before`: of the old head, until now."""
        self._heads: dict[str, Samples] = {old: copy.deepcopy(before), new: {}}
        self._new, self._old = new, old
        self._num_cold = dict(num_cold)

    def take(self, news: CounterDeltas) -> None:
        was_cold = {name for name, number in self._num_cold.items() if number > 0}
        for name, counts in news.workloads.items():
            if (workload := base_workload(name)) in was_cold:
                self._num_cold[workload] -= counts.num_ended
        for head, samples in self._heads.items():
            add_news(samples, news, head, was_cold)

    def gain(self, error: float) -> Gain | None:
        return gain_of(self._heads[self._new], self._heads[self._old], error)


def add_news(samples: Samples, news: CounterDeltas, head: str, without: Collection[str] = ()) -> None:
    """Add the steps of a head."""
    for name, counts in news.by_head.get(head, {}).items():
        if (workload := base_workload(name)) not in without:
            samples.setdefault(workload, Sample()).add(counts, news.workloads[name].num_started)


# ---- what is ordered


@dataclass(frozen=True)
class HeadRef:
    """A head. `name`: as drafters find it (`drafter.head`, or with `CANDIDATE`). `digest`: "" where not known yet."""

    name: str
    digest: str = ""


CANDIDATE = "candidate-"
"""Begins the names of proposed heads, whose files are in the cache directory."""


@dataclass(frozen=True)
class HeadOrders:
    """What the router wants of every drafter replica.

    Attributes:
        instead: by the digest of a head that the settings or a `user_config` name: what drafts in its place. A
            `user_config` with another head is in no order, so it always wins.
        extra: heads beyond those of the settings: of workloads that were given one, and the last candidate.
    """

    instead: Mapping[str, HeadRef] = field(default_factory=dict)
    extra: tuple[HeadRef, ...] = ()


@dataclass(frozen=True)
class HeadRouting:
    """Which requests draft with a head that the settings do not name, as the router tells targets. By digest.

    Attributes:
        own: heads by workload.
        trial: the candidate, "" without one; it gets `share` of the requests of `workloads`, () for all that draft with
            the default head. Counts of a workload with `TRIAL_SUFFIX` are its.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    trial: str = ""
    share: float = 0.0
    workloads: tuple[str, ...] = ()

    def of(self, workload: str) -> str:
        """The head that is named for a workload, "" for that of the settings."""
        return self.trial if workload.endswith(TRIAL_SUFFIX) else self.own.get(workload, "")


@dataclass(frozen=True)
class DraftersView:
    """What all drafter replicas say alike.

    Attributes:
        configured: heads of settings and `user_config`, in their order.
        live: heads that draft, in the order of the settings, then those of `HeadOrders.extra`.
        instead: the last order that they were given.
        problems: why heads that were ordered are not live, by name.
    """

    configured: tuple[HeadRef, ...]
    live: tuple[HeadRef, ...]
    instead: Mapping[str, HeadRef] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


# ---- who decides


@dataclass(slots=True)
class HeadChange:
    """One head in the place of another: a trial, a promoted candidate, or a new `user_config`.

    `place`: digest of the configured head that is replaced, or the workloads that are given a head of their own.
    `before`: what to put back there, by workload or (key "") for the place; None: nothing was ordered.
    """

    trial: HeadTrial
    new: HeadRef
    old: HeadRef
    place: str = ""
    before: dict[str, HeadRef | None] = field(default_factory=dict)
    duel: Duel | None = None


class HeadKeeper:
    """Decides which heads draft, from the counts of all targets and from what drafters say. Not thread-safe.

    Args:
        index_of: by workload, the place of its head in `drafter.heads`; 0 for the others.
        num_spare: heads that drafters hold beyond these.
        share: of the requests that a candidate drafts for.
        clock: Unix time, for what is shown.
    """

    MAX_CHANGES = 32
    MAX_SEEN = 16

    def __init__(
        self, index_of: Mapping[str, int], num_spare: int, share: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._index_of, self._num_spare, self._share, self._clock = dict(index_of), num_spare, share, clock
        self._configured: tuple[HeadRef, ...] = ()
        self._instead: dict[str, HeadRef] = {}
        self._own: dict[str, HeadRef] = {}
        self._candidate: HeadRef | None = None
        self._changes: list[HeadChange] = []  # newest last
        self._seen: dict[str, Samples] = {}  # by head; the one with the latest steps last
        self._weights = ""  # of the targets that all this was counted of
        self.events: list[str] = []
        """What happened, for the log; the caller takes it out."""

    # what it says

    @property
    def has_begun(self) -> bool:
        """Whether it knows what drafters are configured with, so that its orders mean something."""
        return bool(self._configured)

    @property
    def orders(self) -> HeadOrders:
        return HeadOrders(dict(self._instead), self._extra())

    @property
    def names_in_use(self) -> set[str]:
        """Of heads that draft, or that a change which stands would bring back."""
        before = {head.name for change in self._changes if self._stands(change) for head in (change.new, change.old)}
        return before | {head.name for head in (*self._instead.values(), *self._extra())}

    @property
    def routing(self) -> HeadRouting:
        own = {workload: head.digest for workload, head in self._own.items()}
        candidate = "" if self._candidate is None else self._candidate.digest
        if (change := self._running()) is None or change.trial.state != "running":
            return HeadRouting(own, candidate)  # of a trial that is over, requests may still run
        return HeadRouting(own, candidate, self._share, change.trial.workloads)

    def trial(self, name: str) -> HeadTrial:
        """The newest of a name. Raises ValueError for one that is not known (any more)."""
        for change in reversed(self._changes):
            if change.trial.name == name:
                return change.trial
        raise ValueError(f"no head {name!r:.80} was proposed, or it is forgotten")

    def document(self) -> list[dict[str, Any]]:
        """The changes of heads, newest first, as JSON."""
        return [
            {
                **dataclasses.asdict(change.trial),
                "stands": self._stands(change),
                "is_watched": self._stands(change) and change.duel is not None,
            }
            for change in reversed(self._changes)
        ]

    def snapshot(self) -> dict[str, Any]:
        """What must outlive a restart, as JSON, for `restore`. Evidence of comparisons begins anew."""
        return {
            "weights": self._weights,
            "configured": [dataclasses.asdict(head) for head in self._configured],
            "instead": {digest: dataclasses.asdict(head) for digest, head in self._instead.items()},
            "own": {workload: dataclasses.asdict(head) for workload, head in self._own.items()},
            "changes": [
                {**dataclasses.asdict(dataclasses.replace(change, duel=None)), "compares": change.duel is not None}
                for change in self._changes
            ],
            "seen": {
                head: {name: [list(sample.counts.rows), sample.num_requests] for name, sample in samples.items()}
                for head, samples in self._seen.items()
            },
        }

    def restore(self, snapshot: Any) -> None:
        """Raises ValueError naming what is wrong with the snapshot; nothing has changed then."""
        other = HeadKeeper(self._index_of, self._num_spare, self._share, self._clock)
        try:
            other._weights = str(snapshot.get("weights", ""))
            other._configured = tuple(HeadRef(**head) for head in snapshot["configured"])
            other._instead = {str(digest): HeadRef(**head) for digest, head in snapshot["instead"].items()}
            other._own = {str(workload): HeadRef(**head) for workload, head in snapshot["own"].items()}
            for head, samples in snapshot["seen"].items():
                other._seen[head] = {name: Sample(Counts(*rows), int(num)) for name, (rows, num) in samples.items()}
                for sample in other._seen[head].values():
                    sample.counts.check()
            for row in snapshot["changes"]:
                other._changes.append(other._restored(row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the snapshot of heads cannot be used: {error!r}") from error
        self.__dict__ = other.__dict__

    def _restored(self, row: Mapping[str, Any]) -> HeadChange:
        fields = {**row["trial"], "workloads": tuple(row["trial"]["workloads"])}
        before = {workload: head and HeadRef(**head) for workload, head in row["before"].items()}
        change = HeadChange(HeadTrial(**fields), HeadRef(**row["new"]), HeadRef(**row["old"]), row["place"], before)
        if not change.trial.is_over:
            self._candidate = change.new
        if row["compares"]:
            known = self._seen.get(change.old.digest, {}) if change.trial.is_over else {}
            change.duel = Duel(change.new.digest, change.old.digest, known, {})
        return change

    # what it is told

    def propose(self, name: str, proposal: HeadProposal) -> HeadTrial:
        """Begin a trial. Raises ValueError with the reason where there can be none now."""
        if not self._num_spare:
            raise ValueError("drafter.spare_heads is 0: drafters have no place for a candidate beside their heads")
        if not self._configured:
            raise ValueError("no drafter has said yet which heads draft: try again")
        if (running := self._running()) is not None:
            raise ValueError(f"a trial is under way, of {running.trial.name}: one at a time")
        if len(self._own_heads()) >= self._num_spare:
            raise ValueError(f"all {self._num_spare} of drafter.spare_heads draft for workloads of their own")
        old = {self._head_of(workload) for workload in proposal.workloads or ("",)}
        if len(old) > 1:
            raise ValueError(
                f"the workloads {', '.join(proposal.workloads)} draft with {len(old)} heads: propose for one"
            )
        trial = HeadTrial(name, proposal.workloads, proposal.parent, dict(proposal.provenance), "loading")
        self._candidate = HeadRef(name)
        self._note(HeadChange(trial, self._candidate, old.pop()), "drafters load it")
        return trial

    def see(self, drafters: DraftersView, num_running: Mapping[str, int]) -> None:
        """What the drafter replicas say, as far as they agree. `num_running`: requests by workload."""
        if not self._configured:  # a router before this one may have decided
            self._configured, self._instead = drafters.configured, dict(drafters.instead)
        if len(self._configured) == len(drafters.configured):  # else the settings are others
            for before, head in zip(self._configured, drafters.configured, strict=True):
                if head.digest != before.digest:
                    self._reconfigured(before, head, num_running)
        self._configured = drafters.configured
        change = self._running()
        if change is None or change.trial.state != "loading":
            return
        name = change.trial.name
        if name in drafters.problems:
            self._end(change, "refused", drafters.problems[name])
        elif digest := {head.name: head.digest for head in drafters.live}.get(name):
            change.new = self._candidate = HeadRef(name, digest)
            if digest == change.old.digest:
                self._end(change, "refused", "it is the head that drafts already")
                return
            change.duel = Duel(digest, change.old.digest, {}, num_running)
            change.trial = dataclasses.replace(change.trial, head=digest, against=change.old.digest)
            self._note(change, f"it drafts for {self._share:.0%} of the requests", "running")

    def follow(self, weights: str, num_running: Mapping[str, int]) -> None:
        """Digest of the targets' weights, "" where nobody knows it. What was counted of others is no evidence any more:
        a trial begins anew, and a watch ends, since it would blame the head for what the target changed."""
        before, self._weights = self._weights, weights or self._weights
        if before in ("", self._weights):
            return
        self._seen.clear()
        for change in self._changes:
            if change.trial.state == "running":
                change.duel = Duel(change.new.digest, change.old.digest, {}, num_running)
            elif change.duel is not None:
                change.duel = None
                self._note(change, "it stays: the target is another")

    def take(self, news: CounterDeltas, num_running: Mapping[str, int]) -> None:
        """What targets counted since the last time."""
        for head in news.by_head:
            samples = self._seen[head] = self._seen.pop(head, {})
            add_news(samples, news, head)
        while len(self._seen) > self.MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        for change in list(self._changes):
            if change.duel is not None and (not change.trial.is_over or self._stands(change)):
                change.duel.take(news)
                self._judge(change, num_running)

    def back(self) -> HeadTrial:
        """End the trial, or else take back the last change that stands: an operator's order. Raises ValueError where
        there is none."""
        for change in reversed(self._changes):
            if not change.trial.is_over:
                self._end(change, "dropped", "ordered by an operator")
                return change.trial
            if change.trial.state == "promoted" and self._stands(change):
                self._take_back(change, "ordered by an operator")
                return change.trial
        raise ValueError("there is no change of a head to take back")

    # how it decides

    def _judge(self, change: HeadChange, num_running: Mapping[str, int]) -> None:
        assert change.duel is not None
        is_trial = change.trial.state == "running"
        gain = change.duel.gain(TRIAL_ERROR if is_trial else WATCH_ERROR)
        if gain is None:
            return
        rounded = {name: round(getattr(gain, name), 4) for name in ("low", "high")}
        change.trial = dataclasses.replace(change.trial, gain=round(gain.mean, 4), num_steps=gain.num_steps, **rounded)
        said = f"AL {gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%}) over {gain.num_requests} requests"
        if not is_trial:
            if gain.high < -WATCH_MARGIN:
                self._take_back(change, said)
            elif gain.low > -WATCH_MARGIN or gain.num_requests > MAX_WATCH_REQUESTS:
                change.duel = None
                self._note(change, f"it stays: {said}")
        elif gain.low > 0:
            self._promote(change, said, num_running)
        elif gain.high < MIN_GAIN or gain.num_requests > MAX_TRIAL_REQUESTS:
            self._end(change, "dropped", said)

    def _promote(self, change: HeadChange, reason: str, num_running: Mapping[str, int]) -> None:
        workloads = change.trial.workloads
        index = self._index_of.get(workloads[0], 0) if workloads else 0
        alike = {name for name, other in self._index_of.items() if other == index}
        if not workloads or (index and alike == set(workloads) and not alike & self._own.keys()):
            change.place = self._configured[index].digest
            change.before = {"": self._instead.get(change.place)}
            self._instead[change.place] = change.new
        else:
            change.before = {workload: self._own.get(workload) for workload in workloads}
            self._own |= dict.fromkeys(workloads, change.new)
            self._candidate = None
        change.duel = Duel(change.new.digest, change.old.digest, self._seen.get(change.old.digest, {}), num_running)
        self._note(change, reason, "promoted")

    def _reconfigured(self, before: HeadRef, head: HeadRef, num_running: Mapping[str, int]) -> None:
        """A `user_config` put another head into a place."""
        old = self._instead.pop(before.digest, before)
        if (running := self._running()) is not None and running.old == old:
            self._end(running, "dropped", "a user_config changed the head that it was compared with")
        if old.digest == head.digest:
            return  # the operator wants what drafts already
        trial = HeadTrial(head.name, (), old.digest, {}, "promoted", head=head.digest, against=old.digest)
        self._seen.pop(head.digest, None)
        duel = Duel(head.digest, old.digest, self._seen.get(old.digest, {}), num_running)
        self._note(HeadChange(trial, head, old, head.digest, {"": old}, duel), "by a user_config")

    def _take_back(self, change: HeadChange, reason: str) -> None:
        for workload, head in change.before.items():
            orders, key = (self._own, workload) if workload else (self._instead, change.place)
            if head is None:
                orders.pop(key, None)
            else:
                orders[key] = head
        self._end(change, "taken back", reason)
        if (running := self._running()) is not None and running.old == change.new:
            self._end(running, "dropped", "the head that it was compared with was taken back")

    def _end(self, change: HeadChange, state: TrialState, reason: str) -> None:
        change.duel = None
        if state == "refused":
            self._candidate = None
        self._note(change, reason, state)

    def _note(self, change: HeadChange, reason: str, state: TrialState | None = None) -> None:
        now_s, trial = round(self._clock(), 1), change.trial
        change.trial = dataclasses.replace(
            trial, state=state or trial.state, reason=reason, begun_s=trial.begun_s or now_s, changed_s=now_s
        )
        if not any(change is known for known in self._changes):
            self._changes = [*self._changes, change][-self.MAX_CHANGES :]
        self.events.append(
            f"head {change.trial.name} ({change.trial.head or 'not loaded'}) {change.trial.state}: {reason}"
        )

    # small questions

    def _running(self) -> HeadChange | None:
        """The trial that is not over."""
        return next((change for change in self._changes if not change.trial.is_over), None)

    def _stands(self, change: HeadChange) -> bool:
        """Whether its new head drafts where it was put."""
        if change.trial.state != "promoted":
            return False
        if not change.place:
            return all(self._own.get(workload) == change.new for workload in change.before)
        placed = next((head for head in self._configured if head.digest == change.place), None)
        return placed is not None and self._instead.get(change.place, placed) == change.new

    def _head_of(self, workload: str) -> HeadRef:
        """What drafts for a workload without a trial."""
        configured = self._configured[self._index_of.get(workload, 0)]
        return self._own.get(workload) or self._instead.get(configured.digest, configured)

    def _own_heads(self) -> tuple[HeadRef, ...]:
        return tuple(dict.fromkeys(self._own.values()))

    def _extra(self) -> tuple[HeadRef, ...]:
        """A candidate that was dropped stays until the next one: its requests end with it."""
        return (*self._own_heads(), *([] if self._candidate is None else [self._candidate]))[: self._num_spare]
