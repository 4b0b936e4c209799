"""``peagle manifest configs/local.yaml``: what KubeRay needs to run a config, as YAML: the RayService, a NetworkPolicy
and PodDisruptionBudgets.

What enters: a Serve config file of `configs/`. What leaves: manifests whose `serveConfigV2` is that file and whose pods
are sized from its settings, so nothing is written twice. No secret is in them: pods refer to Kubernetes Secrets. By
default memory and CPUs of pods with GPUs are room to start with, not measured: the section `kubernetes` sets them.
"""

import importlib.metadata
import math
import re
from pathlib import Path
from typing import Any

import yaml

from cluster.settings import ClusterSettings, PodSettings, key_variables
from deployments.compat import MAX_STREAM_S, RAY_ENVIRONMENT
from deployments.up import UpError, live_form, model_applications, read_config
from peagle import __version__

Json = dict[str, Any]

CPUS_PER_GPU = 8
MAX_GPUS_PER_POD = 8
"""GPUs of a usual node. Drafters that do not fit beside their target get pods of their own."""

MAX_IDLE_S = 300
"""Time that a pod without a replica stays: a new one would load its checkpoint again."""

AGENT_PORT = 52365
"""Port of Ray's agent on every node, which says without a token whether the node is healthy."""

KEYS_SECRET = "peagle-keys"
"""Holds callers' API keys, each under the name of its environment variable."""

CACHE = "/home/ray/.cache"
"""Where a pod keeps the checkpoints that it downloads. With GPUs it is a volume, if `kubernetes.volumes` has none."""

DRAIN = (
    'timeout 30 ray drain-node --address "$RAY_ADDRESS" --reason DRAIN_NODE_REASON_PREEMPTION'
    f" --reason-message 'the pod is deleted' --deadline-remaining-seconds {MAX_STREAM_S:.0f}"
    " && while grep -Eqs 'Serve[R]eplica|HAProxy[M]anager' /proc/[0-9]*/cmdline; do sleep 1; done"
)
"""Before a worker pod ends: Serve starts its replicas elsewhere, where there is room, and ends those here when they
have finished what they had. The brackets keep grep from finding itself."""

SECURITY = {
    "runAsNonRoot": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of every container, as Kubernetes' pod security standard `restricted` asks."""


# One replica on CPUs was seen to need about 6.5 GB with the embedded target (engine 4.1 GB; replica, router and proxy
# 0.7 GB to 0.9 GB each; the object store apart), and a drafter beside it 1.1 GB. The limit leaves room for longer
# contexts.
CPU = {"image": f"peagle-serve:{__version__}-cpu", "head": "4Gi", "worker": "10Gi", "shared_memory": "1Gi"}
GPU = {"image": f"peagle-serve:{__version__}-gpu", "head": "8Gi", "worker": "64Gi", "shared_memory": "8Gi"}
"""Image, memory of head and worker pods, and /dev/shm (Ray's object store and the engine's own segments), where the
settings say nothing else."""


def render(path: Path) -> str:
    """The manifest of a config's service. Raises UpError or ValueError for a wrong config."""
    config, settings, *others = read_config(path, is_here=False)
    if others:
        raise UpError(f"{path.name} serves several models: write a file for each, and let the Ingress choose by path")
    if not re.fullmatch(r"[a-z0-9-]{1,40}(?<!-)", path.stem):
        raise UpError(f"{path.name} names the RayService: rename it to small letters, digits and -, at most 40")
    service = Manifest(f"peagle-{path.stem}", config, settings)
    header = f"# Made from configs/{path.name} by `make k8s`; do not edit by hand.\n"
    header += f"# Needs KubeRay 1.5.1 or later and the image {service.image}.\n"
    if keys := [*service.key_variables, *(path.name for path in service.key_files)]:
        header += f"# Needs a secret {KEYS_SECRET} with callers' API keys: {', '.join(keys)}.\n"
    if claims := sorted(set(settings.kubernetes.volumes.values())):
        header += f"# Needs the PersistentVolumeClaims {', '.join(claims)}, of an access mode for many nodes.\n"
    if settings.target.has_gpu:
        header += (
            "# Needs NVIDIA's device plugin on the nodes; for gated models a secret hf-token with the key token.\n"
        )
    budgets = [service.disruption_budget("headgroup", 1)] + [
        service.disruption_budget(group["groupName"], max(1, group["minReplicas"] - 1))
        for group in service.worker_groups()
    ]
    return header + _dump(service.rayservice(), service.network_policy(), *budgets)


class Manifest:
    """The Kubernetes objects of one service; `name` is theirs."""

    def __init__(self, name: str, config: Json, settings: ClusterSettings) -> None:
        self._name, self._config, self._settings, self._pods = name, config, settings, settings.kubernetes
        self._args: Json = model_applications(config)[0].get("args") or {}
        self._port = int(config.get("http_options", {}).get("port", 8000))
        self._labels = {"peagle-service": name}  # of every pod, besides KubeRay's
        self.key_variables = key_variables(self._args)
        self.key_files = [Path(one.key_file) for one in (settings.callers or {}).values() if one.key_file]
        self._defaults = GPU if settings.target.has_gpu else CPU
        self.image = settings.kubernetes.image or self._defaults["image"]

    def rayservice(self) -> Json:
        # Serve scales replicas, and KubeRay's autoscaler the pods that they ask for.
        autoscaling = {
            "enableInTreeAutoscaling": True,
            "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": MAX_IDLE_S, "securityContext": SECURITY},
        }
        return {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "metadata": {"name": self._name, "labels": {"app.kubernetes.io/name": "peagle-serve"}},
            "spec": {
                "serveConfigV2": _dump(self.serve_config()),
                # Time of the old cluster to finish its streams after a change of pods.
                "rayClusterDeletionDelaySeconds": int(MAX_STREAM_S),
                "rayClusterConfig": {
                    "rayVersion": importlib.metadata.version("ray"),
                    # A client of the dashboard can run code: KubeRay makes a token and hands it to every pod.
                    "authOptions": {"mode": "token"},
                    **({} if self._settings.autoscaling is None else autoscaling),
                    "headGroupSpec": self._head(),
                    "workerGroupSpecs": self.worker_groups(),
                },
            },
        }

    def serve_config(self) -> Json:
        """The Serve config as it runs in a cluster: the proxy on every node, reachable from outside its pod, drafters
        reachable from every node, and what needs no new engine where Serve changes it live.

        Callers whose keys are in environment variables stay in `args`, where pods read them: new keys need new pods.
        """
        http_options = {**self._config.get("http_options", {}), "host": "0.0.0.0"}
        config = {**self._config, "proxy_location": "EveryNode", "http_options": http_options}
        made = live_form(config, self._settings)
        application = made["applications"][0]
        if self.key_variables:
            application["args"]["callers"] = self._args["callers"]
            for deployment in application["deployments"]:
                deployment.get("user_config", {}).pop("callers", None)
        drafter = application["args"].get("drafter") or {}
        (drafter.get("replicas") or {}).pop("host", None)
        return made

    def network_policy(self) -> Json:
        """Opens the HTTP port to everyone, and all ports to the pods of the service and to KubeRay. What else listens
        in the pods (replicas behind HAProxy, drafters, Ray) asks for no API key."""
        kuberay = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": self._name},
            "spec": {
                "podSelector": {"matchLabels": self._labels},
                "policyTypes": ["Ingress"],
                "ingress": [
                    {"ports": [{"protocol": "TCP", "port": self._port}]},
                    {
                        "from": [
                            {"podSelector": {"matchLabels": self._labels}},
                            {"namespaceSelector": {}, "podSelector": kuberay},
                        ]
                    },
                ],
            },
        }

    def disruption_budget(self, group: str, min_available: int) -> Json:
        """How many pods of a group the drain of a node leaves running. An integer: Kubernetes knows no share of the
        pods of a custom resource. Pods that are not ready may always go."""
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": f"{self._name}-{group}"},
            "spec": {
                "minAvailable": min_available,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": self._of_group(group)},
            },
        }

    def _of_group(self, group: str) -> dict[str, str]:
        return {**self._labels, "ray.io/group": group}

    def _head(self) -> Json:
        """The head pod keeps the cluster's books and runs no replica: losing a replica must not take the cluster along.
        KubeRay makes the Kubernetes service of HTTP only where the head names its port."""
        ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": self._port}
        head = self._pods.head
        resources = {"cpu": f"{head.cpus or 1:g}", "memory": head.memory or self._defaults["head"]}
        pod = self._pod("ray-head", ports, resources, head)
        pod["spec"]["containers"][0]["readinessProbe"] = _probe("/api/healthz", AGENT_PORT, 10)
        return {"rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"}, "template": pod}

    def worker_groups(self) -> list[Json]:
        """One pod a target replica, all its engine's workers in it, with room for the drafters, so that Ray can place
        one beside each target; drafters in pods of their own where a node has too few GPUs for both. A learner has
        one of its own."""
        settings, scaling = self._settings, self._settings.autoscaling
        bundles = settings.target_bundles()
        cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles) + settings.ingress.num_cpus
        gpus = sum(bundle.get("GPU", 0.0) for bundle in bundles)
        fewest, most = settings.target.num_replicas, settings.max_num_targets
        groups = []
        if settings.drafter is not None and (drafters := settings.drafter.replicas) is not None:
            num_beside, drafter_gpus = math.ceil(settings.max_num_drafters / most), drafters.num_gpus or 0.0
            if gpus + num_beside * drafter_gpus <= MAX_GPUS_PER_POD:
                cpus, gpus = cpus + num_beside * drafters.num_cpus, gpus + num_beside * drafter_gpus
            else:
                bounds = None if scaling is None else scaling.drafter
                numbers = (bounds.min, bounds.max) if bounds else (drafters.num_replicas, drafters.num_replicas)
                groups.append(self._workers("drafter", *numbers, drafters.num_cpus, drafter_gpus))
        if (learning := settings.learning) is not None:
            groups.append(self._workers("learner", 1, 1, learning.num_cpus, learning.num_gpus or 0.0))
        if scaling is not None:
            fewest = scaling.target.min
        return [self._workers("target", fewest, most, cpus, gpus), *groups]

    def _workers(self, group: str, fewest: int, most: int, cpus: float, gpus: float) -> Json:
        """A group of pods that each have room for `cpus` and `gpus` of Ray's. Raises UpError where they would not."""
        given, num_gpus = self._pods.workers, math.ceil(gpus)
        wanted = given.cpus or max(2, CPUS_PER_GPU * num_gpus, math.ceil(cpus))
        if wanted < cpus:
            raise UpError(f"kubernetes.workers.cpus is {wanted:g}, but Ray places {cpus:g} in a pod of {group}")
        resources = {"cpu": f"{wanted:g}", "memory": given.memory or self._defaults["worker"]}
        if num_gpus:
            resources["nvidia.com/gpu"] = str(num_gpus)
        pod = self._pod("ray-worker", {"serve": self._port}, resources, given)
        # Ready: HAProxy on this node has a replica to go to; nodes without a replica have no HAProxy. KubeRay's own
        # probe asks the same, and takes a pod out of the service for one slow answer.
        pod["spec"]["containers"][0]["readinessProbe"] = _probe("/-/healthz", "serve", 3)
        pod["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", DRAIN]}}}
        pod["spec"]["terminationGracePeriodSeconds"] = int(MAX_STREAM_S) + 30
        # Replicas on different nodes where there are several: a lost node takes one along.
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": self._of_group(group)},
        }
        pod["spec"] |= {"automountServiceAccountToken": False, "topologySpreadConstraints": [spread]}
        if self._pods.service_account is not None:
            pod["spec"]["serviceAccountName"] = self._pods.service_account
        return {
            "groupName": group,
            "replicas": fewest,
            "minReplicas": fewest,
            "maxReplicas": most,
            "rayStartParams": {},
            "template": pod,
        }

    def _pod(self, name: str, ports: dict[str, int], resources: dict[str, str], nodes: PodSettings) -> Json:
        """A pod template of one container, `name`."""
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **RAY_ENVIRONMENT}
        variables: list[Json] = [{"name": variable, "value": value} for variable, value in environment.items()]
        variables += [_secret(variable, KEYS_SECRET, variable) for variable in self.key_variables]
        # A container has 64 MB of /dev/shm by default.
        memory = {"medium": "Memory", "sizeLimit": self._pods.shared_memory or self._defaults["shared_memory"]}
        claims = self._pods.volumes
        mounts = {"/dev/shm": "shared-memory"} | {path: f"claim-{claim}" for path, claim in claims.items()}
        volumes: dict[str, Json] = {"shared-memory": {"emptyDir": memory}}
        volumes |= {f"claim-{claim}": {"persistentVolumeClaim": {"claimName": claim}} for claim in claims.values()}
        if self.key_files:  # Kubernetes renews mounted secrets, and replicas read them again
            mounts |= {str(path.parent): "keys" for path in self.key_files}
            volumes["keys"] = {"secret": {"secretName": KEYS_SECRET}}
        tolerations = [toleration.as_kubernetes() for toleration in nodes.tolerations]
        if self._settings.target.has_gpu:
            variables.append(_secret("HF_TOKEN", "hf-token", "token", optional=True))
        if "nvidia.com/gpu" in resources:
            tolerations.insert(0, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
            if CACHE not in claims:
                mounts[CACHE] = "cache"
                volumes["cache"] = {"emptyDir": {}}
        container = {
            "name": name,
            "image": self.image,
            "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
            "env": variables,
            # Requests equal limits: an engine that is squeezed for CPU or memory drags every request of its replica.
            "resources": {"requests": resources, "limits": resources},
            "securityContext": SECURITY,
            "volumeMounts": [{"name": volume, "mountPath": path} for path, volume in mounts.items()],
            # A dead Ray ends its container by itself. A hung one has 10 minutes, as KubeRay gives it: an engine that
            # compiles leaves other processes little time.
            "livenessProbe": _probe("/api/healthz", AGENT_PORT, 120),
        }
        found = {
            "imagePullSecrets": [{"name": secret} for secret in self._pods.image_pull_secrets],
            "nodeSelector": nodes.node_selector,
            "tolerations": tolerations,
            "securityContext": {"fsGroup": 1000},  # the group of the image's user may write to mounted volumes
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
        }
        return {"metadata": {"labels": self._labels}, "spec": {key: value for key, value in found.items() if value}}


def _probe(path: str, port: int | str, max_failures: int) -> Json:
    get = {"path": path, "port": port}
    times = {"initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": 5}
    return {"httpGet": get, **times, "failureThreshold": max_failures}


def _secret(variable: str, secret: str, key: str, **options: bool) -> Json:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, **options}}}


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the Serve config inside the manifest can be read; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _dump(*documents: Json) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
