"""Verification steps of one workload, weighted by age.

Enters: `Counts` of later and later steps. Leaves: sums in which a step weighs half as much for every half-life of steps
that came after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.beta import Array
from cluster.counts import Counts
from cluster.saved_acceptance import SavedTally


@dataclass(slots=True)
class Tally:
    """Weighted steps: in all, and trials and successes of each conditional acceptance a_i (index i - 1)."""

    steps: float
    reached_D: Array
    accepted_D: Array

    @classmethod
    def zeros(cls, max_draft_tokens: int) -> "Tally":
        """No steps."""
        return cls(0.0, np.zeros(max_draft_tokens), np.zeros(max_draft_tokens))

    @classmethod
    def of_counts(cls, counts: Counts, max_draft_tokens: int) -> "Tally":
        """Steps that weigh 1 each. Depths beyond K_max are left out: they tell nothing about the others."""
        tally = cls.zeros(max_draft_tokens)
        tally.steps = float(counts.num_steps)
        depth = min(max_draft_tokens, len(counts.drafted))
        tally.reached_D[:depth] = counts.reached[:depth]
        tally.accepted_D[:depth] = counts.accepted[:depth]
        return tally

    @classmethod
    def sum(cls, tallies: Sequence["Tally"]) -> "Tally":
        """Several workloads together, each step with the weight it has."""
        return cls(
            sum(one.steps for one in tallies),
            np.sum([one.reached_D for one in tallies], axis=0),
            np.sum([one.accepted_D for one in tallies], axis=0),
        )

    @property
    def depth(self) -> float:
        """Mean K at which these steps were verified, 0 without any.

        A depth is reached where the one before was accepted and K goes that far, so reached / accepted before is the
        share of K that goes on. K is taken not to depend on what is accepted.
        """
        share = found = 1.0 if self.reached_D.size and self.reached_D[0] > 0 else 0.0
        for reached, accepted_before in zip(self.reached_D[1:], self.accepted_D, strict=False):
            if accepted_before <= 0:
                break
            share *= min(1.0, float(reached / accepted_before))
            found += share
        return found

    @classmethod
    def restored(cls, saved: SavedTally) -> "Tally":
        """Inverse of `saved`."""
        return cls(saved.steps, np.array(saved.reached, float), np.array(saved.accepted, float))

    def saved(self, workload: str) -> SavedTally:
        """As a plain record."""
        reached, accepted = self.reached_D.tolist(), self.accepted_D.tolist()
        return SavedTally(workload=workload, steps=self.steps, reached=reached, accepted=accepted)

    def add(self, later: "Tally", half_life_steps: float) -> None:
        """Add later steps, and let each step weigh 2^(-steps since / half-life).

        The n later steps are taken as evenly mixed: each weighs their mean, (1 - 2^(-n/h)) / (n (1 - 2^(-1/h))), so
        that it does not matter how steps are cut into additions.
        """
        if later.steps <= 0:
            return
        kept = 0.5 ** (later.steps / half_life_steps)
        rate = math.log(2) / half_life_steps
        weight = math.expm1(-rate * later.steps) / (math.expm1(-rate) * later.steps)
        self.steps = kept * self.steps + weight * later.steps
        self.reached_D = kept * self.reached_D + weight * later.reached_D
        self.accepted_D = kept * self.accepted_D + weight * later.accepted_D
