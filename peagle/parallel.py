"""One pass of the drafter over sampled rows: what enters it, and what its proposals are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.cod import Rows
from peagle.model import Attend, Drafter


def attend_under(mask: Tensor | BlockMask) -> Attend:
    """Attention under `masks.dense` (boolean [B, T, T], any device) or `masks.block` (compiled functions, GPU)."""

    def attend(_layer: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        if isinstance(mask, BlockMask):
            return flex_attention(q_BATD, k_BGTD, v_BGTD, block_mask=mask, enable_gqa=True)
        return F.scaled_dot_product_attention(q_BATD, k_BGTD, v_BGTD, attn_mask=mask[:, None], enable_gqa=True)

    return attend


def draft_rows(
    drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor, position_BT: Tensor, mask: Tensor | BlockMask
) -> Tensor:
    """Normed hidden states [B, T, H] of N rows of offset 0, then T - N rows of mask tokens.

    aux_BNX: the target's tapped hidden states [B, N, C * S]. The row of anchor a reads the embedding of token a + 1;
    the last anchor has no next token and reads its own, which no loss ever looks at.
    """
    batch, num_tokens = tokens_BN.shape
    num_masks = position_BT.shape[1] - num_tokens
    next_BN = torch.cat([tokens_BN[:, 1:], tokens_BN[:, -1:]], dim=1)
    embeds_BNH, hidden_BNH = drafter.embed(next_BN), drafter.reduce(aux_BNX)
    mask_embed = drafter.mask_embedding.to(embeds_BNH.dtype).expand(batch, num_masks, -1)
    mask_hidden = (
        drafter.reduce(drafter.mask_hidden.to(aux_BNX.dtype)).to(hidden_BNH.dtype).expand(batch, num_masks, -1)
    )
    normed_BTH, _ = drafter(
        torch.cat([embeds_BNH, mask_embed], dim=1),
        torch.cat([hidden_BNH, mask_hidden], dim=1),
        position_BT,
        attend_under(mask),
    )
    return normed_BTH


def compiled_draft_rows(block_mask: bool) -> Callable[..., Tensor]:
    """`draft_rows` compiled (GPU). block_mask: its mask is a BlockMask, whose attention must run compiled."""
    return torch.compile(draft_rows, dynamic=False, fullgraph=block_mask)


def labelled_rows(rows: Rows, chain_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows worth a loss, flattened: index into B * T, index of the label's position into B * N, offset.

    The row of anchor a and offset g proposes token a + g + 2, whose distribution the target gives at position a + g +
    1.
    """
    batch, num_tokens = chain_BN.shape
    useful_BT = rows.offset_BT < chain_BN.gather(1, rows.anchor_BT)
    index_R = useful_BT.flatten().nonzero().squeeze(1)
    position_BT = rows.position_BT + 1 + torch.arange(batch, device=chain_BN.device)[:, None] * num_tokens
    return index_R, position_BT.flatten()[index_R], rows.offset_BT.flatten()[index_R]
