"""Everything that depends on vLLM's version: the tested version, and vLLM's private names that this package uses.

Each group of names is checked when an engine starts. If vLLM has moved one, the start fails with one line that names
what is missing. Another version than the tested one is refused.
"""

import importlib
import inspect
import logging
import os
import re
import typing
from collections.abc import Mapping, Sequence
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

PATCH_POINTS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "scheduler": {
        "vllm.v1.core.sched.scheduler:Scheduler": (
            "schedule",
            "_update_after_schedule(scheduler_output)",
            "update_draft_token_ids(draft_token_ids)",
            "update_from_output(scheduler_output, model_runner_output)",
            "make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens, num_accepted_tokens, "
            "num_invalid_spec_tokens, request_id)",
            "finish_requests(request_ids, finished_status)",
            "add_request(request)",
        ),
        "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids", "trace_headers", "finish_reason"),
        "vllm.sampling_params:SamplingParams": ("output_kind", "stop", "stream_interval"),
        "vllm.v1.structured_output:StructuredOutputManager": ("grammar_init(request)", "_create_grammar(request)"),
    },
    "client": {
        "vllm.v1.engine.async_llm:AsyncLLM": ("generate(prompt, sampling_params, request_id)", "shutdown"),
        "vllm.sampling_params:SamplingParams": (
            "verify(model_config, speculative_config, structured_outputs_config, tokenizer)",
        ),
        "vllm.v1.structured_output:StructuredOutputManager": ("grammar_init(request)",),
        "vllm.v1.engine.input_processor:InputProcessor": (
            "__init__(vllm_config, renderer)",
            "process_inputs",
            "_validate_params(params, supported_tasks)",
            "_validate_model_input(prompt_input, prompt_type)",
        ),
        "vllm.v1.engine.output_processor:OutputProcessor": (
            "add_request(request)",
            "process_outputs(engine_core_outputs)",
            "abort_requests",
        ),
        "vllm.renderers.chat_utils:MM_PARSER_MAP": (),
        "vllm.renderers.base:BaseRenderer": (
            "render_chat(conversations, chat_params)",
            "render_chat_async(conversations, chat_params)",
            "render_cmpl(prompts)",
            "render_cmpl_async(prompts)",
        ),
    },
    "runner": {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
            "propose_draft_token_ids(scheduler_output, sampled_token_ids, aux_hidden_states, spec_decode_metadata)",
            "take_draft_token_ids",
            "_input_fits_in_drafter(common_attn_metadata)",
            "_copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)",
        ),
        "vllm.v1.spec_decode.eagle:EagleProposer": (
            "__init__(vllm_config, device, runner)",
            "prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)",
            "load_model(target_model)",
            "initialize_attn_backend(kv_cache_config)",
            "initialize_cudagraph_keys(cudagraph_mode)",
            "dummy_run(num_tokens)",
        ),
    },
    "v2 runner": {
        "vllm.config:VllmConfig": ("_get_v2_model_runner_unsupported_features",),
        "vllm.v1.worker.gpu_worker:Worker": (
            "_make_model_runner",
            "load_model",
            "sample_tokens(grammar_output)",
        ),
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
            "load_model",
            "_dummy_run(num_tokens)",
            "initialize_kv_cache(kv_cache_config, is_profiling)",
            "add_requests(scheduler_output)",
            "finish_requests(scheduler_output)",
            "prepare_inputs(scheduler_output, batch_req_state, batch_desc, num_active_loras)",
            "capture_model(profile_only)",
            "main_stream",
            "sample(hidden_states, input_batch, grammar_output) -> 3",
            "sample_tokens(grammar_output)",
        ),
        "vllm.v1.core.sched.output:SchedulerOutput": ("__init__(num_spec_tokens_to_schedule)",),
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": (
            "_init_candidates",
            "capture(create_forward_fn, progress_bar_desc)",
            "dispatch(num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len)",
            "run_fullgraph(desc)",
        ),
        "vllm.v1.worker.gpu.block_table:BlockTables": (
            "__init__(block_sizes)",
            "gather_block_tables(idx_mapping, num_reqs_padded)",
            "get_dummy_block_tables(num_reqs)",
        ),
        "vllm.v1.worker.gpu.attn_utils:build_attn_metadata": (
            "(attn_groups, num_reqs, num_tokens, query_start_loc_gpu, query_start_loc_cpu, max_query_len, "
            "seq_lens, max_seq_len, block_tables, slot_mappings, kv_cache_config, seq_lens_cpu_upper_bound, "
            "for_cudagraph_capture)",
        ),
        "vllm.v1.worker.gpu.input_batch:InputBatch": (
            "__init__(cu_num_logits, expanded_idx_mapping, expanded_local_pos, idx_mapping, idx_mapping_np, "
            "input_ids, is_prefilling_np, logits_indices, max_query_len, num_computed_tokens_np, "
            "num_draft_tokens, num_scheduled_tokens, positions, prefill_len_np, query_start_loc, "
            "query_start_loc_np, req_ids, seq_lens_cpu_upper_bound)",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": (
            "__init__(varlen_decode, ubatch_runner)",
            "capture(model)",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor": (
            "__init__(cg_mode, num_tokens, num_reqs, uniform_token_count, max_query_len)",
        ),
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState": (
            "__init__(vllm_config, model, encoder_cache, device)",
            "prepare_attn(input_batch, cudagraph_mode, for_capture)",
        ),
        "vllm.v1.worker.utils:AttentionGroup": (
            "__init__(kernel_block_size)",
            "get_metadata_builder",
            "update_draft_decode_metadata(attn_metadata)",
        ),
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample": (
            "(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, use_fp64)",
        ),
        "vllm.v1.worker.gpu.sample.sampler:Sampler": (
            "__init__(return_sampling_mask, custom_logits_processors)",
            "apply_sampling_params(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, "
            "expanded_local_pos, seq_lens_upper_bound_np)",
        ),
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler": (
            "__init__(sampler, spec_config, device)",
            "_verify(logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, "
            "expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled) -> 3",
        ),
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:gather_draft_sampled": (
            "(input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos, prefill_len) -> 2",
        ),
        "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator": ("num_query_per_req",),
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": (
            "propose(input_batch, aux_hidden_states, num_sampled, num_rejected, last_sampled, "
            "next_prefill_tokens, dummy_run, num_speculative_tokens)",
            "load_draft_model(target_model, target_attn_layer_names)",
            "set_attn(block_tables)",
        ),
    },
    "clients": {
        "vllm.v1.engine.core_client:launch_core_engines": ("(vllm_config, executor_class, log_stats, addresses)",),
        "vllm.v1.engine.utils:get_engine_zmq_bind_addresses": ("(vllm_config, num_api_servers)",),
        "vllm.v1.engine.async_llm:AsyncLLM": ("__init__(client_addresses, client_count, client_index)",),
        "vllm.entrypoints.launchers.api_server.app_state:init_app_state": (
            "(engine_client, state, args, supported_tasks)",
        ),
    },
    "engine": {
        "vllm.v1.executor.uniproc_executor:UniProcExecutor": (),
        "vllm.entrypoints.launchers.cli_args:FrontendArgs": (),
        "vllm.utils.system_utils:get_mp_context": (),
        "vllm.utils.system_utils:multiprocessing": (),
        "vllm.model_executor.models.registry:_run_in_subprocess": ("(fn)",),
    },
    "cpu engine": {
        "vllm.utils.ompmultiprocessing:OMPProcessManager": ("configure_omp_envs(rank, local_rank)",),
    },
    "cpu runner": {
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner": (
            "_sample(logits, spec_decode_metadata)",
            "_update_states(scheduler_output)",
        ),
        "vllm.v1.sample.logits_processor:MinTokensLogitsProcessor": (
            "apply_with_spec_decode(logits, num_draft_tokens)",
        ),
        "vllm.v1.sample.rejection_sampler:RejectionSampler": (
            "forward(metadata, draft_probs, logits, sampling_metadata)",
        ),
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": ("forward_cpu(logits, generators, k, p)",),
        "vllm.v1.sample.sampler:batched_count_greater_than": (),
    },
}
"""Names of vLLM that are overridden, wrapped or called, by the group that uses them.

"module:name" and its methods, each with the parameters that it must have, and perhaps the number of values that its
annotation says it returns. Without a method's name the signature is that of "module:name" itself.
"""

_SIGNATURE = re.compile(r"(?P<method>\w*)(?:\((?P<parameters>.*)\))?(?: -> (?P<num_returned>\d))?")

ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "scheduler": (
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "num_spec_tokens",
        "requests",
        "running",
        "scheduler_config",
        "structured_output_manager",
        "waiting",
    ),
    "graphs": (
        "_candidates",
        "_capture_descs",
        "_graphs_captured",
        "_max_full_descs_to_capture",
        "cudagraph_mode",
        "decode_query_len",
        "max_num_reqs",
        "use_breakable_cg",
    ),
    "client": ("input_processor", "model_config", "output_processor", "renderer", "vllm_config"),
    "v2 runner": (
        "input_buffers",
        "lora_capture_cases",
        "max_num_reqs",
        "num_speculative_steps",
        "output_copy_stream",
        "req_states",
        "sampler",
        "speculator",
    ),
    "v2 speculator": (
        "arange_np",
        "draft_tokens",
        "max_num_reqs",
        "num_speculative_steps",
    ),
    "clients": ("_api_process_count", "_api_process_rank"),
    "runner": (
        "_draft_prob_req_ids",
        "_draft_probs",
        "_draft_token_ids",
        "discard_request_mask",
        "input_batch",
        "input_ids",
        "num_spec_tokens",
        "optimistic_seq_lens_cpu",
        "query_start_loc",
        "requests",
    ),
}
"""Attributes that are read from an object of vLLM, by the group that uses them."""


class UnsupportedVLLMError(RuntimeError):
    """The installed vLLM is another than the tested one, or lacks a name that this package needs."""


def check(group: str, instance: object = None) -> None:
    """Check that this vLLM has the names of a group of `PATCH_POINTS`, and `instance` those of `ATTRIBUTES`.

    Raises:
        UnsupportedVLLMError: another version, or missing names; one line with all of them.
    """
    check_version(vllm_version)
    missing = [line for path, methods in PATCH_POINTS.get(group, {}).items() for line in missing_methods(path, methods)]
    if instance is not None:
        names = [name for name in ATTRIBUTES.get(group, ()) if not hasattr(instance, name)]
        missing += [f"{type(instance).__name__}.{name}" for name in names]
    if missing:
        raise UnsupportedVLLMError(
            f"vLLM {vllm_version} has no {', '.join(missing)}, which this package needs ({group}); use vLLM "
            f"{TESTED_VERSION}"
        )


def check_version(version: str) -> None:
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


def missing_methods(path: str, signatures: Sequence[str]) -> list[str]:
    """The entries of `signatures` that "module:name" lacks, as text."""
    module, _, name = path.partition(":")
    try:
        owner = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return [path]
    missing = []
    for signature in signatures:
        asked = _SIGNATURE.fullmatch(signature)
        assert asked, signature
        found = getattr(owner, asked["method"], None) if asked["method"] else owner
        where = f"{name}.{asked['method']}()" if asked["method"] else f"{name}()"
        if found is None:
            missing.append(where)
            continue
        present = inspect.signature(found).parameters if callable(found) else {}
        parameters = asked["parameters"].split(", ") if asked["parameters"] else []
        missing += [f"parameter {parameter} of {where}" for parameter in parameters if parameter not in present]
        if num := asked["num_returned"]:
            returned = typing.get_args(inspect.signature(found, eval_str=True).return_annotation)
            if len(returned) != int(num):
                missing.append(f"{num} return values of {where}")
    return missing


def allow_v2() -> None:
    """Let vLLM's configuration choose its V2 model runner for P-EAGLE, if our worker brings the speculator.

    vLLM's configuration refuses P-EAGLE on V2, and each process asks it anew. So the modules of the scheduler and the
    worker call this, and whatever makes the configuration. Engines with another worker are unchanged; a second call
    does nothing.
    """
    original = getattr(VllmConfig, _V2_METHOD, None)
    if original is None or getattr(original, "allows_peagle", False):  # `check` names what is missing
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
