"""What kind of engine a vLLM configuration makes, as far as the time of its steps depends on it.

Enters: vLLM's `VllmConfig`. Leaves: plain values: conditions that a table of step times is measured under and checked
against, and the sizes of the captured CUDA graphs. Models are named by their shape, not by their path: a path says
nothing on another machine, and weights do not change the time of a step.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.platforms import current_platform

from peagle.vllm.compat import vllm_version
from peagle.vllm.engine import GRAPHS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MODEL_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "draft_vocab_size",
)
CPU = "cpu"


def engine_conditions(config: "VllmConfig") -> dict[str, Any]:
    """The conditions that `cluster.step_time.StepTimes.check_fits` compares.

    To be read where the engine runs, once its workers are up: until then vLLM may still lower the graph mode.
    """
    speculative = config.speculative_config
    head = None
    if speculative is not None:
        way = "in one pass" if getattr(speculative, "parallel_drafting", False) else "one after another"
        head = f"{_shape(speculative.draft_model_config)}, {way}"
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    quantization = config.model_config.quantization
    compilation = config.compilation_config
    return {
        "gpu": CPU if current_platform.is_cpu() else current_platform.get_device_name(),
        "model": _shape(config.model_config),
        "head": head,
        "dtype": f"{dtype}, {quantization}" if quantization else dtype,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "vllm": vllm_version,
        "max_draft_tokens": config.num_speculative_tokens,
        "full_graph_depths": full_graph_depths(config),
        "cudagraph_mode": _graph_mode(config).name,
        "compile": getattr(compilation.mode, "name", str(compilation.mode)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }


def full_graph_depths(config: "VllmConfig") -> list[int]:
    """Depths K with full CUDA graphs of their own: K_max and the tiers of `peagle.vllm.graphs`, or none at all."""
    mode = _graph_mode(config)
    if mode.decode_mode() != CUDAGraphMode.FULL or not mode.separate_routine():
        return []
    return sorted({*_graph_settings(config).get("depths", ()), config.num_speculative_tokens})


def graph_padding_tokens(config: "VllmConfig") -> int:
    """Tokens that the engine adds at most to run a batch on a full graph; 0 without tiers."""
    return int(_graph_settings(config).get("max_padding_tokens", 0))


def capture_sizes(config: "VllmConfig", raw: Sequence[int], mode_name: str) -> dict[int | None, list[int]]:
    """Captured graph sizes in tokens, of ragged batches (None) and of each full depth.

    Args:
        config: of an engine that is up.
        raw: its `cudagraph_capture_sizes` before it was: vLLM's worker rounds the list to whole requests of 1 + K_max.
        mode_name: the graph mode that vLLM settled on, `engine_conditions(...)["cudagraph_mode"]`.
    """
    mode = CUDAGraphMode[mode_name]
    if mode == CUDAGraphMode.NONE or not raw:
        return {}
    query_len, parallel = 1 + config.num_speculative_tokens, config.parallel_config
    rounded, largest = list(raw), max(raw)
    if mode.decode_mode() == CUDAGraphMode.FULL and query_len > 1:
        passes = config.compilation_config.pass_config
        # vLLM's own rounding, on a copy of the three fields that it touches.
        copy: Any = SimpleNamespace(
            cudagraph_capture_sizes=list(raw), max_cudagraph_capture_size=largest, pass_config=passes
        )
        CompilationConfig.adjust_cudagraph_sizes_for_spec_decode(copy, query_len, parallel.tensor_parallel_size)
        rounded, largest = copy.cudagraph_capture_sizes, copy.max_cudagraph_capture_size
    sizes: dict[int | None, list[int]] = {}
    if mode.mixed_mode() != CUDAGraphMode.NONE:
        sizes[None] = rounded
    if mode.decode_mode() != CUDAGraphMode.FULL or not mode.separate_routine():
        return sizes
    max_requests = config.scheduler_config.max_num_seqs
    tiers = _graph_settings(config).get("depths", ())
    for depth in sorted({*tiers, config.num_speculative_tokens}):
        if tiers:
            from peagle.vllm.graphs import request_counts

            counts = request_counts(1 + depth, max_requests, largest)
            sizes[depth] = [count * (1 + depth) for count in counts]
        else:
            sizes[depth] = [size for size in rounded if query_len <= size <= max_requests * query_len]
    return sizes


def _graph_mode(config: "VllmConfig") -> CUDAGraphMode:
    mode = config.compilation_config.cudagraph_mode
    return CUDAGraphMode.NONE if mode is None or current_platform.is_cpu() else mode


def _graph_settings(config: "VllmConfig") -> dict[str, Any]:
    additional = config.additional_config
    return dict(additional.get(GRAPHS_KEY) or {}) if isinstance(additional, dict) else {}


def _shape(model_config: Any) -> str:
    """`LlamaForCausalLM(num_hidden_layers=30, hidden_size=576, ...)`."""
    config = model_config.hf_text_config
    fields = ((name, getattr(config, name, None)) for name in _MODEL_FIELDS)
    said = ", ".join(f"{name}={value}" for name, value in fields if isinstance(value, int))
    return f"{', '.join(model_config.architectures)}({said})"
