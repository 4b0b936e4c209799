"""What workloads ask of a replica, and the plan that answers: the records of the choice of K.

Formulas: `cluster.depth`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.allocation import SurvivalError, check_survival


@dataclass(frozen=True)
class Objective:
    """What a workload wants.

    Attributes:
        kind: `throughput`: the most tokens per second of all requests together. `latency`: the least mean TPOT. For
            one workload alone the two are the same choice; among several, `latency` counts a workload that accepts
            little as much as one that accepts much.
        max_tpot_s: limit of the mean time per output token, seconds.
        weight: worth of this workload's tokens against others'.
    """

    kind: Literal["throughput", "latency"] = "throughput"
    max_tpot_s: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("throughput", "latency"):
            raise ValueError(f"objective kind is {self.kind!r}: it is throughput or latency")
        if self.max_tpot_s is not None and not 0 < self.max_tpot_s < math.inf:
            raise ValueError(f"max_tpot_s is {self.max_tpot_s}: a limit is a positive number of seconds, or None")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight is {self.weight}: it is a positive number")


THROUGHPUT = Objective()


@dataclass(frozen=True)
class Demand:
    """One workload on one replica.

    Attributes:
        workload: its name.
        num_requests: mean number of its requests in a step, above 0; a fraction where traffic is thin.
        survival: S_1, S_2, ... at least `max_depth` long.
        objective: what it wants.
        max_depth: the most drafts its requests may get; None: as many as `survival` has.
    """

    workload: str
    num_requests: float
    survival: Sequence[float]
    objective: Objective = THROUGHPUT
    max_depth: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.num_requests < math.inf:
            raise ValueError(f"num_requests of {self.workload!r} is {self.num_requests}: it is a positive number")
        if not 0 <= self.deepest <= len(self.survival):
            raise SurvivalError(
                f"{self.workload!r} may get {self.deepest} drafts but its survival has {len(self.survival)} depths"
            )
        check_survival(self.survival, f"workload {self.workload!r}")

    @property
    def deepest(self) -> int:
        """The most drafts a request of it may get."""
        return len(self.survival) if self.max_depth is None else self.max_depth


@dataclass(frozen=True)
class Plan:
    """K of each workload.

    Attributes:
        depths: K by workload.
        tokens_per_s: expected output tokens per second of the replica.
        step_s: expected seconds of a step.
        tpot_s: expected time per output token by workload, seconds: step_s / L(K).
        worth_per_s: lambda, what the plan makes of a second (tokens per second times weights). A further draft pays
            where weight * S_i is above lambda times the time it adds.
        graph_depth: the depth of the full CUDA graph that runs the steps, None where none does.
        meets_limits: every `max_tpot_s` is met.
        reason: why, in words.
    """

    depths: Mapping[str, int]
    tokens_per_s: float
    step_s: float
    tpot_s: Mapping[str, float]
    worth_per_s: float
    graph_depth: int | None
    meets_limits: bool
    reason: str = field(compare=False)
