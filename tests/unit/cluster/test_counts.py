"""Counts of drafts and requests, and what is new in each report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.counts import Counts, DeltaTracker, TargetReport, WorkloadCounts
from tests.support.counted import counts_of

STEPS = st.lists(
    st.integers(0, 7).flatmap(lambda verified: st.tuples(st.just(verified), st.integers(0, verified))), max_size=30
)


def workload(steps, num_started=0):
    return WorkloadCounts(num_started, counts=counts_of(steps))


def report(replica="a", head="h", **workloads):
    return TargetReport(replica, head, head, workloads)


@given(STEPS)
def test_counts_are_the_definition_step_by_step(steps):
    counts = counts_of(steps)
    depths = range(1, max((verified for verified, _ in steps), default=0) + 1)
    assert counts.drafted == [sum(verified >= depth for verified, _ in steps) for depth in depths]
    assert counts.reached == [sum(verified >= n and taken >= n - 1 for verified, taken in steps) for n in depths]
    assert counts.accepted == [sum(taken >= depth for _, taken in steps) for depth in depths]
    assert counts.num_steps == sum(verified > 0 for verified, _ in steps)
    assert counts.num_draft_tokens == sum(verified for verified, _ in steps)
    assert counts.num_accepted_tokens == sum(taken for _, taken in steps)


@given(STEPS, STEPS)
def test_a_difference_is_what_came_on_top(before, after):
    earlier, added = counts_of(before), counts_of(after)
    assert earlier + added == counts_of(before + after)
    assert (earlier + added) - earlier == added
    if added.num_steps:
        with pytest.raises(ValueError, match="no earlier reading"):
            earlier - (earlier + added)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), STEPS), max_size=20))
def test_every_step_counts_once_whatever_was_polled_when(events):
    tracker, found, counted = DeltaTracker(), {}, {}
    for replica, name, steps in events:
        mine = counted.setdefault(replica, {})
        mine[name] = mine.get(name, WorkloadCounts()) + workload(steps, num_started=1)
        deltas = tracker.update([TargetReport(replica, "h", "h", mine)])
        for each, counts in deltas.workloads.items():
            found[each] = found.get(each, WorkloadCounts()) + counts
    assert found == {
        name: sum((mine[name] for mine in counted.values() if name in mine), WorkloadCounts())
        for name in {name for mine in counted.values() for name in mine}
    }


def test_a_restarted_replica_begins_anew_and_a_forgotten_workload_is_no_restart():
    tracker = DeltaTracker()
    tracker.update([report(x=workload([(3, 1)] * 9, 4), y=workload([(3, 2)] * 50, 20))])
    deltas = tracker.update([report(x=workload([(3, 3)], 1), y=workload([(3, 2)] * 60, 25))])
    assert deltas.workloads["x"].num_started == 1
    assert deltas.workloads["y"].num_started == 5
    deltas = tracker.update([report(x=workload([(3, 3)] * 9, 5), y=workload([(3, 2)] * 2, 2))])
    assert deltas.by_head["h"]["x"] == counts_of([(3, 3)] * 9)
    assert deltas.by_head["h"]["y"] == counts_of([(3, 2)] * 2)


def test_a_report_read_twice_or_copied_later_changes_nothing():
    tracker, live = DeltaTracker(), workload([(2, 1)], 1)
    tracker.update([report(x=live)])
    live.counts.add_step(2, 2)  # a replica's own live counts must not change what was remembered
    assert tracker.update([report(x=live)]).workloads["x"].counts == counts_of([(2, 2)])
    assert tracker.update([report(x=live)]).workloads["x"] == WorkloadCounts()


def test_heads_are_counted_side_by_side_and_the_majority_is_current():
    tracker = DeltaTracker()
    assert tracker.update([report("a", "")]).head == ""
    assert tracker.update([report("a", "old", x=workload([(1, 1)] * 3))]).by_head == {}  # whose they are is not known
    old = tracker.update([report("a", "old", x=workload([(1, 1)] * 9))]).by_head
    assert old == {"old": {"x": Counts([6], [6], [6])}}
    assert tracker.update([report("a", "new", x=workload([(1, 1)] * 10))]).by_head == {}
    for head in ("old", "new", "old", "new"):
        deltas = tracker.update([report("a", head, x=workload([(1, 1)] * 10)), report("b", "new")])
        assert deltas.head == "new"
    votes = [report("a", "old"), report("b", "new"), report("c", "new")]
    assert tracker.update(votes).head == "new"
    assert tracker.update(votes[:2]).head == "new"
