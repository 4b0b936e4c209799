"""Who may use the HTTP API: API keys, checked before a request's body is read.

Enters: every HTTP request. Leaves: the request with its `Caller` at `request.state.caller` and without its key, or 401
in OpenAI's form. GET /health and GET /metrics need no key: they are for probes and for Prometheus.
"""

from collections.abc import MutableMapping
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.callers import ANYONE, Caller, Callers, UnknownCallerError
from deployments.errors import ApiError

OPEN_PATHS = ("/health", "/metrics")


class CallerMiddleware:
    """ASGI middleware in front of `app` that lets only `callers` through."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and _route(scope) not in OPEN_PATHS:
            try:
                caller = self._callers.identify(HTTPConnection(scope).headers.get("authorization"))
            except UnknownCallerError as error:
                await _refusal(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
            # The target gets the request's headers: a key that is checked has no business there.
            scope["headers"] = [header for header in scope["headers"] if header[0].lower() != b"authorization"]
        await self._app(scope, receive, send)


def caller_of(request: Request | None) -> Caller:
    """Who sent a request that came through. Without `callers` in the settings it is `ANYONE`, who may set tags."""
    caller = ANYONE if request is None else getattr(request.state, "caller", ANYONE)
    assert isinstance(caller, Caller)
    return caller


def _route(scope: MutableMapping[str, Any]) -> str:
    """The path below the application's route prefix."""
    return str(scope["path"]).removeprefix(str(scope.get("root_path", "")))


def _refusal(error: UnknownCallerError) -> JSONResponse:
    answer = ApiError(401, str(error), code="invalid_api_key")
    return JSONResponse(answer.body(), status_code=401, headers={"WWW-Authenticate": "Bearer"})
