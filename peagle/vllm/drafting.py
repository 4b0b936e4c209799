"""What vLLM's model runner does around the drafter's pass, better in two places.

1. A decode step whose requests all have K = 0 skips the pass of a colocated drafter. K is fixed for a request's life,
   so nothing that such a step leaves out of the drafter's cache is read by its own requests. Prompts still go through
   the pass: their blocks may serve a later request with another K. Blocks of an answer at K = 0, which the chat's next
   turn may take from the prefix cache, lack the drafter's part: with K > 0 that turn drafts worse, and its output is
   the target's all the same.
2. At the end of an unfinished prompt chunk vLLM hands the drafter the prompt's last token as the token that follows.
   The right one is the prompt's token after the chunk.

Mixins over vLLM's own classes; the output of the target is the same with and without them.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from peagle.vllm.channel import DEPTH_KEY, drafts_wanted
from peagle.vllm.compat import PROPOSE_SEAMS, check_seams

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object


class _AfterStep:
    """The part of vLLM's input batch from which the next tokens are chosen, each request as long as its chunk ends."""

    def __init__(self, input_batch: Any, seq_lens_B: npt.NDArray[np.int32]) -> None:
        self.num_reqs, self.req_ids = input_batch.num_reqs, input_batch.req_ids
        self.vocab_size = input_batch.vocab_size
        # vLLM takes the last token of so many. The one after the chunk is wanted, at the position `seq_lens_B`.
        self.num_tokens_no_spec = seq_lens_B[: self.num_reqs] + 1


class ChunkedProposer(EagleProposer):
    """vLLM's proposer with the right next token after an unfinished chunk."""

    chunk_ends_B: npt.NDArray[np.int32]
    """View of the runner's own array: each request's length after this step, if all its drafts were accepted. Exact for
    a prompt chunk, which has no drafts."""

    @classmethod
    def install(cls, runner: Any) -> None:
        """Make the drafter of `runner` one of this class."""
        check_seams(EagleProposer, PROPOSE_SEAMS["proposer"])
        runner.drafter.__class__ = cls
        runner.drafter.chunk_ends_B = runner.optimistic_seq_lens_cpu.numpy()

    def prepare_next_token_ids_padded(
        self, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_mask: Any
    ) -> Any:
        batch = _AfterStep(gpu_input_batch, self.chunk_ends_B)
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, batch, discard_request_mask)  # type: ignore[arg-type]


class PassSkipper(_Runner):
    """Mixin over vLLM's model runner with a colocated drafter; a runner made one calls `prepare_drafting` once."""

    num_draft_passes = 0
    num_skipped_passes = 0

    def prepare_drafting(self) -> None:
        """Check what this class builds on, and give the drafter its right next tokens.

        Raises:
            UnsupportedVLLMError: this vLLM has not the methods that this class builds on.
        """
        check_seams(GPUModelRunner, PROPOSE_SEAMS["runner"])
        if type(getattr(self, "drafter", None)) is EagleProposer:
            ChunkedProposer.install(self)

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's pass, or zeros that no request will verify."""
        if not self._nobody_drafts():
            self.num_draft_passes += 1
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args, **kwargs)
        self.num_skipped_passes += 1
        self._draft_probs = None
        self._draft_prob_req_ids = None
        prepare_next_tokens(self, sampled_token_ids)
        zero = torch.zeros(1, device=self.device, dtype=torch.int32)
        return zero.expand(self.input_batch.num_reqs, self.num_spec_tokens)

    def _nobody_drafts(self) -> bool:
        """Whether all requests of the step decode with K = 0."""
        config = self.speculative_config
        if config is None or config.disable_padded_drafter_batch or not isinstance(self.drafter, EagleProposer):
            return False
        if self.parallel_config.data_parallel_size > 1:  # Ranks meet in the pass.
            return False
        batch, k_max = self.input_batch, self.num_spec_tokens
        if any(depth_in_batch(self.requests[request_id], k_max) for request_id in batch.req_ids):
            return False
        num_computed_B = batch.num_computed_tokens_cpu[: batch.num_reqs]
        return bool((num_computed_B >= batch.num_prompt_tokens[: batch.num_reqs]).all())

    def draft_report(self) -> dict[str, int]:
        """Drafter passes since the start: run, and skipped because nobody wanted drafts."""
        return {"num_passes": self.num_draft_passes, "num_skipped": self.num_skipped_passes}


class DraftReports:
    """What `collective_rpc` can ask of a worker whose model runner is a `PassSkipper`."""

    model_runner: Any

    def draft_report(self) -> dict[str, int]:
        """`collective_rpc("draft_report")`: drafter passes of this worker."""
        report: dict[str, int] = self.model_runner.draft_report()
        return report


def depth_in_batch(request: Any, k_max: int) -> int:
    """K of a request as the worker knows it (vLLM's `CachedRequestState`), 0..k_max."""
    params = request.sampling_params
    extra_args = params.extra_args if params is not None else None
    return drafts_wanted(extra_args.get(DEPTH_KEY) if extra_args else None, k_max)


def prepare_next_tokens(runner: Any, sampled_token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's own step does with sampled tokens before it drafts; the next step reads it in asynchronous mode.

    Returns:
        The token after each request's last valid row, and how many tokens each request sampled: 0 after an unfinished
        prompt chunk. Both int32 [B] on the runner's device.
    """
    next_tokens_B, num_sampled_B = runner.drafter.prepare_next_token_ids_padded(
        sampled_token_ids, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
    )
    runner._copy_valid_sampled_token_count(next_tokens_B, num_sampled_B)
    return next_tokens_B, num_sampled_B
