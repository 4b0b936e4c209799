"""The ingress: OpenAI's HTTP API in front of the target.

Enters: HTTP requests. Leaves: requests to the target that carry their workload and K, and answers or errors in
OpenAI's form. Ready means ready: while no target replica answers, a request gets 503 with Retry-After and never waits.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse
from ray.serve.handle import DeploymentHandle
from ray.serve.llm.ingress import OpenAiIngress
from starlette.responses import JSONResponse

from cluster.request import DraftingError, ForbiddenTagError, Workloads, resolve
from cluster.settings import ClusterSettings
from deployments.autoscaling import ClusterBoard, ScalingView, scaling_metrics
from deployments.readiness import ReplicaMonitor
from deployments.requests import (
    REPLICA_LOST,
    ApiError,
    Body,
    CallerMiddleware,
    ChatBody,
    CompletionBody,
    add_error_handlers,
    caller_of,
    check_body,
    from_engine,
    not_ready,
    prompt_of_application,
)
from deployments.telemetry import (
    METRICS_CONTENT_TYPE,
    DrafterReport,
    ReplicaReport,
    StateFile,
    depth_metrics,
    drafter_metrics,
    drafting_document,
    make_control,
    observe,
    prometheus_text,
)

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0

ENDPOINTS = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "completions": lambda app: app.post("/v1/completions"),
    "chat": lambda app: app.post("/v1/chat/completions"),
    "health": lambda app: app.get("/health"),
    "metrics": lambda app: app.get("/metrics"),
    "drafting": lambda app: app.get("/drafting"),
}


class Ingress(OpenAiIngress):
    """One replica of the ingress, for one model."""

    def __init__(
        self,
        llm_deployments: dict[str, DeploymentHandle[Any]],
        model_cards: dict[str, Any],
        *,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
        lora_paths: dict[str, str] | None = None,
    ) -> None:
        """`drafter`: the deployment of remote drafters, where there is one."""
        super().__init__(llm_deployments, model_cards, lora_paths=lora_paths)
        ((self._model_id, handle),) = llm_deployments.items()
        self._aliases = settings.model.aliases
        for alias in self._aliases:
            self._model_cards[alias] = self._model_cards[self._model_id].model_copy(update={"id": alias})
        self._policy = settings.depth_policy()
        self._workloads = Workloads(known=settings.named_workloads(), aliases=self._aliases)
        if settings.callers is None:
            logger.warning(
                "The settings have no section callers: everyone who reaches this port is served, without an API key, "
                "and may set workload tags."
            )
        self._control = make_control(settings)
        self._state = StateFile(settings.depth.state)
        self._state.restore(self._control)
        self._monitor = ReplicaMonitor(handle, ReplicaReport, self._observe)
        self._monitor.start()
        self._drafters = None if drafter is None else ReplicaMonitor(drafter, DrafterReport)
        if self._drafters is not None:
            self._drafters.start()
        self._scaling: ScalingView | None = None
        if settings.autoscaling is not None:
            self._scaling = ScalingView(ClusterBoard(serve.get_replica_context().app_name))

    async def health(self) -> Response:
        """200 when a request would be served now, else 503 with Retry-After."""
        num_ready = self._monitor.num_ready
        if num_ready == 0:
            raise not_ready(self._model_id)
        return JSONResponse({"status": "ready", "model": self._model_id, "num_target_replicas": num_ready})

    async def metrics(self) -> Response:
        """Prometheus text over all target replicas: whichever ingress replica answers, it says the same."""
        reports = await self._monitor.refresh()
        more = depth_metrics(self._document(), self._model_id) + scaling_metrics(await self._scaled())
        if self._drafters is not None:
            more += drafter_metrics(await self._drafters.refresh(), {one.replica: one.links for one in reports})
        return Response(prometheus_text(reports, more), media_type=METRICS_CONTENT_TYPE)

    async def drafting(self) -> Response:
        """What is known of each workload's acceptance, and the K it gets (`peagle view` shows it); the heads
        that draft, with what was accepted of theirs, remote drafters with the links to them, and how many replicas
        autoscaling wants and why."""
        return JSONResponse({**self._document(), **self._drafting(), "autoscaling": await self._scaled()})

    async def _scaled(self) -> dict[str, Any] | None:
        return None if self._scaling is None else await self._scaling.document()

    def _document(self) -> dict[str, Any]:
        return {"model": self._model_id, **self._control.document(time.monotonic())}

    def _drafting(self) -> dict[str, Any]:
        reports = self._monitor.reports
        return drafting_document(
            [one.by_head for one in reports],
            [head for one in reports for head in one.head.split("+") if head],
            () if self._drafters is None else self._drafters.reports,
            {one.replica: one.links for one in reports},
        )

    def _observe(self, reports: Sequence[ReplicaReport]) -> None:
        observe(self._control, reports)
        self._state.save(self._control)

    async def chat(self, body: ChatBody, request: Request) -> Response:  # type: ignore[override]
        """Answer a chat, whole or streamed."""
        return await super().chat(body, request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:  # type: ignore[override]
        """Continue a prompt, whole or streamed."""
        return await super().completions(body, request)

    async def _get_response(  # type: ignore[override]
        self,
        *,
        body: Body,
        call_method: str,
        raw_request: Request | None = None,
    ) -> AsyncGenerator[Any, None]:
        asked_model = self._model_id if body.model is None else body.model
        await self._get_model_id(asked_model)
        body.model = self._model_id if asked_model in self._aliases else asked_model
        self._decide(body, asked_model, raw_request)
        if self._monitor.num_ready == 0:
            if self._scaling is not None:
                await self._scaling.ask()
            raise not_ready(self._model_id)
        answer = super()._get_response(body=body, call_method=call_method, raw_request=raw_request)
        try:
            item = await self._first(answer)
        except REPLICA_LOST as error:
            raise not_ready(self._model_id) from error
        first = item[0] if isinstance(item, list) else item
        if isinstance(first, ErrorResponse):
            raise from_engine(first)
        yield item
        try:
            async for item in answer:
                yield item
        except REPLICA_LOST:
            # The status line is out already: the stream itself says that it broke off.
            yield f"data: {json.dumps(not_ready(self._model_id).body())}\n\n"

    def _decide(self, body: Body, asked_model: str, raw_request: Request | None) -> None:
        """Replace what the client asked for by the decision on workload and K."""
        caller = caller_of(raw_request)
        try:
            check_body(body)
            drafting = resolve(
                self._policy,
                (body.model_extra or {}).get("drafting"),
                None if raw_request is None else raw_request.headers,
                caller,
                lambda tag: self._workloads.of(tag, asked_model, prompt_of_application(body)),
            )
        except ForbiddenTagError as error:
            raise ApiError(403, error.message, param=error.field, code="tag_not_allowed") from error
        except DraftingError as error:
            raise ApiError(400, error.message, param=error.field) from error
        if self._control is not None:
            drafting = self._control.settle(drafting, time.monotonic(), caller.max_k)
        body.drafting = drafting.to_wire()  # type: ignore[union-attr]

    async def _first(self, answer: AsyncGenerator[Any, None]) -> Any:
        """The first item of `answer`, unless every replica goes away while it waits to be routed to one."""
        task: asyncio.Future[Any] = asyncio.ensure_future(anext(answer))
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_INTERVAL_S))[0]:
                if self._monitor.num_ready == 0:
                    raise not_ready(self._model_id)
            return task.result()
        finally:
            task.cancel()


def make_api(settings: ClusterSettings) -> FastAPI:
    """The web application that the ingress' methods are mounted on."""
    app = FastAPI(title="peagle-serve", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    if (callers := settings.caller_table()) is not None:
        app.add_middleware(CallerMiddleware, callers=callers)
    # Added last and thereby outermost: a browser asks whether it may call before it sends a key.
    if origins := settings.ingress.allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
