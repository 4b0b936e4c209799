"""The two forms of the COD mask against a slow double loop, and against each other."""

import pytest
import torch

from peagle import masks
from peagle.cod import Rows, chain_lengths, sample_rows


def rows_and_documents(num_tokens: int, num_depths: int, ratio: float, seed: int) -> tuple[Rows, torch.Tensor]:
    """Two packed sequences with documents of uneven lengths and padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    document_BN = torch.full((2, num_tokens), -1)
    for sequence in document_BN:
        cuts = torch.randint(1, num_tokens, (4,), generator=generator).sort().values.tolist()
        for number, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
            sequence[start:end] = number
    chain_BN = chain_lengths(document_BN, torch.ones_like(document_BN, dtype=torch.bool), num_depths)
    return sample_rows(chain_BN, num_depths, ratio, generator=generator), document_BN


def by_double_loop(rows: Rows, document_BN: torch.Tensor) -> torch.Tensor:
    batch, num_rows = rows.anchor_BT.shape
    mask = torch.zeros(batch, num_rows, num_rows, dtype=torch.bool)
    for b in range(batch):
        cells = list(zip(rows.anchor_BT[b].tolist(), rows.offset_BT[b].tolist(), strict=True))
        for q, (anchor_q, offset_q) in enumerate(cells):
            for k, (anchor_k, offset_k) in enumerate(cells):
                if document_BN[b, anchor_q] != document_BN[b, anchor_k]:
                    continue
                in_cache = offset_k == 0 and anchor_k <= anchor_q
                in_pass = anchor_k == anchor_q and offset_k <= offset_q
                mask[b, q, k] = in_cache or in_pass
    return mask


@pytest.mark.parametrize(("num_tokens", "num_depths", "ratio"), [(16, 4, 0.7), (23, 8, 0.8), (9, 1, 1.0), (20, 3, 1.0)])
def test_dense_mask_equals_double_loop(num_tokens: int, num_depths: int, ratio: float) -> None:
    rows, document_BN = rows_and_documents(num_tokens, num_depths, ratio, seed=num_tokens)
    assert torch.equal(masks.dense(rows, document_BN), by_double_loop(rows, document_BN))


@pytest.mark.parametrize(("num_tokens", "num_depths", "tile"), [(64, 4, 16), (50, 8, 16), (128, 8, 32)])
def test_block_mask_holds_every_visible_pair_and_leaves_tiles_out(num_tokens: int, num_depths: int, tile: int) -> None:
    rows, document_BN = rows_and_documents(num_tokens, num_depths, 0.8, seed=tile)
    dense = masks.dense(rows, document_BN)
    block = masks.block(rows, document_BN, tile)
    tiles = block.to_dense()[:, 0].bool()
    num_rows = dense.shape[1]
    covered = tiles.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, :num_rows, :num_rows]
    assert not (dense & ~covered).any(), "a pair that the rule allows lies in a tile that is skipped"
    assert tiles.float().mean() < 0.8, "nearly no tile is skipped"
    index = torch.arange(num_rows)
    b = torch.arange(2)[:, None, None]
    assert torch.equal(block.mask_mod(b, b * 0, index[None, :, None], index[None, None, :]), dense)


def test_flex_attention_under_block_mask_equals_dense_attention() -> None:
    from peagle.parallel import attend_under

    rows, document_BN = rows_and_documents(48, 4, 0.8, seed=3)
    torch.manual_seed(0)
    num_rows = rows.anchor_BT.shape[1]
    q = torch.randn(2, 4, num_rows, 16)
    k, v = torch.randn(2, 2, 2, num_rows, 16)
    dense = attend_under(masks.dense(rows, document_BN))(0, q, k, v)
    block = attend_under(masks.block(rows, document_BN, 16))(0, q, k, v)
    torch.testing.assert_close(dense, block)
