"""The target: a replica of `ray.serve.llm`'s server with P-EAGLE inside its vLLM engine.

Enters: a chat or completion request whose `drafting` field holds the ingress' decision (or, by deployment handle, a
client's wish). Leaves: the answer with a `drafting` field that says how it was drafted, and counts for telemetry.
Never decides a K: that is `cluster.request`.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import ValidationError
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from vllm.exceptions import VLLMClientError

from cluster.counts import Counts
from cluster.request import MAX_NUM_WORKLOADS, Drafting, DraftingError, Workloads, from_wire, is_decided
from cluster.settings import ClusterSettings
from deployments.engine_config import engine_config, on_cpu, prepare, use_all_cores_of_a_small_machine
from deployments.links import DrafterLinks
from deployments.requests import (
    Body,
    ChatBody,
    CompletionBody,
    check_body,
    num_prompts,
    prompt_of_application,
    refusal_of,
)
from deployments.telemetry import ReplicaReport, ReplicaTelemetry, make_control, observe
from peagle.heads import head_digest
from peagle.vllm.acceptance import DEPTH_KEY, HEAD_KEY, SURVIVAL_KEY, WORKLOAD_KEY

logger = logging.getLogger(__name__)


class TargetServer(LLMServer):
    """One replica. Its constructor returns when the engine answers, so a running replica is a ready one."""

    async def __init__(  # type: ignore[misc]
        self,
        llm_config: LLMConfig,
        *,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
    ) -> None:
        """`llm_config` sized the placement group when the application was built; the engine's own configuration is
        made here, where the checkpoints are prepared: each node has its own cache. `drafter`: the deployment of remote drafters, where there is one."""
        self._policy = settings.depth_policy()
        self._model_id = settings.model.id
        self._aliases = settings.model.aliases
        named = settings.named_workloads()
        self._workloads = Workloads(known=named, aliases=self._aliases)
        if on_cpu(settings):
            use_all_cores_of_a_small_machine()
        target_dir, head_dir = await asyncio.to_thread(prepare, settings)
        await super().__init__(engine_config(settings, target_dir, head_dir))
        replica = serve.get_replica_context().replica_id.unique_id
        self._remote = settings.drafter if drafter is not None else None
        head = "" if head_dir is None or drafter is not None else await asyncio.to_thread(head_digest, head_dir)
        self._telemetry = ReplicaTelemetry(replica, self._model_id, MAX_NUM_WORKLOADS + len(named), head)
        self._control = make_control(settings)
        self._telemetry.recorder.attach(self._engine_client)
        self._links: DrafterLinks | None = None
        if drafter is not None and self._remote is not None:
            self._links = DrafterLinks(
                drafter, self._engine_client.collective_rpc, self._remote, lambda: self._num_unfinished > 0
            )
            self._links.start(self._telemetry.set_heads)

    @property
    def _engine_client(self) -> Any:
        """vLLM's `AsyncLLM` in this process. `ray.serve.llm` gives no public way to it."""
        return getattr(self.engine, "_engine_client")  # noqa: B009

    @property
    def _num_unfinished(self) -> int:
        """Requests that the engine works on or keeps waiting."""
        return int(self._engine_client.output_processor.get_num_unfinished_requests())

    async def report(self) -> ReplicaReport:
        """What this replica has counted. Raises what the engine died of, if it did."""
        await self.check_health()
        links = () if self._links is None else self._links.links
        report = self._telemetry.report(self._num_unfinished, links)
        observe(self._control, [report])
        return report

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve hands to the policy of autoscaling (`deployments.autoscaling`), every few seconds."""
        return self._telemetry.scaling_counters()

    async def chat(self, request: ChatCompletionRequest, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Answer a chat request: its response object, or lists of server-sent events when it streams."""
        try:
            drafting = self._admit(request)
        except DraftingError as error:
            return _refusal(error)
        return self._reported(await super().chat(request, raw_request_info), request, drafting)

    async def completions(self, request: CompletionRequest, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Answer a completion request, like `chat`."""
        try:
            drafting = self._admit(request)
        except DraftingError as error:
            return _refusal(error)
        return self._reported(await super().completions(request, raw_request_info), request, drafting)

    async def ask(self, method: Literal["chat", "completions"], body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The same for plain dictionaries (see `deployments.client`): one response, or one chunk after the other.
        A refused request yields `{"error": {...}}`."""
        record: Any = {"chat": ChatBody, "completions": CompletionBody}[method]
        try:
            request = record.model_validate(body)
        except (ValidationError, ValueError, VLLMClientError) as error:
            yield _error(400, *refusal_of(error))
            return
        if request.model not in (None, self._model_id, *self._aliases):
            yield _error(404, f"the model {request.model!r} is not served here, but {self._model_id!r} is", "model")
            return
        async for item in await getattr(self, method)(request):
            for part in item if isinstance(item, list) else [item]:
                if not isinstance(part, str):
                    yield part.model_dump()
                elif payload := _payload(part):
                    yield payload

    def _admit(self, request: Body) -> Drafting:
        """Turn the request's `drafting` field into what the engine reads, and take it out of the request.

        Raises:
            DraftingError: as `cluster.request.resolve`, or no messages.
        """
        check_body(request)
        asked_model = request.model
        if asked_model in self._aliases:
            request.model = self._model_id
        asked = (request.model_extra or {}).pop("drafting", None)
        drafting = from_wire(
            self._policy,
            asked,
            lambda tag: self._workloads.of(tag, asked_model, prompt_of_application(request)),
        )
        # What the ingress decided stays, a default K too: only the ingress knows the limit of the request's caller.
        if not is_decided(asked):
            drafting = self._control.settle(drafting, time.monotonic())
        request.vllm_xargs = {
            **(request.vllm_xargs or {}),
            DEPTH_KEY: drafting.max_k,
            WORKLOAD_KEY: drafting.workload,
            **({HEAD_KEY: self._remote.head_index(drafting.workload)} if self._remote is not None else {}),
            **({SURVIVAL_KEY: list(drafting.survival)} if drafting.survival else {}),
        }
        return drafting

    async def _reported(
        self, answer: AsyncGenerator[Any, None], request: Body, drafting: Drafting
    ) -> AsyncGenerator[Any, None]:
        """`answer` with the `drafting` field in its response object, or in the last chunk that finishes a choice."""
        num_unfinished = (request.n or 1) * num_prompts(request)
        async for item in answer:
            if isinstance(item, ChatCompletionResponse | CompletionResponse):
                item.drafting = response_field(drafting, self._telemetry, item.id)  # type: ignore[union-attr]
            elif isinstance(item, list):
                for index, event in enumerate(item):
                    if isinstance(event, str) and (num_finished := _num_finished_choices(event)):
                        num_unfinished -= num_finished
                        if num_unfinished <= 0:
                            item[index] = _with_drafting(event, drafting, self._telemetry)
            yield item


def response_field(drafting: Drafting, telemetry: ReplicaTelemetry, response_id: str) -> dict[str, Any]:
    """The response's `drafting` field: the decision, and what came of it summed over the request's sequences.

    `head` is the digest of the head that drafts for the workload now, "" where none does. `num_steps` counts steps that
    verified drafts; `acceptance_length` is 1 + accepted / steps, 1.0 without steps.
    """
    record = telemetry.recorder.pop(response_id)
    stats = Counts() if record is None else record.counts
    return {
        **drafting.to_wire(),
        "head": telemetry.head_of(drafting.workload),
        "num_steps": stats.num_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": round(stats.acceptance_length, 4),
    }


def _error(status: int, message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": status}}


async def _refusal(error: DraftingError) -> AsyncGenerator[ErrorResponse, None]:
    yield ErrorResponse.model_validate(_error(400, error.message, error.field))


def _payload(event: str) -> dict[str, Any]:
    data = event.removeprefix("data: ").strip()
    return {} if not data.startswith("{") else dict(json.loads(data))


def _num_finished_choices(event: str) -> int:
    """How many choices a server-sent event finishes. Most events finish none and are not parsed for it."""
    if '"finish_reason":' not in event or '"finish_reason":null' in event:
        return 0
    return sum(choice.get("finish_reason") is not None for choice in _payload(event).get("choices", ()))


def _with_drafting(event: str, drafting: Drafting, telemetry: ReplicaTelemetry) -> str:
    payload = _payload(event)
    payload["drafting"] = response_field(drafting, telemetry, payload["id"])
    return f"data: {json.dumps(payload, separators=(',', ':'), ensure_ascii=False)}\n\n"
