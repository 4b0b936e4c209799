"""Where a target's layers go when they do not fit beside the drafter on one GPU."""

import importlib.util

import pytest
import torch

from peagle.train.plan import spread

GB = 10**9


@pytest.mark.parametrize(
    ("free", "others", "expected"),
    [
        ((80, 80), 10, {0: 63, 1: 72}),
        ((80, 40, 20), 30, {0: 45, 1: 36, 2: 18}),
        ((80, 80), 90, {0: 0, 1: 72}),
        ((80,), 10, None),
        ((), 10, None),
    ],
)
def test_a_target_is_spread_with_room_for_the_others_on_the_first_gpu(free, others, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index] * GB, 80 * GB))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = spread(others * GB)
    assert found == (None if expected is None else {index: size * GB for index, size in expected.items()})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert spread(others * GB) is None
