"""Curves of one variable that measured step times are fitted to. Formulas: `cluster.step_time`."""

import json
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# ====================================================================================================
# Curves of one variable that measured step times are fitted to. Formulas: `cluster.step_time`.

Array = NDArray[np.float64]
MAX_BACKFITS = 300
BACKFIT_TOLERANCE = 1e-7


def isotonic(values: Array, weights: Array) -> Array:
    """The non-decreasing sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, weight_before, length_before = blocks.pop()
            mean = (mean * total + before * weight_before) / (total + weight_before)
            total, length = total + weight_before, length + length_before
        blocks.append((mean, total, length))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks]).astype(np.float64)


@dataclass(frozen=True)
class Curve:
    """Seconds over tokens of a graph, or over requests: linear between `knots` and beyond the last."""

    knots: tuple[float, ...]
    seconds: tuple[float, ...]
    slope: float
    """Seconds for each unit beyond the last knot."""

    @classmethod
    def fit(cls, x: Array, values: Array, weights: Array, slope_of_one: float) -> "Curve":
        """`slope_of_one`: the slope where all x are the same. Else it is the chord over the upper half of the knots."""
        knots, index = np.unique(x, return_inverse=True)
        total = np.bincount(index, weights).astype(np.float64)
        heights = isotonic(np.bincount(index, weights * values) / total, total)
        if len(knots) == 1:
            slope = slope_of_one
        else:
            start = min(int(np.searchsorted(knots, knots[-1] / 2)), len(knots) - 2)
            slope = float((heights[-1] - heights[start]) / (knots[-1] - knots[start]))
        return cls(tuple(knots.tolist()), tuple(heights.tolist()), slope)

    def at(self, x: float) -> float:
        knots, seconds = self.knots, self.seconds
        if x > knots[-1]:
            return seconds[-1] + self.slope * (x - knots[-1])
        upper = bisect_left(knots, x)
        if upper == 0 or knots[upper] == x:
            return seconds[upper]
        share = (x - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
        return seconds[upper - 1] + share * (seconds[upper] - seconds[upper - 1])


FLAT = Curve((0.0,), (0.0,), 0.0)
ONE = Curve((0.0,), (1.0,), 0.0)


def additive(tokens: Array, requests: Array, times: Array, weights: Array) -> tuple[Curve, Curve]:
    """V and D of V(tokens) + D(requests), least squares by backfitting; D begins at 0, for a constant is V's."""
    proportional = float(times.max() / tokens.max())
    verify = Curve.fit(tokens, times, weights, proportional)
    draft, before = FLAT, np.full(len(times), np.inf)
    for _ in range(MAX_BACKFITS):
        drafting = np.array([draft.at(one) for one in requests])
        verify = Curve.fit(tokens, times - drafting, weights, proportional)
        verifying = np.array([verify.at(one) for one in tokens])
        curve = Curve.fit(requests, times - verifying, weights, 0.0)
        draft = Curve(curve.knots, tuple(one - curve.seconds[0] for one in curve.seconds), curve.slope)
        if np.max(np.abs(verifying - before) / times) < BACKFIT_TOLERANCE:
            break
        before = verifying
    return verify, draft


# ====================================================================================================
# From measured step times to a function of a batch's shape.
#
# Enters: points, each the time of one shape. Leaves: `StepFit.seconds(shape)`, defined for every shape. Two families:
#
# - **ragged**: every batch that does not run on a full CUDA graph of its own, t = V(n) + D(b) + context. V, over tokens
#   verified n, is the target's forward; D, over requests b, is the drafter and the host. Both never fall (isotonic least
#   squares, by backfitting: Buja, Hastie and Tibshirani 1989), so noise makes no step cheaper than a smaller one.
# - **full, one a depth d**: the batch runs on a full graph of 1 + d tokens a request, t = F_d(n) + context. Every request
#   has depth d, or few enough tokens are missing that the engine pads the batch to that (`padding_tokens`).
#
# Where several depths have full graphs, these are most of what was measured, and the few ragged points are the noisiest,
# being launched piece by piece. Then V and D are those of the full graphs, and a ragged step takes r(b) times as long, r
# being a median of what was measured: a fit to the ragged points alone follows each one that is off. Mean steps with
# prompts among them, on an H200 at 8 to 128 requests and K = 1 to 7, are within 4 % of what this says, 2 % on average
# (tests/test_step_tiers.py).
#
# n is first rounded up to the size of the graph that runs it, so V and F are staircases up to the largest captured size
# (a measurement between two sizes counts at the upper one), straight lines between measured sizes beyond it, and go on
# straight past the last. Context enters as a (b * c) + e (n * c) for a mean context c, with a and e from shapes measured
# at several contexts. Errors are relative: a millisecond counts ten times more at one request than in a step of ten
# times the length. Plain numbers only; knows no file and no engine.

MIN_TIERS = 3
"""Depths with full graphs from which ragged steps are told by them."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a decoding step depends on.

    `num_requests` and `num_tokens` (drafts to verify and one token more for each request) may be fractions, means over
    time. `uniform_depth`: k where every request has that k, else None. `context_tokens`: mean length of what a request
    attends to; 0 means unknown, and the time is that at the context of most measurements. `longest_tokens`: tokens of
    the request that has the most, which says what graph can hold the batch: 1 + its K, or a chunk of a prompt; None
    means 1 + K_max, or 1 + the uniform depth.

    Raises:
        ValueError: names the field that cannot be.
    """

    num_requests: float
    num_tokens: float
    uniform_depth: int | None
    context_tokens: float = 0.0
    longest_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.num_requests) and self.num_requests > 0):
            raise ValueError(f"StepShape.num_requests must be above 0, not {self.num_requests!r}")
        if not (isfinite(self.num_tokens) and self.num_tokens >= self.num_requests - 1e-6):
            raise ValueError(
                f"StepShape.num_tokens must be at least num_requests ({self.num_requests}), not {self.num_tokens!r}"
            )
        if not (isfinite(self.context_tokens) and self.context_tokens >= 0):
            raise ValueError(f"StepShape.context_tokens must be 0 or more, not {self.context_tokens!r}")
        if self.longest_tokens is not None and self.longest_tokens < 1:
            raise ValueError(f"StepShape.longest_tokens must be at least 1, not {self.longest_tokens!r}")
        depth = self.uniform_depth
        if depth is not None and abs(self.num_tokens - self.num_requests * (1 + depth)) > 1e-6 * self.num_tokens:
            raise ValueError(
                f"StepShape.uniform_depth is {depth}, so num_tokens must be {self.num_requests * (1 + depth)}, "
                f"not {self.num_tokens}"
            )

    @classmethod
    def uniform(cls, num_requests: float, depth: int, context_tokens: float = 0.0) -> "StepShape":
        """`num_requests` requests of one depth."""
        return cls(num_requests, num_requests * (1 + depth), depth, context_tokens)

    @classmethod
    def of_depths(cls, depths: Sequence[int], context_tokens: float = 0.0) -> "StepShape":
        """One request for each of `depths`."""
        uniform = depths[0] if depths and min(depths) == max(depths) else None
        return cls(len(depths), len(depths) + sum(depths), uniform, context_tokens)


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A measured shape: median and 95th percentile of `num_steps` steps, in seconds."""

    shape: StepShape
    median_s: float
    p95_s: float
    num_steps: int


def padded(num_tokens: float, sizes: Sequence[float]) -> float:
    """The captured size that runs `num_tokens`; itself where none is large enough."""
    place = bisect_left(sizes, num_tokens - 1e-9)
    return sizes[place] if place < len(sizes) else num_tokens


class StepFit:
    """Times of every shape, fitted to points.

    Args:
        points: at least one.
        full_graph_depths: depths with full graphs of their own.
        sizes: captured graph sizes in tokens, of ragged batches (key None) and of each full depth; without them the
            family has no staircase.
        padding_tokens: the engine adds at most so many tokens to run a batch on a full graph that does not fit it.

    Raises:
        ValueError: there is no point.
    """

    def __init__(
        self,
        points: Iterable[StepPoint],
        full_graph_depths: Iterable[int] = (),
        sizes: Mapping[int | None, Sequence[int]] | None = None,
        padding_tokens: int = 0,
    ) -> None:
        self._full = tuple(sorted(full_graph_depths))
        self._padding_tokens = padding_tokens
        self._sizes = {family: tuple(float(size) for size in sorted(of)) for family, of in (sizes or {}).items()}
        families: dict[int | None, list[tuple[StepPoint, float]]] = {}
        points = list(points)
        if not points:
            raise ValueError("step times: there is no measured point")
        for point in points:
            family, num_tokens = self.place(point.shape)
            families.setdefault(family, []).append((point, num_tokens))
        self.context_tokens = float(np.median([point.shape.context_tokens for point in points]))
        self.per_request, self.per_token = _context_slopes(points)
        placed = {family: _Placed(of, self._context_of) for family, of in families.items()}
        self._curves = {family: of.joint() if family is None else of.of_tokens() for family, of in placed.items()}
        tiers = [depth for depth in families if depth]  # at depth 0 the drafter does not run
        if None in placed and len(tiers) >= MIN_TIERS:
            full = _Placed([one for depth in tiers for one in families[depth]], self._context_of)
            self._curves[None] = placed[None].beside(full)

    def place(self, shape: StepShape) -> tuple[int | None, float]:
        """The depth on whose full graph `shape` runs, or None (ragged), and the tokens of the graph that runs it.

        A batch of unequal depths whose `longest_tokens` is not known counts as one whose deepest request has K_max.
        """
        full, depth = self._full, shape.uniform_depth
        if full and depth not in full and self._padding_tokens:
            longest_tokens = shape.longest_tokens
            if longest_tokens is None:
                longest_tokens = 1 + (full[-1] if depth is None else depth)
            for tier in full[bisect_left(full, longest_tokens - 1) :]:
                num_tokens = padded(shape.num_requests * (1 + tier), self._sizes.get(tier, ()))
                if 0 <= num_tokens - shape.num_tokens <= self._padding_tokens:
                    return tier, num_tokens
        family = depth if depth in full else None
        return family, padded(shape.num_tokens, self._sizes.get(family, ()))

    def seconds(self, shape: StepShape) -> float:
        """Raises ValueError for a ragged shape where no ragged one was measured, or a full one where none was."""
        family, num_tokens = self.place(shape)
        if family not in self._curves:
            raise ValueError(f"step times: no point was measured of the kind of {shape}")
        seconds = self._curves[family].at(num_tokens, shape.num_requests) + self._context_of(shape)
        return max(seconds, 1e-9)

    def _context_of(self, shape: StepShape) -> float:
        if not shape.context_tokens:
            return 0.0
        more = shape.context_tokens - self.context_tokens
        return (self.per_request * shape.num_requests + self.per_token * shape.num_tokens) * more


@dataclass(frozen=True)
class _Family:
    """t = (V(n) + D(b)) r(b), without context."""

    verify: Curve
    draft: Curve = FLAT
    ratio: Curve = ONE

    def at(self, num_tokens: float, num_requests: float) -> float:
        return (self.verify.at(num_tokens) + self.draft.at(num_requests)) * self.ratio.at(num_requests)


class _Placed:
    """Points of one kind, with the tokens of the graphs that ran them, and times less what context adds."""

    def __init__(self, found: Sequence[tuple[StepPoint, float]], context_of: Callable[[StepShape], float]) -> None:
        self.tokens: Array = np.array([num_tokens for _, num_tokens in found])
        self.requests: Array = np.array([float(point.shape.num_requests) for point, _ in found])
        measured = np.array([point.median_s for point, _ in found])
        self.times: Array = measured - np.array([context_of(point.shape) for point, _ in found])
        self.weights: Array = measured**-2.0

    def joint(self) -> _Family:
        return _Family(*additive(self.tokens, self.requests, self.times, self.weights))

    def of_tokens(self) -> _Family:
        slope_of_one = float(self.times.max() / self.tokens.max())
        return _Family(Curve.fit(self.tokens, self.times, self.weights, slope_of_one))

    def beside(self, full: "_Placed") -> _Family:
        """These ragged steps as a multiple of full graphs: at so many requests, the median within a factor of 2."""
        base = full.joint()
        ratios = self.times / [base.at(n, b) for n, b in zip(self.tokens, self.requests, strict=True)]
        sizes = np.unique(self.requests)
        near = [ratios[(self.requests >= size / 2) & (self.requests <= size * 2)] for size in sizes]
        heights = tuple(max(1.0, float(np.median(one))) for one in near)
        return _Family(base.verify, base.draft, Curve(tuple(sizes.tolist()), heights, 0.0))


def _context_slopes(points: Sequence[StepPoint]) -> tuple[float, float]:
    """Seconds for each token of context more, of a request and of a verified token; neither below 0.

    Least squares on differences between measurements of one shape at several contexts, so that nothing else about the
    shape counts. (0, 0) where no shape has several.
    """
    rows: list[tuple[float, float, float]] = []
    cells: dict[tuple[float, float, int | None], list[StepPoint]] = {}
    for point in points:
        shape = point.shape
        cells.setdefault((shape.num_requests, shape.num_tokens, shape.uniform_depth), []).append(point)
    for (num_requests, num_tokens, _), cell in cells.items():
        contexts = np.array([point.shape.context_tokens for point in cell])
        times = np.array([point.median_s for point in cell])
        scale = 1.0 / float(times.mean())
        for more, seconds in zip(contexts - contexts.mean(), times - times.mean(), strict=True):
            rows.append((num_requests * more * scale, num_tokens * more * scale, seconds * scale))
    table = np.array(rows)
    best, slopes = float(np.sum(table[:, 2] ** 2)), (0.0, 0.0)
    for columns in ((0,), (1,), (0, 1)):
        found, _, rank, _ = np.linalg.lstsq(table[:, columns], table[:, 2], rcond=1e-9)
        error = float(np.sum((table[:, columns] @ found - table[:, 2]) ** 2))
        # A second slope must earn its place; otherwise it fits noise.
        if rank == len(columns) and (found > 0).all() and error < best * (0.9 if len(columns) == 2 else 1.0):
            both = dict(zip(columns, found.tolist(), strict=True))
            best, slopes = error, (both.get(0, 0.0), both.get(1, 0.0))
    return slopes


# ====================================================================================================
# What a step costs, in the form in which K is chosen: one curve over the number of drafts.
#
# Enters: step times by shape (`cluster.step_time`, or anything with `seconds`). Leaves: `StepCostsCurve`s, remembered because
# the scheduler asks for the same few at every engine step. Never knows: survival, workloads, the engine.

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
class StepCostsCurve:
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
        self._curves: OrderedDict[tuple[int, int, int], StepCostsCurve] = OrderedDict()
        self.max_draft_tokens = times.max_draft_tokens
        self.full_graph_depths = frozenset(k for k in times.full_graph_depths if 0 <= k <= self.max_draft_tokens)
        # A model of a step that knows nothing of padding stands for an engine that does not pad.
        self._padding_tokens: int = getattr(times, "padding_tokens", 0)
        self._capture_sizes: Mapping[int | None, Sequence[float]] = getattr(times, "capture_sizes", {})

    @classmethod
    def of(cls, times: "StepCosts | CostCurves") -> "CostCurves":
        """`times` itself where it remembers its curves already."""
        return times if isinstance(times, CostCurves) else cls(times)

    def curve(self, num_requests: int, context_tokens: float, prompt_tokens: int = 0) -> StepCostsCurve:
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

    def _measure(self, num_requests: int, context_tokens: int) -> StepCostsCurve:
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
        return StepCostsCurve(ragged, uniform, graph_from)

    def _measure_beside(self, num_requests: int, context_tokens: int, prompt_tokens: int) -> StepCostsCurve:
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
        return StepCostsCurve(ragged, tuple(ragged[places].tolist()), tuple(place + 1 for place in places))

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


# ====================================================================================================
# Corrections of a step-time table as values: they travel from engines, are combined, and correct the table.
#
# Enters: what schedulers found of the same table (`cluster.step_time`), as a value or as the text in which it travels.
# Leaves: one correction for all engines, and cost curves under it. No clock of its own; knows no engine and no HTTP.
#
# A factor belongs to a kind of step, (batch bucket, depth of the full graph or none); a bucket is 1, 2, 3-4, 5-8, ...
# requests. Factors are kept as logarithms of measured / predicted seconds.

MAX_LOG_FACTOR = math.log(8.0)
NO_GRAPH = -1
"""In the place of a full graph's depth."""
NUM_STEPS_TO_TRUST = 50.0
"""Steps after which a kind of step speaks as much for itself as the common factor does for it."""
MAX_POINT_ERROR = 0.1
"""By about so much, in logarithms, the points of a table that was measured on this kind of engine err each by itself.
What all kinds have in common is told from that by being seen in several of them, or by being greater."""
MAX_EVIDENCE_STEPS = 300.0
"""Against other engines more steps of one count as so many: its mean forgets by steps (`Residuals`), so it rests on
about as many however long the engine has run, and a new engine is heard beside an old one."""
MIN_CHANGE = 0.005
"""Costs are made anew when the factor of some kind has moved by this share."""
MAX_BUCKET, MAX_DEPTH, MAX_KINDS = 20, 64, 512
"""No engine has more: 2^20 requests in a step, depths, kinds."""

Kind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Factor:
    """Log of measured / predicted seconds, and the number of steps that it was seen in."""

    log_factor: float = 0.0
    num_steps: float = 0.0


def kind_of(shape: StepShape, full_graph_depths: Collection[int]) -> Kind:
    """The kind of a step."""
    bucket = 0 if shape.num_requests <= 1 else math.ceil(math.log2(shape.num_requests) - 1e-9)
    depth = shape.uniform_depth
    return bucket, depth if depth is not None and depth in full_graph_depths else NO_GRAPH


def share_of(num_steps: float) -> float:
    """How much of a kind's factor is its own after so many steps, 0 to 1; the rest is the common one."""
    return num_steps / (num_steps + NUM_STEPS_TO_TRUST)


def common_factor(total: float, shares: float) -> float:
    """Log of the factor that no kind has for itself, by which unvisited kinds are corrected.

    A mean over kinds, not over steps, as if one more kind had been seen without an error: engines run mostly at one
    depth, and if its error were taken for everybody's, a depth that the table makes too cheap would never be found out.
    That kind without an error counts less as the mean is beyond what single points err: the engine then is another.

    Args:
        total: sum over kinds of share * log factor.
        shares: sum of the shares.
    """
    if not shares:
        return 0.0
    mean = total / shares
    return total / (shares + MAX_POINT_ERROR**2 / (MAX_POINT_ERROR**2 + mean * mean))


@dataclass(frozen=True)
class Corrections:
    """What steps turned out to take over what the table says, by kind of step."""

    kinds: Mapping[Kind, Factor] = field(default_factory=dict)

    @cached_property
    def common(self) -> float:
        """Log of the factor that all kinds have in common."""
        shares = [share_of(one.num_steps) for one in self.kinds.values()]
        total = sum(share * one.log_factor for share, one in zip(shares, self.kinds.values(), strict=True))
        return common_factor(total, sum(shares))

    @property
    def num_steps(self) -> float:
        """Steps of all kinds."""
        return sum(one.num_steps for one in self.kinds.values())

    def log_factor(self, kind: Kind) -> float:
        """Log of the factor by which the table's time of this kind of step is multiplied."""
        own = self.kinds.get(kind)
        if own is None:
            return self.common
        share = share_of(own.num_steps)
        return share * own.log_factor + (1.0 - share) * self.common

    def encode(self) -> str:
        """One header value, JSON: `[[3,7,0.031,640]]`, [bucket, depth, log factor, steps] of each kind; depth -1 stands
        for no full graph."""
        rows = [
            [bucket, depth, round(one.log_factor, 4), round(one.num_steps)]
            for (bucket, depth), one in sorted(self.kinds.items())
        ]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "Corrections":
        """Inverse of `encode`, up to its rounding.

        Raises:
            ValueError: not what `encode` writes, or a number out of its range.
        """
        try:
            rows = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"corrections: {text!r:.80} cannot be read as JSON") from error
        if not isinstance(rows, list) or len(rows) > MAX_KINDS:
            raise ValueError(f"corrections: a list of at most {MAX_KINDS} rows is expected, not {text!r:.80}")
        kinds: dict[Kind, Factor] = {}
        for row in rows:
            if not isinstance(row, list) or len(row) != 4 or not all(type(one) is int for one in row[:2]):
                raise ValueError(f"corrections: a row is [bucket, depth, log factor, steps], not {row!r:.80}")
            bucket, depth = row[:2]
            if not (0 <= bucket <= MAX_BUCKET and NO_GRAPH <= depth <= MAX_DEPTH):
                raise ValueError(f"corrections: there is no bucket {bucket} with depth {depth}")
            kinds[bucket, depth] = _factor(row[2:])
        return cls(kinds)


def _factor(row: list[Any]) -> Factor:
    good = all(isinstance(one, int | float) and not isinstance(one, bool) for one in row)
    # Comparisons are false for what is not a number; a whole number too long for a float is refused by them too.
    if not (good and -MAX_LOG_FACTOR <= row[0] <= MAX_LOG_FACTOR and 0 <= row[1] <= 1e15):
        raise ValueError(
            f"corrections: a factor is [log factor within +-{MAX_LOG_FACTOR:.2f}, steps from 0], not {row!r:.80}"
        )
    return Factor(float(row[0]), float(row[1]))


def combined(found: Iterable[Corrections]) -> Corrections:
    """One correction for several engines with the same table, each weighted by its steps.

    Engines may differ as a whole, so what counts of a kind is how far it is off its own engine's common factor: a kind
    that only a slow engine has run does not look slow because of that.
    """
    engines = [one for one in found if one.num_steps]
    common = _mean([Factor(one.common, one.num_steps) for one in engines]).log_factor
    apart: dict[Kind, list[Factor]] = {}
    for engine in engines:
        for kind, own in engine.kinds.items():
            apart.setdefault(kind, []).append(Factor(own.log_factor - engine.common, own.num_steps))
    kinds = {}
    for kind, factors in apart.items():
        mean = _mean(factors)
        log_factor = min(max(common + mean.log_factor, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        kinds[kind] = Factor(log_factor, mean.num_steps)
    return Corrections(kinds)


def _mean(factors: Collection[Factor]) -> Factor:
    """Their mean by steps, and all their steps."""
    weights = [min(one.num_steps, MAX_EVIDENCE_STEPS) for one in factors]
    total = sum(weights)
    if not total:
        return Factor()
    log_factor = sum(weight * one.log_factor for weight, one in zip(weights, factors, strict=True)) / total
    return Factor(log_factor, sum(one.num_steps for one in factors))


class CorrectedTimes:
    """A table under one correction, which does not move on with what it was taken from."""

    def __init__(self, times: StepCosts, corrections: Corrections) -> None:
        self._times = times
        self.max_draft_tokens = times.max_draft_tokens
        self.full_graph_depths = times.full_graph_depths
        self.padding_tokens: int = getattr(times, "padding_tokens", 0)
        self.capture_sizes: Mapping[int | None, Collection[float]] = getattr(times, "capture_sizes", {})
        self._factors = {kind: math.exp(corrections.log_factor(kind)) for kind in corrections.kinds}
        self._common = math.exp(corrections.common)

    def seconds(self, shape: StepShape) -> float:
        """As that of the table, corrected."""
        factor = self._factors.get(kind_of(shape, self.full_graph_depths), self._common)
        return self._times.seconds(shape) * factor


class LiveCosts:
    """A table under the newest corrections of all engines that use it. Not thread-safe.

    The last word of an engine counts for `max_age_s` after it was said, and not at all when the clock has gone back
    behind it.
    """

    def __init__(self, times: StepCosts, max_age_s: float) -> None:
        self._times, self._max_age_s = times, max_age_s
        self._said: dict[str, tuple[float, Corrections]] = {}
        self.corrections = Corrections()
        self.curves = CostCurves(times)

    def take(self, found: Mapping[str, Corrections], now_s: float) -> bool:
        """Take in the newest corrections by engine; `now_s` is monotonic. True where `curves` is another one now."""
        self._said |= {source: (now_s, one) for source, one in found.items()}
        self._said = {source: said for source, said in self._said.items() if 0 <= now_s - said[0] <= self._max_age_s}
        newest = combined(one for _, one in self._said.values())
        kinds = {*newest.kinds, *self.corrections.kinds}
        moved = [newest.common - self.corrections.common]
        moved += [newest.log_factor(kind) - self.corrections.log_factor(kind) for kind in kinds]
        if max(map(abs, moved)) < MIN_CHANGE:
            return False
        self.corrections = newest
        self.curves = CostCurves(CorrectedTimes(self._times, newest))
        return True

    def document(self) -> dict[str, Any]:
        """The factors in use, as JSON: `others` of what no engine has run, `steps` by kind: `depth` None off the full
        graphs, `requests` the greatest number of the bucket."""
        used = self.corrections
        rows = [
            {
                "depth": None if depth == NO_GRAPH else depth,
                "requests": 1 << bucket,
                "factor": round(math.exp(used.log_factor((bucket, depth))), 3),
                "num_steps": round(own.num_steps),
            }
            for (bucket, depth), own in sorted(used.kinds.items(), key=lambda item: (item[0][1], item[0][0]))
        ]
        return {"num_engines": len(self._said), "others": round(math.exp(used.common), 3), "steps": rows}


# ====================================================================================================
# What step times turn out to be, against what the table predicts: an online correction.
#
# Enters: pairs of measured and predicted seconds for a shape, as steps happen. Leaves: a factor for each kind of shape,
# and how far off the corrected prediction still is. No clock: a step's duration comes in as a value, so a clock that
# jumps shows as one absurd duration, and one observation moves a factor by some percent at the start, by a few per mille
# later.

MAX_LOG_ERROR = 0.5
"""Further from the present estimate than a factor e^0.5 = 1.65, an observation counts as that far."""
NUM_STEPS_OF_PRIOR = 10.0
"""At the start the factor 1 weighs like so many steps, so that a pause among the first does not set the factor."""


@dataclass(slots=True)
class _Mean:
    """Exponential mean of log(measured / predicted)."""

    log_factor: float = 0.0
    num_steps: float = 0.0

    def add(self, log_error: float, weight: float) -> None:
        self.num_steps += 1.0
        step = max(weight, 1.0 / (self.num_steps + NUM_STEPS_OF_PRIOR))
        deviation = min(max(log_error - self.log_factor, -MAX_LOG_ERROR), MAX_LOG_ERROR)
        self.log_factor = min(max(self.log_factor + step * deviation, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)

    @property
    def share(self) -> float:
        return share_of(self.num_steps)


class Residuals:
    """Factors by (batch bucket, depth of the full graph or none); a bucket is 1, 2, 3-4, 5-8, ... requests.

    Depths apart, because the best K is often one of two that are close, and a table's points err each by themselves.
    The correction of a kind is a weighted mean, in logarithms, of its own factor and the one that all kinds have in
    common (`cluster.step_time.common_factor`): what no step has visited yet is corrected like the rest, so that a
    table measured on a faster machine does not make unvisited depths look cheap.

    Args:
        full_graph_depths: as `StepTimes.full_graph_depths`.
        half_life_steps: steps of a kind after which an observation counts half, above 0.
    """

    def __init__(self, full_graph_depths: Collection[int], *, half_life_steps: float = 200.0) -> None:
        if not (math.isfinite(half_life_steps) and half_life_steps > 0):
            raise ValueError(f"Residuals: half_life_steps must be above 0, not {half_life_steps!r}")
        self._full = frozenset(full_graph_depths)
        self._weight = 1.0 - 0.5 ** (1.0 / half_life_steps)
        self._kinds: dict[Kind, _Mean] = {}
        self._total = self._shares = 0.0  # as `common_factor` takes them, kept up step by step
        self._error = 0.0
        self._num_errors = 0.0
        self.num_refused = 0

    def observe(self, measured_s: float, predicted_s: float, shape: StepShape) -> bool:
        """Take in one step; `predicted_s` is the table's own, uncorrected. A duration that is not a finite number
        above 0 is counted in `num_refused`, changes nothing else, and gives False."""
        if not all(math.isfinite(one) and one > 0 for one in (measured_s, predicted_s)):
            self.num_refused += 1
            return False
        error = min(abs(self.correct(predicted_s, shape) / measured_s - 1.0), 1.0)
        self._num_errors += 1.0
        self._error += max(self._weight, 1.0 / self._num_errors) * (error - self._error)
        log_error = math.log(measured_s / predicted_s)
        own = self._kinds.setdefault(kind_of(shape, self._full), _Mean())
        share, total = own.share, own.share * own.log_factor
        own.add(log_error, self._weight)
        self._shares += own.share - share
        self._total += own.share * own.log_factor - total
        return True

    def correct(self, seconds: float, shape: StepShape) -> float:
        """`seconds`, the table's prediction for `shape`, times the factor of its kind."""
        own = self._kinds.get(kind_of(shape, self._full))
        common = common_factor(self._total, self._shares)
        if own is None:
            return seconds * math.exp(common)
        return seconds * math.exp(own.share * own.log_factor + (1.0 - own.share) * common)

    def corrections(self) -> Corrections:
        """All factors as they are now."""
        return Corrections({kind: Factor(one.log_factor, one.num_steps) for kind, one in self._kinds.items()})

    def corrected(self, times: StepCosts) -> CorrectedTimes:
        """`times`, the table that predicted, under the factors as they are now."""
        return CorrectedTimes(times, self.corrections())

    @property
    def mape(self) -> float:
        """Recent mean of |corrected prediction / measured - 1|, each at most 1; 0.0 before the first step. Above 0.1
        the table is worth measuring again."""
        return self._error

    @property
    def num_steps(self) -> float:
        """Steps taken in."""
        return self._num_errors

    def snapshot(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "kinds": [
                [size, depth, one.log_factor, one.num_steps] for (size, depth), one in sorted(self._kinds.items())
            ],
            "mape": [self._error, self._num_errors],
            "num_refused": self.num_refused,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a `snapshot`. Raises ValueError naming the field; then nothing has changed."""
        found = {"kinds", "mape", "num_refused"} ^ set(snapshot)
        if found:
            raise ValueError(f"residuals: field {sorted(found)[0]!r} is missing or unknown")
        error, num_errors = _numbers(snapshot["mape"], 2, "mape")
        kinds: dict[Kind, _Mean] = {}
        if not isinstance(snapshot["kinds"], list):
            raise ValueError(f"residuals: field 'kinds' must be a list, not {snapshot['kinds']!r:.80}")
        for row in snapshot["kinds"]:
            size, depth, log_factor, num_steps = _numbers(row, 4, "kinds")
            kinds[int(size), int(depth)] = _Mean(log_factor, num_steps)
        (num_refused,) = _numbers([snapshot["num_refused"]], 1, "num_refused")
        self._kinds, self._error, self._num_errors = kinds, error, num_errors
        self._shares = sum(one.share for one in kinds.values())
        self._total = sum(one.share * one.log_factor for one in kinds.values())
        self.num_refused = int(num_refused)


def _numbers(value: Any, length: int, field: str) -> list[float]:
    """`value` as `length` finite numbers, counts (the last) not below 0."""
    good = isinstance(value, list | tuple) and len(value) == length
    good = good and all(isinstance(one, int | float) and math.isfinite(one) for one in value)
    if not good or value[-1] < 0:
        raise ValueError(f"residuals: field {field!r} must hold {length} numbers, the last not below 0: {value!r:.80}")
    return [float(one) for one in value]


# ====================================================================================================
# How long one decoding step takes: a table measured on the engine that it speaks for.
#
# Enters: a JSON file that `python -m peagle.vllm.calibrate` wrote, with the conditions of its measurement. Leaves:
# `StepTimes.seconds(shape)` for every batch shape (the fit: `cluster.step_time`), a refusal where the file is of another
# engine, and what the fit is worth on points held out of it. Where nothing was measured `cluster.step_time` stands in.
# Corrections by what happens live are `cluster.step_time`. Knows nothing of workloads or acceptance.

__all__ = ["FIT_FIELDS", "HeldOut", "Residuals", "StepPoint", "StepShape", "StepTimes"]

FORMAT = "peagle step times 1"
RAGGED = "ragged"
FIT_FIELDS = (
    "gpu",
    "model",
    "head",
    "dtype",
    "tensor_parallel_size",
    "vllm",
    "max_draft_tokens",
    "full_graph_depths",
    "cudagraph_mode",
    "compile",
    "async_scheduling",
)
"""Conditions that must be the same where a table is used; `vllm` up to its second number."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A measured point against what the table predicts without its batch.

    `is_inside`: some other batches of its family have at most, and some at least, its requests, and likewise its
    tokens; outside, the prediction is an extrapolation.
    """

    point: StepPoint
    predicted_s: float
    is_inside: bool

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        return abs(self.predicted_s / self.point.median_s - 1.0)


class StepTimes:
    """Seconds of a decoding step by its shape.

    Args:
        points: measured shapes.
        max_draft_tokens: K_max of the engine, 0 without drafts.
        full_graph_depths: depths k at which a batch with k everywhere runs on a full CUDA graph ({K_max} in stock vLLM
            with full decode graphs, none on a CPU or in eager mode).
        capture_sizes: captured graph sizes in tokens, of ragged batches (key None) and of each full depth.
        padding_tokens: the engine adds at most so many tokens to run a batch on a full graph (0: it never does).
        conditions: what was measured, and how.
        measured: False for numbers that nobody measured; they order choices and must not be quoted.

    Raises:
        ValueError: no points, a depth outside 0..K_max, or a full depth without a point.
    """

    def __init__(
        self,
        points: Iterable[StepPoint],
        *,
        max_draft_tokens: int,
        full_graph_depths: Iterable[int] = (),
        capture_sizes: Mapping[int | None, Sequence[int]] | None = None,
        padding_tokens: int = 0,
        conditions: Mapping[str, Any] | None = None,
        measured: bool = True,
    ) -> None:
        self.points = tuple(points)
        self.max_draft_tokens = max_draft_tokens
        self.full_graph_depths = frozenset(full_graph_depths)
        self.capture_sizes = {key: tuple(sizes) for key, sizes in (capture_sizes or {}).items()}
        self.padding_tokens = padding_tokens
        self.conditions = {
            **(conditions or {}),
            "max_draft_tokens": max_draft_tokens,
            "full_graph_depths": sorted(self.full_graph_depths),
        }
        self.measured = measured
        if not self.points:
            raise ValueError("step times: there is no measured point")
        measured_depths = {point.shape.uniform_depth for point in self.points}
        for depth in sorted(self.full_graph_depths):
            if not 0 <= depth <= max_draft_tokens:
                raise ValueError(f"step times: full_graph_depths has {depth}, outside 0..{max_draft_tokens}")
            if depth not in measured_depths:
                raise ValueError(f"step times: full_graph_depths has {depth}, but no point was measured at that depth")
        self._fit = self._fit_of(self.points)

    def _fit_of(self, points: Sequence[StepPoint]) -> StepFit:
        return StepFit(points, self.full_graph_depths, self.capture_sizes, self.padding_tokens)

    def seconds(self, shape: StepShape) -> float:
        """Expected seconds of a step of `shape`; some microseconds of work.

        Raises ValueError for a ragged shape where only full graphs were measured."""
        return self._fit.seconds(shape)

    @property
    def context_tokens(self) -> float:
        """The context of most measurements, at which a shape of unknown context is timed."""
        return self._fit.context_tokens

    def check_fits(self, conditions: Mapping[str, Any], source: str = "step times") -> None:
        """Make sure that the table was measured under `conditions`, those of the engine that is to use it.

        `source` names the table in the message. A table that was not measured fits every engine of its K_max.

        Raises:
            ValueError: names the fields that differ or are missing, both values, and the command that measures anew.
        """
        wrong = []
        for field in FIT_FIELDS if self.measured else ("max_draft_tokens",):
            here, there = (_comparable(field, of.get(field, "not stated")) for of in (conditions, self.conditions))
            if here != there:
                wrong.append(f"{field} is {conditions.get(field, 'not stated')!r} here and {there!r} in the table")
        if wrong:
            raise ValueError(
                f"{source} was measured on another engine: {'; '.join(wrong)}. "
                "Measure this one: python -m peagle.vllm.calibrate"
            )

    def held_out(self) -> list[HeldOut]:
        """Every point against a fit without its batch, at whatever context that was measured; not the points of a
        batch that is alone in its family."""
        found = []
        for point in self.points:
            shape = point.shape
            rest = [one for one in self.points if _batch(one.shape) != _batch(shape)]
            family, _ = self._fit.place(shape)
            peers = [one.shape for one in rest if self._fit.place(one.shape)[0] == family]
            if not peers:
                continue
            requests, tokens = ([one.num_requests for one in peers], [one.num_tokens for one in peers])
            inside = min(requests) <= shape.num_requests <= max(requests)
            inside = inside and min(tokens) <= shape.num_tokens <= max(tokens)
            found.append(HeldOut(point, self._fit_of(rest).seconds(shape), inside))
        return found

    def to_document(self) -> dict[str, Any]:
        """The table as JSON, for `from_document` in another process."""
        return {
            "format": FORMAT,
            "measured": self.measured,
            "max_draft_tokens": self.max_draft_tokens,
            "full_graph_depths": sorted(self.full_graph_depths),
            "capture_sizes": {RAGGED if key is None else str(key): list(of) for key, of in self.capture_sizes.items()},
            "padding_tokens": self.padding_tokens,
            "conditions": self.conditions,
            "points": [_to_row(point) for point in self.points],
        }

    @classmethod
    def from_document(cls, document: Any, source: str = "step times") -> "StepTimes":
        """Inverse of `to_document`. Raises ValueError naming the `source` and the field."""
        try:
            return _from_json(document)
        except (KeyError, TypeError, ValueError) as error:
            said = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{source}: {said}") from error

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, one line a point."""
        head = self.to_document()
        points = head.pop("points")
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = ",\n".join(f"  {json.dumps(point)}" for point in points)
        text = "\n".join(["{", *lines, ' "points": [', rows, " ]", "}"]) + "\n"
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "StepTimes":
        """Read what `save` wrote. Raises ValueError naming the file and the field."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"step times {path}: cannot be read as JSON ({error}); write it with peagle.vllm.calibrate"
            ) from error
        return cls.from_document(raw, f"step times {path}")


def _batch(shape: StepShape) -> tuple[float, float, int | None]:
    return shape.num_requests, shape.num_tokens, shape.uniform_depth


def _comparable(field: str, value: Any) -> Any:
    return ".".join(str(value).split(".")[:2]) if field == "vllm" else value


_ROW = ("num_requests", "num_tokens", "uniform_depth", "context_tokens", "median_s", "p95_s", "num_steps")
_KEYS = {
    *("format", "measured", "max_draft_tokens", "full_graph_depths", "capture_sizes", "padding_tokens"),
    *("conditions", "points"),
}


def _to_row(point: StepPoint) -> dict[str, Any]:
    shape, times = point.shape, (round(point.median_s, 7), round(point.p95_s, 7), point.num_steps)
    where = (shape.num_requests, shape.num_tokens, shape.uniform_depth, round(shape.context_tokens, 1))
    return dict(zip(_ROW, (*where, *times), strict=True))


def _from_json(raw: Any) -> StepTimes:
    """Raises ValueError, KeyError or TypeError."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}")
    if unknown := sorted(set(raw) - _KEYS):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    conditions, deepest = raw["conditions"], _whole(raw["max_draft_tokens"], "max_draft_tokens")
    if not isinstance(conditions, dict) or not isinstance(raw["measured"], bool):
        raise ValueError("conditions must be an object and measured true or false")
    if conditions.get("max_draft_tokens", deepest) != deepest:
        raise ValueError(f"max_draft_tokens is {deepest}, but {conditions['max_draft_tokens']!r} in conditions")
    sizes: dict[int | None, list[int]] = {}
    for key, of in dict(raw["capture_sizes"]).items():
        family = None if key == RAGGED else _whole(int(key) if key.isdigit() else key, "capture_sizes")
        sizes[family] = [_whole(size, f"capture_sizes.{key}") for size in of]
    return StepTimes(
        [_from_row(row, index, deepest) for index, row in enumerate(raw["points"])],
        max_draft_tokens=deepest,
        full_graph_depths=[_whole(depth, "full_graph_depths") for depth in raw["full_graph_depths"]],
        capture_sizes=sizes,
        padding_tokens=_whole(raw["padding_tokens"], "padding_tokens"),
        conditions=conditions,
        measured=raw["measured"],
    )


def _from_row(row: Any, index: int, max_draft_tokens: int) -> StepPoint:
    where = f"points[{index}]"
    if not isinstance(row, dict) or set(row) != set(_ROW):
        raise ValueError(f"{where} must have the keys {', '.join(_ROW)}")
    num_requests, num_tokens, num_steps = (_whole(row[key], f"{where}.{key}") for key in (_ROW[0], _ROW[1], _ROW[6]))
    depth = None if row["uniform_depth"] is None else _whole(row["uniform_depth"], f"{where}.uniform_depth")
    for key in ("context_tokens", "median_s", "p95_s"):
        if isinstance(row[key], bool) or not isinstance(row[key], int | float) or not math.isfinite(row[key]):
            raise ValueError(f"{where}.{key} must be a number, not {row[key]!r}")
    if not 0 < row["median_s"] <= row["p95_s"]:
        raise ValueError(f"{where}.median_s must be above 0 and at most p95_s, not {row['median_s']!r}")
    if num_tokens > num_requests * (1 + max_draft_tokens):
        raise ValueError(f"{where}.num_tokens is {num_tokens}: more than 1 + max_draft_tokens a request")
    try:
        shape = StepShape(num_requests, num_tokens, depth, row["context_tokens"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return StepPoint(shape, row["median_s"], row["p95_s"], num_steps)


def _whole(value: Any, field: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{field} must be a whole number from 0, not {value!r}")
    return value


# ====================================================================================================
# Step times that stand in for a table which nobody has measured: what K is chosen by until `calibrate` has run.
#
# Enters: K_max, whether the engine is on a GPU, and the depths with full CUDA graphs. Leaves: a `StepTimes` whose
# `measured` is False; its seconds are in proportion, their size means nothing. A measured table is always better.

__all___unmeasured = ["default_step_times"]

_NUM_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_UNIT_S = 0.01


def default_step_times(
    max_draft_tokens: int, *, on_gpu: bool = False, full_graph_depths: Iterable[int] | None = None
) -> StepTimes:
    """Step times of an engine that nobody has measured.

    full_graph_depths: of a GPU, K at which batches run on full CUDA graphs; None as in vLLM by itself, K_max alone.

    With c for the fixed part of a step:

    - a CPU is compute-bound at once: c / 32 for each token, c / 16 for each request, c / 10 for the drafter's pass. It
      says the steps of SmolLM2-135M on two cores within 16 %. For usual survivals and K_max = 7: K = 7 at one
      request, 6 at 2 and 4, 4 at 8 and 16, 3 from 32 on.
    - a GPU has room for a few hundred tokens: c up to 64, c / 150 for each token more, c / 200 for each request,
      c / 5 for the drafter's pass, 0.15 c off the full graphs (on an H200, K = 3 of 7: 0.8 c at one request and nothing
      from eight on, where the step hides its launches). K = 7 up to 16 requests, 4 at 32, 3 at 64, 2 from 128 on. It
      says the steps of an H200 with the shape of Llama-3.1-8B within 10 %; with that of Qwen3-30B-A3B there is room for
      more, so K is rather too small.

    tests/test_unmeasured.py holds both against what was measured.

    Raises:
        ValueError: a K_max below 0, or a full-graph depth outside 0..K_max.
    """
    if max_draft_tokens < 0:
        raise ValueError(f"max_draft_tokens must be 0 or more, not {max_draft_tokens}")
    full_depths: set[int] = set()
    if on_gpu:
        full_depths = {max_draft_tokens} if full_graph_depths is None else set(full_graph_depths)
    points = []
    for num_requests in _NUM_REQUESTS:
        for depth in range(max_draft_tokens + 1):
            for uniform in (depth, None):
                units = _on_gpu(num_requests, depth, uniform in full_depths) if on_gpu else _on_cpu(num_requests, depth)
                shape = StepShape(num_requests, num_requests * (1 + depth), uniform)
                points.append(StepPoint(shape, _UNIT_S * units, _UNIT_S * units, 1))
    return StepTimes(points, max_draft_tokens=max_draft_tokens, full_graph_depths=full_depths, measured=False)


def _on_cpu(num_requests: int, depth: int) -> float:
    drafter = 0.1 if depth else 0.0
    return 1.0 + num_requests * (1 + depth) / 32 + num_requests / 16 + drafter


def _on_gpu(num_requests: int, depth: int, is_full: bool) -> float:
    verified = max(0, num_requests * (1 + depth) - 64) / 150
    drafter, launches = 0.2 if depth else 0.0, 0.0 if is_full else 0.15
    return 1.0 + verified + num_requests / 200 + drafter + launches
