"""The settings with which vLLM serves a target together with a P-EAGLE head, or an EAGLE-3 head to compare with.

Enters: directories and numbers. Leaves: keyword arguments for `LLM`, `AsyncEngineArgs`, or `engine_kwargs` of
`ray.serve.llm`. Pure: reads the head's config.json, imports no vLLM, starts nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.config import LLAMA_NAMES, QWEN_NAMES

SYNC_SCHEDULER = "peagle.vllm.scheduler.PerRequestDepthScheduler"
ASYNC_SCHEDULER = "peagle.vllm.scheduler.PerRequestDepthAsyncScheduler"
CPU_WORKER = "peagle.vllm.cpu_worker.CPUWorker"

OWNED_ENGINE_KEYS: Mapping[str, str] = {
    "model": "give the target directory",
    "dtype": "give dtype",
    "speculative_config": "give the head and max_draft_tokens",
    "scheduler_cls": "per-request depth needs its own scheduler",
    "async_scheduling": "give async_scheduling, which also picks the scheduler",
    "worker_cls": "give on_cpu, which picks the worker",
}
"""Engine settings that `engine_kwargs` decides, with what to use instead."""


def engine_kwargs(
    target_dir: str | Path | None,
    head_dir: str | Path | None,
    *,
    max_draft_tokens: int | None = None,
    parallel_drafting: bool | None = None,
    dtype: str = "auto",
    async_scheduling: bool,
    on_cpu: bool,
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
        on_cpu: whether the engine runs on a CPU. It then gets our worker, which repairs sampling there, also without a
            head.
        extra: further engine settings, passed on unchanged.

    Raises:
        ValueError: names the setting and what to do: a key in `extra` that is decided here, a head directory without a
            readable config.json of a P-EAGLE or EAGLE-3 head, a way of drafting that is not the head's, a K_max outside
            1..`num_depths`, asynchronous scheduling on a CPU.
    """
    extra = dict(extra or {})
    for key, hint in OWNED_ENGINE_KEYS.items():
        if key in extra:
            raise ValueError(f"engine setting {key!r} is not free: {hint}")
    kwargs: dict[str, Any] = {"dtype": dtype, "async_scheduling": async_scheduling, **extra}
    if on_cpu:
        if async_scheduling:
            raise ValueError("async_scheduling must be off on a CPU: vLLM runs it on GPUs only")
        kwargs["worker_cls"] = CPU_WORKER
    if target_dir is not None:
        kwargs["model"] = str(target_dir)
    if head_dir is None:
        if max_draft_tokens is not None:
            raise ValueError("max_draft_tokens is set but there is no head: give the head, or leave it out")
        return kwargs
    config = _head_config(Path(head_dir))
    parallel = config.get("pard_token", config.get("ptd_token_id")) is not None
    if parallel_drafting is not None and parallel_drafting != parallel:
        kind = "has a mask token (P-EAGLE)" if parallel else "has no mask token (EAGLE-3)"
        raise ValueError(f"parallel_drafting is {parallel_drafting}, but head {head_dir} {kind}: write {parallel}")
    kwargs["speculative_config"] = {
        "method": "eagle3",
        "model": str(head_dir),
        "num_speculative_tokens": _max_draft_tokens(head_dir, config.get("num_depths"), max_draft_tokens),
        "parallel_drafting": parallel,
    }
    kwargs["scheduler_cls"] = ASYNC_SCHEDULER if async_scheduling else SYNC_SCHEDULER
    return kwargs


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
