"""Fixtures that several test modules share: the prepared target and head, as a user gets them."""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from peagle.embedded import DEFAULT_TARGET, prepare_target
from peagle.heads import prepare_head
from tests.support.warm_engine import engines_start_warm

if TYPE_CHECKING:
    from tests.support.service_harness import Service

# The same cases in every run, however slow the machine is at the moment.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

FOLDERS = ["service", "engine", "kernels"]
"""What takes long comes first. The first two start engines."""


def starts_engines(path: Path) -> bool:
    """Whether a test of this module talks to an engine or to Ray."""
    return path.parent.name in FOLDERS[:2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, and listed as such, where there is none. `FOLDERS` come first, and in them what
    needs the application comes last."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))

    def place(item: pytest.Item) -> tuple[int, bool]:
        folder = item.path.parent.name
        number = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
        return number, "application" in fixtures_of(item)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What the modules have imported is not looked through in every garbage collection: that takes most of a second."""
    gc.collect()
    gc.freeze()


def fixtures_of(item: pytest.Item) -> Sequence[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else ()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The shared application makes room for tests that start engines, or Ray, themselves."""
    if starts_engines(item.path) and "application" not in fixtures_of(item):
        stop_application()


def pytest_sessionfinish() -> None:
    stop_application()


def stop_application() -> None:
    if harness := sys.modules.get("tests.support.service_harness"):  # else nobody has started it
        harness.APPLICATION.stop()


class EnginesTogether(LoadScopeScheduling):
    """With `-n`: all modules of the service in one process, one after another, all that start engines in one, and
    every other module in any: two processes have work to the end."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::", 1)[0]
        path = self.config.rootpath / module
        return path.parent.name if starts_engines(path) else module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EnginesTogether:
    return EnginesTogether(config, log)


@pytest.fixture(scope="module", autouse=True)
def _own_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """vLLM sets variables of its process. Which modules share one is chance, so none gets those of the module before.
    The shared application keeps its own."""
    before = dict(os.environ)
    yield
    if request.path.parent.name != "service":
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Without what other tests of this process left for the garbage collector, which may log a complaint."""
    gc.collect()
    caplog.clear()
    return caplog


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads that share out small tensors wait for each other, on busy cores for seconds; tokenizers must not fork
    worker threads of their own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """Checkpoint of the embedded target in the user's cache (converted there at the first run)."""
    return prepare_target()


@pytest.fixture(scope="session")
def head_dir(target_dir: Path) -> Path:
    """Plain head for the embedded target, made from the shipped one."""
    return prepare_head(DEFAULT_TARGET, target_dir)


@pytest.fixture(scope="module")
def application() -> "Service":
    """The application that all tests of the service share, as it was started."""
    from tests.support.service_harness import APPLICATION

    return APPLICATION.start()


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """Environment for the engines of a module, which start warm."""
    with engines_start_warm():
        yield
