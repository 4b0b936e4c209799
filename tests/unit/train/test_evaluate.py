"""Evaluation against decoding: what drafting at each anchor gets right, also at temperature 1; counts and files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.cli import main
from peagle.checkpoint import save_drafter
from peagle.config import DrafterConfig, HeadError
from peagle.draft import DraftSession
from peagle.model import Drafter
from peagle.train import evaluate as program
from peagle.train.data import Conversations, write_manifest
from peagle.train.evaluate import AnswerCounts, figures, replay, table, walk
from peagle.train.target import Target
from tests.support.head_factory import random_drafter, reconfigure

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
    drafter = random_drafter(DrafterConfig.for_target(target.config, **values), seed=1).float()
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
    aux_NX = target.states(tokens_N[None], position_BN, drafter.config.aux_layer_ids)[0][0]
    session, found, done = DraftSession(drafter), [], 0
    for position in range(prompt, len(tokens_N) - 1):  # of the newest token
        drafts_K = session.propose(tokens_N[done + 1 : position + 1], aux_NX[done:position], k).token_ids_K
        true_K, done = tokens_N[position + 1 : position + 1 + k], position
        found.append(int((drafts_K[: len(true_K)] == true_K).long().cumprod(0).sum()))
    return found


@pytest.mark.parametrize("changes", [{}, {"ptd_token_id": None}])
def test_every_anchor_accepts_what_drafting_there_gets_right(target: Target, changes: dict, monkeypatch) -> None:
    monkeypatch.setattr("peagle.train.evaluate.PACK_TOKENS", 28)
    drafter, data = new_drafter(target, **changes), random_data(16)
    assert data.lengths.max() > 28, "no answer stands alone"
    found = replay(drafter, target, data)
    assert found.walked == list(range(16))
    for (ids, prompt), accepted in zip(data.documents(), found.accepted, strict=True):
        assert accepted.tolist() == accepted_in_session(drafter, target, ids, prompt, NUM_DEPTHS)
    assert set(np.concatenate(found.accepted).tolist()) == {0, 1, 2, 3}, "too little is ever right to compare"


@pytest.fixture
def folders(target: Target, tmp_path: Path) -> Path:
    """Heads of both kinds, and answers at two temperatures."""
    save_drafter(tmp_path / "p-eagle", new_drafter(target))
    reconfigure(tmp_path / "p-eagle", eagle_aux_hidden_state_layer_ids=..., eagle_config=...)  # vLLM's default layers
    save_drafter(tmp_path / "eagle3", new_drafter(target, ptd_token_id=None, num_layers=1, num_depths=2))
    for seed, (name, manifest) in enumerate({"greedy": {}, "sampled": {"temperature": 1.0}}.items()):
        data = random_data(10, seed)
        data.save_part(tmp_path / name, "00")
        write_manifest(tmp_path / name, {"categories": ["code", "qa"] * 5, **manifest})
    return tmp_path


def test_program_writes_table_and_json(target: Target, folders: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("peagle.heads.shipped_heads", lambda: {"ours": folders / "eagle3"})
    arguments = ["evaluate", folders / "p-eagle", folders / "greedy", folders / "sampled"]
    arguments += ["--against", "ours", "--target", target.model.config.name_or_path]
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
    with pytest.raises(HeadError, match="'nothing' is neither a directory nor shipped; shipped: ours"):
        list(program.evaluate_heads("nothing", [folders / "greedy"], "no target"))
    evaluated = [folders / "p-eagle", [folders / "greedy"], target.model.config.name_or_path]
    write_manifest(folders / "greedy", {"categories": ["code", "qa"] * 5, "tokenizer": "another"})
    monkeypatch.setattr("peagle.train.data.tokenizer_hash", lambda _: "the target's")
    with pytest.raises(ValueError, match="data and target do not match: .* made with tokenizer another"):
        list(program.evaluate_heads(*evaluated))
    reconfigure(folders / "p-eagle", vocab_size=VOCABULARY - 1)
    with pytest.raises(HeadError, match="vocab"):
        list(program.evaluate_heads(*evaluated))
    some = program.load_answers(folders / "greedy", max_per_category=3)
    assert some.categories == ["code", "qa"] * 3
    assert some.data.tokens.tolist() == program.load_answers(folders / "greedy").data.select(range(6)).tokens.tolist()


@pytest.mark.parametrize(("manifest", "message"), [({}, "names no categories"), ({"categories": ["a"]}, "names 1 cat")])
def test_wrong_manifests_are_named(folders: Path, manifest: dict, message: str) -> None:
    write_manifest(folders / "greedy", manifest)
    with pytest.raises(ValueError, match=message):
        program.load_answers(folders / "greedy")


def test_a_wrong_folder_is_named_before_the_target_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no part-.* in .*; make them with"):
        list(program.evaluate_heads(tmp_path / "no head", [tmp_path], str(tmp_path / "no target")))


def test_walk_visits_the_anchors_that_decoding_visits() -> None:
    accepted_A = np.array([2, 3, 0, 1, 3, 0])
    # Anchor 0 accepts 2 and goes on at 3, which accepts 1 and goes on at 5, which accepts none.
    assert walk(accepted_A, 3).tolist() == [2, 1, 0]
    assert walk(accepted_A, 1).tolist() == [1, 0, 1, 0]
    assert walk(accepted_A[:0], 3).tolist() == []
    counts = AnswerCounts.from_accepted([accepted_A, np.array([0, 1])], 3)
    assert counts.num_steps.tolist() == [[4, 3, 3], [2, 2, 2]]
    assert counts.num_accepting.tolist() == [[2, 1, 0], [1, 0, 0]]
    found = figures(counts)
    assert (found["num_answers"], found["num_tokens"]) == (2, 8)
    assert found["acceptance_length"] == {"1": 1.3333, "2": 1.6, "3": 1.6}
    assert found["acceptance_rates"] == [0.6, 0.2, 0.0]
    one = figures(counts.select(np.array([1])))
    assert "acceptance_length_95" not in one
    groups = {"all": found, "chat": found, "chat looping": one, "looping": one, "non-looping": found}
    assert [line.split("  ")[0] for line in table({"groups": groups}).splitlines()[1:]] == [
        "all",
        "chat looping",
        "looping",
    ]
