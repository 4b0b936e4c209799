"""Schedulers for vLLM that verify at most K draft tokens a step for each request.

Enters: a request whose `SamplingParams.extra_args["peagle_k"]` says its K. Leaves: `SchedulerOutput`s in which that
request has at most K drafts, and outputs that carry what was verified and accepted (`peagle.vllm.step_notes`).
The drafter always proposes K_max tokens in its one pass (P-EAGLE, arXiv 2602.01469, section 3); K limits verification
only, so trimming costs no draft quality and keeps the distribution of the output.

Given to vLLM as an import string, `scheduler_cls=SYNC_SCHEDULER` or `ASYNC_SCHEDULER` of `peagle.vllm.engine`, for its
V1 and its V2 model runner. Where requests carry survivals and the engine knows its step times, drafts beyond what pays
in the step at hand are trimmed too (`peagle.vllm.trimming`); never deepened. Where the worker can choose which drafts
are verified (`peagle.vllm.chosen`), somewhat more are planned than pay, and the step says how many it verifies.
Knows nothing of workloads or of how K is chosen.
"""

import copy
import logging
import math
import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from peagle.vllm import compat
from peagle.vllm.limits import use_own_backends
from peagle.vllm.outputs import OutputCoalescer
from peagle.vllm.rejections import Rejections
from peagle.vllm.request_args import DEPTH_KEY, drafts_wanted
from peagle.vllm.step_notes import (
    STEP_COSTS_HEADER,
    STEPS_HEADER,
    VerifiedStep,
    read_plan,
    read_result,
    steps_text,
    update_plan,
)
from peagle.vllm.trimming import MORE_TO_CHOOSE, Trimmer, make_trimmer
from peagle.vllm.turns import count_overtaken, group_of, order_by_turns

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    _Base = Scheduler
else:
    _Base = object

compat.allow_v2()

logger = logging.getLogger(__name__)

WARNING_INTERVAL_S = 60.0

VERIFY_ALL_INTERVAL_STEPS = 50
"""Steps from one that verifies all drafts to the next, where vLLM chooses among them: acceptance stays known."""

ADMITTED_WEIGHT = 0.1
"""Weight of the newest step in the mean number of drafts that vLLM's adaptive verification admits of a request."""


class _PerRequestDepth(_Base):
    """What both schedulers share: reading K, admission padding, reports of verified steps.

    A K that reaches this point unchecked is not obeyed and stops nobody: an integer outside 0..K_max is clamped to it,
    anything else counts as absent (K_max). Either is logged, at most once a minute for an engine. Validation with an
    answer to the client belongs to the front end.
    """

    _is_adaptive = False
    """vLLM's adaptive verification chooses among the drafts that are planned (`peagle.vllm.adaptive`)."""
    _verifies_all = False
    """The next step verifies all its drafts nevertheless."""
    _is_choice = False
    """The worker chooses among the drafts of the next step, `_chosen_share` a request."""
    _chosen_share = 0.0
    _chosen_step: list[VerifiedStep] | None = None
    """The requests of a step whose drafts were chosen, while its output is taken in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.check("scheduler", self)
        if self.dynamic_sd_lookup is not None:
            raise ValueError(
                "speculative_config.num_speculative_tokens_per_batch_size must not be set: with parallel drafting vLLM "
                "hands drafts to the wrong request when the batch lowers its number of drafts; set each request's "
                f"{DEPTH_KEY} instead"
            )
        self._trimmer = make_trimmer(self.vllm_config, self.num_spec_tokens)
        speculative = self.vllm_config.speculative_config
        self._is_adaptive = speculative is not None and speculative.enable_adaptive_verification
        self._mean_admitted = float(self.num_spec_tokens)
        self._num_planned = 0
        use_own_backends(self.structured_output_manager)
        # Requests whose remote drafter had no drafts for them in the last step that it was asked in.
        self._without_drafts: set[str] = set()
        # Prompts that wait for room in the KV cache run in no step, and must not trim all of them.
        self._is_stuck = False
        self._steps: dict[str, list[VerifiedStep]] = {}
        self._rejections = Rejections(self.num_spec_tokens)
        self._coalescer = OutputCoalescer(self.scheduler_config.stream_interval)
        self._last_warning_s = float("-inf")

    def depth_of(self, request: Any) -> int:
        """K of a `Request`: drafts to verify per step, 0..`num_spec_tokens`. Read once and kept on it."""
        if (kept := getattr(request, "peagle_max_k", None)) is not None:
            return int(kept)
        params = request.sampling_params
        depth = drafts_wanted(params, self.num_spec_tokens)
        wanted = ((params.extra_args if params is not None else None) or {}).get(DEPTH_KEY)
        is_wrong = wanted is not None and not (type(wanted) is int and 0 <= wanted <= self.num_spec_tokens)
        if is_wrong and time.monotonic() - self._last_warning_s >= WARNING_INTERVAL_S:
            text = "request %s: %s=%r is not an integer in 0..%d; using %d (not logged again for a minute)"
            logger.warning(text, request.request_id, DEPTH_KEY, wanted, self.num_spec_tokens, depth)
            self._last_warning_s = time.monotonic()
        request.peagle_max_k = depth
        return depth

    def add_request(self, request: "Request") -> None:
        """vLLM's own, after a request without a seed got one: all that is drawn for it depends on its seed and on token
        positions alone, in this process's workers and after preemption."""
        params = request.sampling_params
        if params is not None and params.seed is None:
            request.sampling_params = copy.copy(params)  # sequences of one request may share theirs
            request.sampling_params.seed = secrets.randbits(63)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        """vLLM's own, after the drafts were trimmed once more where prompts are about to run in the same step, and with
        those that wait for their first step in turns."""
        waiting = self.waiting
        takes_turns = isinstance(waiting, FCFSRequestQueue) and any(map(group_of, waiting))
        if isinstance(waiting, FCFSRequestQueue) and takes_turns:
            ordered = order_by_turns(waiting, self.running)
            waiting.clear()
            waiting.extend(ordered)
        prompt_tokens = 0 if self._trimmer is None else self._prompt_tokens_ahead()
        if prompt_tokens and not self._is_stuck and not self._is_adaptive:
            self._trim([request for request in self.running if request.spec_token_ids], prompt_tokens)
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._is_stuck = prompt_tokens > 0 and not _prompt_tokens(output)
        if takes_turns:
            count_overtaken(self.waiting, [self.requests[new.req_id] for new in output.scheduled_new_reqs])
        return output

    def _prompt_tokens_ahead(self) -> int:
        """Tokens of prompts that the next step can take in, as far as places and tokens a step allow."""
        left = [request.num_prompt_tokens - request.num_computed_tokens for request in self.running]
        num_places = max(0, self.max_num_running_reqs - len(self.running))
        left += [request.num_tokens - request.num_computed_tokens for request in islice(self.waiting, num_places)]
        return min(sum(tokens for tokens in left if tokens > 0), self.max_num_scheduled_tokens)

    def _depths(self, requests: "list[Request]") -> list[int]:
        """K of each request, 0 where its drafter had none."""
        return [0 if request.request_id in self._without_drafts else self.depth_of(request) for request in requests]

    def _trim(self, requests: list[Any], prompt_tokens: int = 0) -> int:
        """Keep of each request's drafts the first K, and under load the ones that pay in this step, or, where the
        worker is to choose as many, somewhat more. The greatest K."""
        max_ks = depths = self._depths(requests)
        if self._is_adaptive:
            for request, depth in zip(requests, self._plan_adaptive(max_ks), strict=True):
                request.spec_token_ids = request.spec_token_ids[:depth]
            return max(max_ks, default=0)
        if self._trimmer is not None:
            depths = self._trimmer.depths(requests, max_ks, prompt_tokens)
        num_chosen = self._trimmer.num_chosen if self._trimmer is not None and self._is_choice else None
        self._is_choice = num_chosen is not None
        if num_chosen is not None:
            self._chosen_share = num_chosen / len(requests)
            most = math.ceil(self._chosen_share) + MORE_TO_CHOOSE
            depths = [min(most, max_k) for max_k in max_ks]
            self._is_choice = num_chosen < sum(depths)
        for request, depth in zip(requests, depths, strict=True):
            request.spec_token_ids = request.spec_token_ids[:depth]
        return max(max_ks, default=0)

    def _plan_adaptive(self, max_ks: list[int]) -> list[int]:
        """Drafts of each request that the next step may verify: somewhat more than the mean of what was admitted
        lately, so that the drafter's pass is no deeper than it pays; in one step of many all."""
        self._num_planned += bool(max_ks)
        self._verifies_all = self._num_planned % VERIFY_ALL_INTERVAL_STEPS == 0
        most = math.ceil(self._mean_admitted) + MORE_TO_CHOOSE
        return max_ks if self._verifies_all else [min(most, max_k) for max_k in max_ks]

    def _record_admitted(self, num_admitted: list[int], scheduled: "SchedulerOutput") -> bool:
        """Take in what vLLM's adaptive verification admitted in a step. Whether that is less than was planned."""
        drafts = scheduled.scheduled_spec_decode_tokens
        update_plan(scheduled, draft_budget=sum(num_admitted))
        mean = sum(num_admitted) / max(1, len(drafts))
        self._mean_admitted += ADMITTED_WEIGHT * (mean - self._mean_admitted)
        return sum(num_admitted) < sum(map(len, drafts.values()))

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        compat.drop_admission_padding(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _plan_pass(self, scheduled: "SchedulerOutput", num_ahead: int, is_choice: bool = False) -> None:
        """Say how deep the drafter's pass of this step is to be, how many of the step's drafts it will not see, and
        whether what it drafts is to be valued."""
        drafts, num_chosen = scheduled.scheduled_spec_decode_tokens.values(), read_plan(scheduled).draft_budget
        if self._is_adaptive and not read_plan(scheduled).verifies_all:
            num_chosen = round(min(self._mean_admitted * len(drafts), sum(map(len, drafts))))
        if num_chosen is None:
            num_rejected = self._rejections.expected(map(len, drafts))
        else:
            num_rejected = self._rejections.expected_of_chosen(num_chosen)
        update_plan(scheduled, num_drafts_ahead=num_ahead, num_rejected=num_rejected, ranks_drafts=is_choice)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: "SpecDecodingStats | None",
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> "SpecDecodingStats | None":
        """Note one request's verified step; vLLM calls this for each request with drafts, whatever its log settings.

        Drafts that a grammar ruled out before verification, or that were never there (`num_invalid_spec_tokens`), do
        not count as verified. The V2 runner verifies its own drafts, also those behind a grammar's end, which the
        grammar rules out here and lets pass there: what of them was accepted does not count either.
        """
        num_verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_verified > 0:
            num_accepted = min(num_accepted_tokens, num_verified)
            step = VerifiedStep(num_verified, num_accepted, is_chosen=self._chosen_step is not None)
            self._steps.setdefault(request_id, []).append(step)
            if self._chosen_step is not None:
                self._chosen_step.append(step)
            else:
                self._rejections.add(num_verified, num_accepted)
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        """vLLM's own update, less the outputs that nobody gets to see yet (`peagle.vllm.outputs`); then each request's
        unreported steps onto its output, and about twice a second what was learned of step times onto the first output
        of each client."""
        result = read_result(model_runner_output)
        num_admitted = result.list_admitted()
        if self._is_adaptive and num_admitted and not self._record_admitted(num_admitted, scheduler_output):
            num_admitted = None
        if self._trimmer is not None:
            self._trimmer.arrived(time.perf_counter(), scheduler_output)
        if result.num_ready is not None:
            num_ready = dict(zip(model_runner_output.req_ids, result.num_ready, strict=True))
            self._leave_out_missing(num_ready, scheduler_output)
        if self._trimmer is not None and (worth := result.list_worth()) is not None:
            self._trimmer.hear_worth(*worth)
        if num_admitted is not None:
            self._leave_out(dict(zip(model_runner_output.req_ids, num_admitted, strict=True)), scheduler_output)
            self._chosen_step = []
        outputs_by_client = self._due(super().update_from_output(scheduler_output, model_runner_output))
        if self._chosen_step is not None:
            num_verified = sum(step.num_verified for step in self._chosen_step)
            self._rejections.add_chosen(num_verified, sum(step.num_accepted for step in self._chosen_step))
            self._chosen_step = None
        if self._trimmer is not None:
            self._report_costs(self._trimmer, outputs_by_client)
            if not self.has_requests():
                self._trimmer.pause()
        if not self._steps:
            return outputs_by_client
        for core_outputs in outputs_by_client.values():
            for output in core_outputs.outputs:
                if steps := self._steps.pop(output.request_id, None):
                    output.trace_headers = {**(output.trace_headers or {}), STEPS_HEADER: steps_text(steps)}
        # A step without an output waits for the request's next one; a request that is gone has none.
        self._steps = {request_id: steps for request_id, steps in self._steps.items() if request_id in self.requests}
        return outputs_by_client

    def _due(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> "dict[int, EngineCoreOutputs]":
        """What of a step's outputs goes out now, without messages that say nothing."""
        due, now_s = {}, time.monotonic()
        for client, core_outputs in outputs_by_client.items():
            core_outputs.outputs = self._coalescer.due(core_outputs.outputs, self.requests, now_s)
            if core_outputs.outputs or core_outputs.finished_requests or core_outputs.scheduler_stats is not None:
                due[client] = core_outputs
        return due

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> "list[Request]":
        """vLLM's own. Who aborts a request has no use for what is held of it; of one that failed it goes out with its
        last output."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            self._coalescer.forget(request.request_id for request in finished)
        return finished

    @staticmethod
    def _report_costs(trimmer: Trimmer, outputs_by_client: "dict[int, EngineCoreOutputs]") -> None:
        """A step without an output leaves them for the next one."""
        firsts = [client.outputs[0] for client in outputs_by_client.values() if client.outputs]
        if firsts and (costs := trimmer.report(time.perf_counter())) is not None:
            for first in firsts:
                first.trace_headers = {**(first.trace_headers or {}), STEP_COSTS_HEADER: costs}

    def _leave_out_missing(self, num_drafts: dict[str, int], scheduled: "SchedulerOutput") -> None:
        """`num_drafts`: what the remote drafter had for each request, -1 where it was not asked."""
        for request_id, num_ready in num_drafts.items():
            if num_ready > 0:
                self._without_drafts.discard(request_id)
            elif num_ready == 0 and request_id in self.requests:
                self._without_drafts.add(request_id)
        self._leave_out({request_id: ready for request_id, ready in num_drafts.items() if ready >= 0}, scheduled)
        if self._without_drafts:
            self._without_drafts &= self.requests.keys()

    @staticmethod
    def _leave_out(num_verified: dict[str, int], scheduled: "SchedulerOutput") -> None:
        """Tell vLLM of planned drafts that were not verified as it tells itself of those that a grammar ruled out."""
        invalid = dict(scheduled.num_invalid_spec_tokens or {})
        for request_id, num in num_verified.items():
            num_planned = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            if num < num_planned:
                invalid[request_id] = max(invalid.get(request_id, 0), num_planned - num)
        scheduled.num_invalid_spec_tokens = invalid


def _prompt_tokens(output: "SchedulerOutput") -> int:
    """Tokens of a step beyond one and its drafts of each request."""
    num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return output.total_num_scheduled_tokens - num_drafts - len(output.num_scheduled_tokens)


class PerRequestDepthScheduler(_PerRequestDepth, Scheduler):
    """Synchronous scheduling: drafts come back from the worker between two steps and are trimmed there. The drafter's
    pass is left out of steps that are better without (`Trimmer.makes_drafts`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise ValueError("async_scheduling is on: scheduler_cls must be PerRequestDepthAsyncScheduler")
        self._is_drafted = True

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        super()._update_after_schedule(scheduler_output)
        found = [self.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        prompt_tokens = _prompt_tokens(scheduler_output)
        self._is_drafted = self._trimmer is not None and self._trimmer.makes_drafts(
            found, self._depths(found), prompt_tokens
        )
        self._plan_pass(scheduler_output, self.num_spec_tokens if self._is_drafted else 0)

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """Keep the first K of the drafts that vLLM takes over (after a grammar's check, where there is one); none of a
        step whose pass was left out."""
        super().update_draft_token_ids(draft_token_ids)
        found = [self.requests.get(request_id) for request_id in draft_token_ids.req_ids]
        drafting = [request for request in found if request is not None and request.spec_token_ids]
        if self._is_drafted:
            self._trim(drafting)
        else:
            for request in drafting:
                request.spec_token_ids = []


class PerRequestDepthAsyncScheduler(_PerRequestDepth, AsyncScheduler):
    """Asynchronous scheduling: the next step is planned before the drafts exist, with K placeholders a request.

    The worker fills the placeholders from its own K_max-wide table, so fewer of them means the first K drafts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise ValueError(
                "async_scheduling is off (on a CPU vLLM forces it off): scheduler_cls must be PerRequestDepthScheduler"
            )

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        found: list[Any] = [self.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        if self._verifies_all:
            update_plan(scheduler_output, verifies_all=True)
        may_choose = (
            self._trimmer is not None and self._trimmer.chooses and len(found) > 1 and all(map(self._is_plain, found))
        )
        # A request that is new in this step is not among those that the last one planned for.
        if self._is_choice and may_choose:
            self._choose(scheduler_output)
        super()._update_after_schedule(scheduler_output)
        self._is_choice = may_choose
        drafting = [request for request in found if not request.is_prefill_chunk and request.spec_token_ids]
        max_k = self._trim(drafting)
        is_valued = self._is_choice or (may_choose and self._trimmer is not None and self._trimmer.wants_worth)
        # This step's pass makes the drafts of the next one; where all are trimmed away it fills the drafter's cache.
        deepest = max((len(request.spec_token_ids) for request in drafting), default=0)
        self._plan_pass(scheduler_output, max(deepest, min(max_k, 1)), is_valued)

    def _choose(self, scheduled: "SchedulerOutput") -> None:
        """Say how many of the step's drafts are verified, where that is fewer than are planned."""
        drafts = scheduled.scheduled_spec_decode_tokens
        num_chosen = round(self._chosen_share * len(drafts))
        if num_chosen < sum(map(len, drafts.values())):
            update_plan(scheduled, draft_budget=num_chosen)

    def _is_plain(self, request: Any) -> bool:
        """Whether it may be in a step whose drafts the worker chooses: not where it has none, nor where vLLM finds its
        rows of logits by what the host knows of the step."""
        if (kept := getattr(request, "peagle_is_plain", None)) is None:
            params = request.sampling_params
            kept = not request.use_structured_output and params is not None and params.logprobs is None
            request.peagle_is_plain = kept
        return bool(kept) and self.depth_of(request) > 0
