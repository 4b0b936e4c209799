"""What step times turn out to be, against what the table predicts: an online correction.

Enters: pairs of measured and predicted seconds for a shape, as steps happen. Leaves: a factor for each kind of shape,
and how far off the corrected prediction still is. No clock: a step's duration comes in as a value, so a clock that
jumps shows as one absurd duration, and one observation moves a factor by some percent at the start, by a few per mille
later.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.corrections import (
    MAX_LOG_FACTOR,
    CorrectedTimes,
    Corrections,
    Factor,
    Kind,
    common_factor,
    kind_of,
    share_of,
)
from cluster.step_costs import StepCosts
from cluster.step_fit import StepShape

MAX_LOG_ERROR = 0.5
"""Further from the present estimate than a factor e^0.5 = 1.65, an observation counts as that far."""
NUM_STEPS_OF_PRIOR = 10.0
"""At the start the factor 1 weighs like so many steps, so that a pause among the first does not set the factor."""


@dataclass(slots=True)
class _Mean:
    """Exponential mean of log(measured / predicted)."""

    log_factor: float = 0.0
    num_steps: float = 0.0

    def add(self, log_error: float, weight: float) -> None:
        self.num_steps += 1.0
        step = max(weight, 1.0 / (self.num_steps + NUM_STEPS_OF_PRIOR))
        deviation = min(max(log_error - self.log_factor, -MAX_LOG_ERROR), MAX_LOG_ERROR)
        self.log_factor = min(max(self.log_factor + step * deviation, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)

    @property
    def share(self) -> float:
        return share_of(self.num_steps)


class Residuals:
    """Factors by (batch bucket, depth of the full graph or none); a bucket is 1, 2, 3-4, 5-8, ... requests.

    Depths apart, because the best K is often one of two that are close, and a table's points err each by themselves.
    The correction of a kind is a weighted mean, in logarithms, of its own factor and the one that all kinds have in
    common (`cluster.corrections.common_factor`): what no step has visited yet is corrected like the rest, so that a
    table measured on a faster machine does not make unvisited depths look cheap.

    Args:
        full_graph_depths: as `StepTimes.full_graph_depths`.
        half_life_steps: steps of a kind after which an observation counts half, above 0.
    """

    def __init__(self, full_graph_depths: Collection[int], *, half_life_steps: float = 200.0) -> None:
        if not (math.isfinite(half_life_steps) and half_life_steps > 0):
            raise ValueError(f"Residuals: half_life_steps must be above 0, not {half_life_steps!r}")
        self._full = frozenset(full_graph_depths)
        self._weight = 1.0 - 0.5 ** (1.0 / half_life_steps)
        self._kinds: dict[Kind, _Mean] = {}
        self._total = self._shares = 0.0  # as `common_factor` takes them, kept up step by step
        self._error = 0.0
        self._num_errors = 0.0
        self.num_refused = 0

    def observe(self, measured_s: float, predicted_s: float, shape: StepShape) -> bool:
        """Take in one step; `predicted_s` is the table's own, uncorrected. A duration that is not a finite number
        above 0 is counted in `num_refused`, changes nothing else, and gives False."""
        if not all(math.isfinite(one) and one > 0 for one in (measured_s, predicted_s)):
            self.num_refused += 1
            return False
        error = min(abs(self.correct(predicted_s, shape) / measured_s - 1.0), 1.0)
        self._num_errors += 1.0
        self._error += max(self._weight, 1.0 / self._num_errors) * (error - self._error)
        log_error = math.log(measured_s / predicted_s)
        own = self._kinds.setdefault(kind_of(shape, self._full), _Mean())
        share, total = own.share, own.share * own.log_factor
        own.add(log_error, self._weight)
        self._shares += own.share - share
        self._total += own.share * own.log_factor - total
        return True

    def correct(self, seconds: float, shape: StepShape) -> float:
        """`seconds`, the table's prediction for `shape`, times the factor of its kind."""
        own = self._kinds.get(kind_of(shape, self._full))
        common = common_factor(self._total, self._shares)
        if own is None:
            return seconds * math.exp(common)
        return seconds * math.exp(own.share * own.log_factor + (1.0 - own.share) * common)

    def corrections(self) -> Corrections:
        """All factors as they are now."""
        return Corrections({kind: Factor(one.log_factor, one.num_steps) for kind, one in self._kinds.items()})

    def corrected(self, times: StepCosts) -> CorrectedTimes:
        """`times`, the table that predicted, under the factors as they are now."""
        return CorrectedTimes(times, self.corrections())

    @property
    def mape(self) -> float:
        """Recent mean of |corrected prediction / measured - 1|, each at most 1; 0.0 before the first step. Above 0.1
        the table is worth measuring again."""
        return self._error

    @property
    def num_steps(self) -> float:
        """Steps taken in."""
        return self._num_errors

    def snapshot(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "kinds": [
                [size, depth, one.log_factor, one.num_steps] for (size, depth), one in sorted(self._kinds.items())
            ],
            "mape": [self._error, self._num_errors],
            "num_refused": self.num_refused,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a `snapshot`. Raises ValueError naming the field; then nothing has changed."""
        found = {"kinds", "mape", "num_refused"} ^ set(snapshot)
        if found:
            raise ValueError(f"residuals: field {sorted(found)[0]!r} is missing or unknown")
        error, num_errors = _numbers(snapshot["mape"], 2, "mape")
        kinds: dict[Kind, _Mean] = {}
        if not isinstance(snapshot["kinds"], list):
            raise ValueError(f"residuals: field 'kinds' must be a list, not {snapshot['kinds']!r:.80}")
        for row in snapshot["kinds"]:
            size, depth, log_factor, num_steps = _numbers(row, 4, "kinds")
            kinds[int(size), int(depth)] = _Mean(log_factor, num_steps)
        (num_refused,) = _numbers([snapshot["num_refused"]], 1, "num_refused")
        self._kinds, self._error, self._num_errors = kinds, error, num_errors
        self._shares = sum(one.share for one in kinds.values())
        self._total = sum(one.share * one.log_factor for one in kinds.values())
        self.num_refused = int(num_refused)


def _numbers(value: Any, length: int, field: str) -> list[float]:
    """`value` as `length` finite numbers, counts (the last) not below 0."""
    good = isinstance(value, list | tuple) and len(value) == length
    good = good and all(isinstance(one, int | float) and math.isfinite(one) for one in value)
    if not good or value[-1] < 0:
        raise ValueError(f"residuals: field {field!r} must hold {length} numbers, the last not below 0: {value!r:.80}")
    return [float(one) for one in value]
