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
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import cli as ray_command_line

import peagle.heads
from cluster.settings import Catalog, ClusterSettings, key_variables, load_settings, with_live
from deployments import ROUTER_NAME, TARGET_NAME
from deployments.cli import main
from deployments.client import read_requests
from deployments.manifest import CPU, GPU, KEYS_SECRET, Machine, render
from deployments.up import UpError, read_config
from peagle.checkpoint import read_head_config
from peagle.embedded import embedded_targets
from peagle.schema import SettingsError

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CONFIG = ROOT / "configs" / "local.yaml"
GPU_CONFIG = ROOT / "configs" / "gpu.yaml"
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
    if document["kind"] == "RayJob":
        return [document["spec"]["submitterPodTemplate"]]
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


def made(path: Path, *, job: bool = False) -> list[Json]:
    return list(yaml.safe_load_all(render(path, job=job)))


def of(name: str, *, job: bool = False) -> list[Json]:
    """The objects of a config by its name."""
    return made(ROOT / "configs" / f"{name}.yaml", job=job)


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
    assert render(CONFIG, job=True) == (K8S / "local-batch.yaml").read_text(encoding="utf-8"), "run `make k8s`"
    assert {path.stem for path in K8S.glob("*.yaml")} == {*MADE, "local-batch", "kustomization"}
    (listed,) = re.findall(r"^K8S = (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert listed.split() == MADE


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_valid_manifest(path: Path) -> None:
    documents = made(path) + made(path, job=True)
    kinds = [document["kind"] for document in documents]
    assert kinds[:4] == ["RayService", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget"]
    assert kinds[-1] == "RayJob"
    assert {document["kind"]: problems(document) for document in documents} == {kind: [] for kind in kinds}


def workers(service: Json) -> Json:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]


def pod(service: Json) -> Json:
    return workers(service)["template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "mutate", "message"),
    [
        ("RayService", lambda m: m["spec"].update(serveConfigv2=m["spec"].pop("serveConfigV2")), "serveConfigv2"),
        ("RayService", lambda m: m["spec"]["rayClusterConfig"].update(rayversion="2.60.0"), "rayversion"),
        ("RayService", lambda m: m["spec"]["rayClusterConfig"]["authOptions"].update(mode="off"), "'off' is not one"),
        ("RayService", lambda m: m["spec"]["rayClusterConfig"]["autoscalerOptions"].update(version="v3"), "'v3' is"),
        ("RayService", lambda m: workers(m).update(replicas="one"), "'one' is not of type 'integer'"),
        ("RayService", lambda m: workers(m).pop("groupName"), "'groupName' is a required property"),
        ("RayService", lambda m: pod(m)["containers"][0].update(img="x"), "img"),
        ("RayService", lambda m: pod(m)["containers"][0].pop("name"), "'name' is a required property"),
        ("RayService", lambda m: pod(m)["containers"][0]["resources"].update(limit={}), "limit"),
        ("RayService", lambda m: pod(m)["containers"][0]["readinessProbe"].update(httpget={}), "httpget"),
        ("RayService", lambda m: pod(m)["containers"][0]["env"][0].update(valueFrom={"secret": {}}), "secret"),
        ("RayService", lambda m: pod(m)["topologySpreadConstraints"][0].pop("maxSkew"), "'maxSkew' is a required"),
        ("RayService", lambda m: workers(m)["template"]["metadata"].update(label={}), "label"),
        ("NetworkPolicy", lambda m: m["spec"].update(policytypes=["Ingress"]), "policytypes"),
        ("NetworkPolicy", lambda m: m["spec"]["ingress"][0].update(port=1), "port"),
        ("PodDisruptionBudget", lambda m: m["spec"].update(minAvailable=[1]), "[1] is not"),
        ("PodDisruptionBudget", lambda m: m["spec"].update(available=1), "available"),
        ("RayJob", lambda m: m["spec"].update(entryPoint="x"), "entryPoint"),
        ("RayJob", lambda m: m["spec"]["clusterSelector"].update(n=1), "1 is not of type 'string'"),
        ("RayJob", lambda m: m["spec"]["submitterPodTemplate"]["spec"].update(restart="Never"), "restart"),
    ],
)
def test_a_wrong_field_is_caught(kind: str, mutate: Any, message: str) -> None:
    documents = of("local-autoscale") + of("local", job=True)
    broken = next(document for document in documents if document["kind"] == kind)
    assert problems(broken) == []
    mutate(broken)
    assert any(message in problem for problem in problems(broken)), problems(broken)


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
        assert found.drafter is not None
        assert found.drafter.replicas is not None
        anywhere = settings.drafter.replicas.model_copy(update={"host": None, "num_replicas": 1})
        assert found.drafter.replicas == anywhere  # a drafter on 127.0.0.1 is not reached from another pod
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert (inside["proxy_location"], inside["http_options"]["host"]) == ("EveryNode", "0.0.0.0")


def test_keys_are_named_and_not_held(raw: Json, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = {"web": {"key_env": "WEB_KEY", "max_k": 3}, "job": {"key_env": "JOB_KEY"}}
    raw["applications"][0]["args"]["callers"] = callers
    monkeypatch.setenv("WEB_KEY", "sk-of-this-machine")
    service, *_ = make(raw)
    for group in groups(service).values():
        found = environment(group)
        for variable in ("WEB_KEY", "JOB_KEY"):
            assert found[variable] == {"secretKeyRef": {"name": KEYS_SECRET, "key": variable}}
        assert not problems(service)
    assert "key_sha256" not in yaml.dump(service)
    keys = {"WEB_KEY": "sk-web", "JOB_KEY": "sk-job"}
    settings, options = settings_in(service, keys)
    table = settings.caller_table()
    assert table is not None
    caller = table.identify("Bearer sk-web")
    assert (caller.name, caller.max_k) == ("web", 3)
    assert "callers" not in options[ROUTER_NAME]["user_config"]  # None there would open the service
    assert key_variables({"callers": [1]}) == key_variables({"callers": {"a": 1, "b": {"key_env": 2}}}) == []


def test_a_key_given_by_its_digest_changes_without_new_pods(raw: Json, make: Any) -> None:
    args = raw["applications"][0]["args"]
    args["callers"] = {"web": {"key_sha256": "a" * 64}}
    before = make(raw)[0]["spec"]
    args["callers"]["web"]["key_sha256"] = "b" * 64
    args["limits"] = {"max_running_requests": 7}
    after = make(raw)[0]["spec"]
    assert before["rayClusterConfig"] == after["rayClusterConfig"]
    old, new = (yaml.safe_load(spec["serveConfigV2"])["applications"][0] for spec in (before, after))
    assert old["args"] == new["args"]
    assert new["deployments"][0]["user_config"]["callers"]["web"]["key_sha256"] == "b" * 64
    assert new["deployments"][0]["user_config"]["limits"]["max_running_requests"] == 7


def test_a_drafter_named_in_the_environment_is_in_the_manifest(raw: Json, make: Any, monkeypatch: Any) -> None:
    args = raw["applications"][0]["args"]
    del args["drafter"], args["depth"]
    named = {
        "method": "eagle3",
        "model": "smollm2-135m-instruct",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    monkeypatch.setenv("SM_VLLM_SPECULATIVE_CONFIG", json.dumps(named))
    settings, _ = settings_in(make(raw)[0], {})
    assert settings.max_draft_tokens == 3


# ---- pods


def limits(service: Json) -> dict[str, str]:
    found = container(workers(service))["resources"]
    assert found["limits"] == found["requests"]
    return dict(found["limits"])


def test_pods_follow_the_settings(raw: Json, make: Any) -> None:
    args = raw["applications"][0]["args"]
    args["target"] |= {"num_replicas": 3, "bundle": {"CPU": 5.0}}
    args["drafter"]["replicas"] |= {"num_replicas": 4, "num_cpus": 0.8}
    service, *_ = make(raw)
    group = workers(service)
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    assert limits(service)["cpu"] == "7"


def test_a_pod_has_the_gpus_of_its_engine_and_of_the_drafters_beside_it(make: Any) -> None:
    raw = yaml.safe_load(GPU_CONFIG.read_text())
    args = raw["applications"][0]["args"]
    assert limits(make(raw)[0]) == {"cpu": "8", "memory": GPU.worker_memory, "nvidia.com/gpu": "1"}
    args["engine"]["tensor_parallel_size"] = 2
    assert limits(make(raw)[0])["nvidia.com/gpu"] == "2"
    args["target"]["num_replicas"] = 2
    args["drafter"] |= {"placement": "remote", "replicas": {"num_replicas": 3}}
    found = limits(make(raw)[0])  # three drafters for two targets: room for two beside each
    assert (found["nvidia.com/gpu"], found["cpu"]) == ("4", "32")


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


def test_pods_for_gpus_can_run_on_their_nodes_and_keep_what_they_download() -> None:
    service, plain = of("gpu")[0], of("local")[0]
    assert pod(service)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    mounts = {mount["name"]: mount["mountPath"] for mount in container(workers(service))["volumeMounts"]}
    # The head runs no replica: it must not hold a claim that only one node can mount.
    head = groups(service)["headgroup"]["template"]["spec"]
    assert [volume["name"] for volume in head["volumes"]] == ["shared-memory"]
    image_file = (ROOT / GPU.dockerfile).read_text(encoding="utf-8")
    assert f"PEAGLE_CACHE={mounts['models']}/peagle" in image_file
    assert "HF_HUB_OFFLINE" not in image_file
    assert environment(workers(service))["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}
    }
    assert "tolerations" not in pod(plain)
    assert "nvidia.com/gpu" not in limits(plain)
    assert "HF_TOKEN" not in environment(workers(plain))


@pytest.mark.parametrize("name", MADE)
def test_names_within_a_manifest_fit_each_other(name: str) -> None:
    """What no schema sees: ports of probes, volumes of mounts, labels of selectors."""
    service, _, *budgets = of(name)
    for group, spec in groups(service).items():
        found, template = container(spec), spec["template"]
        ports = {port["name"]: port["containerPort"] for port in found["ports"]}
        # KubeRay makes the service of HTTP from the head's port of this name; Kubernetes' own is 8000.
        assert ports["serve"] == 8000
        for probe in (found["readinessProbe"], found["livenessProbe"]):
            assert probe["httpGet"]["port"] in (*ports, 52365)
        assert found["readinessProbe"]["failureThreshold"] < found["livenessProbe"]["failureThreshold"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        assert {mount["name"] for mount in found["volumeMounts"]} == volumes
        labels = {**template["metadata"]["labels"], "ray.io/group": group}
        selecting = [b for b in budgets if b["spec"]["selector"]["matchLabels"].items() <= labels.items()]
        assert len(selecting) == 1
        for constraint in template["spec"].get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
        assert found["securityContext"]["runAsNonRoot"]
        assert found["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        # The cluster before an upgrade has as long for its streams as HAProxy gives them.
        assert environment(spec)["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"] == "deployments.haproxy:install"
        stop_s = environment(spec)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]
        assert service["spec"]["rayClusterDeletionDelaySeconds"] == int(stop_s)
    assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_another_port_of_http_is_used_everywhere(raw: Json, make: Any) -> None:
    raw["http_options"]["port"] = 9000
    service, policy, *_ = make(raw)
    for group in groups(service).values():
        assert {"name": "serve", "containerPort": 9000} in container(group)["ports"]
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9000}]


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


def test_pods_come_and_go_with_replicas() -> None:
    scaled, plain = of("local-autoscale")[0], of("local")[0]
    group, cluster = workers(scaled), scaled["spec"]["rayClusterConfig"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 2)
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    # KubeRay's autoscaler v2 takes no pod that restarts by itself.
    assert not any("restartPolicy" in spec["template"]["spec"] for spec in groups(scaled).values())
    assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & plain["spec"]["rayClusterConfig"].keys()


def test_from_outside_only_the_port_of_http_is_reached() -> None:
    """Replicas, HAProxy's pages, drafters and Ray ask for no API key."""
    service, policy, *_ = of("local")
    (job,) = of("local", job=True)
    rules = policy["spec"]["ingress"]
    assert [rule["ports"] for rule in rules if "from" not in rule] == [[{"protocol": "TCP", "port": 8000}]]
    (inside,) = [rule for rule in rules if "from" in rule]
    allowed = [peer["podSelector"]["matchLabels"] for peer in inside["from"]]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert allowed == [selected, {"app.kubernetes.io/name": "kuberay-operator"}]
    for template in templates(service) + templates(job):  # a job's submitter asks the dashboard
        assert template["metadata"]["labels"] == selected


def test_every_pod_starts_ray_with_what_the_way_of_http_needs(raw: Json, make: Any) -> None:
    for section, is_optimized in ({}, False), ({"num_replicas": 2}, True):
        raw["applications"][0]["args"]["ingress"] = section
        for group in groups(make(raw)[0]).values():
            found = environment(group)
            assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
            assert ("RAY_SERVE_THROUGHPUT_OPTIMIZED" in found) == is_optimized


@pytest.mark.parametrize(("machine", "name"), [(CPU, "local"), (GPU, "gpu")])
def test_image_file_builds_what_the_manifest_runs(machine: Machine, name: str) -> None:
    text = (ROOT / machine.dockerfile).read_text(encoding="utf-8")
    assert f"-f {machine.dockerfile} -t {machine.image} " in text
    for group in groups(of(name)[0]).values():
        assert container(group)["image"] == machine.image
    for sources in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE):
        missing = [name for name in sources.split() if not (ROOT / name).exists()]
        assert not missing, f"{machine.dockerfile} copies what is not there: {missing}"
    # `serve run configs/...` must find its file from where Ray starts.
    assert re.search(r"^RUN ln -s /opt/peagle/configs (/home/ray)/configs\nWORKDIR \1\n\Z", text, flags=re.MULTILINE)
    assert re.findall(r"^FROM (.+)$", text, flags=re.MULTILINE) == ["python:3.11.15-slim-bookworm"]
    # fsGroup 1000 lets the image's user write to volumes.
    assert "--uid 1000" in text
    assert "\nUSER 1000\n" in text


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
    labels = {"ray.io/originated-from-crd": "RayService", "ray.io/node-type": "head"}
    assert monitor["spec"]["selector"]["matchLabels"] == labels


# ---- the job


def test_the_job_runs_a_command_and_a_file_that_the_image_has() -> None:
    (job,) = of("local", job=True)
    command, subcommand, path = job["spec"]["entrypoint"].split()
    assert (command, subcommand) == ("peagle", "batch")
    requests = read_requests(ROOT / Path(path).relative_to("/opt/peagle"))
    assert {request["url"] for request in requests} == {"/v1/chat/completions", "/v1/completions"}
    # A cluster selector excludes a cluster of its own.
    assert job["spec"]["clusterSelector"].keys() == {"ray.io/cluster"}
    assert "rayClusterSpec" not in job["spec"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2: a request is an object with a text custom_id"),
        ('{"custom_id": 1}', "line 2: a request is an object with a text custom_id"),
        ('{"custom_id": "b", "url": "/v1/embeddings", "body": {}}', "line 2: url is '/v1/embeddings', and can be"),
        ('{"custom_id": "b", "url": "/v1/completions", "body": {"messages": []}}', "must be an object with prompt"),
        ('{"custom_id": "b", "url": "/v1/chat/completions", "body": []}', "must be an object with messages"),
    ],
)
def test_a_wrong_line_of_requests_is_named(tmp_path: Path, line: str, message: str) -> None:
    right = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "separators\u2028inside"}}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(right, ensure_ascii=False) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_requests(path)
    path.write_text(json.dumps(right, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert read_requests(path) == [right]
