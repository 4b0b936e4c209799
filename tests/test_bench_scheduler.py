"""The arms of `benchmarks.scheduler`: each plans the drafts that its name says."""

import random

import pytest

from benchmarks import scheduler


@pytest.mark.parametrize(("arm", "num_drafts"), [("stock-0", 0), ("stock-3", 3), ("ours-3", 3), ("ours-7", 7)])
def test_a_step_has_the_drafts_of_its_arm(arm: str, num_drafts: int) -> None:
    found, draw = scheduler.make_scheduler(arm, 2), random.Random(0)
    before = found.schedule()
    for _ in range(4):
        scheduled = found.schedule()
        found.update_from_output(before, scheduler.runner_output(before, draw))
        before = scheduled
    assert [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in ("0", "1")] == [num_drafts] * 2


def test_a_run_that_outlasts_its_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="--steps 2000"):
        scheduler.measure("ours-learned", 1, 2000)
