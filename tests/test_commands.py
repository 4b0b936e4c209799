"""The command `peagle`: what it offers, how it fails, and that the commands which documentation names can be typed."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer

from deployments.cli import _show_answer, app, main

ROOT = Path(__file__).parents[1]
COMMANDS = typer.main.get_command(app).commands
PAGES = [ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.yaml")]
SOURCES = [
    path for package in ("peagle", "cluster", "deployments", "benchmarks") for path in ROOT.glob(f"{package}/**/*.py")
]


def documented() -> Iterator[tuple[str, str, str]]:
    """(file, program, what follows it): spans in backticks, and lines that begin with a program."""
    program = re.compile(r"^(?:\S*/)?(peagle|(?:python -m )?benchmarks\.\w+) +(.*)$")
    for path in PAGES + SOURCES:
        text = path.read_text(encoding="utf-8")
        spans = [
            " ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        ]
        lines = [re.sub(r"^[#\s$@|]*(?:Commands|Look:|exec)?\s*", "", line) for line in text.splitlines()]
        for command in [*spans, *lines]:
            if (found := program.match(command)) and not re.match(r"[a-z]+ [a-z]+ [a-z]+ ", command):
                yield str(path.relative_to(ROOT)), found[1].removeprefix("python -m "), found[2]


def test_documented_commands_exist() -> None:
    wrong, num_options = [], 0
    for where, program, rest in documented():
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest))
        num_options += len(options)
        if program == "peagle":
            name = rest.split()[0]
            if name.startswith(("-", ".")):
                continue
            if name not in COMMANDS:
                wrong.append(f"{where}: peagle has no {name}")
                continue
            known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        else:
            path = ROOT / (program.replace(".", "/") + ".py")
            source = path.read_text(encoding="utf-8") if path.exists() else ""
            if "__main__" not in source:
                wrong.append(f"{where}: {program} is no program")
            known = {option for option in options if f'"{option}"' in source or option[2:].replace("-", "_") in source}
        wrong += [f"{where}: {program} {rest.split()[0]} has no {option}" for option in sorted(options - known)]
        wrong += [
            f"{where}: {config} is not there"
            for config in re.findall(r"configs/[\w/-]+\.yaml", rest)
            if not (ROOT / config).exists() and config != "configs/X.yaml"
        ]
    assert wrong == []
    assert num_options > 10


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert COMMANDS[name].help.partition("\n")[0] in " ".join(capsys.readouterr().out.split())
    for parameter in COMMANDS[name].params:
        assert parameter.name == "help" or getattr(parameter, "help", None), f"{name}: {parameter.name} says nothing"


def test_help_loads_no_engine() -> None:
    """`peagle --help` answers at once: torch, Ray, vLLM and numpy are imported by the subcommand that needs them."""
    code = "import sys; from deployments.cli import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert not [name for name in ("torch", "ray", "vllm", "numpy") if f"'{name}'" in loaded]


def test_the_router_and_what_starts_the_service_load_no_engine() -> None:
    """vLLM takes ten seconds to import, on cores that the target's replica needs at the same time."""
    code = "import sys, deployments.router, deployments.up; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "line",
    [
        "train none.yaml --num-workers 4 seed=1",
        "generate none.yaml --prompts none.jsonl --out none seed=1",
        "tokenize none.yaml none.jsonl --out none",
    ],
)
def test_recipes_and_overrides(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides may follow options; then the recipe is looked for, and its absence is one line."""
    assert main(shlex.split(line)) == 1
    assert capsys.readouterr().err == "error: [Errno 2] No such file or directory: 'none.yaml'\n"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "none.yaml", "--prompts", "none.jsonl"]) == 1
    assert "--prompts needs --out" in capsys.readouterr().err
    assert main(["tran"]) == 2
    assert main(["view", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/drafting does not answer" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        main(["--traceback", "train", "none.yaml"])


def test_chat_shows_a_last_step_in_green_but_for_the_token_that_ends_the_turn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokens = [{"token": text, "bytes": list(text.encode())} for text in ("a", "b", "<end>")]
    choice = {"delta": {"content": "ab"}, "logprobs": {"content": tokens}, "finish_reason": "stop"}
    stream = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=stream))
    context = typer.Context(COMMANDS["chat"])
    context.color = True
    with context, httpx.Client(base_url="http://service", transport=transport) as client:
        assert _show_answer(client, {}) == "ab"
    shown = capsys.readouterr().out
    assert re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown) == ["a", "b"]
