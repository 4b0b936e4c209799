"""The replica's side and the other side of a front-end process, over the socket between them, without an engine."""

import asyncio
import json
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from cluster.errors import ApiError
from deployments import front_end_processes
from deployments.answers import EngineAnswers
from deployments.front_end import FrontEnd, Usage
from deployments.front_end_processes import (
    FrontEndProcess,
    FrontEndProcesses,
    RemoteGrammarChecker,
    Task,
    Wire,
    Worker,
)
from peagle.vllm.recorder import DraftingRecorder, RequestDrafting
from tests.unit.deployments.test_front_end import HELLO, cluster
from tests.unit.deployments.test_target_replica import COUNTS, chunk, endless, events

LAST = [chunk("stop"), "data: [DONE]\n\n"]


class NoProcess(FrontEndProcess):
    """The other side runs on this event loop. Its vLLM answers by `answer`, which a test sets."""

    answer: Callable[[Any], Any]
    start_s = 0.0

    def _launch(self, setup: Any, end: socket.socket) -> Any:
        self.aborted: list[str] = []
        self.checker: RemoteGrammarChecker
        self.theirs: Wire
        self._work = asyncio.get_running_loop().create_task(self._serve(end))
        return SimpleNamespace(kill=self.die, wait=lambda: -9, pid=self.place)

    async def _serve(self, end: socket.socket) -> None:
        async def ask(body: Any, request: Any) -> Any:
            return type(self).answer(body)

        async def abort(ids: list[str]) -> None:
            self.aborted += ids

        wire = self.theirs = await Wire.open(end, Task)
        client: Any = SimpleNamespace(errored=False, abort=abort)
        chat: Any = SimpleNamespace(create_chat_completion=ask, create_error_response=create_error_response)
        record = RequestDrafting("x", "default", COUNTS, num_output_tokens=9, num_prompt_tokens=4)
        recorder = DraftingRecorder()
        recorder.pop = lambda response_id: record
        self.checker = RemoteGrammarChecker(wire)
        vllm = SimpleNamespace(openai_serving_chat=chat, anthropic_serving_messages=SimpleNamespace())
        charge = lambda *charged: wire.send(front_end_processes.Charged(*charged))  # noqa: E731
        worker = Worker(wire, EngineAnswers(client, vllm, recorder, charge), recorder, self.checker)
        try:
            await asyncio.sleep(self.start_s)
            wire.send(front_end_processes.Ready())
            async for message in wire.messages():
                worker.handle(message)
        finally:
            wire.close()

    def die(self) -> None:
        self._work.cancel()


class Replica(FrontEndProcesses):
    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(front_end_processes, "FrontEndProcess", NoProcess)
        monkeypatch.setattr(front_end_processes, "client_addresses", lambda _, number: [("", "")] * number)
        self.charged: list[Any] = []
        self.kept: list[Any] = []

        def charge(*charged: Any) -> None:
            self.charged.append(charged)

        def keep(*kept: Any) -> None:
            self.kept.append(kept)

        self.recorder = DraftingRecorder()
        super().__init__(number, 8, self.recorder, charge, keep)
        self.front_end = FrontEnd(cluster())

    async def start(self) -> None:
        async def find_outcome(fields: Any) -> Any:
            return {"error": f"no {fields}"}

        self.launch(None, Namespace())
        self.engine_end = asyncio.get_running_loop().create_future()
        await self.attach(SimpleNamespace(find_outcome=find_outcome), self.engine_end)

    def process(self, place: int) -> Any:
        return self._processes[place]

    def ask(self, **body: Any) -> Any:
        return self.generate(self.front_end.admit("chat", {"messages": HELLO, "stream": True, **body}))


async def soon(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


async def test_requests_go_to_the_process_with_the_fewest_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, asked = Replica(2, monkeypatch), []

    async def answer(request: Any) -> AsyncIterator[str]:
        asked.append(request)
        async for event in endless():
            yield event

    NoProcess.answer = answer
    await replica.start()
    streams = [replica.ask(n=3), *(replica.ask(n=1) for _ in range(3))]
    assert [await anext(stream) for stream in streams] == [chunk()] * 4
    assert [replica.process(place).num_requests for place in (0, 1)] == [1, 3]
    assert [(one.n, one.vllm_xargs["peagle_k"]) for one in asked] == [(3, 7), (1, 7), (1, 7), (1, 7)]
    for stream in streams:
        await stream.aclose()
    await soon(lambda: len(replica.charged) == 4)
    assert replica.charged[0] == ("anyone", 0, Usage(4, 9, 4))
    assert [len(replica.process(place).aborted) for place in (0, 1)] == [1, 3]
    assert [replica.process(place).num_sequences for place in (0, 1)] == [0, 0]


async def test_answers_and_errors_come_through_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(1, monkeypatch)
    await replica.start()
    NoProcess.answer = lambda _: events(chunk(), *LAST)
    found = [item async for item in replica.ask()]
    assert found[0] == chunk()
    assert json.loads(found[1].removeprefix("data: "))["drafting"]["num_steps"] == 2
    assert found[2:] == [LAST[-1], Usage(4, 9, 4)]
    NoProcess.answer = lambda _: create_error_response(ValueError("too long"))
    (error,) = [item async for item in replica.ask()]
    assert isinstance(error, ApiError)
    assert (error.status, error.message, error.code) == (400, "too long", "invalid_value")
    replica.process(0).theirs.send(front_end_processes.Kept("code", "web", [1, 2], [3]))
    await soon(lambda: replica.kept == [("code", "web", [1, 2], [3])])
    found = await replica.process(0).checker.find_outcome({"regex": "a"})
    assert found == {"error": "no {'regex': 'a'}"}


@pytest.mark.parametrize("what", ["engine", "process"])
async def test_an_engine_or_a_process_that_dies_ends_the_replica(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(2, monkeypatch)
    await replica.start()
    NoProcess.answer = lambda _: endless()
    streams = [replica.ask(), replica.ask()]
    for stream in streams:
        await anext(stream)
    if what == "engine":
        replica.engine_end.set_result(None)
    else:
        replica.process(0).die()
    for stream in streams:
        *_, error = [item async for item in stream]
        assert error.code == "engine_lost"
    died = {"engine": "the engine has died", "process": "front-end process 0 has ended with -9"}
    assert replica.problem == died[what]
    (refused,) = [item async for item in replica.ask()]
    assert (refused.status, refused.code) == (502, "engine_lost"), "HAProxy asks another replica"


async def test_a_replica_whose_process_dies_at_its_start_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(2, monkeypatch)
    monkeypatch.setattr(NoProcess, "start_s", 60.0)
    start = asyncio.create_task(replica.start())
    await asyncio.sleep(0.05)
    replica.process(1).die()
    with pytest.raises(RuntimeError, match="front-end process 1 has ended with -9"):
        await start


async def test_counts_are_asked_for_until_a_process_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(2, monkeypatch)
    await replica.start()
    monkeypatch.setattr(front_end_processes, "REPORT_TIMEOUT_S", 0.05)
    await replica.refresh_counts()
    assert all(replica.process(place).has_reported.is_set() for place in (0, 1))
    monkeypatch.setattr(Worker, "handle", lambda *_: None)
    await replica.refresh_counts()
    assert not any(replica.process(place).has_reported.is_set() for place in (0, 1))
