"""The manifests in `k8s/` are what the generator makes of their configs, and satisfy KubeRay's and Kubernetes' schemas.

The API server silently drops fields that a schema does not know, so a misspelt field would be lost without a word. The
schemas are therefore made strict first: where they list properties, others are errors. What KubeRay checks beyond its
schema, or takes from a manifest by name, has tests of its own.
"""

import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import cli as ray_command_line
from ray.serve.schema import ServeDeploySchema

import peagle.heads
from cluster.request import identify_caller
from cluster.settings import Catalog, ClusterSettings, key_variables, load_settings, with_live
from deployments import ROUTER_NAME, TARGET_NAME
from deployments.batch import read_requests
from deployments.cli import main
from deployments.manifest import CPU, GPU, KEYS_SECRET, render
from deployments.up import UpError, read_config
from peagle.checkpoint import read_head_config
from peagle.embedded import embedded_targets
from peagle.schema import SettingsError

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "two-models")
CONFIG = ROOT / "configs" / "local.yaml"
MADE = ["local", "local-autoscale", "gpu", "gpu-remote"]
"""Configs whose manifests are committed: a demo on CPUs, autoscaling, one model, drafters on GPUs of their own."""

Json = dict[str, Any]


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


def kuberay() -> dict[str, jsonschema.Draft202012Validator]:
    """Validators of KubeRay's kinds."""
    schemas = json.loads(gzip.decompress((ROOT / "tests" / "data" / "kuberay-v1.schemas.json.gz").read_bytes()))
    for schema in schemas.values():
        schema["properties"]["metadata"] = {"type": "object"}  # the API server checks metadata by itself
    return {kind: jsonschema.Draft202012Validator(strict(schema)) for kind, schema in schemas.items()}


KUBERAY = kuberay()


def problems(document: Json) -> list[str]:
    """What the schemas say against an object. KubeRay's say nothing of the metadata of pods: those are checked as
    Kubernetes' own kind besides."""
    objects = [document]
    if document["kind"] in KUBERAY:
        errors = KUBERAY[document["kind"]].iter_errors(document)
        if found := [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]:
            return found
        objects = [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates(document)]
    try:
        for checked in objects:
            kubernetes_validate.validate(checked, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def templates(document: Json) -> list[Json]:
    return [group["template"] for group in groups(document).values()]


def groups(service: Json) -> dict[str, Json]:
    """The groups of pods by the name that KubeRay gives them in the label ray.io/group."""
    cluster = service["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"headgroup": cluster["headGroupSpec"], **workers}


def container(group: Json) -> Json:
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def environment(group: Json) -> Json:
    variables = container(group)["env"]
    found = {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in variables}
    assert len(found) == len(variables)
    return found


def made(path: Path) -> list[Json]:
    return list(yaml.safe_load_all(render(path)))


def of(name: str) -> list[Json]:
    """The objects of a config by its name."""
    return made(ROOT / "configs" / f"{name}.yaml")


def written(name: str) -> list[Json]:
    """The objects of a file that is written by hand."""
    return list(yaml.safe_load_all((K8S / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.fixture
def raw() -> Json:
    return dict(yaml.safe_load(CONFIG.read_text()))


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes the objects of a raw config; the RayService is the first."""

    def written(raw: Json, name: str = "c.yaml") -> list[Json]:
        path = tmp_path / name
        path.write_text(yaml.dump(raw))
        return made(path)

    return written


# ---- what is committed, and the schemas


def test_committed_manifests_are_the_generated_ones() -> None:
    for name in MADE:
        committed = (K8S / f"{name}.yaml").read_text(encoding="utf-8")
        assert render(ROOT / "configs" / f"{name}.yaml") == committed, "run `make k8s` and commit the result"
    assert {path.stem for path in K8S.glob("*.yaml")} == {*MADE, "batch", "models", "kustomization"}
    (listed,) = re.findall(r"^K8S = (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert listed.split() == MADE


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_valid_manifest(path: Path) -> None:
    documents = made(path)
    kinds = [document["kind"] for document in documents]
    assert kinds[:4] == ["RayService", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget"]
    assert {document["kind"]: problems(document) for document in documents} == {kind: [] for kind in kinds}


def workers(service: Json) -> Json:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]


def pod(service: Json) -> Json:
    return workers(service)["template"]["spec"]


def test_wrong_settings_make_no_manifest(raw: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw["applications"][0]["args"]["depth"]["default"] = 99
    path, output = tmp_path / "wrong.yaml", tmp_path / "manifest.yaml"
    path.write_text(yaml.dump(raw))
    with pytest.raises(SettingsError, match=r"depth\.default is 99"):
        render(path)
    assert main(["manifest", str(path), "--output", str(output)]) == 1
    assert "depth.default is 99" in capsys.readouterr().err
    assert not output.exists()
    assert main(["manifest", str(CONFIG), "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == (K8S / "local.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Local.yaml", "my_model.yaml", "a" * 41 + ".yaml", "v1.2.yaml", "gpu-.yaml"])
def test_a_name_that_kuberay_refuses_is_refused_first(raw: Json, make: Any, name: str) -> None:
    with pytest.raises(UpError, match=re.escape(f"{name} names the RayService: rename it")):
        make(raw, name)


# ---- the service in its cluster is that of the config


def settings_in(service: Json, env: dict[str, str]) -> tuple[ClusterSettings, Json]:
    """The settings with which the targets of a RayService run, as `deployments.app` and `reconfigure` make them, and
    the options of the deployments by name."""
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    options = {deployment["name"]: deployment for deployment in application["deployments"]}
    catalog = Catalog(frozenset(embedded_targets()), Path(peagle.heads.__file__).parent, read_head_config)
    settings = load_settings(application["args"], catalog, env)
    assert options[TARGET_NAME]["user_config"] == options[ROUTER_NAME]["user_config"]
    return with_live(settings, options[TARGET_NAME]["user_config"]), options


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_service_has_the_settings_of_its_config(path: Path) -> None:
    service, settings = made(path)[0], read_config(path)[1]
    found, options = settings_in(service, {})
    for section in ("model", "engine", "depth", "limits", "callers", "autoscaling"):
        assert getattr(found, section) == getattr(settings, section)
    if settings.autoscaling is None:
        assert options[TARGET_NAME]["num_replicas"] == settings.target.num_replicas
    if settings.drafter is not None and settings.drafter.replicas is not None:
        anywhere = settings.drafter.replicas.model_copy(update={"host": None, "num_replicas": 1})
        assert found.drafter.replicas == anywhere  # a drafter on 127.0.0.1 is not reached from another pod
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert (inside["proxy_location"], inside["http_options"]["host"]) == ("EveryNode", "0.0.0.0")


def test_keys_are_named_and_not_held(raw: Json, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = {"web": {"key_env": "WEB_KEY", "max_k": 3}, "job": {"key_env": "JOB_KEY"}, "old": {"key_file": "/k/old"}}
    raw["applications"][0]["args"]["callers"] = callers
    monkeypatch.setenv("WEB_KEY", "sk-of-this-machine")
    service, *_ = make(raw)
    for group in groups(service).values():
        found = environment(group)
        for variable in ("WEB_KEY", "JOB_KEY"):
            assert found[variable] == {"secretKeyRef": {"name": KEYS_SECRET, "key": variable}}
        assert not problems(service)
        assert {"name": "keys", "mountPath": "/k"} in container(group)["volumeMounts"]
        assert {"name": "keys", "secret": {"secretName": KEYS_SECRET}} in group["template"]["spec"]["volumes"]
    assert "key_sha256" not in yaml.dump(service)
    keys = {"WEB_KEY": "sk-web", "JOB_KEY": "sk-job"}
    settings, options = settings_in(service, keys)
    table = settings.caller_table()
    caller = identify_caller(table, "Bearer sk-web")
    assert (caller.name, caller.max_k) == ("web", 3)
    assert "callers" not in options[ROUTER_NAME]["user_config"]  # None there would open the service
    assert key_variables({"callers": [1]}) == key_variables({"callers": {"a": 1, "b": {"key_env": 2}}}) == []


# ---- pods


def limits(service: Json) -> dict[str, str]:
    found = container(workers(service))["resources"]
    assert found["limits"] == found["requests"]
    return dict(found["limits"])


def test_drafters_have_pods_of_their_own_where_a_node_has_too_few_gpus(make: Any) -> None:
    raw = yaml.safe_load((ROOT / "configs" / "gpu-remote.yaml").read_text())
    args = raw["applications"][0]["args"]
    args["engine"]["tensor_parallel_size"] = 7
    assert list(groups(make(raw)[0])) == ["headgroup", "target"]
    args["engine"]["tensor_parallel_size"] = 8
    args["target"]["num_replicas"], args["drafter"]["replicas"]["num_replicas"] = 2, 2
    service, _, *budgets = make(raw)
    assert problems(service) == []
    found = groups(service)
    assert [group.get("replicas") for group in found.values()] == [None, 2, 2]
    gpus = [container(group)["resources"]["limits"].get("nvidia.com/gpu") for group in found.values()]
    assert gpus == [None, "8", "1"]
    assert [budget["metadata"]["name"] for budget in budgets] == [
        "peagle-c-headgroup",
        "peagle-c-target",
        "peagle-c-drafter",
    ]
    args["autoscaling"] = {"policy": "queue_length", "target": {"min": 2, "max": 3}, "drafter": {"min": 2, "max": 5}}
    del args["target"]["num_replicas"], args["drafter"]["replicas"]["num_replicas"]
    scaled = groups(make(raw)[0])
    assert [(group["minReplicas"], group["maxReplicas"]) for group in list(scaled.values())[1:]] == [(2, 3), (2, 5)]


def test_a_learner_has_a_pod_of_its_own(make: Any) -> None:
    raw = yaml.safe_load((ROOT / "configs" / "gpu-remote.yaml").read_text())
    args = raw["applications"][0]["args"]
    args["drafter"]["spare_heads"] = 1
    args["learning"] = {"workloads": "all", "num_cpus": 4}
    service = make(raw)[0]
    assert problems(service) == []
    assert list(groups(service)) == ["headgroup", "target", "learner"]
    assert container(groups(service)["learner"])["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_pods_are_as_the_section_kubernetes_says(make: Any) -> None:
    raw = yaml.safe_load((ROOT / "configs" / "gpu.yaml").read_text())
    args = raw["applications"][0]["args"]
    taints = [{"key": "spot", "value": "yes", "effect": "NoExecute"}, {"key": "llm"}]
    args["kubernetes"] = {
        "image": "registry.example.com/peagle:1",
        "image_pull_secrets": ["registry"],
        "service_account": "reads-bucket",
        "volumes": {"/models": "weights", "/home/ray/.cache": "cache"},
        "shared_memory": "16Gi",
        "head": {"cpus": 2, "memory": "12Gi", "node_selector": {"pool": "cpu"}},
        "workers": {"cpus": 11.5, "memory": "200Gi", "node_selector": {"gpu": "h100"}, "tolerations": taints},
    }
    service = make(raw)[0]
    assert problems(service) == []
    head, worker = groups(service).values()
    for group, asked, nodes in (
        (head, {"cpu": "2", "memory": "12Gi"}, {"pool": "cpu"}),
        (worker, {"cpu": "11.5", "memory": "200Gi", "nvidia.com/gpu": "1"}, {"gpu": "h100"}),
    ):
        spec = group["template"]["spec"]
        assert container(group)["image"] == "registry.example.com/peagle:1"
        assert container(group)["resources"] == {"requests": asked, "limits": asked}
        assert (spec["imagePullSecrets"], spec["nodeSelector"]) == ([{"name": "registry"}], nodes)
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
        assert volumes.keys() == set(mounts.values())
        assert volumes[mounts["/models"]] == {"persistentVolumeClaim": {"claimName": "weights"}}
        assert volumes[mounts["/home/ray/.cache"]] == {"persistentVolumeClaim": {"claimName": "cache"}}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"] == "16Gi"
    assert worker["template"]["spec"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute"},
        {"key": "llm", "operator": "Exists"},
    ]
    assert "tolerations" not in head["template"]["spec"]
    assert worker["template"]["spec"]["serviceAccountName"] == "reads-bucket"
    assert "serviceAccountName" not in head["template"]["spec"]  # KubeRay's autoscaler runs there
    assert "kubernetes" not in yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    args["kubernetes"]["workers"]["cpus"] = 1
    with pytest.raises(UpError, match="kubernetes.workers.cpus is 1, but Ray places 2 in a pod of target"):
        make(raw)


def test_checkpoints_that_only_the_cluster_has(raw: Json, make: Any, tmp_path: Path, capsys: Any) -> None:
    args = raw["applications"][0]["args"]
    args["model"] = {"source": "/models/mine"}
    args["drafter"] |= {"head": "/models/head", "max_draft_tokens": 7}
    args["kubernetes"] = {"volumes": {"/models": "weights"}}
    service = make(raw)[0]
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert (inside["model"]["source"], inside["drafter"]["head"]) == ("/models/mine", "/models/head")
    path = tmp_path / "c.yaml"
    assert main(["check", str(path)]) == 0
    assert "target: /models/mine, served as mine" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="model.source: '/models/mine' is not one of ours, no existing directory"):
        read_config(path)  # as `peagle serve` and the pods do
    args["kubernetes"]["volumes"] = {"/model": "weights"}
    with pytest.raises(SettingsError, match="no existing directory"):
        make(raw)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"volumes": {"models": "a"}}, "kubernetes.volumes has the directory 'models': write an absolute path"),
        ({"volumes": {"/models/": "a"}}, "without / at its end"),
        ({"volumes": {"/models": "My_Claim"}}, "kubernetes.volumes./models is 'My_Claim': the name of a claim"),
        ({"workers": {"memory": "64 GB"}}, "kubernetes.workers.memory is '64 GB': write an amount of memory"),
        ({"workers": {"node_selectors": {}}}, "unknown key kubernetes.workers.node_selectors; did you mean node_sel"),
        ({"head": {"tolerations": [{"key": "a", "effect": "No"}]}}, "kubernetes.head.tolerations.0.effect must be"),
        ([], "wrong type at kubernetes"),
    ],
)
def test_wrong_settings_of_pods(raw: Json, make: Any, section: Any, message: str) -> None:
    raw["applications"][0]["args"]["kubernetes"] = section
    with pytest.raises(SettingsError, match=re.escape(message)):
        make(raw)


@pytest.mark.parametrize(("num_replicas", "min_available"), [(1, 1), (2, 1), (3, 2)])
def test_a_drain_takes_one_target_at_a_time_and_never_the_last(
    raw: Json, make: Any, num_replicas: int, min_available: int
) -> None:
    raw["applications"][0]["args"]["target"]["num_replicas"] = num_replicas
    _, _, head, targets = make(raw)
    assert head["spec"]["minAvailable"] == 1
    assert targets["spec"]["minAvailable"] == min_available


def test_a_pod_that_is_deleted_first_hands_its_replicas_on() -> None:
    """The command as Ray knows it, and what it waits for; a real Serve that drains a node was tried by hand."""
    service = of("local")[0]
    (shell, flag, script) = container(workers(service))["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, flag) == ("bash", "-c")
    assert subprocess.run([shell, "-n", flag, script]).returncode == 0
    drain, wait = script.split(" && ")
    _, _, ray, name, *options = shlex.split(drain)
    (command,) = [command for command in ray_command_line.commands.values() if command.name == name]
    assert ray == "ray"
    found = command.make_context(name, options).params
    assert found["node_id"] is None  # this pod's
    assert found["deadline_remaining_seconds"] < pod(service)["terminationGracePeriodSeconds"]
    (pattern,) = re.findall("grep -Eqs '(.*)'", wait)
    for title in ("ray::ServeReplica:peagle:target", "ray::ServeReplica:peagle:router", "ray::HAProxyManager"):
        assert re.search(pattern, title)
    assert not re.search(pattern, script)
    assert "lifecycle" not in container(groups(service)["headgroup"])


def test_from_outside_only_the_port_of_http_is_reached() -> None:
    """Replicas, HAProxy's pages, drafters and Ray ask for no API key."""
    service, policy, *_ = of("local")
    rules = policy["spec"]["ingress"]
    assert [rule["ports"] for rule in rules if "from" not in rule] == [[{"protocol": "TCP", "port": 8000}]]
    (inside,) = [rule for rule in rules if "from" in rule]
    allowed = [peer["podSelector"]["matchLabels"] for peer in inside["from"]]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert allowed == [selected, {"app.kubernetes.io/name": "kuberay-operator"}]
    for template in templates(service):
        assert template["metadata"]["labels"] == selected


# ---- Kustomize


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for `kubectl kustomize`")
def test_kustomize_builds_the_service_with_its_components_and_the_users_image() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(K8S)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    by_kind = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    monitor, rules = by_kind.pop("ServiceMonitor"), by_kind.pop("PrometheusRule")
    assert rules["spec"]["groups"]
    assert by_kind["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert {kind: problems(document) for kind, document in by_kind.items()} == {kind: [] for kind in by_kind}
    service = by_kind["RayService"]
    plain = of("gpu")[0]
    ray, plain_ray = service["spec"]["rayClusterConfig"], plain["spec"]["rayClusterConfig"]
    fault_tolerance = ray.pop("gcsFaultToleranceOptions")
    assert fault_tolerance["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    for group in groups(service).values():
        found = group["template"]["spec"]["containers"][0]
        assert found["image"] == f"registry.example.com/{GPU.image}"
        found["image"] = GPU.image
    assert ray == plain_ray
    # KubeRay gives the head service the ports of the head's container, and these labels.
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in container(groups(service)["headgroup"])["ports"]}
    assert endpoint["path"] == "/metrics"
    ingress = by_kind["Ingress"]["spec"]
    (rule,) = ingress["rules"]
    assert [rule["host"]] == ingress["tls"][0]["hosts"]
    (path,) = rule["http"]["paths"]
    assert path["path"] == "/v1"  # the page and /metrics ask for no key
    assert service_url(service).startswith(f"http://{path['backend']['service']['name']}:")
    labels = {"ray.io/originated-from-crd": "RayService", "ray.io/node-type": "head"}
    assert monitor["spec"]["selector"]["matchLabels"] == labels


# ---- what is written by hand


def test_jobs_are_valid_and_their_commands_can_be_typed() -> None:
    (batch,), (claim, download) = written("batch"), written("models")
    assert {document["metadata"]["name"]: problems(document) for document in (batch, claim, download)} == {
        "peagle-batch": [],
        "models": [],
        "download-models": [],
    }
    (asking,) = batch["spec"]["template"]["spec"]["containers"]
    (program, name, requests, flag, url) = asking["command"]
    assert (program, name, flag, url) == ("peagle", "batch", "--url", service_url(of("local")[0]))
    found, refused = read_requests(ROOT / Path(requests).relative_to("/opt/peagle"))  # the image's copy
    assert found
    assert not refused
    (loading,) = download["spec"]["template"]["spec"]["containers"]
    assert (asking["image"], loading["image"]) == (CPU.image, GPU.image)
    script = loading["args"][0]
    assert subprocess.run(["sh", "-nc", script]).returncode == 0
    (hub,) = re.findall(r"hf (\w+) ", script)
    command = [str(Path(sys.executable).with_name("hf")), hub, "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--local-dir" in known
    (named,) = re.findall(r"for name in (.*); do", script)
    assert all(checkpoint in (ROOT / "configs/gpu.yaml").read_text() for checkpoint in named.split())


def service_url(service: Json) -> str:
    """Where KubeRay lets a service answer inside the cluster."""
    port = {port["name"]: port["containerPort"] for port in container(workers(service))["ports"]}["serve"]
    return f"http://{service['metadata']['name']}-serve-svc:{port}"


def test_serve_build_writes_the_config_of_an_application_made_in_python(tmp_path: Path) -> None:
    """Ray's own command, for a user's module that calls `build`."""
    args = yaml.safe_load(CONFIG.read_text())["applications"][0]["args"]
    (tmp_path / "mine.py").write_text(f"from deployments.app import build\napp = build({args!r})\n")
    command = [str(Path(sys.executable).with_name("serve")), "build", "mine:app", "-o", "mine.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(written).applications
    assert application.import_path == "mine:app"
    assert {deployment.name for deployment in application.deployments} >= {TARGET_NAME, ROUTER_NAME}
