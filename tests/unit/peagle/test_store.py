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


def test_directory_is_built_once_and_reused(tmp_path: Path) -> None:
    reports: list[str] = []
    path = prepare(tmp_path / "a" / "b")
    inode = path.stat().st_ino
    assert (path / "sub" / "config").read_bytes() == b"{}"
    assert prepare_directory(path.parent, "thing", build, reports.append) == path
    assert (path.stat().st_ino, reports) == (inode, [])
    assert leftovers(path.parent) == []


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def build_on_full_disk(directory: Path) -> None:
        write_bytes(directory / "config", b"{}")
        (directory / "weights").symlink_to("/dev/full")  # every write fails as on a full disk
        write_bytes(directory / "weights", b"w" * 1000)

    with pytest.raises(CacheError, match=r"No space left on device .*PEAGLE_CACHE") as caught:
        prepare_directory(tmp_path, "thing", build_on_full_disk)
    assert caught.value.errno == errno.ENOSPC
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "thing").exists()
    assert prepare(tmp_path).is_dir(), "a later try, with room, works"


def test_a_library_that_tells_of_a_full_disk_in_words_alone(tmp_path: Path) -> None:
    def save(directory: Path) -> None:
        Tokenizer(WordLevel({"a" * 10_000: 0}, unk_token="a")).save(str(directory / "tokenizer.json"))

    with full_disk(100), pytest.raises(CacheError, match=r"File too large.*PEAGLE_CACHE"):
        prepare_directory(tmp_path, "thing", save)
    assert leftovers(tmp_path) == []
    assert prepare_directory(tmp_path, "thing", save).is_dir()


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


def test_one_of_many_starters_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    starters = [context.Process(target=_slow_build, args=(str(tmp_path / "cache"), str(log))) for _ in range(3)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join(timeout=300)
    assert [starter.exitcode for starter in starters] == [0, 0, 0]
    assert log.read_text() == "built\n"


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
