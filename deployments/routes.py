"""The HTTP routes over a `FrontEnd`: what is served at which path, who may reach it, how bodies and answers flow."""

import base64
import contextlib
import functools
import hashlib
import hmac
import ipaddress
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import __version__ as vllm_version
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

from cluster.errors import ApiError
from cluster.request import ANYONE
from cluster.settings import IngressSettings
from deployments import openapi
from deployments.body import BODIES, Call, detect_call, engine_keys, read_json
from deployments.compat import GATEWAY_HEADER, address_header, gateway_token, listening_host
from deployments.errors import internal_error, json_response
from deployments.front_end import FrontEnd, logger
from deployments.http_streams import EventStream, read_body, until_disconnected
from deployments.protocols import TOKENIZER_PATHS, answer_by_tokenizer
from deployments.telemetry import METRICS_CONTENT_TYPE
from peagle import __version__ as peagle_version

CALLS: dict[str, Call] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
ANSWERS: dict[Call, type[BaseModel]] = {
    "chat": ChatCompletionResponse,
    "completions": CompletionResponse,
    "responses": ResponsesResponse,
    "messages": AnthropicMessagesResponse,
}
RECORDS: dict[str, dict[type[BaseModel], type[BaseModel]]] = {
    **{path: {BODIES[call]: ANSWERS[call]} for path, call in CALLS.items()},
    "/invocations": {BODIES[call]: ANSWERS[call] for call in ("chat", "completions")},
    **TOKENIZER_PATHS,
}
"""Records of a body and of its answer, by the path that takes it by POST."""

JSON_MEDIA_TYPE = "application/json"

PROBE_PATHS = ("/health", "/ping")
"""Load balancers ask these, with any Host header."""

SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css")  # they come with vLLM

OPEN_PATHS = ("/", "/metrics", "/docs", "/openapi.json", *(f"/docs/{name}" for name in SWAGGER_FILES), *PROBE_PATHS)
"""For probes and Prometheus, and pages, which ask for a key themselves: they need no key."""


class Backend(Protocol):
    """What answers behind the HTTP API."""

    front_end: FrontEnd
    vllm: Any  # the state of vLLM's API server: its API objects by name

    async def health(self) -> dict[str, Any]:
        """Raises ApiError (503) where a request would not be served."""

    async def metrics(self) -> bytes: ...

    async def drafting(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Entrance:
    """Where requests come in. `host`: the address that the service listens on, "" where it is not known;
    `address_header`: of the client's address, as HAProxy of this service writes it, "" without one; and what the
    settings' `ingress` allows. `gateway_token`: by which a gateway of this cluster proves what it is."""

    host: str = ""
    address_header: str = ""
    gateway_token: str = ""
    allowed_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()

    @classmethod
    def read_from_serve(cls, ingress: IngressSettings) -> "Entrance":
        """The entrance of the replica that runs this. Waits for Serve's controller."""
        return cls(listening_host(), address_header(), gateway_token(), ingress.allowed_hosts, ingress.allow_origins)

    @property
    def checks_hosts(self) -> bool:
        """Whether Host and Origin are checked where no key is needed: `allowed_hosts` is set, or only this machine
        reaches the service."""
        return bool(self.allowed_hosts) or _is_loopback(self.host)

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError (403) for a request of another site's web page. Its Origin shows it, or its Host, if that
        site's name has been made to lead to this machine (DNS rebinding)."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        name = _host_name(host)
        hosts = {self.host.lower(), *(_host_name(allowed) for allowed in self.allowed_hosts)}
        if host and not (_is_loopback(name) or name in hosts or "*" in hosts):
            raise ApiError(
                403,
                f"the Host {host!r:.80} is not one of this service, which has no API keys: write it into "
                "ingress.allowed_hosts",
                code="host_not_allowed",
            )
        is_own = host and origin.partition("://")[2].lower() == host.lower()
        if origin and not (is_own or origin in self.allow_origins or "*" in self.allow_origins):
            raise ApiError(
                403,
                f"web pages of {origin!r:.80} may not call this service: write it into ingress.allow_origins",
                code="origin_not_allowed",
            )


def _host_name(host: str) -> str:
    """The name or address in a Host header, without its port."""
    name = host.lower().strip()
    return name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0].rstrip(".")


@functools.lru_cache
def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_app(backend: Backend, entrance: Entrance) -> FastAPI:
    """The HTTP API: OpenAI's, Anthropic's Messages, SageMaker's, the paths for tokens, and GET /health, /version,
    /metrics, /drafting and the page at /."""
    engine_keys()  # takes a part of a second
    app = FastAPI(
        title="peagle-serve", version=peagle_version, docs_url=None, redoc_url=None, redirect_slashes=False,
        responses=openapi.REFUSALS,
    )  # fmt: skip

    async def ask(request: Request) -> Response:
        return await _answer(backend, request)

    for path in RECORDS:
        app.add_route(path, ask, methods=["POST"])  # of Starlette: without FastAPI's search for parameters

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(backend.front_end.models().values())})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if (card := backend.front_end.models().get(model)) is None:
            raise ApiError(404, f"the model {model!r:.80} is not served here", param="model", code="model_not_found")
        return JSONResponse(card)

    @app.api_route("/ping", methods=["GET", "POST"])
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(await backend.health())

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": vllm_version, "peagle": peagle_version})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await backend.metrics(), media_type=METRICS_CONTENT_TYPE)

    @app.get("/drafting")
    async def drafting() -> Response:
        return JSONResponse(await backend.drafting())

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text, headers = live_page()
        return HTMLResponse(text, headers=headers)

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        scripts, styles = (f"{root}/docs/{name}" for name in SWAGGER_FILES)
        text = bytes(
            get_swagger_ui_html(
                openapi_url=f"{root}/openapi.json", title=app.title, swagger_js_url=scripts, swagger_css_url=styles,
                swagger_favicon_url="data:,",
            ).body
        ).decode()  # fmt: skip
        scripts = f"script-src 'self' {hash_of(text, 'script')}"
        return HTMLResponse(text, headers=page_headers(scripts, "style-src 'self' 'unsafe-inline'"))

    app.mount("/docs", StaticFiles(packages=[("vllm.entrypoints.serve.instrumentator", "static")]))

    async def refuse(request: Request, error: Exception) -> Response:
        path, headers = _path(request.scope), dict[str, str]()
        if isinstance(error, HTTPException):
            text, headers = str(error.detail), dict(error.headers or {})
            if error.status_code == 404:
                text = f"{path:.80} is not served here, but {', '.join(served)}; /docs describes them"
            error = ApiError(error.status_code, text)
        elif not isinstance(error, ApiError):
            logger.error("a request to %s failed", request.url.path, exc_info=error)
            error = internal_error()
        response = json_response(error, path)
        response.headers.update(headers)
        return response

    served = [route.path_format for route in app.routes if isinstance(route, Route) and route.include_in_schema]
    app.openapi = functools.cache(functools.partial(openapi.document, app, RECORDS))  # type: ignore[method-assign]
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(GateMiddleware, front_end=backend.front_end, entrance=entrance)
    # Added last and thereby outermost: a browser asks whether it may call before it sends a key.
    if origins := entrance.allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _path(scope: Scope) -> str:
    """The path of a request below the one that the service is at, without a slash at its end."""
    return str(scope.get("path", "")).removeprefix(str(scope.get("root_path", ""))).rstrip("/") or "/"


def hash_of(text: str, tag: str) -> str:
    """The source of a content security policy that stands for what is inside this tag of a page."""
    inside = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def page_headers(*rules: str) -> dict[str, str]:
    """Headers by which a browser loads nothing from elsewhere. `rules`: what else its policy says."""
    policy = "; ".join((
        "default-src 'none'", *rules, "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'",
    ))  # fmt: skip
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


@functools.cache
def live_page() -> tuple[str, dict[str, str]]:
    """The page at / and its headers, by which a browser runs and loads nothing but what the file itself holds."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    sources = (f"{tag}-src {hash_of(text, tag)}" for tag in ("script", "style"))
    return text, page_headers(*sources, "require-trusted-types-for 'script'")


async def _answer(backend: Backend, request: Request) -> Response:
    """The HTTP response to a request with a body; its status waits for the first piece of the answer."""
    front_end, caller = backend.front_end, getattr(request.state, "caller", ANYONE)
    path = _path(request.scope)

    async with contextlib.AsyncExitStack() as until_sent:
        try:
            front_end.admission.count_request(caller)
            _check_media_type(request.headers.get("content-type", ""))
            hold = until_sent.enter_context(front_end.bodies.hold_body(caller))
            document = read_json(await read_body(request, hold, front_end.limits.max_body_bytes), front_end.limits)
            await until_sent.enter_async_context(until_disconnected(request))
            if path in TOKENIZER_PATHS:
                async with front_end.tokenizing.hold_places(caller):
                    text = await answer_by_tokenizer(path, front_end, backend.vllm, document)
                front_end.metrics.count_answer("", 200)
                return Response(text, media_type=JSON_MEDIA_TYPE)
            call = CALLS.get(path) or detect_call(document)
        except ApiError as error:
            front_end.metrics.count_answer("", error.status)
            raise
        pieces = front_end.answer(call, document, caller, request.headers)
        first = await anext(pieces, "")
        if first.startswith(("data: ", "event: ")):
            return EventStream(_events(first, pieces, path), until_sent.pop_all())
        return Response("".join([first, *[piece async for piece in pieces]]), media_type=JSON_MEDIA_TYPE)


def _check_media_type(content_type: str) -> None:
    """Raises ApiError (415) for what is not said to be JSON: a browser lets any web page send other media types, and
    none, to any address without asking."""
    if content_type.partition(";")[0].strip().lower() != JSON_MEDIA_TYPE:
        said = f"Content-Type {content_type!r:.80}" if content_type else "no Content-Type"
        raise ApiError(
            415,
            f"The request has {said}: send the header Content-Type: {JSON_MEDIA_TYPE}.",
            code="unsupported_media_type",
        )


async def _events(first: str, pieces: AsyncIterator[str], path: str) -> AsyncIterator[str]:
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        yield first
        try:
            async for piece in pieces:
                yield piece
        except ApiError as error:
            yield error.event(path)  # the status line is out: the stream itself says that it broke off


class GateMiddleware:
    """Looks at every request before anything else does: refuses those of foreign web pages where no key protects the
    service, finds the caller by API key or address, and takes the key away. HEAD is answered as GET, whose body the
    HTTP server leaves out, and a path with a slash at its end as the one without."""

    def __init__(self, app: ASGIApp, front_end: FrontEnd, entrance: Entrance) -> None:
        self._app, self._front_end, self._entrance = app, front_end, entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _path(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        # A copy: the HTTP server has to see that it was HEAD.
        scope = {**scope, "method": method, "path": str(scope.get("root_path", "")) + path}
        headers = Headers(scope=scope)
        try:
            if path not in PROBE_PATHS and not self._front_end.needs_key and self._entrance.checks_hosts:
                self._entrance.check_site(headers)
            if path not in OPEN_PATHS:
                key = headers.get("x-api-key")  # of Anthropic's clients
                authorization = headers.get("authorization") or (f"Bearer {key}" if key else None)
                caller = self._front_end.identify_caller(authorization, self._read_address(scope))
                scope["state"] = {**scope.get("state", {}), "caller": caller}
                keys = b"authorization", b"x-api-key"
                scope["headers"] = [header for header in scope["headers"] if header[0].lower() not in keys]
        except ApiError as error:
            self._front_end.metrics.count_answer("", error.status)
            await json_response(error, path)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _read_address(self, scope: Scope) -> str:
        """What HAProxy wrote: it appends its header below those that the client may have sent under the same name. A
        gateway is the client of HAProxy, and proves that it is one."""
        headers = Headers(scope=scope)
        proof, _, address = headers.get(GATEWAY_HEADER, "").partition(" ")
        if proof and hmac.compare_digest(proof.encode(), self._entrance.gateway_token.encode()):
            return address
        found = headers.getlist(self._entrance.address_header) if self._entrance.address_header else []
        return found[-1] if found else ""
