"""Autoscaling from acceptance: the object that Serve's policy, and the simulation, ask for replica counts.

Enters: what Serve says of the deployments, and the replicas' counters (`Observation`). Leaves: a `Decision`, and for
every decision made anew a line for the log, from which `cluster.scaling_replay` makes the same decision again. Never
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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.scaling_capacity import CapacityModel, PassTimes
from cluster.scaling_counters import CounterBook, CounterExport, Limits, Reading, WorkloadTotals
from cluster.scaling_decision import decide
from cluster.scaling_memory import AcceptanceMemory
from cluster.scaling_records import Decision, Inputs, Pool, WorkloadDemand
from cluster.scaling_settings import AutoscalingSettings
from cluster.scaling_traffic import Rate, TrafficHistory
from cluster.step_time import StepTimes
from cluster.transfer import as_drawn

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
        times: step times of the targets' engine; None only with the policy `queue_length`.
        max_num_seqs: requests that an engine runs at a time.
        max_ongoing_requests: requests that Serve lets a target replica hold at a time.
        max_depth, pinned, pinned_default: the operator's limits of K (`CapacityModel`).
        passes: pass times of a remote drafter.

    Raises:
        ValueError: the policy `acceptance` without measured step times.
    """

    def __init__(
        self,
        settings: AutoscalingSettings,
        times: StepTimes | None,
        *,
        max_num_seqs: int,
        max_ongoing_requests: int,
        max_depth: int | None = None,
        pinned: Mapping[str, int] | None = None,
        pinned_default: int | None = None,
        passes: PassTimes | None = None,
    ) -> None:
        if times is None and settings.policy == "acceptance":
            raise ValueError("autoscaling.policy is acceptance, which needs step times: set depth.step_times")
        if times is not None and not times.measured and settings.policy == "acceptance":
            raise ValueError(
                "autoscaling.policy is acceptance, which needs step times that were measured on this engine"
            )
        # The log's header rounds times, and a replay must see the very numbers that were decided on.
        times = None if times is None else StepTimes.from_document(times.to_document())
        self.settings, self._times, self._passes = settings, times, passes
        self._limits = {
            "max_num_seqs": max_num_seqs,
            "max_depth": max_depth,
            "pinned": dict(pinned or {}),
            "pinned_default": pinned_default,
        }
        self.model = None if times is None else capacity_model(settings, times, self._limits)
        deepest = times.max_draft_tokens if times else 0
        self.memory = AcceptanceMemory(deepest)
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
        reporting, unusable, _ = self._counters.usable(now_s, settings.stale_after_s, observation.running)
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
            "step_times": None if self._times is None else self._times.to_document(),
            "pass_times": None if self._passes is None else self._passes.model_dump(),
            "limits": self._limits,
        }


def _growth(trend: float, rates: Collection[Rate], start_time_s: float) -> float:
    """Relative growth from the middle of the windows that the rates are of, to now; where it is a rise, to when a
    replica ordered now serves."""
    total = sum(one.requests_per_s for one in rates)
    age_s = sum(one.requests_per_s * one.window_s for one in rates) / (2 * total) if total else 0.0
    return max(-MAX_DECLINE, trend * (age_s + (start_time_s if trend > 0 else 0.0)))


def capacity_model(settings: AutoscalingSettings, times: StepTimes, limits: Mapping[str, Any]) -> CapacityModel:
    """The model for these settings."""
    max_tpot_s = None if settings.max_tpot_ms is None else settings.max_tpot_ms / 1000
    return CapacityModel(times, max_tpot_s=max_tpot_s, **limits)


def record(inputs: Inputs, decision: Decision) -> dict[str, Any]:
    """A decision with everything it was made from, for JSON."""
    return {"inputs": dataclasses.asdict(inputs), "decision": dataclasses.asdict(decision)}
