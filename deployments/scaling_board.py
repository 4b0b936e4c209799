"""What autoscaling says and hears: small documents in Ray's own key-value store, and the file of decisions.

Serve runs policies in its controller, one for each deployment; the ingress and the other policies learn of a decision
here. Enters: documents and log lines of a policy. Leaves: the newest document of each name, for whoever asks on any
node. An `Exchange` reads and writes in a thread, because a policy's call must wait for no disk and no network.
"""

import json
import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray.experimental import internal_kv

logger = logging.getLogger("ray.serve")

NAMESPACE = "peagle"
DECISION, DRAFTERS, ASKED = "decision", "drafters", "asked"
"""Names of documents: the target policy's decision; drafter replicas as their policy sees them; when a request last
found no target replica."""

EXCHANGE_INTERVAL_S = 1.0
MAX_LOG_BYTES = 64 * 2**20
"""Of the file of decisions; a full one is kept as FILE.1 and begun anew."""

MAX_LINES = 1000


class Board(Protocol):
    """Documents by name."""

    def get(self, name: str) -> dict[str, Any] | None: ...

    def put(self, name: str, document: Mapping[str, Any]) -> None: ...


class ClusterBoard:
    """The documents of one application, in the key-value store of the Ray cluster that this process belongs to."""

    def __init__(self, app_name: str) -> None:
        self._prefix = f"autoscaling/{app_name}/"

    def get(self, name: str) -> dict[str, Any] | None:
        """None where there is none. Raises what Ray raises when the store does not answer."""
        value = internal_kv._internal_kv_get(self._prefix + name, namespace=NAMESPACE)
        document: dict[str, Any] | None = None if value is None else json.loads(value)
        return document

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        value = json.dumps(document, allow_nan=False)
        internal_kv._internal_kv_put(self._prefix + name, value, namespace=NAMESPACE)


class DecisionLog:
    """Appends the lines of `ScalingPolicy.take_log` to a file, which `cluster.scaling_replay` reads. Each file begins
    with the settings."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._head = ""

    def write(self, lines: Sequence[str]) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for line in lines:
            if line.startswith('{"format"'):
                self._head = line
            full = self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes
            if full:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            with self.path.open("a", encoding="utf-8") as file:
                if full and line != self._head:
                    file.write(self._head + "\n")
                file.write(line + "\n")


class Exchange:
    """Carries documents between a policy and a board, and lines to a log, once a second. `hears`: names to read."""

    def __init__(self, board: Board, hears: Sequence[str] = (), log: DecisionLog | None = None) -> None:
        self._board, self._hears, self._log = board, tuple(hears), log
        self._heard: dict[str, dict[str, Any]] = {}
        self._said: dict[str, Mapping[str, Any]] = {}
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._problem = ""
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self, policy: object) -> None:
        """Begin, and end with `policy`: Serve makes a new one each time that it takes a config."""
        weakref.finalize(policy, self._stopped.set)
        threading.Thread(target=self._run, name="peagle-autoscaling", daemon=True).start()

    def say(self, name: str, document: Mapping[str, Any]) -> None:
        with self._lock:
            self._said[name] = document

    def write(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._lines.extend(lines)

    def heard(self, name: str) -> dict[str, Any] | None:
        """The newest document of a name that was read."""
        return self._heard.get(name)

    def carry(self) -> None:
        """Write what was said, read what is there. Raises what board or file raise; nothing said is lost by that."""
        with self._lock:
            said, lines = dict(self._said), list(self._lines)
        for name, document in said.items():
            self._board.put(name, document)
            with self._lock:
                if self._said.get(name) is document:
                    del self._said[name]
        for name in self._hears:
            if (found := self._board.get(name)) is not None:
                self._heard[name] = found
        if lines and self._log is not None:
            self._log.write(lines)
        with self._lock:
            for _ in lines[: len(self._lines)]:
                self._lines.popleft()

    def _run(self) -> None:
        while not self._stopped.wait(EXCHANGE_INTERVAL_S):
            try:
                self.carry()
                self._problem = ""
            except Exception as error:  # the policy decides on without it, and this goes on trying
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    logger.exception("autoscaling: decisions cannot be shown or logged; scaling goes on")
