"""Runs that go wrong stop with a message that names the step, the file or the setting, and keep what was good."""

import math
import shutil

import pytest
import torch
from torch import Tensor

from peagle.train.data import Batch, Conversations, write_manifest
from peagle.train.passes import PassReport
from peagle.train.recipe import OptimizerRecipe, Recipe
from peagle.train.trainer import Optimizer, Trainer


def load(small, name: str, *overrides: str) -> Recipe:
    return Recipe.load(small / "recipe.yaml", [f"output={small / name}", "evaluate.data=null", *overrides])


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(small) -> None:
    class Poisoned(Trainer):
        def run_pass(self, batch: Batch, *kept: Tensor | None) -> PassReport:
            if self.step == 12:
                with torch.no_grad():
                    self.drafter.norm.weight.fill_(float("nan"))
            return super().run_pass(batch, *kept)

    with pytest.raises(FloatingPointError, match=r"step 13: .*nan.*checkpoint\.pt.*optimizer\.lr"):
        Poisoned(load(small, "nan", "save_every_steps=10")).run()
    kept = torch.load(small / "nan" / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 10
    assert all(bool(value.isfinite().all()) for value in kept["drafter"].values())
    assert not (small / "nan" / "head").exists()


def test_a_gradient_that_is_no_number_spoils_no_later_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"a": parameter}, OptimizerRecipe(), fused=False)
    (parameter * torch.tensor([math.nan, 1.0])).sum().backward()
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        optimizer.step(1.0)
    assert parameter.tolist() == [1.0, 1.0]
    parameter.sum().backward()
    assert optimizer.step(1.0) == pytest.approx(math.sqrt(2))


def test_data_with_more_conversations_than_categories_is_named(small, tmp_path) -> None:
    shutil.copytree(small / "data", tmp_path / "data")
    write_manifest(tmp_path / "data", {"categories": ["a"] * 3})
    with pytest.raises(ValueError, match=r"data: manifest.json names 3 categories for 24 conversations"):
        Trainer(load(small, "few", f"data={tmp_path / 'data'}", "evaluate.held_out=0.4"))


def test_out_of_memory_names_the_settings(small) -> None:
    class Full(Trainer):
        def run_pass(self, batch: Batch, *kept: Tensor | None) -> PassReport:
            raise torch.OutOfMemoryError("CUDA out of memory")

    message = r"num_segments.*num_sequences \(now 4.*max_tokens \(now 64.*chunk"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        Full(load(small, "full")).run()


def test_a_run_that_cannot_fit_is_refused_before_the_target_loads(small) -> None:
    (small / "without-weights").mkdir()
    shutil.copy(small / "target" / "config.json", small / "without-weights")
    asked = [f"target={small / 'without-weights'}", "batch.num_sequences=1000000000"]
    with pytest.raises(ValueError, match=r"cannot fit: it needs more than \d+\.\d GiB .*Lower batch.num_seq"):
        Trainer(load(small, "large", *asked))


def test_a_damaged_checkpoint_is_named(small) -> None:
    (small / "damaged").mkdir()
    (small / "damaged" / "checkpoint.pt").write_bytes(b"PK\x03\x04 not all of it")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        Trainer(load(small, "damaged")).run()


def test_a_checkpoint_of_another_run_or_of_other_data_is_refused(small, tmp_path) -> None:
    Trainer(load(small, "first", "schedule.max_steps=2")).run()
    # Other conversations make other batches, of which a resumed run would pass over the first.
    shutil.copytree(small / "data", tmp_path / "data")
    Conversations.from_lists([[2, 3]], [[4, 5, 6]]).save_part(tmp_path / "data", "01")
    for override, message in (
        ("seed=1", r"seed = 0, the recipe says 1"),
        ("optimizer.name=adamw", r"optimizer\.name = muon, the recipe says adamw"),
        (f"data={tmp_path / 'data'}", r"other data: the conversations in .*data have changed"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(load(small, "first", override)).run()
