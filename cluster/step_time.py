"""How long an engine step takes: one model, which starts as a guess and is moved by what is measured.

Enters: whether the engine has a GPU, perhaps points that it measured at its start, and the steps that it then runs.
Leaves: `StepCosts`, a plain value that travels from the scheduler to the choice of K and to autoscaling. Never knows:
survival, workloads, vLLM.

A step of R requests with N target rows (one a request and one a draft), beside prompts of P tokens, at a mean context
of C tokens, takes

    seconds = V(N + P) + D(R) + (g + d R) [drafting] + p [P > 0] + q [choosing] + c_R R C + c_N (N + P) C

V is the target's forward, D the host by requests, both straight between knots; g + d R the drafter's pass, which makes
the drafts of the next step and is left out where none are wanted; p what a step loses off the CUDA graphs; q what it
takes more where the worker chooses which drafts are verified. What the server's process takes to send text is not in
it: streams have a pace of their own (`peagle.vllm.outputs`), whatever K.

`StepCostModel` estimates these coefficients by Bayesian linear regression, as a Kalman filter. The mean begins at a
cautious guess for a CPU or a GPU, in units of a step's fixed part; the points, or without them the first steps, say how
long the unit is. Each point and each step is one observation of a sum of coefficients. What was never visited moves
along with its neighbours and with the scale, and stays uncertain.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a running engine.

    Attributes:
        seconds: what it took.
        num_requests: requests that decoded.
        num_tokens: their target rows, drafts included.
        context_tokens: mean length of what these requests attend to.
        prompt_tokens: rows of prompts in the same step.
        is_drafted: the drafter's pass ran, for the next step; None where it runs exactly if drafts are verified.
        is_chosen: the worker chose which drafts are verified.
    """

    seconds: float
    num_requests: int
    num_tokens: int
    context_tokens: float = 0.0
    prompt_tokens: int = 0
    is_drafted: bool | None = None
    is_chosen: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether a step can have these numbers."""
        is_timed = 0 < self.seconds < math.inf and 0 < self.num_requests <= self.num_tokens
        return is_timed and 0 <= self.context_tokens < math.inf and self.prompt_tokens >= 0


NUMBERS = (
    "drafting_s",
    "per_request_drafting_s",
    "beside_prompts_s",
    "choosing_s",
    "per_request_context_s",
    "per_token_context_s",
)
"""The coefficients other than V and D: g, d, p, q, c_R and c_N."""

LEAST_S = 1e-6


@dataclass(frozen=True)
class Curve:
    """Seconds over a number: straight between ascending `knots`, and on beyond the last two; never falling."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, numbers: Array) -> Array:
        (x0, x1), (y0, y1) = self.knots[-2:], self.seconds[-2:]
        beyond = np.maximum(numbers - x1, 0.0) * ((y1 - y0) / (x1 - x0))
        return np.asarray(np.interp(numbers, self.knots, self.seconds) + beyond, np.float64)

    def at(self, number: float) -> float:
        return float(self(np.array(number)))

    def to_wire(self, name: str) -> dict[str, float]:
        return {f"{name}:{knot:g}": seconds for knot, seconds in zip(self.knots, self.seconds, strict=True)}

    @classmethod
    def from_wire(cls, name: str, numbers: Mapping[str, float]) -> "Curve":
        """Raises ValueError for fewer than two knots, or seconds that fall."""
        begin = f"{name}:"
        pairs = sorted((float(key.removeprefix(begin)), numbers[key]) for key in numbers if key.startswith(begin))
        if len(pairs) < 2 or any(before[1] > after[1] for before, after in pairwise(pairs)):
            raise ValueError(f"{name} needs at least two knots, never falling: {pairs}")
        knots, seconds = zip(*pairs, strict=True)
        return cls(knots, tuple(map(float, seconds)))


@dataclass(frozen=True)
class StepCosts:
    """The model's coefficients at one time, in seconds.

    Attributes:
        forward, by_requests: V and D.
        num_steps: steps of the running engine that it rests on.
        has_points: the engine measured points at its start.
        others: as the formula has them; of `per_*_context_s` each token of context counts.
    """

    forward: Curve
    by_requests: Curve
    drafting_s: float = 0.0
    per_request_drafting_s: float = 0.0
    beside_prompts_s: float = 0.0
    choosing_s: float = 0.0
    per_request_context_s: float = 0.0
    per_token_context_s: float = 0.0
    num_steps: float = 0.0
    has_points: bool = False

    def curve(
        self,
        num_requests: int,
        num_drafts: int,
        context_tokens: float = 0.0,
        prompt_tokens: float = 0.0,
        *,
        is_drafted: bool = False,
    ) -> Array:
        """Seconds of a step of `num_requests` with 0 .. `num_drafts` drafts in all, never falling.

        `is_drafted`: the drafter's pass runs without drafts too, because some request may get drafts in the next step.
        With `prompt_tokens` of other requests' prompts in the same step it is what such a step takes less what the
        prompts add to one without drafts: that part is paid whatever is drafted, and its sum does not depend on K,
        because every request has one prompt.

        Raises ValueError where a number is out of range.
        """
        if num_requests < 1 or num_drafts < 0 or prompt_tokens < 0 or not 0 <= context_tokens < math.inf:
            raise ValueError(
                f"no step has {num_requests} requests, {num_drafts} drafts, {prompt_tokens} prompt tokens and a "
                f"context of {context_tokens}"
            )
        num_tokens: Array = np.arange(num_requests, num_requests + num_drafts + 1, dtype=np.float64)
        seconds = self.forward(num_tokens + prompt_tokens) + self.per_token_context_s * context_tokens * num_tokens
        seconds[0 if is_drafted else 1 :] += self.pass_s(num_requests)
        seconds += self.by_requests.at(num_requests) + self.per_request_context_s * context_tokens * num_requests
        if prompt_tokens:
            seconds -= self.forward.at(num_requests + prompt_tokens) - self.forward.at(num_requests)
        return np.maximum.accumulate(np.maximum(seconds, LEAST_S))

    def seconds(
        self, num_requests: float, num_tokens: float, context_tokens: float = 0.0, prompt_tokens: float = 0.0
    ) -> float:
        """What one step takes, prompts included. Numbers may be fractions: means over time."""
        rows = num_tokens + prompt_tokens
        seconds = self.forward.at(rows) + self.per_token_context_s * context_tokens * rows
        seconds += self.by_requests.at(num_requests) + self.per_request_context_s * context_tokens * num_requests
        seconds += self.pass_s(num_requests) * (num_tokens > num_requests) + self.beside_prompts_s * (prompt_tokens > 0)
        return max(seconds, LEAST_S)

    def pass_s(self, num_requests: float) -> float:
        """What the drafter's pass adds to a step."""
        return self.drafting_s + self.per_request_drafting_s * num_requests

    def to_wire(self) -> dict[str, float]:
        """Flat numbers by name: JSON, and metrics, can hold them."""
        numbers = {name: getattr(self, name) for name in ("num_steps", *NUMBERS)}
        curves = self.forward.to_wire("forward_s") | self.by_requests.to_wire("by_requests_s")
        return {"has_points": float(self.has_points), **numbers, **curves}

    @classmethod
    def from_wire(cls, value: Any) -> "StepCosts":
        """Inverse of `to_wire`; also of its JSON text. Raises ValueError for anything else."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"step costs: {value!r:.80} cannot be read as JSON") from error
        if not isinstance(value, Mapping) or not all(
            isinstance(number, int | float) and 0 <= number < math.inf for number in value.values()
        ):
            raise ValueError(f"step costs must be numbers from 0 by name, not {value!r:.80}")
        try:
            forward, by_requests = (Curve.from_wire(name, value) for name in ("forward_s", "by_requests_s"))
            numbers = {name: float(value[name]) for name in (*NUMBERS, "num_steps")}
            return cls(forward, by_requests, **numbers, has_points=bool(value["has_points"]))
        except (KeyError, ValueError) as error:
            raise ValueError(f"step costs cannot be read: {error!r}") from error


MAX_EVIDENCE_STEPS = 300.0
"""The most steps that an engine's costs are weighted by, so that a new engine counts beside an old one."""


def average_costs(engines: Sequence[StepCosts]) -> StepCosts:
    """One model for several engines, each weighted by its steps. Raises ValueError without any."""
    if not engines:
        raise ValueError("an average of no step costs")
    weights = np.array([1.0 + min(costs.num_steps, MAX_EVIDENCE_STEPS) for costs in engines])
    weights /= weights.sum()

    def mean(curves: Sequence[Curve]) -> Curve:
        knots = sorted({knot for curve in curves for knot in curve.knots})
        seconds = weights @ np.array([curve(np.array(knots)) for curve in curves])
        return Curve(tuple(knots), tuple(np.maximum.accumulate(seconds).tolist()))

    forward, by_requests = mean([costs.forward for costs in engines]), mean([costs.by_requests for costs in engines])
    numbers = {name: float(weights @ np.array([getattr(costs, name) for costs in engines])) for name in NUMBERS}
    num_steps = sum(costs.num_steps for costs in engines)
    has_points = any(costs.has_points for costs in engines)
    return StepCosts(forward, by_requests, **numbers, num_steps=num_steps, has_points=has_points)


# ---- what is believed before anything is measured

REQUEST_KNOTS = tuple(float(1 << power) for power in range(11))
KNOTS = (1.0, *(share * (1 << power) for power in range(1, 14) for share in (1.0, 1.5)))
MAX_POINTS = 256
FIRST_STEPS = 8
"""Without points, the median of so many steps says how long the unit is: a first step may have compiled something."""

SCALE_DEVIATION = 0.5
"""Of the unit, once it was set: standard deviation, as a share."""
OCTAVE_DEVIATION = 0.25
"""Of V over V at half the rows, as a share: V may rise later, or earlier, than the guess."""
LARGE_BY_REQUESTS = LARGE_CHOOSING = 0.3
"""Of the unit: D wanders as if it were that large, and q may be."""
POINT_ERROR, STEP_ERROR = 0.03, 0.1
"""Of a point, and of a single step, as a share of what it took."""
MAX_KNOWN_ERROR = 0.25
"""Standard deviation of a known difference between the times of two numbers of rows, as a share of the fewer's time."""
FORGETTING = 1 / 20_000
"""The share of its first uncertainty that the model regains with every step: engines change slowly."""

CONTEXT_UNIT = 1000.0  # tokens; keeps the coefficients of one magnitude


@dataclass(frozen=True)
class _Guess:
    """Coefficients in units of the fixed part of a step; `unit_s` is the guess of that.

    - A CPU is compute-bound at once. The guess says the drafted steps of SmolLM2-135M on two cores within 30 %.
    - A GPU has room for `free_rows`. The guess says the steps of an H200 with the shape of Llama-3.1-8B within 10 %;
      with that of Qwen3-30B-A3B there is more room.
    """

    unit_s: float
    free_rows: float
    rows_a_unit: float
    requests_a_unit: float
    numbers: tuple[float, ...]

    def forward(self, knots: Array) -> Array:
        return 1.0 + np.maximum(knots - self.free_rows, 0.0) / self.rows_a_unit


CPU = _Guess(0.03, 0.0, 16.0, 64.0, (0.3, 0.18, 0.02, 0.0, 0.002, 0.002))
GPU = _Guess(0.008, 64.0, 150.0, 200.0, (0.2, 0.001, 0.15, 0.05, 0.001, 0.0002))


class StepCostModel:
    """What is believed of one engine's step times. Not thread-safe.

    Args:
        on_gpu: which guess to start from.
        document: what the engine measured at its start, `{"points": [{"num_requests", "num_tokens", "step_s"}, ...],
            "context_tokens", ...}`: steps that only decoded, drafting included. None without.

    Raises:
        ValueError: the document cannot be; names the field.
    """

    def __init__(self, on_gpu: bool, document: Mapping[str, Any] | None = None) -> None:
        guess = GPU if on_gpu else CPU
        points = [] if document is None else _points(document)
        self._knots = np.array(sorted({*KNOTS, *(float(point.num_tokens) for point in points)}))
        self._request_knots = np.array(REQUEST_KNOTS)
        forward, by_requests = guess.forward(self._knots), self._request_knots / guess.requests_a_unit
        self._mean = np.concatenate([forward, by_requests, guess.numbers])
        self._choosing = len(forward) + len(by_requests) + NUMBERS.index("choosing_s")
        self._covariance = np.diag(np.square(self._mean))
        end = len(forward) + len(by_requests)
        self._covariance[: len(forward), : len(forward)] = _wander(self._knots, forward)
        # D is little where the guess is right, and may be much.
        own = _wander(self._request_knots, by_requests + LARGE_BY_REQUESTS) + np.outer(by_requests, by_requests)
        self._covariance[len(forward) : end, len(forward) : end] = own
        if on_gpu:
            self._covariance[self._choosing, self._choosing] = LARGE_CHOOSING**2
        self._covariance += SCALE_DEVIATION**2 * np.outer(self._mean, self._mean)
        self._first_covariance = self._covariance.copy()
        self._unit_s = guess.unit_s
        self._first_steps: list[TimedStep] | None = [] if not points else None
        self._has_points = bool(points)
        self.num_steps = 0
        if points:
            self._set_unit(points)
            for point in points:
                self._learn(point, POINT_ERROR)
            # The shape that was measured holds; the whole may become slower or faster.
            scale = SCALE_DEVIATION**2 * np.outer(self._mean, self._mean)
            self._first_covariance = 4 * self._covariance + scale

    def observe(self, step: TimedStep) -> None:
        """Take in a step. One whose numbers cannot be is left out."""
        if not step.is_possible:
            return
        self.num_steps += 1
        if self._first_steps is None:
            self._learn(step, STEP_ERROR)
            return
        self._first_steps.append(step)
        if len(self._first_steps) == FIRST_STEPS:
            first_steps, self._first_steps = self._first_steps, None
            self._set_unit(first_steps)
            for first in first_steps:
                self._learn(first, STEP_ERROR)

    @property
    def costs(self) -> StepCosts:
        """What is believed now. No coefficient is below 0, and V and D never fall, whatever noise says (`_rising`)."""
        begin, end = len(self._knots), len(self._knots) + len(self._request_knots)
        numbers = np.maximum(self._mean[end:], 0.0) * self._unit_s
        numbers[4:] /= CONTEXT_UNIT
        forward, by_requests = (
            (_rising(self._mean[part], self._covariance[part, part]) * self._unit_s).tolist()
            for part in (slice(0, begin), slice(begin, end))
        )
        return StepCosts(
            Curve(tuple(self._knots.tolist()), tuple(forward)),
            Curve(tuple(self._request_knots.tolist()), tuple(by_requests)),
            **dict(zip(NUMBERS, numbers.tolist(), strict=True)),
            num_steps=self.num_steps,
            has_points=self._has_points,
        )

    def error(
        self, num_requests: int, num_tokens: int, context_tokens: float = 0.0, is_drafted: bool | None = None
    ) -> float:
        """Standard deviation of what is believed of a step's time, as a share of it."""
        weights = self._weights(TimedStep(0.0, num_requests, num_tokens, context_tokens, 0, is_drafted))
        expected = max(float(weights @ self._mean), LEAST_S)
        return math.sqrt(max(float(weights @ self._covariance @ weights), 0.0)) / expected

    @property
    def choosing_error_s(self) -> float:
        """Standard deviation of what is believed of `choosing_s`."""
        return math.sqrt(max(float(self._covariance[self._choosing, self._choosing]), 0.0)) * self._unit_s

    def _set_unit(self, steps: Sequence[TimedStep]) -> None:
        self._unit_s = float(np.median([step.seconds / float(self._weights(step) @ self._mean) for step in steps]))

    def _learn(self, step: TimedStep, error: float) -> None:
        weights = self._weights(step)
        seconds, expected = step.seconds / self._unit_s, float(weights @ self._mean)
        carried = self._covariance @ weights
        # A long pause is as uncertain as it is long, so it moves little.
        variance = float(weights @ carried) + (error * max(seconds, expected)) ** 2
        surprise = min(max(seconds - expected, -3 * math.sqrt(variance)), 3 * math.sqrt(variance))
        self._mean += carried * (surprise / variance)
        self._covariance -= np.outer(carried, carried / variance)
        self._covariance *= 1.0 - FORGETTING
        self._covariance += FORGETTING * self._first_covariance

    def _weights(self, step: TimedStep) -> Array:
        """How often a step pays each coefficient."""
        weights = np.zeros(len(self._mean))
        rows, begin = step.num_tokens + step.prompt_tokens, 0
        for number, knots in ((rows, self._knots), (step.num_requests, self._request_knots)):
            upper = min(max(int(knots.searchsorted(number)), 1), len(knots) - 1)
            share = (number - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
            weights[begin + upper - 1 : begin + upper + 1] = 1.0 - share, share
            begin += len(knots)
        is_drafted = step.num_tokens > step.num_requests if step.is_drafted is None else step.is_drafted
        num_drafted, context = step.num_requests * is_drafted, step.context_tokens / CONTEXT_UNIT
        beside = step.prompt_tokens > 0
        by_context = step.num_requests * context, rows * context
        weights[begin:] = is_drafted, num_drafted, beside, step.is_chosen, *by_context
        return weights


def _wander(knots: Array, mean: Array) -> Array:
    """Covariance of a curve that wanders from its mean by `OCTAVE_DEVIATION` of it in every octave of the knots."""
    octaves = np.log2(knots) + 1.0
    return np.asarray(OCTAVE_DEVIATION**2 * np.minimum(octaves[:, None], octaves) * np.outer(mean, mean), np.float64)


def _rising(mean: Array, covariance: Array) -> Array:
    """A curve that never falls and is not below 0, from what is believed of its knots.

    Fewer rows take at most what more rows take, where the difference of the two is known. Where fewer really take
    longer (a CPU's 2 rows, by its kernels), the more are not held to be as slow: they would seem to cost nothing, and
    no step of theirs could say otherwise. What was never visited, and may be believed to take anything, lowers nothing.
    """
    variance = np.diag(covariance)
    difference = np.sqrt(np.maximum(variance[:, None] + variance - 2.0 * covariance, 0.0))
    is_known = np.tri(len(mean), dtype=bool).T & (difference <= MAX_KNOWN_ERROR * mean[:, None])
    most = np.where(is_known, mean, np.inf).min(axis=1)
    return np.asarray(np.maximum.accumulate(np.maximum(np.minimum(mean, most), 0.0)), np.float64)


def guessed_costs(on_gpu: bool) -> StepCosts:
    """What stands in until an engine has said something. Its seconds are in proportion, their size means little."""
    return StepCostModel(on_gpu).costs


def _points(document: Mapping[str, Any]) -> list[TimedStep]:
    """Raises ValueError naming the field."""
    rows = document.get("points") if isinstance(document, Mapping) else None
    if not isinstance(rows, Sequence) or not 0 < len(rows) <= MAX_POINTS:
        raise ValueError(f"step costs: points must be a list of 1 to {MAX_POINTS}, not {rows!r:.80}")
    context_tokens = document.get("context_tokens", 0.0)
    points = []
    for index, row in enumerate(rows):
        try:
            point = TimedStep(
                float(row["step_s"]), int(row["num_requests"]), int(row["num_tokens"]), float(context_tokens)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"step costs: points[{index}] cannot be read: {error!r}") from error
        if not point.is_possible:
            raise ValueError(f"step costs: points[{index}] cannot be: {row!r:.120}")
        points.append(point)
    return points
