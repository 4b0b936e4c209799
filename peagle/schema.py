"""Records that are read from outside: strict pydantic models, and errors that say where, what, what to write instead.

Settings of the cluster (`cluster.settings`) and recipes of training (`peagle.train.recipe`) are made of `Section`s. A
validator raises `ValueError`, or `SettingsError` for several, with text that continues the path of its field
(`.max is 8, above ...`), or a whole line where it is about another path. Imports nothing but pydantic, and yaml
to read a file.
"""

from __future__ import annotations

import difflib
import re
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

    elsewhere: typing.ClassVar[Mapping[str, str]] = {}
    """The same for keys that other programs have and users try."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def read(cls, raw: Any, path: str = "", context: Any = None) -> typing.Self:
        """The record in `raw`, which was read at `path`. Raises SettingsError, which lists every problem."""
        try:
            return cls.model_validate(raw, context=context)
        except ValidationError as error:
            raise SettingsError(problem_lines(error, cls, path)) from error


class SettingsError(ValueError):
    """The settings cannot be served. `problems` holds one line for each thing to mend."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        lines = "\n".join(f"  - {line}" for line in problems)
        plural = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{len(problems)} {plural} in the settings:\n{lines}")

    def __reduce__(self) -> tuple[type[SettingsError], tuple[list[str]]]:
        return SettingsError, (self.problems,)

    @classmethod
    def check(cls, problems: list[str]) -> None:
        """Raises where there are any."""
        if problems:
            raise cls(problems)


def problem_lines(error: ValidationError, model: type[BaseModel], path: str = "") -> list[str]:
    """The lines of a `ValidationError` of `model`, which was read at `path`."""
    lines: list[str] = []
    for detail in error.errors():
        keys = [str(key) for key in detail["loc"] if key != "[key]"]
        where = ".".join([path, *keys] if path else keys)
        raised = detail.get("ctx", {}).get("error")
        if detail["type"] == "value_error" and isinstance(raised, ValueError):
            texts = raised.problems if isinstance(raised, SettingsError) else [str(raised)]
            lines += [text if text[:1].isalpha() else where + text for text in texts]
        elif detail["type"] == "extra_forbidden":
            lines.append(_unknown_key(where, _model_at(model, keys[:-1])))
        elif detail["type"] == "missing":
            lines.append(f"missing key {where}")
        elif detail["type"] == "model_type" and keys:
            first = next(iter(_model_at(model, keys).model_fields))
            lines.append(f"{where} must be a mapping, such as {{{first}: ...}}, not {detail['input']!r:.80}")
        else:
            lines.append(f"{where}: {_said(detail)}" if where else _said(detail))
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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+$"), list("-+.0123456789")
)
"""9e-3 and 1.0e3 are numbers in YAML 1.2; PyYAML reads 1.1."""


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
        names = [name for detail in error.errors() for name in re.findall(r"'([^']+)'", detail["msg"])]
        hint = nearest(value, names) if isinstance(value, str) else ""
        said = " or ".join(dict.fromkeys(_said(detail) for detail in error.errors()))
        return [f"{path}: {said.replace(' or Input should be ', ' or ')}{hint}"]
    return []


def _said(detail: Any) -> str:
    """pydantic's words, with the value unless it holds others."""
    value, text = detail["input"], re.sub("valid dictionary.*", "mapping", detail["msg"])
    is_number = detail["type"] in ("float_type", "int_type")
    has_unit = is_number and isinstance(value, str) and re.fullmatch(r"\s*\d[\d.]*\s*[a-zA-Z%]+", value)
    hint = ": write the number alone, in the unit of the key" if has_unit else ""
    return text if isinstance(value, Mapping | list) else f"{text}, not {value!r:.80}{hint}"


def nearest(key: Any, known: Collection[str]) -> str:
    """`; did you mean X?` for the known name most like `key`, or nothing when none is like it."""
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.69)
    return f"; did you mean {close[0]}?" if close else ""


def listed(names: Collection[Any]) -> str:
    """`a, b and c`."""
    words = [str(name) for name in names]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _unknown_key(path: str, model: type[BaseModel]) -> str:
    """An unknown key with the nearest valid one, or with the one section here that has it."""
    above, dot, key = path.rpartition(".")
    if issubclass(model, Section) and key in model.removed:
        return f"{path} is no setting any more: {model.removed[key]}"
    if issubclass(model, Section) and key in model.elsewhere:
        return f"unknown key {path}: {model.elsewhere[key]}"
    inner = [f"{above}{dot}{name}.{key}" for name in model.model_fields if key in _model_at(model, [name]).model_fields]
    hint = f"; did you mean {inner[0]}?" if len(inner) == 1 else nearest(key, model.model_fields) or "."
    return f"unknown key {path}{hint} Valid keys here: {', '.join(model.model_fields)}"


def _model_at(model: type[BaseModel], keys: list[str]) -> type[BaseModel]:
    """The model that a path of keys leads to. The key of a mapping, or the place in a list, leads to the
    model of its values."""
    for key in keys:
        if key in model.model_fields:
            model = _model_in(model.model_fields[key].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model among the parts of an annotation, such as the values of a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)
