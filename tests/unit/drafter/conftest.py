from collections.abc import Iterator

import pytest

from tests.support.transport_harness import POOLS


@pytest.fixture(autouse=True)
def links_end() -> Iterator[None]:
    """With the test that made them."""
    yield
    while POOLS:
        POOLS.pop().close()
