"""Muon's arithmetic on a CPU."""

import pytest
import torch
from torch.optim import _muon

from peagle.train.recipe import OptimizerRecipe
from peagle.train.trainer import Optimizer


def test_muon_takes_its_products_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    types, orthogonalize = [], _muon._zeropower_via_newtonschulz

    def recording(*args: object) -> torch.Tensor:
        found = orthogonalize(*args)
        types.append(found.dtype)
        return found

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", recording)
    matrix, norm = torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Parameter(torch.ones(1))
    matrix.grad, norm.grad = torch.randn(8, 16), torch.ones(1)
    Optimizer({"layers.0.fc": matrix, "norm": norm}, OptimizerRecipe(name="muon"), fused=False).step(1.0)
    assert types == [torch.float32]
