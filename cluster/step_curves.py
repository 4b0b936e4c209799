"""Curves of one variable that measured step times are fitted to. Formulas: `cluster.step_fit`."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MAX_BACKFITS = 300
BACKFIT_TOLERANCE = 1e-7


def isotonic(values: Array, weights: Array) -> Array:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, weight_before, length_before = blocks.pop()
            mean = (mean * total + before * weight_before) / (total + weight_before)
            total, length = total + weight_before, length + length_before
        blocks.append((mean, total, length))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks]).astype(np.float64)


@dataclass(frozen=True)
class Curve:
    """Seconds over tokens of a graph, or over requests: linear between `knots` and beyond the last."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]
    slope: float
    """Seconds for each unit beyond the last knot."""

    @classmethod
    def fit(cls, x: Array, values: Array, weights: Array, slope_of_one: float) -> "Curve":
        """`slope_of_one`: the slope where all x are the same. Else it is the chord over the upper half of the knots."""
        knots, index = np.unique(x, return_inverse=True)
        total = np.bincount(index, weights).astype(np.float64)
        heights = isotonic(np.bincount(index, weights * values) / total, total)
        if len(knots) == 1:
            slope = slope_of_one
        else:
            start = min(int(np.searchsorted(knots, knots[-1] / 2)), len(knots) - 2)
            slope = float((heights[-1] - heights[start]) / (knots[-1] - knots[start]))
        return cls(tuple(knots.tolist()), tuple(heights.tolist()), slope)

    def at(self, x: float) -> float:
        knots, seconds = self.knots, self.seconds
        if x > knots[-1]:
            return seconds[-1] + self.slope * (x - knots[-1])
        upper = bisect_left(knots, x)
        if upper == 0 or knots[upper] == x:
            return seconds[upper]
        share = (x - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
        return seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1])


FLAT = Curve((0.0,), (0.0,), 0.0)
ONE = Curve((0.0,), (1.0,), 0.0)


def additive(tokens: Array, requests: Array, times: Array, weights: Array) -> tuple[Curve, Curve]:
    """V and D of V(tokens) + D(requests), least squares by backfitting; D begins at 0, for a constant is V's."""
    proportional = float(times.max() / tokens.max())
    verify = Curve.fit(tokens, times, weights, proportional)
    draft, before = FLAT, np.full(len(times), np.inf)
    for _ in range(MAX_BACKFITS):
        drafting = np.array([draft.at(one) for one in requests])
        verify = Curve.fit(tokens, times - drafting, weights, proportional)
        verifying = np.array([verify.at(one) for one in tokens])
        curve = Curve.fit(requests, times - verifying, weights, 0.0)
        draft = Curve(curve.knots, tuple(one - curve.seconds[0] for one in curve.seconds), curve.slope)
        if np.max(np.abs(verifying - before) / times) < BACKFIT_TOLERANCE:
            break
        before = verifying
    return verify, draft
