"""The front-end processes of a replica: vLLM's work for each request, from text to tokens and back to text.

One Python process does it for some 25,000 output tokens/s. With `target.front_ends` above 1 the replica's own process
keeps what must be one: HTTP, keys, limits, the fair queue, K, counts, the checker of grammars. It hands each admitted
request to the process with the fewest (`FrontEndProcesses`). That one is a client of the engine of its own
(`peagle.vllm.clients`), and sends the answer back, event by event. This module run as a program is such a process.

Both ends of the socket between them write frames: four bytes of length, then a list of the messages below in
MessagePack. A process that dies ends its replica, as one of `vllm serve --api-server-count` ends its server.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec
import uvloop
from prometheus_client.core import Metric
from vllm.utils.gc_utils import freeze_gc_heap

from cluster.errors import ApiError
from deployments.answers import Charge, EngineAnswers
from deployments.errors import engine_lost, internal_error
from deployments.front_end import Admitted, Answer, Usage
from deployments.metrics import Families
from peagle.vllm.clients import METRICS_FOLDER, Address, client_addresses, connect
from peagle.vllm.grammar_checker import GrammarChecker
from peagle.vllm.recorder import DraftingRecorder, RecorderDelta

logger = logging.getLogger(__name__)

PROGRAM = ("deployments.front_end_processes",)
"""Module of a process, and its arguments before the number of its socket."""

REPORT_TIMEOUT_S = 1.0

Keep = Callable[[str, str, list[int], list[int]], None]
"""`DraftingRecorder`'s `on_answer`."""


# ---- messages to a process


class Job(msgspec.Struct, tag=True, array_like=True):
    """A request to answer."""

    number: int
    admitted: Admitted


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The client of a job has gone."""

    number: int


class Report(msgspec.Struct, tag=True, array_like=True):
    """`Counted` is to be sent."""


class Outcome(msgspec.Struct, tag=True, array_like=True):
    """`GrammarChecker.find_outcome` of a grammar."""

    number: int
    outcome: dict[str, Any]


# ---- messages from a process


class Ready(msgspec.Struct, tag=True, array_like=True):
    """It is connected to the engine."""


class Item(msgspec.Struct, tag=True, array_like=True):
    """An item of a job's `Answer`, an `ApiError` by its arguments; None at its end."""

    number: int
    item: str | Usage | dict[str, Any] | None


class Charged(msgspec.Struct, tag=True, array_like=True):
    """`Usage` of a request that was broken off. `number`: the front end's."""

    caller: str
    number: int
    usage: Usage


class Kept(msgspec.Struct, tag=True, array_like=True):
    """An answer that heads may learn from."""

    workload: str
    caller: str
    prompt: list[int]
    answer: list[int]


class Grammar(msgspec.Struct, tag=True, array_like=True):
    """A grammar to check."""

    number: int
    fields: dict[str, Any]


class Counted(msgspec.Struct, tag=True, array_like=True):
    """What was counted since the last message of this kind."""

    delta: RecorderDelta


Task = Job | Stop | Report | Outcome
Result = Ready | Item | Charged | Kept | Grammar | Counted


class Wire:
    """One end of the socket: messages that are sent in one turn of the event loop go out in one frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        """`kind`: of the messages that come in."""
        self._reader, self._writer = reader, writer
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[kind])
        self._outbox: list[msgspec.Raw] = []

    @classmethod
    async def open(cls, end: socket.socket, kind: Any) -> "Wire":
        return cls(*await asyncio.open_unix_connection(sock=end), kind)

    def send(self, message: Task | Result) -> None:
        encoded = msgspec.Raw(self._encoder.encode(message))
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(encoded)

    def _flush(self) -> None:
        frame = self._encoder.encode(self._outbox)
        self._outbox.clear()
        self._writer.write(len(frame).to_bytes(4, "little") + frame)

    async def messages(self) -> AsyncIterator[Any]:
        """What comes in, until the other end is gone."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                for message in self._decoder.decode(await self._reader.readexactly(size)):
                    yield message
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()


# ---- in the replica's process


class FrontEndProcess:
    """One front-end process, as the replica sees it. `place`: its number, from 0 on."""

    def __init__(self, place: int, setup: Mapping[str, Any]) -> None:
        self.place = place
        self.num_requests = 0
        """Requests handed to it."""
        self.num_sequences = 0
        """Sequences of the requests that it answers."""
        self.jobs: dict[int, asyncio.Queue[str | ApiError | Usage | None]] = {}
        """Items of the answers that it makes. Those that a client does not read wait here, at most its whole answer."""
        self.has_reported = asyncio.Event()
        self.wire: Wire
        self._end, theirs = socket.socketpair()
        self._process = self._launch({**setup, "index": place + 1}, theirs)

    def _launch(self, setup: dict[str, Any], end: socket.socket) -> subprocess.Popen[bytes]:
        environ = {"OMP_NUM_THREADS": "1", METRICS_FOLDER: setup.pop("metrics_folder")}
        with end, tempfile.TemporaryFile() as file:
            cloudpickle.dump(setup, file)
            file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", *PROGRAM, str(end.fileno())],
                stdin=file,
                pass_fds=[end.fileno()],
                env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    async def run(self, handle: Callable[["FrontEndProcess", Any], None]) -> None:
        """Hand on its messages until it ends."""
        self.wire = await Wire.open(self._end, Result)
        async for message in self.wire.messages():
            handle(self, message)

    async def wait(self) -> str:
        """How the process, whose messages have ended, has ended, in words."""
        self._process.kill()  # one that closed its socket and does not go
        status = await asyncio.to_thread(self._process.wait)
        return f"front-end process {self._process.pid} has ended with {status}"


class FrontEndProcesses:
    """The front-end processes of one replica.

    Args:
        number: that run side by side.
        max_workloads: that each counts apart.
        recorder: counts what they count.
        charge: counts the tokens of requests that were broken off.
        keep: takes answers that heads may learn from.
    """

    def __init__(
        self,
        number: int,
        max_workloads: int,
        recorder: DraftingRecorder,
        charge: Charge,
        keep: Keep | None = None,
    ) -> None:
        self.number = number
        self.grammars: GrammarChecker
        self.problem = ""
        """Why the replica is to be replaced; "" while it is not."""
        self._recorder, self._charge, self._keep = recorder, charge, keep
        self._processes: list[FrontEndProcess] = []
        self._numbers = itertools.count()
        self._num_ready = 0
        self.metrics_folder = tempfile.TemporaryDirectory(prefix="peagle-metrics-")
        """Where all clients of the engine keep vLLM's metrics."""
        self._setup: dict[str, Any] = {
            "max_workloads": max_workloads,
            "learns": keep is not None,
            "metrics_folder": self.metrics_folder.name,
        }
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_started = asyncio.Event()

    def launch(self, config: Any, arguments: Namespace) -> Sequence[Address]:
        """Start the processes, before the engine: they import while it loads. The addresses of their clients."""
        addresses = client_addresses(config, self.number)
        setup = {**self._setup, "config": config, "arguments": arguments}
        self._processes = [FrontEndProcess(i, {**setup, "address": address}) for i, address in enumerate(addresses)]
        return addresses

    async def attach(self, grammars: GrammarChecker, engine_end: asyncio.Future[Any]) -> None:
        """Wait until all processes answer.

        Args:
            engine_end: is done when the engine has died.

        Raises:
            RuntimeError: they do not start.
        """
        self.grammars = grammars
        engine_end.add_done_callback(lambda _: self._give_up("the engine has died"))
        for process in self._processes:
            self._run_task(self._run(process))
        await self._has_started.wait()
        if self.problem:
            raise RuntimeError(self.problem)

    async def refresh_counts(self) -> None:
        """Let the recorder have all that was counted until now."""
        for process in self._processes:
            process.has_reported.clear()
            process.wire.send(Report())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                for process in self._processes:
                    await process.has_reported.wait()

    def families(self, replica: str) -> list[Metric]:
        """Metrics of the processes."""
        found = Families()
        for process in self._processes:
            found.add("front_end_requests", process.num_requests, replica, str(process.place))
        return list(found.values())

    def _run_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, process: FrontEndProcess) -> None:
        try:
            await process.run(self._handle)
        finally:
            self._give_up(await process.wait())

    def _give_up(self, problem: str) -> None:
        """End all answers: a process has ended; or the engine has, of which the processes may not hear."""
        if self.problem:
            return
        logger.error("%s; this replica is to be replaced", problem)
        self.problem = problem
        self._has_started.set()
        for process in self._processes:
            for items in process.jobs.values():
                items.put_nowait(engine_lost())
                items.put_nowait(None)

    def _handle(self, process: FrontEndProcess, message: Result) -> None:
        match message:
            case Item(number, item):
                if (items := process.jobs.get(number)) is not None:  # its client may have gone meanwhile
                    items.put_nowait(ApiError(**item) if isinstance(item, dict) else item)
            case Charged(caller, number, usage):
                self._charge(caller, number, usage)
            case Counted(delta):
                self._recorder.add_delta(delta)
                process.has_reported.set()
            case Kept(workload, caller, prompt, answer) if self._keep is not None:
                self._keep(workload, caller, prompt, answer)
            case Grammar(number, fields):
                self._run_task(self._check_grammar(process, number, fields))
            case Ready():
                self._num_ready += 1
                if self._num_ready == self.number:
                    self._has_started.set()

    async def _check_grammar(self, process: FrontEndProcess, number: int, fields: dict[str, Any]) -> None:
        process.wire.send(Outcome(number, await self.grammars.find_outcome(fields)))

    async def generate(self, admitted: Admitted) -> Answer:
        """`EngineAnswers.generate`, by the process with the fewest sequences."""
        if self.problem:
            yield engine_lost()
            return
        process, number = min(self._processes, key=lambda one: one.num_sequences), next(self._numbers)
        process.wire.send(Job(number, admitted))
        process.num_sequences += admitted.num_sequences
        process.num_requests += 1
        items = process.jobs[number] = asyncio.Queue()
        is_over = False
        try:
            while (item := await items.get()) is not None:
                yield item
            is_over = True
        finally:
            del process.jobs[number]
            process.num_sequences -= admitted.num_sequences
            if not is_over:
                process.wire.send(Stop(number))


# ---- in a process of its own


class RemoteGrammarChecker(GrammarChecker):
    """Asks the checker in the replica's process."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[dict[str, Any]]]()

    def stop(self) -> None: ...

    async def find_outcome(self, fields: dict[str, Any]) -> dict[str, Any]:
        number, outcome = next(self._numbers), asyncio.get_running_loop().create_future()
        try:
            self._wire.send(Grammar(number, fields))
        except (TypeError, RecursionError) as error:
            return {"error": f"structured_outputs is no JSON: {error}."}
        self._waiting[number] = outcome
        try:
            return dict(await outcome)
        finally:
            del self._waiting[number]

    def resolve(self, message: Outcome) -> None:
        outcome = self._waiting.get(message.number)
        if outcome is not None and not outcome.done():
            outcome.set_result(message.outcome)


class Worker:
    """Answers jobs."""

    def __init__(
        self, wire: Wire, answers: EngineAnswers, recorder: DraftingRecorder, checker: RemoteGrammarChecker
    ) -> None:
        self._wire, self._answers, self._recorder, self._checker = wire, answers, recorder, checker
        self._jobs: dict[int, asyncio.Task[None]] = {}

    def handle(self, message: Task) -> None:
        match message:
            case Job(number):
                task = self._jobs[number] = asyncio.get_running_loop().create_task(self._answer(message))
                task.add_done_callback(lambda _: self._jobs.pop(number, None))
            case Outcome():
                self._checker.resolve(message)
            case Report():
                self._wire.send(Counted(self._recorder.take_delta()))
            case Stop(number) if number in self._jobs:
                self._jobs[number].cancel()

    async def _answer(self, job: Job) -> None:
        try:
            async with contextlib.aclosing(self._answers.generate(job.admitted)) as items:
                async for item in items:
                    self._send(job, item)
        except Exception:
            logger.exception("a request failed")
            self._send(job, internal_error())
        self._send(job, None)

    def _send(self, job: Job, item: str | ApiError | Usage | None) -> None:
        self._wire.send(Item(job.number, item.arguments if isinstance(item, ApiError) else item))


def exit_with_replica(end: socket.socket) -> None:
    """End this process when the replica's is gone, whatever it does or waits for: nobody waits for what is left."""
    poller = select.poll()
    poller.register(end, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


async def serve(setup: Mapping[str, Any], end: socket.socket) -> None:
    """Answer jobs until the replica's process is gone."""
    wire = await Wire.open(end, Task)
    client, vllm = await connect(setup["config"], setup["arguments"], setup["address"], setup["index"])
    keep = (lambda *answer: wire.send(Kept(*answer))) if setup["learns"] else None
    recorder = DraftingRecorder(max_workloads=setup["max_workloads"], on_answer=keep)
    checker = RemoteGrammarChecker(wire)
    answers = EngineAnswers.attach(client, vllm, recorder, lambda *charged: wire.send(Charged(*charged)), checker)
    worker = Worker(wire, answers, recorder, checker)
    freeze_gc_heap()
    wire.send(Ready())
    async for message in wire.messages():
        worker.handle(message)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    setup = pickle.load(sys.stdin.buffer)
    gc.enable()
    end = socket.socket(fileno=int(sys.argv[-1]))
    threading.Thread(target=exit_with_replica, args=(end.dup(),), daemon=True).start()
    uvloop.run(serve(setup, end))


if __name__ == "__main__":
    main()
