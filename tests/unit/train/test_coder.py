"""The two recipes of Qwen2.5-Coder's heads are equal but for the heads."""

from __future__ import annotations

from pathlib import Path

from peagle.train.recipe import Recipe

RECIPES = {name: Path(__file__).parents[3] / f"configs/train/coder-{name}.yaml" for name in ("peagle", "eagle3")}


def test_the_two_recipes_differ_in_the_head_alone() -> None:
    peagle, eagle3 = (Recipe.load(path).model_dump() for path in RECIPES.values())
    for name in ("target", "data", "seed", "batch", "optimizer", "schedule", "loss", "evaluate"):
        assert peagle[name] == eagle3[name], name
    assert peagle["output"] != eagle3["output"]
    shared = ("num_depths", "draft_vocab_size", "fc_norm", "aux_layer_ids", "start_from")
    assert {key: peagle["drafter"][key] for key in shared} == {key: eagle3["drafter"][key] for key in shared}
