"""Counts of verified drafts, by request and by workload, in the process of an engine's client. Imports no vLLM."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.counts import Counts, WorkloadCounts, counts_since
from cluster.request import DEFAULT_WORKLOAD
from peagle.vllm.request_args import LEARN_KEY, WORKLOAD_KEY, read_extra_args, undraftable_field
from peagle.vllm.step_notes import STEP_LATENCY_HEADER, STEPS_HEADER, counts_of_steps

WHOLE_ANSWERS = ("None", "stop", "length")
"""vLLM's finish reasons, as text, of an answer whose tokens may all be used for training."""


@dataclass(slots=True)
class RequestDrafting:
    """Drafting of a request, summed over its sequences (n > 1, or several prompts).

    Attributes:
        request_id: the id that its caller gave to the engine.
        workload: the workload under which it is counted.
        counts: its verified steps; set when it ends.
        num_output_tokens: tokens of its answer, up to the one that completes a stop string.
        num_prompt_tokens: tokens of its prompt.
        learned_from: tokens to train heads on, if its caller allows it.
        undraftable: the sampling field because of which it has no drafts (`undraftable_field`), or "".
    """

    request_id: str
    workload: str
    counts: Counts = field(default_factory=Counts)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    learned_from: "LearnedFrom | None" = None
    undraftable: str = ""


@dataclass(slots=True)
class LearnedFrom:
    """Token ids of a request and of its answer so far."""

    caller: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    has_failed: bool = False


@dataclass(slots=True)
class RecorderDelta:
    """What a `DraftingRecorder` has counted since it was last asked (`take_delta`).

    Attributes:
        workloads: new counts by workload.
        num_output_tokens: new output tokens.
        step_latency: the newest step latency model, as text; "" before the first.
    """

    workloads: dict[str, WorkloadCounts] = field(default_factory=dict)
    num_output_tokens: int = 0
    step_latency: str = ""


class DraftingRecorder:
    """Counts verified drafts of one engine, by request and by workload. Make one for each engine client, in the
    client's process, and `attach` it; or one that adds up what those of several clients have counted (`add_delta`).

    It wraps three methods of the client's output processor, so it counts every sequence: streamed or not, n > 1, ended
    by a stop string (which only this process notices), cancelled. Not thread-safe: use it on the event loop (or thread)
    that runs the client.

    Args:
        max_records: finished requests kept for `pop`; the oldest are dropped first.
        max_workloads: workloads that are counted separately, besides `default`. A further one replaces the least
            recently used one without live sequences. If all have live sequences, it is counted under `default`.
        on_answer: is called with workload, caller, prompt and answer of each complete answer that may be used for
            training: one that ended by itself, at a stop string, or at its greatest length.
    """

    def __init__(
        self,
        *,
        max_records: int = 4096,
        max_workloads: int = 256,
        on_answer: Callable[[str, str, list[int], list[int]], None] | None = None,
    ) -> None:
        self._on_answer = on_answer
        self._max_records, self._max_workloads = max_records, max_workloads
        self._live: dict[str, RequestDrafting] = {}
        self._steps: dict[str, Counter[str]] = {}  # of each live request; in no counts yet
        self._workloads: OrderedDict[str, WorkloadCounts] = OrderedDict()  # least recently used first
        self._finished: OrderedDict[str, list[RequestDrafting]] = OrderedDict()
        self.num_output_tokens = 0
        """Output tokens of all sequences since `attach`."""
        self.step_latency = ""
        """The newest step latency model of the scheduler, as text (`STEP_LATENCY_HEADER`); "" before the first."""
        self._taken: dict[str, WorkloadCounts] | None = None  # what `take_delta` has reported, once it was asked
        self._num_tokens_taken = 0
        self._sources: dict[int, Counter[str]] = {}  # running sequences of other clients, by workload

    def attach(self, engine: Any) -> None:
        """Start recording `engine`: an `AsyncLLM`, an `LLMEngine` or an `LLM`, before its first request."""
        processor: Any = getattr(engine, "llm_engine", engine).output_processor
        add_request, process_outputs = processor.add_request, processor.process_outputs
        abort_requests = processor.abort_requests

        def add_and_track(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = add_request(request, *args, **kwargs)
            if request.request_id in processor.request_states:
                self._track(request)
            return result

        def process_and_record(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = process_outputs(engine_core_outputs, *args, **kwargs)
            self._record(engine_core_outputs)  # afterwards: vLLM has removed tokens after a stop string
            self._close((output.request_id for output in engine_core_outputs), processor.request_states, False)
            return result

        def abort_and_close(*args: Any, **kwargs: Any) -> list[str]:
            aborted: list[str] = abort_requests(*args, **kwargs)
            self._close(aborted, processor.request_states, True)
            return aborted

        processor.add_request = add_and_track
        processor.process_outputs = process_and_record
        processor.abort_requests = abort_and_close

    def pop(self, *request_ids: str) -> RequestDrafting | None:
        """Remove and return the record of a finished request, summed over its prompts and their sequences.

        Args:
            request_ids: the ids given to `AsyncLLM.generate`, one a prompt. OpenAI's completions API numbers its
                prompts: response "cmpl-x" is "cmpl-x-0", "cmpl-x-1", ... The record exists from the last output on.

        Returns:
            None for unknown ids: not finished, popped before, or dropped (`max_records`).
        """
        by_prompt = [self._finished.pop(request_id, []) for request_id in request_ids]
        records = [record for found in by_prompt for record in found]
        if not records:
            return None
        return RequestDrafting(
            request_ids[0],
            records[0].workload,
            sum((record.counts for record in records), Counts()),
            sum(record.num_output_tokens for record in records),
            sum(found[0].num_prompt_tokens for found in by_prompt if found),  # its sequences share a prompt
            undraftable=records[0].undraftable,
        )

    def workloads(self) -> dict[str, WorkloadCounts]:
        """Counts of each workload since `attach`, of finished, aborted and running requests.

        Of an aborted request, the step that runs in the engine and steps with buffered tokens are not counted.
        """
        found = {workload: counts.copy() for workload, counts in self._workloads.items()}
        running: dict[str, Counter[str]] = {}
        for request_id, live in self._live.items():
            running.setdefault(live.workload, Counter()).update(self._steps[request_id])
        for workload, steps in running.items():
            found[workload].counts += counts_of_steps(steps)
        return found

    def take_delta(self) -> RecorderDelta:
        """What was counted since the last call."""
        now, before = self.workloads(), self._taken or {}
        delta = RecorderDelta(
            {name: counts_since(found, before.get(name)) for name, found in now.items() if found != before.get(name)},
            self.num_output_tokens - self._num_tokens_taken,
            self.step_latency,
        )
        self._taken, self._num_tokens_taken = now, self.num_output_tokens
        return delta

    def add_delta(self, source: int, delta: RecorderDelta) -> None:
        """Count what the recorder of another client of the same engine has counted. `source`: which one."""
        running = self._sources.setdefault(source, Counter())
        for name, added in delta.workloads.items():
            # What ends under an unknown name has begun when there was no room for that.
            is_lost = added.num_running < 0 and name not in self._workloads
            name = DEFAULT_WORKLOAD if is_lost else self._counted_as(name)
            self._workloads[name] = self._workloads.get(name, WorkloadCounts()) + added
            self._workloads.move_to_end(name)
            running[name] += added.num_running
            if not running[name]:
                del running[name]
        self.num_output_tokens += delta.num_output_tokens
        self.step_latency = delta.step_latency or self.step_latency

    def drop_source(self, source: int, lost: Mapping[str, int]) -> None:
        """Count the sequences that a lost client had running as aborted. `lost`: how many of each workload. Some of
        them may have begun, and others have ended, since its last delta."""
        running = self._sources.pop(source, Counter[str]())
        lost_now = Counter[str]()
        for workload, number in lost.items():
            lost_now[self._counted_as(workload)] += number
        for name in running | lost_now:
            totals = self._workloads.setdefault(name, WorkloadCounts())
            num_known, num_lost = running[name], lost_now[name]
            totals.num_started += max(0, num_lost - num_known)
            totals.num_finished += max(0, num_known - num_lost)
            totals.num_aborted += num_lost

    def _counted_as(self, workload: str) -> str:
        """The name under which a sequence of `workload` is counted, for which room is made."""
        is_known = workload in self._workloads or workload == DEFAULT_WORKLOAD
        return workload if is_known or self._make_room() else DEFAULT_WORKLOAD

    def _track(self, request: Any) -> None:
        if request.request_id in self._live:
            return  # a later part of a streamed prompt
        extra_args = read_extra_args(request.sampling_params)
        workload = self._counted_as(str(extra_args.get(WORKLOAD_KEY) or DEFAULT_WORKLOAD))
        self._workloads.setdefault(workload, WorkloadCounts()).num_started += 1
        self._workloads.move_to_end(workload)
        self._steps[request.request_id] = Counter()
        self._live[request.request_id] = RequestDrafting(
            request.external_req_id or request.request_id,
            workload,
            num_prompt_tokens=len(request.prompt_token_ids or ()),
            learned_from=None if self._on_answer is None else _learned_from(request, extra_args.get(LEARN_KEY)),
            undraftable=undraftable_field(request.sampling_params),
        )

    def _make_room(self) -> bool:
        """Drop the least recently used workload without live sequences, if needed. Whether one more has room. One of
        which `take_delta` has to report more stays: its sequences would never end for whoever adds them up."""
        if len(self._workloads.keys() - {DEFAULT_WORKLOAD}) < self._max_workloads:
            return True
        for name, counts in self._workloads.items():
            is_reported = self._taken is None or self._taken.get(name, WorkloadCounts()) == counts
            if name != DEFAULT_WORKLOAD and not counts.num_running and is_reported:
                del self._workloads[name]
                return True
        return False

    def _record(self, engine_core_outputs: Iterable[Any]) -> None:
        for output in engine_core_outputs:
            headers = output.trace_headers or {}
            # The model is the engine's, so it does not matter which output carries it.
            self.step_latency = headers.get(STEP_LATENCY_HEADER, self.step_latency)
            live = self._live.get(output.request_id)
            if live is None:  # it has ended here, and not yet in the engine
                continue
            self.num_output_tokens += len(output.new_token_ids)
            live.num_output_tokens += len(output.new_token_ids)
            if (learned := live.learned_from) is not None:
                learned.answer += output.new_token_ids
                learned.has_failed |= str(output.finish_reason) not in WHOLE_ANSWERS
            if (steps := headers.get(STEPS_HEADER)) is not None:
                self._steps[output.request_id].update(steps.split())

    def _close(self, internal_ids: Iterable[str], still_open: Mapping[str, Any], is_aborted: bool) -> None:
        for internal_id in internal_ids:
            if internal_id in still_open or (record := self._live.pop(internal_id, None)) is None:
                continue
            record.counts = counts_of_steps(self._steps.pop(internal_id))
            totals = self._workloads[record.workload]
            totals.counts += record.counts
            totals.num_finished += not is_aborted
            totals.num_aborted += is_aborted
            totals.num_output_tokens += record.num_output_tokens
            totals.num_prompt_tokens += record.num_prompt_tokens
            learned, record.learned_from = record.learned_from, None
            if learned is not None and self._on_answer is not None and not (is_aborted or learned.has_failed):
                self._on_answer(record.workload, learned.caller, learned.prompt, learned.answer)
            self._finished.setdefault(record.request_id, []).append(record)
            while len(self._finished) > self._max_records:
                self._finished.popitem(last=False)


def _learned_from(request: Any, caller: Any) -> LearnedFrom | None:
    """None without the caller's permission, and for a prompt that is more than tokens of the target."""
    has_more = request.mm_features or request.prompt_embeds is not None or request.lora_request is not None
    if not isinstance(caller, str) or not request.prompt_token_ids or has_more or request.resumable:
        return None
    return LearnedFrom(caller, list(request.prompt_token_ids))
