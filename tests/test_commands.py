"""Commands that documentation names can be typed: their modules, options and configs exist."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("peagle", "cluster", "deployments")
COMMAND = re.compile(rf"(?:python -m )?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?= |$)")


def in_backticks(text: str) -> Iterator[str]:
    """Spans of a page outside its blocks of code, broken lines joined."""
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield " ".join(span.split())


def in_lines(text: str) -> Iterator[str]:
    """Lines from `python -m` on, with a line behind that goes on with options."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if "python -m " in line:
            more = following.strip() if following.strip().startswith(("--", "[--")) else ""
            yield f"{line[line.index('python -m ') :]} {more}"


def documented() -> Iterator[tuple[str, str, str]]:
    """(where, module, the command from the module's name on)."""
    commands = [(page, span) for page in ("README.md", "results/README.md") for span in in_backticks(read(page))]
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        commands += [(str(path.relative_to(ROOT)), line) for line in in_lines(path.read_text(encoding="utf-8"))]
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            docstring = ast.get_docstring(ast.parse(source)) if "python -m" in source else None
            commands += [(str(path.relative_to(ROOT)), line) for line in in_lines(docstring or "")]
    for where, command in commands:
        if (found := COMMAND.match(command)) and " " in command:  # else it may be any module's name
            yield where, found[1], command[found.start(1) :]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def program(module: str) -> Path | None:
    """The file that `python -m` runs."""
    path = ROOT / module.replace(".", "/")
    return next((one for one in (path.with_suffix(".py"), path / "__main__.py") if one.exists()), None)


@pytest.mark.skip(reason="rewritten with the README, for the one command `peagle`")
def test_documented_commands_exist() -> None:
    wrong, num_options = [], 0
    for where, module, command in documented():
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", command))
        num_options += len(options)
        path = program(module)
        source = path.read_text(encoding="utf-8") if path else ""
        if "__main__" not in source:
            wrong.append(f"{where}: {module} is no program")
        wrong += [f"{where}: {module} has no {one}" for one in sorted(options) if f'"{one}"' not in source]
        wrong += [
            f"{where}: {config} is not there"
            for config in re.findall(r"configs/[\w/-]+\.yaml", command)
            if not (ROOT / config).exists() and config != "configs/X.yaml"
        ]
    assert wrong == []
    assert num_options > 100


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("deployments.train", ["--num-workers", "4"]),
        ("benchmarks.human_code", ["--out", "none", "--num", "3"]),
        ("peagle.train.stored", ["--max-batches", "2"]),
        ("peagle.vllm.generate", ["--prompts", "none.jsonl", "--out", "none"]),
    ],
)
def test_overrides_may_follow_the_options(monkeypatch: pytest.MonkeyPatch, module: str, options: list[str]) -> None:
    """Once the line is read, the recipe is looked for."""
    monkeypatch.setattr(sys, "argv", [module, "none.yaml", *options, "seed=1"])
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        importlib.import_module(module).main()
