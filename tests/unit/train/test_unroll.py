"""The unroll of EAGLE-3 against a twin that drafts from one anchor at a time with a KV cache; what rows may not see."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import DrafterConfig
from peagle.draft import KVCache
from peagle.model import Drafter
from peagle.train.cod import chain_lengths
from peagle.train.data import Batch
from peagle.train.passes import Eagle3Pass, States, block_masks, unrolled_rows
from peagle.train.recipe import Recipe
from tests.support.head_factory import TARGET, random_drafter
from tests.support.plain_losses import plain_losses

NUM_STEPS = 4
CONFIG = DrafterConfig.for_target(TARGET, num_layers=2, num_depths=NUM_STEPS, fc_norm=True)
LENGTHS = (9, 5, 7)  # documents of each sequence; three tokens of padding follow


def random_batch() -> tuple[Batch, Tensor]:
    """Two sequences of the same documents and target hidden states [2, N, C * S]."""
    generator = torch.Generator().manual_seed(0)
    document_N = torch.cat([torch.full((length,), number) for number, length in enumerate(LENGTHS)])
    document_BN = torch.cat([document_N, torch.full((3,), -1)]).expand(2, -1)
    position_N = torch.cat([torch.arange(length) for length in (*LENGTHS, 3)])
    tokens_BN = torch.randint(0, 100, document_BN.shape, generator=generator)
    index_BN = torch.arange(tokens_BN.numel()).view_as(tokens_BN).where(document_BN >= 0, -1)
    batch = Batch(tokens_BN, document_BN, position_N.expand(2, -1), document_BN >= 0, index_BN)
    aux_BNX = torch.randn(*document_BN.shape, CONFIG.fc_input_size, generator=generator).double()
    return batch, aux_BNX


def draft_alone(drafter: Drafter, token_ids: list[int], aux_AX: Tensor, num_steps: int) -> list[Tensor]:
    """Normed rows [H] of one chain, drafted as an engine does.

    aux_AX: hidden states of the target up to the anchor, from the beginning of its document. token_ids: the tokens
    after each of these rows, then those that the chain reads.
    """
    cache = KVCache(drafter.config.num_hidden_layers)

    def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = cache.append(layer_index, k, v)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    num_rows = len(aux_AX)
    position, hidden = torch.arange(num_rows), drafter.project_inputs(aux_AX)
    embeds, normed = drafter.embed(torch.tensor(token_ids[:num_rows])), []
    for step in range(num_steps):
        row, stream = drafter(embeds[None], hidden[None], position[None], attend)
        normed.append(row[0, -1])
        if step + 1 < num_steps:
            next_id = token_ids[num_rows + step]
            embeds, hidden, position = drafter.embed(torch.tensor([next_id])), stream[0, -1:], position[-1:] + 1
    return normed


def chains(batch: Batch, num_steps: int) -> list[tuple[int, int, int, int]]:
    """(sequence, first token of the document, anchor, steps whose label lies in the document) of every chain."""
    length_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_steps)
    first_BN = torch.arange(length_BN.shape[1]) - batch.position_BN
    return [(b, int(first_BN[b, a]), a, int(length_BN[b, a])) for b, a in length_BN.nonzero().tolist()]


@pytest.mark.parametrize(
    "switches",
    [{}, {"norm_before_residual": True}, {"norm_output": True}, {"num_hidden_layers": 1}],
)
def test_rows_and_gradients_equal_one_chain_at_a_time(switches: dict[str, object]) -> None:
    drafter = random_drafter(dataclasses.replace(CONFIG, **switches))
    batch, aux_BNX = random_batch()
    rows = unrolled_rows(drafter, batch.tokens_BN, aux_BNX, batch.position_BN, batch.document_BN)
    rows_BKNH = rows.unflatten(1, (NUM_STEPS, -1))
    together, alone, num_rows = torch.tensor(0.0), torch.tensor(0.0), 0
    for b, first, anchor, length in chains(batch, NUM_STEPS):
        ids = batch.tokens_BN[b, first + 1 : anchor + 1 + length].tolist()
        for step, expected in enumerate(draft_alone(drafter, ids, aux_BNX[b, first : anchor + 1], length)):
            torch.testing.assert_close(rows_BKNH[b, step, anchor], expected)
            weight = torch.randn(CONFIG.hidden_size, generator=torch.Generator().manual_seed(num_rows))
            together = together + rows_BKNH[b, step, anchor] @ weight.double()
            alone, num_rows = alone + expected @ weight.double(), num_rows + 1
    assert num_rows == 2 * sum(sum(min(NUM_STEPS, length - 2 - a) for a in range(length - 2)) for length in LENGTHS)
    names = list(drafter.trainable())
    ours, twin = (torch.autograd.grad(total, list(drafter.trainable().values())) for total in (together, alone))
    for name, one, other in zip(names, ours, twin, strict=True):
        # Norms and rotation work in float32 inside a drafter of float64.
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=lambda text, name=name: f"{name}: {text}"
        )
        assert one.abs().max() > 1e-3, f"{name} gets no gradient: nothing compared"


def test_the_pass_forms_the_gradient_of_the_weighted_loss() -> None:
    recipe = Recipe(
        target="", data="", output="", drafter={"method": "eagle3", "num_depths": NUM_STEPS}, loss={"offset_decay": 0.8}
    )
    drafter = random_drafter(CONFIG)
    batch, aux_BNX = random_batch()
    batch = dataclasses.replace(batch, answer_BN=batch.position_BN >= 3)
    last_BNS = torch.randn(*batch.tokens_BN.shape, 32, generator=torch.Generator().manual_seed(3)).double()
    lm_head_VS = drafter.lm_head.weight.detach()
    report = Eagle3Pass(recipe, compiled=False)(drafter, batch, States(aux_BNX, last_BNS, lm_head_VS))
    rows_BKNH = unrolled_rows(drafter, batch.tokens_BN, aux_BNX, batch.position_BN, batch.document_BN)
    rows_BKNH = rows_BKNH.unflatten(1, (NUM_STEPS, -1))
    cells = [(b, step, anchor) for b, _, anchor, length in chains(batch, NUM_STEPS) for step in range(length)]
    logits_RV = drafter.logits(torch.stack([rows_BKNH[cell] for cell in cells]))
    target_RV = torch.stack([last_BNS[b, anchor + step + 1] for b, step, anchor in cells]) @ lm_head_VS.T
    weight_R = torch.tensor([0.8**step for _, step, _ in cells])
    draft_R = target_RV.argmax(-1)
    loss = weight_R / weight_R.sum() @ plain_losses(logits_RV, target_RV).float()
    torch.testing.assert_close(report.loss.double(), loss.double())
    parameters = list(drafter.trainable().values())
    for parameter, expected in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    num_right = int((logits_RV.argmax(-1) == draft_R).sum())
    assert int(report.correct_R.sum()) == num_right
    assert report.offset_R.bincount().tolist() == [sum(step == k for _, step, _ in cells) for k in range(NUM_STEPS)]


def test_recipes_that_do_not_fit_are_refused() -> None:
    common = dict(target="", data="", output="")
    recipe = Recipe(**common, drafter={"method": "eagle3"}, batch={"num_segments": 2})
    with pytest.raises(ValueError, match="num_segments = 2: method eagle3 has no segments, write 1"):
        Eagle3Pass(recipe, compiled=False)


@torch.no_grad()
def test_flex_attention_joins_to_the_same_rows() -> None:
    config = dataclasses.replace(CONFIG, head_dim=16)
    drafter = random_drafter(config).float()
    batch, aux_BNX = random_batch()
    flex, plain = (
        unrolled_rows(drafter, batch.tokens_BN, aux_BNX.float(), batch.position_BN, attention_mask)
        for attention_mask in (block_masks(batch.document_BN, config.num_depths, 16), batch.document_BN)
    )
    torch.testing.assert_close(flex, plain, rtol=1e-3, atol=1e-4)
