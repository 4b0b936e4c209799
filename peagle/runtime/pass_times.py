"""How long a drafter's answer may take, from how long its answers took. Pure."""

from __future__ import annotations

import dataclasses
import math

_WEIGHT = 0.1  # of the newest answer in the averages
_NUM_PASSES = 3  # expected passes that a target waits: its own, and one each of others in front and of bad luck


@dataclasses.dataclass
class PassTimes:
    """Averages over answers: exponential, of seconds and of rows.

    A pass costs a fixed part and a part by rows, so a step with more rows than the average may take as much longer
    (an upper bound), which keeps a chunk of a long prompt from looking like a drafter that hangs.
    """

    min_deadline_s: float
    max_deadline_s: float
    average_s: float | None = None
    average_rows: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.min_deadline_s <= self.max_deadline_s < math.inf:
            raise ValueError(
                f"min_deadline_s = {self.min_deadline_s} and max_deadline_s = {self.max_deadline_s} must be above 0, "
                "finite and in this order"
            )

    def add(self, service_s: float, num_rows: int) -> None:
        """An answer to a step of num_rows rows took service_s seconds."""
        if self.average_s is None:
            self.average_s, self.average_rows = service_s, max(1.0, num_rows)
            return
        self.average_s += _WEIGHT * (service_s - self.average_s)
        self.average_rows += _WEIGHT * (max(1.0, num_rows) - self.average_rows)

    def deadline_s(self, num_rows: int) -> float:
        """Seconds to wait for the answer to a step of num_rows rows: the longest allowed as long as none is known."""
        if self.average_s is None:
            return self.max_deadline_s
        expected_s = self.average_s * max(1.0, num_rows / self.average_rows)
        return min(max(_NUM_PASSES * expected_s, self.min_deadline_s), self.max_deadline_s)
