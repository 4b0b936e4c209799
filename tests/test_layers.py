"""The tree keeps the layers of the design: who may import whom, one place that binds, and sizes that a reader can hold.

Rules are checked on the syntax tree, so nothing is imported and a violation is named with file and line. The second
half proves on synthetic sources that every rule can fail.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
PRODUCT = ("peagle", "cluster", "deployments")
SOURCES = (*PRODUCT, "benchmarks", "tests")


@dataclass(frozen=True)
class Layer:
    """What the modules under a folder may import: `only` these top-level packages (None: any) and `never` those, `but`
    for these modules of them."""

    folder: str
    never: frozenset[str] = frozenset()
    but: frozenset[str] = frozenset()
    only: frozenset[str] | None = None


# The first folder that holds a file decides.
LAYERS = (
    # The engine's scheduler trims by the same pure rule as the ingress chooses by.
    Layer(
        "peagle/vllm",
        never=frozenset({"ray", "cluster", "deployments", "tests", "benchmarks"}),
        but=frozenset({"cluster.depth", "cluster.step_time"}),
    ),
    Layer("peagle", never=frozenset({"ray", "cluster", "deployments", "tests", "benchmarks", "vllm", "peagle.vllm"})),
    Layer("cluster", only=frozenset({*sys.stdlib_module_names, "numpy", "pydantic", "yaml", "cluster"})),
    Layer("deployments", never=frozenset({"tests", "benchmarks"})),
)
BINDER = "deployments/app.py"  # the one module that composes the application


@dataclass(frozen=True)
class Import:
    line: int
    module: str  # full dotted name, relative imports resolved


def imports_of(tree: ast.AST, path: str) -> Iterator[Import]:
    """Every import of a module, also inside functions and under TYPE_CHECKING, and `import_module("literal")`.

    `path` is the module's path from the root, with slashes; relative imports are resolved against it.
    """
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from peagle import vllm` imports a module too: each name counts as a possible submodule.
            yield Import(node.lineno, module)
            yield from (Import(node.lineno, f"{module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and (module := _imported_by_call(node)):
            yield Import(node.lineno, module)


def _imported_by_call(node: ast.Call) -> str | None:
    """The module that `import_module("...")` or `__import__("...")` names literally, else None."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in {"import_module", "__import__"} or not node.args:
        return None
    module = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return module if isinstance(module, str) else None


def violations(source: str, path: str) -> list[str]:
    """What is wrong with one module, each as ``path:line: reason``."""
    try:
        tree = ast.parse(source, filename=path, feature_version=(3, 11))
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: not Python 3.11: {error.msg}"]
    found = [*_import_violations(tree, path), *_binding_violations(tree, path), *_size_violations(tree, source, path)]
    return list(dict.fromkeys(found))


def _import_violations(tree: ast.AST, path: str) -> Iterator[str]:
    layer = next((layer for layer in LAYERS if path.startswith(f"{layer.folder}/")), None)
    if layer is None:
        return
    for item in imports_of(tree, path):
        top = item.module.split(".")[0]
        banned, allowed = _first_above(item.module, layer.never), _first_above(item.module, layer.but)
        if banned and not allowed:
            yield f"{path}:{item.line}: {layer.folder}/ must not import {banned}"
        elif layer.only is not None and top not in layer.only:
            yield f"{path}:{item.line}: {layer.folder}/ is pure and must not import {top}"


def _first_above(module: str, names: frozenset[str]) -> str | None:
    """The first of `names` that is `module` or a package above it."""
    return next((name for name in names if f"{module}.".startswith(f"{name}.")), None)


def _binding_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Ray Serve's `Deployment.bind` is called in one module only. A socket's `bind` gets one tuple, so it is known."""
    if path == BINDER or not path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or [type(argument) for argument in node.args] == [ast.Tuple]:
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "bind":
            yield f"{path}:{node.lineno}: only {BINDER} binds deployments"


def _size_violations(tree: ast.AST, source: str, path: str) -> Iterator[str]:
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: function {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def source_files() -> list[Path]:
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_module_keeps_its_layer_and_size() -> None:
    files = source_files()
    assert {path.relative_to(ROOT).parts[0] for path in files} >= {*PRODUCT, "tests"}, "a package was not found"
    found = [
        line
        for path in files
        for line in violations(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("peagle/train.py", "import ray", "1: peagle/ must not import ray"),
        ("peagle/train.py", "\nfrom ray.serve import run", "2: peagle/ must not import ray"),
        ("peagle/train.py", "def f():\n    from cluster.settings import X", "2: peagle/ must not import cluster"),
        ("peagle/train.py", "import importlib\nimportlib.import_module('ray.data')", "2: peagle/ must not import ray"),
        ("peagle/model.py", "from vllm import LLM", "1: peagle/ must not import vllm"),
        ("peagle/model.py", "from peagle import vllm", "1: peagle/ must not import peagle.vllm"),
        ("peagle/model.py", "from .vllm import stats", "1: peagle/ must not import peagle.vllm"),
        ("peagle/heads/join.py", "from ..vllm import stats", "1: peagle/ must not import peagle.vllm"),
        ("peagle/vllm/scheduler.py", "import deployments.app", "1: peagle/vllm/ must not import deployments"),
        ("peagle/vllm/scheduler.py", "import cluster.settings", "1: peagle/vllm/ must not import cluster"),
        ("cluster/depth.py", "import torch", "1: cluster/ is pure and must not import torch"),
        ("cluster/depth.py", "from peagle.config import HeadError", "1: cluster/ is pure and must not import peagle"),
        ("deployments/target.py", "import tests.conftest", "1: deployments/ must not import tests"),
        ("deployments/target.py", "app = Target.bind(settings)", "1: only deployments/app.py binds deployments"),
        ("cluster/new.py", "def f[T](x: T) -> T:\n    return x", "1: not Python 3.11: "),
        ("peagle/long.py", "x = 1\n" * 301, "1: 301 lines, at most 300"),
        ("tests/test_long.py", "def f():\n" + "    x = 1\n" * 60, "1: function f has 61 lines, at most 60"),
        ("cluster/long.py", "async def g():\n" + "    x = 1\n" * 60, "1: function g has 61 lines, at most 60"),
    ],
)
def test_a_violation_is_named_with_file_and_line(path: str, source: str, reason: str) -> None:
    assert any(found.startswith(f"{path}:{reason}") for found in violations(source, path)), violations(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("peagle/train.py", "import torch\nimport rayon\nfrom peagle.model import Drafter\nimport clusters"),
        ("peagle/vllm/scheduler.py", "from vllm.v1 import core\nfrom peagle.config import HeadError"),
        ("peagle/vllm/scheduler.py", "from cluster.depth import allocate"),
        ("cluster/depth.py", "import json\nimport numpy as np\nimport yaml\nfrom cluster.settings import Section"),
        ("deployments/target.py", "import ray\nfrom peagle.heads import prepare_head\nfrom cluster import settings"),
        ("deployments/app.py", "app = Target.bind(settings)"),
        ("deployments/bench.py", "probe.bind(('127.0.0.1', 0))"),
        ("peagle/short.py", "x = 1\n" * 300),
        ("peagle/short.py", "def f():\n" + "    x = 1\n" * 59),
    ],
)
def test_what_the_layers_allow_passes(path: str, source: str) -> None:
    assert violations(source, path) == []
