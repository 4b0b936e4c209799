"""CUDA graphs of vLLM's V2 runner without an engine: their configuration, and which graph a step gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextmanager
def outside_an_engine(cudagraph_utils: Any) -> Iterator[None]:
    """vLLM's module of graphs, which asks for ranks and a memory pool, without either."""
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = cudagraph_utils.current_platform
    pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else 0
    with (
        mock.patch.object(cudagraph_utils, "get_pp_group", return_value=rank),
        mock.patch.object(cudagraph_utils, "is_global_first_rank", return_value=False),
        mock.patch.object(platform, "get_global_graph_pool", return_value=pool, create=True),
    ):
        yield


def graph_config(max_num_seqs: int, max_num_batched_tokens: int, sizes: list[int], **more: Any) -> Any:
    """sizes: in rows, of the graphs to capture. more: further fields."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size_across_dp=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_multimodal_model=False, is_encoder_decoder=False, use_mla=False, rswa_window=None
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        additional_config={},
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        use_cumem_cudagraph_pool=False,
        **more,
    )
