"""Replica counts that follow the traffic: the router decides, and Serve's policies of target and drafter obey.

Enters: what the router has counted (`cluster.scaling` decides). Leaves: one record in Ray's key-value store, which
`ReplicaPolicy` reads. That runs in Serve's controller and would stop every application's scaling if it raised or
waited. Serve applies its delays and bounds. It pickles this module by value, so its imports must be installed on the
head node. Serve takes a policy of a whole application from its config file only, so each deployment has its own.
"""

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext

from cluster.counts import CounterDeltas, TargetReport
from cluster.k_policy import KPolicy
from cluster.scaling import Pool, ScalingPolicy
from cluster.settings import STALE_AFTER_S, ClusterSettings, ReplicaRange
from deployments import DRAFTER_NAME, TARGET_NAME
from deployments.compat import KVChannel

logger = logging.getLogger("ray.serve")

DECISION_INTERVAL_S = 5.0

RECORD = "replicas"
"""Name of the record among the documents of the application. Its fields: `time_s`, and by deployment the wanted number
of replicas, null where the queue length decides."""


def autoscaling_config(settings: ClusterSettings, deployment: str) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of targets or remote drafters; None where their number is fixed. Drafters get their
    work past Serve, so queue length would never ask for a second one."""
    scaling = settings.autoscaling
    bounds = None if scaling is None else {TARGET_NAME: scaling.target, DRAFTER_NAME: scaling.drafter}[deployment]
    if scaling is None or bounds is None:
        return None
    ongoing = scaling.target_ongoing_requests
    kwargs: dict[str, Any] = {"deployment": deployment}
    if deployment == TARGET_NAME:
        kwargs |= {"target_ongoing_requests": ongoing, "shrinks": scaling.policy == "queue_length"}
    return {
        "min_replicas": bounds.min,
        "max_replicas": bounds.max,
        "target_ongoing_requests": ongoing,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "downscale_to_zero_delay_s": 0.0,  # the router has waited for `idle_s`
        "policy": {"policy_function": "deployments.autoscaling:ReplicaPolicy", "policy_kwargs": kwargs},
    }


# ---- in the router


def read_pools(app_name: str) -> dict[str, Pool]:
    """The deployments of an application by name. Asks Serve's controller."""
    pools = {}
    for name, deployment in serve.status().applications[app_name].deployments.items():
        states = {str(getattr(state, "value", state)): num for state, num in deployment.replica_states.items()}
        wanted = sum(num for state, num in states.items() if state not in ("STOPPING", "PENDING_MIGRATION"))
        pools[name] = Pool(states.get("RUNNING", 0), wanted)
    return pools


class Autoscaler:
    """Decides for the whole service, in the router, and publishes each decision."""

    def __init__(
        self, settings: ClusterSettings, channel: KVChannel, read_pools: Callable[[], dict[str, Pool]]
    ) -> None:
        assert settings.autoscaling is not None
        self._settings, self._channel, self._read_pools = settings.autoscaling, channel, read_pools
        self.policy = ScalingPolicy(settings.autoscaling)
        self._decided_s, self._num_decisions = -math.inf, 0
        self._deciding: asyncio.Task[None] | None = None
        self._problem = ""
        self._numbers: dict[str, int | None] = {}
        self.document: dict[str, Any] | None = None
        """The newest decision, for `GET /drafting`."""

    def observe(self, deltas: CounterDeltas | None, reports: Sequence[TargetReport], k_policy: KPolicy) -> None:
        """Take in a round of reports, and decide where it is time again."""
        now_s = time.monotonic()
        self.policy.observe(deltas, reports, now_s)
        is_free = self._deciding is None or self._deciding.done()
        if is_free and now_s - self._decided_s >= DECISION_INTERVAL_S:
            self._decided_s = now_s
            self._deciding = asyncio.get_running_loop().create_task(self.decide(k_policy, now_s))

    def wake(self) -> None:
        """A request found no target replica, which alone wakes a target scaled to zero."""
        self.policy.traffic.note_busy(time.monotonic())
        self._decided_s = -math.inf

    async def decide(self, k_policy: KPolicy, now_s: float) -> None:
        """Decide and publish. What goes wrong is logged; policies go by queue length when the record is old."""
        try:
            pools = await asyncio.to_thread(self._read_pools)
            target, drafter = pools[TARGET_NAME], pools.get(DRAFTER_NAME)
            decision = self.policy.decide(now_s, target, drafter, k_policy)
            numbers = {TARGET_NAME: decision.target, DRAFTER_NAME: decision.drafter}
            record = {"time_s": time.time(), **numbers}
            await asyncio.to_thread(self._channel.put, RECORD, record)
            self._problem = ""
        except Exception as error:
            if repr(error) != self._problem:  # each is logged once
                self._problem = repr(error)
                logger.exception("autoscaling: no decision can be made or published")
            return
        self._num_decisions += 1
        if numbers != self._numbers:
            logger.info("autoscaling: %s", json.dumps({**dataclasses.asdict(decision), "pool": vars(target)}))
        self._numbers = numbers
        self.document = {
            "policy": self._settings.policy,
            "num_decisions": self._num_decisions,
            "time_s": record["time_s"],
            **dataclasses.asdict(decision),
            "target": _shown(decision.target, target, self._settings.target),
            "drafter": _shown(decision.drafter, drafter, self._settings.drafter),
        }


def _shown(number: int | None, pool: Pool | None, bounds: ReplicaRange | None) -> dict[str, Any] | None:
    if pool is None or bounds is None:
        return None
    wanted = pool.num_wanted if number is None else number
    return {"num_running": pool.num_running, "num_wanted": wanted, **bounds.model_dump()}


# ---- in Serve's controller

READ_INTERVAL_S = 1.0

POLLS = 0.1
"""Mean ongoing requests that the questions of the router make up at most: below, a target is idle."""


class ReplicaPolicy:
    """Serve's policy of one deployment: the number in the router's record. Without one, or with one that is stale, as
    many as the queue length asks for and never fewer than there are.

    Args:
        target_ongoing_requests: of a replica, by queue length; None: the number stays where the record says none.
        shrinks: queue length decides by itself while the router is there, and may take replicas away.
        clock: seconds that never go back.
        reader: runs what waits for the store.
    """

    def __init__(
        self,
        deployment: str,
        target_ongoing_requests: float | None = None,
        shrinks: bool = False,
        clock: Callable[[], float] = time.monotonic,
        channel: KVChannel | None = None,
        reader: Executor | None = None,
    ) -> None:
        self._deployment, self._clock, self._channel = deployment, clock, channel
        self._target_ongoing_requests, self._shrinks = target_ongoing_requests, shrinks
        self._reader = reader or ThreadPoolExecutor(1, "peagle-autoscaling")
        self._reading: Future[dict[str, Any] | None] | None = None
        self._record: dict[str, Any] | None = None
        self._asked_s = self._seen_s = -math.inf
        self._problem = ""

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number of replicas; the present one, after an error."""
        try:
            return self._wanted(ctx), {}
        except Exception as error:
            if repr(error) != self._problem:  # each is logged once, not several times a second
                self._problem = repr(error)
                logger.exception("autoscaling: the number of replicas of %s stays as it is", self._deployment)
            return ctx.target_num_replicas, {}

    def _wanted(self, ctx: AutoscalingContext) -> int:
        self._read_record(ctx.app_name or "")
        is_fresh = self._clock() - self._seen_s <= STALE_AFTER_S
        if is_fresh and (number := (self._record or {}).get(self._deployment)) is not None:
            return int(number)
        if self._target_ongoing_requests is None:
            return ctx.target_num_replicas
        ongoing = ctx.total_num_requests
        if not POLLS <= ongoing < math.inf:
            ongoing = 0.0
        wanted = math.ceil(ongoing / self._target_ongoing_requests - 1e-9)
        least = 0 if is_fresh and self._shrinks else ctx.target_num_replicas
        return max(wanted, least, int(is_fresh))  # only the record takes the target to zero

    def _read_record(self, app_name: str) -> None:
        """Begin to read the record once a second, and take what has been read. Another node's clock may be wrong, so
        only that the record changes says that it is fresh. The first one may be of a service that has ended."""
        now_s = self._clock()
        if self._reading is None and now_s - self._asked_s >= READ_INTERVAL_S:
            self._asked_s, channel = now_s, self._channel or KVChannel(app_name)
            self._reading = self._reader.submit(channel.get, RECORD)
        if self._reading is not None and self._reading.done():
            reading, self._reading = self._reading, None
            record, known = reading.result() or {}, self._record
            if known is not None and record.get("time_s") != known.get("time_s"):
                self._seen_s = now_s
            self._record = record
