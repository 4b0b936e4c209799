"""How many replicas of target and drafter: one decision from one set of numbers.

Enters: `Inputs`, everything known at one moment, and the capacity model. Leaves: a `Decision` with the numbers behind
it and its reason in words. Pure: the same inputs give the same decision, which is how a log is replayed
(`cluster.scaling_replay`). Never knows: how the inputs were measured, Ray.

    D = (1 + growth) sum_c rate_c length_c
    N_target = ceil(max(D / (utilisation mu), (D + backlog / drain_s) / mu))
    N_drafter = ceil((D + backlog / drain_s) s / (drafter_utilisation passes_per_s))

(policy-and-apis, D4; s: drafted steps per token). The backlog is what will wait when a replica ordered now serves: what
no wanted replica has in its best batch, and what comes until then beyond what is planned for. Up when the need is
beyond the wanted number by more than `UP_TOLERANCE`; down only when D fits in fewer at `dead_band` of the utilisation,
every replica reports, none is starting and the last one to start is warm. A change of capacity enters as far as the
interval of acceptance or a backlog bears it out, and beyond that by at most `max_change` a decision. On missing data:
as many as the queue length asks for, and never fewer than there are.
"""

import math
from collections.abc import Sequence

from cluster.scaling_capacity import Capacity, CapacityModel, PassTimes, Traffic
from cluster.scaling_records import Decision, Inputs, Pool, WorkloadDemand
from cluster.scaling_settings import AutoscalingSettings, ReplicaRange

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
    backlog = _backlog_tokens(inputs, capacity, arriving, used, settings) / settings.drain_s
    # A backlog is worked off by full replicas: `utilisation` is for traffic that lasts.
    drained = (arriving + backlog) / used if backlog else 0.0
    planned = arriving / (settings.utilisation * used)
    needed = max(planned, drained) + settings.spare_replicas
    sparse = max(planned / settings.dead_band, drained) + settings.spare_replicas
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
    max_change = settings.max_change if num_steps >= MIN_STEPS else 0.0
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
    needed = passes_per_s / (settings.drafter_utilisation * passes.passes_per_s())
    kept = may_shrink
    if inputs.drafter.num_running < inputs.drafter.num_wanted:
        kept = "drafters are starting"
    return _with_dead_band(needed, needed / settings.dead_band, inputs.drafter, settings.drafter, settings, kept)[0]


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
