"""Who sees whom in a training pass (paper section 3.1).

A row with anchor a and offset g sees
    - rows of offset 0 at anchors <= a of its own document: what the drafter's KV cache holds when it drafts at a;
    - rows of its own chain at offsets <= g: the mask tokens before it in the same pass;
of these, with a sliding window of W, only the rows at positions > a + g - W: itself and the W - 1 before it.

Three forms of one rule: `Sight.dense` (boolean tensor, any device), `Sight.block` (FlexAttention's BlockMask, which
skips empty tiles), and `MaskTable`, dense masks of whole passes from one structure that is built once (paper Fig. 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from peagle.train.cod import CodRows


@dataclasses.dataclass(frozen=True)
class Sight:
    """What the rule needs to know of T queries and of U keys, all int32.

    first_BT: least position that a query sees, the beginning of its document or of its window.
    """

    anchor_BT: Tensor
    offset_BT: Tensor
    first_BT: Tensor
    anchor_BU: Tensor
    offset_BU: Tensor

    @classmethod
    def of(cls, rows: CodRows, document_BN: Tensor, window: int | None = None) -> Sight:
        """Every row as query and as key.

        document_BN: document id of each token, each document in one piece, padding (-1) last. window: W, in tokens.
        """
        first_BT = _document_starts(document_BN).gather(1, rows.anchor_BT)
        if window is not None:
            first_BT = first_BT.maximum(rows.position_BT - window + 1)
        anchor_BT, offset_BT = rows.anchor_BT.int(), rows.offset_BT.int()
        return cls(anchor_BT, offset_BT, first_BT.int(), anchor_BT, offset_BT)

    def select(self, key_U: Tensor, num_queries: int) -> Sight:
        """Of the rows numbered `key_U` as keys and of the last `num_queries` of them as queries.

        For the sight of all rows (`of`). -1 in place of a number is a blank: a key that nobody sees, a query that sees
        itself alone. Its anchor is its own and lies behind all others, so that the rule holds for it as it is.
        """
        behind_U = self.anchor_BU.amax() + 1 + torch.arange(key_U.shape[0], device=key_U.device, dtype=torch.int32)
        blank_U, chosen_U = key_U < 0, key_U.clamp_min(0)
        anchor_BU = behind_U.where(blank_U, self.anchor_BU[:, chosen_U])
        offset_BU = self.offset_BU[:, chosen_U].masked_fill(blank_U, 1)
        first_BU = (behind_U + 1).where(blank_U, self.first_BT[:, chosen_U])
        start = key_U.shape[0] - num_queries
        return Sight(anchor_BU[:, start:], offset_BU[:, start:], first_BU[:, start:], anchor_BU, offset_BU)

    def rule(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """visible(sequence, head, query, key) -> bool, of their numbers (FlexAttention's `mask_mod`)."""
        anchor_BT, offset_BT, first_BT = self.anchor_BT, self.offset_BT, self.first_BT
        anchor_BU, offset_BU = self.anchor_BU, self.offset_BU

        def visible(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            anchor_q, anchor_k, offset_k = anchor_BT[b, query], anchor_BU[b, key], offset_BU[b, key]
            prefix = (offset_k == 0) & (anchor_k <= anchor_q)
            own_chain = (anchor_k == anchor_q) & (offset_k <= offset_BT[b, query])
            return (prefix | own_chain) & (anchor_k + offset_k >= first_BT[b, query])

        return visible

    def dense(self) -> Tensor:
        """Boolean mask [B, T, U], True where the query of dimension 1 sees the key of dimension 2."""
        (batch, num_queries), num_keys, device = self.first_BT.shape, self.anchor_BU.shape[1], self.first_BT.device
        b = torch.arange(batch, device=device)[:, None, None]
        query, key = torch.arange(num_queries, device=device), torch.arange(num_keys, device=device)
        return self.rule()(b, torch.zeros_like(b), query[None, :, None], key[None, None, :])

    def block(self, tile: int = 128) -> BlockMask:
        """FlexAttention's form of `dense`: the rule, and what is known of the tiles of tile x tile rows beforehand.

        The least and greatest anchor, offset and position of a tile bound what it can hold: tiles where nobody sees
        anybody are skipped, those where everybody sees everybody are not asked the rule. The bounds are tight, since
        anchors only grow within the rows of offset 0, and again within the mask rows. (`create_block_mask` evaluates
        the rule at all T * U pairs, and its compiled form of this rule never gets through ptxas with Triton 3.6.)
        """
        num_queries, num_keys = self.first_BT.shape[1], self.anchor_BU.shape[1]
        near_BQK, full_BQK = self._tiles(tile)
        return BlockMask.from_kv_blocks(
            *_ordered(near_BQK & ~full_BQK),
            *_ordered(full_BQK),
            BLOCK_SIZE=tile,
            mask_mod=self.rule(),
            seq_lengths=(num_queries, num_keys),
        )

    def _tiles(self, tile: int) -> tuple[Tensor, Tensor]:
        """Tiles where a query may see a key, and those where each query sees each key; bool [B, Q, K] both."""
        query_low, query_high = (bound[:, :, None] for bound in _tile_bounds(self.anchor_BT, tile))
        first_low, first_high = (bound[:, :, None] for bound in _tile_bounds(self.first_BT, tile))
        key_low, key_high = (bound[:, None] for bound in _tile_bounds(self.anchor_BU, tile))
        offset_low, offset_high = (bound[:, None] for bound in _tile_bounds(self.offset_BU, tile))
        position_low, position_high = (bound[:, None] for bound in _tile_bounds(self.anchor_BU + self.offset_BU, tile))
        near = (key_low <= query_high) & (position_high >= first_low) & ((offset_low == 0) | (query_low <= key_high))
        full = (offset_high == 0) & (key_high <= query_low) & (position_low >= first_high)
        for dim, values in ((1, self.anchor_BT), (2, self.anchor_BU)):
            if values.shape[1] % tile:  # the last tile reaches beyond the last row
                full.select(dim, -1).fill_(False)
        return near, full


def dense(rows: CodRows, document_BN: Tensor, window: int | None = None) -> Tensor:
    """Boolean mask [B, T, T], True where the row of dimension 1 sees the row of dimension 2."""
    return Sight.of(rows, document_BN, window).dense()


def block(rows: CodRows, document_BN: Tensor, tile: int = 128, window: int | None = None) -> BlockMask:
    """FlexAttention's form of `dense`; `Sight.block` says how."""
    return Sight.of(rows, document_BN, window).block(tile)


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


class MaskTable:
    """Boolean masks equal to `dense`, for sequences of up to `max_tokens` tokens and K = `num_depths`.

    Seen as blocks [N, N] of anchors, one for each pair of query offset g and key offset h, the mask has three kinds:

        h = 0        lower triangle: the row at anchor a sees every row of offset 0 at anchors <= a
        1 <= h <= g  diagonal: it sees its own chain
        h > g        nothing

    The table is the triangle at the greatest length: the K blocks (g, 0) of every example are one view of its top left
    corner, from which the rows that COD keeps are picked. The diagonal needs no table: `CodRows` sets the kept rows of
    a chain side by side.

    max_bytes: limit on the table (max_tokens ** 2 bytes), the masks of B sequences (B * T ** 2) and what is held while
    one is made (N ** 2 + 2 * N * T) together. Raises ValueError when the table alone is over it.
    """

    def __init__(
        self, max_tokens: int, num_depths: int, device: torch.device | str = "cpu", max_bytes: int = 4 * 2**30
    ) -> None:
        self.max_tokens, self.num_depths, self.max_bytes = max_tokens, num_depths, max_bytes
        self._require(max_tokens**2, f"the table of {max_tokens} tokens")
        self._triangle_NN = torch.ones(max_tokens, max_tokens, dtype=torch.bool, device=device).tril_()

    def _require(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.max_bytes:
            raise ValueError(
                f"masks: {what} takes {num_bytes / 2**30:.2f} GiB, over the limit max_bytes = "
                f"{self.max_bytes / 2**30:.2f} GiB; use attention: flex, which never holds a whole mask, or lower "
                "batch.max_tokens, batch.num_sequences or cod.ratio"
            )

    def prefix(self, num_tokens: int) -> Tensor:
        """The blocks (g, 0) of an example of `num_tokens` tokens: a view [N, N] of the table, True where key <= query.

        Raises ValueError when the table is smaller.
        """
        if num_tokens > self.max_tokens:
            raise ValueError(f"masks: a sequence of {num_tokens} tokens, but the table holds {self.max_tokens}")
        return self._triangle_NN[:num_tokens, :num_tokens]

    def dense(self, rows: CodRows, document_BN: Tensor, window: int | None = None) -> Tensor:
        """Boolean mask [B, T, T], True where the row of dimension 1 sees the row of dimension 2.

        rows: in the order of `sample_rows`, of at most `num_depths` offsets; else as `Sight.of`. Raises ValueError for
        a sequence that the table does not hold and for masks over the limit.
        """
        batch, num_rows = rows.anchor_BT.shape
        num_tokens = rows.num_tokens
        prefix_NN = self.prefix(num_tokens)
        num_bytes = self.max_tokens**2 + batch * num_rows**2 + num_tokens * (num_tokens + 2 * num_rows)
        self._require(num_bytes, f"the mask of {batch} x {num_rows} rows")
        mask_BTT = torch.zeros(batch, num_rows, num_rows, dtype=torch.bool, device=document_BN.device)
        index_N = torch.arange(num_tokens, device=document_BN.device)
        for b, mask_TT in enumerate(mask_BTT):
            visible_NN = prefix_NN & (document_BN[b, :, None] == document_BN[b])
            seen_TN = visible_NN[rows.anchor_BT[b]]
            if window is not None:
                seen_TN &= index_N > rows.position_BT[b, :, None] - window
            mask_TT[:, :num_tokens] = seen_TN
        reach = self.num_depths - 1 if window is None else min(self.num_depths - 1, window)
        self._add_chains(mask_BTT[:, num_tokens:, num_tokens:], rows.anchor_BT[:, num_tokens:], reach)
        return mask_BTT

    @staticmethod
    def _add_chains(mask_BMM: Tensor, anchor_BM: Tensor, reach: int) -> None:
        """The blocks (g, h >= 1): a mask row sees itself and, of the reach - 1 rows before it, those of its chain."""
        mask_BMM.diagonal(dim1=1, dim2=2).fill_(True)
        for back in range(1, min(reach, anchor_BM.shape[1])):
            same_BM = anchor_BM[:, back:] == anchor_BM[:, :-back]
            mask_BMM.diagonal(offset=-back, dim1=1, dim2=2).copy_(same_BM)
