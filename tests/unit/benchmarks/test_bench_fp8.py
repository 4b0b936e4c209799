"""FP8 as benchmarks.fp8 computes it: torch's own cast, with the scales and of the matrices that vLLM takes."""

import torch
from torch import nn

from benchmarks.fp8 import E4M3, MAX_E4M3, joined_matrices, rounded, to_fp8
from tests.support.head_factory import CONFIG, random_drafter


def test_numbers_keep_three_bits_behind_the_first_and_the_largest_stays() -> None:
    x = torch.tensor([[1.0, -0.3, 0.01], [448.0, 1.03, -2.0]])
    found = rounded(x, x.abs().amax(-1, keepdim=True))
    assert found[:, 0].tolist() == x[:, 0].tolist()
    torch.testing.assert_close(found, x, rtol=2**-4, atol=2**-10)
    assert not torch.equal(found, x)
    assert rounded(torch.zeros(2, 2), torch.zeros(2, 1)).tolist() == [[0, 0], [0, 0]]


def test_all_products_but_the_output_matrix_have_fp8_operands() -> None:
    drafter, plain = random_drafter(CONFIG), random_drafter(CONFIG)
    others = [module for module in to_fp8(drafter).modules() if isinstance(module, nn.Linear)]
    for matrices in joined_matrices(drafter):
        largest = max(matrix.weight.abs().max() for matrix in matrices)
        for matrix in matrices:
            scaled = (matrix.weight / (largest / MAX_E4M3)).float()
            torch.testing.assert_close(scaled.to(E4M3).float(), scaled, rtol=1e-6, atol=0)
            others = [other for other in others if other is not matrix]
    assert others == [drafter.lm_head]
    x = torch.randn(3, CONFIG.fc_input_size).double()
    inputs = rounded(x, x.abs().amax(-1, keepdim=True))
    weight = rounded(plain.fc.weight, plain.fc.weight.abs().max())
    torch.testing.assert_close(drafter.fc(x), inputs @ weight.T)
    assert not torch.allclose(drafter.fc(x), plain.fc(x))
