"""The RayService in `k8s/` is what the generator makes of `configs/local.yaml`, and satisfies KubeRay's own schema.

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

from cluster.loading import SettingsError
from deployments.manifest import IMAGE, main, rayservice, render
from deployments.up import read_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "local.yaml"
MANIFEST = ROOT / "k8s" / "rayservice-cpu.yaml"


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


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    loaded = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def test_committed_manifest_is_the_generated_one() -> None:
    assert render(CONFIG) == MANIFEST.read_text(encoding="utf-8"), "run `make k8s` and commit the result"


def test_manifest_satisfies_kuberays_schema(validator: Any, manifest: dict[str, Any]) -> None:
    errors = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(manifest)
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


def test_config_for_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = yaml.safe_load(CONFIG.read_text())
    raw["applications"][0]["args"]["target"]["bundle"] = {"GPU": 1}
    path = tmp_path / "gpu.yaml"
    path.write_text(yaml.dump(raw))
    assert main([str(path)]) == 1
    assert "target.bundle asks for a GPU" in capsys.readouterr().err


def test_wrong_settings_make_no_manifest(tmp_path: Path) -> None:
    raw = yaml.safe_load(CONFIG.read_text())
    raw["applications"][0]["args"]["depth"]["default"] = 99
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.dump(raw))
    with pytest.raises(SettingsError, match=r"depth\.default is 99"):
        render(path)


def test_pods_come_and_go_with_replicas(manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scaled = yaml.safe_load(render(ROOT / "configs" / "local-autoscale.yaml"))
    workers = _workers(scaled)
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 2)
    assert scaled["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert "enableInTreeAutoscaling" not in manifest["spec"]["rayClusterConfig"]


def test_image_file_builds_what_the_manifest_runs(manifest: dict[str, Any]) -> None:
    text = (ROOT / "k8s" / "Dockerfile").read_text(encoding="utf-8")
    assert f"-t {IMAGE} " in text
    assert _workers(manifest)["template"]["spec"]["containers"][0]["image"] == IMAGE
    for sources in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE):
        missing = [name for name in sources.split() if not (ROOT / name).exists()]
        assert not missing, f"k8s/Dockerfile copies what is not there: {missing}"
