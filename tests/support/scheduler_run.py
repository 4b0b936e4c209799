"""Drives the product's schedulers over vLLM's own, step by step, with numbers in place of a worker."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from peagle.vllm.engine_settings import engine_kwargs
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, MAX_K_KEY
from peagle.vllm.scheduler import AsyncDraftingScheduler, DraftingScheduler
from peagle.vllm.step_notes import STEPS_HEADER, SchedulerPlan, read_plan, write_num_ready

BLOCK_SIZE, NUM_BLOCKS = 16, 1000
TOKEN = 5
"""The token of all prompts, drafts and answers."""
ANY_TEXT: Any = SimpleNamespace(
    accept_tokens=lambda *_: True, validate_tokens=lambda tokens: tokens, is_terminated=lambda: False
)
"""A grammar that rules nothing out."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A scheduled step: vLLM's output, and by request its rows and its planned drafts."""

    output: Any
    rows: dict[str, int]
    drafts: dict[str, int]

    @property
    def plan(self) -> SchedulerPlan:
        return read_plan(self.output)


class SchedulerRun:
    """A scheduler of an engine with `config`, whose requests get tokens by `finish`."""

    def __init__(self, config: Any, *, is_async: bool) -> None:
        config.scheduler_config.async_scheduling = is_async
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        kind = AsyncDraftingScheduler if is_async else DraftingScheduler
        self.scheduler: Any = kind(config, cache, StructuredOutputManager(config), BLOCK_SIZE, log_stats=True)
        self._is_async = is_async
        self.stats: list[Any] = []
        """vLLM's own counts of drafts, of each step that has them."""

    def add(self, name: str, k: Any = None, *, prompt: int = 3, has_grammar: bool = False, **more: Any) -> None:
        """A new request. more: fields of SamplingParams, and `rates`."""
        channel = {MAX_K_KEY: k, ACCEPTANCE_RATES_KEY: more.pop("rates", None)}
        params = SamplingParams(
            **{"max_tokens": 900, "temperature": 0.0, "output_kind": RequestOutputKind.DELTA, **more},
            structured_outputs=StructuredOutputsParams(regex="a*") if has_grammar else None,
            extra_args={key: value for key, value in channel.items() if value is not None},
        )
        request = Request(name, [TOKEN] * prompt, params, None)
        if has_grammar:
            request.structured_output_request.grammar = ANY_TEXT  # type: ignore[union-attr]
        self.scheduler.add_request(request)

    def abort(self, name: str, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        self.scheduler.finish_requests(name, status)

    def schedule(self) -> Step:
        output = self.scheduler.schedule()
        drafts = output.scheduled_spec_decode_tokens
        rows = dict(output.num_scheduled_tokens)
        return Step(output, rows, {name: len(drafts.get(name, ())) for name in rows})

    def finish(
        self, step: Step, accepted: Mapping[str, int] | None = None, num_ready: list[int] | None = None
    ) -> dict[str, EngineCoreOutput]:
        """Hand in the step's result: accepted drafts of each request, at most those planned, and those that were ready.

        Returns:
            The outputs that go out, by request.
        """
        names, sampled = list(step.rows), []
        for name in names:
            request = self.scheduler.requests[name]
            is_chunk = request.num_computed_tokens < request.num_prompt_tokens
            num_accepted = min((accepted or {}).get(name, 0), step.drafts[name])
            sampled.append([] if is_chunk else [TOKEN] * (1 + num_accepted))
        runner_output = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, sampled)
        if num_ready is not None:
            write_num_ready(runner_output, num_ready)
        found = self.scheduler.update_from_output(step.output, runner_output)
        if not self._is_async:
            k_max = self.scheduler.num_spec_tokens
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[TOKEN] * k_max for _ in names]))
        for client in found.values():
            if client.scheduler_stats is not None and client.scheduler_stats.spec_decoding_stats is not None:
                self.stats.append(client.scheduler_stats.spec_decoding_stats)
        return {output.request_id: output for client in found.values() for output in client.outputs}

    def step(self, accepted: Mapping[str, int] | None = None, num_ready: list[int] | None = None) -> Step:
        found = self.schedule()
        self.finish(found, accepted, num_ready)
        return found


def steps_of(output: EngineCoreOutput) -> str:
    """The verified steps that an output reports."""
    return (output.trace_headers or {}).get(STEPS_HEADER, "")


def scheduler_config(target_dir: Path, head_dir: Path, k_max: int) -> Any:
    """The configuration of an engine on a CPU."""
    settings = {"max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": False}
    kwargs = engine_kwargs(target_dir, head_dir, max_draft_tokens=k_max, dtype="float32", on_cpu=True, extra=settings)
    return EngineArgs(**kwargs).create_engine_config()
