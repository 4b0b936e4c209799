"""A head's model card, made from what training wrote, and its upload by the real client to a hub on this machine."""

import base64
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from deployments.cli import main
from peagle.checkpoint import save_head
from peagle.heads import shipped_heads
from tests.support.head_factory import CONFIG, head_tensors
from tests.unit.peagle.test_download import Hub, HubHandler, hub, run

assert hub  # a fixture
REPO, BASE = "org/small-P-EAGLE", "org/target"
NAMED = dataclasses.replace(CONFIG, num_depths=8)


SHIPPED = shipped_heads()["smollm2-135m-instruct"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Small, with the provenance of a real one."""
    head = save_head(tmp_path / "head", NAMED, head_tensors(NAMED))
    shutil.copy(SHIPPED / "provenance.json", head)
    return head


def test_the_card_says_how_the_head_was_made_what_it_brings_and_how_to_use_it(head: Path) -> None:
    provenance = json.loads((head / "provenance.json").read_text())
    lengths = provenance["acceptance_offline"]["humaneval"]["acceptance_length"]
    provenance["acceptance_offline"]["humaneval"]["acceptance_length_95"] = {"7": [4.25, 4.75]}
    (head / "provenance.json").write_text(json.dumps(provenance))
    command = ["publish", str(head), "--repo", REPO, "--base-model", BASE, "--note", "Of small use.", "--dry-run"]
    assert main(command) == 0
    card = ModelCard.load(head / "README.md")
    assert (card.data.base_model, card.data.license) == (BASE, "apache-2.0")
    text = card.text
    (line,) = [line for line in text.splitlines() if line.startswith("| humaneval |")]
    assert line.split("|")[2].strip() == "164"
    assert line.endswith(f"{lengths['7']:.2f} [4.25, 4.75] |")
    assert "Of small use." in text
    assert f"{provenance['training']['num_answer_tokens']:,} answer tokens" in text
    assert provenance["made"]["commit"] in text
    serve = next(line for line in text.splitlines() if line.startswith("vllm serve"))
    speculative = json.loads(serve.split("'")[1])
    assert speculative == {
        "method": "eagle3", "model": REPO, "num_speculative_tokens": 7, "parallel_drafting": True,
    }  # fmt: skip
    here = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert here["drafter"] == {"head": REPO, "max_draft_tokens": 7}


def test_what_cannot_be_published_is_named(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(head), "--repo", REPO, "--dry-run"]) == 1
    assert "'smollm2-135m-instruct' is no Hugging Face id: name it with --base-model" in capsys.readouterr().err
    assert main(["publish", str(head), "--repo", "small", "--base-model", BASE, "--dry-run"]) == 1
    assert "--repo 'small' is no Hugging Face id" in capsys.readouterr().err
    shipped = shutil.copytree(SHIPPED, head.with_name("shipped"))
    assert main(["publish", str(shipped), "--repo", REPO, "--base-model", BASE, "--dry-run"]) == 1
    assert f"is not in the form that vLLM loads: `peagle convert {shipped} OUT --target DIR`" in capsys.readouterr().err
    (head / "provenance.json").unlink()
    assert main(["publish", str(head), "--repo", REPO, "--base-model", BASE, "--dry-run"]) == 1
    assert "provenance.json does not exist" in capsys.readouterr().err


def take_commits(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Lets the hub take what a client commits; the files by "org/name/path"."""
    taken: dict[str, bytes] = {}

    def do_POST(self: HubHandler) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = self.path.strip("/").split("/")
        address = f"http://{self.headers['Host']}/{REPO}"
        answer: dict[str, Any] = {"url": address}
        if parts[-2] == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            answer = {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]}
        elif parts[-2] == "commit":
            repository = "/".join(parts[2:4])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    assert line["value"]["encoding"] == "base64"
                    taken[f"{repository}/{line['value']['path']}"] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{address}/commit/{'0' * 40}", "commitOid": "0" * 40, "hookOutput": ""}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    monkeypatch.setattr(HubHandler, "do_POST", do_POST, raising=False)
    return taken


def test_a_head_is_uploaded_as_it_is(hub: Hub, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = take_commits(monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    code = "from deployments.cli import main; sys.exit(main(['--traceback', 'publish', *sys.argv[1:]]))"
    done = run(hub, tmp_path, code, str(head), "--repo", REPO, "--base-model", BASE)
    assert done.returncode == 0, done.stderr[-2000:]
    names = ("README.md", "config.json", "model.safetensors", "provenance.json")
    assert taken == {f"{REPO}/{name}": (head / name).read_bytes() for name in names}
