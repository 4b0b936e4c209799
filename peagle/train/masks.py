"""The attention mask of a training pass (paper section 3.1).

A row with anchor a and offset g sees
    - rows of offset 0 at anchors <= a of its own document: what the drafter's KV cache holds when it drafts at a;
    - rows of its own chain at offsets <= g: the mask tokens before it in the same pass.

Two forms of one rule: `AttentionMask.dense` (boolean tensor, any device) and `AttentionMask.block` (FlexAttention's
BlockMask, which skips empty tiles). The paper makes a mask of the greatest length once and takes views of it (Fig. 3).
Here each batch has a mask of its own: a block mask follows from the bounds of its tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from peagle.train.cod import CodRows


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """What the rule needs to know of T queries and of U keys, all int32.

    first_BT: least anchor that a query sees, the beginning of its document.
    """

    anchor_BT: Tensor
    offset_BT: Tensor
    first_BT: Tensor
    anchor_BU: Tensor
    offset_BU: Tensor

    @classmethod
    def from_rows(cls, rows: CodRows, document_BN: Tensor) -> AttentionMask:
        """Every row as query and as key.

        document_BN: document id of each token, each document in one piece, padding (-1) last.
        """
        first_BT = _document_starts(document_BN).gather(1, rows.anchor_BT)
        anchor_BT, offset_BT = rows.anchor_BT.int(), rows.offset_BT.int()
        return cls(anchor_BT, offset_BT, first_BT.int(), anchor_BT, offset_BT)

    def select(self, key_U: Tensor, num_queries: int) -> AttentionMask:
        """The mask of the rows numbered `key_U` as keys and of the last `num_queries` of them as queries.

        Of the mask of all rows (`from_rows`). -1 in place of a number is a blank: a key that nobody sees, a query that
        sees itself alone. Its anchor is its own and lies behind all others, so that the rule holds for it as it is.
        """
        behind_U = self.anchor_BU.amax() + 1 + torch.arange(key_U.shape[0], device=key_U.device, dtype=torch.int32)
        blank_U, chosen_U = key_U < 0, key_U.clamp_min(0)
        anchor_BU = behind_U.where(blank_U, self.anchor_BU[:, chosen_U])
        offset_BU = self.offset_BU[:, chosen_U].masked_fill(blank_U, 1)
        first_BU = behind_U.where(blank_U, self.first_BT[:, chosen_U])
        start = key_U.shape[0] - num_queries
        return AttentionMask(anchor_BU[:, start:], offset_BU[:, start:], first_BU[:, start:], anchor_BU, offset_BU)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """visible(sequence, head, query, key) -> bool, of their numbers (FlexAttention's `mask_mod`)."""
        anchor_BT, offset_BT, first_BT = self.anchor_BT, self.offset_BT, self.first_BT
        anchor_BU, offset_BU = self.anchor_BU, self.offset_BU

        def visible(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            anchor_q, anchor_k, offset_k = anchor_BT[b, query], anchor_BU[b, key], offset_BU[b, key]
            prefix = (offset_k == 0) & (anchor_k <= anchor_q)
            own_chain = (anchor_k == anchor_q) & (offset_k <= offset_BT[b, query])
            return (prefix | own_chain) & (anchor_k >= first_BT[b, query])

        return visible

    def dense(self) -> Tensor:
        """Boolean mask [B, T, U], True where the query of dimension 1 sees the key of dimension 2."""
        sizes = self.first_BT.shape[0], 1, self.first_BT.shape[1], self.anchor_BU.shape[1]
        return create_mask(self.mask_mod(), *sizes, device=self.first_BT.device).squeeze(1)

    def block(self, tile: int = 128) -> BlockMask:
        """FlexAttention's form of `dense`: the rule, and what is known of the tiles of tile x tile rows beforehand.

        The least and greatest anchor and offset of a tile bound what it can hold: tiles where no row sees
        another are skipped, and the rule is not asked where each sees each. (`create_block_mask` evaluates the rule at
        all T * U pairs, and its compiled form of this rule never gets through ptxas with Triton 3.6.)
        """
        num_queries, num_keys = self.first_BT.shape[1], self.anchor_BU.shape[1]
        near_BQK, full_BQK = self._tiles(tile)
        return BlockMask.from_kv_blocks(
            *_ordered(near_BQK & ~full_BQK),
            *_ordered(full_BQK),
            BLOCK_SIZE=tile,
            mask_mod=self.mask_mod(),
            seq_lengths=(num_queries, num_keys),
        )

    def _tiles(self, tile: int) -> tuple[Tensor, Tensor]:
        """Tiles where a query may see a key, and those where each query sees each key; bool [B, Q, K] both."""
        query_low, query_high = (bound[:, :, None] for bound in _tile_bounds(self.anchor_BT, tile))
        first_low, first_high = (bound[:, :, None] for bound in _tile_bounds(self.first_BT, tile))
        key_low, key_high = (bound[:, None] for bound in _tile_bounds(self.anchor_BU, tile))
        offset_low, offset_high = (bound[:, None] for bound in _tile_bounds(self.offset_BU, tile))
        near = (key_low <= query_high) & (key_high >= first_low) & ((offset_low == 0) | (query_low <= key_high))
        full = (offset_high == 0) & (key_high <= query_low) & (key_low >= first_high)
        for dim, values in ((1, self.anchor_BT), (2, self.anchor_BU)):
            if values.shape[1] % tile:  # the last tile reaches beyond the last row
                full.select(dim, -1).fill_(False)
        return near, full


def _document_starts(document_BN: Tensor) -> Tensor:
    """Position at which each token's document begins, int64 [B, N]."""
    position_N = torch.arange(document_BN.shape[1], device=document_BN.device)
    begins_BN = torch.ones_like(document_BN, dtype=torch.bool)
    begins_BN[:, 1:] = document_BN[:, 1:] != document_BN[:, :-1]
    return position_N.where(begins_BN, 0).cummax(dim=1).values


def _ordered(tiles_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """A row of tiles as FlexAttention wants it: how many are set, and their numbers first, int32, one head."""
    order_BQK = tiles_BQK.byte().argsort(dim=-1, descending=True, stable=True)
    return tiles_BQK.sum(-1, dtype=torch.int32)[:, None], order_BQK.int()[:, None]


def _tile_bounds(values_BT: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each tile of rows, [B, ceil(T / tile)] each."""
    short = -values_BT.shape[1] % tile
    tiled = torch.cat([values_BT, values_BT[:, -1:].expand(-1, short)], dim=1).unflatten(1, (-1, tile))
    return tiled.amin(-1), tiled.amax(-1)
