"""What is seen of drafting: steps by head over a swap, who the drafters are, and what /drafting and /metrics say."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from cluster.control import DepthControl
from cluster.counts import Counts
from cluster.request import DepthPolicy
from cluster.view import table
from deployments.links import MAX_MISSED_POLLS, Roster, agreed_heads, drafters_of, link_reports
from deployments.telemetry import (
    MAX_NUM_HEADS,
    DrafterReport,
    HeadCounts,
    LinkReport,
    LiveHead,
    drafter_metrics,
    drafting_document,
    head_metrics,
)

GOOD = Counts.from_steps([(3, 3), (3, 1)])
BAD = Counts.from_steps([(3, 0)])


def drafter(replica: str, *digests: str, address: str = "h:1", refused: str = "") -> DrafterReport:
    heads = tuple(LiveHead(index, f"head-{digest}", digest) for index, digest in enumerate(digests))
    return DrafterReport(replica, address, heads, refused, {"passes": 5.0}, f"of {address}")


def test_steps_count_for_the_head_that_was_live() -> None:
    counts = HeadCounts()
    counts.add({"code": GOOD, "chat": GOOD}, {"code": "c"}, "a")
    counts.add({"code": GOOD, "chat": GOOD}, {"code": "c"}, "a")
    assert counts.by_head() == {"a": GOOD, "c": GOOD}
    counts.add({"code": GOOD, "chat": GOOD + BAD}, {"code": "c"}, "b")
    assert counts.by_head() == {"a": GOOD, "c": GOOD, "b": BAD}


def test_a_head_that_was_only_verified_less_deep_than_the_one_before_has_a_document() -> None:
    counts, shallow = HeadCounts(), Counts.from_steps([(1, 1)])
    counts.add({"code": GOOD}, {}, "deep")
    counts.add({"code": GOOD + shallow}, {}, "shallow")
    assert counts.by_head() == {"deep": GOOD, "shallow": shallow}
    document = drafting_document([counts.by_head()], ["shallow"], [], {})
    assert [one["survival"] for one in document["heads"]] == [[1.0, 0.5, 0.5], [1.0]]


def test_counters_that_began_anew_count_from_zero() -> None:
    counts = HeadCounts()
    counts.add({"code": GOOD}, {}, "a")
    counts.add({}, {}, "a")
    counts.add({"code": BAD}, {}, "a")
    assert counts.by_head() == {"a": GOOD + BAD}


def test_only_the_latest_heads_are_kept() -> None:
    counts = HeadCounts()
    total = Counts()
    for index in range(MAX_NUM_HEADS + 3):
        total += BAD
        counts.add({"code": total}, {}, f"head-{index}")
    assert next(iter(counts.by_head())) == "head-3"
    assert len(counts.by_head()) == MAX_NUM_HEADS


def test_the_engine_is_told_addresses_and_digests() -> None:
    reports = [drafter("r2", "a", "b", address="h:2"), drafter("r1", "a", "b", address="h:1")]
    told = drafters_of(reports)
    assert [one["address"] for one in told] == ["h:1", "h:2"]
    assert told[0]["heads"] == {0: "a", 1: "b"}
    assert told[0]["key"] == "of h:1"
    assert drafters_of(reversed(reports)) == told


def test_a_drafter_is_dropped_when_it_is_missed_for_some_time() -> None:
    roster, stays, goes = Roster(), drafter("r1", "a", address="h:1"), drafter("r2", "a", address="h:2")
    assert roster.update([stays, goes]) == [stays, goes]
    swapped = drafter("r1", "b", address="h:1")
    for _ in range(MAX_MISSED_POLLS):
        assert roster.update([swapped]) == [swapped, goes]
    assert roster.update([swapped]) == [swapped]
    for _ in range(MAX_MISSED_POLLS):
        assert roster.update([]) == [swapped]
    assert roster.update([swapped]) == [swapped]
    for _ in range(MAX_MISSED_POLLS):
        assert roster.update([]) == [swapped]
    assert roster.update([]) == []


def test_heads_change_when_most_drafters_have_changed() -> None:
    old, new = drafter("r1", "a"), drafter("r2", "b")
    assert agreed_heads([]) == ()
    assert agreed_heads([old]) == ("a",)
    assert agreed_heads([old, new]) == ()
    assert agreed_heads([old, new, new]) == ("b",)


def test_links_are_those_of_the_worker_that_sends() -> None:
    link = {
        "address": "h:1", "state": "late", "path": "tcp", "problem": "late", "average_pass_s": 0.1, "num_steps": 7,
        "num_requests": 2, "sum_wait_s": 0.5, "heads": {"0": "a"},
    }  # fmt: skip
    found = link_reports([{}, {"counts": {}, "pool": {"num_up": 0, "links": [link]}}])
    assert found == (LinkReport("h:1", "late", "tcp", "late", 0.1, {"steps": 7.0, "wait_s": 0.5}),)
    assert link_reports([{}, {}]) == ()


def test_the_document_has_each_head_with_its_acceptance() -> None:
    links = {"target-1": [LinkReport("h:1", "up", "tcp", counters={"steps": 7.0})]}
    document = drafting_document([{"a": GOOD}, {"a": BAD, "old": BAD}], ["a", "new"], [drafter("r1", "a")], links)
    by_head = {one["head"]: one for one in document["heads"]}
    assert by_head["a"]["survival"] == [0.6667, 0.3333, 0.3333]
    assert by_head["a"]["acceptance_length"] == round(1 + 4 / 3, 4)
    assert [by_head[head]["is_live"] for head in ("a", "new", "old")] == [True, True, False]
    assert by_head["new"]["acceptance_length"] is None
    assert document["drafters"][0]["heads"] == [{"index": 0, "name": "head-a", "head": "a"}]
    assert document["links"][0]["target"] == "target-1"
    shown = table({"model": "m", **DepthControl(DepthPolicy(3, 3, 3)).document(0.0), **document}).splitlines()
    assert "head a (live): AL 2.33, 3 steps" in shown
    assert "head new (live): nothing drafted yet, 0 steps" in shown
    assert "drafter h:1: a; links: up by tcp" in shown


def test_metrics_have_heads_links_and_refusals() -> None:
    class Fixed:
        def collect(self) -> list[Metric]:
            drafters = [drafter("r1", "a", refused="no such head")]
            links = {"t1": [LinkReport("h:1", "up", counters={"steps": 7.0}), LinkReport("h:2", "late")]}
            return [*head_metrics({"t1": {"a": GOOD}}, "m"), *drafter_metrics(drafters, links)]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed())
    lines = generate_latest(registry).decode().splitlines()
    for line in (
        'peagle_head_accepted_tokens_total{depth="1",head="a",model="m",replica="t1"} 2.0',
        'peagle_drafter_head{head="a",index="0",replica="r1"} 1.0',
        'peagle_drafter_head_refused{replica="r1"} 1.0',
        'peagle_drafter_passes_total{replica="r1"} 5.0',
        'peagle_link_up{drafter="h:2",replica="t1"} 0.0',
        'peagle_link_steps_total{drafter="h:1",replica="t1"} 7.0',
    ):
        assert line in lines, lines
