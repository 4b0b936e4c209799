"""The online correction: it follows the engine, shrugs off pauses, and survives a restart."""

import json
import math

import pytest

from cluster.step_time import Residuals, StepShape

SMALL, FULL, LARGE = StepShape.uniform(1, 3), StepShape.uniform(1, 7), StepShape.uniform(32, 3)


def settled(factor: float, shape: StepShape, num_steps: int = 2000) -> Residuals:
    residuals = Residuals({7})
    for _ in range(num_steps):
        assert residuals.observe(0.01 * factor, 0.01, shape)
    return residuals


@pytest.mark.parametrize("factor", [0.5, 0.95, 1.3, 3.0])
def test_a_lasting_difference_is_learned(factor):
    residuals = settled(factor, SMALL)
    assert residuals.correct(0.02, SMALL) == pytest.approx(0.02 * factor, rel=1e-3)
    assert residuals.mape < 0.01


def test_kinds_learn_apart_and_an_unvisited_kind_takes_the_common_factor():
    residuals = settled(1.5, SMALL)
    assert residuals.correct(1.0, LARGE) == residuals.correct(1.0, FULL) == pytest.approx(1.5, rel=0.03)
    for _ in range(3000):
        residuals.observe(0.01, 0.01, FULL)
        residuals.observe(0.015, 0.01, SMALL)
    assert residuals.correct(1.0, FULL) == pytest.approx(1.0, rel=0.02)
    assert residuals.correct(1.0, SMALL) == pytest.approx(1.5, rel=0.02)
    assert residuals.correct(1.0, StepShape.uniform(3, 1)) == residuals.correct(1.0, StepShape.uniform(4, 1))


def test_depths_on_full_graphs_learn_apart():
    residuals = Residuals({3, 7})
    for _ in range(3000):
        residuals.observe(0.011, 0.01, FULL)
        residuals.observe(0.009, 0.01, StepShape.uniform(1, 3))
    assert residuals.correct(1.0, FULL) == pytest.approx(1.1, rel=0.01)
    assert residuals.correct(1.0, StepShape.uniform(1, 3)) == pytest.approx(0.9, rel=0.01)


def test_the_error_of_the_depth_that_runs_is_not_taken_for_that_of_all():
    """A table makes K = 3 look 8 % too cheap, and the engine runs hardly anything else: K = 7 must look better for it,
    or its own few steps would never become more."""
    residuals = Residuals({3, 7})
    for step in range(2000):
        residuals.observe(0.0108, 0.010, SMALL)
        if step % 100 == 0:
            residuals.observe(0.0097, 0.010, FULL)
    assert residuals.correct(1.0, SMALL) == pytest.approx(1.08, rel=0.01)
    assert residuals.correct(1.0, FULL) < 1.03
    assert residuals.correct(1.0, LARGE) < 1.05


def test_a_pause_of_a_minute_moves_nothing_that_matters():
    residuals = settled(1.0, SMALL)
    residuals.observe(60.0, 0.01, SMALL)
    assert residuals.correct(1.0, SMALL) == pytest.approx(1.0, abs=0.002)
    assert residuals.mape < 0.01


def test_steps_with_rare_long_pauses_still_give_the_usual_time():
    residuals = Residuals({7})
    for step in range(3000):
        residuals.observe(1.0 if step % 50 == 0 else 0.012, 0.01, SMALL)
    assert residuals.correct(1.0, SMALL) == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize("seconds", [0.0, -3.0, math.nan, math.inf])
def test_a_clock_that_jumps_is_refused_and_counted(seconds):
    residuals = settled(1.2, SMALL)
    before = residuals.snapshot() | {"num_refused": 1}
    assert not residuals.observe(seconds, 0.01, SMALL)
    assert residuals.snapshot() == before
    assert not residuals.observe(0.01, seconds, SMALL)
    assert residuals.num_refused == 2


def test_mape_says_what_the_correction_cannot_remove():
    residuals = Residuals({7})
    for step in range(3000):
        residuals.observe(0.013 if step % 2 else 0.008, 0.01, SMALL)
    assert 0.15 < residuals.mape < 0.35


def test_no_factor_beyond_eight():
    residuals = settled(1e6, SMALL, 20_000)
    assert 7.99 < residuals.correct(1.0, SMALL) <= 8.0


def test_a_snapshot_continues_where_it_was_taken():
    residuals = settled(1.4, FULL)
    residuals.observe(0.02, 0.01, LARGE)
    again = Residuals({7})
    again.restore(json.loads(json.dumps(residuals.snapshot())))
    assert again.snapshot() == residuals.snapshot()
    assert again.correct(1.0, LARGE) == residuals.correct(1.0, LARGE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mape": None}, "field 'mape'"),
        ({"mape": [0.0, -1.0]}, "field 'mape'"),
        ({"mape": [0.1]}, "field 'mape'"),
        ({"kinds": 3}, "field 'kinds'"),
        ({"kinds": [[1, True, math.nan, 4]]}, "field 'kinds'"),
        ({"num_refused": "x"}, "field 'num_refused'"),
        ({"more": 1}, "field 'more' is missing or unknown"),
    ],
)
def test_a_broken_snapshot_is_refused_by_field_and_changes_nothing(change, said):
    residuals = settled(1.4, FULL)
    before = residuals.snapshot()
    with pytest.raises(ValueError, match=said):
        residuals.restore({**before, **change})
    assert residuals.snapshot() == before


def test_half_life_must_be_positive():
    with pytest.raises(ValueError, match="half_life_steps must be above 0"):
        Residuals({7}, half_life_steps=0)
