"""Settings of a round, and which heads are trained on; `tests/unit/deployments/test_learner.py` trains."""

from pathlib import Path
from typing import Any

import pytest

from peagle.config import HeadError
from peagle.train.continual import HeadInTraining, continual_recipe
from peagle.train.target import Target

SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {"num_sequences": 4, "max_tokens": 64},
    "optimizer": {"muon_lr": 0.01, "lr": 0.01, "ema_decay": 0.5},
    "schedule": {"max_steps": 40, "warmup_steps": 5},
    "loss": {"chunk": 64},
}


def test_settings_of_a_round_are_checked() -> None:
    assert continual_recipe({"schedule": {"max_steps": 3}}).schedule.max_steps == 3
    with pytest.raises(ValueError, match=r"drafter is no section"):
        continual_recipe({"drafter": {"num_layers": 3}})
    with pytest.raises(ValueError, match=r"max_step\b"):
        continual_recipe({"schedule": {"max_step": 3}})


def test_an_eagle3_head_is_refused(small: Path) -> None:
    from peagle.heads import shipped_heads

    with pytest.raises(HeadError, match="EAGLE-3"):
        HeadInTraining({}, Target(small / "target"), shipped_heads()["smollm2-135m-instruct-eagle3"])
