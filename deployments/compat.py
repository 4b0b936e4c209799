"""Uses of Ray that are not its public API, but for HAProxy's (`deployments.haproxy`), and the version that they were
read in.

What is private in vLLM is in `peagle.vllm.compat`.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import logging.handlers
import math
import os
import secrets
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication import authentication_token_setup
from ray._private.services import canonicalize_bootstrap_address
from ray.experimental import internal_kv
from starlette.middleware import Middleware
from starlette.responses import Response

from cluster.errors import ApiError
from deployments import GATEWAY_NAME, ROUTER_NAME, TARGET_NAME
from deployments.errors import LOST_CODE, json_response, not_ready, server_lost

logger = logging.getLogger(__name__)

RAY_VERSION = "2.60"
"""Ray's minor version that this was written against."""

MAX_STREAM_S = 600.0
"""Time that a target replica which Serve retires has to finish its streams; it takes no new ones."""

ADDRESS_HEADER_ENV = "PEAGLE_ADDRESS_HEADER"
"""Environment variable of Ray that names the header in which HAProxy writes its client's address, below what the client
sends under that name. Replicas listen on ports of their own, so the name is one that clients cannot guess."""

RAY_ENVIRONMENT = {
    # By Ray's default of 15 any other process of the machine starves the engines.
    "RAY_worker_niceness": "0",
    # What Serve's proxy answers itself comes in OpenAI's form and at once.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.compat:proxy_middlewares",
    # HAProxy takes HTTP to the replicas, and not Serve's proxy in Python.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Each change of its servers starts a new HAProxy beside the old one, which may finish the streams that it has.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": f"{MAX_STREAM_S:.0f}",
    # HAProxy as this service needs it: retries, refusals in OpenAI's form, no pages of its own.
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "deployments.haproxy:install",
    # HAProxy tells replicas the client's address in it: callers without keys take turns by their address.
    ADDRESS_HEADER_ENV: "X-Peagle-Client",
    # A HAProxy whose manager died is the door closed: it is noticed after three checks, and started anew.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Ray gives up a proxy that three times is not ready in this time, and on a busy machine all take long to start.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # HAProxy needs this time to hear that a replica is to go. A request that still comes is sent to another one.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    # By Ray's default of 1000 the kernel ends engines first, whoever fills the memory; so it ends the largest process.
    "RAY_worker_oom_score_adjustment": "0",
}
"""Environment of the processes that start Ray, on every node."""

SETUP_HOOK_ENV = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Environment variable of a worker process of Ray with the path of a function that it calls first of all."""

KV_NAMESPACE = "peagle"


class CompatError(RuntimeError):
    """This Ray is not one that the service can run on."""


def check() -> None:
    """Raises CompatError for another Ray than `RAY_VERSION`."""
    if not (version := importlib.metadata.version("ray")).startswith(f"{RAY_VERSION}."):
        raise CompatError(f"Ray {version} is not supported, {RAY_VERSION} is: the service uses its private names")


async def ask_each(handle: Any, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """What each running replica of a deployment answers to a method, or the exception in its place: TimeoutError for
    one that does not answer in time. Ray's own `results_async` gives one time-out to all of them together.

    Raises what Ray raises where there is no replica.
    """
    async with asyncio.timeout(timeout_s):
        asked = await handle.broadcast(method, *args)._fetch_replica_results_async()

    async def one(result: Any) -> Any:
        async with asyncio.timeout(timeout_s):
            return await result.get_async()

    return await asyncio.gather(*map(one, asked), return_exceptions=True)


def download_nothing(config: Any) -> None:
    """Let a replica with this `LLMConfig` start its engine without the task that downloads the model on each node, a
    process that imports vLLM first. For a model that is there."""
    config.get_or_create_callback().ctx.run_init_node = False


def engine_class(on_cpu: bool, launch_front_ends: Callable[[Any, Namespace], tuple[Sequence[Any], str | None]]) -> type:
    """`ray.serve.llm`'s engine without Ray between scheduler and worker where there is one worker.

    Otherwise no step passes from process to process but through Ray's worker, and vLLM is imported once more by the
    task that makes the configuration where it sees a GPU. The replica has a share of its bundle's
    (`deployments.app.target_options`), so it and what it starts see that one. On a GPU the worker has a process of its
    own: where the host limits a step, as with small targets, the scheduler then plans while the worker launches. On a
    CPU, whose cores the model has use for, both are one process; vLLM has two there, to set OpenMP's environment in the
    worker's, which the scheduler's can have as well.

    `launch_front_ends`: is given vLLM's configuration and its server's arguments; returns what
    `peagle.vllm.clients.started_for` takes.
    """
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine, _get_vllm_engine_config
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from peagle.vllm import clients, compat, fork_server

    compat.check_version()

    class LocalEngine(VLLMEngine):
        def _prepare_engine_config(self, callback_ctx: Any) -> Any:
            config: Any = self.llm_config.get_engine_config()
            if config.num_devices > 1:
                return super()._prepare_engine_config(callback_ctx)
            if not on_cpu:  # as Ray does, where it is not told to leave that alone
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
            fork_server.inspect_models()
            arguments, made = _get_vllm_engine_config(self.llm_config)
            return arguments, FrontendArgs(**config.frontend_kwargs), made

        def _start_async_llm_engine(self, arguments: Any, config: Any, placement_group: Any) -> Any:
            with contextlib.ExitStack() as stack:
                if config.parallel_config.world_size == 1:
                    # The class, because the name "uni" is not taken on a CPU.
                    config.parallel_config.distributed_executor_backend = UniProcExecutor if on_cpu else "mp"
                    if not config.parallel_config.numa_bind:  # which binds spawned processes alone
                        fork_server.use()
                front: Any = self.llm_config.get_engine_config()
                given = vars(FrontendArgs(**front.frontend_kwargs)) | vars(arguments)
                stack.enter_context(clients.started_for(*launch_front_ends(config, Namespace(**given))))
                if on_cpu and config.parallel_config.world_size == 1:
                    from vllm.utils.ompmultiprocessing import OMPProcessManager

                    stack.enter_context(OMPProcessManager(config).configure_omp_envs(rank=0, local_rank=0))
                return super()._start_async_llm_engine(arguments, config, placement_group)

    return LocalEngine


def read_engine(engine: Any) -> tuple[Any, Any]:
    """vLLM's `AsyncLLM` of a started engine of `ray.serve.llm`, and the state of vLLM's API server that it makes: the
    API objects by name."""
    return engine._engine_client, engine._app_state


class KVChannel:
    """JSON documents of one application in the key-value store of the Ray cluster that this process belongs to. They
    outlive every process of the application."""

    def __init__(self, app_name: str) -> None:
        self._prefix = f"autoscaling/{app_name}/"

    def get(self, name: str) -> dict[str, Any] | None:
        """None where there is none. Raises what Ray raises when the store does not answer."""
        value = internal_kv._internal_kv_get(self._prefix + name, namespace=KV_NAMESPACE)
        return None if value is None else dict(json.loads(value))

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        value = json.dumps(document, allow_nan=False)
        internal_kv._internal_kv_put(self._prefix + name, value, namespace=KV_NAMESPACE)


def listening_host() -> str:
    """The address that Serve's HTTP listens on. Asks Serve's controller."""
    return str(_http_options().host or "")


def address_header() -> str:
    """The header in which HAProxy writes the client's address, "" where it was not told to."""
    return os.environ.get(ADDRESS_HEADER_ENV, "")


def local_url() -> str:
    """Where Serve's HTTP answers on this node, without a slash at the end. Asks Serve's controller."""
    options = _http_options()
    return f"http://{'127.0.0.1' if options.host in (None, '0.0.0.0') else options.host}:{options.port}"


def _http_options() -> Any:
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    return client.http_config


GATEWAY_HEADER = "x-peagle-gateway"
"""Header of a request that a gateway has forwarded: the cluster's token, and the client's address."""


def gateway_token() -> str:
    """A secret that all replicas of this Ray cluster share; the first one that asks makes it."""
    internal_kv._internal_kv_put("gateway-token", secrets.token_hex(16), overwrite=False, namespace=KV_NAMESPACE)
    return bytes(internal_kv._internal_kv_get("gateway-token", namespace=KV_NAMESPACE)).decode()


def be_no_nicer() -> None:
    """Give this process, and so those that it starts, the priority of any other, where it may (root, or CAP_SYS_NICE):
    without RAY_worker_niceness Ray starts workers at nice 15, where whatever else runs on the machine starves an
    engine."""
    if os.nice(0) > 0:
        with contextlib.suppress(PermissionError):
            for thread in Path("/proc/self/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def start_fork_server() -> None:
    """What Ray calls first of all in a target replica's process. What the server starts has its priority."""
    from peagle.vllm import fork_server

    be_no_nicer()
    try:
        fork_server.start()
    except OSError:  # the engine's process asks for it once more
        logger.exception("the process that imports vLLM for the engine does not start")


def prepare_replica() -> None:
    """To be called first in a replica's constructor.

    Lets the log that Serve has opened for the replica stay open: vLLM configures logging again when its engine starts,
    which closes every handler of the process. Serve's log would end, and a new controller, which asks for its file,
    would take the replica for broken and end it.

    Closes the port for calls between replicas to other machines where none come that way: it reads pickles, asks for no
    token, and is open on every interface.

    Leaves it to the service to notice that a client has gone (`deployments.http_streams`): Serve would watch each
    request too, with two more tasks.
    """
    from ray.serve._private import constants, replica

    replica.parse_disconnect_disabled_header = lambda headers: True

    for handler in logging.getLogger("ray.serve").handlers:
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
    if not (constants.RAY_SERVE_USE_GRPC_BY_DEFAULT or constants.RAY_SERVE_PROXY_USE_GRPC):
        add_port: Any = replica.add_port_to_grpc_server
        replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")


def local_cluster() -> str | None:
    """Address of the Ray cluster that runs on this machine, None where none answers. Ray's note of the last one stays
    when that cluster is killed, and `ray.init` would wait for it for a long time."""
    try:
        address = str(canonicalize_bootstrap_address("auto"))
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return None
    return address


def use_token() -> None:
    """Let this process send the token that the Ray cluster it is going to join was started with. Ray turns that on by
    itself only in the process that starts a cluster, and warns of it."""
    authentication_token_setup.logger.setLevel(logging.ERROR)
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def serve_client(dashboard: str) -> Any:
    """Client of Serve's REST API at a dashboard's URL. Raises ConnectionError where none answers."""
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(dashboard)


# ---- Serve's ways of HTTP: HAProxy, and its own proxy in Python, which takes what HAProxy finds no replica for

WATCH_INTERVAL_S = 0.25
MAX_WAIT_S = 0.5
"""For a replica to come, at the most."""


def warn_of_environment() -> None:
    """Log which variables of RAY_ENVIRONMENT this Ray was started without."""
    if missing := [name for name in RAY_ENVIRONMENT if name not in os.environ]:
        logger.warning(
            "streams cost more CPU, and requests are lost with their replica: start Ray with %s in its environment, on "
            "every node; docs/configuration.md has the values, and `peagle serve` sets them",
            ", ".join(missing),
        )


def proxy_middlewares() -> list[Any]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: what Serve's proxy answers itself comes in OpenAI's form, and what
    no replica is there for does not wait."""
    return [Middleware(PlainErrors), Middleware(NoReplica)]


class PlainErrors:
    """ASGI middleware that turns error responses of plain text into JSON. A replica that died gives 503: the request
    may be sent again."""

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
                    await error_response(start, text)(scope, receive, send)
                return
            await send(message)

        try:
            await self._app(scope, receive, send_json)
        except UnicodeDecodeError:  # of Serve, which reads some headers before the application does
            await json_response(ApiError(400, "A header of the request is no UTF-8 text."))(scope, receive, send)


class NoReplica:
    """ASGI middleware of Serve's proxy: a request for a service of ours without a running replica gets 503 with
    Retry-After, where the proxy by itself would hold it back until there is one; and autoscaling is told of it, because
    nothing else wakes a deployment that was scaled to zero. The router answers GET /metrics all the same.

    Serve puts it before the HTTP server of each replica too, where it does nothing.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        while not hasattr(app, "proxy_router") and hasattr(app, "_app"):
            app = app._app
        self._routes = getattr(app, "proxy_router", None)
        self._woken_s = -math.inf

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = str(scope.get("path", ""))
        match = None
        if self._routes is not None and scope["type"] == "http" and not path.startswith("/-/"):
            match = self._routes.match_route(path)
        if match is None or match[1].deployment_name not in (TARGET_NAME, GATEWAY_NAME):
            await self._app(scope, receive, send)
        elif not await self._is_answered(match[1], scope, receive, send):
            await (await self._refusal(match[1].app_name, scope))(scope, receive, send)

    async def _is_answered(self, handle: Any, scope: Any, receive: Any, send: Any) -> bool:
        """Let a replica answer. False, with nothing sent, where none is left before one begins to."""
        has_begun = is_refused = False

        async def send_noted(message: Any) -> None:
            nonlocal has_begun
            if not is_refused:  # Serve's proxy may have words of its own for what is cancelled
                has_begun = True
                await send(message)

        if not await self._comes(handle, MAX_WAIT_S):
            return False
        task = asyncio.ensure_future(self._app(scope, receive, send_noted))
        try:
            while not (await asyncio.wait({task}, timeout=None if has_begun else WATCH_INTERVAL_S))[0]:
                # A replica that takes new settings still works on what it has.
                if not has_begun and not await self._comes(handle, 4 * MAX_WAIT_S) and not (has_begun or task.done()):
                    is_refused = True
                    return False
            task.result()
            return True
        finally:
            task.cancel()

    @staticmethod
    async def _comes(handle: Any, max_wait_s: float) -> bool:
        """Whether a replica is there. Serve leaves one out for a moment while it hands it new settings."""
        end_s = time.monotonic() + max_wait_s
        while not num_replicas(handle):
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(WATCH_INTERVAL_S / 5)
        return True

    async def _refusal(self, app_name: str, scope: Any) -> Any:
        from ray import serve

        with contextlib.suppress(Exception):  # no router either, or another application
            async with asyncio.timeout(1.0):
                if scope["path"].endswith("/metrics"):
                    return Response(await serve.get_deployment_handle(ROUTER_NAME, app_name).metrics.remote())
                # A probe wakes nothing.
                if scope["method"] == "POST" and time.monotonic() - self._woken_s >= WATCH_INTERVAL_S:
                    self._woken_s = time.monotonic()
                    await serve.get_deployment_handle(ROUTER_NAME, app_name).wake_target.remote()
        return json_response(not_ready())


def num_replicas(handle: Any) -> int:
    """Running replicas of a deployment, as a handle knows them without asking."""
    router = handle._router._asyncio_router
    found = router._running_replicas if router._request_router is None else router._request_router.curr_replicas
    return len(found or ())


def error_response(start: dict[str, Any], text: bytes) -> Response:
    """An error response of plain text in OpenAI's form, with its other headers."""
    error = server_lost()
    if start["status"] != 500:
        error = ApiError(start["status"], text.decode("utf-8", "replace"))
        error.code, error.retry_after_s = LOST_CODE if error.status == 503 else None, None
    response = json_response(error)
    ours = {name for name, _ in response.raw_headers}
    response.raw_headers += [item for item in start["headers"] if item[0].lower() not in ours]
    return response
