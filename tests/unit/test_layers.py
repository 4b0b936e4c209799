"""The tree keeps the layers of DESIGN.md: who may import whom, one place that binds, one class of a name.

Rules are checked on the syntax tree, so nothing is imported and a violation is named with file and line. The second
half proves on synthetic sources that every rule can fail.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


OUTSIDE = frozenset({"deployments", "tests", "benchmarks"})
METHOD = OUTSIDE | {"ray", "cluster", "vllm", "peagle.vllm"}

# The first folder that holds a file decides.
LAYERS = (
    # The engine's scheduler counts, and trims by the same pure rule as the ingress chooses by.
    Layer(
        "peagle/vllm",
        never=OUTSIDE | {"ray", "cluster"},
        but=frozenset({"cluster.counts", "cluster.depth", "cluster.request", "cluster.step_time"}),
    ),
    Layer("peagle/drafter", never=METHOD | {"peagle.train"}),
    Layer("peagle/train", never=METHOD | {"peagle.drafter"}),
    Layer("peagle", never=METHOD | {"peagle.drafter"}),
    Layer(
        "cluster",
        only=frozenset({*sys.stdlib_module_names, "msgspec", "numpy", "pydantic", "yaml", "cluster", "peagle.schema"}),
    ),
    Layer("deployments", never=frozenset({"tests", "benchmarks"})),
    Layer("benchmarks", never=frozenset({"tests"})),
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
    return list(dict.fromkeys([*_import_violations(tree, path), *_binding_violations(tree, path)]))


def _import_violations(tree: ast.AST, path: str) -> Iterator[str]:
    layer = next((layer for layer in LAYERS if path.startswith(f"{layer.folder}/")), None)
    if layer is None:
        return
    for item in imports_of(tree, path):
        top = item.module.split(".")[0]
        banned, allowed = _first_above(item.module, layer.never), _first_above(item.module, layer.but)
        if banned and not allowed:
            yield f"{path}:{item.line}: {layer.folder}/ must not import {banned}"
        elif layer.only is not None and not _first_above(item.module, layer.only):
            yield f"{path}:{item.line}: {layer.folder}/ is pure and must not import {top}"


def _first_above(module: str, names: frozenset[str]) -> str | None:
    """The first of `names` that is `module` or a package above it."""
    return next((name for name in names if f"{module}.".startswith(f"{name}.")), None)


def _binding_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Ray Serve's `Deployment.bind` is called in one module only. A socket's `bind` gets one tuple or address, so it is
    known."""
    if path == BINDER or not path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or [type(argument) for argument in node.args] in (
            [ast.Tuple],
            [ast.JoinedStr],
        ):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "bind":
            yield f"{path}:{node.lineno}: only {BINDER} binds deployments"


def shared_class_names(modules: Iterable[tuple[str, str]]) -> list[str]:
    """Class names that more than one of the (path, source) use, each with its places."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, source in modules:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return [f"class {name} is in {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def source_files(folders: Iterable[str]) -> list[tuple[str, str]]:
    """(path from the root, text) of every module under `folders`."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def test_every_module_keeps_its_layer() -> None:
    files = source_files(SOURCES)
    assert {path.split("/")[0] for path, _ in files} >= {*PRODUCT, "tests"}, "a package was not found"
    found = [line for path, source in files for line in violations(source, path)]
    assert not found, "\n" + "\n".join(found)


def test_no_class_name_is_used_twice() -> None:
    found = shared_class_names(source_files(PRODUCT))
    assert not found, "\n" + "\n".join(found)
    assert shared_class_names([("peagle/a.py", "class A: ..."), ("cluster/b.py", "\nclass A: ...\nclass B: ...")]) == [
        "class A is in peagle/a.py:1, cluster/b.py:2"
    ]


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("peagle/evaluate.py", "import ray", "1: peagle/ must not import ray"),
        ("peagle/train/data.py", "\nfrom ray.serve import run", "2: peagle/train/ must not import ray"),
        ("peagle/model.py", "def f():\n    from cluster.settings import X", "2: peagle/ must not import cluster"),
        ("peagle/model.py", "import importlib\nimportlib.import_module('ray.data')", "2: peagle/ must not import ray"),
        ("peagle/model.py", "from vllm import LLM", "1: peagle/ must not import vllm"),
        ("peagle/model.py", "from peagle import vllm", "1: peagle/ must not import peagle.vllm"),
        ("peagle/model.py", "from .vllm import stats", "1: peagle/ must not import peagle.vllm"),
        ("peagle/heads/join.py", "from ..vllm import stats", "1: peagle/ must not import peagle.vllm"),
        ("peagle/drafter/rows.py", "import peagle.train.cod", "1: peagle/drafter/ must not import peagle.train"),
        ("peagle/drafter/rows.py", "from vllm import LLM", "1: peagle/drafter/ must not import vllm"),
        ("peagle/vllm/scheduler.py", "import deployments.app", "1: peagle/vllm/ must not import deployments"),
        ("peagle/vllm/scheduler.py", "import benchmarks.heads", "1: peagle/vllm/ must not import benchmarks"),
        ("peagle/vllm/scheduler.py", "import cluster.settings", "1: peagle/vllm/ must not import cluster"),
        ("cluster/depth.py", "import torch", "1: cluster/ is pure and must not import torch"),
        ("cluster/depth.py", "from peagle.config import HeadError", "1: cluster/ is pure and must not import peagle"),
        ("deployments/target.py", "import tests.conftest", "1: deployments/ must not import tests"),
        ("deployments/target.py", "app = Target.bind(settings)", "1: only deployments/app.py binds deployments"),
        ("cluster/new.py", "def f[T](x: T) -> T:\n    return x", "1: not Python 3.11: "),
    ],
)
def test_a_violation_is_named_with_file_and_line(path: str, source: str, reason: str) -> None:
    assert any(found.startswith(f"{path}:{reason}") for found in violations(source, path)), violations(source, path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("peagle/model.py", "import torch\nimport rayon\nfrom peagle.config import HeadConfig\nimport clusters"),
        ("peagle/vllm/scheduler.py", "from vllm.v1 import core\nfrom peagle.config import HeadError"),
        ("peagle/vllm/scheduler.py", "from cluster.depth import allocate"),
        ("cluster/depth.py", "import json\nimport numpy as np\nimport yaml\nfrom cluster.settings import Section"),
        ("deployments/target.py", "import ray\nfrom peagle.heads import prepare_head\nfrom cluster import settings"),
        ("deployments/app.py", "app = Target.bind(settings)"),
        ("deployments/up.py", "probe.bind(('127.0.0.1', 0))"),
        ("benchmarks/service.py", "import ray\nimport peagle.vllm.engine\nimport deployments.app"),
    ],
)
def test_what_the_layers_allow_passes(path: str, source: str) -> None:
    assert violations(source, path) == []
