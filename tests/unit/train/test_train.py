"""The trainer end to end on a small random target: it learns, resumes exactly, and its head is what evaluation says."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import DrafterConfig, Llama3Rope
from peagle.train.data import Batch, Conversations, write_manifest
from peagle.train.evaluate import evaluate, load_answers
from peagle.train.passes import PassReport, start_from
from peagle.train.prompts import make_data
from peagle.train.qk_clip import attention_scores, clip_attention
from peagle.train.recipe import Recipe
from peagle.train.target import Target
from peagle.train.trainer import Trainer
from tests.support.head_factory import CONFIG, TARGET, head_tensors, random_drafter
from tests.support.small_run import EAGLE3, trainer_of, write_small_run
from tests.unit.train.test_passes import random_batch


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its answers and a recipe, for all tests: each names an output of its own."""
    return write_small_run(tmp_path_factory.mktemp("small"))


def accuracies(folder) -> list[list[float]]:
    """Share of draft tokens that equal the target's, by draft position, of each tenth step."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["accuracy"] for record in records if "accuracy" in record]


class KilledTrainer(Trainer):
    """Ends right after its first checkpoint."""

    def save(self) -> None:
        super().save()
        raise InterruptedError


def test_learns_saves_and_resumes_exactly(small) -> None:
    def run(name: str, *overrides: str) -> Trainer:
        trainer = trainer_of(small, name, "log_every_steps=10", *overrides)
        trainer.run()
        return trainer

    straight = run("straight")
    first, *_, last = accuracies(small / "straight")
    assert last[0] > 2 * first[0], "nothing is learned"
    provenance = json.loads((small / "straight/head/provenance.json").read_text())
    assert provenance["training"]["num_steps"] == 60
    found = provenance["acceptance_offline"]["all"]["acceptance_length"]
    assert found["4"] > 1.2, f"AL {found}: one token in 64 right by chance would be 1.02"
    target = Target(small / "target")
    head = load_head(small / "straight/head")
    drafter = build_drafter(*head, embed_VH=target.embed_VS, lm_head_VH=target.lm_head_VS)
    groups = evaluate([drafter], target, load_answers(small / "data"))["groups"]
    # The head is stored in bfloat16: hence the tolerance.
    assert groups["all"]["acceptance_length"]["4"] == pytest.approx(found["4"], rel=0.1)
    (shown,) = (small / "straight" / "tensorboard").iterdir()
    assert all(name in shown.read_bytes() for name in (b"train/accuracy/1", b"train/lr", b"train/tokens_per_s"))
    recipe = Recipe.load(small / "recipe.yaml", [f"output={small / 'broken'}", "log_every_steps=10"])
    with pytest.raises(InterruptedError):
        KilledTrainer(recipe).run()
    resumed = run("broken").drafter.trainable()
    for name, value in straight.drafter.trainable().items():
        torch.testing.assert_close(resumed[name], value, msg=name)
    assert run("broken").step == 60, "a finished run goes on"
    with pytest.raises(ValueError, match="drafter"):
        run("broken", "drafter.num_layers=1")


@pytest.mark.parametrize("kind", [(), EAGLE3], ids=["p-eagle", "eagle3"])
def test_joined_passes_read_the_conversations_before(small, kind: tuple[str, ...], monkeypatch) -> None:
    """In a joined pass, and in no other, the loss of later conversations depends on the first one's hidden states."""
    for share, depends in ((0.0, False), (1.0, True)):
        trainer = trainer_of(small, "joined", f"batch.joined_share={share}", *kind)
        batch = next(trainer.batches())
        first_BN = (batch.document_BN == 0) & (torch.arange(len(batch.document_BN)) == 0)[:, None]
        batch.answer_BN[first_BN] = False  # no loss of its own
        plain, losses = trainer.target.states, []
        for scale in (1.0, 3.0):

            def scaled(*args, scale=scale, plain=plain, first_BN=first_BN, **kwargs):
                aux_BNX, last_BNS = plain(*args, **kwargs)
                return torch.where(first_BN[..., None], scale * aux_BNX + scale - 1, aux_BNX), last_BNS

            monkeypatch.setattr(trainer.target, "states", scaled)
            trainer.random.manual_seed(0)
            losses.append(float(trainer.run_pass(batch).loss))
        assert (losses[0] != losses[1]) == depends


def test_segments_train_the_same_drafter(small) -> None:
    def weights(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        settings = ["schedule.max_steps=4", "evaluate.data=null", "loss.reach=0.5", "optimizer.name=adamw"]
        trainer = trainer_of(small, name, *settings, "optimizer.lr=0.001", *overrides)
        trainer.run()
        return {key: value.detach() for key, value in trainer.drafter.trainable().items()}

    parts = weights("parts", "batch.num_segments=3")
    for name, value in weights("whole").items():
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_eagle3_trains_from_a_recipe_and_beats_chance(small) -> None:
    head = trainer_of(small, "eagle3", "log_every_steps=10", *EAGLE3).run()
    first, *_, last = accuracies(small / "eagle3")
    assert len(last) == 4
    assert all(late > early + 0.05 for early, late in zip(first, last, strict=True)), (first, last)
    config = load_head(head)[0]
    assert (config.num_depths, config.ptd_token_id) == (4, None)
    found = json.loads((head / "provenance.json").read_text())["acceptance_offline"]["all"]["acceptance_length"]
    assert found["4"] > 1.2, f"AL {found}: one token in 64 right by chance would be 1.02"


def test_held_out_conversations_are_evaluated_on_and_kept_for_peagle_evaluate(small) -> None:
    overrides = ["evaluate.data=null", "evaluate.held_out=0.4", "schedule.max_steps=12"]
    head = trainer_of(small, "held", *overrides).run()
    training = json.loads((head / "provenance.json").read_text())
    answers = load_answers(small / "held/held-out")
    assert 0 < len(answers.data) == 24 - training["training"]["num_conversations"]
    assert training["acceptance_offline"]["all"]["num_answers"] == len(answers.data)
    assert set(answers.categories) <= {"even", "odd"}
    with pytest.raises(ValueError, match=r"evaluate\.held_out = 0\.4, the recipe says 0\.3: use another output"):
        trainer_of(small, "held", "evaluate.data=null", "evaluate.held_out=0.3").run()
    with pytest.raises(ValueError, match=r"evaluate.held_out goes without .data"):
        Recipe.load(small / "recipe.yaml", ["evaluate.held_out=0.1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.num_layer=2", "drafter.num_layer"),
        ("cod.ratio=1.5", "cod.ratio"),
        ("drafter.num_depths=65", "drafter.num_depths: .* less than or equal to 64"),
        ("seed=-1", "seed: .* greater than or equal to 0"),
        ("schedule.max_steps=many", "schedule.max_steps"),
        ("drafter.ptd_token_id", "section.key=value"),
        ("applications=[]", r"is the config of a service: `peagle serve "),
        ("drafter.num_layers.x=1", r"override 'drafter.num_layers.x=1': num_layers is no section, but 2"),
    ],
)
def test_wrong_recipes_name_the_key(small, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.load(small / "recipe.yaml", [override])
    assert Recipe.load(small / "recipe.yaml", ["optimizer.lr=9e-3"]).optimizer.lr == 0.009


# ---- what a drafter takes over from another head


def test_a_p_eagle_drafter_takes_what_fits_of_an_eagle3_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    eagle3 = DrafterConfig.for_target(TARGET, num_layers=1, fc_norm=True, num_depths=5)
    stored = head_tensors(eagle3)
    save_head(tmp_path / "eagle3", eagle3, stored)
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


# ---- what goes wrong stops with a message that names the step, the file or the setting, and keeps what was good


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


def test_a_mask_token_that_stands_in_the_data_and_a_folder_without_answers_are_named(small) -> None:
    taken = int(Conversations.load(small / "data").tokens[0])
    with pytest.raises(
        ValueError, match=rf"drafter\.ptd_token_id = {taken} stands in the conversations of .*, \d+ times"
    ):
        Trainer(load(small, "taken", f"drafter.ptd_token_id={taken}"))
    with pytest.raises(ValueError, match=r"evaluate\.data: .*no part-\*\.npz in nowhere"):
        Trainer(load(small, "nowhere", "evaluate.data=nowhere"))


def test_data_of_another_source_is_not_taken_for_the_recipes(small) -> None:
    with pytest.raises(ValueError, match=r"data: .* was made of something else, not of the recipe's .*, chats\.jsonl"):
        make_data(load(small, "other", "conversations=chats.jsonl"))


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
        ("drafter.num_layers=1", r"made with drafter\.num_layers = 2, the recipe says 1: use"),
        ("optimizer.name=adamw", r"optimizer\.name = muon, the recipe says adamw"),
        (f"data={tmp_path / 'data'}", r"other data: the conversations in .*data have changed"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(load(small, "first", override)).run()


# ---- attention scores as the clip sees them, and what it changes


@pytest.mark.parametrize("config", [CONFIG, dataclasses.replace(CONFIG, ptd_token_id=None)], ids=["p-eagle", "eagle3"])
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


@pytest.mark.parametrize("kind", [(), EAGLE3], ids=["p-eagle", "eagle3"])
def test_a_trainer_keeps_scores_near_the_limit(small: Path, tmp_path: Path, kind: tuple[str, ...]) -> None:
    def greatest(*settings: str) -> float:
        overrides = "schedule.max_steps=25", "evaluate.data=null", *kind, *settings
        trainer = trainer_of(small, tmp_path / str(len(settings)), *overrides)
        trainer.run()
        batch = next(trainer.batches())
        layers = trainer.drafter.config.aux_layer_ids
        aux_BNX, _ = trainer.target.states(batch.tokens_BN, batch.position_BN, layers)
        return float(attention_scores(trainer.drafter, batch, aux_BNX).max())

    freely = greatest()
    assert greatest(f"optimizer.max_attention_score={freely / 4}") < freely / 2
