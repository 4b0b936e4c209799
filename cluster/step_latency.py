"""The step latency model: how long a step of an engine takes, by its requests, its drafts and the drafter's pass.

Enters: whether the engine has a GPU, perhaps steps that it measured at its start, and the steps that it then runs.
Leaves: a `StepLatency`, a plain value that travels from the scheduler to the choice of K and to autoscaling.

The model is a table. A row is a number of requests (`REQUESTS`), a column a number of drafts a request (`DRAFTS`); the
first column is a step without drafts and without the drafter's pass. Between grid points the time is linear. The table
begins as a guess for a CPU or a GPU, and each grid point is then scaled by a moving average of measured / expected of
the steps near it. A grid point that no step came near takes the scale of its neighbours. A grid point that was not
visited for long counts as uncertain again, so the scheduler explores it (`StepLatencyModel.error`).

The context of the requests is not in the table: it changes slowly, and the scale follows it.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REQUESTS = tuple(float(1 << power) for power in range(11))
DRAFTS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0)
_COLUMNS = (-1.0, *DRAFTS)
_LOG_REQUESTS, _DRAFTS = np.log2(REQUESTS), np.array(DRAFTS)

LEAST_S = 1e-6


class TimedStep(msgspec.Struct, frozen=True):
    """A step of a running engine, or one that it timed at its start.

    Attributes:
        seconds: what it took; `step_s` in JSON.
        num_requests: requests that decoded.
        num_tokens: their rows in the target's forward pass, one a request and one a draft.
        prompt_tokens: rows of prompts in the same step.
        is_drafted: the drafter's pass ran, for the next step; None where it runs exactly if drafts are verified.
        is_chosen: the worker chose which drafts are verified (`peagle.vllm.chosen`).
    """

    seconds: float = msgspec.field(name="step_s")
    num_requests: int
    num_tokens: int
    prompt_tokens: int = 0
    is_drafted: bool | None = None
    is_chosen: bool = False

    @property
    def is_possible(self) -> bool:
        return 0 < self.seconds < math.inf and 0 < self.num_requests <= self.num_tokens and self.prompt_tokens >= 0


Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class StepLatency(msgspec.Struct, frozen=True, dict=True):
    """Seconds of a step, as the model believes them at one time.

    Attributes:
        table: [len(REQUESTS)][1 + len(DRAFTS)]; the first column is without drafts and without the drafter's pass.
        prompt_row_s: what one row of a prompt adds.
        choosing_s: what a step takes more whose drafts the worker chooses.
        num_steps: steps of the running engine that it rests on.
        is_measured: the engine measured steps at its start.
    """

    table: tuple[tuple[Seconds, ...], ...]
    prompt_row_s: Seconds
    choosing_s: Seconds = 0.0
    num_steps: float = 0.0
    is_measured: bool = False

    @cached_property
    def _table(self) -> Array:
        return np.array(self.table)

    def curve(
        self, num_requests: float, num_drafts: int, prompt_tokens: float = 0.0, *, is_drafted: bool = False
    ) -> Array:
        """Seconds of a step of `num_requests` with 0 .. `num_drafts` drafts in all.

        `is_drafted`: the drafter's pass runs without drafts too, because some request may get drafts in the next step.
        Beside `prompt_tokens` each draft takes at least what a prompt's row takes. What the prompts themselves take is
        left out: every request has one prompt, whatever its K.

        Raises ValueError where a number is out of range.
        """
        if not 1 <= num_requests < math.inf or num_drafts < 0 or prompt_tokens < 0:
            raise ValueError(f"no step has {num_requests} requests, {num_drafts} drafts, {prompt_tokens} prompt tokens")
        drafts = np.arange(num_drafts + 1)
        seconds = self._seconds(num_requests, drafts / num_requests)
        if prompt_tokens:
            seconds = np.maximum(seconds, seconds[0] + self.prompt_row_s * drafts)
        if not is_drafted:
            seconds[0] = self._seconds(num_requests, np.array(-1.0))
        return seconds

    def seconds(self, num_requests: float, num_tokens: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of one step, prompts included. Numbers may be fractions: means over time."""
        drafts = (num_tokens - num_requests) / num_requests if num_tokens > num_requests else -1.0
        return float(self._seconds(max(1.0, num_requests), np.array(drafts))) + self.prompt_row_s * prompt_tokens

    def _seconds(self, num_requests: float, drafts: Array) -> Array:
        """By drafts a request; -1: without drafts and without the drafter's pass."""
        place, share = _place(num_requests, REQUESTS)
        row = (1.0 - share) * self._table[place] + share * self._table[place + 1]
        beyond = np.maximum(drafts - DRAFTS[-1], 0.0) * (row[-1] - row[-2]) / (DRAFTS[-1] - DRAFTS[-2])
        return np.asarray(np.maximum(np.interp(drafts, _COLUMNS, row) + beyond, LEAST_S), np.float64)

    def to_wire(self) -> dict[str, Any]:
        """As JSON can hold it, with four significant digits."""
        rounded = tuple(tuple(float(f"{seconds:.4g}") for seconds in row) for row in self.table)
        found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, table=rounded))
        return found

    @classmethod
    def from_wire(cls, text: str) -> "StepLatency":
        """Inverse of `to_wire` and JSON. Raises ValueError for anything else."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"a step latency cannot be read: {error}") from error
        found.check()
        return found

    def check(self) -> None:
        """Raises ValueError for a table of another shape."""
        if [len(row) for row in self.table] != [len(_COLUMNS)] * len(REQUESTS):
            raise ValueError(f"the table of a step latency has {len(REQUESTS)} rows of {len(_COLUMNS)}: {self!r:.80}")


def _place(number: float, grid: Sequence[float]) -> tuple[int, float]:
    """The grid point below a number, at most the last but one, and the share of the way to the next one."""
    place = min(max(bisect_right(grid, number) - 1, 0), len(grid) - 2)
    return place, (number - grid[place]) / (grid[place + 1] - grid[place])


MAX_AVERAGED_STEPS = 300.0
"""The most steps that an engine is weighted by in an average, so that a new engine counts beside an old one."""


def average_latency(engines: Sequence[StepLatency]) -> StepLatency:
    """One latency for several engines, each weighted by its steps. Raises ValueError without any."""
    if not engines:
        raise ValueError("an average of no step latencies")
    weights = np.array([1.0 + min(engine.num_steps, MAX_AVERAGED_STEPS) for engine in engines])
    weights /= weights.sum()
    table = np.tensordot(weights, np.array([engine.table for engine in engines]), axes=1)
    return StepLatency(
        tuple(map(tuple, table.tolist())),
        float(weights @ [engine.prompt_row_s for engine in engines]),
        float(weights @ [engine.choosing_s for engine in engines]),
        sum(engine.num_steps for engine in engines),
        any(engine.is_measured for engine in engines),
    )


# ---- the model of one engine

_R, _K = np.meshgrid(REQUESTS, np.maximum(_COLUMNS, 0.0), indexing="ij")
_PASS = np.array(_COLUMNS) >= 0
_GUESSES: dict[bool, tuple[Array, float]] = {
    # A CPU is compute-bound at once: within 30 % of the drafted steps of SmolLM2-135M on two cores.
    False: (0.03 * (1.0 + _R * (1 + _K) / 16 + _R / 64 + (0.3 + 0.18 * _R) * _PASS), 0.03 / 16),
    # A GPU has room for 64 rows: within 10 % of the steps of an H200 with the shape of Llama-3.1-8B.
    True: (
        0.008 * (1.0 + np.maximum(_R * (1 + _K) - 64, 0) / 150 + _R / 200 + (0.2 + 0.001 * _R) * _PASS),
        0.008 / 150,
    ),
}
"""By whether the engine has a GPU: the table before anything is measured, and seconds of a prompt's row."""

FIRST_STEPS = 8
"""Steps whose median of measured / expected scales the guess: a first step may have compiled something."""
MAX_STEPS = 20.0
"""Steps near a grid point from which on a further one moves its scale by 1 / `MAX_STEPS`."""
FORGETTING_STEPS = 5000.0
"""Steps elsewhere after which the steps near a grid point count 1 / e."""
KNOWN_STEPS = 0.1
"""Steps below which a grid point takes the scale of its neighbours."""
MAX_SURPRISE = 0.5
"""Logarithm of measured / expected beyond which a step counts as a pause, and moves its grid points no further."""
GUESS_ERROR, MEASURED_ERROR, STEP_ERROR = 0.25, 0.05, 0.1
"""Standard deviations, as shares: of the guess, of steps between those measured at the start, of one running step."""
PROMPT_ROWS, KEPT_PROMPT_ROWS = 512.0, 0.98
"""Rows of prompts that the guess of their time is worth; the share of what is known that a step with prompts keeps."""
CHOOSING_ERROR, MAX_CHOOSING_STEPS = 0.3, 200
"""Standard deviation of the guess of `choosing_s`, as a share of a step; steps whose mean it is."""


class StartDocument(msgspec.Struct, frozen=True):
    """Steps that the engine timed at its start. They only decoded, and the drafter's pass ran in those with drafts."""

    points: Annotated[list[TimedStep], msgspec.Meta(min_length=1, max_length=256)]


class StepLatencyModel:
    """What is believed of one engine's step latency. Not thread-safe.

    Args:
        on_gpu: which guess to start from.
        document: a `StartDocument` as JSON holds it, None where the engine measured nothing.

    Raises:
        ValueError: the document cannot be; names the field.
    """

    def __init__(self, on_gpu: bool, document: Mapping[str, Any] | None = None) -> None:
        self._guess, self._prompt_row_s = _GUESSES[on_gpu]
        self._seconds: Array = self._guess
        self._steps: Array = np.zeros_like(self._guess)
        self._errors = np.full_like(self._guess, GUESS_ERROR if document is None else MEASURED_ERROR)
        self._errors[:, 1] = GUESS_ERROR  # the drafter's pass without drafts is not measured at the start
        self._first_steps: list[TimedStep] | None = [] if document is None else None
        self._is_measured = document is not None
        self._choosing_steps = self._choosing_s = 0.0
        self.num_steps = 0
        points: list[TimedStep] = []
        if document is not None:
            try:
                points = msgspec.convert(document, StartDocument).points
            except msgspec.ValidationError as error:
                raise ValueError(f"step times: {error}") from error
            if wrong := [point for point in points if not point.is_possible]:
                raise ValueError(f"step times: no step can be {wrong[0]}")
            self._set_unit(points)
        for point in points:
            self._add_decoding(point, MAX_STEPS, math.inf)
        self._prompt_rows, self._prompt_s = PROMPT_ROWS, PROMPT_ROWS * self._prompt_row_s

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
            self._set_unit(steps)
            self._prompt_s = PROMPT_ROWS * self._prompt_row_s
        for each in steps:
            self._add(each)

    @property
    def latency(self) -> StepLatency:
        """What is believed now."""
        table = self._filled().copy()
        # The drafter's pass without drafts, where no step said what it takes: on the line of one and two drafts.
        bare, without, one, two = table[:, 1], table[:, 0], table[:, 2], table[:, 3]
        table[:, 1] = np.where(self._steps[:, 1] < KNOWN_STEPS, np.clip(2 * one - two, without, one), bare)
        rows = tuple(map(tuple, table.tolist()))
        return StepLatency(rows, self._prompt_row_s, max(0.0, self._choosing_s), self.num_steps, self._is_measured)

    def error(self, num_requests: int, num_tokens: int, is_drafted: bool | None = None) -> float:
        """Standard deviation of what is believed of a step's time, as a share of it."""
        shares = _shares(TimedStep(1.0, num_requests, num_tokens, 0, is_drafted))
        num_steps, error = float((shares * self._steps).sum()), float((shares * self._errors).sum())
        return error / math.sqrt(1.0 + num_steps * (error / STEP_ERROR) ** 2)

    @property
    def choosing_error_s(self) -> float:
        """Standard deviation of what is believed of `choosing_s`."""
        unit_s = float(self._seconds[0, 1])
        return CHOOSING_ERROR * unit_s / math.sqrt(1.0 + self._choosing_steps * (CHOOSING_ERROR / STEP_ERROR) ** 2)

    def _set_unit(self, steps: Sequence[TimedStep]) -> None:
        scale = float(np.median([step.seconds / self._expected_s(step) for step in steps]))
        self._guess = self._seconds = scale * self._guess
        self._prompt_row_s *= scale

    def _expected_s(self, step: TimedStep) -> float:
        """Seconds of a step by what is believed, prompts included."""
        decoding_s = float((_shares(step) * self._seconds).sum())
        return decoding_s + self._prompt_row_s * step.prompt_tokens + max(0.0, self._choosing_s) * step.is_chosen

    def _add(self, step: TimedStep) -> None:
        if step.prompt_tokens:
            # Its decoding part is taken as known.
            prompts_s = self._prompt_row_s * step.prompt_tokens
            found_s = min(max(step.seconds - self._expected_s(step) + prompts_s, 0.0), 4.0 * prompts_s)
            self._prompt_rows = KEPT_PROMPT_ROWS * self._prompt_rows + step.prompt_tokens
            self._prompt_s = KEPT_PROMPT_ROWS * self._prompt_s + found_s
            self._prompt_row_s = max(self._prompt_s / self._prompt_rows, LEAST_S)
            return
        if step.is_chosen:
            self._choosing_steps = min(self._choosing_steps + 1, MAX_CHOOSING_STEPS)
            expected_s, most_s = self._expected_s(step), MAX_SURPRISE * self._expected_s(step)
            self._choosing_s += min(max(step.seconds - expected_s, -most_s), most_s) / self._choosing_steps
        if step.is_drafted is False and step.num_tokens > step.num_requests:
            # It verified the drafts of the step before and made none: less their time it is a step without both.
            drafted = msgspec.structs.replace(step, is_drafted=True)
            bare = msgspec.structs.replace(drafted, num_tokens=step.num_requests)
            verifying_s = self._expected_s(drafted) - self._expected_s(bare)
            step = msgspec.structs.replace(step, seconds=max(step.seconds - verifying_s, LEAST_S))
        self._steps *= 1.0 - 1.0 / FORGETTING_STEPS
        self._add_decoding(step)

    def _add_decoding(self, step: TimedStep, weight: float = 1.0, max_surprise: float = MAX_SURPRISE) -> None:
        added = weight * _shares(step)
        if (self._steps[added > 0] < KNOWN_STEPS).any():
            self._seconds = self._filled()
        surprise = math.log(step.seconds / self._expected_s(step))
        self._steps = np.minimum(self._steps + added, MAX_STEPS)
        moved = added / np.maximum(self._steps, np.maximum(added, LEAST_S))
        self._seconds = self._seconds * np.exp(min(max(surprise, -max_surprise), max_surprise) * moved)

    def _filled(self) -> Array:
        """The table, unknown grid points from known ones. In a row with known grid points the time is linear between
        them, and a constant multiple of the guess beyond; in a row without any the multiple lies between those of the
        nearest rows with some."""
        is_known: NDArray[np.bool_] = np.asarray(self._steps >= KNOWN_STEPS)
        rows, scales = np.flatnonzero(is_known.any(axis=1)), []
        for row in rows:
            guess, scale = self._guess[row], self._seconds[row] / self._guess[row]
            if len(known := np.flatnonzero(is_known[row, 1:])):
                places, beyond = np.take(DRAFTS, known), np.interp(DRAFTS, np.take(DRAFTS, known), scale[1:][known])
                between = np.interp(DRAFTS, places, self._seconds[row, 1:][known]) / guess[1:]
                scale[1:] = np.where((places[0] <= _DRAFTS) & (places[-1] >= _DRAFTS), between, beyond)
            else:
                scale[1:] = scale[0]
            scale[0] = scale[0] if is_known[row, 0] else scale[1]
            scales.append(scale)
        if not scales:
            return self._seconds
        columns = [np.interp(_LOG_REQUESTS, _LOG_REQUESTS[rows], column) for column in np.array(scales).T]
        return np.asarray(self._guess * np.stack(columns, axis=1), np.float64)


def _shares(step: TimedStep) -> Array:
    """[len(REQUESTS), 1 + len(DRAFTS)]: the shares of the grid points around a step's place in the table."""
    rows, columns = np.zeros(len(REQUESTS)), np.zeros(len(_COLUMNS))
    place, share = _place(min(step.num_requests, REQUESTS[-1]), REQUESTS)
    rows[place : place + 2] = 1.0 - share, share
    drafts = min((step.num_tokens - step.num_requests) / step.num_requests, DRAFTS[-1])
    is_drafted = drafts > 0 if step.is_drafted is None else step.is_drafted
    place, share = _place(drafts if is_drafted else -1.0, _COLUMNS)
    columns[place : place + 2] = 1.0 - share, share
    return np.asarray(np.outer(rows, columns), np.float64)


def guessed_latency(on_gpu: bool) -> StepLatency:
    """What stands in until an engine has said something. Its seconds are in proportion, their size means little."""
    return StepLatencyModel(on_gpu).latency
