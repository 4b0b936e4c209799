"""A remote drafter on vLLM's V2 model runner: a speculator that sends each step's rows away and waits for the drafts.

The engine keeps vLLM's `eagle3` + `parallel_drafting` configuration, so taps, schedulers and rejection sampling are
those of a colocated drafter, and so are the target's graphs (`peagle.vllm.v2_worker`); it loads no head and has no
cache for one. What is sent, and to whom, is `peagle.vllm.remote.StepSender`'s. Everything happens in the order of the
GPU's stream: the host waits for nothing, and tokens have left for the client when the stream waits for drafts.

In a step whose drafts the GPU chose (`peagle.vllm.chosen`), the host does not know where a request's rows begin. What
travels then has a place for each row that a request may have, and the places without a row stay empty.

Of the ranks of a tensor-parallel group the first sends; the others get its drafts by a broadcast.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from peagle.drafter.protocol import Int32Array
from peagle.vllm.chosen import Chances
from peagle.vllm.draft_rows import TargetRows, accepted_rows
from peagle.vllm.remote import EngineBatch, RemoteControl, SampledRows, StepSender, check_config, make_sender
from peagle.vllm.request_args import drafts_wanted, head_of
from peagle.vllm.step_notes import read_plan, update_result
from peagle.vllm.v2_worker import PEagleRunner, V2Worker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclasses.dataclass(eq=False)
class _Known:
    """A request of the engine, running or preempted. tokens: its prompt, after a preemption its answer so far too."""

    head: int
    depth: int
    tokens: Sequence[int]


class RemoteSpeculator(BaseSpeculator):
    """Stands where vLLM's V2 runner has its drafter."""

    supports_mm_inputs = False
    draft_logits = None
    _is_choice = False
    """The next step may choose among the drafts of this one."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        """Raises ValueError for settings that do not go with a remote drafter; the message names them."""
        check_config(config)
        if not config.scheduler_config.async_scheduling:
            raise ValueError("a remote drafter on a GPU needs async_scheduling: leave it on")
        self.sender: StepSender | None = None  # None on ranks that do not send
        if get_tp_group().rank_in_group == 0:
            self.sender = make_sender(config, device, config.compilation_config.cudagraph_capture_sizes or ())
        self._device, self._k_max = device, config.num_speculative_tokens
        self._known: dict[str, _Known] = {}
        self.chances = Chances(config.scheduler_config.max_num_seqs, self._k_max, device)
        self._num_ahead, self._depths = self._k_max, list[int]()
        self.num_drafts: dict[str, int] = {}
        """By request that the last step wanted drafts for: how many will come, as far as the last answers say."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """No pass, no graphs."""

    def capture(self) -> None:
        """No pass, no graphs."""

    def aux_views(self) -> list[Tensor]:
        """Places where a graph of the target may leave the hidden states of each tapped layer, so that no copy is."""
        replayer = self.sender.replayer if self.sender is not None else None
        return [] if replayer is None else list(replayer.tap_views)

    def add(self, scheduled: "SchedulerOutput") -> None:
        """Take in requests that start in this step, or come back after a preemption."""
        for new in scheduled.scheduled_new_reqs:
            params = new.sampling_params
            head = head_of(params.extra_args if params is not None else None)
            known = self._known.setdefault(new.req_id, _Known(head, drafts_wanted(params, self._k_max), ()))
            known.tokens = new.prefill_token_ids or ()
        # A request whose drafter had none gets 0 drafts until an answer holds some: at least one is asked for.
        self._num_ahead = max(1, read_plan(scheduled).limit_drafts_ahead(self._k_max))
        self._is_choice = read_plan(scheduled).ranks_drafts

    def forget(self, request_ids: Iterable[str]) -> None:
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
        max_query_len = int(input_batch.num_scheduled_tokens.max())
        replayer = self.sender.replayer if self.sender is not None else None
        if dummy_run:
            accepted_rows(target, max_query_len)  # compiled before requests come
            if replayer is not None and aux_hidden_states:
                replayer.take_taps(aux_hidden_states, 1)  # the buffer counts in vLLM's profile of memory
            return torch.zeros(num_requests, k_max, dtype=torch.int64, device=self._device)
        if self.sender is None:
            drafts_BK = torch.empty(num_requests, k_max, dtype=torch.int64, device=self._device)
        else:
            assert aux_hidden_states, "the target returned no tapped hidden states"
            buffers = (None, None) if replayer is None else (replayer.integers, replayer.sources_R)
            travel_B1, num_travelling = self._travelling(input_batch)
            start_B, num_valid_B, next_tokens_R, sources_R = accepted_rows(
                target, max_query_len, travel_B1, num_travelling, *buffers
            )
            chosen_R = None if travel_B1 is None else sources_R
            sent = self.sender.send(SampledRows(start_B, num_valid_B, next_tokens_R, aux_hidden_states, chosen_R))
            drafts_BK, chance_BK = self.sender.enqueue_wait(sent, num_requests)
            if self._is_choice:
                self.chances.record(chance_BK, input_batch.idx_mapping, self._num_ahead)
            num_drafts = self.sender.num_drafts(sent, num_requests)
            asked = zip(input_batch.req_ids, self._depths, num_drafts, strict=True)
            self.num_drafts = {request_id: count for request_id, depth, count in asked if depth}
        if get_tp_group().world_size > 1:
            drafts_BK = get_tp_group().broadcast(drafts_BK, src=0)
        return drafts_BK

    def _travelling(self, batch: InputBatch) -> tuple[Tensor | None, int]:
        """`travel_B1` and `num_travelling` of `accepted_rows`: as `begin` says."""
        lengths_B = batch.num_scheduled_tokens
        if (num_travelling := int(lengths_B.sum())) == batch.num_tokens:
            return None, num_travelling
        first_B1 = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32)
        return async_tensor_h2d(first_B1, device=self._device), num_travelling

    def begin(self, batch: InputBatch) -> None:
        """Tell the drafter of a step that runs now; `propose` follows."""
        if self.sender is None:
            return
        # Where the GPU chooses the drafts, the most that each request may have.
        lengths_B = batch.num_scheduled_tokens
        known = [self._known[request_id] for request_id in batch.req_ids]
        k_B = np.array([request.depth for request in known], dtype=np.int32)
        ends_B = batch.num_computed_tokens_np + lengths_B
        depth_B = np.minimum(k_B, self._num_ahead) * (ends_B >= batch.prefill_len_np)
        self._depths = depth_B.tolist()

        def prompt_of(index: int) -> Int32Array:
            tokens = known[index].tokens[: int(batch.num_computed_tokens_np[index]) + 1]
            return np.array(tokens, dtype=np.int32)

        self.sender.begin(
            EngineBatch(
                request_ids=batch.req_ids,
                requests=self._known,
                heads_B=np.array([request.head for request in known], dtype=np.int32),
                depth_B=depth_B,
                # A request with K = 0 never drafts; its prompt may serve another one from the drafter's cache.
                wanted_B=(k_B > 0) | batch.is_prefilling_np,
                row_offset_B=np.cumsum(lengths_B, dtype=np.int32) - lengths_B,
                num_rows_B=lengths_B,
                num_sent_B=lengths_B,
                num_target_rows=batch.num_tokens,
                prompt_of=prompt_of,
            )
        )


class RemoteModelRunner(PEagleRunner):
    """vLLM's V2 runner with a remote drafter."""

    speculator: RemoteSpeculator
    _planned: InputBatch | None = None

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> InputBatch:
        """vLLM's; the batch is kept for `execute_model`."""
        self._planned = super().prepare_inputs(*args, **kwargs)
        return self._planned

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, after which the drafter hears of the step that the GPU runs now."""
        output: Any = super().execute_model(*args, **kwargs)
        planned, self._planned = self._planned, None
        if planned is not None:
            self.speculator.begin(planned)
        return output

    @property
    def remote(self) -> StepSender | None:
        """The sending side; None on ranks that do not send, and when the engine is down."""
        return self.speculator.sender if self.speculator is not None else None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's own; its output says which drafts, planned for this step, there were (`StepResult`)."""
        before, self.speculator.num_drafts = self.speculator.num_drafts, {}
        output: Any = super().sample_tokens(grammar_output)
        inner = getattr(output, "model_runner_output", output)
        if self.remote is not None and (request_ids := getattr(inner, "req_ids", None)) is not None:
            update_result(inner, num_ready=[before.get(request_id, -1) for request_id in request_ids])
        return output


class RemoteV2Worker(RemoteControl, V2Worker):
    """`V2Worker` for a target with a remote drafter. Without drafters, which come by `set_drafters`, the target serves
    as without speculation."""

    drafting_runner = RemoteModelRunner

    def make_speculator(self) -> RemoteSpeculator:
        assert self.device is not None
        return RemoteSpeculator(self.vllm_config, self.device)
