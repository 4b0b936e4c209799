"""Which head drafts: chance takes no good head back and promotes none, what is worse goes, an operator's word wins."""

import itertools
import json
from typing import Any

import pytest

from cluster.counts import CounterDeltas, Counts, WorkloadCounts
from cluster.heads import (
    DraftersView,
    Duel,
    HeadKeeper,
    HeadOrders,
    HeadProposal,
    HeadRef,
    HeadRouting,
    HeadTrial,
    Sample,
    gain_of,
)
from tests.support.head_traffic import HeadTraffic, acceptance_length, requests_of

NUM_BEFORE = 1800
C = "candidate-c"


def make_keeper(num_spare: int = 1, **index_of: int) -> HeadKeeper:
    return HeadKeeper(index_of, num_spare, 0.1, itertools.count(1000.0).__next__)


def swapped(seed: int, loss: float, num_after: int = 3000) -> HeadTraffic:
    """A service whose operator put in the head b, which loses drafts, after some time with a."""
    traffic = HeadTraffic(make_keeper(0), seed, {"a": 0.0, "b": loss})
    traffic.run(NUM_BEFORE)
    traffic.configured = HeadRef("b", "b")
    traffic.run(num_after)
    return traffic


def tried(seed: int, now: float, then: float, num_requests: int, **proposal: Any) -> tuple[HeadTraffic, HeadTrial]:
    """A service and what became of a candidate within some requests."""
    traffic = HeadTraffic(make_keeper(), seed, {"a": now, "c": then})
    traffic.run(600)
    traffic.keeper.propose(C, HeadProposal("/heads/c", **proposal))
    while traffic.num_requests < num_requests and not traffic.keeper.trial(C).is_over:
        traffic.run(60)
    return traffic, traffic.keeper.trial(C)


# ---- the watch


def test_a_head_that_is_as_good_is_never_taken_back() -> None:
    assert [swapped(seed, 0.0).head for seed in range(40)] == ["b"] * 40


def test_a_head_stays_while_the_mix_within_a_workload_changes() -> None:
    for seed in range(10):
        traffic = HeadTraffic(make_keeper(0), seed, {"a": 0.0, "b": 0.0})
        for part in range(10):
            traffic.weights[part % 6] *= 2.0
            traffic.weights /= traffic.weights.sum()
            traffic.run(300, workload="default")
            if part == 4:
                traffic.configured = HeadRef("b", "b")
        assert traffic.head == "b"


@pytest.mark.parametrize(("loss", "most_requests"), [(0.5, 120), (0.2, 240), (0.1, 720)])
def test_a_worse_head_is_taken_back_the_sooner_the_worse_it_is(loss: float, most_requests: int) -> None:
    for seed in range(10):
        traffic = swapped(seed, loss, most_requests)
        assert traffic.head == "a"
        (change,) = traffic.keeper.document()
        assert (change["state"], change["head"], change["against"]) == ("taken back", "b", "a")
        assert change["low"] < acceptance_length(loss) / acceptance_length(0) - 1 < change["high"] < -0.03
        assert not change["stands"]
        assert "taken back" in traffic.keeper.events[-1]


def test_a_slightly_worse_head_is_taken_back_after_some_thousand_requests() -> None:
    assert [swapped(seed, 0.05, 4800).head for seed in range(10)].count("a") >= 7


def test_the_same_user_config_does_not_bring_it_again_and_another_one_does() -> None:
    traffic = swapped(0, 0.5, 120)
    traffic.run(120)
    assert traffic.keeper.orders == HeadOrders({"b": HeadRef("a", "a")})
    traffic.configured = HeadRef("a", "a")
    traffic.run(60)
    assert (traffic.head, traffic.keeper.orders) == ("a", HeadOrders())
    assert len(traffic.keeper.document()) == 1, "it drafts already: nothing to watch"
    traffic.configured = HeadRef("b", "b")
    traffic.run(60)
    assert traffic.head == "b", "a new watch begins"
    traffic.run(120)
    assert traffic.head == "a"


def test_without_evidence_on_the_head_before_nothing_is_decided() -> None:
    traffic = HeadTraffic(make_keeper(0), 0, {"a": 0.0, "b": 0.5})
    traffic.look()
    traffic.configured = HeadRef("b", "b")
    traffic.run(1200)
    assert traffic.head == "b"
    assert traffic.keeper.document()[0]["gain"] is None


def test_what_was_taken_back_outlives_a_restart() -> None:
    traffic = swapped(0, 0.5, 120)
    again = make_keeper(0)
    again.restore(json.loads(json.dumps(traffic.keeper.snapshot())))
    assert again.orders == HeadOrders({"b": HeadRef("a", "a")})
    assert again.document() == traffic.keeper.document()
    told = make_keeper(0)
    told.see(DraftersView((HeadRef("b", "b"),), (HeadRef("a", "a"),), again.orders.instead), {})
    assert told.orders == again.orders, "without its file, what drafters were told by the router before"


def test_a_watch_goes_on_after_a_restart() -> None:
    traffic = swapped(0, 0.1, 60)
    assert traffic.keeper.document()[0]["is_watched"]
    snapshot = json.loads(json.dumps(traffic.keeper.snapshot()))
    traffic.keeper = make_keeper(0)
    traffic.keeper.restore(snapshot)
    traffic.run(900)
    assert traffic.head == "a"


def test_a_head_is_not_taken_back_for_what_another_target_costs() -> None:
    for is_told in (True, False):
        traffic = HeadTraffic(make_keeper(0), 0, {"a": 0.0, "b": 0.3})
        traffic.keeper.follow("old weights", {})
        traffic.run(NUM_BEFORE)
        traffic.configured = HeadRef("b", "b")
        traffic.look()
        if is_told:  # the target was updated as well, and a would lose the same
            other = make_keeper(0)
            other.restore(json.loads(json.dumps(traffic.keeper.snapshot())))
            traffic.keeper = other
            traffic.keeper.follow("new weights", {})
        traffic.run(600)
        assert traffic.head == ("b" if is_told else "a")
    traffic, trial = tried(0, 0.0, 0.0, 1200)
    traffic.keeper.follow("old weights", {})
    traffic.keeper.follow("new weights", {})
    assert trial.gain is not None
    traffic.run(120)
    newer = traffic.keeper.trial(C)
    assert (newer.state, newer.num_steps < trial.num_steps) == ("running", True), "the trial began anew"


@pytest.mark.parametrize("damage", [{"changes": None}, {"instead": {"b": {"nam": "a"}}}, {"seen": {"a": {"x": [1]}}}])
def test_a_damaged_snapshot_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    snapshot, keeper = swapped(0, 0.5, 120).keeper.snapshot() | damage, make_keeper(0)
    with pytest.raises(ValueError, match="the snapshot of heads cannot be used"):
        keeper.restore(snapshot)
    assert not keeper.has_begun


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
        assert trial.low is not None
        assert trial.high is not None
        assert 0 < trial.low < acceptance_length(0) / acceptance_length(now) - 1 < trial.high
        traffic.run(1200)
        assert traffic.head == "c", "and stays under watch"
        assert traffic.keeper.names_in_use == {"a", C}


def test_a_worse_candidate_is_dropped_and_its_requests_end_with_it() -> None:
    traffic, trial = tried(0, 0.0, 0.2, 6000)
    assert trial.state == "dropped"
    assert traffic.head == "a"
    assert traffic.keeper.orders.extra == (HeadRef(C, "c"),)
    assert traffic.keeper.routing == HeadRouting(trial="c")
    traffic.keeper.propose("candidate-d", HeadProposal("/heads/d"))
    assert traffic.keeper.orders.extra == (HeadRef("candidate-d"),)


def test_a_promoted_head_that_turns_out_worse_is_taken_back() -> None:
    traffic, _ = tried(0, 0.1, 0.0, 4500)
    traffic._losses = {"a": 0.1, "c": 0.5}
    traffic.run(600)
    assert traffic.head == "a"
    assert traffic.keeper.trial(C).state == "taken back"
    assert traffic.keeper.orders.instead == {}


def test_a_workload_is_given_a_head_of_its_own() -> None:
    traffic, trial = tried(0, 0.2, 0.0, 12_000, workloads=("qa",))
    assert trial.state == "promoted"
    assert traffic.head == "a", "the others keep theirs"
    assert traffic.keeper.routing.own == {"qa": "c"}
    assert traffic.keeper.orders == HeadOrders({}, (HeadRef(C, "c"),))
    with pytest.raises(ValueError, match="all 1 of drafter.spare_heads draft for workloads"):
        traffic.keeper.propose("candidate-d", HeadProposal("/heads/d"))
    assert traffic.keeper.back().state == "taken back"
    assert traffic.keeper.routing == HeadRouting()


def news_of(losses: dict[tuple[str, str], float]) -> CounterDeltas:
    """A few requests by head and workload."""
    news = CounterDeltas()
    for (head, name), loss in losses.items():
        counts = Counts(*requests_of("qa", loss)[:5].sum(0).reshape(3, -1).tolist())
        news.workloads[name] = WorkloadCounts(5, 5, counts=counts)
        news.by_head.setdefault(head, {})[name] = counts
    return news


def test_why_there_can_be_no_trial() -> None:
    with pytest.raises(ValueError, match="drafter.spare_heads is 0"):
        make_keeper(0).propose(C, HeadProposal("/heads/c"))
    keeper = make_keeper()
    with pytest.raises(ValueError, match="no drafter has said yet"):
        keeper.propose(C, HeadProposal("/heads/c"))
    with pytest.raises(ValueError, match="no change of a head to take back"):
        keeper.back()
    with pytest.raises(ValueError, match="no head 'x' was proposed"):
        keeper.trial("x")
    configured = (HeadRef("a", "a"),)
    keeper.see(DraftersView(configured, configured), {})
    keeper.propose(C, HeadProposal("/heads/c", parent="a", provenance={"num_requests": 5}))
    with pytest.raises(ValueError, match="a trial is under way, of candidate-c"):
        keeper.propose(C, HeadProposal("/heads/c"))
    assert keeper.routing == HeadRouting(), "no request before drafters have it"
    keeper.see(DraftersView(configured, configured, problems={C: "3 depths"}), {})
    trial = keeper.trial(C)
    assert (trial.state, trial.reason, trial.provenance) == ("refused", "3 depths", {"num_requests": 5})
    assert keeper.orders == HeadOrders()
    keeper.propose(C, HeadProposal("/heads/c"))
    keeper.see(DraftersView(configured, (*configured, HeadRef(C, "a"))), {})
    assert keeper.trial(C).reason == "it is the head that drafts already"


def test_a_user_config_ends_the_trial_against_the_head_before() -> None:
    traffic = HeadTraffic(make_keeper(), 0, {"a": 0.0, "b": 0.0, "c": 0.0})
    traffic.run(600)
    traffic.keeper.propose(C, HeadProposal("/heads/c"))
    traffic.run(60)
    assert traffic.keeper.routing.trial == "c"
    traffic.configured = HeadRef("b", "b")
    traffic.look()
    assert traffic.keeper.trial(C).state == "dropped"
    assert traffic.keeper.back().name == "b"
    assert traffic.head == "a"


# ---- the evidence


def test_what_was_under_way_when_heads_changed_does_not_count() -> None:
    duel = Duel("b", "a", {"code": Sample(Counts([900], [900], [600]), 30)}, {"code": 7})
    for _ in range(2):
        duel.take(news_of({("b", "code"): 0.5}))
        assert duel.gain(0.001) is None
    for _ in range(3):
        duel.take(news_of({("b", "code"): 0.5}))
    gain = duel.gain(0.001)
    assert gain is not None
    assert gain.num_requests == 15


def test_the_interval_narrows_with_requests_and_not_with_their_length() -> None:
    def half(num_requests: int, num_steps: int) -> float:
        counts = Counts([num_steps], [num_steps], [num_steps // 2])
        gain = gain_of({"x": Sample(counts, num_requests)}, {"x": Sample(counts, num_requests)}, 0.01)
        assert gain is not None
        assert gain.mean == pytest.approx(0, abs=1e-9)
        return gain.high

    assert half(400, 16_000) < half(100, 4000) / 1.8
    assert half(100, 40_000) > 0.9 * half(100, 4000)
    assert gain_of({"x": Sample(Counts([99], [99], [9]), 99)}, {"y": Sample(Counts([99], [99], [9]), 99)}, 0.01) is None
