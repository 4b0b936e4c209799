"""Autoscaling without a Ray cluster: the router's part and Serve's policies under Serve's own contexts, on a clock and
with replicas of a test's choosing."""

import asyncio
import inspect
import json
import time
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from cluster.k_policy import KPolicy
from cluster.scaling import Pool
from cluster.settings import ClusterSettings
from deployments.autoscaling import Autoscaler, ReplicaPolicy, autoscaling_config
from deployments.compat import KVChannel
from tests.support.scaling_cases import FakeReplica

TARGET, DRAFTER = DeploymentID("target", "app"), DeploymentID("drafter", "app")


def scaled_settings(**autoscaling: Any) -> ClusterSettings:
    """Targets of 32 requests at a time with a drafter; remote where the number of drafters has bounds."""
    placement = "remote" if "drafter" in autoscaling else "colocated"
    args = {
        "model": {"source": "org/tiny"},
        "drafter": {"head": "org/head", "placement": placement, "max_draft_tokens": 3},
        "engine": {"dtype": "float32", "max_num_seqs": 32},
        "autoscaling": {"policy": "acceptance", "target": {"min": 1, "max": 20}, **autoscaling},
    }
    return ClusterSettings.model_validate(args)


class MemoryChannel(KVChannel):
    """In a dictionary in the place of Ray's key-value store. `fails`: the store does not answer."""

    fails = False

    def __init__(self) -> None:
        super().__init__("app")
        self.documents: dict[str, str] = {}

    def get(self, name: str) -> Any:
        self._answer()
        return json.loads(self.documents[name]) if name in self.documents else None

    def put(self, name: str, document: Any) -> None:
        self._answer()
        self.documents[name] = json.dumps(document, allow_nan=False)

    def _answer(self) -> None:
        if self.fails:
            raise ConnectionError("no answer")


class Inline(Executor):
    """Does at once what it is given."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except ConnectionError as error:
            done.set_exception(error)
        return done


class Controller:
    """Calls the target's policy as Serve's controller does, beside a router that decides every 10 s."""

    def __init__(self, settings: ClusterSettings | None = None) -> None:
        settings = settings or scaled_settings()
        self.now_s, self.channel = 1000.0, MemoryChannel()
        self.wanted, self.replicas = 1, [FakeReplica("a", started_s=1000.0)]
        self.k_policy = KPolicy(settings.k_rules(), max_num_seqs=settings.max_num_seqs)
        self.router = Autoscaler(settings, self.channel, self.pools)
        config = autoscaling_config(settings, "target")
        assert config is not None
        self.policy = self.make(config)

    def make(self, config: dict[str, Any]) -> ReplicaPolicy:
        """A policy of a config, through JSON as Serve carries it."""
        kwargs = json.loads(json.dumps(config["policy"]["policy_kwargs"]))
        return ReplicaPolicy(**kwargs, clock=lambda: self.now_s, channel=self.channel, reader=Inline())

    def pools(self) -> dict[str, Pool]:
        return {"target": Pool(len(self.replicas), self.wanted), "drafter": Pool(1, 1)}

    def decide(self) -> None:
        """The router's part."""
        reports = [replica.report(self.now_s) for replica in self.replicas]
        deltas = self.k_policy.observe(reports, self.now_s)
        self.router.policy.observe(deltas, reports, self.now_s)
        asyncio.run(self.router.decide(self.k_policy, self.now_s))

    def context(self, **changes: Any) -> AutoscalingContext:
        ids = [ReplicaID(replica.name, TARGET) for replica in self.replicas]
        return context(TARGET, ids, self.wanted, **changes)

    def tick(self, **changes: Any) -> int:
        return ask(self.policy, self.context(**changes))

    def serve(self, seconds: float, requests_per_s: float, rates: tuple[float, ...], **changes: Any) -> int:
        """Ticks every 10 s; every replica serves its part."""
        wanted = self.wanted
        for _ in range(int(seconds / 10)):
            self.now_s += 10
            for replica in self.replicas:
                replica.serve("chat", round(10 * requests_per_s / len(self.replicas)), rates)
            self.decide()
            wanted = self.tick(**changes)
        return wanted


def ask(policy: ReplicaPolicy, ctx: AutoscalingContext) -> int:
    wanted, state = policy(ctx)
    assert isinstance(wanted, int)
    assert state == {}
    return wanted


def context(deployment: DeploymentID, ids: Iterable[ReplicaID], wanted: int, **changes: Any) -> AutoscalingContext:
    known: dict[str, Any] = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    known |= {
        "deployment_id": deployment,
        "deployment_name": deployment.name,
        "app_name": deployment.app_name,
        "current_num_replicas": len(list(ids)),
        "target_num_replicas": wanted,
        "running_replicas": list(ids),
        "total_num_requests": 4.0,
        "total_queued_requests": 0.0,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 20,
        "policy_state": {},
        "current_time": time.time(),
        "config": AutoscalingConfig(min_replicas=1, max_replicas=20),
    }
    return AutoscalingContext(**{**known, **changes})
