"""Verification of a step's drafts as one full CUDA graph, where vLLM launches some twenty kernels from the host.

Enters: the target's hidden states where its own graph left them, and what the runner laid out of the step. Leaves: what
vLLM's rejection sampler returns, from vLLM's own kernels. A graph holds the target's output matrix, the temperature
where a request has one, acceptance, and the token after the accepted ones.

Graphs are for a number of rows of logits and of requests, and read both from buffers of their own (`StagedRows`), which
one kernel fills: the runner's arrays of sampling parameters change their place from step to step. Steps with any other
sampling parameter, with log probabilities, a grammar, or more rows than `MAX_ROWS` go vLLM's way.

B requests, N rows of logits, S places of requests in the runner, K drafts at most, H hidden size.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from peagle.vllm import compat
from peagle.vllm.engine import capture_sizes

MAX_ROWS = 256
"""Of logits in a graph. Beyond, the GPU takes longer for a step than the host, and a graph's logits, which it keeps,
take hundreds of megabytes."""


@dataclasses.dataclass(frozen=True)
class StagedRows:
    """What the graphs read of a step, at fixed addresses. Requests are numbered as in the batch; a request after the
    last one pads: it is greedy and has no rows. So do rows after the last one, of the request `max_requests`.

    rows_N: int64, row of the target's output. request_N: int32. draft_N: int32, 0 for a request's first row; K for rows
    that pad, whose logits nobody needs. up_to_B1: int32, rows of the requests before. temperature_B: float32. seed_B:
    int64. prefill_B: int32, tokens that are not sampled. Of rows there is one more than `MAX_ROWS`, because a request
    without rows reads the one where its first would be.
    """

    rows_N: Tensor
    request_N: Tensor
    draft_N: Tensor
    up_to_B1: Tensor
    temperature_B: Tensor
    seed_B: Tensor
    prefill_B: Tensor

    @classmethod
    def empty(cls, max_requests: int, device: torch.device) -> StagedRows:
        """Of no request."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            rows_N=zeros(MAX_ROWS + 1, torch.int64),
            request_N=zeros(MAX_ROWS + 1) + max_requests,
            draft_N=zeros(MAX_ROWS + 1),
            up_to_B1=zeros(max_requests + 1),
            temperature_B=zeros(max_requests + 1, torch.float32),
            seed_B=zeros(max_requests + 1, torch.int64),
            prefill_B=zeros(max_requests),
        )


class VerificationGraphs(CudaGraphManager):
    """Graphs by the number of rows, in the engine's sizes, and of requests, about twice too many at most."""

    def _init_candidates(self) -> None:
        self._by_rows: dict[int, list[BatchExecutionDescriptor]] = {}
        most, before = min(MAX_ROWS, self.max_num_reqs * self.decode_query_len), 0
        for num_rows in [*(size for size in capture_sizes(most) if size < most), most]:
            counts = [min(num_rows, self.max_num_reqs)]
            # Fewer requests never have so many rows.
            while counts[-1] > 1 and (counts[-1] // 2) * self.decode_query_len > before:
                counts.append(counts[-1] // 2)
            self._by_rows[num_rows] = [
                BatchExecutionDescriptor(CUDAGraphMode.FULL, num_rows, count) for count in reversed(counts)
            ]
            before = num_rows
        self._sizes = list(self._by_rows)
        self._capture_descs[CUDAGraphMode.FULL] = [desc for descs in self._by_rows.values() for desc in descs][::-1]

    def fitting(self, num_rows: int, num_requests: int) -> BatchExecutionDescriptor | None:
        """The graph for so many rows and requests; None where there is none."""
        if num_rows > self._sizes[-1]:
            return None
        descs = self._by_rows[self._sizes[bisect_left(self._sizes, num_rows)]]
        return descs[bisect_left(descs, num_requests, key=lambda desc: desc.num_reqs or 0)]


class Verification:
    """Of one runner, whose target's graphs are captured. Used by its thread, in the order of its stream."""

    @classmethod
    def of(cls, runner: Any) -> Verification | None:
        """None where a step is verified in another way than vLLM's usual one, or has no full graphs."""
        sampler, speculative = runner.sampler, runner.speculative_config
        is_usual = (
            compat.is_tested()
            and type(sampler) is Sampler
            and type(runner.rejection_sampler) is RejectionSampler
            and sampler.trace_replay_state is None
            and not sampler.compute_nans
            and not speculative.enable_adaptive_verification
            and getattr(runner.speculator, "draft_logits", None) is None
            and runner.model_state.num_new_sampled_tokens_per_step == 1
            and runner.parallel_config.tensor_parallel_size == 1
            and runner.batch_sharder is None
            and runner.pp_handler is None
            and runner.pcp_manager is None
            and runner.lora_config is None
        )
        has_graphs = runner.cudagraph_manager.hidden_states is not None
        return cls(runner) if is_usual and has_graphs else None

    def __init__(self, runner: Any) -> None:
        self._runner, self._sampler, self._rejection = runner, runner.sampler, runner.rejection_sampler
        self._hidden_MH: Tensor = runner.cudagraph_manager.hidden_states
        max_requests, k_max, device = runner.max_num_reqs, runner.num_speculative_steps, runner.device
        self.rows = StagedRows.empty(max_requests, device)
        self._requests_B = torch.arange(max_requests, dtype=torch.int32, device=device)
        self._sampled_BK1 = torch.zeros(max_requests, k_max + 1, dtype=torch.int64, device=device)
        # Each begins where memory is aligned: kernels are compiled again for a pointer that is not.
        self._num_sampled_B, self._num_rejected_B = (
            torch.zeros(max_requests, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.graphs, self.scaled_graphs = (
            VerificationGraphs(runner.vllm_config, device, CUDAGraphMode.FULL, decode_query_len=k_max + 1)
            for _ in range(2)
        )

    def capture(self, num_sampled: int | None = None) -> int:
        """Captures all graphs, or so many of the largest ones; returns the bytes that they take."""
        torch.accelerator.synchronize()
        num_free = torch.accelerator.get_memory_info()[0]
        # With temperatures they take more: the others find their memory in what these leave.
        for graphs, is_scaled in ((self.scaled_graphs, True), (self.graphs, False)):

            def forward(
                desc: BatchExecutionDescriptor, warmup: bool, is_scaled: bool = is_scaled
            ) -> Callable[[CUDAGraphMode], None]:
                return lambda mode: self.verify(desc, is_scaled)

            graphs._max_full_descs_to_capture = num_sampled
            graphs.capture(forward, "Capturing verification")
        torch.accelerator.synchronize()
        return num_free - torch.accelerator.get_memory_info()[0]

    def __call__(self, hidden_MH: Tensor, batch: InputBatch) -> SamplerOutput | None:
        """What vLLM's rejection sampler returns for this step, in buffers that the next one overwrites; None where no
        graph can tell.

        hidden_MH: the target's output, by row of the step.
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
        if is_scaled and not self._need_temperature_alone(place_B):
            return None
        stage_rows(
            batch, self.rows, desc, states.temperature.gpu, states.seeds.gpu, sampler.req_states.prefill_len.gpu,
            num_drafts=self._runner.num_speculative_steps,
        )  # fmt: skip
        # What the step before sampled may still be on its way to the host.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        graphs.run_fullgraph(desc)
        return SamplerOutput(
            sampled_token_ids=self._sampled_BK1[:num_requests],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=self._num_sampled_B[:num_requests],
            num_rejected=self._num_rejected_B[:num_requests],
        )

    def _need_temperature_alone(self, place_B: np.ndarray[Any, Any]) -> bool:
        """Whether none of these requests has logits processed in any other way than by its temperature."""
        sampler, states = self._sampler, self._sampler.sampling_states
        thinking = sampler.thinking_budget_state
        return not (
            (states.min_p.np[place_B] != 0.0).any()
            or (states.top_k.np[place_B] != states.vocab_size).any()
            or (states.top_p.np[place_B] != 1.0).any()
            or sampler.logit_bias_state.use_logit_bias[place_B].any()
            or sampler.penalties_state.use_penalty[place_B].any()
            or sampler.bad_words_state.num_bad_words.np[place_B].any()
            or (thinking.enabled and thinking.use_thinking_budget[place_B].any())
        )

    def verify(self, desc: BatchExecutionDescriptor, is_scaled: bool) -> None:
        """What a graph holds: `RejectionSampler.__call__` over the staged rows."""
        runner, rows, num_rows, num_requests = self._runner, self.rows, desc.num_tokens, desc.num_reqs
        assert num_requests is not None
        rows_N, request_N = rows.rows_N[:num_rows], rows.request_N[:num_rows]
        requests_B, up_to_B1 = self._requests_B[:num_requests], rows.up_to_B1[: num_requests + 1]
        logits_NV = runner.model.compute_logits(self._hidden_MH.index_select(0, rows_N))
        if is_scaled:
            logits_NV = logits_NV.float()
            apply_temperature(logits_NV, request_N, rows.temperature_B)
        sampled_BK1, num_sampled_B = rejection_sample(
            logits_NV,
            None,
            runner.input_buffers.input_ids[rows_N],
            up_to_B1,
            runner.input_buffers.positions[rows_N],
            requests_B,
            request_N,
            rows.draft_N[:num_rows],
            rows.temperature_B,
            rows.seed_B,
            runner.num_speculative_steps,
            self._rejection.synthetic_conditional_rates,
            use_fp64=self._sampler.use_fp64_gumbel,
            use_block_verification=self._rejection.use_block_verification,
        )
        num_sampled_B, num_rejected_B = get_num_sampled_and_rejected(
            num_sampled_B, runner.input_buffers.seq_lens, up_to_B1, requests_B, rows.prefill_B
        )
        self._sampled_BK1[:num_requests] = sampled_BK1
        self._num_sampled_B[:num_requests] = num_sampled_B
        self._num_rejected_B[:num_requests] = num_rejected_B


def stage_rows(
    batch: InputBatch,
    out: StagedRows,
    desc: BatchExecutionDescriptor,
    temperature_S: Tensor,
    seed_S: Tensor,
    prefill_S: Tensor,
    *,
    num_drafts: int,
) -> None:
    """Fills `out` for a batch and a graph that holds it; one kernel. Parameters are by the runner's place of a request;
    num_drafts: K."""
    num_padded = desc.num_reqs or batch.num_reqs
    _stage_kernel[(num_padded + 1,)](
        batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, temperature_S, seed_S, prefill_S,
        out.rows_N, out.request_N, out.draft_N, out.up_to_B1, out.temperature_B, out.seed_B, out.prefill_B,
        batch.num_reqs, num_padded, len(batch.logits_indices), desc.num_tokens, len(out.prefill_B),
        NUM_DRAFTS=num_drafts, BLOCK=triton.next_power_of_2(num_drafts + 1), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "num_padded", "num_rows", "num_padded_rows", "max_requests"])
def _stage_kernel(
    place_B, given_up_to_B1, given_rows_N, temperature_S, seed_S, prefill_S,
    rows_N, request_N, draft_N, up_to_B1, temperature_B, seed_B, prefill_B,
    num_requests, num_padded, num_rows, num_padded_rows, max_requests,
    NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a request, padding ones included; the last one has the rows that pad."""
    request, column = tl.program_id(0), tl.arange(0, BLOCK)
    if request < num_padded:
        is_request = request < num_requests
        place = tl.load(place_B + request, mask=is_request, other=0)
        tl.store(temperature_B + request, tl.load(temperature_S + place, mask=is_request, other=0.0))
        tl.store(seed_B + request, tl.load(seed_S + place, mask=is_request, other=0))
        tl.store(prefill_B + request, tl.load(prefill_S + place, mask=is_request, other=0))
        first = tl.load(given_up_to_B1 + request, mask=is_request, other=num_rows)
        end = tl.load(given_up_to_B1 + request + 1, mask=is_request, other=num_rows)
        tl.store(up_to_B1 + request + 1, end)
        row = first + column
        tl.store(rows_N + row, tl.load(given_rows_N + row, mask=row < end), mask=row < end)
        tl.store(request_N + row, column * 0 + request, mask=row < end)
        tl.store(draft_N + row, column, mask=row < end)
    else:
        for before in range(num_rows, num_padded_rows + 1, BLOCK):
            row = before + column
            is_row = row <= num_padded_rows
            tl.store(rows_N + row, tl.zeros([BLOCK], tl.int64), mask=is_row)
            tl.store(request_N + row, column * 0 + max_requests, mask=is_row)
            tl.store(draft_N + row, column * 0 + NUM_DRAFTS, mask=is_row)
