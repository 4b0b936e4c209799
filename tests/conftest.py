"""Fixtures that several test modules share: the prepared target and head, as a user gets them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.embedded import DEFAULT_TARGET, prepare_target
from peagle.heads import prepare_head
from tests.cpu_engine_environment import preload_environment
from tests.warm_engine import start_engines_warm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, and listed as such, where there is none. With `-n`, all tests of engines and
    services run in one process, which begins with them, and every other module in one process as well."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("engines" if has_engine(item) else item.path.name))
    items.sort(key=lambda item: not has_engine(item))


def has_engine(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("engine", "service"))


@pytest.fixture(scope="session", autouse=True)
def _openmp_threads() -> None:
    """Tests of tensors run beside engines on two cores; tokenizers must not fork worker threads of their own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads that share out small tensors wait for each other, on busy cores for seconds."""
    import torch

    if has_engine(request.node):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """Checkpoint of the embedded target in the user's cache (converted there at the first run)."""
    return prepare_target()


@pytest.fixture(scope="session")
def head_dir(target_dir: Path) -> Path:
    """Plain head for the embedded target, made from the shipped one."""
    return prepare_head(DEFAULT_TARGET, target_dir)


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """Environment for the engines of a module, which start warm."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in preload_environment().items():
            patch.setenv(name, value)
        start_engines_warm(patch)
        yield
