"""Where a target's layers go when they do not fit beside the drafter on one GPU."""

import pytest
import torch

from peagle.train.plan import spread

GB = 10**9


@pytest.mark.parametrize(
    ("free", "target", "others", "expected"),
    [
        ((80, 80), 60, 10, None),
        ((80, 80), 75, 10, {0: 70, 1: 72}),
        ((80, 40, 20), 120, 30, {0: 50, 1: 36, 2: 18}),
        ((80,), 75, 10, None),
        ((80, 80), 60, 90, None),
        ((), 60, 10, None),
    ],
)
def test_a_target_is_spread_where_the_first_gpu_has_not_the_room(
    free: tuple[int, ...],
    target: int,
    others: int,
    expected: dict[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index] * GB, 80 * GB))
    found = spread(target * GB, others * GB)
    assert found == (None if expected is None else {index: size * GB for index, size in expected.items()})
