"""The mask of a training pass taken from one structure that is built once (paper section 3.1, Fig. 3).

Who sees whom depends on anchors and offsets, never on the sequence's length. Seen as blocks [N, N] of anchors, one for
each pair of query offset g and key offset h, the mask has three kinds only:

    h = 0        lower triangle: the row at anchor a sees every row of offset 0 at anchors <= a
    1 <= h <= g  diagonal: it sees its own chain
    h > g        nothing

The table is the triangle, at the greatest length that will be asked for: the K blocks (g, 0) of every example are one
view of its top left corner, and the rows that COD keeps are picked from that view. The diagonal needs no table, since
`Rows` sets the kept rows of a chain side by side: whoever stands d rows before a row is of its chain or is not seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.cod import Rows


class MaskTable:
    """Boolean masks equal to `peagle.masks.dense`, for sequences of up to `max_tokens` tokens and K = `num_depths`.

    The table takes max_tokens ** 2 bytes on `device` (4 MiB at 2,048 tokens, 400 MiB at 20,480), the masks of B
    sequences B * T ** 2 (69 MiB at 2,048 tokens, K = 8, r = 0.8), and N ** 2 + 2 * N * T bytes are held while one is
    made. max_bytes: limit on all of these together. Raises ValueError when the table alone is over it.
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

    def dense(self, rows: Rows, document_BN: Tensor, window: int | None = None) -> Tensor:
        """Boolean mask [B, T, T], True where the row of dimension 1 sees the row of dimension 2.

        rows: in the order of `sample_rows`, of at most `num_depths` offsets. document_BN: document id of each token;
        rows of different documents never see each other. window: W, a row sees itself and the W - 1 positions before.
        Raises ValueError for a sequence that the table does not hold and for masks over the limit.
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
