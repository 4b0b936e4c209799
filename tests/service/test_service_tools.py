"""Tool calls through the real service: vLLM's parser makes them of the model's text, answered whole and as a stream.

The target is too small to call a tool by itself, so each text is forced: by `tool_choice`, or by `structured_outputs`.
"""

import json
from typing import Any

import pytest

from tests.support.service_harness import QUESTION, Service, run_together

pytestmark = pytest.mark.service

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
