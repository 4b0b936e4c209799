"""From a raw mapping (the YAML's `args`) to checked `ClusterSettings`, before anything is loaded.

Enters: the mapping, the environment, and a `Catalog` of what exists on this machine. Leaves: settings with every
default filled in, or one `SettingsError` that lists all problems, each with its path and what to write instead.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cluster import messages
from cluster.caller_settings import check_depths, read_callers
from cluster.depth_settings import DepthSettings, check_depth
from cluster.drafter_settings import DrafterSettings, check_placement, fill_remote, read_drafter
from cluster.drafting import is_workload_tag
from cluster.scaling_settings import AutoscalingSettings, check_autoscaling, check_sources
from cluster.settings import (
    OWNED_ENGINE_KEYS,
    CallerSettings,
    ClusterSettings,
    ModelSettings,
    TargetSettings,
)
from cluster.sources import SourceError, resolve_source

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
        raise SettingsError([f"args must be a mapping with the keys {messages.listed(_SECTIONS)}, not {raw!r:.80}"])
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
    if (record := messages.record_of(field.annotation)) is not None
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
            self.problems.append(f"{messages.listed(names)} contradict: keep one of them")
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
                self.problems.append(messages.unknown_key(str(key), "", ClusterSettings))

    def parse(self, name: str, value: Any) -> Any:
        """The section as its record; None (with the problems noted) when it does not fit."""
        if name not in _RECORDS:
            return value
        if value is None and name == "drafter":
            return None
        try:
            return _RECORDS[name].model_validate(value)
        except ValidationError as error:
            self.problems.extend(messages.problem(detail, name, _RECORDS[name]) for detail in error.errors())
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
                hint = messages.nearest(key, known)
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
