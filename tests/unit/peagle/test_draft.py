"""Drafting in one pass or one by one: the cached reference against a twin that recomputes every row."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import DrafterConfig
from peagle.draft import DraftSession
from peagle.model import Drafter
from tests.support.head_factory import CONFIG, random_drafter

EAGLE3 = dataclasses.replace(CONFIG, num_hidden_layers=1, ptd_token_id=None)


def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.no_grad()
def plain_logits(drafter: Drafter, tokens: Tensor, aux: Tensor, num_drafts: int) -> Tensor:
    """[K, V_draft] logits after `tokens` [n]: all rows of each draft token from the beginning."""
    num_real = len(tokens) - 1
    ids, hidden, logits = tokens[1:].tolist(), list(drafter.project_inputs(aux)), []
    for row in range(num_real - 1, num_real - 1 + num_drafts):
        position = torch.arange(row + 1)[None]
        normed, back = drafter(drafter.embed(torch.tensor([ids])), torch.stack(hidden)[None], position, attend)
        logits.append(drafter.logits(normed[0, row]))
        if drafter.config.is_parallel:
            ids.append(drafter.config.ptd_token_id)
            hidden.append(drafter.project_inputs(drafter.mask_hidden.view(-1)))
        else:
            ids.append(int(drafter.target_ids[logits[-1].argmax()]))
            hidden.append(back[0, row])
    return torch.stack(logits)


CONFIGS = {
    "P-EAGLE": CONFIG,
    "EAGLE-3": EAGLE3,
    "norms": dataclasses.replace(EAGLE3, norm_before_residual=True, fc_norm=True, num_hidden_layers=2),
    "norm of the output": dataclasses.replace(EAGLE3, norm_output=True),
    "reduced": dataclasses.replace(CONFIG, draft_vocab_size=10),
    "reduced EAGLE-3": dataclasses.replace(EAGLE3, draft_vocab_size=10),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("num_drafts", [1, 2, 4, 9])
def test_cached_steps_equal_recomputing_everything(num_drafts: int, config: DrafterConfig) -> None:
    drafter = random_drafter(config)
    target_ids = torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size)
    drafter.register_buffer("target_ids", target_ids, persistent=False)
    tokens, aux = torch.randint(0, 99, (40,)), torch.randn(40, CONFIG.fc_input_size).double()
    session, start = DraftSession(drafter), 0
    for end in (7, 8, 10, 16, 17, 39):  # prompt of 7, then 1..22 tokens accepted at a time
        drafts = session.propose(tokens[start + 1 : end], aux[start : end - 1], num_drafts)
        expected = plain_logits(drafter, tokens[:end], aux[: end - 1], num_drafts)
        torch.testing.assert_close(drafts.logits_KV, expected, rtol=1e-5, atol=1e-5)
        assert drafts.token_ids_K.tolist() == target_ids[expected.argmax(dim=-1)].tolist()
        start = end - 1
        assert session.num_rows == start, "rows of drafted tokens stayed in the cache"
