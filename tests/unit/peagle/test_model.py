"""The drafter network: training and drafting are the same function, and its parts equal Llama's.

The main test ties the two uses together: one pass over sampled rows under the mask of conditional drop-token sampling
gives, at every row, the logits that one-pass drafting with a KV cache gives when it stands at that row's anchor.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM

from peagle.checkpoint import build_drafter, is_plain, load_head, save_drafter, without_tables
from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import Drafts, DraftSession
from peagle.model import Drafter, Layer, Rotary
from peagle.train.cod import attend_under, chain_lengths, draft_rows, sample_rows
from peagle.train.data import Conversations, answer_token_counts, frequent_tokens
from peagle.train.masks import AttentionMask
from peagle.train.target import Target
from tests.support.head_factory import CONFIG, TARGET, random_drafter
from tests.support.small_run import trainer_of, write_small_run

NUM_DEPTHS = CONFIG.num_depths
VARIANTS = {
    "plain": CONFIG,
    "fc_norm": dataclasses.replace(CONFIG, fc_norm=True),
    "norm_before_residual": dataclasses.replace(CONFIG, norm_before_residual=True),
    "attention_bias": dataclasses.replace(CONFIG, attention_bias=True),
    "reduced": dataclasses.replace(CONFIG, draft_vocab_size=40),
    "qk_norm": dataclasses.replace(CONFIG, qk_norm=True),
    "norm_before_fc": dataclasses.replace(CONFIG, norm_before_fc=True),
}
# Two packed sequences of 24 tokens: documents of 10, 9 and 5 tokens, and of 20 and 4 tokens that are padding (-1).
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 9 + [2] * 5, [0] * 20 + [-1] * 4])
POSITIONS = torch.tensor([[*range(10), *range(9), *range(5)], [*range(20), *range(4)]])


def drafted_logits(drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor) -> dict[tuple[int, int, int], Tensor]:
    """Logits by (sequence, anchor, offset), drafting in every document one token after another.

    The last token of a document has no next token, so nothing is drafted there.
    """
    found = {}
    for sequence, document_N in enumerate(DOCUMENTS):
        for document in sorted(set(document_N.tolist()) - {-1}):
            session = DraftSession(drafter)
            places = (document_N == document).nonzero()[:, 0]
            for anchor in places[:-1].tolist():
                row = tokens_BN[sequence, anchor + 1][None], aux_BNX[sequence, anchor][None]
                for offset, logits_V in enumerate(session.propose(*row, NUM_DEPTHS).logits_KV):
                    found[sequence, anchor, offset] = logits_V
    return found


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("ratio", [1.0, 0.7])
def test_training_pass_equals_drafting_with_a_cache(config: DrafterConfig, ratio: float) -> None:
    drafter, generator = random_drafter(config), torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, 99, DOCUMENTS.shape, generator=generator)
    aux_BNX = torch.randn(*DOCUMENTS.shape, CONFIG.fc_input_size, generator=generator).double()
    chain_BN = chain_lengths(DOCUMENTS, torch.ones_like(DOCUMENTS, dtype=torch.bool), NUM_DEPTHS)
    rows = sample_rows(chain_BN, NUM_DEPTHS, ratio, generator=generator)
    position_BT = POSITIONS.gather(1, rows.anchor_BT) + rows.offset_BT
    mask_BTT = AttentionMask.from_rows(rows, DOCUMENTS).dense()
    with torch.no_grad():
        logits_BTV = drafter.logits(draft_rows(drafter, tokens_BN, aux_BNX, position_BT, mask_BTT))
    drafted, num_rows = drafted_logits(drafter, tokens_BN, aux_BNX), 0
    for sequence, (anchor_T, offset_T) in enumerate(zip(rows.anchor_BT, rows.offset_BT, strict=True)):
        for row, key in enumerate(zip(anchor_T.tolist(), offset_T.tolist(), strict=True)):
            if (expected := drafted.get((sequence, *key))) is not None:
                num_rows += 1
                # RMSNorm and RoPE tables work in float32.
                torch.testing.assert_close(logits_BTV[sequence, row], expected, rtol=0, atol=1e-4)
    num_anchors = 9 + 8 + 4 + 19
    assert num_rows == num_anchors * NUM_DEPTHS if ratio == 1.0 else num_rows > 2 * num_anchors


LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["llama", "llama with stretched RoPE", "qwen3"])
def test_layers_after_the_first_are_those_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    scaling = Llama3Rope(**LONG) if "stretched" in kind else None
    rope = {"rope_theta": 10000.0, "rope_type": "default"} | ({"rope_type": "llama3"} | LONG if scaling else {})
    settings = TARGET | {"head_dim": 8, "rms_norm_eps": 1e-5, "attn_implementation": "eager", "rope_parameters": rope}
    network = AutoModel.from_config(AutoConfig.for_model(kind.split()[0], **settings))
    reference = network.layers[0]
    config = dataclasses.replace(CONFIG, qk_norm=kind == "qwen3", rope_scaling=scaling)
    layer = Layer(config, 1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    layer.load_state_dict(reference.state_dict())
    stream_BTH, positions_BT = torch.randn(2, 7, 32), torch.arange(11, 18).expand(2, -1)
    cos_sin = network.rotary_emb(stream_BTH, positions_BT)
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected = reference(stream_BTH, attention_mask=causal, position_embeddings=cos_sin)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rotary = Rotary(config).tables(positions_BT)
    attend = attend_under(torch.ones(2, 7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(layer(stream_BTH, stream_BTH, rotary, attend), expected, rtol=1e-4, atol=1e-4)


# ---- drafting in one pass or one by one, against twins that recompute every row, and against decoding


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


def test_trained_head_drafts_the_same_after_saving(tmp_path: Path) -> None:
    settings = ["drafter.draft_vocab_size=24", "schedule.max_steps=12", "evaluate={}"]
    trainer = trainer_of(write_small_run(tmp_path), "run", *settings)
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
