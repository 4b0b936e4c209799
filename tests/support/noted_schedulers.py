"""The product's schedulers, which also write down what each step was made of. Test-only."""

import json
import os
from pathlib import Path
from typing import Any

from peagle.vllm.scheduler import PerRequestDepthAsyncScheduler, PerRequestDepthScheduler

NOTES = "TEST_STEP_NOTES"
"""Environment variable: the file that gets, for each step, {"prompt_tokens": n, "drafts": [K of each decode],
"ahead": most drafts of a request in the next step, "num_rejected": of these drafts, as expected}."""


class _Noted:
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        is_prompt = {one.request_id: one.num_computed_tokens < one.num_prompt_tokens for one in self.running}  # type: ignore[attr-defined]
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        drafts = {name: len(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        scheduled = output.num_scheduled_tokens.items()
        note = {
            "prompt_tokens": sum(num for name, num in scheduled if is_prompt.get(name, True)),
            "drafts": [drafts.get(name, 0) for name, _ in scheduled if not is_prompt.get(name, True)],
            "ahead": output.peagle_plan.num_drafts_ahead,
            "num_rejected": output.peagle_plan.num_rejected,
        }
        with Path(os.environ[NOTES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        return output


class NotedScheduler(_Noted, PerRequestDepthScheduler):
    pass


class NotedAsyncScheduler(_Noted, PerRequestDepthAsyncScheduler):
    pass
