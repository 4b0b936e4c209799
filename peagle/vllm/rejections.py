"""A forecast of how many drafts of the next step will be rejected. A pass of the drafter is sized by it."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate


class RejectionForecast:
    """Forecasts the rejected drafts of an engine's next step from its last steps.

    The acceptance rate at each draft position is that of all requests together; later steps weigh more.
    """

    DECAY = 0.95
    """Decay of a step's weight, per step."""

    def __init__(self, k_max: int) -> None:
        self._num_verified, self._num_accepted = [0.0] * (k_max + 1), [0.0] * (k_max + 1)

    def record_step(self, num_verified: int, num_accepted: int) -> None:
        """Count one request's step: drafts verified, 1..k_max, and accepted."""
        self._num_verified[num_verified] += 1.0
        self._num_accepted[num_accepted] += 1.0

    def forecast(self, num_drafts: Iterable[int]) -> int:
        """A number of rejected drafts that the step rarely stays below: the mean less one standard deviation.

        A request's number of accepted drafts lies in 0..K, so its standard deviation is at most K / 2. Call it once a
        step: each call lets the counts decay.

        Args:
            num_drafts: of each request, 0..k_max.
        """
        num_verified = num_accepted = 0.0
        rates_K = [1.0] * len(self._num_verified)  # [0] is not used
        for position in range(len(rates_K) - 1, 0, -1):
            num_verified += self._num_verified[position]
            num_accepted += self._num_accepted[position]
            if num_verified:
                rates_K[position] = num_accepted / num_verified
        accepted_K = list(accumulate(rates_K[1:], initial=0.0))
        mean = variance = 0.0
        for k, count in Counter(num_drafts).items():
            mean += count * (k - accepted_K[k])
            variance += count * (k / 2) ** 2
        for counts in (self._num_verified, self._num_accepted):
            counts[:] = [self.DECAY * count for count in counts]
        return max(0, int(mean - math.sqrt(variance)))
