"""A head that is trained on: on a small random target it gains, and what is saved is what was judged."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoint import is_plain, load_head
from peagle.config import UNNAMED_LAYERS, HeadError
from peagle.heads import shipped_heads
from peagle.train.continual import HeadInTraining, continual_recipe
from peagle.train.data import Conversations
from peagle.train.target import Target
from tests.support.head_factory import reconfigure
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
    head = HeadInTraining(SETTINGS, target, small / "run" / "head", 6)
    figures = head.train(data, rests.append)
    assert (figures["num_steps"], len(rests), len(figures["accuracy"])) == (40, 39, 4)
    first = head.compare(data, K, names)
    assert first["low"] > 1
    assert first["acceptance_length_new"] > first["acceptance_length_current"]
    head.save(tmp_path / "learned", {"parent_digest": "abc"})
    assert json.loads((tmp_path / "learned" / "provenance.json").read_text())["parent_digest"] == "abc"
    assert is_plain(tmp_path / "learned", load_head(tmp_path / "learned")[0])
    again = HeadInTraining(SETTINGS, target, tmp_path / "learned", 6)
    stored = again.compare(data, K, names)
    assert stored["ratio"] == 1
    assert stored["acceptance_length_current"] == pytest.approx(first["acceptance_length_new"], rel=0.05)  # bfloat16
    head.train(data, rests.append)
    assert head.compare(data, K, names)["ratio"] > first["ratio"]


def test_a_head_that_names_neither_layers_nor_depths_is_trained_for_the_drafts_of_the_service(
    small: Path, tmp_path: Path
) -> None:
    head_dir = Path(shutil.copytree(small / "run" / "head", tmp_path / "head"))
    reconfigure(head_dir, eagle_aux_hidden_state_layer_ids=..., eagle_config=..., num_depths=...)
    head = HeadInTraining(SETTINGS | {"schedule": {"max_steps": 1}}, Target(small / "target"), head_dir, 6)
    assert len(head.train(Conversations.load(small / "data"), lambda _: None)["accuracy"]) == 6
    head.save(tmp_path / "learned", {})
    saved = load_head(tmp_path / "learned")[0]
    assert (saved.aux_layer_ids, saved.num_depths_is_known) == (UNNAMED_LAYERS, False)


def test_a_round_that_failed_spoils_no_later_one(small: Path) -> None:
    data, head = (
        Conversations.load(small / "data"),
        HeadInTraining(SETTINGS, Target(small / "target"), small / "run" / "head", 6),
    )
    head.optimizer.parameters[0].grad = torch.full_like(head.optimizer.parameters[0], math.nan)
    assert head.train(data, lambda _: None)["num_steps"] == 40


def test_settings_of_a_round_are_checked() -> None:
    assert continual_recipe({"schedule": {"max_steps": 3}}).schedule.max_steps == 3
    with pytest.raises(ValueError, match=r"drafter is no section"):
        continual_recipe({"drafter": {"num_layers": 3}})
    with pytest.raises(ValueError, match=r"max_step\b"):
        continual_recipe({"schedule": {"max_step": 3}})


def test_an_eagle3_head_is_refused(small: Path) -> None:
    with pytest.raises(HeadError, match="EAGLE-3"):
        HeadInTraining({}, Target(small / "target"), shipped_heads()["smollm2-135m-instruct-eagle3"], 6)
