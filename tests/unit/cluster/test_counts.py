"""Counts of drafts and requests, what is new in each report, and their wire form."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.counts import Counts, Ledger, TargetReport, WorkloadCounts
from cluster.step_time import guessed_costs
from tests.support.counted import counts_of

STEPS = st.lists(
    st.integers(0, 7).flatmap(lambda verified: st.tuples(st.just(verified), st.integers(0, verified))), max_size=30
)


def workload(steps, num_started=0, num_finished=0, num_aborted=0):
    counts = counts_of(steps)
    return WorkloadCounts(num_started, num_finished, num_aborted, 10 * num_finished, 5 * num_finished, counts)


def report(replica="a", head="h", *, heads=None, **workloads):
    return TargetReport(replica, "m", head, heads or {}, workloads)


@given(STEPS)
def test_counts_are_the_definition_step_by_step(steps):
    counts = counts_of(steps)
    depths = range(1, max((verified for verified, _ in steps), default=0) + 1)
    assert counts.drafted == [sum(verified >= depth for verified, _ in steps) for depth in depths]
    assert counts.reached == [
        sum(verified >= depth and taken >= depth - 1 for verified, taken in steps) for depth in depths
    ]
    assert counts.accepted == [sum(taken >= depth for _, taken in steps) for depth in depths]
    assert counts.num_steps == sum(verified > 0 for verified, _ in steps)
    assert counts.num_draft_tokens == sum(verified for verified, _ in steps)
    assert counts.num_accepted_tokens == sum(taken for _, taken in steps)
    counts.check()


@given(STEPS, STEPS)
def test_a_difference_is_what_came_on_top(before, after):
    earlier, added = counts_of(before), counts_of(after)
    assert earlier + added == counts_of(before + after)
    assert (earlier + added) - earlier == added
    if added.num_steps:
        with pytest.raises(ValueError, match="cannot be"):
            earlier - (earlier + added)


@given(STEPS)
def test_counts_travel_as_json(steps):
    counts = WorkloadCounts(3, 1, 1, 40, 20, counts_of(steps))
    assert WorkloadCounts.from_wire(json.loads(json.dumps(counts.to_wire()))) == counts


@pytest.mark.parametrize(
    "wire", [None, [], [[1]], [[1], [1], [2]], [[1, 2], [1, 0], [1, 0]], [[1.0], [1], [1]], [[1], [1], [-1]], "abc"]
)
def test_wire_of_impossible_counts_is_refused(wire):
    with pytest.raises(ValueError):
        Counts.from_wire(wire)
    with pytest.raises(ValueError):
        WorkloadCounts.from_wire([1, 0, 0, 0, 0, wire])
    with pytest.raises(ValueError):
        WorkloadCounts.from_wire(wire)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), STEPS), max_size=20))
def test_every_step_counts_once_whatever_was_polled_when(events):
    """Replicas count; each event is followed by a report of one of them."""
    ledger, found, counted = Ledger(), {}, {}
    for replica, name, steps in events:
        mine = counted.setdefault(replica, {})
        mine[name] = mine.get(name, WorkloadCounts()) + workload(steps, num_started=1)
        news = ledger.take([TargetReport(replica, "m", "h", {}, mine)])
        assert not news.restarted
        for each, counts in news.workloads.items():
            found[each] = found.get(each, WorkloadCounts()) + counts
    assert found == {
        name: sum((mine[name] for mine in counted.values() if name in mine), WorkloadCounts())
        for name in {name for mine in counted.values() for name in mine}
    }


def test_a_restarted_replica_begins_anew_and_a_forgotten_workload_is_no_restart():
    ledger = Ledger()
    ledger.take([report(x=workload([(3, 1)] * 9, 4), y=workload([(3, 2)] * 50, 20))])
    news = ledger.take([report(x=workload([(3, 3)], 1), y=workload([(3, 2)] * 60, 25))])
    assert not news.restarted
    assert news.workloads["x"].num_started == 1
    assert news.workloads["y"].num_started == 5
    news = ledger.take([report(x=workload([(3, 3)] * 9, 5), y=workload([(3, 2)] * 2, 2))])
    assert news.restarted == ["a"]
    assert news.by_head["h"]["x"] == counts_of([(3, 3)] * 9)
    assert news.by_head["h"]["y"] == counts_of([(3, 2)] * 2)


def test_a_report_read_twice_or_copied_later_changes_nothing():
    ledger, live = Ledger(), workload([(2, 1)], 1)
    ledger.take([report(x=live)])
    live.counts.add_step(2, 2)  # a replica's own live counts must not change what was remembered
    assert ledger.take([report(x=live)]).workloads["x"].counts == counts_of([(2, 2)])
    assert ledger.take([report(x=live)]).workloads["x"] == WorkloadCounts()


def test_heads_are_counted_side_by_side_and_the_majority_is_current():
    """Fault 16: a restarted drafter that drafts with the old head for a while voids nothing."""
    ledger = Ledger()
    assert ledger.take([report("a", "")]).head == ""
    assert ledger.take([report("a", "old", x=workload([(1, 1)] * 3))]).by_head == {}  # whose they are is not known
    assert ledger.take([report("a", "old", x=workload([(1, 1)] * 9))]).by_head == {"old": {"x": Counts([6], [6], [6])}}
    assert ledger.take([report("a", "new", x=workload([(1, 1)] * 10))]).by_head == {}
    for head in ("old", "new", "old", "new"):
        news = ledger.take([report("a", head, x=workload([(1, 1)] * 10)), report("b", "new")])
        assert news.head == "new"
    votes = [report("a", "old"), report("b", "new"), report("c", "new")]
    assert ledger.take(votes).head == "new"
    assert ledger.take(votes[:2]).head == "new"
    assert ledger.take([report("b", "")]).head == "new"


def test_workloads_with_heads_of_their_own():
    ledger = Ledger()
    heads = {"x": "own"}
    ledger.take([report(heads=heads, x=workload([]), y=workload([]))])
    news = ledger.take([report(heads=heads, x=workload([(1, 0)]), y=workload([(1, 1)]))])
    assert news.by_head == {"own": {"x": Counts([1], [1], [0])}, "h": {"y": Counts([1], [1], [1])}}
    assert (news.heads, news.head) == (heads, "h")


def test_a_ledger_goes_on_after_a_restart_of_its_own():
    ledger = Ledger()
    ledger.take([report("a", heads={"x": "own"}, x=workload([(3, 1)] * 9, 4)), report("b")])
    restored = Ledger.from_wire(json.loads(json.dumps(ledger.to_wire())))
    assert restored.to_wire() == ledger.to_wire()
    assert restored.take([report("a", x=workload([(3, 1)] * 9, 4))]).workloads["x"] == WorkloadCounts()
    for damaged in ({}, None, {"head": "", "heads": {}, "replicas": [{"replica": "a"}]}):
        with pytest.raises(ValueError, match="cannot be read"):
            Ledger.from_wire(damaged)


def test_replicas_are_forgotten_by_age():
    ledger = Ledger()
    for number in range(Ledger.MAX_REPLICAS + 1):
        ledger.take([report(str(number), x=workload([(1, 1)], 1))])
    assert ledger.take([report("1", x=workload([(1, 1)], 1))]).workloads["x"] == WorkloadCounts()
    assert ledger.take([report("0", x=workload([(1, 1)], 1))]).workloads["x"].num_started == 1


@given(STEPS, STEPS)
def test_reports_travel_as_json(first, second):
    counted = report("a", "digest", heads={"x": "own"}, x=workload(first, 3, 1, 1), y=workload(second, 2))
    for sent in (counted, TargetReport("a", "m", step_costs=guessed_costs(True), time_s=7.5)):
        received = TargetReport.from_wire(json.loads(json.dumps(sent.to_wire())))
        assert dataclasses.replace(received, model="m") == sent
    for damaged in (None, {}, {**sent.to_wire(), "heads": 1}, {**sent.to_wire(), "step_costs": {"drafting_s": 1}}):
        with pytest.raises(ValueError, match="cannot be read|step costs"):
            TargetReport.from_wire(damaged)
