"""Words for what is wrong with a settings file: the key, its path, and what to write instead."""

import difflib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

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
