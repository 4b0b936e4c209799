"""The step latency model: how long a step of an engine takes, by its requests, its drafts and the drafter's pass.

Enters: whether the engine has a GPU, perhaps steps that it measured at its start, and the steps that it then runs.
Leaves: a `StepLatency`, a plain value that travels from the scheduler to the choice of K and to autoscaling.

A `StepLatency` is a table. A row is a number of requests (`REQUESTS`), a column a number of drafts a request
(`DRAFTS`); the first column is a step without drafts and without the drafter's pass. Between grid points the time is
linear.

The model is a linear regression of step times. On a GPU its terms are the time in the table that was measured at the
start (else a guess), a constant, the requests, and the rows of prompts. The host's work and the growing context come on
top of what was measured. A CPU computes row by row. Its terms are a constant, the requests, the rows, the drafter's
pass, the pass times the requests, and the rows of prompts. Coefficients begin at those of the table or the guess.
Newer steps weigh more.
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

LEAST_S, LEAST_PROMPT_ROW_S = 1e-6, 1e-8


class TimedStep(msgspec.Struct, frozen=True):
    """A step of a running engine, or one that it timed at its start.

    Attributes:
        seconds: what it took; `step_s` in JSON.
        num_requests: requests that decoded.
        num_tokens: their rows in the target's forward pass, one a request and one a draft.
        prompt_tokens: rows of prompts in the same step.
        is_drafted: the drafter's pass ran, for the next step; None where it runs exactly if drafts are verified.
    """

    seconds: float = msgspec.field(name="step_s")
    num_requests: int
    num_tokens: int
    prompt_tokens: int = 0
    is_drafted: bool | None = None

    @property
    def is_possible(self) -> bool:
        return 0 < self.seconds < math.inf and 0 < self.num_requests <= self.num_tokens and self.prompt_tokens >= 0


class StepLatency(msgspec.Struct, frozen=True, dict=True):
    """Seconds of a step, as the model believes them at one time.

    Attributes:
        table: [len(REQUESTS)][1 + len(DRAFTS)]; the first column is without drafts and without the drafter's pass.
        prompt_row_s: what one row of a prompt adds.
        num_steps: steps of the running engine that it rests on.
        is_measured: the engine measured steps at its start.
    """

    table: tuple[tuple[float, ...], ...]
    prompt_row_s: float
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
        """
        drafts = np.arange(num_drafts + 1)
        seconds = self.interpolate(num_requests, drafts / num_requests)
        if prompt_tokens:
            seconds = np.maximum(seconds, seconds[0] + self.prompt_row_s * drafts)
        if not is_drafted:
            seconds[0] = self.interpolate(num_requests, np.array(-1.0))
        return seconds

    def seconds(self, num_requests: float, num_tokens: float, prompt_tokens: float = 0.0) -> float:
        """Seconds of one step, prompts included. Numbers may be fractions: means over time."""
        drafts = (num_tokens - num_requests) / num_requests if num_tokens > num_requests else -1.0
        return float(self.interpolate(max(1.0, num_requests), np.array(drafts))) + self.prompt_row_s * prompt_tokens

    def interpolate(self, num_requests: float, drafts: Array) -> Array:
        """Seconds by drafts a request; -1: without drafts and without the drafter's pass."""
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
        """Inverse of `to_wire` and JSON."""
        return msgspec.json.decode(text, type=cls)


def _place(number: float, grid: Sequence[float]) -> tuple[int, float]:
    """The grid point below a number, at most the last but one, and the share of the way to the next one."""
    place = min(max(bisect_right(grid, number) - 1, 0), len(grid) - 2)
    return place, (number - grid[place]) / (grid[place + 1] - grid[place])


MAX_AVERAGED_STEPS = 300.0
"""The most steps that an engine is weighted by in an average, so that a new engine counts beside an old one."""


def average_latency(engines: Sequence[StepLatency]) -> StepLatency:
    """One latency for several engines, at least one, each weighted by its steps."""
    weights = np.array([1.0 + min(engine.num_steps, MAX_AVERAGED_STEPS) for engine in engines])
    weights /= weights.sum()
    table = np.tensordot(weights, np.array([engine.table for engine in engines]), axes=1)
    return StepLatency(
        tuple(map(tuple, table.tolist())),
        float(weights @ [engine.prompt_row_s for engine in engines]),
        sum(engine.num_steps for engine in engines),
        any(engine.is_measured for engine in engines),
    )


# ---- the model of one engine

_R, _K = np.meshgrid(REQUESTS, np.maximum(_COLUMNS, 0.0), indexing="ij")
_PASS = np.broadcast_to(np.array(_COLUMNS) >= 0, _K.shape)
_CPU_COEFFICIENTS = 0.03 * np.array([1.0, 1 / 64, 1 / 16, 0.3, 0.18, 1 / 16])
"""Coefficients of a CPU's terms. A CPU is compute-bound at once. They are within 30 % of the drafted steps of
SmolLM2-135M on two cores."""
_GPU_TABLE = 0.008 * (1.0 + np.maximum(_R * (1 + _K) - 64, 0) / 150 + _R / 200 + (0.2 + 0.001 * _R) * _PASS)
"""A GPU has room for 64 rows: within 10 % of the steps of an H200 with the shape of Llama-3.1-8B."""
_GPU_PROMPT_ROW_S = 0.008 / 150

FIRST_STEPS = 8
"""Steps whose median of measured / expected scales a guess: a first step may have compiled something."""
KEPT = 0.998
"""Weight of a step relative to the one after it."""
MAX_SURPRISE = 0.5
"""Relative deviation from what is expected beyond which a step counts as a pause, and moves nothing further."""
STEP_ERROR = 0.1
"""Standard deviation of one running step's time, as a share."""
MAX_EXCESS = 1.1
"""Most time of a measured step relative to a larger one: graphs of other sizes and noise make equal steps differ."""
PRIOR_ERRORS = {"table": 0.1, "constant": 1.0, "requests": 1.0 / 64, "prompts": 0.2, "cpu": 0.5}
"""Standard deviations of coefficients before any step. Those of the constant and of a request are shares of a step of
one request. The others are shares of the coefficient itself."""


class StartDocument(msgspec.Struct, frozen=True):
    """Steps that the engine timed at its start. They only decoded, and the drafter's pass ran in those with drafts."""

    points: Annotated[list[TimedStep], msgspec.Meta(min_length=1, max_length=256)]


class StepLatencyModel:
    """What is believed of one engine's step latency. Not thread-safe.

    Args:
        on_gpu: which terms the times have, and which guess to start from.
        document: a `StartDocument` as JSON holds it, None where the engine measured nothing.

    Raises:
        ValueError: the document cannot be; names the field.
    """

    def __init__(self, on_gpu: bool, document: Mapping[str, Any] | None = None) -> None:
        self._has_table, self._is_measured = on_gpu or document is not None, document is not None
        self._first_steps: list[TimedStep] | None = [] if document is None else None
        self.num_steps = 0
        if document is None:
            self._start(StepLatency(_as_rows(_GPU_TABLE), _GPU_PROMPT_ROW_S), _CPU_COEFFICIENTS)
            return
        try:
            points = msgspec.convert(document, StartDocument).points
        except msgspec.ValidationError as error:
            raise ValueError(f"step times: {error}") from error
        if wrong := [point for point in points if not point.is_possible]:
            raise ValueError(f"step times: no step can be {wrong[0]}")
        self._start(_measured(points), _CPU_COEFFICIENTS)

    def _start(self, table: StepLatency, cpu_coefficients: Array) -> None:
        self._table, prior, errors = table, cpu_coefficients, PRIOR_ERRORS["cpu"] * cpu_coefficients
        if self._has_table:
            least_s, prompt_row_s = table.table[0][0], table.prompt_row_s
            prior = np.array([1.0, 0.0, 0.0, prompt_row_s])
            shares = [PRIOR_ERRORS[name] for name in ("table", "constant", "requests", "prompts")]
            errors = np.array(shares) * [1.0, least_s, least_s, prompt_row_s]
        self._coefficients = self._prior = prior
        self._prior_weights = np.diag((STEP_ERROR / errors) ** 2)
        self._products, self._sums = np.zeros_like(self._prior_weights), np.zeros_like(prior)

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
            unit = float(np.median([step.seconds / float(self._terms(step) @ self._prior) for step in steps]))
            table = StepLatency(_as_rows(unit * _GPU_TABLE), unit * _GPU_PROMPT_ROW_S)
            self._start(table, unit * _CPU_COEFFICIENTS)
        for each in steps:
            # Each step counts by its relative deviation.
            terms = self._terms(each)
            expected_s = max(float(terms @ self._coefficients), LEAST_S)
            surprise = min(max(each.seconds / expected_s - 1.0, -MAX_SURPRISE), MAX_SURPRISE)
            terms /= expected_s
            self._products = KEPT * self._products + np.outer(terms, terms)
            self._sums = KEPT * self._sums + terms * (1.0 + surprise)
        # Least squares, with the prior as steps that are never forgotten.
        weights, sums = self._products + self._prior_weights, self._sums + self._prior_weights @ self._prior
        self._coefficients = np.maximum(np.linalg.solve(weights, sums), 0.0)

    def _terms(self, step: TimedStep) -> Array:
        num, rows = step.num_requests, step.num_tokens
        is_drafted = rows > num if step.is_drafted is None else step.is_drafted
        if not self._has_table:
            return np.array([1.0, num, rows, is_drafted, is_drafted * num, step.prompt_tokens], np.float64)
        drafts = np.array((rows - num) / num if is_drafted or rows > num else -1.0)
        return np.array([float(self._table.interpolate(num, drafts)), 1.0, num, step.prompt_tokens])

    @property
    def latency(self) -> StepLatency:
        """What is believed now."""
        found = self._coefficients
        if self._has_table:
            table = found[0] * np.array(self._table.table) + found[1] + found[2] * _R
        else:
            table = found[0] + found[1] * _R + found[2] * _R * (1 + _K) + (found[3] + found[4] * _R) * _PASS
        return StepLatency(_as_rows(np.maximum(table, LEAST_S)), float(found[-1]), self.num_steps, self._is_measured)


def _as_rows(table: Array) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, table.tolist()))


def _measured(points: Sequence[TimedStep]) -> StepLatency:
    """The table of steps that an engine timed, each size of batch at several numbers of drafts.

    Other programs, such as an engine that starts beside, only add time, and a smaller step takes no longer than a
    larger one: so no step counts for much more than one with more requests or more drafts.
    Beyond the most drafts a further one takes what the last one did; beyond the largest batch the time grows with the
    requests. The drafter's pass without drafts is on the line of the steps with the fewest drafts. A prompt's row takes
    what a row does in the largest batch.

    Raises:
        ValueError: no batch has a step with drafts.
    """
    by_size: dict[int, dict[float, float]] = {}
    for point in points:
        by_size.setdefault(point.num_requests, {})[point.num_tokens / point.num_requests - 1.0] = point.seconds
    sizes, rows = [], []
    for size, seconds in sorted(by_size.items()):
        drafts = np.array(sorted(k for k in seconds if k > 0))
        if not len(drafts):
            continue
        without_s, *drafted = _limited([seconds.get(0.0, math.inf), *(seconds[k] for k in drafts)])
        times = np.maximum.accumulate(drafted)
        slopes = np.diff(times) / np.diff(drafts) if len(drafts) > 1 else np.zeros(1)
        pass_s = max(min(float(times[0] - slopes[0] * drafts[0]), float(times[0])), without_s)
        beyond = np.maximum(np.array(DRAFTS) - drafts[-1], 0.0) * slopes[-1]
        with_drafts = np.interp(DRAFTS, [0.0, *drafts], [pass_s, *times]) + beyond
        sizes.append(size)
        rows.append([without_s, *np.maximum(with_drafts, without_s)])
    if not rows:
        raise ValueError("step times: no point has drafts")
    columns = _limited(rows).T
    table = np.stack([np.interp(REQUESTS, sizes, column) for column in columns], axis=1)
    table *= np.maximum(np.array(REQUESTS) / sizes[-1], 1.0)[:, None]
    most, least = rows[-1][len(_COLUMNS) - 4], rows[-1][1]
    return StepLatency(
        _as_rows(table), max((most - least) / (sizes[-1] * DRAFTS[-4]), LEAST_PROMPT_ROW_S), is_measured=True
    )


def _limited(times: Any) -> Array:
    """Times along the first axis, each at most `MAX_EXCESS` of the least that comes later."""
    found: Array = np.asarray(times)
    return np.minimum(found, MAX_EXCESS * np.minimum.accumulate(found[::-1])[::-1])


def guessed_latency(on_gpu: bool) -> StepLatency:
    """What stands in until an engine has said something. Its seconds are in proportion, their size means little."""
    return StepLatencyModel(on_gpu).latency
