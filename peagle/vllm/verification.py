"""Verification of a step's drafts: coupled to the target's own sampling, and as one full CUDA graph where possible.

Coupled (`CoupledSampler`): the target draws its token for each row from noise of the request's seed and the position,
as vLLM's sampler does without drafts. A draft is accepted if and only if it is that token. Drafts are greedy, so the
acceptance probability is that of rejection sampling: the target's probability of the draft. But an answer depends on
its seed alone, and not on the number and choice of verified drafts.

Captured (`Verification`): one graph in place of about twenty kernels that vLLM launches from the host. Enters: the
target's hidden states, where its own graph left them, and the runner's layout of the step. Leaves: what vLLM's
rejection sampler returns. A graph holds the target's output matrix, its tokens, the acceptance of drafts, and, for
requests that need them, penalties, temperature, min_p, top_k and top_p.

A graph is for a number of rows of logits and a number of requests. It reads a step from buffers of its own
(`StagedRows`), which one kernel fills, because the runner's arrays of sampling parameters change their address from
step to step. Steps with any other sampling parameter, log probabilities, a grammar, or more than `MAX_ROWS` rows run
vLLM's own code.

B requests, N rows of logits, S places of requests in the runner, K drafts at most, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from peagle.vllm import compat
from peagle.vllm.engine_settings import capture_sizes

MAX_ROWS = 256
"""Rows of logits in the largest graph. With more, the GPU takes longer for a step than the host, and the graph would
keep hundreds of megabytes of logits."""


class CoupledSampler(RejectionSampler):
    """vLLM's, with coupled verification in the place of rejection sampling."""

    @classmethod
    def install(cls, runner: Any) -> None:
        """Replace the rejection sampler of a runner with a loaded model, where drafts are greedy and accepted by the
        target's probability alone. Rejection sampling of another method, and a watermark, stay vLLM's."""
        sampler = runner.rejection_sampler
        if (
            type(sampler) is RejectionSampler
            and runner.speculative_config.rejection_sample_method == "standard"
            and getattr(runner.speculator, "draft_logits", None) is None
            and sampler.watermark_key is None
        ):
            runner.rejection_sampler = cls(sampler.sampler, runner.speculative_config, runner.device)

    def _verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray[Any, Any],
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        processed_NV = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        found = self.draw(
            processed_NV,
            verify_draft_sampled,
            cu_num_logits,
            pos,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
        )
        return processed_NV, *found

    def draw(
        self,
        logits_NV: Tensor,
        draft_N: Tensor,
        up_to_B1: Tensor,
        position_N: Tensor,
        place_N: Tensor,
        temperature_S: Tensor,
        seed_S: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draw the target's tokens and accept drafts.

        Args:
            logits_NV: with sampling parameters applied.
            draft_N: the row's input token; not read for a request's first row. -1 is never accepted.
            up_to_B1: int32, rows before each request, and in all.
            place_N: the row's request, as index into the S-tensors.

        Returns: what `accept_drafts` returns.
        """
        token_N = gumbel_sample(
            logits_NV,
            place_N,
            temperature_S,
            seed_S,
            position_N,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        return accept_drafts(token_N, draft_N, up_to_B1, self.num_speculative_steps)


def accept_drafts(token_N: Tensor, draft_N: Tensor, up_to_B1: Tensor, k_max: int) -> tuple[Tensor, Tensor]:
    """Accept each request's drafts up to the first that differs from the target's token of the row before it.

    Returns:
        The request's tokens [B, K + 1] int64, that differing token included, and how many they are [B] int32; 0 for a
        request without rows.
    """
    num_requests = len(up_to_B1) - 1
    sampled_BK1 = token_N.new_empty(num_requests, k_max + 1)
    num_sampled_B = token_N.new_empty(num_requests, dtype=torch.int32)
    _accept_kernel[(num_requests,)](
        token_N, draft_N, up_to_B1, sampled_BK1, num_sampled_B,
        WIDTH=k_max + 1, BLOCK=triton.next_power_of_2(k_max + 1), num_warps=1,
    )  # fmt: skip
    return sampled_BK1, num_sampled_B


class Parameters(NamedTuple):
    """Sampling parameters by a request's place. top_k_S: V for all tokens. prefill_S: number of the request's tokens
    that are not sampled."""

    temperature_S: Tensor
    min_p_S: Tensor
    top_k_S: Tensor
    top_p_S: Tensor
    repetition_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    seed_S: Tensor
    prefill_S: Tensor

    @classmethod
    def read(cls, sampler: Sampler) -> Parameters:
        """The runner's, at their addresses of this step."""
        states, penalties = sampler.sampling_states, sampler.penalties_state
        return cls(
            temperature_S=states.temperature.gpu,
            min_p_S=states.min_p.gpu,
            top_k_S=states.top_k.gpu,
            top_p_S=states.top_p.gpu,
            repetition_S=penalties.repetition_penalty.gpu,
            frequency_S=penalties.frequency_penalty.gpu,
            presence_S=penalties.presence_penalty.gpu,
            seed_S=states.seeds.gpu,
            prefill_S=sampler.req_states.prefill_len.gpu,
        )

    def neutral(self, vocab_size: int, device: torch.device) -> Parameters:
        """Parameters of S + 1 places that leave logits unchanged and sample greedily. The last place is for padding."""
        values = {"top_k_S": vocab_size, "top_p_S": 1, "repetition_S": 1}
        return Parameters(
            *(
                torch.full((len(given_S) + 1,), values.get(name, 0), dtype=given_S.dtype, device=device)
                for name, given_S in self._asdict().items()
            )
        )


@dataclasses.dataclass(frozen=True)
class StagedRows:
    """A step as the graphs read it, at fixed addresses. Requests and rows after the last one are padding: they have the
    place S, which is greedy, and padding requests have no rows.

    Attributes:
        rows_N: int64, row of the target's output.
        place_N: int64, place of the row's request.
        draft_N: int32, draft position of the row's input; 0 for a request's first row, K for padding.
        up_to_B1: int32, rows of the requests before.
        place_B: int64.
        parameters: of S + 1 places.

    There is one row more than `MAX_ROWS`: a request without rows reads the row where its first would be.
    """

    rows_N: Tensor
    place_N: Tensor
    draft_N: Tensor
    up_to_B1: Tensor
    place_B: Tensor
    parameters: Parameters

    @classmethod
    def empty(cls, sampler: Sampler, max_requests: int, device: torch.device) -> StagedRows:
        """Buffers without any request."""

        def filled(size: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        return cls(
            rows_N=filled(MAX_ROWS + 1, 0, torch.int64),
            place_N=filled(MAX_ROWS + 1, max_requests, torch.int64),
            draft_N=filled(MAX_ROWS + 1, 0),
            up_to_B1=filled(max_requests + 1, 0),
            place_B=filled(max_requests, max_requests, torch.int64),
            parameters=Parameters.read(sampler).neutral(sampler.sampling_states.vocab_size, device),
        )


class VerificationGraphs(CudaGraphManager):
    """Graphs by the number of rows, in the engine's sizes, and by the number of requests, at most about twice as many
    as a step has."""

    def _init_candidates(self) -> None:
        self._by_rows: dict[int, list[BatchExecutionDescriptor]] = {}
        most, before = min(MAX_ROWS, self.max_num_reqs * self.decode_query_len), 0
        for num_rows in [*(size for size in capture_sizes(most) if size < most), most]:
            counts = [min(num_rows, self.max_num_reqs)]
            # A smaller number of requests cannot have `before` rows.
            while counts[-1] > 1 and (counts[-1] // 2) * self.decode_query_len > before:
                counts.append(counts[-1] // 2)
            self._by_rows[num_rows] = [
                BatchExecutionDescriptor(CUDAGraphMode.FULL, num_rows, count) for count in reversed(counts)
            ]
            before = num_rows
        self._sizes = list(self._by_rows)
        self._capture_descs[CUDAGraphMode.FULL] = [desc for descs in self._by_rows.values() for desc in descs][::-1]

    def fitting(self, num_rows: int, num_requests: int) -> BatchExecutionDescriptor | None:
        """The smallest graph that holds these numbers; None without one."""
        if num_rows > self._sizes[-1]:
            return None
        descs = self._by_rows[self._sizes[bisect_left(self._sizes, num_rows)]]
        return descs[bisect_left(descs, num_requests, key=lambda desc: desc.num_reqs or 0)]


class Verification:
    """Verification graphs of one runner. Used by its thread, in the order of its stream."""

    @classmethod
    def create(cls, runner: Any) -> Verification | None:
        """The graphs of a runner with a loaded model and a captured target; None if the runner verifies in another way
        than vLLM's usual one, or has no full graphs."""
        sampler, rejection = runner.sampler, runner.rejection_sampler
        is_usual = (
            compat.captures_verification(runner.vllm_config)
            and type(sampler) is Sampler
            and type(rejection) in (CoupledSampler, RejectionSampler)
            and rejection.watermark_key is None
            and getattr(runner.speculator, "draft_logits", None) is None
            and [type(one) for one in sampler.logits_processors] == [LogitBiasState, PenaltiesState, BadWordsState]
            and sampler.trace_replay_state is None
            and not sampler.compute_nans
            and not sampler.return_sampling_mask
            and runner.model_state.num_new_sampled_tokens_per_step == 1
            and runner.batch_sharder is None
            and runner.pcp_manager is None
        )
        has_graphs = runner.cudagraph_manager.hidden_states is not None
        return cls(runner) if is_usual and has_graphs else None

    def __init__(self, runner: Any) -> None:
        self._runner, self._sampler, self._rejection = runner, runner.sampler, runner.rejection_sampler
        self._hidden_MH: Tensor = runner.cudagraph_manager.hidden_states
        max_requests, k_max, device = runner.max_num_reqs, runner.num_speculative_steps, runner.device
        self.rows = StagedRows.empty(runner.sampler, max_requests, device)
        self._sampled_BK1 = torch.zeros(max_requests, k_max + 1, dtype=torch.int64, device=device)
        # Tensors of their own: Triton compiles a kernel again for a pointer that is not aligned.
        self._num_sampled_B, self._num_rejected_B = (
            torch.zeros(max_requests, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.graphs, self.scaled_graphs = (
            VerificationGraphs(runner.vllm_config, device, CUDAGraphMode.FULL, decode_query_len=k_max + 1)
            for _ in range(2)
        )

    def capture(self, num_sampled: int | None = None) -> int:
        """Capture all graphs, or the `num_sampled` largest ones of each kind.

        Returns:
            The bytes that they take.
        """
        torch.accelerator.synchronize()
        num_free = torch.accelerator.get_memory_info()[0]
        # The graphs with parameters take more memory, and the others reuse it.
        for graphs, is_scaled in ((self.scaled_graphs, True), (self.graphs, False)):

            def forward(
                desc: BatchExecutionDescriptor, warmup: bool, is_scaled: bool = is_scaled
            ) -> Callable[[CUDAGraphMode], None]:
                return lambda mode: self.verify(desc, is_scaled)

            graphs._max_full_descs_to_capture = num_sampled
            graphs.capture(forward, "Capturing verification")
        # The graphs read these buffers. vLLM replaces them when it needs larger ones, so they are kept alive here.
        caches = (
            topk_topp_triton._TRITON_BUFFER_CACHE,
            topk_topp_triton._TRITON_TABLE_CACHE,
            topk_topp_triton._TRITON_SPLIT_CACHE,
        )
        self._kept = [list(cache.values()) for cache in caches]
        torch.accelerator.synchronize()
        return num_free - torch.accelerator.get_memory_info()[0]

    def __call__(self, hidden_MH: Tensor, batch: InputBatch) -> SamplerOutput | None:
        """Verify a step by a graph.

        Args:
            hidden_MH: the target's output, by row of the step.

        Returns:
            What vLLM's rejection sampler returns, in buffers that the next step overwrites; None if no graph holds this
            step.
        """
        num_rows, num_requests = len(batch.logits_indices), batch.num_reqs
        if not batch.num_draft_tokens or hidden_MH.data_ptr() != self._hidden_MH.data_ptr():
            return None
        sampler, place_B = self._sampler, batch.idx_mapping_np
        is_scaled = bool(sampler.needs_logits_processing[place_B].any())
        graphs = self.scaled_graphs if is_scaled else self.graphs
        desc = graphs.fitting(num_rows, num_requests)
        states = sampler.sampling_states
        if desc is None or (states.num_logprobs[place_B] != NO_LOGPROBS).any():
            return None
        if is_scaled and self._need_more(place_B):
            return None
        stage_rows(batch, self.rows, desc, Parameters.read(sampler), num_drafts=self._runner.num_speculative_steps)
        # The copy of the previous step's tokens to the host may still read these buffers.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        graphs.run_fullgraph(desc)
        return SamplerOutput(
            sampled_token_ids=self._sampled_BK1[:num_requests],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=self._num_sampled_B[:num_requests],
            num_rejected=self._num_rejected_B[:num_requests],
        )

    def _need_more(self, place_B: np.ndarray[Any, Any]) -> bool:
        """Whether one of these requests needs logits processing that no graph holds."""
        bias, _, bad_words = self._sampler.logits_processors
        thinking = self._sampler.thinking_budget_state
        return bool(
            bias.use_logit_bias[place_B].any()
            or bad_words.num_bad_words.np[place_B].any()
            or (thinking.enabled and thinking.use_thinking_budget[place_B].any())
        )

    def verify(self, desc: BatchExecutionDescriptor, is_scaled: bool) -> None:
        """The contents of a graph: the rejection sampler's `__call__` over the staged rows."""
        runner, rows, num_rows, num_requests = self._runner, self.rows, desc.num_tokens, desc.num_reqs
        assert num_requests is not None
        rows_N, place_N, draft_N = rows.rows_N[:num_rows], rows.place_N[:num_rows], rows.draft_N[:num_rows]
        up_to_B1, place_B = rows.up_to_B1[: num_requests + 1], rows.place_B[:num_requests]
        given, buffers = rows.parameters, runner.input_buffers
        tokens_N, position_N = gather_draft_sampled(
            buffers.input_ids, buffers.positions, rows_N, place_N, draft_N, given.prefill_S
        )
        logits_NV = runner.model.compute_logits(self._hidden_MH.index_select(0, rows_N))
        if is_scaled:
            # In the order of `Sampler.apply_sampling_params`; a row costs nothing where it has no such parameter.
            penalties = self._sampler.penalties_state
            logits_NV = logits_NV.float()
            apply_penalties(
                logits_NV, place_N, tokens_N, draft_N, given.repetition_S, given.frequency_S, given.presence_S,
                penalties.prompt_bin_mask, penalties.output_bin_counts,
            )  # fmt: skip
            apply_temperature(logits_NV, place_N, given.temperature_S)
            apply_min_p(logits_NV, place_N, given.min_p_S)
            # vLLM itself sorts the whole vocabulary for fewer than 8 rows, whatever their parameters are.
            logits_NV = topk_topp_triton.apply_top_k_top_p_triton(
                logits_NV, given.top_k_S[place_N], given.top_p_S[place_N]
            )
        if isinstance(self._rejection, CoupledSampler):
            sampled_BK1, num_sampled_B = self._rejection.draw(
                logits_NV, tokens_N, up_to_B1, position_N, place_N, given.temperature_S, given.seed_S
            )
        else:
            sampled_BK1, num_sampled_B = rejection_sample(
                logits_NV,
                None,
                tokens_N,
                up_to_B1,
                position_N,
                place_B,
                place_N,
                draft_N,
                given.temperature_S,
                given.seed_S,
                runner.num_speculative_steps,
                self._rejection.synthetic_conditional_rates,
                use_fp64=self._sampler.use_fp64_gumbel,
                use_block_verification=self._rejection.use_block_verification,
            )
        num_sampled_B, num_rejected_B = get_num_sampled_and_rejected(
            num_sampled_B, buffers.seq_lens, up_to_B1, place_B, given.prefill_S
        )
        self._sampled_BK1[:num_requests] = sampled_BK1
        self._num_sampled_B[:num_requests] = num_sampled_B
        self._num_rejected_B[:num_requests] = num_rejected_B


def stage_rows(
    batch: InputBatch, out: StagedRows, desc: BatchExecutionDescriptor, parameters: Parameters, *, num_drafts: int
) -> None:
    """Fill `out` with a batch, padded to the graph `desc`; one kernel. num_drafts: K."""
    num_padded = desc.num_reqs or batch.num_reqs
    _stage_kernel[(num_padded + 1,)](
        batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, tuple(parameters),
        out.rows_N, out.place_N, out.draft_N, out.up_to_B1, out.place_B, tuple(out.parameters),
        batch.num_reqs, num_padded, len(batch.logits_indices), desc.num_tokens, len(out.place_B),
        NUM_DRAFTS=num_drafts, BLOCK=triton.next_power_of_2(num_drafts + 1), num_warps=1,
    )  # fmt: skip


@triton.jit
def _accept_kernel(token_N, draft_N, up_to_B1, sampled_BK1, num_sampled_B, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a request."""
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, end = tl.load(up_to_B1 + request), tl.load(up_to_B1 + request + 1)
    row = first + column
    token = tl.load(token_N + row, mask=row < end, other=0)
    draft = tl.load(draft_N + row + 1, mask=row + 1 < end, other=-1)
    num_accepted = tl.min(tl.where(token == draft, BLOCK, column), axis=0)
    tl.store(sampled_BK1 + request * WIDTH + column, token, mask=column < WIDTH)
    tl.store(num_sampled_B + request, tl.minimum(num_accepted + 1, end - first))


@triton.jit(do_not_specialize=["num_requests", "num_padded", "num_rows", "num_padded_rows", "max_requests"])
def _stage_kernel(
    given_place_B, given_up_to_B1, given_rows_N, given_parameters,
    rows_N, place_N, draft_N, up_to_B1, place_B, parameters,
    num_requests, num_padded, num_rows, num_padded_rows, max_requests,
    NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a request, padding requests included; the last program writes the padding rows."""
    request, column = tl.program_id(0), tl.arange(0, BLOCK)
    if request < num_padded:
        is_request = request < num_requests
        place = tl.load(given_place_B + request, mask=is_request, other=max_requests)
        tl.store(place_B + request, place)
        for index in tl.static_range(len(parameters)):
            value = tl.load(given_parameters[index] + place, mask=is_request)
            tl.store(parameters[index] + place, value, mask=is_request)
        first = tl.load(given_up_to_B1 + request, mask=is_request, other=num_rows)
        end = tl.load(given_up_to_B1 + request + 1, mask=is_request, other=num_rows)
        tl.store(up_to_B1 + request + 1, end)
        row = first + column
        tl.store(rows_N + row, tl.load(given_rows_N + row, mask=row < end), mask=row < end)
        tl.store(place_N + row, column * 0 + place, mask=row < end)
        tl.store(draft_N + row, column, mask=row < end)
    else:
        for before in range(num_rows, num_padded_rows + 1, BLOCK):
            row = before + column
            is_row = row <= num_padded_rows
            tl.store(rows_N + row, tl.zeros([BLOCK], tl.int64), mask=is_row)
            tl.store(place_N + row, column * 0 + max_requests, mask=is_row)
            tl.store(draft_N + row, column * 0 + NUM_DRAFTS, mask=is_row)
