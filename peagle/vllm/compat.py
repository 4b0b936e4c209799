"""Everything that depends on vLLM's version. Written against 0.26 and 0.29; other modules name no version.

The seams used are the same in both: four methods of `Scheduler`, three of `OutputProcessor`, and the attribute paths
below. They are not public, so each is checked when the engine starts: a vLLM that moved one fails there with its name,
rather than serving with a K that nothing obeys.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm import __version__ as vllm_version

SUPPORTED_VERSIONS = ("0.26", "0.29")

SCHEDULER_SEAMS: Mapping[str, Sequence[str]] = {
    "_update_after_schedule": ("scheduler_output",),
    "update_draft_token_ids": ("draft_token_ids",),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "make_spec_decoding_stats": (
        "spec_decoding_stats",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_invalid_spec_tokens",
        "request_id",
    ),
}
"""Methods that `peagle.vllm.scheduler` overrides, with the parameters it relies on."""

PROPOSE_SEAMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "runner": {
        "propose_draft_token_ids": (
            "scheduler_output",
            "sampled_token_ids",
            "aux_hidden_states",
            "spec_decode_metadata",
        ),
        "take_draft_token_ids": (),
        "_input_fits_in_drafter": ("common_attn_metadata",),
        "_copy_valid_sampled_token_count": ("next_token_ids", "valid_sampled_tokens_count"),
    },
    "proposer": {
        "prepare_next_token_ids_padded": (
            "sampled_token_ids",
            "requests",
            "gpu_input_batch",
            "discard_request_mask",
        ),
        "load_model": ("target_model",),
        "initialize_attn_backend": ("kv_cache_config",),
        "initialize_cudagraph_keys": ("cudagraph_mode",),
        "dummy_run": ("num_tokens",),
    },
}
"""What `peagle.vllm.remote` and `peagle.vllm.remote` override or call of vLLM's model runner and of its drafter."""


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM lacks a seam that per-request depth needs."""


class _Scheduled(Protocol):
    """The part of vLLM's `SchedulerOutput` that admission padding touches."""

    scheduled_new_reqs: list[Any]
    scheduled_cached_reqs: Any
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


def check_seams(cls: type, seams: Mapping[str, Sequence[str]]) -> None:
    """Make sure that `cls` has every method in `seams` with the parameters named there.

    Raises:
        UnsupportedVLLMError: names the version, the method and what is missing.
    """
    for name, parameters in seams.items():
        method = getattr(cls, name, None)
        present = inspect.signature(method).parameters if callable(method) else {}
        missing = [parameter for parameter in parameters if parameter not in present]
        if method is None or missing:
            what = f"parameters {missing} of {name}()" if method is not None else f"{name}()"
            raise UnsupportedVLLMError(
                f"vLLM {vllm_version}: {cls.__name__} has no {what}, which per-request draft depth needs; "
                f"supported versions are {', '.join(SUPPORTED_VERSIONS)}"
            )


def drop_admission_padding(scheduled: _Scheduled) -> None:
    """Take back the placeholder drafts that vLLM gives a decode in the step that admits it.

    A request admitted with one token left to compute is widened by vLLM to 1 + K_max rows, so that the step keeps the
    shape of a full CUDA graph. Nothing was drafted for those rows: they cannot be accepted, they exceed the request's
    K, and they would count as rejected drafts. Only requests new or resumed in this step can carry them, and only with
    exactly one true token, so one token is what remains. Blocks reserved for the rows stay with the request as
    look-ahead. Must run before `num_computed_tokens` moves on.
    """
    admitted = [request.req_id for request in scheduled.scheduled_new_reqs]
    admitted.extend(scheduled.scheduled_cached_reqs.resumed_req_ids)
    for request_id in admitted:
        if scheduled.scheduled_spec_decode_tokens.pop(request_id, None):
            scheduled.total_num_scheduled_tokens -= scheduled.num_scheduled_tokens[request_id] - 1
            scheduled.num_scheduled_tokens[request_id] = 1
