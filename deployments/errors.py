"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}` with the right status."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray.exceptions import RayActorError, RayTaskError
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse, OpenAIHTTPException
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.requests import refusal_of

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
