"""Which heads have a live drafter: told by the worker that sends the steps, read by the engine's scheduler.

With asynchronous scheduling the scheduler plans K drafts for a request before they exist. With nobody to propose them
they would be verified for nothing, so the worker writes a bit mask of the heads with a live link after every step.

One word in a file of /dev/shm, named after vLLM's instance id, which both processes know. The scheduler takes the name
away when it opens the file. A scheduler on another host finds none, and takes all heads for live.
"""

import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from peagle.runtime.hello import MAX_NUM_HEADS

logger = logging.getLogger(__name__)

MAX_HEADS = MAX_NUM_HEADS  # bits of the word
_SHARED_DIR = Path("/dev/shm")
_ALL = 2**MAX_HEADS - 1


class Health:
    """The word; a reader's stays readable when its writer is gone."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._word = np.frombuffer(mapping, dtype=np.int64, count=1)

    @classmethod
    def create(cls, instance_id: str) -> "Health":
        """The writer's; no head is live yet. Raises OSError where /dev/shm cannot be written."""
        return cls(_map(_path(instance_id), os.O_CREAT | os.O_RDWR))

    @classmethod
    def open(cls, instance_id: str) -> "Health":
        """The reader's. Where the writer is on another host: a word of its own, in which all heads are live."""
        path = _path(instance_id)
        try:
            health = cls(_map(path, os.O_RDWR))
        except FileNotFoundError:
            logger.warning("%s does not exist: drafts are planned whether a drafter is there or not", path)
            health = cls(mmap.mmap(-1, mmap.PAGESIZE))
            health._word[0] = _ALL
            return health
        path.unlink(missing_ok=True)
        return health

    def write(self, live_heads: Iterable[int]) -> None:
        """Say which heads have a live link. Raises ValueError for an index outside 0..MAX_HEADS - 1."""
        word = 0
        for head in live_heads:
            if not 0 <= head < MAX_HEADS:
                raise ValueError(f"head {head} is outside 0..{MAX_HEADS - 1}")
            word |= 1 << head
        self._word[0] = word

    def is_live(self, head: int) -> bool:
        """Whether `head` has a live link; False for an index that no engine can have."""
        return 0 <= head < MAX_HEADS and bool(int(self._word[0]) >> head & 1)


def _path(instance_id: str) -> Path:
    return _SHARED_DIR / f"peagle-health-{os.getuid()}-{instance_id}"


def _map(path: Path, flags: int) -> mmap.mmap:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        return mmap.mmap(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)
