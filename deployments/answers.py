"""What vLLM answers to admitted requests, with how it was drafted. Runs where vLLM's client of the engine does: in the
replica's process, or in its front-end processes (`deployments.front_end_processes`).

Enters: an `Admitted` request. Leaves: its `Answer`, and counts (`peagle.vllm.recorder`). Knows neither Ray nor HTTP.
"""

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from vllm.entrypoints.anthropic.serving import wrap_data_with_event
from vllm.exceptions import GenerationError

from cluster.errors import ApiError
from cluster.request import Drafting, base_workload
from deployments.body import Call, from_engine, from_validation, grammars, num_prompts
from deployments.errors import engine_lost
from deployments.front_end import Admitted, Answer, Usage, event_document
from deployments.protocols import MessageForm
from peagle.vllm.grammar_checker import GrammarChecker, current_queue
from peagle.vllm.limits import guard
from peagle.vllm.recorder import DraftingRecorder, RequestDrafting
from peagle.vllm.rendering import render_at_once

logger = logging.getLogger(__name__)

Charge = Callable[[str, int, Usage], None]
"""Counts the tokens of a request: `deployments.front_end.FrontEnd.charge`."""

ENGINE_IDS: dict[Call, str] = {
    "chat": "chatcmpl-{}", "completions": "cmpl-{}", "responses": "resp_{}_0", "messages": "chatcmpl-{}",
}  # fmt: skip
"""What vLLM makes of the name of a request; it numbers the prompts of a completion behind that."""

FIELDS: dict[Call, dict[str, str]] = {
    "chat": {"max_tokens": "max_completion_tokens"},
    "responses": {"messages": "input", "max_tokens": "max_output_tokens"},
    "messages": {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"},
}
"""Fields of an API by the names that vLLM has for them in its refusals."""

ODD_VALUE_ERRORS = (KeyError, IndexError, AttributeError, RecursionError, UnicodeError)
"""What vLLM's chat templates raise for values of a type that they do not expect."""


class EngineAnswers:
    """The answers of one of vLLM's clients of an engine.

    Args:
        client: vLLM's, an `AsyncLLM`.
        vllm: the state of vLLM's API server: its API objects by name.
        recorder: counts drafts of the client's requests; attached to it already.
        charge: counts the tokens of a request that was broken off, once for each.
    """

    def __init__(self, client: Any, vllm: Any, recorder: DraftingRecorder, charge: Charge) -> None:
        self._client, self._vllm = client, vllm
        self._messages = MessageForm(vllm.anthropic_serving_messages)
        self._recorder, self._charge = recorder, charge
        self._aborts: set[asyncio.Task[None]] = set()
        self._ids: set[str] = set()  # of the requests in the engine, as it names them

    @classmethod
    def attach(
        cls, client: Any, vllm: Any, recorder: DraftingRecorder, charge: Charge, grammars: GrammarChecker
    ) -> "EngineAnswers":
        """For an engine before its first request. Changes its client, which then checks requests and counts drafts."""
        recorder.attach(client)
        guard(client, grammars)
        render_at_once(client)
        return cls(client, vllm, recorder, charge)

    async def generate(self, admitted: Admitted) -> Answer:
        """The engine's answer to what the front end has admitted, see `deployments.front_end.Answer`."""
        if not self._ids.isdisjoint(engine_ids(admitted)):  # clients name requests, and vLLM aborts all of a name
            admitted.request_id += f"-{uuid.uuid4().hex[:8]}"
        current_queue.set(admitted.queue)
        ids, is_complete = engine_ids(admitted), False
        self._ids.update(ids)
        try:
            if self._client.errored:
                raise engine_lost()
            result = await self._ask(admitted)
            if hasattr(result, "error"):
                raise self._failure(admitted, from_engine(result.error))
            if hasattr(result, "usage"):
                field = self._drafting_field(admitted, self._pop(admitted))
                is_complete = True
                used = result.usage
                num_prompt_tokens = used.input_tokens if admitted.call == "responses" else used.prompt_tokens
                # Before the text: an answer that cannot be written is charged, too.
                num_tokens = used.total_tokens - num_prompt_tokens
                accepted = accepted_tokens(num_tokens, field["num_steps"], field["num_accepted_tokens"])
                yield Usage(num_prompt_tokens, num_tokens, accepted)
                yield self._write(admitted.call, result, field)
                return
            events = (self._response_events if admitted.call == "responses" else self._events)(admitted, result)
            if admitted.call == "messages":
                events = self._messages.convert_events(events)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
            is_complete = True
        except ApiError as error:
            yield error
        except Exception as error:  # noqa: BLE001  # answered and logged there
            yield self._failure(admitted, self._refusal(error))
        finally:
            if is_complete:
                self._ids.difference_update(ids)
            else:
                task = asyncio.get_running_loop().create_task(self._abort(ids, admitted))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def _ask(self, admitted: Admitted) -> Any:
        """vLLM's answer: a response, an `ErrorResponse`, or the generator of events. vLLM is asked directly, because
        `ray.serve.llm` copies each of these into types of its own, and batches events. vLLM gets no other headers of
        the client, because some would set its priority."""
        vllm: Any = self._vllm
        body: Any = admitted.body
        headers = {"x-request-id": admitted.request_id, **admitted.trace}
        raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        request = Request({"type": "http", "headers": raw})
        match admitted.call:
            case "chat":
                return await vllm.openai_serving_chat.create_chat_completion(body, request)
            case "completions":
                return await vllm.openai_serving_completion.create_completion(body, request)
            case "responses":
                body.request_id = f"resp_{admitted.request_id}"
                return await vllm.openai_serving_responses.create_responses(body, request)
            case "messages":
                return await self._messages.ask(body, request)

    def _write(self, call: Call, result: Any, drafting: dict[str, Any]) -> str:
        """The JSON text of a whole answer."""
        if call == "messages":
            return self._messages.write(result, drafting)
        if call == "responses":
            result.drafting = drafting
            return str(result.model_dump_json(by_alias=True))
        return text_with(result.model_dump(), drafting)

    def _pop(self, admitted: Admitted) -> RequestDrafting:
        """What was recorded of a request that has ended, an empty record where nothing was."""
        ids = engine_ids(admitted)
        return self._recorder.pop(*ids) or RequestDrafting(ids[0], admitted.drafting.workload)

    async def _abort(self, ids: Sequence[str], admitted: Admitted) -> None:
        """End what is left of a request, and charge its caller for what there was. vLLM aborts what is cancelled, but
        not always all of its sequences, and sometimes late."""
        try:
            await self._client.abort(ids)
        finally:
            self._ids.difference_update(ids)
            self._charge(admitted.caller, admitted.number, usage_of(self._pop(admitted)))

    async def _events(self, admitted: Admitted, events: Any) -> Answer:
        """vLLM's server-sent events, with `drafting` in the last chunk: the one that finishes the last choice, or with
        `include_usage` the one with the usage."""
        num_unfinished = admitted.num_sequences
        # vLLM's first event names the role; with a grammar it waits for the first text, which may never come.
        has_grammar = is_held = bool(grammars(admitted.fields))
        held, has_begun = "", False
        tail: list[str] = []  # from the chunk on that finishes the last choice
        async with contextlib.aclosing(events):
            async for event in events:
                if event.startswith('data: {"error"'):
                    failure = from_engine(event_document(event)["error"])
                    may_be_grammar = has_grammar and failure.status == 500
                    if not has_begun or self._client.errored or may_be_grammar:
                        failure = self._failure(admitted, failure)
                    raise failure
                if is_held:
                    is_held, held = False, event
                    continue
                if held:
                    yield held
                    held = ""
                has_begun = True
                num_unfinished -= num_finished_choices(event)
                if num_unfinished > 0:
                    yield event
                else:
                    tail.append(event)
        if held:
            yield held
        if not tail:
            yield Usage()
            return
        record = self._pop(admitted)
        last = max(index for index, event in enumerate(tail) if event_document(event))
        text = text_with(event_document(tail[last]), self._drafting_field(admitted, record))
        tail[last] = f"data: {text}\n\n"
        yield usage_of(record)  # before the tail, which the client may not read
        for event in tail:
            yield event

    async def _response_events(self, admitted: Admitted, events: Any) -> Answer:
        """vLLM's events of a response, with `drafting` in the response of the last one. The first ones, which say that
        it has begun, wait for its first text: what is refused never has one."""
        held = []
        async with contextlib.aclosing(events):
            async for event in events:
                held.append(event)
                if event.type in ("response.created", "response.in_progress"):
                    continue
                if event.type == "response.completed":
                    record = self._pop(admitted)
                    event.response.drafting = self._drafting_field(admitted, record)
                    yield usage_of(record)
                for one in held:
                    yield wrap_data_with_event(one.model_dump_json(by_alias=True), one.type)
                held.clear()

    def _drafting_field(self, admitted: Admitted, record: RequestDrafting) -> dict[str, Any]:
        drafting = admitted.drafting
        if record.undraftable:
            drafting = Drafting(drafting.workload, 0, "request", f"{record.undraftable} goes without drafts")
        return drafting_field(drafting, admitted.head, record.counts)

    def _failure(self, admitted: Admitted, failure: ApiError) -> ApiError:
        """`failure` of a request of which nothing has been answered, with its cause where it can be told."""
        if self._client.errored:
            return engine_lost()
        # vLLM makes its structured_outputs of whichever field of the client's says what may be answered.
        name = next(iter(grammars(admitted.fields)), "tools" if admitted.fields.get("tools") else None)
        param = failure.param or ""
        field = param.partition(".")[0]
        own = name if field == "structured_outputs" else FIELDS.get(admitted.call, {}).get(field)
        if own is not None and not (admitted.call == "chat" and own not in admitted.fields):
            return ApiError(failure.status, failure.message.replace(field, own), param=param.replace(field, own))
        if failure.status == 500 and grammars(admitted.fields):
            # So vLLM ends a request whose grammar rejects every token (a schema that refers to itself does), or takes
            # too long (`TimedGrammar`).
            text = "its grammar allows no text, or takes too long for this text"
            return ApiError(400, f"{name} cannot be followed: {text}", param=name)
        return failure

    def _refusal(self, error: Exception) -> ApiError:
        """What a request gets that raised before its first output."""
        if isinstance(error.__context__, GenerationError):  # which vLLM fails to make an event of a response of
            error = error.__context__
        if isinstance(error, ValidationError):  # of the chat that vLLM makes of a message
            return from_validation(error)
        refusal = from_engine(self._vllm.openai_serving_chat.create_error_response(error).error)
        if refusal.status == 500 and isinstance(error, ODD_VALUE_ERRORS):
            logger.warning("a request cannot be turned into a prompt", exc_info=error)
            return ApiError(400, f"the request cannot be turned into a prompt ({error!r:.200})")
        if refusal.status == 500:
            logger.error("a request failed", exc_info=error)
        return refusal


def drafting_field(drafting: Drafting, head: str, counts: Any) -> dict[str, Any]:
    """The answer's `drafting` field: the decision, and what came of it summed over the request's sequences.

    `head`: digest of the head that drafts for the workload, "" where none does. `num_steps` counts steps that verified
    drafts; `acceptance_length` is 1 + accepted / steps, 1.0 without steps.
    """
    tpot_ms = None if drafting.expected_tpot_s is None else round(1000 * drafting.expected_tpot_s, 3)
    rates = list(drafting.acceptance_rates)
    learned = {"reason": drafting.reason, "acceptance_rates": rates, "expected_tpot_ms": tpot_ms}
    return {
        "workload": base_workload(drafting.workload),
        "k": drafting.k,
        "max_k": drafting.max_k,
        "source": drafting.source,
        **{name: value for name, value in learned.items() if value},
        "head": head,
        "num_steps": counts.num_steps,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "acceptance_length": round(counts.acceptance_length, 4),
    }


def text_with(document: dict[str, Any], drafting: Mapping[str, Any]) -> str:
    """The JSON text of an answer or of a stream's last chunk with its `drafting`. `usage`, where there is one, counts
    the answer's accepted drafts where OpenAI's API counts accepted predictions."""
    if usage := document.get("usage"):
        counts = drafting["num_steps"], drafting["num_accepted_tokens"]
        details = {"accepted_prediction_tokens": accepted_tokens(usage["completion_tokens"], *counts)}
        usage["completion_tokens_details"] = (usage.get("completion_tokens_details") or {}) | details
    return json.dumps({**document, "drafting": drafting}, ensure_ascii=False, separators=(",", ":"))


def accepted_tokens(num_tokens: int, num_steps: int, num_accepted: int) -> int:
    """Accepted drafts among the `num_tokens` of an answer. Its last step may have accepted more, beyond the answer's
    end. One token of each step is no draft."""
    return max(0, min(num_accepted, num_tokens - num_steps))


def num_finished_choices(event: str) -> int:
    """How many choices a server-sent event finishes. Most finish none, and are not parsed for it."""
    if '"finish_reason":' not in event or '"finish_reason":null' in event:
        return 0
    return sum(choice.get("finish_reason") is not None for choice in event_document(event).get("choices", ()))


def usage_of(record: RequestDrafting) -> Usage:
    counts = record.counts.num_steps, record.counts.num_accepted_tokens
    accepted = accepted_tokens(record.num_output_tokens, *counts)
    return Usage(record.num_prompt_tokens, record.num_output_tokens, accepted)


def engine_ids(admitted: Admitted) -> list[str]:
    """The names that the engine gives to the prompts of a request."""
    name = ENGINE_IDS[admitted.call].format(admitted.request_id)
    if admitted.call != "completions":
        return [name]
    return [f"{name}-{index}" for index in range(num_prompts(admitted.body))]
