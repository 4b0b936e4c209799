"""P-EAGLE as a speculator of vLLM's V2 model runner: one pass of mask rows, replayed as one full CUDA graph.

Enters: the target's three tapped hidden states, and what was sampled and rejected, all on the GPU. Leaves: K_max draft
tokens a request, in the target's vocabulary; equal to `peagle.draft`. The rows of the pass are those of
`peagle.vllm.draft_rows`.

Batches in which no request has more than 1 + K_max target rows, that is decoding ones, give every request 2 K_max rows.
So one graph for each number of requests serves them, whatever was rejected or trimmed, and holds everything from `fc`
to the choice of draft tokens. Other batches, with prompts in them, run densely packed, on vLLM's piecewise graphs where
their size has one. Greedy drafts only: vLLM's rejection sampling keeps the output's distribution with them.

R requests, N target rows, M rows of the pass, H drafter's hidden size, X = 3 times the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from peagle.vllm.draft_rows import DraftRows, TargetRows, write_rows

logger = logging.getLogger(__name__)

MAX_NUM_SPLITS, MAX_SPLIT_REQUESTS = 32, 32


def most_rows(config: VllmConfig) -> int:
    """Rows of the largest pass: each request of a full batch has K_max - 1 rows beyond the target's."""
    scheduler = config.scheduler_config
    most: int = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (config.num_speculative_tokens - 1)
    return most


def request_counts(most: int) -> list[int]:
    """Numbers of requests to capture a graph for: dense where a pass costs the same, then at most 1/8 too large."""
    counts = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, most, 64))
    return [*(count for count in counts if count < most), most]


class DraftGraphs(CudaGraphManager):
    """Graphs of passes: full ones for some numbers of requests, piecewise ones for the engine's sizes in rows."""

    def _init_candidates(self) -> None:
        full, piecewise = [], []
        if self.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            limit = min(self.max_num_reqs, most_rows(self.vllm_config) // self.decode_query_len)
            for count in request_counts(limit):
                num_rows = count * self.decode_query_len
                full.append(BatchExecutionDescriptor(CUDAGraphMode.FULL, num_rows, count, self.decode_query_len))
        if self.cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE and not self.use_breakable_cg:
            for size in sorted(self.compilation_config.cudagraph_capture_sizes or []):
                piecewise.append(BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None))
        for descs in filter(None, (full, piecewise)):
            self._capture_descs[descs[0].cg_mode] = descs[::-1]
            start = 0
            for desc in descs:
                for num_rows in range(start, desc.num_tokens + 1):
                    self._candidates.setdefault((num_rows, 0), []).append(desc)
                start = desc.num_tokens + 1


class PEagleSpeculator(DraftModelSpeculator):
    """Drop-in for vLLM's EAGLE speculator where `parallel_drafting` is set."""

    graphs: DraftGraphs | None
    rows: DraftRows
    model: Any  # vLLM's network of an EAGLE-3 head

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Raises ValueError for settings that it was not made for; the message names them."""
        super().__init__(vllm_config, device)
        _check_settings(vllm_config)
        self.stride = 2 * self.num_speculative_steps
        self.max_rows = most_rows(vllm_config)
        self.mask_token_id = get_parallel_drafting_token_id(self.draft_model_config.hf_config)
        self.graphs = None

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        return load_eagle_model(target_model, self.vllm_config)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = False  # prompts with images are drafted from their text
        most_targets = max(self.max_num_tokens, self.max_num_reqs * (1 + self.num_speculative_steps))
        shape: Any = {"dtype": self.dtype, "device": self.device}
        self.taps_NX = torch.zeros(most_targets, self.model.model.fc_input_size, **shape)
        self.hidden_MH = torch.zeros(self.max_rows, self.hidden_size, **shape)
        # Row 0 is the shared hidden state of mask rows, the others are the target's rows after `fc`.
        self.reduced_NH = torch.zeros(1 + most_targets, self.hidden_size, **shape)
        with torch.inference_mode():
            self.reduced_NH[:1] = self.model.combine_hidden_states(self.model.mask_hidden.to(self.dtype))

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        self.groups = [index for index, groups in enumerate(self.attn_groups) if groups]
        self.builders = [group.get_metadata_builder(0) for groups in self.attn_groups for group in groups]
        for builder in self.builders:
            if hasattr(builder, "max_cudagraph_size"):  # up to which FlashAttention plans for graphs, in rows
                builder.max_cudagraph_size = self.max_rows
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
        self.graphs = DraftGraphs(self.vllm_config, self.device, cudagraph_mode, decode_query_len=self.stride)

    def capture(self) -> None:
        assert self.graphs is not None
        self.graphs.capture(self._prepare_capture, "Capturing P-EAGLE's CUDA graphs")

    def _prepare_capture(self, desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        """vLLM's `CreateForwardFn`: a batch of requests without any context, which writes nothing to the cache."""
        rows, count = self.rows, desc.num_reqs or min(desc.num_tokens, self.max_num_reqs)
        for buffer in (rows.token_ids_R, rows.positions_R, rows.sources_R, rows.sample_rows_BK, rows.context_B):
            buffer.zero_()
        rows.slots_GR.fill_(-1)
        metadata = slots = None
        if desc.cg_mode == CUDAGraphMode.FULL:
            rows.context_B[:count] = self.stride
            rows.first_row_B1.copy_(self.arange.clamp(max=count) * self.stride)
            self.block_tables.get_dummy_block_tables(count)
            first_row_B1 = self.arange[: count + 1] * self.stride
            context_B = torch.full((count,), self.stride, dtype=torch.int32)
            metadata, slots = self._attention(
                desc.num_tokens, first_row_B1, context_B, self.stride, self.max_model_len, for_capture=True
            )
        num_targets = count * (1 + self.num_speculative_steps)
        return lambda mode: self._draft(count, num_targets, desc.num_tokens, metadata, slots, mode)

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
        """Draft tokens of every request of the batch, [R, K_max] int64; those of unfinished prompts mean nothing."""
        assert aux_hidden_states, "the target returned no tapped hidden states"
        num_requests, num_targets = input_batch.num_reqs, input_batch.num_tokens
        num_drafts, max_query_len = self.num_speculative_steps, int(input_batch.num_scheduled_tokens.max())
        torch.cat([tap_NH[:num_targets] for tap_NH in aux_hidden_states], dim=-1, out=self.taps_NX[:num_targets])
        num_rows = num_targets + num_requests * (num_drafts - 1)
        if dummy_run and skip_attn_for_dummy_run:  # memory is profiled before there is a cache
            self.rows = DraftRows.empty(self.max_num_reqs, self.max_rows, num_drafts, 1, self.device)
            self._draft(num_requests, num_targets, min(num_rows, self.max_rows), None, None, CUDAGraphMode.NONE)
            return self.draft_tokens[:num_requests]

        desc = self._graph_for(num_requests, num_rows, max_query_len, is_profile)
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        stride = self.stride if is_full else 0
        num_rows = desc.num_tokens if is_full else num_rows
        target = TargetRows(
            first_row_B1=input_batch.query_start_loc,
            input_ids_N=input_batch.input_ids,
            positions_N=input_batch.positions,
            place_B=input_batch.idx_mapping,
            num_sampled_B=num_sampled,
            num_rejected_B=num_rejected,
            last_sampled_S=last_sampled,
            next_prefill_S=next_prefill_tokens,
        )
        for group in self.groups:
            write_rows(
                target,
                self.block_tables.input_block_tables[group],
                self.rows,
                group=group,
                num_drafts=num_drafts,
                stride=stride,
                max_query_len=max_query_len,
                num_rows=desc.num_tokens,
                block_size=self.block_tables.kernel_block_sizes[group],
                mask_token_id=self.mask_token_id,
                max_model_len=self.max_model_len,
            )
        first_row_B1, context_B = self._host_rows(input_batch, stride, desc.num_reqs if is_full else num_requests)
        # Full graphs read these through the builder's buffers, so they are built for a replay too.
        metadata, slots = self._attention(
            num_rows, first_row_B1, context_B, stride or max_query_len + num_drafts - 1, int(context_B.max())
        )
        if is_full:
            assert self.graphs is not None
            self.graphs.run_fullgraph(desc)
        else:
            self._draft(num_requests, num_targets, desc.num_tokens, metadata, slots, desc.cg_mode)
        return self.draft_tokens[:num_requests]

    def _graph_for(
        self, num_requests: int, num_rows: int, max_query_len: int, is_profile: bool
    ) -> BatchExecutionDescriptor:
        """The graph of a pass with so many requests and rows; of no graph, with mode NONE."""
        if is_profile or self.graphs is None:
            return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_rows, num_requests)
        if max_query_len <= 1 + self.num_speculative_steps:
            desc = self.graphs.dispatch(num_requests, num_requests * self.stride, self.stride, 0)
            if desc.cg_mode == CUDAGraphMode.FULL:
                return desc
        return self.graphs.dispatch(num_requests, num_rows, None, 0)

    def _host_rows(self, batch: InputBatch, stride: int, num_padded: int | None) -> tuple[Tensor, Tensor]:
        """The host's view: first rows [num_padded + 1], and what no request's number of keys exceeds [num_padded]."""
        count, num_masks = batch.num_reqs, self.num_speculative_steps - 1
        num_padded = num_padded or count
        if stride:
            first_row_B1 = self.arange[: num_padded + 1].clamp(max=count) * stride
        else:
            first_row_B1 = (
                torch.from_numpy(batch.query_start_loc_np[: count + 1]) + self.arange[: count + 1] * num_masks
            )
        context_B = torch.zeros(num_padded, dtype=torch.int32)
        context_B[:count] = (batch.seq_lens_cpu_upper_bound[:count] + num_masks).clamp(max=self.max_model_len)
        return first_row_B1, context_B

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
                # A graph reserves a partial result for every split; with many requests there is work without them.
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

    def _draft(
        self,
        num_requests: int,
        num_targets: int,
        num_rows: int,
        attn_metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        mode: CUDAGraphMode,
    ) -> None:
        """The pass over the rows in the buffers, from the taps to `draft_tokens`. What a full graph holds."""
        model, rows = self.model, self.rows
        self.reduced_NH[1 : 1 + num_targets] = model.combine_hidden_states(self.taps_NX[:num_targets])
        torch.index_select(self.reduced_NH, 0, rows.sources_R[:num_rows], out=self.hidden_MH[:num_rows])
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_rows,
            cudagraph_runtime_mode=mode,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        ):
            normed_MH, _ = model(
                input_ids=rows.token_ids_R[:num_rows],
                positions=rows.positions_R[:num_rows],
                hidden_states=self.hidden_MH[:num_rows],
                inputs_embeds=None,
            )
        sampled = rows.sample_rows_BK[: num_requests * self.num_speculative_steps]
        draft_ids = model.logits_processor(model.lm_head, normed_MH[sampled]).argmax(dim=-1)
        if model.draft_id_to_target_id is not None:
            draft_ids = draft_ids + model.draft_id_to_target_id[draft_ids]
        self.draft_tokens[:num_requests] = draft_ids.view(num_requests, -1)


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
    }
    if found := [setting for setting, is_on in refused.items() if is_on]:
        raise ValueError(f"P-EAGLE does not go with {', '.join(found)}: leave it out")
