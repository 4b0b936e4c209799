"""What several benchmarks need: applications of Ray Serve that end with the benchmark, and tables."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application

from deployments.up import ray_environment

READY_TIMEOUT_S = 400.0


def free_port() -> int:
    """A port below those that the system gives to whoever asks for any: Ray's own processes would take one of those
    before the proxy does. Raises OSError where fifty are taken."""
    for port in random.sample(range(20_000, 30_000), 50):
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among 50 between 20000 and 30000")


@contextmanager
def running_applications(make: Callable[[], Mapping[str, Application]], ready: str) -> Iterator[str]:
    """Yields the URL of the proxy once `ready` ("/health" of ours, with its prefix) answers 200.

    make: applications by name; each is found below `/name`, a single one at the root. Called once Ray runs: making one
    of `ray.serve.llm` asks Ray for its runtime environment, which would start another Ray.

    Raises:
        RuntimeError: not ready after `READY_TIMEOUT_S`, with Serve's own words.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    before = dict(os.environ)
    os.environ.update({**ray_environment(), **before})  # Ray's processes take it from this one
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        prefix = "/{}" if len(applications := make()) > 1 else "/"
        targets = [
            serve.RunTarget(app, name=name, route_prefix=prefix.format(name)) for name, app in applications.items()
        ]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        end_s = time.monotonic() + READY_TIMEOUT_S
        serve.run_many(targets, wait_for_applications_running=len(targets) > 1)
        while httpx.get(f"{url}{ready}", timeout=120).status_code != 200:
            if time.monotonic() > end_s:
                raise RuntimeError(f"the service is not ready after {READY_TIMEOUT_S:.0f} s: {serve.status()}")
            time.sleep(1)
        yield url
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """First column left, the rest right; floats with three decimals, None as a dash."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in rows:
        cells = (f"{value:.3f}" if isinstance(value, float) else str("-" if value is None else value) for value in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys, which are the header; counts as "2 a, 3 b"."""

    def show(value: Any) -> Any:
        return ", ".join(f"{n} {key}" for key, n in value.items()) if isinstance(value, Mapping) else value

    return markdown(list(rows[0]), [[show(value) for value in row.values()] for row in rows])
