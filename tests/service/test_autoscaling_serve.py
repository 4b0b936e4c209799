"""The policy in Serve's own controller, with replicas that count instead of serving: from their reports through the
router's decision to new replicas. No engine runs here."""

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from cluster.counts import TargetReport
from cluster.k_policy import KPolicy
from cluster.settings import ClusterSettings
from deployments.autoscaling import Autoscaler, autoscaling_config, read_pools
from deployments.compat import KVChannel
from deployments.replicas import ReplicaMonitor
from tests.support.autoscaling_harness import scaled_settings
from tests.support.scaling_cases import BAD, GOOD, FakeReplica
from tests.support.service_harness import wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]

REQUESTS_PER_S = 2.0
FLAG, APP = "rates-are-bad", "scaled"


class Counting:
    """A replica that answers nothing and counts `REQUESTS_PER_S`, with an acceptance that a file decides."""

    def __init__(self, flag: str) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        self._fake = FakeReplica(name, started_s=time.monotonic())
        self._flag, self._served_s = Path(flag), time.time()

    async def report(self) -> TargetReport:
        num = int((time.time() - self._served_s) * REQUESTS_PER_S)
        if num:
            self._served_s = time.time()
            self._fake.serve("chat", num, BAD if self._flag.exists() else GOOD)
        return self._fake.report(time.monotonic())


class Idle:
    """In the drafter's place."""


class Front:
    """In the router's place: monitor and autoscaler are its own."""

    async def __init__(self, settings: ClusterSettings, target: Any, drafter: Any) -> None:
        self._k_policy = KPolicy(settings.k_rules(), max_num_seqs=settings.max_num_seqs)
        self._autoscaler = Autoscaler(settings, KVChannel(APP), functools.partial(read_pools, APP))
        self._monitor = ReplicaMonitor[TargetReport](target, self._observe)
        self._monitor.start()

    def _observe(self, reports: Sequence[TargetReport]) -> None:
        deltas = self._k_policy.observe(reports, time.monotonic())
        self._autoscaler.observe(deltas, reports, self._k_policy)

    async def decision(self) -> dict[str, Any]:
        return self._autoscaler.document or {"source": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="test-scaling")
    try:
        serve.start(proxy_location="Disabled")
        bounds = {"min": 1, "max": 3}
        delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 600.0}
        settings = scaled_settings(target=bounds, drafter=bounds, utilisation=0.8, **delays)
        target = scaled(Counting, "target", autoscaling_config(settings, "target")).bind(str(tmp_path / FLAG))
        drafter = scaled(Idle, "drafter", autoscaling_config(settings, "drafter")).bind()
        front = serve.deployment(Front, ray_actor_options={"num_cpus": 0.1}).bind(settings, target, drafter)
        serve.run(front, name=APP, route_prefix=None)
        yield tmp_path
    finally:
        serve.shutdown()
        ray.shutdown()


def scaled(kind: type, name: str, config: Any) -> Any:
    return serve.deployment(kind, name=name, autoscaling_config=config, ray_actor_options={"num_cpus": 0.1})


def running(name: str) -> int:
    states = serve.status().applications[APP].deployments[name].replica_states
    return sum(count for state, count in states.items() if str(getattr(state, "value", state)) == "RUNNING")


def decision() -> dict[str, Any]:
    found: dict[str, Any] = serve.get_app_handle(APP).decision.remote().result(timeout_s=10)
    return found


def test_counters_of_replicas_become_replicas(folder: Path) -> None:
    wait_for(lambda: decision()["source"] == "acceptance", "decision from acceptance", find=decision)
    good = decision()
    assert good["target"] == {"num_running": 1, "num_wanted": 1, "min": 1, "max": 3}
    (folder / FLAG).touch()
    wait_for(lambda: running("target") > 1 and running("drafter") > 1, "second replicas of both", find=decision)
    wait_for(lambda: decision()["drafter"]["num_running"] > 1, "sight of the drafters", find=decision)
    bad = decision()
    assert bad["ongoing_requests"] == 0, "by queue length one replica is enough"
    assert bad["capacity_tokens_per_s"] < good["capacity_tokens_per_s"]
    assert bad["target"]["num_wanted"] > 1
