"""The cache directory: directories that are built once, checked by hash, and never seen half-written.

Each holds a ``manifest.json`` (sha256, size and mtime of every file). `peagle.embedded` and `peagle.heads` say what is
built.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Report = Callable[[str], None]


class CacheError(OSError):
    """The cache directory cannot hold what must be prepared: no space, no write permission, or not a directory."""


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir`, else the environment variable PEAGLE_CACHE, else ``~/.cache/peagle`` (absolute, may not exist)."""
    if cache_dir is None:
        named = os.environ.get("PEAGLE_CACHE", "").strip()
        cache_dir = Path(named) if named else Path.home() / ".cache" / "peagle"
    return Path(cache_dir).expanduser().absolute()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file and force it to the disk, so that a full disk shows here and not in a later reader.

    Raises OSError naming the file and its size.
    """
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while writing {len(data)} bytes", str(path)) from error


def is_intact(directory: Path, full: bool = False) -> bool:
    """Whether `directory` holds exactly what its manifest says.

    Sizes are always compared. Contents are hashed for a file whose mtime differs from the manifest's, and for every
    file when `full` is set.
    """
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False
    for name, entry in files.items():
        path = directory / name
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        if stat.st_size != entry["num_bytes"]:
            return False
        if (full or stat.st_mtime_ns != entry["mtime_ns"]) and sha256_of(path) != entry["sha256"]:
            return False
    return bool(files)


def prepare_directory(
    root: Path,
    name: str,
    num_bytes: int,
    build: Callable[[Path], None],
    *,
    verify: bool = False,
    report: Report = logger.info,
) -> Path:
    """The intact directory ``root/name``; `build` makes it when it is missing or damaged.

    `build` gets an empty directory beside the final one; only when every file and the manifest are on the disk is it
    renamed into place, so a reader sees all or nothing. Starters that come at the same time wait for one builder.
    `num_bytes` is what the finished directory takes. `verify` hashes every file of a directory that is reused.

    Raises CacheError when the directory cannot be written or has no room; nothing half-written is left behind.
    """
    final = root / name
    if is_intact(final, full=verify):
        return final
    try:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # a file system that makes no directories, such as /proc
            raise PermissionError(errno.EACCES, error.strerror, str(root)) from error
        lock = FileLock(root / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"another process prepares {final}; waiting for it")
            lock.acquire()
        try:
            if not is_intact(final, full=verify):
                _build(final, num_bytes, build, report)
        finally:
            lock.release()
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        raise _explained(error, final, num_bytes) from error
    return final


def _build(final: Path, num_bytes: int, build: Callable[[Path], None], report: Report) -> None:
    """Build `final` in a directory beside it and rename; the caller holds the lock."""
    for debris in final.parent.glob(f".{final.name}.*.partial"):  # of a builder that was killed
        shutil.rmtree(debris, ignore_errors=True)
    if final.exists():
        report(f"{final} is damaged or incomplete; preparing it again")
    if shutil.disk_usage(final.parent).free < num_bytes:
        raise _explained(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), final, num_bytes)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        partial.chmod(0o755)
        try:
            build(partial)
        except Exception as error:
            # Libraries in Rust (tokenizers, safetensors) tell of the disk in words alone.
            if not isinstance(error, OSError) and (found := re.search(r"\(os error (\d+)\)", str(error))):
                raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
            raise
        _write_manifest(partial)
        if final.exists():
            final.rename(final.parent / f".{final.name}.old.partial")
        partial.rename(final)
        _sync_directory(final.parent)
        shutil.rmtree(final.parent / f".{final.name}.old.partial", ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_manifest(directory: Path) -> None:
    """Manifest of every file in `directory`, written last: its presence says that all others are complete."""
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        stat = path.stat()
        entry = {"sha256": sha256_of(path), "num_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        files[path.relative_to(directory).as_posix()] = entry
    write_bytes(directory / MANIFEST, json.dumps({"files": files}, indent=1).encode())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    """Force the directory's entries (names, not contents) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(error: OSError, final: Path, num_bytes: int) -> OSError:
    """`error` as a CacheError that names the directory, the cause and the way out; any other error as it is."""
    directory = final.parent
    if error.errno in NO_SPACE:
        free = shutil.disk_usage(directory).free
        what = f"no room: {num_bytes:,} bytes are needed, {free:,} are free ({error.strerror})"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        what = f"not writable ({error.strerror})"
    elif error.errno in {errno.ENOTDIR, errno.EEXIST}:
        what = f"not a directory ({error.strerror})"
    else:
        return error
    return CacheError(
        error.errno,
        f"cannot prepare {final.name} in the cache directory {directory}: {what}. "
        "Set the environment variable PEAGLE_CACHE to a directory that fits",
    )
