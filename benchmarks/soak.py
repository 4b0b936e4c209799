"""Whether the service keeps its size under a mixed load: requests, errors, memory, files and threads of each process.

    python -m benchmarks.soak [--config configs/local.yaml] [--minutes 30] [--out FILE]

The service is started as its users start it (`peagle serve`). Clients ask without a pause for whole answers, streams,
grammars and tools, under old and new workloads; they leave in the midst of answers, send what is not valid, and read
every page. Processes are measured without load, after two fifths of the time and at the end: until then caches, pools
of threads and the record of workloads fill.
"""

import argparse
import contextlib
import itertools
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import markdown
from benchmarks.faults import running_service
from peagle.provenance import conditions

WARM_SHARE, NUM_CLIENTS, IDLE_TIMEOUT_S, SETTLE_S = 0.4, 5, 120.0, 10.0
QUESTIONS = ("Count from one to thirty.", "Write a function that sorts a list.", "Why is the sky blue?")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "maxLength": 9}}},
    },
}
BAD: tuple[dict[str, Any], ...] = (
    {"temperature": "hot"},
    {"drafting": {"k": 99}},
    {"max_tokens": 10**6},
    {"messages": [{"role": "user", "content": "word " * 4000}]},
    {"structured_outputs": {"regex": "("}},
    {"logit_bias": {"999999": 1}},
    {"n": 1000},
    {"unknown": 1},
)
PAGES = ("/metrics", "/drafting", "/health", "/ping", "/v1/models", "/openapi.json", "/")

Ask = Callable[[httpx.Client, dict[str, Any], random.Random], str]
"""Sends a request made of a body; "" where it ended as it must, else what came instead."""


def whole(client: httpx.Client, body: dict[str, Any], _: random.Random) -> str:
    response = client.post("/v1/chat/completions", json=body)
    return "" if response.status_code == 200 and response.json()["choices"] else response.text[:300]


def stream(client: httpx.Client, body: dict[str, Any], _: random.Random) -> str:
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        text = response.read().decode()
    return "" if text.endswith("data: [DONE]\n\n") else text[-300:]


def several(client: httpx.Client, body: dict[str, Any], choice: random.Random) -> str:
    prompts = [message["content"] for message in body.pop("messages")] * 2
    body |= {"prompt": prompts, "n": 2, "temperature": 0.8, "seed": choice.randrange(99)}
    response = client.post("/v1/completions", json=body)
    return "" if response.status_code == 200 and len(response.json()["choices"]) == 4 else response.text[:300]


def with_tools(client: httpx.Client, body: dict[str, Any], choice: random.Random) -> str:
    form = choice.choice(("tools", "schema", "regex"))
    if form == "tools":
        body |= {"tools": [TOOL], "tool_choice": "none"}  # in the prompt; to call them the engine needs their parser
    elif form == "schema":  # a new one each time: compiled grammars are kept by the engine
        schema = {"type": "object", "properties": {f"p{choice.randrange(10**6)}": {"type": "boolean"}}}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    else:
        body["structured_outputs"] = {"regex": f"[a-c]{{{choice.randrange(3, 9)}}}"}
    return whole(client, body, choice)


def leaves_a_stream(client: httpx.Client, body: dict[str, Any], choice: random.Random) -> str:
    body |= {"stream": True, "max_tokens": 500, "ignore_eos": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for _ in itertools.islice(response.iter_lines(), choice.randrange(1, 12)):
            pass
        return "" if response.status_code == 200 else f"status {response.status_code}"


def leaves_a_whole_answer(client: httpx.Client, body: dict[str, Any], choice: random.Random) -> str:
    with contextlib.suppress(httpx.ReadTimeout):
        body |= {"max_tokens": 500, "ignore_eos": True}
        response = client.post("/v1/chat/completions", json=body, timeout=choice.uniform(0.2, 2.0))
        return f"status {response.status_code}, sooner than possible"
    return ""


def not_valid(client: httpx.Client, body: dict[str, Any], choice: random.Random) -> str:
    response = client.post("/v1/chat/completions", json={**body, **choice.choice(BAD)})
    return "" if response.status_code == 400 and response.json()["error"]["message"] else response.text[:300]


def page(client: httpx.Client, _: dict[str, Any], choice: random.Random) -> str:
    response = client.get(choice.choice(PAGES))
    return "" if response.status_code == 200 else f"{response.url}: {response.status_code}"


KINDS: tuple[Ask, ...] = (
    whole, whole, stream, stream, several, with_tools, leaves_a_stream, leaves_a_whole_answer, not_valid, page,
)  # fmt: skip


class Clients:
    """Threads that ask one request after another, of every kind; `pause` ends those that run and starts no other."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.asked: Counter[str] = Counter()
        self.failed: list[dict[str, Any]] = []
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def running(self) -> Any:
        ended = threading.Event()
        threads = [threading.Thread(target=self._run, args=(ended,)) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    def _run(self, ended: threading.Event) -> None:
        with httpx.Client(base_url=self._url, timeout=180) as client:
            while not ended.is_set():
                self._ask(client, number := next(self._numbers), random.Random(number))

    def _ask(self, client: httpx.Client, number: int, choice: random.Random) -> None:
        ask = choice.choice(KINDS)
        messages = [{"role": "user", "content": choice.choice(QUESTIONS)}]
        body: dict[str, Any] = {"model": self._model, "messages": messages, "max_tokens": choice.randrange(4, 40)}
        body["temperature"] = choice.choice((0, 0.8))
        # The same few workloads, tags that come once, and none.
        tags = ("code", "chat", f"once-{number}", None)
        if (tag := choice.choice(tags)) is not None:
            body["drafting"] = {"workload": tag}
        try:
            problem = ask(client, body, choice)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        self.asked[ask.__name__] += 1
        if problem:
            self.failed.append({"kind": ask.__name__, "number": number, "problem": problem})
            sys.stderr.write(f"{json.dumps(self.failed[-1])}\n")


def wait_until_idle(url: str) -> None:
    """Until nothing runs in the engines, and what ended has been cleared away."""
    end_s = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < end_s:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        if not any(float(line.split()[-1]) for line in lines if line.startswith("peagle_running_requests{")):
            break
        time.sleep(1.0)
    time.sleep(SETTLE_S)


def processes(others: set[int]) -> dict[int, dict[str, Any]]:
    """What each process of the service holds, by its id; `others`: children of this process that are not of it."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid not in others and process.status() != psutil.STATUS_ZOMBIE:
                command = process.cmdline() or [process.name()]
                name = Path(command[0].split(" ")[0]).name
                if name.startswith("python"):  # a program, told apart by what it runs
                    name = next((Path(part).name for part in command[1:] if not part.startswith("-")), name)
                found[process.pid] = {
                    "name": name,
                    "rss_mib": round(process.memory_info().rss / 2**20, 1),
                    "num_fds": process.num_fds(),
                    "num_threads": process.num_threads(),
                }
    return found


def soak(config: Path, minutes: float, say: Callable[[str], Any] = sys.stderr.write) -> dict[str, Any]:
    """Requests by kind, those that failed, and each process after the warm-up and at the end."""
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    with running_service(config, 1) as (url, model):
        clients = Clients(url, model)
        taken = []
        totals = []
        for share in (WARM_SHARE, 1 - WARM_SHARE):
            end_s = time.monotonic() + 60 * minutes * share
            with clients.running():
                while time.monotonic() < end_s:
                    time.sleep(min(30.0, max(0.0, end_s - time.monotonic())))
                    sizes = processes(others).values()
                    totals.append({
                        "requests": sum(clients.asked.values()),
                        **{key: round(sum(one[key] for one in sizes)) for key in ("rss_mib", "num_fds", "num_threads")},
                    })  # fmt: skip
                    say(f"{json.dumps(totals[-1])}, {len(clients.failed)} failed\n")
            wait_until_idle(url)
            taken.append(processes(others))
    start, end = taken
    return {
        "minutes": minutes,
        "requests": dict(sorted(clients.asked.items())),
        "failed": clients.failed,
        "under_load": totals,
        "processes": [
            {"name": one["name"], "start": start.get(pid), "end": end.get(pid)}
            for pid, one in sorted({**start, **end}.items(), key=lambda item: item[1]["name"])
        ],
    }


def grown(found: dict[str, Any], mib: float, num_fds: int, num_threads: int) -> list[dict[str, Any]]:
    """Processes of a result that hold more than this above what they held after the warm-up, and those new or gone."""
    allowed = {"rss_mib": mib, "num_fds": num_fds, "num_threads": num_threads}

    def has_grown(one: dict[str, Any]) -> bool:
        start, end = one["start"], one["end"]
        return start is None or end is None or any(end[key] > start[key] + most for key, most in allowed.items())

    return [one for one in found["processes"] if has_grown(one)]


def table(found: dict[str, Any]) -> str:
    keys = ("rss_mib", "num_fds", "num_threads")
    header = ["process", *(f"{key}, {when}" for key in keys for when in ("start", "end"))]
    rows = [
        [one["name"], *((one[when] or {}).get(key) for key in keys for when in ("start", "end"))]
        for one in found["processes"]
    ]
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped then too
    found = soak(options.config, options.minutes)
    if options.out is not None:
        text = json.dumps({"made": conditions(), **found}, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{json.dumps(found['requests'])}, {len(found['failed'])} failed\n{table(found)}\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
