"""The policies that Serve calls, with Serve's own contexts, configs and wrapper: good data, and all kinds of bad."""

import json
import logging
import time
from pathlib import Path

import pytest
import yaml
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.settings import Catalog, load_settings
from deployments import view
from deployments.autoscaling import (
    ASKED,
    DECISION,
    DRAFTERS,
    SILENT_S,
    DrafterAutoscaler,
    drafter_autoscaling,
    target_autoscaling,
)
from deployments.drafter import HeadLoader
from deployments.telemetry import scaling_metrics
from tests.support.autoscaling_harness import DRAFTER, TARGET, Controller, arguments, context
from tests.support.scaling_cases import BAD, GOOD, FakeReplica, settings
from tests.unit.cluster.test_settings import QUEUE, catalog, remote  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[3]


@pytest.fixture
def controller() -> Controller:
    return Controller()


# ---- what Serve is given


def test_the_config_that_ships_says_what_serve_gets(catalog: Catalog) -> None:  # noqa: F811
    (application,) = yaml.safe_load((ROOT / "configs" / "local-autoscale.yaml").read_text())["applications"]
    args = application["args"]
    args["model"]["source"], args["drafter"]["head"] = "embedded-model", "shipped-head"
    shipped = load_settings(args, Catalog(catalog.embedded_models, catalog.heads_dir, catalog.read_head))
    config = AutoscalingConfig(**(target_autoscaling(shipped) or {}))
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s) == (1, 2, 5.0)
    limits = config.policy.policy_kwargs["limits"]
    assert limits == {"max_num_seqs": 8, "max_k": 7, "pinned": {}, "pinned_default": None, "max_tpot_ms": None}
    cpus = shipped.target.num_cpus + shipped.target.bundle["CPU"]
    assert 2 * cpus + shipped.ingress.num_cpus <= 2


def test_a_drafter_has_a_policy_and_room_for_the_requests_of_all_targets_that_may_come(
    catalog: Catalog,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.drafter.target_source", lambda source: "nowhere")
    scaling = {**QUEUE, "drafter": {"min": 1, "max": 2}}
    args = remote(autoscaling=scaling, target__num_replicas=..., engine__max_num_seqs=8)
    scaled = load_settings(args, catalog)
    config = AutoscalingConfig(**(drafter_autoscaling(scaled) or {}))
    assert (config.min_replicas, config.max_replicas) == (1, 2)
    assert config.policy.policy_function == "deployments.autoscaling:DrafterAutoscaler"
    assert HeadLoader(scaled).max_num_requests == 3 * 8


def test_serve_itself_makes_and_calls_the_policies() -> None:
    """The module pickled by value, its class made from JSON, behind Serve's delays and bounds."""
    made = AutoscalingPolicy(policy_function="deployments.autoscaling:TargetAutoscaler", policy_kwargs=arguments())
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(made))(context(TARGET, [ReplicaID("a", TARGET)], 1))
    assert wanted == 1
    made = AutoscalingPolicy(policy_function="deployments.autoscaling:DrafterAutoscaler")
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(made))(context(DRAFTER, [], 2))
    assert wanted == 2


# ---- the target's policy


def test_acceptance_that_collapses_wants_replicas_before_queue_length_would(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    controller.wanted, controller.replicas = 3, [FakeReplica(name) for name in "abc"]
    before = controller.serve(300, 6.0, GOOD)
    assert (before, controller.decision()["source"]) == (3, "acceptance")
    after = controller.serve(120, 6.0, BAD)
    assert after > before
    shown = controller.decision()
    assert shown["acceptance_length"] < 2
    assert shown["ongoing_requests"] / before < settings().target_ongoing_requests
    assert "replicas" in shown["reason"]
    (*_, line) = [record.message for record in caplog.records if record.message.startswith("autoscaling: {")]
    logged = json.loads(line.removeprefix("autoscaling: "))
    assert (logged["target"], logged["inputs"]["target"]["num_wanted"]) == (after, 3)


def test_a_decision_is_shown(controller: Controller) -> None:
    controller.serve(120, 3.0, GOOD)
    shown = controller.decision()
    assert shown["num_decisions"] == 12
    samples = {(one.name, *one.labels.values()): one.value for of in scaling_metrics(shown) for one in of.samples}
    assert samples["peagle_autoscaling_replicas", "target", "wanted"] == shown["target"]["num_wanted"]
    assert samples["peagle_autoscaling_demand_tokens_per_second",] == shown["demand_tokens_per_s"]
    assert samples["peagle_autoscaling_source", "acceptance"] == 1
    document = {"max_draft_tokens": 3, "workloads": [], "model": "m", "policy": "fixed", "step_times": ""}
    text = view.as_text({**document, "autoscaling": shown})
    assert "target 1 running" in text
    assert shown["reason"] in text


def test_without_data_the_queue_decides_and_nothing_shrinks(controller: Controller) -> None:
    controller.replicas, controller.wanted = [FakeReplica("a"), FakeReplica("b")], 2
    assert controller.tick(total_num_requests=0.0) == 2
    controller.now_s += 10
    assert controller.tick(total_num_requests=100.0) == 7
    assert controller.decision()["source"] == "queue_length"


def test_a_restart_and_nonsense_are_named_and_cost_nothing(controller: Controller) -> None:
    controller.replicas = [FakeReplica(name) for name in "abc"]
    controller.wanted = 3
    before = controller.serve(300, 3.0, GOOD)
    controller.replicas[0] = FakeReplica("a")  # counters begin at zero
    assert controller.serve(10, 3.0, GOOD) <= max(before, 3)
    assert "a restarted" in controller.decision()["reason"]
    for value in (-5, 1.5, 10**300, "x", None):
        controller.now_s += 10
        controller.report(b={"workloads": {"chat": [value, 0, 0, 0, 0, [[], [], []]]}})
        assert 1 <= controller.tick() <= 3
        assert "b is left out" in controller.decision()["reason"]


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


@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_a_target_at_zero_wakes_for_a_request_that_found_none(ahead_s: float) -> None:
    """Also where the clock of the ingress' node is ahead."""
    controller = Controller(target={"min": 0, "max": 3}, scale_to_zero=True, idle_s=60.0)
    controller.serve(120, 3.0, GOOD)
    quiet = {"total_num_requests": 0.02, "total_queued_requests": 0.0}  # the monitors' questions
    assert controller.serve(120, 0.0, GOOD, **quiet) == 0
    controller.wanted, controller.replicas = 0, []
    controller.now_s += 10
    assert controller.tick(**quiet) == 0
    controller.board.put(ASKED, {"time_s": time.time() + ahead_s})
    controller.carry()
    assert controller.tick(**quiet) == 1


# ---- the drafter's policy and the board


def test_drafters_follow_the_decision_while_there_is_one() -> None:
    controller = Controller(drafter={"min": 1, "max": 10})
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
