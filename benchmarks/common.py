"""What several benchmarks need: a free port, waiting for a server, and tables."""

import random
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx


def free_port() -> int:
    """A port below those that the system gives to whoever asks for any: Ray's own processes would take one of those
    before the proxy does. Raises OSError where fifty are taken."""
    for port in random.sample(range(20_000, 30_000), 50):
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port among 50 between 20000 and 30000")


def is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.5)


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
