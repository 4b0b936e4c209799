"""The Serve config file of a service: read and checked, in the form that can be changed live, and what it asks for.

Enters: a YAML file. Leaves: its content with the `ClusterSettings` of each application, or a `ConfigError` that names
what is wrong. Starts nothing, and needs no Ray cluster.
"""

import copy
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.settings import (
    OBJECT_STORES,
    SPECULATIVE_CONFIG_ENV,
    ClusterSettings,
    key_variables,
    live_config,
    load_settings,
    pod_directories,
    swapped,
)
from deployments import DRAFTER_NAME, LEARNER_NAME, ROUTER_NAME, TARGET_NAME
from deployments.app import catalog, check_heads
from deployments.gateway import GATEWAY_PATH, GatewaySettings
from peagle.schema import listed, nearest, problem_lines, read_yaml

SERVICE_PATH = "deployments.app:build"

OWNED_OPTIONS = {
    "num_replicas": "set target.num_replicas or drafter.replicas.num_replicas under args",
    "autoscaling_config": "set autoscaling under args",
    "user_config": "set callers, limits and num_draft_tokens under args",
    "max_ongoing_requests": "set limits under args",
    "ray_actor_options": "set num_cpus, bundle and env of target, drafter.replicas or ingress under args",
    "placement_group_bundles": "set target.bundle under args",
    "max_replicas_per_node": "Serve takes it for deployments without placement groups only",
    "request_router_config": "see docs/configuration.md#environment-of-ray",
}
"""Options of Serve that a deployment cannot have from a user, each with what to do instead."""

Config = Mapping[str, Any]
"""Content of a Serve config file."""
Services = Sequence[ClusterSettings]


class ConfigError(ValueError):
    """The config cannot be served; the message says why."""


def read_config(path: Path, *, is_here: bool = True) -> tuple[Any, ...]:
    """A Serve config file, and the `ClusterSettings` under `args` of each application that serves a model, checked
    without loading anything. What stands there of a gateway is checked too.

    What does not run here has callers' keys and the volumes of its pods elsewhere: then the name of each environment
    variable that is to hold a key stands for the key, and directories in volumes are taken as they are.

    A drafter that the environment variable SM_VLLM_SPECULATIVE_CONFIG names here is written into `args`: the processes
    of a cluster have environments of their own.

    Raises ConfigError for a file that is missing, no YAML or no Serve config, SettingsError for wrong settings.
    """
    try:
        config = read_yaml(path.read_bytes(), path)
        if isinstance(config, dict) and "applications" not in config and {"target", "data"} <= config.keys():
            raise ConfigError(f"{path} is a recipe of training: `peagle train {path}`")
        ServeDeploySchema.model_validate(config, extra="forbid")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        places = [".".join(map(str, one["loc"])) if one["type"] == "value_error" else "" for one in error.errors()]
        lines = [
            f"{place}: {line}" if place else line  # Ray's own texts do not name it
            for place, line in zip(places, problem_lines(error, ServeDeploySchema), strict=True)
        ]
        sections = listed(ClusterSettings.model_fields)
        if any(one["loc"] and one["loc"][-1] in {"args", *ClusterSettings.model_fields} for one in error.errors()):
            lines.append(f"the service's own keys, {sections}, stand under args of applications")
        raise ConfigError("\n  - ".join([f"{path} is not a Ray Serve config file:", *lines])) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not 0 < (port := http_address(config)[1]) < 2**16:
        raise ConfigError(f"{path}: http_options.port is {port}: write a port from 1 to 65535")
    for index, application in enumerate(config["applications"]):
        application.setdefault("name", "default")
        if not re.fullmatch(r"(/[^/{}]+)+|/", prefix := application.get("route_prefix", "/") or ""):
            remedy = "write a path such as /coder, without / at its end"
            raise ConfigError(f"{path}: applications.{index}.route_prefix is {prefix!r}: {remedy}")
        given, known = application["import_path"], (SERVICE_PATH, GATEWAY_PATH)
        if given.startswith("deployments") and given not in known:  # others may build the service in a module of theirs
            raise ConfigError(f"{path}: applications.{index}.import_path: no {given}{nearest(given, known)}")
    if not config["applications"]:
        raise ConfigError(f"{path}: applications is empty, there is nothing to serve")
    services = [_read_application(application, is_here) for application in model_applications(config)]
    if (gateway := gateway_application(config)) is not None:
        prefixes = [application.get("route_prefix") for application in model_applications(config)]
        served = dict(zip(prefixes, (settings.model for settings in services), strict=True))
        for name, prefix in GatewaySettings.read(gateway.get("args") or {}).models.items():
            if prefix not in served:
                raise ConfigError(f"{path}: models.{name}: no application has the route_prefix {prefix}")
            if name not in (ids := [served[prefix].id, *served[prefix].aliases]):
                raise ConfigError(f"{path}: models.{name}: the application at {prefix} serves {listed(ids)}")
    elif len(services) > 1:
        raise ConfigError(f"{path}: several applications need one more in front of them, {GATEWAY_PATH}")
    states = [settings.num_draft_tokens.state for settings in services if settings.num_draft_tokens.state is not None]
    if len(set(states)) < len(states):
        raise ConfigError(
            f"{path}: two applications have the num_draft_tokens.state {max(states, key=states.count)}: "
            "name a file each"
        )
    return config, *services


def gateway_application(config: Config) -> dict[str, Any] | None:
    """The application in front of those of several models."""
    return next((one for one in config["applications"] if one["import_path"] == GATEWAY_PATH), None)


def model_applications(config: Config) -> list[dict[str, Any]]:
    return [application for application in config["applications"] if application["import_path"] != GATEWAY_PATH]


def _read_application(application: dict[str, Any], is_here: bool) -> ClusterSettings:
    """The settings of one application, whose `args` get the drafter of SM_VLLM_SPECULATIVE_CONFIG."""
    args = application.setdefault("args", {})
    env, known = dict(os.environ), catalog()
    if not is_here:
        env |= {name: name for name in key_variables(args)}
        known = replace(known, elsewhere=pod_directories(args))
    settings = load_settings(args, known, env)
    check_heads(settings)
    names = [TARGET_NAME, ROUTER_NAME]
    if settings.drafter is not None and settings.drafter.is_remote:
        names.append(DRAFTER_NAME)
    if settings.learning is not None:
        names.append(LEARNER_NAME)
    for given in application.get("deployments") or ():
        if given["name"] not in names:
            needs = {DRAFTER_NAME: "drafter.placement: remote", LEARNER_NAME: "a section learning"}.get(given["name"])
            hint = f": it needs {needs}" if needs else nearest(given["name"], names)
            raise ConfigError(f"deployments: {given['name']} is not one of {listed(names)}{hint}")
        is_drafter = given["name"] == DRAFTER_NAME
        free = ("name", "logging_config", "health_check_", "graceful_shutdown_", *(["user_config"] * is_drafter))
        free += ("max_replicas_per_node",) * (given["name"] != TARGET_NAME)
        if owned := [key for key in given if not key.startswith(free)]:
            remedy = OWNED_OPTIONS.get(owned[0], "the service needs its own; see docs/configuration.md")
            raise ConfigError(f"deployments.{given['name']}.{owned[0]} is not yours to set: {remedy}")
        if settings.drafter is not None and is_drafter and given.get("user_config"):
            drafter = swapped(settings.drafter, given["user_config"], known)
            check_heads(settings.model_copy(update={"drafter": drafter}))
    if settings.drafter is not None and not {"drafter", "speculative_config"} & args.keys():
        args["speculative_config"] = env[SPECULATIVE_CONFIG_ENV]
    return settings


def live_form(config: Config, *services: ClusterSettings) -> dict[str, Any]:
    """The config with what can be changed while requests run taken out of `args`, and put under `deployments`.

    Serve starts every replica of an application anew when its `args` change, so engines would be stopped for a limit or
    a number of replicas.
    """
    made = copy.deepcopy(dict(config))
    for application, settings in zip(model_applications(made), services, strict=True):
        args, live = application["args"], live_config(settings)
        for section in ("callers", "limits", "num_draft_tokens", "kubernetes"):
            args.pop(section, None)
        if settings.num_draft_tokens.state is not None:  # the router reads it before Serve hands it a user_config
            args["num_draft_tokens"] = {"state": settings.num_draft_tokens.state}
        if settings.learning is not None and settings.learning.workloads is None:  # callers say what may be kept
            args["learning"] = {**args["learning"], "workloads": "callers"}
        args["model"] = {key: value for key, value in args["model"].items() if key != "aliases"}
        ingress = args.pop("ingress", None) or {}
        if kept := {key: ingress[key] for key in ("allow_origins", "allowed_hosts", "usage_log") if ingress.get(key)}:
            args["ingress"] = kept
        changes: dict[str, dict[str, Any]] = {
            ROUTER_NAME: {"ray_actor_options": {"num_cpus": settings.ingress.num_cpus}, "user_config": live},
            TARGET_NAME: {"user_config": live},
        }
        if settings.autoscaling is None:
            (args.get("target") or {}).pop("num_replicas", None)
            changes[TARGET_NAME]["num_replicas"] = settings.target.num_replicas
            if settings.drafter is not None and settings.drafter.replicas is not None:
                (args["drafter"].get("replicas") or {}).pop("num_replicas", None)
                changes[DRAFTER_NAME] = {"num_replicas": settings.drafter.replicas.num_replicas}
        for given in application.get("deployments") or ():
            changes[given["name"]] = {**given, **changes.get(given["name"], {})}  # none takes a caller's API key away
        application["deployments"] = [{"name": name, **options} for name, options in changes.items()]
    return made


def base_url(config: Config) -> str:
    """Where the gateway answers, without one the first application, as seen from this machine."""
    host, port = http_address(config)
    prefix = (gateway_application(config) or config["applications"][0]).get("route_prefix") or "/"
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}{prefix.rstrip('/')}"


def http_address(config: Config) -> tuple[str, int]:
    """Host and port at which Serve listens."""
    options = ServeDeploySchema.model_validate(config).http_options
    return options.host, options.port


def asked_resources(config: Config, services: Services, *, at_start: bool = False) -> dict[str, dict[str, float]]:
    """What all replicas together ask for, by Ray resource and setting: at the most, or those that start first."""
    asked = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for settings in services:
        num_targets, num_drafters, scaling = settings.max_num_targets, settings.max_num_drafters, settings.autoscaling
        if at_start and scaling is not None:
            num_targets = max(1, scaling.target.min)
            num_drafters = 0 if scaling.drafter is None else max(1, scaling.drafter.min)
        asked["CPU"]["target.num_cpus"] += num_targets * settings.target.num_cpus
        asked["CPU"]["ingress.num_cpus"] += settings.ingress.num_cpus
        for name, number in settings.target.bundle.items():
            asked[name]["target.bundle"] += num_targets * settings.num_workers * number
        drafters = None if settings.drafter is None else settings.drafter.replicas
        for section, number, one in ("drafter.replicas", num_drafters, drafters), ("learning", 1, settings.learning):
            if one is not None:
                asked["CPU"][f"{section}.num_cpus"] += number * one.num_cpus
                asked["GPU"][f"{section}.num_gpus"] += number * (one.num_gpus or 0.0)
    if (gateway := gateway_application(config)) is not None:
        front = GatewaySettings.read(gateway.get("args") or {})
        asked["CPU"]["num_cpus of the gateway"] += front.num_replicas * front.num_cpus
    return asked


def describe(config: Config, *services: ClusterSettings) -> str:
    """What a config that was read asks for, a line each."""
    lines = []
    for application, settings in zip(model_applications(config), services, strict=True):
        drafter, scaling = settings.drafter, settings.autoscaling
        where = f"on {'GPU' if settings.target.has_gpu else 'CPU'}, served as {settings.model.id} at {base_url(config)}"
        lines.append(f"target: {settings.model.source}, {where}")
        if drafter is None:
            lines.append("drafter: none")
        else:
            what = f"{drafter.method} {drafter.head or ''}".rstrip() if drafter.is_vllms_own else drafter.head
            own = [one for one in application.get("deployments") or () if one["name"] == DRAFTER_NAME]
            head = (own[0].get("user_config") or {}).get("head") if own else None
            later = f", replaced by {head} (user_config)" if head else ""
            lines.append(f"drafter: {what}{later}, {drafter.placement}, K_max {settings.max_draft_tokens}")
        lines.append(f"replicas at the most: {settings.max_num_targets} targets, {settings.max_num_drafters} drafters")
        lines.append(f"autoscaling: {'off' if scaling is None else scaling.policy}")
        lines.append(f"callers: {'anybody' if settings.callers is None else ', '.join(settings.callers)}\n")
    totals = {name: sum(parts.values()) for name, parts in sorted(asked_resources(config, services).items())}
    needed = ", ".join(f"{name} {total:g}" for name, total in totals.items() if total)
    lines.append(f"Ray resources at the most: {needed}")
    for application in model_applications(config):
        if variables := key_variables(application.get("args")):
            lines.append(f"{application['name']} needs API keys in the environment: {', '.join(variables)}")
        if (path := application["import_path"]) != SERVICE_PATH:
            lines.append(f"{application['name']} is built by {path}; its args were checked as those of {SERVICE_PATH}")
    sources = [one.model.source for one in services]
    heads = [one.drafter.head for one in services if one.drafter is not None and one.drafter.head]
    if unnamed := sorted({name for name in (*heads, *sources) if name.startswith("YOUR_ORG/")}):
        lines.append(f"to be replaced by yours before it can be served: {', '.join(unnamed)}")
    elif absent := sorted({name for name in (*heads, *sources) if "/" in name and not Path(name).is_dir()}):
        elsewhere = ("/", *OBJECT_STORES)
        kinds = [name if name.startswith(elsewhere) else f"{name} (a Hugging Face id?)" for name in absent]
        lines.append(f"ok; not here yet, so their shapes are not checked: {', '.join(kinds)}")
    else:
        lines.append("ok")
    return "\n".join(lines)
