"""``peagle serve configs/local.yaml``: the whole service on this machine, from nothing to a ready URL.

Checks the YAML, joins the Ray cluster that runs here (else starts one), deploys through Ray Serve's REST API as KubeRay
does, waits until requests are answered, prints how to talk to the service, and stops it at Ctrl-C.
Decides nothing about the service: that is in the YAML and in `deployments.app`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import ray.serve
import yaml
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ServeDeploySchema

import peagle.heads
from cluster.settings import Catalog, ClusterSettings, load_settings
from peagle.checkpoint import read_head_config
from peagle.embedded import embedded_targets

POLL_INTERVAL_S = 1.0
HEARTBEAT_S = 10.0
MIN_LOGICAL_CPUS = 8

Say = Callable[[str], None]


class UpError(ValueError):
    """The service cannot be brought up; the message says why."""


def up(path: Path, *, detach: bool, timeout_s: float, say: Say) -> None:
    """Start the service and hold on until Ctrl-C; with `detach`, return when it is ready.

    Raises UpError when it cannot be brought up, SettingsError for wrong settings.
    """
    try:
        config, settings = read_config(path)
        if settings.callers is None:
            say("no callers in the settings: no API key is asked for, and every workload tag is trusted")
        serve = connect(join_or_start_ray(config, settings, detach, say))
        _serve(config, settings, serve, detach, timeout_s, say)
    except KeyboardInterrupt:
        return
    finally:
        ray.shutdown()


def _serve(
    config: dict[str, Any],
    settings: ClusterSettings,
    serve: ServeSubmissionClient,
    detach: bool,
    timeout_s: float,
    say: Say,
) -> None:
    """Deploy, wait, tell, and (unless detached) hold on until Ctrl-C and stop the service."""
    # `ray.init` sets a handler that ends this process at once, so this comes after it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        deploy(serve, config)
        wait_until_ready(serve, config, time.monotonic() + timeout_s, say)
        say(usage(base_url(config), settings.model.id, needs_key=settings.callers is not None))
        if detach:
            say(f"Stop it with: {_tool('ray')} stop")
            return
        say("Ctrl-C stops the service.")
        signal.pause()
    except (Exception, KeyboardInterrupt):
        say("stopping the service")
        ray.serve.shutdown()  # type: ignore[no-untyped-call]
        raise


def read_config(path: Path) -> tuple[dict[str, Any], ClusterSettings]:
    """A Serve config file and the settings under its first application's `args`, checked without loading anything.

    Raises UpError for a file that is missing, no YAML or no Serve config, SettingsError for wrong settings.
    """
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        ServeDeploySchema.model_validate(config)
    except OSError as error:
        raise UpError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UpError(f"{path} is not a Ray Serve config file: {error}") from error
    if not config["applications"]:
        raise UpError(f"{path}: applications is empty, there is nothing to serve")
    catalog = Catalog(frozenset(embedded_targets()), Path(peagle.heads.__file__).parent, read_head_config)
    return config, load_settings(config["applications"][0].get("args") or {}, catalog, os.environ)


def base_url(config: dict[str, Any]) -> str:
    """Where the first application answers, as seen from this machine."""
    host, port = _address(config)
    prefix = config["applications"][0].get("route_prefix") or "/"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}{prefix.rstrip('/')}"


def _address(config: dict[str, Any]) -> tuple[str, int]:
    options = ServeDeploySchema.model_validate(config).http_options
    return options.host, options.port


def num_logical_cpus(settings: ClusterSettings) -> int:
    """CPUs that Ray is told to have. They are places for processes, not cores: replicas, ingress and engine workers
    each take some, and on a small machine nothing would ever be scheduled with the number of cores."""
    target, ingress = settings.target, settings.ingress
    needed = (
        settings.max_num_targets * (target.num_cpus + target.bundle.get("CPU", 0))
        + ingress.num_replicas * ingress.num_cpus
    )
    if settings.drafter is not None and (drafters := settings.drafter.replicas) is not None:
        needed += settings.max_num_drafters * drafters.num_cpus
    return max(MIN_LOGICAL_CPUS, int(needed) + 3, os.cpu_count() or 1)


def join_or_start_ray(config: dict[str, Any], settings: ClusterSettings, detach: bool, say: Say) -> str:
    """URL of the dashboard of the Ray cluster to use: the one that runs here or that RAY_ADDRESS names, else a fresh
    one, which ends with this process unless `detach`. RAY_ADDRESS=local asks for a fresh one.

    Raises UpError when none can be had or the service's port is taken.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    context: Any
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        try:
            context = ray.init(address=address, **quiet)
            say(f"using the Ray cluster at {context.address_info['gcs_address']}")
            return f"http://{context.dashboard_url}"
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                raise UpError(f"RAY_ADDRESS={address}: {error}") from error
    _require_free_port(*_address(config))
    with _children_ignore_ctrl_c():
        return f"http://{_start_ray(num_logical_cpus(settings), detach, say, quiet).dashboard_url}"


@contextmanager
def _children_ignore_ctrl_c() -> Iterator[None]:
    """A terminal sends Ctrl-C to every process started from it. Ray's own must outlive it, to stop in order."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_ray(num_cpus: int, detach: bool, say: Say, quiet: dict[str, Any]) -> Any:
    """Start Ray on this machine and connect to it; returns the context of `ray.init`."""
    # Ray's processes inherit this environment; the checkout is importable there also when it is not installed.
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    say(f"starting Ray on this machine ({num_cpus} logical CPUs)")
    if not detach:
        return ray.init(address="local", num_cpus=num_cpus, include_dashboard=True, **quiet)
    command = [_tool("ray"), "start", "--head", "--num-cpus", str(num_cpus)]
    done = subprocess.run([*command, "--disable-usage-stats"], capture_output=True, text=True)
    if done.returncode:
        raise UpError(f"ray start failed: {done.stderr.strip() or done.stdout.strip()}")
    return ray.init(address="auto", **quiet)


def _require_free_port(host: str, port: int) -> None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UpError(
            f"{host}:{port} cannot be used ({os.strerror(error.errno or 0)}); set http_options.port in the YAML"
        ) from error


def connect(dashboard: str) -> ServeSubmissionClient:
    """Client of Serve's REST API, with this user's Ray token. Waits for the dashboard, which comes up after Ray."""
    for _ in range(30):
        try:
            return ServeSubmissionClient(dashboard)
        except ConnectionError:
            time.sleep(POLL_INTERVAL_S)
    raise UpError(f"Ray's dashboard at {dashboard} does not answer; Serve takes its config there")


def deploy(serve: ServeSubmissionClient, config: dict[str, Any]) -> None:
    """Hand the config to Serve. Raises UpError with Serve's own words when it is refused."""
    try:
        serve.deploy_applications(config)
    except RuntimeError as error:
        raise UpError(f"Ray Serve refused the config: {str(error).strip()[-2000:]}") from error


def wait_until_ready(serve: ServeSubmissionClient, config: dict[str, Any], deadline: float, say: Say) -> None:
    """Return when the service answers requests; report changes on the way.

    Raises UpError when an application fails, or at `deadline` (of time.monotonic()).
    """
    said, said_at = "", 0.0
    names = [application.get("name", "default") for application in config["applications"]]
    while True:
        found = serve.get_serve_details().get("applications", {})
        states = {name: found[name] for name in names if name in found}
        for name, state in states.items():
            if state["status"] in {"DEPLOY_FAILED", "UNHEALTHY"}:
                raise UpError(f"application {name}: {state['status']}\n{_reasons(state)}")
        ready = bool(states) and all(state["status"] == "RUNNING" for state in states.values())
        if ready and _answers(base_url(config)):
            return
        now, line = time.monotonic(), "; ".join(progress(name, state) for name, state in states.items())
        if line and (line != said or now - said_at >= HEARTBEAT_S):
            say(line)
            said, said_at = line, now
        if now > deadline:
            raise UpError(f"not ready in time; last state: {line}\n" + "\n".join(map(_reasons, states.values())))
        time.sleep(POLL_INTERVAL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def progress(name: str, state: dict[str, Any]) -> str:
    """One line: how many replicas of each deployment run."""
    parts = []
    for deployment, detail in sorted(state.get("deployments", {}).items()):
        replicas = [replica.get("state") for replica in detail.get("replicas", [])]
        parts.append(f"{deployment} {replicas.count('RUNNING')}/{max(len(replicas), 1)}")
    return f"{name} {state['status'].lower()}" + (f": {', '.join(parts)} running" if parts else "")


def _reasons(state: dict[str, Any]) -> str:
    messages = [state.get("message", ""), *(d.get("message", "") for d in state.get("deployments", {}).values())]
    return "\n".join(message.strip() for message in messages if message and message.strip())


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def usage(url: str, model: str, *, needs_key: bool = False) -> str:
    """What to type to talk to the service: the URL, a curl line and a Python line that work as they stand, or once
    API_KEY holds a caller's key where the service `needs_key`."""
    question = "Write a factorial in Python."
    # Temperature 0: a small model answers best so, and its drafts are accepted most.
    body = json.dumps({"model": model, "temperature": 0, "messages": [{"role": "user", "content": question}]})
    key_header = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    openai, key = ("import os, openai", "os.environ['API_KEY']") if needs_key else ("import openai", "'-'")
    client = (
        f"{openai}; print(openai.OpenAI(base_url='{url}/v1', api_key={key}).chat.completions.create("
        f"model='{model}', temperature=0, messages=[dict(role='user', content='{question}')])"
        ".choices[0].message.content)"
    )
    return (
        f"\nReady: {url}/v1   (model {model}{', API_KEY stands for the key of a caller' if needs_key else ''})\n\n"
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key_header} -d '{body}'\n\n"
        f'{sys.executable} -c "{client}"\n\n'
        # Ray's command-line tools send the cluster's token only when they are told that there is one.
        f"{'RAY_AUTH_MODE=token ' * (os.environ.get('RAY_AUTH_MODE') == 'token')}{_tool('serve')} status\n"
    )
