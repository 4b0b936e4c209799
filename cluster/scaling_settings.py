"""The `autoscaling` section: how many replicas of target and drafter, who decides, and what can be wrong with it."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from cluster.section import Section

NEEDED_BY_QUEUE_LENGTH = "target_ongoing_requests"


class ReplicaRange(Section):
    """Bounds of a deployment's number of replicas. `min` 0 only with `autoscaling.scale_to_zero`."""

    min: int = Field(default=1, ge=0)
    max: int = Field(ge=1)

    def clamp(self, number: int) -> int:
        return min(self.max, max(self.min, number))


class AutoscalingSettings(Section):
    """Replica counts that follow the traffic. Without this section the counts are fixed.

    `policy`: `acceptance` (demand in output tokens/s against what a replica gives at its predicted best K) or
    `queue_length` (Serve's own: ongoing requests over `target_ongoing_requests`, which is also what `acceptance`
    falls back to while replicas do not report). `target`, `drafter`: bounds; `drafter` for remote drafters only.

    `utilisation`: the share of a replica's capacity that is planned for. `dead_band`: a replica goes only when the
    demand fits in the others at this share of the utilisation. `max_change`: the most that a change of acceptance or
    mix moves a count in one decision, as a share, beyond what the interval of acceptance or waiting requests bear out.
    `decision_interval_s`: between decisions. `start_time_s`: from the decision to a replica that serves, `warmup_s`
    from there to one that is as fast as the others. `drain_s`: within what time a backlog is to be gone, by replicas
    that run full. `stale_after_s`: reports older than this are missing. `max_tpot_ms`: capacity counts batches only
    that keep it. `spare_replicas`: on top of what the demand needs. `scale_to_zero`: the target goes to 0 after
    `idle_s` without a request. `upscale_delay_s`, `downscale_delay_s`: Serve's own, how long a wish must last.
    `pass_times`: a file with the times of a remote drafter's passes (`python -m peagle.bench.parallel_pass --out FILE
    --head HEAD --pass-times-out FILE2`: FILE2); without it the number of drafters goes with that of targets. `log`: the
    file that every decision is written to, on the head node (`python -m cluster.scaling_replay FILE`); by default
    peagle_autoscaling.jsonl among Serve's logs."""

    policy: Literal["acceptance", "queue_length"]
    target: ReplicaRange
    drafter: ReplicaRange | None = None
    target_ongoing_requests: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    utilisation: float = Field(default=0.75, gt=0, le=1)
    drafter_utilisation: float = Field(default=0.6, gt=0, le=1)
    dead_band: float = Field(default=0.9, gt=0, le=1)
    max_change: float = Field(default=0.2, gt=0, lt=1)
    decision_interval_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    start_time_s: float = Field(default=180.0, ge=0, allow_inf_nan=False)
    warmup_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    drain_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    stale_after_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    max_tpot_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    spare_replicas: int = Field(default=0, ge=0)
    scale_to_zero: bool = False
    idle_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    upscale_delay_s: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    downscale_delay_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    pass_times: str | None = Field(default=None, min_length=1)
    log: str | None = Field(default=None, min_length=1)


def check_autoscaling(settings: AutoscalingSettings, *, has_remote_drafter: bool) -> list[str]:
    """A line for each problem."""
    problems = []
    for name, bounds in (("target", settings.target), ("drafter", settings.drafter)):
        if bounds is None:
            continue
        if bounds.min > bounds.max:
            problems.append(f"autoscaling.{name}.min is {bounds.min}, above autoscaling.{name}.max, {bounds.max}")
        if bounds.min == 0 and not settings.scale_to_zero:
            problems.append(f"autoscaling.{name}.min is 0: write autoscaling.scale_to_zero: true, or a min of 1")
    if settings.scale_to_zero and settings.target.min > 0:
        problems.append("autoscaling.scale_to_zero is true: autoscaling.target.min must then be 0")
    if settings.drafter is not None and not has_remote_drafter:
        problems.append("autoscaling.drafter bounds a remote drafter: write drafter.placement: remote, or remove it")
    if settings.drafter is None and has_remote_drafter:
        problems.append("autoscaling.drafter is missing: a remote drafter scales too, e.g. {min: 1, max: 2}")
    if settings.downscale_delay_s <= settings.stale_after_s:
        problems.append(
            f"autoscaling.downscale_delay_s is {settings.downscale_delay_s:g}: it must be more than stale_after_s "
            f"({settings.stale_after_s:g}), or replicas that fall silent look like traffic that went away"
        )
    if settings.policy == "queue_length":
        for key in ("max_tpot_ms", "pass_times"):
            if getattr(settings, key) is not None:
                problems.append(f"autoscaling.{key} is read by the acceptance policy only: write policy: acceptance")
    return problems


def check_sources(
    settings: AutoscalingSettings,
    *,
    max_draft_tokens: int,
    has_step_times: bool,
    engine: Mapping[str, Any],
    fixed_counts: Collection[str],
) -> list[str]:
    """A line for each thing that the policy lacks, or that contradicts it. `has_step_times`: depth.step_times is given;
    `fixed_counts`: keys of the settings that fix a number of replicas."""
    problems = [f"{key} fixes what autoscaling decides: remove one of them" for key in fixed_counts]
    if settings.policy != "acceptance":
        return problems
    if max_draft_tokens == 0:
        problems.append("autoscaling.policy is acceptance, which needs a drafter: write policy: queue_length")
    elif not has_step_times:
        problems.append(
            "autoscaling.policy is acceptance, which needs step times of this engine: set depth.step_times "
            "(python -m peagle.vllm.calibrate), or write policy: queue_length"
        )
    most = engine.get("max_num_seqs")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        problems.append("autoscaling.policy is acceptance, which needs engine.max_num_seqs, the largest batch, from 1")
    return problems
