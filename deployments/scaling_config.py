"""From the settings section `autoscaling` to Serve's `autoscaling_config` of target and drafter."""

from typing import Any

from cluster.scaling import ScalingPolicy
from cluster.scaling_capacity import PassTimes
from cluster.scaling_settings import AutoscalingSettings, ReplicaRange
from cluster.settings import ClusterSettings

TARGET_POLICY = "deployments.autoscaling:TargetAutoscaler"
DRAFTER_POLICY = "deployments.autoscaling:DrafterAutoscaler"

MAX_STREAM_S = 600.0
"""A target replica that Serve retires has so long to finish its streams; it takes no new ones."""

DEFAULT_MAX_NUM_SEQS = 256
"""Where only queue length decides, which asks for no batch."""


def target_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of the target; None where its number of replicas is fixed.

    Raises ValueError for tables that cannot be used.
    """
    scaling = settings.autoscaling
    if scaling is None:
        return None
    kwargs = policy_kwargs(settings, scaling)
    return _config(scaling, scaling.target, {"policy_function": TARGET_POLICY, "policy_kwargs": kwargs})


def drafter_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of remote drafters; None where their number is fixed."""
    scaling = settings.autoscaling
    if scaling is None or scaling.drafter is None:
        return None
    return _config(scaling, scaling.drafter, {"policy_function": DRAFTER_POLICY})


def policy_kwargs(settings: ClusterSettings, scaling: AutoscalingSettings) -> dict[str, Any]:
    """What `TargetAutoscaler` is made from, as JSON. Raises ValueError as `ScalingPolicy` does."""
    by_acceptance = scaling.policy == "acceptance"
    times = settings.depth.times(settings.max_draft_tokens) if by_acceptance else None
    passes = None if scaling.pass_times is None else PassTimes.load(scaling.pass_times)
    depths = settings.depth_policy()
    limits = {
        "max_num_seqs": settings.engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
        "max_depth": depths.max_depth,
        "pinned": dict(settings.depth.by_workload),
        "pinned_default": depths.default_depth if settings.depth.policy == "fixed" else None,
    }
    max_ongoing = settings.target.max_ongoing_requests
    ScalingPolicy(scaling, times, max_ongoing_requests=max_ongoing, passes=passes, **limits)
    return {
        "settings": scaling.model_dump(mode="json"),
        # Serve writes these arguments to its log: the conditions of measurement stay in the file that they come from.
        "step_times": None if times is None else {**times.to_document(), "conditions": {}},
        "pass_times": None if passes is None else passes.model_dump(mode="json"),
        "limits": limits,
        "max_ongoing_requests": max_ongoing,
    }


def _config(scaling: AutoscalingSettings, bounds: ReplicaRange, policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "min_replicas": bounds.min,
        "max_replicas": bounds.max,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "policy": policy,
    }
