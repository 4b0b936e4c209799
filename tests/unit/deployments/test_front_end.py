"""The front end without an engine: what each request gets before one sees it, over HTTP and as a dictionary by handle.

Behind it stands a backend that answers with what was admitted, so that a test sees what an engine would get.
"""

import asyncio
import gc
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import httpx
import jsonschema
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from cluster.admission import Admission
from cluster.counts import Counts
from cluster.errors import ApiError
from cluster.heads import HeadRouting
from cluster.request import Caller
from cluster.settings import (
    CallerSettings,
    ClusterSettings,
    DrafterSettings,
    LearningSettings,
    ModelSettings,
    live_config,
    with_live,
)
from deployments import http_streams
from deployments.answers import drafting_field, text_with, usage_of
from deployments.body import (
    BODIES,
    MAX_NESTING,
    check_counts,
    from_engine,
    grammars,
    known_fields,
    read_document,
    read_json,
)
from deployments.compat import GATEWAY_HEADER
from deployments.errors import engine_lost
from deployments.front_end import Admitted, FrontEnd, FrontEndMetrics, Usage
from deployments.routes import Entrance, make_app
from deployments.usage_log import UsageLog
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, GROUP_KEY, HEAD_KEY, LEARN_KEY, MAX_K_KEY, WORKLOAD_KEY

SECRET = "sk-very-secret"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
HELLO = [{"role": "user", "content": "Hi"}]
JSON = "application/json"
JSON_TYPE = {"content-type": JSON}
CHAT = "/v1/chat/completions"
PATHS = {"chat": CHAT, "completions": "/v1/completions"}
LEAST: dict[str, dict[str, Any]] = {"chat": {"messages": HELLO}, "completions": {"prompt": "One,"}}
STREAMED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO}, "/v1/messages": {"messages": HELLO, "max_tokens": 5}, "/v1/responses": {"input": "Hi"},
}  # fmt: skip


def cluster(**sections: Any) -> ClusterSettings:
    found = {
        "model": ModelSettings(source="org/tiny", id="tiny", aliases={"tiny-coder": "code"}),
        "drafter": DrafterSettings(head="h", max_draft_tokens=7),
        **sections,
    }
    return ClusterSettings.model_construct(**{**ClusterSettings(model=found["model"]).__dict__, **found})


def limits(**changed: Any) -> ClusterSettings:
    return cluster(limits=cluster().limits.model_copy(update=changed))


def callers(**by_name: dict[str, Any]) -> ClusterSettings:
    sections = {name: CallerSettings.model_validate(section) for name, section in by_name.items()}
    return cluster(callers=sections)


class Echo:
    """Answers with what it gets. `pause`: a stream waits for it after its first event."""

    def __init__(self, found: ClusterSettings | None = None, ends_with: Exception | None = None) -> None:
        self.front_end = FrontEnd(found or cluster())
        self.front_end.generate = self.generate
        self.admitted: list[Admitted] = []
        self.pause: asyncio.Event | None = None
        self.num_begun = self.num_closed = 0
        self._ends_with = ends_with

    async def generate(self, admitted: Admitted) -> AsyncIterator[Any]:
        self.admitted.append(admitted)
        try:
            if admitted.body.stream:
                yield 'data: {"id":"x","choices":[]}\n\n'
                self.num_begun += 1
            if self.pause is not None:
                await self.pause.wait()
            if self._ends_with is not None:
                if isinstance(self._ends_with, ApiError):
                    yield self._ends_with
                    return
                raise self._ends_with
            if admitted.body.stream:
                yield "data: [DONE]\n\n"
            else:
                yield json.dumps({"drafting": drafting_field(admitted.drafting, "", Counts())})
            yield Usage(3, 5)
        finally:
            self.num_closed += 1

    async def health(self) -> dict[str, Any]:
        return {"status": "ready"}

    async def metrics(self) -> bytes:
        return b""

    async def drafting(self) -> dict[str, Any]:
        return {}


def request(backend: Echo, method: str, path: str, **sent: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        app: FastAPI = make_app(backend, sent.pop("entrance", Entrance()))
        transport = httpx.ASGITransport(app, root_path=sent.pop("root_path", ""), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **sent)

    return asyncio.run(ask())


def chat(backend: Echo, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return request(backend, "POST", CHAT, json={**LEAST["chat"], **body}, headers=headers)


def complete(backend: Echo, **body: Any) -> httpx.Response:
    return request(backend, "POST", PATHS["completions"], json={**LEAST["completions"], **body})


async def call_app(backend: Echo, receive: Any, send: Any = None, path: str = CHAT) -> list[Any]:
    """The messages of an answer by ASGI itself, which knows clients that leave."""
    sent: list[Any] = []
    scope: Any = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    scope["headers"] = [(b"content-type", b"application/json")]

    async def keep(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(60):
        await make_app(backend, Entrance())(scope, receive, send or keep)
    return sent


def statuses(backend: Echo) -> dict[str, float]:
    """Answers that were counted, by status."""
    (answers,) = [family for family in backend.front_end.families() if family.name == "peagle_answers"]
    return {sample.labels["status"]: sample.value for sample in answers.samples}


# ---- what is refused, with the field that is to blame


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def content(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": value}]}


def calls(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": value}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


LARGE = "a" * 70_000
BAD_CHATS: dict[str, tuple[dict[str, Any], str | None]] = {
    "content as an object": (content({"a": 1}), "messages.0.content"),
    "content of an unknown part": (content([{"type": "nope"}]), "messages.0.content.0"),
    "no messages": ({"messages": []}, "messages"),
    "message in Harmony's form": ({"messages": [{"author": {"role": "user"}, "content": []}]}, "messages.0.role"),
    "tool calls as a number": (calls(3), None),
    "arguments as a number": (calls([{"id": "a", **tool(arguments=3)}]), "tool_calls.0.function.arguments"),
    "surrogate in content": (content("\ud800"), None),
    "surrogate in a name": ({"drafting": {"\ud800": 3}}, None),
    "field nested deeply": ({"chat_template_kwargs": nested(MAX_NESTING)}, "chat_template_kwargs"),
    "number beyond 64 bits": ({"top_k": 10**30}, "top_k"),
    "too many stop strings": ({"stop": [str(number) for number in range(17)]}, "stop"),
    **{
        f"the server's {key}": ({"vllm_xargs": {key: 3}}, f"vllm_xargs.{key}")
        for key in (MAX_K_KEY, HEAD_KEY, LEARN_KEY, ACCEPTANCE_RATES_KEY, WORKLOAD_KEY)
    },
    "an object in extra arguments": ({"vllm_xargs": {"a": {"b": 1}}}, "vllm_xargs.a"),
    "spoken answers": ({"modalities": ["text", "audio"]}, "modalities"),
    "moderation that blocks": ({"moderation": {"policy": {"output": {"mode": "block"}}}}, "moderation.policy"),
    "the best of two": ({"best_of": 2}, "best_of"),
    "beams, whose tokens would be nobody's": ({"use_beam_search": True}, "use_beam_search"),
    "a cache elsewhere": ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    "another engine's images": ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
    "the same by another way": ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
    "two grammars": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "a grammar of no kind": ({"structured_outputs": {"regexx": "a"}}, "structured_outputs"),
    "choices as a number": ({"structured_outputs": {"choice": 3}}, "structured_outputs.choice"),
    "a choice of another tool": ({"tools": [tool()], "tool_choice": tool(name="g")}, "tool_choice"),
    "no sequence": ({"n": 0}, "n"),
    "more sequences than allowed": ({"n": 17}, "n"),
    "more logprobs than allowed": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "prompt logprobs of all tokens": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "both ends of a message": ({"add_generation_prompt": True, "continue_final_message": True}, None),
    "a request id without end": ({"request_id": "a" * 10_000}, "request_id"),
    "a field of a plugin": ({"logits_processors": ["os.system"]}, "logits_processors"),
    "100,000 choices": ({"structured_outputs": {"choice": [f"choice {n}" for n in range(100_000)]}}, None),
    "a large schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [LARGE]}}}},
        "response_format",
    ),
    "large tools that make a grammar": ({"tool_choice": "required", "tools": [tool(description=LARGE)]}, "tools"),
    "a large strict tool": ({"tools": [tool(), tool(name="g", strict=True, description=LARGE)]}, "tools"),
    "a large strict tool, by choice": (
        {"tool_choice": "auto", "tools": [tool(strict=True, description=LARGE)]},
        "tools",
    ),
}


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a prompt as an object": ({"prompt": {"a": 1}}, "prompt"),
    "a prompt of ids and texts": ({"prompt": [1, "a"]}, "prompt.1"),
    "a prompt of ids and lists of lists": ({"prompt": [[1], [["a"]]]}, "prompt.1.0"),
    "prompts above the limit": ({"prompt": ["a"] * 17}, "n"),
    "messages of a chat": ({"messages": HELLO}, "messages"),
    "logprobs of all tokens": ({"logprobs": -1}, "logprobs"),
    "prompt logprobs of a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
}


@pytest.mark.parametrize("name", [*BAD_CHATS, *BAD_COMPLETIONS])
def test_a_bad_request_gets_400_that_names_the_field(name: str) -> None:
    body, param = {**BAD_CHATS, **BAD_COMPLETIONS}[name]
    backend, call = Echo(), "chat" if name in BAD_CHATS else "completions"
    text = json.dumps({**LEAST[call], **body})
    response = request(backend, "POST", PATHS[call], content=text, headers=JSON_TYPE)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], len(error["message"]) < 1000) == ("invalid_request_error", True)
    assert param in (None, error["param"])
    assert backend.admitted == [], "no engine sees it"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool(description=LARGE)], "tool_choice": None},
        {"tools": [tool(strict=True, description=LARGE)], "tool_choice": "none"},
        {"response_format": {"type": "text", "x": LARGE}},
        {"response_format": {"type": "json_schema", "json_schema": {"enum": ["a"] * 16_000}}},
    ],
)
def test_what_makes_no_grammar_may_be_large_and_spaces_do_not_count(fields: dict[str, Any]) -> None:
    check_counts(fields, cluster().limits)
    assert grammars(fields).keys() <= {"response_format"}


def test_usage_counts_accepted_drafts_up_to_the_end_of_the_answer() -> None:
    for num_tokens, num_steps, num_accepted, expected in ((4, 1, 7, 3), (9, 1, 7, 7), (2, 3, 4, 0)):
        drafting = {"num_steps": num_steps, "num_accepted_tokens": num_accepted}
        usage = json.loads(text_with({"usage": {"completion_tokens": num_tokens}}, drafting))["usage"]
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == expected
        record: Any = SimpleNamespace(
            num_prompt_tokens=3, num_output_tokens=num_tokens, counts=SimpleNamespace(**drafting)
        )
        assert usage_of(record) == Usage(3, num_tokens, expected)


def test_a_path_or_method_that_is_none() -> None:
    for method, path, status, allow in (
        ("GET", CHAT, 405, "POST"),
        ("GET", f"{CHAT}/", 405, "POST"),
        ("DELETE", "/ping", 405, "GET POST"),
        ("POST", "/", 405, "GET"),
        ("GET", "/v1/nothing", 404, ""),
        ("GET", "/v1/models/gpt-none", 404, ""),
        ("GET", "/v1/models/../../etc/passwd", 404, ""),
        ("POST", "/v1/embeddings", 404, ""),
    ):
        response = request(Echo(), method, path)
        assert response.status_code == status, path
        assert sorted(response.headers.get("allow", "").replace(",", " ").split()) == allow.split(), path
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert "/v1/messages/count_tokens" in response.json()["error"]["message"], "what is served"


def test_the_openapi_document_is_true_of_bodies_and_refusals() -> None:
    document = request(Echo(), "GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema), name
    for call, name in (("chat", "ChatCompletionRequest"), ("completions", "CompletionRequest")):
        operation = document["paths"][PATHS[call]]["post"]
        ref = f"#/components/schemas/{name}"
        assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": ref}
        assert operation["responses"].keys() == {"200", "4XX", "5XX"}
    validator = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/ChatCompletionRequest", **document})
    for good in ({}, {"drafting": {"k": 3, "workload": "code"}}, {"n": None}, {"store": True}, {"stop": ["a"]}):
        assert validator.is_valid({"messages": HELLO, **good})
        assert chat(Echo(), **good).status_code == 200
    for bad in ({"drafting": {"depth": 3}}, {"max_token": 3}, {"messages": 3}, {"temperature": "hot"}):
        assert not validator.is_valid({"messages": HELLO, **bad})
        refused = chat(Echo(), **bad)
        assert refused.status_code == 400
        jsonschema.validate(refused.json(), {"$ref": "#/components/schemas/Error", **document})
    assert "422" not in json.dumps(document)


def test_an_unknown_field_is_told_what_it_is_called_here() -> None:
    for name, hint in (
        ("max_token", "; did you mean max_tokens?"),
        ("functions", "; it is called tools here"),
        ("max_output_tokens", "; it is called max_tokens here"),
        ("guided_json", "; it is called structured_outputs.json here"),
        ("zzz", ""),
    ):
        error = chat(Echo(), **{name: 3}).json()["error"]
        assert (error["message"], error["param"]) == (f"unknown field {name}{hint}", name)


@pytest.mark.parametrize("call", LEAST)
def test_every_parameter_of_openais_client_is_taken_or_refused_by_name(call: Any) -> None:
    declared = (chat_params if call == "chat" else completion_params).CompletionCreateParamsBase
    unused: dict[str, Any] = {"modalities": ["text"], "best_of": 1, "use_beam_search": False}
    for name in get_type_hints(declared).keys() - known_fields(BODIES[call]):
        if call == "chat" and name in ("audio", "function_call", "functions"):
            with pytest.raises(ApiError) as raised:
                FRONT_END.admit(call, {**LEAST[call], name: {"a": "b"}})
            assert (raised.value.status, raised.value.param) == (400, name)
        else:
            assert name not in FRONT_END.admit(call, {**LEAST[call], name: unused.get(name, "any")}).fields


def test_a_body_that_is_no_json_object_gets_400() -> None:
    lists = b"[1]", b"[" * 100_000
    for raw in (b"{", b"", b"\xff\xfe", b"null", *lists, b'{"a": "\xed\xa0\x80"}', b'{"top_p": 1e999}'):
        response = request(Echo(), "POST", CHAT, content=raw, headers=JSON_TYPE)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_beyond_the_limit_gets_413_and_is_not_read_to_its_end() -> None:
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while num_read < 1000:
            num_read += 1
            yield b" " * 1000

    backend = Echo(limits(max_body_bytes=10_000))
    response = request(backend, "POST", CHAT, content=endless(), headers=JSON_TYPE)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert "more than 10000 bytes, this service's limit (limits.max_body_bytes)" in response.json()["error"]["message"]
    assert num_read < 20


def test_a_body_that_does_not_come_gets_408_and_one_that_breaks_off_499(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(http_streams, "BODY_TIMEOUT_S", 0.5)

    async def ask(*pieces: bytes, leaves: bool) -> list[Any]:
        received = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]

        async def receive() -> Any:
            if received:
                return received.pop(0)
            if not leaves:
                await asyncio.sleep(5)
            return {"type": "http.disconnect"}

        return await call_app(Echo(), receive)

    slow, gone = asyncio.run(ask(b'{"messages": [', leaves=False)), asyncio.run(ask(b"{", leaves=True))
    assert [sent[0]["status"] for sent in (slow, gone)] == [408, 499]
    assert "was not complete after 0 s, with 14 bytes of it" in slow[1]["body"].decode()
    assert "Traceback" not in caplog.text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    call=st.sampled_from(sorted(BODIES)),
    field=st.sampled_from(sorted({*BODIES["chat"].model_fields, *BODIES["completions"].model_fields, "drafting"})),
    value=VALUES,
)
def test_no_value_of_any_field_is_the_servers_fault(call: Any, field: str, value: Any) -> None:
    """A value is admitted or refused with 4xx; whatever else is raised would be a 500."""
    refusal = ApiError(400, "")
    try:
        document = read_document({**LEAST.get(call, LEAST["completions"]), field: value}, FRONT_END.limits)
        assert FRONT_END.admit(call, document).body.vllm_xargs
    except ApiError as error:
        refusal = error
    assert 400 <= refusal.status < 500
    json.dumps(refusal.body()).encode()


FRONT_END = FrontEnd(cluster())


# ---- limits


def test_sequences_are_prompts_times_n() -> None:
    backend = Echo(limits(max_num_sequences=6))
    assert complete(backend, prompt=["a", "b", "c"], n=2).status_code == 200
    assert backend.admitted[0].num_sequences == 6
    response = complete(backend, prompt=["a", "b", "c", "d"], n=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert complete(backend, prompt=[[1], [2]], n=3).status_code == 200
    assert complete(backend, prompt=[1, 2, 3, 4, 5, 6, 7]).status_code == 200, "one prompt of seven tokens"


def test_log_probabilities_of_prompts_are_bounded_by_the_whole_answer() -> None:
    backend = Echo(limits(max_num_prompt_logprobs=1000))
    ids = list(range(1, 101))
    assert complete(backend, prompt=ids, echo=True, logprobs=4, n=2).status_code == 200
    assert complete(backend, prompt="text" * 100, logprobs=20, n=16).status_code == 200, "of the answer alone"
    for body, param in (
        ({"prompt": ids, "echo": True, "logprobs": 4, "n": 3}, "logprobs"),
        ({"prompt": [ids, ids, ids], "prompt_logprobs": 4}, "prompt_logprobs"),
    ):
        error = complete(backend, **body).json()["error"]
        assert (error["param"], error["code"]) == (param, "limit")
    long = content("text" * 300)["messages"]
    of_answer = {"logprobs": True, "top_logprobs": 3}
    for body, param in (
        ({"messages": long, "prompt_logprobs": 3}, "prompt_logprobs"),
        ({"messages": long, "echo": True, **of_answer}, "top_logprobs"),
        ({"tools": [tool(description="text" * 300)], "tool_choice": "none", "prompt_logprobs": 3}, "prompt_logprobs"),
        ({"documents": [{"text": "text" * 300}], "prompt_logprobs": 3}, "prompt_logprobs"),
    ):
        error = chat(backend, **body).json()["error"]
        assert (error["param"], error["code"]) == (param, "limit")
    assert chat(backend, messages=long, **of_answer).status_code == 200


def test_sequences_of_one_request_share_a_group_that_no_client_names() -> None:
    backend = Echo()
    for _ in range(2):
        assert complete(backend, prompt=["a", "b"], vllm_xargs={"own": 1}).status_code == 200
    first, second = (admitted.body.vllm_xargs for admitted in backend.admitted)
    assert first[GROUP_KEY] != second[GROUP_KEY]
    assert first["own"] == 1, "it passes as it is"
    assert GROUP_KEY not in FRONT_END.admit("completions", {"prompt": "a"}).body.vllm_xargs
    assert complete(backend, vllm_xargs={GROUP_KEY: "a"}).json()["error"]["param"] == f"vllm_xargs.{GROUP_KEY}"


def test_entries_of_a_field_are_counted_before_they_are_looked_at() -> None:
    backend = Echo(limits(max_list_entries=50, max_num_sequences=50))
    for field in ("messages", "tools", "bad_words", "allowed_token_ids", "stop_token_ids"):
        assert chat(backend, **{field: [{}] * 51}).json()["error"]["code"] == "limit", field
    for field in ("logit_bias", "vllm_xargs", "chat_template_kwargs"):
        assert chat(backend, **{field: {str(n): {} for n in range(51)}}).json()["error"]["code"] == "limit", field
    assert complete(backend, prompt=[{}] * 51).json()["error"]["code"] == "limit"
    assert complete(backend, prompt=[5] * 51).status_code == 200, "token ids of a prompt are not counted"
    check_counts({"tokens": [5] * 51}, backend.front_end.limits)  # nor are those of /detokenize
    parts = content([{"type": "text", "text": "a"}] * 26)["messages"]
    assert [chat(backend, messages=parts * num).status_code for num in (1, 2)] == [200, 400], "of all messages"


def test_values_of_a_body_are_counted_before_it_is_parsed() -> None:
    few = limits(max_body_values=100).limits

    def status(raw: str) -> int:
        try:
            read_json(raw.encode(), few)
        except ApiError as error:
            return error.status
        return 200

    for element in ("[]", "{}", '{"a":1}', "1", '""', '"\\""', '"[,"', "1.5", "null"):
        assert status(f'{{"a": [{",".join([element] * 120)}]}}') == 413, element
        assert status(f'{{"a": [{",".join([element] * 30)}]}}') == 200, element
    assert status(json.dumps({"prompt": ',[{"\\' * 1000})) == 200, "a text is one value"
    assert status('["' + "," * 1000) == 400, "an unfinished text"
    assert status("[" * 102) == 413
    for num, found in ((97, 200), (98, 413)):
        text = f'{{"a": ["a, b"{", 1" * num}, "c,"]}}'
        assert status(text) == found, "up to the limit, commas in texts left out"


def test_an_error_does_not_give_back_what_was_sent() -> None:
    long = "x" * 10**6
    named = {long: 1}, {"messages": long}, content([{"type": long}])
    for sent in (*named, {"drafting": {"workload": long}}, {"vllm_xargs": {long: {}}}):
        response = chat(Echo(), **sent)
        assert 400 <= response.status_code < 500, response.text[:1000]
        assert len(response.content) < 4000


async def test_more_than_run_and_wait_gets_429_and_callers_take_turns() -> None:
    backend = Echo(limits(max_running_requests=1, max_queued_requests=2))
    backend.pause = asyncio.Event()
    pieces = [asyncio.ensure_future(_collected(backend, Caller(name))) for name in ("crowd", "crowd", "crowd", "late")]
    (refused,), _ = await asyncio.wait(pieces, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    error = refused.exception()
    assert isinstance(error, ApiError)
    assert (error.status, error.retry_after_s) == (429, 2)
    assert "1 requests run and 2 wait" in error.message
    assert error.body()["error"]["type"] == "rate_limit_error"
    backend.pause.set()
    await asyncio.gather(*pieces, return_exceptions=True)
    assert len(backend.admitted) == 3


async def _collected(backend: Echo, caller: Caller) -> list[str]:
    document = {"messages": HELLO, "stream": True}
    return [piece async for piece in backend.front_end.answer("chat", document, caller)]


# ---- workload and K


def test_the_clients_own_name_of_a_request_is_kept_where_it_is_one() -> None:
    parts = content([{"type": "text", "text": "Hi"}])
    admitted = FRONT_END.admit("chat", {**parts, "n": 2}, headers={"x-request-id": "abc-1"})
    assert (admitted.body.n, admitted.request_id) == (2, "abc-1")
    odd = FRONT_END.admit("chat", {"messages": HELLO}, headers={"x-request-id": "a b\n"})
    assert odd.request_id != "a b\n"


def test_an_unknown_model_gets_404() -> None:
    for model in ("gpt-none", 3, ""):
        response = chat(Echo(), model=model)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert chat(Echo(), model=None).status_code == 200


# ---- as SageMaker asks


def test_invocations_are_told_apart_by_their_fields() -> None:
    for body, call in (
        ({"messages": HELLO, "prompt": None, "stream": True}, "chat"),
        ({"prompt": [[1, 2]], "messages": None, "drafting": {"k": 2}}, "completions"),
    ):
        backend, other = Echo(), Echo()
        found = request(backend, "POST", "/invocations", json=body)
        expected = request(other, "POST", PATHS[call], json=body)
        assert (found.status_code, found.text) == (200, expected.text)
        assert found.headers["content-type"] == expected.headers["content-type"]
        assert (backend.admitted[0].call, backend.admitted[0].fields) == (call, other.admitted[0].fields)
    for body, param in (({"messages": None}, "messages"), ({"messages": HELLO, "prompt": "One,"}, "prompt")):
        response = request(Echo(), "POST", "/invocations", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# ---- who may call, and in what form


def test_a_body_that_is_not_said_to_be_json_gets_415() -> None:
    """A browser sends none of these elsewhere without asking first, but for what a form or a script can send."""
    text = json.dumps({"messages": HELLO})
    for kind in (JSON, "Application/JSON ;a=b"):
        assert request(Echo(), "POST", CHAT, content=text, headers={"content-type": kind}).status_code == 200
    for headers in ({}, *({"content-type": kind} for kind in ("", "text/plain", "application/jsonp"))):
        response = request(Echo(), "POST", CHAT, content=text, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


LOCAL = Entrance("127.0.0.1", allowed_hosts=["api.example.com"], allow_origins=["http://page.example"])


FOREIGN = {"host_not_allowed": "ingress.allowed_hosts", "origin_not_allowed": "ingress.allow_origins"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "127.0.0.1"}, None),
        ({"host": "LOCALHOST."}, None),
        ({"host": "api.example.com:443"}, None),
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"host": "127.0.0.1.evil.example"}, "host_not_allowed"),
        ({"host": "[2001:db8::1]"}, "host_not_allowed"),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, None),
        ({"host": "localhost:8000", "origin": "http://page.example"}, None),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, "origin_not_allowed"),
        ({"host": "localhost:8000", "origin": "null"}, "origin_not_allowed"),
    ],
)
def test_a_service_of_this_machine_answers_no_foreign_page(headers: dict[str, str], code: str | None) -> None:
    backend = Echo()
    sent: dict[str, Any] = {"headers": headers, "entrance": LOCAL}
    response = request(backend, "POST", CHAT, json={"messages": HELLO}, **sent)
    assert response.status_code == (200 if code is None else 403), response.text
    assert len(backend.admitted) == (code is None)
    if code is not None:
        assert response.json()["error"]["code"] == code
        assert FOREIGN[code] in response.json()["error"]["message"], "the setting that would allow it"
    for path in ("/", "/metrics", "/drafting", "/v1/models"):
        assert request(Echo(), "GET", path, **sent).status_code == response.status_code
    for path in ("/health", "/ping"):
        assert request(Echo(), "GET", path, **sent).status_code == 200


def test_hosts_are_checked_where_no_key_is_and_nobody_else_should_call() -> None:
    evil = {"host": "evil.example", "origin": "http://evil.example"}
    keyed = callers(web={"key_sha256": DIGEST})
    for entrance, found, status in (
        (Entrance("0.0.0.0"), None, 200),
        (Entrance(""), None, 200),
        (Entrance("127.0.0.2"), None, 403),
        (Entrance("::1"), None, 403),
        (Entrance("0.0.0.0", allowed_hosts=["api.example.com"]), None, 403),
        (Entrance("127.0.0.1", allowed_hosts=["*"], allow_origins=["*"]), None, 200),
        (LOCAL, keyed, 200),
    ):
        sent = {"json": {"messages": HELLO}, "headers": {**evil, **bearer(SECRET)}, "entrance": entrance}
        assert request(Echo(found), "POST", CHAT, **sent).status_code == status, entrance


def test_callers_without_a_key_are_told_apart_by_the_address_that_the_proxy_wrote(monkeypatch: Any) -> None:
    """It writes below what the client sent under the same name."""
    seen: list[str] = []
    monkeypatch.setattr(Admission, "count_request", lambda _, caller: seen.append(caller.address))
    sent = {"json": {"messages": HELLO}, "entrance": Entrance(address_header="x-client", gateway_token="t")}
    for headers, address in (
        ([("X-Client", "192.0.2.9")], "192.0.2.9"),
        ([("X-Client", "192.0.2.1"), ("X-Client", "192.0.2.9")], "192.0.2.9"),
        ([("X-Forwarded-For", "192.0.2.1")], ""),
        ([("X-Client", "192.0.2.9"), (GATEWAY_HEADER, "t 192.0.2.7")], "192.0.2.7"),
        ([("X-Client", "192.0.2.9"), (GATEWAY_HEADER, "u 192.0.2.7")], "192.0.2.9"),
        ([("X-Client", "192.0.2.9"), (GATEWAY_HEADER, " 192.0.2.7")], "192.0.2.9"),
    ):
        backend = Echo()
        assert request(backend, "POST", CHAT, headers=headers, **sent).status_code == 200
        assert seen.pop() == address
        assert backend.admitted[0].caller == "anyone", "no address goes to what is kept for learning"


def test_a_request_that_is_refused_counts_against_the_rate_of_its_caller() -> None:
    headers = bearer(SECRET)
    refused: list[tuple[dict[str, Any], int]] = [
        ({"json": {"messages": HELLO, "temperature": "hot"}}, 400),
        ({"content": b"{", "headers": {**headers, **JSON_TYPE}}, 400),
        ({"content": b"{}", "headers": {**headers, "content-type": "text/plain"}}, 415),
        ({"json": {"messages": HELLO, "model": "other"}}, 404),
        ({"json": {"messages": HELLO, "user": "a" * 20_000}}, 413),
    ]
    found = callers(web={"key_sha256": DIGEST, "requests_per_minute": len(refused)})
    changed = found.limits.model_copy(update={"max_body_bytes": 10_000})
    backend = Echo(found.model_copy(update={"limits": changed}))
    for sent, status in refused:
        assert request(backend, "POST", CHAT, **{"headers": headers, **sent}).status_code == status
    late = chat(backend, headers=headers)
    assert (late.status_code, "5 requests a minute" in late.json()["error"]["message"]) == (429, True)
    assert int(late.headers["retry-after"]) > 0
    assert statuses(backend) == {"400": 2, "415": 1, "404": 1, "413": 1, "429": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_held_until_its_answer_has_ended(stream: bool) -> None:
    backend = Echo()
    seen: list[int] = []

    async def generate(admitted: Admitted) -> AsyncIterator[Any]:
        seen.append(backend.front_end.bodies.num_bytes)
        async for item in Echo.generate(backend, admitted):
            yield item
            seen.append(backend.front_end.bodies.num_bytes)

    backend.front_end.generate = generate
    assert chat(backend, stream=stream, user="u" * 50_000).status_code == 200
    assert min(seen) > 50_000
    assert backend.front_end.bodies.num_bytes == 0


def test_head_is_answered_as_get_and_a_slash_at_the_end_changes_nothing() -> None:
    for path in ("/health", "/ping", "/v1/models", "/metrics", "/"):
        plain = request(Echo(), "GET", path)
        head = request(Echo(), "HEAD", path)
        assert (plain.status_code, head.status_code) == (200, 200)
        assert head.content == b""
        assert head.headers["content-length"] == plain.headers["content-length"]
        assert request(Echo(), "GET", f"{path.rstrip('/')}/").content == plain.content
        assert request(Echo(), "GET", f"/app{path.rstrip('/')}/", root_path="/app").content == plain.content
    assert request(Echo(), "POST", "/v1/completions/", json={"prompt": "One,"}).status_code == 200
    assert request(Echo(), "HEAD", CHAT).status_code == 405


# ---- the answer


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_that_breaks_off_ends_with_its_protocols_error_event_and_without_done(path: str) -> None:
    sent = {**STREAMED[path], "model": "tiny", "stream": True}
    response = request(Echo(ends_with=engine_lost()), "POST", path, json=sent)
    assert response.status_code == 200
    name, _, data = response.text.strip().rpartition("\n\n")[2].rpartition("data: ")
    assert name == ("" if path == CHAT else "event: error\n")
    assert json.loads(data)["error"]["code"] == "engine_lost"
    assert "[DONE]" not in response.text


def test_an_engine_that_is_lost_before_the_answer_gives_502_and_an_unforeseen_error_500(caplog: Any) -> None:
    lost = chat(Echo(ends_with=engine_lost()))
    assert (lost.status_code, lost.headers["retry-after"]) == (502, "5")
    assert lost.json()["error"]["type"] == "server_error"
    failed = chat(Echo(ends_with=RuntimeError("secret detail")))
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert "secret detail" in caplog.text


def test_the_engines_own_refusal_keeps_its_field_and_its_failures_keep_their_words_to_the_log() -> None:
    refused = from_engine({"code": 400, "message": "too long", "param": "input_tokens"})
    assert (refused.status, refused.param, refused.message) == (400, "input_tokens", "too long")
    by_name = from_engine({"code": 400, "message": "top_k must be 0 (disable), or at least 1, got -5.", "param": None})
    assert by_name.param == "top_k"
    assert from_engine({"code": 400, "message": "The prompt is empty", "param": None}).param is None
    assert from_engine({"code": 400, "message": "Client disconnected"}).status == 499
    flags = from_engine({"code": 400, "message": "needs --enable-auto-tool-choice (`--max-logprobs`), not --my-own"})
    assert flags.message == "needs engine.enable_auto_tool_choice (`engine.max_logprobs`), not --my-own"
    failed = from_engine({"code": 500, "message": "EngineCore encountered an issue. See stack trace (above)"})
    assert failed.status == 500
    assert "stack trace" not in failed.message


@pytest.mark.parametrize(("path", "stream"), [(CHAT, False), *((path, True) for path in STREAMED)])
async def test_a_client_that_leaves_closes_its_answer_at_once_and_logs_nothing(
    path: str, stream: bool, caplog: Any
) -> None:
    """An answer that is left to the garbage collector goes on in the engine."""
    backend = Echo()
    backend.pause = asyncio.Event()
    sent = {**STREAMED[path], "model": "tiny", "stream": stream}
    bodies = [{"type": "http.request", "body": json.dumps(sent).encode(), "more_body": False}]

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        while not backend.admitted or (stream and not backend.num_begun):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    messages = await call_app(backend, receive, path=path)
    await asyncio.sleep(0)  # what is cancelled ends in the next turn
    gc.collect()
    assert backend.num_closed == 1
    assert not any(b"DONE" in message.get("body", b"") for message in messages)
    assert statuses(backend) == {"499": 1.0}
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_stops_reading_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_streams, "SEND_TIMEOUT_S", 0.05)
    backend = Echo()

    async def receive() -> Any:
        if backend.admitted:
            await asyncio.Event().wait()  # it stays
        return {"type": "http.request", "body": json.dumps({"messages": HELLO, "stream": True}).encode()}

    async def send(message: Any) -> None:
        if b"[DONE]" in message.get("body", b""):
            await asyncio.Event().wait()  # all buffers are full

    await call_app(backend, receive, send)
    assert (backend.num_closed, backend.front_end.admission.num_running) == (1, 0)
    assert statuses(backend) == {"499": 1.0}


def test_what_clients_see_is_measured_by_workload_and_status() -> None:
    backend = Echo()
    chat(backend, stream=True, drafting={"workload": "code"})
    chat(backend, drafting={"workload": "code"})
    chat(backend, temperature="hot")
    samples = {
        (sample.name, sample.labels.get("workload"), sample.labels.get("status")): sample.value
        for family in backend.front_end.families()
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert samples["peagle_time_to_first_token_seconds_count", "code", None] == 1
    assert samples["peagle_time_per_output_token_seconds_count", "code", None] == 1
    assert samples["peagle_request_latency_seconds_count", "code", None] == 2
    assert samples["peagle_answers_total", "code", "200"] == 2
    assert samples["peagle_answers_total", "", "400"] == 1
    assert not any(name.endswith("_created") for name, _, _ in samples)


def test_workloads_that_are_told_apart_no_more_leave_no_series() -> None:
    metrics = FrontEndMetrics()
    for name in (f"tag-{number}" for number in range(100)):
        metrics.count_answer(name, 200)
        metrics.latency.labels(name).observe(0.1)
    metrics.count_answer("", 400)
    for _ in range(2):
        labels = {sample.labels.get("workload") for family in metrics.families(["tag-7"]) for sample in family.samples}
        assert labels == {"tag-7", "", None}, "None: the queue's length"


def test_each_request_leaves_one_line_of_its_use_without_its_text(tmp_path: Path) -> None:
    log, backend = UsageLog(str(tmp_path / "usage")), Echo()
    settings = callers(web={"key_sha256": DIGEST, "workload": "pages"})
    backend.front_end = FrontEnd(settings, usage_log=log, replica="r1")
    backend.front_end.generate = backend.generate
    chat(backend, headers=bearer(SECRET))
    assert chat(backend, headers=bearer(SECRET), drafting={"k": 99}).status_code == 400
    backend.front_end.charge("web", 7, Usage(1, 1, 1))  # of no open request
    log.close()
    answered, refused = map(json.loads, (tmp_path / "usage").read_text().splitlines())
    about = {"replica": "r1", "caller": "web", "workload": "pages", "model": "tiny", "call": "chat", "status": 200}
    about |= {"prompt_tokens": 3, "output_tokens": 5, "accepted_tokens": 0}
    assert answered.items() >= about.items()
    assert answered.keys() == {*about, "time", "first_s", "total_s"}
    assert 0 <= answered["first_s"] <= answered["total_s"]
    assert (refused["status"], refused["workload"], "output_tokens" in refused) == (400, "", False)
    samples = [sample for family in backend.front_end.families() for sample in family.samples]
    tokens = {sample.name: sample.value for sample in samples if sample.labels.get("caller") == "web"}
    counted = {"prompt": 4, "output": 6, "accepted": 1}
    assert tokens == {f"peagle_caller_{kind}_tokens_total": number for kind, number in counted.items()}


# ---- callers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("learn", [False, True])
def test_only_requests_of_callers_who_opted_in_may_be_learned_from(learn: bool) -> None:
    found = callers(web={"key_sha256": DIGEST, "learn": learn})
    backend = Echo(found.model_copy(update={"learning": LearningSettings()}))
    assert chat(backend, headers=bearer(SECRET)).status_code == 200
    assert backend.admitted[0].body.vllm_xargs.get(LEARN_KEY) == ("web" if learn else None)


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/none", "/health/x"])
@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer ", SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", f"Bearer {DIGEST}"]
)
def test_an_unknown_key_gets_401_before_anything_else(path: str, key: str | None) -> None:
    backend = Echo(callers(web={"key_sha256": DIGEST}))
    headers = {} if key is None else {"Authorization": key}
    response = request(backend, "POST", path, content=b"{", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert SECRET not in response.text


def test_probes_and_the_page_need_no_key_and_a_route_prefix_changes_nothing() -> None:
    backend = Echo(callers(web={"key_sha256": DIGEST}))
    for path, status in (
        *((path, 200) for path in ("/", "/health", "/metrics", "/ping")), ("/drafting", 401), ("/v1/models", 401),
    ):  # fmt: skip
        assert request(backend, "GET", path).status_code == status
        assert request(backend, "GET", f"/app{path}", root_path="/app").status_code == status
    assert request(backend, "GET", "/app/v1/models", root_path="/app", headers=bearer(SECRET)).status_code == 200


def test_of_a_clients_headers_the_engine_sees_those_of_its_trace_alone() -> None:
    backend = Echo()
    trace = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=b"}
    assert chat(backend, headers={**trace, "X-Request-Priority": "-9", "X-Session-Id": "other"}).status_code == 200
    assert chat(backend).status_code == 200
    first, second = backend.admitted
    assert (first.trace, second.trace) == (trace, {})


def test_a_browser_may_ask_whether_it_may_call_and_can_read_the_refusal() -> None:
    origin = {"Origin": "http://page.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    backend = Echo(callers(web={"key_sha256": DIGEST}))
    entrance = Entrance(allow_origins=["http://page.example"])
    assert request(backend, "OPTIONS", CHAT, headers=preflight, entrance=entrance).status_code == 200
    refused = request(backend, "POST", CHAT, headers=origin, entrance=entrance)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-origin" not in request(Echo(), "POST", CHAT, headers=origin).headers


# ---- settings that change while requests run


def test_limits_callers_k_and_aliases_change_while_the_front_end_serves() -> None:
    before = cluster()
    changes: dict[str, dict[str, Any]] = {
        "limits": {"max_num_sequences": 1}, "num_draft_tokens": {"max": 2}, "model": {"aliases": {"other": "code"}},
    }  # fmt: skip
    sections = {name: getattr(before, name).model_copy(update=change) for name, change in changes.items()}
    after = callers(web={"key_sha256": DIGEST}).model_copy(update=sections)
    backend = Echo(before)
    assert chat(backend, n=2).status_code == 200
    live = json.loads(json.dumps(live_config(after)))
    changed = with_live(before, live)
    assert live_config(changed) == live_config(after)
    backend.front_end.apply_settings(changed)
    assert chat(backend).status_code == 401
    assert chat(backend, headers=bearer(SECRET), n=2).status_code == 400
    assert chat(backend, headers=bearer(SECRET), model="tiny-coder").status_code == 404
    drafting = chat(backend, headers=bearer(SECRET), model="other").json()["drafting"]
    assert (drafting["workload"], drafting["k"]) == ("code", 2)
    assert SECRET not in json.dumps(live)


# ---- which head drafts


def test_a_share_of_the_requests_tries_the_candidate_that_drafters_have_and_clients_do_not_notice() -> None:
    front_end = FrontEnd(cluster(drafter=DrafterSettings(head="a", placement="remote", max_draft_tokens=7)))
    front_end.heads = ("A", "C")

    def tried(routing: HeadRouting) -> Counter[tuple[int, str]]:
        """Index of the head, and workload in the engine, of 200 requests."""
        front_end.routing, found = routing, Counter[tuple[int, str]]()
        for _ in range(200):
            admitted = front_end.admit("chat", {"messages": HELLO, "drafting": {"workload": "chat", "k": 3}})
            args = admitted.body.vllm_xargs
            shown = drafting_field(admitted.drafting, "", Counts())["workload"]
            assert (args[MAX_K_KEY], shown) == (3, "chat")
            found[args[HEAD_KEY], args[WORKLOAD_KEY]] += 1
        return found

    for none in (HeadRouting(), HeadRouting("not here", 0.5)):
        assert tried(none) == {(0, "chat"): 200}
        assert front_end.find_head("chat") == "A"
    found = tried(HeadRouting(trial="C", share=0.5))
    assert found.keys() == {(0, "chat"), (1, "chat/trial")}
    assert 50 < found[1, "chat/trial"] < 150
    assert [front_end.find_head(name) for name in ("chat", "code/trial")] == ["A", "C"]
    front_end.remember_workload("chat/trial")
    assert "chat/trial" not in front_end._workloads.names()
    front_end.heads = ()
    assert front_end.find_head("chat") == ""
