"""A headless Chromium that a test looks through, over its DevTools protocol. Needs the Debian package `chromium`."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

BINARIES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
START_S = 60.0


class Tab:
    """One page. `problems`: errors and warnings that the browser has logged, violations of the page's policy too."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                self.problems += [entry["text"]] * (entry["level"] in ("error", "warning"))

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = 60.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not self.run(condition):
            assert time.monotonic() < end_s, (condition, self.run("document.body.innerText"), self.problems)
            time.sleep(0.2)

    def fill(self, name: str, value: str) -> None:
        self.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")

    def press(self, name: str) -> None:
        self.run(f"document.getElementById({json.dumps(name)}).click()")

    def text(self, name: str) -> str:
        return str(self.run(f"document.getElementById({json.dumps(name)}).innerText"))


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a fresh browser. Skips the test where none is installed."""
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command = [binary, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        # A profile of its own: whatever the user's environment has for a home, nothing of it is used.
        running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": folder})
        try:
            port_file, end_s = Path(folder) / "DevToolsActivePort", time.monotonic() + START_S
            while not (port_file.exists() and port_file.read_text()):
                assert running.poll() is None, f"{binary} has ended with status {running.returncode}"
                assert time.monotonic() < end_s, f"{binary} does not start"
                time.sleep(0.2)
            port = port_file.read_text().splitlines()[0]
            tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json()
            (address,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            with connect(address, max_size=None, proxy=None) as connection:
                tab = Tab(connection)
                yield tab
        finally:
            running.terminate()
            running.wait(30)
