"""The `drafter` section: which heads draft, where they run, and what can be wrong with it.

Placement is a setting: `colocated` drafts inside the target's engine, `remote` on replicas of their own, which hold the
drafter's weights and its KV cache. Drafts and output are the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from cluster.drafting import is_workload_tag
from cluster.messages import nearest, problem
from cluster.section import Section
from cluster.sources import SourceError, drafts_in_parallel, read_head_config

SHARED_SHAPE = ("hidden_size", "target_hidden_size", "vocab_size", "aux_layer_ids")
"""What the heads of one drafter have in common: the target sends every request's rows in one form."""

ROW_DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
"""vLLM's names of data types, each with the one by which target and drafter agree."""

MAX_NUM_HEADS = 32
"""Of one drafter; each has weights and a share of the cache."""

SWAPPED_KEYS = ("head", "heads_by_workload")


class DrafterReplicas(Section):
    """Replicas of a remote drafter.

    `num_cpus`, `num_gpus`: Ray resources of one replica; GPUs by default one where the target has GPUs, else none.
    `cache_gib`: memory of its KV cache, all heads together. `max_num_requests`: requests drafted at a time, by default
    as many as all targets together run. `host`: address that it listens on, by default its node's as Ray knows it.
    `env`: environment variables of its process."""

    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    cache_gib: float = Field(default=1.0, gt=0)
    max_num_requests: int | None = Field(default=None, ge=1)
    host: str | None = Field(default=None, min_length=1)
    env: dict[str, str] = Field(default_factory=dict)


class LinkSettings(Section):
    """How long a target waits for the drafts of a step: three times what a pass takes on average, within these limits;
    then it goes on without drafts. With `max_deadline_ms` also for the first passes, whose time is not known yet."""

    min_deadline_ms: float = Field(default=50.0, gt=0, allow_inf_nan=False)
    max_deadline_ms: float = Field(default=1000.0, gt=0, allow_inf_nan=False)


class DrafterSettings(Section):
    """The drafter. `head`: a shipped head's name, a directory, or a Hugging Face id; `max_draft_tokens`: K_max, and
    `parallel_drafting`: all drafts in one pass (P-EAGLE) or one after another (EAGLE-3), both by default what the head
    was trained for; `engine_options`: further keys of vLLM's speculative_config.

    With `placement: remote`, `replicas` run the drafter, targets reach them over `links`, and `heads_by_workload` gives
    workloads heads of their own."""

    head: str = Field(min_length=1)
    placement: Literal["colocated", "remote"] = "colocated"
    max_draft_tokens: int | None = Field(default=None, ge=1, le=64)
    parallel_drafting: bool | None = None
    engine_options: dict[str, Any] = Field(default_factory=dict)
    replicas: DrafterReplicas | None = None
    links: LinkSettings | None = None
    heads_by_workload: dict[str, str] = Field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        return self.placement == "remote"

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that draft, each once: the default head first, then those of workloads. Their order is the index
        by which a request names its head."""
        return tuple(dict.fromkeys((self.head, *self.heads_by_workload.values())))

    def head_index(self, workload: str) -> int:
        """The index in `heads` of the head that drafts for a workload."""
        return self.heads.index(self.heads_by_workload.get(workload, self.head))


def read_drafter(drafter: DrafterSettings, heads_dir: Path) -> tuple[DrafterSettings, list[str]]:
    """The section with its defaults filled in from the head's config.json, and a line for each problem."""
    try:
        head, config = read_head_config(drafter.head, heads_dir)
    except SourceError as error:
        return drafter, [str(error)]
    problems = _kind_problems(drafter, config)
    num_depths = config.get("num_depths")
    deepest = drafter.max_draft_tokens
    if deepest is None and num_depths is None:
        problems.append("missing key drafter.max_draft_tokens: the head does not say how deep it was trained")
    elif deepest is not None and num_depths is not None and deepest > num_depths:
        problems.append(
            f"drafter.max_draft_tokens is {deepest}, but the head {drafter.head} was trained for {num_depths} "
            f"depths (its num_depths): write {num_depths} or less"
        )
    deepest = deepest or num_depths
    by_workload = {}
    for workload, name in drafter.heads_by_workload.items():
        by_workload[workload], found = _read_workload_head(workload, name, config, deepest, heads_dir)
        problems += found
    filled = {"head": head, "max_draft_tokens": deepest, "heads_by_workload": by_workload}
    return drafter.model_copy(update=filled), problems


def check_placement(drafter: DrafterSettings, engine: Mapping[str, Any]) -> list[str]:
    """A line for each setting that means nothing where the drafter runs. `engine`: vLLM's arguments for the target."""
    if not drafter.is_remote:
        return [
            f"drafter.{key} has no meaning with placement: colocated, where the drafter runs in the target's engine: "
            "write placement: remote, or leave it out"
            for key in ("replicas", "links", "heads_by_workload")
            if getattr(drafter, key)
        ]
    problems = []
    if (dtype := engine.get("dtype", "auto")) not in ROW_DTYPES:
        problems.append(
            f"engine.dtype is {dtype!r:.80}, but placement: remote needs its name, {', '.join(sorted(ROW_DTYPES))}: "
            "target and drafter compute in one type"
        )
    links = drafter.links or LinkSettings()
    if links.min_deadline_ms > links.max_deadline_ms:
        problems.append(
            f"drafter.links.min_deadline_ms is {links.min_deadline_ms:g}, above max_deadline_ms, "
            f"{links.max_deadline_ms:g}"
        )
    if len(drafter.heads) > MAX_NUM_HEADS:
        problems.append(f"drafter.heads_by_workload: {len(drafter.heads)} heads, at most {MAX_NUM_HEADS}")
    if drafter.engine_options:
        names = ", ".join(drafter.engine_options)
        problems.append(
            f"drafter.engine_options ({names}) are for a drafter in the target's engine, which placement: remote does "
            "not have: leave them out"
        )
    if (num_stages := engine.get("pipeline_parallel_size", 1)) != 1:
        problems.append(
            f"engine.pipeline_parallel_size is {num_stages!r:.80}, but placement: remote needs all layers on each "
            "worker, 1: use tensor_parallel_size, or placement: colocated"
        )
    return problems


def fill_remote(drafter: DrafterSettings, *, target_has_gpu: bool) -> DrafterSettings:
    """The section of a remote drafter with the defaults of `replicas` and `links` filled in."""
    replicas = drafter.replicas or DrafterReplicas()
    if replicas.num_gpus is None:
        replicas = replicas.model_copy(update={"num_gpus": 1.0 if target_has_gpu else 0.0})
    return drafter.model_copy(update={"replicas": replicas, "links": drafter.links or LinkSettings()})


def swapped(drafter: DrafterSettings, user_config: Any, heads_dir: Path) -> DrafterSettings:
    """The section with the heads that a deployment's `user_config` names, `{head: ..., heads_by_workload: {...}}`; what
    it leaves out is as in `drafter`, the section that the application was built from.

    Raises:
        ValueError: every problem: an unknown key, no such head, one that does not fit the others, or workloads that
            would share a head which the running targets tell apart, or the other way round.
    """
    if not isinstance(user_config, Mapping):
        raise ValueError(f"user_config must be a mapping with {' and '.join(SWAPPED_KEYS)}, not {user_config!r:.80}")
    if unknown := [str(key) for key in user_config if key not in SWAPPED_KEYS]:
        raise ValueError(f"unknown key {unknown[0]} in user_config{nearest(unknown[0], SWAPPED_KEYS)}; it swaps heads")
    try:
        asked = DrafterSettings.model_validate({**drafter.model_dump(), **user_config})
    except ValidationError as error:
        raise ValueError("; ".join(problem(one, "user_config", DrafterSettings) for one in error.errors())) from error
    if asked.heads_by_workload.keys() != drafter.heads_by_workload.keys():
        raise ValueError(
            f"user_config names heads of the workloads {sorted(asked.heads_by_workload)}, the running service tells "
            f"{sorted(drafter.heads_by_workload)} apart: change drafter.heads_by_workload in args and deploy anew"
        )
    filled, problems = read_drafter(asked, heads_dir)
    if problems:
        raise ValueError("; ".join(problems))
    if [filled.head_index(one) for one in drafter.heads_by_workload] != [
        drafter.head_index(one) for one in drafter.heads_by_workload
    ] or len(filled.heads) != len(drafter.heads):
        raise ValueError(
            "user_config gives workloads one head that have two in the running service, or the other way round: "
            "change drafter.heads_by_workload in args and deploy anew"
        )
    return filled


def _kind_problems(drafter: DrafterSettings, config: dict[str, Any]) -> list[str]:
    """Whether the head drafts the way that the settings say. An empty `config`: a head that is not here yet."""
    parallel = drafter.parallel_drafting
    if drafter.is_remote and (parallel is False or (config and not drafts_in_parallel(config))):
        return [
            "drafter.placement: remote is for P-EAGLE heads, which draft in one pass, and the head "
            f"{drafter.head} is an EAGLE-3 head, which drafts one token after another: write colocated"
        ]
    if config and parallel is not None and parallel != drafts_in_parallel(config):
        return [
            f"drafter.parallel_drafting is {str(parallel).lower()}, but the head {drafter.head} is "
            + ("an EAGLE-3 head, without a mask token: write false" if parallel else "a P-EAGLE head: write true")
        ]
    return []


def _read_workload_head(
    workload: str, name: str, default: Mapping[str, Any], deepest: int | None, heads_dir: Path
) -> tuple[str, list[str]]:
    """A workload's head as `read_head_config` resolves it, compared with the default head's config.json."""
    key = f"drafter.heads_by_workload.{workload}"
    problems = []
    if not is_workload_tag(workload):
        problems.append(
            f"drafter.heads_by_workload has the tag {workload!r:.80}: a tag is 1 to 64 letters, digits or . _ : -"
        )
    try:
        head, config = read_head_config(name, heads_dir, key)
    except SourceError as error:
        return name, [*problems, str(error)]
    if config and not drafts_in_parallel(config):
        problems.append(f"{key}: {name} is an EAGLE-3 head; placement: remote is for P-EAGLE heads")
    if config and default:
        own, shared = _shape(config), _shape(default)
        problems += [
            f"{key}: the head {name} has {field} {own[field]}, the default head {shared[field]}: the heads of one "
            "drafter read the same hidden states"
            for field in SHARED_SHAPE
            if own[field] != shared[field]
        ]
    num_depths = config.get("num_depths")
    if deepest is not None and num_depths is not None and num_depths < deepest:
        problems.append(
            f"{key}: the head {name} was trained for {num_depths} depths (its num_depths), fewer than "
            f"drafter.max_draft_tokens, {deepest}: lower that, or take another head"
        )
    return head, problems


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SHARED_SHAPE` in a head's config.json. Layer ids that are not given are vLLM's default."""
    key = "eagle_aux_hidden_state_layer_ids"
    layer_ids = config.get(key) or (config.get("eagle_config") or {}).get(key)
    return {
        "hidden_size": config.get("hidden_size"),
        "target_hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "vocab_size": config.get("vocab_size"),
        "aux_layer_ids": "vLLM's default" if layer_ids is None else list(layer_ids),
    }
