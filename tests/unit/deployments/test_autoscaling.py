"""The router's decisions and the policies that Serve calls, with Serve's own contexts, configs and wrapper: good data,
and all kinds of bad."""

from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from cluster.settings import STALE_AFTER_S, Catalog, load_settings
from deployments import view
from deployments.app import bind_drafter, target_options
from deployments.autoscaling import autoscaling_config
from deployments.drafter import MIN_NUM_REQUESTS, HeadLoader
from deployments.metrics import Families
from deployments.telemetry import add_scaling_metrics
from tests.support.autoscaling_harness import DRAFTER, TARGET, Controller, ask, context, scaled_settings
from tests.support.scaling_cases import BAD, GOOD, FakeReplica
from tests.unit.cluster.test_settings import QUEUE, catalog, remote  # noqa: F401 - a fixture


@pytest.fixture
def controller() -> Controller:
    return Controller()


# ---- what Serve is given


def test_a_target_may_finish_its_streams_and_a_drafter_has_room_for_all_targets_that_may_come(
    catalog: Catalog,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.drafter.target_source", lambda source: "nowhere")
    scaling = {**QUEUE, "drafter": {"min": 1, "max": 2}}
    scaled = load_settings(remote(autoscaling=scaling, target__num_replicas=..., engine__max_num_seqs=8), catalog)
    for settings, number in ((load_settings(remote(), catalog), "num_replicas"), (scaled, "autoscaling_config")):
        options = target_options(settings)
        assert options["graceful_shutdown_timeout_s"] == 600.0
        assert options["ray_actor_options"]["runtime_env"]["env_vars"]["KMP_BLOCKTIME"] == "1"
        assert options.keys() & {"num_replicas", "autoscaling_config"} == {number}
        bound: Any = bind_drafter(settings)
        assert bound._bound_deployment.user_config == {}
    assert (scaled.max_num_targets, scaled.max_num_drafters) == (3, 2)
    config = AutoscalingConfig(**(autoscaling_config(scaled, "drafter") or {}))
    assert (config.min_replicas, config.max_replicas) == (1, 2)
    assert config.policy.policy_kwargs == {"deployment": "drafter"}
    assert HeadLoader(scaled).max_num_requests == MIN_NUM_REQUESTS
    many = load_settings(remote(autoscaling=scaling, target__num_replicas=..., engine__max_num_seqs=100), catalog)
    assert HeadLoader(many).max_num_requests == 3 * 100


@pytest.mark.parametrize(
    "kwargs", [{"deployment": "target", "target_ongoing_requests": 16.0}, {"deployment": "drafter"}]
)
def test_serve_itself_makes_and_calls_the_policy(kwargs: dict[str, Any]) -> None:
    """The module pickled by value, its class made from JSON, behind Serve's delays and bounds; without a Ray cluster to
    read from."""
    made = AutoscalingPolicy(policy_function="deployments.autoscaling:ReplicaPolicy", policy_kwargs=kwargs)
    wanted, _ = _apply_autoscaling_config(_resolve_policy_callable(made))(context(TARGET, [ReplicaID("a", TARGET)], 2))
    assert wanted == 2


# ---- the target


def test_a_decision_is_shown(controller: Controller) -> None:
    controller.serve(120, 3.0, GOOD)
    shown = controller.router.document
    assert shown["num_decisions"] == 12
    add_scaling_metrics(found := Families(), shown)
    samples = {(one.name, *one.labels.values()): one.value for of in found.values() for one in of.samples}
    assert samples["peagle_autoscaling_replicas", "target", "wanted"] == shown["target"]["num_wanted"]
    assert samples["peagle_autoscaling_demand_tokens_per_second",] == shown["demand_tokens_per_s"]
    assert samples["peagle_autoscaling_source", "acceptance"] == 1
    document = {"max_draft_tokens": 3, "workloads": [], "model": "m", "policy": "fixed", "step_times": ""}
    text = view.as_text({**document, "autoscaling": shown})
    assert "target 1 running" in text
    assert shown["reason"] in text


def test_a_stale_record_counts_as_none_until_a_new_one_comes(controller: Controller) -> None:
    controller.wanted, controller.replicas = 3, [FakeReplica(name, started_s=1000.0) for name in "abc"]
    assert controller.serve(400, 0.3, GOOD) == 1
    controller.now_s += STALE_AFTER_S + 1
    assert controller.tick(total_num_requests=0.0) == 3
    controller.decide()
    controller.now_s += 1
    assert controller.tick(total_num_requests=0.0) == 1


def test_by_queue_length_the_number_goes_both_ways() -> None:
    controller = Controller(scaled_settings(policy="queue_length", target_ongoing_requests=4.0))
    controller.wanted = 3
    controller.tick()
    controller.decide()
    controller.now_s += 1
    assert controller.tick(total_num_requests=21.0) == 6
    assert controller.tick(total_num_requests=4.0) == 1
    controller.now_s += STALE_AFTER_S + 1
    assert controller.tick(total_num_requests=4.0) == 3, "the router is silent"


@pytest.mark.parametrize("ended", [None, {"time_s": 1.0, "target": 8, "drafter": None}])
def test_without_a_record_of_this_service_the_queue_decides_and_nothing_shrinks(
    controller: Controller, ended: Any
) -> None:
    controller.channel.put("replicas", ended)
    controller.wanted = 3
    assert controller.tick(total_num_requests=0.0) == 3
    controller.now_s += 10
    assert controller.tick(total_num_requests=100.0) == 7
    controller.decide()
    controller.now_s += 1
    controller.channel.put("replicas", {"time_s": 2.0, "target": 2, "drafter": None})
    assert controller.tick(total_num_requests=0.0) == 2


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
    assert caplog.text.count("stays as it is") == 1
    assert controller.serve(60, 3.0, GOOD) >= 1


def test_a_store_that_does_not_answer_is_read_again(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.channel.fails = True
    controller.wanted = 2
    for _ in range(3):
        controller.now_s += 10
        controller.decide()
        assert controller.tick(total_num_requests=0.0) == 2
    assert caplog.text.count("no decision can be made or published") == 1
    assert caplog.text.count("stays as it is") == 1
    controller.channel.fails = False
    controller.replicas.append(FakeReplica("b", started_s=controller.now_s))
    assert controller.serve(300, 0.1, GOOD) == 1


# ---- the drafter


def test_drafters_follow_the_decision_while_there_is_one() -> None:
    settings = scaled_settings(drafter={"min": 1, "max": 10})
    controller = Controller(settings)
    policy = controller.make(autoscaling_config(settings, "drafter") or {})

    def wanted(at: int) -> int:
        return ask(policy, context(DRAFTER, [ReplicaID("d", DRAFTER)], at))

    assert wanted(1) == 1
    controller.serve(120, 30.0, BAD)
    decided = controller.router.document["drafter"]
    assert decided["num_running"] == 1
    assert decided["num_wanted"] > 1
    assert wanted(1) == decided["num_wanted"]
    controller.now_s += STALE_AFTER_S + 1
    assert wanted(4) == 4
