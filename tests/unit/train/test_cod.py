"""Conditional drop-token sampling: counts of the paper's example, the distribution of nested chains, labels."""

import itertools
from collections import Counter
from typing import Any

import torch

from peagle.train.cod import chain_lengths, kept_per_offset, sample_rows


def test_counts_are_those_of_the_papers_example() -> None:
    assert kept_per_offset(16, 4, 0.7) == [16, 11, 7, 4]
    rows = sample_rows(torch.full((1, 16), 4), 4, 0.7, generator=torch.Generator().manual_seed(0))
    assert rows.anchor_BT.shape == (1, 38)
    assert torch.bincount(rows.offset_BT[0]).tolist() == [16, 11, 7, 4]


def check_kept_sets(chains: list[int], expected: dict[Any, float]) -> None:
    """That the kept sets of the offsets 1 and 2, 3 anchors and 1, are drawn with these probabilities."""
    num_draws, generator = 10_000, torch.Generator().manual_seed(2)
    rows = sample_rows(torch.tensor([chains]).expand(num_draws, -1), 3, 0.6, generator=generator)
    drawn = Counter(
        tuple(tuple(a for a, g in zip(anchors, offsets, strict=True) if g == depth) for depth in (1, 2))
        for anchors, offsets in zip(rows.anchor_BT.tolist(), rows.offset_BT.tolist(), strict=True)
    )
    assert set(drawn) == set(expected)
    for outcome, probability in expected.items():
        mean = num_draws * probability
        assert abs(drawn[outcome] - mean) < 5 * mean**0.5, outcome


def test_kept_sets_are_uniform_as_if_drawn_one_offset_after_the_other() -> None:
    # 5 tokens keep 3, then 1 of these: 10 * 3 outcomes. A draw that prefers an anchor, or an offset that does not draw
    # from the one before, shifts or adds outcomes.
    firsts = itertools.combinations(range(5), 3)
    check_kept_sets([3] * 5, {(first, (last,)): 1 / 30 for first in firsts for last in first})


def test_every_offset_draws_from_chains_that_are_still_worth_a_loss() -> None:
    # Anchors 0-3 are worth a loss at offset 1 and keep 3; of these only 0-2 are at offset 2, which keeps 1: any three
    # of the four, then one of those below 3, is 3 + 3 * 2 = 9 outcomes, of two kinds.
    outcomes = ((first, last) for first in itertools.combinations(range(4), 3) for last in first if last < 3)
    check_kept_sets([3, 3, 3, 2, 1], {(first, (last,)): 1 / 4 / (2 if 3 in first else 3) for first, last in outcomes})


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
