"""Attention scores as the clip sees them, and what it changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.continual import HeadInTraining
from peagle.train.data import Batch, Conversations, PackedBatches
from peagle.train.qk_clip import attention_scores, clip_attention
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from peagle.train.trainer import Trainer
from tests.support.head_factory import CONFIG, random_drafter
from tests.support.small_run import write_small_head, write_small_run

LENGTHS = (9, 14)
EAGLE3 = dataclasses.replace(CONFIG, ptd_token_id=None)


def batch_of(config: DrafterConfig, num_padding: int = 0) -> tuple[Batch, Tensor]:
    """Two documents and padding, twice, and the target's states of them."""
    generator = torch.Generator().manual_seed(0)
    document_N = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)] + [torch.full((num_padding,), -1)])
    position_N = torch.cat([torch.arange(n) for n in (*LENGTHS, num_padding)])
    num_tokens = sum(LENGTHS)
    tokens_BN = torch.randint(0, 99, (2, num_tokens), generator=generator)
    aux_BNX = torch.randn(2, num_tokens, config.fc_input_size, generator=generator).double()
    tokens_BN = torch.cat([tokens_BN, tokens_BN[:, -1:].expand(-1, num_padding)], dim=1)
    aux_BNX = torch.nn.functional.pad(aux_BNX, (0, 0, 0, num_padding), value=1e3)
    document_BN = document_N.expand(2, -1)
    return Batch(tokens_BN, document_BN, position_N.expand(2, -1), document_BN >= 0, tokens_BN), aux_BNX


@pytest.mark.parametrize("config", [CONFIG, EAGLE3], ids=["p-eagle", "eagle3"])
def test_scores_above_the_limit_shrink_to_it_and_others_stay(config: DrafterConfig) -> None:
    drafter = random_drafter(config)
    batch, aux_BNX = batch_of(config)
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


def test_padding_counts_for_nothing_and_mask_tokens_do() -> None:
    drafter: Drafter = random_drafter(CONFIG)
    plain, padded = (attention_scores(drafter, *batch_of(CONFIG, num_padding)) for num_padding in (0, 6))
    # Mask tokens stand behind the padding there, which is no document.
    assert bool((padded <= plain + 1e-4).all())
    with torch.no_grad():
        drafter.mask_embedding.normal_(generator=torch.Generator().manual_seed(1))
        drafter.mask_hidden.normal_(generator=torch.Generator().manual_seed(2))
    assert not torch.equal(attention_scores(drafter, *batch_of(CONFIG)), plain)


def test_a_head_with_norms_on_queries_and_keys_stays_as_it_is() -> None:
    drafter = random_drafter(dataclasses.replace(CONFIG, qk_norm=True))
    scores_LA = attention_scores(drafter, *batch_of(CONFIG))
    kept = {name: value.clone() for name, value in drafter.trainable().items()}
    clip_attention(drafter, scores_LA, float(scores_LA.max()) / 4)
    assert all(torch.equal(value, kept[name]) for name, value in drafter.trainable().items())


def test_weights_stay_while_a_step_adds_up_its_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, clipped_at = write_small_run(tmp_path), []

    def counted(*arguments: Any) -> None:
        clipped_at.append(trainer.step)
        clip_attention(*arguments)

    monkeypatch.setattr("peagle.train.trainer.clip_attention", counted)
    settings = ["batch.num_accumulated=3", "schedule.max_steps=6", "optimizer.max_attention_score=0.1"]
    trainer = Trainer(Recipe.load(folder / "recipe.yaml", [*settings, "evaluate.data=null", f"output={tmp_path}/out"]))
    trainer.run()
    assert clipped_at == [0, 4]


EAGLE3_RECIPE = ("drafter.method=eagle3", "drafter.ptd_token_id=null")


@pytest.mark.parametrize("kind", [(), EAGLE3_RECIPE], ids=["p-eagle", "eagle3"])
def test_a_trainer_keeps_scores_near_the_limit(tmp_path: Path, kind: tuple[str, ...]) -> None:
    folder = write_small_run(tmp_path)

    def greatest(*settings: str) -> float:
        overrides = ["schedule.max_steps=25", "evaluate.data=null", f"output={tmp_path / str(len(settings))}"]
        trainer = Trainer(Recipe.load(folder / "recipe.yaml", [*overrides, *kind, *settings]))
        trainer.run()
        batch = next(trainer.batches())
        layers = trainer.drafter.config.aux_layer_ids
        aux_BNX, _ = trainer.target.states(batch.tokens_BN, batch.document_BN, batch.position_BN, layers)
        return float(attention_scores(trainer.drafter, batch, aux_BNX).max())

    freely = greatest()
    assert greatest(f"optimizer.max_attention_score={freely / 4}") < freely / 2


def test_so_does_a_head_that_learns_on(tmp_path: Path) -> None:
    folder = write_small_head(tmp_path)
    data, target = Conversations.load(folder / "data"), Target(folder / "target")

    def greatest(max_score: float | None) -> float:
        settings = {"schedule": {"max_steps": 25}, "optimizer": {"muon_lr": 0.01, "max_attention_score": max_score}}
        settings["batch"] = {"num_sequences": 4, "max_tokens": 64}
        head = HeadInTraining(settings, target, folder / "run" / "head")
        head.train(data, lambda _: None)
        batch = next(PackedBatches(data, num_sequences=4, max_tokens=64, seed=0)())
        aux_BNX, _ = target.states(batch.tokens_BN, batch.document_BN, batch.position_BN, head.config.aux_layer_ids)
        return float(attention_scores(head.drafter, batch, aux_BNX).max())

    freely = greatest(None)
    assert greatest(freely / 4) < freely / 2
