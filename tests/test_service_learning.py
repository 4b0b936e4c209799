"""Heads that learn from live traffic: the real service with a learner, through a shift, by its benchmark in small."""

import json
from pathlib import Path

import pytest

from benchmarks.learning import main

pytestmark = [pytest.mark.service, pytest.mark.long]


def test_after_a_shift_a_head_that_learned_from_it_drafts_better(tmp_path: Path) -> None:
    learning = {
        "min_new_answers": 40,
        "min_held_out": 5,
        "recipe": {
            "batch": {"num_sequences": 1, "max_tokens": 1024},
            "optimizer": {"lr": 5e-4, "muon_lr": 2e-3, "ema_decay": 0.8},
            "schedule": {"max_steps": 20, "warmup_steps": 2},
            "cod": {"ratio": 0.5},
        },
    }
    numbers = ["--num-before", "24", "--num-phase", "24", "--max-tokens", "64", "--max-s", "400"]
    out = tmp_path / "learning.json"
    assert main([*numbers, "--learning", json.dumps(learning), "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["num_failed"], found["equal_answers"]) == (0, "8 of 8")
    assert found["promoted"] is not None, found["states"]
    before, after = found["phases"]["at the shift"], found["phases"]["after"]
    assert after["acceptance_length"] > before["acceptance_length"]
    assert before["heads"] != after["heads"]
