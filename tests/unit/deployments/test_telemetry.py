"""What is seen of the service: Prometheus families, /drafting, the store that keeps what was learned."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.counts import CounterDeltas, Counts, TargetReport, WorkloadCounts
from cluster.heads import DrafterReport, HeadManager, HeadRef
from cluster.k_policy import KPolicy
from cluster.request import KRules
from cluster.spending import DaySpending, SpendingTracker
from deployments.metrics import Families
from deployments.telemetry import (
    StateStore,
    add_change_metrics,
    add_drafter_metrics,
    add_head_counts,
    add_head_metrics,
    drafting_document,
    prometheus_text,
)
from deployments.view import as_text
from tests.support.autoscaling_harness import MemoryChannel
from tests.support.counted import counts_of
from tests.support.disk import full_disk
from tests.unit.cluster.test_heads import swapped

GOOD = counts_of([(3, 3), (3, 1)])
BAD = counts_of([(3, 0)])


def report(head: str = "a", replica: str = "t1", links: Any = (), **workloads: Counts) -> TargetReport:
    counted = {
        name: WorkloadCounts(counts.num_steps, counts.num_steps, 0, 10, 20, counts)
        for name, counts in workloads.items()
    }
    return TargetReport(replica, head, head, counted, links=tuple(links), num_output_tokens=12)


def drafter(replica: str, *digests: str, refused: str = "") -> DrafterReport:
    heads = tuple(HeadRef(f"head-{digest}", digest) for digest in digests)
    return DrafterReport(replica, "h:1", heads, refused, {"passes": 5.0})


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and the values of the labels, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def link(drafter: str, state: str, counters: dict[str, float]) -> dict[str, Any]:
    return {
        "drafter": drafter, "state": state, "path": "tcp", "problem": "", "counters": counters
    }  # fmt: skip


def test_the_document_has_each_head_with_its_acceptance() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0})]), report("new", "t2")]
    by_head = dict[str, Counts]()
    for counted in ({"a": {"code": GOOD}}, {}, {"old": {"code": BAD}, "a": {"code": BAD}}):
        add_head_counts(by_head, CounterDeltas(by_head=counted))
    document = drafting_document(reports, by_head, [drafter("r1", "a")])
    heads = {row["head"]: row for row in document["heads"]}
    assert heads["a"]["survival"] == [0.6667, 0.3333, 0.3333]
    assert heads["a"]["acceptance_length"] == round(1 + 4 / 3, 4)
    assert [heads[head]["is_live"] for head in ("a", "new", "old")] == [True, True, False]
    assert heads["new"]["acceptance_length"] is None
    assert document["drafters"][0]["heads"] == [{"index": 0, "name": "head-a", "head": "a"}]
    assert document["links"][0]["target"] == "t1"
    k_policy = KPolicy(KRules(3, 3, 3))
    shown = as_text({"model": "m", **k_policy.document(0.0), **document}).splitlines()
    assert "head a (live): AL 2.33, 3 steps" in shown
    assert "head new (live): nothing drafted yet, 0 steps" in shown
    assert "drafter h:1: a; links: up by tcp" in shown


def test_a_service_without_a_drafter_is_shown_without_policy_and_step_times() -> None:
    shown = as_text({"model": "m", **KPolicy(KRules(0, 0, 0)).document(0.0)}).splitlines()
    assert shown[-1] == "m: no drafter"


def test_metrics_have_heads_drafters_and_links() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0}), link("h:2", "late", {})])]
    changes = swapped(0, 0.1, 120).manager.document()
    drafters = [drafter("r1", "a", refused="no such head")]
    families = Families()
    add_head_metrics(families, {"a": GOOD})
    add_change_metrics(families, changes)
    add_drafter_metrics(families, drafters, reports)
    found = samples(prometheus_text(families.values()))
    assert found["peagle_head_gain", "a", "low", "b"] == pytest.approx(changes[0]["low"])
    assert found["peagle_head_accepted_tokens_total", "1", "a"] == 2
    assert found["peagle_drafter_head", "a", "0", "r1"] == 1
    assert found["peagle_drafter_head_refused", "r1"] == 1
    assert found["peagle_drafter_passes_total", "r1"] == 5
    assert found["peagle_link_up", "h:2", "t1"] == 0
    assert found["peagle_link_steps_total", "h:1", "t1"] == 7


# ---- the store


def k_policy_with_counts() -> KPolicy:
    k_policy = KPolicy(KRules(3, 3, 3))
    k_policy.observe([report("a", code=sum([GOOD] * 50, Counts()))], 0.0)
    return k_policy


def new_store(path: Path | None = None, channel: Any = None, k_policy: KPolicy | None = None) -> StateStore:
    """That of a router which has just started."""
    policy = k_policy or KPolicy(KRules(3, 3, 3))
    return StateStore(path and str(path), policy, HeadManager({}, 0, 0.1), channel)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the store has logged. Others may log at the same time, such as asyncio of the tasks of tests before."""
    return [record.getMessage() for record in caplog.records if record.name == "deployments.telemetry"]


@pytest.mark.parametrize("in_file", [True, False])
def test_state_outlives_the_router(in_file: bool, tmp_path: Path) -> None:
    """What was learned, which heads were put in others' place, and what callers have used."""
    path, channel = tmp_path / "new" / "state.json" if in_file else None, None if in_file else MemoryChannel()
    k_policy, manager = k_policy_with_counts(), swapped(0, 0.5, 120).manager
    store = StateStore(path and str(path), k_policy, manager, channel)
    store.spending = SpendingTracker(DaySpending(3, {"web": 5}), {"t1": {"web": 5}})
    store.write(store.document())
    later = new_store(path, channel)
    later.restore()
    assert later.document() == store.document()
    if path is not None:
        assert [found.name for found in path.parent.iterdir()] == ["state.json"]


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
    assert "depth.state" in of_file
    assert (tmp_path / "state.unusable").exists()
    assert "cannot be used" in of_cluster
    assert "\n" not in of_cluster


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
    store = new_store(path, k_policy=k_policy_with_counts())
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
    store = new_store(path, k_policy=k_policy_with_counts())
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
