"""Conditional drop-token sampling: counts of the paper's example, the distribution of nested chains, labels, masks."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from peagle.train.cod import CodRows, chain_lengths, kept_per_offset, sample_rows
from peagle.train.masks import AttentionMask


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


# ---- the two forms of the mask against its definition, and against each other


def rows_and_documents(num_tokens: int, num_depths: int, ratio: float, seed: int) -> tuple[CodRows, torch.Tensor]:
    """Two packed sequences with documents of uneven lengths and padding at the end."""
    generator = torch.Generator().manual_seed(seed)
    document_BN = torch.full((2, num_tokens), -1)
    for sequence in document_BN:
        cuts = torch.randint(1, num_tokens, (4,), generator=generator).sort().values.tolist()
        for number, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
            sequence[start:end] = number
    chain_BN = chain_lengths(document_BN, torch.ones_like(document_BN, dtype=torch.bool), num_depths)
    return sample_rows(chain_BN, num_depths, ratio, generator=generator), document_BN


def by_definition(rows: CodRows, document_BN: torch.Tensor) -> torch.Tensor:
    """[B, T, T] of all pairs of rows, as the module's docstring says it."""
    (anchor_q, offset_q), (anchor_k, offset_k) = (
        (rows.anchor_BT.unsqueeze(dim), rows.offset_BT.unsqueeze(dim)) for dim in (2, 1)
    )
    document_BT = document_BN.gather(1, rows.anchor_BT)
    in_cache = (offset_k == 0) & (anchor_k <= anchor_q)
    in_pass = (anchor_k == anchor_q) & (offset_k <= offset_q)
    return (in_cache | in_pass) & (document_BT[:, :, None] == document_BT[:, None])


@pytest.mark.parametrize(("num_depths", "ratio"), [(1, 0.5), (4, 0.7), (8, 0.8), (3, 1.0)])
def test_dense_masks_equal_the_definition(num_depths: int, ratio: float) -> None:
    for num_tokens in (5, 16, 31, 48):
        rows, document_BN = rows_and_documents(num_tokens, num_depths, ratio, seed=num_tokens)
        assert torch.equal(AttentionMask.from_rows(rows, document_BN).dense(), by_definition(rows, document_BN))


def check_tiles(attention_mask: AttentionMask, tile: int) -> float:
    """What is skipped holds no visible pair, what is full holds nothing else. Returns the share visited."""
    dense, block = attention_mask.dense(), attention_mask.block(tile)
    assert (tile, tile) == block.BLOCK_SIZE
    batch, num_queries, num_keys = dense.shape
    visited = block.to_dense()[:, 0].bool()
    full = torch.zeros_like(visited)
    assert (block.kv_num_blocks + block.full_kv_num_blocks).sum() == visited.sum(), "a tile is visited twice"
    for b, row in itertools.product(range(batch), range(visited.shape[1])):
        full[b, row, block.full_kv_indices[b, 0, row, : block.full_kv_num_blocks[b, 0, row]].long()] = True
    padded = F.pad(dense, (0, -num_keys % tile, 0, -num_queries % tile))
    pairs = padded.unflatten(2, (-1, tile)).unflatten(1, (-1, tile))
    assert not (pairs.any(4).any(2) & ~visited).any(), "a pair that the rule allows lies in a skipped tile"
    assert pairs.all(4).all(2)[full].all(), "a full tile holds a pair that the rule forbids, or lies beyond the rows"
    b = torch.arange(batch)[:, None, None]
    query, key = torch.arange(num_queries)[None, :, None], torch.arange(num_keys)[None, None, :]
    assert torch.equal(block.mask_mod(b, b * 0, query, key), dense)
    return float(visited.float().mean())


@pytest.mark.parametrize(("num_tokens", "num_depths", "tile"), [(64, 4, 8), (50, 8, 8), (128, 8, 16)])
def test_tiles_of_the_block_mask(num_tokens: int, num_depths: int, tile: int) -> None:
    rows, document_BN = rows_and_documents(num_tokens, num_depths, 0.8, seed=tile)
    assert check_tiles(AttentionMask.from_rows(rows, document_BN), tile) < 0.7, "nearly no tile is skipped"


def test_segment_sees_what_its_rows_see_in_the_whole_pass() -> None:
    rows, document_BN = rows_and_documents(24, 4, 1.0, seed=1)
    whole = by_definition(rows, document_BN)
    # Of the segment from 7 to 15: earlier rows of offset 0 as keys alone, later ones hidden (-1), its own rows, blanks.
    own = [number for number, anchor in enumerate(rows.anchor_BT[0].tolist()) if 7 <= anchor < 15]
    keys, num_queries = [*range(7), *[-1] * (rows.num_tokens - 7), *own, *[-1] * 3], len(own) + 3
    attention_mask = AttentionMask.from_rows(rows, document_BN).select(torch.tensor(keys), num_queries)
    found, first = attention_mask.dense(), len(keys) - num_queries
    for q, row in enumerate(keys[first:]):
        for k, other in enumerate(keys):
            wanted = whole[:, row, other] if row >= 0 and other >= 0 else torch.tensor([k == first + q] * 2)
            assert torch.equal(found[:, q, k], wanted), (row, other)
    assert check_tiles(attention_mask, 4) < 0.7, "nearly no tile is skipped"
