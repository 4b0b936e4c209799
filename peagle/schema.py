"""Records that are read from outside: strict pydantic models, and errors that say where, what, what to write instead.

Settings of the cluster (`cluster.settings`) and recipes of training (`peagle.train.recipe`) are made of `Section`s. A
validator raises `ValueError`, or `Problems` for several, with text that continues the path of its field
(`.max is 8, above ...`), or a whole line where it is about another path. Imports nothing but pydantic, and yaml
to read a file.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError


class Section(BaseModel):
    """A record that is read from outside: strict, frozen, no unknown keys."""

    removed: typing.ClassVar[Mapping[str, str]] = {}
    """Keys that earlier versions had, each with what stands in its place: they are refused with that."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class SettingsError(ValueError):
    """The settings cannot be served. `problems` holds one line for each thing to mend."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {line}" for line in problems)
        plural = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{len(problems)} {plural} in the settings:\n{lines}")

    def __reduce__(self) -> tuple[type[SettingsError], tuple[list[str]]]:
        return SettingsError, (self.problems,)


class Problems(ValueError):
    """Several problems that one validator found."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = lines

    @classmethod
    def check(cls, lines: list[str]) -> None:
        """Raises where there are any."""
        if lines:
            raise cls(lines)


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_YAML_TYPES = {str: "the string", bool: "the truth value", int: "the integer", float: "the number"}


def problem_lines(error: ValidationError, model: type[BaseModel], path: str = "") -> list[str]:
    """The lines of a `ValidationError` of `model`, which was read at `path`."""
    lines: list[str] = []
    for detail in error.errors():
        keys = [str(key) for key in detail["loc"] if key != "[key]"]
        where = ".".join([path, *keys] if path else keys)
        raised = detail.get("ctx", {}).get("error")
        if detail["type"] == "value_error" and isinstance(raised, ValueError):
            texts = raised.lines if isinstance(raised, Problems) else [str(raised)]
            lines += [text if text[:1].isalpha() else where + text for text in texts]
        elif detail["type"] == "extra_forbidden":
            lines.append(_unknown_key(where, _model_at(model, keys[:-1])))
        elif detail["type"] == "missing":
            lines.append(f"missing key {where}")
        elif (expected := _EXPECTED.get(detail["type"])) is not None:
            place = f" at {where}" if where else ""
            lines.append(f"wrong type{place}: expected {expected}, got {_described(detail['input'])}")
        elif detail["type"] in ("greater_than_equal", "less_than_equal"):
            context = detail["ctx"]
            bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
            lines.append(f"{where} must be {bound}, not {detail['input']!r:.80}")
        elif detail["type"] == "literal_error":
            lines.append(f"{where} must be {detail['ctx']['expected']}, not {detail['input']!r:.80}")
        else:
            lines.append(f"{where}: {detail['msg']}, not {detail['input']!r:.80}" if where else detail["msg"])
    return lines


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping; PyYAML keeps the last one silently. `<<` may stand twice."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value} stands twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


def read_yaml(text: str | bytes, source: str | Path) -> Any:
    """The value of a YAML text. Raises ValueError naming its source, also for a key that stands twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is not YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{source} is not YAML that can be read: it is nested too deeply") from error


def type_problems(path: str, value: Any, expected: Any) -> list[str]:
    """What keeps `value`, which was read at `path`, from being of the type `expected`: a line, or none."""
    try:
        TypeAdapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        details = error.errors()
        if len(details) == 1:
            path = ".".join([path, *(str(key) for key in details[0]["loc"] if key != "[key]")])
        wanted, names = [], []
        for detail in details:
            known = detail.get("ctx", {}).get("expected", "") if detail["type"] == "literal_error" else ""
            names += re.findall(r"'([^']+)'", known)
            wanted.append(known or _EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be "))
        hint = nearest(value, names) if isinstance(value, str) else ""
        return [f"{path} must be {' or '.join(dict.fromkeys(wanted))}, not {details[0]['input']!r:.80}{hint}"]
    return []


def nearest(key: Any, known: Collection[str]) -> str:
    """`; did you mean X?` for the known name most like `key`, or nothing when none is like it."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.69)
    return f"; did you mean {close[0]}?" if close else ""


def listed(names: Collection[Any]) -> str:
    """`a, b and c`."""
    words = [str(name) for name in names]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _unknown_key(path: str, model: type[BaseModel]) -> str:
    """An unknown key with the nearest valid one. A key of a section below is pointed to there: `num_cpus` at the top
    level is `target.num_cpus` or `ingress.num_cpus`."""
    key = path.rpartition(".")[2]
    if issubclass(model, Section) and key in model.removed:
        return f"{path} is no setting any more: {model.removed[key]}"
    deeper = [
        f"{name}.{key}"
        for name, info in model.model_fields.items()
        for inner in _models_in(info.annotation)
        if key in inner.model_fields
    ]
    hint = f"; did you mean {listed(deeper)}?" if deeper else nearest(key, model.model_fields)
    return f"unknown key {path}{hint or '.'} Valid keys here: {', '.join(model.model_fields)}"


def _model_at(model: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """The model that a path of keys leads to. The key of a mapping, or the place in a list, leads to the
    model of its values."""
    for key in keys:
        if key in model.model_fields:
            annotation = model.model_fields[key].annotation
            model = next(iter(_models_in(annotation) or _models_in(annotation, of_values=True)), model)
    return model


def _models_in(annotation: Any, *, of_values: bool = False) -> list[type[BaseModel]]:
    """The models among the options of a field's annotation, or those of the values of a `dict` or `list` among them."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    options = typing.get_args(annotation) if is_union else (annotation,)
    if of_values:
        plain = (option.__origin__ if hasattr(option, "__metadata__") else option for option in options)
        options = tuple(typing.get_args(option)[-1] for option in plain if typing.get_origin(option) in (dict, list))
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _described(value: Any) -> str:
    """A value of a YAML file with its type, shortened."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"{_YAML_TYPES.get(type(value), type(value).__name__)} {value!r:.80}"
