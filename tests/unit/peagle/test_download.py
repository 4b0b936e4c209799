"""Heads and targets by their Hugging Face ids: the real client of the hub, against a small hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from peagle.checkpoint import load_head, save_head
from tests.support.head_factory import REDUCED, TARGET, head_tensors

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
