"""The records of a simulated fleet: what it is given, what an arm sees, what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.traffic import Reading


@dataclass(frozen=True)
class Arrival:
    """One request to come."""

    time_s: float
    label: str
    answer: bytes


@dataclass(frozen=True)
class Swap:
    """From `time_s` on the drafts of all replicas are confirmed as `confirm` says; `head` names the new head."""

    time_s: float
    head: str
    confirm: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Conditions:
    """What all arms share. `measured_from_s`: what arrives and runs earlier does not count."""

    max_num_seqs: int
    min_replicas: int
    max_replicas: int
    max_tpot_s: float
    max_ttft_s: float
    duration_s: float
    measured_from_s: float
    start_time_s: float = 180.0
    upscale_delay_s: float = 15.0
    downscale_delay_s: float = 300.0
    prompt_tokens: int = 128


@dataclass(frozen=True)
class View:
    """What an arm sees. Numbers of requests as Serve averages them."""

    now_s: float
    num_running: int
    target: int
    num_requests: float
    num_queued: float
    running: tuple[str, ...]
    readings: tuple[Reading, ...]


class Arm(Protocol):
    """Who decides. `reads_counters`: whether it needs the replicas' counters; `downscaling_factor`: Serve's."""

    @property
    def reads_counters(self) -> bool: ...

    @property
    def downscaling_factor(self) -> float: ...

    def wish(self, view: View) -> float: ...


@dataclass
class FleetRun:
    """What came out. `minutes`: by minute of arrival, requests and those that kept both limits; `targets`: changes of
    the target number (time, number); `num_changes` after `measured_from_s`."""

    num_requests: int = 0
    num_kept: int = 0
    gpu_hours: float = 0.0
    num_tokens: int = 0
    minutes: dict[int, tuple[int, int]] = field(default_factory=dict)
    targets: list[tuple[float, int]] = field(default_factory=list)
    num_changes: int = 0
    tpot_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """Share of the requests that kept both limits."""
        return self.num_kept / self.num_requests if self.num_requests else 1.0
