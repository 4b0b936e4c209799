"""The front-end processes of a replica: vLLM's work for each request, from text to tokens and back to text.

One Python process does it for some 25,000 output tokens/s. With `target.front_ends` above 1 the replica's own process
keeps what must be one: HTTP, keys, limits, the fair queue, K, counts, the checker of grammars. It hands each admitted
request to the process with the fewest sequences (`FrontEndProcesses`). Each process is a client of the engine
(`peagle.vllm.clients`) and sends answers back, event by event. This module run as a program is such a process.

Both ends of the socket between them write frames: four bytes of length, then a list of the messages below in
MessagePack. A process that dies ends its own answers, and another takes its place.
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
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import msgspec
import uvloop
from prometheus_client.core import Metric
from vllm.utils.gc_utils import freeze_gc_heap

from cluster.errors import ApiError
from deployments.answers import Charge, EngineAnswers
from deployments.errors import engine_lost, internal_error, not_ready
from deployments.front_end import Admitted, Answer, Usage
from deployments.metrics import Families
from peagle.vllm.clients import METRICS_FOLDER, Address, client_addresses, connect
from peagle.vllm.grammar_checker import GrammarChecker, current_queue
from peagle.vllm.recorder import DraftingRecorder, RecorderDelta

logger = logging.getLogger(__name__)

MAX_RESTARTS = 8
"""Processes that may take the place of others. A replica that loses more is given up."""

PROGRAM = ("deployments.front_end_processes",)
"""Module of a process, and its arguments before the number of its socket."""

WINDOW = 64
"""Events of an answer that may be under way to a client that reads slowly."""

REPORT_TIMEOUT_S = 1.0
"""How long `refresh_counts` waits for the reports of all processes."""
MAX_SILENCE_S = 60.0
"""A process that owes a report for longer hangs, and is ended."""

Keep = Callable[[str, str, list[int], list[int]], None]
"""`DraftingRecorder`'s `on_answer`."""


# ---- messages to a process


class Job(msgspec.Struct, tag=True, array_like=True):
    """A request to answer."""

    number: int
    admitted: Admitted


class Stop(msgspec.Struct, tag=True, array_like=True):
    """The client of a job has gone: the job ends."""

    number: int


class More(msgspec.Struct, tag=True, array_like=True):
    """The client of a job has got half a `WINDOW` of events."""

    number: int


class Report(msgspec.Struct, tag=True, array_like=True):
    """Asks for a `Counted`."""


class Outcome(msgspec.Struct, tag=True, array_like=True):
    """`GrammarChecker.find_outcome` of a grammar; None where that has failed."""

    number: int
    outcome: dict[str, Any] | None


# ---- messages from a process


class Ready(msgspec.Struct, tag=True, array_like=True):
    """It is connected to the engine."""


class Item(msgspec.Struct, tag=True, array_like=True):
    """An item of a job's `Answer` but its `Usage`, an `ApiError` by its arguments; None at its end."""

    number: int
    item: str | dict[str, Any] | None


class Charged(msgspec.Struct, tag=True, array_like=True):
    """`Usage` of a request. `number`: the front end's. `job`: its number here; None where it was broken off."""

    caller: str
    number: int
    usage: Usage
    job: int | None = None


class Kept(msgspec.Struct, tag=True, array_like=True):
    """An answer that heads may learn from."""

    workload: str
    caller: str
    prompt: list[int]
    answer: list[int]


class Grammar(msgspec.Struct, tag=True, array_like=True):
    """A grammar to check, and the queue of its request's caller."""

    number: int
    queue: str
    fields: dict[str, Any]


class NoGrammar(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for the outcome of a `Grammar` any more."""

    number: int


class Counted(msgspec.Struct, tag=True, array_like=True):
    """What was counted since the last message of this kind."""

    delta: RecorderDelta


Task = Job | Stop | More | Report | Outcome
Result = Ready | Item | Charged | Kept | Grammar | NoGrammar | Counted


class Wire:
    """One end of the socket: messages that `send` gets in one turn of the event loop go out in one frame."""

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

    def send_now(self, message: Task | Result) -> None:
        """Send before this turn has ended, in a frame of its own."""
        self._write([message])

    def _flush(self) -> None:
        self._write(self._outbox)
        self._outbox.clear()

    def _write(self, messages: Sequence[Any]) -> None:
        if self._writer.is_closing():  # the other end is gone, which `messages` finds
            return
        frame = self._encoder.encode(messages)
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
    """One front-end process, as the replica sees it. `place`: its number among those that run side by side, from 0 on;
    `index`: of its client of the engine."""

    def __init__(self, place: int, index: int, setup: Mapping[str, Any]) -> None:
        self.place, self.index = place, index
        self.is_ready = False
        self.sequences = Counter[str]()  # of the requests that it answers, by workload
        self.jobs: dict[int, asyncio.Queue[str | ApiError | Usage | None]] = {}
        self.checks: dict[int, asyncio.Task[None]] = {}  # of its grammars
        self.reports = deque[asyncio.Future[None]]()  # that it owes, the oldest first
        self.silent_since_s = 0.0  # while it owes some
        self.wire: Wire
        self._end, theirs = socket.socketpair()
        self._process = self._launch({**setup, "index": index}, theirs)

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

    async def run(self, handle: Callable[["FrontEndProcess", Any], None]) -> str:
        """Give `handle` each message of the process until that ends. Returns how it ended, in words."""
        self.wire = await Wire.open(self._end, Result)
        try:
            async for message in self.wire.messages():
                handle(self, message)
        except Exception:  # it starts anew
            logger.exception("a message of front-end process %d cannot be handled", self._process.pid)
        self.is_ready = False
        self.wire.close()
        self.end()
        status = await asyncio.to_thread(self._process.wait)
        return f"front-end process {self._process.pid} has ended with {status}"

    def end(self) -> None:
        self._process.kill()


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
        self, number: int, max_workloads: int, recorder: DraftingRecorder, charge: Charge, keep: Keep | None = None
    ) -> None:
        self.number = number
        self.grammars: GrammarChecker
        self.problem = ""
        """Why the replica is to be given up; "" while it is not."""
        self.num_requests = [0] * number
        """Requests handed to the process at each place, and to those before it."""
        self.num_restarts = 0
        self._recorder, self._charge, self._keep = recorder, charge, keep
        self._processes: dict[int, FrontEndProcess] = {}
        self._numbers = itertools.count()
        self._abort: Callable[[int], Awaitable[None]]
        self._engine_end: asyncio.Future[Any]
        self.metrics_folder = tempfile.TemporaryDirectory(prefix="peagle-metrics-", ignore_cleanup_errors=True)
        """Where all clients of the engine keep vLLM's metrics, also those that have ended."""
        self._setup: dict[str, Any] = {
            "max_workloads": max_workloads,
            "learns": keep is not None,
            "metrics_folder": self.metrics_folder.name,
        }
        self._addresses: list[Address] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._are_ready = asyncio.Event()

    @property
    def num_ready(self) -> int:
        """Processes that answer."""
        return sum(process.is_ready for process in self._processes.values())

    def launch(self, config: Any, arguments: Namespace) -> tuple[Sequence[Address], str]:
        """Start the processes, before the engine: they import while it loads. The addresses of their clients, and the
        folder of their metrics."""
        self._addresses = client_addresses(config, self.number + MAX_RESTARTS)
        self._setup |= {"config": config, "arguments": arguments}
        for place in range(self.number):
            self._start(place, place)
        return self._addresses, self.metrics_folder.name

    def _start(self, place: int, number: int) -> None:
        setup = {**self._setup, "address": self._addresses[number]}
        self._processes[place] = FrontEndProcess(place, number + 1, setup)

    async def attach(
        self, grammars: GrammarChecker, abort: Callable[[int], Awaitable[None]], engine_end: asyncio.Future[Any]
    ) -> None:
        """Wait until all processes answer.

        Args:
            abort: ends all requests of a client of the engine, by its index.
            engine_end: is done when the engine has died.

        Raises:
            RuntimeError: they do not start.
        """
        self.grammars, self._abort, self._engine_end = grammars, abort, engine_end
        engine_end.add_done_callback(lambda _: self._end_answers(*self._processes.values()))
        for place in range(self.number):
            self._run_task(self._run_forever(place))
        await self._are_ready.wait()
        if self.problem:
            raise RuntimeError(self.problem)

    async def refresh_counts(self) -> None:
        """Let the recorder have all that was counted until now."""
        reports, now_s = [], time.monotonic()
        for process in self._processes.values():
            if process.is_ready:
                if not process.reports:
                    process.silent_since_s = now_s
                elif now_s - process.silent_since_s > MAX_SILENCE_S:
                    process.end()
                reports.append(asyncio.get_running_loop().create_future())
                process.reports.append(reports[-1])
                process.wire.send(Report())
        if reports:
            await asyncio.wait(reports, timeout=REPORT_TIMEOUT_S)

    def families(self, replica: str) -> list[Metric]:
        """Requests handed to each process, and restarts, with the label `replica`."""
        found = Families()
        for place, number in enumerate(self.num_requests):
            found.add("front_end_requests", number, replica, str(place))
        found.add("front_end_restarts", self.num_restarts, replica)
        return list(found.values())

    def _run_task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_forever(self, place: int) -> None:
        """Start another process each time that the one at this place has ended."""
        while True:
            process = self._processes[place]
            how = await process.run(self._handle)
            self._end_answers(process)
            for unfinished in (*process.reports, *process.checks.values()):
                unfinished.cancel()
            self._recorder.drop_source(process.index, +process.sequences)
            try:
                if self.num_restarts == MAX_RESTARTS:
                    raise OSError(f"{MAX_RESTARTS} have taken the place of others before")
                self._start(place, self.number + self.num_restarts)
            except OSError as error:  # also no memory, or too many open files
                self.problem = f"{how}, and no other one takes its place: {error}"
                self._are_ready.set()
                return
            logger.warning("%s; another one takes its place", how)
            self.num_restarts += 1
            with contextlib.suppress(Exception):  # the engine may be gone too
                await self._abort(process.index)

    def _handle(self, process: FrontEndProcess, message: Result) -> None:
        match message:
            case Item(number, item):
                if (items := process.jobs.get(number)) is not None:  # its client may have gone meanwhile
                    items.put_nowait(ApiError(**item) if isinstance(item, dict) else item)
            case Charged(_, _, usage, job) if job in process.jobs:
                process.jobs[job].put_nowait(usage)
            case Charged(caller, number, usage):
                self._charge(caller, number, usage)
            case Counted(delta):
                self._recorder.add_delta(process.index, delta)
                process.reports.popleft().cancel()
                process.silent_since_s = time.monotonic()
            case Kept(workload, caller, prompt, answer) if self._keep is not None:
                self._keep(workload, caller, prompt, answer)
            case Grammar(number):
                process.checks[number] = check = self._run_task(self._check_grammar(process, message))
                check.add_done_callback(lambda _: process.checks.pop(number, None))
            case NoGrammar(number) if number in process.checks:
                process.checks[number].cancel()
            case Ready():
                process.is_ready = True
                if self.num_ready == self.number:
                    self._are_ready.set()

    async def _check_grammar(self, process: FrontEndProcess, message: Grammar) -> None:
        current_queue.set(message.queue)
        outcome = None
        try:
            outcome = await self.grammars.find_outcome(message.fields)
        except Exception:
            logger.exception("a grammar cannot be checked")
        process.wire.send(Outcome(message.number, outcome))

    @staticmethod
    def _end_answers(*processes: FrontEndProcess) -> None:
        """The processes have ended; or the engine has, of which they may not hear."""
        for process in processes:
            for items in process.jobs.values():
                items.put_nowait(engine_lost())
                items.put_nowait(None)

    async def generate(self, admitted: Admitted) -> Answer:
        """`EngineAnswers.generate`, by the process with the fewest sequences."""
        ready = [process for process in self._processes.values() if process.is_ready]
        if self._engine_end.done() or not ready:
            yield engine_lost() if self._engine_end.done() else not_ready(status=502)
            return
        process, number = min(ready, key=lambda one: one.sequences.total()), next(self._numbers)
        process.wire.send_now(Job(number, admitted))  # it begins while requests that came with it are parsed
        process.sequences[admitted.drafting.workload] += admitted.num_sequences
        self.num_requests[process.place] += 1
        items = process.jobs[number] = asyncio.Queue()
        is_over, num_events = False, 0
        try:
            while (item := await items.get()) is not None:
                yield item
                num_events += isinstance(item, str)
                if isinstance(item, str) and num_events % (WINDOW // 2) == 0:
                    process.wire.send(More(number))
            is_over = True
        finally:
            del process.jobs[number]
            process.sequences[admitted.drafting.workload] -= admitted.num_sequences
            if not is_over and process.is_ready:
                process.wire.send(Stop(number))
            while not items.empty():
                if isinstance(item := items.get_nowait(), Usage):
                    self._charge(admitted.caller, admitted.number, item)


# ---- in a process of its own


class RemoteGrammarChecker(GrammarChecker):
    """Asks the checker in the replica's process."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._numbers, self._waiting = itertools.count(), dict[int, asyncio.Future[dict[str, Any] | None]]()

    def stop(self) -> None: ...

    async def find_outcome(self, fields: dict[str, Any]) -> dict[str, Any]:
        number, outcome = next(self._numbers), asyncio.get_running_loop().create_future()
        try:
            self._wire.send(Grammar(number, current_queue.get(), fields))
        except (TypeError, RecursionError) as error:
            return {"error": f"structured_outputs is no JSON: {error}."}
        self._waiting[number] = outcome
        try:
            if (found := await outcome) is None:
                raise RuntimeError("a grammar cannot be checked")
            return dict(found)
        finally:
            del self._waiting[number]
            if outcome.cancelled():  # its client has left
                self._wire.send(NoGrammar(number))

    def resolve(self, message: Outcome) -> None:
        outcome = self._waiting.get(message.number)
        if outcome is not None and not outcome.done():
            outcome.set_result(message.outcome)


class Worker:
    """Answers the jobs of one front-end process."""

    def __init__(
        self, wire: Wire, answers: EngineAnswers, recorder: DraftingRecorder, checker: RemoteGrammarChecker
    ) -> None:
        self._wire, self._answers, self._recorder, self._checker = wire, answers, recorder, checker
        self._jobs: dict[int, tuple[asyncio.Task[None], asyncio.Semaphore]] = {}

    def handle(self, message: Task) -> None:
        match message:
            case Job(number):
                room = asyncio.Semaphore(WINDOW)
                task = asyncio.get_running_loop().create_task(self._answer(message, room))
                self._jobs[number] = task, room
                task.add_done_callback(lambda _: self._jobs.pop(number, None))
            case Outcome():
                self._checker.resolve(message)
            case Report():
                self._wire.send(Counted(self._recorder.take_delta()))
            case Stop(number) if number in self._jobs:
                self._jobs[number][0].cancel()
            case More(number) if number in self._jobs:
                for _ in range(WINDOW // 2):
                    self._jobs[number][1].release()

    async def _answer(self, job: Job, room: asyncio.Semaphore) -> None:
        try:
            async with contextlib.aclosing(self._answers.generate(job.admitted)) as items:
                async for item in items:
                    if isinstance(item, str):
                        await room.acquire()
                    self._send(job, item)
        except Exception:
            logger.exception("a request failed")
            self._send(job, internal_error())
        finally:  # whatever ends it, such as a panic of a library in Rust
            self._send(job, None)

    def _send(self, job: Job, item: str | ApiError | Usage | None) -> None:
        if isinstance(item, Usage):
            self._wire.send(Charged(job.admitted.caller, job.admitted.number, item, job.number))
        else:
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
