"""What is believed of acceptance when replicas take minutes to start: long memories, until a shorter one contradicts.

Enters: the replicas' acceptance reports. Leaves: the survival of a workload. Never knows: rates, replicas, clocks.

One memory would be too slow after a collapse or too uncertain before it. Each workload goes by the longest memory that
no shorter one contradicts; a memory once contradicted is full of what is over, and counts again when it agrees with the
one that took its place.
"""

from collections.abc import Iterable, Sequence

from cluster.acceptance import MAX_SOURCE_WORKLOADS, AcceptanceBook, Report, Survival
from cluster.counts import Ledger

HALF_LIVES_STEPS = (20_000.0, 3_000.0, 500.0)
"""Of the memories. The first is longer than for the choice of K, because replicas take minutes and K a step. The last
holds about 180 independent steps: AL with a standard error of 0.11."""

CONTRADICTION, AGREEMENT = 2.0, 0.5
"""Differences of AL in half widths of both 90 % intervals together, from which on memories contradict each other (3.3
standard errors), and up to which they agree."""


MAX_WORKLOADS = 64


class AcceptanceMemory:
    """The memories of all workloads; not thread-safe. `max_draft_tokens`: K_max."""

    def __init__(self, max_draft_tokens: int, half_lives_steps: Sequence[float] = HALF_LIVES_STEPS) -> None:
        self._max_draft_tokens, self._half_lives_steps = max_draft_tokens, tuple(half_lives_steps)
        self._ledger = Ledger(MAX_SOURCE_WORKLOADS * MAX_WORKLOADS)
        self._books: list[AcceptanceBook] = []
        self._in_use: dict[str, int] = {}
        self._forget()

    def absorb_all(self, reports: Iterable[Report]) -> None:
        """Take the reports of one round; a new head voids everything."""
        new = self._ledger.take(reports)
        if new.reset:
            self._forget()
        for workload, counts in new.counts.items():
            for book in self._books:
                book.add(workload, counts)

    def survival(self, workload: str) -> Survival:
        """What is believed now."""
        if len(self._in_use) > 2 * MAX_WORKLOADS:
            self._in_use = {}  # mostly names that the books have forgotten
        believed = [book.survival(workload) for book in self._books]
        current = self._in_use.get(workload, 0)
        for index in range(current):
            if _distance(believed[index], believed[current]) <= AGREEMENT:
                current = index
                break
        while any(_distance(believed[current], shorter) > CONTRADICTION for shorter in believed[current + 1 :]):
            current += 1
        self._in_use[workload] = current
        return believed[current]

    def _forget(self) -> None:
        self._books = [
            AcceptanceBook(self._max_draft_tokens, half_life_steps=half_life, max_workloads=MAX_WORKLOADS)
            for half_life in self._half_lives_steps
        ]
        self._in_use = {}


def _distance(one: Survival, other: Survival) -> float:
    """Difference of AL at K_max against what the intervals allow."""
    half_widths = sum((sum(each.high) - sum(each.low)) / 2 for each in (one, other))
    return abs(sum(one.mean) - sum(other.mean)) / half_widths if half_widths else 0.0
