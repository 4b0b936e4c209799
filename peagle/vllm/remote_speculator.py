"""A remote drafter on vLLM's V2 model runner: a speculator that sends each step's rows away and waits for the drafts.

The engine loads no head and has no cache for one; all else is as with a colocated drafter. Everything happens in the
order of the GPU's stream: the host waits for nothing, and tokens have left for the client when the stream waits for
drafts.

The first rank of a tensor-parallel group sends; the others get its drafts by a broadcast.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from peagle.drafter.protocol import Int32Array
from peagle.vllm.draft_rows import TargetRows, accepted_rows
from peagle.vllm.remote import EngineStep, RemoteControl, StepSender, make_sender
from peagle.vllm.request_args import read_head, read_max_k
from peagle.vllm.step_notes import read_plan, write_num_ready
from peagle.vllm.v2_worker import V2Worker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclasses.dataclass(eq=False)
class _Known:
    """A request of the engine, running or preempted."""

    head: int
    max_k: int
    tokens: Sequence[int]  # its prompt, after a preemption its answer so far too


class RemoteSpeculator(BaseSpeculator):
    """Stands where vLLM's V2 runner has its drafter."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, sender: StepSender | None, k_max: int, device: torch.device) -> None:
        """sender: None on ranks that do not send."""
        self.sender, self._device, self._k_max = sender, device, k_max
        self._known: dict[str, _Known] = {}
        self._num_ahead = self._k_max
        self.num_drafts: dict[str, int] = {}
        """By request that the last step wanted drafts for: how many will come, as far as the last answers say."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No pass, no graphs."""

    def capture(self) -> None:
        """No pass, no graphs."""

    def aux_views(self) -> list[Tensor]:
        """None: the target's graphs leave hidden states where vLLM wants them."""
        return []

    def begin_step(self, scheduled: "SchedulerOutput") -> None:
        """Take in requests that start in this step, or come back after a preemption."""
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            known = self._known.setdefault(new.req_id, _Known(read_head(params), read_max_k(params, self._k_max), ()))
            known.tokens = new.prefill_token_ids or ()
        # A request whose drafter had none gets 0 drafts until an answer holds some: at least one is asked for.
        self._num_ahead = max(1, read_plan(scheduled).limit_drafts_ahead(self._k_max))

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have ended. A preempted one keeps its place at the drafter."""
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def propose(  # type: ignore[override]
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Drafts of every request of the batch, [B, K] int64; 0 where nobody proposes any."""
        num_requests, k_max = input_batch.num_reqs, self._k_max
        target = TargetRows.from_batch(input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens)
        if dummy_run:
            accepted_rows(target, int(input_batch.num_scheduled_tokens.max()))  # compiled before requests come
            return torch.zeros(num_requests, k_max, dtype=torch.int64, device=self._device)
        if self.sender is None:
            drafts_BK = torch.empty(num_requests, k_max, dtype=torch.int64, device=self._device)
        else:
            assert aux_hidden_states, "the target returned no auxiliary hidden states"
            step = self._engine_step(input_batch, target, aux_hidden_states)
            sent = self.sender.send(step)
            drafts_BK = self.sender.wait(sent, num_requests)
            asked = zip(step.request_ids, step.num_drafts_B, self.sender.num_drafts(sent, num_requests), strict=True)
            self.num_drafts = {request_id: count for request_id, k, count in asked if k}
        if get_tp_group().world_size > 1:
            drafts_BK = get_tp_group().broadcast(drafts_BK, src=0)
        return drafts_BK

    def _engine_step(self, batch: InputBatch, target: TargetRows, aux: Sequence[Tensor]) -> EngineStep:
        """The step as `StepSender` takes it."""
        lengths_B = batch.num_scheduled_tokens
        start_B, num_valid_B, next_tokens_R = accepted_rows(target, int(lengths_B.max()))
        known = [self._known[request_id] for request_id in batch.req_ids]
        max_k_B = np.array([request.max_k for request in known], dtype=np.int32)
        ends_B = batch.num_computed_tokens_np + lengths_B

        def read_prompt(index: int) -> Int32Array:
            tokens = known[index].tokens[: int(batch.num_computed_tokens_np[index]) + 1]
            return np.array(tokens, dtype=np.int32)

        return EngineStep(
            request_ids=batch.req_ids,
            requests=self._known,
            heads_B=np.array([request.head for request in known], dtype=np.int32),
            num_drafts_B=(np.minimum(max_k_B, self._num_ahead) * (ends_B >= batch.prefill_len_np)).astype(np.int32),
            # A request with max_k = 0 never drafts; its prompt may serve another one from the drafter's cache.
            wanted_B=(max_k_B > 0) | batch.is_prefilling_np,
            row_offset_B=(np.cumsum(lengths_B) - lengths_B).astype(np.int32),
            num_sent_B=lengths_B,
            read_prompt=read_prompt,
            start_B=start_B,
            num_valid_B=num_valid_B,
            next_tokens_R=next_tokens_R,
            aux=aux,
        )


class RemoteV2Worker(RemoteControl, V2Worker):
    """`V2Worker` for a target with a remote drafter. Without drafters, which come by `set_drafters`, the target serves
    as without speculation."""

    def make_speculator(self) -> RemoteSpeculator:
        """Raises ValueError for settings that do not go with a remote drafter; the message names them."""
        config, device = self.vllm_config, self.device
        assert device is not None
        if not config.scheduler_config.async_scheduling:
            raise ValueError("a remote drafter on a GPU needs async_scheduling: leave it on")
        return RemoteSpeculator(make_sender(config, device), config.num_speculative_tokens, device)

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        runner.remote = runner.speculator.sender
        return runner

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's own; its output says which drafts, planned for this step, there were (`read_num_ready`)."""
        speculator: RemoteSpeculator = self.model_runner.speculator
        before, speculator.num_drafts = speculator.num_drafts, {}
        output: Any = super().sample_tokens(grammar_output)
        inner = getattr(output, "model_runner_output", output)
        if speculator.sender is not None and (request_ids := getattr(inner, "req_ids", None)) is not None:
            write_num_ready(inner, [before.get(request_id, -1) for request_id in request_ids])
        return output
