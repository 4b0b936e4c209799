"""Replica counts that follow the traffic: Serve's policies of target and drafter, and what the ingress shows of them.

Enters: Serve's `AutoscalingContext`, several times a second, and the targets' reports, which the router puts on the
board. Leaves: a number of replicas, to which Serve applies its delays and bounds, and each decision on the board, where
the router and the drafter's policy find it. Decides nothing itself: that is `cluster.scaling`.

Serve takes a policy of a whole application from its config file only, never from the application's code, and would then
need every setting twice. So each deployment has a policy: the target's decides for both, the drafter's does as the
board says. Both run in Serve's controller, where an exception would stop the scaling of every application: what goes
wrong is logged, and the count stays. Serve pickles this module by value, so its imports must be installed on the head
node.
"""

import asyncio
import dataclasses
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from ray.serve.config import AutoscalingContext

from cluster.capacity import CapacityModel
from cluster.counts import TargetReport
from cluster.scaling import Decision, Pool, ScalingPolicy
from cluster.settings import AutoscalingSettings, ClusterSettings, ReplicaRange
from deployments import compat

logger = logging.getLogger("ray.serve")

# ====================================================================================================
# From the settings to Serve's `autoscaling_config`.

TARGET_POLICY = "deployments.autoscaling:TargetAutoscaler"
DRAFTER_POLICY = "deployments.autoscaling:DrafterAutoscaler"

MAX_STREAM_S = 600.0
"""A target replica that Serve retires has so long to finish its streams; it takes no new ones."""


def target_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of the target; None where its number of replicas is fixed."""
    if settings.autoscaling is None:
        return None
    return _config(settings.autoscaling, settings.autoscaling.target, TARGET_POLICY, policy_kwargs(settings))


def drafter_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of remote drafters; None where their number is fixed."""
    scaling = settings.autoscaling
    if scaling is None or scaling.drafter is None:
        return None
    return _config(scaling, scaling.drafter, DRAFTER_POLICY, {})


def policy_kwargs(settings: ClusterSettings) -> dict[str, Any]:
    """What `TargetAutoscaler` is made from, as JSON."""
    scaling, depths = settings.autoscaling, settings.depth_policy()
    assert scaling is not None
    limits = CapacityModel(
        max_num_seqs=settings.max_num_seqs,
        max_k=depths.max_k,
        pinned=dict(depths.by_workload),
        pinned_default=depths.default_k if settings.depth.policy == "fixed" else None,
        max_tpot_ms=scaling.max_tpot_ms,
    )
    return {
        "settings": scaling.model_dump(mode="json"),
        "limits": dataclasses.asdict(limits),
        "max_ongoing_requests": settings.target.max_ongoing_requests,
    }


def _config(
    scaling: AutoscalingSettings, bounds: ReplicaRange, policy: str, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "min_replicas": bounds.min,
        "max_replicas": bounds.max,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "policy": {"policy_function": policy, "policy_kwargs": kwargs},
    }


# ====================================================================================================
# The board: documents in Ray's own key-value store, by which policies, router and ingress replicas talk.

NAMESPACE = "peagle"
DECISION, DRAFTERS, ASKED, REPORTS = "decision", "drafters", "asked", "reports"
"""Names of documents: the target policy's decision; drafter replicas as their policy sees them; when a request last
found no target replica; the targets' reports by replica."""

EXCHANGE_INTERVAL_S = 1.0
ASK_INTERVAL_S = 2.0
REPORT_INTERVAL_S = 5.0


class ClusterBoard:
    """The documents of one application, in the key-value store of the Ray cluster that this process belongs to."""

    def __init__(self, app_name: str) -> None:
        self._prefix = f"autoscaling/{app_name}/"

    def get(self, name: str) -> dict[str, Any] | None:
        """None where there is none. Raises what Ray raises when the store does not answer."""
        value = compat.kv_get(self._prefix + name, NAMESPACE)
        document: dict[str, Any] | None = None if value is None else json.loads(value)
        return document

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        value = json.dumps(document, allow_nan=False)
        compat.kv_put(self._prefix + name, value, NAMESPACE)


class Exchange:
    """Carries documents between a policy and the board once a second, in a thread: a policy waits for no network."""

    def __init__(self, board: ClusterBoard, names: Sequence[str]) -> None:
        """`names`: of the documents to read."""
        self._board = board
        self.documents: dict[str, dict[str, Any] | None] = dict.fromkeys(names)
        """The newest document of each name that was read."""
        self._unsent: dict[str, Mapping[str, Any]] = {}
        self._problem = ""
        self._stopped = threading.Event()

    def start(self, policy: object) -> None:
        """Begin, and end with `policy`: Serve makes a new one each time that it takes a config."""
        weakref.finalize(policy, self._stopped.set)
        threading.Thread(target=self._run, name="peagle-autoscaling", daemon=True).start()

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        self._unsent[name] = document

    def carry(self) -> None:
        """Write what was put, read what is there. Raises what the board raises; nothing is lost by that."""
        for name, document in list(self._unsent.items()):
            self._board.put(name, document)
            if self._unsent.get(name) is document:
                del self._unsent[name]
        for name in self.documents:
            self.documents[name] = self._board.get(name) or self.documents[name]

    def _run(self) -> None:
        while not self._stopped.wait(EXCHANGE_INTERVAL_S):
            try:
                self.carry()
                self._problem = ""
            except Exception as error:  # the policy decides on without it, and this goes on trying
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    logger.exception("autoscaling: decisions cannot be shown; scaling goes on")


class ScalingView:
    """What the router, or one ingress replica, knows of autoscaling, and tells it."""

    def __init__(self, board: ClusterBoard) -> None:
        self._board = board
        self._asked_s = self._reported_s = float("-inf")
        self._reporting: asyncio.Task[None] | None = None

    async def document(self) -> dict[str, Any] | None:
        """The newest decision as the target's policy shows it; None before the first, or where none can be read."""
        try:
            return await asyncio.to_thread(self._board.get, DECISION)
        except Exception:
            logger.exception("the decision of autoscaling cannot be read")
            return None

    async def ask(self) -> None:
        """Say that a request found no target replica, which alone wakes a target scaled to zero. At most every
        `ASK_INTERVAL_S`."""
        if time.monotonic() - self._asked_s < ASK_INTERVAL_S:
            return
        self._asked_s = time.monotonic()
        await self._tell(ASKED, {"time_s": time.time()})

    def report(self, reports: Sequence[TargetReport]) -> None:
        """Hand on what the targets report, at most every `REPORT_INTERVAL_S`."""
        if time.monotonic() - self._reported_s < REPORT_INTERVAL_S or (self._reporting and not self._reporting.done()):
            return
        self._reported_s = time.monotonic()
        document = {report.replica: report.to_wire() for report in reports}
        self._reporting = asyncio.get_running_loop().create_task(self._tell(REPORTS, document))

    async def _tell(self, name: str, document: Mapping[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._board.put, name, document)
        except Exception:
            logger.exception("autoscaling cannot be told: %s", name)


# ====================================================================================================
# The policies.

POLLS = 0.1
"""Mean ongoing requests that the questions of monitors make up at most: below, a target is idle."""

ASKED_S = 15.0
"""A request that found no replica this long ago still wants one."""

SILENT_S = 60.0
"""Without a new decision for this long, the number of drafters stays."""


class _Autoscaler:
    """What both policies have in common: a board, and no exception for Serve.

    Args:
        clock: seconds that never go back.
        board: where decisions are shown; by default Ray's key-value store.
    """

    reads: tuple[str, ...] = ()

    def __init__(self, clock: Callable[[], float] = time.monotonic, board: ClusterBoard | None = None) -> None:
        self._clock, self._board = clock, board
        self._exchange: Exchange | None = None
        self._problem = ""

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas; the present one, after an error."""
        try:
            if self._exchange is None:
                self._exchange = Exchange(self._board or ClusterBoard(ctx.app_name or ""), self.reads)
                if self._board is None:
                    self._exchange.start(self)
            return self._wanted(ctx, self._exchange), {}
        except Exception as error:
            if repr(error) != self._problem:  # each is logged once, not several times a second
                self._problem = repr(error)
                logger.exception("autoscaling: the number of replicas of %s stays as it is", ctx.deployment_name)
            return ctx.target_num_replicas, {}

    def _wanted(self, ctx: AutoscalingContext, exchange: Exchange) -> int:
        raise NotImplementedError


class TargetAutoscaler(_Autoscaler):
    """Serve's policy of the target.

    Args:
        settings, limits, max_ongoing_requests: of `cluster.scaling.ScalingPolicy` and its model, as JSON.
    """

    reads = (DRAFTERS, ASKED, REPORTS)

    def __init__(
        self,
        settings: Mapping[str, Any],
        limits: Mapping[str, Any],
        max_ongoing_requests: int,
        clock: Callable[[], float] = time.monotonic,
        board: ClusterBoard | None = None,
    ) -> None:
        super().__init__(clock, board)
        self._settings = AutoscalingSettings.model_validate(settings)
        self._policy = ScalingPolicy(self._settings, CapacityModel(**limits), max_ongoing_requests)
        self._decision: Decision | None = None
        self._decided_s = 0.0
        self._num_decisions = 0

    def _wanted(self, ctx: AutoscalingContext, exchange: Exchange) -> int:
        now_s, before = self._clock(), self._decision
        is_due = before is None or now_s - self._decided_s >= self._settings.decision_interval_s
        asked = exchange.documents[ASKED]
        # The ingress may run on another node, whose clock may be ahead.
        is_asked = ctx.target_num_replicas == 0 and asked is not None and abs(time.time() - asked["time_s"]) < ASKED_S
        if before is not None and not is_due and not (is_asked and before.target == 0):
            return before.target
        # Serve computes these when they are read, so most ticks read none of them.
        ongoing, queued = ctx.total_num_requests, ctx.total_queued_requests
        if 0 <= ongoing < POLLS:
            ongoing = queued = 0.0
        drafters = exchange.documents[DRAFTERS]
        decision = self._policy.decide(
            now_s,
            Pool(ctx.current_num_replicas, ctx.target_num_replicas, ongoing + is_asked, queued + is_asked),
            [replica.unique_id for replica in ctx.running_replicas],
            exchange.documents[REPORTS] or {},
            None if drafters is None else Pool(drafters["num_running"], drafters["num_wanted"]),
        )
        self._decision, self._decided_s, self._problem = decision, now_s, ""
        self._num_decisions += 1
        if before is None or (before.target, before.drafter) != (decision.target, decision.drafter):
            logger.info("autoscaling: %s", msgspec.json.encode(decision).decode())
        exchange.put(DECISION, self._document(decision))
        return decision.target

    def _document(self, decision: Decision) -> dict[str, Any]:
        """What the ingress shows."""
        document: dict[str, Any] = {
            "policy": self._settings.policy,
            "num_decisions": self._num_decisions,
            "time_s": time.time(),
            "ongoing_requests": decision.inputs.target.ongoing_requests,
            "source": decision.source,
            "reason": decision.reason,
            "target": None,
            "drafter": None,
        }
        for key in ("demand_tokens_per_s", "capacity_tokens_per_s", "acceptance_length", "needed"):
            document[key] = getattr(decision, key)
        for name in ("target", "drafter"):
            bounds, wanted = getattr(self._settings, name), getattr(decision, name)
            if bounds is not None and wanted is not None:
                pool: Pool | None = getattr(decision.inputs, name)
                num_running = None if pool is None else pool.num_running
                document[name] = {"num_running": num_running, "num_wanted": wanted, **bounds.model_dump()}
        return document


class DrafterAutoscaler(_Autoscaler):
    """Serve's policy of the drafter: the number that the target's policy decided on, while that one decides.

    Drafters get their work past Serve, which therefore sees none of it: queue length would never ask for a second one.
    """

    reads = (DECISION,)

    def __init__(self, clock: Callable[[], float] = time.monotonic, board: ClusterBoard | None = None) -> None:
        super().__init__(clock, board)
        self._pool: tuple[int, int] | None = None
        self._decided_s, self._decision_seen_s = -1.0, 0.0

    def _wanted(self, ctx: AutoscalingContext, exchange: Exchange) -> int:
        now_s = self._clock()
        pool = ctx.current_num_replicas, ctx.target_num_replicas
        if pool != self._pool:
            self._pool = pool
            exchange.put(DRAFTERS, {"num_running": pool[0], "num_wanted": pool[1]})
        decision = exchange.documents[DECISION]
        if decision is None or decision["drafter"] is None:
            return ctx.target_num_replicas
        if decision["time_s"] != self._decided_s:
            self._decided_s, self._decision_seen_s = decision["time_s"], now_s
        wanted: int = decision["drafter"]["num_wanted"]
        return wanted if now_s - self._decision_seen_s < SILENT_S else ctx.target_num_replicas
