"""`peagle drafter` serves the shipped head to a target, ends when asked, and refuses bad input in words."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.checkpoint import load_head
from peagle.drafter.client import LinkPool
from peagle.drafter.protocol import TargetShape
from tests.transport_harness import eventually

COMMAND = [sys.executable, "-m", "deployments.cli", "drafter"]


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
        ((link, _),) = pool.assign(slots_B, slots_B * 0, [0, 1])
        hidden_RH = link.reducers[0].reduce(torch.randn(8, config.fc_input_size))
        four = torch.full((2,), 4, dtype=torch.int32)
        assert link.send(slots_B, slots_B * 0, slots_B + 4, slots_B * 4, four * 0, four, four.repeat(4), hidden_RH)
        drafts_BK = link.wait_host()
        assert drafts_BK is not None
        assert ((drafts_BK >= 0) & (drafts_BK < config.vocab_size)).sum(axis=1).tolist() == [4, 5]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        pool.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"--head": "/nowhere"}, "/nowhere"),
        ({"--cache-gib": "0.0001"}, "cache_gib = 0.0001 holds"),
        ({"--max-num-requests": "0"}, "max_num_requests = 0 must be at least 1"),
    ],
)
def test_bad_input_is_named(changes: dict[str, str], problem: str, head_dir: Path, target_dir: Path) -> None:
    options = {"--head": str(head_dir), "--target": str(target_dir)} | changes
    done = subprocess.run(
        [*COMMAND, *[part for option in options.items() for part in option]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
