"""What is seen of the service: Prometheus families and /drafting."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.counts import CounterDeltas, Counts, TargetReport, WorkloadCounts
from cluster.heads import DrafterReport, HeadRef
from cluster.k_policy import KPolicy
from cluster.request import KRules
from deployments import telemetry
from deployments.metrics import Families
from deployments.view import as_text
from tests.support.counted import counts_of
from tests.unit.cluster.test_heads import swapped

GOOD = counts_of([(3, 3), (3, 1)])
BAD = counts_of([(3, 0)])


def report(head: str = "a", replica: str = "t1", links: Any = (), **workloads: Counts) -> TargetReport:
    counted = {name: WorkloadCounts(1, 1, 0, 10, 20, counts) for name, counts in workloads.items()}
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
    return {"drafter": drafter, "state": state, "path": "tcp", "problem": "", "counters": counters}


def test_the_document_has_each_head_with_its_acceptance() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0})]), report("new", "t2")]
    by_head = dict[str, Counts]()
    for counted in ({"a": {"code": GOOD}}, {}, {"old": {"code": BAD}, "a": {"code": BAD}}):
        telemetry.add_head_counts(by_head, CounterDeltas(by_head=counted))
    document = telemetry.drafting_document(reports, by_head, [drafter("r1", "a")])
    heads = {row["head"]: row for row in document["heads"]}
    assert heads["a"]["survival"] == [0.6667, 0.3333, 0.3333]
    assert heads["a"]["acceptance_length"] == round(1 + 4 / 3, 4)
    assert [heads[head]["is_live"] for head in ("a", "new", "old")] == [True, True, False]
    assert heads["new"]["acceptance_length"] is None
    assert document["drafters"][0]["heads"] == [{"index": 0, "name": "head-a", "head": "a"}]
    assert document["links"][0]["target"] == "t1"
    k_policy = KPolicy(KRules(3, 3, 3))
    shown = as_text({"model": "m", **k_policy.document(0.0), **document}).splitlines()
    assert "head a (drafts): AL 2.33, 3 steps" in shown
    assert "head new (drafts): nothing drafted yet, 0 steps" in shown
    assert "drafter h:1: a; links: up by tcp" in shown
    without_drafter = as_text({"model": "m", **KPolicy(KRules(0, 0, 0)).document(0.0)}).splitlines()
    assert without_drafter[-1] == "m: no drafter"


def test_metrics_have_heads_drafters_and_links() -> None:
    reports = [report("a", "t1", [link("h:1", "up", {"steps": 7.0}), link("h:2", "late", {})])]
    changes = swapped(0, 0.1, 120).manager.document()
    drafters = [drafter("r1", "a", refused="no such head")]
    families = Families()
    telemetry.add_head_metrics(families, {"a": GOOD})
    telemetry.add_change_metrics(families, changes)
    telemetry.add_drafter_metrics(families, drafters, reports)
    found = samples(telemetry.prometheus_text(families.values()))
    assert found["peagle_head_gain", "a", "low", "b"] == pytest.approx(changes[0]["low"])
    assert found["peagle_head_accepted_tokens_total", "1", "a"] == 2
    assert found["peagle_drafter_head", "a", "0", "r1"] == 1
    assert found["peagle_drafter_head_refused", "r1"] == 1
    assert found["peagle_drafter_passes_total", "r1"] == 5
    assert found["peagle_link_up", "h:2", "t1"] == 0
    assert found["peagle_link_steps_total", "h:1", "t1"] == 7
