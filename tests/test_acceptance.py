"""Posteriors of acceptance, on simulated steps whose conditional acceptances are known."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cluster.acceptance import MAX_NUM_SOURCES, AcceptanceBook, Counts, Report

K_MAX = 7
CODE = (0.9, 0.88, 0.86, 0.85, 0.85, 0.84, 0.84)
CHAT = (0.6, 0.55, 0.5, 0.5, 0.45, 0.45, 0.4)
TRACES = Path(__file__).parents[1] / "results/2026-11-21-traces-smollm2-135m.npz"


def accepted_of(conditionals: Sequence[float], num_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Drafts that each step would accept at K_max."""
    return np.cumprod(rng.random((num_steps, len(conditionals))) < np.asarray(conditionals), axis=1).sum(axis=1)


def counts_of(accepted: np.ndarray, k: int | np.ndarray = K_MAX) -> Counts:
    """Counts of steps that verified `k` drafts, of which at most `accepted` are right."""
    depths, verified = range(1, K_MAX + 1), np.broadcast_to(k, accepted.shape)
    accepted = np.minimum(accepted, verified)
    return Counts(
        tuple(int((verified >= i).sum()) for i in depths),
        tuple(int(((verified >= i) & (accepted >= i - 1)).sum()) for i in depths),
        tuple(int((accepted >= i).sum()) for i in depths),
    )


def steps(conditionals: Sequence[float], num_steps: int, seed: int, k: int = K_MAX) -> Counts:
    return counts_of(accepted_of(conditionals, num_steps, np.random.default_rng(seed)), k)


def test_mean_converges_to_the_true_survival() -> None:
    book = AcceptanceBook(K_MAX, half_life_steps=1e9)
    errors = []
    for seed in range(3):
        book.add("code", steps(CODE, 100 * 30**seed, seed))
        errors.append(np.abs(np.array(book.survival("code").mean) - np.cumprod(CODE)).max())
    assert errors[0] > errors[2]
    assert errors[2] < 0.01
    assert book.survival("code").acceptance_length(7) == pytest.approx(1 + np.cumprod(CODE).sum(), abs=0.03)


def test_posterior_worked_by_hand() -> None:
    """Depth 1 only: 30 of 40 and 0 of 10 accepted; every prior is worth 10 trials."""
    book = AcceptanceBook(1, prior=[0.5], prior_steps=10, half_life_steps=1e12)
    book.add("code", Counts((40,), (40,), (30,)))
    assert book.survival("code").mean == pytest.approx([(5 + 30) / (10 + 40)], rel=1e-6), "alone: the curve, and itself"
    assert book.survival("new").mean == pytest.approx([35 / 50], rel=1e-6)
    book.add("chat", Counts((10,), (10,), (0,)))
    parent_of_chat, parent_of_code = 35 / 50, 5 / 20
    assert book.survival("chat").mean == pytest.approx([10 * parent_of_chat / (10 + 10)], rel=1e-6)
    assert book.survival("code").mean == pytest.approx([(10 * parent_of_code + 30) / (10 + 40)], rel=1e-6)
    assert book.overall().mean == pytest.approx([(5 + 30) / (10 + 50)], rel=1e-6)


@pytest.mark.parametrize("num_steps", [20, 400])
def test_intervals_cover_at_their_rate_for_independent_steps(num_steps: int) -> None:
    """Truth is drawn as the prior says, so that 90 % is what an interval promises whatever the number of steps."""
    curve = np.cumprod([0.8] * K_MAX).tolist()
    rng, num_inside, num_runs = np.random.default_rng(7), np.zeros(K_MAX), 400
    for _ in range(num_runs):
        truth = rng.beta(10 * 0.8, 10 * 0.2, K_MAX)
        book = AcceptanceBook(K_MAX, prior=curve, prior_steps=10, half_life_steps=1e9, design_effect=1)
        book.add("w", counts_of(accepted_of(truth, num_steps, rng)))
        found, survival = book.survival("w"), np.cumprod(truth)
        num_inside += (np.array(found.low) <= survival) & (survival <= np.array(found.high))
    assert num_inside / num_runs == pytest.approx([0.9] * K_MAX, abs=0.05)


def test_steps_of_real_requests_need_the_design_effect() -> None:
    """Thirty requests of a task, drawn again and again: does the interval of S_1 hold the task's own S_1?"""
    stored = np.load(TRACES)
    ends = np.cumsum(stored["num_anchors"])
    rng, inside = np.random.default_rng(3), {1.0: [], 4.0: []}
    for category in ("humaneval", "math_reasoning", "translation", "summarization"):
        chosen = (stored["category"] == category) & (stored["temperature"] == 0)
        pieces = zip(stored["num_anchors"][chosen], ends[chosen], strict=True)
        requests = [replayed(stored["accepted"][end - num : end]) for num, end in pieces]
        truth = np.mean(np.concatenate(requests) >= 1)
        for _ in range(40):
            sample = np.concatenate([requests[index] for index in rng.integers(len(requests), size=30)])
            for design_effect, found in inside.items():
                book = AcceptanceBook(K_MAX, half_life_steps=1e9, design_effect=design_effect)
                book.add("w", counts_of(sample))
                survival = book.survival("w")
                found.append(survival.low[0] <= truth <= survival.high[0])
    assert np.mean(inside[1.0]) < 0.7
    assert np.mean(inside[4.0]) > 0.8


def replayed(confirmed: np.ndarray) -> np.ndarray:
    """Drafts accepted in each step of a greedy answer at K_max, from those confirmed at each of its tokens."""
    found, position = [], 0
    while position < len(confirmed):
        found.append(min(int(confirmed[position]), K_MAX))
        position += found[-1] + 1
    return np.array(found)


def test_design_effect_widens_intervals_and_counts_fewer_steps() -> None:
    one, four = (AcceptanceBook(K_MAX, design_effect=effect) for effect in (1, 4))
    for book in (one, four):
        book.add("w", steps(CODE, 2000, 0))
    narrow, wide = one.survival("w"), four.survival("w")
    assert narrow.num_steps == pytest.approx(4 * wide.num_steps)
    assert all((b - a) > 1.5 * (d - c) for a, b, c, d in zip(wide.low, wide.high, narrow.low, narrow.high, strict=True))


def test_mixing_k_does_not_bias() -> None:
    """Steps at K = 1 or 2 say nothing of depth 3. Ratios that count them as if they did come out too low."""
    rng = np.random.default_rng(1)
    mixed = counts_of(accepted_of(CODE, 60_000, rng), rng.choice([1, 2, 7], size=60_000))
    book = AcceptanceBook(K_MAX, half_life_steps=1e9)
    book.add("w", mixed)
    truth = np.cumprod(CODE)
    assert book.survival("w").mean == pytest.approx(truth, abs=0.015)
    naive_survival = np.array(mixed.accepted) / mixed.num_steps
    naive_conditional = np.array(mixed.accepted[1:]) / np.array(mixed.accepted[:-1])
    assert naive_survival[2] < truth[2] - 0.3
    assert naive_conditional[1] < CODE[1] - 0.25


def test_forgetting_follows_a_change() -> None:
    book = AcceptanceBook(K_MAX, half_life_steps=1000)
    book.add("w", steps(CODE, 20_000, 0))
    distances = []
    for seed in range(1, 5):
        book.add("w", steps(CHAT, 1000, seed))
        distances.append((book.survival("w").mean[0] - CHAT[0]) / (CODE[0] - CHAT[0]))
    assert distances == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16], abs=0.06)
    assert book.survival("w").num_steps == pytest.approx(1000 / np.log(2) / 4, rel=0.01)


def test_a_pause_and_the_steps_of_others_forget_nothing() -> None:
    book = AcceptanceBook(K_MAX, half_life_steps=100)
    book.add("w", steps(CODE, 300, 0))
    num_steps = book.survival("w").num_steps
    for seed in range(20):
        book.add("other", steps(CODE, 300, seed))
        book.absorb("r1", "head", {"w": Counts()})
    assert book.survival("w").num_steps == num_steps


def test_little_data_sits_near_the_parent() -> None:
    book = AcceptanceBook(K_MAX)
    for index in range(4):
        book.add(f"w{index}", steps(CHAT, 3000, index))
    book.add("rare", steps(CODE, 12, 9))
    unseen, rare, much = (book.survival(name) for name in ("unseen", "rare", "w0"))
    assert unseen.mean == pytest.approx(np.cumprod(CHAT), abs=0.03)
    assert rare.mean[0] == pytest.approx(CHAT[0], abs=0.05)
    assert unseen.num_steps == 0
    assert unseen.high[0] - unseen.low[0] > 3 * (much.high[0] - much.low[0])
    book.add("rare", steps(CODE, 20_000, 10))
    assert book.survival("rare").mean == pytest.approx(np.cumprod(CODE), abs=0.03)


def test_two_books_that_poll_at_different_times_agree() -> None:
    """Three replicas with traffic of their own that changes on the way; one book looks 64 times as rarely."""
    often, rarely = AcceptanceBook(K_MAX), AcceptanceBook(K_MAX)
    rng, totals = np.random.default_rng(5), [{"code": Counts(), "chat": Counts()} for _ in range(3)]
    for step in range(1, 641):
        for index, total in enumerate(totals):
            drift = 0.02 * index - 0.1 * step / 640
            total["code"] += counts_of(accepted_of(np.array(CODE) + drift, 10 * (index + 1), rng), 7 - index)
            total["chat"] += counts_of(accepted_of(np.array(CHAT) + drift, 5, rng), 3)
        reports = [Report(f"r{index}", "head", dict(total)) for index, total in enumerate(totals)]
        often.absorb_all(reports)
        if step % 64 == 0:
            rarely.absorb_all(reversed(reports))
    for workload in ("code", "chat"):
        one, other = often.survival(workload), rarely.survival(workload)
        assert one.num_steps == pytest.approx(other.num_steps, rel=1e-9)
        assert one.mean == pytest.approx(other.mean, abs=0.01)
        assert one.low == pytest.approx(other.low, abs=0.01)


def test_restart_and_return_of_a_source_count_each_step_once() -> None:
    book, plain = AcceptanceBook(K_MAX), AcceptanceBook(K_MAX)
    first, second, third = steps(CODE, 500, 0), steps(CODE, 300, 1), steps(CODE, 200, 2)
    book.absorb("r1", "head", {"w": first})
    book.absorb("r2", "head", {"w": second})
    book.absorb("r1", "head", {"w": first + third})
    book.absorb("r2", "head", {"w": third})
    for counts in (first, second, third, third):
        plain.add("w", counts)
    assert book.survival("w") == plain.survival("w")


def test_another_head_voids_everything() -> None:
    book, fresh = AcceptanceBook(K_MAX), AcceptanceBook(K_MAX)
    book.absorb("r1", "old", {"code": steps(CODE, 5000, 0), "chat": steps(CHAT, 5000, 1)})
    totals = {"code": steps(CHAT, 50, 2)}
    book.absorb("r2", "new", totals)
    fresh.absorb("r2", "new", totals)
    assert (book.head, book.workloads()) == ("new", ("code",))
    assert book.survival("code") == fresh.survival("code")
    book.absorb("r1", "old", {"code": steps(CODE, 9000, 0)})
    assert book.survival("code") == fresh.survival("code")


def test_five_thousand_workloads_keep_memory_bounded() -> None:
    """In one report of each of many replicas, one after the other, and as questions. The busy ones stay."""
    book = AcceptanceBook(K_MAX, max_workloads=8)
    few, many = steps(CHAT, 20, 0), steps(CODE, 500, 1)
    busy = {f"busy-{index}": many for index in range(4)}
    crowd = {f"sys-{index}": few for index in range(5000)}
    sizes = []
    for index in range(3):
        book.absorb(f"r{index}", "head", crowd | busy)
        sizes.append(len(json.dumps(book.snapshot()["sources"])))
    assert len(book.workloads()) == 8
    assert set(busy) <= set(book.workloads())
    assert sizes[0] < 4 * 8 * 400, "names of one source are bounded as well"
    for index in range(5000):
        book.add(f"one-{index}", few)
        book.survival(f"unknown-{index}")
        book.absorb(f"r{index}", "head", busy)
        assert len(book.workloads()) == 8
    assert set(busy) <= set(book.workloads())
    assert len(book.snapshot()["sources"]) == MAX_NUM_SOURCES
    assert book.survival("busy-0").mean == pytest.approx(np.cumprod(CODE), abs=0.05)
    assert len(book._survivals) <= 9


def test_the_workload_without_steps_for_longest_makes_room_and_lives_on_in_the_parent() -> None:
    book = AcceptanceBook(K_MAX, max_workloads=2)
    for seed, workload in enumerate(["a", "b", "a", "c"]):
        book.add(workload, steps(CODE, 3000, seed))
        book.survival("b")
    assert book.workloads() == ("c", "a")
    everything = book.overall().num_steps
    book.add("d", steps(CODE, 1, 9))
    book.add("e", steps(CODE, 1, 9))
    assert book.survival("a").num_steps == 0
    assert book.overall().num_steps > everything / 2
    assert book.survival("a").mean == pytest.approx(np.cumprod(CODE), abs=0.03)


def test_draws_follow_the_posterior() -> None:
    book = AcceptanceBook(K_MAX)
    book.add("w", steps(CHAT, 300, 0))
    chance = random.Random(0)
    drawn = np.array([book.sample("w", chance) for _ in range(4000)])
    survival = book.survival("w")
    assert drawn.mean(axis=0) == pytest.approx(survival.mean, abs=0.005)
    assert np.quantile(drawn, 0.05, axis=0) == pytest.approx(survival.low, abs=0.01)
    assert np.quantile(drawn, 0.95, axis=0) == pytest.approx(survival.high, abs=0.01)
    assert (np.diff(drawn, axis=1) <= 0).all()
    assert book.sample("w", random.Random(5)) == book.sample("w", random.Random(5))
    assert len(book.sample("unseen", chance)) == K_MAX


def test_reports_deeper_than_k_max_count_to_k_max() -> None:
    """A replica of a head with more drafts, while replicas are replaced."""
    deep, cut = AcceptanceBook(3), AcceptanceBook(3)
    deep.add("w", steps(CODE, 100, 0))
    cut.add("w", steps(CODE, 100, 0, k=3))
    assert deep.survival("w") == cut.survival("w")


def test_without_a_drafter_there_is_nothing_to_learn() -> None:
    book = AcceptanceBook(0)
    book.absorb("r1", "none", {"w": Counts()})
    assert book.survival("w").mean == book.sample("w", random.Random(0)) == ()
    assert book.survival("w").acceptance_length(0) == 1.0


def test_bad_arguments_are_named() -> None:
    for arguments in (
        {"max_draft_tokens": -1}, {"max_workloads": 0}, {"half_life_steps": 0}, {"half_life_steps": float("nan")},
        {"prior_steps": 0}, {"design_effect": 0.5}, {"design_effect": float("inf")}, {"prior": [0.5]},
        {"prior": [0.5] * 6 + [0.6]}, {"prior": [0.0] * 7}, {"prior": [1.1] * 7}, {"prior": [float("nan")] * 7},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(arguments))):
            AcceptanceBook(**{"max_draft_tokens": K_MAX, **arguments})
    for k in (-1, 8):
        with pytest.raises(ValueError, match="k must be from 0 to 7"):
            AcceptanceBook(K_MAX).survival("w").acceptance_length(k)
