"""What a drafter takes over from another head."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from peagle.checkpoint import load_head, save_head
from peagle.config import DrafterConfig
from peagle.train.passes import drafter_config, start_from
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.support.head_factory import CONFIG, TARGET, head_tensors, random_drafter

EAGLE3 = DrafterConfig.for_target(TARGET, num_layers=1, fc_norm=True, num_depths=5)


def test_a_p_eagle_drafter_takes_what_fits_of_an_eagle3_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = head_tensors(EAGLE3)
    save_head(tmp_path / "eagle3", EAGLE3, stored)
    drafter = random_drafter(dataclasses.replace(CONFIG, fc_norm=True, norm_before_residual=True)).float()
    before = {name: value.clone() for name, value in drafter.trainable().items()}
    with caplog.at_level(logging.INFO):
        taken = start_from(drafter, tmp_path / "eagle3")
    assert set(taken) == {name for name in stored if name in before}
    assert {"fc.weight", "fc_norm.0.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(taken)
    for name, value in drafter.trainable().items():
        assert torch.equal(value, stored[name] if name in taken else before[name]), name
    said = caplog.text
    assert "layers.0.mlp.up_proj.weight" in said.split("as drawn")[0]
    assert "layers.1.mlp.up_proj.weight" in said.split("as drawn")[1]
    assert "mask_hidden" in said.split("as drawn")[1]
    assert "norm_before_residual = False, this drafter has True" in said


def test_a_run_starts_from_another_head(small: Path, tmp_path: Path) -> None:
    eagle3 = ["drafter.method=eagle3", "drafter.ptd_token_id=null", "drafter.num_layers=1"]
    short = [f"output={tmp_path / 'short'}", "evaluate.data=null", "schedule.max_steps=1"]
    head = Trainer(Recipe.load(small / "recipe.yaml", eagle3 + short)).run()
    override = [f"drafter.start_from={head}", f"output={tmp_path / 'next'}"]
    trainer = Trainer(Recipe.load(small / "recipe.yaml", override))
    stored = load_head(head)[1]
    own = trainer.drafter.trainable()
    assert torch.equal(own["fc.weight"], stored["fc.weight"].float())
    assert torch.equal(own["layers.0.mlp.up_proj.weight"], stored["layers.0.mlp.up_proj.weight"].float())


def test_a_drafter_that_starts_from_a_head_reads_and_norms_as_that_head(small: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(small / "recipe.yaml")
    target = json.loads((recipe.target_dir() / "config.json").read_text())
    config = dataclasses.replace(drafter_config(recipe, target), aux_layer_ids=(0, 1, 2), norm_before_residual=True)
    save_head(tmp_path / "head", config, head_tensors(config))
    found = drafter_config(Recipe.load(small / "recipe.yaml", [f"drafter.start_from={tmp_path / 'head'}"]), target)
    assert (found.aux_layer_ids, found.norm_before_residual) == ((0, 1, 2), True)
