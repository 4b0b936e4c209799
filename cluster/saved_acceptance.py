"""The form of an acceptance snapshot: plain values that JSON can hold, checked field by field when read.

Enters: a ledger, or a snapshot from a file. Leaves: records, or a ValueError that names the field. Never knows: files.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from cluster.counts import MAX_NUM_SOURCES, Counts, Ledger, SourceState
from cluster.section import Section

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TOLERANCE = 1e-6  # relative; sums of weighted steps are rounded


class SavedTally(Section):
    """Weighted steps of a workload: in all, and trials and successes of each a_i."""

    workload: str
    steps: Weight
    reached: list[Weight]
    accepted: list[Weight]


class SavedCounts(Section):
    """A replica's last reading of a workload."""

    workload: str
    drafted: list[int]
    reached: list[int]
    accepted: list[int]


class SavedSource(Section):
    """A replica's last report."""

    source: str
    head: str
    totals: list[SavedCounts]


class SavedBook(Section):
    """Everything an `AcceptanceBook` has learned. Lists of workloads and sources begin with the least recent."""

    format: Literal[1]
    max_draft_tokens: int
    head: str | None
    retired_heads: list[str]
    workloads: list[SavedTally]
    evicted: SavedTally
    sources: list[SavedSource]


def save_sources(ledger: Ledger) -> list[SavedSource]:
    """The last reports that a ledger remembers."""
    return [
        SavedSource(
            source=source,
            head=state.head,
            totals=[
                SavedCounts(
                    workload=name,
                    drafted=list(counts.drafted),
                    reached=list(counts.reached),
                    accepted=list(counts.accepted),
                )
                for name, counts in state.totals.items()
            ],
        )
        for source, state in ledger.sources.items()
    ]


def load_book(snapshot: Any, max_draft_tokens: int, max_source_workloads: int) -> tuple[SavedBook, Ledger]:
    """Read a snapshot, and its ledger.

    Raises:
        ValueError: naming the field, or that the snapshot is of a head with another K_max.
    """
    try:
        saved = SavedBook.model_validate(snapshot)
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(f"{_path(*detail['loc'])}: {detail['msg']}, not {detail.get('input')!r:.80}") from error
    if saved.max_draft_tokens != max_draft_tokens:
        raise ValueError(
            f"snapshot.max_draft_tokens is {saved.max_draft_tokens}, but the head served drafts {max_draft_tokens}: "
            "the snapshot is of another head, start without it"
        )
    _check_tally(saved.evicted, max_draft_tokens, "evicted")
    for index, tally in enumerate(saved.workloads):
        _check_tally(tally, max_draft_tokens, "workloads", index)
    _check_distinct([one.workload for one in saved.workloads], "workloads")
    return saved, _loaded_ledger(saved, max_source_workloads)


def _loaded_ledger(saved: SavedBook, max_source_workloads: int) -> Ledger:
    ledger = Ledger(max_source_workloads)
    ledger.head = saved.head
    ledger.retired.extend(saved.retired_heads)
    _check_distinct([one.source for one in saved.sources], "sources")
    for index, source in list(enumerate(saved.sources))[-MAX_NUM_SOURCES:]:
        _check_distinct([one.workload for one in source.totals], "sources", index, "totals")
        totals: dict[str, Counts] = {}
        for place, one in enumerate(source.totals):
            try:
                totals[one.workload] = Counts(tuple(one.drafted), tuple(one.reached), tuple(one.accepted))
            except ValueError as error:
                raise ValueError(f"{_path('sources', index, 'totals', place)}: {error}") from error
        ledger.sources[source.source] = SourceState(source.head, totals)
    return ledger


def _check_tally(tally: SavedTally, max_draft_tokens: int, *place: str | int) -> None:
    limits = [tally.steps] * max_draft_tokens
    for name in ("reached", "accepted"):
        weights = getattr(tally, name)
        if len(weights) != max_draft_tokens:
            raise ValueError(
                f"{_path(*place, name)} has {len(weights)} depths, but max_draft_tokens is {max_draft_tokens}"
            )
        for index, (weight, limit) in enumerate(zip(weights, limits, strict=True)):
            if weight > limit * (1 + TOLERANCE):
                raise ValueError(
                    f"{_path(*place, name, index)} is {weight}, more than the {limit} trials it is part of"
                )
        limits = weights


def _check_distinct(names: list[str], *place: str | int) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{_path(*place, index)}: {name!r} is there twice")


def _path(*place: str | int) -> str:
    return "snapshot" + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place)
