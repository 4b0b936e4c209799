"""The drafter network: training and drafting are the same function, and its parts equal Llama's.

The main test ties the two uses together: one pass over sampled rows under the mask of conditional drop-token sampling
gives, at every row, the logits that one-pass drafting with a KV cache gives when it stands at that row's anchor.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import DraftSession
from peagle.model import Drafter, Layer, Rotary
from peagle.train.cod import attend_under, chain_lengths, draft_rows, sample_rows
from peagle.train.masks import AttentionMask
from tests.support.head_factory import CONFIG, TARGET, random_drafter

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
