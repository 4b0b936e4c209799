"""`peagle serve`: what it refuses before Ray starts, and what it tells."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.settings import (
    AutoscalingSettings,
    ClusterSettings,
    DrafterReplicas,
    DrafterSettings,
    IngressSettings,
    ModelSettings,
    TargetSettings,
)
from deployments import up
from deployments.cli import main
from deployments.up import base_url, num_logical_cpus, progress, read_config, usage


def config(**http_options: Any) -> dict[str, Any]:
    """The smallest Serve config that is right, without speculation."""
    application = {"import_path": "deployments.app:build", "args": {"model": {"source": "smollm2-135m-instruct"}}}
    return {"http_options": {"host": "127.0.0.1", "port": 8000} | http_options, "applications": [application]}


def write(path: Path, raw: Any) -> str:
    path.write_text(raw if isinstance(raw, str) else yaml.dump(raw))
    return str(path)


def test_right_config_is_read(tmp_path: Path) -> None:
    raw, settings = read_config(Path(write(tmp_path / "right.yaml", config())))
    assert raw == config()
    assert settings.model.id == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("a: [", "is not a Ray Serve config file"),
        ("- a list", "is not a Ray Serve config file"),
        ({"applications": []}, "applications is empty"),
        ({**config(), "proxy_location": "Nowhere"}, "proxy_location"),
        ({"applications": [{"import_path": "deployments.app:build", "args": {"modle": {}}}]}, "unknown key modle"),
        ({"applications": [{"import_path": "deployments.app:build"}]}, "missing key model"),
    ],
)
def test_wrong_config_stops_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], raw: Any, message: str
) -> None:
    assert main(["serve", write(tmp_path / "wrong.yaml", raw)]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert output.out == ""


def test_missing_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "none.yaml")]) == 1
    assert "cannot be read: No such file or directory" in capsys.readouterr().err


def test_port_in_use_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["serve", write(tmp_path / "right.yaml", config(port=port))]) == 1
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in capsys.readouterr().err


def test_a_terminated_service_is_stopped_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` replaces the handler of SIGTERM by its own."""
    before, stopped = signal.getsignal(signal.SIGTERM), []

    def start_ray(*_: Any) -> str:
        signal.signal(signal.SIGTERM, lambda *_: pytest.fail("ended by Ray"))
        return "http://none"

    monkeypatch.setattr(up, "join_or_start_ray", start_ray)
    for step in ("connect", "deploy", "wait_until_ready"):
        monkeypatch.setattr(up, step, lambda *_: None)
    monkeypatch.setattr(signal, "pause", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(up.ray.serve, "shutdown", lambda: stopped.append(True))
    try:
        assert main(["serve", write(tmp_path / "right.yaml", config())]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped == [True]


def test_logical_cpus_cover_every_process() -> None:
    """Three replicas of 4.5 CPUs and two ingresses of one: 15.5, and room for the build task."""
    settings = ClusterSettings(
        model=ModelSettings(source="x"),
        target=TargetSettings(num_replicas=3, num_cpus=0.5, bundle={"CPU": 4.0}),
        ingress=IngressSettings(num_replicas=2, num_cpus=1.0),
    )
    assert num_logical_cpus(settings) >= 16
    replicas = DrafterReplicas(num_replicas=4, num_cpus=2.0)
    remote = settings.model_copy(update={"drafter": DrafterSettings(head="h", placement="remote", replicas=replicas)})
    assert num_logical_cpus(remote) >= 24
    scaled = {"policy": "queue_length", "target": {"max": 6}, "drafter": {"max": 8}}
    most = remote.model_copy(update={"autoscaling": AutoscalingSettings.model_validate(scaled)})
    assert num_logical_cpus(most) >= 6 * 4.5 + 2 + 8 * 2


def test_url_as_seen_from_this_machine() -> None:
    assert base_url(config(port=8123)) == "http://127.0.0.1:8123"
    assert base_url(config(host="0.0.0.0")) == "http://127.0.0.1:8000"
    raw = config()
    raw["applications"][0]["route_prefix"] = "/llm"
    assert base_url(raw) == "http://127.0.0.1:8000/llm"


def test_usage_has_a_url_a_curl_line_and_a_python_line() -> None:
    lines = usage("http://127.0.0.1:8000", "m").splitlines()
    assert any(line.startswith("Ready: http://127.0.0.1:8000/v1") for line in lines)
    assert any(line.startswith("curl -s http://127.0.0.1:8000/v1/chat/completions ") for line in lines)
    (client,) = [line for line in lines if ' -c "' in line]
    compile(client.split(' -c "')[1].rstrip('"'), "usage", "exec")


def test_progress_counts_running_replicas() -> None:
    deployments = {"target": {"replicas": [{"state": "RUNNING"}, {"state": "STARTING"}]}, "ingress": {"replicas": []}}
    line = progress("peagle", {"status": "DEPLOYING", "deployments": deployments})
    assert line == "peagle deploying: ingress 0/1, target 1/2 running"
