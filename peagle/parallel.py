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
    """Attention under a dense mask (boolean [B, T, U], any device) or a block mask (compiled functions, GPU).

    Keys and values are of U rows, queries of T.
    """

    def attend(_layer: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        if isinstance(mask, BlockMask):
            return flex_attention(q_BATD, k_BGTD, v_BGTD, block_mask=mask, enable_gqa=True)
        return F.scaled_dot_product_attention(q_BATD, k_BGTD, v_BGTD, attn_mask=mask[:, None], enable_gqa=True)

    return attend


def next_tokens(tokens_BN: Tensor) -> Tensor:
    """Token a + 1 of each anchor a; the last one has none and gets its own, which no loss ever looks at."""
    return torch.cat([tokens_BN[:, 1:], tokens_BN[:, -1:]], dim=1)


def row_inputs(drafter: Drafter, next_BN: Tensor, aux_BNX: Tensor, num_masks: int) -> tuple[Tensor, Tensor]:
    """Embeddings and hidden states, [B, N + num_masks, H] each, of N rows of offset 0 and of mask tokens after them.

    next_BN: `next_tokens` of the rows. aux_BNX: the target's tapped hidden states there [B, N, C * S].
    """
    batch = next_BN.shape[0]
    embeds_BNH, hidden_BNH = drafter.embed(next_BN), drafter.reduce(aux_BNX)
    mask_embed = drafter.mask_token().to(embeds_BNH.dtype)
    mask_hidden = drafter.reduce(drafter.mask_hidden.to(aux_BNX.dtype)).to(hidden_BNH.dtype)
    return (
        torch.cat([embeds_BNH, mask_embed.expand(batch, num_masks, -1)], dim=1),
        torch.cat([hidden_BNH, mask_hidden.expand(batch, num_masks, -1)], dim=1),
    )


def draft_rows(
    drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor, position_BT: Tensor, mask: Tensor | BlockMask
) -> Tensor:
    """Normed hidden states [B, T, H] of N rows of offset 0, then T - N rows of mask tokens.

    aux_BNX: the target's tapped hidden states [B, N, C * S]. The row of anchor a reads the embedding of token a + 1.
    """
    num_masks = position_BT.shape[1] - tokens_BN.shape[1]
    embeds_BTH, hidden_BTH = row_inputs(drafter, next_tokens(tokens_BN), aux_BNX, num_masks)
    normed_BTH, _ = drafter(embeds_BTH, hidden_BTH, position_BT, attend_under(mask))
    return normed_BTH


def compiled_draft_rows(block_mask: bool) -> Callable[..., Tensor]:
    """`draft_rows` compiled (GPU). block_mask: its mask is a BlockMask, whose attention must run compiled."""
    return torch.compile(draft_rows, dynamic=False, fullgraph=block_mask)


def label_rows(rows: Rows, chain_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of all B * T rows, flattened: whether worth a loss, index of the label's position into B * N, offset.

    The row of anchor a and offset g proposes token a + g + 2, whose distribution the target gives at position a + g +
    1.
    """
    batch, num_tokens = chain_BN.shape
    useful_BT = rows.offset_BT < chain_BN.gather(1, rows.anchor_BT)
    label_BT = rows.position_BT + 1 + torch.arange(batch, device=chain_BN.device)[:, None] * num_tokens
    return useful_BT.flatten(), label_BT.flatten(), rows.offset_BT.flatten()


def labelled_rows(rows: Rows, chain_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows worth a loss: index into B * T, index of the label's position into B * N, offset."""
    useful_T, label_T, offset_T = label_rows(rows, chain_BN)
    index_R = useful_T.nonzero().squeeze(1)
    return index_R, label_T[index_R], offset_T[index_R]
