"""Conditional drop-token sampling (COD): which rows a training pass holds (paper section 3.2).

A chain starts at an anchor, a token position a. Its row at offset g (0..K-1) stands at position a + g and is trained to
propose token a + g + 2. The row at offset 0 reads token a + 1 and the target's hidden state of a, so a + 2 is the first
token that is not known. Offset 0 keeps all N positions. Offset g keeps a share r of what offset g - 1 keeps: kept sets
are nested, so no row is without the rows it depends on.

    N = 16, K = 4, r = 0.7:  16 + 11 + 7 + 4 = 38 rows instead of 64 (the paper's worked example)

The number of rows depends on N, K and r alone, never on the data: compiled kernels keep one shape.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.model import Attend, Drafter


def kept_per_offset(num_tokens: int, num_depths: int, ratio: float) -> list[int]:
    """Anchors kept at offsets 0..K-1: N at the first, then a share r of the one before, rounded down."""
    kept = [num_tokens]
    for _ in range(1, num_depths):
        # The small term keeps products such as 0.7 * 10 from falling under the whole number they stand for.
        kept.append(int(kept[-1] * ratio + 1e-9))
    return kept


@dataclasses.dataclass(frozen=True)
class CodRows:
    """Rows of a training pass: first the N rows of offset 0 in order, then the kept rows sorted by anchor, then offset.

    anchor_BT, offset_BT: int64. A row's position is anchor + offset; its label is the token at anchor + offset + 2.
    """

    anchor_BT: Tensor
    offset_BT: Tensor
    num_tokens: int

    def select(self, b: int) -> CodRows:
        """Rows of one sequence, [1, T]."""
        return CodRows(self.anchor_BT[b : b + 1], self.offset_BT[b : b + 1], self.num_tokens)


def sample_rows(
    chain_BN: Tensor, num_depths: int, ratio: float, *, generator: torch.Generator | None = None
) -> CodRows:
    """Draws the rows of one pass.

    chain_BN: int, how many offsets (0..K) of the chain at each anchor have a label that is worth a loss. Offset g draws
    from the chains kept at offset g - 1 that are still worth one; only where these are too few, others fill the fixed
    number of rows, and no loss looks at them. generator: on the device of `chain_BN`.

    One random order is drawn, and offset g keeps a prefix of it: the same as drawing at each offset anew a uniform
    subset of what the offset before kept, for a prefix, known as a set, is still in uniformly random order. Moving the
    ended chains behind the others keeps the order of both.
    """
    batch, num_tokens = chain_BN.shape
    device = chain_BN.device
    kept_Bn = torch.rand(chain_BN.shape, generator=generator, device=device).argsort(dim=1)
    keys = [torch.empty(batch, 0, dtype=torch.int64, device=device)]
    for g, count in enumerate(kept_per_offset(num_tokens, num_depths, ratio)[1:], 1):
        ended_Bn = chain_BN.gather(1, kept_Bn) <= g
        kept_Bn = kept_Bn.gather(1, ended_Bn.to(torch.uint8).argsort(dim=1, stable=True)[:, :count])
        keys.append(kept_Bn * num_depths + g)
    key_BM = torch.cat(keys, dim=1).sort(dim=1).values
    first_BN = torch.arange(num_tokens, device=device).expand(batch, -1)
    return CodRows(
        anchor_BT=torch.cat([first_BN, key_BM // num_depths], dim=1),
        offset_BT=torch.cat([torch.zeros_like(first_BN), key_BM % num_depths], dim=1),
        num_tokens=num_tokens,
    )


def chain_lengths(document_BN: Tensor, wanted_BN: Tensor, num_depths: int) -> Tensor:
    """Useful chain length of each anchor, 0..K, int64 [B, N].

    document_BN: document id of each token (-1: padding). wanted_BN: bool, tokens whose prediction is worth a loss.
    Offset g at anchor a is useful if tokens a .. a + g + 2 are of one document and token a + g + 2 is wanted; a chain
    ends at the first offset that is not.
    """
    num_tokens = document_BN.shape[1]
    anchors = torch.arange(num_tokens, device=document_BN.device)
    alive_BN = document_BN >= 0
    length_BN = torch.zeros_like(document_BN, dtype=torch.int64)
    for g in range(num_depths):
        label = anchors + g + 2
        inside = label < num_tokens
        label = label.clamp_max(num_tokens - 1)
        alive_BN = alive_BN & inside & (document_BN[:, label] == document_BN) & wanted_BN[:, label]
        length_BN = length_BN + alive_BN
    return length_BN


# ---- one pass of the drafter over sampled rows


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
    """Token a + 1 of each anchor a; the last one has none and gets its own, which no loss looks at."""
    return torch.cat([tokens_BN[:, 1:], tokens_BN[:, -1:]], dim=1)


def row_inputs(drafter: Drafter, next_BN: Tensor, aux_BNX: Tensor, num_masks: int) -> tuple[Tensor, Tensor]:
    """Embeddings and hidden states, [B, N + num_masks, H] each, of N rows of offset 0 and of mask tokens after them.
    EAGLE-3 has no mask tokens: [B, N, H].

    next_BN: `next_tokens` of the rows. aux_BNX: the target's auxiliary hidden states there [B, N, C * S].
    """
    batch = next_BN.shape[0]
    embeds_BNH, hidden_BNH = drafter.embed(next_BN), drafter.project_inputs(aux_BNX)
    if not drafter.config.is_parallel:
        return embeds_BNH, hidden_BNH
    mask_embed = drafter.mask_embedding.to(embeds_BNH.dtype)
    mask_hidden = drafter.project_inputs(drafter.mask_hidden.to(aux_BNX.dtype)).to(hidden_BNH.dtype)
    return (
        torch.cat([embeds_BNH, mask_embed.expand(batch, num_masks, -1)], dim=1),
        torch.cat([hidden_BNH, mask_hidden.expand(batch, num_masks, -1)], dim=1),
    )


def draft_rows(
    drafter: Drafter, tokens_BN: Tensor, aux_BNX: Tensor, position_BT: Tensor, mask: Tensor | BlockMask
) -> Tensor:
    """Normed hidden states [B, T, H] of N rows of offset 0, then T - N rows of mask tokens.

    aux_BNX: the target's auxiliary hidden states [B, N, C * S]. The row of anchor a reads the embedding of token a + 1.
    """
    num_masks = position_BT.shape[1] - tokens_BN.shape[1]
    embeds_BTH, hidden_BTH = row_inputs(drafter, next_tokens(tokens_BN), aux_BNX, num_masks)
    normed_BTH, _ = drafter(embeds_BTH, hidden_BTH, position_BT, attend_under(mask))
    return normed_BTH


def label_rows(rows: CodRows, chain_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(whether worth a loss, index of the label's position into B * N, offset) of all B * T rows, flattened.

    The row of anchor a and offset g proposes token a + g + 2, whose distribution the target gives at position a + g +
    1.
    """
    batch, num_tokens = chain_BN.shape
    useful_BT = rows.offset_BT < chain_BN.gather(1, rows.anchor_BT)
    first_B1 = torch.arange(batch, device=chain_BN.device)[:, None] * num_tokens
    label_BT = first_B1 + rows.anchor_BT + rows.offset_BT + 1
    return useful_BT.flatten(), label_BT.flatten(), rows.offset_BT.flatten()
