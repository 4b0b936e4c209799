"""AL carried from one K to another, against replays of real answers, where AL at every K is known."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.traces import Answer, Kind, Traces, acceptance_length, mixes, survival
from cluster.acceptance import AcceptanceBook, Counts, Survival, Tally
from cluster.transfer import as_drawn, gains, lengths

RESULTS = Path(__file__).resolve().parents[1] / "results"
REAL = RESULTS / "2026-11-21-traces-smollm2-135m.npz"
K_MAX = 7
GROUPS = {**mixes()["apps"].kinds, "qa": Kind(("qa",)), "greedy": Kind(("*",))}


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces.load(REAL).up_to(K_MAX)


def measured(answers: list[Answer], k: int) -> tuple[float, ...]:
    """S_1 .. S_K_max as a service at K = k learns them: the deeper conditional acceptances from probes."""
    reached, accepted = np.zeros(K_MAX), np.zeros(K_MAX)
    for answer in answers:
        anchor = 0
        while anchor < len(answer.accepted):
            found = answer.accepted[anchor]
            reached[: found + 1] += 1
            accepted[:found] += 1
            anchor += min(found, k) + 1
    return tuple(np.cumprod(accepted / reached))


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_al_at_every_lesser_k_is_predicted_within_3_percent(traces: Traces, group: str) -> None:
    answers = traces.select(GROUPS[group])
    predicted = lengths(survival(answers, K_MAX), K_MAX)
    for k in range(K_MAX + 1):
        assert predicted[k] == pytest.approx(acceptance_length(answers, k), rel=0.03), (group, k)


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_al_at_every_greater_k_is_predicted_within_3_percent(traces: Traces, group: str) -> None:
    answers = traces.select(GROUPS[group])
    predicted = lengths(measured(answers, 3), 3)
    for k in range(4, K_MAX + 1):
        assert predicted[k] == pytest.approx(acceptance_length(answers, k), rel=0.03), (group, k)


def test_the_plain_sum_would_not_do(traces: Traces) -> None:
    answers = traces.select(GROUPS["chat"])
    assert 1 + sum(survival(answers, K_MAX)[:3]) < 0.93 * acceptance_length(answers, 3)
    assert 1 + sum(measured(answers, 3)) > 1.1 * acceptance_length(answers, K_MAX)


@pytest.mark.parametrize(
    ("file", "part"),
    [("evaluation-gemma3-270m-h200", "groups"), ("evaluation-smollm2-135m-h200", "against")],
)
def test_other_heads_than_the_rule_was_chosen_on(file: str, part: str) -> None:
    """A head of another target, and an EAGLE-3 head: groups of at least 10 greedy answers."""
    document = json.loads((RESULTS / f"2026-11-21-{file}.json").read_text())
    groups = next(one[part] for one in document["sets"] if one["temperature"] == 0)
    errors, plain_errors = [], []
    for one in groups.values():
        curve = one.get("survival", ())
        if one["num_answers"] < 10 or not curve:
            continue
        for k in range(1, len(curve)):
            real = one["acceptance_length"][str(k)]
            errors.append(abs(lengths(curve, len(curve))[k] / real - 1))
            plain_errors.append(abs((1 + sum(curve[:k])) / real - 1))
    assert len(errors) > 60
    assert np.mean(errors) < 0.015 < 0.03 < np.mean(plain_errors)
    assert np.mean(np.array(errors) < 0.03) > 0.95
    assert max(errors) < 0.06


def test_what_was_measured_stays_what_it_is() -> None:
    curve = (0.8, 0.6, 0.4, 0.2)
    for k in range(5):
        assert lengths(curve, k)[k] == pytest.approx(1 + sum(curve[:k]))
    assert lengths(curve, 0) == pytest.approx((1.0, 1.8, 2.4, 2.8, 3.0))
    assert lengths((), 0) == (1.0,)


def test_steps_that_are_alike_need_no_carrying() -> None:
    curve = (0.8, 0.6, 0.4, 0.2)
    for k in range(5):
        assert lengths(curve, k, 0.0) == pytest.approx((1.0, 1.8, 2.4, 2.8, 3.0))
        assert gains(curve, k, 0.0) == pytest.approx(curve)
    book = AcceptanceBook(4, split_share=0.0)
    book.add("w", Counts((1000,) * 4, (1000, 800, 600, 400), (800, 600, 400, 200)))
    found = book.survival("w")
    assert found.gains() == pytest.approx(found.mean)
    with pytest.raises(ValueError, match="split_share must be from 0 to 1, not 2"):
        AcceptanceBook(4, split_share=2)


def test_up_is_the_inverse_of_down() -> None:
    """A curve at 5, carried down to 3, is found again from there where its shape is known."""
    at_five = np.cumprod([0.85, 0.8, 0.75, 0.7, 0.7])
    down = lengths(tuple(at_five), 5)
    # What is measured at 3: conditional acceptances larger by one factor, such that the sum is the AL carried down.
    conditionals = np.array([0.85, 0.8, 0.75, 0.7, 0.7])
    factors = np.linspace(1.0, 1.15, 15001)
    sums = [1 + np.cumprod(factor * conditionals[:3]).sum() for factor in factors]
    factor = factors[int(np.argmin(np.abs(np.array(sums) - down[3])))]
    assert factor > 1.01
    assert lengths(tuple(np.cumprod(factor * conditionals)), 3)[5] == pytest.approx(down[5], rel=2e-3)


def test_gains_are_usable_as_survivals_whatever_is_measured() -> None:
    chance = random.Random(0)
    for _ in range(500):
        curve, at = [], 1.0
        for _ in range(K_MAX):
            at *= chance.choice((0.0, 1.0, chance.random(), chance.random() ** 0.1))
            curve.append(at)
        found = gains(curve, chance.randint(0, K_MAX))
        assert all(0 <= one <= 1 for one in found), (curve, found)
        assert list(found) == sorted(found, reverse=True), (curve, found)


def test_a_depth_that_does_not_exist_is_refused() -> None:
    for measured_at in (-1, 3):
        with pytest.raises(ValueError, match=r"measured_at is -?\d, outside 0..2"):
            lengths((0.5, 0.2), measured_at)


def test_a_draw_moves_the_worth_as_far_as_it_is_from_the_mean() -> None:
    assert as_drawn((0.7, 0.4), (0.8, 0.4), (0.9, 0.5)) == pytest.approx((0.8, 0.5))
    assert as_drawn((0.7, 0.4), (0.8, 0.4), (0.8, 0.4)) == pytest.approx((0.7, 0.4))
    assert as_drawn((1.0, 1.0), (0.5, 0.1), (0.9, 0.2)) == (1.0, 1.0)
    assert as_drawn((0.1, 0.1), (0.5, 0.1), (0.4, 0.3)) == (0.0, 0.0)


def counts(steps: dict[int, int], conditionals: float) -> Counts:
    """Counts of so many steps at each K, in expectation."""
    depths = range(1, max(steps) + 1)
    drafted = [sum(num for k, num in steps.items() if k >= i) for i in depths]
    return Counts(
        tuple(drafted),
        tuple(round(num * conditionals ** (i - 1)) for i, num in zip(depths, drafted, strict=True)),
        tuple(round(num * conditionals**i) for i, num in zip(depths, drafted, strict=True)),
    )


@pytest.mark.parametrize(("steps", "depth"), [({3: 10000}, 3.0), ({3: 9900, 7: 100}, 3.04), ({2: 5000, 6: 5000}, 4.0)])
def test_a_tally_knows_the_depth_its_steps_were_verified_at(steps: dict[int, int], depth: float) -> None:
    assert Tally.of_counts(counts(steps, 0.8), K_MAX).depth == pytest.approx(depth, abs=0.02)
    assert Tally.zeros(K_MAX).depth == Tally.zeros(0).depth == 0.0


def test_the_book_predicts_al_at_another_k(traces: Traces) -> None:
    """From steps at 7 alone: AL at 3 is what decoding at 3 gives. A workload without steps is taken at the depth of
    all traffic."""
    answers = traces.select(GROUPS["chat"])
    by_depth = survival(answers, K_MAX)
    num_steps = 100_000
    drafted = (num_steps,) * K_MAX
    accepted = tuple(round(num_steps * one) for one in by_depth)
    book = AcceptanceBook(K_MAX, half_life_steps=1e9)
    assert book.survival("chat").depth == 0.0
    book.add("chat", Counts(drafted, (num_steps, *accepted[:-1]), accepted))
    found = book.survival("chat")
    assert found.depth == pytest.approx(7.0)
    assert found.acceptance_length(3) == pytest.approx(acceptance_length(answers, 3), rel=0.03)
    assert sum(found.gains()[:3]) == pytest.approx(found.acceptance_length(3) - 1, rel=1e-6)
    assert book.survival("other").depth == book.overall().depth == pytest.approx(7.0)
    assert Survival(found.mean, found.low, found.high, 1.0).acceptance_length(3) == pytest.approx(
        1 + sum(found.mean[:3])
    )
