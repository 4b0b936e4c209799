"""The contracts of import-linter in pyproject.toml are kept, and so is what they cannot say: the policy is pure, one
module binds the application, a class name stands for one class."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("peagle", "cluster", "deployments")
BINDER = "deployments/app.py"


def test_imports_keep_the_contracts() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_policy_imports_plain_values_alone() -> None:
    graph = grimp.build_graph("cluster", include_external_packages=True, cache_dir=None)
    imported = set().union(*(graph.find_modules_directly_imported_by(module) for module in graph.modules))
    others = {name for name in imported if not name.startswith("cluster")} - sys.stdlib_module_names
    assert others <= {"msgspec", "numpy", "pydantic", "yaml", "peagle"}


def product() -> Iterator[tuple[str, ast.Module]]:
    """(path from the root, syntax tree) of every module."""
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def binds_a_deployment(tree: ast.Module) -> bool:
    """Whether Ray Serve's `Deployment.bind` is called. A socket's `bind` is known by its one tuple or address."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    arguments = [[type(one) for one in call.args] for call in calls if call.func.attr == "bind"]
    return any(types not in ([ast.Tuple], [ast.JoinedStr]) for types in arguments)


def test_one_module_binds_the_application() -> None:
    assert [path for path, tree in product() if binds_a_deployment(tree)] == [BINDER]


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(list)
    for path, tree in product():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
