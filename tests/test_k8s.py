"""The RayServices in `k8s/` are what the generator makes of their configs, and satisfy KubeRay's own schema.

The API server silently drops fields that the schema does not know, so a misspelt field would be lost without a word.
The schema is therefore made strict first: where it lists properties, others are errors.
"""

import copy
import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deployments.cli import main
from deployments.manifest import CPU, GPU, Machine, rayservice, render
from deployments.up import read_config
from peagle.schema import SettingsError

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "local.yaml"
MANIFEST = ROOT / "k8s" / "rayservice-cpu.yaml"
GPU_CONFIG = ROOT / "configs" / "gpu.yaml"
GPU_MANIFEST = ROOT / "k8s" / "rayservice-gpu.yaml"


def strict(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever properties are listed and unknown ones are not asked for,
    and with Kubernetes' integer-or-string marker made an ordinary type."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    packed = (ROOT / "tests" / "data" / "rayservice-v1.schema.json.gz").read_bytes()
    schema = strict(json.loads(gzip.decompress(packed)))
    schema["properties"]["metadata"] = {"type": "object"}  # the API server checks metadata by itself
    return jsonschema.Draft202012Validator(schema)


def loaded(text: str) -> dict[str, Any]:
    """The RayService of a manifest."""
    service, policy = yaml.safe_load_all(text)
    assert (service["kind"], policy["kind"]) == ("RayService", "NetworkPolicy")
    return dict(service)


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return loaded(MANIFEST.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("config", "manifest"), [(CONFIG, MANIFEST), (GPU_CONFIG, GPU_MANIFEST)])
def test_committed_manifest_is_the_generated_one(config: Path, manifest: Path) -> None:
    assert render(config) == manifest.read_text(encoding="utf-8"), "run `make k8s` and commit the result"


@pytest.mark.parametrize("path", [MANIFEST, GPU_MANIFEST])
def test_manifest_satisfies_kuberays_schema(validator: Any, path: Path) -> None:
    errors = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(loaded(path.read_text(encoding="utf-8")))
    ]
    assert errors == []


def _workers(manifest: dict[str, Any]) -> dict[str, Any]:
    workers = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert isinstance(workers, dict)
    return workers


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda m: m["spec"].update(serveConfigv2=m["spec"].pop("serveConfigV2")), "serveConfigv2"),
        (lambda m: m["spec"]["rayClusterConfig"].update(rayversion="2.60.0"), "rayversion"),
        (lambda m: _workers(m).update(replicas="one"), "'one' is not of type 'integer'"),
        (lambda m: _workers(m).pop("groupName"), "'groupName' is a required property"),
        (lambda m: _workers(m)["template"]["spec"]["containers"][0].update(img="x"), "img"),
        (lambda m: _workers(m)["template"]["spec"]["containers"][0]["resources"].update(limit={}), "limit"),
        (lambda m: m["spec"]["rayClusterConfig"]["authOptions"].update(mode="off"), "'off' is not one of"),
    ],
)
def test_a_wrong_field_is_caught(validator: Any, manifest: dict[str, Any], mutate: Any, message: str) -> None:
    broken = copy.deepcopy(manifest)
    mutate(broken)
    assert any(message in error.message for error in validator.iter_errors(broken))


def test_serve_config_in_the_manifest_is_the_local_one_reachable_from_outside(manifest: dict[str, Any]) -> None:
    inside, local = yaml.safe_load(manifest["spec"]["serveConfigV2"]), yaml.safe_load(CONFIG.read_text())
    assert local["applications"][0]["args"]["drafter"]["replicas"].pop("host") == "127.0.0.1"
    assert inside["applications"] == local["applications"]
    assert inside["http_options"]["host"] == "0.0.0.0"
    assert inside["http_options"]["port"] == local["http_options"]["port"]


def test_pods_follow_the_settings() -> None:
    config, settings = read_config(CONFIG)
    bigger = settings.model_copy(
        update={"target": settings.target.model_copy(update={"num_replicas": 3, "bundle": {"CPU": 5.0}})}
    )
    assert bigger.drafter is not None
    assert bigger.drafter.replicas is not None
    replicas = bigger.drafter.replicas.model_copy(update={"num_replicas": 4, "num_cpus": 0.8})
    bigger = bigger.model_copy(update={"drafter": bigger.drafter.model_copy(update={"replicas": replicas})})
    workers = _workers(rayservice("local", config, bigger))
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "7"


def limits(manifest: dict[str, Any]) -> dict[str, str]:
    found = _workers(manifest)["template"]["spec"]["containers"][0]["resources"]
    assert found["limits"] == found["requests"]
    return dict(found["limits"])


def test_a_pod_has_the_gpus_of_its_engine_and_of_the_drafters_beside_it(tmp_path: Path) -> None:
    raw = yaml.safe_load(GPU_CONFIG.read_text())
    args = raw["applications"][0]["args"]
    path = tmp_path / "gpu.yaml"

    def made() -> dict[str, Any]:
        path.write_text(yaml.dump(raw))
        return loaded(render(path))

    assert limits(made()) == {"cpu": "8", "memory": GPU.worker_memory, "nvidia.com/gpu": "1"}
    args["engine"]["tensor_parallel_size"] = 2
    assert limits(made())["nvidia.com/gpu"] == "2"
    args["target"]["num_replicas"] = 2
    args["drafter"] |= {"placement": "remote", "replicas": {"num_replicas": 3}}
    found = limits(made())  # three drafters for two targets: room for two beside each
    assert (found["nvidia.com/gpu"], found["cpu"]) == ("4", "32")


def test_pods_for_gpus_can_run_on_their_nodes_and_keep_what_they_download(manifest: dict[str, Any]) -> None:
    workers, plain = (_workers(one)["template"]["spec"] for one in (loaded(GPU_MANIFEST.read_text()), manifest))
    assert workers["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    mounts = {mount["name"]: mount["mountPath"] for mount in workers["containers"][0]["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in workers["volumes"]}
    # The head runs no replica: it must not hold a claim that only one node can mount.
    head = loaded(GPU_MANIFEST.read_text())["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert [volume["name"] for volume in head["volumes"]] == ["shared-memory"]
    image_file = (ROOT / GPU.dockerfile).read_text(encoding="utf-8")
    assert f"PEAGLE_CACHE={mounts['models']}/peagle" in image_file
    assert "HF_HUB_OFFLINE" not in image_file
    assert "tolerations" not in plain
    assert "nvidia.com/gpu" not in limits(manifest)


def test_from_outside_only_the_port_of_http_is_reached(manifest: dict[str, Any]) -> None:
    """Replicas, HAProxy's pages, drafters and Ray ask for no API key."""
    _, policy = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    rules = policy["spec"]["ingress"]
    assert [rule["ports"] for rule in rules if "from" not in rule] == [[{"protocol": "TCP", "port": 8000}]]
    cluster = manifest["spec"]["rayClusterConfig"]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == selected


def test_every_pod_starts_ray_with_what_the_way_of_http_needs(tmp_path: Path) -> None:
    raw = yaml.safe_load(CONFIG.read_text())
    path = tmp_path / "c.yaml"
    for section, is_optimized in ({}, False), ({"num_replicas": 2}, True):
        raw["applications"][0]["args"]["ingress"] = section
        path.write_text(yaml.dump(raw))
        cluster = loaded(render(path))["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            env = {one["name"]: one.get("value") for one in group["template"]["spec"]["containers"][0]["env"]}
            assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
            assert ("RAY_SERVE_THROUGHPUT_OPTIMIZED" in env) == is_optimized


def test_wrong_settings_make_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = yaml.safe_load(CONFIG.read_text())
    raw["applications"][0]["args"]["depth"]["default"] = 99
    path, output = tmp_path / "wrong.yaml", tmp_path / "manifest.yaml"
    path.write_text(yaml.dump(raw))
    with pytest.raises(SettingsError, match=r"depth\.default is 99"):
        render(path)
    assert main(["manifest", str(path), "--output", str(output)]) == 1
    assert "depth.default is 99" in capsys.readouterr().err
    assert not output.exists()
    assert main(["manifest", str(CONFIG), "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == MANIFEST.read_text(encoding="utf-8")


def test_pods_come_and_go_with_replicas(manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scaled = loaded(render(ROOT / "configs" / "local-autoscale.yaml"))
    workers = _workers(scaled)
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 2)
    assert scaled["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert "enableInTreeAutoscaling" not in manifest["spec"]["rayClusterConfig"]


@pytest.mark.parametrize(("machine", "path"), [(CPU, MANIFEST), (GPU, GPU_MANIFEST)])
def test_image_file_builds_what_the_manifest_runs(machine: Machine, path: Path) -> None:
    text = (ROOT / machine.dockerfile).read_text(encoding="utf-8")
    assert f"-f {machine.dockerfile} -t {machine.image} " in text
    cluster = loaded(path.read_text(encoding="utf-8"))["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        assert group["template"]["spec"]["containers"][0]["image"] == machine.image
    for sources in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE):
        missing = [name for name in sources.split() if not (ROOT / name).exists()]
        assert not missing, f"{machine.dockerfile} copies what is not there: {missing}"
    # `serve run configs/...` must find its file from where Ray starts.
    assert re.search(r"^RUN ln -s /opt/peagle/configs (/home/ray)/configs\nWORKDIR \1\n\Z", text, flags=re.MULTILINE)
