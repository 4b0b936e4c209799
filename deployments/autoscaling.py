"""The classes that Ray Serve calls for the number of replicas: one for the target, one for remote drafters.

Enters: Serve's `AutoscalingContext`, several times a second, with the counters that target replicas export
(`TargetServer.record_autoscaling_stats`). Leaves: a number of replicas, to which Serve applies its delays and bounds;
each decision on the board (`deployments.scaling_board`) and as a line of the log. Decides nothing itself: that is
`cluster.scaling`.

`deployments.app` names these classes as policies of the two deployments. (Serve takes a policy of a whole application
from its config file only, never from the application's code, and would then need every setting twice.) The target's
policy decides for both; the drafter's does as the board says.

Both run in Serve's controller, where an exception would stop the scaling of every application: what goes wrong is
logged, and the count stays. Serve pickles this module by value, so that its imports must be installed on the head node.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.config import AutoscalingContext

from cluster.scaling import Decision, Observation, Pool, Reading, ScalingPolicy
from cluster.scaling_capacity import PassTimes
from cluster.scaling_settings import AutoscalingSettings
from cluster.step_time import StepTimes
from deployments.scaling_board import ASKED, DECISION, DRAFTERS, Board, ClusterBoard, DecisionLog, Exchange

logger = logging.getLogger("ray.serve")

PREFIX = "peagle|"
LOG_NAME = "peagle_autoscaling.jsonl"

POLLS = 0.1
"""Mean ongoing requests that the questions of monitors make up at most: below, a target is idle."""

ASKED_S = 15.0
"""A request that found no replica this long ago still wants one."""

SILENT_S = 60.0
"""Without a new decision for this long, the number of drafters stays."""

Wanted = tuple[int, dict[str, Any]]


class TargetAutoscaler:
    """Serve's policy of the target.

    Args:
        settings, step_times, pass_times, limits, max_ongoing_requests: for `cluster.scaling.ScalingPolicy`, as JSON.
        clock: seconds that never go back.
        board: where to show decisions; by default Ray's key-value store.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        step_times: Mapping[str, Any] | None,
        pass_times: Mapping[str, Any] | None,
        limits: Mapping[str, Any],
        max_ongoing_requests: int,
        clock: Callable[[], float] = time.monotonic,
        board: Board | None = None,
    ) -> None:
        self._clock, self._board = clock, board
        self._exchange: Exchange | None = None
        self._policy: ScalingPolicy | None = None
        self._decision: Decision | None = None
        self._decided_s = 0.0
        self._num_decisions = 0
        self._problem = ""
        self._settings: AutoscalingSettings | None = None
        try:
            self._settings = AutoscalingSettings.model_validate(settings)
            self._policy = ScalingPolicy(
                self._settings,
                None if step_times is None else StepTimes.from_document(step_times),
                max_ongoing_requests=max_ongoing_requests,
                passes=None if pass_times is None else PassTimes.model_validate(pass_times),
                **limits,
            )
        except Exception as error:
            if self._is_new(error):
                logger.exception("autoscaling: the policy cannot be made; the number of targets stays as it is")

    def __call__(self, ctx: AutoscalingContext) -> Wanted:
        """The wanted number of replicas; the present one, after an error."""
        try:
            return self._wanted(ctx), {}
        except Exception as error:
            if self._is_new(error):
                logger.exception("autoscaling: the number of targets stays as it is")
            return ctx.target_num_replicas, {}

    def _wanted(self, ctx: AutoscalingContext) -> int:
        if self._policy is None or self._settings is None:
            return ctx.target_num_replicas
        now_s = self._clock()
        if self._exchange is None:
            self._exchange = self._started(ctx, self._settings)
        is_due = self._decision is None or not 0 <= now_s - self._decided_s < self._settings.decision_interval_s
        if not is_due and self._decision is not None and ctx.target_num_replicas:
            return self._decision.target
        before = self._decision
        decision = self._policy.decide(self._observation(ctx, now_s))
        self._decision, self._problem = decision, ""
        if decision is before:
            return decision.target
        self._decided_s = now_s
        self._num_decisions += 1
        if before is None or (before.target, before.drafter) != (decision.target, decision.drafter):
            logger.info("autoscaling: %s", decision.reason)
        self._exchange.write(self._policy.take_log())
        self._exchange.say(DECISION, self._document(ctx, decision))
        return decision.target

    def _started(self, ctx: AutoscalingContext, settings: AutoscalingSettings) -> Exchange:
        board = self._board or ClusterBoard(ctx.app_name or "")
        path = Path(settings.log) if settings.log else Path(str(get_serve_logs_dir())) / LOG_NAME
        exchange = Exchange(board, (DRAFTERS, ASKED), DecisionLog(path))
        if self._board is None:
            exchange.start(self)
        return exchange

    def _observation(self, ctx: AutoscalingContext, now_s: float) -> Observation:
        assert self._exchange is not None
        ongoing, queued = ctx.total_num_requests, ctx.total_queued_requests
        if 0 <= ongoing < POLLS:
            ongoing = queued = 0.0
        asked = self._exchange.heard(ASKED)
        # The ingress may run on another node, whose clock may be ahead.
        if ctx.target_num_replicas == 0 and asked is not None and abs(time.time() - asked["time_s"]) < ASKED_S:
            ongoing, queued = ongoing + 1, queued + 1
        drafters = self._exchange.heard(DRAFTERS)
        return Observation(
            now_s=now_s,
            target=Pool(ctx.current_num_replicas, ctx.target_num_replicas, ongoing, queued),
            running=[replica.unique_id for replica in ctx.running_replicas],
            readings=readings(ctx),
            drafter=None if drafters is None else Pool(drafters["num_running"], drafters["num_wanted"]),
        )

    def _document(self, ctx: AutoscalingContext, decision: Decision) -> dict[str, Any]:
        """What the ingress shows."""
        assert self._settings is not None
        ongoing = ctx.total_num_requests
        drafters = None if self._exchange is None else self._exchange.heard(DRAFTERS)
        document: dict[str, Any] = {
            "policy": self._settings.policy,
            "num_decisions": self._num_decisions,
            "time_s": time.time(),
            "target": {
                "num_running": ctx.current_num_replicas,
                "num_wanted": decision.target,
                "min": self._settings.target.min,
                "max": self._settings.target.max,
            },
            "drafter": None,
            "ongoing_requests": ongoing if math.isfinite(ongoing) else None,
            "source": decision.source,
            "reason": decision.reason,
        }
        for name in ("demand_tokens_per_s", "capacity_tokens_per_s", "acceptance_length", "needed"):
            document[name] = getattr(decision, name)
        if decision.drafter is not None and self._settings.drafter is not None:
            document["drafter"] = {
                "num_running": None if drafters is None else drafters["num_running"],
                "num_wanted": decision.drafter,
                "min": self._settings.drafter.min,
                "max": self._settings.drafter.max,
            }
        return document

    def _is_new(self, error: Exception) -> bool:
        """Whether an error is another than the last: each is logged once, not several times a second."""
        said, self._problem = self._problem, repr(error)
        return said != self._problem


class DrafterAutoscaler:
    """Serve's policy of the drafter: the number that the target's policy decided on, while that one decides.

    Drafters get their work past Serve, which therefore sees none of it: queue length would never ask for a second one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, board: Board | None = None) -> None:
        self._clock, self._board = clock, board
        self._exchange: Exchange | None = None
        self._pool: tuple[int, int] | None = None
        self._newest = -1.0
        self._heard_s = 0.0
        self._problem = ""

    def __call__(self, ctx: AutoscalingContext) -> Wanted:
        """The wanted number of replicas; the present one, after an error or without a decision."""
        try:
            return self._wanted(ctx), {}
        except Exception as error:
            if repr(error) != self._problem:
                self._problem = repr(error)
                logger.exception("autoscaling: the number of drafters stays as it is")
            return ctx.target_num_replicas, {}

    def _wanted(self, ctx: AutoscalingContext) -> int:
        now_s = self._clock()
        if self._exchange is None:
            self._exchange = Exchange(self._board or ClusterBoard(ctx.app_name or ""), (DECISION,))
            if self._board is None:
                self._exchange.start(self)
        pool = ctx.current_num_replicas, ctx.target_num_replicas
        if pool != self._pool:
            self._pool = pool
            self._exchange.say(DRAFTERS, {"num_running": pool[0], "num_wanted": pool[1]})
        decision = self._exchange.heard(DECISION)
        if decision is None or decision["drafter"] is None:
            return ctx.target_num_replicas
        if decision["time_s"] != self._newest:
            self._newest, self._heard_s = decision["time_s"], now_s
        wanted: int = decision["drafter"]["num_wanted"]
        return wanted if now_s - self._heard_s < SILENT_S else ctx.target_num_replicas


def readings(ctx: AutoscalingContext) -> list[Reading]:
    """The newest export of each replica, from the series that Serve keeps by metric and replica."""
    exports: dict[str, dict[float, dict[str, float]]] = {}
    for name, by_replica in (ctx.raw_metrics or {}).items():
        if not str(name).startswith(PREFIX):
            continue
        for replica, series in by_replica.items():
            if series:
                last = series[-1]
                exports.setdefault(replica.unique_id, {}).setdefault(last.timestamp, {})[str(name)] = last.value
    return [Reading(replica, max(of), of[max(of)]) for replica, of in exports.items()]
