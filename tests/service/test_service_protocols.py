"""The service through the official clients of OpenAI and Anthropic. Each protocol is converted to a chat and back, so
its text is compared with the chat's own."""

from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.service.test_service_tools import FEW_DRAFTS, WEATHER
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
