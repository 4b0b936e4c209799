"""Heads and targets by their Hugging Face ids: the real client of the hub, against a small hub on this machine."""

import dataclasses
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


class HubHandler(BaseHTTPRequestHandler):
    """The part of the hub's API that `snapshot_download` asks for; files by "org/name/path"."""

    files: dict[str, bytes]
    sent: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if (data := self._answer()) is not None:
            self.wfile.write(data)

    def _answer(self) -> bytes | None:
        kind, _, path = self.path.partition("/resolve/")
        if path:
            name = f"{kind.strip('/')}/{path.partition('/')[2]}"
            data = self.files.get(name)
            self.sent += [name] if data is not None and self.command == "GET" else []
        else:
            repository = "/".join(kind.removeprefix("/api/models/").split("/")[:2])
            own = f"{repository}/"
            entries = {name.removeprefix(own): data for name, data in self.files.items() if name.startswith(own)}
            listed = [{"type": "file", "path": n, "size": len(d), "oid": digest(d)} for n, d in entries.items()]
            about = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": name} for name in entries]}
            data = json.dumps(listed if "/tree/" in kind else about).encode() if entries else None
        self.send_response(404 if data is None else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        if data is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_header("ETag", f'"{digest(data)}"')
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        return data

    def log_message(self, *args: object) -> None:
        """Quiet."""


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@dataclasses.dataclass
class Hub:
    url: str
    files: dict[str, bytes]
    sent: list[str]

    def put(self, repository: str, folder: Path) -> None:
        found = (path for path in folder.rglob("*") if path.is_file())
        self.files |= {f"{repository}/{path.relative_to(folder)}": path.read_bytes() for path in found}


@pytest.fixture
def hub() -> Iterator[Hub]:
    class Handler(HubHandler):
        files: dict[str, bytes] = {}  # noqa: RUF012 (of this server)
        sent: list[str] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Hub(f"http://127.0.0.1:{server.server_address[1]}", Handler.files, Handler.sent)
    server.shutdown()


def put_target(hub: Hub) -> None:
    """In three files, and once more in another format, as gpt-oss is."""
    tables = {
        name: save({name: torch.randn(TARGET["vocab_size"], TARGET["hidden_size"])})
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    index = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}
    index["lm_head.weight"] = "c.safetensors"
    hub.files |= {
        "org/target/config.json": json.dumps(TARGET).encode(),
        "org/target/model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
        "org/target/a.safetensors": tables["model.embed_tokens.weight"],
        "org/target/b.safetensors": b"layers, which no drafter needs",
        "org/target/c.safetensors": tables["lm_head.weight"],
        "org/target/original/model.safetensors": b"all of it again",
    }


def run(hub: Hub, cache: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache / "hub"), "PEAGLE_CACHE": str(cache)}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}", *arguments],
        env=environment, capture_output=True, text=True, timeout=400, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip


def head_directory(hub: Hub, cache: Path, head: str) -> subprocess.CompletedProcess[str]:
    code = "from deployments.checkpoints import head_directory; print(head_directory(*sys.argv[1:]))"
    return run(hub, cache, code, head, "org/target")


def test_of_the_target_only_its_tables_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    put_target(hub)
    hub.put("org/head", save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED, shipped=True)))
    hub.files["org/head/pytorch_model.bin"] = b"the same once more"
    done = head_directory(hub, tmp_path, "org/head")
    assert done.returncode == 0, done.stderr[-2000:]
    config, tensors = load_head(done.stdout.split()[-1])
    assert config == REDUCED
    assert tensors["lm_head.weight"].shape == (REDUCED.draft_vocab_size, REDUCED.hidden_size)
    assert sorted(hub.sent) == [
        "org/head/config.json",
        "org/head/model.safetensors",
        "org/target/a.safetensors",
        "org/target/c.safetensors",
        "org/target/config.json",
        "org/target/model.safetensors.index.json",
    ]


def test_a_recipes_target_is_downloaded_once_in_one_format(hub: Hub, tmp_path: Path) -> None:
    put_target(hub)
    hub.files["org/target/pytorch_model.bin"] = b"the same once more"
    code = "from peagle.train.recipe import Recipe; print(Recipe.load(sys.argv[1], sys.argv[2:]).target_dir())"
    recipe = str(Path(__file__).parents[3] / "configs/train/coder-peagle.yaml")
    done = run(hub, tmp_path, code, recipe, "target=org/target")
    assert done.returncode == 0, done.stderr[-2000:]
    names = {"config.json", "model.safetensors.index.json", *(f"{letter}.safetensors" for letter in "abc")}
    assert {path.name for path in Path(done.stdout.split()[-1]).iterdir()} == names
    assert run(hub, tmp_path, code, recipe, "target=org/missing").returncode != 0
