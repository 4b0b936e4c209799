"""The records of a scaling decision: what it is made from, and what comes out. Values that JSON can hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
