"""The schema of a served cluster: what stands under `args` in a YAML of `configs/`.

Each section is a strict record: an unknown key or a wrong type is an error. `cluster.loading.load_settings` reads a
raw mapping into these records and reports every problem it finds in one message; the checks that need facts about
the machine (which models and heads exist) live there too. Counts are `num_*`, limits `max_*`, CPUs are Ray's logical
CPUs.
"""

from typing import Any

from pydantic import Field

from cluster.callers import Caller, Callers, TagRight
from cluster.depth_settings import DepthSettings
from cluster.drafter_settings import DrafterSettings
from cluster.drafting import DepthPolicy
from cluster.scaling_settings import AutoscalingSettings
from cluster.section import Section

OWNED_ENGINE_KEYS = {
    "model": "set model.source",
    "served_model_name": "set model.id",
    "speculative_config": "set drafter, or put speculative_config beside engine",
    "spec_method": "set drafter",
    "spec_model": "set drafter.head",
    "spec_tokens": "set drafter.max_draft_tokens",
    "num_speculative_tokens": "set drafter.max_draft_tokens",
    "scheduler_cls": "the target's scheduler trims each request to its K and cannot be replaced here",
    "async_scheduling": "on for GPUs, off for CPUs, where vLLM does not support it",
    "worker_cls": "the target's worker cannot be replaced here",
    "distributed_executor_backend": "ray.serve.llm chooses it from target.bundle",
    "per_request_spec_decode_metrics": "acceptance is always recorded for each request",
    "disable_log_stats": "acceptance is counted from the engine's statistics",
    "data_parallel_size": "set target.num_replicas",
}
"""Engine arguments that other settings decide, each with what to do instead."""


class ModelSettings(Section):
    """The target. `source`: an embedded model's name, a checkpoint directory, or a Hugging Face id `org/name`;
    `id`: the name clients ask for, by default the source's last part; `aliases`: further names of the same model, each
    with the workload that its requests belong to."""

    source: str = Field(min_length=1)
    id: str = Field(default="", pattern=r"^[^\s]*$")
    aliases: dict[str, str] = Field(default_factory=dict)


class TargetSettings(Section):
    """Replicas of the target. `bundle`: Ray resources of each engine worker, e.g. {GPU: 1} or {CPU: 1}; `num_cpus`:
    of the replica's own process; `env`: environment variables of the replica and its engine; `full_graph_depths`: K's
    with full CUDA graphs of their own, K_max always being one (`peagle.vllm.graphs`)."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    bundle: dict[str, float] = Field(default_factory=lambda: {"GPU": 1.0})
    accelerator_type: str | None = None
    max_ongoing_requests: int = Field(default=256, ge=1)
    env: dict[str, str] = Field(default_factory=dict)
    full_graph_depths: list[int] | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether its engines run on GPUs."""
        return bool(self.bundle.get("GPU"))


class IngressSettings(Section):
    """Replicas of the ingress. `allow_origins`: web pages that a browser may call from (CORS), none by default."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    max_ongoing_requests: int = Field(default=1024, ge=1)
    allow_origins: list[str] = Field(default_factory=list)


class CallerSettings(Section):
    """One caller, under its name. Its API key is given by `key_sha256` (64 hexadecimal digits) or by `key_env`, the
    environment variable that holds it; the key itself stands in no setting. `tags`: whether it may set workload tags;
    `workload`: where its requests without a tag belong; `max_depth`: the largest K of its requests."""

    key_sha256: str | None = None
    key_env: str | None = None
    tags: TagRight = "refuse"
    workload: str | None = None
    max_depth: int | None = Field(default=None, ge=0)


class ClusterSettings(Section):
    """Everything under `args`. `engine` goes to vLLM's engine arguments as it stands. `callers` by name; without it
    everyone is served, and may set tags."""

    model: ModelSettings
    drafter: DrafterSettings | None = None
    depth: DepthSettings = Field(default_factory=DepthSettings)
    engine: dict[str, Any] = Field(default_factory=dict)
    target: TargetSettings = Field(default_factory=TargetSettings)
    ingress: IngressSettings = Field(default_factory=IngressSettings)
    callers: dict[str, CallerSettings] | None = None
    autoscaling: AutoscalingSettings | None = None

    @property
    def max_draft_tokens(self) -> int:
        """K_max, 0 without a drafter."""
        return 0 if self.drafter is None else self.drafter.max_draft_tokens or 0

    @property
    def max_num_targets(self) -> int:
        """Replicas of the target, at the most."""
        return self.target.num_replicas if self.autoscaling is None else self.autoscaling.target.max

    @property
    def max_num_drafters(self) -> int:
        """Replicas of a remote drafter, at the most; 0 without one."""
        if self.drafter is None or self.drafter.replicas is None:
            return 0
        scaled = None if self.autoscaling is None else self.autoscaling.drafter
        return self.drafter.replicas.num_replicas if scaled is None else scaled.max

    def depth_policy(self) -> DepthPolicy:
        """The operator's choice of K, with its defaults filled in."""
        deepest = self.max_draft_tokens
        limit = deepest if self.depth.max is None else self.depth.max
        default = limit if self.depth.default is None else self.depth.default
        return DepthPolicy(deepest, limit, default, dict(self.depth.by_workload))

    def caller_table(self) -> Callers | None:
        """Who may ask; None: everyone."""
        if self.callers is None:
            return None
        return Callers(
            {
                one.key_sha256: Caller(name, one.tags, one.workload, one.max_depth)
                for name, one in self.callers.items()
                if one.key_sha256 is not None
            }
        )

    def named_workloads(self) -> frozenset[str]:
        """The workloads that the operator names: these are told apart from the start and always."""
        fixed = {one.workload for one in (self.callers or {}).values() if one.workload is not None}
        drafted = () if self.drafter is None else self.drafter.heads_by_workload
        by_operator = {*self.depth.by_workload, *self.depth.objectives, *self.model.aliases.values()}
        return frozenset({*by_operator, *fixed, *drafted})
