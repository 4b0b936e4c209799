"""P-EAGLE as a speculator of vLLM's V2 model runner: one pass of mask rows, replayed as one full CUDA graph.

Enters: the target's auxiliary hidden states, and what was sampled and rejected, all on the GPU. Leaves: K_max draft
tokens a request, in the target's vocabulary; equal to `peagle.draft`. `peagle.vllm.draft_rows` lays out the rows.

A pass makes D drafts of a request, at least as many as the next step verifies. It has D - 1 mask rows a request, and
draft d does not depend on later mask rows. Requests with max_k = 0 take part with their prompts only, which a later
request may find in the prefix cache.

Full graphs are of two kinds:

| | uniform | packed |
| --- | --- | --- |
| captured for | a number of requests | a number of rows |
| rows of a request | 2 D | as many as it needs; rejected drafts need none |
| holds | all, from `fc` to the choice of draft tokens | up to the last layer's attention; the rest is a second graph |
| serves | batches below `MIN_PACKED_REQUESTS` | other batches; prompts, where `compat.replays_prompts` |

If the drafter's attention has full graphs only for equal numbers of rows, all are uniform, for each D. A pass without a
full graph runs on vLLM's piecewise graphs, if their sizes reach. If attention can renew its metadata from numbers on
the GPU, as vLLM does between EAGLE's drafts, full graphs do so: the host lays out rows and replays.

Drafts are greedy. With the standard method `peagle.vllm.verification.CoupledSampler` takes the place of vLLM's
rejection sampling, and keeps the output's distribution.

B requests, N target rows, M rows of the pass, S drafts, H drafter's hidden size, X concatenated size of the auxiliary
hidden states, A size of the attention's output.
"""

from __future__ import annotations

import dataclasses
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.utils import AttentionGroup

from peagle.drafter.protocol import valid_rows
from peagle.drafter.rows import best_tokens
from peagle.vllm import compat
from peagle.vllm.draft_rows import DraftRows, TargetRows, write_rows
from peagle.vllm.engine_settings import capture_sizes
from peagle.vllm.last_layer import COMPILED_KEY, LastLayer
from peagle.vllm.request_args import read_max_k
from peagle.vllm.step_notes import read_plan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

MAX_NUM_SPLITS, MAX_SPLIT_REQUESTS = 32, 32
"""Splits of a request's keys in FlashAttention, and the largest batch with more than one split."""

MIN_PACKED_REQUESTS = 32
"""Smaller batches make K_max drafts in uniform graphs."""

RENEWABLE = (FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder)


def can_renew(groups: Iterable[AttentionGroup]) -> bool:
    """Whether a full graph can renew the metadata of these groups (`update_draft_decode_metadata`), so that the host
    builds none for a replay."""
    # For a replay these builders write only FlashAttention's plan, from lengths in the runner's buffers; layers read
    # those buffers themselves. Classes derived from them inherit the flag and do more: the one for static sinks changes
    # the lengths in place. A group with smaller blocks than the cache's has a block table of its own, which vLLM fills
    # when metadata is built.
    return all(
        type(group.get_metadata_builder()) in RENEWABLE
        and group.supports_draft_decode_metadata_update
        and group.kernel_block_size is None
        for group in groups
    )


def most_rows(config: VllmConfig) -> int:
    """Rows of the largest pass: a full batch, each request with K_max - 1 mask rows."""
    scheduler = config.scheduler_config
    return scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (config.num_speculative_tokens - 1)


def request_counts(most: int) -> list[int]:
    """Numbers of requests to capture a graph for: 1, 2, 4, then in steps of 8, 16 and 64."""
    counts = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, most, 64))
    return [*(count for count in counts if count < most), most]


def row_counts(most: int) -> list[int]:
    """Numbers of rows to capture a graph for, at most an eighth too large."""
    sizes = capture_sizes(most)
    sizes += range(sizes[-1] + 512, most, 512)
    return [*(size for size in sizes if size < most), most]


class DraftGraphs(CudaGraphManager):
    """Graphs of passes: full ones by the number of requests at each number of drafts, full ones by the number of rows
    (only with `is_ragged`), and piecewise ones for the engine's sizes in rows.

    is_ragged: the drafter's attention has graphs for rows of any split.
    packs_prompts: steps with prompts in them run on full graphs as well.
    """

    def __init__(self, *args: Any, is_ragged: bool, packs_prompts: bool, **kwargs: Any) -> None:
        self._is_ragged, self._packs_prompts = is_ragged, packs_prompts
        super().__init__(*args, **kwargs)

    def _init_candidates(self) -> None:
        self._by_requests: dict[int, list[BatchExecutionDescriptor]] = {}
        self._packed: list[BatchExecutionDescriptor] = []
        k_max, full, piecewise = self.vllm_config.num_speculative_tokens, [], []
        if self.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            for k in (k_max,) if self._is_ragged else range(1, k_max + 1):
                stride, least = 2 * k, 1 if k == k_max else MIN_PACKED_REQUESTS
                limit = min(self.max_num_reqs, most_rows(self.vllm_config) // stride)
                if self._is_ragged:
                    limit = min(limit, MIN_PACKED_REQUESTS)
                self._by_requests[k] = [
                    BatchExecutionDescriptor(CUDAGraphMode.FULL, count * stride, count, stride)
                    for count in request_counts(limit)
                    if count >= least
                ]
                full += self._by_requests[k]
            if self._is_ragged:
                most = 2 * k_max * self.max_num_reqs
                if self._packs_prompts:
                    most = max(most, capture_sizes(most)[-1])
                self._packed = [
                    BatchExecutionDescriptor(CUDAGraphMode.FULL, size, min(size, self.max_num_reqs), max_query_len=size)
                    for size in row_counts(min(most, most_rows(self.vllm_config)))
                ]
                full += self._packed
        if self.cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE and not self.use_breakable_cg:
            for size in sorted(self.compilation_config.cudagraph_capture_sizes or []):
                piecewise.append(BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None))
        for descs in filter(None, (full, piecewise)):
            self._capture_descs[descs[0].cg_mode] = sorted(descs, key=lambda desc: desc.num_tokens, reverse=True)
        start = 0
        for desc in piecewise:
            for num_rows in range(start, desc.num_tokens + 1):
                self._candidates[num_rows, 0] = [desc]
            start = desc.num_tokens + 1

    def full_graph(
        self, num_requests: int, num_targets: int, k: int, max_query_len: int, num_rejected: int = 0
    ) -> BatchExecutionDescriptor | None:
        """The smallest full graph for a pass.

        Args:
            num_targets: rows of the target.
            k: drafts of a request, at least.
            max_query_len: most target rows of a request.
            num_rejected: target rows that are expected to be rejected.

        Returns:
            None without one, and before the capture: vLLM then runs real steps to warm up.
        """
        if not self._graphs_captured:
            return None
        fitting = []
        for graph_k, descs in self._by_requests.items():
            if graph_k >= k and graph_k + 1 >= max_query_len:
                place = bisect_left(descs, num_requests, key=lambda desc: desc.num_reqs or 0)
                fitting += descs[place : place + 1]
        is_decode = max_query_len <= 1 + self.vllm_config.num_speculative_tokens
        if num_requests >= MIN_PACKED_REQUESTS if is_decode else self._packs_prompts:
            num_rows = num_targets + num_requests * (k - 1) - num_rejected
            num_rows = max(num_rows, num_targets, num_requests * k)
            place = bisect_left(self._packed, num_rows, key=lambda desc: desc.num_tokens)
            fitting += self._packed[place : place + 1]
        return min(fitting, key=lambda desc: desc.num_tokens, default=None)


class ChoiceGraphs(CudaGraphManager):
    """Full graphs of `PEagleSpeculator._choose`, by the number of drafts."""

    def _init_candidates(self) -> None:
        k_max = self.vllm_config.num_speculative_tokens
        descs = [
            BatchExecutionDescriptor(CUDAGraphMode.FULL, size, None) for size in row_counts(k_max * self.max_num_reqs)
        ]
        self._capture_descs[CUDAGraphMode.FULL] = descs[::-1]
        start = 1
        for desc in descs:
            for num_drafts in range(start, desc.num_tokens + 1):
                self._candidates[num_drafts, 0] = [desc]
            start = desc.num_tokens + 1


class PEagleSpeculator(DraftModelSpeculator):
    """Drop-in for vLLM's EAGLE speculator where `parallel_drafting` is set."""

    graphs: DraftGraphs | None
    choices: ChoiceGraphs | None
    rows: DraftRows
    model: Any  # vLLM's network of an EAGLE-3 head, less the end of its last layer
    last_layer: LastLayer

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Raises ValueError for settings that go with no P-EAGLE head; the message names them."""
        super().__init__(vllm_config, device)
        _check_settings(vllm_config)
        self._never_drafted: set[str] = set()
        """Requests with max_k = 0."""
        self._num_ahead = self.num_speculative_steps
        """Most drafts of a request that the next step verifies."""
        self._num_rejected = 0
        """Drafts of this step that are expected to be rejected."""
        self.max_rows = most_rows(vllm_config)
        self.mask_token_id = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        self.graphs = self.choices = None

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        extra = self.vllm_config.additional_config
        if isinstance(extra, dict):
            self.vllm_config.additional_config = {**extra, COMPILED_KEY: True}
        network = load_eagle_model(target_model, self.vllm_config)
        # Target and drafter are compiled for the same range of sizes, and the drafter's passes have more rows. vLLM
        # sets the range by the target's steps again when it loads a head with a load format of its own.
        if endpoints := self.vllm_config.compilation_config.compile_ranges_endpoints:
            endpoints[-1] = max(endpoints[-1], most_rows(self.vllm_config))
        self.last_layer = LastLayer(network)
        return network

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = False  # prompts with images are drafted from their text
        # Packed graphs put all rows of the pass through `fc`.
        most_targets = max(self.max_rows, self.max_num_reqs * (1 + self.num_speculative_steps))
        most_drafts = self.max_num_reqs * self.num_speculative_steps
        shape: Any = {"dtype": self.dtype, "device": self.device}
        self.aux_NX = torch.zeros(most_targets, self.model.model.fc_input_size, **shape)
        self.hidden_MH = torch.zeros(self.max_rows, self.hidden_size, **shape)
        self.attended_SA = torch.zeros(most_drafts, self.last_layer.input_size, **shape)
        self.stream_SH = torch.zeros(most_drafts, self.hidden_size, **shape)
        self.draft_ids_S = torch.zeros(most_drafts, dtype=self.draft_tokens.dtype, device=self.device)
        # Row 0 is the shared hidden state of mask rows, the others are the target's rows after `fc`.
        self.projected_NH = torch.zeros(1 + most_targets, self.hidden_size, **shape)
        with torch.inference_mode():
            self.projected_NH[:1] = self.model.combine_hidden_states(self.model.mask_hidden.to(self.dtype))

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        self.groups = [index for index, groups in enumerate(self.attn_groups) if groups]
        self.builders = [group.get_metadata_builder() for group in chain.from_iterable(self.attn_groups)]
        for builder in self.builders:
            if hasattr(builder, "max_cudagraph_size"):  # up to which FlashAttention plans for graphs, in rows
                builder.max_cudagraph_size = self.max_rows
        self.renews_metadata = can_renew(chain.from_iterable(self.attn_groups))
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        self.rows = DraftRows.empty(
            self.max_num_reqs, self.max_rows, self.num_speculative_steps, num_groups, self.device
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        support = self.attn_cg_support
        if (
            cudagraph_mode.has_full_cudagraphs()
            and support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value
        ):
            logger.warning("the drafter's attention (%s) has no full CUDA graphs", support.min_cg_attn_backend)
            cudagraph_mode = CUDAGraphMode.NONE
        stride = 2 * self.num_speculative_steps
        is_ragged = support.min_cg_support == AttentionCGSupport.ALWAYS
        packs_prompts = cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE and compat.replays_prompts(
            self.vllm_config
        )
        self.graphs = DraftGraphs(
            self.vllm_config,
            self.device,
            cudagraph_mode,
            decode_query_len=stride,
            is_ragged=is_ragged,
            packs_prompts=packs_prompts,
        )
        if is_ragged and cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self.choices = ChoiceGraphs(self.vllm_config, self.device, cudagraph_mode, decode_query_len=stride)

    def capture(self) -> None:
        assert self.graphs is not None
        self.graphs.capture(self._prepare_capture, "Capturing P-EAGLE's CUDA graphs")
        if self.choices is not None:
            self.choices.capture(
                lambda desc, warmup: lambda mode: self._choose(desc.num_tokens), "Capturing the choice of drafts"
            )

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Record the requests that start in this step, and the scheduler's plan of the pass."""
        for new in scheduled.scheduled_new_reqs:
            if not read_max_k(new.sampling_params, self.num_speculative_steps):
                self._never_drafted.add(new.req_id)
        plan = read_plan(scheduled)
        self._num_ahead = plan.limit_drafts_ahead(self.num_speculative_steps)
        self._num_rejected = plan.num_rejected

    def drop_requests(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have ended."""
        self._never_drafted.difference_update(request_ids)

    def _prepare_capture(self, desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        """vLLM's `CreateForwardFn`: a batch of requests without any context, which writes nothing to the cache."""
        rows, count = self.rows, desc.num_reqs or min(desc.num_tokens, self.max_num_reqs)
        for buffer in (rows.token_ids_R, rows.positions_R, rows.sources_R, rows.sample_rows_BD, rows.context_B):
            buffer.zero_()
        rows.slots_GR.fill_(-1)
        metadata = slots = None
        k = (desc.uniform_token_count or 0) // 2 or self.num_speculative_steps
        num_targets, num_drafts = count * (1 + k), count * k
        if desc.cg_mode == CUDAGraphMode.FULL:
            stride = desc.uniform_token_count or desc.num_tokens // count
            if desc.uniform_token_count is None:
                num_targets, num_drafts = desc.num_tokens, 0
            rows.context_B[:count] = stride
            rows.first_row_B1.copy_(torch.from_numpy(np.minimum(self.arange_np, count) * stride))
            self.block_tables.get_dummy_block_tables(count)
            first_row_B1 = torch.from_numpy(self.arange_np[: count + 1] * stride)
            context_B = torch.full((count,), stride, dtype=torch.int32)
            metadata, slots = self._attention(
                desc.num_tokens,
                first_row_B1,
                context_B,
                desc.max_query_len or stride,
                self.max_model_len,
                for_capture=True,
            )

        def draft(mode: CUDAGraphMode) -> None:
            if metadata is not None and self.renews_metadata:
                for group in chain.from_iterable(self.attn_groups):
                    group.update_draft_decode_metadata(metadata)
            self._pass(num_targets, desc.num_tokens, metadata, slots, mode)
            if num_drafts:
                self._choose(num_drafts)
                self._lay_out_drafts(count, k)

        return draft

    @torch.inference_mode()
    def propose(  # type: ignore[override]
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Draft tokens of every request of the batch, [B, K_max] int64. Drafts that the scheduler does not plan to
        verify are undefined."""
        assert aux_hidden_states, "the target returned no auxiliary hidden states"
        num_requests, k_max = input_batch.num_reqs, self.num_speculative_steps
        if dummy_run and skip_attn_for_dummy_run:  # memory is profiled before there is a cache
            self._copy_aux_states(aux_hidden_states, input_batch.num_tokens)
            self.rows = DraftRows.empty(self.max_num_reqs, self.max_rows, k_max, 1, self.device)
            num_rows = min(input_batch.num_tokens + num_requests * (k_max - 1), self.max_rows)
            self._pass(input_batch.num_tokens, num_rows, None, None, CUDAGraphMode.NONE)
            self._choose(num_requests * k_max)
            self._lay_out_drafts(num_requests, k_max)
            return self.draft_tokens[:num_requests]

        members_M = None if dummy_run else self._members(input_batch)
        if members_M is not None and not len(members_M):
            return self.draft_tokens[:num_requests]
        target = TargetRows.from_batch(input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens)
        lengths_B, most_keys_B = input_batch.num_scheduled_tokens, input_batch.seq_lens_cpu_upper_bound[:num_requests]
        if members_M is None:
            self._copy_aux_states(aux_hidden_states, input_batch.num_tokens)
        else:
            lengths_B, most_keys_B = lengths_B[members_M], most_keys_B[torch.from_numpy(members_M)]
            target, member_rows_N = _only(target, members_M, input_batch.query_start_loc_np, lengths_B, self.device)
            self._copy_aux_states(aux_hidden_states, len(member_rows_N), member_rows_N)
        k = k_max if dummy_run else max(1, self._num_ahead)
        self._run_pass(target, lengths_B, most_keys_B, k, members_M is not None, is_profile)
        if members_M is None:
            return self.draft_tokens[:num_requests]
        drafts_BK = torch.zeros(num_requests, k_max, dtype=self.draft_tokens.dtype, device=self.device)
        drafts_BK[async_tensor_h2d(members_M, device=self.device)] = self.draft_tokens[: len(members_M)]
        return drafts_BK

    def _members(self, batch: InputBatch) -> np.ndarray[Any, Any] | None:
        """Indices of the requests that take part in the pass; None: all."""
        if not self._never_drafted:
            return None
        drafts_B = [request_id not in self._never_drafted for request_id in batch.req_ids]
        takes_part_B = np.array(drafts_B) | batch.is_prefilling_np
        return None if takes_part_B.all() else takes_part_B.nonzero()[0]

    def aux_views(self) -> list[Tensor]:
        """Views of the buffer, one a layer, into which a graph of the target may write its auxiliary hidden states."""
        return list(self.aux_NX.split(self.vllm_config.model_config.get_hidden_size(), dim=-1))

    def _copy_aux_states(self, aux: list[Tensor], num_rows: int, rows_N: Tensor | None = None) -> None:
        """Copy the target's auxiliary hidden states to the buffer: its first `num_rows` rows, or the rows `rows_N`."""
        if rows_N is None and aux[0].data_ptr() == self.aux_NX.data_ptr():
            return  # a graph has written them there
        chosen = [layer_NH[:num_rows] if rows_N is None else layer_NH[rows_N] for layer_NH in aux]
        torch.cat(chosen, dim=-1, out=self.aux_NX[:num_rows])

    def _run_pass(
        self,
        target: TargetRows,
        lengths_B: np.ndarray[Any, Any],
        most_keys_B: Tensor,
        k: int,
        is_part: bool,
        is_profile: bool,
    ) -> None:
        """Lay out the rows and make `k` drafts of each request, or more in a full graph for more.

        Args:
            lengths_B: target rows of each request.
            most_keys_B: bounds of each request's keys.
            is_part: some requests of the batch do not take part.
        """
        num_requests, num_targets, max_query_len = len(lengths_B), int(lengths_B.sum()), int(lengths_B.max())
        graphs, stride, num_padded = None if is_profile else self.graphs, 0, num_requests
        desc = None
        if graphs is not None:
            desc = graphs.full_graph(num_requests, num_targets, k, max_query_len, self._num_rejected)
        if desc is not None:
            assert desc.num_reqs is not None
            stride, num_padded = desc.uniform_token_count or 0, desc.num_reqs
            k = stride // 2 or k
        num_rows = num_targets + num_requests * (k - 1) if desc is None else desc.num_tokens
        run_rows, mode = num_rows, CUDAGraphMode.NONE
        if desc is None and graphs is not None:
            piecewise = graphs.dispatch(num_requests, num_rows, None, 0)
            run_rows, mode = piecewise.num_tokens, piecewise.cg_mode
        if is_part:  # the target no longer reads the tables of the whole batch
            self.block_tables.gather_block_tables(target.place_B, num_padded)
        for group in self.groups:
            write_rows(
                target,
                self.block_tables.input_block_tables[group],
                self.rows,
                group=group,
                num_drafts=k,
                stride=stride,
                is_packed=desc is not None and not stride,
                max_query_len=max_query_len,
                num_rows=run_rows,
                block_size=self.block_tables.block_sizes[group],
                mask_token_id=self.mask_token_id,
                max_model_len=self.max_model_len,
            )
        metadata = slots = None
        if desc is None or not self.renews_metadata:
            # Full graphs read metadata in the builders' buffers, so it is built for a replay too. The longest request
            # must be that of the capture, because attention is planned by it.
            planned = None if desc is None else desc.max_query_len
            first_row_B1, context_B = self._host_view(lengths_B, most_keys_B, k, stride, num_padded, num_rows)
            metadata, slots = self._attention(
                num_rows, first_row_B1, context_B, planned or stride or max_query_len + k - 1, int(context_B.max())
            )
        num_drafts = num_requests * k
        if graphs is None or desc is None:
            self._pass(num_targets, run_rows, metadata, slots, mode)
            self._choose(num_drafts)
        else:
            graphs.run_fullgraph(desc)
            if stride:
                return
            self._replay_choice(num_drafts)
        self._lay_out_drafts(num_requests, k)

    def _host_view(
        self, lengths_B: np.ndarray[Any, Any], most_keys_B: Tensor, k: int, stride: int, num_padded: int, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        """First rows [P + 1] and numbers of keys [P] of a pass's requests, padded to P. Only the GPU knows what was
        rejected, so these are upper bounds."""
        num_requests = len(lengths_B)
        if stride:
            first_row_B1 = torch.from_numpy(np.minimum(self.arange_np[: num_padded + 1], num_requests) * stride)
        else:
            ends_B = np.cumsum(lengths_B + (k - 1))
            first_row_B1 = torch.full((num_padded + 1,), int(ends_B[-1]), dtype=torch.int32)
            first_row_B1[0] = 0
            first_row_B1[1 : num_requests + 1] = torch.from_numpy(ends_B)
            first_row_B1.clamp_(max=num_rows)
        context_B = torch.zeros(num_padded, dtype=torch.int32)
        context_B[:num_requests] = (most_keys_B + (k - 1)).clamp(max=self.max_model_len)
        return first_row_B1, context_B

    def _lay_out_drafts(self, num_requests: int, k: int) -> None:
        """Copy `draft_ids_S` [B * D], one request after another, to the first D columns of `draft_tokens`."""
        self.draft_tokens[:num_requests, :k] = self.draft_ids_S[: num_requests * k].view(num_requests, k)

    def _replay_choice(self, num_drafts: int) -> None:
        """`_choose`, as a graph if one is large enough."""
        assert self.choices is not None
        desc = self.choices.dispatch(0, num_drafts, None, 0)
        if desc.cg_mode == CUDAGraphMode.FULL:
            self.choices.run_fullgraph(desc)
        else:
            self._choose(num_drafts)

    def _attention(
        self,
        num_rows: int,
        first_row_B1: Tensor,
        context_B: Tensor,
        max_query_len: int,
        max_seq_len: int,
        for_capture: bool = False,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and cache slots by layer of the rows now in the buffers. The tensors given are the host's view."""
        num_requests = len(context_B)
        for builder in self.builders:
            if hasattr(builder, "max_num_splits"):
                # A graph reserves a partial result for every split. Many requests keep the GPU busy without splits.
                builder.max_num_splits = MAX_NUM_SPLITS if num_requests <= MAX_SPLIT_REQUESTS else 1
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_requests,
            num_tokens=num_rows,
            query_start_loc_gpu=self.rows.first_row_B1[: num_requests + 1],
            query_start_loc_cpu=first_row_B1,
            max_query_len=max_query_len,
            seq_lens=self.rows.context_B[:num_requests],
            max_seq_len=max_seq_len,
            block_tables=[table_BC[:num_requests] for table_BC in self.block_tables.input_block_tables],
            slot_mappings=self.rows.slots_GR[:, :num_rows],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=context_B,
            for_cudagraph_capture=for_capture,
        )
        return metadata, build_slot_mappings_by_layer(self.rows.slots_GR[:, :num_rows], self.kv_cache_config)

    def _pass(
        self,
        num_targets: int,
        num_rows: int,
        attn_metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        mode: CUDAGraphMode,
    ) -> None:
        """Run the pass over the rows in the buffers, from auxiliary hidden states to the last layer's attention. Its
        output for the rows that propose drafts is left in `attended_SA` and `stream_SH`."""
        model, rows = self.model, self.rows
        self.projected_NH[1 : 1 + num_targets] = model.combine_hidden_states(self.aux_NX[:num_targets])
        torch.index_select(self.projected_NH, 0, rows.sources_R[:num_rows], out=self.hidden_MH[:num_rows])
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            cudagraph_runtime_mode=mode,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        ):
            attended_MA, stream_MH = model(
                input_ids=rows.token_ids_R[:num_rows],
                positions=rows.positions_R[:num_rows],
                hidden_states=self.hidden_MH[:num_rows],
                inputs_embeds=None,
            )
        # No pass has fewer rows than drafts.
        num_drafts = min(num_rows, len(self.stream_SH))
        sampled_S = rows.sample_rows_BD[:num_drafts]
        torch.index_select(attended_MA, 0, sampled_S, out=self.attended_SA[:num_drafts])
        torch.index_select(stream_MH, 0, sampled_S, out=self.stream_SH[:num_drafts])

    def _choose(self, num_drafts: int) -> None:
        """Run the rest of the last layer for the first `num_drafts` rows that propose drafts. Draft tokens go to
        `draft_ids_S`."""
        model = self.model
        normed_SH = self.last_layer(self.attended_SA[:num_drafts], self.stream_SH[:num_drafts])
        draft_ids_S = self.draft_ids_S[:num_drafts]
        best_tokens(model.logits_processor(model.lm_head, normed_SH), draft_ids_S)
        if model.draft_id_to_target_id is not None:
            draft_ids_S += model.draft_id_to_target_id[draft_ids_S]


def _only(
    target: TargetRows,
    members_M: np.ndarray[Any, Any],
    first_row_np: np.ndarray[Any, Any],
    lengths_M: np.ndarray[Any, Any],
    device: torch.device,
) -> tuple[TargetRows, Tensor]:
    """The target's rows of some requests of the batch, one after another, and their indices in the batch."""
    rows_N = valid_rows(first_row_np[members_M], lengths_M)
    members, rows = (async_tensor_h2d(indices, device=device) for indices in (members_M, rows_N))
    chosen = dataclasses.replace(
        target,
        first_row_B1=async_tensor_h2d(np.concatenate([[0], np.cumsum(lengths_M)]).astype(np.int32), device=device),
        input_ids_N=target.input_ids_N[rows],
        positions_N=target.positions_N[rows],
        place_B=target.place_B[members],
        num_sampled_B=target.num_sampled_B[members],
        num_rejected_B=target.num_rejected_B[members],
    )
    return chosen, rows


def _check_settings(config: VllmConfig) -> None:
    parallel, speculative = config.parallel_config, config.speculative_config
    assert speculative is not None
    refused = {
        "draft_sample_method other than greedy": speculative.draft_sample_method != "greedy",
        "data_parallel_size above 1 (run more replicas instead)": parallel.data_parallel_size > 1,
        "decode_context_parallel_size above 1": parallel.decode_context_parallel_size > 1,
        "num_speculative_tokens_per_batch_size (each request has its own K)": bool(
            speculative.num_speculative_tokens_per_batch_size
        ),
        "enable_adaptive_verification (the scheduler chooses)": speculative.enable_adaptive_verification,
    }
    if found := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"P-EAGLE does not go with {', '.join(found)}: leave it out")
