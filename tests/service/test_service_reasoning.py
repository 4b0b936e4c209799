"""Reasoning through the real service: vLLM's parser tells it from the answer, with drafts and without, in each API.

The target reasons because its turns before do, in plain text: it has no token for `<think>`."""

from typing import Any

import pytest

from tests.service.test_service_protocols import claude
from tests.support.service_harness import Service, run_together

pytestmark = pytest.mark.service

SEEN = [("grass", "green"), ("snow", "white")]
TURNS: list[dict[str, str]] = []
for thing, color in SEEN:
    said = f"<think>The user asks for a color. {thing.title()} is {color}.</think>{thing.title()} is {color}."
    TURNS += [{"role": "user", "content": f"What color is {thing}?"}, {"role": "assistant", "content": said}]
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
