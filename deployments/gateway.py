"""`build(args)`: an application in front of those of several models, which forwards each request by its `model`.

Enters: any request of the API. Leaves: the same request to the application that serves the model, with the client's
address, and its answer as it comes, streams included. A request without a body goes to the first one. An application
that is not ready gets its own requests refused, and no others.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, field_validator
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from yarl import URL

from cluster.admission import Admission, BodyBudget
from cluster.errors import ApiError
from cluster.request import ANYONE, client_network
from deployments import GATEWAY_NAME, compat
from deployments.app import TARGET_REQUESTS, bind
from deployments.errors import json_response, not_ready, server_lost
from deployments.http_streams import EventStream, read_body, until_disconnected
from deployments.replicas import PacedCall
from deployments.telemetry import METRICS_CONTENT_TYPE, labelled, prometheus_text
from peagle.schema import Section, SettingsError

GATEWAY_PATH = "deployments.gateway:build"

BODIES_HELD = 16
"""Largest bodies that a gateway holds at a time."""

MAX_FORWARDED = 1024
"""Requests, of all its replicas: each takes a second connection of the same HAProxy. A quarter is for clients that have
none."""
ASK_TIMEOUT_S = 10.0
OF_CONNECTION = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
"""Headers that are each connection's own."""
NOT_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add."""


class GatewaySettings(Section):
    """One address for several models."""

    models: dict[str, str] = Field(description="Route prefix of the application that serves a model, by its id.")
    num_replicas: int = Field(default=1, ge=1, description="Replicas of the gateway.")
    num_cpus: float = Field(default=1.0, ge=0, description="Logical CPUs of one.")
    max_body_bytes: int = Field(default=16 * 2**20, ge=1, description="Size of a body; beyond it 413.")

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: dict[str, str]) -> dict[str, str]:
        rule = "write a route prefix such as /coder"
        wrong = {name: path for name, path in models.items() if not path.startswith("/") or path.endswith("/")}
        problems = [f".{name} is {path!r:.80}: {rule}" for name, path in wrong.items()]
        SettingsError.check(problems if models else [f" is empty: for each model, {rule}"])
        return models


class _Named(msgspec.Struct):
    """What the gateway reads of a body."""

    model: Any = None


class Forwarder:
    """Forwards requests to `base_url`, the address of all applications. `address_header`: see `compat`; `token`: by
    which applications know a gateway. To be made on the event loop that it runs on."""

    def __init__(self, settings: GatewaySettings, base_url: str, address_header: str = "", token: str = "") -> None:
        self._models, self._max_body_bytes, self._base_url = settings.models, settings.max_body_bytes, base_url
        self._address_header, self._token = address_header.lower(), token
        self._forwarded = Admission(max(1, MAX_FORWARDED // settings.num_replicas), max_queued=0)
        self._forwarded.num_reserved = self._forwarded.max_running // 4
        self._bodies = BodyBudget(BODIES_HELD * settings.max_body_bytes, f"{BODIES_HELD} times max_body_bytes")
        self._metrics = PacedCall(self._collect_metrics)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # one kept open may end at any moment
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=NOT_OURS,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def find_model(self, body: bytes) -> str:
        """The model that a request is for. Raises ApiError for what is no JSON object, or names none that is served."""
        if not body:
            return next(iter(self._models))
        try:
            model = msgspec.json.decode(body, type=_Named).model
        except msgspec.ValidationError as error:
            raise ApiError(400, f"the body is no JSON object: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
        names = ", ".join(map(repr, self._models))
        if model is None:
            raise ApiError(400, f"model is missing: this address serves {names}", param="model")
        if not isinstance(model, str) or model not in self._models:
            text = f"the model {model!r:.80} is not served here, but {names}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return model

    async def forward(self, request: Request) -> Response:
        """The application's answer; its status waits for that of the application."""
        for model, prefix in self._models.items():
            if f"{request.scope['path']}/".startswith(f"{prefix}/"):
                raise not_ready(model)  # HAProxy knows no application of this prefix
        async with contextlib.AsyncExitStack() as until_sent:
            caller = replace(ANYONE, address=client_network(self._client_address(request)))
            held = until_sent.enter_context(self._bodies.hold_body(caller))
            body = await read_body(request, held, self._max_body_bytes)
            if len(body) > self._max_body_bytes:
                text = f"the body has more than {self._max_body_bytes} bytes (max_body_bytes)"
                raise ApiError(413, text, code="too_large")
            model = self.find_model(body)
            await until_sent.enter_async_context(until_disconnected(request))
            await until_sent.enter_async_context(self._forwarded.hold_places(caller))
            answer = await self._ask(request, request.method, self._models[model], body)
            if answer.status == 503 and request.method == "POST":
                answer.close()
                raise not_ready(model)
            response = EventStream(_until_closed(answer), until_sent.pop_all())
            response.status_code = answer.status
            response.raw_headers = [
                (name.lower(), value)
                for name, value in answer.raw_headers
                if name.lower().decode("latin-1") not in OF_CONNECTION
            ]
            return response

    async def _ask(
        self, request: Request, method: str, prefix: str, body: bytes, path: str = ""
    ) -> aiohttp.ClientResponse:
        path = path or request.scope["raw_path"].decode("latin-1").removeprefix(request.scope.get("root_path", ""))
        query = request.scope["query_string"].decode("latin-1")
        url = URL(f"{self._base_url}{prefix}{path}" + (f"?{query}" if query else ""), encoded=True)
        dropped = {*OF_CONNECTION, "content-length", self._address_header, compat.GATEWAY_HEADER}
        headers = [(name, value) for name, value in request.headers.items() if name not in dropped]
        if address := self._client_address(request):
            headers.append((compat.GATEWAY_HEADER, f"{self._token} {address}"))
        try:
            return await self.session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
        except aiohttp.ClientError as error:
            raise server_lost(502) from error

    def _client_address(self, request: Request) -> str:
        """What HAProxy wrote, which stands last."""
        found = request.headers.getlist(self._address_header) if self._address_header else []
        return found[-1] if found else ""

    async def _ask_all(self, ask: Callable[[str], Awaitable[aiohttp.ClientResponse]]) -> dict[str, tuple[int, bytes]]:
        """Status and body that each application answers to `ask`, by its prefix; 503 where none comes."""

        async def read(prefix: str) -> tuple[int, bytes]:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S), await ask(prefix) as answer:
                    return answer.status, await answer.read()
            except (ApiError, TimeoutError, aiohttp.ClientError):
                return 503, b""

        prefixes = dict.fromkeys(self._models.values())
        return dict(zip(prefixes, await asyncio.gather(*map(read, prefixes)), strict=True))

    # ---- what the gateway answers itself

    async def models(self, request: Request) -> Response:
        """All models, also those that are not ready; or one of them."""
        cards = {name: {"id": name, "object": "model", "created": 0, "owned_by": "peagle"} for name in self._models}
        answers = await self._ask_all(lambda prefix: self._ask(request, "GET", prefix, b"", "/v1/models"))
        refusals = [answer for answer in answers.values() if answer[0] in (401, 403)]
        if len(refusals) == len(answers):
            return Response(refusals[0][1], refusals[0][0], media_type="application/json")
        for status, body in answers.values():
            found = json.loads(body)["data"] if status == 200 else []
            cards |= {card["id"]: card for card in found if card["id"] in cards}
        if not (name := request.path_params.get("model", "").rstrip("/")):
            return JSONResponse({"object": "list", "data": list(cards.values())})
        if name not in cards:
            text = f"the model {name!r:.80} is not served here"
            raise ApiError(404, text, param="model", code="model_not_found")
        return JSONResponse(cards[name])

    async def health(self, request: Request) -> Response:
        """200 while any model is ready."""
        found = await self._ask_all(lambda prefix: self._ask(request, "GET", prefix, b""))
        states = {name: "ready" if found[prefix][0] == 200 else "not ready" for name, prefix in self._models.items()}
        if "ready" not in states.values():
            raise not_ready(next(iter(states)))
        return JSONResponse({"status": "ready", "models": states})

    async def metrics(self, request: Request) -> Response:
        """The metrics of all applications, with a label that tells them apart."""
        return Response(await self._metrics(), media_type=METRICS_CONTENT_TYPE)

    async def _collect_metrics(self) -> bytes:
        def merge() -> bytes:
            families = []
            for prefix, (status, body) in answers.items():
                text = body.decode() if status == 200 else ""
                families += labelled(text_string_to_metric_families(text), application=prefix)
            return prometheus_text(families)

        answers = await self._ask_all(lambda prefix: self.session.get(f"{self._base_url}{prefix}/metrics"))
        return await asyncio.to_thread(merge)

    def app(self) -> Starlette:
        async def refuse(request: Request, error: Exception) -> Response:
            assert isinstance(error, ApiError)
            return json_response(error, request.url.path)

        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        own = {"/v1/models": self.models, "/health": self.health, "/metrics": self.metrics}
        own |= {f"{path}/": answer for path, answer in own.items()} | {"/v1/models/{model:path}": self.models}
        routes = [Route(path, answer) for path, answer in own.items()]
        routes += [Route(path, self.health, methods=["GET", "POST"]) for path in ("/ping", "/ping/")]
        routes.append(Route("/{path:path}", self.forward, methods=methods))
        return Starlette(routes=routes, exception_handlers={ApiError: refuse})


async def _until_closed(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body of an answer. Its connection ends with this, and with it the work for a client that has gone."""
    with contextlib.closing(answer):
        async for piece in answer.content.iter_any():
            yield piece


class GatewayServer:
    """One replica."""

    def __init__(self, settings: GatewaySettings) -> None:
        compat.prepare_replica()
        self._settings = settings

    async def __serve_build_asgi_app__(self) -> Starlette:
        url, token = await asyncio.to_thread(compat.local_url), await asyncio.to_thread(compat.gateway_token)
        return Forwarder(self._settings, url, compat.address_header(), token).app()


HttpGateway = serve.ingress(None)(GatewayServer)


def build(args: Mapping[str, Any]) -> serve.Application:
    """Raises SettingsError, which lists every problem of `args`."""
    settings = GatewaySettings.read(args or {})
    environment = {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}
    return bind(
        "deployments.gateway.HttpGateway",
        settings,
        name=GATEWAY_NAME,
        num_replicas=settings.num_replicas,
        max_ongoing_requests=TARGET_REQUESTS,
        ray_actor_options={"num_cpus": settings.num_cpus, "runtime_env": environment},
    )
