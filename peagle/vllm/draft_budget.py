"""The draft budget of a step by its load: the rule of `cluster.step_allocation`, in the scheduler.

Enters: the requests of the next step, each with the most drafts that it may get and perhaps its cumulative
acceptance rates (`ACCEPTANCE_RATES_KEY`); the times at which steps' results arrive.
Leaves: drafts of each request; with synchronous scheduling whether a step makes any; a step latency model. A request
without rates (pinned K, K of the client, exploration request) keeps its K. The others share the rest, each by the
newest rates of its workload.

A step's time is the interval between two successive results in the engine's own process. With synchronous scheduling
that is a whole cycle: update, drafts, schedule, forward, verification, drafting. With asynchronous scheduling a result
arrives while the next step runs, so the interval is what the step adds to the run: the longer of the host's and the
device's part. In both cases the intervals of a run add up to its time. The first step after a pause has no time.
"""

import logging
import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.acceptance import check_rates
from cluster.step_allocation import allocate
from cluster.step_latency import StepLatencyModel, TimedStep
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, WORKLOAD_KEY, read_extra_args
from peagle.vllm.step_notes import read_plan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Workloads whose acceptance rates are remembered."""

REPORT_INTERVAL_S = 0.5
"""The step latency is reported at most so often; reports are read about once a second."""

EXPLORE_INTERVAL_STEPS = 200
"""Steps from one that verifies another number of drafts than pays, or runs a pass that would be left out, to the next.
It verifies all, so that acceptance stays known; one in `EXPLORED_WITHOUT` none, so that it is known what drafts cost.
All requests of such a step take part: a pass is as long as its longest request needs."""
EXPLORED_WITHOUT = 4

MIN_DRAFTED = 100
"""Requests with drafts, summed over steps, before a pass may be left out: acceptance has been measured by then."""

MIN_GAIN = 0.03
"""Relative gain of tokens per second from which passes are left out, or run again: a change costs a useless pass."""


def timed_step(seconds: float, scheduled: "SchedulerOutput") -> TimedStep | None:
    """The step of `scheduled`, which took `seconds`; None if no request decoded. A request that computes one token more
    than it has drafts decodes; all other tokens are of prompts."""
    drafts, cached = scheduled.scheduled_spec_decode_tokens, scheduled.scheduled_cached_reqs
    num_drafts = sum(map(len, drafts.values()))
    num_requests, num_tokens = len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens
    if scheduled.scheduled_new_reqs or cached.resumed_req_ids or num_tokens > num_requests + num_drafts:
        begun = {request.req_id for request in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        decoding = [
            num
            for request_id, num in scheduled.num_scheduled_tokens.items()
            if request_id not in begun and num == 1 + len(drafts.get(request_id, ()))
        ]
        num_requests, num_tokens = len(decoding), sum(decoding)
    if not num_requests:
        return None
    prompt_tokens = scheduled.total_num_scheduled_tokens - num_tokens
    is_drafted = read_plan(scheduled).limit_drafts_ahead(1) > 0
    return TimedStep(seconds, num_requests, num_tokens, prompt_tokens, is_drafted)


class DraftBudget:
    """Decides the drafts of one step after another. One for each engine."""

    def __init__(self, model: StepLatencyModel) -> None:
        self.model = model
        self._last_s: float | None = None
        self._reported_s, self._reported_steps = -math.inf, -1
        self._explored_at_step = self._left_out_at_step = self._num_drafted = 0
        self._num_explored, self._explores = 0, False
        self._leaves_out = False
        self._decided: tuple[object, list[int]] = None, []
        # Requests of a workload share the rates of its newest request: they are the best estimate, and requests with
        # the same rates are decided together.
        self._newest: OrderedDict[str | None, tuple[float, ...]] = OrderedDict()

    def allocate_drafts(self, requests: "list[Request]", max_ks: list[int], prompt_tokens: int = 0) -> list[int]:
        """Drafts of each request, at most its `max_ks`. `prompt_tokens`: of prompts that run in the same step. Each
        step is first asked for without prompts; if it explores, the requests that still have drafts then keep them all.

        A result is kept until the batch or the step latency changes: this runs between two steps.
        """
        if prompt_tokens and self._explores:
            return max_ks
        self._explores = False
        batch = ([request.request_id for request in requests], max_ks, prompt_tokens, self.model.latency)
        if batch == self._decided[0]:
            return self._decided[1]
        all_rates = self._known_rates(requests)
        typical = next((rates for rates in all_rates if rates is not None), None)
        if typical is None:
            return max_ks
        # Requests that keep their K load the step too; they count with the rates of one of the others.
        known = [typical if rates is None else rates for rates in all_rates]
        limits = [min(max_k, len(rates)) for max_k, rates in zip(max_ks, known, strict=True)]
        fixed = [limit if own is None else 0 for limit, own in zip(limits, all_rates, strict=True)]
        num_drafts = allocate(known, limits, self.model.latency, prompt_tokens, fixed)
        num_drafts = [
            max_k if rates is None else num for max_k, rates, num in zip(max_ks, all_rates, num_drafts, strict=True)
        ]
        if not prompt_tokens and self.model.num_steps - self._explored_at_step >= EXPLORE_INTERVAL_STEPS:
            self._explored_at_step, self._explores = self.model.num_steps, True
            self._num_explored += 1
            verifies_all = self._num_explored % EXPLORED_WITHOUT > 0
            return [
                max_k if verifies_all or rates is None else 0 for max_k, rates in zip(max_ks, all_rates, strict=True)
            ]
        self._decided = batch, num_drafts
        return num_drafts

    def makes_drafts(self, requests: "list[Request]", max_ks: list[int], prompt_tokens: int) -> bool:
        """Whether the drafter's pass runs in the step of these requests, so that the next one has drafts to verify.

        It is left out if steps without it give more tokens per second. The drafter then misses rows of the requests,
        and its later drafts are a little worse. Requests that keep a K above 0 always have their pass, and so do
        prompts beside requests that may draft.
        """
        if not any(max_ks) or prompt_tokens or self._num_drafted < MIN_DRAFTED:
            self._num_drafted += sum(map(bool, max_ks))
            return any(max_ks)
        found = self._known_rates(requests)
        if any(max_k and rates is None for rates, max_k in zip(found, max_ks, strict=True)):
            return True
        all_rates = [rates or () for rates in found]
        limits = [min(max_k, len(rates)) for max_k, rates in zip(max_ks, all_rates, strict=True)]
        num, latency = len(requests), self.model.latency
        num_drafts = allocate(all_rates, limits, latency)
        length = 1.0 + sum(sum(rates[:k]) for rates, k in zip(all_rates, num_drafts, strict=True)) / num
        drafted_s = float(latency.curve(num, sum(num_drafts), is_drafted=True)[-1])
        gain = drafted_s / length / latency.seconds(num, num)
        self._leaves_out = gain > (1.0 - MIN_GAIN if self._leaves_out else 1.0 + MIN_GAIN)
        if not self._leaves_out:
            self._left_out_at_step = self.model.num_steps
        elif self.model.num_steps - self._left_out_at_step >= EXPLORE_INTERVAL_STEPS:
            self._left_out_at_step = self.model.num_steps
            return True
        return not self._leaves_out

    def record_result(self, now_s: float, scheduled: "SchedulerOutput") -> None:
        """Record that the result of `scheduled` arrived at `now_s`, monotonic seconds."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is not None and (step := timed_step(now_s - last_s, scheduled)) is not None:
            self.model.observe(step)

    def record_pause(self) -> None:
        """The engine has no requests: the time up to the next result is no step's."""
        self._last_s = None

    def report(self, now_s: float) -> str | None:
        """The step latency as JSON, if a report is due at `now_s`, monotonic seconds: there were new steps or no report
        yet, and the last report is `REPORT_INTERVAL_S` old."""
        if self.model.num_steps == self._reported_steps or now_s - self._reported_s < REPORT_INTERVAL_S:
            return None
        self._reported_s, self._reported_steps = now_s, self.model.num_steps
        return msgspec.json.encode(self.model.latency).decode()

    def _known_rates(self, requests: "list[Request]") -> list[tuple[float, ...] | None]:
        """The newest rates of each request's workload; only steps that verify all drafts go beyond their end. None for
        a request that keeps its K."""
        workloads = [self._workload(request) for request in requests]
        return [self._newest.get(workload) for workload in workloads]

    def _workload(self, request: Any) -> str | None:
        """The request's workload, kept on it; None if it brought no usable rates."""
        if not hasattr(request, "peagle_workload"):
            request.peagle_workload = self._read(request)
        return request.peagle_workload

    def _read(self, request: "Request") -> str | None:
        """Store the rates that a request brings. Returns its workload; None without valid ones (logged)."""
        extra_args = read_extra_args(request.sampling_params)
        raw = extra_args.get(ACCEPTANCE_RATES_KEY)
        if raw is None:
            return None
        try:
            rates = tuple(map(float, raw))
            check_rates(rates, f"request {request.request_id}")
        except (TypeError, ValueError) as error:
            logger.warning("request %s: %s=%.80r is not used: %s", request.request_id, ACCEPTANCE_RATES_KEY, raw, error)
            return None
        # Rates without a workload are for their request alone.
        workload = str(extra_args.get(WORKLOAD_KEY) or rates)
        self._newest[workload] = rates
        self._newest.move_to_end(workload)
        if len(self._newest) > MAX_KNOWN:
            self._newest.popitem(last=False)
        return workload
