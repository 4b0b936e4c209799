"""The cache directory: directories that are built once and never seen half-written.

Each holds a ``manifest.json`` with the size of every file, by which files that were lost or cut are found.
`peagle.embedded` and `peagle.heads` say what is built.
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

from filelock import FileLock

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
OF_THE_DIRECTORY = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST
})  # fmt: skip
"""Errors for which another cache directory is the way out."""

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


def is_intact(directory: Path) -> bool:
    """Whether `directory` holds the files of its manifest, each of the size that it had."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((directory / name).stat().st_size == entry["num_bytes"] for name, entry in files.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare_directory(root: Path, name: str, build: Callable[[Path], None], report: Report = logger.info) -> Path:
    """The intact directory ``root/name``; `build` makes it when it is missing or damaged.

    `build` gets an empty directory beside the final one; only when every file and the manifest are on the disk is it
    renamed into place, so a reader sees all or nothing. Starters that come at the same time wait for one builder.

    Raises CacheError when the directory cannot be written or has no room; nothing half-written is left behind.
    """
    final = root / name
    if is_intact(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"):
            if not is_intact(final):
                _build(final, build, report)
    except OSError as error:
        if error.errno not in OF_THE_DIRECTORY:
            raise
        raise CacheError(
            error.errno,
            f"cannot prepare {name} in the cache directory {root}: {error}. Set the environment variable PEAGLE_CACHE "
            "to a directory that fits",
        ) from error
    return final


def _build(final: Path, build: Callable[[Path], None], report: Report) -> None:
    """Build `final` in a directory beside it and rename; the caller holds the lock."""
    for debris in final.parent.glob(f".{final.name}.*.partial"):  # of a builder that was killed
        shutil.rmtree(debris, ignore_errors=True)
    if final.exists():
        report(f"{final} is damaged or incomplete; preparing it again")
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
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
        files = {name: {"num_bytes": size} for name, size in sizes.items()}
        write_bytes(partial / MANIFEST, json.dumps({"files": files}, indent=1).encode())
        if final.exists():
            final.rename(final.parent / f".{final.name}.old.partial")
        partial.rename(final)
        shutil.rmtree(final.parent / f".{final.name}.old.partial", ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
