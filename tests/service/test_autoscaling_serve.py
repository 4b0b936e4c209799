"""The policies in Serve's own controller, with replicas that count instead of serving: from their reports to new
replicas and the board. No engine runs here."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from cluster.counts import TargetReport
from deployments.autoscaling import DECISION, DRAFTER_POLICY, TARGET_POLICY, ClusterBoard, ScalingView
from deployments.replicas import ReplicaMonitor
from tests.support.autoscaling_harness import arguments
from tests.support.scaling_cases import BAD, GOOD, FakeReplica

pytestmark = [pytest.mark.service, pytest.mark.long]

WAIT_S = 60.0
REQUESTS_PER_S = 2.0
FLAG = "survival-is-bad"


class Counting:
    """A replica that answers nothing and counts `REQUESTS_PER_S`, with an acceptance that a file decides."""

    def __init__(self, flag: str) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        self._fake, self._flag, self._served_s = FakeReplica(name), Path(flag), time.time()

    async def report(self) -> TargetReport:
        num = int((time.time() - self._served_s) * REQUESTS_PER_S)
        if num:
            self._served_s = time.time()
            self._fake.serve("chat", num, BAD if self._flag.exists() else GOOD)
        return self._fake.report(time.monotonic())


class Idle:
    """In the drafter's place."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="test-scaling")
    try:
        serve.start(proxy_location="Disabled")
        common = {"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 1.0, "downscale_delay_s": 600.0}
        changes: dict[str, Any] = {
            "target": {"min": 1, "max": 3},
            "drafter": {"min": 1, "max": 3},
            "utilisation": 0.8,
            "decision_interval_s": 2.0,
        }
        by_target = {"policy_function": TARGET_POLICY, "policy_kwargs": arguments(**changes)}
        target = scaled(Counting, "target", {**common, "policy": by_target})
        drafter = scaled(Idle, "drafter", {**common, "policy": {"policy_function": DRAFTER_POLICY}})
        serve.run(both(target.bind(str(tmp_path / FLAG)), drafter.bind()), name="scaled", route_prefix=None)
        yield tmp_path
    finally:
        serve.shutdown()
        ray.shutdown()


def scaled(kind: type, name: str, config: dict[str, Any]) -> Any:
    return serve.deployment(kind, name=name, autoscaling_config=config, ray_actor_options={"num_cpus": 0.1})


def both(target: serve.Application, drafter: serve.Application) -> serve.Application:
    class Front:
        """In the router's place."""

        async def __init__(self, target: Any, drafter: Any) -> None:
            self._monitor = ReplicaMonitor(target, TargetReport, ScalingView(ClusterBoard("scaled")).report)
            self._monitor.start()

    bound: serve.Application = serve.deployment(Front, ray_actor_options={"num_cpus": 0.1}).bind(target, drafter)
    return bound


def running(name: str) -> int:
    states = serve.status().applications["scaled"].deployments[name].replica_states
    return sum(count for state, count in states.items() if str(getattr(state, "value", state)) == "RUNNING")


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, f"no {what} after {WAIT_S:.0f} s: {ClusterBoard('scaled').get(DECISION)}"
        time.sleep(0.5)


def test_counters_of_replicas_become_replicas_and_a_document(folder: Path) -> None:
    board = ClusterBoard("scaled")
    wait_for(lambda: (board.get(DECISION) or {"source": ""})["source"] == "acceptance", "decision from acceptance")
    good = board.get(DECISION)
    assert good is not None
    assert good["target"] == {"num_running": 1, "num_wanted": 1, "min": 1, "max": 3}
    (folder / FLAG).touch()
    wait_for(lambda: running("target") > 1 and running("drafter") > 1, "second replicas of both")
    # Between two requests: by queue length one replica is enough.
    wait_for(lambda: (board.get(DECISION) or {})["ongoing_requests"] == 0, "moment without a request under way")
    bad = board.get(DECISION)
    assert bad is not None
    assert bad["capacity_tokens_per_s"] < good["capacity_tokens_per_s"]
    assert bad["target"]["num_wanted"] > 1
    wait_for(lambda: (board.get(DECISION) or {})["drafter"]["num_running"] > 1, "word of the drafters")
