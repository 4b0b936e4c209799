"""Heads that learn from live traffic: the real service with a learner, through a shift, by its benchmark in small."""

import json
from pathlib import Path

import pytest

from benchmarks.learning import main

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.timeout(1200)]

LEARNING = {
    "min_new_answers": 72,
    "min_held_out": 4,
    "replay_share": 0.4,
    "max_loss": 0.1,
    "num_cpus": 1,
    "recipe": {
        "batch": {"num_sequences": 1, "max_tokens": 512},
        "optimizer": {"ema_decay": 0.7},
        "schedule": {"max_steps": 8, "warmup_steps": 1},
        "cod": {"ratio": 0.5},
    },
}
"""A round of minutes on one core: the evidence on a head grows with the number of answers, so they are short."""


def test_after_a_shift_a_head_that_learned_from_it_drafts_better(tmp_path: Path) -> None:
    numbers = ["--num-before", "32", "--num-held-out", "8", "--max-tokens", "32", "--max-s", "800"]
    out = tmp_path / "learning.json"
    assert main([*numbers, "--learning", json.dumps(LEARNING), "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["num_failed"] == 0
    assert found["promoted"] is not None, found["states"]
    after = found["after_over_before"]
    assert [after[kind]["num_equal_answers"] for kind in ("general", "json")] == [8, 8]
    assert after["json"]["ratio"] > 1
    assert after["general"]["ratio"] > 1 - LEARNING["max_loss"]
    heads = [found["phases"][f"json held out, {when}"]["heads"] for when in ("before", "after")]
    assert heads[0] != heads[1]
