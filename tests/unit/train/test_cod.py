"""Conditional drop-token sampling: counts of the paper's example, the distribution of nested chains, labels."""

import itertools
from collections import Counter

import torch

from peagle.train.cod import chain_lengths, kept_per_offset, sample_rows


def test_counts_are_those_of_the_papers_example() -> None:
    assert kept_per_offset(16, 4, 0.7) == [16, 11, 7, 4]
    rows = sample_rows(torch.full((1, 16), 4), 4, 0.7, generator=torch.Generator().manual_seed(0))
    assert rows.anchor_BT.shape == (1, 38)
    assert torch.bincount(rows.offset_BT[0]).tolist() == [16, 11, 7, 4]


NUM_DRAWS = 10_000
#: Chi-square of the outcomes below (29 degrees of freedom) exceeds this once in a million fair samplers.
LIMIT_30 = 83.0


def nested_sets(chains: list[int], num_depths: int, ratio: float) -> Counter[tuple[tuple[int, ...], ...]]:
    """How often each sequence of kept sets (offsets 1, 2, ...) is drawn for one sequence of tokens."""
    generator = torch.Generator().manual_seed(2)
    rows = sample_rows(torch.tensor([chains]).expand(NUM_DRAWS, -1), num_depths, ratio, generator=generator)
    return Counter(
        tuple(tuple(a for a, g in zip(anchors, offsets, strict=True) if g == depth) for depth in range(1, num_depths))
        for anchors, offsets in zip(rows.anchor_BT.tolist(), rows.offset_BT.tolist(), strict=True)
    )


def test_kept_sets_are_uniform_as_if_drawn_one_offset_after_the_other() -> None:
    # 5 tokens keep 3, then 1 of these: 10 * 3 outcomes. A draw that prefers an anchor, or an offset that does not draw
    # from the one before, shifts or adds outcomes.
    drawn = nested_sets([3] * 5, 3, 0.6)
    every = {(first, (one,)) for first in itertools.combinations(range(5), 3) for one in first}
    assert set(drawn) == every
    expected = NUM_DRAWS / len(every)
    assert sum((count - expected) ** 2 / expected for count in drawn.values()) < LIMIT_30


def test_every_offset_draws_from_chains_that_are_still_worth_a_loss() -> None:
    # Anchors 0-3 are worth a loss at offset 1 and keep 3; of these only 0-2 are at offset 2, which keeps 1: any three
    # of the four, then one of those below 3, is 3 + 3 * 2 = 9 outcomes, of two kinds.
    drawn = nested_sets([3, 3, 3, 2, 1], 3, 0.6)
    every = {(first, (one,)) for first in itertools.combinations(range(4), 3) for one in first if one < 3}
    assert set(drawn) == every
    for (first, last), count in drawn.items():
        expected = NUM_DRAWS / 4 / (2 if 3 in first else 3)
        assert abs(count - expected) < 5 * expected**0.5, (first, last)


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
