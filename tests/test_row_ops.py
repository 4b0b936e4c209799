"""What a pass does to rows between its matrix products: kernels against twins, twins against `peagle.model`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter import rows as row_ops
from peagle.drafter.rows import INTERPRETED
from peagle.model import RMSNorm, rotary_tables, rotate
from tests.head_factory import random_drafter
from tests.kernel_device import DEVICE, needs_kernel
from tests.pass_requests import STEPS, SWITCHES, Requests

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 32), (5, 96), (3, 1000))  # rows, numbers of a row


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this process runs the kernels itself")
def test_kernels_equal_their_twins_under_the_interpreter() -> None:
    """The interpreter must be chosen before Triton is imported, so in another process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) > 30, "the interpreter was not on:\n" + done.stdout


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def equal(found: Tensor, expected: Tensor) -> None:
    """To one rounding of the type: kernels sum in another order."""
    tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 2e-6
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
@pytest.mark.parametrize("keeps_normed", [False, True])
def test_first_rows(num_rows: int, size: int, dtype: torch.dtype, keeps_normed: bool) -> None:
    ids_N = torch.randint(0, 7, (num_rows,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids_N[-1] = 6  # the mask token
    weights = [normal(size, dtype=dtype, seed=seed) for seed in (1, 2, 3)]
    arguments = (ids_N, normal(num_rows, size, dtype=dtype), normal(7, size, dtype=dtype, seed=4), 6, *weights, EPS)
    found = row_ops.first_rows_triton(*arguments, keeps_normed)
    for one, expected in zip(found, row_ops.first_rows_torch(*arguments, keeps_normed), strict=True):
        equal(one, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_add_norm(num_rows: int, size: int, dtype: torch.dtype) -> None:
    stream, added = (normal(num_rows, size, dtype=dtype, seed=seed) for seed in (0, 1))
    arguments = (stream, added, normal(size, dtype=dtype, seed=2), EPS)
    for found, expected in zip(row_ops.add_norm_triton(*arguments), row_ops.add_norm_torch(*arguments), strict=True):
        equal(found, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_queries", "num_groups", "head_size"), [(4, 2, 8), (9, 3, 64), (2, 2, 6), (32, 4, 128)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rotate_heads(num_queries: int, num_groups: int, head_size: int, dtype: torch.dtype, is_normed: bool) -> None:
    heads_NHD = normal(3, num_queries + 2 * num_groups, head_size, dtype=dtype)
    norms = (normal(head_size, dtype=dtype, seed=1), normal(head_size, dtype=dtype, seed=2)) if is_normed else None
    cos_PF, sin_PF = tables(50, head_size)
    positions_N = torch.tensor([0, 49, 17], device=DEVICE)
    arguments = (heads_NHD, num_queries, num_groups, positions_N, cos_PF, sin_PF, norms, EPS)
    found = row_ops.rotate_heads_triton(*arguments)
    for one, expected in zip(found, row_ops.rotate_heads_torch(*arguments), strict=True):
        equal(one, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 48), (4, 1536)])
def test_silu_mul(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_rows, 2 * size, dtype=dtype) * 4
    equal(row_ops.silu_mul_triton(gate_up), row_ops.silu_mul_torch(gate_up))


@needs_kernel
@pytest.mark.parametrize("name", SWITCHES)
def test_a_pass_of_kernels_drafts_as_the_sessions(name: str) -> None:
    """All kernels of a pass together, in float32."""
    requests = Requests(random_drafter(SWITCHES[name]).float().to(DEVICE), 3)
    parallel_pass = requests.new_pass(DEVICE)
    for steps in STEPS[:4]:
        expected = [requests.expected(step) for step in steps]
        assert parallel_pass.run(requests.batch(steps)).tolist() == expected


def tables(num_positions: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, D / 2] of the drafter's rotation."""
    cos, sin = rotary_tables(torch.arange(num_positions, device=DEVICE)[None], head_size, 10000.0)
    return cos[0, 0, :, : head_size // 2].contiguous(), sin[0, 0, :, : head_size // 2].contiguous()


def test_the_twins_are_the_drafters_formulas() -> None:
    x = normal(4, 32)
    norm = RMSNorm(32, EPS).to(DEVICE)
    norm.weight.data.copy_(normal(32, seed=1))
    added, normed = row_ops.add_norm_torch(x, x, norm.weight.detach(), EPS)
    equal(normed, norm(added).detach())
    gate_up = normal(4, 20)
    equal(row_ops.silu_mul_torch(gate_up), F.silu(gate_up[:, :10]) * gate_up[:, 10:])
    heads_NHD, positions_N = normal(4, 8, 16), torch.tensor([3, 0, 9, 40], device=DEVICE)
    q_NAD, k_NGD = row_ops.rotate_heads_torch(heads_NHD, 4, 2, positions_N, *tables(50, 16), None, EPS)
    rotated = rotate(heads_NHD.transpose(0, 1)[None], *rotary_tables(positions_N[None], 16, 10000.0))[0].transpose(0, 1)
    equal(q_NAD, rotated[:, :4])
    equal(k_NGD, rotated[:, 4:6])


def test_the_mask_token_has_an_embedding_of_its_own() -> None:
    ids_N, embed_VH, mask_H, ones_H = torch.tensor([1, 2, 1]), normal(3, 8).cpu(), torch.full((8,), 5.0), torch.ones(8)
    both, _ = row_ops.first_rows_torch(ids_N, torch.zeros(3, 8), embed_VH, 2, mask_H, ones_H, ones_H, EPS, False)
    torch.testing.assert_close(both[1, :8], torch.ones(8), rtol=1e-4, atol=1e-4)
    equal(both[0, :8], row_ops.rms_norm(embed_VH[1], ones_H, EPS))
