"""A drafter's head, loaded with its target's tables, and a drafter's process that serves it."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from peagle.checkpoint import load_head, save_head
from peagle.config import HeadError
from peagle.drafter.pool import LinkPool
from peagle.drafter.protocol import StepDescriptor, TargetShape
from peagle.drafter.serving import DrafterLimits, load_runtime_head, load_served_head
from peagle.heads import prepare_head, shipped_heads
from peagle.model import Drafter
from peagle.train.target import Target
from tests.support.head_factory import CONFIG, REDUCED, TARGET, head_tensors
from tests.support.pass_requests import Requests, Step, run, token_ids
from tests.support.transport_harness import eventually


def write_target(folder: Path, **changes: Any) -> Path:
    """A target's config.json and its two tables."""
    torch.manual_seed(1)
    folder.mkdir()
    shape = (TARGET["vocab_size"], TARGET["hidden_size"])
    tables = {"model.embed_tokens.weight": torch.randn(shape), "lm_head.weight": torch.randn(shape)}
    save_file(tables, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TARGET | {"tie_word_embeddings": False} | changes))
    return folder


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["whole", "reduced"])
def test_a_shipped_head_takes_the_targets_tables(tmp_path: Path, config: Any) -> None:
    target_dir = write_target(tmp_path / "target")
    head_dir = save_head(tmp_path / "head", config, head_tensors(config, shipped=True))
    drafter = load_runtime_head(head_dir, target_dir, "cpu", torch.float32)
    plain = load_runtime_head(
        prepare_head(head_dir, target_dir, tmp_path / "cache"), target_dir
    )  # as an engine loads it
    assert drafter.lm_head is not None
    assert plain.lm_head is not None
    assert torch.equal(drafter.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(drafter.target_ids, plain.target_ids)
    ids = torch.arange(config.vocab_size)
    assert torch.equal(drafter.embed(ids), plain.embed(ids))
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    target_dir = write_target(tmp_path / "target", vocab_size=101)
    head_dir = save_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, shipped=True))
    with pytest.raises(HeadError, match="vocabulary: the head has 100 tokens, the target 101"):
        load_runtime_head(head_dir, target_dir)


def test_an_eagle3_head_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, ptd_token_id=None)
    head_dir = save_head(tmp_path / "head", config, head_tensors(config))
    with pytest.raises(HeadError, match=r"head .* has no mask token .* P-EAGLE heads only"):
        load_runtime_head(head_dir, write_target(tmp_path / "target"))


@pytest.fixture(scope="module")
def shipped(target_dir: Path) -> Drafter:
    return load_runtime_head(shipped_heads()["smollm2-135m-instruct"], target_dir, "cpu", torch.float32)


@pytest.mark.timeout(300)
def test_the_shipped_head_drafts_as_its_session(shipped: Drafter, target_dir: Path) -> None:
    """Two requests with the small model's own hidden states; the pass's drafts are the session's."""
    target = Target(target_dir)
    requests = Requests(shipped, 2)
    with torch.no_grad():
        tokens_BN = requests.tokens + 1000
        positions_BN = torch.arange(tokens_BN.shape[1]).expand(2, -1)
        requests.aux, _ = target.states(
            tokens_BN, torch.zeros_like(tokens_BN), positions_BN, shipped.config.aux_layer_ids
        )
    requests.tokens = torch.cat([tokens_BN[:, 1:], tokens_BN[:, :1]], dim=1)
    parallel_pass = requests.new_pass()
    for steps in ([Step(0, 0, 30, 5), Step(1, 0, 11, 0)], [Step(0, 30, 2, 3), Step(1, 11, 4, 5)], [Step(0, 31, 1, 5)]):
        assert token_ids(run(parallel_pass, requests.batch(steps))).tolist() == [
            requests.expected(step) for step in steps
        ]


COMMAND = [sys.executable, "-m", "benchmarks.drafter"]


def test_a_drafter_started_by_hand_drafts_for_a_target_and_ends_when_asked(head_dir: Path, target_dir: Path) -> None:
    options = ["--head", str(head_dir), "--target", str(target_dir), "--max-context", "512", "--cache-gib", "0.1"]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        drafter = json.loads(process.stdout.readline())
        config, _ = load_head(head_dir)
        shape = TargetShape(config.hidden_size, "float32", 5, 2, 16, config.vocab_size)
        pool = LinkPool(shape, aux_layer_ids=config.aux_layer_ids, min_deadline_s=20.0, max_deadline_s=20.0)
        pool.set_drafters([drafter])
        eventually(lambda: pool.num_up)
        slots_B = np.arange(2, dtype=np.int32)
        ((link, _),) = pool.assign(slots_B, slots_B * 0, (0, 1))
        hidden_RH = link.projections[0].project(torch.randn(8, config.fc_input_size))
        four = torch.full((2,), 4, dtype=torch.int32)
        descriptor = StepDescriptor(slots_B, slots_B * 0, slots_B + 4, slots_B * 4, 8)
        assert link.send(descriptor, four * 0, four, four.repeat(4), hidden_RH)
        link.wait(drafts_BK := torch.full((2, 5), -1), drafts_BK.float())
        assert link.has_drafts(slots_B).all()
        assert ((drafts_BK >= 0) & (drafts_BK < config.vocab_size)).all()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        pool.close()


def test_a_cache_that_holds_no_request_is_named(head_dir: Path, target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"cache_gib = 0.0001 holds \d+ blocks .* or a smaller max_context"):
        load_served_head(head_dir, target_dir, DrafterLimits(cache_gib=0.0001))
