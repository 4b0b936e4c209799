"""A drafter's head, loaded with its target's tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoint import save_head
from peagle.config import HeadError
from peagle.drafter.serving import DrafterLimits, load_runtime_head, load_served_head
from peagle.heads import prepare_head, shipped_heads
from peagle.train.target import Target
from tests.support.head_factory import CONFIG, REDUCED, head_tensors, reconfigure, write_target
from tests.support.pass_requests import Requests, Step, run


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["whole", "reduced"])
def test_a_shipped_head_takes_the_targets_tables(tmp_path: Path, config: Any) -> None:
    target_dir = write_target(tmp_path / "target", tied=config is CONFIG)
    head_dir = save_head(tmp_path / "head", config, head_tensors(config, shipped=True))
    drafter = load_runtime_head(head_dir, target_dir, "cpu", torch.float32)
    plain = load_runtime_head(prepare_head(head_dir, target_dir, tmp_path / "cache"), target_dir)
    assert drafter.lm_head is not None
    assert plain.lm_head is not None
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


@pytest.mark.timeout(300)
def test_the_shipped_head_drafts_as_its_session(target_dir: Path) -> None:
    """Two requests with the small model's own hidden states; the pass's drafts are the session's."""
    shipped, target = load_runtime_head(shipped_heads()["smollm2-135m-instruct"], target_dir), Target(target_dir)
    requests = Requests(shipped, 2)
    with torch.no_grad():
        tokens_BN = requests.tokens + 1000
        positions_BN = torch.arange(tokens_BN.shape[1]).expand(2, -1)
        requests.aux, _ = target.states(tokens_BN, positions_BN, shipped.config.aux_layer_ids)
    requests.tokens = torch.cat([tokens_BN[:, 1:], tokens_BN[:, :1]], dim=1)
    parallel_pass = requests.new_pass()
    for steps in ([Step(0, 0, 30, 5), Step(1, 0, 11, 0)], [Step(0, 30, 2, 3), Step(1, 11, 4, 5)], [Step(0, 31, 1, 5)]):
        assert run(parallel_pass, requests.batch(steps)).tolist() == [requests.expected(step) for step in steps]


def test_a_cache_that_holds_no_request_is_named(head_dir: Path, target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"cache_gib = 0.0001 holds \d+ blocks .* or a smaller max_context"):
        load_served_head(head_dir, target_dir, DrafterLimits(cache_gib=0.0001))
