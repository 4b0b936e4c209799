"""K over time: cold start, steadiness, probes, clocks that jump, and a head that changes."""

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from cluster.acceptance import AcceptanceBook, Counts, Survival
from cluster.depth import (
    FREE_PROBE_FACTOR,
    MAX_PROBE_LOSS,
    Book,
    Demand,
    DepthChooser,
    Load,
    Objective,
    SurvivalError,
    best_depths,
)
from cluster.step_time import StepShape, StepTimes, default_step_times
from tests.step_tables import MS, Table

GOOD = (0.95, 0.9, 0.85, 0.8, 0.75)
BAD = (0.1, 0.0, 0.0, 0.0, 0.0)
STEEP = Table(5, base_s=10 * MS, per_token_s=1 * MS)


@dataclass
class KnownBook:
    """Posteriors that a test sets: a mean, and draws around it."""

    means: dict[str, tuple[float, ...]]
    draws: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def workloads(self) -> tuple[str, ...]:
        return tuple(self.means)

    def survival(self, workload: str) -> Survival:
        mean = self.means[workload]
        return Survival(mean, mean, mean, 1000.0)

    def overall(self) -> Survival:
        return self.survival(next(iter(self.means)))

    def sample(self, workload: str, random: random.Random) -> tuple[float, ...]:
        return self.draws.get(workload, self.means[workload])


def counts(of: tuple[float, ...], num_steps: int) -> Counts:
    accepted = tuple(round(num_steps * value) for value in of)
    return Counts((num_steps,) * len(of), (num_steps, *accepted[:-1]), accepted)


def one(book: Book, num: float = 4.0) -> tuple[str, Book, Load]:
    return "a", book, Load({"a": num})


def steady(times=STEEP, max_depth: int = 5, **settings) -> DepthChooser:
    return DepthChooser(times, max_depth, **{"probe_share": 0.0, **settings})


def test_cold_start_rests_on_the_low_end_of_the_prior():
    book, times, rng = AcceptanceBook(7), default_step_times(7), random.Random(0)
    by_load = {}
    for num in (1, 4, 8, 64):
        choice = steady(times, 7).decide("new", book, Load({"new": num}), 0.0, rng)
        assert choice.source == "default"
        assert choice.reason.startswith("nothing measured yet, so K rests on the low end of the prior")
        assert choice.survival == book.survival("new").low
        by_load[num] = choice.k
    assert by_load == {1: 6, 4: 4, 8: 3, 64: 2}
    assert steady(times, 7).decide("new", book, Load(), 0.0, rng).k == 6  # no load known: this request alone
    # At K = 0 nothing would ever be measured.
    costly = steady(Table(7, base_s=0.0, per_token_s=1 * MS), 7)
    assert [costly.decide("new", book, Load(), now_s, rng).k for now_s in (0.0, 60.0)] == [1, 1]


def test_learned_from_its_own_steps_or_from_all_traffic():
    book = AcceptanceBook(5)
    book.add("a", counts(GOOD, 4000))
    chooser = steady()
    choice = chooser.decide(*one(book), 0.0, random.Random(0))
    plan = best_depths([Demand("a", 4, book.survival("a").mean)], STEEP)
    assert (choice.k, choice.source) == (plan.depths["a"], "learned")
    assert choice.expected_tpot_s == pytest.approx(plan.tpot_s["a"])
    assert choice.survival == book.survival("a").mean
    assert plan.reason in choice.reason
    fresh = chooser.decide("b", book, Load({"a": 4.0, "b": 1.0}), 0.1, random.Random(0))
    assert (fresh.source, fresh.survival) == ("learned", book.survival("b").mean)
    assert chooser.depths == {"a": choice.k, "b": fresh.k}


def test_head_swap_starts_cold_again():
    book, chooser = AcceptanceBook(5), steady(Table(5, 1 * MS, 1 * MS))
    book.absorb("replica", "old", {"a": counts(GOOD, 4000)})
    assert chooser.decide(*one(book), 0.0, random.Random(0)).source == "learned"
    book.absorb("replica", "new", {})
    assert chooser.decide(*one(book), 1.0, random.Random(0)).source == "default"


def test_change_waits_for_dwell_and_gain():
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    first = chooser.decide(*one(book), 0.0, rng).k
    assert first == 5
    book.means["a"] = BAD
    held = chooser.decide(*one(book), 1.4, rng)
    assert (held.k, held.survival) == (5, BAD)
    assert held.reason.startswith("kept, for K changed 1.4 s ago at 4 requests: ")
    assert chooser.decide(*one(book), 2.0, rng).k == 0
    book.means["a"] = GOOD
    assert chooser.decide(*one(book), 3.4, rng).k == 0
    assert chooser.decide(*one(book), 4.0, rng).k == 5


def test_small_gain_needs_patience_and_tiny_gain_is_left():
    def rate(k: int, survival: tuple[float, ...]) -> float:
        return (1 + sum(survival[:k])) / STEEP.seconds(StepShape.uniform(4, k))

    before, small, tiny = (0.8, 0.3, 0.0, 0.0, 0.0), (0.8, 0.45, 0.0, 0.0, 0.0), (0.8, 0.404, 0.0, 0.0, 0.0)
    assert 1.01 < rate(2, small) / rate(1, small) < 1.03
    assert 1.0 < rate(2, tiny) / rate(1, tiny) < 1.01
    for after, k_at_10_s in ((small, 2), (tiny, 1)):
        book, chooser, rng = KnownBook({"a": before}), steady(), random.Random(0)
        assert chooser.decide(*one(book), 0.0, rng).k == 1
        book.means["a"] = after
        kept = chooser.decide(*one(book), 5.9, rng)
        assert kept.k == 1
        assert kept.reason.startswith("kept, for a change would gain only ")
        assert chooser.decide(*one(book), 10.0, rng).k == k_at_10_s


def test_gain_that_draws_contradict_is_left():
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    chooser.decide(*one(book), 0.0, rng)
    book.means["a"], book.draws["a"] = BAD, GOOD
    choice = chooser.decide(*one(book), 100.0, rng)
    assert choice.k == 5
    assert choice.reason.startswith("kept, for a gain of ")
    assert "is not certain" in choice.reason


def test_noise_around_a_tie_changes_little():
    """An hour in which K = 1 and K = 2 are worth the same, and the posterior moves by chance."""
    tie, rng = np.array([0.8, 0.5, 0.01, 0.01, 0.01]), np.random.default_rng(0)
    book, chooser, draws = AcceptanceBook(5), steady(), random.Random(0)
    chosen, naive = [], []
    for second in range(0, 3600, 3):
        reached, accepted, left = [], [], 200
        for conditional in tie:
            reached.append(left)
            left = int(rng.binomial(left, conditional))
            accepted.append(left)
        book.add("a", Counts((200,) * 5, tuple(reached), tuple(accepted)))
        chosen.append(chooser.decide(*one(book), float(second), draws).k)
        naive.append(best_depths([Demand("a", 4, book.survival("a").mean)], STEEP).depths["a"])

    def num_changes(depths: list[int]) -> int:
        return sum(k != other for k, other in pairwise(depths))

    assert num_changes(naive) > 50
    assert num_changes(chosen) <= 3
    assert set(chosen[10:]) <= {1, 2}


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_clock_that_jumps(jump_s):
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    assert chooser.decide(*one(book), 50.0, rng).k == 5
    assert chooser.decide(*one(book), 50.0 + jump_s, rng).k == 5
    book.means["a"] = BAD
    found = [chooser.decide(*one(book), 50.0 + jump_s + later_s, rng).k for later_s in (0.6, 2.1, 2.7)]
    assert found == ([5, 0, 0] if jump_s < 0 else [0, 0, 0])
    for now_s in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"now_s is {now_s}"):
            chooser.decide(*one(book), now_s, rng)


def test_silence_changes_nothing():
    """An engine that reports nothing leaves the posterior, and so K, as it is."""
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    assert {chooser.decide(*one(book), float(second), rng).k for second in range(0, 600, 7)} == {5}


def probe_share(times: Table | StepTimes, survival: tuple[float, ...], num: float, **settings) -> tuple[int, float]:
    """K in force and the share of 20,000 requests that probed."""
    chooser, rng = DepthChooser(times, 5, **settings), random.Random(1)
    choices = [chooser.decide(*one(KnownBook({"a": survival}), num), 0.0, rng) for _ in range(20_000)]
    probes = [choice for choice in choices if choice.source == "probe"]
    assert all(choice.k == 5 for choice in probes)
    assert all(choice.reason.startswith("probe: ") for choice in probes)
    (k,) = {choice.k for choice in choices if choice.source != "probe"}
    assert chooser.depths == {"a": k}
    return k, len(probes) / len(choices)


def test_probes_look_deeper_as_often_as_stated():
    cheap = Table(5, base_s=100 * MS, per_token_s=1 * MS)
    assert probe_share(cheap, (0.5, 0.0, 0.0, 0.0, 0.0), 4) == (1, pytest.approx(0.01, abs=0.003))
    assert probe_share(cheap, (0.5, 0.0, 0.0, 0.0, 0.0), 4, probe_share=0.02) == (1, pytest.approx(0.02, abs=0.004))
    assert probe_share(cheap, (0.5, 0.0, 0.0, 0.0, 0.0), 4, probe_share=0.0) == (1, 0.0)
    assert probe_share(cheap, GOOD, 4) == (5, 0.0)  # nothing lies deeper
    free = Table(5, 10 * MS, 1 * MS, sizes=[8, 64])
    assert probe_share(free, (0.5, 0.0, 0.0, 0.0, 0.0), 1) == (1, pytest.approx(FREE_PROBE_FACTOR * 0.01, abs=0.006))


def test_probes_become_rare_where_they_cost_much():
    """One probe takes the whole batch off its full graph."""
    graphs = Table(5, 10 * MS, 1 * MS, full_graph_depths=frozenset({0, 5}), off_graph=1.4)
    k, share = probe_share(graphs, BAD, 32)
    cost = graphs.seconds(StepShape(32, 37, None)) / graphs.seconds(StepShape.uniform(32, 0)) - 1
    assert k == 0
    assert 0 < share == pytest.approx(MAX_PROBE_LOSS / (32 * cost), abs=0.0004)


def test_limit_that_is_missed_changes_k_without_gain():
    """8 requests of a workload that accepts much slow down the one that has a limit."""
    objectives = {"chat": Objective(max_tpot_s=30 * MS)}
    book, chooser, rng = KnownBook({"code": GOOD, "chat": BAD}), steady(objectives=objectives), random.Random(0)
    quiet = chooser.decide("code", book, Load({"code": 1.0, "chat": 1.0}), 0.0, rng)
    assert quiet.k == 5
    assert "within the TPOT limits" in quiet.reason
    busy = Load({"code": 8.0, "chat": 1.0})
    assert chooser.decide("code", book, busy, 1.0, rng).k == 5
    choice = chooser.decide("code", book, busy, 3.0, rng)
    assert choice.k < 5
    assert chooser.decide("chat", book, busy, 3.0, rng).expected_tpot_s <= 30 * MS * 1.01


def test_state_is_bounded_by_load_and_book():
    book, chooser, rng = AcceptanceBook(5, max_workloads=4), steady(), random.Random(0)
    for index in range(300):
        book.add(f"w{index}", counts(GOOD, 10))
        chooser.decide(f"w{index}", book, Load(), float(index), rng)
    assert len(chooser.depths) <= 5


def test_other_step_times():
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    assert chooser.decide(*one(book), 0.0, rng).k == 5
    chooser.use(Table(5, base_s=0.0, per_token_s=1 * MS))
    assert chooser.decide(*one(book), 5.0, rng).k == 0
    with pytest.raises(ValueError, match="the step times are for K_max 7, those before for 5"):
        chooser.use(Table(7))


def test_unusable_input_leaves_k_in_force():
    book, chooser, rng = KnownBook({"a": GOOD}), steady(), random.Random(0)
    k = chooser.decide(*one(book), 0.0, rng).k
    book.means["a"] = (math.nan,) * 5
    with pytest.raises(SurvivalError, match="survival of workload 'a' at depth 1 is nan"):
        chooser.decide(*one(book), 5.0, rng)
    book.means["a"] = (0.5, 0.4)
    with pytest.raises(SurvivalError, match="'a' may get 5 drafts but its survival has 2 depths"):
        chooser.decide(*one(book), 6.0, rng)
    assert chooser.depths == {"a": k}
    for num in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match=f"num_requests of 'a' is {num}"):
            Load({"a": num})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_depth": 6}, r"max_depth is 6, outside 0\.\.5"),
        ({"tiers": [9]}, "tiers has a 9"),
        ({"probe_share": 0.5}, "probe_share is 0.5, outside"),
        ({"min_gain": math.nan}, "min_gain is nan"),
        ({"min_dwell_s": -1.0}, "min_dwell_s is -1.0"),
        ({"replan_s": math.inf}, "replan_s is inf"),
        ({"min_steps": -1.0}, "min_steps is -1.0"),
    ],
)
def test_unusable_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        steady(**settings)
