"""Counts by depth, and the ledger that turns cumulative reports of many replicas into new steps."""

import random
from collections.abc import Mapping

import pytest

from cluster.acceptance import HEAD_PATIENCE_REPORTS, MAX_NUM_SOURCES, Counts, Ledger, Report
from peagle.vllm.acceptance import DraftingStats


def full(num_steps: int, depth: int = 2) -> Counts:
    """`num_steps` steps at K = depth that accepted everything."""
    return Counts(*[(num_steps,) * depth] * 3)


def taken(ledger: Ledger, source: str, head: str, totals: Mapping[str, int]) -> dict[str, int]:
    """New steps by workload of one report with so many steps each."""
    counts = {name: full(num) for name, num in totals.items()}
    new = ledger.take([Report(source, head, counts)])
    return {name: one.num_steps for name, one in new.counts.items() if one.num_steps}


def test_counts_are_those_of_the_engine() -> None:
    chance = random.Random(0)
    steps = [(k, chance.randint(0, k)) for k in (chance.randint(1, 7) for _ in range(500))]
    stats = DraftingStats.from_steps(steps)
    assert Counts(stats.drafted_by_depth, stats.reached_by_depth, stats.accepted_by_depth) == Counts.from_steps(steps)


def test_sums_and_differences_of_different_depths() -> None:
    early, late = [(2, 1)], [(4, 4), (1, 0)]
    both = Counts.from_steps(early + late)
    assert Counts.from_steps(early) + Counts.from_steps(late) == both
    assert both - Counts.from_steps(early) == Counts.from_steps(late)
    assert (both.num_steps, both.max_depth, Counts().num_steps) == (3, 4, 0)
    with pytest.raises(ValueError, match="depth 1 cannot be"):
        Counts.from_steps(early) - both


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (((3,), (3,), (4,)), "accepted 4 at depth 1 cannot be"),
        (((3,), (2,), (1,)), "reached 2, accepted 1 at depth 1 cannot be"),
        (((3, 4), (3, 1), (1, 1)), "drafted 4.* at depth 2 cannot be"),
        (((3, 3), (3, 2), (1, 1)), "reached 2.* at depth 2 cannot be"),
        (((-1,), (-1,), (-1,)), "drafted -1"),
        (((3, 3), (3,), (3, 3)), "reached has 1 depths, but drafted has 2"),
        (((3,), (3,), (1.0,)), "accepted must be a tuple of integers"),
        (([3], [3], [3]), "drafted must be a tuple of integers"),
    ],
)
def test_counts_that_no_steps_can_have(counts: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Counts(*counts)


def test_each_step_counts_once() -> None:
    ledger = Ledger(64)
    assert taken(ledger, "r1", "h", {"code": 10}) == {"code": 10}
    assert taken(ledger, "r1", "h", {"code": 10}) == {}
    assert taken(ledger, "r2", "h", {"code": 5}) == {"code": 5}
    assert taken(ledger, "r1", "h", {"code": 12, "chat": 4}) == {"code": 2, "chat": 4}


def test_reports_of_one_round_are_summed() -> None:
    new = Ledger(64).take([Report("r1", "h", {"code": full(3)}), Report("r2", "h", {"code": full(4, depth=3)})])
    assert (new.reset, new.counts) == (False, {"code": full(3) + full(4, depth=3)})


def test_replica_that_restarts_is_new_as_a_whole() -> None:
    """`chat` counts more than before already, but it too began at zero."""
    ledger = Ledger(64)
    taken(ledger, "r1", "h", {"code": 1000, "chat": 20})
    assert taken(ledger, "r1", "h", {"code": 300, "chat": 30}) == {"code": 300, "chat": 30}
    assert taken(ledger, "r1", "h", {"code": 301, "chat": 30}) == {"code": 1}


def test_one_workload_that_begins_anew_does_not_repeat_the_others() -> None:
    ledger = Ledger(64)
    taken(ledger, "r1", "h", {"code": 1000, "rare": 9})
    assert taken(ledger, "r1", "h", {"code": 1100, "rare": 2}) == {"code": 100, "rare": 2}


def test_a_source_that_comes_back_goes_on_and_a_workload_begins_anew() -> None:
    ledger = Ledger(64)
    taken(ledger, "r1", "h", {"code": 100, "chat": 50})
    taken(ledger, "r2", "h", {"code": 7})
    assert taken(ledger, "r1", "h", {"chat": 51}) == {"chat": 1}
    assert taken(ledger, "r1", "h", {"code": 104, "chat": 51}) == {"code": 104}


def test_a_forgotten_source_is_the_least_recent() -> None:
    ledger = Ledger(64)
    for index in range(MAX_NUM_SOURCES + 1):
        taken(ledger, f"r{index}", "h", {"code": 1})
        taken(ledger, "r0", "h", {"code": 1})
    assert len(ledger.sources) == MAX_NUM_SOURCES
    assert {"r0", "r1"} & set(ledger.sources) == {"r0"}


def test_names_past_the_limit_are_counted_as_default_once() -> None:
    ledger = Ledger(2)
    assert taken(ledger, "r1", "h", {"a": 1, "b": 8, "c": 5, "default": 2}) == {"b": 8, "c": 5, "default": 3}
    assert taken(ledger, "r1", "h", {"a": 9, "c": 6, "b": 8, "default": 2}) == {"c": 1, "default": 8}
    assert taken(ledger, "r1", "h", {"a": 9, "c": 6, "d": 40, "default": 2}) == {"default": 40}


def test_head_that_takes_over_resets_once() -> None:
    ledger = Ledger(64)
    assert not ledger.take([Report("r1", "old", {"code": full(9)})]).reset
    new = ledger.take([Report("r1", "old", {"code": full(10)}), Report("r2", "new", {"code": full(4)})])
    assert (new.reset, new.counts) == (True, {"code": full(4)})
    assert ledger.take([Report("r2", "new", {"code": full(5)})]).reset is False


def test_a_replica_that_does_not_know_its_head_yet_ends_nothing() -> None:
    """With a remote drafter, a target that has just started reports before it has heard of the drafters."""
    ledger = Ledger(64)
    taken(ledger, "r1", "h", {"code": 10})
    for _ in range(HEAD_PATIENCE_REPORTS + 1):
        new = ledger.take([Report("r2", "", {"code": full(2)})])
        assert (new.reset, new.counts, ledger.head) == (False, {}, "h")
    new = ledger.take([Report("r2", "h", {"code": full(3)})])
    assert (new.reset, new.counts) == (False, {"code": full(3)})


def test_replicas_of_both_heads_do_not_reset_each_other() -> None:
    """Replicas are replaced one by one: the earlier head's reports bring nothing, whatever the order."""
    ledger = Ledger(64)
    taken(ledger, "r1", "old", {"code": 10})
    for step in range(1, 20):
        assert taken(ledger, "r2", "new", {"code": step}) == {"code": 1}
        assert taken(ledger, "r1", "old", {"code": 10 + step}) == {}
    assert ledger.head == "new"


def test_earlier_head_comes_back_when_nobody_has_the_current_one() -> None:
    ledger = Ledger(64)
    taken(ledger, "r1", "old", {"code": 10})
    taken(ledger, "r2", "new", {"code": 10})
    found = [taken(ledger, "r3", "old", {"code": 10 * step}) for step in range(1, HEAD_PATIENCE_REPORTS + 1)]
    assert found == [{}] * (HEAD_PATIENCE_REPORTS - 1) + [{"code": 10}]
    assert ledger.head == "old"


def test_swap_in_a_running_replica() -> None:
    """Counters that go on over the swap hold steps of both heads, so those are left out; the next ones count."""
    ledger = Ledger(64)
    taken(ledger, "r1", "old", {"code": 100})
    assert taken(ledger, "r1", "new", {"code": 130}) == {}
    assert taken(ledger, "r1", "new", {"code": 140}) == {"code": 10}
    assert taken(ledger, "r1", "old", {"code": 20}) == {"code": 20}, "back again, with its counters begun anew"
