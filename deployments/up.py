"""`peagle serve`: the whole service on this machine, from nothing to a ready URL; or a new config for a running one.

Checks the YAML, joins the Ray cluster that runs here (else starts one), deploys through Ray Serve's REST API as KubeRay
does, waits until requests are answered, prints how to talk to the service, and stops it at Ctrl-C or SIGTERM.
Decides nothing about the service: that is in the YAML (`deployments.serve_config`) and in `deployments.app`.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import ray
import ray.serve
from huggingface_hub import constants as hub

from deployments import DRAFTER_NAME, ROUTER_NAME, TARGET_NAME, compat
from deployments.host import TERMINATE_S
from deployments.serve_config import (
    Config,
    Services,
    asked_resources,
    base_url,
    http_address,
    live_form,
    model_applications,
    read_config,
)

POLL_INTERVAL_S = 1.0
WATCH_INTERVAL_S, ROUTER_TIMEOUT_S = 2.0, 10.0
HEARTBEAT_S = 10.0
MIN_LOGICAL_CPUS = 8
RAY_STOP_S = 30.0
DASHBOARD_TIMEOUT_S = 30.0

HAPROXY_PORTS = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500}
"""Ports that HAProxy needs besides that of HTTP, with Ray's defaults."""

Say = Callable[[str], None]


class UpError(ValueError):
    """The service cannot be brought up; the message says why."""


def up(path: Path, *, detach: bool = False, timeout_s: float = 900.0, say: Say = print) -> None:
    """Bring up the service of a config, and hold on until Ctrl-C or SIGTERM.

    Where it runs already, only what the config changes is changed, and this returns; a config that the cluster cannot
    take is refused, and the service goes on as it was.

    Args:
        detach: return when ready; Ray and the service keep running.
        timeout_s: to wait until the service is ready.

    Raises:
        ConfigError, UpError, ValueError, OSError: with the reason.
    """
    config, *services = read_config(path)
    _stop_by_signals()
    with contextlib.ExitStack() as stack:
        try:
            dashboard = stack.enter_context(ray_cluster(config, services, detach, say))
            _stop_by_signals()  # Ray has put handlers of its own in their place
            serve = _connect(dashboard)
            _check_address(serve, config)
            if any(state["status"] in {"NOT_STARTED", "DEPLOYING"} for state in _states(serve, config).values()):
                end = f"`{_serve_command('shutdown')}` ends it"
                say(f"the service is starting already: waiting until it is ready ({end})")
                wait_until_ready(serve, config, services, time.monotonic() + timeout_s, say)
            before = running_config(serve, config)
            if before is not None:
                _update(serve, config, before, services, timeout_s, say)
                return
            stack.callback(_stop_service, serve, config, say)
            if any(settings.callers is None for settings in services):
                say("no callers in the settings: no API key is asked for, and every workload tag is trusted")
            deploy(serve, live_form(config, *services))
            wait_until_ready(serve, config, services, time.monotonic() + timeout_s, say)
            first = services[0]
            say(usage(base_url(config), first.model.id, dashboard, needs_key=first.callers is not None))
            if detach:
                say(f"Stop it with: {_serve_command('shutdown')}")
                say(f"Stop all of Ray on this machine with: {_tool('ray')} stop")
                stack.pop_all()
                return
            say("Ctrl-C stops the service.")
            logging.getLogger("ray.serve").setLevel(logging.ERROR)  # of the handles
            names = [application["name"] for application in model_applications(config)]
            watch({name: ray.serve.get_deployment_handle(ROUTER_NAME, name) for name in names}, say)
        except KeyboardInterrupt:
            pass


def _stop_by_signals() -> None:
    """SIGINT and SIGTERM end this program in order. A shell starts what runs in its background with SIGINT ignored."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler)


def _stop_service(serve: Any, config: Config, say: Say) -> None:
    say("stopping the service")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would leave processes behind
    with contextlib.suppress(Exception):  # of a Ray that is gone
        deployments = [one for state in _states(serve, config).values() for one in state["deployments"].values()]
        replicas = [replica for one in deployments for replica in one["replicas"]]
        # No node has room for these. They cannot stop by themselves, and Serve waits for them.
        if waiting := [replica["actor_name"] for replica in replicas if "node_id" not in replica]:
            for name in _states(serve, config):
                ray.serve.delete(name, _blocking=False)
            time.sleep(POLL_INTERVAL_S)  # until then Serve would start another in the place of one that is gone
            for actor in waiting:
                ray.kill(ray.get_actor(actor, namespace="serve"))
    ray.serve.shutdown()  # type: ignore[no-untyped-call]


def num_logical_cpus(config: Config, services: Services) -> int:
    """CPUs that Ray is told to have. They are places for processes, not cores: replicas, router and engine workers
    each take some, and on a small machine nothing would ever be scheduled with the number of cores."""
    asked = sum(asked_resources(config, services)["CPU"].values())
    return max(MIN_LOGICAL_CPUS, int(asked) + 3, os.cpu_count() or 1)


# ---- a Ray cluster


@contextlib.contextmanager
def ray_cluster(config: Config, services: Services, detach: bool, say: Say) -> Iterator[str]:
    """Connect to the Ray cluster that runs here or that RAY_ADDRESS names, else to a fresh one, which ends afterwards
    unless `detach`. RAY_ADDRESS=local asks for a fresh one. Gives the URL of its dashboard.

    Raises UpError when none can be had or the service's port is taken.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = os.environ.get("RAY_ADDRESS") or compat.local_cluster() or "local"
    context: Any = None
    if address != "local":
        compat.use_token()
        try:
            context = ray.init(address=address, **quiet)
            say(f"using the Ray cluster at {context.address_info['gcs_address']}")
        except ConnectionError as error:
            if os.environ.get("RAY_ADDRESS"):
                raise UpError(f"RAY_ADDRESS={address}: {error}") from error
    with contextlib.ExitStack() as stack:
        if context is None:
            host, port = http_address(config)
            if reason := _why_taken(host, port):
                raise UpError(f"{host}:{port} cannot be used ({reason}); set http_options.port in the YAML")
            num_cpus = num_logical_cpus(config, services)
            say(f"starting Ray on this machine ({num_cpus} logical CPUs)")
            # Where other programs fill the memory, Ray's monitor would end replicas, which gives little of it back.
            local = {} if detach else {"RAY_memory_monitor_refresh_ms": "0"}
            env = {**ray_environment(), **local, **os.environ}
            address = stack.enter_context(_own_ray(num_cpus, env, detach))
            context = ray.init(address=address, **quiet)
            check_resources(config, services)  # another cluster may add nodes by itself
        stack.callback(ray.shutdown)
        yield f"http://{context.dashboard_url}"


def ray_environment() -> dict[str, str]:
    """What a Ray that starts on this machine is to have in its environment, ports that are free here included."""
    made = dict(compat.RAY_ENVIRONMENT)
    made[compat.ADDRESS_HEADER_ENV] += f"-{secrets.token_hex(8)}"
    for name, port in HAPROXY_PORTS.items():
        while _why_taken("0.0.0.0", port):
            port += 1
        made[name] = str(port)
    return made


@contextlib.contextmanager
def _own_ray(num_cpus: int, environ: Mapping[str, str], detach: bool) -> Iterator[str]:
    """Ray in a session of its own: a signal to this program's process group reaches only this program, which then
    stops engines, Serve and Ray in that order. Gives the cluster's address."""
    # Ray's processes inherit this environment; the checkout is importable there also when it is not installed.
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
    # Jobs get it too, and find this Python first where no virtual environment is active.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    env = {**environ, "PYTHONPATH": path, "PATH": programs}
    if detach:
        command = [_tool("ray"), "start", "--head", "--num-cpus", str(num_cpus), "--disable-usage-stats"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, start_new_session=True)
        if done.returncode:
            raise UpError(f"ray start failed: {done.stderr.strip() or done.stdout.strip()}")
        yield "auto"
        return
    command = [sys.executable, "-c", f"from deployments.host import host_ray; host_ray({num_cpus})"]
    pipe = subprocess.PIPE
    host = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, start_new_session=True)
    assert host.stdin is not None
    assert host.stdout is not None
    try:
        line = host.stdout.readline()
        if not line.startswith("{"):
            raise UpError(f"Ray does not start: {line.strip() or 'its process has ended; see above'}")
        found = json.loads(line)
        if found["has_token"]:
            compat.use_token()
        yield str(found["address"])
    finally:
        with contextlib.suppress(OSError):
            host.stdin.close()
        try:
            host.wait(RAY_STOP_S + 2 * TERMINATE_S)
        except subprocess.TimeoutExpired:
            host.kill()


def _why_taken(host: str, port: int) -> str:
    """ "" for a port that is free."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


# ---- the service


def _connect(dashboard: str) -> Any:
    """Client of Serve's REST API, with this user's Ray token. Waits for the dashboard, which comes up after Ray."""
    deadline_s = time.monotonic() + DASHBOARD_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ConnectionError):
            return compat.serve_client(dashboard)
        time.sleep(0.1)
    raise UpError(f"Ray's dashboard at {dashboard} does not answer; Serve takes its config there")


def running_config(serve: Any, config: Config) -> dict[str, Any] | None:
    """The config of all that runs beside a service of the same name, None where none does. Raises UpError where only
    others run, which Serve would end."""
    found, running = _states(serve, config), serve.get_serve_details().get("applications", {})
    if not found and (others := ", ".join(running)):
        remedy = "write that name to change it, or set RAY_ADDRESS=local for a Ray of its own"
        raise UpError(f"this config would end the application {others}, which this Ray cluster serves: {remedy}")
    serving = {"RUNNING", "UNHEALTHY"}
    if not found or any(one["status"] not in serving or one["deployed_app_config"] is None for one in found.values()):
        return None
    applications = [state["deployed_app_config"] for state in running.values()]  # None: not of a config, or it ends
    return {**config, "applications": [application for application in applications if application is not None]}


def _states(serve: Any, config: Config) -> dict[str, Any]:
    found = serve.get_serve_details().get("applications", {})
    names = [application["name"] for application in config["applications"]]
    return {name: found[name] for name in names if name in found}


def _update(serve: Any, config: Config, before: Config, services: Services, timeout_s: float, say: Say) -> None:
    """Change a running service. Raises UpError, after which it runs as before."""
    wanted = live_form(config, *services)
    args = {one["name"]: one.get("args") for one in before["applications"]}
    changed = [args.get(one["name"]) != one["args"] for one in model_applications(wanted)]
    anew = [settings for settings, is_changed in zip(services, changed, strict=True) if is_changed]
    check_resources(config, services)
    _check_room_beside(anew)
    how = "its replicas start anew, one after the other" if anew else "only options change"
    if any(settings.autoscaling is None and settings.target.num_replicas == 1 for settings in anew):
        how = "its only target starts anew, and nothing is answered until it runs"
    say(f"the service runs: {how}")
    if ended := ", ".join(sorted(args.keys() - {one["name"] for one in config["applications"]})):
        say(f"no longer in the config, and ends: {ended}")
    try:
        deploy(serve, wanted)
        wait_until_ready(serve, config, services, time.monotonic() + timeout_s, say, is_update=True)
    except (UpError, KeyboardInterrupt) as error:
        say("the config is not taken; the service goes back to the one before")
        deploy(serve, before)
        if isinstance(error, KeyboardInterrupt):
            raise UpError("interrupted: the service goes on with the config before") from error
        with contextlib.suppress(UpError):
            wait_until_ready(serve, config, services, time.monotonic() + timeout_s, say, is_update=True)
        raise
    say(f"ready with the new config: {base_url(config)}/v1")


def _check_address(serve: Any, config: Config) -> None:
    """Raises UpError where Serve runs and the config moves it: it reads `http_options` once, and later passes over them
    silently."""
    there = serve.get_serve_details().get("http_options") or {}
    for name, value in zip(("host", "port"), http_address(config), strict=True):
        if there.get(name, value) != value:
            raise UpError(
                f"http_options.{name} is {value}, and the running service has {there[name]}: write that, or stop the "
                f"service first (`{_serve_command('shutdown')}`)"
            )


def check_resources(config: Config, services: Services) -> None:
    """Raises UpError where the cluster can never hold the replicas that are to start: Serve would wait for ever."""
    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for name, parts in asked_resources(config, services, at_start=True).items():
        if sum(parts.values()) > (found := there.get(name, 0.0)) + 1e-6:
            asking = {setting: number for setting, number in parts.items() if number}
            who = " and ".join(f"{setting} asks for {number:g} {name}" for setting, number in asking.items())
            remedy = f"ask for less, or {'start Ray with more --num-cpus' if name == 'CPU' else 'add a node'}"
            if name == "GPU" and not found:
                values = (f"{setting}: {'{CPU: 1}' if setting == 'target.bundle' else 0}" for setting in asking)
                remedy = f"without a GPU set {', '.join(values)}"
            raise UpError(f"{who}, and the Ray cluster has {found:g}: {remedy}")


def _check_room_beside(anew: Services) -> None:
    """Raises UpError where there is no room for a new target of each of these applications beside the old one."""
    needed = defaultdict[str, float](float)
    for settings in anew:
        for bundle in settings.target_bundles() if settings.autoscaling is None else ():
            for name, number in bundle.items():
                needed[name] += number
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    if missing := [name for name, number in needed.items() if number > free.get(name, 0.0) + 1e-6]:
        found = ", ".join(f"{needed[name]:g} {name} of {free.get(name, 0.0):g}" for name in missing)
        raise UpError(
            "this config starts the engines anew, and there is no room for a new replica beside the old one "
            f"({found} free): stop the service first, or add a node; the service goes on"
        )


def deploy(serve: Any, config: Config) -> None:
    """Hand the config to Serve. Raises UpError with Serve's own words when it is refused."""
    try:
        serve.deploy_applications(config)
    except RuntimeError as error:
        raise UpError(f"Ray Serve refused the config: {str(error).strip()[-2000:]}") from error


def _downloaded_mb(services: Services) -> float:
    """Size of what this machine has of the services' checkpoints from the Hugging Face hub."""
    size = 0
    heads = {one.drafter.head for one in services if one.drafter is not None and one.drafter.head is not None}
    for name in {one.model.source for one in services} | heads:
        for file in Path(hub.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs").glob("*"):
            with contextlib.suppress(OSError):  # a part that is complete gets another name
                size += file.stat().st_size
    return size / 1e6


def wait_until_ready(
    serve: Any, config: Config, services: Services, deadline_s: float, say: Say, *, is_update: bool = False
) -> None:
    """Return when the service answers requests; say on the way what it waits for.

    Raises UpError when an application fails, or at `deadline_s` (of time.monotonic()). In an update UNHEALTHY is no
    failure: Serve says so of replicas that the update does not touch, such as a drafter that died, and replaces them.
    """
    failures = {"DEPLOY_FAILED"} if is_update else {"DEPLOY_FAILED", "UNHEALTHY"}
    had_mb = _downloaded_mb(services)
    said, said_s = "", 0.0
    while True:
        states = _states(serve, config)
        for name, state in states.items():
            if state["status"] in failures:
                raise UpError(f"application {name}: {state['status']}\n{_reasons(state)}")
        is_running = bool(states) and all(state["status"] == "RUNNING" for state in states.values())
        if is_running and _answers(base_url(config)):
            return
        now_s, line = time.monotonic(), "; ".join(progress(name, state) for name, state in states.items())
        if line and (line != said or now_s - said_s >= HEARTBEAT_S):
            size_mb = _downloaded_mb(services)
            say(line + (f"; {size_mb:,.0f} MB downloaded" if size_mb > had_mb else ""))
            said, said_s = line, now_s
        if now_s > deadline_s:
            raise UpError(f"not ready in time; last state: {line}\n" + "\n".join(map(_reasons, states.values())))
        time.sleep(POLL_INTERVAL_S)


def watch(routers: Mapping[str, Any], say: Say) -> None:
    """Say what the routers note of replicas and heads. `routers`: deployment handles by application. Does not
    return."""
    seen: dict[str, Any] = {}
    while True:
        time.sleep(WATCH_INTERVAL_S)
        for name, router in routers.items():
            whose = f"{name}: " if len(routers) > 1 else ""
            try:
                events = router.drafting.remote().result(timeout_s=ROUTER_TIMEOUT_S)["events"]
            except Exception:  # noqa: BLE001  # a router that starts again, or is busy
                continue
            for event in reversed(events if name in seen else ()):
                if event not in seen[name] and event["kind"] != "k":
                    say(f"{time.strftime('%H:%M:%S', time.localtime(event['time_s']))} {whose}{event['text']}")
            seen[name] = events


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


WAITS_FOR = {TARGET_NAME: "the engine to load the model", DRAFTER_NAME: "the head to load", ROUTER_NAME: "the router"}


def progress(name: str, state: Mapping[str, Any]) -> str:
    """One line: how many replicas of each deployment run, and what the others wait for."""
    parts, waits = [], []
    for deployment, detail in sorted(state.get("deployments", {}).items()):
        replicas = [replica.get("state") for replica in detail.get("replicas", [])]
        num_running, num = replicas.count("RUNNING"), max(len(replicas), 1)
        parts.append(f"{deployment} {num_running}/{num}")
        if num_running < num:
            num_coming = sum(state in ("STARTING", "UPDATING") for state in replicas)  # UPDATING: takes new settings
            is_pending = replicas and num_coming < num - num_running
            is_pending = is_pending or "to be scheduled" in detail.get("message", "")  # as Serve says after 30 s
            waits.append("free resources" if is_pending else WAITS_FOR.get(deployment, deployment))
    if not parts:
        return f"{name} {state['status'].lower()}: waits for the settings to be checked and the application to be built"
    waiting = f", waits for {', '.join(dict.fromkeys(waits))}" if waits else ""
    return f"{name} {state['status'].lower()}: {', '.join(parts)} running{waiting}"


def _reasons(state: Mapping[str, Any]) -> str:
    """What Serve says, each message once; the last error in place of a traceback, which the log has."""
    messages = [state.get("message", ""), *(d.get("message", "") for d in state.get("deployments", {}).values())]
    short = (re.sub(r"(?ms)^\S*(ray::|Traceback).*\n(?=[\w.]+(Error|Exception)\b)", "", one) for one in messages)
    return "\n".join(dict.fromkeys(one.strip() for one in short if one.strip()))


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _serve_command(what: str) -> str:
    """A line that runs Ray's `serve`, whose tools send the cluster's token only when told that there is one."""
    return f"{'RAY_AUTH_MODE=token ' * (os.environ.get('RAY_AUTH_MODE') == 'token')}{_tool('serve')} {what}"


def usage(url: str, model: str, dashboard: str, *, needs_key: bool = False) -> str:
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
    token = f"   (token: {_tool('ray')} get-auth-token)" if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    return (
        f"\nReady: {url}/v1   (model {model}{', API_KEY stands for the key of a caller' if needs_key else ''})\n"
        f"Page:  {url}/\n"
        f"Ray:   {dashboard}/{token}\n\n"
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key_header} -d '{body}'\n\n"
        f'{sys.executable} -c "{client}"\n\n'
        f"{_serve_command('status')}\n"
    )
