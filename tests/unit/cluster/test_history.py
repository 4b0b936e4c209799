"""What the live page remembers: points, the headline's speed-up, events, replicas."""

import math
from typing import Any

import pytest

from cluster.counts import Counts, DeltaTracker, TargetReport, WorkloadCounts
from cluster.history import KV_CACHE, MAX_EVENTS, MAX_POINTS, RECENT_POINTS, ServiceHistory, decoded, quantile, speed_up
from tests.support.counted import counts_of
from tests.support.scaling_cases import LATENCY
from tests.support.step_tables import latency_of

TTFT = "peagle_time_to_first_token_seconds_bucket"


class Service:
    """Targets that decode at K = 3 with two accepted drafts a step, observed once a second."""

    def __init__(self, *names: str) -> None:
        self.history, self.now_s, self._tracker = ServiceHistory(lambda: 1000.0 + self.now_s), 0.0, DeltaTracker()
        self.steps, self.names, self.num_ready = dict.fromkeys(names, 0), list(names), len(names)

    def report(self, name: str) -> TargetReport:
        steps = self.steps[name]
        workloads = {"code": WorkloadCounts(num_started=2, counts=counts_of([(3, 2)] * steps))}
        about = {"uptime_s": self.now_s, "num_queued": 1, "node": "host"}
        return TargetReport(name, workloads=workloads, num_output_tokens=3 * steps, **about)

    def run(self, seconds: int, steps: int = 10, load: float = 2.0) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for name in self.names:
                self.steps[name] = self.steps.get(name, 0) + steps
            reports = [self.report(name) for name in self.names]
            self.history.observe_replicas("target", reports, self.num_ready, self.now_s)
            if reports:
                self.history.observe(reports, self._tracker.update(reports), load, LATENCY, self.now_s)

    def point(self, samples: Any = (), **ks: int) -> dict[str, Any]:
        self.history.add_point(samples, ks, self.now_s)
        return self.document()

    def document(self) -> dict[str, Any]:
        return self.history.document(self.now_s)

    def events(self, kind: str) -> list[str]:
        return [event["text"] for event in self.document()["events"] if event["kind"] == kind]


def test_the_speed_up_is_that_of_the_step_latency_model_at_the_load() -> None:
    service = Service("a", "b")
    service.run(16)
    document = service.point()
    (rate,) = document["history"]["tokens_per_s"]
    assert rate == pytest.approx(2 * 30, rel=0.1)
    drafted_s, undrafted_s = LATENCY.seconds(2, 8), LATENCY.seconds(2, 2)
    assert document["speed"]["speed_up"] == pytest.approx(3 * undrafted_s / drafted_s, rel=1e-3)
    assert document["speed"]["acceptance_length"] == 3.0
    assert document["history"]["num_queued"] == [2.0]


def test_steps_without_drafts_bring_nothing_and_the_pass_is_paid_where_it_runs() -> None:
    assert speed_up(decoded(100, Counts(), 4, LATENCY)) == 1.0
    free = latency_of(0.02, pass_s=0.02, num_steps=200)
    # One request: every second step verifies drafts, and takes twice the time.
    assert speed_up(decoded(100, counts_of([(1, 0)] * 50), 1, free)) == pytest.approx(2 / 3, rel=0.05)
    # Of many requests some have drafts in every step.
    assert speed_up(decoded(100, counts_of([(1, 0)] * 50), 64, free)) == pytest.approx(1 / 2, rel=0.05)


def test_the_headline_is_about_the_last_minutes_else_about_the_hour() -> None:
    service = Service("a")
    service.run(16)
    service.point()
    for _ in range(2 * RECENT_POINTS):
        service.run(1, steps=0)
        service.point()
    speed = service.document()["speed"]
    assert speed["speed_up"] > 1
    assert speed["minutes"] > 5
    service.run(1, steps=1)
    assert service.document()["speed"]["tokens"] == 3


def test_a_point_without_any_report_is_a_gap_and_memory_is_bounded() -> None:
    service = Service("a")
    service.run(3)
    service.point()
    for number in range(MAX_POINTS + 5):
        document = service.point(code=number % 2)
    assert len(document["history"]["time_s"]) == MAX_POINTS
    assert document["history"]["tokens_per_s"][-1] is None
    service.history.add_event("router", "started")
    assert len(service.events("k")) == MAX_EVENTS
    assert service.events("router") == ["started"], "frequent events push out none of another kind"


def test_latencies_are_medians_of_a_point_and_of_the_newest_streams_of_a_workload() -> None:
    def samples(below_a_tenth: int, below_one: int, total: int, workload: str = "code") -> Any:
        counts = {"0.1": below_a_tenth, "1.0": below_one, "+Inf": total}
        return [(TTFT, {"workload": workload, "replica": "a", "le": end}, count) for end, count in counts.items()]

    service, failed = Service("a"), {"workload": "", "status": "500", "replica": "a"}
    service.run(2)
    assert service.point(samples(10, 10, 10))["history"]["ttft_s"] == [None], "counted before the router started"
    document = service.point([*samples(10, 20, 20), ("peagle_answers_total", failed, 2)])
    assert document["history"]["ttft_s"][-1] == pytest.approx(0.55)
    assert document["history"]["num_failed"][-1] == 2
    service.point()
    document = service.point([*samples(10, 20, 20), ("peagle_answers_total", failed, 2)])
    assert document["history"]["num_failed"][-2:] == [0, 0], "a replica that was missing in a point is not counted anew"
    assert service.history.times("code")["ttft_s"] is not None
    assert service.point(samples(3, 3, 3))["history"]["ttft_s"][-1] == pytest.approx(0.05), "counted anew"
    assert 0.05 < service.history.times("code")["ttft_s"] < 0.2
    assert service.history.times("chat") == {"ttft_s": None, "tpot_s": None}
    service.point(samples(1, 1, 1, "chat"))
    assert service.history.times("code")["ttft_s"] is None, "a workload that no front end counts is forgotten"
    assert quantile({0.1: 0, math.inf: 3}, 0.5) == 0.1
    assert quantile({}, 0.5) is None


def test_a_replica_that_is_silent_keeps_its_row_and_one_that_is_gone_makes_an_event() -> None:
    service = Service("a", "b")
    service.run(2)
    service.point([(KV_CACHE, {"replica": "a"}, 0.25)])
    row = service.document()["replicas"][0]
    assert (row["node"], row["kv_cache"], row["num_running"], row["silent_s"]) == ("host", 0.25, 2, 0)
    service.names = ["a"]
    service.run(10)
    assert [row["silent_s"] for row in service.document()["replicas"]] == [0, 10], "it runs, and does not report"
    service.num_ready = 1
    service.run(1)
    assert service.events("replica")[0] == "target b is gone (1 running)"
    service.names, service.num_ready = ["a", "c"], 2
    service.run(1)
    assert service.events("replica")[0] == "target c runs (2 running)"
    assert [row["replica"] for row in service.document()["replicas"]] == ["a", "c"]


def test_a_change_of_k_is_an_event_with_all_workloads_that_changed() -> None:
    service = Service("a")
    service.point(code=5, chat=3)
    service.point(code=4, chat=2, new=7)
    service.point(code=4, chat=2, new=7)
    assert service.events("k") == ["K of chat 3 to 2, code 5 to 4"]
