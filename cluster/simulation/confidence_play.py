"""Decoding with K chosen at every step, by different knowledge of the same drafts: what the knowledge is worth.

Enters: answers with survivals for each of their anchors, and step times. Leaves: tokens, seconds and what was expected.
`allocate`'s own `plan_step` decides; only what it is told differs. Nothing but decoding runs: so many requests are in
every step, and one that ends makes room for the next, which begins without a prompt to read.

**K = 0 and the drafter's pass.** Where nothing is drafted the engine saves the drafter's pass, but then nothing is
known of the drafts either. So whoever decides by the drafts in hand first asks the rule by workload whether to draft at
all. If so, a step that verifies nothing has paid for its drafts: it is priced as one at K = 1, a little too dear.

**Rates.** `plan_step` takes the most tokens a second of the step. Where steps differ in what they promise, the most
tokens a second of a long run is another thing: the step is to maximise tokens - rate * seconds, the rate being that of
the run (Dinkelbach). With many requests in a step both are the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.allocation import Allocation, plan_step
from cluster.simulation.confidence import Floats, Ints, Pool
from cluster.step_costs import CostCurves, Curve, StepCosts
from cluster.step_time import StepShape

NUM_DRAWS = 512
"""Requests that are drawn for each place in the engine; then they come again."""
WARM_STEPS = 10
FORBIDDEN_S = 1.0
"""A step that no plan takes."""


@dataclass(frozen=True)
class Drafting:
    """Step times of an engine whose drafter runs in every step."""

    times: StepCosts
    max_draft_tokens: int
    full_graph_depths: frozenset[int]
    padding_tokens: int
    capture_sizes: object

    @classmethod
    def of(cls, times: StepCosts) -> "Drafting":
        padding, sizes = getattr(times, "padding_tokens", 0), getattr(times, "capture_sizes", {})
        return cls(times, times.max_draft_tokens, times.full_graph_depths, padding, sizes)

    def seconds(self, shape: StepShape) -> float:
        if shape.num_tokens == shape.num_requests:
            shape = dataclasses.replace(shape, num_tokens=2 * shape.num_requests, uniform_depth=1)
        return self.times.seconds(shape)


@dataclass(frozen=True)
class GraphPriced:
    """As if ragged batches ran on full graphs: they cost what lies between the uniform ones of the table. Nobody
    measured such an engine; it bounds what trimming single requests could bring on this hardware."""

    times: StepCosts
    max_draft_tokens: int
    full_graph_depths: frozenset[int]

    @classmethod
    def of(cls, times: StepCosts) -> "GraphPriced":
        return cls(times, times.max_draft_tokens, times.full_graph_depths)

    def seconds(self, shape: StepShape) -> float:
        if shape.uniform_depth in self.full_graph_depths:
            return self.times.seconds(shape)
        depths = sorted(self.full_graph_depths)
        tokens = [shape.num_requests * (1 + depth) for depth in depths]
        uniform = [
            self.times.seconds(dataclasses.replace(shape, num_tokens=count, uniform_depth=depth))
            for count, depth in zip(tokens, depths, strict=True)
        ]
        return float(np.interp(shape.num_tokens, tokens, uniform))


@dataclass(frozen=True)
class GraphsOnly:
    """As if a step off the full graphs were never worth it: what rests on uniform steps alone, all of them measured."""

    times: StepCosts
    max_draft_tokens: int
    full_graph_depths: frozenset[int]

    @classmethod
    def of(cls, times: StepCosts) -> "GraphsOnly":
        return cls(times, times.max_draft_tokens, times.full_graph_depths)

    def seconds(self, shape: StepShape) -> float:
        if shape.uniform_depth in self.full_graph_depths:
            return self.times.seconds(shape)
        return FORBIDDEN_S


@dataclass(frozen=True)
class Costs:
    """The same engine where a step without drafts skips the drafter (`free`), and where it does not (`drafting`)."""

    free: CostCurves
    drafting: CostCurves
    context_tokens: float

    @classmethod
    def of(cls, times: StepCosts, context_tokens: float) -> "Costs":
        return cls(CostCurves(times), CostCurves(Drafting.of(times)), context_tokens)


@dataclass
class Played:
    """What a run gave after its first steps. `visited`: (answer, anchor) of every step of a request."""

    num_tokens: int = 0
    expected_tokens: float = 0.0
    seconds: float = 0.0
    num_drafts: int = 0
    num_empty_steps: int = 0
    visited: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


Decide = Callable[[Ints, Ints], Allocation]
"""Depths of the requests of a step, from the answer and the anchor that each one is at."""


def draws(pool: Pool, num_requests: int, rng: np.random.Generator) -> Ints:
    """Answers that each place of the engine serves one after another, [requests, NUM_DRAWS]: each workload as often,
    and each answer of a workload, in random orders."""
    by_workload = [[i for i, one in enumerate(pool.answers) if one.workload == w] for w in range(len(pool.names))]
    rows = []
    for _ in range(num_requests):
        rounds = -(-NUM_DRAWS // len(by_workload))
        columns = [
            np.concatenate([rng.permutation(mine) for _ in range(-(-rounds // len(mine)))])[:rounds]
            for mine in by_workload
        ]
        rows.append(rng.permuted(np.stack(columns, axis=1), axis=1).ravel()[:NUM_DRAWS])
    return np.array(rows)


def play(pool: Pool, drawn: Ints, starts: Floats, num_steps: int, decide: Decide) -> Played:
    """Decode for so many steps beyond the first `WARM_STEPS`.

    starts: where in its first answer each place begins, as a share of the answer's anchors."""
    lengths = [len(one.accepted_A) for one in pool.answers]
    which, turn = drawn[:, 0].copy(), np.zeros(len(drawn), np.int64)
    anchor = np.array([int(start * lengths[i]) for start, i in zip(starts, which, strict=True)])
    found = Played()
    for step in range(WARM_STEPS + num_steps):
        allocation = decide(which, anchor)
        places = list(zip(which.tolist(), anchor.tolist(), strict=True))
        num_tokens = 0
        for slot, ((i, at), k) in enumerate(zip(places, allocation.depths, strict=True)):
            emitted = 1 + min(int(pool.answers[i].accepted_A[at]), k)
            anchor[slot] += emitted
            num_tokens += emitted
            if anchor[slot] >= lengths[i]:
                num_tokens -= anchor[slot] > lengths[i]  # the answer ends with an accepted draft
                turn[slot] = (turn[slot] + 1) % drawn.shape[1]
                which[slot], anchor[slot] = drawn[slot, turn[slot]], 0
        if step < WARM_STEPS:
            continue
        found.num_tokens += int(num_tokens)
        found.expected_tokens += allocation.num_tokens
        found.seconds += allocation.step_s
        found.num_drafts += sum(allocation.depths)
        found.num_empty_steps += not any(allocation.depths)
        found.visited += places
    return found


def fixed(k: int, costs: Costs) -> Decide:
    """Every request at K = k; what is expected is left out."""

    def decide(which: Ints, anchor: Ints) -> Allocation:
        curve = costs.free.curve(len(which), costs.context_tokens)
        return Allocation([k] * len(which), 0.0, curve.uniform[k], None)

    return decide


class ByTable:
    """Survivals by answer and anchor, [A, K_max] of each answer: what `plan_step` is told."""

    def __init__(self, survivals: Sequence[Floats], costs: Costs) -> None:
        self._rows = [[tuple(row) for row in one.tolist()] for one in survivals]
        self._costs = costs
        self._known: dict[tuple[tuple[float, ...], ...], Allocation] = {}

    def told(self, which: Ints, anchor: Ints) -> list[tuple[float, ...]]:
        return [self._rows[i][at] for i, at in zip(which.tolist(), anchor.tolist(), strict=True)]

    def planned(self, which: Ints, anchor: Ints, curves: CostCurves) -> Allocation:
        told = self.told(which, anchor)
        return plan_step(told, [len(one) for one in told], curves, self._costs.context_tokens)

    def by_workload(self, which: Ints, anchor: Ints) -> Allocation:
        """The decision where the survivals are those of workloads, known without drafts. The same requests again are
        remembered, for few end in a step."""
        told = tuple(self.told(which, anchor))
        if told not in self._known:
            self._known[told] = self.planned(which, anchor, self._costs.free)
        return self._known[told]


def informed(before: ByTable, now: ByTable, costs: Costs, rate: float | None = None) -> Decide:
    """Decide by the drafts in hand, `now`, where `before` says that drafting pays. rate: tokens/s of the long run;
    None for the best of each step."""

    def decide(which: Ints, anchor: Ints) -> Allocation:
        plain = before.by_workload(which, anchor)
        if not any(plain.depths):
            return plain
        if rate is None:
            return now.planned(which, anchor, costs.drafting)
        curve = costs.drafting.curve(len(which), costs.context_tokens)
        return at_rate(now.told(which, anchor), curve, costs.drafting.full_graph_depths, rate)

    return decide


def ranked(before: ByTable, now: ByTable, costs: Costs) -> Decide:
    """The number of drafts is planned without them; which ones they are is decided by the drafts in hand. This is what
    can be done on a GPU after the batch was scheduled; a batch on a uniform graph stays as it is."""

    def decide(which: Ints, anchor: Ints) -> Allocation:
        plain = before.by_workload(which, anchor)
        num_drafts = sum(plain.depths)
        if not num_drafts or plain.graph_depth is not None:
            return plain
        survival_CK = np.array(now.told(which, anchor))
        depths, worth = best_drafts(survival_CK, num_drafts)
        return Allocation(depths, len(which) + worth, plain.step_s, None)

    return decide


def best_drafts(survival_CK: Floats, num_drafts: int) -> tuple[list[int], float]:
    """Depth of each request when the likeliest drafts of all are taken, and the sum of their survivals."""
    order = np.argsort(-survival_CK, axis=None, kind="stable")[:num_drafts]
    depths = np.bincount(order // survival_CK.shape[1], minlength=len(survival_CK))
    return depths.tolist(), float(survival_CK.ravel()[order].sum())


def at_rate(told: Sequence[Sequence[float]], curve: Curve, graphs: frozenset[int], rate: float) -> Allocation:
    """The step that maximises expected tokens - rate * seconds: `plan_step` for a run of unequal steps."""
    survival_CK = np.array(told)
    num_requests = len(survival_CK)
    ordered = -np.sort(-survival_CK, axis=None)
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(ordered)])
    best = int((tokens - rate * curve.ragged).argmax())
    chosen, gain = None, float(tokens[best] - rate * curve.ragged[best])
    for depth in sorted(graphs):
        worth = num_requests + float(survival_CK[:, :depth].sum())
        if worth - rate * curve.uniform[depth] > gain:
            chosen, gain = depth, worth - rate * curve.uniform[depth]
    if chosen is not None:
        worth = num_requests + float(survival_CK[:, :chosen].sum())
        return Allocation([chosen] * num_requests, worth, curve.uniform[chosen], chosen)
    depths, worth = best_drafts(survival_CK, best)
    deepest = max(depths)
    if best >= curve.graph_from[deepest]:  # padded to the graph
        return Allocation(depths, num_requests + worth, curve.uniform[deepest], deepest)
    return Allocation(depths, num_requests + worth, float(curve.ragged[best]), None)
