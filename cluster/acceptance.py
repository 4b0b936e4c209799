"""Acceptance of each workload by depth: what is believed, how surely, and from which steps.

Enters: the cumulative counts of every target replica, as often as somebody asks for them. Leaves: the survival S_i of a
workload with intervals, or a random draw of it (Thompson sampling), and a snapshot. Never knows: clocks, step times, K.

Model (policy-and-apis, D1 and D3). A step that verifies k drafts and accepts j of them is a trial of the conditional
acceptances a_1 .. a_min(j + 1, k): k = j censors the next one. With a P-EAGLE head the draft at depth i does not depend
on k, so trials at any K inform the same a_i, and each gets a Beta posterior of its own; S_i is the product a_1 .. a_i.
Its prior is worth `prior_steps` trials around the parent's mean; the parent of a workload is all other workloads
together, and the parent's own prior a published curve. Older steps count less: half after `half_life_steps` further
steps of the same workload. A pause forgets nothing, and no clock is read.

State is shared by being computed again: counts at the replicas only grow, each ingress replica keeps a book of its own
from the same reports, and books that poll at different times agree closely, because a step's weight depends on how many
came after it and not on how they were cut into reports. Nobody owns the estimate. A lost ingress replica takes nothing
along (its successor reads the same counts, or a snapshot); of a lost target replica everything reported stays. A book
that begins late sees each replica's past as one average instead of weighted by age, and agrees with older books after
some half-lives.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.beta import Array, product_interval
from cluster.counts import Counts, Ledger, Report
from cluster.saved_acceptance import SavedBook, load_book, save_sources
from cluster.tally import Tally
from cluster.transfer import SPLIT_SHARE, gains, lengths

__all__ = ["AcceptanceBook", "Counts", "Report", "Survival"]

PUBLISHED_SURVIVAL = (0.80, 0.64, 0.50, 0.39, 0.30, 0.22, 0.17)
"""By depth, in the range published for P-EAGLE heads; depths beyond go on with the last conditional acceptance."""

INTERVAL_LEVEL = 0.9
MAX_SOURCE_WORKLOADS = 4  # names told apart in one source's reports, as a multiple of max_workloads
LEAST_CONDITIONAL, MOST_CONDITIONAL = 0.01, 0.99


@dataclass(frozen=True, slots=True)
class Survival:
    """S_1 .. S_K_max of a workload: posterior mean, and the ends of the central 90 % interval of each.

    `num_steps`: how many independent steps the evidence of the workload itself is worth, after forgetting and divided
    by the design effect. 0 where only the prior speaks. `depth`: mean K at which the evidence was verified, the
    workload's own where it has any, else that of all traffic; 0 without any. S_i is the survival at that K: at another,
    drafts start elsewhere (`cluster.transfer`, whose `split_share` it is taken with).
    """

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    num_steps: float
    depth: float = 0.0
    split_share: float = SPLIT_SHARE

    def acceptance_length(self, k: int) -> float:
        """Expected AL at K = `k`. Raises ValueError outside 0..K_max."""
        if not 0 <= k <= len(self.mean):
            raise ValueError(f"k must be from 0 to {len(self.mean)}, not {k}")
        return lengths(self.mean, round(self.depth), self.split_share)[k]

    def gains(self) -> tuple[float, ...]:
        """What each further draft is expected to add to AL, by which to choose K."""
        return gains(self.mean, round(self.depth), self.split_share)


class AcceptanceBook:
    """The posteriors of all workloads, in one process; not thread-safe.

    Args:
        max_draft_tokens: K_max. Counts of depths beyond it are left out.
        half_life_steps: verification steps of a workload after which a step of it counts half.
        prior_steps: trials at each depth that the parent's mean is worth to a workload, and the curve to the parent.
        max_workloads: told apart; the one without steps for longest makes room, and lives on in the parent.
        prior: S_1 .. S_K_max before any step, default a published curve. Conditional acceptances are kept within
            0.01..0.99, so that data can move them.
        design_effect: steps worth one independent step, because steps of one request resemble each other; also for
            trials, the prior's included. In results/2026-11-21-traces-smollm2-135m.npz the variance of a_i between
            requests is 3.6 times the binomial one (median over tasks and depths, quartiles 2.4 and 4.8). There a
            request that accepts more at one depth also does at the next, so intervals of deep S_i are still too narrow.
        split_share: of `cluster.transfer`, 0..1; 0 for an engine with synthetic acceptance.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        *,
        half_life_steps: float = 4000,
        prior_steps: float = 40,
        max_workloads: int = 64,
        prior: Sequence[float] | None = None,
        design_effect: float = 4.0,
        split_share: float = SPLIT_SHARE,
    ) -> None:
        if max_draft_tokens < 0 or max_workloads < 1:
            raise ValueError(
                f"max_draft_tokens must be at least 0 and max_workloads at least 1, not {max_draft_tokens} and "
                f"{max_workloads}"
            )
        for name, value, least in (
            ("half_life_steps", half_life_steps, 1),
            ("prior_steps", prior_steps, 1),
            ("design_effect", design_effect, 1),
        ):
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} must be a number of at least {least}, not {value}")
        if not 0 <= split_share <= 1:
            raise ValueError(f"split_share must be from 0 to 1, not {split_share}")
        self._split_share = split_share
        self._max_draft_tokens, self._max_workloads = max_draft_tokens, max_workloads
        self._half_life_steps, self._prior_steps = half_life_steps, prior_steps
        self._design_effect = design_effect
        self._prior_D = _conditionals(prior, max_draft_tokens)
        self._ledger = Ledger(MAX_SOURCE_WORKLOADS * max_workloads)
        self._forget()

    @property
    def head(self) -> str | None:
        """The head whose acceptance this is, None before the first report."""
        return self._ledger.head

    def workloads(self) -> tuple[str, ...]:
        """Workloads told apart, the one whose steps are the latest first."""
        return tuple(reversed(self._tallies))

    def absorb(self, source: str, head: str, totals: Mapping[str, Counts]) -> None:
        """Take what the target replica `source` has counted since it started, drafting with `head`.

        Only steps not seen before count; a replica that restarted begins anew. A head that takes over from another
        voids everything (`cluster.counts.Ledger` has the rules).
        """
        self.absorb_all([Report(source, head, totals)])

    def absorb_all(self, reports: Iterable[Report]) -> None:
        """Take the reports of one round of polling. Better than one by one: no replica's steps then seem the later."""
        new = self._ledger.take(reports)
        if new.reset:
            self._forget()
        self._add(new.counts)

    def add(self, workload: str, counts: Counts) -> None:
        """Take further steps of a workload."""
        self._add({workload: counts})

    def survival(self, workload: str) -> Survival:
        """What is believed of a workload; of an unknown one, what the parent says."""
        return self._survival(workload if workload in self._tallies else None)

    def overall(self) -> Survival:
        """All workloads together."""
        everything = self._everything()
        alpha_D, beta_D = self._updated(self._prior_D, everything)
        return self._described(alpha_D, beta_D, everything.steps, everything.depth)

    def sample(self, workload: str, random: random.Random) -> tuple[float, ...]:
        """S_1 .. S_K_max drawn from the posterior, for Thompson sampling."""
        alpha_D, beta_D = self._posterior(workload if workload in self._tallies else None)
        survival, drawn = 1.0, []
        for alpha, beta in zip(alpha_D.tolist(), beta_D.tolist(), strict=True):
            survival *= random.betavariate(alpha, beta)
            drawn.append(survival)
        return tuple(drawn)

    def snapshot(self) -> dict[str, Any]:
        """Everything learned, as a value that JSON can hold. Settings are not in it."""
        tallies = [tally.saved(name) for name, tally in self._tallies.items()]
        return SavedBook(
            format=1,
            max_draft_tokens=self._max_draft_tokens,
            head=self._ledger.head,
            retired_heads=list(self._ledger.retired),
            workloads=tallies,
            evicted=self._evicted.saved(""),
            sources=save_sources(self._ledger),
        ).model_dump()

    def restore(self, snapshot: Any) -> None:
        """Replace everything learned by a snapshot's. Reports absorbed later go on from it.

        Raises:
            ValueError: naming the field of the snapshot; the book is then as it was.
        """
        saved, ledger = load_book(snapshot, self._max_draft_tokens, MAX_SOURCE_WORKLOADS * self._max_workloads)
        self._ledger = ledger
        self._forget()
        for one in saved.workloads:
            self._tallies[one.workload] = Tally.restored(one)
        self._evicted = Tally.restored(saved.evicted)
        self._make_room()
        self._changed()

    def _forget(self) -> None:
        self._tallies: OrderedDict[str, Tally] = OrderedDict()
        self._evicted = Tally.zeros(self._max_draft_tokens)
        self._changed()

    def _changed(self) -> None:
        self._total: Tally | None = None
        self._posteriors: dict[str | None, tuple[Array, Array]] = {}
        self._survivals: dict[str | None, Survival] = {}

    def _add(self, counts_by_workload: Mapping[str, Counts]) -> None:
        """Add steps, and keep the busiest where more workloads are active at a time than are told apart."""
        active = {name: counts for name, counts in counts_by_workload.items() if counts.num_steps}
        busiest_first = sorted(active, key=lambda name: active[name].num_steps, reverse=True)
        for name in busiest_first[self._max_workloads :]:
            self._evicted.add(Tally.of_counts(active[name], self._max_draft_tokens), self._half_life_steps)
        for name in reversed(busiest_first[: self._max_workloads]):
            tally = self._tallies.setdefault(name, Tally.zeros(self._max_draft_tokens))
            tally.add(Tally.of_counts(active[name], self._max_draft_tokens), self._half_life_steps)
            self._tallies.move_to_end(name)
        self._make_room()
        self._changed()

    def _make_room(self) -> None:
        while len(self._tallies) > self._max_workloads:
            self._evicted.add(self._tallies.popitem(last=False)[1], self._half_life_steps)

    def _everything(self) -> Tally:
        if self._total is None:
            self._total = Tally.sum([self._evicted, *self._tallies.values()])
        return self._total

    def _posterior(self, workload: str | None) -> tuple[Array, Array]:
        """Beta parameters of a_1 .. a_K_max. The parent leaves the workload itself out, or it would count twice."""
        if workload not in self._posteriors:
            own = Tally.zeros(self._max_draft_tokens) if workload is None else self._tallies[workload]
            everything = self._everything()
            reached_D = np.maximum(everything.reached_D - own.reached_D, 0.0)
            accepted_D = np.clip(everything.accepted_D - own.accepted_D, 0.0, reached_D)
            alpha_D, beta_D = self._updated(self._prior_D, Tally(0.0, reached_D, accepted_D))
            self._posteriors[workload] = self._updated(alpha_D / (alpha_D + beta_D), own)
        return self._posteriors[workload]

    def _updated(self, mean_D: Array, evidence: Tally) -> tuple[Array, Array]:
        """A prior of `prior_steps` trials around `mean_D` with the evidence, all of it over the design effect."""
        alpha_D = self._prior_steps * mean_D + evidence.accepted_D
        missed_D = np.maximum(evidence.reached_D - evidence.accepted_D, 0.0)
        beta_D = self._prior_steps * (1 - mean_D) + missed_D
        return alpha_D / self._design_effect, beta_D / self._design_effect

    def _survival(self, workload: str | None) -> Survival:
        if workload not in self._survivals:
            own = Tally.zeros(self._max_draft_tokens) if workload is None else self._tallies[workload]
            depth = (own if own.steps > 0 else self._everything()).depth
            self._survivals[workload] = self._described(*self._posterior(workload), own.steps, depth)
        return self._survivals[workload]

    def _described(self, alpha_D: Array, beta_D: Array, steps: float, depth: float) -> Survival:
        mean_D, low_D, high_D = product_interval(alpha_D, beta_D, INTERVAL_LEVEL)
        ends = tuple(mean_D.tolist()), tuple(low_D.tolist()), tuple(high_D.tolist())
        return Survival(*ends, steps / self._design_effect, depth, self._split_share)


def _conditionals(prior: Sequence[float] | None, max_draft_tokens: int) -> Array:
    """a_1 .. a_K_max of survival probabilities."""
    given = PUBLISHED_SURVIVAL if prior is None else tuple(prior)
    if prior is not None and len(given) != max_draft_tokens:
        raise ValueError(f"prior must have one survival for each depth 1..{max_draft_tokens}, not {len(given)}")
    before, found = 1.0, []
    for depth, survival in enumerate(given[:max_draft_tokens], start=1):
        if not 0 < survival <= before:
            raise ValueError(f"prior[{depth - 1}] must be above 0 and at most {before}, not {survival}")
        found.append(min(max(survival / before, LEAST_CONDITIONAL), MOST_CONDITIONAL))
        before = survival
    found += found[-1:] * (max_draft_tokens - len(found))
    return np.array(found, float)
