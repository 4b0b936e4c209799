"""A head that is trained on: on a small random target it gains, and what is saved is what was judged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoint import load_head
from peagle.config import HeadError
from peagle.evaluate import AnswerCounts
from peagle.heads import prepare_head
from peagle.train.continual import HeadInTraining, compared, continual_recipe
from peagle.train.data import Conversations
from peagle.train.target import Target
from tests.support.small_run import write_small_head

K = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {"num_sequences": 4, "max_tokens": 64},
    "optimizer": {"muon_lr": 0.01, "lr": 0.01, "ema_decay": 0.5},
    "schedule": {"max_steps": 40, "warmup_steps": 5},
    "loss": {"chunk": 64},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its answers, and a head that knows little of them."""
    return write_small_head(tmp_path_factory.mktemp("small"))


def test_it_gains_from_round_to_round_and_its_file_is_the_head_that_was_judged(small: Path, tmp_path: Path) -> None:
    data, target, rests = Conversations.load(small / "data"), Target(small / "target"), []
    names = ["chat"] * len(data)
    head = HeadInTraining(SETTINGS, target, small / "run" / "head")
    figures = head.train(data, rests.append)
    assert (figures["num_steps"], len(rests)) == (40, 39)
    first = head.compare(data, K, names)
    assert first["low"] > 1
    assert first["acceptance_length_new"] > first["acceptance_length_current"]
    head.save(tmp_path / "learned", {"parent_digest": "abc"})
    assert json.loads((tmp_path / "learned" / "provenance.json").read_text())["parent_digest"] == "abc"
    again = HeadInTraining(SETTINGS, target, prepare_head(tmp_path / "learned", small / "target", tmp_path))
    stored = again.compare(data, K, names)
    assert stored["ratio"] == 1
    assert stored["acceptance_length_current"] == pytest.approx(first["acceptance_length_new"], rel=0.05)  # bfloat16
    head.train(data, rests.append)
    assert head.compare(data, K, names)["ratio"] > first["ratio"]


def test_joined_share_is_heeded(small: Path) -> None:
    """The first step's loss is another where the drafter sees all conversations as one document."""
    data, losses = Conversations.load(small / "data"), []
    for share in (0.0, 1.0, 1.0):
        batch, schedule = SETTINGS["batch"] | {"joined_share": share}, SETTINGS["schedule"] | {"max_steps": 1}
        settings = SETTINGS | {"batch": batch, "schedule": schedule}
        head = HeadInTraining(settings, Target(small / "target"), small / "run" / "head")
        losses.append(head.train(data, lambda _: None)["loss"])
    assert losses[1] == losses[2] != losses[0]


def test_a_head_in_vllms_form_keeps_its_own_tables(small: Path, tmp_path: Path) -> None:
    plain = prepare_head(small / "run" / "head", small / "target", tmp_path)
    before = load_head(plain)[1]
    head = HeadInTraining(SETTINGS, Target(small / "target"), plain)
    head.train(Conversations.load(small / "data"), lambda _: None)
    head.save(tmp_path / "learned", {})
    config, after = load_head(tmp_path / "learned")
    assert after.keys() == before.keys()
    changed = (after["embed_tokens.weight"] != before["embed_tokens.weight"]).any(dim=1).nonzero().flatten().tolist()
    assert changed == [config.ptd_token_id], "the mask token's row alone"
    assert not torch.equal(after["fc.weight"], before["fc.weight"])


def test_settings_of_a_round_are_checked() -> None:
    assert continual_recipe({"schedule": {"max_steps": 3}}).schedule.max_steps == 3
    with pytest.raises(ValueError, match=r"drafter is no section"):
        continual_recipe({"drafter": {"num_layers": 3}})
    with pytest.raises(ValueError, match=r"max_step\b"):
        continual_recipe({"schedule": {"max_step": 3}})


def test_an_eagle3_head_is_refused(small: Path) -> None:
    from peagle.heads import shipped_heads

    with pytest.raises(HeadError, match="EAGLE-3"):
        HeadInTraining({}, Target(small / "target"), shipped_heads()["smollm2-135m-instruct-eagle3"])


def test_without_answers_nothing_is_known() -> None:
    nothing = AnswerCounts.of([], K)
    found = compared(nothing, nothing)
    assert (found["num_answers"], found["low"], found["high"]) == (0, 1 / (K + 1), K + 1)
