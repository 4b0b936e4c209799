"""The unroll of EAGLE-3 against a twin that drafts from one anchor at a time; what rows may not see."""

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.config import DrafterConfig
from peagle.model import Drafter
from peagle.train.cod import attend_under, chain_lengths
from peagle.train.data import Batch
from peagle.train.passes import Eagle3Pass, States, block_masks, unrolled_rows
from peagle.train.recipe import Recipe
from tests.support.head_factory import TARGET, random_drafter
from tests.support.plain_losses import plain_losses

NUM_STEPS = 4
CONFIG = DrafterConfig.for_target(TARGET, num_layers=2, num_depths=NUM_STEPS, fc_norm=True)
FOLDERS = dict(target="", data="", output="")
LENGTHS = (9, 5, 7)  # documents of each sequence; three tokens of padding follow


def random_batch(lengths: tuple[int, ...] = LENGTHS, num_padding: int = 3, seed: int = 0) -> tuple[Batch, Tensor]:
    """Two sequences of the same documents and target hidden states [2, N, C * S]."""
    generator = torch.Generator().manual_seed(seed)
    document_N = torch.tensor([*range(len(lengths)), -1]).repeat_interleave(torch.tensor([*lengths, num_padding]))
    document_BN = document_N.expand(2, -1)
    position_N = torch.cat([torch.arange(length) for length in (*lengths, num_padding)])
    tokens_BN = torch.randint(0, 100, document_BN.shape, generator=generator)
    index_BN = torch.arange(tokens_BN.numel()).view_as(tokens_BN).where(document_BN >= 0, -1)
    batch = Batch(tokens_BN, document_BN, position_N.expand(2, -1), document_BN >= 0, index_BN)
    aux_BNX = torch.randn(*document_BN.shape, CONFIG.fc_input_size, generator=generator).double()
    return batch, aux_BNX


def draft_alone(drafter: Drafter, token_ids: list[int], aux_AX: Tensor, num_steps: int) -> list[Tensor]:
    """Normed rows [H] of one chain, each step with all rows from the beginning.

    aux_AX: hidden states of the target up to the anchor, from the beginning of its document. token_ids: the tokens
    after each of these rows, then those that the chain reads.
    """
    hidden, normed = list(drafter.project_inputs(aux_AX)), []
    for row in range(len(aux_AX) - 1, len(aux_AX) - 1 + num_steps):
        embeds, position = drafter.embed(torch.tensor(token_ids[: row + 1])), torch.arange(row + 1)
        attend = attend_under(torch.ones(1, row + 1, row + 1, dtype=torch.bool).tril())
        rows, stream = drafter(embeds[None], torch.stack(hidden)[None], position[None], attend)
        normed.append(rows[0, row])
        hidden.append(stream[0, row])
    return normed


def chains(batch: Batch, num_steps: int) -> list[tuple[int, int, int, int]]:
    """(sequence, first token of the document, anchor, steps whose label lies in the document) of every chain."""
    length_BN = chain_lengths(batch.document_BN, batch.answer_BN, num_steps)
    first_BN = torch.arange(length_BN.shape[1]) - batch.position_BN
    return [(b, int(first_BN[b, a]), a, int(length_BN[b, a])) for b, a in length_BN.nonzero().tolist()]


@pytest.mark.parametrize(
    "switches", [{}, {"norm_before_residual": True}, {"norm_output": True}, {"num_hidden_layers": 1}]
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
    owned = drafter.trainable()
    ours, twin = (torch.autograd.grad(total, list(owned.values())) for total in (together, alone))
    for name, one, other in zip(owned, ours, twin, strict=True):
        # Norms and rotation work in float32 inside a drafter of float64.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()), msg=name)
        assert one.abs().max() > 1e-3, f"{name} gets no gradient: nothing compared"


def test_the_pass_forms_the_gradient_of_the_weighted_loss() -> None:
    recipe = Recipe(**FOLDERS, drafter={"method": "eagle3", "num_depths": NUM_STEPS}, loss={"offset_decay": 0.8})
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
    recipe = Recipe(**FOLDERS, drafter={"method": "eagle3"}, batch={"num_segments": 2})
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
