"""What a chunk of a stream costs in each process on its way to the client, without an engine.

    python -m benchmarks.streams [--streams 64] [--chunks 400] [--arms direct ingress proxy] [--out FILE]

The application is the product's: its edge, its HTTP API, its target between vLLM's API objects and the edge. Only vLLM
is left out: ready-made server-sent events stand in its place, a chunk of each stream every 20 ms, or as fast as the way
lets them. Each arm starts a Ray of its own. CPU time is read from the processes before and after; the client is the
process that runs this.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from ray import serve

from benchmarks.common import markdown, running_applications
from cluster.counts import Counts, TargetReport
from cluster.settings import ClusterSettings, IngressSettings, LimitSettings, ModelSettings
from deployments import INGRESS_NAME, TARGET_NAME
from deployments.edge import Edge
from deployments.router import Ingress
from deployments.target import TargetServer
from deployments.up import ray_environment
from peagle.provenance import conditions
from peagle.vllm.acceptance import RequestDrafting

ARMS = {
    "direct": "HAProxy, target",
    "thread": "HAProxy, target that runs in a thread of its own, as is Serve's default",
    "ingress": "HAProxy, one ingress replica, target",
    "proxy": "Serve's proxy in Python, target",
}
KINDS = {"haproxy": "haproxy", "ProxyActor": "proxy", f":{INGRESS_NAME}": "ingress", f":{TARGET_NAME}": "target"}
NUM_WARMUP_CHUNKS = 20
STEP_S = 0.02
"""Between the chunks of a stream. Chunks without a pause between them would travel several at a time."""


class EngineLess(TargetServer):
    """A target whose vLLM answers every request with as many chunks as it has `max_tokens`."""

    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]
        self._settings, self._replica = settings, serve.get_replica_context().replica_id.unique_id
        self.edge, self._num_targets = Edge(settings), 1
        self._head, self._heads, self._aborts, self._router = "digest", {}, set(), None
        self._client = SimpleNamespace(errored=False, abort=self._abort)
        record = RequestDrafting("x", "default", 7, Counts(), num_output_tokens=9, num_prompt_tokens=4)
        self._recorder = SimpleNamespace(pop=lambda _: record)  # type: ignore[assignment]
        chat = SimpleNamespace(create_chat_completion=self._chat)
        self.engine = SimpleNamespace(_oai_serving_chat=chat)  # type: ignore[assignment]

    async def reconfigure(self, user_config: Any) -> None: ...

    async def check_health(self) -> None: ...

    async def report(self) -> TargetReport:
        return TargetReport(self._replica)

    async def _abort(self, ids: list[str]) -> None: ...

    async def _chat(self, request: Any) -> AsyncIterator[str]:
        return events(request.max_tokens)


async def events(number: int) -> AsyncIterator[str]:
    """As vLLM writes them."""
    choice = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None, "token_ids": None}
    document = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
    middle = f"data: {json.dumps(document, separators=(',', ':'))}\n\n"
    choice["finish_reason"] = "length"
    for _ in range(number - 1):
        await asyncio.sleep(STEP_S)
        yield middle
    yield f"data: {json.dumps(document, separators=(',', ':'))}\n\n"
    yield "data: [DONE]\n\n"


def application(arm: str) -> serve.Application:
    ingress = IngressSettings(num_replicas=int(arm == "ingress"))
    settings = ClusterSettings(
        model=ModelSettings(source="org/m", id="m"),
        ingress=ingress,
        limits=LimitSettings(max_running_requests=4096),
        engine={"max_num_seqs": 2048},
    )
    env = {} if arm == "thread" else {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    options = {"num_cpus": 0.1, "runtime_env": {"env_vars": env}}
    common: dict[str, Any] = {"max_ongoing_requests": 4096, "ray_actor_options": options}
    server = EngineLess if arm == "ingress" else serve.ingress(None)(EngineLess)
    deployment: Any = serve.deployment(server, name=TARGET_NAME, **common)
    bound: serve.Application = deployment.bind(settings)
    if arm == "ingress":
        deployment = serve.deployment(serve.ingress(None)(Ingress), name=INGRESS_NAME, **common)
        bound = deployment.bind(settings, None, bound)
    return bound


def cpu_seconds() -> dict[str, float]:
    """CPU time of this user's processes so far, by what they are."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.process_iter(["cmdline", "name"]):
        title = " ".join(process.info["cmdline"] or ()) or process.info["name"]
        kind = next((kind for part, kind in KINDS.items() if part in title.split(" ")[0]), None)
        if kind is not None:
            times = process.cpu_times()
            found[kind] += times.user + times.system
    return found


def measured(arm: str, num_streams: int, num_chunks: int) -> dict[str, Any]:
    """One arm: chunks per second, and microseconds of CPU a chunk by process."""
    os.environ.update(ray_environment(arm == "ingress", print), RAY_SERVE_ENABLE_HA_PROXY=str(int(arm != "proxy")))
    with running_applications(lambda: {"streams": application(arm)}, "/health") as url:
        for number in (NUM_WARMUP_CHUNKS, num_chunks):
            before = cpu_seconds()
            total, seconds = asyncio.run(client(url, num_streams, number))
            after = cpu_seconds()
    if total < num_streams * num_chunks:
        raise SystemExit(f"error: of {num_streams} streams of {num_chunks} chunks only {total} chunks came")
    by_process = {kind: 1e6 * (after[kind] - before[kind]) / total for kind in after if after[kind] > before[kind]}
    return {"way": ARMS[arm], "chunks_per_s": total / seconds, "us_per_chunk": by_process}


async def client(url: str, num_streams: int, num_chunks: int) -> tuple[int, float]:
    """Open all streams and read them: how many chunks came, and in how many seconds."""
    host, port = url.removeprefix("http://").split(":")
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": num_chunks, "stream": True}
    text = json.dumps(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )

    async def read() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
        number = 0
        while piece := await reader.read(1 << 16):
            number += piece.count(b"data: ")
        writer.close()
        return number

    started_s = time.monotonic()
    total = sum(await asyncio.gather(*(read() for _ in range(num_streams))))
    return total, time.monotonic() - started_s


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="open at a time (default: 64)")
    parser.add_argument("--chunks", type=int, default=400, help="of each stream (default: 400)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    before = dict(os.environ)
    arms = {}
    for arm in options.arms:
        os.environ.clear()
        os.environ.update(before)
        arms[arm] = measured(arm, options.streams, options.chunks)
    rows = [
        [one["way"], round(one["chunks_per_s"]), *(one["us_per_chunk"].get(kind) for kind in KINDS.values())]
        for one in arms.values()
    ]
    sys.stdout.write(markdown(["way", "chunks/s", *(f"{kind}, us" for kind in KINDS.values())], rows) + "\n")
    if options.out is not None:
        load = {"streams": options.streams, "chunks": options.chunks}
        document = {"made": conditions(), "num_cores": os.cpu_count(), **load, "arms": arms}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
