"""What is seen of the service: Prometheus families, /drafting, the store that keeps what was learned."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from cluster.counts import Counts, TargetReport, WorkloadCounts
from cluster.heads import DrafterReport, HeadManager, HeadRef
from cluster.k_policy import KPolicy
from cluster.request import DepthPolicy
from cluster.spending import DaySpending, SpendingTracker
from deployments.telemetry import (
    StateStore,
    drafter_metrics,
    drafting_document,
    head_metrics,
    labelled,
    live_heads,
    prometheus_text,
    target_metrics,
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
    return TargetReport(replica, head, {}, counted, links=tuple(links), num_output_tokens=12)


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
        "drafter": drafter, "state": state, "path": "tcp", "problem": "", "average_pass_s": None, "counters": counters
    }  # fmt: skip


def test_the_document_has_each_head_with_its_acceptance() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0})]), report("new", "t2")]
    by_head = {"a": GOOD + BAD, "old": BAD, "new": Counts()}
    document = drafting_document(reports, by_head, [drafter("r1", "a")])
    heads = {row["head"]: row for row in document["heads"]}
    assert heads["a"]["survival"] == [0.6667, 0.3333, 0.3333]
    assert heads["a"]["acceptance_length"] == round(1 + 4 / 3, 4)
    assert [heads[head]["is_live"] for head in ("a", "new", "old")] == [True, True, False]
    assert heads["new"]["acceptance_length"] is None
    assert document["drafters"][0]["heads"] == [{"index": 0, "name": "head-a", "head": "a"}]
    assert document["links"][0]["target"] == "t1"
    k_policy = KPolicy(DepthPolicy(3, 3, 3))
    shown = as_text({"model": "m", **k_policy.document(0.0), **document}).splitlines()
    assert "head a (live): AL 2.33, 3 steps" in shown
    assert "head new (live): nothing drafted yet, 0 steps" in shown
    assert "drafter h:1: a; links: up by tcp" in shown
    assert live_heads(reports) == ["a", "new"]


def test_metrics_have_workloads_heads_links_and_refusals() -> None:
    links = [link("h:1", "up", {"steps": 7.0}), link("h:2", "late", {})]
    reports = [report("a", "t1", links, code=GOOD)]
    families = [
        *target_metrics(reports, 2, "m"),
        *head_metrics({"a": GOOD}),
        *drafter_metrics([drafter("r1", "a", refused="no such head")], reports),
    ]
    found = samples(prometheus_text(families))
    assert found["peagle_target_replicas",] == 2
    assert found["peagle_running_requests", "m", "t1"] == 0
    assert found["peagle_requests_total", "m", "finished", "t1", "code"] == 2
    assert found["peagle_output_tokens_total", "m", "t1", "code"] == 10
    assert found["peagle_generated_tokens_total", "m", "t1"] == 12
    assert found["peagle_verification_steps_total", "m", "t1", "code"] == 2
    assert found["peagle_draft_tokens_total", "3", "m", "t1", "code"] == 2
    assert found["peagle_reached_draft_tokens_total", "3", "m", "t1", "code"] == 1
    assert found["peagle_accepted_tokens_total", "3", "m", "t1", "code"] == 1
    assert found["peagle_head_accepted_tokens_total", "1", "a"] == 2
    assert found["peagle_drafter_head", "a", "0", "r1"] == 1
    assert found["peagle_drafter_head_refused", "r1"] == 1
    assert found["peagle_drafter_passes_total", "r1"] == 5
    assert found["peagle_link_up", "h:2", "t1"] == 0
    assert found["peagle_link_steps_total", "h:1", "t1"] == 7


def test_the_metrics_of_several_replicas_are_one_family_with_a_label_each() -> None:
    def seen(count: int) -> list[Any]:
        registry = CollectorRegistry(auto_describe=False)
        Counter("peagle_answers", "Answers.", ["status"], registry=registry).labels("200").inc(count)
        return list(registry.collect())

    text = prometheus_text([*labelled(seen(2), replica="i1"), *labelled(seen(3), replica="i2")])
    assert text.count(b"# TYPE peagle_answers_total counter") == 1
    found = samples(text)
    assert (found["peagle_answers_total", "i1", "200"], found["peagle_answers_total", "i2", "200"]) == (2, 3)


# ---- the store


def k_policy_with_counts() -> KPolicy:
    k_policy = KPolicy(DepthPolicy(3, 3, 3))
    k_policy.observe([report("a", code=sum([GOOD] * 50, Counts()))], 0.0)
    return k_policy


async def save(store: StateStore, *state: Any) -> None:
    store.save_soon(*state, is_urgent=True)
    await store._task


def test_without_a_file_state_outlives_the_router_in_the_cluster() -> None:
    """What was learned, and which heads were put in others' place."""
    channel, k_policy, manager = MemoryChannel(), k_policy_with_counts(), swapped(0, 0.5, 120).manager
    spending = SpendingTracker(DaySpending(3, {"web": 5}), {"t1": {"web": 5}})
    asyncio.run(save(StateStore(None, channel), k_policy, manager, spending))
    second, found = KPolicy(DepthPolicy(3, 3, 3)), HeadManager({}, 0, 0.1)
    assert StateStore(None, channel).restore(second, found) == spending
    assert second.posteriors.rates("code") == k_policy.posteriors.rates("code")
    assert found.desired == manager.desired


@pytest.mark.parametrize(
    "document", [[], {}, {"format": "other"}, k_policy_with_counts().snapshot() | {"heads": {}}, {"format": None}]
)
def test_a_state_of_another_version_in_the_cluster_is_refused_in_one_line(
    document: Any, caplog: pytest.LogCaptureFixture
) -> None:
    channel = MemoryChannel()
    channel.put("learned", document)
    StateStore(None, channel).restore(KPolicy(DepthPolicy(3, 3, 3)), HeadManager({}, 0, 0.1))
    (record,) = caplog.records
    assert "cannot be used" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_cluster_that_does_not_answer_holds_up_no_router(caplog: pytest.LogCaptureFixture) -> None:
    channel = MemoryChannel()
    store, channel.fails = StateStore(None, channel), True
    store.restore(KPolicy(DepthPolicy(3, 3, 3)))
    for _ in range(3):
        store.write({"format": 1})
    channel.fails = False
    store.write({"format": 1})
    unread, failed, mended = [record.getMessage() for record in caplog.records]
    assert "cannot be used (no answer)" in unread
    assert "cannot be written (no answer)" in failed
    assert "is written again" in mended


def test_a_head_that_was_rolled_back_is_saved_at_once_and_found_again(tmp_path: Path) -> None:
    path, k_policy, manager = tmp_path / "state.json", k_policy_with_counts(), swapped(0, 0.5, 120).manager
    found = HeadManager({}, 0, 0.1)

    async def run() -> None:
        file = StateStore(str(path))
        file.save_soon(k_policy, manager)
        await asyncio.sleep(0.05)
        assert not path.exists(), "not due yet"
        file.save_soon(k_policy, manager, is_urgent=True)
        while not path.exists():
            await asyncio.sleep(0.01)
        file.restore(k_policy, found)

    asyncio.run(run())
    assert found.desired == manager.desired != HeadManager({}, 0, 0.1).desired
    StateStore(str(path)).write(k_policy.snapshot())  # of a service without remote drafters
    StateStore(str(path)).restore(k_policy, found)
    assert found.desired == manager.desired


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": "other"})])
def test_a_damaged_file_is_put_aside(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    found = KPolicy(DepthPolicy(3, 3, 3))
    with caplog.at_level(logging.WARNING):
        StateStore(str(path)).restore(found)
    assert found.posteriors.workloads() == ()
    assert (tmp_path / "state.unusable").read_text() == text
    assert "depth.state" in caplog.text


def test_on_a_full_disk_the_last_state_stays_whole_and_saving_goes_on_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.json"
    file, k_policy = StateStore(str(path)), k_policy_with_counts()
    file.write(k_policy.snapshot())
    before = path.read_text()
    k_policy.observe([report("a", code=sum([GOOD] * 90, Counts()))], 1.0)
    with full_disk(100):
        for _ in range(3):
            file.write(k_policy.snapshot())
    assert path.read_text() == before
    assert [found.name for found in tmp_path.iterdir()] == ["state.json"]
    file.write(k_policy.snapshot())
    assert path.read_text() != before
    failed, mended = [record.getMessage() for record in caplog.records]
    assert f"{path} cannot be written" in failed
    assert "the service goes on" in failed
    assert "is written again" in mended
