"""The base of every record that is read from outside: strict, frozen, no unknown keys."""

import difflib
import json
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.depth import Objective
from cluster.request import Caller, Callers, DepthPolicy, TagRight, digest_of, is_workload_tag
from cluster.step_time import StepTimes, default_step_times

# ====================================================================================================
# The base of every record that is read from outside: strict, frozen, no unknown keys.


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


# ====================================================================================================
# Words for what is wrong with a settings file: the key, its path, and what to write instead.

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "int_from_float": "an integer",
}
_YAML_TYPES = {str: "the string", bool: "the truth value", int: "the integer", float: "the number"}


def listed(names: Collection[Any]) -> str:
    """`a, b and c`."""
    words = [str(name) for name in names]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def nearest(key: Any, known: Collection[str]) -> str:
    """`; did you mean X?` for the known name most like `key`, or nothing when none is like it."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def record_of(annotation: Any) -> type[BaseModel] | None:
    """The record class in a field's annotation (`Record` or `Record | None`), if any."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def unknown_key(key: str, path: str, record: type[BaseModel]) -> str:
    """An unknown key at `path` (empty: the top level), with the nearest valid key.

    A name that is valid in a section further down is pointed to there: `num_replicas` at the top level is
    `target.num_replicas`.
    """
    here = tuple(record.model_fields)
    deeper = [
        f"{name}.{key}"
        for name, field in record.model_fields.items()
        if (section := record_of(field.annotation)) is not None and key in section.model_fields
    ]
    hint = f"; did you mean {listed(deeper)}?" if deeper else nearest(key, here)
    where = f"{path}.{key}" if path else key
    return (
        f"unknown key {where}{hint} Valid keys here: {', '.join(here)}"
        if hint.endswith("?")
        else (f"unknown key {where}; valid keys here: {', '.join(here)}")
    )


def problem(detail: Mapping[str, Any], section: str, record: type[BaseModel]) -> str:
    """One of pydantic's error details about `section`, in our words."""
    steps = [str(step) for step in detail["loc"] if step != "[key]"]
    path = ".".join([section, *steps])
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_key(steps[-1], ".".join([section, *steps[:-1]]), _record_at(steps[:-1], record))
    if kind == "missing":
        return f"missing key {path}"
    if kind in _EXPECTED:
        return f"wrong type at {path}: expected {_EXPECTED[kind]}, got {described(value)}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"{path} must be {bound}, not {value!r:.80}"
    if kind == "literal_error":
        return f"{path} must be {context['expected']}, not {value!r:.80}"
    return f"{path}: {detail['msg']}, not {value!r:.80}"


def _record_at(steps: list[str], record: type[BaseModel]) -> type[BaseModel]:
    """The record that a path of keys leads to; a mapping's own keys lead to its records."""
    annotation: Any = record
    for step in steps:
        inner = record_of(annotation)
        annotation = inner.model_fields[step].annotation if inner is not None else typing.get_args(annotation)[1]
    return record_of(annotation) or record


def described(value: Any) -> str:
    """A value of a YAML file with its type, shortened."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{_YAML_TYPES.get(type(value), type(value).__name__)} {value!r:.80}"


# ====================================================================================================
# Where a model or a head comes from: a name that ships, a directory, or a Hugging Face id `org/name`.

_HUGGING_FACE_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HEAD_ARCHITECTURE = "LlamaForCausalLMEagle3"


class SourceError(ValueError):
    """A source names nothing that exists, or not what it should."""


def resolve_source(source: str, shipped: Collection[str], key: str, what: str) -> str:
    """`source` as it is when it is shipped or a Hugging Face id, else the absolute path of its directory.

    Raises:
        SourceError: neither shipped, nor a directory with a config.json, nor shaped like `org/name`.
    """
    path = Path(source).expanduser()
    if source in shipped:
        return source
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(f"{key}: the directory {source} holds no config.json, so it is no checkpoint")
        return str(path.resolve())
    if _HUGGING_FACE_ID.fullmatch(source):
        return source
    known = f"{what}s: {listed(sorted(shipped))}" if shipped else f"there is no {what}"
    raise SourceError(
        f"{key}: {source!r} is not one of ours, no existing directory and no Hugging Face id (org/name)"
        f"{nearest(source, shipped)} ({known})"
    )


def read_head_config(head: str, heads_dir: Path, key: str = "drafter.head") -> tuple[str, dict[str, Any]]:
    """A head's resolved name (see `resolve_source`) and its config.json; empty for a Hugging Face id, whose
    files are not here yet. `key`: the setting that names the head.

    Raises:
        SourceError: no such head, an unreadable config.json, or a config.json that is no P-EAGLE or EAGLE-3 head's.
    """
    shipped = sorted(path.parent.name for path in heads_dir.glob("*/config.json"))
    resolved = resolve_source(head, shipped, key, "shipped head")
    folder = heads_dir / resolved if resolved in shipped else Path(resolved)
    if not folder.is_dir():
        return resolved, {}
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SourceError(f"{key}: {folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{key}: {folder / 'config.json'} holds no JSON object")
    if config.get("architectures") != [HEAD_ARCHITECTURE]:
        raise SourceError(
            f"{key}: {folder} is no EAGLE-3 head: its architectures are {config.get('architectures')!r:.80}, "
            f"not [{HEAD_ARCHITECTURE!r}]"
        )
    if (num_depths := config.get("num_depths")) is not None and type(num_depths) is not int:
        raise SourceError(f"{key}: num_depths of {folder / 'config.json'} is {num_depths!r:.80}, no whole number")
    return resolved, config


def drafts_in_parallel(config: dict[str, Any]) -> bool:
    """Whether a head's config.json names a mask token: P-EAGLE, which drafts in one pass. EAGLE-3 has none."""
    return config.get("pard_token", config.get("ptd_token_id")) is not None


# ====================================================================================================
# The `depth` section: how K is chosen, and what can be wrong with it.


class ObjectiveSettings(Section):
    """What a workload wants (`cluster.depth`): the most tokens per second, or the least time per output token; with
    an optional limit of that time and a weight of its tokens against those of others."""

    kind: Literal["throughput", "latency"] = "throughput"
    max_tpot_ms: float | None = Field(default=None, gt=0)
    weight: float = Field(default=1.0, gt=0)

    def objective(self) -> Objective:
        return Objective(self.kind, None if self.max_tpot_ms is None else self.max_tpot_ms / 1000, self.weight)


class DepthSettings(Section):
    """K: `max` that a request gets (default K_max), `default` where nothing else decides (default `max`), and a
    table by workload, which pins K.

    `policy`: `fixed`, or `adaptive`: K of every workload that the table does not pin is learned from its acceptance,
    the load and the engine's step times. These come from the file `step_times` (`python -m peagle.vllm.calibrate`);
    without it a cautious model stands in. `objectives`: by workload. `state`: a file where what is learned is saved,
    and found again after a restart."""

    policy: Literal["fixed", "adaptive"] = "fixed"
    default: int | None = Field(default=None, ge=0)
    max: int | None = Field(default=None, ge=0)
    by_workload: dict[str, int] = Field(default_factory=dict)
    step_times: str | None = None
    state: str | None = None
    objectives: dict[str, ObjectiveSettings] = Field(default_factory=dict)

    def times(
        self, max_draft_tokens: int, *, on_gpu: bool = False, full_graph_depths: Sequence[int] | None = None
    ) -> StepTimes:
        """Step times of the targets' engines: the measured table, or the model that stands in for one, of an engine on
        a GPU (with full CUDA graphs at these depths) or a CPU.

        Raises:
            ValueError: the file cannot be read, or is of another K_max.
        """
        if self.step_times is None:
            return default_step_times(max_draft_tokens, on_gpu=on_gpu, full_graph_depths=full_graph_depths)
        times = StepTimes.load(self.step_times)
        if times.max_draft_tokens != max_draft_tokens:
            raise ValueError(
                f"step times {self.step_times}: measured with max_draft_tokens = {times.max_draft_tokens}, "
                f"the drafter has {max_draft_tokens}: measure this engine with python -m peagle.vllm.calibrate"
            )
        return times


def check_depth(depth: DepthSettings, deepest: int, *, is_scaled: bool = False) -> list[str]:
    """A line for each problem; `deepest` is K_max. `is_scaled`: autoscaling reads the step times too."""
    problems: list[str] = []
    limit, because = deepest, f"drafter.max_draft_tokens, {deepest}"
    if depth.max is not None and depth.max > deepest:
        problems.append(f"depth.max is {depth.max}, above {because}")
    elif depth.max is not None:
        limit, because = depth.max, f"depth.max, {depth.max}"
    if depth.default is not None and depth.default > limit:
        problems.append(f"depth.default is {depth.default}, above {because}")
    for section in ("by_workload", "objectives"):
        for tag in getattr(depth, section):
            if not is_workload_tag(tag):
                problems.append(f"depth.{section} has the tag {tag!r:.80}: a tag is 1 to 64 letters, digits or . _ : -")
    for tag, k in depth.by_workload.items():
        if not 0 <= k <= limit:
            problems.append(f"depth.by_workload.{tag} is {k}, outside 0..{limit} ({because})")
    if depth.policy == "fixed":
        for key in ("step_times", "state", "objectives"):
            if getattr(depth, key) and not (key == "step_times" and is_scaled):
                problems.append(f"depth.{key} is read by the adaptive policy only: write depth.policy: adaptive")
    elif both := sorted(depth.by_workload.keys() & depth.objectives.keys()):
        problems.append(f"depth.by_workload pins K of {both[0]}, so depth.objectives.{both[0]} decides nothing")
    if depth.step_times is not None and not Path(depth.step_times).is_file():
        problems.append(f"depth.step_times: {depth.step_times} is no file")
    elif depth.policy == "adaptive" or depth.step_times is not None:
        try:
            depth.times(deepest)
        except ValueError as error:
            problems.append(f"depth.step_times: {error}")
    return problems


# ====================================================================================================
# The `drafter` section: which heads draft, where they run, and what can be wrong with it.
#
# Placement is a setting: `colocated` drafts inside the target's engine, `remote` on replicas of their own, which hold the
# drafter's weights and its KV cache. Drafts and output are the same.

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


# ====================================================================================================
# The `autoscaling` section: how many replicas of target and drafter, who decides, and what can be wrong with it.

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
    `pass_times`: a file with the times of a remote drafter's passes (`python -m benchmarks.parallel_pass --out FILE
    --head HEAD --pass-times-out FILE2`: FILE2); without it the number of drafters goes with that of targets. `log`: the
    file that every decision is written to, on the head node (`python -m benchmarks.scaling_replay FILE`); by default
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


# ====================================================================================================
# The schema of a served cluster: what stands under `args` in a YAML of `configs/`.
#
# Each section is a strict record: an unknown key or a wrong type is an error. `cluster.settings.load_settings` reads a
# raw mapping into these records and reports every problem it finds in one message; the checks that need facts about
# the machine (which models and heads exist) live there too. Counts are `num_*`, limits `max_*`, CPUs are Ray's logical
# CPUs.

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


class LimitSettings(Section):
    """What one request, and all requests together, may ask of the service. A request beyond one of the first kind gets
    400 (413 for its size); beyond `max_running_requests` it waits, beyond `max_queued_requests` it gets 429 with
    Retry-After. Running and queued requests count per ingress replica.

    `max_num_sequences`: n (or best_of) times the number of prompts of one request. `max_grammar_bytes`,
    `max_grammar_choices`, `grammar_timeout_s`: a grammar, schema or list of choices, and the time to compile it."""

    max_body_bytes: int = Field(default=8 * 2**20, ge=1)
    max_num_sequences: int = Field(default=16, ge=1)
    max_num_logprobs: int = Field(default=20, ge=0)
    max_num_stop: int = Field(default=16, ge=0)
    max_grammar_bytes: int = Field(default=64 * 2**10, ge=1)
    max_grammar_choices: int = Field(default=1000, ge=1)
    grammar_timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    max_running_requests: int = Field(default=256, ge=1)
    max_queued_requests: int = Field(default=256, ge=0)


class CallerSettings(Section):
    """One caller, under its name. Its API key is given by `key_sha256` (64 hexadecimal digits) or by `key_env`, the
    environment variable that holds it; the key itself stands in no setting. `tags`: whether it may set workload tags;
    `workload`: where its requests without a tag belong; `max_depth`: the largest K of its requests;
    `max_running_requests`, `requests_per_minute`, `tokens_per_minute` (prompt and output): none by default."""

    key_sha256: str | None = None
    key_env: str | None = None
    tags: TagRight = "refuse"
    workload: str | None = None
    max_depth: int | None = Field(default=None, ge=0)
    max_running_requests: int | None = Field(default=None, ge=1)
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ClusterSettings(Section):
    """Everything under `args`. `engine` goes to vLLM's engine arguments as it stands. `callers` by name; without it
    everyone is served, and may set tags."""

    model: ModelSettings
    drafter: DrafterSettings | None = None
    depth: DepthSettings = Field(default_factory=DepthSettings)
    engine: dict[str, Any] = Field(default_factory=dict)
    target: TargetSettings = Field(default_factory=TargetSettings)
    ingress: IngressSettings = Field(default_factory=IngressSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
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
                one.key_sha256: Caller(
                    name,
                    one.tags,
                    one.workload,
                    one.max_depth,
                    one.max_running_requests,
                    one.requests_per_minute,
                    one.tokens_per_minute,
                )
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


# ====================================================================================================
# From the raw `callers` section to checked records that hold digests, and what is wrong with it.
#
# No message here repeats a value that may be a key: settings files and logs are read by more people than keys are for.


_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[!-~]+")  # what a header carries unchanged: ASCII without blanks
_HOW = "write key_sha256 (printf %s KEY | sha256sum), or key_env, the name of an environment variable that holds it"


def read_callers(raw: Any, env: Mapping[str, str]) -> tuple[dict[str, CallerSettings], list[str]]:
    """The callers by name, each with the `key_sha256` of its key, and a line for each problem."""
    if not isinstance(raw, Mapping):
        return {}, ["callers must be a mapping from a caller's name to its settings; leave it out to serve everyone"]
    if not raw:
        return {}, ["callers is empty, so nobody could ask: name at least one, or leave it out to serve everyone"]
    callers: dict[str, CallerSettings] = {}
    problems: list[str] = []
    for name, section in raw.items():
        if not isinstance(name, str) or not is_workload_tag(name):
            problems.append(f"callers has the name {name!r:.80}: a name is 1 to 64 letters, digits or . _ : -")
        elif (caller := _read(name, section, env, problems)) is not None:
            callers[name] = caller
    return callers, problems + _shared_keys(callers)


def check_depths(callers: Mapping[str, CallerSettings], limit: int, because: str) -> list[str]:
    """A line for each caller whose `max_depth` is above the limit of all, `because` of which it is one."""
    return [
        f"callers.{name}.max_depth is {caller.max_depth}, outside 0..{limit} ({because})"
        for name, caller in callers.items()
        if caller.max_depth is not None and caller.max_depth > limit
    ]


def _read(name: str, section: Any, env: Mapping[str, str], problems: list[str]) -> CallerSettings | None:
    path = f"callers.{name}"
    if not isinstance(section, Mapping):
        problems.append(f"{path} must be a mapping with its key: {_HOW}")
        return None
    digest, key_problem = _digest(path, section, env)
    if key_problem:
        problems.append(key_problem)
    rest = {key: value for key, value in section.items() if key not in ("key_sha256", "key_env")}
    try:
        caller = CallerSettings.model_validate({**rest, "key_sha256": digest})
    except ValidationError as error:
        problems.extend(_problem(detail, path) for detail in error.errors())
        return None
    if caller.workload is not None and not is_workload_tag(caller.workload):
        problems.append(
            f"{path}.workload is {caller.workload!r:.80}: a workload is 1 to 64 letters, digits or . _ : - "
            "starting with a letter or digit"
        )
    return caller


def _problem(detail: Any, path: str) -> str:
    key = str(detail["loc"][-1])
    if detail["type"] == "extra_forbidden" and key in ("key", "api_key", "token"):
        return f"{path}.{key}: keys do not stand in the settings: {_HOW}"
    return problem(detail, path, CallerSettings)


def _digest(path: str, section: Mapping[Any, Any], env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The digest of a caller's key, or what is wrong with it."""
    given, variable = section.get("key_sha256"), section.get("key_env")
    if given is not None and variable is not None:
        return None, f"{path} has key_sha256 and key_env: keep one of them"
    if given is not None:
        if not isinstance(given, str) or not _DIGEST.fullmatch(given):
            return None, (
                f"{path}.key_sha256 must be the 64 hexadecimal digits of `printf %s KEY | sha256sum`, in quotes; "
                "it is not the key itself"
            )
        if given.lower() == digest_of(""):
            return None, f"{path}.key_sha256 is the SHA-256 of an empty key"
        return given.lower(), None
    if variable is None:
        return None, f"{path} has no key: {_HOW}"
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        return None, f"{path}.key_env must be the name of an environment variable; it is not the key itself"
    key = env.get(variable, "").strip()
    if not key:
        return None, f"{path}.key_env: the environment variable {variable} is not set here, where settings are read"
    if not _KEY.fullmatch(key):
        return None, f"{path}.key_env: the key in {variable} has blanks or characters other than ASCII"
    return digest_of(key), None


def _shared_keys(callers: Mapping[str, CallerSettings]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, caller in callers.items():
        if caller.key_sha256 is not None:
            names.setdefault(caller.key_sha256, []).append(name)
    return [f"callers {listed(same)} have the same key" for same in names.values() if len(same) > 1]


# ====================================================================================================
# From a raw mapping (the YAML's `args`) to checked `ClusterSettings`, before anything is loaded.
#
# Enters: the mapping, the environment, and a `Catalog` of what exists on this machine. Leaves: settings with every
# default filled in, or one `SettingsError` that lists all problems, each with its path and what to write instead.


SPECULATIVE_CONFIG_ENV = "SM_VLLM_SPECULATIVE_CONFIG"


@dataclass(frozen=True)
class Catalog:
    """What exists here: embedded models, the folder of shipped heads (one folder a head), and the names of the
    engine's arguments (None: not checked)."""

    embedded_models: Collection[str]
    heads_dir: Path
    engine_keys: Collection[str] | None = None


class SettingsError(ValueError):
    """The settings cannot be served. `problems` holds one line for each thing to mend."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {problem}" for problem in problems)
        plural = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{len(problems)} {plural} in the settings:\n{lines}")

    def __reduce__(self) -> tuple[type["SettingsError"], tuple[list[str]]]:
        return SettingsError, (self.problems,)


def load_settings(raw: Any, catalog: Catalog, env: Mapping[str, str] | None = None) -> ClusterSettings:
    """Check `raw` and fill in what it leaves out.

    vLLM's published `speculative_config` object may stand in place of `drafter`, in `raw` or as JSON in the
    environment variable SM_VLLM_SPECULATIVE_CONFIG.

    Raises:
        SettingsError: listing every problem.
    """
    if not isinstance(raw, Mapping):
        raise SettingsError([f"args must be a mapping with the keys {listed(_SECTIONS)}, not {raw!r:.80}"])
    env = env or {}
    reader = _Reader(catalog)
    sections = dict(raw)
    reader.take_speculative_config(sections, env.get(SPECULATIVE_CONFIG_ENV))
    reader.check_section_names(sections)
    parsed: dict[str, Any] = {name: reader.parse(name, sections[name]) for name in _SECTIONS if name in sections}
    if "callers" in sections:
        parsed["callers"], problems = read_callers(sections["callers"], env)
        reader.problems += problems
    if "model" not in sections:
        reader.problems.append("missing key model: write `model: {source: ...}`")
    reader.check_engine(sections.get("engine"))
    parsed["model"] = reader.check_model(parsed.get("model"))
    drafter_known = "drafter" not in sections or sections["drafter"] is None or parsed["drafter"] is not None
    parsed["drafter"] = reader.check_drafter(parsed.get("drafter"))
    if drafter_known and (depth := parsed.get("depth")) is not None:
        reader.check_depth(depth, parsed["drafter"], parsed.get("autoscaling"))
    if drafter_known:
        reader.check_callers(parsed.get("callers") or {}, parsed.get("depth"), parsed["drafter"])
    reader.check_graphs(parsed.get("target"), parsed["drafter"])
    target = parsed.get("target") or TargetSettings()
    if drafter_known and (scaling := parsed.get("autoscaling")) is not None:
        reader.check_autoscaling(scaling, parsed)
    parsed["drafter"] = reader.check_placement(parsed["drafter"], target, sections.get("engine"))
    if reader.problems:
        raise SettingsError(reader.problems)
    return ClusterSettings(**parsed)


_COUNTED = {"max_model_len": "tokens", "max_num_seqs": "requests"}
"""Engine arguments that a remote drafter is sized by, too."""

_SECTIONS = tuple(ClusterSettings.model_fields)
_RECORDS: dict[str, type[BaseModel]] = {
    name: record
    for name, field in ClusterSettings.model_fields.items()
    if (record := record_of(field.annotation)) is not None
}


class _Reader:
    """One reading of one mapping; collects the problems."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.problems: list[str] = []

    def take_speculative_config(self, sections: dict[str, Any], from_env: str | None) -> None:
        """Turn vLLM's speculative_config, from the mapping or the environment, into a `drafter` section."""
        given = {}
        if "speculative_config" in sections:
            given["speculative_config"] = sections.pop("speculative_config")
        if from_env:
            try:
                given[SPECULATIVE_CONFIG_ENV] = json.loads(from_env)
            except json.JSONDecodeError as error:
                self.problems.append(f"{SPECULATIVE_CONFIG_ENV} is not JSON: {error}")
        if len(given) == 2 and len({json.dumps(value, sort_keys=True, default=str) for value in given.values()}) == 1:
            given.popitem()
        names = [*given, *(["drafter"] if "drafter" in sections and given else [])]
        if len(names) > 1:
            self.problems.append(f"{listed(names)} contradict: keep one of them")
            return
        for name, value in given.items():
            sections["drafter"] = self._drafter_section(name, value)
            if sections["drafter"] is None:
                del sections["drafter"]

    def _drafter_section(self, name: str, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            self.problems.append(f"{name} must be an object like vLLM's --speculative-config, not {value!r:.80}")
            return None
        options = {str(key): item for key, item in value.items()}
        method = options.pop("method", None)
        if method != "eagle3":
            self.problems.append(
                f'{name} must say "method": "eagle3" (with "parallel_drafting": true for a P-EAGLE head); '
                f"it says method {method!r}"
            )
        section = {
            "head": options.pop("model", None),
            "max_draft_tokens": options.pop("num_speculative_tokens", None),
            "parallel_drafting": options.pop("parallel_drafting", False),  # as vLLM reads its absence
        }
        for key, field in (("model", "head"), ("num_speculative_tokens", "max_draft_tokens")):
            if section[field] is None:
                self.problems.append(f"missing key {name}.{key}")
        return None if None in section.values() else {**section, "engine_options": options}

    def check_section_names(self, sections: dict[str, Any]) -> None:
        for key in sections:
            if key not in _SECTIONS:
                self.problems.append(unknown_key(str(key), "", ClusterSettings))

    def parse(self, name: str, value: Any) -> Any:
        """The section as its record; None (with the problems noted) when it does not fit."""
        if name not in _RECORDS:
            return value
        if value is None and name == "drafter":
            return None
        try:
            return _RECORDS[name].model_validate(value)
        except ValidationError as error:
            self.problems.extend(problem(detail, name, _RECORDS[name]) for detail in error.errors())
            return None

    def check_engine(self, engine: Any) -> None:
        if engine is None:
            return
        if not isinstance(engine, Mapping):
            self.problems.append(f"engine must be a mapping of vLLM engine arguments, not {engine!r:.80}")
            return
        known = self.catalog.engine_keys
        for key, value in engine.items():
            if key in OWNED_ENGINE_KEYS:
                self.problems.append(f"engine.{key} is not yours to set: {OWNED_ENGINE_KEYS[key]}")
            elif known is not None and key not in known:
                hint = nearest(key, known)
                self.problems.append(f"unknown key engine.{key}: vLLM has no such argument{hint}")
            elif key in _COUNTED and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                self.problems.append(f"engine.{key} must be a number of {_COUNTED[key]} from 1, not {value!r:.80}")

    def check_model(self, model: ModelSettings | None) -> ModelSettings | None:
        if model is None:
            return None
        try:
            source = resolve_source(model.source, self.catalog.embedded_models, "model.source", "embedded model")
        except SourceError as error:
            self.problems.append(str(error))
            return None
        model_id = model.id or source.rstrip("/").rsplit("/", 1)[-1]
        for alias, workload in model.aliases.items():
            if not alias or alias == model_id or any(character.isspace() for character in alias):
                self.problems.append(
                    f"model.aliases has the name {alias!r:.80}: an alias is another name than {model_id}, "
                    "without blanks"
                )
            if not is_workload_tag(workload):
                self.problems.append(
                    f"model.aliases.{alias} is {workload!r:.80}: a workload is 1 to 64 letters, digits or . _ : - "
                    "starting with a letter or digit"
                )
        return model.model_copy(update={"source": source, "id": model_id})

    def check_drafter(self, drafter: DrafterSettings | None) -> DrafterSettings | None:
        if drafter is None:
            return None
        drafter, problems = read_drafter(drafter, self.catalog.heads_dir)
        self.problems += problems
        return drafter

    def check_placement(
        self, drafter: DrafterSettings | None, target: TargetSettings, engine: Any
    ) -> DrafterSettings | None:
        """The drafter with the defaults of its placement."""
        if drafter is None:
            return None
        self.problems += check_placement(drafter, engine if isinstance(engine, Mapping) else {})
        if not drafter.is_remote:
            return drafter
        return fill_remote(drafter, target_has_gpu=target.has_gpu)

    def check_depth(
        self, depth: DepthSettings, drafter: DrafterSettings | None, scaling: AutoscalingSettings | None
    ) -> None:
        if drafter is None:
            self.problems.append("depth has no meaning without a drafter: remove depth, or give drafter.head")
            return
        deepest = drafter.max_draft_tokens
        if deepest is not None:
            is_scaled = scaling is not None and scaling.policy == "acceptance"
            self.problems.extend(check_depth(depth, deepest, is_scaled=is_scaled))

    def check_autoscaling(self, scaling: AutoscalingSettings, parsed: Mapping[str, Any]) -> None:
        drafter, depth, target = parsed.get("drafter"), parsed.get("depth"), parsed.get("target")
        engine = parsed.get("engine")
        replicas = None if drafter is None else drafter.replicas
        fixed = {"target.num_replicas": target, "drafter.replicas.num_replicas": replicas}
        has_remote = drafter is not None and drafter.is_remote
        self.problems += check_autoscaling(scaling, has_remote_drafter=has_remote)
        self.problems += check_sources(
            scaling,
            max_draft_tokens=0 if drafter is None else drafter.max_draft_tokens or 0,
            has_step_times=depth is not None and depth.step_times is not None,
            engine=engine if isinstance(engine, Mapping) else {},
            fixed_counts=[
                key for key, section in fixed.items() if section and "num_replicas" in section.model_fields_set
            ],
        )

    def check_graphs(self, target: TargetSettings | None, drafter: DrafterSettings | None) -> None:
        depths = None if target is None else target.full_graph_depths
        if target is None or depths is None:
            return
        deepest = 0 if drafter is None else drafter.max_draft_tokens or 0
        if deepest == 0:
            self.problems.append("target.full_graph_depths has no meaning without a drafter: leave it out")
        elif not target.has_gpu:
            self.problems.append("target.full_graph_depths needs a GPU in target.bundle: a CPU has no CUDA graphs")
        elif wrong := [k for k in depths if not 0 <= k <= deepest]:
            self.problems.append(f"target.full_graph_depths has {wrong[0]}, outside 0..{deepest} (K_max)")
        elif not depths:
            self.problems.append("target.full_graph_depths is empty: name at least one K, or leave it out")

    def check_callers(
        self, callers: Mapping[str, CallerSettings], depth: DepthSettings | None, drafter: DrafterSettings | None
    ) -> None:
        if drafter is None:
            self.problems.extend(check_depths(callers, 0, "without a drafter nothing is drafted"))
        elif depth is not None and depth.max is not None:
            self.problems.extend(check_depths(callers, depth.max, f"depth.max, {depth.max}"))
        elif drafter.max_draft_tokens is not None:
            deepest = drafter.max_draft_tokens
            self.problems.extend(check_depths(callers, deepest, f"drafter.max_draft_tokens, {deepest}"))
