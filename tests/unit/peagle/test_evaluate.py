"""Evaluation against decoding: what drafting at each anchor gets right, also at temperature 1; counts and files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import contexts, traces
from benchmarks.plot_acceptance import plot_acceptance
from deployments.cli import main
from peagle import evaluate as program
from peagle.checkpoint import save_drafter
from peagle.config import DrafterConfig
from peagle.draft import DraftSession
from peagle.evaluate import AnswerCounts, figures, replay, walk
from peagle.model import Drafter
from peagle.train.cod import draft_rows, sample_rows
from peagle.train.data import Conversations, write_manifest
from peagle.train.masks import Sight
from peagle.train.recipe import BatchRecipe, DrafterRecipe, OptimizerRecipe, Recipe, ScheduleRecipe
from peagle.train.target import Target
from peagle.train.trainer import Trainer

VOCABULARY, PROMPT_TOKENS, NUM_DEPTHS = 6, 4, 3
"""So few tokens that an untrained drafter is often right."""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=7, initializer_range=0.3, **shape)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return Target(folder)


def new_drafter(target: Target, **changes) -> Drafter:
    """P-EAGLE with the mask token 5, by default."""
    values = dict(num_layers=2, num_depths=NUM_DEPTHS, ptd_token_id=VOCABULARY - 1) | changes
    torch.manual_seed(1)
    drafter = Drafter(DrafterConfig.for_target(target.config, **values))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    drafter.share_target(target.embed_VS, target.lm_head_VS)
    return drafter.eval()


def random_data(num_answers: int, seed: int = 0) -> Conversations:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist() for _ in range(num_answers)]
    answers = [rng.integers(0, VOCABULARY, rng.integers(2, 30)).tolist() for _ in range(num_answers)]
    return Conversations.from_lists(prompts, answers)


def accepted_in_session(drafter: Drafter, target: Target, ids: np.ndarray, prompt: int, k: int) -> list[int]:
    """What one request, drafted with a KV cache after each token of its answer, would get right."""
    tokens_N, position_BN = torch.from_numpy(ids).long(), torch.arange(len(ids))[None]
    zeros_BN = torch.zeros_like(position_BN)
    aux_NX = target.states(tokens_N[None], zeros_BN, position_BN, drafter.config.aux_layer_ids)[0][0]
    return contexts.accepted(drafter, tokens_N, aux_NX, prompt, k).tolist()


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 5}, {"ptd_token_id": None}, {"ptd_token_id": None, "sliding_window": 5}]
)
def test_every_anchor_accepts_what_drafting_there_gets_right(target: Target, changes: dict, monkeypatch) -> None:
    """Packed together, and one answer longer than a packed sequence."""
    monkeypatch.setattr("peagle.evaluate.PACK_TOKENS", 28)
    drafter, data = new_drafter(target, **changes), random_data(16)
    assert data.lengths.max() > 28, "no answer stands alone"
    found = replay(drafter, target, data)
    assert found.walked == list(range(16))
    for (ids, prompt), accepted in zip(data.documents(), found.accepted, strict=True):
        assert accepted.tolist() == accepted_in_session(drafter, target, ids, prompt, NUM_DEPTHS)
    assert set(np.concatenate(found.accepted).tolist()) == {0, 1, 2, 3}, "too little is ever right to compare"


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}])
def test_chances_are_those_of_drafting_there(target: Target, changes: dict) -> None:
    drafter, data = new_drafter(target, **changes), random_data(4)
    found = traces.chances(drafter, target, data, [2, 0])
    for index, chance_NK in zip([2, 0], found, strict=True):
        ids, prompt = list(data.documents())[index]
        tokens_N, zeros_BN = torch.from_numpy(ids).long(), torch.zeros(1, len(ids), dtype=torch.int64)
        position_BN = torch.arange(len(ids))[None]
        aux_NX = target.states(tokens_N[None], zeros_BN, position_BN, drafter.config.aux_layer_ids)[0][0]
        assert chance_NK.shape == (len(ids) - prompt - 1, NUM_DEPTHS)
        for newest in range(prompt, len(ids) - 1):
            drafts = DraftSession(drafter).propose(tokens_N[1 : newest + 1], aux_NX[:newest], NUM_DEPTHS)
            expected_K = drafts.logits_KV.softmax(-1).amax(-1)
            np.testing.assert_allclose(chance_NK[newest - prompt], expected_K.numpy(), rtol=1e-4)


def test_eagle3_heads_go_on_beyond_their_training_and_p_eagle_heads_do_not(target: Target) -> None:
    data = random_data(3)
    longer = replay(new_drafter(target, ptd_token_id=None), target, data, num_depths=5)
    shorter = replay(new_drafter(target, ptd_token_id=None), target, data)
    for five, three in zip(longer.accepted, shorter.accepted, strict=True):
        assert np.minimum(five, NUM_DEPTHS).tolist() == three.tolist()
    with pytest.raises(ValueError, match="trained to draft 3"):
        replay(new_drafter(target), target, data, num_depths=5)


def test_drafts_know_the_true_prefix_only(target: Target) -> None:
    """Changing the answer from one token on changes nothing that drafts before it could see."""
    drafter, data = new_drafter(target), random_data(1, seed=4)
    length, prompt, changed_from = int(data.lengths[0]), int(data.prompt_lengths[0]), 15
    assert length > changed_from + 5
    changed = data.tokens.copy()
    changed[changed_from:] = (changed[changed_from:] + 1) % VOCABULARY
    first, second = (
        replay(drafter, target, dataclasses.replace(data, tokens=tokens)).accepted[0]
        for tokens in (data.tokens, changed)
    )
    # Anchor a (entry a - prompt + 1) knows tokens up to a + 1; its drafts stand at a + 2, a + 3, ...
    for anchor in range(prompt - 1, changed_from - 1):
        unchanged = changed_from - (anchor + 2)
        one, other = int(first[anchor - prompt + 1]), int(second[anchor - prompt + 1])
        assert min(one, unchanged) == min(other, unchanged)
    assert first.tolist() != second.tolist()


def accept_sampled(
    drafts_BK: torch.Tensor, probs_BTV: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling of drafts chosen without chance (arXiv 2211.17192, Algorithm 1, with q = 1 at the draft).

    Draft x is kept with probability p(x); the first rejected one is replaced by a sample of p without x, and when all
    are kept one more token is sampled from the last row. Returns (kept drafts [B], the token after them [B]).
    """
    chance_BK = torch.rand(drafts_BK.shape, generator=generator)
    kept_BK = chance_BK < probs_BTV[:, :-1].gather(2, drafts_BK[..., None])[..., 0]
    num_accepted_B = kept_BK.long().cumprod(dim=1).sum(dim=1)
    weights_BV = probs_BTV[torch.arange(len(drafts_BK)), num_accepted_B]
    if drafts_BK.shape[1]:
        rejected_B1 = drafts_BK.gather(1, num_accepted_B.clamp_max(drafts_BK.shape[1] - 1)[:, None])
        all_kept_B1 = (num_accepted_B == drafts_BK.shape[1])[:, None]
        weights_BV = weights_BV.scatter(1, rejected_B1, weights_BV.gather(1, rejected_B1) * all_kept_B1)
    return num_accepted_B, torch.multinomial(weights_BV, 1, generator=generator)[:, 0]


@torch.no_grad()
def sampled_decoding(
    drafter: Drafter, target: Target, prompts_BP: torch.Tensor, num_tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[list[int]]]:
    """Speculative decoding at temperature 1, as vLLM does it: greedy drafts, rejection sampling, one token more.

    Returns (answers [B, num_tokens], accepted drafts of each step by request).
    """
    num_requests, k = len(prompts_BP), drafter.config.num_depths
    room = prompts_BP.shape[1] + num_tokens + 2 * k + 2
    tokens_BN = torch.zeros(num_requests, room, dtype=torch.long)
    tokens_BN[:, : prompts_BP.shape[1]] = prompts_BP
    length_B = torch.full((num_requests,), prompts_BP.shape[1])
    request_B, position_BN = torch.arange(num_requests), torch.arange(room).expand(num_requests, -1)
    zeros_BN = torch.zeros_like(tokens_BN)
    rows = sample_rows(torch.full_like(tokens_BN, k), k, 1.0)
    mask = Sight.of(rows, zeros_BN).dense()
    steps: list[list[int]] = [[] for _ in range(num_requests)]
    drafts_BK = tokens_BN[:, :0]  # the prompt's own pass drafts nothing
    while bool((length_B < prompts_BP.shape[1] + num_tokens).any()):
        ahead_BK = length_B[:, None] + torch.arange(drafts_BK.shape[1])
        aux_BNX, last_BNS = target.states(
            tokens_BN.scatter(1, ahead_BK, drafts_BK), zeros_BN, position_BN, drafter.config.aux_layer_ids
        )
        seen_BT = length_B[:, None] - 1 + torch.arange(drafts_BK.shape[1] + 1)
        probs_BTV = (last_BNS[request_B[:, None], seen_BT] @ target.lm_head_VS.T).softmax(-1)
        num_accepted_B, next_B = accept_sampled(drafts_BK, probs_BTV, generator)
        running = (length_B < prompts_BP.shape[1] + num_tokens).tolist()
        for request, count in enumerate(num_accepted_B.tolist()):
            if running[request]:
                emitted = torch.cat([drafts_BK[request, :count], next_B[request, None]])
                tokens_BN[request, length_B[request] : length_B[request] + count + 1] = emitted
                length_B[request] += count + 1
                if drafts_BK.shape[1]:
                    steps[request].append(count)
        # States of positions before the newest token are those of the pass just made, wherever its drafts were kept.
        aux_BNX, _ = target.states(tokens_BN, zeros_BN, position_BN, drafter.config.aux_layer_ids)
        normed_BTH = draft_rows(drafter, tokens_BN, aux_BNX, rows.position_BT, mask)
        best_BT = drafter.logits(normed_BTH).argmax(-1)
        wanted_BT = rows.anchor_BT == (length_B - 2)[:, None]
        drafts_BK = best_BT[wanted_BT].view(num_requests, k)
    return tokens_BN[:, prompts_BP.shape[1] : prompts_BP.shape[1] + num_tokens], steps


def written_by(target: Target, prompts_BP: torch.Tensor, num_tokens: int, **sampling) -> Conversations:
    """Texts of the target without any drafts."""
    torch.manual_seed(2)
    written = target.model.generate(prompts_BP, max_new_tokens=num_tokens, eos_token_id=None, **sampling)
    return Conversations.from_lists(prompts_BP.tolist(), written[:, prompts_BP.shape[1] :].tolist())


def trained_drafter(target: Target, data: Conversations, folder: Path) -> Drafter:
    """A drafter that knows something of the target: one that guesses is as good on any text."""
    data.save_part(folder / "data", "00")
    recipe = Recipe(
        target=str(target.model.config._name_or_path),
        data=str(folder / "data"),
        output=str(folder / "run"),
        drafter=DrafterRecipe(num_layers=1, num_depths=NUM_DEPTHS, ptd_token_id=VOCABULARY - 1),
        batch=BatchRecipe(num_sequences=4, max_tokens=64),
        optimizer=OptimizerRecipe(name="muon", muon_lr=0.02, lr=0.02),
        schedule=ScheduleRecipe(max_steps=60, warmup_steps=5),
    )
    trainer = Trainer(recipe)
    trainer.run()
    return trainer.drafter


@pytest.mark.long
def test_walk_at_temperature_1_is_decoding_at_temperature_1(target: Target, tmp_path: Path) -> None:
    num_answers, num_tokens, generator = 140, 16, torch.Generator().manual_seed(0)
    sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    prompts_BP = torch.randint(0, VOCABULARY, (num_answers, PROMPT_TOKENS), generator=generator)
    plain = written_by(target, prompts_BP, num_tokens, **sampling)
    drafter = trained_drafter(target, plain, tmp_path)
    written, steps = sampled_decoding(drafter, target, prompts_BP, num_tokens, generator)
    decoded = Conversations.from_lists(prompts_BP.tolist(), written.tolist())
    # On the texts that decoding wrote, the walk is decoding, step by step; only the last step may reach past the end.
    for accepted_A, own in zip(replay(drafter, target, decoded).accepted, steps, strict=True):
        walked = walk(accepted_A, NUM_DEPTHS).tolist()
        assert walked[:-1] == own[: len(walked) - 1]
        assert walked[-1] <= own[len(walked) - 1]
    # And on texts sampled without any drafts the figures are the same, but for chance.
    greedy = written_by(target, prompts_BP, num_tokens, do_sample=False)
    ours, same, other = (
        figures(AnswerCounts.of(replay(drafter, target, data).accepted, NUM_DEPTHS))
        for data in (decoded, plain, greedy)
    )
    for k in ("1", "3"):
        bounds = [side["acceptance_length_95"][k] for side in (ours, same)]
        error = sum(((high - low) / 3.92) ** 2 for low, high in bounds) ** 0.5
        gaps = [abs(ours["acceptance_length"][k] - side["acceptance_length"][k]) for side in (same, other)]
        assert gaps[0] < 3 * error, (ours, same)
        assert gaps[1] > 6 * error, "greedy texts give the same: nothing is shown"


def test_answers_left_out_are_counted_by_reason_and_group(target: Target) -> None:
    data = Conversations.from_lists([[1, 2]] * 4, [[3], [1] * 40, [1, 2, 3], []])
    groups = ["empty", "long", "fine", "empty"]
    found = replay(new_drafter(target), target, data, max_tokens=20)
    summary = program.summarize(found, program.group_names(data, groups))
    assert summary["all"]["skipped"] == {"fewer than 2 answer tokens": 2, "more than 20 tokens": 1}
    assert summary["all"]["num_answers"] == 1
    assert summary["empty"] == {"num_answers": 0, "num_tokens": 0, "skipped": {"fewer than 2 answer tokens": 2}}
    assert "skipped" not in summary["fine"]
    assert "skipped 1: more than 20 tokens" in program.table({"groups": summary})


@pytest.fixture
def folders(target: Target, tmp_path: Path) -> Path:
    """Heads of both kinds, and answers at two temperatures."""
    save_drafter(tmp_path / "p-eagle", new_drafter(target))
    save_drafter(tmp_path / "eagle3", new_drafter(target, ptd_token_id=None, num_layers=1, num_depths=2))
    for seed, (name, manifest) in enumerate({"greedy": {}, "sampled": {"temperature": 1.0}}.items()):
        data = random_data(10, seed)
        data.save_part(tmp_path / name, "00")
        write_manifest(tmp_path / name, {"categories": ["code", "qa"] * 5, **manifest})
    return tmp_path


def test_program_writes_table_json_plot_and_traces(target: Target, folders: Path, capsys) -> None:
    arguments = ["evaluate", folders / "p-eagle", folders / "greedy", folders / "sampled"]
    arguments += ["--against", folders / "eagle3", "--target", target.model.config._name_or_path]
    arguments += ["--out", folders / "out"]
    assert main([str(argument) for argument in arguments]) == 0
    document = json.loads((folders / "out" / "evaluation.json").read_text())
    assert [head["kind"] for head in document["heads"]] == ["P-EAGLE, 2 layers", "EAGLE-3, 1 layer"]
    assert [one["temperature"] for one in document["sets"]] == [0, 1]
    for one in document["sets"]:
        assert {"all", "code", "qa"} <= set(one["groups"]) == set(one["against"]) == set(one["ratios"])
        ours, theirs = (one[side]["all"]["acceptance_length"]["3"] for side in ("groups", "against"))
        assert one["ratios"]["all"]["ratio"]["3"] == pytest.approx(ours / theirs, abs=1e-3)
    assert "ratio K=3" in capsys.readouterr().out
    plot_acceptance(document, folders / "out" / "evaluation.png")
    image = (folders / "out" / "evaluation.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) < 150_000
    arguments = [*arguments[1:4], "--target", target.model.config._name_or_path, "--out", folders / "t.npz"]
    traces.main([str(argument) for argument in arguments])
    with np.load(folders / "t.npz") as stored:
        assert len(stored["num_anchors"]) == len(stored["category"]) == 20
        assert stored["num_anchors"].sum() == len(stored["accepted"])
        assert "chances" not in stored
    traces.main([*(str(argument) for argument in arguments), "--chances", "--max-per-category", "3"])
    with np.load(folders / "t.npz") as stored:
        assert len(stored["num_anchors"]) == 12
        assert stored["chances"].shape == (len(stored["accepted"]), int(stored["num_depths"]))


@pytest.mark.parametrize(("manifest", "message"), [({}, "names no categories"), ({"categories": ["a"]}, "names 1 cat")])
def test_wrong_manifests_are_named(folders: Path, manifest: dict, message: str) -> None:
    write_manifest(folders / "greedy", manifest)
    with pytest.raises(ValueError, match=message):
        program.load_answers(folders / "greedy")
