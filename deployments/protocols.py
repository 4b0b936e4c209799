"""Other protocols around a chat: OpenAI's Responses, Anthropic's Messages, and vLLM's paths for tokens.

Enters: the body of a request. Leaves: its answer in the protocol's form. A request becomes the fields of a chat, which
goes through `FrontEnd.answer` as any other, and vLLM's own classes convert both ways. Nothing is stored.
"""

import contextlib
import copy
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, get_args

from openai.types.responses.response_output_text import Logprob
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicCountTokensResponse,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import wrap_data_with_event
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, UsageInfo
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)

from deployments.body import check_counts, check_document, from_engine, parse_record, refused
from deployments.errors import ApiError
from deployments.front_end import FrontEnd, event_document

logger = logging.getLogger(__name__)

Ask = Callable[[dict[str, Any]], AsyncGenerator[str]]
"""The answer to a chat with these fields, as `FrontEnd.answer` gives it."""


def read_fields(front_end: FrontEnd, document: Any, unused: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a body that are not null, without `unused`. Raises ApiError."""
    given = check_document(document, front_end.limits.max_body_values)
    fields = {name: value for name, value in given.items() if value is not None and name not in unused}
    check_counts(fields, front_end.limits)
    return fields


def check_tools(fields: Mapping[str, Any], kinds: Sequence[str]) -> None:
    """Raises ApiError (400) for a tool that the provider of the protocol runs itself. `kinds`: the others."""
    tools = fields.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type", kinds[0]) if isinstance(tool, dict) else kinds[0]
        if kind not in kinds:
            name = f"tools.{index}.type"
            raise ApiError(400, f"{name} is {kind!r:.80}, but only {', '.join(kinds)} is served here", param=name)


def check_parts(fields: Mapping[str, Any], name: str, kinds: Sequence[str]) -> None:
    """Raises ApiError (400) for a part of a message that is of none of these kinds."""
    messages = fields.get(name)
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        parts = message.get("content") if isinstance(message, dict) and "role" in message else None
        for number, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict) or part.get("type") not in kinds:
                where = f"{name}.{index}.content.{number}"
                raise ApiError(400, f"{where} must be an object whose type is one of {', '.join(kinds)}", param=where)


class Conversion:
    """An answer in the form of another protocol.

    Attributes:
        names: fields of the protocol by those of the chat.
        unused: fields that clients send and that change no answer here.
    """

    names: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[Collection[str]] = ()

    def __init__(self, front_end: FrontEnd, vllm: Any, ask: Ask) -> None:
        """`vllm`: the state of vLLM's API server, which holds its API objects."""
        self._front_end, self._vllm = front_end, vllm
        self._ask, self._has_asked = ask, False
        self._drafting: Any = None

    async def answer(self, document: Any) -> AsyncGenerator[str]:
        """One JSON text, or server-sent events. Raises ApiError, as `FrontEnd.answer`."""
        try:
            fields = read_fields(self._front_end, document, self.unused)
            async with contextlib.aclosing(self._convert(fields)) as pieces:
                async for piece in pieces:
                    yield piece
        except ApiError as error:
            if not self._has_asked:
                self._front_end.metrics.count_answer("", error.status)
            first, dot, rest = (error.param or "").partition(".")
            is_sent = isinstance(document, dict) and first in document
            if (name := self.names.get(first)) is not None and not is_sent:
                error.message, error.param = error.message.replace(first, name, 1), name + dot + rest
            raise

    def _convert(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        raise NotImplementedError

    async def _chat(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        """The pieces of the chat's answer. Their `drafting` is kept."""
        self._has_asked = True
        async with contextlib.aclosing(self._ask(fields)) as pieces:
            async for piece in pieces:
                if '"drafting":' in piece:
                    document = event_document(piece) or json.loads(piece)
                    self._drafting = document.get("drafting", self._drafting)
                yield piece

    async def _whole(self, fields: dict[str, Any]) -> ChatCompletionResponse:
        return ChatCompletionResponse.model_validate_json("".join([piece async for piece in self._chat(fields)]))


BLOCKS: Sequence[str] = get_args(AnthropicContentBlock.model_fields["type"].annotation)
"""Kinds of parts of Anthropic's messages."""


class Messages(Conversion):
    """Anthropic's Messages API, by vLLM's handler of it with this service's chats in place of its own."""

    names: ClassVar = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
    unused = frozenset(
        {"anthropic_version", "cache_control", "context_management", "inference_geo", "metadata", "service_tier"}
    )

    async def _convert(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        drafting, failures = fields.pop("drafting", None), list[ApiError]()
        check_tools(fields, ("custom",))
        check_parts(fields, "messages", BLOCKS)
        request = parse_record(AnthropicMessagesRequest, fields)

        async def until_failure(pieces: AsyncGenerator[str]) -> AsyncGenerator[str]:
            try:
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        yield piece
            except ApiError as error:  # vLLM's converter of streams would turn it into another one
                failures.append(error)

        async def create_chat_completion(chat: ChatCompletionRequest, _: Any = None) -> Any:
            asked = chat.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
            if drafting is not None:
                asked["drafting"] = drafting
            if chat.stream:  # vLLM's converter does not close what it reads
                return await stack.enter_async_context(contextlib.aclosing(until_failure(self._chat(asked))))
            found = await self._whole(asked)
            (choice,) = found.choices
            if choice.finish_reason == "length":  # vLLM reads the arguments of every call, also of one that is cut
                choice.message.tool_calls = [call for call in choice.message.tool_calls if _is_json(call)]
            return found

        handler = copy.copy(self._vllm.anthropic_serving_messages)
        handler.create_chat_completion = create_chat_completion
        async with contextlib.AsyncExitStack() as stack:
            with refused():
                result = await handler.create_messages(request)
            if isinstance(result, AnthropicMessagesResponse):
                yield _json({**result.model_dump(exclude_none=True), "drafting": self._drafting})
                return
            async for event in await stack.enter_async_context(contextlib.aclosing(result)):
                if failures:
                    raise failures[0]
                kind, _, data = event.partition("\n")
                if kind == "event: message_delta":  # the last one before message_stop
                    found = {**event_document(data), "drafting": self._drafting}
                    event = wrap_data_with_event(_json(found), "message_delta")
                yield event
            for failure in failures:
                raise failure


def _is_json(call: Any) -> bool:
    try:
        json.loads(call.function.arguments)
    except ValueError:
        return False
    return True


def _json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


NOT_STORED = "answers are not stored here: send the whole conversation in input"
NOT_SERVED = {
    "background": "answers are not made in the background here: leave it out",
    "conversation": NOT_STORED,
    "enable_response_messages": "leave it out",
    "previous_input_messages": "send the whole conversation in input",
    "previous_response_id": NOT_STORED,
    "prompt": "no templates of prompts are stored here: send instructions and input",
}
"""Fields of the Responses API that ask for what is not here, and what to do instead."""

_CONVERTED = {"input", "instructions", "tools", "tool_choice", "stream", "top_logprobs", "metadata", "service_tier"}
SHARED = (ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()) - _CONVERTED
"""Fields that a chat has under the same name."""


class Responses(Conversion):
    """OpenAI's Responses API, as vLLM serves it without a store and without tools of its own."""

    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    unused = frozenset({"prompt_cache_options", "prompt_cache_retention", "safety_identifier", "stream_options"})

    async def _convert(self, fields: dict[str, Any]) -> AsyncGenerator[str]:
        for name, instead in NOT_SERVED.items():
            if fields.get(name):
                raise ApiError(400, f"{name} is not served: {instead}", param=name, code="not_served")
        drafting = fields.pop("drafting", None)
        check_tools(fields, ("function", "custom", "namespace"))
        check_parts(fields, "input", ("input_text", "input_image", "output_text"))
        request: ResponsesRequest = parse_record(ResponsesRequest, fields)
        with refused(lambda: "input"):
            chat = self._chat_fields(request, fields)
            defaults = self._vllm.openai_serving_responses.default_sampling_params
            self._sampling = request.to_sampling_params(self._front_end.max_model_len or 1, defaults)
        if drafting is not None:
            chat["drafting"] = drafting
        self._request, self._created = request, int(time.time())
        if not request.stream:
            found = await self._whole(chat)
            (choice,) = found.choices
            calls = [
                FunctionCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in choice.message.tool_calls
            ]
            items = build_response_output_items(
                choice.message.reasoning, choice.message.content, calls, _logprobs(choice) or None, request.tools
            )
            yield self._response(found.id, items, choice.finish_reason, found.usage).model_dump_json(by_alias=True)
            return
        numbers = itertools.count()

        def as_text(event: Any) -> str:
            event.sequence_number = next(numbers)
            return str(wrap_data_with_event(event.model_dump_json(by_alias=True), event.type))

        processor = SimpleStreamingEventProcessor(tools=request.tools)
        chat_id, reason, usage = "", None, None
        async with contextlib.aclosing(self._chat(chat)) as pieces:
            async for piece in pieces:
                if not (document := event_document(piece)):
                    continue
                chunk = ChatCompletionStreamResponse.model_validate(document)
                if not chat_id:
                    chat_id, begun = chunk.id, self._response(chunk.id, [], None, None)
                    yield as_text(ResponseCreatedEvent(type="response.created", sequence_number=0, response=begun))
                    started = ResponseInProgressEvent(type="response.in_progress", sequence_number=0, response=begun)
                    yield as_text(started)
                usage = chunk.usage or usage
                for part in chunk.choices:
                    reason = part.finish_reason or reason
                    for delta in split_delta(part.delta):
                        for event in _events_of(processor, delta, part):
                            yield as_text(event)
        for event in processor.close_current():
            yield as_text(event)
        response = self._response(chat_id, processor.output_items, reason or "stop", usage)
        # Also if it is incomplete, as in vLLM: OpenAI's client takes no other event for the last one.
        yield as_text(ResponseCompletedEvent(type="response.completed", sequence_number=0, response=response))

    @staticmethod
    def _chat_fields(request: ResponsesRequest, fields: Mapping[str, Any]) -> dict[str, Any]:
        made = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        chat: dict[str, Any] = {name: fields[name] for name in SHARED if name in fields}
        chat["messages"] = [_message(message) for message in made]
        if should_continue_final_message(request.input):
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        if request.max_output_tokens is not None:
            chat["max_completion_tokens"] = request.max_output_tokens
        if request.truncation == "auto":
            chat["truncate_prompt_tokens"] = -1
        if request.reasoning is not None and request.reasoning.effort is not None:
            chat["reasoning_effort"] = request.reasoning.effort
        if request.is_include_output_logprobs():
            chat |= {"logprobs": True, "top_logprobs": request.top_logprobs}
        if request.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        if (tools := construct_tool_dicts(request.tools, "auto")) is not None:
            tools = [{**tool, "function": _without_null(tool["function"])} for tool in tools]
            chat |= {"tools": tools, "tool_choice": request.tool_choice}
            if not isinstance(request.tool_choice, str):
                if request.tool_choice.type not in ("function", "custom"):
                    text = f"tool_choice.type {request.tool_choice.type} is not served: name one tool, or send a mode"
                    raise ApiError(400, text, param="tool_choice", code="not_served")
                chat["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
        form = fields.get("text", {}).get("format", {})
        if form.get("type") == "json_schema":
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {name: value for name, value in form.items() if name != "type"},
            }
        elif form.get("type") == "json_object":
            chat["response_format"] = {"type": "json_object"}
        return chat

    def _response(self, chat_id: str, items: list[Any], reason: str | None, usage: UsageInfo | None) -> Any:
        """`reason`: the chat's `finish_reason`, None while there is more to come."""
        request, status = self._request, "completed"
        if reason is None or reason == "length":
            status = "in_progress" if reason is None else "incomplete"
        request.request_id = chat_id.replace("chatcmpl-", "resp_", 1)
        response = ResponsesResponse.from_request(
            request, self._sampling, self._front_end.model, self._created, items, status, _usage(usage)  # type: ignore[arg-type]
        )  # fmt: skip
        if reason is not None:
            response.drafting = self._drafting  # type: ignore[attr-defined]
        return response


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a chat from one of the Responses API."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        if one.get("type") == "input_image":
            image = {"url": one.get("image_url"), "detail": one.get("detail", "auto")}
            return {"type": "image_url", "image_url": image}
        is_text = one.get("type") in ("input_text", "output_text")
        return {"type": "text", "text": one.get("text")} if is_text else one

    found = {name: value for name, value in message.items() if name not in ("id", "phase", "status", "type")}
    if isinstance(content := found.get("content"), list):
        found["content"] = [part(one) if isinstance(one, dict) else one for one in content]
    return found


def _logprobs(choice: Any) -> list[Logprob]:
    found = [] if choice.logprobs is None else choice.logprobs.content or []
    return [Logprob.model_validate(one.model_dump()) for one in found]


def _events_of(processor: SimpleStreamingEventProcessor, delta: Any, choice: Any) -> list[Any]:
    """The events of one part of a chat's chunk."""
    target, call = processor.resolve_target_state(delta)
    if target.name == "NONE":
        return []
    events: list[Any] = []
    if processor.needs_transition(target, call):
        events += [*processor.close_current(), *processor.open(target, call)]
    return [*events, *processor.emit_delta(delta, choice, _logprobs)]


def _usage(usage: UsageInfo | None) -> ResponseUsage | None:
    if usage is None:
        return None
    prompt, answer = usage.prompt_tokens_details, usage.completion_tokens_details
    cached, created = (0, 0) if prompt is None else (prompt.cached_tokens or 0, prompt.created_cache_tokens or 0)
    reasoning = 0 if answer is None else answer.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=created),
        output_tokens=usage.completion_tokens or 0,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
        total_tokens=usage.total_tokens,
    )


CONVERSIONS: dict[str, type[Conversion]] = {"/v1/responses": Responses, "/v1/messages": Messages}


# ---- what needs the tokenizer alone

TOKENIZER_PATHS: dict[str, Sequence[type[BaseModel]]] = {
    "/tokenize": (TokenizeCompletionRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
    "/v1/messages/count_tokens": (AnthropicCountTokensRequest,),
}
"""Records that each path takes."""

RECORD_ANSWERS: dict[type[BaseModel], type[BaseModel]] = {
    ResponsesRequest: ResponsesResponse,
    AnthropicMessagesRequest: AnthropicMessagesResponse,
    TokenizeCompletionRequest: TokenizeResponse,
    TokenizeChatRequest: TokenizeResponse,
    DetokenizeRequest: DetokenizeResponse,
    AnthropicCountTokensRequest: AnthropicCountTokensResponse,
}


async def answer_by_tokenizer(path: str, front_end: FrontEnd, vllm: Any, document: Any) -> str:
    """The answer to a request at a path of `TOKENIZER_PATHS`, a JSON text. Raises ApiError."""
    fields = read_fields(front_end, document, Messages.unused)
    front_end.check_model(fields)
    records = TOKENIZER_PATHS[path]
    if path == "/v1/messages/count_tokens":
        check_tools(fields, ("custom",))
    request: Any = parse_record(records["messages" in fields and len(records) > 1], fields)
    api = vllm.serving_tokenization
    try:
        if isinstance(request, AnthropicCountTokensRequest):
            with refused():
                result = await vllm.anthropic_serving_messages.count_tokens(request)
        elif isinstance(request, DetokenizeRequest):
            result = await api.create_detokenize(request, None)
        else:
            result = await api.create_tokenize(request, None)
    except ApiError:
        raise
    except OverflowError as error:  # of the tokenizer
        raise ApiError(400, f"tokens holds an id that the model does not have ({error})", param="tokens") from error
    except Exception as error:
        refusal = from_engine(api.create_error_response(error).error)
        if refusal.status == 500:
            logger.exception("a request to %s failed", path)
        raise refusal from error
    if isinstance(result, ErrorResponse):
        raise from_engine(result.error)
    return str(result.model_dump_json(exclude_none=True))
