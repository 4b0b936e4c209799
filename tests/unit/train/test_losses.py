"""Chunked losses against their plain twins in float64, where rounding cannot hide an error, and their labels."""

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.train.cod import chain_lengths, label_rows, sample_rows
from peagle.train.losses import ChainWeights, ChunkedLoss
from tests.unit.train.test_passes import plain_losses


@dataclasses.dataclass(frozen=True)
class Problem:
    hidden_RH: Tensor
    lm_head_VH: Tensor
    target_NH: Tensor
    label_R: Tensor
    weight_R: Tensor
    target_ids_V: Tensor

    @classmethod
    def draw(cls, reduced: bool = False, num_rows: int = 37, num_tokens: int = 11, size: int = 8) -> "Problem":
        generator = torch.Generator().manual_seed(num_rows)
        draw = {"generator": generator, "dtype": torch.float64}
        return cls(
            torch.randn(num_rows, size, **draw),
            torch.randn(50, size, **draw),
            torch.randn(num_tokens, size, **draw),
            torch.randint(num_tokens - 2, (num_rows,), generator=generator) + 1,  # tokens without a row, too
            torch.rand(num_rows, generator=generator),
            torch.randperm(50, generator=generator)[:20] if reduced else torch.arange(50),
        )

    @property
    def draft_VH(self) -> Tensor:
        return self.lm_head_VH[self.target_ids_V]

    def score(self, loss: ChunkedLoss, hidden_RH: Tensor, weight_R=None) -> tuple[Tensor, Tensor]:
        labels = loss.labels(self.target_NH, self.lm_head_VH, self.target_ids_V)
        weight_R = self.weight_R if weight_R is None else weight_R
        return loss(hidden_RH, self.draft_VH, labels, self.label_R, lambda _: weight_R)

    def plain(self, hidden_RH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(losses_R, correct_R, outside_R), a row at a time where the vocabularies meet."""
        logits_RV, target_NV = hidden_RH @ self.draft_VH.T, self.target_NH @ self.lm_head_VH.T
        ids = self.target_ids_V.tolist()
        best_R = target_NV.argmax(-1)[self.label_R].tolist()
        draft_R = torch.tensor([ids.index(best) if best in ids else -1 for best in best_R])
        losses_R = plain_losses(logits_RV, target_NV[self.label_R][:, ids])
        return losses_R, logits_RV.argmax(-1) == draft_R, draft_R < 0


@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradient_equal_the_plain_twin(reduced: bool) -> None:
    problem = Problem.draw(reduced)
    plain_RH = problem.hidden_RH.clone().requires_grad_()
    losses_R, correct_R, outside_R = problem.plain(plain_RH)
    plain = (losses_R * problem.weight_R).sum()
    plain.backward()
    assert plain_RH.grad.abs().max() > 1e-2
    for chunk in (1, 8, 37, 64):
        hidden_RH = problem.hidden_RH.clone().requires_grad_()
        total, found_R = problem.score(ChunkedLoss(chunk), hidden_RH)
        (3 * total).backward()
        torch.testing.assert_close(total.detach(), plain.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(hidden_RH.grad, 3 * plain_RH.grad, rtol=1e-10, atol=1e-13)
        assert torch.equal(found_R, correct_R)
    assert outside_R.any() == reduced
    assert not outside_R.all()


def test_bfloat16_rows_keep_their_gradient() -> None:
    """Weights as small as those of a big batch must cost a row's gradient no more than bfloat16's own rounding."""
    problem = Problem.draw()
    lm_head_VH, target_NH = problem.lm_head_VH.bfloat16(), problem.target_NH.bfloat16()
    narrow = dataclasses.replace(problem, lm_head_VH=lm_head_VH, target_NH=target_NH)
    wide = dataclasses.replace(problem, lm_head_VH=lm_head_VH.double(), target_NH=target_NH.double())
    grads = []
    for one, dtype, scale in ((narrow, torch.float32, 1e-6), (wide, torch.float64, 1)):
        hidden_RH = problem.hidden_RH.bfloat16().to(dtype).requires_grad_()
        one.score(ChunkedLoss(8), hidden_RH, problem.weight_R * scale)[0].backward()
        grads.append(hidden_RH.grad.double() / scale)
    # Logits around 8 are rounded to 1/32 in bfloat16, so probabilities are off by some percent.
    torch.testing.assert_close(*grads, rtol=0.1, atol=0.05)


def test_chain_weights_equal_a_slow_loop() -> None:
    document_BN = torch.tensor([[0] * 9 + [1] * 6, [0] * 12 + [-1] * 3])
    chain_BN = chain_lengths(document_BN, document_BN >= 0, 4)
    generator = torch.Generator().manual_seed(0)
    rows = sample_rows(chain_BN, 4, 0.9, generator=generator)
    useful_T, label_T, offset_T = label_rows(rows, chain_BN)
    index_R, label_R, offset_R = useful_T.nonzero().squeeze(1), label_T[useful_T], offset_T[useful_T]
    sequence_R, anchor_R = index_R // rows.anchor_BT.shape[1], rows.anchor_BT.flatten()[index_R]
    token_N = torch.randint(0, 5, (chain_BN.numel(),), generator=generator) - 1  # -1: not in the draft vocabulary
    right_R = torch.rand(len(index_R), generator=generator) < 0.7
    draft_R = torch.where(right_R, token_N[label_R].clamp_min(0), 4)
    correct_R = right_R & (token_N[label_R] >= 0)

    keys = list(zip(sequence_R.tolist(), anchor_R.tolist(), offset_R.tolist(), strict=True))
    correct = dict(zip(keys, correct_R.tolist(), strict=True))
    reached = [all(correct[b, a, earlier] for earlier in range(g)) for b, a, g in keys]
    total = sum(0.9**g for *_, g in keys)
    expected_R = torch.tensor([0.9**g * (1.0 if r else 0.3) / total for (*_, g), r in zip(keys, reached, strict=True)])
    assert 10 < sum(reached) < len(keys) - 10

    settings = {"num_depths": 4, "offset_decay": 0.9, "reach": 0.3}
    weights = ChainWeights(offset_R, token_N, **settings)
    torch.testing.assert_close(weights.weigh(label_R, offset_R, draft_R), expected_R)
    known_N = token_N.clamp_min(0)
    weight_R = ChainWeights(offset_R, known_N, **settings).weigh(label_R, offset_R, known_N[label_R])
    torch.testing.assert_close(weight_R.sum(), torch.tensor(1.0))
    # In two parts, as a partitioned pass may have them: offset 0 of a chain before its other rows.
    weights, weight_R = ChainWeights(offset_R, token_N, **settings), torch.zeros_like(expected_R)
    first_R = (anchor_R % 2 == 0) | (offset_R == 0)
    for part_R in (first_R, ~first_R):
        weight_R[part_R] = weights.weigh(label_R[part_R], offset_R[part_R], draft_R[part_R])
    torch.testing.assert_close(weight_R, expected_R)


def test_a_row_weighs_the_same_whichever_worker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers, whose gradients are averaged: one has 100 rows, the other has one."""

    def weigh(num_rows: int, num_others: int = 0) -> Tensor:
        monkeypatch.setattr("peagle.train.losses.dist.is_initialized", lambda: num_others > 0)
        monkeypatch.setattr("peagle.train.losses.dist.get_world_size", lambda: 2)
        monkeypatch.setattr("peagle.train.losses.dist.all_reduce", lambda total: total.add_(num_others))
        token_N, offset_R = torch.arange(num_rows + 1), torch.zeros(num_rows, dtype=torch.int64)
        weights = ChainWeights(offset_R, token_N, num_depths=1, offset_decay=1.0, reach=1.0)
        return weights.weigh(token_N[1:], offset_R, token_N[1:])

    torch.testing.assert_close(torch.cat([weigh(100, 1), weigh(1, 100)]) / 2, weigh(101))


def test_no_rows_are_no_loss() -> None:
    problem = dataclasses.replace(Problem.draw(), label_R=torch.empty(0, dtype=torch.int64))
    hidden_RH = torch.empty(0, 8, dtype=torch.float64, requires_grad=True)
    total, _ = problem.score(ChunkedLoss(8), hidden_RH, torch.empty(0))
    total.backward()
    assert total == 0
    assert hidden_RH.grad.shape == (0, 8)


@pytest.mark.gpu
def test_compiled_loss_equals_plain_torch_on_a_gpu() -> None:
    problem = Problem.draw(reduced=True, num_rows=700, num_tokens=300)
    problem = Problem(*(value.to("cuda") for value in dataclasses.astuple(problem)))
    grads = []
    for compiled in (False, True):
        hidden_RH = problem.hidden_RH.clone().requires_grad_()
        problem.score(ChunkedLoss(96, compiled), hidden_RH)[0].backward()
        grads.append(hidden_RH.grad)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-13)
