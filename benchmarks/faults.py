"""What each fault costs clients: requests sent, failed and broken off meanwhile, and seconds until all is well again.

    python -m benchmarks.faults [--config configs/local.yaml] [--targets 2] [--faults NAME ...] [--out FILE]

The service is started as its users start it (`peagle serve`), with two targets. Clients ask without a pause, some for
whole answers and some for streams; then one process after another is killed or stopped. A fault is over when the same
kinds of process are there again as before, every target is known to the router, and the drafters are linked. Whole
answers should never fail: another target takes the request. A stream ends with its own target.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.common import free_port, markdown_of, wait_until
from peagle.provenance import conditions

READY_TIMEOUT_S, RECOVERY_TIMEOUT_S, STEADY_S, HANG_S = 600, 300, 4.0, 10.0
SESSIONS: set[int] = set()
"""Process sessions of Ray that this program has started."""
QUESTION = [{"role": "user", "content": "Count from one to thirty."}]
PROCESSES = {
    "drafter": "ray::ServeReplica:peagle:drafter",
    "router": "ray::ServeReplica:peagle:router",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "haproxy manager": "ray::HAProxyManager",
    "haproxy": "haproxy",
    "target": "ray::ServeReplica:peagle:target",
    "engine": "VLLM::EngineCore",
}
FAULTS = ("drafter hung", *PROCESSES)


@dataclass
class Sent:
    """A request and what was answered. outcome: "" for a complete answer; ttft_s: seconds to the first text."""

    body: dict[str, Any]
    start_s: float
    end_s: float = 0.0
    outcome: str = ""
    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    drafting: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def read(self, document: dict[str, Any]) -> None:
        """Add an answer, or a chunk of one. Raises ValueError for an error in a stream."""
        if "error" in document:
            raise ValueError(document["error"]["code"])
        for choice in document["choices"]:
            self.text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        if self.text and self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.start_s
        self.num_tokens = (document.get("usage") or {}).get("completion_tokens", self.num_tokens)
        self.drafting = document.get("drafting", self.drafting)


def ask(client: httpx.Client, body: dict[str, Any]) -> Sent:
    """Send a chat and read its whole answer."""
    sent = Sent(body, time.monotonic())
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                sent.outcome = describe_refusal(response)
            elif sent.streams:
                sent.outcome = "broken off"
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        sent.outcome = ""
                    elif line.startswith("data: "):
                        sent.read(json.loads(line.removeprefix("data: ")))
            else:
                sent.read(json.loads(response.read()))
    except httpx.HTTPError as error:
        sent.outcome = f"{type(error).__name__} {error}".strip()
    except (ValueError, KeyError) as error:
        sent.outcome = f"broken off: {error}"
    sent.end_s = time.monotonic()
    return sent


class Clients:
    """Threads that ask one request after another: `next_body` of a client, None for nothing now."""

    def __init__(self, url: str, num: int, next_body: Callable[[int], dict[str, Any] | None]) -> None:
        self._url, self._next_body, self._ended = url, next_body, threading.Event()
        self.sent: list[Sent] = []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(num)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._ended.is_set():
                if (body := self._next_body(number)) is None:
                    time.sleep(0.2)
                    continue
                self.sent.append(sent := ask(client, body))
                if sent.outcome:
                    time.sleep(0.5)  # clients wait before they try again


def describe_refusal(response: httpx.Response) -> str:
    """Status and error code of an answer that is no 200; "retry" where it has Retry-After."""
    text = response.read().decode(errors="replace")
    code = "no JSON"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        code = str(json.loads(text)["error"]["code"])
    return f"{response.status_code} {code}{', retry' if 'retry-after' in response.headers else ''}"


def processes() -> Iterator[tuple[int, str]]:
    """Ids and command lines of the processes in this program's sessions: the machine may run others."""
    for process in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) in SESSIONS:
                yield process.pid, " ".join(process.info["cmdline"] or ())


def pids(kind: str) -> set[int]:
    """Processes of a kind, a key of `PROCESSES`."""
    return {pid for pid, line in processes() if PROCESSES[kind] in line.split(" ", 1)[0]}


def is_well(url: str, before: dict[str, set[int]], num_targets: int) -> bool:
    """Whether all of the service is there: as many processes of each kind as `before`, and targets that are ready."""
    try:
        health = httpx.get(f"{url}/health", timeout=5)
        document = httpx.get(f"{url}/drafting", timeout=5).json()
    except (httpx.HTTPError, ValueError):
        return False
    if health.status_code != 200 or health.json()["num_target_replicas"] < num_targets:
        return False
    if "drafter" in before and sum(link["state"] == "up" for link in document.get("links", ())) < num_targets:
        return False
    # A HAProxy that was replaced may still end its streams, so there can be several.
    return all(len(pids(kind)) >= (1 if kind == "haproxy" else len(known)) for kind, known in before.items())


def ray_address() -> str:
    """Of the Ray that this program's service runs in."""
    (line,) = (line for _, line in processes() if line.split(" ", 1)[0].endswith("raylet"))
    return line.partition("--gcs-address=")[2].split()[0]


def inflict(fault: str) -> None:
    kind = fault.removesuffix(" hung")
    first, *others = sorted(pids(kind))
    for pid in [first, *others] if kind == "haproxy" else [first]:
        os.kill(pid, signal.SIGKILL if kind == fault else signal.SIGSTOP)
        if kind != fault:
            threading.Timer(HANG_S, os.kill, (pid, signal.SIGCONT)).start()


def measure_recovery(fault: str, is_recovered: Callable[[], bool]) -> float | None:
    """Seconds from a fault, inflicted here, until all is well for two seconds; None after `RECOVERY_TIMEOUT_S`."""
    fault_s, well_since_s = time.monotonic(), None
    inflict(fault)
    time.sleep(HANG_S if fault.endswith("hung") else 1.0)
    while well_since_s is None or time.monotonic() < well_since_s + 2.0:
        well_since_s = (well_since_s or time.monotonic()) if is_recovered() else None
        if time.monotonic() > fault_s + RECOVERY_TIMEOUT_S:
            break
        time.sleep(0.25)
    return None if well_since_s is None else round(well_since_s - fault_s, 1)


def measured(fault: str, url: str, clients: Clients, num_targets: int) -> dict[str, Any]:
    """One fault under load, and what became of the requests that it met."""
    before = {kind: found for kind in PROCESSES if (found := pids(kind))}
    time.sleep(STEADY_S)
    fault_s = time.monotonic()
    recovered_s = measure_recovery(fault, lambda: is_well(url, before, num_targets))
    time.sleep(STEADY_S)  # requests of the time of the fault end
    met = [sent for sent in clients.sent if sent.end_s >= fault_s]
    failed = [sent for sent in met if sent.outcome]
    return {
        "fault": fault,
        "recovered_s": recovered_s,
        "num_whole": sum(not sent.streams for sent in met),
        "num_whole_failed": sum(not sent.streams for sent in failed),
        "num_streams": sum(sent.streams for sent in met),
        "num_streams_failed": sum(sent.streams for sent in failed),
        "outcomes": dict(Counter(f"{'stream' if sent.streams else 'whole'}: {sent.outcome}" for sent in failed)),
        "last_failure_s": round(max((sent.end_s - fault_s for sent in failed), default=0.0), 1),
    }


def fixed_targets(config: Path, num_targets: int) -> dict[str, Any]:
    """The config with so many targets."""
    document: dict[str, Any] = yaml.safe_load(config.read_text(encoding="utf-8"))
    document["applications"][0]["args"]["target"]["num_replicas"] = num_targets
    return document


@contextlib.contextmanager
def running_service(document: dict[str, Any], num_targets: int) -> Iterator[tuple[str, Path]]:
    """URL of a config's service on a free port, and the config's file: from `peagle serve`, once so many targets are
    ready, to SIGTERM."""
    document["http_options"]["port"] = port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "config.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        env = {**os.environ, "RAY_ADDRESS": "local"}  # never in a Ray that runs here already
        with log.open("wb") as output:
            outputs: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(serve_command(file), env=env, start_new_session=True, **outputs)
        try:
            wait_until(lambda: process.poll() is not None or health(url) == num_targets, READY_TIMEOUT_S)
            if health(url) != num_targets:
                raise SystemExit(f"error: the service does not start\n{log.read_text()[-2000:]}")
            SESSIONS.update(os.getsid(child.pid) for child in psutil.Process(process.pid).children())
            yield url, file
        finally:
            process.terminate()
            process.wait(120)


def serve_command(file: Path) -> list[str]:
    return [sys.executable, "-m", "deployments.cli", "serve", str(file)]


def health(url: str) -> int:
    """Targets that are ready."""
    with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
        return int(httpx.get(f"{url}/health", timeout=5).json()["num_target_replicas"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[1] / "configs" / "local.yaml")
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--whole", type=int, default=4, help="clients that ask for whole answers")
    parser.add_argument("--streams", type=int, default=2, help="clients that stream")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the service is stopped then too
    rows = []
    config = fixed_targets(options.config, options.targets)
    with running_service(config, options.targets) as (url, _):
        model = config["applications"][0]["args"]["model"]["id"]
        body = {"model": model, "messages": QUESTION, "max_tokens": options.max_tokens, "ignore_eos": True}
        bodies = [{**body, "stream": number >= options.whole} for number in range(options.whole + options.streams)]
        for fault in options.faults:
            with Clients(url, len(bodies), bodies.__getitem__) as clients:
                rows.append(measured(fault, url, clients, options.targets))
            sys.stderr.write(f"{json.dumps(rows[-1])}\n")
            if options.out is not None:
                document = {"made": conditions(), "options": {k: str(v) for k, v in vars(options).items()}}
                options.out.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(markdown_of(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
