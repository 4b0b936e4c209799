"""Runs real vLLM engines for the tests of `peagle.vllm`: batches in, tokens and counts out."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from peagle.vllm.engine_settings import ASYNC_SCHEDULER, engine_kwargs
from peagle.vllm.grammar_checker import GrammarChecker, GrammarLimits
from peagle.vllm.limits import guard
from peagle.vllm.recorder import DraftingRecorder, RequestDrafting
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, MAX_K_KEY, WORKLOAD_KEY
from tests.support.scripted_drafts import CONTINUATION_KEY

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Job:
    """One request. `abort_after`: cancel it when so many tokens are out. `sampling`: further SamplingParams,
    and `regex` for a grammar."""

    prompt: Sequence[int]
    max_tokens: int
    k: Any = None
    workload: str | None = None
    continuation: Sequence[int] | None = None
    abort_after: int | None = None
    rates: Sequence[float] | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)

    def params(self) -> SamplingParams:
        channel = {MAX_K_KEY: self.k, WORKLOAD_KEY: self.workload, ACCEPTANCE_RATES_KEY: self.rates}
        channel[CONTINUATION_KEY] = self.continuation
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": self.max_tokens}
        sampling |= self.sampling
        kind = RequestOutputKind.FINAL_ONLY if "n" in sampling else RequestOutputKind.CUMULATIVE
        if "regex" in sampling:
            sampling["structured_outputs"] = StructuredOutputsParams(regex=sampling.pop("regex"))
        extra_args = {key: value for key, value in channel.items() if value is not None}
        return SamplingParams(**{"output_kind": kind, **sampling}, extra_args=extra_args or None)


@dataclasses.dataclass(frozen=True)
class Result:
    """What came back. `steps`: (verified, accepted) by vLLM's own count; None without speculation. `num_outputs`: that
    came from the engine's process."""

    tokens: list[list[int]]
    texts: list[str]
    finish_reasons: list[str | None]
    steps: list[tuple[int, int]] | None
    drafting: RequestDrafting | None
    num_outputs: int


class _Preemptions(StatLoggerBase):
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.num_preempted = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None:
            self.num_preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


class RunningEngine:
    """An `AsyncLLM` with a `DraftingRecorder`, driven from synchronous tests on its own event loop. It is gone after
    its `with`, so that the next one has the machine to itself."""

    def __init__(self, kwargs: dict[str, Any], is_async: bool = False) -> None:
        arguments = dict(kwargs)
        if "speculative_config" in arguments:
            arguments["per_request_spec_decode_metrics"] = "detailed"
        config = AsyncEngineArgs(**arguments).create_engine_config()
        # On a CPU vLLM turns asynchronous scheduling off as not worth it. It works there all the same.
        self.is_async = is_async
        if is_async:
            config.scheduler_config.async_scheduling = True
            config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
        self._loop = asyncio.new_event_loop()
        self._num_requests = 0
        self._preemptions: list[_Preemptions] = []
        self._num_outputs: Counter[str] = Counter()  # by request
        self.max_draft_tokens: int = config.num_speculative_tokens
        self.recorder = DraftingRecorder()
        self._client: AsyncLLM = self._run(self._start(config))

    async def _start(self, config: Any) -> AsyncLLM:
        def make_logger(vllm_config: Any, engine_index: int = 0) -> _Preemptions:
            self._preemptions.append(_Preemptions(vllm_config, engine_index))
            return self._preemptions[-1]

        client = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=[make_logger])
        self.recorder.attach(client)
        process_outputs, states = client.output_processor.process_outputs, client.output_processor.request_states

        def process_and_count(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            known = [states[one.request_id] for one in outputs if one.request_id in states]
            self._num_outputs.update(state.external_req_id for state in known)
            return process_outputs(outputs, *args, **kwargs)

        client.output_processor.process_outputs = process_and_count  # type: ignore[method-assign]
        guard(client, GrammarChecker(config, GrammarLimits()))
        return client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout=300))

    @property
    def num_preempted(self) -> int:
        return sum(logger.num_preempted for logger in self._preemptions)

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """All of `jobs` at once, results in their order."""

        async def gather() -> list[Result]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(job)) for job in jobs]
            return [task.result() for task in tasks]

        return self._run(gather())

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of the workers, or of their `worker_extension_cls`, returns in each."""
        return self._run(self._client.collective_rpc(method, args=args))

    async def _one(self, job: Job) -> Result:
        self._num_requests += 1
        request_id = f"test-{self._num_requests}"
        output = None
        async for output in self._client.generate(
            TokensPrompt(prompt_token_ids=list(job.prompt)), job.params(), request_id
        ):
            if job.abort_after is not None and len(output.outputs[0].token_ids) >= job.abort_after:
                await self._client.abort(request_id)
                break
        assert output is not None
        metrics = getattr(output.outputs[0], "spec_decode_metrics", None)
        return Result(
            tokens=[list(choice.token_ids) for choice in output.outputs],
            texts=[choice.text for choice in output.outputs],
            finish_reasons=[choice.finish_reason for choice in output.outputs],
            steps=list(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True)) if metrics else None,
            drafting=self.recorder.pop(request_id),
            num_outputs=self._num_outputs.pop(request_id, 0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.shutdown()
        for task in (pending := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()


def float32_kwargs(
    target_dir: Path, drafter_dir: Path | None, settings: dict[str, Any], k_max: int | None = None, **more: Any
) -> dict[str, Any]:
    """`engine_kwargs` of a target with a drafter or without, in float32."""
    kinds = {"dtype": "float32", "on_cpu": current_platform.is_cpu()}
    return engine_kwargs(target_dir, drafter_dir, max_draft_tokens=k_max, extra=settings, **kinds, **more)
