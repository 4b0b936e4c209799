"""Small exact step costs for tests of the choice of K: formulas whose optimum can be computed by hand or enumerated."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

MS = 1e-3


@dataclass(frozen=True)
class Table:
    """base + per_token * n + per_token_squared * n^2 + per_context * context seconds, with n target rows rounded up to
    the next of `sizes`, as a captured graph is."""

    base_s: float = 10 * MS
    per_token_s: float = 1 * MS
    per_token_squared_s: float = 0.0
    per_context_s: float = 0.0
    sizes: Sequence[int] = ()

    def seconds(self, num_requests: int, num_tokens: int, context_tokens: float = 0.0) -> float:
        place = bisect_left(self.sizes, num_tokens)
        n = self.sizes[place] if place < len(self.sizes) else num_tokens
        per_token_s = self.per_token_s + self.per_token_squared_s * n
        return self.base_s + per_token_s * n + self.per_context_s * context_tokens

    def curve(
        self,
        num_requests: int,
        num_drafts: int,
        context_tokens: float = 0.0,
        prompt_tokens: float = 0.0,
        *,
        is_drafted: bool = False,
    ) -> np.ndarray:
        num_tokens = range(num_requests, num_requests + num_drafts + 1)
        return np.array([self.seconds(num_requests, n, context_tokens) for n in num_tokens])


def survivals(max_draft_tokens: int) -> st.SearchStrategy[tuple[float, ...]]:
    """From good to useless; sometimes with equal entries, or none accepted from a depth on."""
    factor = st.sampled_from([0.0, 0.3, 0.7, 1.0]) | st.floats(0.0, 1.0)
    return st.lists(factor, min_size=max_draft_tokens, max_size=max_draft_tokens).map(
        lambda factors: tuple(np.cumprod(factors).tolist())
    )


TABLES = st.builds(
    Table,
    base_s=st.floats(2, 20).map(lambda ms: ms * MS),
    per_token_s=st.floats(0.01, 2).map(lambda ms: ms * MS),
    per_token_squared_s=st.sampled_from([0.0, 0.02 * MS, 0.2 * MS]),
    sizes=st.just(())
    | st.lists(st.integers(2, 40), min_size=2, max_size=12, unique=True).map(lambda s: tuple(sorted(s))),
)
"""Convex ones and staircases."""
