"""What a pass does to each row between its matrix products, each as one Triton kernel beside a plain torch twin.

The twins are the formulas of `peagle.model`. On a GPU a norm, a rotation or a gate in plain torch is some five kernels,
whose launches would take longer than the matrix products of a small batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `peagle.model.RMSNorm`: over the last dimension, in float32 (float64 stays)."""
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
    """What the first layer reads [N, 2H], normed embeddings beside normed hidden states, and its residual stream."""
    embeds_NH = F.embedding(token_ids_N, embed_VH)
    embeds_NH = torch.where((token_ids_N == mask_token_id)[:, None], mask_embedding_H, embeds_NH)
    normed_NH = rms_norm(hidden_NH, hidden_norm_H, eps)
    both = torch.cat([rms_norm(embeds_NH, input_norm_H, eps), normed_NH], dim=-1)
    return both, normed_NH if norm_before_residual else hidden_NH


def add_norm(stream_NH: Tensor, added_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream with what a block adds to it, and its norm, both [N, H]."""
    stream_NH = stream_NH + added_NH
    return stream_NH, rms_norm(stream_NH, weight_H, eps)


def rotate_heads(x_NAD: Tensor, cos_ND: Tensor, sin_ND: Tensor, norm_D: Tensor | None, eps: float) -> Tensor:
    """Heads normed where `norm_D` is given (Qwen 3), then rotated by position: [N, A, D]."""
    if norm_D is not None:
        x_NAD = rms_norm(x_NAD, norm_D, eps)
    first, second = x_NAD.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_NAD * cos_ND[:, None] + turned * sin_ND[:, None]).to(x_NAD.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[N, 2I], gate beside up -> [N, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
