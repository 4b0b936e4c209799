"""What travels with a request between the process that owns the engine client and vLLM's engine process.

In: two keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`) name the K and the workload of a request.
Out: the scheduler reports each verified step on the request's next output, as one header among its trace headers, and
on any output now and then what its steps turn out to take.

Trace headers are the one free-form field of `EngineCoreOutput` that vLLM 0.26 and 0.29 both have, that is made per
output, and that no HTTP response repeats. OpenTelemetry reads only the header names it knows.
This module knows nothing of vLLM.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# ====================================================================================================
# What travels with a request between the process that owns the engine client and vLLM's engine process.
#
# In: two keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`) name the K and the workload of a request.
# Out: the scheduler reports each verified step on the request's next output, as one header among its trace headers, and
# on any output now and then what its steps turn out to take.
#
# Trace headers are the one free-form field of `EngineCoreOutput` that vLLM 0.26 and 0.29 both have, that is made per
# output, and that no HTTP response repeats. OpenTelemetry reads only the header names it knows.
# This module knows nothing of vLLM.

DEPTH_KEY = "peagle_k"
"""`extra_args` key: int 0..K_max, drafts verified per step of this request. Absent: K_max."""

HEAD_KEY = "peagle_head"
"""`extra_args` key: int 0.., index of the head that a remote drafter proposes with. Absent: 0."""

MAX_HEAD_INDEX = 2**31 - 1

SURVIVAL_KEY = "peagle_survival"
"""`extra_args` key: list of S_1, S_2, ..., at least K long: chances by which the scheduler may trim the request further
under load. Absent: K is obeyed as it is."""

STEP_TIMES_KEY = "peagle_step_times"
"""Key of vLLM's `additional_config`: the document of a `cluster.step_time.StepTimes`, by which the scheduler trims."""

SYNTHETIC_KEY = "peagle_synthetic_survival"
"""`extra_args` key for measurements: S_1, S_2, ... of one request, by which `peagle.vllm.synthetic` accepts."""

WORKLOAD_KEY = "peagle_workload"
"""`extra_args` key: str, the workload under which this request's acceptance is counted. Absent: `DEFAULT_WORKLOAD`."""

DEFAULT_WORKLOAD = "default"

STEPS_HEADER = "x-peagle-steps"

CORRECTIONS_HEADER = "x-peagle-corrections"
"""The scheduler's corrections of its step times, on some output now and then (`cluster.step_time.Corrections`)."""

VerifiedStep = tuple[int, int]
"""(drafts verified, drafts accepted) of one request in one engine step; verified in 1..K, accepted in 0..verified."""


def drafts_wanted(wanted: object, k_max: int) -> int:
    """K that the value `wanted` of `DEPTH_KEY` stands for: an integer is brought into 0..k_max, the rest is absent."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return min(max(wanted, 0), k_max)
    return k_max


def head_of(extra_args: Mapping[str, object] | None) -> int:
    """Index of a request's head, an int32; what is no integer counts as absent. Whatever is further out becomes -1 or
    `MAX_HEAD_INDEX`, which no drafter has."""
    head = (extra_args or {}).get(HEAD_KEY)
    return min(max(head, -1), MAX_HEAD_INDEX) if type(head) is int else 0


def encode_steps(steps: Iterable[VerifiedStep]) -> str:
    """Header value of some steps, oldest first: `"7:3 7:0"`."""
    return " ".join(f"{num_verified}:{num_accepted}" for num_verified, num_accepted in steps)


def decode_steps(value: str) -> list[VerifiedStep]:
    """Inverse of `encode_steps`.

    Raises:
        ValueError: the text is not what `encode_steps` writes.
    """
    steps = []
    for pair in value.split():
        num_verified, _, num_accepted = pair.partition(":")
        steps.append((int(num_verified), int(num_accepted)))
    return steps


def with_steps(headers: Mapping[str, str] | None, steps: Iterable[VerifiedStep]) -> dict[str, str]:
    """`headers` (None: empty) plus the report of `steps`; the argument is not changed."""
    return with_header(headers, STEPS_HEADER, encode_steps(steps))


def with_header(headers: Mapping[str, str] | None, name: str, value: str) -> dict[str, str]:
    """`headers` (None: empty) plus one; the argument is not changed."""
    return {**(headers or {}), name: value}


# ====================================================================================================
# Acceptance as counts by depth: the values that `peagle.vllm.acceptance` leaves.
#
# Enters: verified steps. Leaves: `DraftingStats` of some steps, `RequestDrafting` of a request. Imports no vLLM, so
# that a deployment can carry them as values.


@dataclass(frozen=True, slots=True)
class DraftingStats:
    """Counts over some verification steps, by depth.

    `drafted_by_depth[i - 1]` steps verified at least i drafts; in `reached_by_depth[i - 1]` of those the first i - 1
    were all accepted, and in `accepted_by_depth[i - 1]` the first i. So accepted / reached estimates the conditional
    acceptance a_i, and accepted / drafted the survival S_i, also where K differs between requests or steps: a step with
    fewer than i drafts is in no count of depth i. All three are as long as the deepest step, and empty without steps.
    """

    drafted_by_depth: tuple[int, ...] = ()
    reached_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that verified at least one draft. Prefill and steps at K = 0 are none."""
        return self.drafted_by_depth[0] if self.drafted_by_depth else 0

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified. What the drafter proposed beyond K is not counted."""
        return sum(self.drafted_by_depth)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts accepted, also those that a stop condition cut from the end of the output afterwards."""
        return sum(self.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """AL, tokens per verification step: 1 + accepted / steps. 1.0 without steps (K = 0)."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    def __add__(self, other: "DraftingStats") -> "DraftingStats":
        return DraftingStats(
            _sum_by_depth(self.drafted_by_depth, other.drafted_by_depth),
            _sum_by_depth(self.reached_by_depth, other.reached_by_depth),
            _sum_by_depth(self.accepted_by_depth, other.accepted_by_depth),
        )

    def __sub__(self, earlier: "DraftingStats") -> "DraftingStats":
        """What came on top of `earlier`, a previous reading of the same counts."""
        added = self + DraftingStats(
            tuple(-count for count in earlier.drafted_by_depth),
            tuple(-count for count in earlier.reached_by_depth),
            tuple(-count for count in earlier.accepted_by_depth),
        )
        # As long as the deepest of these steps, which the ones before may have been deeper than.
        deepest = max((depth for depth, count in enumerate(added.drafted_by_depth, start=1) if count), default=0)
        return DraftingStats(
            added.drafted_by_depth[:deepest], added.reached_by_depth[:deepest], added.accepted_by_depth[:deepest]
        )

    @classmethod
    def from_steps(cls, steps: Iterable[VerifiedStep]) -> "DraftingStats":
        """Counts of `steps`, each (drafts verified, drafts accepted)."""
        counter = StepCounter()
        for step in steps:
            counter.add(step)
        return counter.stats()


def _sum_by_depth(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(a), len(b))
    return tuple(x + y for x, y in zip(a + (0,) * (length - len(a)), b + (0,) * (length - len(b)), strict=True))


@dataclass(slots=True)
class StepCounter:
    """Growing counts; `stats()` is a frozen copy."""

    drafted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, step: VerifiedStep) -> None:
        num_verified, num_accepted = step
        while len(self.drafted) < num_verified:
            self.drafted.append(0)
            self.reached.append(0)
            self.accepted.append(0)
        for index in range(num_verified):
            self.drafted[index] += 1
        for index in range(min(num_verified, num_accepted + 1)):
            self.reached[index] += 1
        for index in range(num_accepted):
            self.accepted[index] += 1

    def stats(self) -> DraftingStats:
        return DraftingStats(tuple(self.drafted), tuple(self.reached), tuple(self.accepted))


@dataclass(frozen=True, slots=True)
class RequestDrafting:
    """How one sequence was drafted, from its first token to its end.

    Attributes:
        request_id: the id its caller gave to the engine; the n sequences of a request with n > 1 share it.
        workload: `extra_args["peagle_workload"]`, or `default`.
        k: `extra_args["peagle_k"]` as sent, None where it was not.
        stats: counts by depth.
        num_output_tokens, num_prompt_tokens: tokens that the engine returned for it, and those of its prompt.
        is_aborted: the caller left, or cancelled it, before it was complete.
    """

    request_id: str
    workload: str
    k: Any
    stats: DraftingStats
    num_output_tokens: int
    is_aborted: bool
    num_prompt_tokens: int = 0


# ====================================================================================================
# Acceptance of each request and of each workload, in the process that owns the engine client.
#
# Enters: the steps that `peagle.vllm.scheduler` reports on the engine's outputs, and now and then its corrections of the
# step times. Leaves: `DraftingStats` of a request, as soon as its last output is there, running totals of each workload,
# unfinished and aborted requests included, and the newest corrections. Imports no vLLM.


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
