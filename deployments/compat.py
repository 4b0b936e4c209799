"""The names of Ray that are not its public API, all in one place, and the versions that they were read in.

`check()` looks for every one of them when an application is built, and says in one line what is missing. What is
private in vLLM is in `peagle.vllm.compat`.
"""

import asyncio
import importlib
import importlib.metadata
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

RAY_VERSION = "2.60"
"""Ray's minor version that this was written against. Another may work: the names are checked one by one."""

SEAMS = (
    "ray.serve.handle:DeploymentBroadcastResponse._fetch_replica_results_async",
    "ray.serve._private.replica_result:ReplicaResult.get_async",
    "ray.experimental.internal_kv:_internal_kv_get",
    "ray.experimental.internal_kv:_internal_kv_put",
    "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine.start",
    "ray._private.authentication.authentication_token_setup:maybe_enable_token_auth_if_token_available",
    "ray.dashboard.modules.serve.sdk:ServeSubmissionClient.deploy_applications",
)


class CompatError(RuntimeError):
    """This Ray is not one that the service can run on."""


def check() -> None:
    """Raises CompatError naming the version and every name that is missing; warns of another version that has all."""
    version = importlib.metadata.version("ray")
    missing = [seam for seam in SEAMS if not _exists(seam)]
    if missing:
        raise CompatError(f"Ray {version} is not supported, {RAY_VERSION} is: it has no {', '.join(missing)}")
    if not version.startswith(f"{RAY_VERSION}."):
        warnings.warn(f"Ray {version} has not been tried with this service, {RAY_VERSION} has", stacklevel=2)


def _exists(seam: str) -> bool:
    module, _, path = seam.partition(":")
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True


async def ask_each(handle: Any, method: str, timeout_s: float) -> list[Any]:
    """What each running replica of a deployment answers to `method`, or the exception in its place: TimeoutError for
    one that does not answer in time. Ray's own `results_async` gives one time-out to all of them together.

    Raises what Ray raises where there is no replica.
    """
    async with asyncio.timeout(timeout_s):
        asked = await handle.broadcast(method)._fetch_replica_results_async()

    async def one(result: Any) -> Any:
        async with asyncio.timeout(timeout_s):
            return await result.get_async()

    return await asyncio.gather(*map(one, asked), return_exceptions=True)


def engine_client(server: Any) -> Any:
    """vLLM's `AsyncLLM` in the replica of a `ray.serve.llm` server whose engine has started."""
    return server.engine._engine_client


async def ask_engine(server: Any, call: str, request: Any) -> Any:
    """vLLM's answer to its own record of a request: a response object, an `ErrorResponse`, or the generator of
    server-sent events. `ray.serve.llm` copies each of these into types of its own, and batches events."""
    if call == "chat":
        return await server.engine._oai_serving_chat.create_chat_completion(request)
    return await server.engine._oai_serving_completion.create_completion(request)


def error_of(server: Any, error: Exception) -> Any:
    """vLLM's `error` object for an exception: its own table of which are the client's fault."""
    return server.engine._oai_serving_chat.create_error_response(error).error


def check_engine(server: Any) -> None:
    """Raises CompatError where a started engine lacks what the functions above use."""
    for name in ("_engine_client", "_oai_serving_chat", "_oai_serving_completion"):
        if getattr(server.engine, name, None) is None:
            version = importlib.metadata.version("ray")
            raise CompatError(f"Ray {version} is not supported, {RAY_VERSION} is: its vLLM engine has no {name}")


def kv_get(key: str, namespace: str) -> bytes | None:
    """A value in the key-value store of the Ray cluster."""
    from ray.experimental import internal_kv

    value: bytes | None = internal_kv._internal_kv_get(key, namespace=namespace)
    return value


def kv_put(key: str, value: str, namespace: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key, value, namespace=namespace)


def be_no_nicer() -> None:
    """Give this process, and so those that it starts, the priority of any other. Ray starts workers at nice 15, where
    whatever else runs on the machine starves an engine; `peagle serve` and the manifests tell Ray not to. In a Ray that
    others have started this needs the right to (root, or CAP_SYS_NICE), else RAY_worker_niceness=0 where Ray starts."""
    if os.nice(0) <= 0:
        return
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
    except PermissionError:
        logger.warning(
            "this replica runs at nice %d, and other processes of the machine come first: start Ray with "
            "RAY_worker_niceness=0 in its environment",
            os.nice(0),
        )


def use_token() -> None:
    """Let this process send the token that the Ray cluster it is going to join was started with. Ray turns that on by
    itself only in the process that starts a cluster."""
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def serve_client(dashboard: str) -> Any:
    """Client of Serve's REST API at a dashboard's URL. Raises ConnectionError where none answers."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(dashboard)


# ---- Serve's HTTP proxy


def proxy_middlewares() -> list[Any]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: the errors that the proxy itself answers, as plain text, come in
    OpenAI's form. An ingress replica that died gives 503, for the request may be sent again."""
    from starlette.middleware import Middleware

    return [Middleware(PlainErrors)]


class PlainErrors:
    """ASGI middleware that turns error responses of plain text into JSON."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: dict[str, Any] = {}
        text = b""

        async def send_json(message: Any) -> None:
            nonlocal text
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                if message["status"] >= 400 and (not kinds or kinds[0].startswith(b"text/plain")):
                    start.update(message)
                    return
            elif start:
                text += message.get("body", b"")
                if not message.get("more_body"):
                    for part in error_messages(start, text):
                        await send(part)
                return
            await send(message)

        await self._app(scope, receive, send_json)


def error_messages(start: dict[str, Any], text: bytes) -> list[dict[str, Any]]:
    """The ASGI messages of an error response in OpenAI's form."""
    status, message = start["status"], text.decode("utf-8", "replace")
    headers = [item for item in start["headers"] if item[0].lower() not in (b"content-type", b"content-length")]
    if status == 500:
        status, message = 503, "The server that worked on this request has stopped. Send the request again."
        headers.append((b"retry-after", b"5"))
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": "server_lost" if status == 503 else None}
    body = json.dumps({"error": error}).encode()
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body},
    ]
