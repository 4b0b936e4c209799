"""Rounds of a learner without Serve, on a small random target: what is trained, judged, saved, and begun anew."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.heads import HeadChange, HeadRef
from cluster.learning import KeptAnswer, TrafficBuffer
from cluster.settings import Catalog, ClusterSettings, load_settings
from deployments.learner import HeadTrainer, load_answers
from peagle.checkpoint import read_head_config
from peagle.heads import candidate_files, head_digest, target_digest
from peagle.train.data import Conversations
from tests.support.small_run import write_small_head
from tests.unit.train.test_continual import SETTINGS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_head(tmp_path_factory.mktemp("small"))


def settings(small: Path, **learning: Any) -> ClusterSettings:
    defaults = {"workloads": "all", "recipe": SETTINGS, "min_held_out": 2, "share": 1}
    args = {
        "model": {"id": "small", "source": str(small / "target")},
        "engine": {"dtype": "float32"},
        "target": {"bundle": {"CPU": 1}},
        "drafter": {"head": head_of(small).name, "placement": "remote", "max_draft_tokens": 4, "spare_heads": 1},
        "learning": {"heads_dir": str(small / "learned"), **defaults, **learning},
    }
    return load_settings(args, Catalog((), small, read_head_config))


def head_of(small: Path) -> HeadRef:
    folder = small / "run" / "head"
    return HeadRef(str(folder), head_digest(folder))


def answers_of(small: Path, workload: str, weights: str = "") -> list[KeptAnswer]:
    documents = Conversations.load(small / "data").documents()
    return [KeptAnswer(workload, "web", tokens[:prompt], tokens[prompt:], weights) for tokens, prompt in documents]


def change(state: Any, head: str = "") -> HeadChange:
    return HeadChange("candidate-1", state=state, head=head)


def test_a_round_is_trained_judged_saved_and_begins_from_the_head_that_drafts(small: Path) -> None:
    answers = pickle.loads(pickle.dumps(answers_of(small, "chat")))  # as they come from a target
    trainer, weights, live = HeadTrainer(settings(small)), target_digest(small / "target"), head_of(small)
    found = trainer.train(live, answers[:20], weights)
    assert found["num_steps"] == 40
    found |= trainer.judge(answers[:20], answers[:20])
    assert found["verdict"] == "better"
    folder = trainer.save({**found, "parent_digest": live.digest})
    assert folder.parent == small / "learned"
    learned = json.loads((folder / "provenance.json").read_text())["learned"]
    assert (learned["parent_digest"], learned["recent"]["num_answers"]) == (live.digest, 20)
    assert set(candidate_files(folder)) == {"config.json", "model.safetensors"}

    trainer.end_trial(folder, change("promoted", "abc"))
    trainer.train(HeadRef("candidate-1", "abc"), answers[:20], weights)  # from what was saved
    later = trainer.judge(answers[:20], answers[:20])
    assert later["recent"]["ratio"] < found["recent"]["ratio"], "relative to the promoted one"
    trainer.end_trial(folder, change("dropped", "def"))
    trainer.train(live, answers[:20], weights)
    again = trainer.judge(answers[:20], answers[:20])
    assert again["recent"] == found["recent"], "from the head that drafts, as the first time"
    with pytest.raises(ValueError, match="candidate-gone, which drafts, is not on this node"):
        trainer.train(HeadRef("candidate-gone", "ghi"), answers, weights)


@pytest.mark.parametrize("is_own_folder", [True, False])
def test_a_head_that_was_not_promoted_leaves_the_cache(small: Path, tmp_path: Path, is_own_folder: bool) -> None:
    trainer = HeadTrainer(settings(small, heads_dir=str(tmp_path) if is_own_folder else None))
    folder = tmp_path / "head"
    folder.mkdir()
    trainer.end_trial(folder, change("dropped", "abc"))
    assert folder.exists() == is_own_folder


def test_it_rests_after_judging_as_after_each_step(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, rests = answers_of(small, "chat"), list[float]()
    trainer, weights = HeadTrainer(settings(small, share=0.25)), target_digest(small / "target")
    monkeypatch.setattr("deployments.learner.time.sleep", rests.append)
    found = trainer.train(head_of(small), answers, weights)
    assert len(rests) == found["num_steps"] - 1
    found = trainer.judge(answers, answers)
    assert rests[-1] == pytest.approx(3 * found["judging_s"], abs=0.2)


def test_after_an_update_of_the_target_the_head_follows(small: Path, tmp_path: Path) -> None:
    """The buffer, and the rounds: the same folder holds other weights."""
    target = shutil.copytree(small / "target", tmp_path / "target")
    changed = settings(small)
    changed = changed.model_copy(update={"model": changed.model.model_copy(update={"source": str(target)})})
    trainer, buffer, old = HeadTrainer(changed), TrafficBuffer(2**20, 3600), target_digest(target)
    live = head_of(small)
    before = answers_of(small, "chat", old)
    buffer.add(before, 0)
    kept = buffer.num_answers()["chat"]
    trainer.train(live, before, old)

    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(target)
    new = target_digest(target)
    assert new != old == target_digest(small / "target")
    buffer.add(answers_of(small, "chat", new)[:3], 1)
    assert (buffer.num_answers(), buffer.num_new) == ({"chat": 3}, {"chat": 3})
    assert buffer.counters["outdated"] == kept > 3
    assert trainer.train(live, before[:3], new)["num_steps"] > 0
    assert torch.equal(trainer.target.embed_VS, model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match=f"has the weights {new} on this node, and the targets answer with {old}"):
        trainer.train(live, before, old)  # targets that did not restart


def test_stored_conversations_are_replayed(small: Path) -> None:
    assert load_answers(None) == []
    stored = load_answers(str(small / "data"))
    assert [one.prompt.tolist() for one in stored] == [one.prompt.tolist() for one in answers_of(small, "replay")]
    assert HeadTrainer(settings(small)).max_prompt_tokens == 63, "of SETTINGS"
