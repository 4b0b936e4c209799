"""The service under a mixed load for a while: nothing fails, and no process grows. `python -m benchmarks.soak` runs it
for 30 minutes; `PEAGLE_SOAK_MINUTES` says how long this test does."""

import os
from pathlib import Path

import pytest

from benchmarks.soak import grown, soak, table

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
MINUTES = float(os.environ.get("PEAGLE_SOAK_MINUTES", "6"))


@pytest.mark.long
@pytest.mark.service
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_nothing_fails_and_nothing_grows(capsys: pytest.CaptureFixture[str]) -> None:
    found = soak(CONFIG, MINUTES)
    assert sum(found["requests"].values()) > 100
    assert all(found["requests"].values())
    assert found["failed"] == []
    assert grown(found, mib=150, num_fds=10, num_threads=5) == [], table(found)
