"""Quantiles of Beta variables, where they have a closed form, and intervals of products against drawn ones."""

import numpy as np
import pytest

from cluster.acceptance import product_interval, quantiles


@pytest.mark.parametrize("parameter", [0.05, 0.5, 1.0, 8.0, 3000.0])
@pytest.mark.parametrize("probability", [0.05, 0.5, 0.95])
def test_quantiles_with_a_closed_form(parameter: float, probability: float) -> None:
    """P(x < q) is q^alpha with beta = 1, and 1 - (1 - q)^beta with alpha = 1."""
    alphas, betas = np.array([parameter, 1.0]), np.array([1.0, parameter])
    (found,) = quantiles(alphas, betas, [probability])
    exact = [probability ** (1 / parameter), 1 - (1 - probability) ** (1 / parameter)]
    assert found == pytest.approx(exact, abs=1e-3 if parameter >= 0.5 else 1e-2)


@pytest.mark.parametrize(("alpha", "beta"), [(3.0, 3.0), (4000.0, 1000.0), (0.3, 0.7)])
def test_quantiles_of_drawn_values(alpha: float, beta: float) -> None:
    drawn = np.random.default_rng(0).beta(alpha, beta, 400_000)
    low, high = quantiles(np.array([alpha]), np.array([beta]), [0.05, 0.95])
    assert [low[0], high[0]] == pytest.approx(np.quantile(drawn, [0.05, 0.95]), abs=3e-3)


def test_product_where_it_is_a_beta() -> None:
    """Trials thin out with depth as in a run at one K: Beta(9, 3) Beta(6, 3) = Beta(6, 6)."""
    mean, low, high = product_interval(np.array([9.0, 6.0]), np.array([3.0, 3.0]), 0.9)
    exact = quantiles(np.array([6.0]), np.array([6.0]), [0.05, 0.95])
    assert mean[1] == pytest.approx(0.5)
    assert [low[1], high[1]] == pytest.approx([exact[0][0], exact[1][0]], abs=1e-6)


def test_product_where_it_is_none() -> None:
    """Probability, not position, is what an interval promises: it leaves out nearly as much as it says."""
    alpha, beta = np.array([8.0, 30.0, 7.0, 4.0]), np.array([2.0, 9.0, 3.0, 4.0])
    mean, low, high = product_interval(alpha, beta, 0.9)
    drawn = np.cumprod(np.random.default_rng(1).beta(alpha, beta, (200_000, 4)), axis=1)
    assert mean == pytest.approx(drawn.mean(axis=0), abs=2e-3)
    assert (drawn < low).mean(axis=0) == pytest.approx([0.05] * 4, abs=0.015)
    assert (drawn > high).mean(axis=0) == pytest.approx([0.05] * 4, abs=0.015)


def test_no_depths() -> None:
    assert [end.tolist() for end in product_interval(np.zeros(0), np.zeros(0), 0.9)] == [[], [], []]
