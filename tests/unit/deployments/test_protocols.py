"""Anthropic's Messages and OpenAI's Responses without an engine: requests, errors, clients that go. And /docs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from deployments.errors import engine_lost
from deployments.front_end import Admitted, Usage
from tests.unit.deployments.test_front_end import (
    DIGEST,
    SECRET,
    Echo,
    call_and_leave,
    callers,
    request,
    statuses,
)
from tests.unit.deployments.test_page import policy_of

USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": "tiny", "max_output_tokens": 5, "input": "Hi"},
}
paths = pytest.mark.parametrize("path", BODIES)


class Chats(Echo):
    """Streams the answer to a chat as vLLM's API objects do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        messages = object.__new__(AnthropicServingMessages)
        messages._merge_inline_system = False
        responses = SimpleNamespace(default_sampling_params={})
        self.vllm = SimpleNamespace(anthropic_serving_messages=messages, openai_serving_responses=responses)

    async def generate(self, admitted: Admitted) -> AsyncIterator[Any]:
        self.admitted.append(admitted)
        head = {"id": "chatcmpl-1", "created": 1, "model": "tiny"}
        try:
            for delta in ({"role": "assistant", "content": ""}, {"content": "Yes"}):
                yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta}], 'usage': USAGE})}\n\n"
            self.num_begun += 1
            if self.pause is not None:
                await self.pause.wait()
            if self._ends_with is not None:
                yield self._ends_with
                return
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': USAGE, 'drafting': {'k': 1}})}\n\n"
            yield "data: [DONE]\n\n"
            yield Usage(3, 5)
        finally:
            self.num_closed += 1


@paths
def test_a_request_is_admitted_as_the_chat_that_it_is(path: str) -> None:
    changes: dict[str, Any] = {"system": "S", "tools": [{"name": "f", "input_schema": TOOL["parameters"]}]}
    if path == "/v1/responses":
        changes = {"instructions": "S", "tools": [{"type": "function", **TOOL}]}
    backend = Chats(callers(web={"key_sha256": DIGEST}))
    sent = {**BODIES[path], **changes, "stream": True, "temperature": 0.5, "drafting": {"k": 2}}
    response = request(backend, "POST", path, json=sent, headers={"X-Api-Key": SECRET})
    assert (response.status_code, len(re.findall(r'"drafting": ?{"k": ?1}', response.text))) == (200, 1)
    (admitted,) = backend.admitted
    assert [message["role"] for message in admitted.fields["messages"]] == ["system", "user"]
    assert admitted.fields["tools"][0]["function"]["parameters"] == TOOL["parameters"]
    assert (admitted.body.max_completion_tokens, admitted.body.temperature) == (5, 0.5)
    assert (admitted.caller, admitted.drafting.k, admitted.drafting.source) == ("web", 2, "request")
    assert request(backend, "POST", path, json=sent).status_code == 401


CONTENT = {"role": "user", "content": [{"type": "nope"}]}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/messages", {"model": "other"}, 404, "model"),
    ("/v1/messages", {"messages": [CONTENT]}, 400, "messages.0.content.0"),
    ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "tools.0"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input"),
    ("/v1/responses", {"max_output_tokens": 0}, 400, "max_output_tokens"),
    ("/v1/responses", {"max_tokens": 3}, 400, "max_tokens"),
    ("/v1/responses", {"previous_response_id": "r"}, 400, "previous_response_id"),
]


@pytest.mark.parametrize(("path", "change", "status", "param"), REFUSED)
def test_a_refusal_has_the_protocols_form_and_names_its_field(path: str, change: Any, status: int, param: str) -> None:
    backend = Chats()
    response = request(backend, "POST", path, json={**BODIES[path], **change})
    document = response.json()
    assert (response.status_code, document["error"]["param"]) == (status, param), document
    assert (document.get("type") == "error") == (path == "/v1/messages")
    assert (statuses(backend), backend.admitted) == ({str(status): 1}, [])


@paths
def test_a_stream_that_breaks_off_ends_with_the_protocols_error_event(path: str) -> None:
    response = request(Chats(ends_with=engine_lost()), "POST", path, json={**BODIES[path], "stream": True})
    name, _, data = response.text.strip().rpartition("\n\n")[2].partition("\ndata: ")
    assert (name, json.loads(data)["error"]["code"]) == ("event: error", "engine_lost")
    assert not re.search("message_stop|response.completed", response.text)


@paths
async def test_a_client_that_leaves_closes_the_answer_at_once(path: str) -> None:
    backend = Chats()
    backend.pause = asyncio.Event()
    await call_and_leave(backend, {**BODIES[path], "stream": True}, begins=True, path=path)
    assert (backend.num_closed, statuses(backend)) == (1, {"499": 1})


def test_a_path_that_is_not_served_says_what_is() -> None:
    response = request(Chats(), "POST", "/v1/embeddings", json={})
    assert (response.status_code, "/v1/messages/count_tokens" in response.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize("root", ["", "/app"])
def test_the_description_needs_no_key_and_loads_nothing_from_elsewhere(root: str) -> None:
    backend = Chats(callers(web={"key_sha256": DIGEST}))
    page = request(backend, "GET", f"{root}/docs", root_path=root)
    links = re.findall(r"""(?:src|href|url)(?:=|: )["'](.*?)["']""", page.text)
    assert all(link.startswith((f"{root}/", "data:")) for link in links)
    for link in (one for one in links if one.startswith("/")):
        assert request(backend, "GET", link, root_path=root).status_code == 200, link
    rules = policy_of(page.headers)
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
