"""Autoscaling from acceptance: the object that Serve's policy, and the simulation, ask for replica counts.

Enters: what Serve says of the deployments, and the replicas' counters (`Observation`). Leaves: a `Decision`, and for
every decision made anew a line for the log, from which `benchmarks.scaling_replay` makes the same decision again. Never
knows: Ray, files, the time of day. The parts: `scaling_counters` (what is new in the counters), `scaling_traffic`
(rates and lengths), `scaling_memory` (survivals), `scaling_capacity` (what a replica gives), `scaling_decision` (the
rule).

`decide` raises nothing but programming errors: bad readings are left out and named in the reason. Serve calls a policy
several times a second; a decision is made every `decision_interval_s` and stands in between.
"""

import dataclasses
import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.acceptance import AcceptanceBook, Survival, as_drawn
from cluster.capacity import Capacity, CapacityModel, PassTimes, Traffic
from cluster.counts import Ledger, TargetReport
from cluster.settings import STALE_AFTER_S, AutoscalingSettings, ReplicaRange
from cluster.step_time import StepCosts
from cluster.traffic import CounterBook, CounterExport, Limits, Rate, Reading, TrafficHistory, WorkloadTotals

# ====================================================================================================
# The records of a scaling decision: what it is made from, and what comes out. Values that JSON can hold.

Source = Literal["acceptance", "queue_length", "idle"]


@dataclass(frozen=True)
class Pool:
    """A deployment as Serve sees it.

    Attributes:
        num_running: replicas that serve.
        num_wanted: Serve's target number, starting replicas included.
        ongoing_requests: running and queued, mean over Serve's look-back period.
        queued_requests: of those, waiting in front of the replicas.
    """

    num_running: int
    num_wanted: int
    ongoing_requests: float = 0.0
    queued_requests: float = 0.0


@dataclass(frozen=True)
class WorkloadDemand:
    """One workload: arrivals, mean lengths in tokens, and what is believed of its acceptance, from `num_steps`
    independent steps: what each draft adds to AL (`cluster.acceptance.Survival.gains`), by which K is chosen too, with
    the ends of its interval; without them `gains` is taken for certain."""

    workload: str
    requests_per_s: float
    output_tokens: float
    prompt_tokens: float
    gains: tuple[float, ...]
    num_steps: float
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Inputs:
    """Everything that a decision depends on, besides settings and tables.

    Attributes:
        now_s: for the record only.
        target, drafter: the deployments; drafter None: colocated.
        workloads: those with arrivals; empty where none are known.
        growth: expected relative growth of the arrivals since they were measured, and where they rise, until a replica
            decided now serves.
        history_s: for how long arrivals have been counted.
        num_reporting, num_unusable: replicas that report, and those that report nonsense or fell silent.
        idle_s: for how long nothing arrived.
        settled_s: for how long every wanted replica has been running.
        capacity_before, steps_before: capacity per replica (tokens/s) and drafted steps per token of the last decision.
        notes: what happened to the data, in words.
    """

    now_s: float
    target: Pool
    drafter: Pool | None = None
    workloads: tuple[WorkloadDemand, ...] = ()
    growth: float = 0.0
    history_s: float = 0.0
    num_reporting: int = 0
    num_unusable: int = 0
    idle_s: float = 0.0
    settled_s: float = 0.0
    capacity_before: float | None = None
    steps_before: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Wanted replicas and why.

    Attributes:
        target, drafter: wanted numbers; drafter None: there is no drafter deployment.
        source: what decided.
        reason: in words.
        demand_tokens_per_s: D, None where it is not known; likewise the following.
        capacity_tokens_per_s: mu as used, after the clamp; `measured_capacity_tokens_per_s` before it.
        acceptance_length: mean AL at the predicted K.
        num_requests: the batch of a replica at its capacity.
        depths: predicted K by workload.
        drafted_steps_per_token: as used.
        needed: replicas of the target that the demand needs, before dead band and bounds; a fraction.
    """

    target: int
    drafter: int | None
    source: Source
    reason: str
    demand_tokens_per_s: float | None = None
    capacity_tokens_per_s: float | None = None
    measured_capacity_tokens_per_s: float | None = None
    acceptance_length: float | None = None
    num_requests: int | None = None
    depths: Mapping[str, int] | None = None
    drafted_steps_per_token: float | None = None
    needed: float | None = None


# ====================================================================================================
# What is believed of acceptance when replicas take minutes to start: long memories, until a shorter one contradicts.
#
# Enters: the replicas' acceptance reports. Leaves: the survival of a workload. Never knows: rates, replicas, clocks.
#
# One memory would be too slow after a collapse or too uncertain before it. Each workload goes by the longest memory that
# no shorter one contradicts; a memory once contradicted is full of what is over, and counts again when it agrees with the
# one that took its place.

HALF_LIVES_STEPS = (20_000.0, 3_000.0, 500.0)
"""Of the memories. The first is longer than for the choice of K, because replicas take minutes and K a step. The last
holds about 180 independent steps: AL with a standard error of 0.11."""

CONTRADICTION, AGREEMENT = 2.0, 0.5
"""Differences of AL in half widths of both 90 % intervals together, from which on memories contradict each other (3.3
standard errors), and up to which they agree."""


MAX_WORKLOADS = 64


class AcceptanceMemory:
    """The memories of all workloads; not thread-safe. `max_draft_tokens`: K_max."""

    def __init__(self, max_draft_tokens: int, half_lives_steps: Sequence[float] = HALF_LIVES_STEPS) -> None:
        self._ledger = Ledger()
        self._books = [
            AcceptanceBook(max_draft_tokens, half_life_steps=half_life, max_workloads=MAX_WORKLOADS)
            for half_life in half_lives_steps
        ]
        self._in_use: dict[str, int] = {}

    def absorb_all(self, reports: Iterable[TargetReport]) -> None:
        """Take the reports of one round; each head has evidence of its own."""
        head = self._ledger.head
        news = self._ledger.take(reports)
        if news.head != head:
            self._in_use = {}
        for book in self._books:
            book.absorb(news)

    def survival(self, workload: str) -> Survival:
        """What is believed now."""
        if len(self._in_use) > 2 * MAX_WORKLOADS:
            self._in_use = {}  # mostly names that the books have forgotten
        believed = [book.survival(workload) for book in self._books]
        current = self._in_use.get(workload, 0)
        for index in range(current):
            if _distance(believed[index], believed[current]) <= AGREEMENT:
                current = index
                break
        while any(_distance(believed[current], shorter) > CONTRADICTION for shorter in believed[current + 1 :]):
            current += 1
        self._in_use[workload] = current
        return believed[current]


def _distance(one: Survival, other: Survival) -> float:
    """Difference of AL at K_max against what the intervals allow."""
    half_widths = sum((sum(each.high) - sum(each.low)) / 2 for each in (one, other))
    return abs(sum(one.mean) - sum(other.mean)) / half_widths if half_widths else 0.0


# ====================================================================================================
# How many replicas of target and drafter: one decision from one set of numbers.
#
# Enters: `Inputs`, everything known at one moment, and the capacity model. Leaves: a `Decision` with the numbers behind
# it and its reason in words. Pure: the same inputs give the same decision, which is how a log is replayed
# (`benchmarks.scaling_replay`). Never knows: how the inputs were measured, Ray.
#
#     D = (1 + growth) sum_c rate_c length_c
#     N_target = ceil(max(D / (utilisation mu), (D + backlog / drain_s) / mu))
#     N_drafter = ceil((D + backlog / drain_s) s / (drafter_utilisation passes_per_s))
#
# (policy-and-apis, D4; s: drafted steps per token). The backlog is what will wait when a replica ordered now serves: what
# no wanted replica has in its best batch, and what comes until then beyond what is planned for. Up when the need is
# beyond the wanted number by more than `UP_TOLERANCE`; down only when D fits in fewer at `dead_band` of the utilisation,
# every replica reports, none is starting and the last one to start is warm. A change of capacity enters as far as the
# interval of acceptance or a backlog bears it out, and beyond that by at most `max_change` a decision. On missing data:
# as many as the queue length asks for, and never fewer than there are.

DEAD_BAND = 0.9
"""A replica goes only when the demand fits in the others at this share of the utilisation."""

MAX_CHANGE = 0.2
"""The most that a change of acceptance or mix moves a count in one decision, as a share."""

DRAIN_S = 60.0
"""Within what time a backlog is to be gone, by replicas that run full."""

MIN_STEPS = 100.0
"""Independent verification steps of all workloads together below which acceptance is not known."""

UP_TOLERANCE = 0.05
"""Share of the wanted replicas by which the need must exceed them. What is measured varies by about 3 % around what
stands still."""

SILENT_SHARE = 0.5
"""Share of the known replicas that must report; the others are then taken to be like them."""


def decide(
    inputs: Inputs, model: CapacityModel | None, settings: AutoscalingSettings, passes: PassTimes | None = None
) -> Decision:
    """The decision. `model` None: queue length only; `passes`: of the remote drafter, without which drafters follow
    the targets in proportion to their bounds."""
    if settings.policy == "queue_length" or model is None:
        return _by_queue(inputs, settings, "", may_shrink=True)
    is_idle = inputs.target.ongoing_requests == 0 and not inputs.target.queued_requests
    if settings.scale_to_zero and is_idle and inputs.idle_s >= settings.idle_s and not inputs.num_unusable:
        drafter = None if settings.drafter is None else settings.drafter.clamp(0)
        return Decision(0, drafter, "idle", f"no request for {inputs.idle_s:.0f} s: scaled to zero")
    if missing := _missing(inputs):
        return _by_queue(inputs, settings, missing, may_shrink=False)
    return _by_acceptance(inputs, model, settings, passes)


def _missing(inputs: Inputs) -> str:
    """Why acceptance cannot decide; "" where it can."""
    known = inputs.num_reporting + inputs.num_unusable
    if not inputs.num_reporting:
        return "no replica reports"
    if inputs.num_reporting < SILENT_SHARE * known:
        return f"only {inputs.num_reporting} of {known} replicas report"
    if inputs.history_s < 30.0:
        return f"arrivals have been counted for {inputs.history_s:.0f} s only"
    if not inputs.workloads and inputs.target.ongoing_requests > 0:
        return "requests run, but no replica has counted one that ended"
    return ""


def _by_queue(inputs: Inputs, settings: AutoscalingSettings, because: str, *, may_shrink: bool) -> Decision:
    """Serve's rule: ongoing requests over the number that a replica should have."""
    pool = inputs.target
    asked = math.ceil(pool.ongoing_requests / settings.target_ongoing_requests - 1e-9)
    if pool.ongoing_requests > 0 or (pool.num_wanted and inputs.idle_s < settings.idle_s):
        asked = max(1, asked)  # only `idle_s` without a request takes the target to zero
    wanted = settings.target.clamp(asked if may_shrink else max(asked, pool.num_wanted))
    per_replica = settings.target_ongoing_requests
    said = f"{pool.ongoing_requests:.1f} ongoing requests at {per_replica:g} a replica ask for {asked}"
    if because:
        said = f"{because}, so by queue length and never down: {said}"
    drafter = _in_proportion(wanted, inputs, settings, may_shrink=may_shrink)
    return Decision(wanted, drafter, "queue_length", _joined(said, _bounded(asked, wanted, settings.target), inputs))


def _in_proportion(wanted: int, inputs: Inputs, settings: AutoscalingSettings, *, may_shrink: bool) -> int | None:
    if settings.drafter is None:
        return None
    number = math.ceil(wanted * settings.drafter.max / settings.target.max)
    if not may_shrink and inputs.drafter is not None:
        number = max(number, inputs.drafter.num_wanted)
    return settings.drafter.clamp(number)


def _by_acceptance(
    inputs: Inputs, model: CapacityModel, settings: AutoscalingSettings, passes: PassTimes | None
) -> Decision:
    pool, workloads = inputs.target, [one for one in inputs.workloads if one.requests_per_s > 0]
    if not workloads:
        target, why = _with_dead_band(0.0, 0.0, pool, settings.target, settings, _may_shrink(inputs, settings))
        drafter = _in_proportion(target, inputs, settings, may_shrink=True)
        said = _joined(f"no arrivals for {inputs.idle_s:.0f} s{why}", "", inputs)
        return Decision(target, drafter, "acceptance", said, 0.0, inputs.capacity_before, needed=0.0)
    capacity = model.capacity(_traffic(one, one.gains) for one in workloads)
    used, steps, clamped = _used(capacity, model, inputs, workloads, settings)
    arriving = sum(one.requests_per_s * one.output_tokens for one in workloads)
    known = inputs.num_reporting + inputs.num_unusable
    arriving *= known / inputs.num_reporting * (1.0 + inputs.growth)
    backlog = _backlog_tokens(inputs, capacity, arriving, used, settings) / DRAIN_S
    # A backlog is worked off by full replicas: `utilisation` is for traffic that lasts.
    drained = (arriving + backlog) / used if backlog else 0.0
    planned = arriving / (settings.utilisation * used)
    needed = max(planned, drained) + settings.spare_replicas
    sparse = max(planned / DEAD_BAND, drained) + settings.spare_replicas
    demand = arriving + backlog
    may_shrink = _may_shrink(inputs, settings)
    target, why = _with_dead_band(needed, sparse, pool, settings.target, settings, may_shrink)
    full = f"{100 * settings.utilisation:.0f} %" if planned >= drained else "the full, until the backlog is gone"
    said = (
        f"{demand:.0f} tokens/s wanted{_parts(arriving, backlog, inputs.growth)}, a replica gives {used:.0f} at AL "
        f"{capacity.acceptance_length:.2f} and batch {capacity.num_requests}{clamped}, planned to {full}: "
        f"{needed:.2f} replicas{why}"
    )
    if capacity.hopeless:
        said += f"; {', '.join(capacity.hopeless)} cannot keep max_tpot_ms on any number of replicas"
    drafter = _drafters(demand * steps, target, inputs, settings, passes, may_shrink)
    return Decision(
        target=target,
        drafter=drafter,
        source="acceptance",
        reason=_joined(said, "", inputs),
        demand_tokens_per_s=demand,
        capacity_tokens_per_s=used,
        measured_capacity_tokens_per_s=capacity.tokens_per_s,
        acceptance_length=capacity.acceptance_length,
        num_requests=capacity.num_requests,
        depths=dict(capacity.depths),
        drafted_steps_per_token=steps,
        needed=needed,
    )


def _traffic(one: WorkloadDemand, gains: tuple[float, ...]) -> Traffic:
    share = one.requests_per_s * one.output_tokens
    return Traffic(one.workload, share, gains, one.output_tokens, one.prompt_tokens)


def _used(
    capacity: Capacity,
    model: CapacityModel,
    inputs: Inputs,
    workloads: Sequence[WorkloadDemand],
    settings: AutoscalingSettings,
) -> tuple[float, float, str]:
    """What capacity and drafted steps per token count as, and why that is not what was computed.

    A change enters at once as far as the interval of acceptance bears it out. Of the rest, at most `max_change` a
    decision, and none on few steps; the count of replicas goes as the inverse.
    """
    value, before = capacity.tokens_per_s, inputs.capacity_before
    num_steps = sum(one.num_steps for one in inputs.workloads)
    max_change = MAX_CHANGE if num_steps >= MIN_STEPS else 0.0
    steps = _within(capacity.drafted_steps_per_token, inputs.steps_before, max_change)
    # Requests that pile up say the same as a capacity that falls: two witnesses need no caution.
    is_borne_out = value < (before or 0.0) and _excess(inputs, capacity) > 0
    if before is None or before <= 0 or is_borne_out or _within(value, before, max_change) == value:
        return value, capacity.drafted_steps_per_token if is_borne_out else steps, ""
    is_fall = value < before
    doubtful = model.capacity(_traffic(one, (one.high if is_fall else one.low) or one.gains) for one in workloads)
    near = _within(value, before, max_change)
    used = max(value, min(near, doubtful.tokens_per_s)) if is_fall else min(value, max(near, doubtful.tokens_per_s))
    if used == value:
        return value, steps, ""
    if not max_change:
        return used, steps, f" (not {value:.0f} yet: {num_steps:.0f} steps tell too little)"
    return used, steps, f" (on the way to {value:.0f}, at most {100 * max_change:.0f} % a decision)"


def _within(value: float, before: float | None, max_change: float) -> float:
    if before is None or before <= 0:
        return value
    return min(max(value, before / (1 + max_change)), before / (1 - max_change))


def _excess(inputs: Inputs, capacity: Capacity) -> float:
    """Requests that the wanted replicas will not have in their best batches."""
    return max(0.0, inputs.target.ongoing_requests - inputs.target.num_wanted * capacity.num_requests)


def _backlog_tokens(
    inputs: Inputs, capacity: Capacity, arriving: float, used: float, settings: AutoscalingSettings
) -> float:
    """Output tokens that will wait when a replica ordered now serves: those of the requests that the wanted replicas
    will not have in their best batches, and what comes until then beyond what replicas are planned to give. Of those
    that are starting half is taken to serve: when they were ordered is not known."""
    rate = sum(one.requests_per_s for one in inputs.workloads)
    tokens = sum(one.requests_per_s * one.output_tokens for one in inputs.workloads) / rate
    serving = (inputs.target.num_running + inputs.target.num_wanted) / 2
    waiting = _excess(inputs, capacity) * tokens
    return max(0.0, waiting + (arriving - serving * settings.utilisation * used) * settings.start_time_s)


def _may_shrink(inputs: Inputs, settings: AutoscalingSettings) -> str:
    """Why the counts must not go down; "" where they may."""
    pool = inputs.target
    if inputs.num_unusable:
        return f"{inputs.num_unusable} replicas do not report"
    if pool.num_running < pool.num_wanted:
        return f"{pool.num_wanted - pool.num_running} replicas are starting"
    if inputs.settled_s < settings.warmup_s:
        return "the newest replica is not warm yet"
    return ""


def _with_dead_band(
    needed: float, sparse: float, pool: Pool, bounds: ReplicaRange, settings: AutoscalingSettings, kept: str
) -> tuple[int, str]:
    """From a need to a number. `sparse`: the need when replicas are filled to the dead band only, `kept`: why the
    number must not go down."""
    up, down = math.ceil(needed - max(UP_TOLERANCE * pool.num_wanted, 1e-9)), math.ceil(sparse - 1e-9)
    if up > pool.num_wanted:
        asked, why = up, ""
    elif down < pool.num_wanted and kept:
        asked, why = pool.num_wanted, f", but {kept}"
    elif down < pool.num_wanted:
        asked, why = down, ""
    else:
        asked, why = pool.num_wanted, ", within the dead band" if up < pool.num_wanted else ""
    # A target that has requests, or had one a while ago, keeps a replica: only idle_s takes it to zero.
    least = max(1, bounds.min) if bounds.max else 0
    wanted = min(bounds.max, max(least, asked))
    return wanted, why + (_bounded(asked, wanted, bounds) if asked != wanted else "")


def _drafters(
    passes_per_s: float,
    target: int,
    inputs: Inputs,
    settings: AutoscalingSettings,
    passes: PassTimes | None,
    may_shrink: str,
) -> int | None:
    if settings.drafter is None:
        return None
    if passes is None or inputs.drafter is None:
        return _in_proportion(target, inputs, settings, may_shrink=not may_shrink)
    needed = passes_per_s / (0.6 * passes.passes_per_s())
    kept = may_shrink
    if inputs.drafter.num_running < inputs.drafter.num_wanted:
        kept = "drafters are starting"
    return _with_dead_band(needed, needed / DEAD_BAND, inputs.drafter, settings.drafter, settings, kept)[0]


def _parts(arriving: float, backlog: float, growth: float) -> str:
    parts = [f"{arriving:.0f} arriving"]
    if growth:
        parts.append(f"{100 * growth:+.0f} % of it by the trend")
    if backlog >= 0.5:
        parts.append(f"{backlog:.0f} of backlog")
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _bounded(asked: int, wanted: int, bounds: ReplicaRange) -> str:
    return f", held to {wanted} by the bounds {bounds.min}..{bounds.max}" if asked != bounds.clamp(asked) else ""


def _joined(said: str, bounded: str, inputs: Inputs) -> str:
    return "; ".join([said + bounded, *inputs.notes])


# ====================================================================================================
# Autoscaling from acceptance: the object that Serve's policy, and the simulation, ask for replica counts.
#
# Enters: what Serve says of the deployments, and the replicas' counters (`Observation`). Leaves: a `Decision`, and for
# every decision made anew a line for the log, from which `benchmarks.scaling_replay` makes the same decision again. Never
# knows: Ray, files, the time of day. The parts: `scaling_counters` (what is new in the counters), `scaling_traffic`
# (rates and lengths), `scaling_memory` (survivals), `scaling_capacity` (what a replica gives), `scaling_decision` (the
# rule).
#
# `decide` raises nothing but programming errors: bad readings are left out and named in the reason. Serve calls a policy
# several times a second; a decision is made every `decision_interval_s` and stands in between.

__all__ = [
    "CapacityModel",
    "CounterExport",
    "Decision",
    "Inputs",
    "Observation",
    "Pool",
    "Reading",
    "ScalingPolicy",
    "WorkloadTotals",
]

LOG_FORMAT = "peagle scaling 1"

MAX_LOG = 1000
"""Decisions kept for `take_log`; the oldest go first."""

MAX_DECLINE = 0.5
"""Of the measured arrivals, by which a falling trend makes the present ones fewer."""

BACKWARD_STEP_S = 1.0
"""A clock that goes back by more was set."""


@dataclass(frozen=True)
class Observation:
    """What is known at a tick. `now_s`: the caller's clock, monotonic by preference. `running`: names of the target
    replicas that serve. `readings`: their newest exports; those seen before may come again."""

    now_s: float
    target: Pool
    running: Collection[str]
    readings: Collection[Reading] = ()
    drafter: Pool | None = None


@dataclass
class _Memory:
    """What a decision leaves for the next."""

    decided_s: float | None = None
    decision: Decision | None = None
    capacity: float | None = None
    steps: float | None = None
    unsettled_s: float | None = None
    last_s: float | None = None
    notes: dict[str, float] = field(default_factory=dict)


class ScalingPolicy:
    """Decides replica counts. Not thread-safe.

    Args:
        settings: the section `autoscaling`.
        costs: of the steps of the targets' engine; None only with the policy `queue_length`.
        max_num_seqs: requests that an engine runs at a time.
        max_ongoing_requests: requests that Serve lets a target replica hold at a time.
        max_k, pinned, pinned_default: the operator's limits of K (`CapacityModel`).
        passes: pass times of a remote drafter.

    Raises:
        ValueError: the policy `acceptance` without step costs.
    """

    def __init__(
        self,
        settings: AutoscalingSettings,
        costs: StepCosts | None,
        *,
        max_num_seqs: int,
        max_ongoing_requests: int,
        max_k: int,
        pinned: Mapping[str, int] | None = None,
        pinned_default: int | None = None,
        passes: PassTimes | None = None,
    ) -> None:
        if costs is None and settings.policy == "acceptance":
            raise ValueError("autoscaling.policy is acceptance, which needs step costs")
        self.settings, self._costs, self._passes = settings, costs, passes
        self._limits = {
            "max_num_seqs": max_num_seqs,
            "max_k": max_k,
            "pinned": dict(pinned or {}),
            "pinned_default": pinned_default,
        }
        self.model = None if costs is None else capacity_model(settings, costs, self._limits)
        self.memory = AcceptanceMemory(max_k)
        max_steps_per_s = self.model.max_steps_per_s if self.model else float("inf")
        self._counters = CounterBook(Limits(max_ongoing_requests, max_steps_per_s))
        self._traffic = TrafficHistory()
        self._memory = _Memory()
        self._head_line: dict[str, Any] | None = self._header()
        self._log: deque[dict[str, Any]] = deque(maxlen=MAX_LOG)

    def decide(self, observation: Observation) -> Decision:
        """The wanted counts now. Between decisions the last one stands, except that a target at zero replicas with
        requests is decided at once."""
        now_s = self._clock(observation.now_s)
        memory = self._memory
        pool = self._sound(observation.target)
        observation = dataclasses.replace(observation, target=pool)
        if pool.num_running < pool.num_wanted or memory.unsettled_s is None:
            memory.unsettled_s = now_s
        self._absorb(observation, now_s)
        is_woken = pool.num_wanted == 0 and pool.ongoing_requests + pool.queued_requests > 0
        if is_woken or (pool.num_running == 0 and pool.num_wanted > 0):
            self._traffic.note_busy(now_s)
        due = memory.decided_s is None or now_s - memory.decided_s >= self.settings.decision_interval_s
        if memory.decision is not None and not due and not is_woken:
            return memory.decision
        inputs = self._inputs(observation, now_s)
        decision = decide(inputs, self.model, self.settings, self._passes)
        memory.decided_s, memory.decision = now_s, decision
        if decision.capacity_tokens_per_s is not None:
            memory.capacity = decision.capacity_tokens_per_s
        if decision.drafted_steps_per_token is not None:
            memory.steps = decision.drafted_steps_per_token
        memory.notes = {}
        self._log.append(record(inputs, decision))
        return decision

    def take_log(self) -> list[str]:
        """The lines since the last call, JSON; the first of all has settings and tables."""
        head = [] if self._head_line is None else [self._head_line]
        lines = [json.dumps(one, separators=(",", ":"), allow_nan=False) for one in (*head, *self._log)]
        self._head_line = None
        self._log.clear()
        return lines

    def _clock(self, now_s: float) -> float:
        """Times that never go back: where the caller's clock was set back, what is remembered moves along."""
        memory = self._memory
        if memory.last_s is not None and now_s < memory.last_s:
            by_s = now_s - memory.last_s
            self._counters.shift_clock(by_s)
            self._traffic.shift_clock(by_s)
            memory.decided_s = None if memory.decided_s is None else memory.decided_s + by_s
            memory.unsettled_s = None if memory.unsettled_s is None else memory.unsettled_s + by_s
            if -by_s > BACKWARD_STEP_S:
                memory.notes[f"the clock went back by {-by_s:.0f} s"] = now_s
        memory.last_s = now_s
        return now_s

    def _sound(self, pool: Pool) -> Pool:
        """The pool with numbers of requests that can be: what is no number counts as none."""
        numbers = pool.ongoing_requests, pool.queued_requests
        if all(math.isfinite(number) and number >= 0 for number in numbers):
            return pool
        self._memory.notes[f"requests are said to be {numbers[0]}, {numbers[1]} of them queued"] = 0.0
        sound = (number if math.isfinite(number) and number >= 0 else 0.0 for number in numbers)
        return Pool(pool.num_running, pool.num_wanted, *sound)

    def _absorb(self, observation: Observation, now_s: float) -> None:
        self._counters.note_running(observation.running, now_s)
        new = self._counters.absorb(observation.readings, now_s)
        self.memory.absorb_all(new.reports)
        if new.num_new:
            self._traffic.add(new.totals, observation.target.queued_requests, now_s)
        for replica in new.restarted:
            self._memory.notes[f"{replica} restarted"] = now_s
        for replica, problem in new.nonsense.items():
            self._memory.notes[f"{replica} is left out: {problem}"] = now_s

    def _inputs(self, observation: Observation, now_s: float) -> Inputs:
        settings, memory = self.settings, self._memory
        reporting, unusable, _ = self._counters.usable(now_s, STALE_AFTER_S, observation.running)
        workloads = []
        rates = self._traffic.rates(now_s)
        for name, rate in rates.items():
            if rate.output_tokens is None or rate.prompt_tokens is None:
                continue
            one = self.memory.survival(name)
            worth = one.gains()
            low, high = (as_drawn(end, one.mean, worth) for end in (one.low, one.high))
            lengths = rate.output_tokens, rate.prompt_tokens
            workloads.append(WorkloadDemand(name, rate.requests_per_s, *lengths, worth, one.num_steps, low, high))
        return Inputs(
            now_s=now_s,
            target=observation.target,
            drafter=observation.drafter,
            workloads=tuple(workloads),
            growth=_growth(self._traffic.trend(now_s), rates.values(), settings.start_time_s),
            history_s=self._traffic.history_s(now_s),
            num_reporting=reporting,
            num_unusable=unusable,
            idle_s=self._traffic.idle_s(now_s),
            settled_s=now_s - (now_s if memory.unsettled_s is None else memory.unsettled_s),
            capacity_before=memory.capacity,
            steps_before=memory.steps,
            notes=tuple(memory.notes),
        )

    def _header(self) -> dict[str, Any]:
        return {
            "format": LOG_FORMAT,
            "settings": self.settings.model_dump(),
            "step_costs": None if self._costs is None else self._costs.to_wire(),
            "pass_times": None if self._passes is None else self._passes.model_dump(),
            "limits": self._limits,
        }


def _growth(trend: float, rates: Collection[Rate], start_time_s: float) -> float:
    """Relative growth from the middle of the windows that the rates are of, to now; where it is a rise, to when a
    replica ordered now serves."""
    total = sum(one.requests_per_s for one in rates)
    age_s = sum(one.requests_per_s * one.window_s for one in rates) / (2 * total) if total else 0.0
    return max(-MAX_DECLINE, trend * (age_s + (start_time_s if trend > 0 else 0.0)))


def capacity_model(settings: AutoscalingSettings, costs: StepCosts, limits: Mapping[str, Any]) -> CapacityModel:
    """The model for these settings."""
    max_tpot_s = None if settings.max_tpot_ms is None else settings.max_tpot_ms / 1000
    return CapacityModel(costs, max_tpot_s=max_tpot_s, **limits)


def record(inputs: Inputs, decision: Decision) -> dict[str, Any]:
    """A decision with everything it was made from, for JSON."""
    return {"inputs": dataclasses.asdict(inputs), "decision": dataclasses.asdict(decision)}
