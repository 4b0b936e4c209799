"""The cache directory: all or nothing, whatever happens to the disk, the permissions or the process."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from peagle.store import MANIFEST, CacheError, is_intact, prepare_directory, write_bytes
from tests.support.disk import full_disk


def build(directory: Path) -> None:
    write_bytes(directory / "weights", b"w" * 1000)
    (directory / "sub").mkdir()
    write_bytes(directory / "sub" / "config", b"{}")


def prepare(root: Path) -> Path:
    return prepare_directory(root, "thing", build)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name not in {"thing", ".thing.lock"}]


@pytest.mark.parametrize(("file", "content"), [("weights", b"w" * 999), ("sub/config", None), (MANIFEST, b'{"files"')])
def test_damage_is_found_and_mended(tmp_path: Path, file: str, content: bytes | None) -> None:
    path = prepare(tmp_path)
    (path / file).unlink()
    if content is not None:
        (path / file).write_bytes(content)
    assert not is_intact(path)
    assert prepare(tmp_path) == path
    assert is_intact(path)
    assert (path / "weights").read_bytes() == b"w" * 1000
    assert leftovers(tmp_path) == []


def fill(directory: Path) -> None:
    write_bytes(directory / "config", b"{}")
    (directory / "weights").symlink_to("/dev/full")  # every write fails as on a full disk
    write_bytes(directory / "weights", b"w" * 1000)


def save_tokenizer(directory: Path) -> None:
    """By a library that tells of a full disk in words alone."""
    with full_disk(100):
        Tokenizer(WordLevel({"a" * 10_000: 0}, unk_token="a")).save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(("save", "message"), [(fill, "No space left on device"), (save_tokenizer, "File too large")])
def test_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path, save: Any, message: str) -> None:
    with pytest.raises(CacheError, match=f"{message}.*PEAGLE_CACHE") as caught:
        prepare_directory(tmp_path, "thing", save)
    assert caught.value.errno == (errno.ENOSPC if save is fill else errno.EFBIG)
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "thing").exists()
    assert prepare(tmp_path).is_dir(), "a later try, with room, works"


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Permissions do not bind root, so root steps down for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_directory_without_write_permission() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o555)
        with ordinary_user(), pytest.raises(CacheError, match=r"Permission denied.*PEAGLE_CACHE"):
            prepare(root / "cache")
        root.chmod(0o755)
        prepare(root)
        root.chmod(0o555)
        with ordinary_user():
            assert prepare(root).is_dir(), "what is there already is used"
        root.chmod(0o755)


def _slow_build(root: str, log: str) -> None:
    def logged(directory: Path) -> None:
        with Path(log).open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        build(directory)

    prepare_directory(Path(root), "thing", logged)


def test_one_of_many_starters_builds_and_the_others_find_it(tmp_path: Path) -> None:
    log, root = tmp_path / "log", tmp_path / "a" / "b"
    with multiprocessing.get_context("spawn").Pool(3) as starters:
        starters.starmap_async(_slow_build, [(str(root), str(log))] * 3, chunksize=1).get(300)
    assert log.read_text() == "built\n"
    assert (prepare(root) / "sub" / "config").read_bytes() == b"{}"
    assert leftovers(root) == []


def test_killed_builder_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from peagle.store import prepare_directory\n"
        "def build(d): (d / 'weights').write_bytes(b'half'); print('half', flush=True); time.sleep(60)\n"
        "prepare_directory(Path(sys.argv[1]), 'thing', build)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "half\n"
        builder.send_signal(signal.SIGKILL)
    assert not (tmp_path / "thing").exists()
    assert leftovers(tmp_path) != []
    assert (prepare(tmp_path) / "weights").read_bytes() == b"w" * 1000
    assert leftovers(tmp_path) == []
