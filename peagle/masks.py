"""Who sees whom in a training pass (paper section 3.1).

A row with anchor a and offset g sees
    - rows of offset 0 at anchors <= a of its own document: what the drafter's KV cache holds when it drafts at a;
    - rows of its own chain at offsets <= g: the mask tokens before it in the same pass.

Two forms of one rule: `dense` (boolean tensor, any device) and `block` (FlexAttention's BlockMask, which skips empty
tiles).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from peagle.cod import Rows


def _rule(
    anchor_BT: Tensor, offset_BT: Tensor, document_BT: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor_q, anchor_k = anchor_BT[b, query], anchor_BT[b, key]
        prefix = (offset_BT[b, key] == 0) & (anchor_k <= anchor_q)
        own_chain = (anchor_k == anchor_q) & (offset_BT[b, key] <= offset_BT[b, query])
        return (prefix | own_chain) & (document_BT[b, query] == document_BT[b, key])

    return visible


def row_documents(rows: Rows, document_BN: Tensor) -> Tensor:
    """Document id of each row [B, T], that of its anchor."""
    return document_BN.gather(1, rows.anchor_BT)


def dense(rows: Rows, document_BN: Tensor) -> Tensor:
    """Boolean mask [B, T, T], True where the row of dimension 1 sees the row of dimension 2."""
    rule = _rule(rows.anchor_BT, rows.offset_BT, row_documents(rows, document_BN))
    batch, num_rows = rows.anchor_BT.shape
    device = rows.anchor_BT.device
    index_T = torch.arange(num_rows, device=device)
    b = torch.arange(batch, device=device)[:, None, None]
    return rule(b, torch.zeros_like(b), index_T[None, :, None], index_T[None, None, :])


def block(rows: Rows, document_BN: Tensor, tile: int = 128) -> BlockMask:
    """FlexAttention's form of `dense`: the same rule, and the tiles of tile x tile rows outside which it is False.

    Which tiles matter follows from the order of the rows: anchors and documents only grow within the N rows of offset
    0, and again within the rows of mask tokens, so the least and greatest of a tile bound all of it. The generic
    `create_block_mask` evaluates the rule at all T * T pairs, and its compiled form of this rule never gets through
    ptxas with Triton 3.6.
    """
    document_BT = row_documents(rows, document_BN)
    rule = _rule(rows.anchor_BT, rows.offset_BT, document_BT)
    num_rows = rows.anchor_BT.shape[1]
    # Padding comes last in a sequence: as the greatest document it keeps the order.
    ordered_BT = document_BT.where(document_BT >= 0, document_BN.shape[1])
    anchor_low, anchor_high = _tile_bounds(rows.anchor_BT, tile)
    document_low, document_high = _tile_bounds(ordered_BT, tile)
    offset_low, _ = _tile_bounds(rows.offset_BT, tile)
    near_BQK = (document_low[:, :, None] <= document_high[:, None]) & (
        document_low[:, None] <= document_high[:, :, None]
    )
    near_BQK &= anchor_low[:, None] <= anchor_high[:, :, None]
    near_BQK &= (offset_low[:, None] == 0) | (anchor_low[:, :, None] <= anchor_high[:, None])
    order_BQK = near_BQK.int().argsort(dim=-1, descending=True, stable=True)
    return BlockMask.from_kv_blocks(
        near_BQK.sum(-1, dtype=torch.int32)[:, None],
        order_BQK.int()[:, None],
        BLOCK_SIZE=tile,
        mask_mod=rule,
        seq_lengths=(num_rows, num_rows),
    )


def _tile_bounds(values_BT: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each tile of rows, [B, ceil(T / tile)] each."""
    short = -values_BT.shape[1] % tile
    tiled = torch.cat([values_BT, values_BT[:, -1:].expand(-1, short)], dim=1).unflatten(1, (-1, tile))
    return tiled.amin(-1), tiled.amax(-1)
