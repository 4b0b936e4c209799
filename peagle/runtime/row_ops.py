"""What a pass does to each row between its matrix products, each as one Triton kernel beside a plain torch twin.

The twins are the formulas of `peagle.model`. On a GPU a norm, a rotation or a gate in plain torch is some five kernels,
which together would take longer than the matrix products of a small batch. As in `peagle.kernels`, the kernel runs on a
GPU and under Triton's interpreter, the twin elsewhere; kernels take rows of float32, float16 or bfloat16.

N rows, H hidden size, I width of the MLP, A query heads and G key heads of D = 2F numbers, P positions.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.dispatch import uses_kernel
from peagle.runtime.row_kernels import (
    add_norm_kernel,
    first_rows_kernel,
    rotate_kernel,
    silu_mul_kernel,
)

ROTATED_ELEMENTS = 2048  # of one program
GATED_ELEMENTS = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `peagle.model.RMSNorm`: over the last dimension, in float32 (float64 stays). Plain torch on every device."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def first_rows(
    token_ids_N: Tensor,
    hidden_NH: Tensor,
    embed_VH: Tensor,
    mask_token_id: int,
    mask_embedding_H: Tensor,
    input_norm_H: Tensor,
    hidden_norm_H: Tensor,
    eps: float,
    norm_before_residual: bool,
) -> tuple[Tensor, Tensor]:
    """What the first layer reads [N, 2H], normed embeddings beside normed hidden states, and its residual stream
    [N, H]: the hidden states, normed with `norm_before_residual`. The mask token has an embedding of its own.
    """
    arguments = (token_ids_N, hidden_NH, embed_VH, mask_token_id, mask_embedding_H, input_norm_H, hidden_norm_H, eps)
    taken = first_rows_triton if _takes(hidden_NH) else first_rows_torch
    return taken(*arguments, norm_before_residual)


def first_rows_torch(
    token_ids_N: Tensor,
    hidden_NH: Tensor,
    embed_VH: Tensor,
    mask_token_id: int,
    mask_embedding_H: Tensor,
    input_norm_H: Tensor,
    hidden_norm_H: Tensor,
    eps: float,
    norm_before_residual: bool,
) -> tuple[Tensor, Tensor]:
    embeds_NH = F.embedding(token_ids_N, embed_VH)
    embeds_NH = torch.where((token_ids_N == mask_token_id)[:, None], mask_embedding_H, embeds_NH)
    normed_NH = rms_norm(hidden_NH, hidden_norm_H, eps)
    both_N2H = torch.cat([rms_norm(embeds_NH, input_norm_H, eps), normed_NH], dim=-1)
    return both_N2H, normed_NH if norm_before_residual else hidden_NH


def first_rows_triton(
    token_ids_N: Tensor,
    hidden_NH: Tensor,
    embed_VH: Tensor,
    mask_token_id: int,
    mask_embedding_H: Tensor,
    input_norm_H: Tensor,
    hidden_norm_H: Tensor,
    eps: float,
    norm_before_residual: bool,
) -> tuple[Tensor, Tensor]:
    """One launch, two programs a row."""
    num_rows, size = hidden_NH.shape
    both_N2H = hidden_NH.new_empty(num_rows, 2 * size)
    stream_NH = torch.empty_like(hidden_NH) if norm_before_residual else hidden_NH
    first_rows_kernel[(num_rows, 2)](
        token_ids_N, hidden_NH, embed_VH, mask_embedding_H, input_norm_H, hidden_norm_H, both_N2H, stream_NH,
        size, mask_token_id, eps, KEEPS_NORMED=norm_before_residual, **_row_sizes(size),
    )  # fmt: skip
    return both_N2H, stream_NH


def add_norm(stream_NH: Tensor, added_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream with what a block adds to it, and its norm, both [N, H]."""
    return (add_norm_triton if _takes(stream_NH) else add_norm_torch)(stream_NH, added_NH, weight_H, eps)


def add_norm_torch(stream_NH: Tensor, added_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stream_NH = stream_NH + added_NH
    return stream_NH, rms_norm(stream_NH, weight_H, eps)


def add_norm_triton(stream_NH: Tensor, added_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One launch, a program a row."""
    (num_rows, size), sum_NH = stream_NH.shape, torch.empty_like(stream_NH)
    normed_NH = torch.empty_like(stream_NH)
    add_norm_kernel[(num_rows,)](stream_NH, added_NH, weight_H, sum_NH, normed_NH, size, eps, **_row_sizes(size))
    return sum_NH, normed_NH


def rotate_heads(
    heads_NHD: Tensor,
    num_queries: int,
    num_groups: int,
    positions_N: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries [N, A, D] and keys [N, G, D], rotated by position.

    heads_NHD: [N, A + 2G, D], queries, keys and values of each row. cos_PF, sin_PF: float32, by position. norms: [D]
    of queries and of keys, where both are normed first (Qwen 3).
    """
    rotated = rotate_heads_triton if _takes(heads_NHD) else rotate_heads_torch
    return rotated(heads_NHD, num_queries, num_groups, positions_N, cos_PF, sin_PF, norms, eps)


def rotate_heads_torch(
    heads_NHD: Tensor,
    num_queries: int,
    num_groups: int,
    positions_N: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    cos_N1F, sin_N1F = cos_PF[positions_N, None], sin_PF[positions_N, None]

    def rotated(x_NAD: Tensor) -> Tensor:
        first, second = x_NAD.chunk(2, dim=-1)
        both = torch.cat([first * cos_N1F - second * sin_N1F, second * cos_N1F + first * sin_N1F], dim=-1)
        return both.to(x_NAD.dtype)

    q_NAD, k_NGD = heads_NHD[:, : num_queries + num_groups].split((num_queries, num_groups), dim=1)
    if norms is not None:
        q_NAD, k_NGD = rms_norm(q_NAD, norms[0], eps), rms_norm(k_NGD, norms[1], eps)
    return rotated(q_NAD), rotated(k_NGD)


def rotate_heads_triton(
    heads_NHD: Tensor,
    num_queries: int,
    num_groups: int,
    positions_N: Tensor,
    cos_PF: Tensor,
    sin_PF: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """One launch for queries and keys, a program for some heads of a row."""
    (num_rows, _, head_size), num_heads = heads_NHD.shape, num_queries + num_groups
    out_NHD = heads_NHD.new_empty(num_rows, num_heads, head_size)
    block_f = triton.next_power_of_2(head_size // 2)
    block_a = max(1, min(triton.next_power_of_2(num_heads), ROTATED_ELEMENTS // (2 * block_f)))
    q_norm_D, k_norm_D = norms or (cos_PF, cos_PF)  # the latter are not read
    rotate_kernel[(num_rows, triton.cdiv(num_heads, block_a))](
        heads_NHD, positions_N, cos_PF, sin_PF, q_norm_D, k_norm_D, out_NHD,
        num_heads, num_queries, heads_NHD.stride(0), eps,
        HAS_NORM=norms is not None, HALF=head_size // 2, BLOCK_F=block_f, BLOCK_A=block_a, num_warps=4,
    )  # fmt: skip
    return out_NHD[:, :num_queries], out_NHD[:, num_queries:]


def silu_mul(gate_up_N2I: Tensor) -> Tensor:
    """[N, 2I], gate beside up -> silu(gate) * up [N, I]."""
    return (silu_mul_triton if _takes(gate_up_N2I) else silu_mul_torch)(gate_up_N2I)


def silu_mul_torch(gate_up_N2I: Tensor) -> Tensor:
    gate_NI, up_NI = gate_up_N2I.chunk(2, dim=-1)
    return F.silu(gate_NI) * up_NI


def silu_mul_triton(gate_up_N2I: Tensor) -> Tensor:
    """One launch, a program for each part of a row."""
    num_rows, size = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out_NI = gate_up_N2I.new_empty(num_rows, size)
    grid = (num_rows, triton.cdiv(size, GATED_ELEMENTS))
    silu_mul_kernel[grid](gate_up_N2I, out_NI, size, BLOCK=GATED_ELEMENTS, num_warps=4)
    return out_NI


def _takes(rows: Tensor) -> bool:
    """Whether a kernel is to run on these rows; kernels have no float64, and a launch without programs fails."""
    return uses_kernel(rows) and rows.dtype != torch.float64 and len(rows) > 0


def _row_sizes(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
