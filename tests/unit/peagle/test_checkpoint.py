"""Head directories: round trips in both forms, tables that must agree, and writes that fail half-way."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.checkpoint import build_drafter, load_head, save_head
from peagle.config import HeadError
from tests.support.disk import full_disk
from tests.support.head_factory import CONFIG, REDUCED, head_tensors, rewrite


def test_shipped_head_round_trip_and_its_tables_come_from_the_target(tmp_path: Path) -> None:
    tensors = head_tensors(CONFIG, shipped=True)
    config, loaded = load_head(save_head(tmp_path / "head", CONFIG, tensors))
    assert "embed_tokens.weight" not in loaded
    with pytest.raises(HeadError, match=r"no embed_tokens.weight: pass the target's as embed_VH \[100, 32\]"):
        build_drafter(config, loaded)
    table = torch.randn(100, 32)
    with pytest.raises(HeadError, match=r"no lm_head.weight: pass the target's as lm_head_VH \[100, 32\]"):
        build_drafter(config, loaded, embed_VH=table)
    with pytest.raises(HeadError, match=r"embed_VH has shape \[100, 31\], the head needs \[100, 32\]"):
        build_drafter(config, loaded, embed_VH=table[:, 1:], lm_head_VH=table)
    drafter = build_drafter(config, loaded, embed_VH=table, lm_head_VH=table)
    assert torch.equal(drafter.embed(torch.tensor([98, 99])), torch.stack([table[98], tensors["mask_embedding"]]))


def test_vocabulary_tables_must_agree(tmp_path: Path) -> None:
    def load_with(**changes: Tensor) -> None:
        path = save_head(tmp_path / "head", REDUCED, head_tensors(REDUCED))
        rewrite(path, **changes)
        load_head(path)

    offsets = head_tensors(REDUCED)["d2t"]
    load_with()
    load_with(d2t=offsets.int())
    with pytest.raises(HeadError, match=r"d2t\[6\] = 94 leads to target token 100, outside 0..99 \(1 such entries"):
        load_with(d2t=offsets.index_fill(0, torch.tensor([6]), 94))
    with pytest.raises(HeadError, match="d2t leads 10 draft tokens to only 9 different target tokens"):
        load_with(d2t=offsets.index_put((torch.tensor([1]),), offsets[0] - 1))
    with pytest.raises(HeadError, match="t2d does not mark the 10 target tokens that d2t leads to"):
        load_with(d2t=offsets + torch.arange(10))  # token ids where offsets belong, all in range here
    with pytest.raises(HeadError, match="t2d does not mark the 10 target tokens that d2t leads to, and no others"):
        load_with(t2d=head_tensors(REDUCED)["t2d"].index_fill(0, torch.tensor([0]), True))


def test_a_table_that_orders_the_whole_vocabulary_anew_is_refused(tmp_path: Path) -> None:
    """A plain head has none, so it would be lost."""
    head, ids = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG)), torch.arange(100)
    rewrite(head, d2t=0 * ids)
    load_head(head)
    rewrite(head, d2t=ids.roll(1) - ids)
    with pytest.raises(HeadError, match="d2t orders the whole vocabulary anew, .* without d2t"):
        load_head(head)


def test_a_head_is_not_written_beside_other_weights(tmp_path: Path) -> None:
    """They would be read with it."""
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    (head / "model.safetensors").rename(head / "model-00001-of-00001.safetensors")
    with pytest.raises(HeadError, match=r"holds other weights \(model-00001-of-00001.safetensors\), .*: name another"):
        save_head(head, *load_head(head))
    assert load_head(head)[0] == CONFIG


def test_save_refuses_what_load_would(tmp_path: Path) -> None:
    tensors = head_tensors(CONFIG)
    del tensors["fc.weight"]
    with pytest.raises(HeadError, match=r"missing fc.weight"):
        save_head(tmp_path / "head", CONFIG, tensors)
    assert not (tmp_path / "head").exists()


def test_a_full_disk_leaves_the_old_head_whole(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG))
    config, before = load_head(head)
    with full_disk(20_000), pytest.raises(OSError, match="model.safetensors"):
        save_head(head, config, {name: torch.zeros_like(tensor) for name, tensor in before.items()})
    assert sorted(path.name for path in head.iterdir()) == ["config.json", "model.safetensors"]
    after = load_head(head)[1]
    assert all(torch.equal(after[name], before[name]) for name in before)
