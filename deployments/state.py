"""What the service has learned, kept over restarts of the router."""

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.acceptance import AcceptanceSnapshot
from cluster.counts import TargetReport
from cluster.heads import HeadManager, HeadState
from cluster.k_policy import KPolicy
from cluster.spending import SpendingTracker
from deployments.compat import KVChannel
from peagle.store import write_bytes

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 30.0
LEARNED = "learned"
"""Name of the saved state among the documents of the cluster."""


class SavedState(msgspec.Struct):
    """What a restarted router needs: what was learned, the reports that were counted for it, which heads were put in
    others' place, and what callers have used."""

    reports: list[TargetReport]
    acceptance: AcceptanceSnapshot
    spending: SpendingTracker
    heads: HeadState


class StateStore:
    """Saves the state of a router, at most every `SAVE_INTERVAL_S`, and finds it again: in the file that
    `num_draft_tokens.state` names, else in the key-value store of the Ray cluster, which outlives every replica and
    needs no disk. It ends with the cluster, unless that keeps it in a Redis.

    A router that takes another's place may write beside it for a moment: each writes a file of its own first.
    """

    def __init__(self, path: str | None, policy: KPolicy, heads: HeadManager, channel: KVChannel) -> None:
        self._path, self._channel = None if path is None else Path(path), channel
        self._policy, self._heads = policy, heads
        self.spending = SpendingTracker()
        self._name = "the state in Ray's key-value store" if path is None else f"num_draft_tokens.state: {path}"
        self._saved_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._fails = False

    def restore(self) -> None:
        """Begin where the last router stopped. A state that is damaged or of another version is logged and not used;
        its file is put aside."""
        try:
            if self._path is None:
                document: Any = self._channel.get(LEARNED)
            else:
                document = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else None
            if document is None:
                return
            saved = msgspec.convert(document, SavedState)
            self.spending = saved.spending
            self._heads.state = saved.heads
            self._policy.restore(saved.reports, saved.acceptance)  # last: what was learned may be of another K_max
        except Exception as error:  # noqa: BLE001  # the service starts without it, whatever is wrong
            kept = ""
            if self._path is not None:
                aside = self._path.with_suffix(".unusable")
                with contextlib.suppress(OSError):  # another replica was first, or the folder is read-only
                    self._path.replace(aside)
                    kept = f"; it is kept as {aside}"
            logger.warning("%s cannot be used (%s)%s", self._name, error, kept)

    def save_soon(self, *, is_urgent: bool = False) -> None:
        """Save in a thread, when it is time again and the last save is done: a slow disk holds up no request.
        `is_urgent`: it is time."""
        if is_urgent:
            self._saved_s = -math.inf
        is_due = time.monotonic() - self._saved_s >= SAVE_INTERVAL_S
        if not is_due or (self._task is not None and not self._task.done()):
            return
        self._saved_s = time.monotonic()
        self._task = asyncio.get_running_loop().create_task(asyncio.to_thread(self.write, self.document()))

    def document(self) -> dict[str, Any]:
        """The state of now, as JSON."""
        learned = self._policy.tracker.last_reports, self._policy.posteriors.snapshot()
        document: dict[str, Any] = msgspec.to_builtins(SavedState(*learned, self.spending, self._heads.state))
        return document

    def write(self, document: Mapping[str, Any]) -> None:
        """Replace the saved state by this one, at once and as a whole. The first of several failures in a row
        is logged, and their end."""
        try:
            if self._path is not None:
                self._replace_file(self._path, json.dumps(document).encode())
            else:
                self._channel.put(LEARNED, document)
        except Exception as error:  # noqa: BLE001  # of a disk or of Ray
            if not self._fails:
                again = f"the service goes on, and tries again every {SAVE_INTERVAL_S:.0f} s"
                logger.warning("%s cannot be written (%s); %s", self._name, error, again)
            self._fails = True
        else:
            if self._fails:
                logger.warning("%s is written again", self._name)
            self._fails = False

    @staticmethod
    def _replace_file(path: Path, data: bytes) -> None:
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(part, data)
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
