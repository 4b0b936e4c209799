"""The engine whose answers the engines with drafts must give."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine_cases import engine_settings
from tests.support.engine_harness import RunningEngine, engine_of, target_kwargs
from tests.support.warm_engine import engines_start_warm


@pytest.fixture(scope="package")
def plain_engine(target_dir: Path) -> Iterator[RunningEngine]:
    """The target without speculation. It waits beside the other engines of this folder, one start for all of them."""
    with engines_start_warm():
        started = engine_of(target_kwargs(target_dir, engine_settings(200)))
        engine = started.__enter__()
    yield engine
    started.__exit__(None, None, None)
