"""Conditional drop-token sampling (COD): which rows a training pass holds (paper section 3.2).

A chain starts at an anchor, a token position a. Its row at offset g (0..K-1) stands at position a + g and is trained to
propose token a + g + 2: the row at offset 0 reads token a + 1 and the target's hidden state of a, so a + 2 is the first
token that is not known. Offset 0 keeps all N positions. Offset g keeps a share r of what offset g - 1 keeps: kept sets
are nested, so no row is without the rows it depends on.

    N = 16, K = 4, r = 0.7:  16 + 11 + 7 + 4 = 38 rows instead of 64 (the paper's worked example)

The number of rows depends on N, K and r alone, never on the data: compiled kernels keep one shape.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


def kept_per_offset(
    num_tokens: int, num_depths: int, ratio: float, floor: float = 0.0, max_anchors: int | None = None
) -> list[int]:
    """Anchors kept at offsets 0..K-1: N at the first, then a share r of the one before, rounded down.

    floor: least share of N kept at any offset, rounded down; 0 as published, 0.2 in the public port (speculators).
    max_anchors: chains that may reach beyond offset 0 (speculators: 3,072); the shares are of this number then. Raises
    ValueError for a ratio or floor outside (0, 1] and [0, 1], and for max_anchors under 1.
    """
    if not 0 < ratio <= 1 or not 0 <= floor <= 1:
        raise ValueError(f"cod: ratio = {ratio} must be in (0, 1] and floor = {floor} in [0, 1]")
    if max_anchors is not None and max_anchors < 1:
        raise ValueError(f"cod: max_anchors = {max_anchors} must be at least 1, or none")
    starts = num_tokens if max_anchors is None else min(num_tokens, max_anchors)
    chain = [starts]
    for _ in range(1, num_depths):
        chain.append(max(_share(chain[-1], ratio), _share(starts, floor)))
    return [num_tokens, *chain[1:]]


def _share(count: int, ratio: float) -> int:
    # The small term keeps products such as 0.7 * 10 from falling under the whole number they stand for.
    return int(count * ratio + 1e-9)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a training pass: first the N rows of offset 0 in order, then the kept rows sorted by anchor, then offset.

    anchor_BT, offset_BT: int64. A row's position is anchor + offset; its label is the token at anchor + offset + 2.
    """

    anchor_BT: Tensor
    offset_BT: Tensor
    num_tokens: int

    @property
    def position_BT(self) -> Tensor:
        return self.anchor_BT + self.offset_BT

    def of(self, b: int) -> Rows:
        """Rows of one sequence, [1, T]."""
        return Rows(self.anchor_BT[b : b + 1], self.offset_BT[b : b + 1], self.num_tokens)


def sample_rows(
    chain_BN: Tensor,
    num_depths: int,
    ratio: float,
    *,
    generator: torch.Generator | None = None,
    floor: float = 0.0,
    max_anchors: int | None = None,
) -> Rows:
    """Draws the rows of one pass.

    chain_BN: int, how many offsets (0..K) of the chain at each anchor have a label that is worth a loss. Offset g draws
    from the chains kept at offset g - 1 that are still worth one; only where these are too few, others fill the fixed
    number of rows, and no loss looks at them. generator: on the device of `chain_BN`. Raises as `kept_per_offset`.

    One random order is drawn, and offset g keeps a prefix of it. That is the same as drawing at each offset anew a
    uniform subset of what the offset before kept: a prefix, known as a set, is still in uniformly random order, so its
    own prefix is a uniform subset of it. Moving the ended chains behind the others keeps the order of both.
    """
    batch, num_tokens = chain_BN.shape
    device = chain_BN.device
    kept_Bn = torch.rand(chain_BN.shape, generator=generator, device=device).argsort(dim=1)
    keys = [torch.empty(batch, 0, dtype=torch.int64, device=device)]
    for g, count in enumerate(kept_per_offset(num_tokens, num_depths, ratio, floor, max_anchors)[1:], 1):
        ended_Bn = chain_BN.gather(1, kept_Bn) <= g
        kept_Bn = kept_Bn.gather(1, ended_Bn.to(torch.uint8).argsort(dim=1, stable=True)[:, :count])
        keys.append(kept_Bn * num_depths + g)
    key_BM = torch.cat(keys, dim=1).sort(dim=1).values
    first_BN = torch.arange(num_tokens, device=device).expand(batch, -1)
    return Rows(
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
