"""Runs that go wrong stop with a message that names the step, the file or the setting, and keep what was good."""

import json

import pytest
import torch

from peagle.data import Batch
from peagle.passes import Report
from peagle.recipe import Recipe
from peagle.train import Trainer
from tests.small_run import write_small_run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_run(tmp_path_factory.mktemp("errors"))


def load(small, name: str, *overrides: str) -> Recipe:
    return Recipe.load(small / "recipe.yaml", [f"output={small / name}", "evaluate.data=null", *overrides])


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(small) -> None:
    class Poisoned(Trainer):
        def run_pass(self, batch: Batch) -> Report:
            if self.step == 12:
                with torch.no_grad():
                    self.drafter.norm.weight.fill_(float("nan"))
            return super().run_pass(batch)

    with pytest.raises(FloatingPointError, match=r"step 13: .*nan.*checkpoint\.pt.*optimizer\.lr"):
        Poisoned(load(small, "nan", "save_every_steps=10")).run()
    kept = torch.load(small / "nan" / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 10
    assert all(bool(value.isfinite().all()) for value in kept["drafter"].values())
    assert not (small / "nan" / "head").exists()


def test_out_of_memory_names_the_settings(small) -> None:
    class Full(Trainer):
        def run_pass(self, batch: Batch) -> Report:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        torch.OutOfMemoryError, match=r"num_segments.*num_sequences \(now 4.*max_tokens \(now 64.*chunk"
    ):
        Full(load(small, "full")).run()


def test_a_damaged_checkpoint_is_named(small) -> None:
    (small / "damaged").mkdir()
    (small / "damaged" / "checkpoint.pt").write_bytes(b"PK\x03\x04 not all of it")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        Trainer(load(small, "damaged")).run()


def test_a_checkpoint_of_another_run_is_refused(small) -> None:
    Trainer(load(small, "first", "schedule.max_steps=2")).run()
    with pytest.raises(ValueError, match=r"seed = 0, the recipe says 1"):
        Trainer(load(small, "first", "seed=1")).run()


def test_layers_that_the_target_lacks_are_refused(small) -> None:
    with pytest.raises(ValueError, match=r"aux_layer_ids"):
        Trainer(load(small, "taps", "drafter.aux_layer_ids=[2, 3, 7]"))


def test_the_head_says_how_fast_it_was_trained(small) -> None:
    head = Trainer(load(small, "speed", "schedule.max_steps=8", "batch.num_accumulated=2")).run()
    training = json.loads((head / "provenance.json").read_text())["training"]
    assert training["tokens_per_s"] > 0
    assert training["num_workers"] == 1
