"""Rounds of a learner without Serve, on a small random target: what is trained, judged, saved, and begun anew."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.heads import HeadTrial
from cluster.learning import KeptAnswer, TrafficBuffer
from cluster.settings import Catalog, ClusterSettings, load_settings
from deployments.learner import Rounds
from deployments.replicas import LiveHead
from peagle.checkpoint import read_head_config
from peagle.heads import candidate_files, head_digest
from peagle.train.data import Conversations
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.small_run import write_small_run
from tests.test_continual import SETTINGS


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small_run(tmp_path_factory.mktemp("small"))
    overrides = [f"output={folder / 'run'}", "schedule.max_steps=5", "evaluate.data=null"]
    Trainer(Recipe.load(folder / "recipe.yaml", overrides)).run()
    return folder


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


def trial(state: Any, head: str = "") -> HeadTrial:
    return HeadTrial("candidate-1", (), "", {}, state, head=head)


def test_a_round_is_trained_judged_saved_and_goes_on_or_begins_anew(small: Path) -> None:
    documents = list(Conversations.load(small / "data").documents())
    answers = [KeptAnswer("chat", "web", tokens[:prompt], tokens[prompt:]) for tokens, prompt in documents]
    answers = pickle.loads(pickle.dumps(answers))  # as they come from a target
    rounds = Rounds(settings(small))
    name = str(small / "run" / "head")
    live = LiveHead(0, name, head_digest(Path(name)))
    found = rounds.train(0, live, answers[:20])
    assert found["num_steps"] == 40
    found |= rounds.judge(0, answers[:20], answers[:20])
    assert found["verdict"] == "better"
    folder = rounds.save(0, {**found, "parent_digest": live.digest})
    assert folder.parent == small / "learned"
    learned = json.loads((folder / "provenance.json").read_text())["learned"]
    assert (learned["parent_digest"], learned["recent"]["num_answers"]) == (live.digest, 20)
    assert set(candidate_files(folder)) == {"config.json", "model.safetensors"}

    rounds.tell(0, folder, trial("promoted", "abc"))
    rounds.train(0, LiveHead(0, "candidate-1", "abc"), answers[:20])  # goes on, where the name alone says nothing
    assert rounds.judge(0, answers[:20], answers[:20])["recent"]["ratio"] < found["recent"]["ratio"]
    rounds.tell(0, folder, trial("dropped", "def"))
    rounds.train(0, live, answers[:20])
    again = rounds.judge(0, answers[:20], answers[:20])
    assert again["recent"] == found["recent"], "from the head that drafts, as the first time"
    with pytest.raises(ValueError, match="candidate-gone, which drafts, is not on this node"):
        rounds.train(0, LiveHead(0, "candidate-gone", "ghi"), answers)


def test_a_folder_of_conversations_stands_for_the_mix_of_before(small: Path) -> None:
    rounds = Rounds(settings(small, replay=str(small / "data")))
    trained, judged = rounds.replayed(100, 3) or ([], [])
    assert 100 <= sum(one.num_tokens for one in trained) <= 130
    assert 0 < len(judged) <= 3
    assert not {one.prompt.tobytes() for one in trained} & {one.prompt.tobytes() for one in judged}
    assert Rounds(settings(small)).replayed(100, 3) is None
    assert TrafficBuffer(1000, 1, max_prompt_tokens=rounds.max_prompt_tokens).add(
        [KeptAnswer("chat", "web", np.arange(64, dtype=np.int32), np.arange(9, dtype=np.int32))], 0
    ) == []  # fmt: skip
