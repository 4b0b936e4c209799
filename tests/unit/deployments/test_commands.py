"""The command `peagle`: what it offers, how it fails, and that the commands which documentation names can be typed."""

import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.cli import app, log_to_stderr, main
from peagle.checkpoint import save_head
from peagle.train.data import Conversations
from tests.support.head_factory import CONFIG, TARGET, head_tensors

ROOT = Path(__file__).parents[3]
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
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
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


def test_help_the_router_and_what_starts_the_service_load_no_engine() -> None:
    """`peagle --help` answers at once. vLLM takes ten seconds to import, on cores that the target's replica needs at
    the same time."""
    for code, heavy in (
        ("from deployments.cli import main; main(['--help'])", {"torch", "ray", "vllm", "numpy"}),
        ("import deployments.router, deployments.up", {"torch", "vllm", "transformers"}),
    ):
        command = [sys.executable, "-c", f"{code}; import sys; print({heavy} & set(sys.modules))"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        assert done.stdout.splitlines()[-1] == "set()"


def test_recipes_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides may follow options; then the recipe is looked for, and its absence is one line."""
    for line in (
        "train none.yaml --num-workers 4 seed=1",
        "generate none.yaml --prompts none.jsonl --out none seed=1",
        "tokenize none.yaml none.jsonl --out none seed=1",
    ):
        assert main(shlex.split(line)) == 1
        assert capsys.readouterr().err == "error: [Errno 2] No such file or directory: 'none.yaml'\n"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "none.yaml", "--prompts", "none.jsonl"]) == 1
    assert "--prompts needs --out" in capsys.readouterr().err
    assert main(["tran"]) == 2
    for line in (["view", "http://127.0.0.1:9"], ["chat", "Hello", "--url", "http://127.0.0.1:9"]):
        assert main(line) == 1
        assert re.search("error: http://127.0.0.1:9(/drafting)? does not answer: ", capsys.readouterr().err)
    with pytest.raises(FileNotFoundError):
        main(["--traceback", "train", "none.yaml"])


WRONG_FILES: dict[str, bytes | None] = {
    "missing": b"",
    "a directory": None,
    "empty": b"",
    "binary": b"\xff\xfe\x00\x01" * 64,
    "text": b"<html>not found</html>",
    "nested": b"[" * 20_000,
    "a list": b"[1]\n",
    "a number": b"3\n",
    "no keys": b"{}\n",
    "wrong keys": b'{"model": [1], "target": {"a": 1}, "applications": 3, "recipe": 3, "categories": 5, "messages": 3}',
}
FILES_OF_COMMANDS = {
    "serve {}": "service.yaml",
    "manifest {}": "service.yaml",
    "train {}": "recipe.yaml",
    "generate {}": "recipe.yaml",
    "tokenize {} good/lines.jsonl --out out": "recipe.yaml",
    "generate good/recipe.yaml --prompts {} --out out": "lines.jsonl",
    "tokenize good/recipe.yaml {} --out out": "lines.jsonl",
    "batch {}": "requests.jsonl",
    "convert {head} out": "head/config.json",
    "convert {head} out ": "head/model.safetensors",
    "publish {head} --repo a/b --dry-run": "head/provenance.json",
    "publish {head} --repo a/b --dry-run ": "head/config.json",
    "prepare --head {head}": "head/config.json",
    "evaluate good/head {head} --target good/target": "head/manifest.json",
    "evaluate {head} good/data --target good/target": "head/config.json",
    "evaluate good/head good/data --target {head}": "head/config.json",
    "tokenize good/other.yaml good/lines.jsonl --out out": "head/tokenizer.json",
    "tokenize good/other.yaml good/lines.jsonl --out out ": "head/config.json",
}


@pytest.fixture(scope="module")
def good(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of each kind, in the folder `good` of it."""
    folder = tmp_path_factory.mktemp("files")
    made = folder / "good"
    save_head(made / "head", CONFIG, head_tensors(CONFIG))
    (made / "head/provenance.json").write_text("{}")
    torch.manual_seed(0)
    llama = LlamaConfig(**TARGET, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False)
    LlamaForCausalLM(llama).save_pretrained(made / "target")
    data = Conversations.from_lists([[1, 2]], [[3, 4]])
    data.save_part(made / "data", "00")
    (made / "data/manifest.json").write_text('{"categories": ["default"]}')
    (made / "lines.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    recipe: dict[str, Any] = {"target": str(target_dir), "data": str(made / "data"), "output": "out"}
    recipe["drafter"] = {"num_layers": 1, "ptd_token_id": 5}
    (made / "recipe.yaml").write_text(json.dumps(recipe))
    (made / "other.yaml").write_text(json.dumps(recipe | {"target": "wrong/head"}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target_dir / file, made / "head" / file)
    return folder


@pytest.mark.parametrize("kind", WRONG_FILES)
@pytest.mark.parametrize("line", FILES_OF_COMMANDS)
def test_a_wrong_file_is_one_line_that_names_it(good: Path, line: str, kind: str, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(good)
    name, content = FILES_OF_COMMANDS[line], WRONG_FILES[kind]
    folder = Path("wrong")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("good/head", folder / "head")
    if "manifest.json" in name:
        shutil.copytree("good/data", folder / "head", dirs_exist_ok=True)
    path = folder / name
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content)
    arguments = shlex.split(line.format(path, head=folder / "head"))
    assert main(arguments) == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    error = shown[shown.index("error: ") :]
    assert "unexpected" not in error
    assert str(path) in error or str(path.parent) in error


def test_an_error_that_nobody_has_thought_of_is_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.up.read_config", lambda path: {}["applications"])
    assert main(["serve", "none.yaml"]) == 1
    shown = capsys.readouterr().err
    assert shown == "error: unexpected KeyError('applications'); `peagle --traceback ...` shows where\n"
    with pytest.raises(KeyError):
        main(["--traceback", "serve", "none.yaml"])


def test_check_says_what_a_config_asks_for_and_starts_nothing(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text((ROOT / "configs" / "gpu-remote.yaml").read_text().replace("amazon/", "my-org/"))
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "replicas at the most: 1 targets, 1 drafters" in said
    assert "GPU 2" in said
    assert "-FP8, on GPU, served as" in said
    head, target = "my-org/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"
    absent = f"{target} (a Hugging Face id?), {head} (a Hugging Face id?)"  # sorted
    assert said.splitlines()[-1] == f"ok; not here yet, so their shapes are not checked: {absent}"
    assert "P-EAGLE, remote, K_max " in said  # and not vLLM's name of the method, which is eagle3


def test_check_says_what_it_did_not_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "configs" / "coder.yaml").read_text().replace("deployments.app:build", "mine.app:build")
    callers = "    args:\n      callers: {web: {key_env: WEB_KEY}}\n"
    (path := tmp_path / "c.yaml").write_text(text.replace("    args:\n", callers))
    assert main(["check", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3] == "peagle needs API keys in the environment: WEB_KEY"
    assert lines[-2] == "peagle is built by mine.app:build; its args were checked as those of deployments.app:build"
    assert lines[-1].startswith("to be replaced by yours before it can be served: YOUR_ORG/Qwen")


def test_commands_do_not_log_each_request_of_their_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in ("httpx", "httpx2")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    log_to_stderr()
    assert [logger.level for logger in loggers] == [logging.WARNING, logging.WARNING]


def test_heads_says_so_where_none_has_changed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.view.fetch", lambda url, api_key: {"head_changes": []})
    assert main(["heads"]) == 0
    assert capsys.readouterr().out == "no trial and no change of heads\n"


def test_view_says_that_it_needs_a_key(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = httpx.Response(401, request=httpx.Request("GET", "http://a/drafting"))
    monkeypatch.setattr(httpx, "get", lambda *_, **options: refused)
    assert main(["view", "http://a", "--once"]) == 1
    assert capsys.readouterr().err == "error: http://a/drafting answered 401: write --api-key, or set PEAGLE_API_KEY\n"


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"peagle [\d.]+\S*, vLLM 0\.\d+\S*, Ray 2\.\d+\S*\n", capsys.readouterr().out)
