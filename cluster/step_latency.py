"""The step latency model: how long a step of an engine takes, by its requests, its drafts and the drafter's pass.

Enters: whether the engine has a GPU, and the steps that it runs. Leaves: a `StepLatency`, a plain value that travels
from the scheduler to the choice of K and to autoscaling.

The model is a linear regression of step times. Its terms are a constant, the requests, the drafter's pass, the pass
times the requests, the target's rows, and the rows of prompts. Rows have a term for each interval between
`GRID_POINTS`, because the first rows take little on a GPU, and most in a target with experts. Coefficients begin at a
guess. Newer steps weigh more.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID_POINTS = (0.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2.0**20)
"""Numbers of rows between which a further row always takes the same time."""
_STARTS, _WIDTHS = np.array(GRID_POINTS[:-1]), np.diff(GRID_POINTS)
_ROWS, _PROMPTS = slice(4, -1), -1  # places of terms

LEAST_S = 1e-6


class TimedStep(msgspec.Struct, frozen=True):
    """A step of a running engine.

    Attributes:
        seconds: what it took.
        num_requests: requests that decoded.
        num_tokens: their rows in the target's forward pass, one a request and one a draft.
        prompt_tokens: rows of prompts in the same step.
        is_drafted: the drafter's pass ran, for the next step; None where it runs exactly if drafts are verified.
    """

    seconds: float
    num_requests: int
    num_tokens: int
    prompt_tokens: int = 0
    is_drafted: bool | None = None

    @property
    def is_possible(self) -> bool:
        return 0 < self.seconds < math.inf and 0 < self.num_requests <= self.num_tokens and self.prompt_tokens >= 0

    @property
    def terms(self) -> Array:
        is_drafted = self.num_tokens > self.num_requests if self.is_drafted is None else self.is_drafted
        return _terms(self.num_requests, self.num_tokens, is_drafted, self.prompt_tokens)


def _terms(num_requests: float, num_rows: float, is_drafted: bool, prompt_tokens: float = 0.0) -> Array:
    rows = np.clip(num_rows - _STARTS, 0.0, _WIDTHS)
    return np.array([1.0, num_requests, is_drafted, is_drafted * num_requests, *rows, prompt_tokens], np.float64)


class StepLatency(msgspec.Struct, frozen=True):
    """Seconds of a step, as the model believes them at one time. `coefficients`: seconds of each term. `num_steps`:
    steps that they rest on."""

    coefficients: tuple[float, ...]
    num_steps: float = 0.0

    def curve(
        self, num_requests: float, num_drafts: int, prompt_tokens: float = 0.0, *, is_drafted: bool = False
    ) -> Array:
        """Seconds of a step of `num_requests` with 0 .. `num_drafts` drafts in all.

        `is_drafted`: the drafter's pass runs without drafts too, because some request may get drafts in the next step.
        Beside `prompt_tokens` each draft takes at least what a prompt's row takes. What the prompts themselves take is
        left out: every request has one prompt, whatever its K.
        """
        drafts, slopes = np.arange(num_drafts + 1), np.array(self.coefficients[_ROWS])
        at_points = np.append(0.0, np.cumsum(slopes * _WIDTHS))
        others = float(_terms(num_requests, 0.0, True) @ np.array(self.coefficients))
        seconds: Array = np.maximum(others + np.interp(num_requests + drafts, GRID_POINTS, at_points), LEAST_S)
        if prompt_tokens:
            seconds = np.maximum(seconds, seconds[0] + self.coefficients[_PROMPTS] * drafts)
        if not is_drafted:
            seconds[0] = self.seconds(num_requests, num_requests)
        return seconds

    def seconds(self, num_requests: float, num_tokens: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of one step, prompts included. Numbers may be fractions, means over time; `num_requests` above 0."""
        least = max(1.0, 1.0 / num_requests)  # a step that runs has a request
        terms = _terms(least * num_requests, least * num_tokens, num_tokens > num_requests, prompt_tokens)
        return max(float(terms @ np.array(self.coefficients)), LEAST_S)


MAX_AVERAGED_STEPS = 300.0
"""The most steps that an engine is weighted by in an average, so that a new engine counts beside an old one."""


def average_latency(engines: Sequence[StepLatency]) -> StepLatency:
    """One latency for several engines, at least one, each weighted by its steps."""
    weights = np.array([1.0 + min(engine.num_steps, MAX_AVERAGED_STEPS) for engine in engines])
    coefficients = weights @ np.array([engine.coefficients for engine in engines]) / weights.sum()
    return StepLatency(tuple(coefficients.tolist()), sum(engine.num_steps for engine in engines))


# ---- the model of one engine

_CPU_GUESS = 0.03 * np.array([1.0, 1 / 64, 0.3, 0.18, *[1 / 16] * len(_STARTS), 1 / 16])
"""A CPU computes row by row: within 30 % of the drafted steps of SmolLM2-135M on two cores."""
_GPU_GUESS = 0.008 * np.array([1.0, 1 / 200, 0.1, 0.001, *np.where(_STARTS < 64, 0.0, 1 / 200), 1 / 200])
"""A GPU has room for 64 rows: once scaled, within 30 % of the steps of an H200 with the shape of Llama-3.1-8B."""
GUESS_ERROR, INTERVAL_ERROR = 0.5, 0.4
"""Standard deviation of a coefficient before any step, as a share of it. That of a row is larger, by this share of the
constant over the rows of its interval."""

STEPS_PER_UPDATE = 8
"""Steps between two updates of what is believed: one takes time between two steps of the engine."""
FIRST_STEPS = 8
"""Steps whose median of measured / expected scales the guess: a first step may have compiled something."""
KEPT = 0.998
"""Weight of a step relative to the one after it."""
DOUBT = 40.0
"""How much faster what was known is forgotten, by the square of a step's relative deviation."""
MAX_SURPRISE = 0.5
"""Relative deviation from what is expected beyond which a step counts as a pause, and moves nothing further."""
UNIT_RATE = 0.03
"""Weight of a step in the scale of the guess."""
STEP_ERROR = 0.1
"""Standard deviation of one step's time, as a share."""


class StepLatencyModel:
    """What is believed of one engine's step latency. Not thread-safe. on_gpu: which guess it starts from.

    Attributes:
        latency: what is believed now; the same object until the next update.
        num_steps: steps that it has seen.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._guess = _GPU_GUESS if on_gpu else _CPU_GUESS
        self._coefficients, self._unit = self._guess, 1.0
        errors = GUESS_ERROR * self._guess
        errors[_ROWS] += INTERVAL_ERROR * self._guess[0] / np.minimum(_WIDTHS, _STARTS[-1])
        self._guess_weights = np.diag((STEP_ERROR / errors) ** 2)
        self._products, self._sums = np.zeros_like(self._guess_weights), np.zeros_like(errors)
        self._first_steps: list[TimedStep] | None = []
        self.num_steps = 0
        self.latency = StepLatency(tuple(self._guess.tolist()))

    def observe(self, step: TimedStep) -> None:
        """Take in a step. One whose numbers cannot be is left out."""
        if not step.is_possible:
            return
        self.num_steps += 1
        steps = [step]
        if self._first_steps is not None:
            self._first_steps.append(step)
            if len(self._first_steps) < FIRST_STEPS:
                return
            steps, self._first_steps = self._first_steps, None
            self._unit = float(np.median([step.seconds / float(step.terms @ self._guess) for step in steps]))
            self._coefficients = self._unit * self._guess
        for each in steps:
            # Each step counts by its relative deviation.
            terms = each.terms
            expected_s = max(float(terms @ self._coefficients), LEAST_S)
            self._unit *= 1.0 + UNIT_RATE * _limited(each.seconds / (self._unit * float(terms @ self._guess)) - 1.0)
            surprise = _limited(each.seconds / expected_s - 1.0)
            terms /= expected_s
            kept = KEPT ** (1.0 + DOUBT * surprise**2)
            self._products = kept * self._products + np.outer(terms, terms)
            self._sums = kept * self._sums + terms * (1.0 + surprise)
        if self.num_steps % STEPS_PER_UPDATE == 0:
            self._update()

    def _update(self) -> None:
        # Least squares, with the guess as steps that are never forgotten.
        guess_weights = self._guess_weights / self._unit**2
        weights, sums = self._products + guess_weights, self._sums + guess_weights @ (self._unit * self._guess)
        self._coefficients = _positive_solution(weights, sums)
        self.latency = StepLatency(tuple(self._coefficients.tolist()), self.num_steps)


def _positive_solution(weights: Array, sums: Array) -> Array:
    """x of `weights @ x = sums`, with 0 in place of each unknown that would be negative."""
    found, left = np.zeros_like(sums), np.arange(len(sums))
    while (solution := np.linalg.solve(weights[np.ix_(left, left)], sums[left])).min(initial=0.0) < 0.0:
        left = left[solution > 0.0]
    found[left] = solution
    return found


def _limited(deviation: float) -> float:
    return min(max(deviation, -MAX_SURPRISE), MAX_SURPRISE)


def guessed_latency(on_gpu: bool) -> StepLatency:
    """What stands in until an engine has said something. Its seconds are in proportion, their size means little."""
    return StepLatencyModel(on_gpu).latency
