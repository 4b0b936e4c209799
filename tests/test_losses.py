"""The chunked loss against its plain twin: value and gradient, in float64 where rounding cannot hide an error."""

import pytest
import torch

from peagle.losses import ChunkedSoftCrossEntropy, TargetLogits, soft_cross_entropy


def problem(num_rows: int = 37, num_tokens: int = 11, size: int = 8, vocabulary: int = 50) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    draw = {"generator": generator, "dtype": torch.float64}
    return {
        "hidden": torch.randn(num_rows, size, **draw),
        "lm_head": torch.randn(vocabulary, size, **draw),
        "target_hidden": torch.randn(num_tokens, size, **draw),
        "label": torch.randint(num_tokens, (num_rows,), generator=generator),
        "weight": torch.rand(num_rows, **draw),
    }


@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
def test_chunked_loss_and_gradient_equal_the_plain_twin(chunk: int) -> None:
    p = problem()
    target = TargetLogits.of(p["target_hidden"], p["lm_head"], chunk=4)
    plain_hidden = p["hidden"].clone().requires_grad_()
    plain = soft_cross_entropy(plain_hidden @ p["lm_head"].T, target.logits_NV[p["label"]], p["weight"])
    plain.backward()
    hidden = p["hidden"].clone().requires_grad_()
    loss, losses_R, argmax_R = ChunkedSoftCrossEntropy(chunk)(hidden, p["lm_head"], target, p["label"], p["weight"])
    (3 * loss).backward()
    # The kernels compute in float32: 1e-5 is their rounding over 50 terms; a wrong sign or row is 1e-1 or more.
    torch.testing.assert_close(loss.double(), plain.double().detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, 3 * plain_hidden.grad, rtol=1e-4, atol=1e-5)
    assert losses_R.shape == p["label"].shape
    assert torch.equal(argmax_R, (p["hidden"] @ p["lm_head"].T).argmax(-1))


def test_target_logits_in_chunks_equal_one_product() -> None:
    p = problem(num_tokens=13)
    target = TargetLogits.of(p["target_hidden"], p["lm_head"], chunk=5)
    whole = p["target_hidden"] @ p["lm_head"].T
    torch.testing.assert_close(target.logits_NV, whole)
    torch.testing.assert_close(target.logsumexp_N, whole.float().logsumexp(-1))
    assert torch.equal(target.argmax_N, whole.argmax(-1))


def test_loss_is_least_where_the_drafter_agrees() -> None:
    p = problem(num_rows=11)
    label, weight = torch.arange(11), torch.ones(11, dtype=torch.float64)
    target = TargetLogits.of(p["target_hidden"], p["lm_head"])
    loss = ChunkedSoftCrossEntropy(4)
    hidden = p["target_hidden"].clone().requires_grad_()
    best, _, _ = loss(hidden, p["lm_head"], target, label, weight)
    best.backward()
    other, _, _ = loss(p["target_hidden"] + 0.1, p["lm_head"], target, label, weight)
    assert hidden.grad.abs().max() < 1e-5
    assert other > best
