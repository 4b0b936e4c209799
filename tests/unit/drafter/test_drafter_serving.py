"""A drafter's head, loaded with its target's tables."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoint import save_head
from peagle.config import HeadError
from peagle.drafter.serving import DrafterLimits, load_runtime_head, load_served_head
from peagle.heads import prepare_head
from tests.support.head_factory import CONFIG, REDUCED, head_tensors, reconfigure, write_target


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["whole", "reduced"])
def test_a_shipped_head_takes_the_targets_tables(tmp_path: Path, config: Any) -> None:
    target_dir = write_target(tmp_path / "target", tied=config is CONFIG)
    head_dir = save_head(tmp_path / "head", config, head_tensors(config, shipped=True))
    drafter = load_runtime_head(head_dir, target_dir, "cpu", torch.float32)
    plain = load_runtime_head(prepare_head(head_dir, target_dir, tmp_path / "cache"), target_dir)
    assert torch.equal(drafter.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(drafter.target_ids, plain.target_ids)
    ids = torch.arange(config.vocab_size)
    assert torch.equal(drafter.embed(ids), plain.embed(ids))
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def test_a_head_of_another_target_or_kind_is_refused(tmp_path: Path) -> None:
    target_dir, eagle3 = write_target(tmp_path / "target"), dataclasses.replace(CONFIG, ptd_token_id=None)
    reconfigure(target_dir, vocab_size=101)
    for config, problem in ((CONFIG, "vocabulary: the head has 100 tokens, the target 101"),
                            (eagle3, "head .* has no mask token .* P-EAGLE heads only")):  # fmt: skip
        with pytest.raises(HeadError, match=problem):
            load_runtime_head(save_head(tmp_path / "head", config, head_tensors(config)), target_dir)


def test_a_cache_that_holds_no_request_is_named(head_dir: Path, target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"cache_gib = 0.0001 holds \d+ blocks .* or a smaller max_context"):
        load_served_head(head_dir, target_dir, DrafterLimits(cache_gib=0.0001))
