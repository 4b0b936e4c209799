"""A policy of autoscaling under Serve's own contexts, on a clock and with replicas of a test's choosing.

python -m tests.autoscaling_harness      how long a tick takes
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.autoscaling import DECISION, TargetAutoscaler
from tests.scaling_cases import GOOD, FakeReplica, changed, settings, step_costs

TARGET, DRAFTER = DeploymentID("target", "app"), DeploymentID("drafter", "app")
LIMITS = {"max_num_seqs": 32, "max_k": 3, "pinned": {}, "pinned_default": None}


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

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.now_s, self.board = 1000.0, DictBoard()
        self.log = tmp_path / "decisions.jsonl"
        changes = {"log": str(self.log), "warmup_s": 0.0, **changes}
        self.policy = TargetAutoscaler(**arguments(**changes), clock=lambda: self.now_s, board=self.board)
        self.replicas = [FakeReplica("a")]
        self.wanted = 1
        self.series: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}

    def export(self, values: dict[str, dict[str, float]] | None = None) -> None:
        """What every replica exports now, with other `values` by replica."""
        self.series = {}
        for replica in self.replicas:
            reading = changed(replica.reading(self.now_s), (values or {}).get(replica.name, {}))
            for name, value in reading.values.items():
                point = TimeStampedValue(self.now_s, value)
                self.series.setdefault(name, {})[ReplicaID(replica.name, TARGET)] = [point]

    def context(self, **changes: Any) -> AutoscalingContext:
        ids = [ReplicaID(replica.name, TARGET) for replica in self.replicas]
        return context(TARGET, ids, self.wanted, raw_metrics=lambda: self.series, **changes)

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
            self.export()
            wanted = self.tick(**changes)
        return wanted

    def decision(self) -> dict[str, Any]:
        return self.board.get(DECISION) or {}


def arguments(**changes: Any) -> dict[str, Any]:
    """The policy's arguments, through JSON as Serve carries them."""
    document = {
        "settings": settings(**changes).model_dump(mode="json"),
        "step_costs": step_costs().to_wire(),
        "pass_times": None,
        "limits": LIMITS,
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


def milliseconds_of_ticks(controller: Controller, num_replicas: int) -> tuple[float, float]:
    """Median and largest time of a tick, ten ticks a second for two minutes."""
    controller.replicas = [FakeReplica(f"r{index}") for index in range(num_replicas)]
    taken = []
    for tick in range(1200):
        controller.now_s += 0.1
        if tick % 60 == 0:
            for replica in controller.replicas:
                for workload in range(8):
                    replica.serve(f"w{workload}", 5, GOOD)
            controller.export()
        ctx = controller.context()
        start = time.perf_counter()
        controller.policy(ctx)
        taken.append(1000 * (time.perf_counter() - start))
    return statistics.median(taken), max(taken)


def main() -> None:
    for num_replicas in (1, 8, 32):
        with tempfile.TemporaryDirectory() as folder:
            median, largest = milliseconds_of_ticks(Controller(Path(folder)), num_replicas)
        print(f"{num_replicas} replicas, 8 workloads, a tick: {median:.4f} ms (median), {largest:.1f} (most)")


if __name__ == "__main__":
    main()
