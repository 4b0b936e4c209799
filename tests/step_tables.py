"""Small exact step times for tests of the choice of K: formulas whose optimum can be computed by hand or enumerated."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from cluster.step_time import StepShape

MS = 1e-3


@dataclass(frozen=True)
class Table:
    """base + per_token * n + per_token_squared * n^2 + per_context * context, in seconds.

    n is rounded up to the next of `sizes`, as a captured graph is; a batch that is not on a full graph (`graphs`, by
    depth) costs `off_graph` times as much.
    """

    max_draft_tokens: int
    base_s: float = 10 * MS
    per_token_s: float = 1 * MS
    per_token_squared_s: float = 0.0
    per_context_s: float = 0.0
    sizes: Sequence[int] = ()
    full_graph_depths: frozenset[int] = frozenset()
    off_graph: float = 1.0
    padding_tokens: int = 0
    capture_sizes: dict[int | None, Sequence[int]] = field(default_factory=dict)

    def seconds(self, shape: StepShape) -> float:
        place = bisect_left(self.sizes, shape.num_tokens)
        n = self.sizes[place] if place < len(self.sizes) else shape.num_tokens
        seconds = self.base_s + self.per_token_s * n + self.per_token_squared_s * n * n
        seconds += self.per_context_s * shape.context_tokens
        return seconds * (1.0 if shape.uniform_depth in self.full_graph_depths else self.off_graph)


def flat(max_draft_tokens: int, **changes: object) -> Table:
    """Every step takes 10 ms."""
    return Table(max_draft_tokens, per_token_s=0.0, **changes)  # type: ignore[arg-type]


def survival(rng: random.Random, max_draft_tokens: int) -> tuple[float, ...]:
    """A survival from good to useless; sometimes with equal entries, or none accepted from a depth on."""
    low = rng.choice([0.0, 0.3, 0.7])
    return tuple(accumulate((rng.choice([rng.uniform(low, 1.0), 1.0, low]) for _ in range(max_draft_tokens)), mul))


def convex_table(rng: random.Random, max_draft_tokens: int) -> Table:
    squared_s = rng.choice([0.0, 0.02, 0.2]) * MS
    return Table(max_draft_tokens, rng.uniform(2, 20) * MS, rng.uniform(0.01, 2) * MS, squared_s)


def jagged_table(rng: random.Random, max_draft_tokens: int) -> Table:
    """A staircase over random sizes, and a jump beside random full graphs, K_max among them."""
    sizes = sorted(rng.sample(range(2, 40), rng.randint(2, 12)))
    depths = {max_draft_tokens, *rng.sample(range(max_draft_tokens), rng.randint(0, 2))}
    return Table(
        max_draft_tokens,
        rng.uniform(2, 20) * MS,
        rng.uniform(0.01, 2) * MS,
        sizes=sizes,
        full_graph_depths=frozenset(depths),
        off_graph=rng.uniform(1.0, 1.6),
    )


def step_s(table: Table, numbers: Sequence[int], depths: Sequence[int]) -> float:
    """Seconds of a step with `numbers[i]` requests at K = `depths[i]`."""
    num_requests, num_drafts = sum(numbers), sum(num * k for num, k in zip(numbers, depths, strict=True))
    uniform = depths[0] if len(set(depths)) == 1 else None
    return table.seconds(StepShape(num_requests, num_requests + num_drafts, uniform))
