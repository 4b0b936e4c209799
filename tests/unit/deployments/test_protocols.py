"""Anthropic's Messages and OpenAI's Responses without an engine: requests and errors. And /docs."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import ResponseTextDeltaEvent
from vllm.entrypoints.openai.responses import protocol as vllm_responses
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.errors import ApiError
from cluster.request import system_prompt
from deployments.body import turns
from deployments.front_end import Usage
from peagle.vllm.request_args import MAX_K_KEY, WORKLOAD_KEY
from tests.unit.deployments.test_front_end import DIGEST, SECRET, Echo, callers, request, statuses
from tests.unit.deployments.test_page import policy_of
from tests.unit.deployments.test_target_replica import DRAFTING, Replica, answered, events

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": "tiny", "max_output_tokens": 5, "input": "Hi"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_admitted_as_a_chat_is(path: str) -> None:
    changes: dict[str, Any] = {"system": "S", "tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}
    if path == "/v1/responses":
        changes = {"instructions": "S", "tools": [{"type": "function", **TOOL}]}
    backend = Echo(callers(web={"key_sha256": DIGEST}))
    sent = {**BODIES[path], **changes, "stream": True, "drafting": {"k": 2}}
    assert request(backend, "POST", path, json=sent, headers={"X-Api-Key": SECRET}).status_code == 200
    (admitted,) = backend.admitted
    assert system_prompt(turns(admitted.fields)) == "S", "by which its workload is told"
    assert (admitted.caller, admitted.drafting.k, admitted.drafting.source) == ("web", 2, "request")
    assert admitted.body.vllm_xargs == {MAX_K_KEY: 2, WORKLOAD_KEY: "default"}
    assert json.loads(json.dumps(admitted.fields)) == admitted.fields, "it travels to a front-end process"
    assert request(backend, "POST", path, json=sent).status_code == 401


def test_the_line_of_claude_code_that_differs_in_each_request_makes_no_workload() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1", "You write code.")]
    assert system_prompt(turns({**BODIES["/v1/messages"], "system": system})) == "You write code."


def test_a_refusal_has_the_protocols_form_and_names_its_field() -> None:
    for path, change, status, param in (
        ("/v1/messages", {"model": "other"}, 404, "model"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "nope"}]}]}, 400, "messages.0.content.0"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "tools.0"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
        ("/v1/responses", {"max_tokens": 3}, 400, "max_tokens"),
        ("/v1/responses", {"previous_response_id": "r"}, 400, "previous_response_id"),
    ):
        backend = Echo()
        response = request(backend, "POST", path, json={**BODIES[path], **change})
        document = response.json()
        assert (response.status_code, document["error"]["param"]) == (status, param), document
        assert (document.get("type") == "error") == (path == "/v1/messages")
        assert (statuses(backend), backend.admitted) == ({str(status): 1}, [])


def chat_chunks(*last: str) -> AsyncIterator[str]:
    """vLLM's events of a chat, with its usage in each. `last`: in place of its end."""

    def event(*choices: Any) -> str:
        usage = {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13}
        document = {"id": "chatcmpl-1", "created": 1, "model": "tiny", "choices": choices, "usage": usage}
        return f"data: {json.dumps(document, separators=(',', ':'))}\n\n"

    def choice(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}

    end = last or (event(choice("", "stop")), event(), "data: [DONE]\n\n")
    return events(event(choice("")), event(choice("Yes")), *end)


async def response_events(body: Any, error: Exception | None = None, behind_text: bool = False) -> AsyncIterator[Any]:
    """vLLM's events of a response. `error`: in place of its end, or of its text."""

    def event(kind: Any, name: str, number: int, status: Any) -> Any:
        response = vllm_responses.ResponsesResponse.from_request(body, SamplingParams(), "tiny", 1, [], status)
        return kind(type=name, sequence_number=number, response=response)

    yield event(vllm_responses.ResponseCreatedEvent, "response.created", 0, "in_progress")
    if error is not None and not behind_text:
        raise error
    part = {"item_id": "1", "output_index": 0, "content_index": 0, "logprobs": []}
    yield ResponseTextDeltaEvent(type="response.output_text.delta", sequence_number=1, delta="Yes", **part)
    if error is not None:
        raise error
    yield event(vllm_responses.ResponseCompletedEvent, "response.completed", 2, "completed")


def stream(answer: Any, path: str, **changes: Any) -> tuple[Replica, list[Any]]:
    """Items of the answer whose events are `answer`'s, by a replica."""
    replica, call = Replica(answer), path.rpartition("/")[2]
    sent = {**BODIES[path], **changes, "stream": True}
    return replica, answered(replica, replica.front_end.admit(call, sent, headers={"x-request-id": "abc"}))


def document_of(event: str) -> dict[str, Any]:
    return dict(json.loads(event.partition("\ndata: ")[2]))


def test_a_message_has_its_drafting_behind_its_text() -> None:
    replica, (*said, usage, end, delta, stop) = stream(lambda _: chat_chunks(), "/v1/messages")
    kinds = [event.partition("\n")[0].removeprefix("event: ") for event in (said[0], end, stop)]
    assert kinds == ["message_start", "content_block_stop", "message_stop"]
    assert [document_of(event)["delta"]["text"] for event in said if "text_delta" in event] == ["Yes"]
    assert (document_of(delta)["type"], document_of(delta)["drafting"]) == ("message_delta", DRAFTING)
    assert (usage, replica.names) == (Usage(4, 9, 4), ["abc"])


def test_a_response_has_its_drafting_in_its_last_event() -> None:
    _, (created, said, usage, completed) = stream(response_events, "/v1/responses")
    kinds = [document_of(event)["type"].removeprefix("response.") for event in (created, said, completed)]
    assert kinds == ["created", "output_text.delta", "completed"]
    assert document_of(completed)["response"]["drafting"] == DRAFTING
    assert (usage, document_of(created)["response"]["id"]) == (Usage(4, 9, 4), "resp_abc")


REFUSAL = VLLMValidationError("max_tokens must be at least 1", parameter="max_tokens")
SCHEMA = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}


def refusal(param: str) -> Any:
    return create_error_response(VLLMValidationError(f"{param} is wrong", parameter=param))


def refusal_event(param: str) -> str:
    return f"data: {json.dumps(refusal(param).model_dump())}\n\n"


def test_what_vllm_refuses_has_no_events_and_names_the_clients_field() -> None:
    for path, answer, changes, param in (
        ("/v1/messages", lambda _: refusal("max_completion_tokens"), {}, "max_tokens"),
        ("/v1/messages", lambda _: events(refusal_event("stop")), {}, "stop_sequences"),
        ("/v1/messages", lambda _: events(refusal_event("structured_outputs")), SCHEMA, "output_config.format"),
        ("/v1/responses", lambda _: refusal("max_tokens"), {}, "max_output_tokens"),
        ("/v1/responses", lambda body: response_events(body, REFUSAL), {}, "max_output_tokens"),
    ):
        _, (refused,) = stream(answer, path, **changes)
        assert (refused.status, refused.param, param in refused.message) == (400, param, True)


def test_an_answer_that_breaks_off_ends_with_the_error_alone() -> None:
    for path, answer, name in (
        ("/v1/messages", lambda _: chat_chunks(refusal_event("n")), "chatcmpl-abc"),
        ("/v1/responses", lambda body: response_events(body, EngineDeadError(), behind_text=True), "resp_abc_0"),
    ):
        replica, (*said, failure) = stream(answer, path)
        assert said
        assert isinstance(failure, ApiError)
        assert not re.search("message_stop|response.completed|event: error", "".join(said))
        assert replica.aborted == [name]


@pytest.mark.parametrize("root", ["", "/app"])
def test_the_description_needs_no_key_and_loads_nothing_from_elsewhere(root: str) -> None:
    backend = Echo(callers(web={"key_sha256": DIGEST}))
    page = request(backend, "GET", f"{root}/docs", root_path=root)
    links = re.findall(r"""(?:src|href|url)(?:=|: )["'](.*?)["']""", page.text)
    assert all(link.startswith((f"{root}/", "data:")) for link in links)
    for link in (one for one in links if one.startswith("/")):
        assert request(backend, "GET", link, root_path=root).status_code == 200, link
    rules = policy_of(page.headers)
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
