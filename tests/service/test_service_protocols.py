"""The service through the official clients of OpenAI and Anthropic: Responses, Messages, parsed answers, tokens.

Each protocol is converted to a chat and back, so its text is compared with the chat's own.
"""

import asyncio
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.service.test_service_tools import WEATHER
from tests.support.service_harness import QUESTION, Service

pytestmark = pytest.mark.service

SYSTEM = "You answer in one short sentence."
LIMIT, PARAMETERS = 12, WEATHER["function"]["parameters"]


class Weather(BaseModel):
    city: Literal["Lisbon", "Porto"]


@pytest.fixture(scope="module")
def service(application: Service) -> Service:
    return application


@pytest.fixture(scope="module")
def said(service: Service) -> Any:
    """The chat's own answer to the question with the system prompt."""
    answer = service.ask(messages=[{"role": "system", "content": SYSTEM}, *QUESTION], max_tokens=LIMIT).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    return answer


def claude(service: Service) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=120)


def test_anthropics_client_gets_the_chats_text_whole_and_as_a_stream(service: Service, said: Any) -> None:
    asked: dict[str, Any] = {"model": service.model, "max_tokens": LIMIT, "system": SYSTEM, "messages": QUESTION}
    asked["extra_body"] = {"temperature": 0, "drafting": {"k": 3}}  # the client has no argument for the first
    messages = claude(service).messages
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
    assert whole.drafting["k"] == 3
    assert whole.drafting["num_draft_tokens"] > 0
    del asked["max_tokens"], asked["extra_body"]
    assert messages.count_tokens(**asked).input_tokens == said["usage"]["prompt_tokens"]


def test_anthropics_client_calls_a_tool_and_sends_its_result(service: Service) -> None:
    tool: Any = {"name": "weather", "input_schema": PARAMETERS, "strict": True}
    asked: dict[str, Any] = {"model": service.model, "max_tokens": 100, "tools": [tool]}
    asked["extra_body"] = {"temperature": 0}
    messages, choice = claude(service).messages, {"type": "tool", "name": "weather"}
    whole = messages.create(**asked, messages=QUESTION, tool_choice=choice)
    with messages.stream(**asked, messages=QUESTION, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        Weather.model_validate(block.input)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "It rains."}
    turns: Any = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = messages.create(**asked | {"max_tokens": 8}, messages=turns)
    assert after.usage.input_tokens > whole.usage.input_tokens
    cut = messages.create(**asked | {"max_tokens": 3}, messages=QUESTION, tool_choice=choice)
    assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["text"])


def test_anthropics_client_gets_errors_of_its_own_form(service: Service) -> None:
    messages = claude(service).messages
    with pytest.raises(anthropic.NotFoundError) as missing:
        messages.create(model="other", max_tokens=1, messages=QUESTION)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as long:
        messages.create(model=service.model, max_tokens=1, messages=[{"role": "user", "content": "word " * 4000}])
    assert long.value.type == "invalid_request_error"


def test_responses_have_the_chats_text_whole_and_as_a_stream(service: Service, said: Any) -> None:
    asked: dict[str, Any] = {"model": service.model, "instructions": SYSTEM, "input": QUESTION[0]["content"]}
    asked |= {"max_output_tokens": LIMIT, "temperature": 0, "extra_body": {"drafting": {"k": 3}}}
    client = service.client()
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    text = said["choices"][0]["message"]["content"]
    for answer in (whole, streamed):
        assert (answer.output_text, answer.status) == (text, "incomplete")
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (said["usage"]["prompt_tokens"], LIMIT)
        assert answer.drafting["k"] == 3
        assert answer.drafting["num_draft_tokens"] > 0
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    logged = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = logged.output[0].content
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * LIMIT


def test_a_tool_of_a_response_is_called_and_the_next_turn_has_its_result(service: Service) -> None:
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    choice = {"type": "function", "name": "weather"}
    asked: dict[str, Any] = {"model": service.model, "tools": [tool], "temperature": 0, "max_output_tokens": 100}
    responses, question = service.client().responses, list(QUESTION)
    whole = responses.create(**asked, input=question, tool_choice=choice)
    with responses.stream(**asked, input=question, tool_choice=choice) as stream:
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        (call,) = answer.output
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "weather")
        Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "It rains."}
    turns: Any = [*question, *(item.model_dump(exclude_none=True) for item in whole.output), result]
    after = responses.create(**asked | {"max_output_tokens": 8}, input=turns)
    assert after.usage.input_tokens > whole.usage.input_tokens


def test_openais_client_parses_answers_of_a_schema(service: Service) -> None:
    client = service.client()
    asked: dict[str, Any] = {"model": service.model, "temperature": 0}
    chat = client.chat.completions.parse(**asked, messages=QUESTION, response_format=Weather, max_tokens=60)
    assert isinstance(chat.choices[0].message.parsed, Weather)
    response = client.responses.parse(**asked, input="Hi", text_format=Weather, max_output_tokens=60)
    assert isinstance(response.output_parsed, Weather)


def test_openais_asynchronous_client_streams(service: Service, said: Any) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": service.model, "temperature": 0}
            turns: Any = [{"role": "system", "content": SYSTEM}, *QUESTION]
            chunks = await client.chat.completions.create(**asked, messages=turns, max_tokens=LIMIT, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            events = await client.responses.create(**asked, input=turns, max_output_tokens=LIMIT, stream=True)
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            return text, "".join(deltas)

    assert asyncio.run(ask()) == (said["choices"][0]["message"]["content"],) * 2


def test_text_becomes_tokens_and_tokens_text(service: Service, said: Any) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{service.url}/{path}", json={"model": service.model, **body}, timeout=60)

    found = post("tokenize", prompt="One, two, three", return_token_strs=True).json()
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert found["token_strs"][0] == "One"
    assert post("detokenize", tokens=found["tokens"]).json() == {"prompt": "One, two, three"}
    turns = [{"role": "system", "content": SYSTEM}, *QUESTION]
    assert post("tokenize", messages=turns).json()["count"] == said["usage"]["prompt_tokens"]
    for path, body, param in (
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"messages": [3]}, "messages.0"),
        ("tokenize", {"prompt": "a", "tokens": []}, "tokens"),
        ("tokenize", {"messages": turns, "chat_template": "{{ 1 }}"}, None),
        ("detokenize", {"tokens": [2**63 - 1]}, None),
        ("detokenize", {"tokens": ["a"]}, "tokens.0"),
    ):
        refused = post(path, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert post("tokenize", prompt="a", model="other").status_code == 404
