"""A random target of 7 layers with a vocabulary of 64, its own greedy answers as data, and a recipe for both."""

from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.train.data import Conversations, write_manifest
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer

PROMPT_TOKENS = 6
EAGLE3 = ("drafter.method=eagle3", "drafter.ptd_token_id=null", "drafter.num_layers=1")
"""Overrides of the recipe."""


def write_small_run(folder: Path, **shape: int) -> Path:
    """Writes target/, data/ and recipe.yaml; returns the folder. shape: of the target."""
    torch.manual_seed(0)
    shape |= dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=7)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, initializer_range=0.2)).eval()
    model.save_pretrained(folder / "target")
    prompts = np.random.default_rng(0).integers(2, 64, (24, PROMPT_TOKENS))
    # Without the mask token, which no data may have.
    written = model.generate(
        torch.from_numpy(prompts), max_new_tokens=24, do_sample=False, eos_token_id=None, suppress_tokens=[1]
    )
    data = Conversations.from_lists(prompts.tolist(), written[:, PROMPT_TOKENS:].tolist())
    data.save_part(folder / "data", "00")
    write_manifest(folder / "data", {"categories": ["even", "odd"] * 12})
    recipe = {
        "target": str(folder / "target"),
        "data": str(folder / "data"),
        "output": str(folder / "run"),
        "drafter": {"num_layers": 2, "num_depths": 4, "ptd_token_id": 1},
        "batch": {"num_sequences": 4, "max_tokens": 64},
        "optimizer": {"name": "muon", "muon_lr": 0.01, "lr": 0.01},
        "schedule": {"max_steps": 60, "warmup_steps": 5},
        "save_every_steps": 30,
        "loss": {"chunk": 64},
        "evaluate": {"data": str(folder / "data")},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def trainer_of(folder: Path, output: str | Path, *overrides: str) -> Trainer:
    """Of the folder's recipe, with an output of its own."""
    return Trainer(Recipe.load(folder / "recipe.yaml", [f"output={folder / output}", *overrides]))


def write_small_head(folder: Path) -> Path:
    """The same, and run/head, which knows little of these answers; returns the folder."""
    trainer_of(write_small_run(folder), "run", "schedule.max_steps=5", "evaluate.data=null").run()
    return folder
