"""What a drafter takes over from another head."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch

from peagle.checkpoint import save_head
from peagle.config import DrafterConfig, Llama3Rope
from peagle.train.passes import start_from
from tests.support.head_factory import CONFIG, TARGET, head_tensors, random_drafter
from tests.support.small_run import trainer_of

EAGLE3 = DrafterConfig.for_target(TARGET, num_layers=1, fc_norm=True, num_depths=5)


def test_a_p_eagle_drafter_takes_what_fits_of_an_eagle3_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = head_tensors(EAGLE3)
    save_head(tmp_path / "eagle3", EAGLE3, stored)
    rope = Llama3Rope(8.0, 1.0, 4.0, 8192)
    drafter = random_drafter(dataclasses.replace(CONFIG, fc_norm=True, norm_before_residual=True, rope_scaling=rope))
    drafter = drafter.float()
    caplog.set_level(logging.INFO)
    before = {name: value.clone() for name, value in drafter.trainable().items()}
    taken = start_from(drafter, tmp_path / "eagle3")
    assert set(taken) == {name for name in stored if name in before}
    assert {"fc.weight", "fc_norm.0.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(taken)
    for name, value in drafter.trainable().items():
        assert torch.equal(value, stored[name] if name in taken else before[name]), name
    assert "; of the head not taken: embed_tokens.weight, lm_head.weight\n" in caplog.text
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split()[5] for line in warned] == ["norm_before_residual", "rope_scaling"]


def test_a_run_starts_from_another_head_and_reads_and_norms_as_it_does(small: Path, tmp_path: Path) -> None:
    target = json.loads((small / "target/config.json").read_text())
    config = DrafterConfig.for_target(target, num_layers=1, num_depths=4, fc_norm=True, aux_layer_ids=(0, 1, 2))
    config = dataclasses.replace(config, norm_before_residual=True)
    stored = head_tensors(config)
    head = save_head(tmp_path / "head", config, stored)
    drafter = trainer_of(small, tmp_path / "run", f"drafter.start_from={head}").drafter
    assert (drafter.config.aux_layer_ids, drafter.config.norm_before_residual) == ((0, 1, 2), True)
    own = drafter.trainable()
    assert all(torch.equal(own[name], stored[name]) for name in ("fc.weight", "layers.0.mlp.up_proj.weight"))
