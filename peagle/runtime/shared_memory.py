"""Memory that two processes of one host share, and that no kill -9 leaves behind.

A file in /dev/shm that loses its name as soon as both sides have it: from then on the kernel frees it with its last
process. Until then its maker holds a lock on it; a lock that can be taken belongs to a dead maker, whose file the next
maker removes (`sweep`). Knows nothing of what the memory holds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import secrets
import time
from pathlib import Path

SHARED_DIR = Path("/dev/shm")
_PREFIX = "peagle-mailbox-"
_MIN_AGE_S = 30.0  # a younger file may be one whose maker has not locked it yet
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Equal for two processes exactly when files that one makes in /dev/shm are the other's too; "" where none are.

    The kernel's boot and the device number of the mount: containers of one host share the first, not the second.
    Only x86-64 keeps the order of plain stores and loads, which the mailbox's flags rely on.
    """
    if platform.machine() != "x86_64":
        return ""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()}:{SHARED_DIR.stat().st_dev}"
    except OSError:
        return ""


class SharedMemory:
    """A shared mapping. `name` is the file's as long as it has one."""

    def __init__(self, mapping: mmap.mmap, name: str = "", lock_fd: int | None = None) -> None:
        self.mapping = mapping
        self.name = name
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """New memory, all zero and reserved. Raises OSError where /dev/shm has no room for it."""
        name = f"{_PREFIX}{secrets.token_hex(12)}"
        fd = os.open(SHARED_DIR / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Without room the first touch of a page would kill the process, here it raises.
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(mmap.mmap(fd, num_bytes), name, fd)
        except BaseException:
            (SHARED_DIR / name).unlink(missing_ok=True)
            os.close(fd)
            raise

    @classmethod
    def attach(cls, name: str, num_bytes: int) -> SharedMemory:
        """The memory that another process made under `name`, which it loses here.

        Raises OSError where there is none, ValueError for a name that `create` does not give or another size.
        """
        if not name.startswith(_PREFIX) or "/" in name:
            raise ValueError(f"mailbox {name!r:.80} is not named {_PREFIX}...")
        fd = os.open(SHARED_DIR / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if (found := os.fstat(fd).st_size) != num_bytes:
                raise ValueError(
                    f"mailbox {name} has {found} bytes, not {num_bytes}: the two sides differ in its layout"
                )
            memory = cls(mmap.mmap(fd, num_bytes), name)
        finally:
            os.close(fd)
        memory.unlink()
        return memory

    @classmethod
    def private(cls, num_bytes: int) -> SharedMemory:
        """Memory of this process alone."""
        return cls(mmap.mmap(-1, num_bytes))

    def unlink(self) -> None:
        """Take the name away, if it is still there. The memory stays with those who have it."""
        if self.name:
            (SHARED_DIR / self.name).unlink(missing_ok=True)
            self.name = ""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def sweep() -> int:
    """Remove files whose maker died before the other side had them; how many."""
    num_removed = 0
    for path in SHARED_DIR.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _MIN_AGE_S:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # gone by now, or another user's
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            num_removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
    return num_removed
