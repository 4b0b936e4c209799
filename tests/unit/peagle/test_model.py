"""The drafter network: training and drafting are the same function, and its parts equal Llama's.

The main test ties the two uses together: one pass over sampled rows under the mask of conditional drop-token sampling
gives, at every row, the logits that one-pass drafting with a KV cache gives when it stands at that row's anchor.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import DraftSession
from peagle.model import Drafter, Layer, Rotary
from peagle.train.cod import CodRows, attend_under, chain_lengths, draft_rows, sample_rows
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


def document_positions(document_BN: Tensor) -> Tensor:
    """Position of each token within its document [B, N]."""
    index_N = torch.arange(document_BN.shape[1]).expand_as(document_BN)
    starts = torch.cat([torch.ones_like(document_BN[:, :1]), document_BN.diff(dim=1)], dim=1) != 0
    return index_N - torch.where(starts, index_N, 0).cummax(dim=1).values


@dataclasses.dataclass
class Pass:
    """Inputs of one training pass over DOCUMENTS."""

    tokens_BN: Tensor
    aux_BNX: Tensor
    rows: CodRows
    position_BT: Tensor


def training_pass(ratio: float) -> Pass:
    generator = torch.Generator().manual_seed(1)
    tokens_BN = torch.randint(0, 99, DOCUMENTS.shape, generator=generator)
    aux_BNX = torch.randn(*DOCUMENTS.shape, CONFIG.fc_input_size, generator=generator).double()
    chain_BN = chain_lengths(DOCUMENTS, torch.ones_like(DOCUMENTS, dtype=torch.bool), NUM_DEPTHS)
    rows = sample_rows(chain_BN, NUM_DEPTHS, ratio, generator=generator)
    return Pass(tokens_BN, aux_BNX, rows, document_positions(DOCUMENTS).gather(1, rows.anchor_BT) + rows.offset_BT)


def drafted_logits(drafter: Drafter, data: Pass) -> dict[tuple[int, int, int], Tensor]:
    """Logits by (sequence, anchor, offset), drafting in every document one token after another.

    The last token of a document has no next token, so nothing is drafted there.
    """
    found = {}
    for sequence, document_N in enumerate(DOCUMENTS):
        for document in sorted(set(document_N.tolist()) - {-1}):
            session = DraftSession(drafter)
            places = (document_N == document).nonzero()[:, 0]
            for anchor in places[:-1].tolist():
                drafts = session.propose(
                    data.tokens_BN[sequence, anchor + 1][None], data.aux_BNX[sequence, anchor][None], NUM_DEPTHS
                )
                for offset, logits_V in enumerate(drafts.logits_KV):
                    found[sequence, anchor, offset] = logits_V
    return found


def largest_difference(drafter: Drafter, data: Pass, mask_BTT: Tensor, position_BT: Tensor) -> tuple[float, int]:
    """Between the training pass and drafting: (largest difference of a logit, number of rows compared)."""
    with torch.no_grad():
        normed_BTH = draft_rows(drafter, data.tokens_BN, data.aux_BNX, position_BT, mask_BTT)
        logits_BTV = drafter.logits(normed_BTH)
    drafted = drafted_logits(drafter, data)
    differences = []
    for sequence in range(DOCUMENTS.shape[0]):
        for row, (anchor, offset) in enumerate(
            zip(data.rows.anchor_BT[sequence], data.rows.offset_BT[sequence], strict=True)
        ):
            expected = drafted.get((sequence, int(anchor), int(offset)))
            if expected is not None:
                differences.append(float((logits_BTV[sequence, row] - expected).abs().max()))
    return max(differences), len(differences)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("ratio", [1.0, 0.7])
def test_training_pass_equals_drafting_with_a_cache(config: DrafterConfig, ratio: float) -> None:
    drafter, data = random_drafter(config), training_pass(ratio)
    attention_mask = AttentionMask.from_rows(data.rows, DOCUMENTS)
    difference, num_rows = largest_difference(drafter, data, attention_mask.dense(), data.position_BT)
    assert difference < 1e-4  # RMSNorm and RoPE tables work in float32
    num_anchors = 9 + 8 + 4 + 19
    assert num_rows == num_anchors * NUM_DEPTHS if ratio == 1.0 else num_rows > 2 * num_anchors


LONG = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["llama", "llama with stretched RoPE", "qwen3"])
def test_layers_after_the_first_are_those_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    scaling = Llama3Rope(**LONG) if "stretched" in kind else None
    rope = {"rope_theta": 10000.0, "rope_type": "default"} | ({"rope_type": "llama3"} | LONG if scaling else {})
    settings = TARGET | {"head_dim": 8, "rms_norm_eps": 1e-5, "attn_implementation": "eager", "rope_parameters": rope}
    reference_config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**settings)
    reference = (Qwen3DecoderLayer if kind == "qwen3" else LlamaDecoderLayer)(reference_config, 0)
    config = dataclasses.replace(CONFIG, qk_norm=kind == "qwen3", rope_scaling=scaling)
    layer = Layer(config, 1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    layer.load_state_dict(reference.state_dict())
    stream_BTH, positions_BT = torch.randn(2, 7, 32), torch.arange(11, 18).expand(2, -1)
    cos_sin = LlamaRotaryEmbedding(reference_config)(stream_BTH, positions_BT)
    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected = reference(stream_BTH, attention_mask=causal, position_embeddings=cos_sin)
    expected = expected[0] if isinstance(expected, tuple) else expected
    rotary = Rotary(config).tables(positions_BT)
    attend = attend_under(torch.ones(2, 7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(layer(stream_BTH, stream_BTH, rotary, attend), expected, rtol=1e-4, atol=1e-4)
