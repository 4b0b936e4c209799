"""Schedulers for vLLM that verify at most K draft tokens a step for each request.

Enters: a request whose `SamplingParams.extra_args["peagle_k"]` says its `max_k`, which is K if that is fixed. Leaves:
`SchedulerOutput`s in which that request has at most as many drafts, and outputs that carry what was verified and
accepted (`peagle.vllm.step_notes`).
The drafter proposes at least as many tokens as the next step verifies, at most K_max, in its one pass (P-EAGLE, arXiv
2602.01469, section 3). No draft depends on the number of those behind it. So fewer verified drafts cost no draft
quality and keep the distribution of the output.

Given to vLLM as an import string, `scheduler_cls=SYNC_SCHEDULER` or `ASYNC_SCHEDULER` of `peagle.vllm.engine_settings`,
for its V1 and its V2 model runner. Where requests bring cumulative acceptance rates, a
draft budget also leaves out the drafts that do not pay in the next step (`peagle.vllm.draft_budget`). The scheduler
knows nothing of how K is decided.
"""

import copy
import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cluster.step_latency import StepLatencyModel
from peagle.vllm import compat
from peagle.vllm.draft_budget import DraftBudget
from peagle.vllm.limits import use_own_backends
from peagle.vllm.outputs import OutputCoalescer
from peagle.vllm.rejections import RejectionForecast
from peagle.vllm.request_args import ALL_OF_CLIENT, read_max_k
from peagle.vllm.step_notes import (
    STEP_LATENCY_HEADER,
    STEPS_HEADER,
    SchedulerPlan,
    VerifiedStep,
    read_num_ready,
    steps_text,
    write_plan,
)
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


class _DraftingScheduler(_Base):
    """What both schedulers share, beside max_k and the draft budget:

    - a seed for each request without one (`add_request`);
    - turns between the sequences of several requests (`peagle.vllm.turns`);
    - no admission padding (`compat.drop_admission_padding`), the plan of the drafter's pass (`_plan_pass`);
    - reports of verified steps, and of step times, in trace headers (`step_notes`);
    - outputs coalesced (`peagle.vllm.outputs`), the end of all requests of one client
      (`finish_requests`), and a backend for each grammar (`peagle.vllm.limits`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.check_version()
        super().__init__(*args, **kwargs)
        model = StepLatencyModel(on_gpu=self.vllm_config.device_config.device_type != "cpu")
        self._draft_budget = DraftBudget(model) if self.num_spec_tokens else None
        use_own_backends(self.structured_output_manager)
        # Requests for which the remote drafter had no drafts when it was last asked.
        self._without_drafts: set[str] = set()
        # Prompts that wait for room in the KV cache run in no step, so they must not lower the budget of each.
        self._is_stuck = False
        self._steps: dict[str, list[VerifiedStep]] = {}
        self._rejections = RejectionForecast(self.num_spec_tokens)
        self._coalescer = OutputCoalescer(self.scheduler_config.stream_interval)

    def find_max_k(self, request: Any) -> int:
        """The most drafts of a `Request` per step, 0..`num_spec_tokens`. It is kept on the request."""
        if (kept := getattr(request, "peagle_max_k", None)) is None:
            kept = request.peagle_max_k = read_max_k(request.sampling_params, self.num_spec_tokens)
        return int(kept)

    def add_request(self, request: "Request") -> None:
        """vLLM's own. A request without a seed gets one first: its tokens are drawn from its seed and their positions
        alone, in every worker and after preemption."""
        params = request.sampling_params
        if params is not None and params.seed is None:
            request.sampling_params = copy.copy(params)  # sequences of one request may share theirs
            request.sampling_params.seed = secrets.randbits(63)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        """vLLM's own. If prompts run in the same step, the draft budget is computed again first. Waiting sequences are
        admitted in turns (`peagle.vllm.turns`)."""
        waiting: Any = self.waiting
        takes_turns = isinstance(waiting, FCFSRequestQueue) and any(map(group_of, waiting))
        if takes_turns:
            ordered = order_by_turns(waiting, self.running)
            waiting.clear()
            waiting.extend(ordered)
        prompt_tokens = 0 if self._draft_budget is None else self._prompt_tokens_ahead()
        if prompt_tokens and not self._is_stuck:
            self._limit_drafts([request for request in self.running if request.spec_token_ids], prompt_tokens)
        output: SchedulerOutput = super().schedule(*args, **kwargs)
        self._is_stuck = prompt_tokens > 0 and not _prompt_tokens(output)
        if takes_turns:
            count_overtaken(self.waiting, [self.requests[new.req_id] for new in output.scheduled_new_reqs])
        return output

    def _prompt_tokens_ahead(self) -> int:
        """Tokens of prompts that the next step can compute, within the engine's requests and tokens per step."""
        left = [request.num_prompt_tokens - request.num_computed_tokens for request in self.running]
        num_places = max(0, self.max_num_running_reqs - len(self.running))
        left += [request.num_tokens - request.num_computed_tokens for request in islice(self.waiting, num_places)]
        return min(sum(tokens for tokens in left if tokens > 0), self.max_num_scheduled_tokens)

    def _max_ks(self, requests: "list[Request]") -> list[int]:
        """The most drafts of each request, 0 where its remote drafter had none."""
        return [0 if request.request_id in self._without_drafts else self.find_max_k(request) for request in requests]

    def _limit_drafts(self, requests: list[Any], prompt_tokens: int = 0) -> int:
        """Keep the first drafts of each request: at most its max_k, and within the draft budget of the step.

        Returns:
            The greatest max_k.
        """
        max_ks = num_drafts = self._max_ks(requests)
        if self._draft_budget is not None:
            num_drafts = self._draft_budget.allocate_drafts(requests, max_ks, prompt_tokens)
        for request, k in zip(requests, num_drafts, strict=True):
            request.spec_token_ids = request.spec_token_ids[:k]
        return max(max_ks, default=0)

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        compat.drop_admission_padding(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def _plan_pass(self, scheduled: "SchedulerOutput", num_ahead: int) -> None:
        """Plan the drafter's pass of this step. num_ahead: most drafts of a request that the next step verifies."""
        num_rejected = self._rejections.forecast(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        write_plan(scheduled, SchedulerPlan(num_ahead, num_rejected))

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: "SpecDecodingStats | None",
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> "SpecDecodingStats | None":
        """Record one request's verified step. vLLM calls this for each request with drafts, whatever its log settings.

        Drafts that a grammar ruled out before verification, or that were never there (`num_invalid_spec_tokens`), do
        not count as verified. The V2 runner also verifies drafts behind a grammar's end and may accept them. They are
        invalid here, so they do not count as accepted either.
        """
        num_verified = num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0)
        if num_verified > 0:
            num_accepted = min(num_accepted_tokens, num_verified)
            self._steps.setdefault(request_id, []).append(VerifiedStep(num_verified, num_accepted))
            self._rejections.record_step(num_verified, num_accepted)
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        """vLLM's own update; then outputs are coalesced (`peagle.vllm.outputs`). Each output carries its request's
        unreported steps. About twice a second the first output of each client carries the step latency model."""
        if self._draft_budget is not None:
            self._draft_budget.record_result(time.perf_counter(), scheduler_output)
        if (num_ready := read_num_ready(model_runner_output)) is not None:
            found = dict(zip(model_runner_output.req_ids, num_ready, strict=True))
            self._mark_missing(found, scheduler_output)
        outputs_by_client = self._coalesce(super().update_from_output(scheduler_output, model_runner_output))
        if self._draft_budget is not None:
            # On the first output of each client; a step without outputs leaves it to the next one.
            firsts = [client.outputs[0] for client in outputs_by_client.values() if client.outputs]
            if firsts and (latency := self._draft_budget.report(time.perf_counter())) is not None:
                for first in firsts:
                    first.trace_headers = {**(first.trace_headers or {}), STEP_LATENCY_HEADER: latency}
            if not self.has_requests():
                self._draft_budget.record_pause()
        if not self._steps:
            return outputs_by_client
        for core_outputs in outputs_by_client.values():
            for output in core_outputs.outputs:
                if steps := self._steps.pop(output.request_id, None):
                    output.trace_headers = {**(output.trace_headers or {}), STEPS_HEADER: steps_text(steps)}
        # A step without an output waits for the request's next one; a request that is gone has none.
        self._steps = {request_id: steps for request_id, steps in self._steps.items() if request_id in self.requests}
        return outputs_by_client

    def _coalesce(self, outputs_by_client: "dict[int, EngineCoreOutputs]") -> "dict[int, EngineCoreOutputs]":
        """The outputs of a step that go out now, without empty messages."""
        due, now_s = {}, time.monotonic()
        for client, core_outputs in outputs_by_client.items():
            core_outputs.outputs = self._coalescer.coalesce(core_outputs.outputs, self.requests, now_s)
            if core_outputs.outputs or core_outputs.finished_requests or core_outputs.scheduler_stats is not None:
                due[client] = core_outputs
        return due

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> "list[Request]":
        """vLLM's own. Buffered tokens of an aborted request are dropped. Those of a failed one go out with its last
        output. An id of `ALL_OF_CLIENT` stands for all requests of a client whose process has ended."""
        if request_ids and not isinstance(request_ids, str):
            request_ids = list(request_ids)
            if lost := {name.removeprefix(ALL_OF_CLIENT) for name in request_ids if name.startswith(ALL_OF_CLIENT)}:
                request_ids += [name for name, one in self.requests.items() if str(one.client_index) in lost]
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            self._coalescer.drop(request.request_id for request in finished)
        return finished

    def _mark_missing(self, num_drafts: dict[str, int], scheduled: "SchedulerOutput") -> None:
        """Count the planned drafts that the remote drafter did not have as vLLM counts those that a grammar ruled out.

        Args:
            num_drafts: drafts that it had for each request; -1 where it was not asked.
        """
        invalid = dict(scheduled.num_invalid_spec_tokens or {})
        for request_id, num_ready in num_drafts.items():
            if num_ready > 0:
                self._without_drafts.discard(request_id)
            elif num_ready == 0 and request_id in self.requests:
                self._without_drafts.add(request_id)
            num_planned = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
            if 0 <= num_ready < num_planned:
                invalid[request_id] = max(invalid.get(request_id, 0), num_planned - num_ready)
        scheduled.num_invalid_spec_tokens = invalid
        if self._without_drafts:
            self._without_drafts &= self.requests.keys()


def _prompt_tokens(output: "SchedulerOutput") -> int:
    """Tokens of a step beyond one and its drafts of each request."""
    num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return output.total_num_scheduled_tokens - num_drafts - len(output.num_scheduled_tokens)


class DraftingScheduler(_DraftingScheduler, Scheduler):
    """Synchronous scheduling: drafts come back from the worker between two steps and are limited there. A step that is
    faster without the drafter's pass leaves it out (`DraftBudget.makes_drafts`)."""

    _is_drafted = True
    """Whether the drafter's pass ran in the last step."""

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        super()._update_after_schedule(scheduler_output)
        found = [self.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        prompt_tokens = _prompt_tokens(scheduler_output)
        self._is_drafted = self._draft_budget is not None and self._draft_budget.makes_drafts(
            found, self._max_ks(found), prompt_tokens
        )
        self._plan_pass(scheduler_output, self.num_spec_tokens if self._is_drafted else 0)

    def update_draft_token_ids(self, draft_token_ids: "DraftTokenIds") -> None:
        """vLLM's own, which checks drafts by the grammar; then at most K of them stay, and none of a step whose pass
        was left out."""
        super().update_draft_token_ids(draft_token_ids)
        found = [self.requests.get(request_id) for request_id in draft_token_ids.req_ids]
        drafting = [request for request in found if request is not None and request.spec_token_ids]
        if self._is_drafted:
            self._limit_drafts(drafting)
        else:
            for request in drafting:
                request.spec_token_ids = []


class AsyncDraftingScheduler(_DraftingScheduler, AsyncScheduler):
    """Asynchronous scheduling: the next step is planned before the drafts exist, with K placeholders a request.

    The worker fills the placeholders from its own K_max-wide table, so fewer of them means the first K drafts.
    """

    def _update_after_schedule(self, scheduler_output: "SchedulerOutput") -> None:
        super()._update_after_schedule(scheduler_output)
        found: list[Any] = [self.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        drafting = [request for request in found if not request.is_prefill_chunk and request.spec_token_ids]
        max_k = self._limit_drafts(drafting)
        # This step's pass makes the drafts of the next one; if none are verified there, it fills the drafter's cache.
        deepest = max((len(request.spec_token_ids) for request in drafting), default=0)
        self._plan_pass(scheduler_output, max(deepest, min(max_k, 1)))
