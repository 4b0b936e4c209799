"""vLLM's private names that this package uses: whether the installed vLLM has them.

Engines refuse another release than the tested one (`peagle.vllm.compat`), so a name can be missing only where vLLM is
upgraded: run this module first.
"""

import dis
import importlib
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from types import FunctionType

import pytest

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
        "vllm.renderers:TokenizeParams": ("_text_len_check(tokenizer, text)",),
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
        "vllm.v1.worker.gpu_worker:Worker": ("_make_model_runner", "load_model", "sample_tokens(grammar_output)"),
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
    "cpu engine": {"vllm.utils.ompmultiprocessing:OMPProcessManager": ("configure_omp_envs(rank, local_rank)",)},
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
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "num_spec_tokens",
        "requests",
        "running",
        "scheduler_config",
        "structured_output_manager",
        "waiting",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": (
        "_candidates",
        "_capture_descs",
        "_graphs_captured",
        "_max_full_descs_to_capture",
        "cudagraph_mode",
        "decode_query_len",
        "max_num_reqs",
        "use_breakable_cg",
    ),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "input_processor",
        "model_config",
        "output_processor",
        "renderer",
        "vllm_config",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": (
        "input_buffers",
        "lora_capture_cases",
        "max_num_reqs",
        "num_speculative_steps",
        "output_copy_stream",
        "req_states",
        "sampler",
        "speculator",
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator": (
        "arange_np",
        "draft_tokens",
        "max_num_reqs",
        "num_speculative_steps",
    ),
    "vllm.config:ParallelConfig": ("_api_process_count", "_api_process_rank"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": (
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
"""Attributes that are read from an object of vLLM, by its class."""


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


@pytest.mark.parametrize("group", PATCH_POINTS)
def test_the_installed_vllm_has_every_name(group: str) -> None:
    points = PATCH_POINTS[group].items()
    assert not [line for path, methods in points for line in missing_methods(path, methods)]


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_objects_of_the_installed_vllm_have_every_attribute(path: str) -> None:
    """What a class declares, and what its construction stores."""
    module, _, name = path.partition(":")
    found = set[str]()
    for kind in getattr(importlib.import_module(module), name).__mro__:
        found |= vars(kind).keys() | vars(kind).get("__annotations__", {}).keys()
        if isinstance(init := vars(kind).get("__init__"), FunctionType):
            found |= {line.argval for line in dis.get_instructions(inspect.unwrap(init)) if line.opname == "STORE_ATTR"}
    assert not set(ATTRIBUTES[path]) - found


def test_missing_names_are_told() -> None:
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
    signatures = ["plan_ahead", "update_draft_token_ids(draft_token_ids, colour)", "schedule() -> 2"]
    assert missing_methods(scheduler, signatures) == [
        "Scheduler.plan_ahead()",
        "parameter colour of Scheduler.update_draft_token_ids()",
        "2 return values of Scheduler.schedule()",
    ]
    assert missing_methods("vllm.gone:X", ()) == ["vllm.gone:X"]
