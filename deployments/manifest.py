"""``peagle manifest configs/local.yaml``: the KubeRay RayService of a config, and a NetworkPolicy for it, as YAML.

What enters: a Serve config file of `configs/`. What leaves: a manifest whose `serveConfigV2` is that file and whose
pods are sized from its settings, so nothing is written twice. Memory and CPUs of pods with GPUs are room to start with,
not measured: set them for your nodes.
"""

import copy
import importlib.metadata
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.settings import ClusterSettings
from deployments.up import INGRESS_ENVIRONMENT, RAY_ENVIRONMENT, read_config, replica_resources

HEAD_MEMORY = "4Gi"
CPUS_PER_GPU = 8
MODELS = {"name": "models", "mountPath": "/home/ray/.cache"}
"""Where a pod with GPUs keeps the checkpoints that it downloads."""


@dataclass(frozen=True)
class Machine:
    """What a pod runs, and its memory."""

    image: str
    dockerfile: str
    worker_memory: str
    shared_memory: str
    """/dev/shm: Ray's object store, the engine's own segments and the mailboxes of remote drafters."""


# One replica on CPUs was seen to need about 6.5 GB with the embedded target (engine 4.1 GB; replica, ingress and proxy
# 0.7 GB to 0.9 GB each; the object store apart), and a drafter beside it 1.1 GB. The limit leaves room for longer
# contexts.
CPU = Machine("peagle-serve:0.1.0-cpu", "k8s/Dockerfile", "10Gi", "1Gi")
GPU = Machine("peagle-serve:0.1.0-gpu", "k8s/Dockerfile.gpu", "64Gi", "8Gi")


def render(path: Path) -> str:
    """The manifest's text. Raises UpError or ValueError for a config that is wrong."""
    config, settings = read_config(path)
    machine = _machine(settings)
    header = (
        f"# Made from configs/{path.name} by `make k8s`; do not edit by hand.\n"
        f"# Needs KubeRay 1.5.1 or later and the image that {machine.dockerfile} builds.\n"
    )
    if machine is GPU:
        header += (
            "# Needs NVIDIA's device plugin on the nodes; for gated models a secret hf-token with the key token.\n"
            "# With a persistentVolumeClaim as volume `models` a checkpoint is downloaded once, not by each pod.\n"
        )
    documents = rayservice(path.stem, config, settings), network_policy(path.stem, config)
    return header + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _labels(name: str) -> dict[str, str]:
    """Of every pod of the service, besides KubeRay's."""
    return {"peagle-service": f"peagle-{name}"}


def network_policy(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Who may talk to the pods: everyone to the port of HTTP, the pods to each other, KubeRay to all. What else listens
    in them (replicas behind HAProxy, HAProxy's pages, drafters, Ray) asks for no API key."""
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"peagle-{name}"},
        "spec": {
            "podSelector": {"matchLabels": _labels(name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"protocol": "TCP", "port": _port(config)}]},
                {"from": [{"podSelector": {"matchLabels": _labels(name)}}, operator]},
            ],
        },
    }


def rayservice(name: str, config: dict[str, Any], settings: ClusterSettings) -> dict[str, Any]:
    """The RayService object for a checked config; `name` is the config's file name without its suffix."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": f"peagle-{name}", "labels": {"app.kubernetes.io/name": "peagle-serve"}},
        "spec": {
            "serveConfigV2": yaml.dump(serve_config(config), Dumper=_Dumper, sort_keys=False, width=120),
            "rayClusterConfig": {
                "rayVersion": importlib.metadata.version("ray"),
                # Whoever reaches the dashboard can run code: KubeRay makes a token and hands it to every pod.
                "authOptions": {"mode": "token"},
                # KubeRay then adds and removes pods as Serve asks for replicas.
                **({} if settings.autoscaling is None else {"enableInTreeAutoscaling": True}),
                "headGroupSpec": _head(name, settings),
                "workerGroupSpecs": [_workers(name, settings, _port(config))],
            },
        },
    }


def serve_config(config: dict[str, Any]) -> dict[str, Any]:
    """The Serve config as it runs in a cluster: the proxy on every node, reachable from outside its pod, and drafters
    reachable from every node."""
    http_options = {**config.get("http_options", {}), "host": "0.0.0.0"}
    made = copy.deepcopy({**config, "proxy_location": "EveryNode", "http_options": http_options})
    for application in made["applications"]:
        drafter = (application.get("args") or {}).get("drafter") or {}
        (drafter.get("replicas") or {}).pop("host", None)
    return made


def _port(config: dict[str, Any]) -> int:
    return int(config.get("http_options", {}).get("port", 8000))


def _machine(settings: ClusterSettings) -> Machine:
    return GPU if settings.target.has_gpu else CPU


def _head(name: str, settings: ClusterSettings) -> dict[str, Any]:
    """The head pod keeps the cluster's books and runs no replica: losing a replica must not take the cluster along."""
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _pod(name, "ray-head", ports, settings, {"cpu": "1", "memory": HEAD_MEMORY}),
    }


def _workers(name: str, settings: ClusterSettings, port: int) -> dict[str, Any]:
    """One pod a target replica, all its engine's workers in it, with room for the drafters, so that Ray can place one
    beside each target. KubeRay adds probes: a worker is ready when Serve's proxy on it answers."""
    target, ingress, machine = settings.target, settings.ingress, _machine(settings)
    needed = replica_resources(settings)
    num_cpus = needed["CPU"] + ingress.num_cpus * max(1, ingress.num_replicas)
    num_gpus = needed.get("GPU", 0.0)
    if settings.drafter is not None and (drafters := settings.drafter.replicas) is not None:
        num_drafters = math.ceil(drafters.num_replicas / target.num_replicas)
        num_cpus += drafters.num_cpus * num_drafters
        num_gpus += (drafters.num_gpus or 0) * num_drafters
    resources = {"cpu": str(max(2, math.ceil(num_cpus))), "memory": machine.worker_memory}
    if num_gpus:
        resources["cpu"] = str(max(CPUS_PER_GPU * math.ceil(num_gpus), math.ceil(num_cpus)))
        resources["nvidia.com/gpu"] = str(math.ceil(num_gpus))
    fewest = most = target.num_replicas
    if settings.autoscaling is not None:
        fewest, most = settings.autoscaling.target.min, settings.autoscaling.target.max
    pod = _pod(name, "ray-worker", {"serve": port}, settings, resources)
    if num_gpus:
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "groupName": "target",
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": most,
        "rayStartParams": {},
        "template": pod,
    }


def _pod(
    service: str, name: str, ports: dict[str, int], settings: ClusterSettings, resources: dict[str, str]
) -> dict[str, Any]:
    """A pod template of one container, `name`."""
    machine = _machine(settings)
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **RAY_ENVIRONMENT}
    if settings.ingress.num_replicas:
        environment |= INGRESS_ENVIRONMENT
    container = {
        "name": name,
        "image": machine.image,
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        "env": [{"name": variable, "value": value} for variable, value in environment.items()],
        # Requests equal limits: an engine that is squeezed for CPU or memory drags every request of its replica.
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"runAsNonRoot": True, "allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    # A container has 64 MB of /dev/shm by default.
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": machine.shared_memory}}
    volumes: list[dict[str, Any]] = [shared_memory]
    if machine is GPU:
        token = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
        container["env"] = [*container["env"], {"name": "HF_TOKEN", "valueFrom": token}]
    if "nvidia.com/gpu" in resources:
        container["volumeMounts"] = [*container["volumeMounts"], MODELS]
        volumes.append({"name": MODELS["name"], "emptyDir": {}})
    return {"metadata": {"labels": _labels(service)}, "spec": {"containers": [container], "volumes": volumes}}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the Serve config inside the manifest can be read; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
