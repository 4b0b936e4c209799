"""Who sees whom in a training pass (paper section 3.1).

A row with anchor a and offset g sees
    - rows of offset 0 at anchors <= a of its own document: what the drafter's KV cache holds when it drafts at a;
    - rows of its own chain at offsets <= g: the mask tokens before it in the same pass.

Two forms of one rule: `dense` (boolean tensor, any device) and `block` (FlexAttention's BlockMask, which skips empty tiles).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from peagle.cod import Rows


def _rule(anchor_BT: Tensor, offset_BT: Tensor, document_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
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


def block(rows: Rows, document_BN: Tensor, *, compiled: bool = True) -> BlockMask:
    """FlexAttention's form of `dense`. compiled: build it by a compiled kernel (GPU), not by a dense mask."""
    rule = _rule(rows.anchor_BT, rows.offset_BT, row_documents(rows, document_BN))
    batch, num_rows = rows.anchor_BT.shape
    device = rows.anchor_BT.device.type
    return create_block_mask(rule, batch, None, num_rows, num_rows, device=device, _compile=compiled)
