"""The settings with which vLLM serves a target together with a P-EAGLE head, or an EAGLE-3 head to compare with.

Enters: directories and numbers. Leaves: keyword arguments for `LLM`, `AsyncEngineArgs`, or `engine_kwargs` of
`ray.serve.llm`. Pure: reads the head's config.json, imports no vLLM, starts nothing.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.platforms import current_platform

from peagle.config import LLAMA_NAMES, QWEN_NAMES, DrafterConfig
from peagle.vllm.compat import vllm_version

# ====================================================================================================
# Environment variables with which vLLM's CPU engine is at its speed. Pure: imports no vLLM, changes nothing.
#
# The engine's process must be started with them: they are read while libraries load.

MAX_SMALL_MACHINE_CORES = 4


def cpu_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to `inherited` for an engine on this machine's CPU; what it has already, it keeps.

    Intel's OpenMP runtime comes before any other (vLLM warns that speculation is slow without it); the KV cache gets a
    size of its own (GiB); and where there are few cores all of them compute: vLLM alone keeps one free for processes
    that mostly wait. Engine processes are spawned, so that the first of these takes effect.
    """
    found = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= MAX_SMALL_MACHINE_CORES:
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
    added = {name: value for name, value in found.items() if name not in inherited}
    preload = openmp_preload(inherited.get("LD_PRELOAD", ""))
    if preload != inherited.get("LD_PRELOAD", ""):
        added["LD_PRELOAD"] = preload
    return added


def openmp_preload(preload: str) -> str:
    """The value of LD_PRELOAD with Intel's OpenMP runtime first, where it is installed, and no other beside it.

    vLLM ends its start when GNU's is there too, and itself adds that one to the environment of a process that makes an
    engine's configuration without Intel's.
    """
    library = intel_openmp()
    if library is None:
        return preload
    others = [one for one in re.split("[: ]+", preload) if one and "libgomp" not in one]
    return ":".join(others if any("libiomp5" in one for one in others) else [str(library), *others])


def intel_openmp() -> Path | None:
    """Its library, where the package `intel-openmp` is installed."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    library = next((file for file in files if file.name == "libiomp5.so"), None)
    path = None if library is None else Path(str(library.locate())).resolve()
    return path if path is not None and path.is_file() else None


# ====================================================================================================
# What kind of engine a vLLM configuration makes, as far as the time of its steps depends on it.
#
# Enters: vLLM's `VllmConfig`. Leaves: plain values: conditions that a table of step times is measured under and checked
# against, and the sizes of the captured CUDA graphs. Models are named by their shape, not by their path: a path says
# nothing on another machine, and weights do not change the time of a step.

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


# ====================================================================================================
# The settings with which vLLM serves a target together with a P-EAGLE head, or an EAGLE-3 head to compare with.
#
# Enters: directories and numbers. Leaves: keyword arguments for `LLM`, `AsyncEngineArgs`, or `engine_kwargs` of
# `ray.serve.llm`. Pure: reads the head's config.json, imports no vLLM, starts nothing.

SYNC_SCHEDULER = "peagle.vllm.scheduler.PerRequestDepthScheduler"
ASYNC_SCHEDULER = "peagle.vllm.scheduler.PerRequestDepthAsyncScheduler"
CPU_WORKER = "peagle.vllm.workers.CPUWorker"
GRAPH_WORKER = "peagle.vllm.graph_worker.GraphWorker"

REMOTE_CPU_WORKER = "peagle.vllm.workers.RemoteCPUWorker"
REMOTE_GPU_WORKER = "peagle.vllm.workers.RemoteGPUWorker"

REMOTE_KEY = "peagle_remote"
"""Key of vLLM's `additional_config` under which the remote workers find sizes, layers and settings. It is part of the
key of vLLM's compile cache, so no address of a drafter is in it."""

GRAPHS_KEY = "peagle_graphs"
"""Key of vLLM's `additional_config` under which `GRAPH_WORKER` finds its settings."""

MAX_GRAPH_PADDING_TOKENS = 8

VLLM_GRAPH_TOKENS, MAX_GRAPH_TOKENS = 512, 2048
"""Largest CUDA graph in tokens: vLLM's own limit, and the most with `full_graph_depths`. 128 requests reach vLLM's at
K = 3; beyond it a step of Qwen3-Coder-30B-A3B's shape at K = 7 took 60 ms, on a graph 30 (H200, vLLM 0.26). Twice the
largest decode batch is covered, because under load a step often has a prompt beside it, which no full graph takes."""

CAPTURE_KEYS = frozenset({"max_cudagraph_capture_size", "cudagraph_capture_sizes"})

OWNED_ENGINE_KEYS: Mapping[str, str] = {
    "model": "give the target directory",
    "dtype": "give dtype",
    "speculative_config": "give the head and max_draft_tokens",
    "scheduler_cls": "per-request depth needs its own scheduler",
    "async_scheduling": "give async_scheduling, which also picks the scheduler",
    "worker_cls": "give on_cpu and full_graph_depths, which pick the worker",
}
"""Engine settings that `engine_kwargs` decides, with what to use instead."""


@dataclasses.dataclass(frozen=True)
class RemoteSettings:
    """How long an engine waits for drafts of another process. Addresses come later, by `set_drafters` of its worker.

    A step is given up after three times what a pass takes on average, but not before `min_deadline_s` and no later
    than `max_deadline_s`; it then goes on without drafts.

    Raises:
        ValueError: a deadline that is not above 0, or the two the wrong way round.
    """

    min_deadline_s: float = 0.05
    max_deadline_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("min_deadline_s", "max_deadline_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
        if self.min_deadline_s > self.max_deadline_s:
            raise ValueError(f"min_deadline_s = {self.min_deadline_s} is above max_deadline_s = {self.max_deadline_s}")


def engine_kwargs(
    target_dir: str | Path | None,
    head_dir: str | Path | None,
    *,
    max_draft_tokens: int | None = None,
    parallel_drafting: bool | None = None,
    dtype: str = "auto",
    async_scheduling: bool,
    on_cpu: bool,
    full_graph_depths: Sequence[int] | None = None,
    max_graph_padding_tokens: int | None = None,
    remote: RemoteSettings | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's `LLM` or `AsyncEngineArgs`.

    Args:
        target_dir: checkpoint of the target; None leaves `model` out (`ray.serve.llm` sets it from its own setting).
        head_dir: prepared head in vLLM's format; None means no speculation.
        max_draft_tokens: K_max, at least 1; None takes the depth that the head was trained for (`num_depths`).
        parallel_drafting: all drafts in one pass (P-EAGLE) or one after another (EAGLE-3); None takes what the head was
            trained for, one pass if it has a mask token.
        dtype: of target and drafter. On a CPU without bf16 arithmetic: "float32".
        async_scheduling: whether vLLM plans a step ahead. False on a CPU, where vLLM does not support it.
        on_cpu: whether the engine runs on a CPU, with our worker, which repairs sampling there also without a head.
        full_graph_depths: K's in 0..K_max with full CUDA graphs of their own; K_max is added. None: vLLM's, K_max only.
        max_graph_padding_tokens: tokens added at most to a batch of unequal K, or of a K without graphs, to run it on a
            full graph. None: `MAX_GRAPH_PADDING_TOKENS`, with full_graph_depths.
        remote: the drafter runs in another process: of head_dir only config.json is read. None: in the engine.
        extra: further engine settings, passed on unchanged.

    Raises:
        ValueError: names the setting and what to do: a key in `extra` that is decided here, a head or K_max that does
            not go with the others, asynchronous scheduling or graphs on a CPU, graphs for no K or a wrong one.
    """
    extra = dict(extra or {})
    for key, hint in OWNED_ENGINE_KEYS.items():
        if key in extra:
            raise ValueError(f"engine setting {key!r} is not free: {hint}")
    kwargs: dict[str, Any] = {"dtype": dtype, "async_scheduling": async_scheduling, **extra}
    _check_graphs_apply(full_graph_depths, max_graph_padding_tokens, head_dir, on_cpu)
    if on_cpu:
        if async_scheduling:
            raise ValueError("async_scheduling must be off on a CPU: vLLM runs it on GPUs only")
        kwargs["worker_cls"] = CPU_WORKER
    if target_dir is not None:
        kwargs["model"] = str(target_dir)
    if head_dir is None:
        if max_draft_tokens is not None:
            raise ValueError("max_draft_tokens is set but there is no head: give the head, or leave it out")
        if remote is not None:
            raise ValueError("remote is set but there is no head: give the head that the drafter runs")
        return kwargs
    kwargs["speculative_config"] = _speculative_config(Path(head_dir), max_draft_tokens, parallel_drafting)
    kwargs["scheduler_cls"] = ASYNC_SCHEDULER if async_scheduling else SYNC_SCHEDULER
    if full_graph_depths is not None:
        kwargs |= _graph_settings_engine(kwargs, full_graph_depths, max_graph_padding_tokens)
    if remote is not None:
        kwargs |= _remote_settings(kwargs, Path(head_dir), remote, on_cpu)
    return kwargs


def _remote_settings(kwargs: Mapping[str, Any], head_dir: Path, remote: RemoteSettings, on_cpu: bool) -> dict[str, Any]:
    """`worker_cls` and `additional_config` of an engine with these other settings and a remote drafter."""
    if not kwargs["speculative_config"]["parallel_drafting"]:
        raise ValueError(f"remote is set, but head {head_dir} is an EAGLE-3 head: a remote drafter runs P-EAGLE heads")
    additional_config = dict(kwargs.get("additional_config") or {})
    if REMOTE_KEY in additional_config:
        raise ValueError(f"additional_config[{REMOTE_KEY!r}] is not free: give remote")
    config = DrafterConfig.from_dict(_head_config(head_dir), str(head_dir))
    about = {"hidden_size": config.hidden_size, "aux_layer_ids": list(config.aux_layer_ids)}
    additional_config[REMOTE_KEY] = {**about, **dataclasses.asdict(remote)}
    if not on_cpu:
        additional_config.setdefault(GRAPHS_KEY, {"depths": [], "max_padding_tokens": 0})
    worker = REMOTE_CPU_WORKER if on_cpu else REMOTE_GPU_WORKER
    return {"worker_cls": worker, "additional_config": additional_config}


def _speculative_config(head_dir: Path, max_draft_tokens: int | None, parallel_drafting: bool | None) -> dict[str, Any]:
    """vLLM's setting of the same name for this head."""
    config = _head_config(head_dir)
    parallel = config.get("pard_token", config.get("ptd_token_id")) is not None
    if parallel_drafting is not None and parallel_drafting != parallel:
        kind = "has a mask token (P-EAGLE)" if parallel else "has no mask token (EAGLE-3)"
        raise ValueError(f"parallel_drafting is {parallel_drafting}, but head {head_dir} {kind}: write {parallel}")
    return {
        "method": "eagle3",
        "model": str(head_dir),
        "num_speculative_tokens": _max_draft_tokens(head_dir, config.get("num_depths"), max_draft_tokens),
        "parallel_drafting": parallel,
    }


def _check_graphs_apply(
    depths: Sequence[int] | None, max_padding_tokens: int | None, head_dir: str | Path | None, on_cpu: bool
) -> None:
    if depths is None:
        if max_padding_tokens is not None:
            raise ValueError("max_graph_padding_tokens is set without full_graph_depths: set that too, or neither")
        return
    if on_cpu:
        raise ValueError("full_graph_depths is set, but a CPU has no CUDA graphs: leave it out")
    if head_dir is None:
        raise ValueError("full_graph_depths is set but there is no head: vLLM has full graphs for steps without drafts")


def _graph_settings_engine(
    kwargs: Mapping[str, Any], depths: Sequence[int], max_padding_tokens: int | None
) -> dict[str, Any]:
    """`worker_cls` and `additional_config` of an engine with these other settings."""
    additional_config = kwargs.get("additional_config") or {}
    k_max = kwargs["speculative_config"]["num_speculative_tokens"]
    max_padding_tokens = MAX_GRAPH_PADDING_TOKENS if max_padding_tokens is None else max_padding_tokens
    if GRAPHS_KEY in additional_config:
        raise ValueError(f"additional_config[{GRAPHS_KEY!r}] is not free: give full_graph_depths")
    if isinstance(depths, str) or not depths:
        raise ValueError(f"full_graph_depths must list at least one K, such as [3], not {depths!r}")
    for depth in depths:
        if type(depth) is not int or not 0 <= depth <= k_max:
            raise ValueError(f"full_graph_depths: {depth!r} is not an integer in 0..{k_max} (K_max)")
    if type(max_padding_tokens) is not int or max_padding_tokens < 0:
        raise ValueError(f"max_graph_padding_tokens must be an integer of at least 0, not {max_padding_tokens!r}")
    graphs = {"depths": sorted({*depths, k_max}), "max_padding_tokens": max_padding_tokens}
    found: dict[str, Any] = {"worker_cls": GRAPH_WORKER}
    found["additional_config"] = {**additional_config, GRAPHS_KEY: graphs}
    if not CAPTURE_KEYS & {*kwargs, *(kwargs.get("compilation_config") or {})}:
        found["cudagraph_capture_sizes"] = capture_sizes_engine(
            2 * kwargs.get("max_num_seqs", MAX_GRAPH_TOKENS) * (1 + k_max)
        )
    return found


def capture_sizes_engine(num_tokens: int) -> list[int]:
    """Sizes of graphs for batches of up to `num_tokens`: vLLM's list up to its limit, then eight to a doubling."""
    most = min(max(num_tokens, VLLM_GRAPH_TOKENS), MAX_GRAPH_TOKENS)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, VLLM_GRAPH_TOKENS, 16)]
    start = VLLM_GRAPH_TOKENS
    while start <= most:
        sizes += range(start, 2 * start, start // 8)
        start *= 2
    return [size for size in sizes if size <= most]


def _head_config(head_dir: Path) -> dict[str, Any]:
    """The head's config.json."""
    try:
        config = json.loads((head_dir / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"head {head_dir}: config.json cannot be read ({error}); give a head directory") from error
    known = {*LLAMA_NAMES, *QWEN_NAMES}
    if not isinstance(config, dict) or known.isdisjoint(config.get("architectures") or []):
        raise ValueError(
            f"head {head_dir}: config.json names no architecture of a drafter ({', '.join(sorted(known))})"
        )
    return config


def _max_draft_tokens(head_dir: str | Path, num_depths: int | None, wanted: int | None) -> int:
    """K_max: `wanted`, checked against the head, or the head's own."""
    if wanted is None:
        if num_depths is None:
            raise ValueError(
                f"head {head_dir}: config.json does not say its depth ('num_depths'); set max_draft_tokens"
            )
        return int(num_depths)
    if type(wanted) is not int or wanted < 1:
        raise ValueError(
            f"max_draft_tokens must be an integer of at least 1, not {wanted!r}; for no drafts leave the head out"
        )
    if num_depths is not None and wanted > num_depths:
        raise ValueError(
            f"max_draft_tokens is {wanted}, but head {head_dir} was trained for {num_depths}: use at most {num_depths}"
        )
    return wanted
