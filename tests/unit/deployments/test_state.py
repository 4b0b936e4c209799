"""What the router has learned outlives it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.counts import Counts
from cluster.heads import HeadManager
from cluster.k_policy import KPolicy
from cluster.request import KRules
from cluster.spending import DaySpending, SpendingTracker
from deployments.state import StateStore
from tests.support.autoscaling_harness import MemoryChannel
from tests.support.disk import full_disk
from tests.unit.cluster.test_heads import swapped
from tests.unit.deployments.test_telemetry import GOOD, report


def k_policy_with_counts() -> KPolicy:
    k_policy = KPolicy(KRules(3, 3, 3))
    k_policy.observe([report("a", code=sum([GOOD] * 50, Counts()))], 0.0)
    return k_policy


def new_store(path: Path | None = None, channel: Any = None) -> StateStore:
    """That of a router which has just started."""
    return StateStore(path and str(path), KPolicy(KRules(3, 3, 3)), HeadManager(0, 0.1), channel)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the store has logged. Others may log at the same time, such as asyncio of the tasks of tests before."""
    return [record.getMessage() for record in caplog.records if record.name == "deployments.state"]


@pytest.mark.parametrize("in_file", [True, False])
def test_state_outlives_the_router(in_file: bool, tmp_path: Path) -> None:
    path, channel = tmp_path / "new" / "state.json" if in_file else None, None if in_file else MemoryChannel()
    k_policy, manager = k_policy_with_counts(), swapped(0, 0.5, 120).manager
    store = StateStore(path and str(path), k_policy, manager, channel)
    store.spending = SpendingTracker(DaySpending(3, {"web": 5}), {"t1": {"web": 5}})
    store.write(store.document())
    later = new_store(path, channel)
    later.restore()
    assert later.document() == store.document()


@pytest.mark.parametrize("document", [[], {}, {"format": 3, "tracker": {}, "acceptance": {}}, {"reports": 7}])
def test_a_state_of_another_version_is_refused_in_one_line_and_its_file_put_aside(
    document: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, channel = tmp_path / "state.json", MemoryChannel()
    path.write_text(json.dumps(document) if document else "{")
    channel.put("learned", document)
    for store in (new_store(path), new_store(channel=channel)):
        fresh = store.document()
        store.restore()
        assert store.document() == fresh
    of_file, of_cluster = said(caplog)
    assert "num_draft_tokens.state" in of_file
    assert (tmp_path / "state.unusable").exists()
    assert "cannot be used" in of_cluster
    assert "\n" not in of_file + of_cluster


def test_a_cluster_that_does_not_answer_holds_up_no_router(caplog: pytest.LogCaptureFixture) -> None:
    channel = MemoryChannel()
    store, channel.fails = new_store(channel=channel), True
    store.restore()
    for _ in range(3):
        store.write({})
    channel.fails = False
    store.write({})
    unread, failed, mended = said(caplog)
    assert "cannot be used (no answer)" in unread
    assert "cannot be written (no answer)" in failed
    assert "is written again" in mended


async def test_a_head_that_was_rolled_back_is_saved_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    store = new_store(path)
    store.save_soon()
    await asyncio.sleep(0.05)
    assert not path.exists(), "not due yet"
    store.save_soon(is_urgent=True)
    while not path.exists():
        await asyncio.sleep(0.01)


def test_on_a_full_disk_the_last_state_stays_whole_and_saving_goes_on_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    store = new_store(path)
    store.write(store.document())
    before = path.read_text()
    with full_disk(100):
        for _ in range(3):
            store.write(store.document())
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]
    store.write({})
    assert path.read_text() != before
    failed, mended = said(caplog)
    assert f"{path} cannot be written" in failed
    assert "the service goes on" in failed
    assert "is written again" in mended
