"""Errors in OpenAI's form, or Anthropic's: what a client gets in place of an answer."""

import functools
import json
from typing import Any

from starlette.responses import JSONResponse

from cluster.admission import BusyError

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 2000, 200
"""Limits of an error: a client must not get back the megabytes that it sent."""

RETRY_AFTER_S = 5
NOT_READY = (
    "{} is not ready: no replica is up (still loading, or restarting). Try again in "
    f"{RETRY_AFTER_S} seconds; GET /health answers 200 when it is ready."
)
NOT_READY_CODE, LOST_CODE = "model_not_ready", "server_lost"
LOST = "The server that worked on this request has stopped. Send the request again."


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(Exception):
    """An answer other than success. `param` names the request's field, where one is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or {400: "invalid_value", 404: "not_found"}.get(status)
        self.retry_after_s = RETRY_AFTER_S if status in (502, 503) and retry_after_s is None else retry_after_s

    @property
    def arguments(self) -> dict[str, Any]:
        """By which the same error is made again."""
        return {name: getattr(self, name) for name in ("status", "message", "param", "code", "retry_after_s")}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ApiError, **self.arguments), ()

    def body(self, path: str = "") -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, which can be encoded whatever the client sent. `path`: of
        the request. Anthropic's API has types of its own, and `"type": "error"` beside `error`."""
        is_anthropics = path.startswith(ANTHROPIC_PATH)
        types, default = {429: "rate_limit_error"}, "server_error"
        if is_anthropics:
            types, default = ANTHROPIC_TYPES, "api_error"
        error = {
            "message": _encodable(f"{self.message:.{MAX_MESSAGE_CHARS}}"),
            "type": types.get(self.status, default if self.status >= 500 else "invalid_request_error"),
            "param": None if self.param is None else _encodable(f"{self.param:.{MAX_PARAM_CHARS}}"),
            "code": self.code,
        }
        return {"type": "error", "error": error} if is_anthropics else {"error": error}

    def event(self, path: str = "") -> str:
        """The error as the last server-sent event of a stream that has begun."""
        if path not in ("/v1/responses", ANTHROPIC_PATH):
            return f"data: {json.dumps(self.body(path))}\n\n"
        return f"event: error\ndata: {json.dumps({'type': 'error', **self.body(path)})}\n\n"

    def response(self, path: str = "") -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(path), status_code=self.status, headers=headers)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def not_ready(model: str = "") -> ApiError:
    """No replica of the target can answer: at the start until the engine has loaded, later when all are gone. `model`:
    its name, where it is known."""
    what = f"The model {model!r}" if model else "The service"
    return ApiError(503, NOT_READY.format(what), code=NOT_READY_CODE)


def server_lost(status: int = 503) -> ApiError:
    """A replica is gone that worked on a request."""
    return ApiError(status, LOST, code=LOST_CODE)


def engine_lost() -> ApiError:
    """The engine that worked on a request is gone. HAProxy sends a request with this status to another replica, but not
    one with 503, which is what a whole service says that is not ready."""
    return ApiError(
        502,
        "The engine that worked on this request has stopped, so the answer is not complete. Send the request again.",
        code="engine_lost",
    )


def internal_error() -> ApiError:
    return ApiError(500, "The server failed on this request; its log says why.")


def busy_error(error: BusyError) -> ApiError:
    return ApiError(429, error.message, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
