"""What CUDA graphs of vLLM's V2 runner read of its configuration, without an engine."""

from types import SimpleNamespace
from typing import Any


def graph_config(max_num_seqs: int, max_num_batched_tokens: int, sizes: list[int], **more: Any) -> Any:
    """sizes: in rows, of the graphs to capture. more: further fields."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_multimodal_model=False, is_encoder_decoder=False, use_mla=False, rswa_window=None
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        additional_config={},
        speculative_config=None,
        kv_transfer_config=None,
        use_cumem_cudagraph_pool=False,
        **more,
    )
