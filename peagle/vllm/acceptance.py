"""What travels with a request through vLLM's engine, and the counts of verified drafts that come back.

In: keys of `SamplingParams.extra_args` (HTTP: `vllm_xargs`). Out: the scheduler writes each verified step of a request
on its next output, as one of its trace headers, and now and then on any output what it has learned of step times.
`DraftingRecorder`, in the process that owns the engine client, turns these into `cluster.counts`.

Trace headers are the one free-form field of `EngineCoreOutput` that is made per output and that no HTTP response
repeats; OpenTelemetry reads only the names it knows. vLLM's own per-request metrics (`per_request_spec_decode_metrics`)
come with the last output only: aborted requests, those ended by a stop string and running ones would not be counted.
Imports no vLLM.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from cluster.counts import Counts, WorkloadCounts
from cluster.request import DEFAULT_WORKLOAD

DEPTH_KEY = "peagle_k"
"""`extra_args` key: int 0..K_max, the most drafts verified per step of this request (its max_k). Absent: K_max."""

HEAD_KEY = "peagle_head"
"""`extra_args` key: int 0.., index of the head that a remote drafter proposes with. Absent: 0."""

MAX_HEAD_INDEX = 2**31 - 1
MIN_P_EPSILON = 1e-5  # vLLM's own

SURVIVAL_KEY = "peagle_survival"
"""`extra_args` key: list of S_1, S_2, ..., at least K long: chances by which the scheduler may trim the request further
under load. Absent: K is obeyed as it is."""

WORKLOAD_KEY = "peagle_workload"
"""`extra_args` key: str, the workload under which this request is counted. Absent: `DEFAULT_WORKLOAD`."""

LEARN_KEY = "peagle_learn"
"""`extra_args` key: str, name of the caller whose answers may be kept to train heads on. Absent: none of it is kept."""

GROUP_KEY = "peagle_group"
"""`extra_args` key: str, the same for all sequences of one request of several. Absent: it has one sequence."""

STEPS_HEADER = "x-peagle-steps"
"""A request's `VerifiedStep`s that were not reported yet, oldest first: "7,3 7,0 5,5c"."""

STEP_COSTS_HEADER = "x-peagle-step-costs"
"""What the scheduler has learned of its step times, in the form of `cluster.step_time`."""

WHOLE_ANSWERS = ("None", "stop", "length")
"""vLLM's finish reasons, as text, of an answer of which every token may be learned from."""


class VerifiedStep(NamedTuple):
    """One request in one engine step. Drafts verified, 1..K, and accepted, 0..verified; is_chosen: the worker chose how
    many (`peagle.vllm.chosen`). Deep drafts are among the chosen ones where they are likely, so of survival such a step
    says nothing."""

    num_verified: int
    num_accepted: int
    is_chosen: bool = False


CHOSEN = "c"


def steps_text(steps: Iterable[VerifiedStep]) -> str:
    """What stands under `STEPS_HEADER`. Words and not JSON: the process of `DraftingRecorder`, which is full first,
    counts them as they are."""
    return " ".join([f"{verified},{accepted}{CHOSEN if is_chosen else ''}" for verified, accepted, is_chosen in steps])


def counts_of_steps(steps: Mapping[str, int], *, of_survival: bool = False) -> Counts:
    """Counts of steps: how often each word of a `steps_text` came. of_survival: less those that say nothing of it."""
    counts = Counts()
    for step, number in steps.items():
        if not (of_survival and step.endswith(CHOSEN)):
            num_verified, num_accepted = step.removesuffix(CHOSEN).split(",")
            counts.add_step(int(num_verified), int(num_accepted), number)
    return counts


def drafts_wanted(params: Any, k_max: int) -> int:
    """K of a request with vLLM's `SamplingParams` (None: it generates nothing): an integer under `DEPTH_KEY` is brought
    into 0..k_max, anything else counts as absent; 0 where its sampling goes with no drafts."""
    if params is not None and undraftable_field(params):
        return 0
    wanted = ((params.extra_args if params is not None else None) or {}).get(DEPTH_KEY)
    return min(max(wanted, 0), k_max) if type(wanted) is int else k_max


def plan_drafts_ahead(scheduled: Any, num_drafts: int, num_rejected: int = 0, is_choice: bool = False) -> None:
    """Write on a `SchedulerOutput`: in the step after it, no request has more than `num_drafts` drafts verified. With 0
    nobody needs the drafter's pass in this step but its prompts, which a later request may find in the prefix cache.

    num_rejected: how many of this step's drafts are expected to be rejected (`Rejections`). The scheduler says so, and
    not each worker for itself, so that all ranks of a group run passes of the same size.
    is_choice: the worker may have to choose among the drafts of the pass (`choose_drafts`), and is to say what they
        are worth.
    """
    scheduled.peagle_drafts_ahead, scheduled.peagle_num_rejected = num_drafts, num_rejected
    scheduled.peagle_is_choice = is_choice


def choose_drafts(scheduled: Any, num_drafts: int) -> None:
    """Write on a `SchedulerOutput`: of its drafts only so many are verified, and the worker chooses which."""
    scheduled.peagle_num_chosen = num_drafts


def num_chosen_of(scheduled: Any) -> int | None:
    """What `choose_drafts` wrote; None where all are verified."""
    return getattr(scheduled, "peagle_num_chosen", None)


def verify_all(scheduled: Any) -> None:
    """Write on a `SchedulerOutput`: all its drafts are verified, also where the worker could choose among them."""
    scheduled.peagle_verifies_all = True


def verifies_all(scheduled: Any) -> bool:
    """Whether `verify_all` wrote on it."""
    return bool(getattr(scheduled, "peagle_verifies_all", False))


def drafts_ahead(scheduled: Any, k_max: int) -> int:
    """What `plan_drafts_ahead` wrote; without, `k_max`."""
    return min(getattr(scheduled, "peagle_drafts_ahead", k_max), k_max)


def is_choice_ahead(scheduled: Any) -> bool:
    """What `plan_drafts_ahead` said of it."""
    return bool(getattr(scheduled, "peagle_is_choice", False))


def num_rejected_of(scheduled: Any) -> int:
    """Drafts of the step that are expected to be rejected; 0 where nothing is known."""
    return int(getattr(scheduled, "peagle_num_rejected", 0))


class Rejections:
    """How many drafts of an engine's next step will be rejected, by what became of those of its last steps.

    Acceptance at each depth is that of all requests together, later steps counting more.
    """

    KEPT = 0.95
    """What is left of a step's weight with each step after it."""

    def __init__(self, k_max: int) -> None:
        self._num_verified, self._num_accepted = [0.0] * (k_max + 1), [0.0] * (k_max + 1)
        self._num_chosen = self._num_chosen_rejected = 0.0

    def add(self, num_verified: int, num_accepted: int) -> None:
        """One request's step."""
        self._num_verified[num_verified] += 1.0
        self._num_accepted[num_accepted] += 1.0

    def add_chosen(self, num_verified: int, num_accepted: int) -> None:
        """All of a step whose drafts were chosen."""
        self._num_chosen = self.KEPT * self._num_chosen + num_verified
        self._num_chosen_rejected = self.KEPT * self._num_chosen_rejected + num_verified - num_accepted

    def expected_of_chosen(self, num_drafts: int) -> int:
        """As `expected`, of so many drafts that are chosen; 0 before the first such step."""
        if not self._num_chosen:
            return 0
        return max(0, int(num_drafts * self._num_chosen_rejected / self._num_chosen - 2.0 * math.sqrt(num_drafts)))

    def expected(self, num_drafts: Iterable[int]) -> int:
        """At least so many of the requests' drafts are rejected, as a rule: the mean, less a bound of its standard
        deviation. Of a request's 0..K accepted drafts that is K / 2 at most. To be asked once a step.

        Args:
            num_drafts: of each request, 0..k_max.
        """
        num_verified = num_accepted = 0.0
        survival_K = [1.0] * len(self._num_verified)  # [0] is not used
        for depth in range(len(survival_K) - 1, 0, -1):
            num_verified += self._num_verified[depth]
            num_accepted += self._num_accepted[depth]
            if num_verified:
                survival_K[depth] = num_accepted / num_verified
        accepted_K = list(accumulate(survival_K[1:], initial=0.0))
        mean = variance = 0.0
        for k, count in Counter(num_drafts).items():
            mean += count * (k - accepted_K[k])
            variance += count * (k / 2) ** 2
        for counts in (self._num_verified, self._num_accepted):
            counts[:] = [self.KEPT * count for count in counts]
        return max(0, int(mean - math.sqrt(variance)))


def undraftable_field(params: Any) -> str:
    """The first field of these `SamplingParams` that goes without drafts, "" where there is none.

    vLLM processes logits for these fields by request, and not by row.
    """
    is_asked = {
        "logit_bias": bool(params.logit_bias),
        "min_p": params.min_p > MIN_P_EPSILON,
        "thinking_token_budget": getattr(params, "thinking_token_budget", None) is not None,
    }
    return next((field for field, asked in is_asked.items() if asked), "")


def head_of(extra_args: Mapping[str, object] | None) -> int:
    """Index of a request's head, an int32; what is no integer counts as absent. Whatever is further out becomes -1 or
    `MAX_HEAD_INDEX`, which no drafter has."""
    head = (extra_args or {}).get(HEAD_KEY)
    return min(max(head, -1), MAX_HEAD_INDEX) if type(head) is int else 0


def attach_num_drafts(model_runner_output: Any, num_drafts: list[int]) -> None:
    """Write on vLLM's `ModelRunnerOutput` how many drafts a remote drafter had ready for the step, 0..K_max, in the
    order of the output's `req_ids`; -1 where it was asked for none. From a worker's process it travels along: vLLM
    pickles the output's attributes.

    Drafts that were planned and not there are counted neither as verified nor as rejected, and while the drafter has
    none for a request, none are planned for it.
    """
    model_runner_output.peagle_num_drafts = num_drafts


def num_drafts_of(model_runner_output: Any) -> list[int] | None:
    """What `attach_num_drafts` wrote; None where the drafter always has K_max."""
    return getattr(model_runner_output, "peagle_num_drafts", None)


def attach_num_admitted(model_runner_output: Any, num_admitted: Any) -> None:
    """Write on vLLM's `ModelRunnerOutput` how many drafts of each request were verified where the worker chose: a list
    in the order of the output's `req_ids`, or what becomes one by `tolist()` when the output is there."""
    model_runner_output.peagle_num_admitted = num_admitted


def num_admitted_of(model_runner_output: Any) -> list[int] | None:
    """What `attach_num_admitted` wrote; None where nothing was chosen."""
    found = getattr(model_runner_output, "peagle_num_admitted", None)
    return found if found is None or isinstance(found, list) else found.tolist()


def attach_worth(model_runner_output: Any, counts: Any, num_requests: int) -> None:
    """Write on vLLM's `ModelRunnerOutput` how many drafts of a batch of so many requests, that of the step before, are
    worth each of `cluster.depth.WORTH_LEVELS` or more: a list, or what becomes one by `tolist()` later."""
    model_runner_output.peagle_worth = counts, num_requests


def worth_of(model_runner_output: Any) -> tuple[list[int], int] | None:
    """What `attach_worth` wrote."""
    if (found := getattr(model_runner_output, "peagle_worth", None)) is None:
        return None
    counts, num_requests = found
    return counts if isinstance(counts, list) else counts.tolist(), num_requests


@dataclass(slots=True)
class RequestDrafting:
    """How a request was drafted; the sequences of one with n > 1, or several prompts, summed.

    Attributes:
        request_id: the id that its caller gave to the engine.
        workload: under which it is counted.
        max_k: `extra_args["peagle_k"]` as sent, None where it was not.
        counts: its verified steps, from its end on.
        num_output_tokens, num_prompt_tokens: tokens of its answer, up to the one that completes a stop string, and
            those of its prompt.
        is_aborted: the caller left, or cancelled it, before it was complete.
        learned_from: what is kept of it to train heads on, where its caller lets that be.
        undraftable: the field of its sampling that goes without drafts (`undraftable_field`), "" where there is none.
    """

    request_id: str
    workload: str
    max_k: Any
    counts: Counts = field(default_factory=Counts)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    is_aborted: bool = False
    learned_from: "LearnedFrom | None" = None
    undraftable: str = ""


@dataclass(slots=True)
class LearnedFrom:
    """Token ids of a request and of its answer so far."""

    caller: str
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    has_failed: bool = False


class DraftingRecorder:
    """Counts what one engine does, by request and by workload. Make one for each engine client, in the client's
    process, and `attach` it.

    It hangs on three methods of the client's output processor, so it sees every sequence in every mode: streamed or
    not, n > 1, ended by a stop string (which only this process notices), cancelled. Not thread-safe: it works, and is
    to be read, on the event loop (or thread) that runs the client.

    Args:
        max_records: finished requests kept for `pop`; the oldest go first.
        max_workloads: names counted apart, `default` not included. A further name takes the place, and ends the counts,
            of the one without a new sequence for longest; while all have live sequences it is counted under `default`.
        on_answer: gets workload, caller, prompt and answer of each complete answer that may be learned from: one that
            ended by itself, at a stop string, or at its greatest length, up to which it is the target's own.
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
        """Of all sequences since `attach`."""
        self.step_costs = ""
        """The newest of what the scheduler learned of step times, as it travelled; "" before the first."""

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
            result = process_outputs(engine_core_outputs, *args, **kwargs)
            self._record(engine_core_outputs)  # afterwards, for tokens behind a stop string are gone then
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
            response_id,
            records[0].workload,
            records[0].max_k,
            sum((record.counts for record in records), Counts()),
            sum(record.num_output_tokens for record in records),
            sum(record.num_prompt_tokens for record in records),
            any(record.is_aborted for record in records),
            undraftable=records[0].undraftable,
        )

    def workloads(self) -> dict[str, WorkloadCounts]:
        """Counts of each workload since `attach`, whatever became of its requests; of steps those that tell survival.

        Not in it: of a request that was aborted, a step still running in the engine, and those whose tokens were held
        back there.
        """
        found = {workload: counts.copy() for workload, counts in self._workloads.items()}
        running: dict[str, Counter[str]] = {}
        for request_id, live in self._live.items():
            running.setdefault(live.workload, Counter()).update(self._steps[request_id])
        for workload, steps in running.items():
            found[workload].counts += counts_of_steps(steps, of_survival=True)
        return found

    def context_tokens(self) -> float:
        """Mean context of the sequences in the engine, waiting ones included; 0.0 without any."""
        num_tokens = sum(live.num_prompt_tokens + live.num_output_tokens for live in self._live.values())
        return num_tokens / len(self._live) if self._live else 0.0

    def _track(self, request: Any) -> None:
        if request.request_id in self._live:
            return  # a later part of a streamed prompt
        extra_args = getattr(request.sampling_params, "extra_args", None) or {}
        workload = str(extra_args.get(WORKLOAD_KEY) or DEFAULT_WORKLOAD)
        if workload not in self._workloads and workload != DEFAULT_WORKLOAD and not self._make_room():
            workload = DEFAULT_WORKLOAD
        self._workloads.setdefault(workload, WorkloadCounts()).num_started += 1
        self._workloads.move_to_end(workload)
        self._steps[request.request_id] = Counter()
        self._live[request.request_id] = RequestDrafting(
            request.external_req_id or request.request_id,
            workload,
            extra_args.get(DEPTH_KEY),
            num_prompt_tokens=len(request.prompt_token_ids or ()),
            learned_from=None if self._on_answer is None else _learned_from(request, extra_args.get(LEARN_KEY)),
            undraftable="" if request.sampling_params is None else undraftable_field(request.sampling_params),
        )

    def _make_room(self) -> bool:
        """Whether there is room for one more workload, after the least recently used without sequences has made it."""
        if len(self._workloads.keys() - {DEFAULT_WORKLOAD}) < self._max_workloads:
            return True
        for name, counts in self._workloads.items():
            if name != DEFAULT_WORKLOAD and not counts.num_running:
                del self._workloads[name]
                return True
        return False

    def _record(self, engine_core_outputs: Iterable[Any]) -> None:
        for output in engine_core_outputs:
            headers = output.trace_headers or {}
            # Corrections are the engine's: whose output carries them does not matter, nor whether that is followed.
            self.step_costs = headers.get(STEP_COSTS_HEADER, self.step_costs)
            live = self._live.get(output.request_id)
            if live is None:  # its answer has ended here, and not yet in the engine
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
            record.is_aborted = is_aborted
            steps = self._steps.pop(internal_id)
            record.counts = counts_of_steps(steps)
            totals = self._workloads[record.workload]
            totals.counts += counts_of_steps(steps, of_survival=True)
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
    """None for a request that nobody may learn from, or whose prompt is more than tokens of the target."""
    has_more = request.mm_features or request.prompt_embeds is not None or request.lora_request is not None
    if not isinstance(caller, str) or not request.prompt_token_ids or has_more or request.resumable:
        return None
    return LearnedFrom(caller, list(request.prompt_token_ids))
