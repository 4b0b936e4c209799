"""Rounds of a learner without Serve, on a small random target: what is trained, judged, saved, and begun anew."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.heads import HeadTrial
from cluster.learning import KeptAnswer, TrafficBuffer
from cluster.settings import Catalog, ClusterSettings, load_settings
from deployments.learner import HeadsInUse, Rounds
from deployments.replicas import LiveHead
from peagle.checkpoint import read_head_config
from peagle.heads import candidate_files, head_digest, target_digest
from peagle.train.data import Conversations
from tests.support.small_run import write_small_head
from tests.unit.train.test_continual import SETTINGS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_head(tmp_path_factory.mktemp("small"))


def settings(small: Path, **learning: Any) -> ClusterSettings:
    args = {
        "model": {"id": "small", "source": str(small / "target")},
        "engine": {"dtype": "float32"},
        "target": {"bundle": {"CPU": 1}},
        "drafter": {
            "head": str(small / "run" / "head"),
            "placement": "remote",
            "max_draft_tokens": 4,
            "spare_heads": 1,
        },
        "learning": {
            "workloads": "all",
            "recipe": SETTINGS,
            "min_held_out": 2,
            "heads_dir": str(small / "learned"),
            "share": 1,
            **learning,
        },
    }
    return load_settings(args, Catalog((), small, read_head_config))


def answers_of(small: Path, workload: str, weights: str = "") -> list[KeptAnswer]:
    documents = Conversations.load(small / "data").documents()
    return [KeptAnswer(workload, "web", tokens[:prompt], tokens[prompt:], weights) for tokens, prompt in documents]


def trial(state: Any, head: str = "") -> HeadTrial:
    return HeadTrial("candidate-1", (), "", {}, state, head=head)


def test_a_round_is_trained_judged_saved_and_goes_on_or_begins_anew(small: Path) -> None:
    answers = pickle.loads(pickle.dumps(answers_of(small, "chat")))  # as they come from a target
    rounds, weights = Rounds(settings(small)), target_digest(small / "target")
    name = str(small / "run" / "head")
    live = LiveHead(0, name, head_digest(Path(name)))
    found = rounds.train(live, answers[:20], weights)
    assert found["num_steps"] == 40
    found |= rounds.judge(live.digest, answers[:20], answers[:20], {})
    assert found["verdict"] == "better"
    folder = rounds.save(live, {**found, "parent_digest": live.digest})
    assert folder.parent == small / "learned"
    learned = json.loads((folder / "provenance.json").read_text())["learned"]
    assert (learned["parent_digest"], learned["recent"]["num_answers"]) == (live.digest, 20)
    assert set(candidate_files(folder)) == {"config.json", "model.safetensors"}

    rounds.tell(live.digest, folder, trial("promoted", "abc"))
    rounds.train(LiveHead(0, "candidate-1", "abc"), answers[:20], weights)  # goes on; the name alone says nothing
    assert rounds.judge("abc", answers[:20], answers[:20], {})["recent"]["ratio"] < found["recent"]["ratio"]
    rounds.tell("abc", folder, trial("dropped", "def"))
    rounds.train(live, answers[:20], weights)
    again = rounds.judge(live.digest, answers[:20], answers[:20], {})
    assert again["recent"] == found["recent"], "from the head that drafts, as the first time"
    with pytest.raises(ValueError, match="candidate-gone, which drafts, is not on this node"):
        rounds.train(LiveHead(0, "candidate-gone", "ghi"), answers, weights)


def test_a_head_that_gains_for_one_workload_and_loses_for_another_is_proposed_for_that_one(small: Path) -> None:
    known, new = answers_of(small, "chat")[:12], answers_of(small, "sql")[12:]
    rounds, weights = Rounds(settings(small)), target_digest(small / "target")
    name = str(small / "run" / "head")
    live = LiveHead(0, name, head_digest(Path(name)))
    rounds.train(live, known, weights)
    folder = rounds.save(live, {})
    rounds.tell(live.digest, folder, trial("promoted", "abc"))
    rounds.train(LiveHead(0, "candidate-1", "abc"), new, weights)
    found = rounds.judge("abc", [*known, *new], known, {"sql": (new, new), "chat": (known, known)})
    parts = found["recent"]["by_workload"]
    assert parts["sql"]["low"] > 1 > parts["chat"]["high"]
    assert (list(found["alone"]), found["verdict"]) == (["sql"], "better")
    assert found["before"]["high"] < 1
    rounds.tell("abc", folder, trial("promoted", "def"))
    rounds.train(LiveHead(1, "candidate-2", "def"), new[:1], weights)  # it goes on as the workload's own


def test_it_rests_after_judging_as_after_each_step(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, rests = answers_of(small, "chat"), list[float]()
    rounds, weights = Rounds(settings(small, share=0.25)), target_digest(small / "target")
    name = str(small / "run" / "head")
    live = LiveHead(0, name, head_digest(Path(name)))
    monkeypatch.setattr("deployments.learner.time.sleep", rests.append)
    found = rounds.train(live, answers, weights)
    assert len(rests) == found["num_steps"] - 1
    found = rounds.judge(live.digest, answers, answers, {})
    assert rests[-1] == pytest.approx(3 * found["judging_s"], abs=0.2)


def test_which_head_drafts_for_which_workload(small: Path) -> None:
    drafter = settings(small).drafter
    assert drafter is not None
    heads = (LiveHead(0, "a", "aa"), LiveHead(1, "b", "bb"), LiveHead(2, "c", "cc"))
    drafter = drafter.model_copy(update={"heads_by_workload": {"code": "b", "sql": "b"}, "spare_heads": 2})
    in_use = HeadsInUse(drafter, heads, {"sql": "cc", "chat": "gone"})
    named = [in_use.head_of(workload).name for workload in ("code", "sql", "chat", "mail")]
    assert named == ["b", "c", "a", "a"]
    assert [in_use.workloads_of(head) for head in heads] == [(), ("code",), ("sql",)]
    assert not in_use.has_room
    assert HeadsInUse(drafter, heads, {}).has_room


def test_after_an_update_of_the_target_the_head_follows(small: Path, tmp_path: Path) -> None:
    """The buffer, and the rounds: the same folder holds other weights."""
    target = shutil.copytree(small / "target", tmp_path / "target")
    changed = settings(small)
    changed = changed.model_copy(update={"model": changed.model.model_copy(update={"source": str(target)})})
    rounds, buffer, old = Rounds(changed), TrafficBuffer(2**20, 3600), target_digest(target)
    name = str(small / "run" / "head")
    live = LiveHead(0, name, head_digest(Path(name)))
    before = answers_of(small, "chat", old)
    kept = len(buffer.add(before, 0))
    rounds.train(live, before, old)

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
    assert rounds.train(live, before[:3], new)["num_steps"] > 0
    assert torch.equal(rounds.target.embed_VS, model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match=f"has the weights {new} on this node, and the targets answer with {old}"):
        rounds.train(live, before, old)  # targets that did not restart


def test_a_folder_of_conversations_stands_for_the_mix_of_before(small: Path) -> None:
    rounds = Rounds(settings(small, replay=str(small / "data")))
    trained, judged = rounds.replayed(100) or ([], [])
    assert 100 <= sum(one.num_tokens for one in trained) <= 130
    assert 0 < len(judged) <= 4
    assert not {one.prompt.tobytes() for one in trained} & {one.prompt.tobytes() for one in judged}
    assert Rounds(settings(small)).replayed(100) is None
    assert TrafficBuffer(1000, 1, max_prompt_tokens=rounds.max_prompt_tokens).add(
        [KeptAnswer("chat", "web", np.arange(64, dtype=np.int32), np.arange(9, dtype=np.int32))], 0
    ) == []  # fmt: skip
