"""From measured step times to a function of a batch's shape.

Enters: points, each the time of one shape. Leaves: `StepFit.seconds(shape)`, defined for every shape. Two families:

- **ragged**: every batch that does not run on a full CUDA graph of its own, t = V(n) + D(b) + context. V, over tokens
  verified n, is the target's forward; D, over requests b, is the drafter and the host. Both never fall (isotonic least
  squares, by backfitting: Buja, Hastie and Tibshirani 1989), so noise makes no step cheaper than a smaller one.
- **full, one a depth d**: the batch runs on a full graph of 1 + d tokens a request, t = F_d(n) + context. Every request
  has depth d, or few enough tokens are missing that the engine pads the batch to that (`padding_tokens`).

Where several depths have full graphs, these are most of what was measured, and the few ragged points are the noisiest,
being launched piece by piece. Then V and D are those of the full graphs, and a ragged step takes r(b) times as long, r
being a median of what was measured: a fit to the ragged points alone follows each one that is off. Mean steps with
prompts among them, on an H200 at 8 to 128 requests and K = 1 to 7, are within 4 % of what this says, 2 % on average
(tests/test_step_tiers.py).

n is first rounded up to the size of the graph that runs it, so V and F are staircases up to the largest captured size
(a measurement between two sizes counts at the upper one), straight lines between measured sizes beyond it, and go on
straight past the last. Context enters as a (b * c) + e (n * c) for a mean context c, with a and e from shapes measured
at several contexts. Errors are relative: a millisecond counts ten times more at one request than in a step of ten
times the length. Plain numbers only; knows no file and no engine.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from cluster.step_curves import FLAT, ONE, Array, Curve, additive

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
