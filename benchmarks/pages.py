"""What is made from code: in `docs/` the tables of settings, training recipe, metrics and alerts, and the charts; and
`configs/schema.json`, by which editors check and complete a config.

    python -m benchmarks.pages [--check]

A page holds `<!-- made: NAME -->` and `<!-- end -->`; what stands between them is replaced. `--check` writes nothing
and fails where a page is old. `make docs` runs it.
"""

import argparse
import ast
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from benchmarks.chart import CHARTS, svg
from cluster.settings import ClusterSettings
from deployments.gateway import GATEWAY_PATH, GatewaySettings
from deployments.metrics import FAMILIES, LEARNED, PREFIX, REMOTE, SCALED, SEVERAL
from deployments.telemetry import ENGINE_PREFIX
from peagle.train.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCHEMA = ROOT / "configs" / "schema.json"
BEGIN, END = "<!-- made: {} -->\n", "<!-- end -->"

UNITS = {
    "_s": "s", "_ms": "ms", "_gib": "GiB", "_mib": "MiB", "_bytes": "bytes", "in_flight": "bytes", "_hours": "h",
    "_minutes": "min", "_cpus": "CPUs", "_gpus": "GPUs", "_replicas": "replicas", "_requests": "requests",
    "_sequences": "sequences", "_values": "values", "_entries": "entries", "_logprobs": "values", "_tokens": "tokens",
    "_heads": "heads", "_answers": "answers", "_held_out": "answers", "_per_minute": "per minute",
    "_per_day": "per day", "max_k": "tokens", "share": "share", "utilisation": "share", "_gain": "share",
    "_loss": "share", "ratio": "share", "_steps": "steps", "_workers": "engines", "_rounds": "rounds",
    "_conversations": "conversations", "_depths": "tokens", "_layers": "layers", "_size": "width",
    "_segments": "parts", "chunk": "rows",
}  # fmt: skip
"""Unit by the end of a key's name, for numbers."""
OWN_UNITS = {
    "default": "tokens", "max": "tokens", "min": "replicas", "by_workload": "tokens",
    "max_running_requests": "sequences", "max_queued_requests": "sequences",
}  # fmt: skip
KINDS = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "text"}
BOUNDS = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
SECTION_NAMES = {"callers": "callers.NAME", "num_draft_tokens.objectives": "num_draft_tokens.objectives.WORKLOAD"}


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    names = header.split(", ")
    lines = [names, ["---"] * len(names), *rows]
    return "".join("| " + " | ".join(cell or " " for cell in line) + " |\n" for line in lines)


def kind_of(annotation: Any) -> str:
    """A type in words: `integer`, `list of text`, `adaptive` or `fixed`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(kind_of(option) for option in inner if option is not type(None))
    if origin is typing.Annotated:
        return kind_of(inner[0])
    if origin is list:
        return f"list of {kind_of(inner[0])}"
    if origin is tuple:
        return "list of numbers"
    if origin is dict:
        return "mapping" if inner[1] is Any else f"mapping to {kind_of(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return KINDS.get(annotation, "any")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field holds, as its value or as the values of its mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from models_in(inner)


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value is None or value in ("", {}, []):
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"{value:,}".removesuffix(".0")
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=200).splitlines()[0]}`"


def unit_of(name: str, kind: str, path: str) -> str:
    """ "" for what is no number."""
    if not any(word in kind for word in ("integer", "number")):
        return "-"
    if name in OWN_UNITS:
        return "replicas" if path.startswith("autoscaling") else OWN_UNITS[name]
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "-")


def bounds_of(field: FieldInfo) -> str:
    kinds = (kind for kind in typing.get_args(field.annotation) if typing.get_origin(kind) is typing.Annotated)
    inner = [bound for kind in kinds for part in kind.__metadata__ for bound in getattr(part, "metadata", ())]
    all_bounds = [*field.metadata, *inner]
    found = ((sign, bound) for sort, sign in BOUNDS.items() for bound in all_bounds if isinstance(bound, sort))
    return "".join(f", {sign} {getattr(bound, type(bound).__name__.lower()):g}" for sign, bound in found)


def settings_tables(model: type[BaseModel], path: str = "", level: int = 3) -> str:
    """A heading and a table for each section, in the order of the schema."""
    rows, sections = [], []
    for name, field in model.model_fields.items():
        where = f"{path}.{name}" if path else name
        kind = kind_of(field.annotation)
        if found := list(models_in(field.annotation)):
            where = SECTION_NAMES.get(where, where)
            anchor = where.lower().replace(".", "")  # as GitHub makes it of the heading
            kind = kind.replace("section", f"[section](#{anchor})")
            sections.append((found[0], where))
        unit, text = unit_of(name, kind, path), field.description or ""
        rows.append([f"`{name}`", kind + bounds_of(field), default_of(field), unit, text])
    title = f"`{path}`" if path else "All sections"
    parts = [f"{'#' * level} {title}\n\n{table('key, type, default, unit, meaning', rows)}"]
    return "\n".join([*parts, *(settings_tables(inner, where, level) for inner, where in sections)])


def removed_table() -> str:
    """Settings that earlier versions had, by their paths, and what stands in their place."""

    def rows(model: type[BaseModel], path: str) -> Iterator[list[str]]:
        for key, hint in getattr(model, "removed", {}).items():
            yield [f"`{path}{key}`", hint]
        for name, field in model.model_fields.items():
            where = SECTION_NAMES.get(f"{path}{name}", f"{path}{name}")
            for inner in models_in(field.annotation):
                yield from rows(inner, f"{where}.")

    return table("setting, in its place", rows(ClusterSettings, ""))


def metrics_tables() -> str:
    parts = []
    for where, title in (
        ("", "### Always"),
        (SEVERAL, "### With `target.front_ends` above 1"),
        (REMOTE, "### With `drafter.placement: remote`"),
        (SCALED, "### With a section `autoscaling`"),
        (LEARNED, "### With a section `learning`"),
    ):
        rows = [
            [f"`{PREFIX}{name}{'_total' if family.kind == 'counter' else ''}`", family.kind, family.labels, family.text]
            for name, family in FAMILIES.items()
            if family.where == where
        ]
        parts.append(f"{title}\n\n{table('metric, type, labels, meaning', rows)}")
    return "\n".join(parts)


def engine_families() -> dict[str, tuple[str, str, str]]:
    """vLLM's families, from its source: kind, labels and meaning by name, as `/metrics` shows them."""
    spec = importlib.util.find_spec("vllm")
    source = Path(str(spec and spec.origin)).with_name("v1") / "metrics" / "loggers.py"
    found = {}
    for call in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        given = {one.arg: one.value for one in call.keywords}
        name, text = (getattr(given.get(key), "value", None) for key in ("name", "documentation"))
        if not str(name).startswith(ENGINE_PREFIX):
            continue
        kind = call.func.attr.strip("_").removesuffix("_cls")
        own = (node.value for node in ast.walk(given["labelnames"]) if isinstance(node, ast.Constant))
        labels = dict.fromkeys(["model_name", "engine", "replica", *map(str, own)])
        meaning = " ".join(str(text).split()).partition(". ")[0].rstrip(".") + "."
        found[f"{name}{'_total' if kind == 'counter' else ''}"] = kind, " ".join(labels), meaning
    return dict(sorted(found.items()))


def engine_table() -> str:
    families = engine_families().items()
    rows = ([f"`{name}`", kind, " ".join(labels.split()[3:]), text] for name, (kind, labels, text) in families)
    return table("metric, type, further labels, meaning", rows)


def config_schema() -> str:
    """JSON Schema of a config: Ray Serve's own keys are left to Ray, the settings under `args` are ours."""
    settings = ClusterSettings.model_json_schema()
    known = {"type": "object", "properties": {"args": {"$ref": "#/$defs/ClusterSettings"}}}
    is_gateway = {"properties": {"import_path": {"const": GATEWAY_PATH}}, "required": ["import_path"]}
    gateway = {"type": "object", "properties": {"args": GatewaySettings.model_json_schema()}}
    # vLLM's own JSON may stand in place of a section.
    own = {**settings["properties"], "speculative_config": {"description": "vLLM's, in place of `drafter`."}}
    definitions = settings.pop("$defs") | {"ClusterSettings": {**settings, "properties": own}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A service's Ray Serve config",
        "type": "object",
        "properties": {"applications": {"type": "array", "items": {"if": is_gateway, "then": gateway, "else": known}}},
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1) + "\n"


def alerts_table() -> str:
    spec = yaml.safe_load((ROOT / "k8s/components/monitoring/alerts.yaml").read_text(encoding="utf-8"))["spec"]
    rules = [rule for group in spec["groups"] for rule in group["rules"]]
    rows = ([f"`{one['alert']}`", one["labels"]["severity"], one.get("for", "at once"), _plain(one)] for one in rules)
    return table("alert, severity, lasts, what it says", rows)


def _plain(rule: dict[str, Any]) -> str:
    """The summary, with the names of labels in place of their values."""
    return str(rule["annotations"]["summary"]).replace("{{ $labels.", "`").replace("{{ $", "`").replace(" }}", "`")


MADE: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {"settings": lambda: settings_tables(ClusterSettings)},
    "changelog.md": {"removed": removed_table},
    "recipe.md": {"recipe": lambda: settings_tables(Recipe)},
    "metrics.md": {"metrics": metrics_tables, "engine metrics": engine_table, "alerts": alerts_table},
}
"""Page -> name of a part -> what makes it."""


def renewed(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """A page with its made parts as they are to be. Raises ValueError where a part's marks are not there."""
    for name, make in parts.items():
        begin = BEGIN.format(name)
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(END)
        if not found or not closed:
            raise ValueError(f"no {begin.strip()} ... {END}")
        text = f"{before}{begin}\n{make()}\n{END}{after}"
    return text


def old_pages() -> dict[Path, str]:
    """Pages whose made parts are old, the charts and the schema, with the text that they should have."""
    wanted = {DOCS / name: renewed((DOCS / name).read_text(encoding="utf-8"), parts) for name, parts in MADE.items()}
    wanted |= {DOCS / name: svg(chart) for name, chart in CHARTS.items()}
    wanted[SCHEMA] = config_schema()
    there = {path: path.read_text(encoding="utf-8") for path in wanted if path.exists()}
    return {path: text for path, text in wanted.items() if there.get(path) != text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is old")
    check = parser.parse_args().check
    for path, text in (old := old_pages()).items():
        print(f"{path.relative_to(ROOT)}: {'old; run make docs' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
