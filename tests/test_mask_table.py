"""Masks from the table equal the definition and `masks.dense`, for every length the table holds."""

import pytest
import torch

from peagle.train import masks
from peagle.train.cod import CodRows, chain_lengths, sample_rows
from peagle.train.masks import MaskTable

MAX_TOKENS = 48


def packed_rows(num_tokens: int, num_depths: int, ratio: float) -> tuple[CodRows, torch.Tensor]:
    """Three sequences: packed documents with padding at the end, a single document, nothing but padding."""
    thirds = torch.arange(num_tokens) * 4 // num_tokens
    document_BN = torch.stack([thirds.where(thirds < 3, -1), torch.zeros_like(thirds), torch.full_like(thirds, -1)])
    chain_BN = chain_lengths(document_BN, document_BN >= 0, num_depths)
    generator = torch.Generator().manual_seed(num_tokens)
    return sample_rows(chain_BN, num_depths, ratio, generator=generator), document_BN


def by_double_loop(rows: CodRows, document_BN: torch.Tensor, window: int = 1000) -> torch.Tensor:
    batch, num_rows = rows.anchor_BT.shape
    mask = torch.zeros(batch, num_rows, num_rows, dtype=torch.bool)
    for b in range(batch):
        cells = list(zip(rows.anchor_BT[b].tolist(), rows.offset_BT[b].tolist(), strict=True))
        for q, (anchor_q, offset_q) in enumerate(cells):
            for k, (anchor_k, offset_k) in enumerate(cells):
                in_cache = offset_k == 0 and anchor_k <= anchor_q
                in_pass = anchor_k == anchor_q and offset_k <= offset_q
                near = anchor_k + offset_k > anchor_q + offset_q - window
                mask[b, q, k] = (in_cache or in_pass) and near and document_BN[b, anchor_q] == document_BN[b, anchor_k]
    return mask


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 31, MAX_TOKENS])
@pytest.mark.parametrize(("num_depths", "ratio"), [(1, 0.5), (2, 0.8), (4, 0.7), (8, 0.8), (8, 1.0)])
def test_every_length_is_a_view_of_one_table(num_tokens: int, num_depths: int, ratio: float) -> None:
    table = MaskTable(MAX_TOKENS, num_depths)
    rows, document_BN = packed_rows(num_tokens, num_depths, ratio)
    mask = table.dense(rows, document_BN)
    assert torch.equal(mask, by_double_loop(rows, document_BN))
    assert torch.equal(mask, masks.dense(rows, document_BN))
    assert table.prefix(num_tokens).data_ptr() == table.prefix(MAX_TOKENS).data_ptr(), "copied, not viewed"


@pytest.mark.parametrize("window", [1, 3, 7, 20, 100])
def test_a_sliding_window(window: int) -> None:
    rows, document_BN = packed_rows(31, 6, 0.8)
    mask = MaskTable(MAX_TOKENS, 6).dense(rows, document_BN, window)
    assert torch.equal(mask, by_double_loop(rows, document_BN, window))
    assert torch.equal(mask, masks.dense(rows, document_BN, window))


def test_a_longer_sequence_than_the_table_is_refused() -> None:
    rows, document_BN = packed_rows(MAX_TOKENS + 1, 4, 0.7)
    with pytest.raises(ValueError, match="49 tokens, but the table holds 48"):
        MaskTable(MAX_TOKENS, 4).dense(rows, document_BN)


def test_memory_over_the_limit_is_refused_before_it_is_taken() -> None:
    with pytest.raises(ValueError, match=r"table of 1000000 tokens .* attention: flex"):
        MaskTable(1_000_000, 8)
    rows, document_BN = packed_rows(16, 4, 0.7)
    # Table, three masks of 38 rows, and what is held while one is made.
    needed = MAX_TOKENS**2 + 3 * 38**2 + 16 * (16 + 2 * 38)
    MaskTable(MAX_TOKENS, 4, max_bytes=needed).dense(rows, document_BN)
    with pytest.raises(ValueError, match=r"3 x 38 rows .* max_bytes .* attention: flex"):
        MaskTable(MAX_TOKENS, 4, max_bytes=needed - 1).dense(rows, document_BN)
