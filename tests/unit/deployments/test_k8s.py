"""The manifests in `k8s/` are what the generator makes of their configs, and satisfy KubeRay's and Kubernetes' schemas.

The API server silently drops fields that a schema does not know, so a misspelt field would be lost without a word. The
schemas are therefore made strict first: where they list properties, others are errors.
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
from ray import serve
from ray.scripts.scripts import cli as ray_command_line

import peagle.heads
from cluster.request import identify_caller
from cluster.settings import Catalog, ClusterSettings, load_settings, with_live
from deployments import ROUTER_NAME, TARGET_NAME
from deployments.app import build
from deployments.batch import read_requests
from deployments.cli import main
from deployments.gateway import GATEWAY_PATH
from deployments.manifest import CPU, GPU, KEYS_SECRET, render
from deployments.serve_config import ConfigError, read_config
from peagle.checkpoint import read_head_config
from peagle.embedded import EMBEDDED_TARGETS
from peagle.schema import SettingsError

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "two-models")
CONFIG = ROOT / "configs" / "local.yaml"
MADE = ["local", "gpu"]
"""Configs whose manifests are committed."""

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


def made(path: Path) -> list[Json]:
    return list(yaml.safe_load_all(render(path)))


def config(name: str = "local") -> tuple[Json, Json]:
    """A config by its name, and the `args` in it."""
    raw = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    return raw, raw["applications"][0]["args"]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes the objects of a raw config; the RayService is the first."""

    def written(raw: Json, name: str = "c.yaml") -> list[Json]:
        path = tmp_path / name
        path.write_text(yaml.dump(raw))
        objects = made(path)
        assert [problem for document in objects for problem in problems(document)] == []
        return objects

    return written


# ---- what is committed, and the schemas


def test_committed_manifests_are_the_generated_ones() -> None:
    for name in MADE:
        committed = (K8S / f"{name}.yaml").read_text(encoding="utf-8")
        assert render(ROOT / "configs" / f"{name}.yaml") == committed, "run `make k8s` and commit the result"
    assert {path.stem for path in K8S.glob("*.yaml")} == {*MADE, "batch", "models", "kustomization"}
    (listed,) = re.findall(r"^K8S = (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert listed.split() == MADE


def test_wrong_settings_make_no_manifest(tmp_path: Path, capsys: Any) -> None:
    raw, args = config()
    args["num_draft_tokens"]["default"] = 99
    path, output = tmp_path / "wrong.yaml", tmp_path / "manifest.yaml"
    path.write_text(yaml.dump(raw))
    assert main(["manifest", str(path), "--output", str(output)]) == 1
    assert "num_draft_tokens.default is 99" in capsys.readouterr().err
    assert not output.exists()
    assert main(["manifest", str(CONFIG), "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == (K8S / "local.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Local.yaml", "my_model.yaml", "a" * 41 + ".yaml", "gpu-.yaml"])
def test_a_name_that_kuberay_refuses_is_refused_first(make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name} names the RayService: rename it")):
        make(config()[0], name)


# ---- the service in its cluster is that of the config


def settings_in(service: Json, env: dict[str, str]) -> tuple[ClusterSettings, Json]:
    """The settings with which the targets of a RayService run, as `deployments.app` and `reconfigure` make them, and
    the options of the deployments by name."""
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    options = {deployment["name"]: deployment for deployment in application["deployments"]}
    catalog = Catalog(frozenset(EMBEDDED_TARGETS), Path(peagle.heads.__file__).parent, read_head_config)
    settings = load_settings(application["args"], catalog, env)
    assert options[TARGET_NAME]["user_config"] == options[ROUTER_NAME]["user_config"]
    return with_live(settings, options[TARGET_NAME]["user_config"]), options


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_a_valid_manifest_with_its_settings(path: Path) -> None:
    documents, settings = made(path), read_config(path)[1]
    kinds = [document["kind"] for document in documents]
    assert kinds[:4] == ["RayService", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget"]
    assert [problem for document in documents for problem in problems(document)] == []
    service = documents[0]
    found, options = settings_in(service, {})
    for section in ("model", "engine", "num_draft_tokens", "limits", "callers", "autoscaling"):
        assert getattr(found, section) == getattr(settings, section)
    if settings.autoscaling is None:
        assert options[TARGET_NAME]["num_replicas"] == settings.target.num_replicas
    if settings.drafter is not None and settings.drafter.replicas is not None:
        anywhere = settings.drafter.replicas.model_copy(update={"host": None, "num_replicas": 1})
        assert found.drafter.replicas == anywhere  # a drafter on 127.0.0.1 is not reached from another pod
    inside = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert (inside["proxy_location"], inside["http_options"]["host"]) == ("EveryNode", "0.0.0.0")
    assert isinstance(build(inside["applications"][0]["args"]), serve.Application)
    num_gpus = settings.num_workers * settings.target.bundle.get("GPU", 0)
    num_gpus += 0 if settings.drafter.replicas is None else settings.drafter.replicas.num_gpus
    assert int([*gpus(service).values()][1] or 0) == num_gpus


def test_keys_are_named_and_not_held(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, args = config()
    args["callers"] = {"web": {"key_env": "WEB_KEY", "max_k": 3}, "old": {"key_file": "/k/old"}}
    monkeypatch.setenv("WEB_KEY", "sk-of-this-machine")
    service, *_ = make(raw)
    for group in groups(service).values():
        secret = {"secretKeyRef": {"name": KEYS_SECRET, "key": "WEB_KEY"}}
        assert {"name": "WEB_KEY", "valueFrom": secret} in container(group)["env"]
        assert {"name": "keys", "mountPath": "/k"} in container(group)["volumeMounts"]
        assert {"name": "keys", "secret": {"secretName": KEYS_SECRET}} in group["template"]["spec"]["volumes"]
    assert "key_sha256" not in yaml.dump(service)
    settings, options = settings_in(service, {"WEB_KEY": "sk-web"})
    caller = identify_caller(settings.caller_table(), "Bearer sk-web")
    assert (caller.name, caller.max_k) == ("web", 3)
    assert "callers" not in options[ROUTER_NAME]["user_config"]  # None there would open the service


@pytest.mark.parametrize("folder", ["/models", "/", "/etc", "/home/ray/.cache", "/etc/ssl/certs", "/lib64/k"])
def test_keys_hide_no_folder_of_a_pod(make: Any, folder: str) -> None:
    raw, args = config()
    args["kubernetes"] = {"volumes": {"/models": "weights"}}
    args["callers"] = {"web": {"key_file": str(Path(folder, "web"))}}
    with pytest.raises(ConfigError, match=f"would hide what {folder} holds: name a folder that nothing else is in"):
        make(raw)


def test_a_gateway_has_no_manifest(make: Any) -> None:
    raw, _ = config()
    raw["applications"][0]["route_prefix"] = "/m"
    models = {"smollm2-135m-instruct": "/m"}
    raw["applications"].insert(0, {"name": "g", "import_path": GATEWAY_PATH, "args": {"models": models}})
    with pytest.raises(ConfigError, match="write a file for each model, without a gateway"):
        make(raw)


# ---- pods


def gpus(service: Json) -> dict[str, str | None]:
    """GPUs of a pod by its group."""
    resources = {name: container(group)["resources"] for name, group in groups(service).items()}
    assert all(found["limits"] == found["requests"] for found in resources.values())
    return {name: found["limits"].get("nvidia.com/gpu") for name, found in resources.items()}


def test_drafters_have_pods_of_their_own_where_a_node_has_too_few_gpus(make: Any) -> None:
    raw, args = config("gpu-remote")
    args["engine"]["tensor_parallel_size"] = 7
    assert gpus(make(raw)[0]) == {"headgroup": None, "target": "8"}
    args["engine"]["tensor_parallel_size"] = 8
    del args["target"]["num_replicas"], args["drafter"]["replicas"]["num_replicas"]
    args["autoscaling"] = {"policy": "queue_length", "target": {"min": 2, "max": 3}, "drafter": {"min": 2, "max": 5}}
    service, _, *budgets = make(raw)
    assert gpus(service) == {"headgroup": None, "target": "8", "drafter": "1"}
    bounds = [(group["minReplicas"], group["maxReplicas"]) for group in list(groups(service).values())[1:]]
    assert bounds == [(2, 3), (2, 5)]
    names = [f"peagle-c-{name}" for name in groups(service)]
    assert [budget["metadata"]["name"] for budget in budgets] == names


def test_a_learner_has_a_pod_of_its_own(make: Any) -> None:
    raw, args = config("gpu-remote")
    args["drafter"]["spare_heads"] = 1
    args["learning"] = {"workloads": "all", "num_cpus": 4}
    assert gpus(make(raw)[0]) == {"headgroup": None, "target": "2", "learner": "1"}


def test_pods_are_as_the_section_kubernetes_says(make: Any) -> None:
    raw, args = config("gpu")
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
    head, worker = (group["template"]["spec"] for group in groups(service).values())
    for spec, asked, nodes in (
        (head, {"cpu": "2", "memory": "12Gi"}, {"pool": "cpu"}),
        (worker, {"cpu": "11.5", "memory": "200Gi", "nvidia.com/gpu": "1"}, {"gpu": "h100"}),
    ):
        (pod,) = spec["containers"]
        assert (pod["image"], pod["resources"]["limits"]) == ("registry.example.com/peagle:1", asked)
        assert (spec["imagePullSecrets"], spec["nodeSelector"]) == ([{"name": "registry"}], nodes)
        volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
        assert {mount["mountPath"]: volumes.pop(mount["name"]) for mount in pod["volumeMounts"]} == {
            "/models": {"persistentVolumeClaim": {"claimName": "weights"}},
            "/home/ray/.cache": {"persistentVolumeClaim": {"claimName": "cache"}},
            "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        }
        assert volumes == {}
    assert worker["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoExecute"},
        {"key": "llm", "operator": "Exists"},
    ]
    assert "tolerations" not in head
    assert worker["serviceAccountName"] == "reads-bucket"
    assert "serviceAccountName" not in head  # KubeRay's autoscaler runs there
    args["kubernetes"]["workers"]["cpus"] = 1
    with pytest.raises(ConfigError, match="kubernetes.workers.cpus is 1, but Ray places 2 in a pod of target"):
        make(raw)


def test_checkpoints_that_only_the_cluster_has(make: Any, tmp_path: Path, capsys: Any) -> None:
    raw, args = config()
    args["model"] = {"source": "/models/mine"}
    args["drafter"] |= {"head": "/models/head", "max_draft_tokens": 7}
    args["kubernetes"] = {"volumes": {"/models": "weights"}}
    inside = yaml.safe_load(make(raw)[0]["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert (inside["model"]["source"], inside["drafter"]["head"]) == ("/models/mine", "/models/head")
    assert main(["check", str(tmp_path / "c.yaml")]) == 0
    assert "target: /models/mine, on CPU, served as mine" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="model.source: '/models/mine' is no embedded model, no directory"):
        read_config(tmp_path / "c.yaml")  # as `peagle serve` and the pods do
    args["kubernetes"]["volumes"] = {"/model": "weights"}
    with pytest.raises(SettingsError, match="no directory"):
        make(raw)


def test_folders_of_this_machine_are_not_taken_for_those_of_pods(make: Any, tmp_path: Path) -> None:
    shipped = Path(peagle.heads.__file__).parent / "smollm2-135m-instruct"
    target, live, conversations = (tmp_path / name for name in ("target", "live", "replay"))
    shutil.copytree(shipped, live)
    target.mkdir()
    (target / "config.json").write_text("{}")
    for key, folder in (
        ("model.source", target),
        ("drafter.head", shipped),
        ("deployments.drafter.user_config.head", live),
        ("learning.replay", conversations),
    ):
        raw, args = config()
        if key == "model.source":
            args["model"]["source"] = str(folder)
            del args["drafter"], args["num_draft_tokens"]
        elif key == "drafter.head":
            args["drafter"]["head"] = str(folder)
        elif key == "learning.replay":
            args["drafter"]["spare_heads"] = 1
            args["learning"] = {"workloads": "all", "replay": str(folder)}
        else:
            raw["applications"][0]["deployments"] = [{"name": "drafter", "user_config": {"head": str(folder)}}]
        refused = f"{key} is {folder}, a folder of this machine that pods do not have: write kubernetes.volumes"
        with pytest.raises(ConfigError, match=re.escape(refused)):
            make(raw)
        for pods in ({"volumes": {str(folder.parent): "claim"}}, {"image": "mine/with-models:1"}):
            args["kubernetes"] = pods
            make(raw)


def test_wrong_settings_of_pods_are_named_with_the_remedy(make: Any) -> None:
    raw, args = config()
    for section, message in (
        ({"volumes": {"models": "a"}}, "kubernetes.volumes has the directory 'models': write an absolute path"),
        ({"volumes": {"/models": "My_Claim"}}, "kubernetes.volumes./models is 'My_Claim': the name of a claim"),
        ({"workers": {"memory": "64 GB"}}, "kubernetes.workers.memory is '64 GB': write an amount of memory"),
        ({"workers": {"node_selectors": {}}}, "unknown key kubernetes.workers.node_selectors; did you mean node_sel"),
        ({"head": {"tolerations": [{"key": "a", "effect": "No"}]}}, "head.tolerations.0.effect: Input should be"),
    ):
        args["kubernetes"] = section
        with pytest.raises(SettingsError, match=re.escape(message)):
            make(raw)


@pytest.mark.parametrize(("name", "has_token"), [("local", False), ("local-autoscale", True)])
def test_only_a_head_with_an_autoscaler_has_a_token_of_kubernetes(name: str, has_token: bool) -> None:
    pods = groups(made(ROOT / "configs" / f"{name}.yaml")[0])
    found = {group: pod["template"]["spec"].get("automountServiceAccountToken", True) for group, pod in pods.items()}
    assert found == {"headgroup": has_token, "target": False}


def test_a_drain_takes_one_target_at_a_time_and_never_the_last(make: Any) -> None:
    raw, args = config()
    for num_replicas, min_available in ((1, 1), (2, 1), (3, 2)):
        args["target"]["num_replicas"] = num_replicas
        assert [budget["spec"]["minAvailable"] for budget in make(raw)[2:]] == [1, min_available]


def test_a_pod_that_is_deleted_first_hands_its_replicas_on() -> None:
    """The command as Ray knows it, and what it waits for; a real Serve that drains a node was tried by hand."""
    target = groups(made(CONFIG)[0])["target"]
    (*_, script) = container(target)["lifecycle"]["preStop"]["exec"]["command"]
    drain, wait = script.split(" && ")
    _, _, _, name, *options = shlex.split(drain)
    (command,) = [command for command in ray_command_line.commands.values() if command.name == name]
    found = command.make_context(name, options).params
    assert found["node_id"] is None  # this pod's
    assert found["deadline_remaining_seconds"] < target["template"]["spec"]["terminationGracePeriodSeconds"]
    (pattern,) = re.findall("grep -Eqs '(.*)'", wait)
    for title in ("ray::ServeReplica:peagle:target", "ray::ServeReplica:peagle:router", "ray::HAProxyManager"):
        assert re.search(pattern, title)
    assert not re.search(pattern, script)


def test_from_outside_only_the_port_of_http_is_reached() -> None:
    """Replicas, HAProxy's pages, drafters and Ray ask for no API key."""
    service, policy, *_ = made(CONFIG)
    outside, inside = policy["spec"]["ingress"]
    assert outside == {"ports": [{"protocol": "TCP", "port": 8000}]}
    allowed = [peer["podSelector"]["matchLabels"] for peer in inside["from"]]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert allowed == [selected, {"app.kubernetes.io/name": "kuberay-operator"}]
    assert all(template["metadata"]["labels"] == selected for template in templates(service))


# ---- what is written by hand


def service_url(service: Json) -> str:
    """Where KubeRay lets a service answer inside the cluster."""
    port = {port["name"]: port["containerPort"] for port in container(groups(service)["target"])["ports"]}["serve"]
    return f"http://{service['metadata']['name']}-serve-svc:{port}"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for `kubectl kustomize`")
def test_kustomize_builds_the_service_with_its_components_and_the_users_image() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(K8S)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    by_kind = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    monitor, rules = by_kind.pop("ServiceMonitor"), by_kind.pop("PrometheusRule")
    assert rules["spec"]["groups"]
    assert {kind: problems(document) for kind, document in by_kind.items()} == {kind: [] for kind in by_kind}
    service = by_kind["RayService"]
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    images = {container(group)["image"] for group in groups(service).values()}
    assert images == {f"registry.example.com/{GPU['image']}"}
    # KubeRay gives the head service the ports of the head's container.
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in container(groups(service)["headgroup"])["ports"]}
    (path,) = by_kind["Ingress"]["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/v1"  # the page and /metrics ask for no key
    assert service_url(service).startswith(f"http://{path['backend']['service']['name']}:")


def test_jobs_are_valid_and_their_commands_can_be_typed() -> None:
    documents = [one for name in ("batch", "models") for one in yaml.safe_load_all((K8S / f"{name}.yaml").read_text())]
    assert [problems(document) for document in documents] == [[], [], []]
    asking, loading = (documents[place]["spec"]["template"]["spec"]["containers"][0] for place in (0, 2))
    (program, name, requests, flag, url) = asking["command"]
    assert (program, name, flag, url) == ("peagle", "batch", "--url", service_url(made(CONFIG)[0]))
    found, refused = read_requests(ROOT / Path(requests).relative_to("/opt/peagle"))  # the image's copy
    assert found
    assert not refused
    assert (asking["image"], loading["image"]) == (CPU["image"], GPU["image"])
    assert subprocess.run(["sh", "-nc", loading["args"][0]]).returncode == 0
    (named,) = re.findall(r"for name in (.*); do", loading["args"][0])
    assert all(checkpoint in (ROOT / "configs/gpu.yaml").read_text() for checkpoint in named.split())
