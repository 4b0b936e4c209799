"""Trims drafts by the load that a step really has: the rule of `cluster.depth`, in the scheduler.

Enters: the requests of the next step, each with the most drafts that it may get and perhaps its survival
(`SURVIVAL_KEY`); the moments at which steps' results arrive; what the engine measured at its start. Leaves: drafts of
each request, and what was learned of step times. A request without a survival (pinned, asked for by the client, a
probe) keeps its K; the others make room around it, each by what was last said of its workload.

A step's time is the interval between two results that follow each other in the engine's own process. Without
asynchronous scheduling that is a whole cycle: update, taking over drafts, schedule, forward, verification, drafting.
With it the result of one step is taken while the next one runs, so the interval between two results is what the step
adds to the time of the run: the longer of the host's and the device's part. Either way the intervals of a run add up
to its time, whatever overlaps. The first step after a pause has no time.
"""

import json
import logging
import math
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.depth import allocate, check_survival
from cluster.step_time import StepCostModel, TimedStep
from peagle.vllm.acceptance import SURVIVAL_KEY, WORKLOAD_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Requests and workloads that are remembered."""

REPORT_INTERVAL_S = 0.5
"""Costs are reported at most so often; reports are read about once a second."""

STEPS_PER_COSTS = 8
"""Steps after which drafts are weighed by newer costs: making them takes time between two steps."""

LOOK_ERROR, LOOK_INTERVAL_STEPS = 0.06, 20
"""A step verifies all its drafts, once in so many steps, while what that takes is known no better than this share."""


def document_path(instance_id: str) -> Path:
    """Where the engine with vLLM's `instance_id` writes what its steps took at its start:

    {"device", "max_draft_tokens", "context_tokens", "points": [{"num_requests", "num_tokens", "step_s"}, ...]}
    """
    return Path(tempfile.gettempdir()) / f"peagle-steps-{instance_id}.json"


def make_trimmer(config: "VllmConfig", max_draft_tokens: int) -> "Trimmer | None":
    """None for an engine without drafts. A start document that cannot be used is logged and left out."""
    if not max_draft_tokens:
        return None
    on_gpu, path = config.device_config.device_type != "cpu", document_path(config.instance_id)
    if path.exists():
        try:
            return Trimmer(StepCostModel(on_gpu, json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            logger.warning("step times measured at the start are not used: %s: %s", path, error)
    return Trimmer(StepCostModel(on_gpu))


def timed_step(seconds: float, scheduled: "SchedulerOutput", is_drafted: bool = False) -> TimedStep | None:
    """The step of `scheduled`, which took so long; None where no request decoded. A request that computes one token
    more than it has drafts decodes; all other tokens are of prompts. `is_drafted`: as of `TimedStep`."""
    drafts, cached = scheduled.scheduled_spec_decode_tokens, scheduled.scheduled_cached_reqs
    begun = {request.req_id for request in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
    num_requests = num_tokens = 0
    for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
        if request_id not in begun and num_scheduled == 1 + len(drafts.get(request_id, ())):
            num_requests += 1
            num_tokens += num_scheduled
    if not num_requests:
        return None
    contexts = cached.num_computed_tokens
    context_tokens = sum(contexts) / len(contexts) if contexts else 0.0
    prompt_tokens = scheduled.total_num_scheduled_tokens - num_tokens
    return TimedStep(seconds, num_requests, num_tokens, context_tokens, prompt_tokens, is_drafted)


class Trimmer:
    """Drafts of the requests of one step after another. One for each engine, fed in order."""

    def __init__(self, model: StepCostModel) -> None:
        self.model = model
        self._last_s: float | None = None
        self._reported_s, self._reported_steps = -math.inf, 0
        self._costs, self._costs_at_step = model.costs, 0
        self._looked_at_step = 0
        self._is_drafting = False
        # Read once a request, not once a step. Requests of a workload share the survival of the one that came last: it
        # is the best known, and requests with the same survival are decided together.
        self._workload_of: OrderedDict[str, str | None] = OrderedDict()
        self._newest: OrderedDict[str, tuple[float, ...]] = OrderedDict()

    def depths(self, requests: "list[Request]", max_ks: list[int], prompt_tokens: int = 0) -> list[int]:
        """Drafts of each request, at most its `max_ks`. `prompt_tokens`: of prompts that run in the same step."""
        self._is_drafting = any(max_ks)
        workloads = [self._workload(request) for request in requests]
        known = [None if workload is None else self._newest.get(workload) for workload in workloads]
        # One that is too short for its K says nothing of the rest: the K is obeyed.
        survivals = [
            None if survival is None or len(survival) < max_k else survival
            for survival, max_k in zip(known, max_ks, strict=True)
        ]
        typical = next((survival for survival in survivals if survival is not None), None)
        if typical is None:
            return max_ks
        context_tokens = sum(request.num_computed_tokens for request in requests) / len(requests)
        if not prompt_tokens and self._should_look(len(requests), sum(max_ks), context_tokens):
            return max_ks
        # Those that keep their K load the step like the rest; they are valued like one of them.
        valued = [typical if survival is None else survival for survival in survivals]
        limits = [min(max_k, len(survival)) for max_k, survival in zip(max_ks, valued, strict=True)]
        if self.model.num_steps - self._costs_at_step >= STEPS_PER_COSTS:
            self._costs, self._costs_at_step = self.model.costs, self.model.num_steps
        depths = allocate(valued, limits, self._costs, context_tokens, prompt_tokens)
        return [
            max_k if survival is None else depth
            for max_k, survival, depth in zip(max_ks, survivals, depths, strict=True)
        ]

    def arrived(self, now_s: float, scheduled: "SchedulerOutput") -> None:
        """The result of `scheduled` is there at `now_s`, monotonic seconds. A clock that stands still, goes back or is
        no number gives no time."""
        is_drafted, self._is_drafting = self._is_drafting, False  # set again for every step that may have drafts
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or not 0 < now_s - last_s < math.inf:
            return
        if (step := timed_step(now_s - last_s, scheduled, is_drafted)) is not None:
            self.model.observe(step)

    def pause(self) -> None:
        """The engine has nothing to do: what comes until the next result is no step's time."""
        self._last_s = None

    def report(self, now_s: float) -> str | None:
        """What is believed of step times (`cluster.step_time.StepCosts.to_wire` as JSON), where it is to be reported at
        `now_s`, monotonic seconds: there were new steps, or there was no report yet, and the last report is
        `REPORT_INTERVAL_S` old or the clock has gone back."""
        has_reported = self._reported_s > -math.inf
        if has_reported and self.model.num_steps == self._reported_steps:
            return None
        if 0 <= now_s - self._reported_s < REPORT_INTERVAL_S:
            return None
        self._reported_s, self._reported_steps = now_s, self.model.num_steps
        numbers = {name: float(f"{number:.4g}") for name, number in self.model.costs.to_wire().items()}
        return json.dumps(numbers, separators=(",", ":"))

    def _should_look(self, num_requests: int, num_drafts: int, context_tokens: float) -> bool:
        """Whether this step verifies everything to learn what that takes: what was never run is never known, and a
        guess that is too dear would stand for ever."""
        num_steps = self.model.num_steps
        if not num_steps or num_steps - self._looked_at_step < LOOK_INTERVAL_STEPS:
            return False
        if self.model.error(num_requests, num_requests + num_drafts, context_tokens) <= LOOK_ERROR:
            return False
        self._looked_at_step = num_steps
        return True

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
