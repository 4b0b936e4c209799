"""The draft budget of a step by its load: the rule of `cluster.step_allocation`, in the scheduler.

Enters: the requests of the next step, each with the most drafts that it may get and perhaps its survival (cumulative
acceptance rates, `SURVIVAL_KEY`); the times at which steps' results arrive; the engine's measurements at its start.
Leaves: drafts of each request; with synchronous scheduling whether a step makes any; a step latency model. A request
without a survival (pinned K, K of the client, exploration request) keeps its K. The others share the rest, each by the
newest survival of its workload.

A step's time is the interval between two successive results in the engine's own process. With synchronous scheduling
that is a whole cycle: update, drafts, schedule, forward, verification, drafting. With asynchronous scheduling a result
arrives while the next step runs, so the interval is what the step adds to the run: the longer of the host's and the
device's part. In both cases the intervals of a run add up to its time. The first step after a pause has no time.
"""

import json
import logging
import math
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cluster.acceptance import check_rates
from cluster.step_allocation import allocate, best_total
from cluster.step_latency import StepLatency, StepLatencyModel, TimedStep
from peagle.vllm.request_args import SURVIVAL_KEY, WORKLOAD_KEY
from peagle.vllm.step_notes import read_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096
"""Requests and workloads that are remembered."""

REPORT_INTERVAL_S = 0.5
"""Costs are reported at most so often; reports are read about once a second."""

STEPS_PER_LATENCY = 8
"""Steps between two updates of the step latency that budgets use: an update takes time between two steps."""

EXPLORE_ERROR, EXPLORE_INTERVAL_STEPS = 0.06, 20
"""While the relative error of a step's predicted time is above the first number, one step in 20 explores. It verifies
all its drafts or another number of each request. Or it does the opposite of what the estimate says of the drafter's
pass, if a better estimate could change that decision."""

VERIFY_INTERVAL_STEPS = 200
"""Steps from one that verifies all its drafts although fewer pay, or runs a pass that would be left out, to the next:
so acceptance stays known. All requests of such a step take part: a pass is as long as its longest request needs."""

CHOICE_KEY = "peagle_choice"
"""Key of vLLM's `additional_config`: bool, verify the best drafts of a batch rather than each request's first ones
(`peagle.vllm.chosen`), where possible. Absent: true."""

WORTH_KEPT = 0.9
"""Decay of the moving average of the worth of drafts, per step."""

MORE_TO_CHOOSE = 3
"""Drafts beyond the mean that a request may have in a step whose drafts are chosen. The drafter's pass makes as many,
and few of the best drafts have a later position."""

CHOICE_INTERVAL_STEPS = 50
"""Replaces `VERIFY_INTERVAL_STEPS` where drafts are chosen: only these steps then show acceptance by position."""

CHOICE_ERROR = 0.02
"""While the error of the time that choosing takes is above this share of a step, and could change whether it pays, one
step in `EXPLORE_INTERVAL_STEPS` does the opposite of the present decision."""

WORTH_INTERVAL_STEPS = 8
"""Steps from one that measures the worth of drafts to the next, while first drafts are verified: it takes time."""

MIN_DRAFTED = 100
"""Requests with drafts, summed over steps, before a pass may be left out: acceptance has been measured by then."""

MIN_GAIN = 0.03
"""Relative gain of tokens per second from which passes are left out, or run again: a change costs a useless pass."""


def document_path(instance_id: str) -> Path:
    """The file of the step times that the engine with vLLM's `instance_id` measures at its start:

    {"device", "max_draft_tokens", "context_tokens", "points": [{"num_requests", "num_tokens", "step_s"}, ...],
    "chooses": whether the worker can choose a step's drafts}
    """
    return Path(tempfile.gettempdir()) / f"peagle-steps-{instance_id}.json"


def make_draft_budget(config: "VllmConfig", max_draft_tokens: int) -> "DraftBudget | None":
    """None for an engine without drafts. A start document that cannot be read is logged and not used."""
    if not max_draft_tokens:
        return None
    on_gpu, path = config.device_config.device_type != "cpu", document_path(config.instance_id)
    if path.exists():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return DraftBudget(StepLatencyModel(on_gpu, document), chooses=bool(document.get("chooses")))
        except (OSError, ValueError) as error:
            logger.warning("step times measured at the start are not used: %s: %s", path, error)
    return DraftBudget(StepLatencyModel(on_gpu))


def timed_step(seconds: float, scheduled: "SchedulerOutput") -> TimedStep | None:
    """The step of `scheduled`, which took `seconds`; None if no request decoded. A request that computes one token more
    than it has drafts decodes; all other tokens are of prompts."""
    drafts, cached = scheduled.scheduled_spec_decode_tokens, scheduled.scheduled_cached_reqs
    num_drafts = sum(map(len, drafts.values()))
    num_requests, num_tokens = len(scheduled.num_scheduled_tokens), scheduled.total_num_scheduled_tokens
    num_chosen = read_plan(scheduled).draft_budget
    num_spared = 0 if num_chosen is None else num_drafts - num_chosen
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
    num_rows, is_chosen = num_tokens - num_spared, num_chosen is not None
    return TimedStep(seconds, num_requests, num_rows, prompt_tokens, is_drafted, is_chosen)


class DraftBudget:
    """Decides the drafts of one step after another. One for each engine."""

    def __init__(self, model: StepLatencyModel, *, chooses: bool = False) -> None:
        """chooses: the worker can choose which drafts of a step are verified (`peagle.vllm.chosen`)."""
        self.model, self.chooses = model, chooses
        self._last_s: float | None = None
        self._reported_s, self._reported_steps = -math.inf, 0
        self._latency, self._latency_at_step = model.latency, 0
        self._explored_at_step = self._verified_at_step = self._crossed_at_step = self._num_drafted = 0
        self._verifies_all = False
        self._leaves_out = False
        self._decided: tuple[object, list[int], int | None] = None, [], None
        self.num_chosen: int | None = None
        """Drafts that the worker should choose, by the last call of `depths`. None if each request's first drafts are
        as good, and in exploration steps."""
        self._worth: NDArray[np.float64] | None = None  # drafts of a request, by their worth
        # Read once a request, not once a step. Requests of a workload share the survival of its newest request: it is
        # the best estimate, and requests with the same survival are decided together.
        self._workload_of: OrderedDict[str, str | None] = OrderedDict()
        self._newest: OrderedDict[str, tuple[float, ...]] = OrderedDict()

    def depths(self, requests: "list[Request]", max_ks: list[int], prompt_tokens: int = 0) -> list[int]:
        """Drafts of each request, at most its `max_ks`. `prompt_tokens`: of prompts that run in the same step. Each
        step is first asked for without prompts; if it then was to verify all its drafts, it still does with them.

        A result is kept until the batch or the step latency changes: this runs between two steps.
        """
        self.num_chosen = None
        if prompt_tokens and self._verifies_all:
            return max_ks
        self._verifies_all = False
        batch = ([request.request_id for request in requests], max_ks, prompt_tokens, self._newest_latency())
        if batch == self._decided[0]:
            self.num_chosen = self._decided[2]
            return self._decided[1]
        survivals = self._survivals(requests)
        typical = next((survival for survival in survivals if survival is not None), None)
        if typical is None:
            return max_ks
        explores = not prompt_tokens and self.model.num_steps - self._explored_at_step >= EXPLORE_INTERVAL_STEPS
        if explores:
            self._explored_at_step = self.model.num_steps
            if self._is_unsure(len(requests), sum(max_ks)):
                self._verifies_all = True
                return max_ks
        # Requests that keep their K load the step too; they count with the survival of one of the others.
        valued = [typical if survival is None else survival for survival in survivals]
        limits = [min(max_k, len(survival)) for max_k, survival in zip(max_ks, valued, strict=True)]
        depths, rate = allocate(valued, limits, self._newest_latency(), prompt_tokens)
        if explores and (other := self._choose_exploration(valued, limits, depths)) is not None:
            depths = [min(limit, other) for limit in limits]
        depths = [
            max_k if survival is None else depth
            for max_k, survival, depth in zip(max_ks, survivals, depths, strict=True)
        ]
        if explores and other is not None:
            return depths
        num_chosen, is_exploration = None, False
        if None not in survivals:
            num, most = len(requests), sum(max_ks)
            num_chosen, is_exploration = self._best_choice(num, most, prompt_tokens, rate, explores)
        interval = VERIFY_INTERVAL_STEPS if num_chosen is None else CHOICE_INTERVAL_STEPS
        if depths == max_ks and num_chosen is None:
            self._verified_at_step = self.model.num_steps
        elif not prompt_tokens and self.model.num_steps - self._verified_at_step >= interval:
            self._verified_at_step, self._verifies_all = self.model.num_steps, True
            return max_ks
        self.num_chosen = num_chosen
        if not is_exploration:
            self._decided = batch, depths, num_chosen
        return depths

    def _best_choice(
        self, num: int, most: int, prompt_tokens: int, rate: float, explores: bool
    ) -> tuple[int | None, bool]:
        """Number of drafts that the worker should choose, of at most `most` drafts of `num` requests. None if the first
        drafts of each request, which give `rate` tokens per second, are as good. And whether the decision is reversed
        in this step, to measure the time that choosing takes.
        """
        if not self.chooses or self._worth is None:
            return None, False
        latency = self._newest_latency()
        seconds = latency.curve(num, most, prompt_tokens, is_drafted=True) + latency.choosing_s
        num_chosen, chosen_rate = best_total((num * self._worth).tolist(), num, most, seconds)
        error = self.model.choosing_error_s / float(seconds[num_chosen])
        is_exploration = explores and error > CHOICE_ERROR and abs(math.log(chosen_rate / rate)) < 2.0 * error
        return (num_chosen if (chosen_rate > rate) != is_exploration else None), is_exploration

    @property
    def wants_worth(self) -> bool:
        """Whether the worth of the next step's drafts is to be measured although none of them will be chosen."""
        return self.model.num_steps % WORTH_INTERVAL_STEPS == 0

    def record_worth(self, counts: Sequence[int], num_requests: int) -> None:
        """Record the worth of a step's drafts: counts of drafts of at least each of `WORTH_LEVELS` of
        `cluster.step_allocation`."""
        worth = np.array(counts, np.float64) / num_requests
        self._worth = worth if self._worth is None else WORTH_KEPT * self._worth + (1.0 - WORTH_KEPT) * worth

    def makes_drafts(self, requests: "list[Request]", max_ks: list[int], prompt_tokens: int) -> bool:
        """Whether the drafter's pass runs in the step of these requests, so that the next one has drafts to verify.

        It is left out if steps without it give more tokens per second. The drafter then misses rows of the requests,
        and its later drafts are a little worse. Requests that keep their K, and prompts, always have their pass.
        """
        if not any(max_ks) or prompt_tokens or self._num_drafted < MIN_DRAFTED:
            self._num_drafted += sum(map(bool, max_ks))
            return any(max_ks)
        found = self._survivals(requests)
        if any(max_k and survival is None for survival, max_k in zip(found, max_ks, strict=True)):
            return True
        survivals = [survival or () for survival in found]
        limits = [min(max_k, len(survival)) for max_k, survival in zip(max_ks, survivals, strict=True)]
        num, latency = len(requests), self._newest_latency()
        depths, _ = allocate(survivals, limits, latency)
        num_drafts = sum(depths)
        length = 1.0 + sum(sum(survival[:k]) for survival, k in zip(survivals, depths, strict=True)) / num
        drafted_s = float(latency.curve(num, num_drafts, is_drafted=True)[-1])
        gain = drafted_s / length / latency.seconds(num, num)
        self._leaves_out = gain > (1.0 - MIN_GAIN if self._leaves_out else 1.0 + MIN_GAIN)
        num_steps, num_tokens = self.model.num_steps, num + num_drafts * self._leaves_out
        error = self.model.error(num, num_tokens, is_drafted=self._leaves_out)
        is_unsure = error > EXPLORE_ERROR and abs(math.log(gain)) < 2.0 * error
        interval = EXPLORE_INTERVAL_STEPS if is_unsure else VERIFY_INTERVAL_STEPS
        is_exploration = (is_unsure or self._leaves_out) and num_steps - self._crossed_at_step >= interval
        if is_exploration:
            self._crossed_at_step = num_steps
        return self._leaves_out == is_exploration

    def arrived(self, now_s: float, scheduled: "SchedulerOutput") -> None:
        """Record that the result of `scheduled` arrived at `now_s`, monotonic seconds. If the clock stands still, goes
        back or is NaN, the step has no time."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or not 0 < now_s - last_s < math.inf:
            return
        if (step := timed_step(now_s - last_s, scheduled)) is not None:
            self.model.observe(step)

    def pause(self) -> None:
        """The engine has no requests: the time up to the next result is no step's."""
        self._last_s = None

    def report(self, now_s: float) -> str | None:
        """The step latency (`StepLatency.to_wire` as JSON), if a report is due at `now_s`, monotonic seconds: there
        were new steps or no report yet, and the last report is `REPORT_INTERVAL_S` old or the clock has gone back."""
        has_reported = self._reported_s > -math.inf
        if has_reported and self.model.num_steps == self._reported_steps:
            return None
        if 0 <= now_s - self._reported_s < REPORT_INTERVAL_S:
            return None
        self._reported_s, self._reported_steps = now_s, self.model.num_steps
        return json.dumps(self.model.latency.to_wire(), separators=(",", ":"))

    def _is_unsure(self, num_requests: int, num_drafts: int) -> bool:
        """Whether the error of such a step's predicted time is above `EXPLORE_ERROR`."""
        return self.model.error(num_requests, num_requests + num_drafts) > EXPLORE_ERROR

    def _choose_exploration(
        self, survivals: Sequence[tuple[float, ...]], limits: list[int], depths: list[int]
    ) -> int | None:
        """Another limit of drafts of a request to explore: one whose time is uncertain and that could be better than
        `depths`. None without any.

        Without exploration a wrong guess of a step that is never run would not be corrected.
        """
        num = len(limits)
        seconds = self._newest_latency().curve(num, sum(limits), is_drafted=True)
        groups = Counter(zip(survivals, limits, depths, strict=True))

        def rate(k: int | None) -> tuple[int, float]:
            """Drafts, and tokens per second, with at most `k` drafts of a request; None: with `depths`."""
            num_drafts, gained = 0, 0.0
            for (survival, limit, depth), count in groups.items():
                kept = depth if k is None else min(limit, k)
                num_drafts += count * kept
                gained += count * sum(survival[:kept])
            return num_drafts, (num + gained) / float(seconds[num_drafts])

        best, found = rate(None)[1], None
        for k in range(max(limits) + 1):
            num_drafts, expected = rate(k)
            error = self.model.error(num, num + num_drafts)
            hope = expected / max(1.0 - 2.0 * error, EXPLORE_ERROR)
            if error > EXPLORE_ERROR and hope > best:
                best, found = hope, k
        return found

    def _newest_latency(self) -> StepLatency:
        if self.model.num_steps - self._latency_at_step >= STEPS_PER_LATENCY:
            self._latency, self._latency_at_step = self.model.latency, self.model.num_steps
        return self._latency

    def _survivals(self, requests: "list[Request]") -> list[tuple[float, ...] | None]:
        """The newest survival of each request's workload; only steps that verify all drafts go beyond its end. None for
        a request that keeps its K."""
        workloads = [self._workload(request) for request in requests]
        return [None if workload is None else self._newest.get(workload) for workload in workloads]

    def _workload(self, request: "Request") -> str | None:
        """The request's workload; None if it brought no usable survival."""
        request_id = request.request_id
        if request_id not in self._workload_of:
            self._workload_of[request_id] = self._read(request)
            if len(self._workload_of) > MAX_KNOWN:
                self._workload_of.popitem(last=False)
        return self._workload_of[request_id]

    def _read(self, request: "Request") -> str | None:
        """Store the survival that a request brings. Returns its workload; None without a valid survival (logged)."""
        params = request.sampling_params
        extra_args: dict[str, Any] = (params.extra_args if params is not None else None) or {}
        raw = extra_args.get(SURVIVAL_KEY)
        if raw is None:
            return None
        try:
            survival = tuple(map(float, raw))
            check_rates(survival, f"request {request.request_id}")
        except (TypeError, ValueError) as error:
            logger.warning("request %s: %s=%.80r is not used: %s", request.request_id, SURVIVAL_KEY, raw, error)
            return None
        # A survival without a workload is for its request alone.
        workload = str(extra_args.get(WORKLOAD_KEY) or survival)
        self._newest[workload] = survival
        self._newest.move_to_end(workload)
        if len(self._newest) > MAX_KNOWN:
            self._newest.popitem(last=False)
        return workload
