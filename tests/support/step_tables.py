"""Small exact step latencies for tests of the choice of K: formulas whose optimum can be computed or enumerated."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cluster.step_latency import GRID_POINTS, StepLatency, StepLatencyModel, TimedStep

MS = 1e-3


@dataclass(frozen=True)
class Table:
    """base + per_token * n + per_token_squared * n^2 + pass seconds, with n target rows rounded up to the next of
    `sizes`, as a captured graph is."""

    base_s: float = 10 * MS
    per_token_s: float = 1 * MS
    per_token_squared_s: float = 0.0
    sizes: Sequence[int] = ()
    pass_s: float = 0.0

    def seconds(self, num_requests: float, num_tokens: float, is_drafted: bool | None = None) -> float:
        place = bisect_left(self.sizes, num_tokens)
        n = self.sizes[place] if place < len(self.sizes) else num_tokens
        is_drafted = num_tokens > num_requests if is_drafted is None else is_drafted
        return self.base_s + (self.per_token_s + self.per_token_squared_s * n) * n + self.pass_s * is_drafted

    def curve(
        self, num_requests: float, num_drafts: int, prompt_tokens: float = 0.0, *, is_drafted: bool = False
    ) -> np.ndarray:
        tokens = (num_requests + drafts for drafts in range(num_drafts + 1))
        return np.array([self.seconds(num_requests, n, is_drafted or None) for n in tokens])


def acceptance_rates(max_draft_tokens: int) -> st.SearchStrategy[tuple[float, ...]]:
    """From good to useless; sometimes with equal entries, or none accepted from a position on."""
    factor = st.sampled_from([0.0, 0.3, 0.7, 1.0]) | st.floats(0.0, 1.0)
    return st.lists(factor, min_size=max_draft_tokens, max_size=max_draft_tokens).map(
        lambda factors: tuple(np.cumprod(factors).tolist())
    )


SECONDS = {
    "base_s": st.floats(2, 20).map(lambda ms: ms * MS),
    "per_token_s": st.floats(0.01, 2).map(lambda ms: ms * MS),
}
TABLES = st.builds(
    Table,
    **SECONDS,
    per_token_squared_s=st.sampled_from([0.0, 0.02 * MS, 0.2 * MS]),
    sizes=st.just(())
    | st.lists(st.integers(2, 40), min_size=2, max_size=12, unique=True).map(lambda s: tuple(sorted(s))),
)
"""Convex ones and staircases."""
LINES = st.builds(Table, **SECONDS, pass_s=st.sampled_from([0.0, 5 * MS]))
"""Each draft takes the same time."""


def latency_of(
    constant_s: float = 0.0,
    request_s: float = 0.0,
    row_s: float = 0.0,
    pass_s: float = 0.0,
    prompt_row_s: float = 0.001,
    num_steps: float = 0.0,
) -> StepLatency:
    """In which each row takes the same time."""
    rows = [row_s] * (len(GRID_POINTS) - 1)
    return StepLatency((constant_s, request_s, pass_s, 0.0, *rows, prompt_row_s), num_steps)


def model_of(seconds: Callable[[int, int], float], sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> StepLatencyModel:
    """What is believed of a GPU's engine whose steps take what a formula of requests and rows says, as if it had run
    none yet."""
    model = StepLatencyModel(on_gpu=True)
    for _ in range(8):
        for size in sizes:
            for k in (0, 1, 2, 5):
                model.observe(TimedStep(seconds(size, size * (1 + k)), size, size * (1 + k)))
    model.num_steps = 0
    return model
