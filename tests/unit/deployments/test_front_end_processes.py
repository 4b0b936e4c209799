"""The replica's side and the other side of a front-end process, over the socket between them, without an engine."""

import asyncio
import contextlib
import json
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvloop
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from cluster.errors import ApiError
from deployments import front_end_processes
from deployments.answers import EngineAnswers
from deployments.front_end import FrontEnd, Usage
from deployments.front_end_processes import MAX_RESTARTS, WINDOW, Outcome, RemoteGrammarChecker, Stop, Wire, Worker
from peagle.vllm.grammar_checker import current_queue
from peagle.vllm.recorder import DraftingRecorder, RequestDrafting
from tests.unit.deployments.test_front_end import HELLO, cluster
from tests.unit.deployments.test_replicas import until
from tests.unit.deployments.test_target_replica import COUNTS, chunk, endless, events

LAST = [chunk("stop"), "data: [DONE]\n\n"]


class NoProcess(front_end_processes.FrontEndProcess):
    """The other side runs on this event loop. Its vLLM answers by `answer`, which a test sets."""

    answer: Callable[[Any], Any]

    def _launch(self, setup: Any, end: socket.socket) -> Any:
        self.aborted: list[str] = []
        self.checker: RemoteGrammarChecker
        self.theirs: Wire
        self._work = asyncio.get_running_loop().create_task(self._serve(end))
        return SimpleNamespace(kill=self.die, wait=lambda: -9, pid=self.index)

    async def _serve(self, end: socket.socket) -> None:
        async def ask(body: Any, request: Any) -> Any:
            return type(self).answer(body)

        async def abort(ids: list[str]) -> None:
            self.aborted += ids

        wire = self.theirs = await Wire.open(end, front_end_processes.Task)
        client: Any = SimpleNamespace(errored=False, abort=abort)
        chat: Any = SimpleNamespace(create_chat_completion=ask, create_error_response=create_error_response)
        record = RequestDrafting("x", "default", COUNTS, num_output_tokens=9, num_prompt_tokens=4)
        recorder = DraftingRecorder()
        recorder.pop = lambda *ids: record
        self.checker = RemoteGrammarChecker(wire)
        vllm = SimpleNamespace(openai_serving_chat=chat, anthropic_serving_messages=SimpleNamespace())
        charge = lambda *charged: wire.send(front_end_processes.Charged(*charged))  # noqa: E731
        worker = Worker(wire, EngineAnswers(client, vllm, recorder, charge), recorder, self.checker)
        wire.send(front_end_processes.Ready())
        try:
            async for message in wire.messages():
                worker.handle(message)
        finally:
            wire.close()

    def die(self) -> None:
        self._work.cancel()


class Replica(front_end_processes.FrontEndProcesses):
    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(front_end_processes, "FrontEndProcess", NoProcess)
        monkeypatch.setattr(front_end_processes, "client_addresses", lambda _, number: [("", "")] * number)
        self.charged: list[Any] = []
        self.kept: list[Any] = []
        charge = lambda *charged: self.charged.append(charged)  # noqa: E731
        keep = lambda *kept: self.kept.append(kept)  # noqa: E731
        super().__init__(number, 8, DraftingRecorder(), charge, keep)
        self.front_end = FrontEnd(cluster())

    @classmethod
    async def started(cls, number: int, monkeypatch: pytest.MonkeyPatch) -> "Replica":
        async def abort(index: int) -> None: ...

        async def find_outcome(fields: Any) -> Any:
            if "fails" in fields:
                raise OSError("too many open files")
            if "waits" in fields:
                await asyncio.get_running_loop().create_future()
            return {"error": f"no {fields}, {current_queue.get()}"}

        replica = cls(number, monkeypatch)
        replica.launch(None, Namespace())
        replica.engine_end = asyncio.get_running_loop().create_future()
        await replica.attach(SimpleNamespace(find_outcome=find_outcome), abort, replica.engine_end)
        return replica

    def process(self, place: int) -> Any:
        return self._processes[place]

    def ask(self, **body: Any) -> Any:
        return self.generate(self.front_end.admit("chat", {"messages": HELLO, "stream": True, **body}))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_job_leaves_at_once_whole_and_in_order(run: Any) -> None:
    async def exchange() -> None:
        ours, theirs = socket.socketpair()
        wire = await Wire.open(ours, front_end_processes.Result)
        wire.send(Stop(1))
        wire.send_now(Stop(2))
        theirs.setblocking(False)
        assert msgspec.msgpack.decode(theirs.recv(1000)[4:]) == [["Stop", 2]]  # the other waits for the turn's end
        large = [Outcome(number, {"error": "x" * 300_000}) for number in range(4)]
        for message in large:
            wire.send_now(message)
        other = await Wire.open(theirs, front_end_processes.Task)
        messages = other.messages()
        assert [await anext(messages) for _ in range(5)] == [*large, Stop(1)]

    run(exchange())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_messages_to_an_end_that_is_gone_are_dropped(run: Any) -> None:
    async def exchange() -> None:
        ours, theirs = socket.socketpair()
        wire = await Wire.open(ours, front_end_processes.Result)
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        theirs.close()
        for _ in range(3):
            wire.send_now(Stop(1))
            wire.send(Stop(2))
            await asyncio.sleep(0.01)
        assert [message async for message in wire.messages()] == []
        assert errors == []

    run(exchange())


async def test_requests_go_to_the_process_with_the_fewest_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, asked = await Replica.started(2, monkeypatch), list[Any]()

    def answer(request: Any) -> AsyncIterator[str]:
        asked.append(request)
        return endless()

    NoProcess.answer = answer
    streams = [replica.ask(n=3), *(replica.ask(n=1) for _ in range(3))]
    assert [await anext(stream) for stream in streams] == [chunk()] * 4
    assert replica.num_requests == [1, 3]
    assert [(one.n, one.vllm_xargs["peagle_k"]) for one in asked] == [(3, 7), (1, 7), (1, 7), (1, 7)]
    for stream in streams:
        await stream.aclose()
    await until(lambda: len(replica.charged) == 4)
    assert replica.charged[0] == ("anyone", 0, Usage(4, 9, 4))
    assert [len(replica.process(place).aborted) for place in (0, 1)] == [1, 3]
    assert [replica.process(place).sequences.total() for place in (0, 1)] == [0, 0]


async def test_an_answer_that_has_ended_is_charged_though_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(1, monkeypatch)
    NoProcess.answer = lambda _: events(chunk(), *LAST)
    stream = replica.ask()
    assert await anext(stream) == chunk()
    await asyncio.sleep(0.05)
    await stream.aclose()
    await until(lambda: replica.charged)
    assert [usage for _, _, usage in replica.charged] == [Usage(4, 9, 4)]


async def test_tokens_that_are_under_way_when_the_client_leaves_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(1, monkeypatch)
    NoProcess.answer = lambda _: endless()
    stream = replica.ask()
    assert await anext(stream)
    process = replica.process(0)
    await stream.aclose()
    process.theirs.send(front_end_processes.Charged("anyone", 0, Usage(4, 9, 4), 0))  # before it hears of that
    await until(lambda: replica.charged == [("anyone", 0, Usage(4, 9, 4))] * 2)


async def test_answers_and_errors_come_through_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(1, monkeypatch)
    NoProcess.answer = lambda _: events(chunk(), *LAST)
    found = [item async for item in replica.ask()]
    assert found[0] == chunk()
    assert json.loads(found[2].removeprefix("data: "))["drafting"]["num_steps"] == 2
    assert (found[1], found[3:]) == (Usage(4, 9, 4), [LAST[-1]])
    lines = list[str]()
    NoProcess.answer = lambda _: lines.append(current_queue.get()) or create_error_response(ValueError("too long"))
    (error,) = [item async for item in replica.ask()]
    assert lines == ["anyone"]
    assert isinstance(error, ApiError)
    assert (error.status, error.message, error.code) == (400, "too long", "invalid_value")
    replica.process(0).theirs.send(front_end_processes.Kept("code", "web", [1, 2], [3]))
    await until(lambda: replica.kept == [("code", "web", [1, 2], [3])])
    current_queue.set("web")
    found = await replica.process(0).checker.find_outcome({"regex": "a"})
    assert found == {"error": "no {'regex': 'a'}, web"}
    with pytest.raises(RuntimeError, match="cannot be checked"):
        await replica.process(0).checker.find_outcome({"fails": "a"})
    waits = asyncio.create_task(replica.process(0).checker.find_outcome({"waits": "a"}))
    await until(lambda: len(replica.process(0).checks) == 1)
    waits.cancel()
    await until(lambda: not replica.process(0).checks)


async def test_a_client_that_does_not_read_holds_up_its_own_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, made = await Replica.started(1, monkeypatch), list[int]()
    NoProcess.answer = lambda _: endless(made)
    slow = replica.ask()
    assert await anext(slow)
    await until(lambda: len(made) >= WINDOW)
    await asyncio.sleep(0.05)
    assert len(made) == WINDOW
    NoProcess.answer = lambda _: events(*LAST)
    assert len([item async for item in replica.ask()]) == 3
    for _ in range(3 * WINDOW):
        await anext(slow)
    await asyncio.sleep(0.05)
    assert 3 * WINDOW < len(made) <= 4 * WINDOW + 1
    await slow.aclose()


async def test_a_replica_that_loses_too_many_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(1, monkeypatch)
    for index in range(1, MAX_RESTARTS + 2):
        await until(lambda index=index: replica.process(0).index == index and replica.process(0).is_ready)
        assert not replica.problem
        replica.process(0).die()
    await until(lambda: bool(replica.problem))
    assert replica.num_restarts == MAX_RESTARTS
    assert "has ended with -9, and no other one takes its place: 8 have" in replica.problem
    (refused,) = [item async for item in replica.ask()]
    assert (refused.status, refused.code) == (502, "model_not_ready"), "HAProxy asks another replica, and not with 503"


async def test_a_replica_whose_process_cannot_be_started_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise OSError("no memory")

    replica = await Replica.started(1, monkeypatch)
    monkeypatch.setattr(front_end_processes, "FrontEndProcess", no_memory)
    replica.process(0).die()
    await until(lambda: bool(replica.problem))
    assert "no other one takes its place: no memory" in replica.problem


async def test_an_engine_that_dies_ends_the_answers_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(2, monkeypatch)
    NoProcess.answer = lambda _: endless()
    streams = [replica.ask(), replica.ask()]
    for stream in streams:
        await anext(stream)
    replica.engine_end.set_result(None)
    for stream in streams:
        with contextlib.suppress(StopAsyncIteration):
            while not isinstance(item := await anext(stream), ApiError):
                pass
        assert item.code == "engine_lost"
    (refused,) = [item async for item in replica.ask()]
    assert refused.code == "engine_lost", "until Serve has found out, which takes seconds"


async def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await Replica.started(1, monkeypatch)
    monkeypatch.setattr(front_end_processes, "REPORT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(front_end_processes, "MAX_SILENCE_S", 0.1)
    for _ in range(3):
        await replica.refresh_counts()
        await asyncio.sleep(0.08)
    assert replica.num_restarts == 0
    monkeypatch.setattr(Worker, "handle", lambda *_: None)
    async with asyncio.timeout(5):
        while replica.num_restarts == 0:
            await replica.refresh_counts()
            await asyncio.sleep(0.01)  # without a process that is ready the line above waits for nothing
