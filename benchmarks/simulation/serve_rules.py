"""Ray Serve's rules around an autoscaling policy, as of 2.60: metrics, delays, bounds, the way back from zero.

Enters: what a policy wishes, and the numbers of requests. Leaves: Serve's target number. Written after
`ray/serve/autoscaling_policy.py` (`_apply_delay_logic`, `_get_cold_start_scale_up_replicas`,
`_core_replica_queue_length_policy`; the upscaling factor is 1), so that the simulation needs no Ray; a test compares
the two.
"""

import math
from collections import deque
from dataclasses import dataclass, field

LOOK_BACK_S = 30.0
RECORD_S = 6.0
"""Between two samples of a metric: 0.2 of the look-back period."""

PUSH_S = 10.0
"""Between two deliveries to the controller."""

_EPSILON_S = 1e-6


@dataclass
class DelayedTarget:
    """A deployment's target number. A wish must last `upscale_delay_s` or `downscale_delay_s` to become it; of a wish
    for fewer than run, `downscaling_factor` is taken."""

    target: int
    minimum: int
    maximum: int
    upscale_delay_s: float
    downscale_delay_s: float
    downscaling_factor: float = 1.0
    _direction: int = 0
    _since_s: float | None = None

    def apply(self, wish: float, num_running: int, num_requests: float, now_s: float) -> int:
        """The new target. `num_running`: replicas that serve."""
        if num_running == 0 and num_requests > 0:
            self.target = self._bounded(max(1, self.target))
            return self.target
        wished = self._scaled(wish, num_running)
        if num_running == 0 and wished > 0:
            self.target = self._bounded(wished)
            return self.target
        self.target = self._bounded(self._delayed(max(0, wished), now_s))
        return self.target

    def _scaled(self, wish: float, num_running: int) -> int:
        if num_running == 0 or wish >= num_running:
            return math.ceil(wish)
        scaled = math.ceil(num_running + self.downscaling_factor * (wish - num_running))
        is_stuck = math.ceil(wish) < num_running == scaled
        return scaled - 1 if is_stuck else scaled

    def _delayed(self, wished: int, now_s: float) -> int:
        direction = (wished > self.target) - (wished < self.target)
        if direction != self._direction or direction == 0:
            self._direction, self._since_s = direction, None
        if direction == 0:
            return self.target
        if direction < 0 and self.target != 1:
            wished = max(1, wished)  # to zero only from one
        if self._since_s is None:
            self._since_s = now_s
        delay_s = self.upscale_delay_s if direction > 0 else self.downscale_delay_s
        if now_s - self._since_s + _EPSILON_S < delay_s:
            return self.target
        self._direction, self._since_s = 0, None
        return wished

    def _bounded(self, number: int) -> int:
        return min(self.maximum, max(self.minimum, number))


def queue_length_wish(num_requests: float, num_running: int, target: int, target_ongoing_requests: float) -> float:
    """What Serve's own policy wishes."""
    if num_running == 0:
        return float(target)
    return num_running * (num_requests / (target_ongoing_requests * num_running))


@dataclass
class LookBack:
    """A number of requests as the controller sees it: sampled, averaged over the look-back period, delivered late."""

    seen: float = 0.0
    _samples: deque[tuple[float, float]] = field(default_factory=deque)

    def sample(self, value: float, now_s: float) -> None:
        self._samples.append((now_s, value))
        while now_s - self._samples[0][0] > LOOK_BACK_S:
            self._samples.popleft()

    def deliver(self) -> None:
        """A push: the controller now sees the mean of the samples."""
        if self._samples:
            self.seen = sum(value for _, value in self._samples) / len(self._samples)
