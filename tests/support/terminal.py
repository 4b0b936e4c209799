"""The command `peagle` in a terminal, as a person uses it."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager


def _take_terminal() -> None:
    """Of a new process: the terminal is its own, and Ctrl-C reaches it, which tests in the background may ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A running command; `shown`: what it wrote after the last match."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = dict(os.environ, TERM="xterm", COLUMNS="60", LINES="20", PROMPT_TOOLKIT_NO_CPR="1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def type(self, keys: str, *patterns: str) -> None:
        """Type, and read on to each of `patterns`."""
        os.write(self._master, keys.encode())
        for pattern in patterns:
            self.wait_for(pattern)

    def wait_for(self, pattern: str, timeout_s: float = 120) -> None:
        """Read on, from the last match, to the next of `pattern`."""
        end_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.shown)):
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.shown!r}"
            if select.select([self._master], [], [], left_s)[0]:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]

    def ended(self) -> int:
        return self.process.wait(timeout=120)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    found = Terminal(*arguments)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
