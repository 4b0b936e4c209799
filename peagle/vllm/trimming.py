"""Trims drafts by the load that a step really has: the rule of `cluster.depth`, in the scheduler.

Enters: the requests of the next step, each with its K and perhaps its survival (`SURVIVAL_KEY`), and the engine's step
times (`STEP_TIMES_KEY` in vLLM's `additional_config`). Leaves: depths, never above K. A request without a survival
(pinned, asked for by the client, a probe) keeps its K; the others make room around it, each by what was last said of
its workload. The table is corrected by what the steps turn out to take (`cluster.step_time`), and the corrections are
told, so that the K of later requests is chosen by them too.
"""

import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cluster.depth import allocate, check_survival
from cluster.step_time import CostCurves, Residuals, StepShape, StepTimes
from peagle.vllm.acceptance import STEP_TIMES_KEY, SURVIVAL_KEY, WORKLOAD_KEY

# ====================================================================================================
# How long each decoding step of a running engine took, and of what shape it was.
#
# Enters: the moment at which a step's result reaches the scheduler, and what that step had scheduled. Leaves: `TimedStep`
# s, and their text form, in which they travel as one header of an engine output (as in `peagle.vllm.acceptance`).
#
# A step's time is the interval between two results that follow each other in the engine's own process. Without
# asynchronous scheduling that is a whole cycle: update, taking over drafts, schedule, forward, verification, drafting.
# With it the result of one step is taken while the next one runs, so the interval between two results is what the step
# adds to the time of the run: the longer of the host's and the device's part. Either way the intervals of a run add up
# to its time, whatever overlaps. A step with prompt tokens in it, and the first after a pause, have no time.
# Knows nothing of vLLM but the fields it reads; never decides anything.

STEP_TIME_HEADER = "x-peagle-step-time"


class Scheduled(Protocol):
    """The part of vLLM's `SchedulerOutput` that says what a step computes."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that only decoded.

    `num_tokens`: drafts verified plus one for each request; `uniform_depth`: K where all had the same, else None;
    `context_tokens`: mean length before the step.
    """

    seconds: float
    num_requests: int
    num_tokens: int
    uniform_depth: int | None
    context_tokens: float

    def encode(self) -> str:
        """One header value: `"0.0067123 8 32 3 512.5"`; `-` stands for no uniform depth."""
        depth = "-" if self.uniform_depth is None else self.uniform_depth
        return f"{self.seconds:.7f} {self.num_requests} {self.num_tokens} {depth} {self.context_tokens:.1f}"

    @classmethod
    def decode(cls, value: str) -> "TimedStep":
        """Inverse of `encode`.

        Raises:
            ValueError: the text is not what `encode` writes.
        """
        parts = value.split()
        if len(parts) != 5:
            raise ValueError(f"{STEP_TIME_HEADER}: five parts expected, not {value!r:.80}")
        seconds, num_requests, num_tokens, depth, context = parts
        uniform = None if depth == "-" else int(depth)
        return cls(float(seconds), int(num_requests), int(num_tokens), uniform, float(context))


class StepClock:
    """Turns arrivals of results into `TimedStep`s. One for each engine, fed in order."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def arrived(self, now_s: float, scheduled: Scheduled) -> TimedStep | None:
        """The result of `scheduled` is there at `now_s` (monotonic seconds). None where the step has no time.

        A clock that stands still or goes back gives no time either.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or not math.isfinite(now_s - last_s) or now_s <= last_s:
            return None
        return _decoded(now_s - last_s, scheduled)

    def pause(self) -> None:
        """The engine has nothing to do: what comes until the next result is no step's time."""
        self._last_s = None


def _decoded(seconds: float, scheduled: Scheduled) -> TimedStep | None:
    tokens = scheduled.num_scheduled_tokens
    if not tokens or scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids:
        return None
    drafts = scheduled.scheduled_spec_decode_tokens
    depths = {len(drafts.get(request_id, ())) for request_id in tokens}
    num_drafts = sum(len(of) for of in drafts.values())
    if scheduled.total_num_scheduled_tokens != len(tokens) + num_drafts:
        return None  # a chunk of a prompt
    context = scheduled.scheduled_cached_reqs.num_computed_tokens
    mean_context = sum(context) / len(context) if context else 0.0
    uniform = depths.pop() if len(depths) == 1 else None
    return TimedStep(seconds, len(tokens), scheduled.total_num_scheduled_tokens, uniform, mean_context)


# ====================================================================================================
# Trims drafts by the load that a step really has: the rule of `cluster.depth`, in the scheduler.
#
# Enters: the requests of the next step, each with its K and perhaps its survival (`SURVIVAL_KEY`), and the engine's step
# times (`STEP_TIMES_KEY` in vLLM's `additional_config`). Leaves: depths, never above K. A request without a survival
# (pinned, asked for by the client, a probe) keeps its K; the others make room around it, each by what was last said of
# its workload. The table is corrected by what the steps turn out to take (`cluster.step_time`), and the corrections are
# told, so that the K of later requests is chosen by them too.

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Requests and workloads that are remembered."""

NUM_STEPS_BETWEEN_CORRECTIONS = 500
TELL_INTERVAL_S = 0.5
"""Corrections are told at most so often; reports are read about once a second."""
MAX_MAPE = 0.1
"""Above this mean error of the corrected prediction the table is worth measuring again."""

Survival = tuple[float, ...]


def make_trimmer(config: "VllmConfig", max_draft_tokens: int) -> "Trimmer | None":
    """None for an engine without step times.

    Raises:
        ValueError: the step times are damaged, or were measured on another engine; names the fields.
    """
    additional = config.additional_config
    document = additional.get(STEP_TIMES_KEY) if isinstance(additional, dict) else None
    if document is None:
        return None
    times = StepTimes.from_document(document)
    if times.max_draft_tokens != max_draft_tokens:
        raise ValueError(
            f"step times: max_draft_tokens is {times.max_draft_tokens}, the engine's is {max_draft_tokens}"
        )
    return Trimmer(times, max_draft_tokens)


class Trimmer:
    """Depths of the requests of one step after another."""

    def __init__(self, times: StepTimes, max_draft_tokens: int) -> None:
        self._times = times
        self._residuals = Residuals(times.full_graph_depths)
        self._curves = CostCurves(times)
        self._max_draft_tokens = max_draft_tokens
        self._clock = StepClock()
        self._has_warned = False
        self._told_s, self._told_steps = -math.inf, 0.0
        # Read once a request, not once a step. Requests of a workload share the survival of the one that came last: it
        # is the best known, and requests with the same survival are decided together.
        self._workload_of: OrderedDict[str, str | None] = OrderedDict()
        self._newest: OrderedDict[str, Survival] = OrderedDict()

    def depths(self, requests: "list[Request]", wanted: list[int], prompt_tokens: int = 0) -> list[int]:
        """Depth of each request, at most its `wanted` K. `prompt_tokens`: of prompts that run in the same step."""
        workloads = [self._workload(request) for request in requests]
        found = [None if workload is None else self._newest.get(workload) for workload in workloads]
        # One that is too short for its K says nothing of the rest: the K is obeyed.
        survivals = [
            None if survival is None or len(survival) < depth else survival
            for survival, depth in zip(found, wanted, strict=True)
        ]
        typical = next((survival for survival in survivals if survival is not None), None)
        if typical is None:
            return wanted
        context_tokens = sum(request.num_computed_tokens for request in requests) / len(requests)
        # Those that keep their K load the step like the rest; they are valued like one of them.
        valued = [typical if survival is None else survival for survival in survivals]
        limits = [min(depth, len(survival)) for depth, survival in zip(wanted, valued, strict=True)]
        depths = allocate(valued, limits, self._curves, context_tokens, prompt_tokens)
        return [k if survival is None else depth for k, survival, depth in zip(wanted, survivals, depths, strict=True)]

    def arrived(self, now_s: float, scheduled: Scheduled) -> None:
        """The result of `scheduled` is there at `now_s`, monotonic seconds."""
        if (step := self._clock.arrived(now_s, scheduled)) is not None:
            self.observe(step)

    def untold(self, now_s: float) -> str | None:
        """The corrections as text (`cluster.step_time.Corrections`) where they are to be told at `now_s`, monotonic
        seconds: new steps have been timed, and the last word is `TELL_INTERVAL_S` old or the clock has gone back."""
        num_steps = self._residuals.num_steps
        if num_steps == self._told_steps or 0 <= now_s - self._told_s < TELL_INTERVAL_S:
            return None
        self._told_s, self._told_steps = now_s, num_steps
        return self._residuals.corrections().encode()

    def pause(self) -> None:
        """The engine has nothing to do."""
        self._clock.pause()

    def observe(self, step: TimedStep) -> None:
        """Take in what a step took."""
        shape = StepShape(step.num_requests, step.num_tokens, step.uniform_depth, step.context_tokens)
        self._residuals.observe(step.seconds, self._times.seconds(shape), shape)
        if self._residuals.num_steps % NUM_STEPS_BETWEEN_CORRECTIONS == 0:
            self._curves = CostCurves(self._residuals.corrected(self._times))
            if self._residuals.mape > MAX_MAPE and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "step times are off by %.0f%% on average, corrected as they are: measure this engine again with "
                    "python -m peagle.vllm.calibrate",
                    100 * self._residuals.mape,
                )

    def _workload(self, request: "Request") -> str | None:
        """The request's workload; None where it brought no survival, or none that is usable."""
        request_id = request.request_id
        if request_id not in self._workload_of:
            self._workload_of[request_id] = self._read(request)
            if len(self._workload_of) > MAX_KNOWN:
                self._workload_of.popitem(last=False)
        return self._workload_of[request_id]

    def _read(self, request: "Request") -> str | None:
        """Take in the survival that a request brings. Its workload; None where it brings none or a bad one (logged)."""
        params = request.sampling_params
        extra_args: dict[str, Any] = (params.extra_args if params is not None else None) or {}
        raw = extra_args.get(SURVIVAL_KEY)
        if raw is None:
            return None
        try:
            survival = tuple(map(float, raw))
            check_survival(survival, f"request {request.request_id}")
        except (TypeError, ValueError) as error:
            logger.warning("request %s: %s=%.80r is not used: %s", request.request_id, SURVIVAL_KEY, raw, error)
            return None
        # One that names no workload speaks for itself alone.
        workload = str(extra_args.get(WORKLOAD_KEY) or survival)
        self._newest[workload] = survival
        self._newest.move_to_end(workload)
        if len(self._newest) > MAX_KNOWN:
            self._newest.popitem(last=False)
        return workload
