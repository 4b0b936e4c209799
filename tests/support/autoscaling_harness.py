"""A policy of autoscaling under Serve's own contexts, on a clock and with replicas of a test's choosing."""

import json
import time
from collections.abc import Iterable
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import DECISION, REPORTS, TargetAutoscaler
from tests.support.scaling_cases import FakeReplica, reported, settings

TARGET, DRAFTER = DeploymentID("target", "app"), DeploymentID("drafter", "app")


class DictBoard:
    """A board in memory, for policies without a Ray cluster."""

    def __init__(self) -> None:
        self.documents: dict[str, str] = {}

    def get(self, name: str) -> dict[str, Any] | None:
        return json.loads(self.documents[name]) if name in self.documents else None

    def put(self, name: str, document: Any) -> None:
        self.documents[name] = json.dumps(document, allow_nan=False)


class Controller:
    """Calls a policy as Serve's controller does, on a clock and with replicas of the test's choosing."""

    def __init__(self, **changes: Any) -> None:
        self.now_s, self.board = 1000.0, DictBoard()
        self.policy = TargetAutoscaler(
            **arguments(**{"warmup_s": 0.0, **changes}), clock=lambda: self.now_s, board=self.board
        )
        self.replicas = [FakeReplica("a")]
        self.wanted = 1

    def report(self, **changed: dict[str, Any]) -> None:
        """What every replica reports now, with other fields by replica."""
        self.board.put(REPORTS, reported(self.replicas, self.now_s, **changed))
        self.carry()

    def context(self, **changes: Any) -> AutoscalingContext:
        ids = [ReplicaID(replica.name, TARGET) for replica in self.replicas]
        return context(TARGET, ids, self.wanted, **changes)

    def tick(self, **changes: Any) -> int:
        wanted, state = self.policy(self.context(**changes))
        assert isinstance(wanted, int)
        assert state == {}
        self.carry()
        return wanted

    def carry(self) -> None:
        if self.policy._exchange is not None:
            self.policy._exchange.carry()

    def serve(self, seconds: float, requests_per_s: float, survival: tuple[float, ...], **changes: Any) -> int:
        """Ticks every 10 s; every replica serves its part."""
        wanted = self.wanted
        for _ in range(int(seconds / 10)):
            self.now_s += 10
            for replica in self.replicas:
                replica.serve("chat", round(10 * requests_per_s / len(self.replicas)), survival)
            self.report()
            wanted = self.tick(**changes)
        return wanted

    def decision(self) -> dict[str, Any]:
        return self.board.get(DECISION) or {}


def arguments(**changes: Any) -> dict[str, Any]:
    """The policy's arguments, through JSON as Serve carries them."""
    document = {
        "settings": settings(**changes).model_dump(mode="json"),
        "limits": {"max_num_seqs": 32, "max_k": 3, "pinned": {}, "pinned_default": None, "max_tpot_ms": None},
        "max_ongoing_requests": 256,
    }
    return dict(json.loads(json.dumps(document)))


def context(deployment: DeploymentID, ids: Iterable[ReplicaID], wanted: int, **changes: Any) -> AutoscalingContext:
    known: dict[str, Any] = {
        "deployment_id": deployment,
        "deployment_name": deployment.name,
        "app_name": deployment.app_name,
        "current_num_replicas": len(list(ids)),
        "target_num_replicas": wanted,
        "running_replicas": list(ids),
        "total_num_requests": 4.0,
        "total_queued_requests": 0.0,
        "aggregated_metrics": None,
        "raw_metrics": None,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 20,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": time.time(),
        "config": AutoscalingConfig(min_replicas=1, max_replicas=20),
    }
    return AutoscalingContext(**{**known, **changes})
