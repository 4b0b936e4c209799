"""Other protocols around a chat: OpenAI's Responses, Anthropic's Messages, and vLLM's paths for tokens.

Enters: the body of a request. Leaves: its answer in the protocol's form. A request becomes the fields of a chat, which
goes through `FrontEnd.answer` as any other, and vLLM's own classes convert both ways. Nothing is stored.
"""

import contextlib
import copy
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, get_args

from openai.types.responses.response_output_text import Logprob
from pydantic import BaseModel
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import _is_json, wrap_data_with_event
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.openai.responses import utils
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize import protocol as tokenizer

from cluster.errors import ApiError
from deployments.body import check_counts, drop_unused, from_engine, parse_record, refused
from deployments.front_end import FrontEnd, event_document, logger

Ask = Callable[[dict[str, Any]], AsyncGenerator[str]]  # the answer to a chat with these fields


def check_kinds(name: str, parts: Any, kinds: Sequence[str], default: str | None = None) -> None:
    """Raises ApiError (400) for a part of a list whose type is none of `kinds`. `default`: the type without one."""
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        if not isinstance(part, dict) or part.get("type", default) not in kinds:
            text = f"{name}.{index} must be an object whose type is one of {', '.join(kinds)}: no other is served here"
            raise ApiError(400, text, param=f"{name}.{index}")


class Conversion:
    """An answer in the form of another protocol.

    Attributes:
        record: vLLM's record of a request; `answer_record`: of its answer.
        unused: further fields, which change no answer here; `names`: fields of the protocol by those of the chat.
        turns: the field with the messages, and kinds of their parts.
        tools: kinds of tools, the default one first. The provider of the protocol runs the others itself.
    """

    record: ClassVar[Any]
    answer_record: ClassVar[Any]
    unused: ClassVar[Collection[str]]
    names: ClassVar[Mapping[str, str]]
    turns: ClassVar[tuple[str, Sequence[str]]]
    tools: ClassVar[Sequence[str]]
    _convert: Any

    def __init__(self, front_end: FrontEnd, vllm: Any, ask: Ask) -> None:
        """`vllm`: the state of vLLM's API server, which holds its API objects."""
        self._front_end, self._vllm, self._ask = front_end, vllm, ask
        self._has_asked = False
        self._failure: ApiError | None = None
        self._asked_drafting, self._drafting = dict[str, Any](), dict[str, Any]()

    async def answer(self, document: dict[str, Any]) -> AsyncGenerator[str]:
        """One JSON text, or server-sent events. Raises ApiError, as `FrontEnd.answer`."""
        try:
            fields = drop_unused(document, self.unused)
            check_counts(fields, self._front_end.limits)
            self._asked_drafting = {name: fields.pop(name) for name in ("drafting",) if name in fields}
            check_kinds("tools", fields.get("tools"), self.tools, self.tools[0])
            messages = fields.get(self.turns[0])
            for index, message in enumerate(messages if isinstance(messages, list) else ()):
                if isinstance(message, dict) and "role" in message:
                    check_kinds(f"{self.turns[0]}.{index}.content", message.get("content"), self.turns[1])
            async with contextlib.aclosing(self._convert(fields)) as pieces:
                async for piece in pieces:
                    if self._failure is not None:
                        break
                    yield piece
            if self._failure is not None:
                raise self._failure
        except ApiError as error:
            if not self._has_asked:
                self._front_end.metrics.count_answer("", error.status)
            first, dot, rest = (error.param or "").partition(".")
            name = first if first in document else self.names.get(first, first)
            if name != first:
                error.message, error.param = error.message.replace(first, name, 1), name + dot + rest
            raise

    async def _chat(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        """The pieces of the chat's answer. Keeps its `drafting`, and the error of a stream, which so ends."""
        self._has_asked = True
        try:
            async with contextlib.aclosing(self._ask({**fields, **self._asked_drafting})) as pieces:
                async for piece in pieces:
                    if '"drafting":' in piece:
                        self._drafting = event_document(piece).get("drafting", self._drafting)
                    yield piece
        except ApiError as error:
            if not fields.get("stream"):
                raise
            self._failure = error


class Messages(Conversion):
    """Anthropic's Messages API, by vLLM's handler of it with this service's chats in place of its own."""

    record, answer_record = anthropic.AnthropicMessagesRequest, anthropic.AnthropicMessagesResponse
    unused = frozenset(
        {"anthropic_version", "cache_control", "context_management", "inference_geo", "metadata", "service_tier"}
    )
    names: ClassVar = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
    turns = "messages", get_args(anthropic.AnthropicContentBlock.model_fields["type"].annotation)
    tools = ("custom",)

    async def _convert(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        request = parse_record(self.record, fields)

        async def create_chat_completion(chat: ChatCompletionRequest, _: Any = None) -> Any:
            pieces = self._chat(chat.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True))
            if chat.stream:  # vLLM's converter does not close what it reads
                return await stack.enter_async_context(contextlib.aclosing(pieces))
            found = ChatCompletionResponse.model_validate_json("".join([piece async for piece in pieces]))
            (choice,) = found.choices
            if choice.finish_reason == "length" and (calls := choice.message.tool_calls):  # the last one may be cut
                choice.message.tool_calls = [call for call in calls if _is_json(call.function.arguments)]
            return found

        handler = copy.copy(self._vllm.anthropic_serving_messages)
        handler.create_chat_completion = create_chat_completion
        async with contextlib.AsyncExitStack() as stack:
            with refused():
                result = await handler.create_messages(request)
            if isinstance(result, anthropic.AnthropicMessagesResponse):
                yield json.dumps({**result.model_dump(exclude_none=True), "drafting": self._drafting})
                return
            async for event in await stack.enter_async_context(contextlib.aclosing(result)):
                kind, _, data = event.partition("\n")
                if kind == "event: message_delta":  # the last one before message_stop
                    found = {**event_document(data), "drafting": self._drafting}
                    event = wrap_data_with_event(json.dumps(found), "message_delta")
                yield event


NOT_SERVED = "background", "conversation", "previous_input_messages", "previous_response_id", "prompt"
"""Fields of the Responses API that need a store, or messages in Harmony's form."""
_CONVERTED = {"input", "instructions", "tools", "tool_choice", "stream", "top_logprobs", "metadata", "service_tier"}
_SAME = (responses.ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()) - _CONVERTED


class Responses(Conversion):
    """OpenAI's Responses API, as vLLM serves it without a store and without tools of its own."""

    record, answer_record = responses.ResponsesRequest, responses.ResponsesResponse
    unused = frozenset({"prompt_cache_options", "prompt_cache_retention", "safety_identifier", "stream_options"})
    names: ClassVar = {
        "messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }  # fmt: skip
    turns = "input", ("input_text", "input_image", "output_text")
    tools = ("function", "custom", "namespace")

    async def _convert(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        for name in (name for name in NOT_SERVED if fields.get(name)):
            text = f"{name} is not served here: nothing is stored, so send the whole conversation in input"
            raise ApiError(400, text, param=name, code="not_served")
        request: responses.ResponsesRequest = parse_record(self.record, fields)
        with refused(lambda: "input"):
            chat = _chat_fields(request, fields)
            defaults = self._vllm.openai_serving_responses.default_sampling_params
            sampling = request.to_sampling_params(self._front_end.max_model_len or 1, defaults)
        processor = SimpleStreamingEventProcessor(tools=request.tools)
        numbers, created_s = itertools.count(), int(time.time())
        has_begun, reason, usage = False, None, None

        def response(status: Any) -> Any:
            made = self._front_end.model, created_s, processor.output_items, status, usage and _usage(usage)
            return responses.ResponsesResponse.from_request(request, sampling, *made)

        def as_text(event: Any) -> str:
            event.sequence_number = next(numbers)
            return str(wrap_data_with_event(event.model_dump_json(by_alias=True), event.type))

        async with contextlib.aclosing(self._chat(chat)) as pieces:
            async for piece in pieces:
                if not (document := event_document(piece)):
                    continue
                events: list[Any] = []
                if not has_begun:
                    has_begun, request.request_id = True, document["id"].replace("chatcmpl-", "resp_", 1)
                    begun: Any = {"sequence_number": 0, "response": response("in_progress")}
                    events += [responses.ResponseCreatedEvent(type="response.created", **begun)]
                    events += [responses.ResponseInProgressEvent(type="response.in_progress", **begun)]
                usage = document.get("usage") or usage
                for choice in document["choices"]:
                    reason = choice.get("finish_reason") or reason
                    events += _events_of(processor, choice)
                for event in events if request.stream else ():
                    yield as_text(event)
        events = processor.close_current()
        found = response("incomplete" if reason == "length" else "completed")
        found.drafting = self._drafting
        if not request.stream:
            yield found.model_dump_json(by_alias=True)
            return
        # Also if it is incomplete, as in vLLM: OpenAI's client takes no other event for the last one.
        last = responses.ResponseCompletedEvent(type="response.completed", sequence_number=0, response=found)
        for event in (*events, last):
            yield as_text(event)


def _chat_fields(request: responses.ResponsesRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
    made = utils.construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
    for message in made:
        if isinstance(content := message.get("content"), list):  # a chat has one kind of text
            message["content"] = [{"type": "text", "text": one["text"]} if "text" in one else one for one in content]
    chat["messages"] = made
    if utils.should_continue_final_message(request.input):
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if request.reasoning is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.is_include_output_logprobs():
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if (tools := utils.construct_tool_dicts(request.tools, "auto")) is not None:
        chat |= {"tools": tools, "tool_choice": request.tool_choice}
        if not isinstance(request.tool_choice, str):
            name = getattr(request.tool_choice, "name", "")  # others have no name, and name no tool of these
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    form = fields.get("text", {}).get("format", {})
    if (kind := form.get("type", "text")) != "text":
        chat["response_format"] = {"type": kind, **({"json_schema": form} if kind == "json_schema" else {})}
    return chat


def _events_of(processor: SimpleStreamingEventProcessor, choice: dict[str, Any]) -> list[Any]:
    """The events of a choice of a chat, or of a chunk of it."""
    delta = choice["delta"] if "delta" in choice else choice["message"]
    for index, call in enumerate(delta.get("tool_calls") or ()):
        call.setdefault("index", index)
    logged = (choice.get("logprobs") or {}).get("content") or ()
    logprobs = [Logprob.model_validate(one) for one in logged]
    events: list[Any] = []
    for part in split_delta(DeltaMessage.model_validate(delta)):
        target, call = processor.resolve_target_state(part)
        if target.name != "NONE":
            if processor.needs_transition(target, call):
                events += [*processor.close_current(), *processor.open(target, call)]
            events += processor.emit_delta(part, choice, lambda _: logprobs)  # type: ignore[arg-type]
    return events


def _usage(usage: dict[str, Any]) -> responses.ResponseUsage:
    prompt, answer = (usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion"))
    cached, written = (prompt.get(name) or 0 for name in ("cached_tokens", "created_cache_tokens"))
    return responses.ResponseUsage.model_validate({
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    })  # fmt: skip


CONVERSIONS: dict[str, type[Conversion]] = {"/v1/responses": Responses, "/v1/messages": Messages}

TOKENIZER_PATHS: dict[str, dict[type[BaseModel], type[BaseModel]]] = {
    "/tokenize": {
        tokenizer.TokenizeCompletionRequest: tokenizer.TokenizeResponse,
        tokenizer.TokenizeChatRequest: tokenizer.TokenizeResponse,
    },
    "/detokenize": {tokenizer.DetokenizeRequest: tokenizer.DetokenizeResponse},
    "/v1/messages/count_tokens": {anthropic.AnthropicCountTokensRequest: anthropic.AnthropicCountTokensResponse},
}
"""Records that each path takes, with their answers, for which the tokenizer alone is needed."""


async def answer_by_tokenizer(path: str, front_end: FrontEnd, vllm: Any, document: dict[str, Any]) -> str:
    """The answer to a request at a path of `TOKENIZER_PATHS`, a JSON text. Raises ApiError."""
    fields = drop_unused(document, Messages.unused)
    check_counts(fields, front_end.limits)
    front_end.check_model(fields)
    request = parse_record([*TOKENIZER_PATHS[path]]["messages" in fields and path == "/tokenize"], fields)
    api = vllm.serving_tokenization
    ask = {"/tokenize": api.create_tokenize, "/detokenize": api.create_detokenize}.get(path)
    try:
        result = await (ask or vllm.anthropic_serving_messages.count_tokens)(request, None)
    except Exception as error:  # noqa: BLE001  # vLLM knows which are the client's fault
        result = api.create_error_response(error)
        if result.error.code >= 500:
            logger.error("a request to %s failed", path, exc_info=error)
    if isinstance(result, ErrorResponse):
        raise from_engine(result.error)
    return str(result.model_dump_json(exclude_none=True))
