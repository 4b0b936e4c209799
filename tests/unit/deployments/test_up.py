"""`peagle serve`: what it refuses before Ray starts, and what it tells."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.history import ServiceHistory
from cluster.request import Caller
from cluster.settings import live_config, load_settings
from deployments import up
from deployments.app import catalog
from deployments.cli import main
from deployments.replicas import settings_with
from deployments.serve_config import asked_resources, base_url, gateway_application, live_form, read_config
from deployments.up import UpError, num_logical_cpus
from peagle.checkpoint import save_head
from peagle.schema import SettingsError
from tests.support.head_factory import CONFIG, head_tensors
from tests.support.service_harness import CONFIGS


def config(**http_options: Any) -> dict[str, Any]:
    """The smallest Serve config that is right, without speculation."""
    application = {"import_path": "deployments.app:build", "args": {"model": {"source": "smollm2-135m-instruct"}}}
    return {"http_options": {"host": "127.0.0.1", "port": 8000} | http_options, "applications": [application]}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a config to a file."""

    def written(raw: Any) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(raw if isinstance(raw, str) else yaml.dump(raw))
        return path

    return written


def test_a_drafter_named_by_sagemakers_variable_goes_with_the_config(write: Any, monkeypatch: Any) -> None:
    """The processes of a cluster that runs already do not have it."""
    given = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "parallel_drafting": True}
    monkeypatch.setenv("SM_VLLM_SPECULATIVE_CONFIG", json.dumps(given))
    raw, settings = read_config(write(config()))
    assert (settings.drafter.head, settings.max_draft_tokens) == ("org/head", 3)
    monkeypatch.delenv("SM_VLLM_SPECULATIVE_CONFIG")
    assert read_config(write(raw))[1] == settings


def application(**changes: Any) -> dict[str, Any]:
    return {"applications": [{**config()["applications"][0], **changes}]}


def several(*prefixes: str, gateway: str | None = None, state: str | None = None) -> dict[str, Any]:
    (model,) = config()["applications"]
    if state is not None:
        model["args"]["model"]["id"] = "m"
        model["args"] |= {"drafter": {"head": "smollm2-135m-instruct"}, "num_draft_tokens": {"state": state}}
    made = [{**model, "name": prefix, "route_prefix": prefix} for prefix in prefixes]
    front = {"name": "g", "import_path": "deployments.gateway:build", "args": {"models": {"m": gateway}}}
    return {"applications": made if gateway is None else [front, *made]}


def test_rays_places_are_enough_for_the_models_and_the_gateway() -> None:
    raw, *services = read_config(CONFIGS / "two-models.yaml")
    gateway_application(raw)["args"] |= {"num_replicas": 200, "num_cpus": 1}
    assert num_logical_cpus(raw, services) >= 200 + sum(one.target_bundles()[0]["CPU"] for one in services)


def test_each_of_several_models_is_changed_live() -> None:
    config, *services = read_config(CONFIGS / "two-models.yaml")
    made = {one["name"]: one for one in live_form(config, *services)["applications"]}
    assert [one.model.id for one in services] == list(made["gateway"]["args"]["models"])
    for name in ("fast", "plain"):
        assert {one["name"] for one in made[name]["deployments"]} == {"router", "target"}
    assert base_url(config) == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("a: [", "is not YAML"),
        ("http_options: {port: 8001, port: 8002}", "the key port stands twice"),
        ("- a list", "is not a Ray Serve config file"),
        ({"applications": []}, "applications is empty"),
        ({"target": "a", "data": "b"}, "is a recipe of training: `peagle train "),
        ({**config(), "proxy_location": "Nowhere"}, "proxy_location"),
        ({**config(), "callers": {"web": {}}}, "learning and kubernetes, stand under args of applications"),
        ({**config(prt=8001)}, "unknown key http_options.prt; did you mean port?"),
        (config(port=99999), "http_options.port is 99999: write a port from 1 to 65535"),
        (application(route_prefix="v1"), "applications.0.route_prefix is 'v1': write a path such as /coder"),
        (application(route_prefix="/v1/"), "applications.0.route_prefix is '/v1/'"),
        (
            application(deployments=[{"name": "target", "user_config": {}}]),
            "deployments.target.user_config is not yours to set: set callers, limits and num_draft_tokens under args",
        ),
        (
            application(deployments=[{"name": "target", "num_replicas": 2}]),
            "deployments.target.num_replicas is not yours to set: set target.num_replicas or",
        ),
        (
            application(deployments=[{"name": "router", "max_queued_requests": 2}]),
            "deployments.router.max_queued_requests is not yours to set: the service needs its own",
        ),
        (application(import_path="x"), '- applications.0.import_path: Got invalid import path "x"'),
        (
            application(deployments=[{"name": "target", "num_replica": 2}]),
            "unknown key applications.0.deployments.0.num_replica; did you mean num_replicas?",
        ),
        (application(deployments=[{"name": "ruoter"}]), "ruoter is not one of target and router; did you mean router?"),
        (
            application(deployments=[{"name": "drafter"}]),
            "deployments: drafter is not one of target and router: it needs drafter.placement: remote",
        ),
        (application(args={"modle": {}}), "unknown key modle"),
        (
            application(args={"model": {"source": "smollm2-135m-instruct"}, "engine": {"uds": "/run/s"}}),
            "unknown key engine.uds: neither engine nor API reads it",
        ),
        ({"applications": [{"import_path": "deployments.app:build"}]}, "missing key model"),
        (
            application(import_path="deployments.ap:build"),
            "applications.0.import_path: no deployments.ap:build; did you mean deployments.app:build?",
        ),
        (several("/a", "/b"), "in front of them, deployments.gateway:build"),
        (several("/a", "/b", gateway="/x"), "models.m: no application has the route_prefix /x"),
        (several("/a", gateway="a"), "models.m is 'a'"),
        (
            several("/a", "/b", gateway="/a", state="/s"),
            "two applications have the num_draft_tokens.state /s: name a file each",
        ),
        (several("/a", gateway="/a"), "models.m: the application at /a serves smollm2-135m-instruct"),
    ],
)
def test_wrong_config_stops_before_ray_starts(write: Any, capsys: Any, raw: Any, message: str) -> None:
    assert main(["serve", str(write(raw))]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.out == ""


def test_port_in_use_is_named(write: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["serve", str(write(config(port=port)))]) == 1
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in capsys.readouterr().err


class Serve:
    """In the place of Serve and its REST API: keeps what it is given. `fails`: applications that do not come up;
    `statuses`: of the others, at each look, and `new_statuses` after a new config; `ended`: applications, replicas and
    at last all, in turn; `without_config`: applications that end, or that nobody deployed by a config."""

    def __init__(self) -> None:
        self.deployed: list[dict[str, Any]] = []
        self.fails: list[dict[str, Any]] = []
        self.statuses = self.new_statuses = ["RUNNING"]
        self.running: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.without_config: list[str] = []

    def deploy_applications(self, wanted: dict[str, Any]) -> None:
        self.deployed.append(wanted)
        self.running, self.statuses = wanted["applications"], self.new_statuses

    def get_serve_details(self) -> dict[str, Any]:
        found = {}
        for one in self.running:
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            status = "DEPLOY_FAILED" if one in self.fails else status
            message = 'It failed 3 times. Error:\n\x1b[36mray::x()\n  File "x.py", line 1\nRuntimeError: no such GPU'
            target = {"replicas": [{"actor_name": "waiting"}, {"node_id": "a", "actor_name": "placed"}]}
            deployments = {} if one["name"] in self.ended else {"target": target}  # as Serve says
            about = {"deployed_app_config": one, "deployments": deployments}
            found[one.get("name", "default")] = {"status": status, "message": message, **about}
        found |= {name: {"status": "DELETING", "deployed_app_config": None} for name in self.without_config}
        return {"applications": found, "http_options": {"host": "127.0.0.1", "port": 8000}}

    def end(self, name: str = "all", **_: Any) -> None:
        self.ended.append(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster that is there, with Serve on it; signals as they were afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = SimpleNamespace(serve=(serve := Serve()), total={"CPU": 8.0, "GPU": 1.0}, free={"CPU": 4.0})

    @contextlib.contextmanager
    def ray_cluster(*_: Any) -> Iterator[str]:
        for number in before:  # as `ray.init` does
            signal.signal(number, lambda *_: pytest.fail("ended by Ray"))
        yield "http://none"

    monkeypatch.setattr(up, "ray_cluster", ray_cluster)
    monkeypatch.setattr(up, "_connect", lambda _: found.serve)
    monkeypatch.setattr(up, "_answers", lambda _: True)
    monkeypatch.setattr(up, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(up.ray, "cluster_resources", lambda: found.total)
    monkeypatch.setattr(up.ray, "available_resources", lambda: found.free)
    monkeypatch.setattr(up.ray.serve, "get_deployment_handle", lambda *_: None)
    monkeypatch.setattr(up.ray.serve, "delete", serve.end)
    monkeypatch.setattr(up.ray.serve, "shutdown", serve.end)
    monkeypatch.setattr(up.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(up.ray, "kill", serve.end)
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_service_is_stopped_in_order(write: Any, machine: Any, monkeypatch: Any, number: Any) -> None:
    """`ray.init` replaces the handlers by its own, and a shell starts a background program with SIGINT ignored."""
    monkeypatch.setattr(up, "watch", lambda *_: os.kill(os.getpid(), number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert main(["serve", str(write(config()))]) == 0
    assert machine.serve.ended == ["default", "waiting", "all"], "Serve would wait for a replica that has no node"


def test_a_service_that_is_starting_is_waited_for(write: Any, machine: Any, before: Any, capsys: Any) -> None:
    machine.serve.statuses = ["DEPLOYING", "DEPLOYING", "RUNNING"]
    assert main(["serve", str(write(served()))]) == 0
    said = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said[0].startswith("the service is starting already: waiting until it is ready")
    assert said[-1] == "ready with the new config: http://127.0.0.1:8000/v1"
    assert machine.serve.ended == []


def test_a_service_that_cannot_start_is_stopped_and_says_why(write: Any, machine: Any, capsys: Any) -> None:
    path = write(config())
    machine.serve.fails.append(live_form(*read_config(path))["applications"][0])
    assert main(["serve", str(path)]) == 1
    assert "DEPLOY_FAILED\nIt failed 3 times. Error:\nRuntimeError: no such GPU\n" in capsys.readouterr().err
    assert machine.serve.ended[-1] == "all"


def test_a_replica_that_serve_cannot_place_waits_for_resources() -> None:
    slow = "Deployment 'target' has 1 replicas that have taken more than 30s to be scheduled."
    target = {"replicas": [{"state": "STARTING"}], "message": ""}
    assert "the engine to load" in up.progress("peagle", {"status": "DEPLOYING", "deployments": {"target": target}})
    target["replicas"] = [{"state": "UPDATING"}]
    assert "free resources" not in up.progress("peagle", {"status": "DEPLOYING", "deployments": {"target": target}})
    target["message"] = slow
    assert "free resources" in up.progress("peagle", {"status": "DEPLOYING", "deployments": {"target": target}})


# ---- a new config for a service that runs

REMOTE: dict[str, Any] = {"head": "smollm2-135m-instruct", "placement": "remote", "max_draft_tokens": 7}
REMOTE["replicas"] = {"num_replicas": 1, "num_cpus": 0.5}


def served(**sections: Any) -> dict[str, Any]:
    raw = config()
    args = {"drafter": REMOTE, "engine": {"dtype": "float32"}, "target": {"bundle": {"CPU": 1.0}}}
    raw["applications"][0]["args"] |= {**args, **sections}
    return raw


@pytest.fixture
def before(machine: Any, write: Any) -> list[dict[str, Any]]:
    """Applications of a service that was started with the plain config and runs."""
    machine.serve.running = live_form(*read_config(write(served())))["applications"]
    return machine.serve.running


@pytest.fixture
def bring_up(write: Any) -> Any:
    """`peagle serve` with a raw config. Gives what it says."""

    def run(raw: dict[str, Any], **options: Any) -> list[str]:
        said: list[str] = []
        up.up(write(raw), say=said.append, **options)
        return said

    return run


@pytest.fixture
def refuse(bring_up: Any, machine: Any, before: Any) -> Any:
    """That `peagle serve` refuses a raw config, and leaves the running service alone."""

    def refused(raw: dict[str, Any], message: str) -> None:
        with pytest.raises(UpError, match=message):
            bring_up(raw)
        assert (machine.serve.deployed, machine.serve.ended) == ([], [])

    return refused


@pytest.mark.parametrize(
    "sections",
    [
        {"ingress": {"num_cpus": 0.25}},
        {"target": {"bundle": {"CPU": 1.0}, "num_replicas": 2}},
        {"drafter": {**REMOTE, "replicas": {"num_replicas": 2, "num_cpus": 0.5}}},
        {"num_draft_tokens": {"policy": "fixed", "default": 3}},
        {"limits": {"max_num_sequences": 4}},
        {"callers": {"web": {"key_sha256": "ab" * 32}}},
        {"model": {"source": "smollm2-135m-instruct", "aliases": {"coder": "code"}}},
    ],
)
def test_what_needs_no_new_engine_starts_none(bring_up: Any, machine: Any, before: Any, sections: Any) -> None:
    bring_up(served(**sections))
    ((after,),) = [deployed["applications"] for deployed in machine.serve.deployed]
    assert before[0]["args"] == after["args"], "Serve starts all replicas anew when these change"
    assert before[0]["deployments"] != after["deployments"]
    assert machine.serve.ended == [], "and the service is not this program's to stop"


def test_what_replicas_are_made_from_stays_in_args(write: Any, tmp_path: Path) -> None:
    """The state is read before Serve hands the router a `user_config`; HTTP begins with hosts and origins."""
    num_draft_tokens = {"policy": "fixed", "default": 3, "state": str(tmp_path / "state.json")}
    ingress = {"allow_origins": ["http://page.example"], "allowed_hosts": ["api.example.com"]}
    made = live_form(*read_config(write(served(num_draft_tokens=num_draft_tokens, ingress=ingress))))
    args = made["applications"][0]["args"]
    assert (args["num_draft_tokens"], args["ingress"]) == ({"state": num_draft_tokens["state"]}, ingress)


def test_a_learner_that_learns_from_callers_starts_without_their_section(write: Any) -> None:
    """`callers` are live settings, which Serve hands on after it has built the application."""
    drafter = {**REMOTE, "spare_heads": 1}
    callers = {"web": {"key_sha256": "ab" * 32, "learn": True}}
    raw, settings = read_config(write(served(drafter=drafter, callers=callers, learning={})))
    args = live_form(raw, settings)["applications"][0]["args"]
    started = settings_with(load_settings(args, catalog()), live_config(settings))
    web, other = Caller("web", learn=True), Caller("other")
    for one in (settings, started):
        assert (one.learns_from(web, "chat"), one.learns_from(other, "chat")) == (True, False)


def test_options_that_the_file_itself_gives_to_deployments_stay(write: Any) -> None:
    raw = served(target={"bundle": {"CPU": 1.0}, "num_replicas": 2})
    raw["applications"][0]["deployments"] = [
        {"name": "drafter", "user_config": {"head": "org/other"}},
        {"name": "target", "health_check_timeout_s": 7},
    ]
    made = live_form(*read_config(write(raw)))
    options = {one["name"]: one for one in made["applications"][0]["deployments"]}
    assert options["drafter"] == {"name": "drafter", "num_replicas": 1, "user_config": {"head": "org/other"}}
    raw["applications"][0]["deployments"][0]["user_config"]["head"] = "other"
    with pytest.raises(ValueError, match=r"user_config.head: 'other' is no shipped head"):
        read_config(write(raw))
    assert (options["target"]["num_replicas"], options["target"]["health_check_timeout_s"]) == (2, 7)
    assert options["target"]["user_config"]["limits"]["max_num_sequences"] == 16


def test_nothing_that_a_config_gives_to_a_deployment_lets_callers_in_without_a_key(write: Any) -> None:
    config, settings = read_config(write(served(callers={"web": {"key_sha256": "ab" * 32}})))
    config["applications"][0]["deployments"] = [{"name": "target", "user_config": {}}]
    (application,) = live_form(config, settings)["applications"]
    options = {one["name"]: one for one in application["deployments"]}
    assert options["target"]["user_config"]["callers"]["web"]["key_sha256"] == "ab" * 32


@pytest.mark.parametrize(("fewest", "num_targets"), [(0, 1), (2, 2)])
def test_replicas_that_start_first_are_as_many_as_autoscaling_keeps(write: Any, fewest: int, num_targets: int) -> None:
    scaling = {"policy": "queue_length", "target": {"min": fewest, "max": 3}, "drafter": {"min": fewest, "max": 3}}
    drafter = {**REMOTE, "replicas": {"num_cpus": 0.5}}
    raw, *services = read_config(write(served(drafter=drafter, autoscaling=scaling)))
    cpus = asked_resources(raw, services, at_start=True)["CPU"]
    assert (cpus["target.bundle"], cpus["drafter.replicas.num_cpus"]) == (num_targets, 0.5 * num_targets)


def test_jobs_on_rays_machine_find_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def run(*_: Any, env: dict[str, str], **__: Any) -> Any:
        environments.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(up.subprocess, "run", run)
    with up._own_ray(8, {"PATH": "/usr/bin"}, detach=True):
        assert environments[0]["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_the_dashboard_is_printed_with_the_command_for_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert re.search(r"Ray: +http://d/   \(token: \S+/ray get-auth-token\)\n", up.usage("http://s", "m", "http://d"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "http://d/\n" in up.usage("http://s", "m", "http://d")


def test_replicas_that_no_node_can_hold_are_refused_at_once(machine: Any, refuse: Any) -> None:
    raw = served(target={"num_replicas": 2}, drafter={**REMOTE, "replicas": None})
    machine.total["GPU"] = 0.0
    remedy = "without a GPU set target.bundle: {CPU: 1}, drafter.replicas.num_gpus: 0"
    refuse(raw, f"target.bundle asks for 2 GPU .* {remedy}")
    machine.total["GPU"] = 2.0
    refuse(raw, "drafter.replicas.num_gpus asks for 1 GPU, and the Ray cluster has 2: ask for less")


def test_a_config_that_fails_gives_way_to_the_one_before(write: Any, machine: Any, before: Any, capsys: Any) -> None:
    before.append({"name": "chat", "import_path": "x:y", "args": {}})
    machine.serve.without_config = ["old"]
    path = write(served(engine={"dtype": "bfloat16"}))
    machine.serve.fails.append(live_form(*read_config(path))["applications"][0])
    assert main(["serve", str(path)]) == 1
    said = capsys.readouterr()
    assert "no longer in the config, and ends: chat" in said.out
    assert "no such GPU" in said.err
    assert machine.serve.deployed[-1]["applications"] == before
    assert machine.serve.ended == []


def test_a_service_of_another_name_is_not_ended(refuse: Any) -> None:
    raw = served()
    raw["applications"][0]["name"] = "other"
    refuse(raw, "would end the application default, which")


@pytest.mark.parametrize("status", ["RUNNING", "DEPLOYING", "DEPLOY_FAILED"])
def test_a_service_that_is_there_is_not_moved_to_another_port(machine: Any, refuse: Any, status: str) -> None:
    """Serve passes over it: one would wait for an answer at the new port."""
    machine.serve.statuses = [status]
    raw = served()
    raw["http_options"]["port"] = 8001
    refuse(raw, "http_options.port is 8001, and the running service has 8000")


def test_new_engines_without_room_beside_the_old_ones_are_refused(bring_up: Any, refuse: Any, machine: Any) -> None:
    """Each of the two would fit alone."""
    raw, *services = read_config(CONFIGS / "two-models.yaml")
    machine.serve.running = live_form(raw, *services)["applications"]
    for application in raw["applications"][1:]:
        application["args"]["engine"]["max_num_seqs"] = 4
    beside = sum(one.target_bundles()[0]["CPU"] for one in services)
    machine.free = {"CPU": beside - 0.1}
    refuse(raw, f"beside the old one \\({beside:g} CPU of ")
    total = sum(asked_resources(raw, services)["CPU"].values())
    machine.total = {"CPU": total - 0.05}
    refuse(raw, "num_cpus of the gateway asks for 0.1 CPU, and the Ray cluster has ")
    machine.total, machine.free = {"CPU": total}, {"CPU": beside}
    bring_up(raw)
    assert len(machine.serve.deployed) == 1


def test_a_replica_that_dies_meanwhile_does_not_undo_a_change(bring_up: Any, machine: Any, before: Any) -> None:
    machine.serve.new_statuses = ["UNHEALTHY", "UNHEALTHY", "RUNNING"]
    bring_up(served(limits={"max_queued_requests": 512}))
    assert machine.serve.statuses == ["RUNNING"]
    assert len(machine.serve.deployed) == 1


# ---- Ray, and what is left of it

ENGINE = """
import multiprocessing, multiprocessing.shared_memory as shared, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
segment = shared.SharedMemory(create=True, size=64)
lock = multiprocessing.get_context("spawn").Lock()
print(segment.name, lock._semlock.name, flush=True)
time.sleep(600)
"""
SESSION = """
import os, subprocess, sys, time
from deployments import host

child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
segment, lock = child.stdout.readline().replace("/", "").split()
files = [f"/dev/shm/{segment}", f"/dev/shm/sem.{lock}"]
assert all(map(os.path.exists, files))
host.TERMINATE_S = 0.5
host.end_session()
assert child.wait(5) == -9
while any(map(os.path.exists, files)):
    time.sleep(0.1)
print("nothing is left")
"""


@pytest.mark.long
def test_processes_of_a_session_are_ended_with_their_shared_memory() -> None:
    """An engine that outlives Ray keeps gigabytes."""
    env = {**os.environ, "PYTHONPATH": str(Path(up.__file__).parents[1])}
    command = [sys.executable, "-c", SESSION, ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True, env=env)
    assert done.stdout.strip() == "nothing is left", done.stdout + done.stderr


def test_each_event_of_replicas_and_heads_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    history = ServiceHistory()
    notes: Any = iter([
        ("router", "the router has started"), ("replica", "target b is gone (1 running)"), ("k", "K of code 5 to 4"),
        ConnectionError, ("replica", "target c runs (2 running)"), KeyboardInterrupt,
    ])  # fmt: skip

    def result(timeout_s: float) -> Any:
        note = next(notes)
        if isinstance(note, type):
            raise note
        history.add_event(*note)
        return history.document(0.0)

    said: list[str] = []
    monkeypatch.setattr(up, "WATCH_INTERVAL_S", 0.0)
    router = SimpleNamespace(drafting=SimpleNamespace(remote=lambda: SimpleNamespace(result=result)))
    with pytest.raises(KeyboardInterrupt):
        up.watch({"a": router}, said.append)
    assert [line.split(" ", 1)[1] for line in said] == ["target b is gone (1 running)", "target c runs (2 running)"]


def test_megabytes_from_the_hub_are_said(bring_up: Any, tmp_path: Path, machine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)

    def answers(_: str) -> bool:
        (blobs / "part.incomplete").write_bytes(bytes(3_000_000))
        return machine.serve.statuses.pop() == "ready"

    monkeypatch.setattr(up, "_answers", answers)
    machine.serve.new_statuses = ["RUNNING", "RUNNING", "ready", "no"]
    raw = served(model={"source": "org/model", "id": "model"}, drafter=None)
    assert any(line.endswith("; 3 MB downloaded") for line in bring_up(raw, detach=True))


def test_a_head_of_another_target_is_refused_before_ray_starts(write: Any, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    path = write(served(drafter={"head": str(head)}))
    with pytest.raises(SettingsError, match=r"(?s)drafter.head: the head does not fit .*reads 32, the target has 576"):
        read_config(path)
