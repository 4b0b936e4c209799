"""Names, types and bounds of vLLM's settings, read from its source: importing vLLM takes ten seconds.

Enters: dataclasses of vLLM as "path/of/file:Class". Leaves: a mapping from a field's name to the type by which pydantic
checks its value. A type is read when it is asked for; `Any` where the source does not tell.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

PARSERS = {
    "tool_call_parser": ("tool_parsers/__init__", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Settings that name a parser, and the table of vLLM that has the names."""

_PLAIN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "Any": Any, "list": list, "dict": dict}
_BOUNDS = {"gt", "ge", "lt", "le"}
_METHODS = re.compile(r"^    (?:@|def |async def ).*\n(?:(?:     .*|    \).*)?\n)*", re.MULTILINE)


class SettingTypes(Mapping[str, Any]):
    """Types by a setting's name."""

    def __init__(self, fields: Mapping[str, ast.AnnAssign]) -> None:
        self._fields = fields

    @classmethod
    def read(cls, *records: str) -> Self | None:
        """The fields of these dataclasses. None where vLLM is not installed, or keeps them elsewhere."""
        fields: dict[str, ast.AnnAssign] = {}
        for record in records:
            file, _, name = record.partition(":")
            found = _fields_of(_source(f"{file}.py"), name)
            if found is None:
                return None
            fields |= found
        return cls(fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, name: str) -> Any:
        field = self._fields[name]
        if name in PARSERS and (names := _parser_names(*PARSERS[name])):
            return Literal[names] | None
        found = _type_of(field.annotation)
        # An engine argument takes its default, and with it its bounds, from one of the configurations.
        value = field.value
        default = _referred(value) or value
        keywords = {keyword.arg: keyword.value for keyword in default.keywords} if _is_field(default) else {}
        bounds = {name: ast.literal_eval(value) for name, value in keywords.items() if name in _BOUNDS}
        options = typing.get_args(found) if typing.get_origin(found) is typing.Union else (found,)
        bounded = [
            Annotated[option, Field(**bounds)] if option in (int, float) and bounds else option for option in options
        ]
        default = keywords.get("default", default)
        if isinstance(default, ast.Constant) and default.value is None:
            bounded.append(None)
        return typing.Union[tuple(bounded)]  # noqa: UP007


def _type_of(node: ast.expr) -> Any:
    """The type that an annotation names, `Any` where it is none of the plain ones."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return _PLAIN.get(name) or _alias(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_type_of(left), _type_of(right)]  # noqa: UP007
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            constants = tuple(value.value for value in values if isinstance(value, ast.Constant))
            return Literal[constants] if len(constants) == len(values) else Any
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return list[_type_of(inner)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, inner])):
            return dict[_type_of(key), _type_of(inner)]  # type: ignore[misc]
    return Any


@functools.cache
def _alias(name: str) -> Any:
    """A type that vLLM's configurations call by a name of their own: the literals of it."""
    for source in _config_sources():
        if found := re.search(rf"^{name}(?:: *\w+)? = (Literal\[[^\[\]]*\])$", source, re.MULTILINE):
            return _type_of(ast.parse(found[1], mode="eval").body)
    return Any


def _referred(value: ast.expr | None) -> ast.expr | None:
    """The default that `CacheConfig.block_size` or `get_field(CacheConfig, "block_size")` stands for."""
    match value:
        case ast.Attribute(value=ast.Name(id=record), attr=name):
            pass
        case ast.Call(func=ast.Name(id="get_field"), args=[ast.Name(id=record), ast.Constant(value=str(name))]):
            pass
        case _:
            return None
    sources = (source for source in _config_sources() if re.search(rf"^class {record}\b", source, re.MULTILINE))
    field = (_fields_of(next(sources, ""), record) or {}).get(name)
    return None if field is None else field.value


def _is_field(node: ast.expr | None) -> typing.TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field"


@functools.cache
def _fields_of(source: str, name: str) -> dict[str, ast.AnnAssign] | None:
    """Fields of a dataclass and of its bases in the same file. None: no such class. Methods are left out before the
    class is parsed: they are nearly all of it."""
    found = re.search(rf"^class {name}\b.*\n(?:[ \t)].*\n|\n)*", source, re.MULTILINE)
    if found is None:
        return None
    (node,) = ast.parse(_METHODS.sub("", found[0])).body
    assert isinstance(node, ast.ClassDef)
    fields: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        inherited = _fields_of(source, base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    named = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    return fields | {line.target.id: line for line in named if isinstance(line.target, ast.Name)}


@functools.cache
def _parser_names(file: str, table: str) -> tuple[str, ...]:
    source = _source(f"{file}.py")
    found = re.search(rf"^{table}\b.*?= (\{{.*?^\}})", source, re.MULTILINE | re.DOTALL)
    return tuple(sorted(ast.literal_eval(found[1]))) if found else ()


@functools.cache
def _config_sources() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in sorted(_folder().glob("config/*.py")))


def _source(file: str) -> str:
    path = _folder() / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _folder() -> Path:
    """vLLM's folder; one that does not exist where vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    places = None if spec is None else spec.submodule_search_locations
    return Path(places[0]) if places else Path("/nonexistent")
