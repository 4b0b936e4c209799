"""A CPU worker for vLLM's asynchronous scheduler with a remote drafter, as GPUs have it on the V2 model runner.

vLLM runs the asynchronous scheduler on GPUs only, so the product has no such worker for a CPU. With this one the tests
run our asynchronous scheduler, and the reports of drafts that were not there, in a real engine without a GPU: it waits
for the drafts at once, and fills those that are missing with token 0, as `peagle.vllm.remote_speculator` does.
"""

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from peagle.vllm.remote import EngineStep
from peagle.vllm.step_notes import write_num_ready
from peagle.vllm.workers import RemoteCPURunner, RemoteCPUWorker


class AsyncRemoteRunner(RemoteCPURunner):
    step: EngineStep
    num_drafts: dict[str, int]
    """By request: drafts that the last step found for it, where it asked for some."""

    def set_up_drafter(self) -> None:
        super().set_up_drafter()
        self.num_drafts = {}

    def engine_step(self, *args: Any, **kwargs: Any) -> EngineStep:
        self.step = super().engine_step(*args, **kwargs)
        return self.step

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        super().propose_draft_token_ids(*args, **kwargs)
        num_requests = self.input_batch.num_reqs
        drafts_BK = torch.zeros(num_requests, self.num_spec_tokens, dtype=torch.int32)
        if self.remote is not None:
            drafts_BK = self.remote.wait(self._sent, num_requests).int()
            num_drafts = self.remote.num_drafts(self._sent, num_requests)
            counts = zip(self.input_batch.req_ids, self.step.num_drafts_B, num_drafts, strict=True)
            self.num_drafts = {request_id: count for request_id, depth, count in counts if depth}
        self._sent = []
        if get_tp_group().world_size > 1:
            drafts_BK = get_tp_group().broadcast(drafts_BK, src=0)
        return drafts_BK

    def sample_tokens(self, grammar_output: Any) -> Any:
        before, self.num_drafts = self.num_drafts, {}
        output: Any = super().sample_tokens(grammar_output)
        inner = getattr(output, "_model_runner_output", output)
        if self.remote is not None and (request_ids := getattr(inner, "req_ids", None)) is not None:
            write_num_ready(inner, [before.get(request_id, -1) for request_id in request_ids])
        return output


class AsyncRemoteWorker(RemoteCPUWorker):
    runner_class = AsyncRemoteRunner
