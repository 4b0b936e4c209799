"""The form of the COD mask that skips tiles against the dense one, which `test_model` compares with drafting."""

import dataclasses

import pytest
import torch

from peagle.config import DrafterConfig, HeadError
from peagle.train.cod import CodRows, chain_lengths, sample_rows
from peagle.train.masks import AttentionMask
from tests.support.head_factory import CONFIG


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


def segment(rows: CodRows, start: int, stop: int, num_blanks: int) -> tuple[list[int], int]:
    """Numbers of the keys of one segment, -1 for blanks, and how many of the last are its queries: rows of offset 0
    before `start` seen only as keys, those after it hidden, then own rows and blanks.
    """
    anchors = rows.anchor_BT[0].tolist()
    own = [number for number, anchor in enumerate(anchors) if start <= anchor < stop]
    keys = [number if number < start else -1 for number in range(rows.num_tokens)]
    return [*keys, *own, *[-1] * num_blanks], len(own) + num_blanks


def test_window_of_a_head_is_what_vllm_takes_it_for() -> None:
    """vLLM's Llama layers ask `layer_types` first; a head with windows in some layers only is none of ours."""
    raw = dataclasses.replace(CONFIG, sliding_window=64).to_dict()
    assert (raw["sliding_window"], raw["layer_types"]) == (64, ["sliding_attention"] * 2)
    assert DrafterConfig.from_dict(raw).sliding_window == 64
    assert "sliding_window" not in CONFIG.to_dict()
    assert DrafterConfig.from_dict(raw | {"layer_types": None}).sliding_window is None
    assert DrafterConfig.from_dict(raw | {"layer_types": ["full_attention"] * 2}).sliding_window is None
    for change in ({"layer_types": ["sliding_attention", "full_attention"]}, {"sliding_window": None}):
        with pytest.raises(HeadError, match="the same window, a whole number, in all its layers"):
            DrafterConfig.from_dict(raw | change)


def check_tiles(attention_mask: AttentionMask, tile: int) -> tuple[float, float]:
    """What is skipped holds no visible pair, what is full holds nothing else. Returns the shares visited and full."""
    dense, block = attention_mask.dense(), attention_mask.block(tile)
    batch, num_queries, num_keys = dense.shape
    sizes = (batch, -(-num_queries // tile), -(-num_keys // tile))
    partial, full = torch.zeros(2, *sizes, dtype=torch.bool)
    for tiles, counts, order in (
        (partial, block.kv_num_blocks, block.kv_indices),
        (full, block.full_kv_num_blocks, block.full_kv_indices),
    ):
        for b in range(batch):
            for row in range(sizes[1]):
                tiles[b, row, order[b, 0, row, : counts[b, 0, row]].long()] = True
    assert not (partial & full).any()
    partial_pairs, full_pairs = (
        tiles.repeat_interleave(tile, 1).repeat_interleave(tile, 2)[:, :num_queries, :num_keys]
        for tiles in (partial, full)
    )
    assert not (dense & ~partial_pairs & ~full_pairs).any(), "a pair that the rule allows lies in a skipped tile"
    assert dense[full_pairs].all(), "a full tile holds a pair that the rule forbids"
    for count, length in ((1, num_queries), (2, num_keys)):
        assert not (length % tile and full.select(count, -1).any()), "a full tile beyond the last row"
    b = torch.arange(batch)[:, None, None]
    query, key = torch.arange(num_queries)[None, :, None], torch.arange(num_keys)[None, None, :]
    assert torch.equal(block.mask_mod(b, b * 0, query, key), dense)
    assert torch.equal(block.to_dense()[:, 0].bool(), partial | full)
    return float((partial | full).float().mean()), float(full.float().mean())


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("num_tokens", "num_depths", "tile"), [(64, 4, 8), (50, 8, 8), (128, 8, 16)])
def test_tiles_of_the_block_mask(num_tokens: int, num_depths: int, tile: int, window: int | None) -> None:
    rows, document_BN = rows_and_documents(num_tokens, num_depths, 0.8, seed=tile)
    visited, _ = check_tiles(AttentionMask.from_rows(rows, document_BN, window), tile)
    assert visited < 0.7, "nearly no tile is skipped"


@pytest.mark.parametrize("window", [None, 24])
def test_tiles_of_a_segment(window: int | None) -> None:
    rows, document_BN = rows_and_documents(128, 4, 1.0, seed=5)
    keys, num_queries = segment(rows, 63, 101, num_blanks=40)
    attention_mask = AttentionMask.from_rows(rows, document_BN, window)
    visited, _ = check_tiles(attention_mask.select(torch.tensor(keys), num_queries), 16)
    assert visited < 0.33, "blanks see more than themselves"
