"""What depends on vLLM's version: the tested version, and what is changed or read of vLLM in several modules.

An engine of another version than the tested one is refused as it starts. The private names that this package uses are
listed and checked in `tests/unit/vllm/test_vllm_names.py`.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

TESTED_VERSION = "0.32"
UNTESTED_VARIABLE = "PEAGLE_UNTESTED_VLLM"
"""Environment variable: "1" lets another vLLM than `TESTED_VERSION` run."""

_V2_METHOD = "_get_v2_model_runner_unsupported_features"
_V2_REFUSAL = "parallel drafting for EAGLE speculative decoding"

PROMPT_GRAPHS_KEY = "peagle_prompt_graphs"
"""Key of vLLM's `additional_config`: bool, run steps with prompts as one full CUDA graph where possible
(`replays_prompts`). Absent: true."""


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is another than the tested one."""


def check_version(version: str = vllm_version) -> None:
    """Raises UnsupportedVLLMError for another release than `TESTED_VERSION`; where `UNTESTED_VARIABLE` is 1, it is
    logged instead."""
    if is_tested(version):
        return
    if os.environ.get(UNTESTED_VARIABLE) != "1":
        raise UnsupportedVLLMError(
            f"vLLM {version} was not tested with this package, {TESTED_VERSION} was; to try it anyway, set the "
            f"environment variable {UNTESTED_VARIABLE}=1"
        )
    logger.warning("vLLM %s was not tested with this package, %s was", version, TESTED_VERSION)


def is_tested(version: str = vllm_version) -> bool:
    """Whether a vLLM is of the tested release. Code that repeats the order of vLLM's calls runs with that one only."""
    return Version(version).release[:2] == Version(TESTED_VERSION).release[:2]


def allow_v2() -> None:
    """Let vLLM's configuration choose its V2 model runner for P-EAGLE, if our worker brings the speculator.

    vLLM's configuration refuses P-EAGLE on V2, and each process asks it anew. So the modules of the scheduler and the
    worker call this, and whatever makes the configuration. Engines with another worker are unchanged; a second call
    does nothing.
    """
    original = getattr(VllmConfig, _V2_METHOD, None)
    if original is None or getattr(original, "allows_peagle", False):  # of an untested vLLM; or done already
        return

    def unsupported(self: VllmConfig) -> list[str]:
        found: list[str] = original(self)
        worker: Any = self.parallel_config.worker_cls
        if isinstance(worker, str) and worker.startswith("peagle."):
            found = [feature for feature in found if feature != _V2_REFUSAL]
        return found

    unsupported.allows_peagle = True  # type: ignore[attr-defined]
    setattr(VllmConfig, _V2_METHOD, unsupported)


def chat_part_kinds() -> frozenset[str]:
    """Kinds of parts that a chat message's content may have."""
    from vllm.renderers.chat_utils import MM_PARSER_MAP

    return frozenset(MM_PARSER_MAP)


def replays_prompts(config: VllmConfig) -> bool:
    """Whether steps with prompts may run as one full CUDA graph.

    Not if `additional_config` refuses it (`PROMPT_GRAPHS_KEY`), nor where the host acts between the layers or plans
    attention by the prompts of a step: KV transfer, image features, MLA, ranks that share sequences or agree on graphs.
    Raises ValueError if the key is no bool.
    """
    parallel, model, extra = config.parallel_config, config.model_config, config.additional_config
    wanted = extra.get(PROMPT_GRAPHS_KEY, True) if isinstance(extra, Mapping) else True
    if not isinstance(wanted, bool):
        raise ValueError(f"additional_config[{PROMPT_GRAPHS_KEY!r}] must be true or false, not {wanted!r}")
    return (
        wanted
        and config.kv_transfer_config is None
        and parallel.data_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and not model.is_multimodal_model
        and not model.is_encoder_decoder
        and not model.use_mla
        and model.rswa_window is None
    )


def captures_verification(config: VllmConfig) -> bool:
    """Whether verification may run as one full CUDA graph (`peagle.vllm.verification`).

    Not on several GPUs, which gather logits or exchange sampled tokens. Not with LoRA, whose adapters vLLM assigns to
    rows of logits on the host.
    """
    parallel = config.parallel_config
    return (
        is_tested()
        and parallel.tensor_parallel_size == 1
        and parallel.pipeline_parallel_size == 1
        and config.lora_config is None
    )


def name_aux_layers(config: VllmConfig) -> None:
    """Write the layers of a head's auxiliary hidden states to where the V2 runner reads them.

    Many heads name them in `eagle_config` alone, as vLLM's V1 runner reads them. V2 would silently use its default
    layers, which the head was not trained on.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return
    head: Any = speculative.draft_model_config.hf_config
    layer_ids = (getattr(head, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    if layer_ids and not getattr(head, "eagle_aux_hidden_state_layer_ids", None):
        head.eagle_aux_hidden_state_layer_ids = list(layer_ids)


def drop_admission_padding(scheduled: SchedulerOutput) -> None:
    """Remove the placeholder drafts that vLLM adds to a decoding request in the step that admits it.

    vLLM widens a request that is admitted with one token left to compute to 1 + K_max rows, to keep the shape of a full
    CUDA graph. Nothing was drafted for these rows: they cannot be accepted, they exceed the request's K, and they would
    count as rejected. Only requests that are new or resumed in this step have them, beside exactly one token. The
    request keeps the blocks reserved for the rows as look-ahead. Call this before `num_computed_tokens` is advanced.
    """
    admitted = [request.req_id for request in scheduled.scheduled_new_reqs]
    admitted.extend(scheduled.scheduled_cached_reqs.resumed_req_ids)
    for request_id in admitted:
        if scheduled.scheduled_spec_decode_tokens.pop(request_id, None):
            scheduled.total_num_scheduled_tokens -= scheduled.num_scheduled_tokens[request_id] - 1
            scheduled.num_scheduled_tokens[request_id] = 1
