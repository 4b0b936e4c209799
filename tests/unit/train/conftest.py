from pathlib import Path

import pytest

from tests.support.small_run import write_small_run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its answers and a recipe, for all tests: each names an output of its own."""
    return write_small_run(tmp_path_factory.mktemp("small"))
