"""`build(args)`: the whole application, from the settings under `args` of a YAML in `configs/`.

Everything that can be wrong with the settings is found here, before anything is loaded. Binds every deployment but the
gateway. Only the replicas import what they are made of: Serve builds the application in a process of its own, for
which vLLM and torch are by far the slowest to import.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ray import serve

import peagle.heads
from cluster.settings import OBJECT_STORES, Catalog, ClusterSettings, live_config, load_settings
from deployments import DRAFTER_NAME, LEARNER_NAME, ROUTER_NAME, TARGET_NAME, compat
from deployments.autoscaling import autoscaling_config
from deployments.replicas import MAX_DRAIN_S
from peagle.checkpoint import check_head, read_head_config
from peagle.config import read_json
from peagle.embedded import EMBEDDED_TARGETS
from peagle.schema import SettingsError
from peagle.vllm.engine_settings import openmp_preload
from peagle.vllm.setting_types import SettingTypes

HEALTH_CHECK_PERIOD_S = 2.0
"""Short (Serve's own is 10 s, and it asks three times): until a dead drafter, router or engine is replaced, targets
decode without drafts, choose K by the last policy update, or answer nothing."""

TARGET_REQUESTS = 1_000_000
"""Requests that Serve lets into a target replica at a time: no limit, so that `limits` refuses in OpenAI's form."""

ROUTER_REQUESTS = 1024
"""Calls that the router answers at a time: of targets, drafters, and readers of its metrics."""

LEARNER_TIMEOUT_S = 300.0
"""Timeout of the learner's health check. The learner gives way to every other process, so it may be slow to answer. A
learner that is replaced loses the answers that it kept."""

LEAST_GPU = 0.001
"""GPUs that a target replica's own process asks Ray for, so that it sees its bundle's GPU. The bundle reserves all of
that GPU."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application that `serve run` deploys: the target's replicas, which answer HTTP, with the router, and with
    `placement: remote` the drafter's.

    Each deployment gets what it uses: Serve starts the replicas of a deployment anew when what they are made from
    changes. What can change while requests run is its `user_config`.

    Raises:
        SettingsError: lists every problem of `args`.
        CompatError: another Ray than this was written for.
    """
    compat.check()
    settings = load_settings(args, catalog(), os.environ)
    check_files(settings)
    drafter = bind_drafter(settings)
    router = bind_router(settings, drafter, bind_learner(settings))
    return bind_target(settings, "deployments.target.HttpTarget", drafter, router)


def bind(replica: str | type, *args: Any, **options: Any) -> serve.Application:
    """A deployment of a class, or of the one at a path "package.module.Class"."""
    quiet = {"enable_access_log": False}  # else a line for each call by another replica, one a second
    options = {"health_check_period_s": HEALTH_CHECK_PERIOD_S, "logging_config": quiet, **options}
    deployment: Any = serve.deployment(object, **options)
    bound: serve.Application = deployment.options(func_or_class=replica).bind(*args)
    return bound


def bind_target(
    settings: ClusterSettings, replica: str | type, *handles: serve.Application | None
) -> serve.Application:
    """The deployment of targets; `handles`: of drafter and router."""
    return bind(replica, settings, *handles, **target_options(settings))


def target_options(settings: ClusterSettings) -> dict[str, Any]:
    """Serve's options of the targets, with resources as `ray.serve.llm` gives them."""
    target, scaling = settings.target, autoscaling_config(settings, TARGET_NAME)
    # One worker runs in the replica's own process tree, which sees the GPU of its bundle as soon as it asks for any of
    # it. Several are actors of their own, and take their bundles whole.
    sees_gpu = {"num_gpus": LEAST_GPU} if target.has_gpu and settings.num_workers == 1 else {}
    actor = {"num_cpus": target.num_cpus, **sees_gpu, "runtime_env": {"env_vars": replica_env(settings)}}
    return {
        "name": TARGET_NAME,
        **({"num_replicas": target.num_replicas} if scaling is None else {"autoscaling_config": scaling}),
        "graceful_shutdown_timeout_s": compat.MAX_STREAM_S,
        "max_ongoing_requests": TARGET_REQUESTS,
        "ray_actor_options": actor,
        "placement_group_bundles": settings.target_bundles(),
        "placement_group_strategy": "PACK",
        "user_config": live_config(settings),
    }


def replica_env(settings: ClusterSettings) -> dict[str, str]:
    """Environment variables of a target replica and its engine.

    Serve runs a replica's code in a thread of its own by default, from which each chunk of a stream would cross over.
    On a CPU, vLLM's speculative decoding wants Intel's OpenMP runtime loaded before any other (vLLM warns without it),
    and the KV cache gets a size of its own (in GiB). Workers that are actors of their own ask Ray for their share of a
    GPU, where vLLM would wait for a whole one. `target.env` wins over all.
    """
    env = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    if settings.num_workers == 1 and not settings.engine.get("numa_bind"):  # vLLM binds spawned processes alone
        env[compat.SETUP_HOOK_ENV] = "deployments.compat.start_fork_server"
    if 0 < (num_gpus := settings.target.bundle.get("GPU", 0.0)) < 1:
        env["VLLM_RAY_PER_WORKER_GPUS"] = str(num_gpus)
    if not settings.target.has_gpu:
        if preload := openmp_preload(os.environ.get("LD_PRELOAD", "")):
            env["LD_PRELOAD"] = preload
        if settings.drafter is not None and settings.drafter.is_remote:
            env["KMP_BLOCKTIME"] = "1"  # ms that threads spin behind their work: the drafter needs the cores
        env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    return {**env, **settings.target.env}


def bind_router(settings: ClusterSettings, *handles: serve.Application | None) -> serve.Application:
    """The deployment of the router; `handles`: of drafter and learner."""
    return bind(
        "deployments.router.Router",
        settings,
        *handles,
        name=ROUTER_NAME,
        num_replicas=1,
        max_ongoing_requests=ROUTER_REQUESTS,
        ray_actor_options={"num_cpus": settings.ingress.num_cpus},
        user_config=live_config(settings),
    )


def bind_drafter(settings: ClusterSettings) -> serve.Application | None:
    """The deployment of remote drafters; None where drafters run in the targets' engines."""
    if settings.drafter is None or (replicas := settings.drafter.replicas) is None:
        return None
    scaling = autoscaling_config(settings, DRAFTER_NAME)
    number = {"num_replicas": replicas.num_replicas} if scaling is None else {"autoscaling_config": scaling}
    actor = {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus}
    return bind(
        "deployments.drafter.DrafterReplica",
        settings,
        name=DRAFTER_NAME,
        **number,
        user_config={},  # Serve says nothing to replicas when a config file no longer has one
        ray_actor_options={**actor, "runtime_env": {"env_vars": dict(replicas.env)}},
        graceful_shutdown_timeout_s=MAX_DRAIN_S + 10,
    )


def bind_learner(settings: ClusterSettings) -> serve.Application | None:
    """The deployment that trains heads on; None without a section `learning`."""
    if (learning := settings.learning) is None:
        return None
    return bind(
        "deployments.learner.Learner",
        settings,
        name=LEARNER_NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": learning.num_cpus, "num_gpus": learning.num_gpus},
        health_check_timeout_s=LEARNER_TIMEOUT_S,
    )


def catalog() -> Catalog:
    """What this installation has: embedded models, shipped heads, and vLLM's settings."""
    return Catalog(
        frozenset(EMBEDDED_TARGETS),
        Path(peagle.heads.__file__).parent,
        read_head_config,
        SettingTypes.read("engine/arg_utils:AsyncEngineArgs", "entrypoints/launchers/cli_args:BaseFrontendArgs"),
        SettingTypes.read("config/speculative:SpeculativeConfig"),
    )


def check_files(settings: ClusterSettings) -> None:
    """Check the head (`check_heads`), the reader of object stores, and the learner's recipe, which needs torch. Raises
    SettingsError, which lists every problem."""
    check_heads(settings)
    sources = [settings.model.source, *([settings.drafter.head] if settings.drafter is not None else [])]
    if any(name.startswith(OBJECT_STORES) for name in sources) and find_spec("runai_model_streamer") is None:
        raise SettingsError(["checkpoints in object stores need a package here: pip install 'vllm[runai]'"])
    if settings.learning is not None:
        from peagle.train.continual import continual_recipe  # it needs torch

        try:
            continual_recipe(settings.learning.recipe)
        except ValueError as error:
            raise SettingsError([f"learning.recipe: {error}"]) from error


def check_heads(settings: ClusterSettings) -> None:
    """Check the head's files without loading them, and that they fit the target where that one's sizes are at hand.
    Raises SettingsError for a damaged or missing file, wrong tensors, or a head for another target."""
    if settings.drafter is None or settings.drafter.is_vllms_own:
        return
    embedded = EMBEDDED_TARGETS.get(settings.model.source)
    target_config = Path(settings.model.source) / "config.json"
    folder = peagle.heads.shipped_heads().get(settings.drafter.head, Path(settings.drafter.head))
    if not folder.is_dir():
        return
    try:
        target = None if embedded is None else dict(embedded.shape)
        if target_config.is_file():
            target = read_json(target_config, "target")
        check_head(folder, target)
    except (ValueError, OSError) as error:
        raise SettingsError([f"drafter.head: {error}"]) from error
