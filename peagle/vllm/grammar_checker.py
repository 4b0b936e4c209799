"""Checks and compiles grammars in a process of their own, within limits of CPU time and memory.

vLLM validates a grammar on the event loop of the engine's client, and compiles it in threads of the engine that cannot
be stopped. `GrammarChecker`, in the client's process, first has both done by a process that it starts: this module run
as a program. That process has one thread, so it can fork. Each grammar gets a child, which the kernel ends if it
exceeds a limit. The child also writes a short text by the grammar, because with some grammars each token takes much
longer than the one before. The engine gets only grammars that passed there.
"""

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, OrderedDict
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

NUM_CHILDREN = 2
"""Grammars that are compiled at the same time."""
WALL_FACTOR = 6
"""Limit of wall-clock time, as a multiple of the limit of CPU time: the machine may be busy."""
ADDRESS_SPACE_BYTES = 512 * 2**20
"""Address space of a child beyond the memory limit: stacks and arenas of the compiler's threads, mostly unused."""
MAX_OUTCOMES = 1024
"""Grammars whose outcome is remembered."""
NUM_TOKENS = 64
"""Tokens of the text that a child writes by a grammar."""

current_queue = ContextVar("current_queue", default="")
"""Queue (`cluster.request.Caller.queue`) that the current request is from. Grammars of one queue are compiled
one after the other, so that a client with many slow ones does not keep others waiting."""

_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init)
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch looks for GPUs without CUDA's driver, which starts a thread
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",
}
"""Environment of the process that forks. No library may start a thread there. vLLM's timeout of regular expressions is
off, because it counts wall-clock time."""


@dataclasses.dataclass(frozen=True)
class GrammarLimits:
    """Limits of one grammar (a schema, regular expression, EBNF, structural tag or list of choices).

    Attributes:
        max_cpu_s, max_memory_bytes: of its compilation and of `NUM_TOKENS` tokens.
    """

    max_cpu_s: float = 10.0
    max_memory_bytes: int = 100 * 2**20


class CheckedGrammar(StructuredOutputsParams):
    """A grammar that `GrammarChecker.check` has passed, as vLLM's validation has rewritten it."""


class GrammarChecker:
    """The checker of an engine's clients. To be used on one event loop.

    Args:
        config: vLLM's configuration of the engine.
        limits: of each grammar. May be replaced at any time.
    """

    def __init__(self, config: Any, limits: GrammarLimits) -> None:
        self.limits = limits
        self._setup = config.model_config, config.structured_outputs_config
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._places = asyncio.Semaphore(NUM_CHILDREN)
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # by queue
        self._outcomes: OrderedDict[Any, asyncio.Task[dict[str, Any]]] = OrderedDict()
        self._num_waiting = Counter[Any]()  # clients, by grammar
        self._queued = dict[Any, str]()  # queues of grammars that wait for a place

    @property
    def pid(self) -> int | None:
        """Id of the process that forks; None where it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process if it does not run. It imports compilers for some seconds; grammars wait for it."""
        if self.pid is not None:
            return
        self.stop()
        with tempfile.TemporaryFile() as setup:
            cloudpickle.dump(self._setup, setup)
            setup.seek(0)
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "peagle.vllm.grammar_checker", str(theirs.fileno())],
                    stdin=setup,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )

    def stop(self) -> None:
        """End the process; the next grammar starts it again."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def check(self, structured: StructuredOutputsParams) -> CheckedGrammar:
        """The grammar that the engine may be given.

        Raises:
            VLLMValidationError: it exceeds a limit, is wrong, or allows no text.
        """
        fields = {name: value for name in _FIELDS if (value := getattr(structured, name)) is not None}
        outcome = await self.find_outcome(fields)
        if "error" in outcome:
            raise VLLMValidationError(outcome["error"], parameter="structured_outputs")
        checked = CheckedGrammar(**fields)
        for name, value in outcome.items():
            setattr(checked, name, value)
        return checked

    async def find_outcome(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What becomes of a grammar with these fields of `StructuredOutputsParams`: the fields that vLLM's validation
        has set, or {"error": text}."""
        limits = self.limits
        try:
            key: Any = limits, json.dumps(fields, sort_keys=True)
        except (RecursionError, TypeError, ValueError) as error:
            return {"error": f"structured_outputs is no JSON: {error}."}
        if self._queued.get(key, queue := current_queue.get()) != queue:
            key = *key, queue  # it waits behind others of another queue
        if (task := self._outcomes.get(key)) is None:
            task = self._outcomes[key] = asyncio.get_running_loop().create_task(self._compile(key, fields, limits))
            self._queued[key] = queue
            while len(self._outcomes) > MAX_OUTCOMES:
                self._outcomes.popitem(last=False)
        self._outcomes.move_to_end(key)
        self._num_waiting[key] += 1
        try:
            # Work that has begun goes on when its clients leave: the place is free when the child has ended.
            outcome = await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]
                if key in self._queued:
                    del self._queued[key]
                    self._outcomes.pop(key, None)
                    task.cancel()
        return outcome if "error" not in outcome else {"error": f"structured_outputs: {outcome['error']}"}

    async def _compile(self, key: Any, fields: dict[str, Any], limits: GrammarLimits) -> dict[str, Any]:
        """The child's answer: {"error": text}, or the fields of `StructuredOutputsParams` that validation has set. A
        failure that may be the machine's and not the grammar's is not remembered."""
        job = json.dumps({"fields": fields, "limits": dataclasses.asdict(limits)}).encode()
        outcome = None
        try:
            turn = self._turns.setdefault(current_queue.get(), asyncio.Lock())
            async with turn, self._places:
                self._queued.pop(key, None)
                if not (answer := await self._ask(job)):
                    logger.warning("the process that checks grammars has ended; it is started again")
                    answer = await self._ask(job)
            if not answer:
                return {"error": "the process that checks grammars has stopped; send the request again"}
            try:
                outcome = dict(json.loads(answer))
            except ValueError:
                most = f"{limits.max_cpu_s:g} s or {limits.max_memory_bytes // 2**20} MiB"
                logger.warning("a grammar was refused: it takes more than %s to compile", most)
                return {"error": f"the grammar takes more than {most} to compile"}
            return outcome
        finally:
            if outcome is None and self._outcomes.get(key) is asyncio.current_task():
                del self._outcomes[key]

    async def _ask(self, job: bytes) -> bytes:
        """Bytes from the child: a space when it begins, its answer when it is done. Empty: the process has ended."""
        self.start()
        assert self._control is not None
        asked, answer = self._process, b""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"job"], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(job)
            writer.write_eof()
            answer = await reader.read()
        if not answer and self._process is asked:  # else another one that waited has done so
            self.stop()
        return answer


# ---- in the process of its own


class _Compilers:
    """vLLM's validation, and its compilers, as the engine will use them."""

    def __init__(self, model_config: Any, structured_outputs_config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend

        self._model_config, self._config = model_config, structured_outputs_config
        self._tokenizer = cached_tokenizer_from_config(model_config=model_config)
        self._manager_class = StructuredOutputManager
        self._backends: dict[str, Any] = {}
        backend = structured_outputs_config.backend
        self._find_backend("xgrammar" if backend == "auto" else backend)
        if backend == "auto" and GuidanceBackend.is_tokenizer_supported(self._tokenizer):
            self._find_backend("guidance")

    def _find_backend(self, name: str) -> Any:
        """The backend, made by the code of the engine's manager."""
        if name not in self._backends:
            manager: Any = SimpleNamespace(
                backend=None,
                tokenizer=self._tokenizer,
                executor=SimpleNamespace(submit=lambda *_: None),
                vllm_config=SimpleNamespace(
                    model_config=self._model_config, structured_outputs_config=self._config, speculative_config=None
                ),
                _use_async_grammar_compilation=True,
                _create_grammar=None,
            )
            asked = SimpleNamespace(
                structured_output_request=SimpleNamespace(grammar=None),
                sampling_params=SimpleNamespace(structured_outputs=SimpleNamespace(_backend=name)),
            )
            self._manager_class.grammar_init(manager, asked)  # type: ignore[arg-type]
            self._backends[name] = manager.backend
        return self._backends[name]

    def compile(self, fields: dict[str, Any]) -> dict[str, Any]:
        """`GrammarChecker._compile`'s answer."""
        from vllm.v1.structured_output.request import get_structured_output_key

        structured = StructuredOutputsParams(**fields)
        params = SamplingParams(structured_outputs=structured)
        params.verify(self._model_config, None, self._config, self._tokenizer)
        backend = self._find_backend(str(structured._backend))
        # The engine has one table for all backends, as wide as the first one's.
        first, own = (one.allocate_token_bitmask(1).shape[1] for one in (next(iter(self._backends.values())), backend))
        if own != first or 32 * (own - 1) >= self._model_config.get_vocab_size():
            return {"error": f"{structured._backend}, which this grammar needs, does not know this model's vocabulary"}
        grammar = backend.compile_grammar(*get_structured_output_key(structured))
        if not self._write_text(backend, grammar):
            return {"error": "the grammar allows no text"}
        changed = {name: getattr(structured, name) for name in _FIELDS if getattr(structured, name) != fields.get(name)}
        return {**changed, "_backend": structured._backend, "_backend_was_auto": structured._backend_was_auto}

    def _write_text(self, backend: Any, grammar: Any) -> int:
        """Draw up to `NUM_TOKENS` tokens, each of those that the grammar allows there. Returns how many there were."""
        mask, draw = backend.allocate_token_bitmask(1), np.random.default_rng(0)
        for num_tokens in range(NUM_TOKENS):
            grammar.fill_bitmask(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != getattr(self._tokenizer, "eos_token_id", None)]
            if not len(allowed) or not grammar.accept_tokens("", [int(draw.choice(allowed))]):
                return num_tokens
        return NUM_TOKENS


def _answer(connection: socket.socket, compilers: _Compilers) -> None:
    """Check one grammar, in a child."""
    connection.sendall(b" ")
    with connection.makefile("rb") as job_file:
        job = json.load(job_file)
    limits = GrammarLimits(**job["limits"])
    before_bytes = _limit_this_process(limits)
    try:
        answer = compilers.compile(job["fields"])
        taken_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes
        if taken_bytes > limits.max_memory_bytes:
            return
    except MemoryError:
        return
    except Exception as error:  # noqa: BLE001  # the grammar is wrong
        text = error.args[0] if error.args else error
        answer = {"error": f"{text!s:.500}"}
    connection.sendall(json.dumps(answer).encode())


def _limit_this_process(limits: GrammarLimits) -> int:
    """Set the limits of this child. Returns its resident memory before, in bytes."""
    gc.disable()
    num_pages, num_resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    space = num_pages * resource.getpagesize() + limits.max_memory_bytes + ADDRESS_SPACE_BYTES
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, max(1, round(limits.max_cpu_s))),
        (resource.RLIMIT_AS, space),
    ):
        resource.setrlimit(limit, (most, most))
    signal.alarm(max(1, round(WALL_FACTOR * limits.max_cpu_s)))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory is short, the kernel ends this process first
    return num_resident * resource.getpagesize()


def main() -> None:
    """Fork a child for each connection that arrives, until the client's process is gone."""
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    compilers = _Compilers(*pickle.load(sys.stdin.buffer))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    gc.collect()
    gc.freeze()
    while fds := socket.recv_fds(control, 16, 1)[1]:
        connection = socket.socket(fileno=fds[0])
        if os.fork() == 0:
            try:
                control.close()
                _answer(connection, compilers)
            finally:
                os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
