"""The policies that Serve calls, with Serve's own contexts, configs and wrapper: good data, and all kinds of bad."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from benchmarks import scaling_replay
from cluster import view
from deployments.autoscaling import (
    ASKED,
    DECISION,
    DRAFTERS,
    SILENT_S,
    DecisionLog,
    DrafterAutoscaler,
    Exchange,
    TargetAutoscaler,
    readings,
    scaling_metrics,
)
from tests.autoscaling_harness import DRAFTER, TARGET, Controller, DictBoard, arguments, context
from tests.scaling_cases import BAD, GOOD, FakeReplica, settings


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


def test_serve_itself_makes_and_calls_the_policies() -> None:
    """The module pickled by value, its class made from JSON, behind Serve's delays and bounds."""
    made = AutoscalingPolicy(policy_function="deployments.autoscaling:TargetAutoscaler", policy_kwargs=arguments())
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(made))(context(TARGET, [ReplicaID("a", TARGET)], 1))
    assert wanted == 1
    made = AutoscalingPolicy(policy_function="deployments.autoscaling:DrafterAutoscaler")
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(made))(context(DRAFTER, [], 2))
    assert wanted == 2


def test_acceptance_that_collapses_wants_replicas_before_queue_length_would(controller: Controller) -> None:
    controller.wanted, controller.replicas = 3, [FakeReplica(name) for name in "abc"]
    before = controller.serve(300, 6.0, GOOD)
    assert (before, controller.decision()["source"]) == (3, "acceptance")
    after = controller.serve(120, 6.0, BAD)
    assert after > before
    shown = controller.decision()
    assert shown["acceptance_length"] < 2
    assert shown["ongoing_requests"] / before < settings().target_ongoing_requests
    assert "replicas" in shown["reason"]


def test_every_decision_is_shown_and_can_be_replayed(controller: Controller) -> None:
    controller.serve(120, 3.0, GOOD)
    shown = controller.decision()
    again = list(scaling_replay.replay(controller.log.read_text().splitlines()))
    assert len(again) == shown["num_decisions"] == 12
    assert all(not one.differs for one in again)
    assert again[-1].again.reason == shown["reason"]
    samples = {(one.name, *one.labels.values()): one.value for of in scaling_metrics(shown) for one in of.samples}
    assert samples["peagle_autoscaling_replicas", "target", "wanted"] == shown["target"]["num_wanted"]
    assert samples["peagle_autoscaling_demand_tokens_per_second",] == shown["demand_tokens_per_s"]
    assert samples["peagle_autoscaling_source", "acceptance"] == 1
    document = {"max_draft_tokens": 3, "workloads": [], "model": "m", "policy": "fixed", "step_times": ""}
    text = view.table({**document, "autoscaling": shown})
    assert "target 1 running" in text
    assert shown["reason"] in text


def test_a_full_log_goes_on_in_a_file_that_begins_with_the_settings(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", max_bytes=100)
    log.write(['{"format": 1}', "x" * 60])
    log.write(["y" * 60, "z"])
    assert (tmp_path / "log").read_text().splitlines() == ['{"format": 1}', "y" * 60, "z"]
    assert (tmp_path / "log.1").read_text().splitlines() == ['{"format": 1}', "x" * 60]


def test_without_data_the_queue_decides_and_nothing_shrinks(controller: Controller) -> None:
    controller.replicas, controller.wanted = [FakeReplica("a"), FakeReplica("b")], 2
    assert controller.tick(total_num_requests=0.0) == 2
    controller.now_s += 10
    assert controller.tick(total_num_requests=100.0) == 7
    assert controller.decision()["source"] == "queue_length"


def test_silence_after_good_data_does_not_shrink(controller: Controller) -> None:
    """Until readings count as stale a silent replica looks like one without arrivals; Serve's downscale_delay_s is
    longer than that."""
    controller.serve(300, 3.0, GOOD)
    controller.replicas.append(FakeReplica("b"))
    controller.wanted = 2
    controller.serve(20, 6.0, GOOD)
    given = []
    for _ in range(10):  # the same readings again and again
        controller.now_s += 10
        given.append(controller.tick(total_num_requests=1.0))
    assert settings().stale_after_s < settings().downscale_delay_s
    assert given[3:] == [2] * 7
    assert "never down" in controller.decision()["reason"]


def test_a_restart_and_nonsense_are_named_and_cost_nothing(controller: Controller) -> None:
    controller.replicas = [FakeReplica(name) for name in "abc"]
    controller.wanted = 3
    before = controller.serve(300, 3.0, GOOD)
    controller.replicas[0] = FakeReplica("a")  # counters begin at zero
    assert controller.serve(10, 3.0, GOOD) <= max(before, 3)
    assert "a restarted" in controller.decision()["reason"]
    for value in (float("nan"), -5.0, 1e300, "x"):
        controller.now_s += 10
        controller.export({"b": {"peagle|arrived|chat": value}})
        assert 1 <= controller.tick() <= 3
        assert "b is left out" in controller.decision()["reason"]


@pytest.mark.parametrize("by_s", [-100_000.0, 100_000.0])
def test_clock_steps_do_not_scale(controller: Controller, by_s: float) -> None:
    before = controller.wanted = controller.serve(300, 3.0, GOOD)
    controller.replicas = [FakeReplica(name) for name in "abcdefgh"[:before]]
    controller.serve(60, 3.0, GOOD)
    controller.now_s += by_s
    assert controller.serve(120, 3.0, GOOD) == before


class Broken(AutoscalingContext):
    """A context whose numbers cannot be read, as when Serve's own bookkeeping fails."""

    @property
    def total_num_requests(self) -> float:
        raise RuntimeError("no metrics")


def test_an_exception_leaves_the_count_as_it_is(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    broken = controller.context()
    broken.__class__ = Broken
    broken.target_num_replicas = 5
    assert controller.policy(broken) == (5, {})
    assert controller.policy(broken) == (5, {})
    assert caplog.text.count("stays as it is") <= 1
    assert controller.serve(60, 3.0, GOOD) >= 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -3.0])
def test_requests_that_are_no_number_count_as_none(controller: Controller, number: float) -> None:
    assert controller.tick(total_num_requests=number, total_queued_requests=number) == 1


def test_arguments_that_make_no_policy_leave_the_count(tmp_path: Path) -> None:
    policy = TargetAutoscaler(
        **{**arguments(log=str(tmp_path / "log")), "step_costs": {"points": 3}}, board=DictBoard()
    )
    assert policy(context(TARGET, [], 4)) == (4, {})


def test_series_of_others_and_empty_ones_are_left_alone() -> None:
    ids = [ReplicaID("a", TARGET)]
    series = {"ongoing": {ids[0]: [TimeStampedValue(1.0, 2.0)]}, "peagle|head": {ids[0]: []}}
    assert readings(context(TARGET, ids, 1, raw_metrics=series)) == []
    series["peagle|head"] = {ids[0]: [TimeStampedValue(1.0, 2.0), TimeStampedValue(7.0, 3.0)]}
    (one,) = readings(context(TARGET, ids, 1, raw_metrics=series))
    assert (one.replica, one.time_s, one.values) == ("a", 7.0, {"peagle|head": 3.0})


@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_a_target_at_zero_wakes_for_a_request_that_found_none(tmp_path: Path, ahead_s: float) -> None:
    """Also where the clock of the ingress' node is ahead."""
    controller = Controller(tmp_path, target={"min": 0, "max": 3}, scale_to_zero=True, idle_s=60.0)
    controller.serve(120, 3.0, GOOD)
    quiet = {"total_num_requests": 0.02, "total_queued_requests": 0.0}  # the monitors' questions
    assert controller.serve(120, 0.0, GOOD, **quiet) == 0
    controller.wanted, controller.replicas = 0, []
    controller.now_s += 10
    assert controller.tick(**quiet) == 0
    controller.board.put(ASKED, {"time_s": time.time() + ahead_s})
    controller.carry()
    assert controller.tick(**quiet) == 1


def test_drafters_follow_the_decision_while_there_is_one(tmp_path: Path) -> None:
    controller = Controller(tmp_path, drafter={"min": 1, "max": 10})
    now_s = 0.0
    policy = DrafterAutoscaler(clock=lambda: now_s, board=controller.board)

    def wanted(at: int) -> int:
        found, _ = policy(context(DRAFTER, [ReplicaID("d", DRAFTER)], at))
        assert policy._exchange is not None
        policy._exchange.carry()
        return found

    assert wanted(1) == 1
    assert controller.board.get(DRAFTERS) == {"num_running": 1, "num_wanted": 1}
    controller.serve(120, 30.0, BAD)
    decided = controller.decision()["drafter"]
    assert decided["num_running"] == 1
    assert decided["num_wanted"] > 1
    wanted(1)
    assert wanted(1) == decided["num_wanted"]
    now_s = SILENT_S + 1  # the target's policy says nothing new
    assert wanted(4) == 4
    controller.board.documents[DECISION] = '{"drafter": 3, "time_s": 1}'
    wanted(4)
    assert wanted(4) == 4


def test_what_was_said_is_kept_until_it_could_be_carried(tmp_path: Path) -> None:
    class Unreachable(DictBoard):
        def put(self, name: str, document: Any) -> None:
            raise ConnectionError("no store")

    exchange = Exchange(Unreachable(), log=DecisionLog(tmp_path / "log"))
    exchange.say(DECISION, {"a": 1})
    exchange.write(["line"])
    with pytest.raises(ConnectionError):
        exchange.carry()
    exchange._board = board = DictBoard()
    exchange.carry()
    exchange.carry()
    assert board.get(DECISION) == {"a": 1}
    assert (tmp_path / "log").read_text() == "line\n"


def test_a_policy_that_serve_replaced_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.autoscaling.ClusterBoard", lambda app_name: DictBoard())
    before = set(threading.enumerate())
    target, drafter = TargetAutoscaler(**arguments(log=str(tmp_path / "log"))), DrafterAutoscaler()
    target(context(TARGET, [ReplicaID("a", TARGET)], 1))
    drafter(context(DRAFTER, [ReplicaID("d", DRAFTER)], 1))
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    del target, drafter
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in started)


def test_most_ticks_touch_no_metrics(controller: Controller) -> None:
    """Serve computes them when they are read, and ticks ten times a second."""
    controller.serve(120, 3.0, GOOD)

    def unread() -> Any:
        raise AssertionError("read between two decisions")

    for _ in range(9):
        controller.now_s += 1
        controller.policy(controller.context(total_num_requests=unread, total_queued_requests=unread))
    assert controller.policy._problem == ""
