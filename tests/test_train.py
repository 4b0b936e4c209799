"""The trainer end to end on a small random target: it learns, resumes exactly, and its head is what evaluation says."""

import json

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.checkpoint import build_drafter, load_head
from peagle.data import Conversations, write_manifest
from peagle.evaluate import Tally, evaluate, load_answers, match_matrices, walk
from peagle.recipe import Recipe
from peagle.target import Target
from peagle.train import Trainer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random target of 6 layers with a vocabulary of 64, and its own greedy answers as data."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "target")
    prompts = np.random.default_rng(0).integers(2, 64, (24, 6))
    written = model.generate(torch.from_numpy(prompts), max_new_tokens=24, do_sample=False, eos_token_id=None)
    data = Conversations.from_lists(prompts.tolist(), written[:, 6:].tolist())
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


def accuracies(folder) -> dict[int, float]:
    """Share of first draft tokens that equal the target's, by step."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {record["step"]: record["accuracy"][0] for record in records if "accuracy" in record}


class Killed(Exception):
    """Stands for the signal that ends a run."""


class KilledTrainer(Trainer):
    """Ends right after its first checkpoint."""

    def save(self) -> None:
        super().save()
        raise Killed


def test_learns_saves_and_resumes_exactly(small) -> None:
    def run(name: str, *overrides: str) -> Trainer:
        recipe = Recipe.load(small / "recipe.yaml", [f"output={small / name}", "log_every_steps=10", *overrides])
        trainer = Trainer(recipe)
        trainer.run()
        return trainer

    straight = run("straight")
    logged = accuracies(small / "straight")
    assert logged[60] > 2 * logged[10], "nothing is learned"
    recipe = Recipe.load(small / "recipe.yaml", [f"output={small / 'broken'}", "log_every_steps=10"])
    with pytest.raises(Killed):
        KilledTrainer(recipe).run()
    resumed = run("broken")
    for name, value in straight.drafter.trainable().items():
        torch.testing.assert_close(
            resumed.drafter.trainable()[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )
    with pytest.raises(ValueError, match="drafter"):
        run("broken", "drafter.num_layers=1")


def test_head_loads_and_beats_chance(small) -> None:
    trainer = Trainer(Recipe.load(small / "recipe.yaml", [f"output={small / 'head-run'}"]))
    head = trainer.run()
    provenance = json.loads((head / "provenance.json").read_text())
    assert provenance["training"]["num_steps"] == 60
    target = Target(small / "target")
    drafter = build_drafter(*load_head(head), embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    groups = evaluate(drafter, target, *load_answers(small / "data"))
    assert set(groups) >= {"all", "even", "odd"}
    # By chance one token in 64, an AL of 1.02. The head is stored in bfloat16: hence the tolerance to the run's figure.
    assert groups["all"]["acceptance_length"]["4"] > 1.2
    own = provenance["acceptance_offline"]["all"]["acceptance_length"]["4"]
    assert groups["all"]["acceptance_length"]["4"] == pytest.approx(own, rel=0.1)


def test_evaluation_sees_the_true_prefix_only(small) -> None:
    """Drafts of an anchor must not change when the tokens after what it knows change."""
    target = Target(small / "target")
    trainer = Trainer(Recipe.load(small / "recipe.yaml", [f"output={small / 'leak'}"]))
    data, _ = load_answers(small / "data")
    one = data.select([0])
    changed = one.tokens.copy()
    changed[20:] = (changed[20:] + 7) % 64
    other = Conversations(changed, one.lengths, one.prompt_lengths)
    first = match_matrices(trainer.drafter, target, one)[0]
    second = match_matrices(trainer.drafter, target, other)[0]
    # Anchor a (row a - 5) knows tokens up to a + 1, and depth i is compared with token a + 1 + i.
    rows = [(anchor - 5, depth) for anchor in range(5, 19) for depth in range(4) if anchor + depth + 2 < 20]
    assert all(first[row, depth] == second[row, depth] for row, depth in rows)


def test_walk_counts_steps_as_decoding_does() -> None:
    matches = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=bool)
    tally = Tally()
    walk(matches, 3, tally)
    # Anchor 0 accepts 2 and goes on at 3, which accepts 1 and goes on at 5, which accepts none.
    assert (tally.num_steps, tally.num_tokens, tally.accepted_by_depth) == (3, 6, [2, 1, 0])
    assert tally.acceptance_length == 2.0
    one = Tally()
    walk(matches, 1, one)
    assert (one.num_steps, one.accepted_by_depth) == (4, [2])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.num_layer=2", "drafter.num_layer"),
        ("cod.ratio=1.5", "cod.ratio"),
        ("schedule.max_steps=many", "schedule.max_steps"),
        ("drafter.ptd_token_id", "section.key=value"),
    ],
)
def test_wrong_recipes_name_the_key(small, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.load(small / "recipe.yaml", [override])
