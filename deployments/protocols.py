"""What answers beside OpenAI's own calls: Anthropic's Messages, and vLLM's paths for tokens."""

import contextlib
import copy
import json
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages, _is_json, wrap_data_with_event
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize import protocol as tokenizer

from deployments.body import UNUSED_FIELDS, check_counts, drop_unused, from_engine, parse_record
from deployments.front_end import Answer, FrontEnd, Usage, event_document, logger


class MessageForm:
    """Anthropic's Messages by vLLM's handler of them, in two halves: the chat that it makes of a message, whose answer
    is a chat's in all that concerns drafts and errors, and the form that it gives to this answer."""

    def __init__(self, handler: AnthropicServingMessages) -> None:
        self._handler, self._chats = handler, copy.copy(handler)
        self._chats.messages_full_converter = self._chats.message_stream_converter = lambda answer: answer  # type: ignore

    async def ask(self, message: anthropic.AnthropicMessagesRequest, request: Request) -> Any:
        """The answer of the chat that a message is: whole, a generator of its events, or an `ErrorResponse`."""
        return await self._chats.create_messages(message, request)

    def write(self, answer: ChatCompletionResponse, drafting: dict[str, Any]) -> str:
        (choice,) = answer.choices
        if choice.finish_reason == "length":  # the last call may be cut
            choice.message.tool_calls = [
                call for call in choice.message.tool_calls if _is_json(call.function.arguments)
            ]
        found = self._handler.messages_full_converter(answer).model_dump(exclude_none=True)
        return json.dumps({**found, "drafting": drafting})

    async def convert_events(self, items: Answer) -> Answer:
        """The events of a message from the items of the chat's answer. Raises what these raise."""
        drafting: dict[str, Any] = {}
        usages, failure = list[Usage](), None

        async def read_chunks() -> Any:
            nonlocal drafting, failure
            try:
                async for item in items:
                    if isinstance(item, Usage):
                        usages.append(item)
                    elif isinstance(item, str):
                        if '"drafting":' in item:
                            drafting = event_document(item)["drafting"]
                        yield item
            except Exception as error:  # noqa: BLE001  # of which vLLM would make an event without its words
                failure = error

        async with (
            contextlib.aclosing(items),
            contextlib.aclosing(read_chunks()) as chunks,
            contextlib.aclosing(self._handler.message_stream_converter(chunks)) as events,
        ):
            async for event in events:
                while usages:  # before what the client may not read
                    yield usages.pop()
                kind, _, data = event.partition("\n")
                if kind == "event: message_delta":  # the last one before message_stop
                    event = wrap_data_with_event(
                        json.dumps({**event_document(data), "drafting": drafting}), "message_delta"
                    )
                yield event
        if failure is not None:
            raise failure


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
    fields = drop_unused(document, UNUSED_FIELDS["messages"])
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
