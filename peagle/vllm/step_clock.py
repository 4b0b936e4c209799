"""How long each decoding step of a running engine took, and of what shape it was.

Enters: the moment at which a step's result reaches the scheduler, and what that step had scheduled. Leaves: `TimedStep`
s, and their text form, in which they travel as one header of an engine output (as in `peagle.vllm.channel`).

A step's time is the interval between two results that follow each other in the engine's own process. Without
asynchronous scheduling that is a whole cycle: update, taking over drafts, schedule, forward, verification, drafting.
With it the result of one step is taken while the next one runs, so the interval between two results is what the step
adds to the time of the run: the longer of the host's and the device's part. Either way the intervals of a run add up
to its time, whatever overlaps. A step with prompt tokens in it, and the first after a pause, have no time.
Knows nothing of vLLM but the fields it reads; never decides anything.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

STEP_TIME_HEADER = "x-peagle-step-time"


class Scheduled(Protocol):
    """The part of vLLM's `SchedulerOutput` that says what a step computes."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that only decoded.

    `num_tokens`: drafts verified plus one for each request; `uniform_depth`: K where all had the same, else None;
    `context_tokens`: mean length before the step.
    """

    seconds: float
    num_requests: int
    num_tokens: int
    uniform_depth: int | None
    context_tokens: float

    def encode(self) -> str:
        """One header value: `"0.0067123 8 32 3 512.5"`; `-` stands for no uniform depth."""
        depth = "-" if self.uniform_depth is None else self.uniform_depth
        return f"{self.seconds:.7f} {self.num_requests} {self.num_tokens} {depth} {self.context_tokens:.1f}"

    @classmethod
    def decode(cls, value: str) -> "TimedStep":
        """Inverse of `encode`.

        Raises:
            ValueError: the text is not what `encode` writes.
        """
        parts = value.split()
        if len(parts) != 5:
            raise ValueError(f"{STEP_TIME_HEADER}: five parts expected, not {value!r:.80}")
        seconds, num_requests, num_tokens, depth, context = parts
        uniform = None if depth == "-" else int(depth)
        return cls(float(seconds), int(num_requests), int(num_tokens), uniform, float(context))


class StepClock:
    """Turns arrivals of results into `TimedStep`s. One for each engine, fed in order."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def arrived(self, now_s: float, scheduled: Scheduled) -> TimedStep | None:
        """The result of `scheduled` is there at `now_s` (monotonic seconds). None where the step has no time.

        A clock that stands still or goes back gives no time either.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or not math.isfinite(now_s - last_s) or now_s <= last_s:
            return None
        return _decoded(now_s - last_s, scheduled)

    def pause(self) -> None:
        """The engine has nothing to do: what comes until the next result is no step's time."""
        self._last_s = None


def _decoded(seconds: float, scheduled: Scheduled) -> TimedStep | None:
    tokens = scheduled.num_scheduled_tokens
    if not tokens or scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids:
        return None
    drafts = scheduled.scheduled_spec_decode_tokens
    depths = {len(drafts.get(request_id, ())) for request_id in tokens}
    num_drafts = sum(len(of) for of in drafts.values())
    if scheduled.total_num_scheduled_tokens != len(tokens) + num_drafts:
        return None  # a chunk of a prompt
    context = scheduled.scheduled_cached_reqs.num_computed_tokens
    mean_context = sum(context) / len(context) if context else 0.0
    uniform = depths.pop() if len(depths) == 1 else None
    return TimedStep(seconds, len(tokens), scheduled.total_num_scheduled_tokens, uniform, mean_context)
