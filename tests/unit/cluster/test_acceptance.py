"""Counts of drafts, and posteriors of acceptance on simulated steps whose conditional acceptance rates are known."""

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import acceptance
from cluster.acceptance import MAX_HEADS, PUBLISHED_RATES, AcceptancePosteriors, AcceptanceSnapshot
from cluster.counts import CounterDeltas, Counts, DeltaTracker, TargetReport, WorkloadCounts
from cluster.request import MAX_NUM_WORKLOADS
from tests.support.counted import counts_of

K_MAX = 7
CODE = (0.9, 0.88, 0.86, 0.85, 0.85, 0.84, 0.84)
CHAT = (0.6, 0.55, 0.5, 0.5, 0.45, 0.45, 0.4)


def accepted_of(conditionals: Sequence[float], num_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Drafts that each step would accept at K_max."""
    return np.cumprod(rng.random((num_steps, len(conditionals))) < np.asarray(conditionals), axis=1).sum(axis=1)


def counts_at(accepted: np.ndarray, k: int | np.ndarray = K_MAX) -> Counts:
    """Counts of steps that verified `k` drafts, of which at most `accepted` are right."""
    positions, verified = range(1, K_MAX + 1), np.broadcast_to(k, accepted.shape)
    accepted = np.minimum(accepted, verified)
    return Counts(
        [int((verified >= i).sum()) for i in positions],
        [int(((verified >= i) & (accepted >= i - 1)).sum()) for i in positions],
        [int((accepted >= i).sum()) for i in positions],
    )


def steps(conditionals: Sequence[float], num_steps: int, seed: int, k: int = K_MAX) -> Counts:
    return counts_at(accepted_of(conditionals, num_steps, np.random.default_rng(seed)), k)


def add(posteriors: AcceptancePosteriors, **counts: Counts) -> None:
    posteriors.update(CounterDeltas(by_head={"": counts}))


def test_posterior_worked_by_hand() -> None:
    """Position 1 only: 300 of 400 and 0 of 100 accepted; every prior is worth 40 trials."""
    posteriors, published = AcceptancePosteriors(1, half_life_steps=1e12), PUBLISHED_RATES[0]
    assert posteriors.rates("new").mean == pytest.approx([published])
    add(posteriors, code=Counts([400], [400], [300]))
    alone = (40 * published + 300) / (40 + 400)
    assert posteriors.rates("code").mean == pytest.approx([alone], rel=1e-6)
    assert posteriors.rates("new").mean == pytest.approx([alone], rel=1e-6)
    add(posteriors, chat=Counts([100], [100], [0]))
    parent_of_code = 40 * published / (40 + 100)
    assert posteriors.rates("chat").mean == pytest.approx([40 * alone / (40 + 100)], rel=1e-6)
    assert posteriors.rates("code").mean == pytest.approx([(40 * parent_of_code + 300) / (40 + 400)], rel=1e-6)
    assert posteriors.num_steps == pytest.approx(500)


@pytest.mark.parametrize("num_steps", [80, 1600])
def test_intervals_cover_at_their_rate_for_independent_steps(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truth is drawn as the prior says, so that 90 % is what an interval promises whatever the number of steps."""
    monkeypatch.setattr(acceptance, "DESIGN_EFFECT", 1.0)
    prior = np.array(PUBLISHED_RATES) / np.array([1.0, *PUBLISHED_RATES[:-1]])
    rng, num_inside, num_runs = np.random.default_rng(7), np.zeros(K_MAX), 400
    for _ in range(num_runs):
        truth = rng.beta(40 * prior, 40 * (1 - prior))
        posteriors = AcceptancePosteriors(K_MAX, half_life_steps=1e9)
        add(posteriors, w=counts_at(accepted_of(truth, num_steps, rng)))
        found, rates = posteriors.rates("w"), np.cumprod(truth)
        num_inside += (np.array(found.low) <= rates) & (rates <= np.array(found.high))
    assert num_inside / num_runs == pytest.approx([0.9] * K_MAX, abs=0.05)


def test_rates_never_grow_and_intervals_stay_within_0_and_1() -> None:
    for conditionals in ((0.0,) * K_MAX, (1.0,) * K_MAX, CHAT):
        posteriors = AcceptancePosteriors(K_MAX)
        add(posteriors, w=steps(conditionals, 50_000, 0))
        found = posteriors.rates("w")
        assert list(found.mean) == sorted(found.mean, reverse=True)
        ends = zip(found.low, found.mean, found.high, strict=True)
        assert all(0 <= low <= mean <= high <= 1 for low, mean, high in ends)


def test_mixing_k_does_not_bias() -> None:
    """Steps at K = 1 or 2 say nothing of position 3. Ratios that count them as if they did come out too low."""
    rng = np.random.default_rng(1)
    posteriors = AcceptancePosteriors(K_MAX, half_life_steps=1e9)
    add(posteriors, w=counts_at(accepted_of(CODE, 60_000, rng), rng.choice([1, 2, 7], size=60_000)))
    assert posteriors.rates("w").mean == pytest.approx(np.cumprod(CODE), abs=0.015)


def test_forgetting_follows_a_change() -> None:
    posteriors = AcceptancePosteriors(K_MAX, half_life_steps=1000)
    add(posteriors, w=steps(CODE, 20_000, 0))
    distances = []
    for seed in range(1, 5):
        add(posteriors, w=steps(CHAT, 1000, seed))
        distances.append((posteriors.rates("w").mean[0] - CHAT[0]) / (CODE[0] - CHAT[0]))
    assert distances == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16], abs=0.06)
    assert posteriors.rates("w").num_steps == pytest.approx(1000 / np.log(2), rel=0.01)


def test_each_head_has_evidence_of_its_own_and_a_change_back_voids_nothing() -> None:
    posteriors, plain = AcceptancePosteriors(K_MAX), AcceptancePosteriors(K_MAX)
    posteriors.update(CounterDeltas(by_head={"old": {"code": steps(CODE, 5000, 0)}}, head="old"))
    old = posteriors.rates("code")
    posteriors.update(CounterDeltas(by_head={"new": {"code": steps(CHAT, 500, 2)}}, head="new"))
    add(plain, code=steps(CHAT, 500, 2))
    assert posteriors.workloads() == ("code",)
    assert (new := posteriors.rates("code")) == plain.rates("code")
    posteriors.update(CounterDeltas(head="old"))
    assert posteriors.rates("code") == old
    posteriors.update(CounterDeltas(head="new"))
    posteriors.update(CounterDeltas())
    assert posteriors.rates("code") == new, "also where no replica names its head"
    trial = CounterDeltas(by_head={"old": {"code/trial": steps(CODE, 50, 3)}}, head="new", trial_head="old")
    posteriors.update(trial)
    assert posteriors.rates("code") == new
    assert posteriors.workloads() == ("code/trial", "code")
    for index in range(10):
        steps_of_one = {f"h{index}": {"w": steps(CODE, 10, index)}}
        posteriors.update(CounterDeltas(by_head=steps_of_one, head=f"h{index}"))
    assert len(posteriors.snapshot().evidence) == MAX_HEADS


def test_many_workloads_keep_memory_bounded_and_the_busy_ones_stay() -> None:
    posteriors, few, many = AcceptancePosteriors(K_MAX), steps(CHAT, 20, 0), steps(CODE, 500, 1)
    busy = {f"busy-{index}": many for index in range(4)}
    add(posteriors, **{f"sys-{index}": few for index in range(1000)}, **busy)
    assert len(posteriors.workloads()) == MAX_NUM_WORKLOADS
    for index in range(200):
        add(posteriors, **{f"one-{index}": few})
        posteriors.rates(f"unknown-{index}")
        add(posteriors, **busy)
    assert len(posteriors.workloads()) == MAX_NUM_WORKLOADS
    assert set(busy) <= set(posteriors.workloads())
    assert posteriors.rates("busy-0").mean == pytest.approx(np.cumprod(CODE), abs=0.05)


def test_reports_deeper_than_k_max_count_to_k_max() -> None:
    """A replica of a head with more drafts, while replicas are replaced."""
    deep, cut = AcceptancePosteriors(3), AcceptancePosteriors(3)
    add(deep, w=steps(CODE, 100, 0))
    add(cut, w=steps(CODE, 100, 0, k=3))
    assert deep.rates("w") == cut.rates("w")
    shallow = AcceptancePosteriors(K_MAX)
    add(shallow, w=Counts([5, 5], [5, 4], [4, 3]))
    assert len(shallow.rates("w").mean) == K_MAX


def test_a_snapshot_is_everything_for_the_same_k_max() -> None:
    posteriors, restored = AcceptancePosteriors(K_MAX), AcceptancePosteriors(K_MAX)
    for index, name in enumerate(("a", "b", "c")):
        by_head = {"one": {name: steps(CODE, 900, index)}, "two": {name: steps(CHAT, 50, index)}}
        posteriors.update(CounterDeltas(by_head=by_head, head="one"))
    document = json.loads(msgspec.json.encode(posteriors.snapshot()))
    restored.restore(msgspec.convert(document, AcceptanceSnapshot))
    assert restored.snapshot() == posteriors.snapshot()
    assert all(restored.rates(name) == posteriors.rates(name) for name in ("a", "b", "c", "new"))
    with pytest.raises(ValueError, match="K_max 3, but the one served drafts 7"):
        restored.restore(msgspec.convert({**document, "max_draft_tokens": 3}, AcceptanceSnapshot))


# ---- counts of drafts and requests, and what is new in each report


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
