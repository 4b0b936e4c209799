"""Acceptance of each request and of each workload, in the process that owns the engine client.

Enters: the steps that `peagle.vllm.scheduler` reports on the engine's outputs, and now and then its corrections of the
step times. Leaves: `DraftingStats` of a request, as soon as its last output is there, running totals of each workload,
unfinished and aborted requests included, and the newest corrections. Imports no vLLM.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.vllm.channel import (
    CORRECTIONS_HEADER,
    DEFAULT_WORKLOAD,
    DEPTH_KEY,
    STEPS_HEADER,
    WORKLOAD_KEY,
    decode_steps,
)
from peagle.vllm.stats import DraftingStats, RequestDrafting, StepCounter


@dataclass(slots=True)
class _Tracked:
    request_id: str
    workload: str
    k: Any
    counter: StepCounter = field(default_factory=StepCounter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def finished(self, is_aborted: bool) -> RequestDrafting:
        numbers = self.num_output_tokens, is_aborted, self.num_prompt_tokens
        return RequestDrafting(self.request_id, self.workload, self.k, self.counter.stats(), *numbers)


class DraftingRecorder:
    """Reads the step reports of one engine. Make one for each engine client, in the client's process, and `attach` it.

    It hangs on three methods of the client's output processor, so it sees every sequence in every mode: streamed or
    not, n > 1, ended by a stop string (which only this process notices), cancelled. Not thread-safe: it works, and is
    to be read, on the event loop (or thread) that runs the client.

    Args:
        on_finish: called with each sequence's record as it ends, aborted ones included. It must return quickly and not
            raise: it runs between two outputs of the engine.
        max_records: finished sequences kept for `pop`; the oldest go first.
        max_workloads: names counted apart, `default` not included. A further name takes the place, and ends the counts,
            of the one without a new sequence for longest; while all have live sequences it is counted under `default`.
    """

    def __init__(
        self,
        on_finish: Callable[[RequestDrafting], None] | None = None,
        *,
        max_records: int = 4096,
        max_workloads: int = 256,
    ) -> None:
        self._on_finish = on_finish
        self._max_records = max_records
        self._max_workloads = max_workloads
        self._live: dict[str, _Tracked] = {}
        self._totals: OrderedDict[str, StepCounter] = OrderedDict()  # least recently used first
        self._finished: OrderedDict[str, list[RequestDrafting]] = OrderedDict()
        self.corrections = ""
        """The newest of the scheduler's corrections of its step times, as they travelled; "" where it said none."""

    def attach(self, engine: Any) -> None:
        """Start recording `engine`: an `AsyncLLM`, an `LLMEngine` or an `LLM`, before its first request.

        Raises:
            TypeError: `engine` has no output processor with the methods needed (another vLLM, or no vLLM engine).
            ValueError: a recorder hangs on this engine already.
        """
        processor: Any = getattr(getattr(engine, "llm_engine", engine), "output_processor", None)
        for name in ("add_request", "process_outputs", "abort_requests", "request_states"):
            if not hasattr(processor, name):
                raise TypeError(f"{type(engine).__name__} has no output_processor.{name}: not a vLLM engine client")
        if "process_outputs" in vars(processor):
            raise ValueError("this engine has a DraftingRecorder already")
        add_request, process_outputs = processor.add_request, processor.process_outputs
        abort_requests = processor.abort_requests

        def add_and_track(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = add_request(request, *args, **kwargs)
            if request.request_id in processor.request_states:
                self._track(request)
            return result

        def process_and_record(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._record(engine_core_outputs)
            result = process_outputs(engine_core_outputs, *args, **kwargs)
            self._close((output.request_id for output in engine_core_outputs), processor.request_states, False)
            return result

        def abort_and_close(*args: Any, **kwargs: Any) -> list[str]:
            aborted: list[str] = abort_requests(*args, **kwargs)
            self._close(aborted, processor.request_states, True)
            return aborted

        processor.add_request = add_and_track
        processor.process_outputs = process_and_record
        processor.abort_requests = abort_and_close

    def pop(self, response_id: str) -> RequestDrafting | None:
        """The record of a finished request, once; its sequences (n > 1, several prompts) summed.

        Args:
            response_id: the `id` of the OpenAI response (`chatcmpl-...`, `cmpl-...`), or the id given to
                `AsyncLLM.generate`. The record is there when the last output of the request is.

        Returns:
            None for an unknown id: not finished, popped before, or older than `max_records` records.
        """
        records = self._finished.pop(response_id, [])
        # The completions API numbers its prompts: the engine knows response "cmpl-x" as "cmpl-x-0", "cmpl-x-1", ...
        index = 0
        while numbered := self._finished.pop(f"{response_id}-{index}", None):
            records += numbered
            index += 1
        if not records:
            return None
        return RequestDrafting(
            request_id=response_id,
            workload=records[0].workload,
            k=records[0].k,
            stats=sum((record.stats for record in records), DraftingStats()),
            num_output_tokens=sum(record.num_output_tokens for record in records),
            is_aborted=any(record.is_aborted for record in records),
            num_prompt_tokens=sum(record.num_prompt_tokens for record in records),
        )

    def totals(self) -> Mapping[str, DraftingStats]:
        """Counts of each workload since `attach`, step by step, whatever became of the requests.

        Not in it: a step still running in the engine when its request was aborted.
        """
        return {workload: counter.stats() for workload, counter in self._totals.items()}

    def running(self) -> tuple[dict[str, int], float]:
        """Sequences in the engine, waiting ones included, by workload; and their mean context in tokens."""
        counts: dict[str, int] = {}
        num_tokens = 0
        for tracked in self._live.values():
            counts[tracked.workload] = counts.get(tracked.workload, 0) + 1
            num_tokens += tracked.num_prompt_tokens + tracked.num_output_tokens
        return counts, num_tokens / len(self._live) if self._live else 0.0

    def _track(self, request: Any) -> None:
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        workload = str(extra_args.get(WORKLOAD_KEY) or DEFAULT_WORKLOAD)
        if workload not in self._totals and workload != DEFAULT_WORKLOAD and not self._make_room():
            workload = DEFAULT_WORKLOAD
        self._totals.setdefault(workload, StepCounter())
        self._totals.move_to_end(workload)
        # A later part of a streamed prompt comes under the same id and continues its counts.
        self._live.setdefault(
            request.request_id,
            _Tracked(
                request.external_req_id or request.request_id,
                workload,
                extra_args.get(DEPTH_KEY),
                num_prompt_tokens=len(request.prompt_token_ids or ()),
            ),
        )

    def _make_room(self) -> bool:
        """Whether there is room for one more workload, after the least recently used without sequences has made it."""
        names = self._totals.keys() - {DEFAULT_WORKLOAD}
        if len(names) < self._max_workloads:
            return True
        idle = names - {tracked.workload for tracked in self._live.values()}
        oldest = next((name for name in self._totals if name in idle), None)
        if oldest is not None:
            del self._totals[oldest]
        return oldest is not None

    def _record(self, engine_core_outputs: Iterable[Any]) -> None:
        for output in engine_core_outputs:
            headers = output.trace_headers or {}
            # They are of the engine: whose output carries them does not matter, nor whether that is still followed.
            self.corrections = headers.get(CORRECTIONS_HEADER, self.corrections)
            tracked = self._live.get(output.request_id)
            if tracked is None:
                continue
            tracked.num_output_tokens += len(output.new_token_ids)
            if report := headers.get(STEPS_HEADER):
                total = self._totals[tracked.workload]
                for step in decode_steps(report):
                    tracked.counter.add(step)
                    total.add(step)

    def _close(self, internal_ids: Iterable[str], still_open: Mapping[str, Any], is_aborted: bool) -> None:
        for internal_id in internal_ids:
            if internal_id in still_open or (tracked := self._live.pop(internal_id, None)) is None:
                continue
            record = tracked.finished(is_aborted)
            self._finished.setdefault(record.request_id, []).append(record)
            while len(self._finished) > self._max_records:
                self._finished.popitem(last=False)
            if self._on_finish is not None:
                self._on_finish(record)
