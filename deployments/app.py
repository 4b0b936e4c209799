"""`build(args)`: the whole application, from the settings under `args` of a YAML in `configs/`.

Everything that can be wrong with the settings is found here, before anything is loaded. Binds every deployment; nothing
else does.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.llm import build_llm_deployment

import peagle.heads
from cluster.settings import Catalog, ClusterSettings, live_config, load_settings
from deployments import DRAFTER_NAME, INGRESS_NAME, LEARNER_NAME, ROUTER_NAME, TARGET_NAME, compat
from deployments.autoscaling import drafter_autoscaling
from deployments.drafter import MAX_DRAIN_S, DrafterReplica
from deployments.ingress import Ingress
from deployments.learner import Learner
from deployments.router import Router
from deployments.target import TargetServer, engine_config
from peagle.checkpoint import check_head, read_head_config
from peagle.embedded import embedded_targets
from peagle.schema import SettingsError
from peagle.train.continual import continual_recipe

HEALTH_CHECK_PERIOD_S = 2.0
"""A drafter or a router that died is noticed and replaced soon: until then targets decode without drafts, or choose K
by the last guidance. So is a target whose engine died (Serve's own period is 10 s, and it asks three times)."""

LEARNER_TIMEOUT_S = 300.0
"""It gives way to every other process, so it may be slow to answer; a replica that is replaced forgets what it kept."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application that `serve run` deploys: the target's replicas, which answer HTTP, with the router, and with
    `placement: remote` the drafter's; or, with `ingress.num_replicas`, ingress replicas before the targets.

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
    if settings.ingress.num_replicas:
        target = bind_target(settings, TargetServer, drafter=drafter)
        return bind_router(settings, serve.ingress(None)(Ingress), INGRESS_NAME, drafter, target)
    router = bind_router(settings, Router, ROUTER_NAME, drafter, None, bind_learner(settings))
    return bind_target(settings, serve.ingress(None)(TargetServer), drafter=drafter, router=router)


def bind_target(
    settings: ClusterSettings, server: type[TargetServer], **handles: serve.Application | None
) -> serve.Application:
    """The deployment of targets; `handles`: of what its replicas talk to."""
    return build_llm_deployment(
        engine_config(settings),
        bind_kwargs={"settings": settings, **handles},
        deployment_cls=server,
        override_serve_options={
            "name": TARGET_NAME,
            "user_config": live_config(settings),
            "health_check_period_s": HEALTH_CHECK_PERIOD_S,
            "logging_config": {"enable_access_log": False},  # a line a second, of the router's questions, otherwise
        },
    )


def bind_router(
    settings: ClusterSettings, router: type[Router], name: str, *handles: serve.Application | None
) -> serve.Application:
    """The deployment of the router, or of ingress replicas; `handles`: of drafter and target."""
    deployment: Any = serve.deployment(
        router,
        name=name,
        num_replicas=max(1, settings.ingress.num_replicas),
        max_ongoing_requests=settings.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.ingress.num_cpus},
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        user_config=live_config(settings),
        logging_config={"enable_access_log": name == INGRESS_NAME},
    )
    bound: serve.Application = deployment.bind(settings, *handles)
    return bound


def bind_drafter(settings: ClusterSettings) -> serve.Application | None:
    """The deployment of remote drafters; None where drafters run in the targets' engines."""
    if settings.drafter is None or not settings.drafter.is_remote:
        return None
    replicas = settings.drafter.replicas
    assert replicas is not None
    scaling = drafter_autoscaling(settings)
    deployment: Any = serve.deployment(
        DrafterReplica,
        name=DRAFTER_NAME,
        **({"num_replicas": replicas.num_replicas} if scaling is None else {"autoscaling_config": scaling}),
        ray_actor_options={
            "num_cpus": replicas.num_cpus,
            "num_gpus": replicas.num_gpus,
            "runtime_env": {"env_vars": dict(replicas.env)},
        },
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=MAX_DRAIN_S + 10,
        logging_config={"enable_access_log": False},  # one line a second and target otherwise
    )
    bound: serve.Application = deployment.bind(settings)
    return bound


def bind_learner(settings: ClusterSettings) -> serve.Application | None:
    """The deployment that trains heads on; None without a section `learning`."""
    learning = settings.learning
    if learning is None:
        return None
    deployment: Any = serve.deployment(
        Learner,
        name=LEARNER_NAME,
        num_replicas=1,
        ray_actor_options={"num_cpus": learning.num_cpus, "num_gpus": learning.num_gpus},
        health_check_timeout_s=LEARNER_TIMEOUT_S,
        logging_config={"enable_access_log": False},
    )
    bound: serve.Application = deployment.bind(settings)
    return bound


def catalog() -> Catalog:
    """What this installation has: embedded models, shipped heads, and the names of vLLM's settings."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    def names_of(*records: type) -> frozenset[str]:
        return frozenset(field.name for record in records for field in dataclasses.fields(record))

    return Catalog(
        frozenset(embedded_targets()),
        Path(peagle.heads.__file__).parent,
        read_head_config,
        engine_keys=names_of(AsyncEngineArgs, FrontendArgs),
        draft_keys=names_of(SpeculativeConfig),
    )


def check_files(settings: ClusterSettings) -> None:
    """Check the heads' files without loading them, and that they fit the target where that one's config is at hand.

    Raises:
        SettingsError: a damaged or missing file, wrong tensors, or a head for another target.
    """
    if settings.drafter is None:
        return
    target_config = Path(settings.model.source) / "config.json"
    named = {"drafter.head": settings.drafter.head} | {
        f"drafter.heads_by_workload.{workload}": head for workload, head in settings.drafter.heads_by_workload.items()
    }
    problems = []
    for key, head in named.items():
        folder = peagle.heads.shipped_heads().get(head, Path(head))
        if not folder.is_dir():
            continue
        try:
            target = json.loads(target_config.read_text()) if target_config.is_file() else None
            check_head(folder, target)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if settings.learning is not None:
        try:
            continual_recipe(settings.learning.recipe)
        except ValueError as error:
            problems.append(f"learning.recipe: {error}")
    if problems:
        raise SettingsError(problems)
