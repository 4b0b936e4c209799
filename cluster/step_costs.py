"""What a step costs, in the form in which K is chosen: one curve over the number of drafts.

Enters: step times by shape (`cluster.step_time`, or anything with `seconds`). Leaves: `Curve`s, remembered because
the scheduler asks for the same few at every engine step. Never knows: survival, workloads, the engine.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.step_fit import StepShape, padded

MAX_POINTS = 96
"""A curve asks the model at so many numbers of drafts at most and interpolates between: a curve of 128 requests would
take 15 ms of the engine's time otherwise, each time that a batch has a new size."""

MAX_POINTS_BESIDE_PROMPTS = 24
"""The same beside prompts, whose tokens leave little of the staircase."""


class StepCosts(Protocol):
    """What the choice of K needs of a step-time model. `cluster.step_time.StepTimes` is one."""

    @property
    def max_draft_tokens(self) -> int:
        """K_max."""
        ...

    @property
    def full_graph_depths(self) -> frozenset[int]:
        """Depths at which a batch where all requests have the same K runs on a full CUDA graph."""
        ...

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one engine step, drafting included."""
        ...


@dataclass(frozen=True)
class Curve:
    """Seconds of a step of one number of requests.

    `ragged[m]`: with m drafts in all, requests at different K (at the same K only where nothing else is possible: one
    request, m = 0, m = requests * K_max). `uniform[k]`: every request at k. `graph_from[k]`: with so many drafts or
    more, and K = k the deepest among them, a batch runs on the full graph of k and takes `uniform[k]`: requests * k
    where the engine pads no batches, fewer where it does, more than can be where k has no full graph.
    """

    ragged: NDArray[np.float64]
    uniform: tuple[float, ...]
    graph_from: tuple[int, ...]


class CostCurves:
    """Step times behind a bounded memory of curves, least recently used ones forgotten. Not thread-safe.

    The context is rounded to one eighth of its power of two, so a context that grows token by token does not ask for
    a new curve at every step; the step time at the rounded context is what the decision sees. Tokens of prompts are
    rounded to a power of two. `times` must not change its answers: take a new `CostCurves` when it does (a correction
    by residuals, another table).
    """

    def __init__(self, times: StepCosts, max_curves: int = 512) -> None:
        self._times = times
        self._max_curves = max_curves
        self._curves: OrderedDict[tuple[int, int, int], Curve] = OrderedDict()
        self.max_draft_tokens = times.max_draft_tokens
        self.full_graph_depths = frozenset(k for k in times.full_graph_depths if 0 <= k <= self.max_draft_tokens)
        # A model of a step that knows nothing of padding stands for an engine that does not pad.
        self._padding_tokens: int = getattr(times, "padding_tokens", 0)
        self._capture_sizes: Mapping[int | None, Sequence[float]] = getattr(times, "capture_sizes", {})

    @classmethod
    def of(cls, times: "StepCosts | CostCurves") -> "CostCurves":
        """`times` itself where it remembers its curves already."""
        return times if isinstance(times, CostCurves) else cls(times)

    def curve(self, num_requests: int, context_tokens: float, prompt_tokens: int = 0) -> Curve:
        """The curve of a batch.

        With `prompt_tokens` of other requests' prompts in the same step no full graph can run it, and the curve is what
        such a step takes less what the prompts add to one without drafts. That part is paid whatever is drafted, and
        its sum does not depend on K, because every request has one prompt: counted in, it would make each step look as
        if more drafts were worth their time.

        Raises:
            ValueError: context, number of requests or prompt tokens are out of range, or the table answers with a time
                that is not positive and finite.
        """
        if num_requests < 1:
            raise ValueError(f"num_requests is {num_requests}: a step has at least 1 request")
        if prompt_tokens < 0:
            raise ValueError(f"prompt_tokens is {prompt_tokens}: a step has 0 or more")
        rounded = 1 << round(math.log2(prompt_tokens)) if prompt_tokens else 0
        key = (num_requests, rounded_context(context_tokens), rounded)
        known = self._curves.get(key)
        if known is not None:
            self._curves.move_to_end(key)
            return known
        curve = self._measure_beside(*key) if rounded else self._measure(num_requests, key[1])
        self._curves[key] = curve
        if len(self._curves) > self._max_curves:
            self._curves.popitem(last=False)
        return curve

    def _measure(self, num_requests: int, context_tokens: int) -> Curve:
        max_drafts = num_requests * self.max_draft_tokens

        def seconds(num_drafts: int, uniform_depth: int | None) -> float:
            return self._seconds(
                StepShape(num_requests, num_requests + num_drafts, uniform_depth, float(context_tokens))
            )

        uniform = tuple(seconds(num_requests * k, k) for k in range(self.max_draft_tokens + 1))
        if num_requests == 1:
            ragged = np.array(uniform)
        else:
            asked = np.unique(np.linspace(1, max_drafts - 1, MAX_POINTS).round().astype(int))
            found = [seconds(int(num_drafts), None) for num_drafts in asked] if max_drafts > 1 else []
            between = np.interp(np.arange(1, max_drafts), asked, found) if found else ()
            ragged = np.array([uniform[0], *between, *uniform[1:][-1:]])
            self._raise_to_graphs(ragged, uniform, num_requests)
        ragged.setflags(write=False)
        graph_from = tuple(self._graph_from(num_requests, k) for k in range(self.max_draft_tokens + 1))
        return Curve(ragged, uniform, graph_from)

    def _measure_beside(self, num_requests: int, context_tokens: int, prompt_tokens: int) -> Curve:
        max_drafts = num_requests * self.max_draft_tokens

        def seconds(num_tokens: int) -> float:
            longest = max(prompt_tokens, self.max_draft_tokens + 2)  # more than any graph gives a request
            return self._seconds(StepShape(num_requests, num_requests + num_tokens, None, context_tokens, longest))

        asked = np.unique(np.linspace(0, max_drafts, MAX_POINTS_BESIDE_PROMPTS).round().astype(int))
        prompts_s = seconds(prompt_tokens) - seconds(0)
        found = [seconds(prompt_tokens + int(num_drafts)) - prompts_s for num_drafts in asked]
        ragged = np.maximum.accumulate(np.interp(np.arange(max_drafts + 1), asked, found))
        ragged.setflags(write=False)
        places = [num_requests * k for k in range(self.max_draft_tokens + 1)]
        return Curve(ragged, tuple(ragged[places].tolist()), tuple(place + 1 for place in places))

    def _seconds(self, shape: StepShape) -> float:
        value = self._times.seconds(shape)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the step-time table says {value} s for {shape}: every time must be positive, finite")
        return value

    def _raise_to_graphs(self, ragged: NDArray[np.float64], uniform: Sequence[float], num_requests: int) -> None:
        """A step off the graphs takes no less than one on a full graph that verifies no more. Few ragged batches are
        measured, and what is said of those between them must not draw a batch off a graph that is known."""
        if num_requests > 1:
            for depth in sorted(self.full_graph_depths):
                beyond = ragged[num_requests * depth :]
                np.maximum(beyond, uniform[depth], out=beyond)

    def _graph_from(self, num_requests: int, depth: int) -> int:
        num_drafts = num_requests * depth
        if depth not in self.full_graph_depths:
            return num_drafts + 1
        graph_tokens = padded(num_requests + num_drafts, self._capture_sizes.get(depth, ()))
        return max(0, min(num_drafts, math.ceil(graph_tokens) - self._padding_tokens - num_requests))


def rounded_context(context_tokens: float) -> int:
    """The context to one eighth of the power of two below it, e.g. 1000 -> 1024, 1100 -> 1152; at most 7% away.

    Raises:
        ValueError: negative, infinite or not a number.
    """
    if not 0 <= context_tokens < math.inf:
        raise ValueError(f"context_tokens is {context_tokens}: the mean context is a finite number, 0 or more")
    grain = max(1, (1 << int(context_tokens).bit_length()) // 16)
    return round(context_tokens / grain) * grain
