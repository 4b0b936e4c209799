"""How a target replica is built from the settings: checkpoints, environment, and `ray.serve.llm`'s LLMConfig."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ray.serve.llm import LLMConfig

from cluster.settings import ClusterSettings
from deployments.autoscaling import MAX_STREAM_S, target_autoscaling
from peagle.embedded import embedded_targets, prepare_target
from peagle.heads import prepare_head
from peagle.vllm.engine import MAX_SMALL_MACHINE_CORES, RemoteSettings, engine_kwargs, openmp_preload

# ====================================================================================================
# The target's and the heads' checkpoints on this node: converted, joined or downloaded when they are not there yet.
#
# Imports neither vLLM nor `ray.serve.llm`: a drafter's replica starts without them.


def target_source(source: str) -> str:
    """What vLLM loads for `model.source`: the directory of an embedded model, made ready here, else the source."""
    return str(prepare_target(source)) if source in embedded_targets() else source


def head_directory(head: str, target: str) -> Path:
    """The directory of a head made ready for the target, `target_source` of which is given.

    Raises:
        ValueError: a damaged file, or a head for another target.
    """
    return prepare_head(local_directory(head) or head, local_directory(target) or Path(target))


def local_directory(source: str) -> Path | None:
    """The local directory of a Hugging Face id, downloaded when need be; None for a shipped name."""
    if Path(source).is_dir():
        return Path(source)
    if "/" not in source:
        return None
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source))


# ====================================================================================================
# How a target replica is built from the settings: checkpoints, environment, and `ray.serve.llm`'s LLMConfig.


def on_cpu(settings: ClusterSettings) -> bool:
    """Whether the target runs without a GPU."""
    return not settings.target.has_gpu


def prepare(settings: ClusterSettings) -> tuple[str, Path | None]:
    """Make the target and the head ready on this node: convert, join, or download what is not in the cache yet.

    Returns what vLLM loads: the target's directory or Hugging Face id, and the head's directory.

    Raises:
        ValueError: a damaged file, or a head for another target.
    """
    target = target_source(settings.model.source)
    return target, None if settings.drafter is None else head_directory(settings.drafter.head, target)


def replica_env(settings: ClusterSettings, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables of a replica and its engine.

    On a CPU, vLLM's speculative decoding wants Intel's OpenMP runtime loaded before any other (vLLM warns without it),
    and the KV cache gets a size of its own (in GiB). `target.env` wins over both.
    """
    env: dict[str, str] = {}
    if on_cpu(settings):
        if preload := openmp_preload(inherited.get("LD_PRELOAD", "")):
            env["LD_PRELOAD"] = preload
        env["VLLM_CPU_KVCACHE_SPACE"] = inherited.get("VLLM_CPU_KVCACHE_SPACE", "1")
    return {**env, **settings.target.env}


def use_all_cores_of_a_small_machine(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let vLLM's CPU worker compute on every core where there are few. To be called on the replica's own node.

    By itself vLLM keeps one core free for its other processes, which mostly wait: on two cores that halves the speed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= MAX_SMALL_MACHINE_CORES:
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(str(core) for core in cores))


def engine_config(
    settings: ClusterSettings,
    target: str | None = None,
    head_dir: Path | None = None,
) -> LLMConfig:
    """`ray.serve.llm`'s configuration of a target replica.

    Without `target` it sizes the deployment (resources, environment, replicas) and its engine must not be started.
    """
    extra = dict(settings.engine)
    dtype = extra.pop("dtype", "auto")
    drafter = settings.drafter if head_dir is not None else None
    links = None if drafter is None or not drafter.is_remote else drafter.links
    kwargs = engine_kwargs(
        None,
        head_dir,
        max_draft_tokens=None if drafter is None else drafter.max_draft_tokens,
        parallel_drafting=None if drafter is None else drafter.parallel_drafting,
        dtype=dtype,
        async_scheduling=not on_cpu(settings),
        on_cpu=on_cpu(settings),
        remote=None if links is None else RemoteSettings(links.min_deadline_ms / 1000, links.max_deadline_ms / 1000),
        extra=extra,
    )
    if drafter is not None:
        kwargs["speculative_config"] |= drafter.engine_options
    return LLMConfig(
        model_loading_config={"model_id": settings.model.id, "model_source": target or settings.model.source},
        engine_kwargs=kwargs,
        accelerator_type=settings.target.accelerator_type,
        placement_group_config={"bundle_per_worker": dict(settings.target.bundle)},
        runtime_env={"env_vars": replica_env(settings)},
        deployment_config=_deployment_options(settings),
        experimental_configs={"stream_batching_interval_ms": 0},
    )


def _deployment_options(settings: ClusterSettings) -> dict[str, Any]:
    scaling = target_autoscaling(settings)
    replicas: dict[str, Any] = {"num_replicas": settings.target.num_replicas}
    if scaling is not None:
        replicas = {"autoscaling_config": scaling, "graceful_shutdown_timeout_s": MAX_STREAM_S}
    return {
        **replicas,
        "max_ongoing_requests": settings.target.max_ongoing_requests,
        "ray_actor_options": {"num_cpus": settings.target.num_cpus},
    }
