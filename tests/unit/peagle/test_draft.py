"""Drafting in one pass or one by one: cached reference against twins that recompute every row, and against decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.checkpoint import build_drafter, is_plain, load_head, save_drafter, without_tables
from peagle.config import DrafterConfig
from peagle.draft import Drafts, DraftSession
from peagle.model import Drafter
from peagle.train.data import Conversations, answer_token_counts, frequent_tokens
from peagle.train.target import Target
from tests.support.head_factory import CONFIG, TARGET, random_drafter
from tests.support.small_run import trainer_of, write_small_run

EAGLE3 = dataclasses.replace(CONFIG, num_hidden_layers=1, ptd_token_id=None)
EAGLE3_SWITCHES = [
    EAGLE3,
    dataclasses.replace(EAGLE3, norm_before_residual=True, fc_norm=True, num_hidden_layers=2),
    dataclasses.replace(EAGLE3, norm_output=True),
]


def random_request(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [N] and target hidden states [N, C * S]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 99, (num_tokens,), generator=generator)
    return tokens, torch.randn(num_tokens, CONFIG.fc_input_size, generator=generator).double()


@torch.no_grad()
def plain_logits(drafter: Drafter, tokens: Tensor, aux: Tensor, num_drafts: int) -> Tensor:
    """[K, V_draft] logits after `tokens` [n], every row recomputed, attention written out row by row."""
    num_real = len(tokens) - 1
    ids, hidden = [], []
    for row in range(num_real + num_drafts - 1):
        real = row < num_real
        ids.append(int(tokens[row + 1]) if real else drafter.config.ptd_token_id)
        hidden.append(aux[row] if real else drafter.mask_hidden.view(-1))

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            for row in range(q.shape[2]):
                scores = k[0, group, : row + 1] @ q[0, head, row] / q.shape[3] ** 0.5
                out[0, head, row] = scores.softmax(dim=0) @ v[0, group, : row + 1]
        return out

    embeds, reduced = drafter.embed(torch.tensor([ids])), drafter.project_inputs(torch.stack(hidden)[None])
    normed, _ = drafter(embeds, reduced, torch.arange(len(ids))[None], attend)
    return drafter.logits(normed[0, num_real - 1 :])


@torch.no_grad()
def plain_sequential_logits(drafter: Drafter, tokens: Tensor, aux: Tensor, num_drafts: int) -> Tensor:
    """[K, V_draft] logits of an EAGLE-3 head after `tokens` [n]: all rows of each draft token from the beginning."""
    num_real = len(tokens) - 1
    ids, hidden, logits = tokens[1:].tolist(), list(drafter.project_inputs(aux)), []

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for row in range(num_real - 1, num_real - 1 + num_drafts):
        position = torch.arange(row + 1)[None]
        normed, back = drafter(drafter.embed(torch.tensor([ids])), torch.stack(hidden)[None], position, attend)
        logits.append(drafter.logits(normed[0, row]))
        ids.append(int(drafter.target_ids[logits[-1].argmax()]))
        hidden.append(back[0, row])
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("config", "num_drafts"),
    [
        *((CONFIG, num_drafts) for num_drafts in (1, 2, 5, 9)),
        *((config, num_drafts) for config in EAGLE3_SWITCHES for num_drafts in (1, 4)),
    ],
)
def test_cached_steps_equal_recomputing_everything(config: DrafterConfig, num_drafts: int) -> None:
    drafter, twin = random_drafter(config), plain_logits if config.is_parallel else plain_sequential_logits
    tokens, aux = random_request(40)
    session, start = DraftSession(drafter), 0
    for end in (7, 8, 10, 16, 17, 39):  # prompt of 7, then 1..22 tokens accepted at a time
        drafts = session.propose(tokens[start + 1 : end], aux[start : end - 1], num_drafts)
        expected = twin(drafter, tokens[:end], aux[: end - 1], num_drafts)
        torch.testing.assert_close(drafts.logits_KV, expected, rtol=1e-5, atol=1e-5)
        assert drafts.token_ids_K.tolist() == expected.argmax(dim=-1).tolist()
        start = end - 1
        assert session.num_rows == start, "rows of drafted tokens stayed in the cache"


@pytest.mark.parametrize("kind", [CONFIG, EAGLE3])
def test_drafts_of_a_reduced_vocabulary_are_the_target_s_token_ids(kind: DrafterConfig) -> None:
    config = dataclasses.replace(kind, draft_vocab_size=10)
    drafter = random_drafter(config)
    drafter.register_buffer("target_ids", torch.arange(10) * 7 + 3, persistent=False)
    tokens, aux = random_request(9)
    drafts = DraftSession(drafter).propose(tokens[1:], aux[:-1], 5)
    assert drafts.logits_KV.shape == (5, 10)
    assert drafts.token_ids_K.tolist() == [int(index) * 7 + 3 for index in drafts.logits_KV.argmax(dim=-1)]
    if kind is EAGLE3:
        torch.testing.assert_close(drafts.logits_KV, plain_sequential_logits(drafter, tokens, aux[:-1], 5))


@pytest.mark.parametrize("config", [CONFIG, EAGLE3])
def test_speculative_decoding_with_a_real_target_equals_greedy_decoding(config: DrafterConfig) -> None:
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**TARGET, initializer_range=0.4)).double().eval()
    drafter = random_drafter(config)
    prompt = [5, 17, 3, 88, 41]
    reference = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)[
        0
    ].tolist()
    tokens, session, lengths = list(prompt), DraftSession(drafter), []
    with torch.no_grad():
        tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
        while len(tokens) < len(reference):
            out = target(torch.tensor([tokens]), output_hidden_states=True)
            aux = torch.cat([out.hidden_states[layer] for layer in config.aux_layer_ids], dim=-1)[0]
            rows = slice(session.num_rows, len(tokens) - 1)
            drafts = session.propose(torch.tensor(tokens[rows.start + 1 :]), aux[rows], 4).token_ids_K
            right = reference[len(tokens) :][: len(lengths) % 5]  # 0..4 right drafts in turn
            drafts[: len(right)] = torch.tensor(right, dtype=torch.int64)
            logits = target(torch.tensor([tokens + drafts.tolist()])).logits[:, len(tokens) - 1 :]
            best = logits[0].argmax(dim=-1).tolist()  # accepted: drafts while each is the target's choice, and one more
            lengths.append(next((i for i, draft in enumerate(drafts.tolist()) if draft != best[i]), len(drafts)))
            tokens += best[: lengths[-1] + 1]
    assert tokens[: len(reference)] == reference
    assert set(range(4)) <= set(lengths)
    assert len(set(reference)) > 10, "a looping target would prove little"


# ---- a reduced draft vocabulary, and tables that are left to the target


def test_most_frequent_tokens_ascending_and_ties_to_the_lower_id() -> None:
    count_V = torch.tensor([0, 7, 2, 9, 2, 0, 1])
    assert frequent_tokens(count_V, 3).tolist() == [1, 2, 3]
    assert frequent_tokens(count_V, 3, always=[6]).tolist() == [1, 3, 6]
    assert frequent_tokens(count_V, 7, always=[6]).tolist() == list(range(7))
    for size in (8, 1):
        with pytest.raises(ValueError, match=rf"draft_vocab_size = {size}: must be in 2\.\.7"):
            frequent_tokens(count_V, size, always=[6, 0])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small"))


def test_trained_head_drafts_the_same_after_saving(small: Path, tmp_path: Path) -> None:
    settings = ["drafter.draft_vocab_size=24", "schedule.max_steps=12", "evaluate={}"]
    trainer = trainer_of(small, tmp_path / "run", *settings)
    before = {name: value.detach().clone() for name, value in trainer.drafter.trainable().items()}
    head = trainer.run()
    live = trainer.drafter
    moved = [name for name, value in live.trainable().items() if not torch.equal(value, before[name])]
    assert sorted(moved) == sorted(before), "every tensor that the head owns is trained"
    data = trainer.batches.data
    assert torch.equal(live.target_ids, frequent_tokens(answer_token_counts(data, 64), 24, always=[2]))

    config, tensors = load_head(save_drafter(tmp_path / "exact", live, dtype=torch.float32))
    assert config == load_head(head)[0]
    assert is_plain(head, config)
    expected = drafts(live, trainer.target, data)
    assert set(expected.token_ids_K.tolist()) <= set(live.target_ids.tolist())
    tables = {"embed_VH": trainer.target.embed_VS, "lm_head_VH": trainer.target.lm_head_VS}
    for built in (build_drafter(config, tensors), build_drafter(config, without_tables(config, tensors), **tables)):
        again = drafts(built, trainer.target, data)
        assert torch.equal(again.token_ids_K, expected.token_ids_K)
        torch.testing.assert_close(again.logits_KV, expected.logits_KV)


def drafts(drafter: Drafter, target: Target, data: Conversations) -> Drafts:
    """What a drafter proposes after the first conversation."""
    tokens_1N = torch.from_numpy(next(iter(data.documents()))[0].astype("int64"))[None]
    position_1N = torch.arange(tokens_1N.shape[1])[None]
    aux_1NX, _ = target.states(tokens_1N, position_1N, drafter.config.aux_layer_ids)
    return DraftSession(drafter).propose(tokens_1N[0, 1:], aux_1NX[0, :-1], 4)
