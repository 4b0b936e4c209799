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
from typing import Any

from cluster.step_costs import CostCurves, StepCosts
from cluster.step_fit import StepShape

MAX_LOG_FACTOR = math.log(8.0)
NO_GRAPH = -1
"""In the place of a full graph's depth."""
NUM_STEPS_TO_TRUST = 100.0
"""Steps after which a kind of step speaks as much for itself as all steps together do for it."""
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


def shrunk(own: Factor, common: Factor) -> float:
    """The log factor of a kind: a weighted mean of its own and that of all kinds together."""
    share = own.num_steps / (own.num_steps + NUM_STEPS_TO_TRUST)
    return share * own.log_factor + (1.0 - share) * common.log_factor


@dataclass(frozen=True)
class Corrections:
    """What steps turned out to take, over what the table says: `common` of all kinds together, `kinds` by kind."""

    common: Factor = Factor()
    kinds: Mapping[Kind, Factor] = field(default_factory=dict)

    def log_factor(self, kind: Kind) -> float:
        """Log of the factor by which the table's time of this kind of step is multiplied."""
        own = self.kinds.get(kind)
        return self.common.log_factor if own is None else shrunk(own, self.common)

    def encode(self) -> str:
        """One header value, JSON: `[[0.0123,812],[3,7,0.031,640]]`, first all kinds together, then
        [bucket, depth, log factor, steps] of each; depth -1 stands for no full graph."""
        rows = [[bucket, depth, *_rounded(one)] for (bucket, depth), one in sorted(self.kinds.items())]
        return json.dumps([_rounded(self.common), *rows], separators=(",", ":"))

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
        if not isinstance(rows, list) or not 1 <= len(rows) <= 1 + MAX_KINDS:
            raise ValueError(f"corrections: a list of 1 to {1 + MAX_KINDS} rows is expected, not {text!r:.80}")
        kinds: dict[Kind, Factor] = {}
        for row in rows[1:]:
            if not isinstance(row, list) or len(row) != 4 or not all(type(one) is int for one in row[:2]):
                raise ValueError(f"corrections: a row is [bucket, depth, log factor, steps], not {row!r:.80}")
            bucket, depth = row[:2]
            if not (0 <= bucket <= MAX_BUCKET and NO_GRAPH <= depth <= MAX_DEPTH):
                raise ValueError(f"corrections: there is no bucket {bucket} with depth {depth}")
            kinds[bucket, depth] = _factor(row[2:])
        return cls(_factor(rows[0]), kinds)


def _rounded(one: Factor) -> list[float]:
    return [round(one.log_factor, 4), round(one.num_steps)]


def _factor(row: Any) -> Factor:
    good = isinstance(row, list) and len(row) == 2
    good = good and all(isinstance(one, int | float) and not isinstance(one, bool) for one in row)
    # Comparisons are false for what is not a number; a whole number too long for a float is refused by them too.
    if not (good and -MAX_LOG_FACTOR - 1e-4 <= row[0] <= MAX_LOG_FACTOR + 1e-4 and 0 <= row[1] <= 1e15):
        raise ValueError(
            f"corrections: a factor is [log factor within +-{MAX_LOG_FACTOR:.2f}, steps from 0], not {row!r:.80}"
        )
    return Factor(min(max(float(row[0]), -MAX_LOG_FACTOR), MAX_LOG_FACTOR), float(row[1]))


def combined(found: Iterable[Corrections]) -> Corrections:
    """One correction for several engines with the same table, each weighted by its steps.

    Engines may differ as a whole, so what counts of a kind is how far it is off its own engine's common factor: a kind
    that only a slow engine has run does not look slow because of that.
    """
    engines = list(found)
    common = _mean([one.common for one in engines])
    apart: dict[Kind, list[Factor]] = {}
    for engine in engines:
        for kind, own in engine.kinds.items():
            apart.setdefault(kind, []).append(Factor(own.log_factor - engine.common.log_factor, own.num_steps))
    kinds = {}
    for kind, factors in apart.items():
        mean = _mean(factors)
        log_factor = min(max(common.log_factor + mean.log_factor, -MAX_LOG_FACTOR), MAX_LOG_FACTOR)
        kinds[kind] = Factor(log_factor, mean.num_steps)
    return Corrections(common, kinds)


def _mean(factors: Collection[Factor]) -> Factor:
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
        self._common = math.exp(corrections.common.log_factor)

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
        moved = [newest.common.log_factor - self.corrections.common.log_factor]
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
        return {"num_engines": len(self._said), "others": round(math.exp(used.common.log_factor), 3), "steps": rows}
