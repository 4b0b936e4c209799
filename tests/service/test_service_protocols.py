"""The service through the official clients of OpenAI and Anthropic. Each protocol is converted to a chat and back, so
its text is compared with the chat's own."""

import json
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.support.service_harness import QUESTION, Service, run_together

pytestmark = pytest.mark.service

SYSTEM = "You answer in one sentence."  # its own: it becomes a workload
LIMIT = 12


class Weather(BaseModel):
    city: Literal["Lisbon", "Porto"]


@pytest.fixture(scope="module")
def said(application: Service) -> Any:
    """The chat's own answer to the question with the system prompt."""
    return application.ask(messages=[{"role": "system", "content": SYSTEM}, *QUESTION], max_tokens=LIMIT).json()


def claude(service: Service) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=120)


def test_anthropics_client_gets_the_chats_text_whole_and_as_a_stream(application: Service, said: Any) -> None:
    asked: dict[str, Any] = {"model": application.model, "max_tokens": LIMIT, "system": SYSTEM, "messages": QUESTION}
    asked["extra_body"] = {"temperature": 0, "drafting": {"k": 3}}  # the client has no argument for the first
    messages = claude(application).messages
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    text = said["choices"][0]["message"]["content"]
    for answer in (whole, streamed):
        assert [(block.type, block.text) for block in answer.content] == [("text", text)]
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", LIMIT)
        num_prompt_tokens = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        assert num_prompt_tokens == said["usage"]["prompt_tokens"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert (whole.drafting["k"], whole.drafting["num_draft_tokens"] > 0) == (3, True)
    del asked["max_tokens"], asked["extra_body"]
    assert messages.count_tokens(**asked).input_tokens == said["usage"]["prompt_tokens"]


def test_anthropics_client_calls_a_tool_and_gets_errors_of_its_own_form(application: Service) -> None:
    tool: Any = {"name": "weather", "input_schema": WEATHER["function"]["parameters"], "strict": True}
    asked: dict[str, Any] = {"model": application.model, "tools": [tool], "extra_body": {"temperature": 0}}
    asked["extra_headers"] = FEW_DRAFTS
    messages, choice = claude(application).messages, {"type": "tool", "name": "weather"}
    called = {**asked, "max_tokens": 100, "messages": QUESTION, "tool_choice": choice}

    def read_stream() -> anthropic.types.Message:
        with messages.stream(**called) as stream:
            return stream.get_final_message()

    for answer in run_together(lambda: messages.create(**called), read_stream):
        (block,) = answer.content
        assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        Weather.model_validate(block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "It rains."}
    turns: Any = [*QUESTION, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert messages.create(**asked, max_tokens=8, messages=turns).usage.input_tokens > answer.usage.input_tokens
    cut = messages.create(**asked, max_tokens=3, messages=QUESTION, tool_choice=choice)
    assert (cut.stop_reason, [part.type for part in cut.content]) == ("max_tokens", ["text"])
    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="other", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError) as refused:
        messages.create(model=application.model, max_tokens=1, messages=[{"role": "user", "content": "word " * 4000}])
    assert refused.value.type == "invalid_request_error"


def test_responses_have_the_chats_text_whole_and_as_a_stream(application: Service, said: Any) -> None:
    asked: dict[str, Any] = {"model": application.model, "instructions": SYSTEM, "input": QUESTION[0]["content"]}
    asked |= {"max_output_tokens": LIMIT, "temperature": 0, "extra_body": {"drafting": {"k": 3}}}
    client = application.client()
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    text = said["choices"][0]["message"]["content"]
    for answer in (whole, streamed):
        assert (answer.output_text, answer.status) == (text, "incomplete")
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (said["usage"]["prompt_tokens"], LIMIT)
        assert (answer.drafting["k"], answer.drafting["num_draft_tokens"] > 0) == (3, True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    logged = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = logged.output[0].content
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * LIMIT


def test_a_tool_of_a_response_is_called_and_the_next_turn_has_its_result(application: Service) -> None:
    tool, choice = {"type": "function", "strict": True, **WEATHER["function"]}, {"type": "function", "name": "weather"}
    asked: dict[str, Any] = {"model": application.model, "tools": [tool], "temperature": 0}
    asked["extra_headers"] = FEW_DRAFTS
    responses, question = application.client().responses, list(QUESTION)
    called = {**asked, "input": question, "tool_choice": choice}

    def read_stream() -> Any:
        with responses.stream(**called) as stream:
            return stream.get_final_response()

    for answer in run_together(lambda: responses.create(**called), read_stream):
        (call,) = answer.output
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "weather")
        Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    turns: Any = [*question, call.model_dump(exclude_none=True, exclude={"parsed_arguments"}), result]
    after = responses.create(**asked, max_output_tokens=8, input=turns)
    assert after.usage.input_tokens > answer.usage.input_tokens


def test_openais_client_parses_answers_of_a_schema(application: Service) -> None:
    client, asked = application.client(), {"model": application.model, "temperature": 0}
    chat, response = run_together(
        lambda: client.chat.completions.parse(**asked, messages=QUESTION, response_format=Weather, max_tokens=60),
        lambda: client.responses.parse(**asked, input="Hi", text_format=Weather, max_output_tokens=60),
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    assert isinstance(response.output_parsed, Weather)


def test_text_becomes_tokens_and_tokens_text(application: Service, said: Any) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{application.url}/{path}", json={"model": application.model, **body}, timeout=60)

    found = post("tokenize", prompt="One, two, three", return_token_strs=True).json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert found["token_strs"][0] == "One"
    assert post("detokenize", tokens=found["tokens"]).json() == {"prompt": "One, two, three"}
    turns = [{"role": "system", "content": SYSTEM}, *QUESTION]
    assert post("tokenize", messages=turns).json()["count"] == said["usage"]["prompt_tokens"]
    assert post("tokenize", messages=turns, chat_template="{{ 1 }}").status_code == 400
    assert post("detokenize", tokens=[2**63 - 1]).status_code == 400
    assert post("tokenize", messages=[3]).json()["error"]["param"] == "messages.0"


# ---- tool calls: vLLM's parser makes them of the model's text, answered whole and as a stream
# The target is too small to call a tool by itself, so each text is forced: by `tool_choice`, or `structured_outputs`.


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Lisbon", "Porto"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FEW_DRAFTS = {"X-Drafting-K": "1"}  # a grammar rules most of them out
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Porto"}}</tool_call>'
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
WAYS: dict[str, dict[str, Any]] = {
    "named": {"tools": [STRICT], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    "auto": {"tools": [WEATHER], "extra_body": {"structured_outputs": {"choice": [CALL]}}},
}
"""Without `strict` vLLM lets the arguments of a call be any JSON."""


@pytest.mark.parametrize("way", WAYS)
def test_a_call_has_openais_form_whole_and_as_a_stream(application: Service, way: str) -> None:
    asked = {"model": application.model, "messages": QUESTION, "max_tokens": 100, "temperature": 0}
    asked |= {"extra_headers": FEW_DRAFTS}
    chat = application.client().chat.completions
    answer, chunks = run_together(
        lambda: chat.create(**asked, **WAYS[way]),
        lambda: [chunk for chunk in chat.create(**asked, **WAYS[way], stream=True) if chunk.choices],
    )
    assert answer.drafting["num_draft_tokens"] > 0
    (choice,) = answer.choices
    assert choice.finish_reason == ("stop" if way == "named" else "tool_calls")
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, bool(call.id)) == ("function", "weather", True)
    arguments = json.loads(call.function.arguments)
    assert arguments in ({"city": "Lisbon"}, {"city": "Porto"})

    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert [delta.function.name for delta in deltas if delta.function.name] == ["weather"]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def test_an_answer_without_a_call_is_text(application: Service) -> None:
    (choice,) = application.ask(tools=[WEATHER]).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert not choice["message"].get("tool_calls")


# ---- reasoning: vLLM's parser tells it from the answer, with drafts and without, in each API
# The target reasons because its turns before do, in plain text: it has no token for `<think>`.


SEEN = [("grass", "green"), ("snow", "white")]
TURNS: list[dict[str, str]] = []
for thing, color in SEEN:
    spoken = f"<think>The user asks for a color. {thing.title()} is {color}.</think>{thing.title()} is {color}."
    TURNS += [{"role": "user", "content": f"What color is {thing}?"}, {"role": "assistant", "content": spoken}]
TURNS.append({"role": "user", "content": "What color is the sky?"})
ON = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def parts(application: Service) -> tuple[str, str]:
    """Reasoning and answer, by hand from what the target says without drafts and without the parser."""
    message = application.ask(messages=TURNS, max_tokens=60, drafting={"k": 0}).json()["choices"][0]["message"]
    assert message.get("reasoning") is None
    begin, reasoning, answer = message["content"].replace("</think>", "<think>").split("<think>")
    assert (begin, bool(reasoning), bool(answer)) == ("", True, True)
    return reasoning, answer


def test_a_chat_has_its_reasoning_apart_whole_and_as_a_stream(application: Service, parts: tuple[str, str]) -> None:
    asked: dict[str, Any] = {"model": application.model, "messages": TURNS, "max_tokens": 60, "temperature": 0}
    asked["extra_body"] = ON
    chat = application.client().chat.completions
    whole, chunks = run_together(
        lambda: chat.create(**asked), lambda: [chunk for chunk in chat.create(**asked, stream=True) if chunk.choices]
    )
    message = whole.choices[0].message
    assert (message.reasoning, message.content) == parts
    assert whole.drafting["num_accepted_tokens"] > 0
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [(getattr(delta, "reasoning", None) or "", delta.content or "") for delta in deltas]
    assert tuple(map("".join, zip(*pieces, strict=True))) == parts


def test_a_response_and_a_message_have_it_in_parts_of_their_own(application: Service, parts: tuple[str, str]) -> None:
    asked: dict[str, Any] = {"model": application.model, "extra_body": {**ON, "temperature": 0}}
    of_responses = {**asked, "input": TURNS, "max_output_tokens": 60}
    of_messages = {**asked, "messages": TURNS, "max_tokens": 60}
    responses: Any = application.client().responses
    messages: Any = claude(application).messages

    def read_response() -> tuple[list[Any], Any]:
        with responses.stream(**of_responses) as stream:
            return list(stream), stream.get_final_response()

    def read_message() -> Any:
        with messages.stream(**of_messages) as stream:
            return stream.get_final_message()

    response, (events, streamed_response), *of_claude = run_together(
        lambda: responses.create(**of_responses), read_response, lambda: messages.create(**of_messages), read_message
    )
    for answer in (response, streamed_response):
        reasoning, message = answer.output
        assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", *parts)
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == parts[0]
    for answer in of_claude:
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", *parts)
