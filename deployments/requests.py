"""The request bodies of the API, and the checks that their schema and the engine leave out."""

import logging
from collections.abc import MutableMapping
from typing import Any, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator
from ray.exceptions import RayActorError, RayTaskError
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    OpenAIHTTPException,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.request import ANYONE, Caller, Callers, DraftingError, UnknownCallerError, system_prompt
from peagle.vllm.acceptance import DEPTH_KEY, HEAD_KEY, SURVIVAL_KEY, WORKLOAD_KEY

# ====================================================================================================
# The request bodies of the API, and the checks that their schema and the engine leave out.

# The records that the ingress parses and the engine answers with. Those of `ray.serve.llm.openai_api_models` are
# subclasses of them, which neither uses.


class ChatBody(ChatCompletionRequest):
    """Body of /v1/chat/completions: OpenAI's and vLLM's fields, and `drafting`."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_odd_shapes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return _parsed(data, handler)


class CompletionBody(CompletionRequest):
    """Body of /v1/completions, with `drafting` too."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_odd_shapes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return _parsed(data, handler)


T = TypeVar("T")
Body = ChatCompletionRequest | CompletionRequest


def _parsed(data: Any, handler: ModelWrapValidatorHandler[T]) -> T:
    """The record of `data`. vLLM's own validators run before the types are checked and trip over values of a type that
    they do not expect, which must be an error of the request and not of the server."""
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    try:
        # A field that is null is a field that is missing.
        return handler({key: value for key, value in data.items() if value is not None})
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"a field has a value of the wrong type ({error})") from error


def refusal_of(error: Exception) -> tuple[str, str | None]:
    """What a parsing error says to the client, and the request's field that it is about, where it names one."""
    if not isinstance(error, ValidationError | RequestValidationError):
        return str(error), getattr(error, "parameter", None)
    detail = error.errors()[0]
    steps = [str(step) for step in detail["loc"] if step != "body"]
    # Behind a field's name and index stand the names of the types that were tried.
    field = ".".join(steps[: 2 if len(steps) > 1 and steps[1].isdigit() else 1])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{field}: {message}" if field else message, field or None


def check_body(body: Body) -> None:
    """What neither the schema nor the engine says clearly.

    Raises:
        DraftingError: no messages, or the engine's own request arguments set from outside.
    """
    if isinstance(body, ChatCompletionRequest) and not body.messages:
        raise DraftingError("messages", "messages must hold at least one message")
    for key in body.vllm_xargs or {}:
        if key in (DEPTH_KEY, HEAD_KEY, SURVIVAL_KEY, WORKLOAD_KEY):
            raise DraftingError(f"vllm_xargs.{key}", f"vllm_xargs.{key} is set by the server: send the field drafting")


def num_prompts(body: Body) -> int:
    """Prompts of a completion request (a list of strings or of token lists), 1 for a chat request."""
    prompt = getattr(body, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def prompt_of_application(body: Body) -> str:
    """The system prompt of a chat request, "" for a completion request."""
    return system_prompt(body.messages) if isinstance(body, ChatCompletionRequest) else ""


# ====================================================================================================
# Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}` with the right status.

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
REPLICA_LOST = (
    RayActorError,
    EngineDeadError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    BackPressureError,
)
"""What a call to the target raises when its replica is gone or its engine dead: try again later, nothing was wrong with
the request."""

_NAMES = {400: ("invalid_request_error", "invalid_value"), 404: ("invalid_request_error", "not_found")}


class ApiError(Exception):
    """An answer to the client other than success. `param` names the request's field, where one is to blame."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        kind, default_code = _NAMES.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
        self.kind = kind
        self.code = code or default_code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        # What a client sent may stand in it, and a lone surrogate, which JSON can hold, has no UTF-8 form.
        message, param = (
            None if one is None else one.encode("utf-8", "backslashreplace").decode()
            for one in (self.message, self.param)
        )
        return {"error": {"message": message, "type": self.kind, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Extra headers of the response: when to come back, for a service that is not ready."""
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}


def not_ready(model_id: str) -> ApiError:
    """No replica of the target can answer: at start until the engine has loaded, later when all of them are gone."""
    return ApiError(
        503,
        f"The model {model_id!r} is not ready: no replica is up (still loading, or restarting). Try again in "
        f"{RETRY_AFTER_S} seconds; GET /health answers 200 when it is ready.",
        code="model_not_ready",
    )


def from_engine(response: ErrorResponse) -> ApiError:
    """The engine's own refusal of a request, for example a prompt longer than the context."""
    error = response.error
    status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    return ApiError(status, error.message, param=error.param)


def add_error_handlers(app: FastAPI) -> None:
    """Let `app` answer every error in OpenAI's form."""

    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return answer(error)

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = "model_not_found" if error.status_code == 404 and "model" in str(error.detail) else None
        return answer(ApiError(error.status_code, str(error.detail), param="model" if code else None, code=code))

    async def parent_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OpenAIHTTPException)
        param, code = ("model", "model_not_found") if error.status_code == 404 else (None, None)
        return answer(ApiError(error.status_code, error.message, param=param, code=code))

    async def malformed(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(_from_validation(error))

    async def refused(request: Request, error: Exception) -> JSONResponse:
        message, field = refusal_of(error)
        return answer(ApiError(400, message, param=field))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 500)
        if isinstance(error, RayTaskError) or status >= 500:
            logger.error("a request to %s failed", request.url.path, exc_info=error)
        message = getattr(error, "message", None) if status < 500 else None
        return answer(ApiError(status, str(message or "The server failed on this request; its log says why.")))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(OpenAIHTTPException, parent_error)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(VLLMClientError, refused)
    app.add_exception_handler(Exception, unexpected)


def _from_validation(error: RequestValidationError) -> ApiError:
    detail = error.errors()[0]
    if detail["type"] == "json_invalid":
        reason = detail.get("ctx", {}).get("error", "cannot be parsed")
        return ApiError(400, f"The request body is not valid JSON: {reason}.", code="invalid_json")
    message, field = refusal_of(error)
    return ApiError(400, message, param=field)


# ====================================================================================================
# Who may use the HTTP API: API keys, checked before a request's body is read.
#
# Enters: every HTTP request. Leaves: the request with its `Caller` at `request.state.caller` and without its key, or 401
# in OpenAI's form. GET /health and GET /metrics need no key: they are for probes and for Prometheus.

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
