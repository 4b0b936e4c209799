"""What travels with a step of the engine, beside vLLM's own.

| record | travels on | from, to |
| --- | --- | --- |
| `SchedulerPlan` | vLLM's `SchedulerOutput`, which it pickles | scheduler, worker |
| drafts that were ready | vLLM's `ModelRunnerOutput`, which it pickles | worker with a remote drafter, scheduler |
| `VerifiedStep` | trace headers of a request's `EngineCoreOutput`, as text | scheduler, `peagle.vllm.recorder` |

Trace headers are the one free-form field that is made for each output and that no HTTP response repeats. OpenTelemetry
reads only the names it knows. vLLM's own `per_request_spec_decode_metrics` come with the last output only, so running
and aborted requests, and those ended by a stop string, would not be counted. Imports no vLLM.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.counts import Counts


@dataclass(frozen=True)
class SchedulerPlan:
    """The scheduler's plan of one step.

    Attributes:
        num_drafts_ahead: most drafts of a request that the next step verifies; None: K_max. With 0 only this step's
            prompts need the drafter's pass: a later request may find them in the prefix cache.
        num_rejected: forecast of this step's rejected drafts (`peagle.vllm.rejections`). It is made here and not by
            each worker, so that all ranks of a group run passes of one size.
    """

    num_drafts_ahead: int | None = None
    num_rejected: int = 0

    def limit_drafts_ahead(self, k_max: int) -> int:
        """`num_drafts_ahead`, at most `k_max`."""
        return k_max if self.num_drafts_ahead is None else min(self.num_drafts_ahead, k_max)


def read_plan(scheduled: Any) -> SchedulerPlan:
    return getattr(scheduled, "peagle_plan", SchedulerPlan())


def write_plan(scheduled: Any, plan: SchedulerPlan) -> None:
    scheduled.peagle_plan = plan


def read_num_ready(model_runner_output: Any) -> list[int] | None:
    """Drafts that a remote drafter had for each request, 0..K_max, in the order of the output's `req_ids`; -1 where it
    was not asked. None: the drafter is in the engine and always has K_max, or the engine is on a CPU, where only drafts
    that are there are planned.

    Planned drafts that were not there count neither as verified nor as rejected. A request gets no planned drafts while
    its drafter has none.
    """
    return getattr(model_runner_output, "peagle_num_ready", None)


def write_num_ready(model_runner_output: Any, num_ready: list[int]) -> None:
    model_runner_output.peagle_num_ready = num_ready


STEPS_HEADER = "x-peagle-steps"
"""A request's `VerifiedStep`s that were not reported yet, oldest first: "7,3 7,0 5,5"."""

STEP_LATENCY_HEADER = "x-peagle-step-latency"
"""What the scheduler has learned of its step times, in the form of `cluster.step_latency`."""


class VerifiedStep(NamedTuple):
    """One request in one engine step: drafts verified, 1..K, and accepted, 0..verified."""

    num_verified: int
    num_accepted: int


def steps_text(steps: Iterable[VerifiedStep]) -> str:
    """The text under `STEPS_HEADER`. Words and not JSON: `DraftingRecorder` counts them as they are, and its process is
    the first that is full."""
    return " ".join([f"{verified},{accepted}" for verified, accepted in steps])


def counts_of_steps(steps: Mapping[str, int]) -> Counts:
    """Counts of steps: word of a `steps_text` -> how often it came."""
    counts = Counts()
    for step, number in steps.items():
        num_verified, num_accepted = step.split(",")
        counts.add_step(int(num_verified), int(num_accepted), number)
    return counts
