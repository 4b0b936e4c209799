"""Run a stock vLLM engine and write down the drafts of every step; the engine needs a process of its own.

Job: {"engine": keyword arguments of `LLM`, "prompts": token ids of each request, "answers": the greedy continuation of
each, "max_tokens": int}.
Records: one entry a request and step, {"request": index of the prompt, "token_ids": all committed tokens at that step,
"draft_token_ids": what the drafter proposed after them}.

The drafts of a random head are hardly ever accepted, so after writing them down the first m of them are replaced by the
answer's next tokens, m going round from 0 to K: all acceptance lengths, and rejected rows after them, are exercised.
"""

import json
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler


def recording_scheduler(prompts: list[list[int]], answers: list[list[int]], records: list[dict[str, Any]]) -> type:
    """A scheduler class that appends to `records` and puts right drafts in the place of the proposed ones."""

    class RecordingScheduler(Scheduler):
        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            for place, request_id in enumerate(draft_token_ids.req_ids):
                request = self.requests.get(request_id)
                if request is None or request.is_finished() or request.is_prefill_chunk:
                    continue
                drafts = list(draft_token_ids.draft_token_ids[place])
                index = prompts.index(list(request.prompt_token_ids))
                entry = {"request": index, "token_ids": list(request.all_token_ids), "draft_token_ids": drafts}
                records.append(entry)
                num_done = request.num_tokens - len(prompts[index])
                num_right = sum(record["request"] == index for record in records) % (len(drafts) + 1)
                right = answers[index][num_done : num_done + num_right]
                draft_token_ids.draft_token_ids[place] = right + drafts[len(right) :]
            super().update_draft_token_ids(draft_token_ids)

    return RecordingScheduler


def main(job_path: Path, records_path: Path) -> None:
    job = json.loads(job_path.read_text())
    records: list[dict[str, Any]] = []
    scheduler = recording_scheduler(job["prompts"], job["answers"], records)
    engine = LLM(**job["engine"], scheduler_cls=scheduler)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    records_path.write_text(json.dumps(records))
