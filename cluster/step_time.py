"""How long one decoding step takes: a table measured on the engine that it speaks for.

Enters: a JSON file that `python -m peagle.vllm.calibrate` wrote, with the conditions of its measurement. Leaves:
`StepTimes.seconds(shape)` for every batch shape (the fit: `cluster.step_fit`), a refusal where the file is of another
engine, and what the fit is worth on points held out of it. Where nothing was measured `cluster.unmeasured` stands in.
Corrections by what happens live are `cluster.residuals`. Knows nothing of workloads or acceptance.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.residuals import Residuals
from cluster.step_fit import StepFit, StepPoint, StepShape

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
