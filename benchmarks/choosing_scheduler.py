"""For `benchmarks.check_drafts --choice`: a scheduler in which any number of drafts may be what pays."""

import random
from typing import Any

from peagle.vllm.scheduler import PerRequestDepthAsyncScheduler


class ChoosingScheduler(PerRequestDepthAsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._draft_budget is not None
        assert self._draft_budget.chooses, "this engine cannot choose"
        draft_budget: Any = self._draft_budget
        draw = random.Random(5)

        def depths(requests: list[Any], max_ks: list[int], prompt_tokens: int = 0) -> list[int]:
            draft_budget.num_chosen = draw.randint(0, sum(max_ks)) if draw.random() < 0.9 else None
            return max_ks

        draft_budget.depths = depths
