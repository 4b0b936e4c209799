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
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.serve.llm import build_llm_deployment
from ray.serve.llm.ingress import make_fastapi_ingress

import peagle.heads
from cluster.loading import Catalog, SettingsError, load_settings
from cluster.settings import ClusterSettings
from deployments.depth import step_times
from deployments.engine_config import engine_config
from deployments.ingress import ENDPOINTS, Ingress, make_api
from deployments.names import INGRESS_NAME, TARGET_NAME
from deployments.target import TargetServer
from peagle.embedded import embedded_targets
from peagle.head_files import check_head


def build(args: dict[str, Any]) -> serve.Application:
    """The application that `serve run` deploys: an ingress and the target's replicas.

    Raises:
        SettingsError: lists every problem of `args`.
    """
    settings = load_settings(args, catalog(), os.environ)
    check_files(settings)
    times = step_times(settings)
    sizing = engine_config(settings)
    target = build_llm_deployment(
        sizing,
        bind_kwargs={"settings": settings, "times": times},
        deployment_cls=TargetServer,
        # The ingress logs every HTTP request; the target would log its own once-a-second health question.
        override_serve_options={"name": TARGET_NAME, "logging_config": {"enable_access_log": False}},
    )
    ingress: Any = serve.deployment(
        make_fastapi_ingress(Ingress, endpoint_map=ENDPOINTS, app=make_api(settings)),
        name=INGRESS_NAME,
        num_replicas=settings.ingress.num_replicas,
        max_ongoing_requests=settings.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.ingress.num_cpus},
    )
    model_id = settings.model.id
    application: serve.Application = ingress.bind(
        llm_deployments={model_id: target},
        model_cards={model_id: to_model_metadata(model_id, sizing)},
        settings=settings,
        times=times,
    )
    return application


def catalog() -> Catalog:
    """What this installation has: embedded models, shipped heads, and the engine's arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    names = {field.name for record in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(record)}
    return Catalog(frozenset(embedded_targets()), Path(peagle.heads.__file__).parent, frozenset(names))


def check_files(settings: ClusterSettings) -> None:
    """Check a head's files without loading them, and that it fits the target where that one's config is at hand.

    Raises:
        SettingsError: a damaged or missing file, wrong tensors, or a head for another target.
    """
    if settings.drafter is None:
        return
    head = settings.drafter.head
    folder = peagle.heads.shipped_heads().get(head, Path(head))
    if not folder.is_dir():
        return
    target_config = Path(settings.model.source) / "config.json"
    try:
        target = json.loads(target_config.read_text()) if target_config.is_file() else None
        check_head(folder, target)
    except ValueError as error:
        raise SettingsError([f"drafter.head: {error}"]) from error
