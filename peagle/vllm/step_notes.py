"""What travels with a step of the engine, beside vLLM's own.

| record | travels on | from, to |
| --- | --- | --- |
| `SchedulerPlan` | vLLM's `SchedulerOutput`, which it pickles | scheduler, worker |
| `StepResult` | vLLM's `ModelRunnerOutput`, which it pickles | worker, scheduler |
| `VerifiedStep` | trace headers of a request's `EngineCoreOutput`, as text | scheduler, `peagle.vllm.recorder` |

Trace headers are the one free-form field that is made for each output and that no HTTP response repeats. OpenTelemetry
reads only the names it knows. vLLM's own `per_request_spec_decode_metrics` come with the last output only, so running
and aborted requests, and those ended by a stop string, would not be counted. Imports no vLLM.
"""

import dataclasses
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
        ranks_drafts: the next step may verify the best drafts of this step's pass, so the worker counts them by
            acceptance (`StepResult.acceptance_counts`).
        draft_budget: number of this step's drafts that are verified; the worker chooses which. None: all.
    """

    num_drafts_ahead: int | None = None
    num_rejected: int = 0
    ranks_drafts: bool = False
    draft_budget: int | None = None

    def limit_drafts_ahead(self, k_max: int) -> int:
        """`num_drafts_ahead`, at most `k_max`."""
        return k_max if self.num_drafts_ahead is None else min(self.num_drafts_ahead, k_max)


@dataclass(frozen=True)
class StepResult:
    """The worker's result of one step; each list is in the order of the output's `req_ids`.

    Attributes:
        num_ready: drafts that a remote drafter had for each request, 0..K_max; -1 where it was not asked. None: the
            drafter is colocated and always has K_max. Planned drafts that were not there count neither as verified nor
            as rejected. A request gets no planned drafts while its drafter has none.
        num_admitted: verified drafts of each request, where the worker chose them; else None. A tensor whose copy to
            the host is complete when the output is there.
        acceptance_counts: (counts, number of requests) of the step before. Count i is the number of drafts whose
            expected accepted tokens, the cumulative probability of acceptance, are at least level i of
            `cluster.step_allocation.PROBABILITY_LEVELS`. Such a tensor too.
    """

    num_ready: list[int] | None = None
    num_admitted: Any = None
    acceptance_counts: tuple[Any, int] | None = None


def read_plan(scheduled: Any) -> SchedulerPlan:
    return getattr(scheduled, "peagle_plan", SchedulerPlan())


def update_plan(scheduled: Any, **changes: Any) -> None:
    scheduled.peagle_plan = dataclasses.replace(read_plan(scheduled), **changes)


def read_result(model_runner_output: Any) -> StepResult:
    return getattr(model_runner_output, "peagle_result", StepResult())


def update_result(model_runner_output: Any, **changes: Any) -> None:
    model_runner_output.peagle_result = dataclasses.replace(read_result(model_runner_output), **changes)


STEPS_HEADER = "x-peagle-steps"
"""A request's `VerifiedStep`s that were not reported yet, oldest first: "7,3 7,0 5,5c"."""

STEP_COSTS_HEADER = "x-peagle-step-costs"
"""What the scheduler has learned of its step times, in the form of `cluster.step_latency`."""


class VerifiedStep(NamedTuple):
    """One request in one engine step: drafts verified, 1..K, and accepted, 0..verified.

    is_chosen: the worker chose how many (`peagle.vllm.adaptive_verification`). It chooses late positions where
    acceptance is likely, so such a step is no sample of the acceptance rate by position.
    """

    num_verified: int
    num_accepted: int
    is_chosen: bool = False


CHOSEN = "c"


def steps_text(steps: Iterable[VerifiedStep]) -> str:
    """The text under `STEPS_HEADER`. Words and not JSON: `DraftingRecorder` counts them as they are, and its process is
    the first that is full."""
    return " ".join([f"{verified},{accepted}{CHOSEN if is_chosen else ''}" for verified, accepted, is_chosen in steps])


def counts_of_steps(steps: Mapping[str, int], *, of_survival: bool = False) -> Counts:
    """Counts of steps.

    Args:
        steps: word of a `steps_text` -> how often it came.
        of_survival: leave out steps whose drafts the worker chose.
    """
    counts = Counts()
    for step, number in steps.items():
        if not (of_survival and step.endswith(CHOSEN)):
            num_verified, num_accepted = step.removesuffix(CHOSEN).split(",")
            counts.add_step(int(num_verified), int(num_accepted), number)
    return counts
