"""Errors of the service as a whole, and errors as HTTP responses."""

from starlette.responses import JSONResponse

from cluster.errors import RETRY_AFTER_S, ApiError

LOST_CODE = "server_lost"


def json_response(error: ApiError, path: str = "") -> JSONResponse:
    """`path`: of the request, see `ApiError.body`."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(path), status_code=error.status, headers=headers)


def not_ready(model: str = "", status: int = 503) -> ApiError:
    """No replica of the target can answer: at the start until the engine has loaded, later when all are gone. `model`:
    its name, where it is known. `status`: 502 of a single replica, so that HAProxy asks another one."""
    what = f"The model {model!r}" if model else "The service"
    text = f"{what} is not ready: no replica is up (still loading, or restarting)."
    when = f"Try again in {RETRY_AFTER_S} seconds; GET /health answers 200 when it is ready."
    return ApiError(status, f"{text} {when}", code="model_not_ready")


def server_lost(status: int = 503) -> ApiError:
    """A replica is gone that worked on a request."""
    text = "The server that worked on this request has stopped. Send the request again."
    return ApiError(status, text, code=LOST_CODE)


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
