"""The front end of one replica, without HTTP: all that happens to a request before the engine, and to its answer.

Enters: the body of an HTTP request, or a dictionary by deployment handle, with its caller and headers. Leaves: an
`Admitted` request that the engine can take as it is: checked, within the limits, with its workload and K. Then the
engine's answer with a `drafting` field, or an `ApiError` in OpenAI's form. Nothing here knows Ray, or where the engine
is.
"""

import contextlib
import functools
import itertools
import json
import logging
import random
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from cluster.admission import Admission, BodyBudget
from cluster.errors import ApiError
from cluster.heads import HeadRouting
from cluster.k_policy import PolicyUpdate
from cluster.request import (
    ANYONE,
    DEFAULT_WORKLOAD,
    TRIAL_SUFFIX,
    Caller,
    Drafting,
    Workloads,
    base_workload,
    client_network,
    identify_caller,
    resolve,
    system_prompt,
)
from cluster.settings import ClusterSettings, LimitSettings
from deployments.body import (
    BODIES,
    TRANSFER_FIELDS,
    UNUSED_FIELDS,
    Body,
    Call,
    check_counts,
    check_limits,
    check_protocol,
    drop_unused,
    parse_record,
    turns,
)
from deployments.errors import internal_error
from deployments.metrics import FAMILIES, PREFIX
from deployments.usage_log import UsageLog
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, GROUP_KEY, HEAD_KEY, LEARN_KEY, MAX_K_KEY, WORKLOAD_KEY

logger = logging.getLogger(__name__)

QUEUED_PER_RUNNING = 2
"""Sequences that a front end hands to an engine, for each that the engine runs at a time: the engine never waits."""

SERVER_KEYS = (MAX_K_KEY, GROUP_KEY, HEAD_KEY, LEARN_KEY, ACCEPTANCE_RATES_KEY, WORKLOAD_KEY)
"""Keys of `vllm_xargs` that the front end sets."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of W3C's trace context."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Admitted:
    """A request as the engine gets it.

    `fields`: vLLM's fields, with what the front end decided of `vllm_xargs`. `request_id`: the client's name of it, or
    one of our own. `num_sequences`: its weight. `trace`: headers by which the engine's span becomes part of its
    client's trace. `caller`, `queue`: name of who asked, and of its queue for a place. `head`: digest of the head that
    drafts for it, "" where none does. `number`: its own among the requests of the front end."""

    call: Call
    fields: dict[str, Any]
    drafting: Drafting
    request_id: str
    num_sequences: int = 1
    trace: dict[str, str] = field(default_factory=dict)
    caller: str = ""
    queue: str = ""
    head: str = ""
    number: int = 0

    @functools.cached_property
    def body(self) -> Body:
        """vLLM's record of `fields`."""
        body: Body = parse_record(BODIES[self.call], self.fields)
        return body


class Usage(NamedTuple):
    """Tokens of an answer. Each accepted draft is a token of the output."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_accepted_tokens: int = 0


Answer = AsyncGenerator["str | ApiError | Usage", None]
"""The answer to an `Admitted` request: one JSON text, or server-sent events where it streams. What cannot be answered
gives an `ApiError` as an item. A complete one has a `Usage`."""

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
TPOT_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class FrontEndMetrics:
    """What clients see of the service: times by workload, and answers by status."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def family(kind: Any, name: str, **options: Any) -> Any:
            labels = FAMILIES[name].labels.removesuffix("replica").split()  # the router adds that one
            return kind(PREFIX + name, FAMILIES[name].text, labels, registry=self._registry, **options)

        self.first_token = family(Histogram, "time_to_first_token_seconds", buckets=LATENCY_BUCKETS_S)
        self.per_token = family(Histogram, "time_per_output_token_seconds", buckets=TPOT_BUCKETS_S)
        self.latency = family(Histogram, "request_latency_seconds", buckets=LATENCY_BUCKETS_S)
        self._statuses: dict[str, set[str]] = {}  # of the answers counted, by workload
        self._answers = family(Counter, "answers")
        self.queued = family(Gauge, "queued_requests")
        self._tokens = [family(Counter, f"caller_{kind}_tokens") for kind in ("prompt", "output", "accepted")]

    def count_answer(self, workload: str, status: int) -> None:
        """workload: "" where the request was refused before it had one."""
        self._statuses.setdefault(workload, set()).add(str(status))
        self._answers.labels(workload, str(status)).inc()

    def count_tokens(self, caller: str, usage: Usage) -> None:
        for counter, number in zip(self._tokens, usage, strict=True):
            counter.labels(caller).inc(number)

    def families(self, workloads: Iterable[str]) -> list[Metric]:
        """Plain values, which can travel, of these workloads; what was kept of others is dropped."""
        for gone in self._statuses.keys() - {*workloads, ""}:
            for status in self._statuses.pop(gone):
                self._answers.remove(gone, status)
            for histogram in (self.first_token, self.per_token, self.latency):
                histogram.remove(gone)
        found = list(self._registry.collect())
        for family in found:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return found


class FrontEnd:
    """The front end of one replica.

    Args:
        max_running: sequences that the engine may have, `QUEUED_PER_RUNNING` for each that it runs
            at a time; None: `limits.max_running_requests` alone decides.
        usage_log: gets a line for each request, if there is one.
        replica: name of the replica, for these lines.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        max_running: int | None = None,
        usage_log: UsageLog | None = None,
        replica: str = "",
    ) -> None:
        self.metrics = FrontEndMetrics()
        self._usage_log, self._replica, self._numbers = usage_log, replica, itertools.count()
        self.keys: Mapping[str, Sequence[str]] = {}
        self._max_running = max_running
        self.max_model_len: int | None = None
        """Tokens of a prompt and its answer, once the engine has said it."""
        self.generate: Callable[[Admitted], Answer]
        """The engine, which a replica sets before its first request."""
        self.admission = Admission(1, 0)
        self.bodies = BodyBudget(1)
        # One request at a time: the thread that tokenizes a long text keeps prompts waiting.
        self.tokenizing = Admission(1, 0)
        self.metrics.queued.set_function(lambda: self.admission.num_queued_requests)
        self._settings = settings
        self._workloads = Workloads(known=settings.named_workloads(), aliases=settings.model.aliases)
        self.heads: tuple[str, ...] = ()
        """Digests of the heads that draft: the live one, then the candidate of the router."""
        self.routing = HeadRouting()
        self.policy_update = PolicyUpdate()
        """The router's last one with choices: K where neither the request nor the operator fixed it."""
        self.apply_settings(settings)

    def apply_settings(self, settings: ClusterSettings) -> None:
        """Go on with other limits, callers, K and aliases; requests that run keep theirs."""
        names, aliases = settings.named_workloads(), settings.model.aliases
        if (names, aliases) != (self._settings.named_workloads(), self._settings.model.aliases):
            self._workloads = Workloads(known=names, aliases=aliases)
        self._settings = settings
        self._rules = settings.k_rules()
        self.set_keys(self.keys)
        limits, max_running = settings.limits, self._max_running
        self.admission.max_queued = self.tokenizing.max_queued = limits.max_queued_requests
        self.bodies.max_bytes = limits.max_body_bytes_in_flight
        # More wait here, where the queue is fair, and not in the engine.
        places = min(limits.max_running_requests, max_running or limits.max_running_requests)
        self.admission.max_running = places
        # Half of the places beyond what the engine runs at a time: one caller alone keeps it busy with the others.
        running = places if max_running is None else max_running // QUEUED_PER_RUNNING
        self.admission.num_reserved = max(0, places - running) // 2

    def set_keys(self, keys: Mapping[str, Sequence[str]]) -> None:
        """Tell callers by these keys of files from now on (`ClusterSettings.read_key_files`)."""
        self.keys, self._callers = keys, self._settings.caller_table(keys)

    @property
    def model(self) -> str:
        return self._settings.model.id

    @property
    def limits(self) -> LimitSettings:
        return self._settings.limits

    def models(self) -> dict[str, dict[str, Any]]:
        """Model cards by id, the served model first."""
        card = {"object": "model", "created": 0, "owned_by": "peagle", "permission": []}
        if self.max_model_len is not None:
            card["max_model_len"] = self.max_model_len
        return {name: {"id": name, **card} for name in (self.model, *self._settings.model.aliases)}

    @property
    def needs_key(self) -> bool:
        return self._callers is not None

    def identify_caller(self, authorization: str | None, address: str = "") -> Caller:
        """The caller of a request with this Authorization header, from this address ("": not known). Raises ApiError
        (401)."""
        if self._callers is None:
            return replace(ANYONE, address=client_network(address))
        return identify_caller(self._callers, authorization)

    def admit(
        self, call: Call, document: Mapping[str, Any], caller: Caller = ANYONE, headers: Mapping[str, str] | None = None
    ) -> Admitted:
        """Check a request (see `read_json`) and decide its workload and K. Raises ApiError."""
        fields = drop_unused(document, UNUSED_FIELDS[call])
        asked = fields.pop("drafting", None)
        model = self.check_model(fields)
        check_counts(fields, self.limits)
        check_protocol(call, fields)
        body: Body = parse_record(BODIES[call], fields)
        num_sequences = check_limits(body, self.limits)
        own = fields.get("vllm_xargs") or {}
        if taken := [key for key in (*SERVER_KEYS, *TRANSFER_FIELDS) if key in own]:
            name, is_set = f"vllm_xargs.{taken[0]}", "is set by the server: send the field drafting"
            problem = "is not served here" if taken[0] in TRANSFER_FIELDS else is_set
            raise ApiError(400, f"{name} {problem}", param=name)
        drafting = self._decide(asked, model, fields, caller, headers)
        decided: dict[str, Any] = {MAX_K_KEY: drafting.max_k, WORKLOAD_KEY: drafting.workload}
        if drafting.acceptance_rates:
            decided[ACCEPTANCE_RATES_KEY] = list(drafting.acceptance_rates)
        if (drafter := self._settings.drafter) is not None and drafter.is_remote:
            decided[HEAD_KEY] = self._head_index(drafting.workload)
        if num_sequences > 1:
            decided[GROUP_KEY] = secrets.token_hex(8)
        if self._settings.learns_from(caller, base_workload(drafting.workload)):
            decided[LEARN_KEY] = caller.name
        request_id = fields.pop("request_id", None)
        if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
            rule = "1 to 128 letters, digits or . _ : -"  # every chunk of a stream carries it
            raise ApiError(400, f"request_id must be {rule}, not {request_id!r:.80}", param="request_id")
        headers = headers or {}
        named = headers.get("x-request-id", "")
        request_id = request_id or (named if _REQUEST_ID.fullmatch(named) else secrets.token_hex(16))
        body.vllm_xargs = fields["vllm_xargs"] = {**own, **decided}
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        head = self.find_head(drafting.workload)
        admitted = Admitted(call, fields, drafting, request_id, num_sequences, trace, caller.name, caller.queue, head)
        admitted.body = body
        return admitted

    def check_model(self, fields: dict[str, Any]) -> str:
        """The model's name or alias in a request, in whose place the name is put. Raises ApiError (404)."""
        model = fields.get("model", self.model)
        if not isinstance(model, str) or model not in (self.model, *self._settings.model.aliases):
            raise ApiError(
                404, f"the model {model!r:.80} is not served here, but {self.model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip
        fields["model"] = self.model
        return model

    def _decide(
        self, asked: Any, model: str, fields: Mapping[str, Any], caller: Caller, headers: Mapping[str, str] | None
    ) -> Drafting:
        prompt = system_prompt(turns(fields))
        find_workload = lambda tag: self._workloads.resolve(tag, model, prompt)  # noqa: E731
        drafting = resolve(self._rules, asked, headers, caller, find_workload)
        if self._rules.is_adaptive:
            most = self._rules.max_k
            drafting = self.policy_update.choose(drafting, most if caller.max_k is None else min(most, caller.max_k))
        # Now and then the head on trial drafts. K stays: both heads get the same.
        if self.routing.trial in self.heads and random.random() < self.routing.share:
            drafting = replace(drafting, workload=drafting.workload + TRIAL_SUFFIX)
        return drafting

    def _head_index(self, workload: str) -> int:
        """The place in `heads` of the head that drafts for a workload."""
        if workload.endswith(TRIAL_SUFFIX) and self.routing.trial in self.heads:
            return self.heads.index(self.routing.trial)
        return 0

    def find_head(self, workload: str = DEFAULT_WORKLOAD) -> str:
        """Digest of the head that drafts for a workload, "" where none does, or it is not known yet."""
        index = self._head_index(workload)
        return self.heads[index] if index < len(self.heads) else ""

    def remember_workload(self, workload: str) -> None:
        """Tell `workload`, which another front end has found, apart from now on."""
        self._workloads.remember(base_workload(workload))

    async def answer(
        self, call: Call, document: Mapping[str, Any], caller: Caller = ANYONE, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[str]:
        """The answer to a request, from its admission to its end: one JSON text, or server-sent events. Raises ApiError
        instead of an answer, or in the midst of a stream. Counts its status, 499 if the client leaves."""
        started_s, first_s, time_s = time.perf_counter(), None, time.time()
        workload, status, usage, is_counted_later = "", 499, None, False
        number = next(self._numbers)
        if self._usage_log is not None:
            self._usage_log.begin(number)
        try:
            admitted = self.admit(call, document, caller, headers)
            admitted.number = number
            workload = base_workload(admitted.drafting.workload)
            async with (
                self.admission.hold_places(caller, admitted.num_sequences),
                contextlib.aclosing(self.generate(admitted)) as items,
            ):
                is_counted_later = True
                async for item in items:
                    if isinstance(item, str):
                        first_s = first_s or time.perf_counter()
                        yield item
                    elif isinstance(item, Usage):
                        usage = item
                    else:
                        raise item
            status = 200
            self._measure(workload, bool(admitted.body.stream), usage, started_s, first_s)
        except ApiError as error:
            status = error.status
            raise
        except Exception as error:
            status = 500
            logger.exception("a %s request failed", call)
            raise internal_error() from error
        finally:
            self.metrics.count_answer(workload, status)
            if usage is not None:
                self.charge(caller.name, number, usage)
            if self._usage_log is not None:
                total_s = round(time.perf_counter() - started_s, 4)
                first = None if first_s is None else round(first_s - started_s, 4)
                self._usage_log.end(
                    number, is_counted_later=is_counted_later, time=round(time_s, 3), replica=self._replica,
                    caller=caller.name, workload=workload, model=self.model, call=call, status=status, first_s=first,
                    total_s=total_s,
                )  # fmt: skip

    def charge(self, caller: str, number: int, usage: Usage) -> None:
        """Count the tokens of a request, also of one that was broken off, for its caller."""
        self.admission.charge_tokens(caller, usage.num_prompt_tokens + usage.num_output_tokens)
        self.metrics.count_tokens(caller, usage)
        if self._usage_log is not None:
            prompt, output, accepted = usage
            self._usage_log.count(number, prompt_tokens=prompt, output_tokens=output, accepted_tokens=accepted)

    def families(self) -> list[Metric]:
        """`FrontEndMetrics.families` of the workloads that are distinguished now."""
        return self.metrics.families(self._workloads.names())

    def _measure(
        self, workload: str, streams: bool, usage: Usage | None, started_s: float, first_s: float | None
    ) -> None:
        ended_s = time.perf_counter()
        self.metrics.latency.labels(workload).observe(ended_s - started_s)
        if not streams or first_s is None:
            return
        self.metrics.first_token.labels(workload).observe(first_s - started_s)
        if usage is not None and usage.num_output_tokens > 1:
            self.metrics.per_token.labels(workload).observe((ended_s - first_s) / (usage.num_output_tokens - 1))


def event_document(event: str) -> dict[str, Any]:
    """The JSON object of a server-sent event, {} for `[DONE]`."""
    data = event.removeprefix("data: ").strip()
    return dict(json.loads(data)) if data.startswith("{") else {}
