"""Counts of verification steps, as tests write them down."""

from collections.abc import Iterable

from cluster.counts import Counts


def counts_of(steps: Iterable[tuple[int, int]]) -> Counts:
    """Counts of `steps`, each (drafts verified, drafts accepted of them)."""
    counts = Counts()
    for num_verified, num_accepted in steps:
        counts.add_step(num_verified, num_accepted)
    return counts
