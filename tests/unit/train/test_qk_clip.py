"""Attention scores as the clip sees them, and what it changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from peagle.config import DrafterConfig
from peagle.train.qk_clip import attention_scores, clip_attention
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer
from tests.support.head_factory import CONFIG, random_drafter
from tests.unit.train.test_unroll import random_batch

EAGLE3 = dataclasses.replace(CONFIG, ptd_token_id=None)


@pytest.mark.parametrize("config", [CONFIG, EAGLE3], ids=["p-eagle", "eagle3"])
def test_scores_above_the_limit_shrink_to_it_and_others_stay(config: DrafterConfig) -> None:
    drafter = random_drafter(config)
    batch, aux_BNX = random_batch()
    before_LA = attention_scores(drafter, batch, aux_BNX)
    assert before_LA.shape == (config.num_hidden_layers, config.num_attention_heads)
    top_LG = before_LA.view(config.num_hidden_layers, config.num_key_value_heads, -1).amax(-1)
    limit = float(top_LG[0].mean())  # one group of the first layer is above it
    kept = {name: value.clone() for name, value in drafter.trainable().items()}
    clip_attention(drafter, before_LA, limit)

    after_LA = attention_scores(drafter, batch, aux_BNX)
    after_LG = after_LA.view_as(before_LA).view(*top_LG.shape, -1)
    # The layers behind see other rows than before: the first alone can be foretold.
    expected_AG = before_LA[0].view(top_LG.shape[1], -1) * (limit / top_LG[0].clamp_min(limit))[:, None]
    torch.testing.assert_close(after_LG[0], expected_AG, rtol=1e-4, atol=1e-4)
    assert float(after_LA[0].max()) == pytest.approx(limit, rel=1e-4)

    for name, value in drafter.trainable().items():
        rows_GRX = value.detach().unflatten(0, (top_LG.shape[1], -1)) if value.ndim == 2 else value.detach()
        same = rows_GRX == (kept[name].view_as(rows_GRX))
        if name in ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"):
            assert [bool(group.all()) for group in same] == (top_LG[0] <= limit).tolist()
        elif "q_proj" not in name and "k_proj" not in name:
            assert bool(same.all()), name


EAGLE3_RECIPE = ("drafter.method=eagle3", "drafter.ptd_token_id=null")


@pytest.mark.parametrize("kind", [(), EAGLE3_RECIPE], ids=["p-eagle", "eagle3"])
def test_a_trainer_keeps_scores_near_the_limit(small: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    def greatest(*settings: str) -> float:
        overrides = ["schedule.max_steps=25", "evaluate.data=null", f"output={tmp_path / str(len(settings))}"]
        trainer = Trainer(Recipe.load(small / "recipe.yaml", [*overrides, *kind, *settings]))
        trainer.run()
        batch = next(trainer.batches())
        layers = trainer.drafter.config.aux_layer_ids
        aux_BNX, _ = trainer.target.states(batch.tokens_BN, batch.position_BN, layers)
        return float(attention_scores(trainer.drafter, batch, aux_BNX).max())

    freely = greatest()
    assert greatest(f"optimizer.max_attention_score={freely / 4}") < freely / 2
