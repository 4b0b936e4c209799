"""The arms of `benchmarks.scheduler`: each plans the drafts that its name says, of requests that never run out."""

import random
from typing import Any

import pytest

from benchmarks import scheduler


@pytest.mark.parametrize(("arm", "num_drafts"), [("stock-0", 0), ("stock-3", 3), ("ours-3", 3), ("ours-7", 7)])
def test_a_step_has_the_drafts_of_its_arm(arm: str, num_drafts: int) -> None:
    found, draw = scheduler.make_scheduler(arm), random.Random(0)
    for number in range(2):
        found.add_request(scheduler.new_request(arm, number, draw, 0))
    before = found.schedule()
    for _ in range(4):
        scheduled = found.schedule()
        found.update_from_output(before, scheduler.runner_output(before, set(), draw))
        before = scheduled
    assert [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in ("0", "1")] == [num_drafts] * 2


def test_requests_that_end_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, make = [], scheduler.new_request

    def counted(arm: str, number: int, *args: Any) -> Any:
        numbers.append(number)
        return make(arm, number, *args)

    monkeypatch.setattr(scheduler, "new_request", counted)
    assert min(scheduler.measure("ours-learned", 3, 300).values()) > 0
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 6
