"""How many replicas of target and drafter: from demand and acceptance, a decision with its inputs and its reason.

Enters: what Serve says of the deployments, and the targets' reports. Leaves: a `Decision`. Never knows: Ray,
files, the time of day. `ScalingPolicy` keeps what a decision needs to remember; `decide` is pure.

    D = (1 + growth) sum_c rate_c length_c
    N_target = ceil(max(D / (utilisation mu), (D + backlog / DRAIN_S) / mu))

(policy-and-apis, D4; mu: `cluster.capacity`). The backlog is what will wait when a replica ordered now serves: what no
wanted replica has in its best batch, and what comes until then beyond what is planned for. Up when the need is beyond
the wanted number by more than `UP_TOLERANCE`; down only when D fits in fewer at `DEAD_BAND` of the utilisation, every
replica reports, none is starting and the last one to start is warm. A change of capacity enters as far as the interval
of acceptance or a backlog bears it out, and beyond that by at most `MAX_CHANGE` a decision. On missing or stale data:
as many as the queue length asks for, and never fewer than there are. Drafters follow the targets in proportion to their
bounds: a target's step of one request needs one pass, whatever it accepts.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from cluster.acceptance import AcceptancePosteriors, AcceptanceRates
from cluster.capacity import Capacity, CapacityModel, WorkloadDemand
from cluster.counts import CounterDeltas
from cluster.settings import STALE_AFTER_S, AutoscalingSettings, ReplicaRange
from cluster.step_latency import StepLatency, average_latency
from cluster.traffic import Rate, ReportBook, TrafficHistory

Source = Literal["acceptance", "queue_length", "idle"]

DEAD_BAND = 0.9
"""A replica goes only when the demand fits in the others at this share of the utilisation."""

MAX_CHANGE = 0.2
"""The largest change of capacity in one decision, as a share."""

DRAIN_S = 60.0
"""The time in which full replicas are to work off a backlog."""

MIN_STEPS = 100.0
"""Independent verification steps of all workloads together below which acceptance is not known."""

MIN_TIMED_STEPS = 100.0
"""Engine steps after which an engine without points of its start knows its step times."""

MIN_HISTORY_S = 30.0
"""Seconds for which arrivals must have been counted."""

UP_TOLERANCE = 0.05
"""Share of the wanted replicas by which the need must exceed them. At constant traffic it varies by about 3 %."""

SILENT_SHARE = 0.5
"""Share of the known replicas that must report; the others then count as equal to these."""

MAX_DECLINE = 0.5
"""The largest share by which a falling trend reduces the measured arrivals."""


@dataclass(frozen=True)
class Pool:
    """A deployment as Serve sees it: replicas that serve, and Serve's target number; requests that run or are queued, a
    mean over Serve's look-back period, and of these the queued ones."""

    num_running: int
    num_wanted: int
    ongoing_requests: float = 0.0
    queued_requests: float = 0.0


@dataclass(frozen=True)
class Inputs:
    """Everything that a decision depends on, besides settings.

    Attributes:
        drafter: None where it is colocated, or not known.
        workloads: those with arrivals.
        latency: of the targets' steps; None where no replica knows it.
        growth: expected relative growth of the arrivals since they were measured, and where they rise, until a replica
            decided now serves.
        history_s: seconds for which arrivals have been counted.
        num_reporting, num_unusable: replicas that report, and those that report nonsense or stopped reporting.
        idle_s: seconds without an arrival.
        settled_s: seconds for which every wanted replica has been running.
        capacity_before: capacity per replica (tokens/s) of the last decision.
        notes: what happened to the data, in words.
    """

    target: Pool
    drafter: Pool | None = None
    workloads: tuple[WorkloadDemand, ...] = ()
    latency: StepLatency | None = None
    growth: float = 0.0
    history_s: float = 0.0
    num_reporting: int = 0
    num_unusable: int = 0
    idle_s: float = 0.0
    settled_s: float = 0.0
    capacity_before: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Wanted replicas and why; `dataclasses.asdict` makes it JSON.

    Attributes:
        target, drafter: wanted numbers; drafter None: there is no drafter deployment.
        source: what decided.
        demand_tokens_per_s: D, None where it is not known; likewise the following.
        capacity_tokens_per_s: mu as used, after the limit of its change; `measured_capacity_tokens_per_s` before it.
        acceptance_length, num_requests, depths: of a replica at its capacity: mean AL, the batch, K by workload.
        needed: replicas of the target that the demand needs, before dead band and bounds; a fraction.
    """

    inputs: Inputs
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
    needed: float | None = None


def decide(inputs: Inputs, model: CapacityModel, settings: AutoscalingSettings) -> Decision:
    if settings.policy == "queue_length":
        return _by_queue(inputs, settings, "")
    is_idle = inputs.target.ongoing_requests == 0 and not inputs.target.queued_requests
    if settings.scale_to_zero and is_idle and inputs.idle_s >= settings.idle_s and not inputs.num_unusable:
        reason = f"no request for {inputs.idle_s:.0f} s: scaled to zero"
        return Decision(inputs, 0, _drafters(0, inputs, settings), "idle", reason)
    if missing := _missing(inputs):
        return _by_queue(inputs, settings, missing)
    return _by_acceptance(inputs, model, settings)


def _missing(inputs: Inputs) -> str:
    """Why acceptance cannot decide; "" where it can."""
    known = inputs.num_reporting + inputs.num_unusable
    if not inputs.num_reporting:
        return "no replica reports"
    if inputs.num_reporting < SILENT_SHARE * known:
        return f"only {inputs.num_reporting} of {known} replicas report"
    if inputs.latency is None:
        return "no replica knows yet what its steps take"
    if inputs.history_s < MIN_HISTORY_S:
        return f"arrivals have been counted for {inputs.history_s:.0f} s only"
    if not inputs.workloads and inputs.target.ongoing_requests > 0:
        return "requests run, but no replica has counted one that ended"
    return ""


def _by_queue(inputs: Inputs, settings: AutoscalingSettings, missing: str) -> Decision:
    """Serve's rule: ongoing requests over the number that a replica should have. Never down where acceptance should
    decide and data is `missing`."""
    pool = inputs.target
    asked = math.ceil(pool.ongoing_requests / settings.target_ongoing_requests - 1e-9)
    if pool.ongoing_requests > 0 or (pool.num_wanted and inputs.idle_s < settings.idle_s):
        asked = max(1, asked)  # only `idle_s` without a request takes the target to zero
    wanted = settings.target.clamp(max(asked, pool.num_wanted) if missing else asked)
    reason = (
        f"{pool.ongoing_requests:.1f} ongoing requests at {settings.target_ongoing_requests:g} a replica ask for "
        f"{asked}{_bounded(asked, settings.target)}"
    )
    if missing:
        reason = f"{missing}, so by queue length and never down: {reason}"
    drafter = _drafters(wanted, inputs, settings, may_shrink=not missing)
    return Decision(inputs, wanted, drafter, "queue_length", "; ".join([reason, *inputs.notes]))


def _drafters(target: int, inputs: Inputs, settings: AutoscalingSettings, *, may_shrink: bool = True) -> int | None:
    if settings.drafter is None:
        return None
    number = math.ceil(target * settings.drafter.max / settings.target.max)
    if not may_shrink and inputs.drafter is not None:
        number = max(number, inputs.drafter.num_wanted)
    return settings.drafter.clamp(number)


def _by_acceptance(inputs: Inputs, model: CapacityModel, settings: AutoscalingSettings) -> Decision:
    pool, workloads = inputs.target, [demand for demand in inputs.workloads if demand.requests_per_s > 0]
    kept = _kept_because(inputs, settings)
    if not workloads:
        target, why = _with_dead_band(0.0, 0.0, pool, settings.target, kept)
        drafter = _drafters(target, inputs, settings, may_shrink=not kept)
        reason = "; ".join([f"no arrivals for {inputs.idle_s:.0f} s{why}", *inputs.notes])
        before = inputs.capacity_before
        return Decision(inputs, target, drafter, "acceptance", reason, 0.0, before, needed=0.0)
    assert inputs.latency is not None
    capacity = model.capacity(inputs.latency, workloads)
    used, limited = _used(capacity, model, inputs, inputs.latency, workloads)
    num_known = inputs.num_reporting + inputs.num_unusable
    counted = sum(demand.tokens_per_s for demand in workloads)
    arriving = counted * num_known / inputs.num_reporting * (1.0 + inputs.growth)
    backlog = _backlog_tokens(inputs, capacity, arriving, used, settings) / DRAIN_S
    demand = arriving + backlog
    # A backlog is worked off by full replicas: `utilisation` is for traffic that lasts.
    drained = demand / used if backlog else 0.0
    planned = arriving / (settings.utilisation * used)
    needed = max(planned, drained) + settings.spare_replicas
    sparse = max(planned / DEAD_BAND, drained) + settings.spare_replicas
    target, why = _with_dead_band(needed, sparse, pool, settings.target, kept)
    full = f"{100 * settings.utilisation:.0f} %" if planned >= drained else "the full, until the backlog is gone"
    reason = (
        f"{demand:.0f} tokens/s wanted{_parts(arriving, backlog, inputs.growth)}, a replica gives {used:.0f} at AL "
        f"{capacity.acceptance_length:.2f} and batch {capacity.num_requests}{limited}, planned to {full}: "
        f"{needed:.2f} replicas{why}"
    )
    if capacity.missed:
        reason += f"; {', '.join(capacity.missed)} cannot keep max_tpot_ms on any number of replicas"
    return Decision(
        inputs=inputs,
        target=target,
        drafter=_drafters(target, inputs, settings, may_shrink=not kept),
        source="acceptance",
        reason="; ".join([reason, *inputs.notes]),
        demand_tokens_per_s=demand,
        capacity_tokens_per_s=used,
        measured_capacity_tokens_per_s=capacity.tokens_per_s,
        acceptance_length=capacity.acceptance_length,
        num_requests=capacity.num_requests,
        depths=dict(capacity.depths),
        needed=needed,
    )


def _used(
    capacity: Capacity, model: CapacityModel, inputs: Inputs, latency: StepLatency, workloads: Sequence[WorkloadDemand]
) -> tuple[float, str]:
    """The capacity to plan with, and in words why it is not the computed one.

    A change enters at once as far as the interval of acceptance supports it. Of the rest at most `MAX_CHANGE` enters at
    a decision, and none on few steps; the number of replicas is inverse to the capacity.
    """
    value, before = capacity.tokens_per_s, inputs.capacity_before
    if before is None or before <= 0:
        return value, ""
    num_steps = sum(demand.num_steps for demand in inputs.workloads)
    max_change = MAX_CHANGE if num_steps >= MIN_STEPS else 0.0
    near = min(max(value, before / (1 + max_change)), before / (1 - max_change))
    # Where requests pile up too, a fall of capacity is not in doubt.
    if near == value or (value < before and _excess(inputs, capacity) > 0):
        return value, ""
    is_fall = value < before
    ends = [replace(demand, rates=(demand.high if is_fall else demand.low) or demand.rates) for demand in workloads]
    supported = model.capacity(latency, ends).tokens_per_s
    used = max(value, min(near, supported)) if is_fall else min(value, max(near, supported))
    if used == value:
        return value, ""
    if not max_change:
        return used, f" (not {value:.0f} yet: {num_steps:.0f} steps tell too little)"
    return used, f" (on the way to {value:.0f}, at most {100 * max_change:.0f} % a decision)"


def _excess(inputs: Inputs, capacity: Capacity) -> float:
    """Requests that do not fit in the best batches of the wanted replicas."""
    return max(0.0, inputs.target.ongoing_requests - inputs.target.num_wanted * capacity.num_requests)


def _backlog_tokens(
    inputs: Inputs, capacity: Capacity, arriving: float, used: float, settings: AutoscalingSettings
) -> float:
    """Output tokens that will wait when a replica ordered now serves: those of the requests that do not fit in the best
    batches of the wanted replicas, and arrivals until then beyond what replicas are planned to give. Half of the
    starting replicas count as serving, because it is not known when they were ordered."""
    rate = sum(demand.requests_per_s for demand in inputs.workloads)
    tokens_each = sum(demand.tokens_per_s for demand in inputs.workloads) / rate
    serving = (inputs.target.num_running + inputs.target.num_wanted) / 2
    waiting = _excess(inputs, capacity) * tokens_each
    return max(0.0, waiting + (arriving - serving * settings.utilisation * used) * settings.start_time_s)


def _kept_because(inputs: Inputs, settings: AutoscalingSettings) -> str:
    """Why the counts must not go down; "" where they may."""
    pool = inputs.target
    if inputs.num_unusable:
        return f"{inputs.num_unusable} replicas do not report"
    if pool.num_running < pool.num_wanted:
        return f"{pool.num_wanted - pool.num_running} replicas are starting"
    if inputs.settled_s < settings.warmup_s:
        return "the newest replica is not warm yet"
    return ""


def _with_dead_band(needed: float, sparse: float, pool: Pool, bounds: ReplicaRange, kept: str) -> tuple[int, str]:
    """The number of replicas for a need, and in words what limited it. `sparse`: the need when replicas are filled to
    the dead band only; `kept`: why the number must not go down."""
    up, down = math.ceil(needed - max(UP_TOLERANCE * pool.num_wanted, 1e-9)), math.ceil(sparse - 1e-9)
    if up > pool.num_wanted:
        asked, why = up, ""
    elif down < pool.num_wanted and kept:
        asked, why = pool.num_wanted, f", but {kept}"
    elif down < pool.num_wanted:
        asked, why = down, ""
    else:
        asked, why = pool.num_wanted, ", within the dead band" if up < pool.num_wanted else ""
    # Only `idle_s` without a request takes the target to zero.
    wanted = min(bounds.max, max(1, bounds.min, asked))
    return wanted, why + (_bounded(asked, bounds) if asked != wanted else "")


def _parts(arriving: float, backlog: float, growth: float) -> str:
    parts = [f"{arriving:.0f} arriving"]
    if growth:
        parts.append(f"{100 * growth:+.0f} % of it by the trend")
    if backlog >= 0.5:
        parts.append(f"{backlog:.0f} of backlog")
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _bounded(asked: int, bounds: ReplicaRange) -> str:
    wanted = bounds.clamp(asked)
    return f", held to {wanted} by the bounds {bounds.min}..{bounds.max}" if asked != wanted else ""


# ====================================================================================================
# What is remembered between decisions.

HALF_LIVES_STEPS = (20_000.0, 3_000.0, 500.0)
"""Of the memories of acceptance. The first is longer than for the choice of K, because replicas take minutes and K a
step. The last holds about 180 independent steps: AL with a standard error of 0.11."""

CONTRADICTION, AGREEMENT = 2.0, 0.5
"""Differences of AL in half widths of both 90 % intervals together, from which on memories contradict each other (3.3
standard errors), and up to which they agree."""


class AcceptanceMemory:
    """What is believed of acceptance when replicas take minutes to start; not thread-safe.

    One memory would be too slow after a collapse or too uncertain before it. Each workload uses the longest memory that
    no shorter one contradicts. A contradicted memory is out of date, and is used again when it agrees with the one that
    replaced it.
    """

    def __init__(self, max_draft_tokens: int, half_lives_steps: Sequence[float] = HALF_LIVES_STEPS) -> None:
        self._posteriors = [AcceptancePosteriors(max_draft_tokens, half_life_steps=steps) for steps in half_lives_steps]
        self._in_use: dict[tuple[str, str], int] = {}

    def update(self, deltas: CounterDeltas) -> None:
        for posteriors in self._posteriors:
            posteriors.update(deltas)

    def rates(self, workload: str) -> AcceptanceRates:
        key = self._posteriors[0].head_of(workload), workload
        if len(self._in_use) > 2 * len(self._posteriors[0].workloads()) + 64:
            self._in_use = {}  # mostly names that the posteriors have forgotten
        believed = [posteriors.rates(workload) for posteriors in self._posteriors]
        current = self._in_use.get(key, 0)
        current = next((i for i in range(current) if _distance(believed[i], believed[current]) <= AGREEMENT), current)
        while any(_distance(believed[current], shorter) > CONTRADICTION for shorter in believed[current + 1 :]):
            current += 1
        self._in_use[key] = current
        return believed[current]


def _distance(a: AcceptanceRates, b: AcceptanceRates) -> float:
    """Difference of AL at K_max against what the intervals allow."""
    half_widths = (sum(a.high) - sum(a.low) + sum(b.high) - sum(b.low)) / 2
    return abs(sum(a.mean) - sum(b.mean)) / half_widths if half_widths else 0.0


class ScalingPolicy:
    """Decides replica counts. Not thread-safe. Bad data raises nothing: it is left out, and the reason names it.

    Args:
        settings: the section `autoscaling`.
        model: limits of a target replica.
        max_ongoing_requests: the most requests that Serve gives to a target replica at a time.
    """

    def __init__(self, settings: AutoscalingSettings, model: CapacityModel, max_ongoing_requests: int) -> None:
        self.settings, self.model = settings, model
        self.memory = AcceptanceMemory(model.max_k)
        self._reports = ReportBook(max_ongoing_requests)
        self._traffic = TrafficHistory()
        self._capacity: float | None = None
        self._unsettled_s: float | None = None

    def decide(
        self,
        now_s: float,
        target: Pool,
        running: Collection[str],
        reports: Mapping[str, Any],
        drafter: Pool | None = None,
    ) -> Decision:
        """The wanted numbers of replicas at `now_s`, monotonic.

        `running`: names of the target replicas that serve; `reports`: their newest ones, as `ReportBook.take` gets
        them. A negative or infinite number of requests counts as 0.
        """
        notes = []
        numbers = target.ongoing_requests, target.queued_requests
        usable = [number if 0 <= number < math.inf else 0.0 for number in numbers]
        if usable != list(numbers):
            notes.append(f"requests are said to be {numbers[0]}, {numbers[1]} of them queued")
            target = Pool(target.num_running, target.num_wanted, *usable)
        if target.num_running < target.num_wanted or self._unsettled_s is None:
            self._unsettled_s = now_s
        deltas, arrived = self._reports.take(reports, running, now_s)
        self.memory.update(deltas)
        if arrived is not None:
            self._traffic.add(arrived, target.queued_requests, now_s)
        is_waking = target.num_running == 0 and (target.num_wanted > 0 or target.ongoing_requests > 0)
        if is_waking:
            self._traffic.note_busy(now_s)
        notes += [f"{replica} restarted" for replica in deltas.restarted]
        notes += [f"{replica} is left out: {why}" for replica, why in self._reports.nonsense.items()]
        fresh = self._reports.fresh(now_s, STALE_AFTER_S)
        rates = self._traffic.rates(now_s)
        latencies = [report.step_latency for report in fresh if report.step_latency is not None]
        known = [found for found in latencies if found.is_measured or found.num_steps >= MIN_TIMED_STEPS]
        inputs = Inputs(
            target=target,
            drafter=drafter,
            workloads=tuple(self._demand(name, rate) for name, rate in rates.items() if rate.lengths is not None),
            latency=average_latency(known) if known else None,
            growth=_growth(self._traffic.trend(now_s), rates.values(), self.settings.start_time_s),
            history_s=self._traffic.history_s(now_s),
            num_reporting=len(fresh),
            num_unusable=self._reports.num_unusable(now_s, STALE_AFTER_S),
            idle_s=self._traffic.idle_s(now_s),
            settled_s=now_s - self._unsettled_s,
            capacity_before=self._capacity,
            notes=tuple(notes),
        )
        decision = decide(inputs, self.model, self.settings)
        if decision.capacity_tokens_per_s is not None:
            self._capacity = decision.capacity_tokens_per_s
        return decision

    def _demand(self, name: str, rate: Rate) -> WorkloadDemand:
        assert rate.lengths is not None
        believed = self.memory.rates(name)
        # The ends of intervals are taken position by position, and may cross by a rounding.
        low, high = (tuple(accumulate(end, min)) for end in (believed.low, believed.high))
        return WorkloadDemand(name, rate.requests_per_s, *rate.lengths, believed.mean, believed.num_steps, low, high)


def _growth(trend: float, rates: Collection[Rate], start_time_s: float) -> float:
    """Relative growth from the middle of the rates' windows to now; of a rise, to when a replica ordered now serves."""
    total = sum(rate.requests_per_s for rate in rates)
    age_s = sum(rate.requests_per_s * rate.window_s for rate in rates) / (2 * total) if total else 0.0
    return max(-MAX_DECLINE, trend * (age_s + (start_time_s if trend > 0 else 0.0)))
