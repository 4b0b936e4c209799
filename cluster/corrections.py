"""Corrections of a step-time table as values: they travel from engines, are combined, and correct the table.

Enters: what schedulers found of the same table (`cluster.residuals`), as a value or as the text in which it travels.
Leaves: one correction for all engines, and cost curves under it. No clock of its own; knows no engine and no HTTP.

A factor belongs to a kind of step, (batch bucket, depth of the full graph or none); a bucket is 1, 2, 3-4, 5-8, ...
requests. Factors are kept as logarithms of measured / predicted seconds.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cluster.step_costs import CostCurves, StepCosts
from cluster.step_fit import StepShape

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
