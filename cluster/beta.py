"""Quantiles of Beta variables and of products of independent ones, with numpy alone.

Enters: arrays of Beta parameters by depth. Leaves: means and quantiles by depth. Never knows what the variables are.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_GRID_POINTS = 513
GRID_HALF_WIDTH = 8.0  # standard deviations
_GRID_G = np.linspace(-GRID_HALF_WIDTH, GRID_HALF_WIDTH, NUM_GRID_POINTS)
_GRID_G.setflags(write=False)


def quantiles(alpha_D: Array, beta_D: Array, probabilities: Sequence[float]) -> list[Array]:
    """For each probability, the values that the Beta(alpha, beta) stay below with it. Parameters > 0.

    Integrates the density of y = logit(x), x^alpha (1 - x)^beta, which is smooth with exponential tails whatever the
    parameters are; its mode is log(alpha / beta), and its variance trigamma(alpha) + trigamma(beta) is less than the
    sum of 1/p + 1/p^2 over both parameters p. The error is below 1e-3, and below 1e-2 for parameters under 0.5.
    """
    scale_D = np.sqrt(1 / alpha_D + 1 / alpha_D**2 + 1 / beta_D + 1 / beta_D**2)
    mode_D = np.log(alpha_D / beta_D)
    logit_DG = mode_D[:, None] + scale_D[:, None] * _GRID_G
    # log(1 + e^y), written so that a large |y| cannot overflow.
    softplus_DG = np.maximum(logit_DG, 0) + np.log1p(np.exp(-np.abs(logit_DG)))
    density_DG = alpha_D[:, None] * logit_DG - (alpha_D + beta_D)[:, None] * softplus_DG
    density_DG = np.exp(density_DG - density_DG.max(axis=1, keepdims=True))
    # Trapezoids: half of each interval's two ends.
    mass_DG = np.zeros_like(density_DG)
    np.cumsum(density_DG[:, 1:] + density_DG[:, :-1], axis=1, out=mass_DG[:, 1:])
    rows = [np.interp(np.multiply(probabilities, mass_G[-1]), mass_G, _GRID_G) for mass_G in mass_DG]
    position_PD = np.array(rows, float).reshape(len(alpha_D), len(probabilities)).T
    return list(1 / (1 + np.exp(-(mode_D + scale_D * position_PD))))


def product_interval(alpha_D: Array, beta_D: Array, level: float) -> tuple[Array, Array, Array]:
    """Mean, low and high end of x_1 x_2 ... x_d for each d, with independent x_i ~ Beta(alpha_i, beta_i).

    Mean and variance are exact; the interval of probability `level`, as much left out on either side, is that of the
    Beta with the same mean and variance. That is the product's own distribution when alpha_i + beta_i = alpha_{i-1},
    which is how trials thin out with depth when every step plays the same K.
    """
    total_D = alpha_D + beta_D
    mean_D = np.asarray(np.cumprod(alpha_D / total_D), np.float64)
    # 1 + variance / mean^2 of a product is the product of the factors' own, and beta / (alpha (total + 1)) is a Beta's.
    relative_variance_D = np.expm1(np.cumsum(np.log1p(beta_D / (alpha_D * (total_D + 1)))))
    matched_total_D = np.maximum((1 - mean_D) / (mean_D * relative_variance_D) - 1, 1e-3)
    ends = [(1 - level) / 2, (1 + level) / 2]
    low_D, high_D = quantiles(mean_D * matched_total_D, (1 - mean_D) * matched_total_D, ends)
    return mean_D, low_D, high_D
