"""One line of JSON for each request: who asked, what for, how many tokens. Never prompts, answers or keys.

A thread writes the lines, in the order in which requests end. A slow disk holds up no request. A line that cannot be
written is reported on the replica's standard error, and lost.
"""

import asyncio
import json
import logging
import queue
import sys
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from typing import Any

STDOUT = "-"
MAX_WAITING_LINES = 10_000
MAX_WAIT_S = 10.0
"""For the tokens of a request that was broken off. They come a moment after its end, or never, if its process died."""


class UsageLog:
    """Appends to a file, which is opened again after it was moved away (logrotate). Several replicas of a node may
    share it: a line is one write."""

    def __init__(self, path: str) -> None:
        """`path`: of the file; `-`: standard output. Raises OSError where the file cannot be opened."""
        target = logging.StreamHandler(sys.stdout) if path == STDOUT else WatchedFileHandler(path, encoding="utf-8")
        lines: queue.Queue[Any] = queue.Queue(MAX_WAITING_LINES)
        self._handler, self._listener = QueueHandler(lines), QueueListener(lines, target)
        self._listener.start()
        self._open: dict[int, dict[str, Any]] = {}

    def close(self) -> None:
        """Write what is left, also of requests whose tokens have not come."""
        for number in [number for number, found in self._open.items() if "status" in found]:
            self._write(number)
        self._listener.stop()

    def begin(self, number: int) -> None:
        """A request has come. `number`: its own among those that are open."""
        self._open[number] = {}

    def end(self, number: int, *, is_counted_later: bool, **fields: Any) -> None:
        """The answer has ended, with a `status`. `is_counted_later`: the engine will say its tokens."""
        found = self._open[number] = {**fields, **self._open[number]}
        if is_counted_later and "output_tokens" not in found:
            asyncio.get_running_loop().call_later(MAX_WAIT_S, self._write, number)
        else:
            self._write(number)

    def count(self, number: int, **tokens: int) -> None:
        """The tokens of a request, before or after its end."""
        if (found := self._open.get(number)) is not None:
            found.update(tokens)
            if "status" in found:
                self._write(number)

    def _write(self, number: int) -> None:
        if (found := self._open.pop(number, None)) is not None:
            self._handler.handle(logging.makeLogRecord({"msg": json.dumps(found, ensure_ascii=False)}))
