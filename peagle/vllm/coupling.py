"""Coupled sampling on vLLM's V1 model runner: a sampled answer does not depend on its drafts.

The target draws each token as the argmax of its processed logits plus Gumbel noise. The noise depends on the request's
seed, the token's position and the token's id alone. A draft is accepted if it is the token that the target draws at its
position. So an answer is the same with and without drafts, whatever K, load and neighbours, but for rounding of logits.

vLLM's plain sampler processes each row of a step's logits as a sequence of its own: the request with the drafts before
that row as output. So penalties, bans, top-k and top-p are those of a step without drafts.

Every request needs a seed: `peagle.vllm.scheduler` gives one to a request without.

Dimensions: B requests, R rows of logits (one for each draft and one more for each request), S = 1 + most drafts of a
request, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

NO_TOKEN = -1
"""vLLM's mark of a place after a request's last token."""

UInt64Array = npt.NDArray[np.uint64]


def noise_seeds(seeds_B: Sequence[int], ends_B: Tensor, num_rows_B: Sequence[int]) -> Tensor:
    """Seeds of the rows' noise.

    Args:
        seeds_B: of the requests; only the lowest 64 bits count.
        ends_B: position of the token that is drawn from each request's last row.
        num_rows_B: rows of each request, at successive positions.

    Returns: int64 [R]
    """
    rows_B = np.asarray(num_rows_B)
    last_row_R = np.repeat(np.cumsum(rows_B) - 1, rows_B)
    position_R = np.repeat(ends_B.numpy(), rows_B) - last_row_R + np.arange(len(last_row_R))
    seed_B = np.array([seed & (2**64 - 1) for seed in seeds_B], dtype=np.uint64)
    return torch.from_numpy(_mix(np.repeat(_mix(seed_B), rows_B) + position_R.astype(np.uint64)).view(np.int64))


def _mix(values: UInt64Array) -> UInt64Array:
    """SplitMix64: neighbouring numbers become unrelated ones."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class GumbelDraw(nn.Module):
    """Replaces vLLM's `TopKTopPSampler`, whose random generators have a state."""

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self._logprobs_mode = logprobs_mode
        self.seeds_R: Tensor | None = None
        """`noise_seeds` of the next call's rows; None, before the first step, means 0 for each."""

    def forward(
        self, logits_RV: Tensor, generators: Any, k_R: Tensor | None, p_R: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [R], and processed logits or log probabilities [R, V] where the engine's `logprobs_mode` asks for
        them."""
        logits_RV = apply_top_k_top_p(logits_RV, k_R, p_R)
        seeds_R = torch.zeros(len(logits_RV), dtype=torch.int64) if self.seeds_R is None else self.seeds_R
        tokens_R = torch.ops._C.fused_gumbel_argmax(logits_RV.float().contiguous(), seeds_R)
        if self._logprobs_mode not in PROCESSED_LOGPROBS_MODES:
            return tokens_R, None
        return tokens_R, logits_RV if self._logprobs_mode == "processed_logits" else Sampler.compute_logprobs(logits_RV)


class CoupledVerifier(nn.Module):
    """Replaces vLLM's `RejectionSampler`; it is called in the same way."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        """Draw a token for each row and keep each request's tokens up to the first that differs from its draft.

        Args:
            draft_probs: not read.
            logits: [R, V]

        Returns:
            Tokens [B, S], `NO_TOKEN` after the last one; log probabilities [B * S, ...] if a request asks for them.
        """
        drafts = metadata.draft_token_ids
        num_rows_B = torch.tensor(metadata.num_draft_tokens) + 1
        last_row_B = num_rows_B.cumsum(0) - 1
        rows = rows_as_requests(sampling_metadata, num_rows_B, last_row_B, drafts.tolist())
        drawn: SamplerOutput = self.sampler(logits=logits, sampling_metadata=rows)
        tokens_R = drawn.sampled_token_ids.flatten()
        next_draft_R = torch.full_like(tokens_R, NO_TOKEN)
        is_draft_R = torch.ones_like(tokens_R, dtype=torch.bool).index_fill(0, last_row_B, False)
        next_draft_R[is_draft_R] = drafts.to(tokens_R.dtype)
        place_S = torch.arange(metadata.max_spec_len + 1)
        row_BS = (last_row_B - num_rows_B + 1)[:, None] + place_S
        row_BS.clamp_(max=len(tokens_R) - 1)
        # A request's last row has no draft, so nothing behind it is accepted.
        num_tokens_B = 1 + (tokens_R == next_draft_R)[row_BS].cumprod(1).sum(1)
        tokens_BS = tokens_R[row_BS].masked_fill(place_S >= num_tokens_B[:, None], NO_TOKEN)
        found = drawn.logprobs_tensors
        if found is not None:
            ids_R, logprobs_R, ranks_R = (part[row_BS.flatten()] for part in found[:3])
            found = LogprobsTensors(ids_R, logprobs_R, ranks_R)
        return SamplerOutput(sampled_token_ids=tokens_BS, logprobs_tensors=found)


def rows_as_requests(
    metadata: SamplingMetadata, num_rows_B: Tensor, last_row_B: Tensor, drafts: Sequence[int]
) -> SamplingMetadata:
    """The metadata of B requests, expanded to their R rows. A row has the drafts before it as output.

    drafts: of all requests, one after another, R - B in all.
    """
    num_rows = num_rows_B.tolist()
    request_R = torch.arange(len(num_rows)).repeat_interleave(num_rows_B)
    outputs: list[list[int]] = []
    if metadata.output_token_ids:
        rest = iter(drafts)
        for output, rows in zip(metadata.output_token_ids, num_rows, strict=False):
            own = list(islice(rest, rows - 1))
            outputs += [output, *([*output, *own[:place]] for place in range(1, rows))]

    def expand(values_B: Any) -> Any:
        return None if values_B is None else values_B[request_R]

    holder: Any = metadata.thinking_budget_state_holder
    processors: list[Any] = [_RowProcessor(one, num_rows, last_row_B) for one in metadata.logitsprocs.all]
    banned = metadata.bad_words_token_ids
    thinking: Any = None if holder is None else _ThinkingOfLastRows(holder, metadata.output_token_ids, last_row_B)
    return replace(
        metadata,
        temperature=expand(metadata.temperature),
        top_p=expand(metadata.top_p),
        top_k=expand(metadata.top_k),
        prompt_token_ids=expand(metadata.prompt_token_ids),
        frequency_penalties=expand(metadata.frequency_penalties),
        presence_penalties=expand(metadata.presence_penalties),
        repetition_penalties=expand(metadata.repetition_penalties),
        output_token_ids=outputs,
        spec_token_ids=None,
        allowed_token_ids_mask=expand(metadata.allowed_token_ids_mask),
        bad_words_token_ids={row: banned[b] for row, b in enumerate(request_R.tolist()) if b in banned},
        logitsprocs=LogitsProcessors(processors),
        thinking_budget_state_holder=thinking,
    )


class _RowProcessor:
    """A logits processor of B requests, applied to R rows.

    Only min_tokens works with drafts. Requests with another processor have K = 0 (`undraftable_field`), so they have
    one row.
    """

    def __init__(self, processor: Any, num_rows_B: list[int], last_row_B: Tensor) -> None:
        self._processor, self._num_rows_B, self._last_row_B = processor, num_rows_B, last_row_B

    def is_argmax_invariant(self) -> bool:
        return bool(self._processor.is_argmax_invariant())

    def apply(self, logits_RV: Tensor) -> Tensor:
        if isinstance(self._processor, MinTokensLogitsProcessor):
            return self._processor.apply_with_spec_decode(logits_RV, self._num_rows_B)
        logits_RV[self._last_row_B] = self._processor.apply(logits_RV[self._last_row_B])
        return logits_RV


class _ThinkingOfLastRows:
    """vLLM's thinking budgets of B requests, applied to R rows; requests with one have K = 0 (`undraftable_field`)."""

    def __init__(self, holder: Any, outputs: list[list[int]], last_row_B: Tensor) -> None:
        self._holder, self._outputs, self._last_row_B = holder, outputs, last_row_B
        self._no_drafts: list[list[int]] = [[] for _ in range(len(last_row_B))]

    def has_tracked_requests(self) -> bool:
        return bool(self._holder.has_tracked_requests())

    def update_state(self, output_token_ids: Any, spec_token_ids: Any, repeat_indices: Any = None) -> None:
        self._holder.update_state(self._outputs, self._no_drafts, None)

    def apply_to_logits(self, logits_RV: Tensor, predict_bonus_token: bool, spec_token_ids: Any) -> Tensor:
        last_BV = logits_RV[self._last_row_B]
        logits_RV[self._last_row_B] = self._holder.apply_to_logits(last_BV, False, self._no_drafts)
        return logits_RV


class CoupledModelRunner(CPUModelRunner):
    """vLLM's V1 runner for CPUs, with coupled sampling."""

    @classmethod
    def install(cls, runner: Any) -> None:
        """Turn `runner`, whose `__init__` has run, into one of this class."""
        # vLLM's CPU worker makes its runner by name in `init_device`, without `Worker._make_model_runner`.
        runner.__class__ = cls
        runner.sampler.topk_topp_sampler = GumbelDraw(runner.sampler.logprobs_mode)
        if runner.speculative_config is not None:
            runner.rejection_sampler = CoupledVerifier(runner.sampler)

    def _update_states(self, scheduler_output: Any) -> Any:
        found = super()._update_states(scheduler_output)
        # They are not used, and vLLM rewinds them after each chunk of a prompt, which CPU generators cannot do.
        self.input_batch.generators.clear()
        return found

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        batch = self.input_batch
        if not batch.all_greedy:
            params = [self.requests[request_id].sampling_params for request_id in batch.req_ids]
            seeds_B = [(one.seed if one is not None else None) or 0 for one in params]
            drafts = [0] * len(seeds_B) if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
            ends_B = self.seq_lens[: len(seeds_B)]
            self.sampler.topk_topp_sampler.seeds_R = noise_seeds(seeds_B, ends_B, [1 + number for number in drafts])
        return super()._sample(logits, spec_decode_metadata)
