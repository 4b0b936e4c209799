"""``peagle manifest configs/local.yaml``: what KubeRay needs to run a config, as YAML: the RayService, a NetworkPolicy
and PodDisruptionBudgets.

What enters: a Serve config file of `configs/`. What leaves: manifests whose `serveConfigV2` is that file and whose pods
are sized from its settings, so nothing is written twice. The objects stand in `manifest.yaml.j2`. No secret is in them:
pods refer to Kubernetes Secrets. By default memory and CPUs of pods with GPUs are room to start with, not measured: the
section `kubernetes` sets them.
"""

import importlib.metadata
import math
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml

from cluster.settings import ClusterSettings, PodSettings, key_variables
from deployments.compat import MAX_STREAM_S, RAY_ENVIRONMENT
from deployments.serve_config import ConfigError, gateway_application, live_form, model_applications, read_config
from peagle import __version__
from peagle.heads import shipped_heads

Json = dict[str, Any]

CPUS_PER_GPU = 8
MAX_GPUS_PER_POD = 8
"""GPUs of a usual node. Drafters that do not fit beside their target get pods of their own."""

KEYS_SECRET = "peagle-keys"
"""Holds callers' API keys, each under the name of its environment variable."""

CACHE = "/home/ray/.cache"
"""Where a pod keeps the checkpoints that it downloads. With GPUs it is a volume, if `kubernetes.volumes` has none."""

IMAGE_FOLDERS = "/bin", "/dev", "/etc/ssl", "/lib", "/lib64", "/opt/peagle", "/proc", "/sbin", "/sys", "/usr"
"""Folders that a pod needs as its image has them."""

# One replica on CPUs was seen to need about 6.5 GB with the embedded target (engine 4.1 GB; replica, router and proxy
# 0.7 GB to 0.9 GB each; the object store apart), and a drafter beside it 1.1 GB. The limit leaves room for longer
# contexts.
CPU = {"image": f"peagle-serve:{__version__}-cpu", "head": "4Gi", "worker": "10Gi", "shared_memory": "1Gi"}
GPU = {"image": f"peagle-serve:{__version__}-gpu", "head": "8Gi", "worker": "64Gi", "shared_memory": "8Gi"}
"""Image, memory of head and worker pods, and /dev/shm (Ray's object store and the engine's own segments), where the
settings say nothing else."""


def render(path: Path) -> str:
    """The manifest of a config's service. Raises ConfigError or ValueError for a wrong config."""
    config, settings, *others = read_config(path, is_here=False)
    if others or gateway_application(config) is not None:
        remedy = "write a file for each model, without a gateway, and let the Ingress choose by path"
        raise ConfigError(f"{path.name} serves several models: {remedy}")
    if not re.fullmatch(r"[a-z0-9-]{1,40}(?<!-)", path.stem):
        raise ConfigError(f"{path.name} names the RayService: rename it to small letters, digits and -, at most 40")
    check_folders(config, settings)
    service = Manifest(f"peagle-{path.stem}", config, settings)
    header = f"# Made from {path.name} by `peagle manifest`; do not edit by hand.\n"
    header += f"# Needs KubeRay 1.5.1 or later and the image {service.image}.\n"
    if keys := [*service.key_variables, *(path.name for path in service.key_files)]:
        header += f"# Needs a secret {KEYS_SECRET} with callers' API keys: {', '.join(keys)}.\n"
    if claims := sorted(set(settings.kubernetes.volumes.values())):
        header += f"# Needs the PersistentVolumeClaims {', '.join(claims)}, of an access mode for many nodes.\n"
    if settings.target.has_gpu:
        header += (
            "# Needs NVIDIA's device plugin on the nodes; for gated models a secret hf-token with the key token.\n"
        )
    return header + _dump(*yaml.safe_load_all(service.render()))


def check_folders(config: Json, settings: ClusterSettings) -> None:
    """Raises ConfigError for a checkpoint, or conversations to replay, in a folder of this machine: pods have the
    folders of `kubernetes.volumes`, and those of `kubernetes.image`, which are not known here. What is to be written,
    such as `learning.heads_dir`, each pod makes for itself."""
    if settings.kubernetes.image is not None:
        return
    named = {"model.source": settings.model.source}
    if settings.drafter is not None:
        named["drafter.head"] = settings.drafter.head
    if settings.learning is not None and settings.learning.replay:
        named["learning.replay"] = str(Path(settings.learning.replay).expanduser().resolve())
    for given in model_applications(config)[0].get("deployments") or ():
        head = (given.get("user_config") or {}).get("head")
        if head and head not in shipped_heads() and (folder := Path(head).expanduser()).is_dir():
            named[f"deployments.{given['name']}.user_config.head"] = str(folder.resolve())
    for key, place in named.items():
        path = Path(place or "")
        if path.is_absolute() and not any(path.is_relative_to(folder) for folder in settings.kubernetes.volumes):
            remedy = "write kubernetes.volumes with a claim for a folder above it, or kubernetes.image, which has it"
            raise ConfigError(f"{key} is {path}, a folder of this machine that pods do not have: {remedy}")


class Manifest:
    """The Kubernetes objects of one service; `name` is theirs."""

    def __init__(self, name: str, config: Json, settings: ClusterSettings) -> None:
        self._name, self._config, self._settings, self._pods = name, config, settings, settings.kubernetes
        self._args: Json = model_applications(config)[0].get("args") or {}
        self._port = int(config.get("http_options", {}).get("port", 8000))
        self.key_variables = key_variables(self._args)
        self.key_files = [Path(one.key_file) for one in (settings.callers or {}).values() if one.key_file]
        self._defaults = GPU if settings.target.has_gpu else CPU
        self.image = settings.kubernetes.image or self._defaults["image"]

    def render(self) -> str:
        templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # YAML
        )
        templates.policies["json.dumps_kwargs"] = {"sort_keys": False}
        head, groups = self._pods.head, self.worker_groups()
        resources = {"cpu": f"{head.cpus or 1:g}", "memory": head.memory or self._defaults["head"]}
        return templates.get_template("manifest.yaml.j2").render(
            name=self._name,
            image=self.image,
            port=self._port,
            pods=self._pods,
            has_gpu=self._settings.target.has_gpu,
            is_autoscaled=self._settings.autoscaling is not None,
            serve_config=_dump(self.serve_config()),
            ray_version=importlib.metadata.version("ray"),
            environment={"RAY_USAGE_STATS_ENABLED": "0", **RAY_ENVIRONMENT},
            key_variables=self.key_variables,
            keys_secret=KEYS_SECRET,
            max_stream_s=int(MAX_STREAM_S),
            head=self._pod(resources, head),
            groups=groups,
            budgets={"headgroup": 1} | {group["name"]: max(1, group["fewest"] - 1) for group in groups},
        )

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

    def worker_groups(self) -> list[Json]:
        """One pod a target replica, all its engine's workers in it, with room for the drafters, so that Ray can place
        one beside each target; drafters in pods of their own where a node has too few GPUs for both. A learner has
        one of its own."""
        settings, scaling = self._settings, self._settings.autoscaling
        bundles = settings.target_bundles()
        cpus = sum(bundle.get("CPU", 0.0) for bundle in bundles) + settings.ingress.num_cpus
        gpus = sum(bundle.get("GPU", 0.0) for bundle in bundles)
        fewest = settings.target.num_replicas if scaling is None else scaling.target.min
        most = settings.max_num_targets
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
        return [self._workers("target", fewest, most, cpus, gpus), *groups]

    def _workers(self, group: str, fewest: int, most: int, cpus: float, gpus: float) -> Json:
        """Pods that each have room for `cpus` and `gpus` of Ray's. Raises ConfigError where they would not."""
        given, num_gpus = self._pods.workers, math.ceil(gpus)
        wanted = given.cpus or max(2, CPUS_PER_GPU * num_gpus, math.ceil(cpus))
        if wanted < cpus:
            raise ConfigError(f"kubernetes.workers.cpus is {wanted:g}, but Ray places {cpus:g} in a pod of {group}")
        resources = {"cpu": f"{wanted:g}", "memory": given.memory or self._defaults["worker"]}
        if num_gpus:
            resources["nvidia.com/gpu"] = str(num_gpus)
        return {"name": group, "fewest": fewest, "most": most, **self._pod(resources, given)}

    def _pod(self, resources: dict[str, str], nodes: PodSettings) -> Json:
        """Resources, nodes and volumes of a pod."""
        # A container has 64 MB of /dev/shm by default.
        memory = {"medium": "Memory", "sizeLimit": self._pods.shared_memory or self._defaults["shared_memory"]}
        claims = self._pods.volumes
        mounts = {"/dev/shm": "shared-memory"} | {path: f"claim-{claim}" for path, claim in claims.items()}
        volumes: dict[str, Json] = {"shared-memory": {"emptyDir": memory}}
        volumes |= {f"claim-{claim}": {"persistentVolumeClaim": {"claimName": claim}} for claim in claims.values()}
        for path in self.key_files:
            used = map(Path, (*mounts, CACHE, "/tmp/ray", *IMAGE_FOLDERS))
            is_within = any(path.is_relative_to(folder) for folder in IMAGE_FOLDERS)
            if is_within or any(folder.is_relative_to(path.parent) for folder in used):
                remedy = "name a folder that nothing else is in, such as /etc/peagle/keys"
                raise ConfigError(f"callers: the secret with {path} would hide what {path.parent} holds: {remedy}")
        if self.key_files:  # Kubernetes renews mounted secrets, and replicas read them again
            mounts |= {str(path.parent): "keys" for path in self.key_files}
            volumes["keys"] = {"secret": {"secretName": KEYS_SECRET}}
        tolerations = [toleration.as_kubernetes() for toleration in nodes.tolerations]
        if "nvidia.com/gpu" in resources:
            tolerations.insert(0, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
            if CACHE not in claims:
                mounts[CACHE] = "cache"
                volumes["cache"] = {"emptyDir": {}}
        return {
            "resources": resources,
            "node_selector": nodes.node_selector,
            "tolerations": tolerations,
            "mounts": mounts,
            "volumes": volumes,
        }


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that the Serve config inside the manifest can be read; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _dump(*documents: Json) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
