"""Predicted AL at a fixed K beside that of real runs.

Enters: traces, and the results of `benchmarks.stock_acceptance` (a real engine) or `peagle.evaluate`. Leaves: one line for
each K, temperature and group. From the engine `tokens_per_step` is compared, for it counts only tokens that came out,
as the traces do; its `acceptance_length` also counts drafts accepted past an answer's end. Where the real run answered
some of the questions only, the traces' categories are weighted as it had them; other answers remain other answers.

Traces hold what every position would accept, so a replay starts its drafts where decoding at that K does. Counts of a
service know only the K it played; `carried_lengths` shows how well `cluster.transfer` goes from the survival of a real
run at its greatest K to its AL at the others.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.simulation.traces import Answer, Traces, num_steps
from cluster.transfer import lengths

ALL = "all"


@dataclass(frozen=True)
class Compared:
    """AL of one group at one K; `num_answers` and `num_traces`: answers behind each figure."""

    group: str
    temperature: float
    k: int
    real: float
    predicted: float
    num_answers: int
    num_traces: int

    @property
    def difference(self) -> float:
        """Predicted over real, less 1."""
        return self.predicted / self.real - 1

    @property
    def same_answers(self) -> bool:
        """Whether both figures can be of the same answers, judging by their number."""
        return self.num_answers == self.num_traces


@dataclass(frozen=True)
class Carried:
    """AL of one group at K = k from its survival at K = from_k; `plain`: 1 + S_1 + ... + S_k."""

    group: str
    temperature: float
    from_k: int
    k: int
    real: float
    predicted: float
    plain: float

    @property
    def difference(self) -> float:
        """Predicted over real, less 1."""
        return self.predicted / self.real - 1


def real_lengths(document: Mapping[str, Any], path: str) -> Iterator[tuple[str, float, int, float, int]]:
    """Group, temperature, K, AL and number of answers of each figure in a results file."""
    if "engine" in document:
        temperature = float(document.get("temperature") or 0.0)
        for k, groups in document["engine"].items():
            for name, one in groups.items():
                if one.get("tokens_per_step") is not None:
                    yield name, temperature, int(k), float(one["tokens_per_step"]), int(one["num_answers"])
    elif "sets" in document:
        for one_set in document["sets"]:
            for name, one in one_set["groups"].items():
                for k, length in one.get("acceptance_length", {}).items():
                    yield name, float(one_set["temperature"]), int(k), float(length), int(one["num_answers"])
    else:
        raise ValueError(f"{path}: has neither 'engine' (benchmarks.stock_acceptance) nor 'sets' (peagle.evaluate)")


def compare_lengths(traces: Traces, path: str | Path) -> list[Compared]:
    """Each figure of the results that the traces have answers for.

    Raises ValueError naming the file when it is no such results, or none of its figures can be predicted.
    """
    real = _read(path, real_lengths)
    found = []
    for group, temperature, k, length, num_answers in real:
        by_category = {
            name: num for name, *same, _, num in real if same == [temperature, k] and group == ALL != name
        } or {group: num_answers}
        weighted = _weighted(traces, temperature, by_category)
        if weighted and 0 <= k <= traces.max_draft_tokens:
            found.append(Compared(group, temperature, k, length, _predicted(weighted, k), num_answers, len(weighted)))
    if not found:
        raise ValueError(f"{path}: none of its {len(real)} figures has answers in {traces.source}")
    return found


def carried_lengths(path: str | Path) -> list[Carried]:
    """Each figure of the results below the greatest K that they hold survivals for. Raises ValueError as
    `compare_lengths`."""
    return _read(path, _carried)


def _carried(document: Mapping[str, Any], path: str) -> Iterator[Carried]:
    # Survivals of an engine count drafts accepted past an answer's end, and so does its `acceptance_length`.
    for temperature, name, curve, by_k in _survivals(document):
        for k, real in by_k.items():
            if 0 < k < len(curve):
                predicted = lengths(curve, len(curve))[k]
                yield Carried(name, temperature, len(curve), k, real, predicted, 1 + sum(curve[:k]))


def _survivals(document: Mapping[str, Any]) -> Iterator[tuple[float, str, list[float], dict[int, float]]]:
    """Temperature, group, S_1 .. at the greatest K, and AL by K."""
    if "engine" in document:
        temperature = float(document.get("temperature") or 0.0)
        groups_by_k = {int(k): groups for k, groups in document["engine"].items()}
        greatest = groups_by_k[max(groups_by_k)]
        for name, one in greatest.items():
            by_k = {k: groups[name].get("acceptance_length") for k, groups in groups_by_k.items() if name in groups}
            known = {k: float(length) for k, length in by_k.items() if length is not None}
            yield temperature, name, one.get("survival", []), known
    for one_set in document.get("sets", ()):
        for name, one in one_set["groups"].items():
            by_k = {int(k): float(length) for k, length in one.get("acceptance_length", {}).items()}
            yield float(one_set["temperature"]), name, one.get("survival", []), by_k


T = TypeVar("T")


def _read(path: str | Path, read: Callable[[Mapping[str, Any], str], Iterator[T]]) -> list[T]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ValueError(f"{path}: not a JSON object")
        return list(read(document, str(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not results of benchmarks.stock_acceptance or peagle.evaluate: {error!r}") from None


def _weighted(traces: Traces, temperature: float, by_category: Mapping[str, int]) -> list[tuple[Answer, float]]:
    """Answers of these categories with weights that give each category as many answers as the real run had."""
    found: list[tuple[Answer, float]] = []
    for category, num_answers in by_category.items():
        chosen = [one for one in traces.answers if one.temperature == temperature and one.category == category]
        found += [(one, num_answers / len(chosen)) for one in chosen]
    return found


def _predicted(weighted: list[tuple[Answer, float]], k: int) -> float:
    steps = sum(weight * num_steps(one.accepted, k) for one, weight in weighted)
    return sum(weight * len(one.accepted) for one, weight in weighted) / steps


def table(compared: list[Compared]) -> str:
    lines = ["group                     T  K   real  predicted  difference"]
    for one in compared:
        note = "" if one.same_answers else f"   {one.num_answers} answers, {one.num_traces} in the traces"
        lines.append(
            f"{one.group:22s} {one.temperature:4g} {one.k:2d} {one.real:6.3f} {one.predicted:10.3f} "
            f"{one.difference:+10.1%}{note}"
        )
    return "\n".join(lines)


def carried_table(carried: list[Carried]) -> str:
    lines = ["group                     T  K from K   real  carried  difference  plain sum"]
    for one in carried:
        lines.append(
            f"{one.group:22s} {one.temperature:4g} {one.k:2d} {one.from_k:6d} {one.real:6.3f} {one.predicted:8.3f} "
            f"{one.difference:+11.1%} {one.plain / one.real - 1:+10.1%}"
        )
    return "\n".join(lines)
