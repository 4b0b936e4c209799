"""A forecast of how many drafts of the next step will be rejected, by which a pass of the drafter is sized."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate


class Rejections:
    """How many drafts of an engine's next step will be rejected, by what became of those of its last steps.

    Acceptance at each depth is that of all requests together, later steps counting more.
    """

    KEPT = 0.95
    """Decay of a step's weight, per step."""

    def __init__(self, k_max: int) -> None:
        self._num_verified, self._num_accepted = [0.0] * (k_max + 1), [0.0] * (k_max + 1)
        self._num_chosen = self._num_chosen_rejected = 0.0

    def add(self, num_verified: int, num_accepted: int) -> None:
        """One request's step."""
        self._num_verified[num_verified] += 1.0
        self._num_accepted[num_accepted] += 1.0

    def add_chosen(self, num_verified: int, num_accepted: int) -> None:
        """All of a step whose drafts were chosen."""
        self._num_chosen = self.KEPT * self._num_chosen + num_verified
        self._num_chosen_rejected = self.KEPT * self._num_chosen_rejected + num_verified - num_accepted

    def expected_of_chosen(self, num_drafts: int) -> int:
        """As `expected`, of so many drafts that are chosen; 0 before the first such step."""
        if not self._num_chosen:
            return 0
        return max(0, int(num_drafts * self._num_chosen_rejected / self._num_chosen - 2.0 * math.sqrt(num_drafts)))

    def expected(self, num_drafts: Iterable[int]) -> int:
        """At least so many of the requests' drafts are rejected, as a rule: the mean, less a bound of its standard
        deviation. Of a request's 0..K accepted drafts that is K / 2 at most. To be asked once a step.

        Args:
            num_drafts: of each request, 0..k_max.
        """
        num_verified = num_accepted = 0.0
        survival_K = [1.0] * len(self._num_verified)  # [0] is not used
        for depth in range(len(survival_K) - 1, 0, -1):
            num_verified += self._num_verified[depth]
            num_accepted += self._num_accepted[depth]
            if num_verified:
                survival_K[depth] = num_accepted / num_verified
        accepted_K = list(accumulate(survival_K[1:], initial=0.0))
        mean = variance = 0.0
        for k, count in Counter(num_drafts).items():
            mean += count * (k - accepted_K[k])
            variance += count * (k / 2) ** 2
        for counts in (self._num_verified, self._num_accepted):
            counts[:] = [self.KEPT * count for count in counts]
        return max(0, int(mean - math.sqrt(variance)))
