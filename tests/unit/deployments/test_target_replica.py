"""A target replica between the front end and vLLM's API objects: what becomes of answers, errors, clients that go."""

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from cluster.errors import ApiError
from cluster.request import Caller, hash_key
from cluster.settings import live_config
from deployments.answers import EngineAnswers
from deployments.front_end import Admitted, FrontEnd, Usage
from deployments.replicas import EngineLost
from deployments.target import TargetServer, default_front_ends
from deployments.usage_log import UsageLog
from peagle.schema import SettingsError
from peagle.vllm.recorder import RequestDrafting
from tests.support.counted import counts_of
from tests.unit.deployments.test_front_end import HELLO, callers, cluster

COUNTS = counts_of([(3, 3), (3, 1)])
FIELDS: dict[str, dict[str, Any]] = {"chat": {"messages": HELLO}, "completions": {"prompt": ["a", "b"]}}


class Replica(TargetServer):
    """Without Ray and an engine; `answer` is what vLLM's API objects do with a request."""

    def __init__(self, answer: Callable[[Any], Any], log: UsageLog | None = None) -> None:
        async def ask(body: Any, request: Any) -> Any:
            self.names.append(request.headers["x-request-id"])
            return answer(body)

        self.names: list[str] = []
        self.aborted: list[str] = []
        self._settings, self._grammars = cluster(), SimpleNamespace(limits=None)  # type: ignore[assignment]
        self._usage_log, self.front_end = log, FrontEnd(self._settings, usage_log=log)
        self._front_ends = None
        self.front_end.heads = ("digest",)
        self._client = SimpleNamespace(errored=False, abort=self._end)
        self.record = RequestDrafting("x", "default", COUNTS, num_output_tokens=9, num_prompt_tokens=4)
        self.recorder: Any = SimpleNamespace(pop=lambda *ids: self.record)
        self.engine = SimpleNamespace()
        messages = object.__new__(AnthropicServingMessages)
        messages._merge_inline_system = False
        messages.create_chat_completion = ask  # type: ignore[method-assign]
        chat = SimpleNamespace(create_chat_completion=ask, create_error_response=create_error_response)
        self.vllm = SimpleNamespace(
            openai_serving_chat=chat,
            openai_serving_completion=SimpleNamespace(create_completion=ask),
            openai_serving_responses=SimpleNamespace(create_responses=ask),
            anthropic_serving_messages=messages,
        )
        charge = self.front_end.charge
        self.front_end.generate = EngineAnswers(self._client, self.vllm, self.recorder, charge).generate

    async def _end(self, ids: list[str]) -> None:
        self.aborted += ids

    def __del__(self) -> None:
        """Serve awaits it; here nothing does."""


def chunk(finish_reason: str | None = None, index: int = 0) -> str:
    choice = {"index": index, "delta": {"content": "a"}, "finish_reason": finish_reason}
    return f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [choice]}, separators=(',', ':'))}\n\n"


async def events(*items: Any) -> AsyncIterator[str]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def endless(made: list[int] | None = None) -> AsyncIterator[str]:
    while True:
        yield chunk()
        if made is not None:
            made.append(1)
        await asyncio.sleep(0)


def raising(error: Exception) -> Any:
    raise error


async def leave(answer: Any, num_items: int) -> None:
    """Read the beginning of an answer, and go. The engine is told in a turn of its own."""
    assert [await anext(answer) for _ in range(num_items)]
    await answer.aclose()
    await asyncio.sleep(0.01)


def keep_charges(replica: Replica) -> list[tuple[str, int]]:
    """Where the callers and tokens are put that are charged from now on."""
    charged: list[tuple[str, int]] = []
    replica.front_end.admission.charge_tokens = lambda *given: charged.append(given)  # type: ignore[method-assign]
    return charged


def items(replica: Replica, **body: Any) -> list[Any]:
    return answered(replica, replica.front_end.admit("chat", {"messages": HELLO, **body}))


def answered(replica: Replica, admitted: Admitted) -> list[Any]:
    async def run() -> list[Any]:
        found = [item async for item in replica.front_end.generate(admitted)]
        await asyncio.sleep(0.01)
        return found

    return asyncio.run(run())


def whole(request: Any) -> ChatCompletionResponse:
    message = {"role": "assistant", "content": "Hi"}
    return ChatCompletionResponse(
        id="chatcmpl-1", model="tiny", choices=[{"index": 0, "message": message, "finish_reason": "stop"}],
        usage=UsageInfo(prompt_tokens=4, completion_tokens=9, total_tokens=13),
    )  # fmt: skip


DRAFTING = {
    "workload": "default", "k": 7, "max_k": 7, "source": "default", "head": "digest", "num_steps": 2,
    "num_draft_tokens": 6, "num_accepted_tokens": 4, "acceptance_length": 3.0,
}  # fmt: skip


def test_drafting_of_an_answer_that_went_without_drafts_says_why() -> None:
    replica = Replica(whole)
    replica.record = RequestDrafting("x", "default", num_output_tokens=9, num_prompt_tokens=4, undraftable="min_p")
    (text,) = [item for item in items(replica) if isinstance(item, str)]
    found = json.loads(text)["drafting"]
    decided = {"k": 0, "max_k": 0, "source": "request", "reason": "min_p goes without drafts"}
    nothing = {"num_steps": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "acceptance_length": 1.0}
    assert found == DRAFTING | decided | nothing


def test_a_stream_has_its_drafting_in_the_chunk_that_finishes_the_last_choice() -> None:
    found = items(
        Replica(lambda _: events(chunk(), chunk("stop", 1), chunk(), chunk("length", 0), "data: [DONE]\n\n")),
        stream=True, n=2,
    )  # fmt: skip
    assert ["drafting" in item for item in found if isinstance(item, str)] == [False, False, False, True, False]
    assert json.loads(found[4].removeprefix("data: "))["drafting"] == DRAFTING
    assert found[3] == Usage(4, 9, 4)


def test_who_hears_of_an_engines_death_needs_no_vllm_to_read_it() -> None:
    """Serve's controller, the router and ingress replicas would import vLLM, which closes their logs."""
    replica = Replica(lambda _: None)
    replica.engine.check_health = lambda: raising(EngineDeadError())
    for call in (replica.check_health, replica.report):
        with pytest.raises(EngineLost, match="EngineDeadError") as raised:
            asyncio.run(call())
        assert b"vllm." not in pickle.dumps(raised.value)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_an_engine_that_dies_in_a_stream_ends_it_in_words_of_our_own() -> None:
    """vLLM turns the engine's death into an event that speaks of a stack trace above, with code 500."""
    died = json.dumps(create_error_response(EngineDeadError()).model_dump())
    replica = Replica(lambda _: events(chunk(), f"data: {died}\n\n", "data: [DONE]\n\n"))
    replica._client.errored = True
    (refused,) = items(replica, stream=True)
    assert (refused.status, refused.code) == (502, "engine_lost")
    replica._client.errored = False

    async def dies() -> AsyncIterator[str]:
        yield chunk()
        replica._client.errored = True
        yield f"data: {died}\n\n"
        yield "data: [DONE]\n\n"

    replica.vllm.openai_serving_chat.create_chat_completion = lambda *_: asyncio.sleep(0, dies())
    first, lost = items(replica, stream=True)
    assert first == chunk()
    assert isinstance(lost, ApiError)
    assert (lost.status, lost.code) == (502, "engine_lost")
    assert "stack trace" not in lost.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_grammar_is_named_by_the_field_that_the_client_sent(stream: bool) -> None:
    """vLLM makes structured_outputs of each of them."""
    error = VLLMValidationError("structured_outputs: allows no text", parameter="structured_outputs")
    refusal = create_error_response(error)
    event = f"data: {json.dumps(refusal.model_dump())}\n\n"
    response_format = {"response_format": {"type": "json_object"}}
    for fields, param in (
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (response_format, "response_format"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required", **response_format}, "tools"),
    ):
        (refused,) = items(Replica(lambda _: events(event) if stream else refusal), stream=stream, **fields)
        assert (refused.status, refused.param) == (400, param)
        assert refused.message.startswith(f"{param}: allows no text")


def test_what_is_raised_before_the_first_token_is_the_requests_fault_or_the_services() -> None:
    for error, status, param in (
        (VLLMValidationError("no such token", parameter="prompt"), 400, "prompt"),
        (ValueError("too long"), 400, None),
        (KeyError("function"), 400, None),
        (RecursionError(), 400, None),
        (RuntimeError("broken"), 500, None),
    ):
        (refused,) = items(Replica(lambda _, error=error: raising(error)))
        assert (refused.status, refused.param) == (status, param), error
        (refused,) = items(Replica(lambda _, error=error: create_error_response(error)))
        assert refused.status == status or isinstance(error, KeyError | RecursionError), error


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_refusal_of_vllms_name_for_a_field_names_the_clients(field: str) -> None:
    error = VLLMValidationError("max_tokens must be at least 1, got 0.", parameter="max_tokens")
    (refused,) = items(Replica(lambda _: raising(error)), **{field: 0})
    assert (refused.param, refused.message.split()[0]) == (field, field)


def test_a_stream_whose_grammar_cannot_be_followed_any_further_says_so() -> None:
    failed = create_error_response(GenerationError("Internal server error"))
    for fields, status in (({"structured_outputs": {"regex": "a"}}, 400), ({}, 500)):
        answer = events(*[chunk()] * 3, f"data: {json.dumps(failed.model_dump())}\n\n")
        *_, error = items(Replica(lambda _, answer=answer: answer), stream=True, **fields)
        assert error.status == status
        assert ("takes too long for this text" in error.message) == bool(fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_allows_no_text_is_an_error_of_the_request(stream: bool) -> None:
    """vLLM ends such a request as it ends one that it failed on."""
    failed = create_error_response(GenerationError("Internal server error"))
    event = f"data: {json.dumps(failed.model_dump())}\n\n"
    itself = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    replica = Replica(lambda _: events(chunk(), event) if stream else failed)
    (refused,) = items(replica, stream=stream, response_format=itself)
    assert (refused.status, refused.param) == (400, "response_format")
    *_, plain = items(replica, stream=stream)
    assert plain.status == 500
    if stream:
        fine = Replica(lambda _: events(chunk(), chunk("stop"), "data: [DONE]\n\n"))
        found = items(fine, stream=True, response_format=itself)
        assert [type(item) for item in found] == [str, Usage, str, str]


@pytest.mark.parametrize("call", FIELDS)
async def test_a_client_that_leaves_aborts_all_sequences_of_its_request(call: Any, tmp_path: Path) -> None:
    """vLLM's generator may be left to the garbage collector with two of three sequences still running."""
    closed: list[bool] = []

    async def stream() -> AsyncIterator[str]:
        try:
            while True:
                yield chunk()
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    log = UsageLog(str(tmp_path / "usage"))
    replica = Replica(lambda _: stream(), log)
    charged = keep_charges(replica)
    document = {**FIELDS[call], "stream": True, "n": 3, "request_id": "r1"}
    await leave(replica.front_end.answer(call, document, Caller("web")), 3)
    assert closed == [True]
    assert replica.aborted == (["chatcmpl-r1"] if call == "chat" else ["cmpl-r1-0", "cmpl-r1-1"])
    assert charged == [("web", 13)], "prompt and output so far"
    log.close()
    line = json.loads((tmp_path / "usage").read_text())
    counted = [line[f"{kind}_tokens"] for kind in ("prompt", "output", "accepted")]
    assert (line["status"], line["caller"], counted) == (499, "web", [4, 9, 4])


async def test_a_new_replica_refuses_key_files_that_a_running_one_passes_over(tmp_path: Path) -> None:
    """A replica without keys would refuse everybody, and be the first to be asked."""
    file = tmp_path / "key"
    settings = callers(web={"key_file": str(file)})
    replica = Replica(lambda _: None)
    replica._settings = settings
    with pytest.raises(SettingsError, match=r"callers\.web\.key_file"):
        await replica.reconfigure(live_config(settings))
    file.write_text("first")
    await replica.reconfigure(live_config(settings))
    assert replica.front_end.keys == {"web": [hash_key("first")]}
    file.unlink()
    await replica.reconfigure(live_config(settings))
    assert replica.front_end.keys == {"web": [hash_key("first")]}


async def test_a_new_replica_refuses_settings_that_would_let_in_everybody() -> None:
    replica = Replica(lambda _: None)
    bad = {"callers": {"web": {"key_sha256": "short"}}}
    with pytest.raises(SettingsError, match=r"user_config\.callers\.web\.key_sha256"):
        await replica.reconfigure(bad)
    await replica.reconfigure(live_config(callers(web={"key_sha256": "ab" * 32})))
    await replica.reconfigure(bad)
    assert replica.front_end.needs_key, "it goes on as it was"


async def test_an_answer_is_charged_though_its_client_leaves_at_the_end(tmp_path: Path) -> None:
    log = UsageLog(str(tmp_path / "usage"))
    replica = Replica(lambda _: events(chunk(), chunk("stop")), log)
    charged, records = keep_charges(replica), [replica.record]
    replica.recorder.pop = lambda *_: records.pop() if records else None
    await leave(replica.front_end.answer("chat", {"messages": HELLO, "stream": True}, Caller("web")), 2)
    assert sum(tokens for _, tokens in charged) == 13
    log.close()
    (line,) = (tmp_path / "usage").read_text().splitlines()
    assert json.loads(line)["output_tokens"] == 9


async def test_a_replica_that_ends_writes_the_lines_that_wait_for_tokens_and_leaves_no_folder(tmp_path: Path) -> None:
    replica = Replica(lambda _: events(chunk(), chunk("stop")), UsageLog(str(tmp_path / "usage")))
    replica._client.abort = lambda _: asyncio.sleep(60)  # which says the tokens too late
    replica.engine.shutdown = lambda: asyncio.sleep(0)  # type: ignore[attr-defined]
    await leave(replica.ask("chat", {"messages": HELLO, "stream": True}), 1)
    folder = TemporaryDirectory(dir=tmp_path)
    replica._front_ends = SimpleNamespace(metrics_folder=folder)  # type: ignore[assignment]
    await TargetServer.__del__(replica)
    assert not Path(folder.name).exists()
    (line,) = (tmp_path / "usage").read_text().splitlines()
    assert (json.loads(line)["status"], "output_tokens" in line) == (499, False)


@pytest.mark.parametrize("call", FIELDS)
async def test_requests_of_one_name_do_not_end_each_other(call: Any) -> None:
    """Gateways give retries, and calls side by side, one X-Request-Id; vLLM aborts all requests of a name."""
    replica = Replica(lambda _: endless())
    asked = replica.names

    def begin() -> Any:
        document = {**FIELDS[call], "stream": True, "request_id": "r1"}
        return replica.front_end.generate(replica.front_end.admit(call, document))

    first = begin()
    assert await anext(first)
    await leave(begin(), 1)
    assert asked[0] == "r1"
    assert asked[1].startswith("r1-")
    assert replica.aborted
    assert all(asked[1] in name for name in replica.aborted)
    await leave(first, 1)
    await anext(begin())
    assert asked[2] == "r1", "its name is free again"


def test_a_call_by_handle_goes_through_the_same_edge() -> None:
    async def run(**body: Any) -> list[Any]:
        replica = Replica(whole)
        return [item async for item in replica.ask("chat", {"messages": HELLO, **body})]

    (answer,) = asyncio.run(run(drafting={"k": 3}))
    assert (answer["drafting"]["k"], answer["drafting"]["source"]) == (3, "request")
    for body, param in (({"drafting": {"k": 99}}, "drafting.k"), ({"top_k": 10**30}, "top_k"), ({"top_p": {1}}, None)):
        (refused,) = asyncio.run(run(**body))
        assert (refused["status"], refused["error"]["param"]) == (400, param)


def test_front_end_processes_by_default_follow_the_cpus_of_the_replicas_gpus() -> None:
    by_cpus = {(2, 1, 1): 1, (8, 1, 1): 2, (16, 1, 1): 4}
    by_share = {(64, 8, 1): 2, (64, 8, 4): 4, (16, 1, 0.25): 1, (8, 1, 2): 2, (16, 1, 0): 1}
    for (num_cpus, num_gpus, own_gpus), number in {**by_cpus, **by_share}.items():
        assert default_front_ends(num_cpus, num_gpus, own_gpus) == number, (num_cpus, num_gpus, own_gpus)
