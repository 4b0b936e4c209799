"""Log-probabilities of drafts at every anchor of a text: those that drafting there gives, and a usable file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.simulation.confidence import load
from cluster.simulation.traces import Kind
from peagle.bench import draft_confidence
from peagle.checkpoint import save_drafter
from peagle.config import DrafterConfig
from peagle.data import Conversations, write_manifest
from peagle.draft import DraftSession
from peagle.evaluate import Answers, first_of_each
from peagle.model import Drafter
from peagle.replay import replay
from peagle.target import Target

VOCABULARY, NUM_DEPTHS = 6, 3
"""So few tokens that an untrained drafter is often right."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=7, **shape)).save_pretrained(folder)
    return Target(folder)


def new_drafter(target: Target, ptd_token_id: int | None = VOCABULARY - 1) -> Drafter:
    torch.manual_seed(1)
    values = dict(num_layers=2, num_depths=NUM_DEPTHS, ptd_token_id=ptd_token_id)
    drafter = Drafter(DrafterConfig.for_target(target.config, **values))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    drafter.share_target(target.embed_VS, target.lm_head_VS)
    return drafter.eval()


def random_data(num_answers: int) -> Conversations:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist() for _ in range(num_answers)]
    answers = [rng.integers(0, VOCABULARY, rng.integers(2, 30)).tolist() for _ in range(num_answers)]
    return Conversations.from_lists(prompts, answers)


def in_session(drafter: Drafter, target: Target, ids: np.ndarray, prompt: int) -> np.ndarray:
    """The log-softmax of each draft, [anchors, K], of a request drafted with a KV cache."""
    tokens_N, session, found = torch.from_numpy(ids).long(), DraftSession(drafter), []
    zeros_BN, position_BN = torch.zeros(1, len(ids), dtype=torch.long), torch.arange(len(ids))[None]
    aux_NX = target.states(tokens_N[None], zeros_BN, position_BN, drafter.config.aux_layer_ids)[0][0]
    for end in range(prompt + 1, len(ids)):
        rows = slice(session.num_rows, end - 1)
        drafts = session.propose(tokens_N[rows.start + 1 : end], aux_NX[rows], NUM_DEPTHS)
        found.append(drafts.logits_KV.log_softmax(-1).max(-1).values.numpy())
    return np.array(found)


def test_every_draft_has_the_log_probability_that_drafting_there_gives(target: Target) -> None:
    """Also drafts behind a wrong one, and at anchors whose first draft is wrong."""
    drafter, data = new_drafter(target), random_data(40)
    found = replay(drafter, target, data, with_log_probs=True)
    for (ids, prompt), log_probs_AK in zip(data.documents(), found.log_probs, strict=True):
        np.testing.assert_allclose(log_probs_AK, in_session(drafter, target, ids, prompt), atol=1e-4)
    plain = replay(drafter, target, data)
    assert plain.log_probs == []
    assert [one.tolist() for one in plain.accepted] == [one.tolist() for one in found.accepted]
    assert set(np.concatenate(found.accepted).tolist()) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="with_log_probs: the head has no mask token"):
        replay(new_drafter(target, None), target, data, with_log_probs=True)


def test_the_first_answers_of_each_category_are_kept() -> None:
    answers = Answers(random_data(5), ["a", "b", "a", "a", "b"], 1.0)
    some = first_of_each(answers, 2)
    assert (some.categories, some.temperature) == (["a", "b", "a", "b"], 1.0)
    kept = [ids.tolist() for ids, _ in answers.data.documents()]
    assert [ids.tolist() for ids, _ in some.data.documents()] == [kept[i] for i in (0, 1, 2, 4)]
    assert first_of_each(answers, None) is answers
    with pytest.raises(ValueError, match="max_per_category is 0"):
        first_of_each(answers, 0)


def test_the_program_writes_traces_that_can_be_calibrated(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, drafter = random_data(6), new_drafter(target)
    save_drafter(tmp_path / "head", drafter, dtype=torch.float32)
    data.save_part(tmp_path / "answers", "00")
    write_manifest(tmp_path / "answers", {"categories": ["qa"] * 6, "temperature": 1.0})
    monkeypatch.setattr(draft_confidence, "load_target", lambda folder: target)
    out = tmp_path / "traces.npz"
    arguments = ["draft_confidence", str(tmp_path / "head"), "--target", "T", "--answers", str(tmp_path / "answers")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--max-per-category", "5", "--out", str(out)])
    draft_confidence.main()
    pool = load([out], {"questions": Kind(("qa",), temperature=1.0)})
    expected = replay(drafter, target, data, with_log_probs=True)
    assert len(pool.answers) == 5
    for one, accepted_A, log_probs_AK in zip(pool.answers, expected.accepted, expected.log_probs, strict=False):
        assert one.accepted_A.tolist() == accepted_A.tolist()
        assert 1 / (1 + np.exp(-one.log_odds_AK)) == pytest.approx(np.exp(log_probs_AK), abs=2e-3)
    made = json.loads(str(np.load(out)["made"]))
    assert made["answers"][0]["num_answers"] == 5
    assert len(made["head"]["digest"]) == 10
