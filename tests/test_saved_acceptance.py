"""A snapshot of what was learned: equal values when restored, and named errors for a damaged one."""

import json
import random
from typing import Any

import pytest

from cluster.acceptance import AcceptanceBook, Counts, Report

K_MAX = 7


def steps(num_steps: int, seed: int) -> Counts:
    """Steps at K from 5 to K_max with any number of drafts accepted."""
    chance = random.Random(seed)
    deepest = [chance.randint(5, K_MAX) for _ in range(num_steps - 1)] + [K_MAX]
    return Counts.from_steps((k, chance.randint(0, k)) for k in deepest)


def learned() -> AcceptanceBook:
    book = AcceptanceBook(K_MAX, max_workloads=3)
    totals = {f"w{index}": steps(100 * (index + 1), index) for index in range(5)}
    book.absorb("r1", "old", totals)
    book.absorb_all([Report("r2", "head", totals), Report("r3", "head", {"w0": steps(50, 9)})])
    return book


def test_snapshot_restores_to_equal_values_and_goes_on() -> None:
    book, restored = learned(), AcceptanceBook(K_MAX, max_workloads=3)
    restored.restore(json.loads(json.dumps(book.snapshot(), allow_nan=False)))
    more = {"w0": steps(900, 11), "w9": steps(30, 12)}
    for _ in range(2):
        assert restored.snapshot() == book.snapshot()
        assert restored.workloads() == book.workloads()
        for workload in (*book.workloads(), "unseen"):
            assert restored.survival(workload) == book.survival(workload)
        for one in (book, restored):
            one.absorb_all([Report("r3", "head", more), Report("r1", "old", more)])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], 2, r"snapshot\.format: "),
        (["max_draft_tokens"], 5, r"snapshot\.max_draft_tokens is 5, but the head served drafts 7"),
        (["workloads", 0, "steps"], -1.0, r"snapshot\.workloads\[0\]\.steps: "),
        (["workloads", 1, "reached", 2], float("nan"), r"snapshot\.workloads\[1\]\.reached\[2\]: "),
        (["workloads", 1, "accepted", 2], 1e9, r"snapshot\.workloads\[1\]\.accepted\[2\] is 1000000000\.0, more than"),
        (["workloads", 1, "workload"], "w2", r"snapshot\.workloads\[1\]: 'w2' is there twice"),
        (["evicted", "accepted"], [0.0], r"snapshot\.evicted\.accepted has 1 depths"),
        (["evicted", "extra"], 1, r"snapshot\.evicted\.extra: "),
        (["sources", 0, "totals", 0, "drafted"], [1, 2], r"snapshot\.sources\[0\]\.totals\[0\]: reached has 7"),
        (["sources", 0, "head"], None, r"snapshot\.sources\[0\]\.head: "),
    ],
)
def test_snapshot_that_is_damaged_is_refused_by_field(path: list[Any], value: Any, message: str) -> None:
    book = learned()
    before, damaged = book.survival("w4"), book.snapshot()
    place: Any = damaged
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        book.restore(damaged)
    assert book.survival("w4") == before


def test_snapshot_that_is_none() -> None:
    for snapshot in (None, [], "{}", {}):
        with pytest.raises(ValueError, match="snapshot"):
            AcceptanceBook(K_MAX).restore(snapshot)
