"""What streams cost on their way to the client when the engine costs nothing, and how long a new request then waits.

    python -m benchmarks.streams [--streams 128] [--step-ms 20] [--tokens 1] [--arms vllm target] [--out FILE]
    python -m benchmarks.streams --streams 768 --targets 6 --clients 4 --arms target      (a node of many cores)

Everything is real but vLLM's engine core: in its place a process sends every running request so many tokens each step,
in the engine's form. More than one token a step are said to be accepted drafts, in the product's arms.
Arms: `vllm` is `vllm serve`'s own server; `target` is the product (HAProxy, target, its `--front-ends`). A client keeps
so many streams open, each of 64 to 192 steps (`--steps`) and followed by another. Counted over a window of time:
chunks, tokens, time to the first chunk, and the CPU time of each kind of process. On few cores the clients' own share
is taken from the others. Each front-end process has an engine of its own that costs nothing.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import ray
import zmq
import zmq.asyncio
from ray import serve
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.common import free_port, is_ready, markdown, wait_until
from cluster.settings import load_settings
from deployments import TARGET_NAME, front_end_processes
from deployments.app import bind_target, catalog
from deployments.checkpoints import target_source
from deployments.target import TargetServer
from deployments.up import ray_environment
from peagle.embedded import DEFAULT_TARGET
from peagle.provenance import conditions
from peagle.vllm.outputs import OutputCoalescer
from peagle.vllm.step_notes import STEPS_HEADER, VerifiedStep, steps_text

ARMS = ("vllm", "target")
KINDS = {
    "haproxy": "haproxy",
    f":streams:{TARGET_NAME}": "server",
    "--serve-vllm": "server",
    "--front-end ": "front ends",
}
MAX_NUM_SEQS, READY_TIMEOUT_S = 1024, 400.0
PACE = "PEAGLE_STREAMS_PACE"
"""For the processes of the server, as JSON: `step_ms`, `tokens` of a request in a step, `arm`, and the `folder` of
files with the tokens that each has got from its engine (8 bytes)."""
WAYS = zmq.PUSH, zmq.PULL


class Tokens:
    """In place of the client of vLLM's engine core: `EngineProcess` in a process of its own, over vLLM's wire."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, vllm_config: Any, **_: Any) -> None:
        vllm_config.cache_config.num_gpu_blocks = 1000
        folder = Path(tempfile.mkdtemp())
        self._to_engine, self._from_engine = (zmq.asyncio.Context.instance().socket(kind) for kind in WAYS)
        for name, socket in (("in", self._to_engine), ("out", self._from_engine)):
            socket.bind(f"ipc://{folder / name}")
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self._num_tokens = 0
        self._counted = os.open(Path(json.loads(os.environ[PACE])["folder"]) / str(os.getpid()), os.O_CREAT | os.O_RDWR)
        subprocess.Popen([sys.executable, "-m", "benchmarks.streams", "--engine", str(folder)])

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None: ...

    async def collective_rpc_async(self, *_: Any, **__: Any) -> list[Any]:
        return []  # there are no workers

    async def add_request_async(self, request: Any) -> None:
        await self._to_engine.send_multipart(self._encoder.encode(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            await self._to_engine.send_multipart([b"", *(request_id.encode() for request_id in request_ids)])

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs: EngineCoreOutputs = self._decoder.decode(await self._from_engine.recv_multipart(copy=False))
        self._num_tokens += sum([len(output.new_token_ids) for output in outputs.outputs])
        os.pwrite(self._counted, self._num_tokens.to_bytes(8, "little"), 0)
        return outputs

    def shutdown(self, timeout: float | None = None) -> None: ...


class EngineProcess:
    """Gives each request tokens in every step from its arrival on; ends with the process that started it."""

    def __init__(self, folder: Path) -> None:
        pace = json.loads(os.environ[PACE])
        self._step_s, self._tokens = pace["step_ms"] / 1000, pace["tokens"]
        self._coalescer = OutputCoalescer() if pace["arm"] == "target" else None
        self._is_drafted = pace["arm"] == "target" and self._tokens > 1
        self._requests: dict[str, EngineCoreRequest] = {}
        self._left: dict[str, int] = {}
        self._words = deque(range(1000, 3000))
        self._to_client, self._from_client = (zmq.Context.instance().socket(kind) for kind in WAYS)
        for name, socket in (("in", self._from_client), ("out", self._to_client)):
            socket.connect(f"ipc://{folder / name}")

    def run(self) -> None:
        """Steps are due at fixed times; what is late comes at once."""
        encoder, decoder, due_s, parent = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest), 0.0, os.getppid()
        while os.getppid() == parent:
            due_s = max(due_s + self._step_s, (now_s := time.monotonic()) - 1.0)
            time.sleep(max(0.0, due_s - now_s))
            while self._from_client.poll(0):
                frames = self._from_client.recv_multipart()
                if frames[0]:
                    request = decoder.decode(frames)
                    self._requests[request.request_id] = request
                    self._left[request.request_id] = request.sampling_params.max_tokens
                else:
                    self._end([frame.decode() for frame in frames[1:]])
            if outputs := self._step():
                self._to_client.send_multipart(encoder.encode(EngineCoreOutputs(outputs=outputs)))

    def _step(self) -> list[EngineCoreOutput]:
        outputs = []
        for request_id, left in list(self._left.items()):
            number = min(left, self._tokens)
            self._words.rotate(1)
            tokens = [self._words[index] for index in range(number)]
            self._left[request_id] = left - number
            reason = FinishReason.LENGTH if number == left else None
            outputs.append(EngineCoreOutput(request_id=request_id, new_token_ids=tokens, finish_reason=reason))
        ended = [output.request_id for output in outputs if output.finished]
        if self._coalescer is not None:
            outputs = self._coalescer.coalesce(outputs, self._requests, time.monotonic())
        self._end(ended)
        if self._is_drafted:
            for output in outputs:
                number = -(-len(output.new_token_ids) // self._tokens)
                steps = steps_text(number * [VerifiedStep(2 * self._tokens - 1, self._tokens - 1)])
                output.trace_headers = {**(output.trace_headers or {}), STEPS_HEADER: steps}
        return outputs

    def _end(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)
            self._requests.pop(request_id, None)
        if self._coalescer is not None:
            self._coalescer.drop(request_ids)


def leave_out_the_engine_core() -> None:
    EngineCoreClient.make_async_mp_client = staticmethod(Tokens)  # type: ignore[method-assign]


class EngineLess(TargetServer):
    """The product's target without an engine core."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]
        leave_out_the_engine_core()
        front_end_processes.PROGRAM = ("benchmarks.streams", "--front-end")
        await super().__init__(*args)


def serve_vllm(port: int, model: str) -> None:
    """`vllm serve` without an engine core, in this process."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    leave_out_the_engine_core()
    arguments = ["--model", target_source(model), "--served-model-name", "m", "--port", str(port)]
    arguments += ["--max-num-seqs", str(MAX_NUM_SEQS), "--disable-uvicorn-access-log"]
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)))


def application(options: argparse.Namespace) -> serve.Application:
    args: dict[str, Any] = {
        "model": {"id": "m", "source": options.model},
        "engine": {"max_num_seqs": MAX_NUM_SEQS},
        "target": {
            "num_replicas": options.targets,
            "bundle": {"CPU": 1},
            "num_cpus": 0.1,
            "front_ends": options.front_ends,
        },
        "limits": {"max_running_requests": MAX_NUM_SEQS},
    }
    settings = load_settings(args, catalog(), os.environ)
    return bind_target(settings, serve.ingress(None)(EngineLess))


@contextmanager
def server(arm: str, options: argparse.Namespace) -> Iterator[str]:
    """URL of an arm that is ready."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with ExitStack() as stack:
        if arm == "vllm":
            command = [sys.executable, "-m", "benchmarks.streams", "--serve-vllm", str(port), "--model", options.model]
            process = subprocess.Popen(command)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            wait_until(lambda: is_ready(url) or process.poll() is not None, READY_TIMEOUT_S)
        else:
            os.environ.update({**ray_environment(), **os.environ})  # Ray's processes take it from this one
            ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
            stack.callback(serve.shutdown)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(application(options), name="streams")
            wait_until(lambda: is_ready(url), READY_TIMEOUT_S)
        if not is_ready(url):
            raise SystemExit(f"error: {arm} does not start")
        yield url


def cpu_seconds() -> dict[str, float]:
    """CPU time of this user's processes so far, by what they are."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.process_iter(["cmdline", "name"]):
        title = " ".join(process.info["cmdline"] or ()) or process.info["name"]
        kind = next((kind for part, kind in KINDS.items() if part in title), None)
        if kind is not None:
            times = process.cpu_times()
            found[kind] += times.user + times.system
    return found


def tokens_out() -> int:
    """Tokens that the servers have got from their engines so far."""
    files = Path(json.loads(os.environ[PACE])["folder"]).iterdir()
    return sum(int.from_bytes(file.read_bytes(), "little") for file in files)


class Clients:
    """Streams that are kept open, and what came of them."""

    def __init__(self, url: str, options: argparse.Namespace, seed: int) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._num_tokens, self._steps, self._draw = options.tokens, options.steps, random.Random(seed)
        self._prompt = " ".join(["Hi"] * options.prompt_words)
        self.num_chunks = self.num_answers = self.num_failed = 0
        self.first_s: list[float] = []

    async def run_forever(self) -> None:
        at_least, most = 1, self._steps[1]  # the first ones end at different times
        while True:
            await self._ask(self._draw.randint(at_least, most) * self._num_tokens)
            at_least = self._steps[0]

    async def _ask(self, max_tokens: int) -> None:
        messages = [{"role": "user", "content": self._prompt}]
        body = {"model": "m", "messages": messages, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        text = json.dumps(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        started_s, is_answered, is_whole, num_seen = time.perf_counter(), False, False, 0
        try:
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            while piece := await reader.read(1 << 16):
                number = piece.count(b"data: ")
                # vLLM's first event has no text.
                if not is_answered and (num_seen := num_seen + number) > 1:
                    is_answered = True
                    self.first_s.append(time.perf_counter() - started_s)
                self.num_chunks += number
                is_whole = is_whole or b"[DONE]" in piece
            self.num_answers += is_whole
            self.num_failed += not is_whole
        finally:
            writer.close()


async def keep_open(url: str, options: argparse.Namespace, index: int, start_s: float) -> Clients:
    """One client's share of the streams, counted for `options.seconds` from `start_s` (seconds since the epoch) on."""
    clients = Clients(url, options, seed=index)
    num_streams = len(range(index, options.streams, options.clients))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(clients.run_forever()) for _ in range(num_streams)]
        await asyncio.sleep(start_s - time.time())
        clients.num_chunks = 0
        clients.first_s.clear()
        await asyncio.sleep(start_s + options.seconds - time.time())
        for task in tasks:
            task.cancel()
    return clients


def run_client(url: str, options: argparse.Namespace, index: int, start_s: float) -> Clients:
    return asyncio.run(keep_open(url, options, index, start_s))


def load(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Chunks and times of all clients, each a process of its own, and what the servers spent meanwhile."""
    context = multiprocessing.get_context("spawn")
    everyone = context.Barrier(options.clients)
    with ProcessPoolExecutor(options.clients, mp_context=context, initializer=everyone.wait) as pool:
        list(pool.map(abs, range(options.clients)))  # all have imported what they need
        start_s = time.time() + options.warm_seconds
        shares = [pool.submit(run_client, url, options, index, start_s) for index in range(options.clients)]
        time.sleep(start_s - time.time())
        before, tokens_before = cpu_seconds(), tokens_out()
        time.sleep(start_s + options.seconds - time.time())
        after, num_tokens = cpu_seconds(), tokens_out() - tokens_before
        clients = [share.result() for share in shares]
    num_answers, num_failed = (sum(getattr(one, name) for one in clients) for name in ("num_answers", "num_failed"))
    if num_failed:
        raise SystemExit(f"error: {num_failed} streams of {num_failed + num_answers} broke off")
    num_chunks = sum(one.num_chunks for one in clients)
    first_s = sorted(seconds for one in clients for seconds in one.first_s)
    spent = {kind: value for kind in after if (value := after[kind] - before.get(kind, 0.0)) > 0}
    return {
        "tokens_per_s": num_tokens / options.seconds,
        "us_per_token": {kind: 1e6 * value / num_tokens for kind, value in spent.items()},
        "chunks_per_s": num_chunks / options.seconds,
        "us_per_chunk": {kind: 1e6 * value / num_chunks for kind, value in spent.items()},
        "cores": {kind: value / options.seconds for kind, value in spent.items()},
        "num_answers": num_answers,
        "num_first": len(first_s),
        "median_ttft_ms": 1000 * statistics.median(first_s),
        "p99_ttft_ms": 1000 * first_s[int(0.99 * len(first_s))],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128, help="open at a time")
    parser.add_argument("--model", default=DEFAULT_TARGET, help="its tokenizer and configuration are what matters here")
    parser.add_argument("--targets", type=int, default=1, help="replicas of the product's arms")
    parser.add_argument("--front-ends", type=int, default=1, help="processes of each, as `target.front_ends`")
    parser.add_argument("--clients", type=int, default=1, help="processes that share the streams")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the engine that is not there")
    parser.add_argument("--tokens", type=int, default=1, help="of a request in a step")
    parser.add_argument("--steps", type=int, nargs=2, default=[64, 192], help="of an answer, at least and at most")
    parser.add_argument("--prompt-words", type=int, default=1, help="tokens of a prompt, but for the chat template's")
    parser.add_argument("--seconds", type=float, default=8.0, help="that are counted ...")
    parser.add_argument("--warm-seconds", type=float, default=6.0, help="... after these")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--serve-vllm", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--front-end", type=int, metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.serve_vllm:
        serve_vllm(options.serve_vllm, options.model)
        return 0
    if options.front_end:
        leave_out_the_engine_core()
        front_end_processes.main()
        return 0
    if options.engine:
        EngineProcess(options.engine).run()
        return 0
    arms, rows, kinds = {}, [], dict.fromkeys(KINDS.values())
    for arm in options.arms:
        with tempfile.TemporaryDirectory() as folder:
            pace = {"step_ms": options.step_ms, "tokens": options.tokens, "arm": arm, "folder": folder}
            with mock.patch.dict(os.environ, {PACE: json.dumps(pace)}), server(arm, options) as url:
                found = arms[arm] = load(url, options)
        rates = [round(found[name]) for name in ("tokens_per_s", "chunks_per_s", "median_ttft_ms", "p99_ttft_ms")]
        rates += [round(found["us_per_token"].get(kind, 0.0), 1) for kind in ("server", "front ends")]
        spent = found["us_per_chunk"]
        rows.append([arm, *rates, *(round(spent[kind]) if kind in spent else None for kind in kinds)])
    kind_names = (f"{one}, us/chunk" for one in kinds)
    header = ["way", "tokens/s", "chunks/s", "TTFT ms", "p99", "server, us/token", "front ends", *kind_names]
    sys.stdout.write(markdown(header, rows) + "\n")
    if options.out is not None:
        hidden = ("out", "serve_vllm", "front_end", "engine")
        load_options = {name: value for name, value in vars(options).items() if name not in hidden}
        document = {"made": conditions(), "num_cores": os.cpu_count(), "options": load_options, "arms": arms}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
