"""What a client gets in place of an answer, in OpenAI's form or Anthropic's. Raised wherever a request is refused."""

import functools
import json
from typing import Any

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 2000, 200
"""Limits of an error: a client must not get back the megabytes that it sent."""

RETRY_AFTER_S = 5
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


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
