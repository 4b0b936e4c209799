"""Engine settings with which vLLM serves a target with a P-EAGLE head, an EAGLE-3 head, or none.

Enters: directories and numbers. Leaves: keyword arguments for `LLM`, `AsyncEngineArgs`, or `engine_kwargs` of
`ray.serve.llm`, and the LD_PRELOAD of an engine on a CPU. Reads the head's config.json; imports no vLLM and starts
nothing.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.config import DrafterConfig, read_head_config

SYNC_SCHEDULER = "peagle.vllm.scheduler.DraftingScheduler"
ASYNC_SCHEDULER = "peagle.vllm.scheduler.AsyncDraftingScheduler"
CPU_WORKER = "peagle.vllm.workers.CPUWorker"
V2_WORKER = "peagle.vllm.v2_worker.V2Worker"
REMOTE_CPU_WORKER = "peagle.vllm.workers.RemoteCPUWorker"
REMOTE_GPU_WORKER = "peagle.vllm.remote_speculator.RemoteV2Worker"

REMOTE_KEY = "peagle_remote"
"""Key of vLLM's `additional_config` with sizes, layers and settings for the remote workers. It is part of the key of
vLLM's compile cache, so it holds no address of a drafter."""

CAPTURE_KEYS = frozenset({"max_cudagraph_capture_size", "cudagraph_capture_sizes"})
MAX_GRAPH_TOKENS = 4096  # of the largest graph; 40 sizes take about 20 s at the start of a 30B target's engine


def engine_kwargs(
    target_dir: str | Path | None,
    head_dir: str | Path | None,
    *,
    method: str = "eagle3",
    max_draft_tokens: int | None = None,
    dtype: str = "auto",
    on_cpu: bool,
    remote_deadline_s: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for vLLM's `LLM` or `AsyncEngineArgs`.

    Args:
        target_dir: checkpoint of the target; None leaves `model` out (`ray.serve.llm` sets it from its own setting).
        head_dir: prepared head in vLLM's format; None, without a `method` of vLLM's own, means no speculation.
        method: as vLLM names it. "eagle3" means P-EAGLE and EAGLE-3 heads. Any other one is vLLM's own: head_dir goes
            to vLLM unread, None if the method has no files.
        max_draft_tokens: K_max, from 1 to the head's `num_depths`, if known. None: `num_depths`; vLLM's own methods
            have no such number.
        dtype: of target and drafter. On a CPU without bf16 arithmetic: "float32".
        on_cpu: the engine runs on a CPU, with our worker also without a head, which repairs sampling there. vLLM has
            asynchronous scheduling on GPUs only.
        remote_deadline_s: the drafter runs in another process, and a step waits so long for drafts. Of head_dir only
            config.json is read; addresses come later, by `set_drafters` of the worker. None: in the engine.
        extra: further engine settings, passed on unchanged but for those that are decided here.

    Raises:
        ValueError: a head or K_max that does not fit (a head may be there only now, so the settings could not tell).
            The message names the setting and what to do.
    """
    extra = extra or {}
    kwargs: dict[str, Any] = {
        **extra,
        "dtype": dtype,
        "async_scheduling": not on_cpu,
        "scheduler_cls": SYNC_SCHEDULER if on_cpu else ASYNC_SCHEDULER,
        "worker_cls": CPU_WORKER if on_cpu else V2_WORKER,
    }
    if target_dir is not None:
        kwargs["model"] = str(target_dir)
    if method != "eagle3":
        if method == "ngram" and not on_cpu:
            method = "ngram_gpu"  # the one that goes with asynchronous scheduling
        model = {} if head_dir is None else {"model": str(head_dir)}
        kwargs["speculative_config"] = {"method": method, **model, "num_speculative_tokens": max_draft_tokens}
    elif head_dir is not None:
        head = read_head_config(head_dir)
        kwargs["speculative_config"] = _speculative_config(head, str(head_dir), max_draft_tokens)
        if remote_deadline_s is not None:
            kwargs |= _remote_engine(kwargs, head, remote_deadline_s, on_cpu)
    has_own_sizes = CAPTURE_KEYS & {*extra, *(extra.get("compilation_config") or {})}
    if "speculative_config" in kwargs and not on_cpu and not has_own_sizes:
        rows = 1 + int(kwargs["speculative_config"]["num_speculative_tokens"])
        kwargs["cudagraph_capture_sizes"] = capture_sizes(rows * int(extra.get("max_num_seqs", MAX_GRAPH_TOKENS)))
    return kwargs


def capture_sizes(num_tokens: int) -> list[int]:
    """Sizes of CUDA graphs, in tokens: up to one and a half times a decoding batch of `num_tokens`, for prompts beside
    it, and at least vLLM's own 512.

    From 64 on a batch is padded by at most an eighth. vLLM's own list ends at 512 tokens on Hopper, 64 requests at
    K = 7; larger steps would be launched kernel by kernel.
    """
    most = min(max(num_tokens + num_tokens // 2, 512), MAX_GRAPH_TOKENS)
    sizes = [1, 2, 4, *range(8, 64, 8)]
    for start in (64, 128, 256, 512, 1024, 2048):
        sizes += range(start, 2 * start, max(16, start // 8))
    return [*(size for size in sizes if size < most), most]


def _speculative_config(head: DrafterConfig, head_dir: str, max_draft_tokens: int | None) -> dict[str, Any]:
    """vLLM's setting of the same name for this head."""
    wanted = head.num_depths if max_draft_tokens is None else max_draft_tokens
    if type(wanted) is not int or not 1 <= wanted <= head.max_depths:
        raise ValueError(
            f"max_draft_tokens must be an integer from 1 to {head.max_depths}, the depths that head {head_dir} was "
            f"trained for, not {wanted!r}; for no drafts leave the head out"
        )
    return {
        "method": "eagle3",
        "model": head_dir,
        "num_speculative_tokens": wanted,
        "parallel_drafting": head.is_parallel,
    }


def _remote_engine(kwargs: Mapping[str, Any], head: DrafterConfig, deadline_s: float, on_cpu: bool) -> dict[str, Any]:
    """`worker_cls` and `additional_config` of an engine with these other settings and a remote drafter."""
    if not head.is_parallel:
        raise ValueError("remote is set, but the head is an EAGLE-3 head: a remote drafter runs P-EAGLE heads")
    layers = list(head.aux_layer_ids)
    about = {"hidden_size": head.hidden_size, "aux_layer_ids": layers, "max_deadline_s": deadline_s}
    return {
        "worker_cls": REMOTE_CPU_WORKER if on_cpu else REMOTE_GPU_WORKER,
        "additional_config": {**(kwargs.get("additional_config") or {}), REMOTE_KEY: about},
    }


# ---- Intel's OpenMP runtime: speculation on a CPU is slow without it


def openmp_preload(preload: str) -> str:
    """The value of LD_PRELOAD with Intel's OpenMP runtime first, if it is installed, and without GNU's.

    vLLM does not start with both. It adds GNU's itself to a process that makes an engine's configuration without
    Intel's.
    """
    library = intel_openmp()
    if library is None:
        return preload
    others = [path for path in re.split("[: ]+", preload) if path and "libgomp" not in path]
    return ":".join(others if any("libiomp5" in path for path in others) else [str(library), *others])


def intel_openmp() -> Path | None:
    """Path of its library; None without the package `intel-openmp`."""
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so")
    return next((path for path in paths if path.is_file()), None)
