"""How many replicas of target and drafter: from demand and acceptance, a decision with its reason.

Enters: counter deltas and reports of the targets, what the choice of K has learned of acceptance and step latency, and
what Serve says of the deployments. Leaves: a `Decision`. Never knows: Ray, files, the time of day.

    D = sum_c rate_c length_c
    N_target = ceil(max(D / (utilisation mu), (D + backlog / DRAIN_S) / mu))

D is the demand and mu the capacity of one replica (`replica_capacity`), both in output tokens per second. The backlog
is what will wait when a replica that is ordered now begins to serve. It has two parts: what no wanted replica has in
its full batch, and what comes until then beyond what is planned for.

The number goes up when the need exceeds the wanted number by more than `UP_TOLERANCE`. It goes down only when D fits in
fewer replicas at `DEAD_BAND` of the utilisation, every replica reports, and none is starting, unless one should long
have come (`STUCK`). Serve follows a number that lasts. On missing or stale data its policy
(`deployments.autoscaling`) goes by queue length and takes no replica away. Drafters follow the targets in proportion to
their bounds: a target's step needs one pass, whatever it accepts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cluster.counts import CounterDeltas, TargetReport
from cluster.k_policy import Demand, KPolicy, best_ks
from cluster.request import base_workload
from cluster.settings import STALE_AFTER_S, AutoscalingSettings, ReplicaRange
from cluster.traffic import TrafficHistory, WorkloadTraffic

DEAD_BAND = 0.9
"""A replica goes only when the demand fits in the others at this share of the utilisation."""

UP_TOLERANCE = 0.05
"""Share of the wanted replicas by which the need must exceed them."""

DRAIN_S = 60.0
"""The time in which full replicas are to work off a backlog."""

LOAD_TIME_S = 10.0
"""Time constant of the mean number of ongoing requests."""

MIN_HISTORY_S, MIN_STEPS, MIN_TIMED_STEPS = 30.0, 400.0, 100.0
"""What must be known: seconds for which arrivals were counted; verification steps of all workloads; engine steps."""

SILENT_SHARE = 0.5
"""Share of the running replicas that must report; the others then count as equal to these."""

STUCK = 2.0
"""Start times without a further replica after which those that are starting are no longer waited for: the cluster may
have no room for them."""


@dataclass(frozen=True)
class Pool:
    """A deployment as Serve sees it: replicas that serve, and those that it wants."""

    num_running: int = 0
    num_wanted: int = 0


@dataclass(frozen=True)
class Decision:
    """Wanted replicas and why.

    Attributes:
        target: wanted number; None: as many as the queue length asks for.
        drafter: wanted number; None: there is no drafter deployment.
        source: what decided.
        ongoing_requests: mean number of requests in the targets, waiting ones included.
        demand_tokens_per_s: D, None where it is not known; likewise the following.
        capacity_tokens_per_s: mu.
        acceptance_length: mean AL of a replica's steps at its capacity.
        needed: replicas of the target that the demand needs, before dead band and bounds; a fraction.
    """

    target: int | None
    drafter: int | None
    source: Literal["acceptance", "queue_length", "idle"]
    reason: str
    ongoing_requests: float = 0.0
    demand_tokens_per_s: float | None = None
    capacity_tokens_per_s: float | None = None
    acceptance_length: float | None = None
    needed: float | None = None


def replica_capacity(k_policy: KPolicy, traffic: Mapping[str, WorkloadTraffic]) -> tuple[float, float]:
    """Output tokens per second of one target replica with a full batch, and the mean acceptance length of its steps.

        mu = 1 / (1 / R + p tau),   R = sum_c b_c L_c(k_c) / t(b, n)

    b is `max_num_seqs`, of which a workload has its share of the tokens in steps: b_c ~ d_c / L_c. k_c is the plan of
    `best_ks`. It is not the K in force, so that the choice of K and the number of replicas do not chase each other. p
    is the number of prompts per output token, and tau the time that one prompt adds to a step. So 1 - mu / R is the
    share of time that prompts take.

    `traffic`: at least one workload.
    """
    rules, latency, num_requests = k_policy.rules, k_policy.latency, k_policy.max_num_seqs
    demands = []
    for name in traffic:
        base = base_workload(name)
        is_free = rules.is_adaptive and base not in rules.by_workload
        low, high = (0, rules.max_k) if is_free else (rules.find_k(base)[0],) * 2
        demands.append(Demand(name, 1.0, k_policy.posteriors.rates(name).mean, high, low))
    tokens_C = np.array([each.tokens_per_s for each in traffic.values()])
    ks = [demand.max_k for demand in demands]
    for _ in range(2):  # K follows from the shares of a batch, and they from K
        shares_C = tokens_C / [each.acceptance_length(k) for each, k in zip(demands, ks, strict=True)]
        shares_C /= shares_C.sum()
        loads = (num_requests * shares_C).tolist()
        plan = best_ks([replace(each, num_requests=load) for each, load in zip(demands, loads, strict=True)], latency)
        ks = list(plan.ks.values())
    length = float(shares_C @ [each.acceptance_length(k) for each, k in zip(demands, ks, strict=True)])
    requests_C = np.array([each.requests_per_s for each in traffic.values()])
    prompt_tokens = float(requests_C @ [each.prompt_tokens for each in traffic.values()] / requests_C.sum())
    rows = num_requests * (1.0 + float(shares_C @ ks)), prompt_tokens
    prompt_s = latency.seconds(num_requests, *rows) - latency.seconds(num_requests, rows[0])
    prompts_per_token = float(requests_C.sum() / tokens_C.sum())
    return 1.0 / (1.0 / plan.tokens_per_s + prompts_per_token * prompt_s), length


class ScalingPolicy:
    """Decides replica counts. Not thread-safe; `now_s` is monotonic."""

    def __init__(self, settings: AutoscalingSettings) -> None:
        self.settings = settings
        self.traffic = TrafficHistory()
        self._reported_s: dict[str, float] = {}
        self._observed_s = -math.inf
        self._ongoing, self._is_busy = 0.0, False
        self._num_running, self._grown_s = 0, -math.inf

    def observe(self, deltas: CounterDeltas | None, reports: Sequence[TargetReport], now_s: float) -> None:
        """Add a round of reports; `deltas`: what `KPolicy.observe` found new in them."""
        self._reported_s |= {report.replica: now_s for report in reports}
        self._reported_s = {name: at for name, at in self._reported_s.items() if now_s - at <= STALE_AFTER_S}
        queued = sum(report.num_queued for report in reports)
        ongoing = queued + sum(report.num_running for report in reports)
        kept = math.exp((self._observed_s - now_s) / LOAD_TIME_S)
        self._ongoing, self._is_busy = kept * self._ongoing + (1 - kept) * ongoing, ongoing > 0
        self._observed_s = now_s
        if deltas is not None:
            self.traffic.add(deltas.workloads, queued, now_s)

    def decide(self, now_s: float, target: Pool, drafter: Pool | None, k_policy: KPolicy) -> Decision:
        """The wanted numbers of replicas at `now_s`. `drafter`: None where it is not known."""
        if target.num_running == 0 and target.num_wanted > 0:
            self.traffic.note_busy(now_s)  # the client that it starts for was told to come again
        settings, idle_s = self.settings, self.traffic.idle_s(now_s)
        if target.num_running > self._num_running or target.num_running >= target.num_wanted:
            self._grown_s = now_s
        self._num_running = target.num_running
        num_silent = max(0, target.num_running - len(self._reported_s))
        if settings.target.min == 0 and not self._is_busy and idle_s >= settings.idle_s and not num_silent:
            return Decision(0, self._num_drafters(0), "idle", f"no request for {idle_s:.0f} s: scaled to zero")
        traffic = self.traffic.by_workload()
        missing = self._find_missing(traffic, num_silent, k_policy, now_s)
        if missing or settings.policy == "queue_length":
            num_drafters = self._num_drafters(target.num_wanted)
            if missing and drafter is not None and num_drafters is not None:
                num_drafters = max(num_drafters, drafter.num_wanted)
            reason = f"{self._ongoing:.1f} ongoing requests at {settings.target_ongoing_requests:g} a replica"
            if missing and settings.policy == "acceptance":
                reason = f"{missing}, so by queue length and never down: {reason}"
            return Decision(None, num_drafters, "queue_length", reason, self._ongoing)
        kept = ""  # why the number must not go down
        if num_silent:
            kept = f"{num_silent} replicas do not report"
        elif target.num_running < target.num_wanted and now_s - self._grown_s <= STUCK * settings.start_time_s:
            kept = f"{target.num_wanted - target.num_running} replicas are starting"
        if not traffic:
            number, why = _apply_dead_band(0.0, 0.0, target.num_wanted, settings.target, kept)
            reason = f"no arrivals for {idle_s:.0f} s{why}"
            return Decision(number, self._num_drafters(number), "acceptance", reason, self._ongoing, 0.0, needed=0.0)
        return self._decide_by_acceptance(traffic, k_policy, target, num_silent, kept)

    def _find_missing(
        self, traffic: Mapping[str, WorkloadTraffic], num_silent: int, k_policy: KPolicy, now_s: float
    ) -> str:
        """Why acceptance cannot decide; "" where it can."""
        num_reporting, history_s = self._num_running - num_silent, self.traffic.history_s(now_s)
        if num_reporting < max(1, SILENT_SHARE * self._num_running):
            return f"only {num_reporting} of {self._num_running} replicas report"
        if history_s < MIN_HISTORY_S:
            return f"arrivals have been counted for {history_s:.0f} s only"
        if not traffic:
            return "requests run, but no replica has counted one that ended" if self._is_busy else ""
        latency, num_steps = k_policy.latency, k_policy.posteriors.num_steps
        if latency.num_steps < MIN_TIMED_STEPS:
            return "no replica knows yet what its steps take"
        rules = k_policy.rules
        may_draft = any(rules.find_k(base_workload(name))[0] for name in traffic) or (rules.is_adaptive and rules.max_k)
        if num_steps < MIN_STEPS and may_draft:
            return f"{num_steps:.0f} verified steps tell too little of acceptance"
        return ""

    def _decide_by_acceptance(
        self, traffic: Mapping[str, WorkloadTraffic], k_policy: KPolicy, target: Pool, num_silent: int, kept: str
    ) -> Decision:
        settings, (capacity, length) = self.settings, replica_capacity(k_policy, traffic)
        excess = max(0.0, self._ongoing - target.num_wanted * k_policy.max_num_seqs)
        counted = sum(each.tokens_per_s for each in traffic.values())
        tokens_each = counted / sum(each.requests_per_s for each in traffic.values())
        arriving = counted * target.num_running / (target.num_running - num_silent)
        # Half of the starting replicas count as serving, because it is not known when they were ordered.
        serving = (target.num_running + target.num_wanted) / 2
        piling_up = (arriving - serving * settings.utilisation * capacity) * settings.start_time_s
        backlog = max(0.0, excess * tokens_each + piling_up) / DRAIN_S
        # A backlog is worked off by full replicas: `utilisation` is for traffic that lasts.
        drained = (arriving + backlog) / capacity if backlog else 0.0
        planned = arriving / (settings.utilisation * capacity)
        needed, sparse = max(planned, drained), max(planned / DEAD_BAND, drained)
        number, why = _apply_dead_band(needed, sparse, target.num_wanted, settings.target, kept)
        full = f"{100 * settings.utilisation:.0f} %" if planned >= drained else "the full, until the backlog is gone"
        parts = f" ({backlog:.0f} of it backlog)" if backlog else ""
        parts += f", a replica gives {capacity:.0f}"
        return Decision(
            target=number,
            drafter=self._num_drafters(number),
            source="acceptance",
            reason=f"{arriving + backlog:.0f} tokens/s wanted{parts} at AL {length:.2f} and batch "
            f"{k_policy.max_num_seqs:.0f}, planned to {full}: {needed:.2f} replicas{why}",
            ongoing_requests=self._ongoing,
            demand_tokens_per_s=arriving + backlog,
            capacity_tokens_per_s=capacity,
            acceptance_length=length,
            needed=needed,
        )

    def _num_drafters(self, num_targets: int) -> int | None:
        if (bounds := self.settings.drafter) is None:
            return None
        return bounds.clamp(math.ceil(num_targets * bounds.max / self.settings.target.max))


def _apply_dead_band(needed: float, sparse: float, num_wanted: int, bounds: ReplicaRange, kept: str) -> tuple[int, str]:
    """The number of replicas for a need, and in words what limited it. `sparse`: the need when replicas are filled to
    the dead band only; `kept`: why the number must not go down."""
    up, down = math.ceil(needed - max(UP_TOLERANCE * num_wanted, 1e-9)), math.ceil(sparse - 1e-9)
    asked, why = num_wanted, ""
    if up > num_wanted:
        asked = up
    elif down < num_wanted and not kept:
        asked = down
    elif up < num_wanted:
        why = f", but {kept}" if down < num_wanted else ", within the dead band"
    number = bounds.clamp(max(1, asked))  # only `idle_s` without a request takes the target to zero
    return number, why if asked == number else f"{why}, held to {number} by the bounds {bounds.min}..{bounds.max}"
