"""Conditional drop-token sampling: counts of the paper's example, nested chains, labels by a slow loop."""

import pytest
import torch

from peagle.cod import chain_lengths, kept_per_offset, sample_rows


def test_counts_are_those_of_the_papers_example() -> None:
    assert kept_per_offset(16, 4, 0.7) == [16, 11, 7, 4]
    assert sum(kept_per_offset(16, 4, 0.7)) == 38


def test_floor_and_full_ratio() -> None:
    assert kept_per_offset(10, 4, 1.0) == [10, 10, 10, 10]
    assert kept_per_offset(100, 8, 0.5, floor=0.2)[-1] == 20
    assert kept_per_offset(10, 3, 0.7) == [10, 7, 4]


@pytest.mark.parametrize(("ratio", "floor"), [(0.0, 0.0), (1.2, 0.0), (0.5, -0.1)])
def test_wrong_shares_are_refused(ratio: float, floor: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        kept_per_offset(16, 4, ratio, floor)


def test_every_kept_row_has_the_rows_before_it_in_its_chain() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = sample_rows(torch.full((3, 64), 8), 8, 0.8, generator=generator)
    for anchors, offsets in zip(rows.anchor_BT.tolist(), rows.offset_BT.tolist(), strict=True):
        kept = set(zip(anchors, offsets, strict=True))
        assert len(kept) == len(anchors), "a row stands twice"
        assert all((anchor, offset - 1) in kept for anchor, offset in kept if offset)
    assert rows.anchor_BT.shape[1] == sum(kept_per_offset(64, 8, 0.8))


def test_anchors_are_drawn_evenly() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = sample_rows(torch.full((4000, 10), 3), 3, 0.5, generator=generator)
    counts = torch.bincount(rows.anchor_BT[rows.offset_BT == 1], minlength=10)
    # 4,000 draws of 5 of 10: 2,000 each, standard deviation 32; six of them are never seen by chance.
    assert (counts - 2000).abs().max() < 190, counts


def test_useless_anchors_come_last() -> None:
    chain_BN = torch.tensor([[4] * 8 + [0] * 8])
    rows = sample_rows(chain_BN, 4, 0.5, generator=torch.Generator().manual_seed(0))
    assert rows.anchor_BT[rows.offset_BT == 1].max() < 8


def test_chain_lengths_equal_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    document_BN = torch.tensor([[0] * 7 + [1] * 9 + [-1] * 4, [0] * 20])
    wanted_BN = (torch.rand(document_BN.shape, generator=generator) < 0.8) & (document_BN >= 0)
    found = chain_lengths(document_BN, wanted_BN, 4)
    for b in range(2):
        for anchor in range(20):
            length = 0
            while length < 4:
                label = anchor + length + 2
                inside = label < 20 and document_BN[b, anchor] >= 0 and document_BN[b, label] == document_BN[b, anchor]
                if not (inside and wanted_BN[b, label]):
                    break
                length += 1
            assert found[b, anchor] == length, (b, anchor)
