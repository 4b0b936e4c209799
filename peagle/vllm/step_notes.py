"""What travels with a step of the engine, beside vLLM's own.

`SchedulerPlan`, on vLLM's `SchedulerOutput`: what the scheduler tells the worker. `StepResult`, on its
`ModelRunnerOutput`: what the worker answers. `VerifiedStep`, as text among the trace headers of a request's
`EngineCoreOutput`: what the scheduler tells the process of the engine's client, where `peagle.vllm.recorder` counts it.

vLLM pickles the attributes of the first two. Trace headers are the one free-form field of `EngineCoreOutput` that is
made per output and that no HTTP response repeats; OpenTelemetry reads only the names it knows. vLLM's own per-request
metrics (`per_request_spec_decode_metrics`) come with the last output only: aborted requests, those ended by a stop
string and running ones would not be counted. Imports no vLLM.
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
        num_drafts_ahead: in the step after it no request has more drafts verified; None: K_max. With 0 nobody needs the
            drafter's pass in this step but its prompts, which a later request may find in the prefix cache.
        num_rejected: how many of this step's drafts are expected to be rejected (`peagle.vllm.rejections`). The
            scheduler says so, and not each worker for itself, so that all ranks of a group run passes of one size.
        ranks_drafts: the next step may verify the best drafts of the pass, so the worker is to say what they are worth.
        draft_budget: only so many of this step's drafts are verified, and the worker chooses which; None: all.
        verifies_all: all are, also where vLLM could choose among them (`peagle.vllm.adaptive`).
    """

    num_drafts_ahead: int | None = None
    num_rejected: int = 0
    ranks_drafts: bool = False
    draft_budget: int | None = None
    verifies_all: bool = False

    def limit_drafts_ahead(self, k_max: int) -> int:
        """`num_drafts_ahead`, at most `k_max`."""
        return k_max if self.num_drafts_ahead is None else min(self.num_drafts_ahead, k_max)


@dataclass(frozen=True)
class StepResult:
    """The worker's result of one step; each list is in the order of the output's `req_ids`.

    Attributes:
        num_ready: how many drafts a remote drafter had for each request, 0..K_max; -1 where it was asked for none;
            None where the drafter always has K_max. Drafts that were planned and not there are counted neither as
            verified nor as rejected, and while the drafter has none for a request, none are planned for it.
        num_admitted: how many drafts of each request were verified, where the worker chose; None where it did not. A
            list, or what becomes one by `tolist()` when the output is there.
        worth: of the drafts of the step before, of so many requests, how many are worth each of
            `cluster.step_allocation.WORTH_LEVELS` or more; the counts likewise.
    """

    num_ready: list[int] | None = None
    num_admitted: Any = None
    worth: tuple[Any, int] | None = None

    def list_admitted(self) -> list[int] | None:
        return self.num_admitted if self.num_admitted is None else _as_list(self.num_admitted)

    def list_worth(self) -> tuple[list[int], int] | None:
        return self.worth if self.worth is None else (_as_list(self.worth[0]), self.worth[1])


def _as_list(counts: Any) -> list[int]:
    return counts if isinstance(counts, list) else counts.tolist()


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
    """One request in one engine step. Drafts verified, 1..K, and accepted, 0..verified; is_chosen: the worker chose how
    many (`peagle.vllm.chosen`). Deep drafts are among the chosen ones where they are likely, so of survival such a step
    says nothing."""

    num_verified: int
    num_accepted: int
    is_chosen: bool = False


CHOSEN = "c"


def steps_text(steps: Iterable[VerifiedStep]) -> str:
    """What stands under `STEPS_HEADER`. Words and not JSON: the process of `DraftingRecorder`, which is full first,
    counts them as they are."""
    return " ".join([f"{verified},{accepted}{CHOSEN if is_chosen else ''}" for verified, accepted, is_chosen in steps])


def counts_of_steps(steps: Mapping[str, int], *, of_survival: bool = False) -> Counts:
    """Counts of steps: how often each word of a `steps_text` came. of_survival: less those that say nothing of it."""
    counts = Counts()
    for step, number in steps.items():
        if not (of_survival and step.endswith(CHOSEN)):
            num_verified, num_accepted = step.removesuffix(CHOSEN).split(",")
            counts.add_step(int(num_verified), int(num_accepted), number)
    return counts
