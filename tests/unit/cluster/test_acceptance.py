"""Posteriors of acceptance, on simulated steps whose conditional acceptances are known."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate_depths import acceptance_length, load_answers, select
from benchmarks.simulate_depths import survival as survival_of
from cluster.acceptance import (
    MAX_HEADS,
    AcceptanceBook,
    Survival,
    Tally,
    as_drawn,
    gains,
    lengths,
    product_interval,
    quantiles,
)
from cluster.counts import Counts, Ledger, News, TargetReport, WorkloadCounts
from tests.support import counted

K_MAX = 7
CODE = (0.9, 0.88, 0.86, 0.85, 0.85, 0.84, 0.84)
CHAT = (0.6, 0.55, 0.5, 0.5, 0.45, 0.45, 0.4)
TRACES = Path(__file__).parents[3] / "benchmarks/results/2026-11-21-traces-smollm2-135m.npz"


def accepted_of(conditionals: Sequence[float], num_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Drafts that each step would accept at K_max."""
    return np.cumprod(rng.random((num_steps, len(conditionals))) < np.asarray(conditionals), axis=1).sum(axis=1)


def counts_of(accepted: np.ndarray, k: int | np.ndarray = K_MAX) -> Counts:
    """Counts of steps that verified `k` drafts, of which at most `accepted` are right."""
    depths, verified = range(1, K_MAX + 1), np.broadcast_to(k, accepted.shape)
    accepted = np.minimum(accepted, verified)
    return Counts(
        [int((verified >= i).sum()) for i in depths],
        [int(((verified >= i) & (accepted >= i - 1)).sum()) for i in depths],
        [int((accepted >= i).sum()) for i in depths],
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
    book.add("code", Counts([40], [40], [30]))
    assert book.survival("code").mean == pytest.approx([(5 + 30) / (10 + 40)], rel=1e-6), "alone: the curve, and itself"
    assert book.survival("new").mean == pytest.approx([35 / 50], rel=1e-6)
    book.add("chat", Counts([10], [10], [0]))
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
        book.absorb(News(by_head={"": {"w": Counts()}}))
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


def report(replica: str, head: str, totals: dict[str, Counts]) -> TargetReport:
    return TargetReport(
        replica, head=head, workloads={name: WorkloadCounts(counts=each) for name, each in totals.items()}
    )


def test_two_books_that_poll_at_different_times_agree() -> None:
    """Three replicas with traffic of their own that changes on the way; one book looks 64 times as rarely."""
    (often, often_ledger), (rarely, rarely_ledger) = ((AcceptanceBook(K_MAX), Ledger()) for _ in range(2))
    rng, totals = np.random.default_rng(5), [{"code": Counts(), "chat": Counts()} for _ in range(3)]
    for step in range(1, 641):
        for index, total in enumerate(totals):
            drift = 0.02 * index - 0.1 * step / 640
            total["code"] += counts_of(accepted_of(np.array(CODE) + drift, 10 * (index + 1), rng), 7 - index)
            total["chat"] += counts_of(accepted_of(np.array(CHAT) + drift, 5, rng), 3)
        reports = [report(f"r{index}", "head", dict(total)) for index, total in enumerate(totals)]
        often.absorb(often_ledger.take(reports))
        if step % 64 == 0:
            rarely.absorb(rarely_ledger.take(list(reversed(reports))))
    for workload in ("code", "chat"):
        one, other = often.survival(workload), rarely.survival(workload)
        assert one.num_steps == pytest.approx(other.num_steps, rel=1e-9)
        assert one.mean == pytest.approx(other.mean, abs=0.01)
        assert one.low == pytest.approx(other.low, abs=0.01)


def test_each_head_has_evidence_of_its_own_and_a_change_back_voids_nothing() -> None:
    """Fault 16: a restarted drafter that first drafts with the old head made everything be learned again, twice."""
    book, plain = AcceptanceBook(K_MAX), AcceptanceBook(K_MAX)
    book.absorb(News(by_head={"old": {"code": steps(CODE, 5000, 0)}}, head="old"))
    old = book.survival("code")
    book.absorb(News(by_head={"new": {"code": steps(CHAT, 500, 2)}}, head="new"))
    plain.add("code", steps(CHAT, 500, 2))
    assert book.workloads() == ("code",)
    assert (new := book.survival("code")) == plain.survival("code")
    book.absorb(News(head="old"))
    assert book.survival("code") == old
    book.absorb(News(head="new"))
    assert book.survival("code") == new
    book.absorb(News(head="new", heads={"code": "old"}))
    assert book.survival("code") == old
    for index in range(10):
        book.absorb(News(by_head={f"h{index}": {"w": steps(CODE, 10, index)}}, head=f"h{index}"))
    assert len(book.snapshot()["evidence"]) == MAX_HEADS


def test_five_thousand_workloads_keep_memory_bounded() -> None:
    """In one report, one after the other, and as questions. The busy ones stay."""
    book = AcceptanceBook(K_MAX, max_workloads=8)
    few, many = steps(CHAT, 20, 0), steps(CODE, 500, 1)
    busy = {f"busy-{index}": many for index in range(4)}
    book.absorb(News(by_head={"": {f"sys-{index}": few for index in range(5000)} | busy}))
    assert len(book.workloads()) == 8
    assert set(busy) <= set(book.workloads())
    for index in range(2000):
        book.add(f"one-{index}", few)
        book.survival(f"unknown-{index}")
        book.absorb(News(by_head={"": dict(busy)}))
    assert len(book.workloads()) == 8
    assert set(busy) <= set(book.workloads())
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
    book.add("w", Counts())
    assert book.survival("w").mean == book.sample("w", random.Random(0)) == ()
    assert book.survival("w").acceptance_length(0) == 1.0


def test_a_snapshot_is_everything_and_a_damaged_one_changes_nothing() -> None:
    book = AcceptanceBook(K_MAX, max_workloads=2)
    for index, name in enumerate(("a", "b", "c")):
        book.absorb(
            News(by_head={"one": {name: steps(CODE, 900, index)}, "two": {name: steps(CHAT, 50, index)}}, head="one")
        )
    snapshot = json.loads(json.dumps(book.snapshot()))
    restored = AcceptanceBook(K_MAX, max_workloads=2)
    restored.restore(snapshot)
    assert restored.snapshot() == book.snapshot()
    assert all(restored.survival(name) == book.survival(name) for name in ("a", "b", "c", "new"))
    damaged = []
    for change in ("evicted", "workloads"):
        damaged.append(json.loads(json.dumps(snapshot)))
        damaged[-1]["evidence"]["one"][change] = [1, [2], [3]] if change == "evicted" else {"b": [5, [9] * 7, [1] * 7]}
    damaged += [
        None,
        [],
        {},
        {**snapshot, "max_draft_tokens": 3},
        {**snapshot, "heads": 7},
        {**snapshot, "evidence": {"h": {}}},
    ]
    for each in damaged:
        with pytest.raises(ValueError, match="snapshot"):
            restored.restore(each)
        assert restored.snapshot() == book.snapshot()
    with pytest.raises(ValueError, match="K_max 3, but the one served drafts 7"):
        restored.restore({**snapshot, "max_draft_tokens": 3})


def test_al_is_known_from_0_to_k_max() -> None:
    for k in (-1, 8):
        with pytest.raises(ValueError, match="k must be from 0 to 7"):
            AcceptanceBook(K_MAX).survival("w").acceptance_length(k)


# ---- Beta intervals


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (3, 1), (40, 10), (2000, 3), (1.2, 300)])
def test_quantiles_are_those_of_draws(alpha: float, beta: float) -> None:
    ends = quantiles(np.array([alpha]), np.array([beta]), [0.05, 0.5, 0.95])
    drawn = np.quantile(np.random.default_rng(0).beta(alpha, beta, 400_000), [0.05, 0.5, 0.95])
    assert np.array(ends).ravel() == pytest.approx(drawn, abs=0.004)


def test_the_interval_of_a_product_is_that_of_draws() -> None:
    alpha, beta = np.array([80.0, 60.0, 40.0, 25.0]), np.array([20.0, 18.0, 15.0, 12.0])
    mean, low, high = product_interval(alpha, beta, 0.9)
    drawn = np.cumprod(np.random.default_rng(0).beta(alpha, beta, (200_000, 4)), axis=1)
    assert mean == pytest.approx(drawn.mean(axis=0), abs=0.002)
    assert low == pytest.approx(np.quantile(drawn, 0.05, axis=0), abs=0.01)
    assert high == pytest.approx(np.quantile(drawn, 0.95, axis=0), abs=0.01)


# ---- AL at another K

GROUPS = {
    "code": (("humaneval", "coding"), 0.0),
    "chat": (("writing", "roleplay", "humanities"), 0.0),
    "translation": (("translation",), 0.0),
    "summarization": (("summarization",), 0.0),
    "greedy": (("*",), 0.0),
    "sampled": (("*",), 1.0),
}


@pytest.mark.parametrize("group", GROUPS)
def test_al_is_carried_to_lesser_k_of_replayed_answers(group: str) -> None:
    """What was measured at 7 tells AL at 1 to 6 within 3 %, where the plain sum is off by up to 9 %."""
    answers = select(load_answers(TRACES), *GROUPS[group])
    curve = survival_of(answers)
    real = [acceptance_length(answers, k) for k in range(1, 7)]
    carried = np.abs(np.array(lengths(curve, 7)[1:7]) / real - 1)
    plain = np.abs((1 + np.cumsum(curve)[:6]) / real - 1)
    assert carried.max() < 0.03
    assert carried.mean() < plain.mean()


@pytest.mark.parametrize("group", ["code", "chat", "greedy"])
def test_al_is_carried_to_greater_k_of_replayed_answers(group: str) -> None:
    """What is measured at 3, with deeper conditional acceptances from rare probes, tells AL at 4 to 7 within 5 %."""
    answers = select(load_answers(TRACES), *GROUPS[group])
    found = []
    for answer in answers:
        place = 0
        while place < len(answer.accepted):
            found.append((3 if len(found) % 50 else 7, answer.accepted[place]))
            place += min(found[-1][1], found[-1][0]) + 1
    counts = counted.counts_of((k, min(k, accepted)) for k, accepted in found)
    curve = tuple(np.cumprod([a / max(r, 1) for a, r in zip(counts.accepted, counts.reached, strict=True)]).tolist())
    carried = np.array(lengths(curve, 3)[4:])
    real = np.array([acceptance_length(answers, k) for k in range(4, 8)])
    plain = 1 + np.cumsum(curve)[3:]
    assert np.abs(carried / real - 1).max() < 0.08
    assert np.abs(carried / real - 1).mean() < np.abs(plain / real - 1).mean()


def test_what_was_measured_stays_what_it_is() -> None:
    curve = (0.8, 0.6, 0.4, 0.2)
    for k in range(5):
        assert lengths(curve, k)[k] == pytest.approx(1 + sum(curve[:k]))
    assert lengths((), 0) == (1.0,)
    for measured_at in (-1, 3):
        with pytest.raises(ValueError, match=r"measured_at is -?\d, outside 0..2"):
            lengths((0.5, 0.2), measured_at)


@given(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=K_MAX, max_size=K_MAX), st.integers(0, K_MAX))
def test_gains_are_usable_as_survivals_whatever_is_measured(factors: list[float], measured_at: int) -> None:
    found = gains(tuple(np.cumprod(factors).tolist()), measured_at)
    assert all(0 <= each <= 1 for each in found)
    assert list(found) == sorted(found, reverse=True)


def test_a_draw_moves_the_worth_as_far_as_it_is_from_the_mean() -> None:
    assert as_drawn((0.7, 0.4), (0.8, 0.4), (0.9, 0.5)) == pytest.approx((0.8, 0.5))
    assert as_drawn((1.0, 1.0), (0.5, 0.1), (0.9, 0.2)) == (1.0, 1.0)
    assert as_drawn((0.1, 0.1), (0.5, 0.1), (0.4, 0.3)) == (0.0, 0.0)


def test_a_tally_knows_the_depth_its_steps_were_verified_at() -> None:
    rng = np.random.default_rng(0)
    mixed = counts_of(accepted_of([0.8] * K_MAX, 20_000, rng), rng.choice([2, 6], size=20_000))
    assert Tally.of_counts(mixed, K_MAX).depth == pytest.approx(4.0, abs=0.1)
    assert Tally.of_counts(steps(CODE, 900, 0, k=3), K_MAX).depth == pytest.approx(3.0)
    assert Tally.zeros(K_MAX).depth == Tally.zeros(0).depth == 0.0


def test_the_book_predicts_al_at_another_k() -> None:
    """From steps at 7 alone. A workload without steps is taken at the depth of all traffic."""
    answers = select(load_answers(TRACES), *GROUPS["chat"])
    accepted = [round(100_000 * value) for value in survival_of(answers)]
    book = AcceptanceBook(K_MAX, half_life_steps=1e9)
    assert book.survival("chat").depth == 0.0
    book.add("chat", Counts([100_000] * K_MAX, [100_000, *accepted[:-1]], accepted))
    found = book.survival("chat")
    assert found.depth == pytest.approx(7.0)
    assert found.acceptance_length(3) == pytest.approx(acceptance_length(answers, 3), rel=0.03)
    assert sum(found.gains()[:3]) == pytest.approx(found.acceptance_length(3) - 1, rel=1e-6)
    assert book.survival("other").depth == book.overall().depth == pytest.approx(7.0)
    alike = Survival(found.mean, found.low, found.high, 1.0)
    assert alike.acceptance_length(3) == pytest.approx(1 + sum(found.mean[:3]))
