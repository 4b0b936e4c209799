"""A head's model card, made from what training wrote, and its upload."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard

from deployments.cli import main
from peagle.checkpoint import save_head
from peagle.heads import shipped_heads
from tests.support.head_factory import CONFIG, head_tensors

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
    speculative = {"method": "eagle3", "model": REPO, "num_speculative_tokens": 7, "parallel_drafting": True}
    assert json.loads(serve.split("'")[1]) == speculative
    here = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert here["drafter"] == {"head": REPO, "max_draft_tokens": 7}


def test_what_cannot_be_published_is_named(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(folder: Path, *more: str, repo: str = REPO) -> str:
        assert main(["publish", str(folder), "--repo", repo, "--dry-run", *more]) == 1
        return capsys.readouterr().err

    assert "'smollm2-135m-instruct' is no Hugging Face id: name it with --base-model" in refused(head)
    assert "--repo 'small' is no Hugging Face id" in refused(head, "--base-model", BASE, repo="small")
    shipped = shutil.copytree(SHIPPED, head.with_name("shipped"))
    message = f"is not in the form that vLLM loads: `peagle convert {shipped} OUT --target DIR`"
    assert message in refused(shipped, "--base-model", BASE)
    (head / "provenance.json").unlink()
    assert "provenance.json does not exist" in refused(head, "--base-model", BASE)


def test_a_head_is_uploaded_as_it_is(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, taken = [], {}

    def upload(_: HfApi, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **_more: str) -> None:
        taken.update({f"{repo_id}/{name}": (folder_path / name).read_bytes() for name in allow_patterns})

    monkeypatch.setattr(HfApi, "create_repo", lambda _, repo, **options: made.append(repo))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert main(["publish", str(head), "--repo", REPO, "--base-model", BASE]) == 0
    names = ("README.md", "config.json", "model.safetensors", "provenance.json")
    assert (made, taken) == ([REPO], {f"{REPO}/{name}": (head / name).read_bytes() for name in names})
