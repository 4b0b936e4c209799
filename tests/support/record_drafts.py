"""Run a stock vLLM engine and write down the drafts of every step. A program of its own: the engine needs its process.

    python tests/support/record_drafts.py JOB.json RECORDS.json

JOB: {"engine": keyword arguments of `LLM`, "prompts": token ids of each request, "answers": the greedy continuation of
each, "max_tokens": int, "rounds": how often all of them are asked, one round after another (1), "drafters": of an
engine whose drafter is another process, what `set_drafters` takes, "report": file for {"remote": what such an engine
then says of it, "num_cached_tokens": of each request of each round, prompt tokens found in the target's prefix cache}}.
RECORDS: one entry a request and step, {"request": index of the prompt, "token_ids": all committed tokens at that step,
"draft_token_ids": what the drafter proposed after them, "num_preempted": how often the request was put off so far}.

The drafts of a random head are hardly ever accepted, so after writing them down the first m of them are replaced by the
answer's next tokens, m going round from 0 to K: all acceptance lengths, and rejected rows after them, are exercised.
"""

from __future__ import annotations

import json
import sys
import time
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
                entry["num_preempted"] = request.num_preemptions
                records.append(entry)
                num_done = request.num_tokens - len(prompts[index])
                num_right = sum(record["request"] == index for record in records) % (len(drafts) + 1)
                right = answers[index][num_done : num_done + num_right]
                draft_token_ids.draft_token_ids[place] = right + drafts[len(right) :]
            super().update_draft_token_ids(draft_token_ids)

    return RecordingScheduler


def main(job_path: str, records_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    records: list[dict[str, Any]] = []
    scheduler = recording_scheduler(job["prompts"], job["answers"], records)
    engine = LLM(**job["engine"], scheduler_cls=scheduler)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    if "drafters" in job:
        connect(engine, job["drafters"])
    num_cached_tokens = []
    for _ in range(job.get("rounds", 1)):
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        num_cached_tokens.append([output.num_cached_tokens for output in outputs])
    Path(records_path).write_text(json.dumps(records))
    if "report" in job:
        report = {"remote": engine.collective_rpc("remote_report")[0], "num_cached_tokens": num_cached_tokens}
        Path(job["report"]).write_text(json.dumps(report))


def connect(engine: LLM, drafters: list[dict[str, Any]], timeout_s: float = 120.0) -> None:
    """Name the drafters to the engine and wait until steps can go to all of them."""
    engine.collective_rpc("set_drafters", args=(drafters,))
    end_s = time.monotonic() + timeout_s
    while (pool := engine.collective_rpc("remote_report")[0])["num_up"] < len(drafters):
        if time.monotonic() > end_s:
            raise TimeoutError(f"no link after {timeout_s} s: {pool}")
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
