"""The head manager: chance rolls no good head back and promotes none, what is worse goes, an operator's word wins."""

import itertools
from typing import Any

import msgspec
import pytest

from cluster.counts import CounterDeltas, Counts, WorkloadCounts
from cluster.heads import (
    DesiredHeads,
    DrafterReport,
    HeadChange,
    HeadEvidence,
    HeadManager,
    HeadProposal,
    HeadRef,
    HeadRouting,
    HeadState,
    compare_heads,
)
from cluster.request import MAX_NUM_WORKLOADS
from tests.support.head_traffic import HeadTraffic, acceptance_length, requests_of

NUM_BEFORE = 1800
C = "candidate-c"


def make_manager(num_spare: int = 1) -> HeadManager:
    return HeadManager(num_spare, 0.1, itertools.count(1000.0).__next__)


A, B = HeadRef("a", "a"), HeadRef("b", "b")


def report(*heads: HeadRef, **fields: Any) -> DrafterReport:
    """Of a drafter whose first head is configured, unless `fields` say another."""
    return DrafterReport("r1", "", heads, **{"configured": heads[0], **fields})


def swapped(seed: int, loss: float, num_after: int = 3000) -> HeadTraffic:
    """A service whose operator put in the head b, which loses drafts, after some time with a."""
    traffic = HeadTraffic(make_manager(0), seed, {"a": 0.0, "b": loss})
    traffic.run(NUM_BEFORE)
    traffic.configured = HeadRef("b", "b")
    traffic.run(num_after)
    return traffic


def tried(seed: int, now: float, then: float, num_requests: int) -> tuple[HeadTraffic, HeadChange]:
    """A service and what became of a candidate within some requests."""
    traffic = HeadTraffic(make_manager(), seed, {"a": now, "c": then})
    traffic.run(600)
    traffic.manager.propose(C, HeadProposal("/heads/c"))
    while traffic.num_requests < num_requests and not traffic.manager.get_change(C).is_over:
        traffic.run(60)
    return traffic, traffic.manager.get_change(C)


def proposed() -> HeadManager:
    """Of drafters that have not loaded the candidate yet."""
    manager = make_manager()
    manager.observe_drafters([report(A)])
    manager.propose(C, HeadProposal("/heads/c"))
    return manager


# ---- the watch


def test_a_head_that_is_as_good_is_never_rolled_back() -> None:
    assert [swapped(seed, 0.0).head for seed in range(40)] == ["b"] * 40


def test_a_head_stays_while_the_mix_within_a_workload_changes() -> None:
    for seed in range(10):
        traffic = HeadTraffic(make_manager(0), seed, {"a": 0.0, "b": 0.0})
        for part in range(10):
            traffic.weights[part % 6] *= 2.0
            traffic.weights /= traffic.weights.sum()
            traffic.run(300, workload="default")
            if part == 4:
                traffic.configured = HeadRef("b", "b")
        assert traffic.head == "b"


@pytest.mark.parametrize(("loss", "most_requests"), [(0.5, 120), (0.2, 240), (0.1, 720)])
def test_a_worse_head_is_rolled_back_the_sooner_the_worse_it_is(loss: float, most_requests: int) -> None:
    for seed in range(10):
        traffic = swapped(seed, loss, most_requests)
        assert traffic.head == "a"
        (change,) = traffic.manager.document()
        assert (change["state"], change["head"], change["against"]) == ("rolled back", "b", "a")
        assert change["low"] < acceptance_length(loss) / acceptance_length(0) - 1 < change["high"] < -0.03
        assert not change["stands"]
        assert "rolled back" in traffic.manager.events[-1]


def test_the_same_user_config_does_not_bring_it_again_and_another_one_does() -> None:
    traffic = swapped(0, 0.5, 120)
    traffic.run(120)
    assert traffic.manager.desired == DesiredHeads("b", A)
    traffic.configured = HeadRef("a", "a")
    traffic.run(60)
    assert (traffic.head, traffic.manager.desired) == ("a", DesiredHeads())
    assert len(traffic.manager.document()) == 1, "it drafts already: nothing to watch"
    traffic.configured = HeadRef("b", "b")
    traffic.run(60)
    assert traffic.head == "b", "a new watch begins"
    traffic.run(120)
    assert traffic.head == "a"


def test_what_was_rolled_back_outlives_a_restart() -> None:
    traffic = swapped(0, 0.5, 120)
    again = restarted(traffic.manager, 0)
    assert again.desired == DesiredHeads("b", A)
    assert again.document() == traffic.manager.document()
    without_its_state = make_manager(0)
    without_its_state.observe_drafters([report(A, configured=B, desired=again.desired)])
    assert without_its_state.desired == again.desired, "as drafters were told by the router before"
    assert without_its_state.roll_back().name == "a"
    assert without_its_state.desired == DesiredHeads()


def restarted(manager: HeadManager, num_spare: int) -> HeadManager:
    """The one of the next router."""
    again = make_manager(num_spare)
    again.state = msgspec.json.decode(msgspec.json.encode(manager.state), type=HeadState)
    return again


def test_a_watch_and_a_trial_go_on_after_a_restart_with_their_evidence() -> None:
    traffic = swapped(0, 0.1, 60)
    for _ in range(15):
        assert traffic.manager.document()[0]["is_watched"] == (traffic.head == "b")
        traffic.manager = restarted(traffic.manager, 0)
        traffic.run(60)
    assert traffic.head == "a"
    traffic, _ = tried(0, 0.2, 0.0, 660)
    for _ in range(40):
        traffic.manager = restarted(traffic.manager, 1)
        traffic.run(60)
    assert traffic.manager.get_change(C).state == "promoted"


def test_a_head_is_not_rolled_back_for_what_another_target_costs() -> None:
    for is_told in (True, False):
        traffic = HeadTraffic(make_manager(0), 0, {"a": 0.0, "b": 0.3})
        traffic.weights_of_target = "old"
        traffic.run(NUM_BEFORE)
        traffic.configured = HeadRef("b", "b")
        traffic.report()
        if is_told:  # the target was updated as well, and a would lose the same
            traffic.manager = restarted(traffic.manager, 0)
            traffic.weights_of_target = "new"
        traffic.run(600)
        assert traffic.head == ("b" if is_told else "a")


def test_evidence_is_kept_of_the_workloads_of_late() -> None:
    """Clients name workloads as they like, and all of it is saved."""
    traffic = HeadTraffic(make_manager(0), 0, {"a": 0.0})
    for number in range(MAX_NUM_WORKLOADS + 20):
        traffic.run(60, workload=f"tag-{number}")
        traffic.run(60, workload="always")
    (kept,) = traffic.manager.state.evidence.values()
    assert len(kept) == MAX_NUM_WORKLOADS
    assert {"always", f"tag-{MAX_NUM_WORKLOADS + 19}"} < kept.keys()


def test_a_trial_begins_anew_with_another_target() -> None:
    traffic, trial = tried(0, 0.0, 0.0, 1200)
    num_before = trial.num_steps
    traffic.weights_of_target = "old"
    traffic.run(60)
    assert traffic.manager.get_change(C).num_steps > num_before > 0, "the first that is known is no other"
    traffic.weights_of_target = "new"
    traffic.run(120)
    assert (trial.state, trial.num_steps < num_before) == ("running", True)


# ---- trials


def test_a_candidate_that_is_not_better_is_never_promoted() -> None:
    found = [tried(seed, 0.0, 0.0, 6000)[1].state for seed in range(20)]
    assert set(found) <= {"running", "dropped"}


@pytest.mark.parametrize(("now", "most_requests"), [(0.2, 3000), (0.1, 4500), (0.05, 10_000)])
def test_a_better_candidate_is_promoted(now: float, most_requests: int) -> None:
    for seed in range(5):
        traffic, trial = tried(seed, now, 0.0, most_requests)
        assert trial.state == "promoted"
        assert traffic.head == "c"
        assert traffic.manager.desired == DesiredHeads("a", HeadRef(C, "c"), HeadRef(C, "c"))
        assert traffic.manager.live_head == HeadRef(C, "c")
        assert 0 < trial.low < acceptance_length(0) / acceptance_length(now) - 1 < trial.high
        traffic.run(1200)
        assert traffic.head == "c", "and stays under watch"
        assert traffic.manager.names_in_use == {"a", C}, "what drafts, and what a roll-back returns to"


def test_a_worse_candidate_is_dropped_and_its_requests_end_with_it() -> None:
    traffic, trial = tried(0, 0.0, 0.2, 6000)
    assert trial.state == "dropped"
    assert traffic.head == "a"
    assert traffic.manager.desired.candidate == HeadRef(C, "c")
    assert traffic.manager.routing == HeadRouting(trial="c")
    traffic.manager.propose("candidate-d", HeadProposal("/heads/d"))
    assert traffic.manager.desired.candidate == HeadRef("candidate-d")
    assert "candidate-d" in traffic.manager.names_in_use


def test_a_promoted_head_that_turns_out_worse_is_rolled_back() -> None:
    traffic, trial = tried(0, 0.1, 0.0, 4500)
    traffic.losses = {"a": 0.1, "c": 0.5}
    traffic.run(600)
    assert (traffic.head, trial.state, traffic.manager.desired.replacement) == ("a", "rolled back", None)


def test_a_second_roll_back_does_not_bring_a_head_that_was_rolled_back() -> None:
    traffic, _ = tried(0, 0.1, 0.0, 4500)
    traffic.losses |= {"b": 0.5}
    traffic.configured = HeadRef("b", "b")
    traffic.run(60)
    assert traffic.head == "b"
    for rolled_back, head in (("b", "c"), (C, "a")):
        assert traffic.manager.roll_back().name == rolled_back
        traffic.report()
        assert traffic.head == head


def test_a_trial_begins_when_all_drafters_have_the_candidate() -> None:
    manager = proposed()
    ready, slow = report(A, HeadRef(C, "c"), desired=manager.desired), report(A, desired=manager.desired)
    for reports in ([], [report(A)], [ready, slow]):
        manager.observe_drafters(reports)
        assert manager.get_change(C).state == "loading"
    manager.observe_drafters([ready, ready])
    assert manager.get_change(C).against == "a"
    assert manager.routing == HeadRouting("c", 0.1)


def test_why_there_can_be_no_trial() -> None:
    with pytest.raises(ValueError, match="write drafter.spare_heads: 1"):
        make_manager(0).propose(C, HeadProposal("/heads/c"))
    manager = make_manager()
    with pytest.raises(ValueError, match="no drafter has said yet"):
        manager.propose(C, HeadProposal("/heads/c"))
    with pytest.raises(ValueError, match="no change of a head to roll back"):
        manager.roll_back()
    with pytest.raises(ValueError, match="no head 'x' was proposed"):
        manager.get_change("x")
    manager.observe_drafters([report(A)])
    manager.propose(C, HeadProposal("/heads/c", parent="a", provenance={"num_requests": 5}))
    with pytest.raises(ValueError, match="a trial is under way, of candidate-c"):
        manager.propose(C, HeadProposal("/heads/c"))
    assert manager.routing == HeadRouting(), "no request before drafters have it"
    given = {"desired": manager.desired}
    manager.observe_drafters([report(A, **given), report(A, **given, problems={C: "3 depths"})])
    trial = manager.get_change(C)
    assert (trial.state, trial.reason, trial.provenance) == ("refused", "3 depths", {"num_requests": 5})
    assert manager.desired == DesiredHeads()
    manager.propose(C, HeadProposal("/heads/c"))
    manager.observe_drafters([report(A, HeadRef(C, "a"), **given)])
    assert manager.get_change(C).reason == "it is the head that drafts already"


def test_a_user_config_ends_the_trial_against_the_head_before() -> None:
    traffic = HeadTraffic(make_manager(), 0, {"a": 0.0, "b": 0.0, "c": 0.0})
    traffic.run(600)
    traffic.manager.propose(C, HeadProposal("/heads/c"))
    traffic.run(60)
    assert traffic.manager.routing.trial == "c"
    traffic.configured = HeadRef("b", "b")
    traffic.report()
    assert traffic.manager.get_change(C).state == "dropped"
    assert traffic.manager.roll_back().name == "b"
    assert traffic.head == "a"


# ---- the evidence


def test_what_was_under_way_when_heads_changed_does_not_count() -> None:
    manager = make_manager(0)
    manager.observe_drafters([report(A)])
    counts = Counts(*requests_of("qa")[:5].sum(0).reshape(3, -1).tolist())
    ended = {"code": WorkloadCounts(5, 5, counts=counts)}
    for _ in range(20):
        manager.record_counts(CounterDeltas(ended, {"a": {"code": counts}}), {"code": 12})
    manager.observe_drafters([report(B)])
    for num_rounds in range(1, 6):  # of 5 requests
        manager.record_counts(CounterDeltas(ended, {"b": {"code": counts}}), {"code": 12})
        assert (manager.document()[0]["gain"] is not None) == (num_rounds >= 5), "3 rounds end what ran, 2 are compared"


def test_the_interval_narrows_with_requests_and_not_with_their_length() -> None:
    def half(num_requests: int, num_steps: int) -> float:
        evidence = {"x": HeadEvidence(Counts([num_steps], [num_steps], [num_steps // 2]), num_requests)}
        found = compare_heads(evidence, evidence, 0.01)
        assert found.gain == pytest.approx(0, abs=1e-9)
        return found.high

    assert half(400, 16_000) < half(100, 4000) / 1.8
    assert half(100, 40_000) > 0.9 * half(100, 4000)
    assert half(10, 400) > 3 * half(100, 4000)
    few = HeadEvidence(Counts([99], [99], [9]), 99)
    assert compare_heads({"x": few}, {"y": few}, 0.01) is None


def test_heads_are_compared_at_the_k_that_both_were_verified_at() -> None:
    """The same acceptance of each draft; one head was verified at K = 3 under load, then little at K = 1."""
    deep = HeadEvidence(Counts([8000, 8000, 8000], [8000, 6000, 4500], [6000, 4500, 3375]), 800)
    short = HeadEvidence(Counts([8000, 800, 800], [8000, 600, 450], [6000, 450, 337]), 800)
    found = compare_heads({"x": deep}, {"x": short}, 0.01)
    assert found.gain == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("is_late", [False, True], ids=["steps with the start", "steps in the next report"])
def test_a_trial_of_long_answers_ends(is_late: bool) -> None:
    """One workload whose requests take 250 steps: evidence is not halved while it decides."""
    manager = proposed()
    manager.observe_drafters([report(A, HeadRef(C, "c"), desired=manager.desired)])
    counts, starts, steps = Counts([2500], [2500], [1500]), CounterDeltas(), CounterDeltas()
    for name, head in (("x", "a"), ("x/trial", "c")):
        starts.workloads[name] = WorkloadCounts(10, 10) if is_late else WorkloadCounts()
        steps.workloads[name] = WorkloadCounts(counts=counts) if is_late else WorkloadCounts(10, 10, counts=counts)
        steps.by_head[head] = {name: counts}
    for _ in range(501):
        manager.record_counts(starts, {"x": 20})
        manager.record_counts(steps, {"x": 0})
    assert manager.get_change(C).state == "dropped"
