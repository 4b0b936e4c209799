"""The classes that Ray Serve calls for the number of replicas: one for the target, one for remote drafters.

Enters: Serve's `AutoscalingContext`, several times a second, with the counters that target replicas export
(`TargetServer.record_autoscaling_stats`). Leaves: a number of replicas, to which Serve applies its delays and bounds;
each decision on the board (`deployments.autoscaling`) and as a line of the log. Decides nothing itself: that is
`cluster.scaling`.

`deployments.app` names these classes as policies of the two deployments. (Serve takes a policy of a whole application
from its config file only, never from the application's code, and would then need every setting twice.) The target's
policy decides for both; the drafter's does as the board says.

Both run in Serve's controller, where an exception would stop the scaling of every application: what goes wrong is
logged, and the count stays. Serve pickles this module by value, so that its imports must be installed on the head node.
"""

import asyncio
import json
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from ray.experimental import internal_kv
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.config import AutoscalingContext

from cluster.capacity import PassTimes
from cluster.scaling import Decision, Observation, Pool, Reading, ScalingPolicy
from cluster.settings import AutoscalingSettings, ClusterSettings, ReplicaRange
from cluster.step_time import StepCosts, guessed_costs

# ====================================================================================================
# What autoscaling says and hears: small documents in Ray's own key-value store, and the file of decisions.
#
# Serve runs policies in its controller, one for each deployment; the ingress and the other policies learn of a decision
# here. Enters: documents and log lines of a policy. Leaves: the newest document of each name, for whoever asks on any
# node. An `Exchange` reads and writes in a thread, because a policy's call must wait for no disk and no network.

logger = logging.getLogger("ray.serve")

NAMESPACE = "peagle"
DECISION, DRAFTERS, ASKED = "decision", "drafters", "asked"
"""Names of documents: the target policy's decision; drafter replicas as their policy sees them; when a request last
found no target replica."""

EXCHANGE_INTERVAL_S = 1.0
MAX_LOG_BYTES = 64 * 2**20
"""Of the file of decisions; a full one is kept as FILE.1 and begun anew."""

MAX_LINES = 1000


class Board(Protocol):
    """Documents by name."""

    def get(self, name: str) -> dict[str, Any] | None: ...

    def put(self, name: str, document: Mapping[str, Any]) -> None: ...


class ClusterBoard:
    """The documents of one application, in the key-value store of the Ray cluster that this process belongs to."""

    def __init__(self, app_name: str) -> None:
        self._prefix = f"autoscaling/{app_name}/"

    def get(self, name: str) -> dict[str, Any] | None:
        """None where there is none. Raises what Ray raises when the store does not answer."""
        value = internal_kv._internal_kv_get(self._prefix + name, namespace=NAMESPACE)
        document: dict[str, Any] | None = None if value is None else json.loads(value)
        return document

    def put(self, name: str, document: Mapping[str, Any]) -> None:
        value = json.dumps(document, allow_nan=False)
        internal_kv._internal_kv_put(self._prefix + name, value, namespace=NAMESPACE)


class DecisionLog:
    """Appends the lines of `ScalingPolicy.take_log` to a file. Each file begins with the settings."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._head = ""

    def write(self, lines: Sequence[str]) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for line in lines:
            if line.startswith('{"format"'):
                self._head = line
            full = self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes
            if full:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            with self.path.open("a", encoding="utf-8") as file:
                if full and line != self._head:
                    file.write(self._head + "\n")
                file.write(line + "\n")


class Exchange:
    """Carries documents between a policy and a board, and lines to a log, once a second. `hears`: names to read."""

    def __init__(self, board: Board, hears: Sequence[str] = (), log: DecisionLog | None = None) -> None:
        self._board, self._hears, self._log = board, tuple(hears), log
        self._heard: dict[str, dict[str, Any]] = {}
        self._said: dict[str, Mapping[str, Any]] = {}
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._problem = ""
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self, policy: object) -> None:
        """Begin, and end with `policy`: Serve makes a new one each time that it takes a config."""
        weakref.finalize(policy, self._stopped.set)
        threading.Thread(target=self._run, name="peagle-autoscaling", daemon=True).start()

    def say(self, name: str, document: Mapping[str, Any]) -> None:
        with self._lock:
            self._said[name] = document

    def write(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._lines.extend(lines)

    def heard(self, name: str) -> dict[str, Any] | None:
        """The newest document of a name that was read."""
        return self._heard.get(name)

    def carry(self) -> None:
        """Write what was said, read what is there. Raises what board or file raise; nothing said is lost by that."""
        with self._lock:
            said, lines = dict(self._said), list(self._lines)
        for name, document in said.items():
            self._board.put(name, document)
            with self._lock:
                if self._said.get(name) is document:
                    del self._said[name]
        for name in self._hears:
            if (found := self._board.get(name)) is not None:
                self._heard[name] = found
        if lines and self._log is not None:
            self._log.write(lines)
        with self._lock:
            for _ in lines[: len(self._lines)]:
                self._lines.popleft()

    def _run(self) -> None:
        while not self._stopped.wait(EXCHANGE_INTERVAL_S):
            try:
                self.carry()
                self._problem = ""
            except Exception as error:  # the policy decides on without it, and this goes on trying
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    logger.exception("autoscaling: decisions cannot be shown or logged; scaling goes on")


# ====================================================================================================
# From the settings section `autoscaling` to Serve's `autoscaling_config` of target and drafter.

TARGET_POLICY = "deployments.autoscaling:TargetAutoscaler"
DRAFTER_POLICY = "deployments.autoscaling:DrafterAutoscaler"

MAX_STREAM_S = 600.0
"""A target replica that Serve retires has so long to finish its streams; it takes no new ones."""

DEFAULT_MAX_NUM_SEQS = 256
"""Where only queue length decides, which asks for no batch."""


def target_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of the target; None where its number of replicas is fixed.

    Raises ValueError for tables that cannot be used.
    """
    scaling = settings.autoscaling
    if scaling is None:
        return None
    kwargs = policy_kwargs(settings, scaling)
    return _config(scaling, scaling.target, {"policy_function": TARGET_POLICY, "policy_kwargs": kwargs})


def drafter_autoscaling(settings: ClusterSettings) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` of remote drafters; None where their number is fixed."""
    scaling = settings.autoscaling
    if scaling is None or scaling.drafter is None:
        return None
    return _config(scaling, scaling.drafter, {"policy_function": DRAFTER_POLICY})


def policy_kwargs(settings: ClusterSettings, scaling: AutoscalingSettings) -> dict[str, Any]:
    """What `TargetAutoscaler` is made from, as JSON. Raises ValueError as `ScalingPolicy` does."""
    by_acceptance = scaling.policy == "acceptance"
    costs = guessed_costs(settings.target.has_gpu) if by_acceptance else None
    passes: PassTimes | None = None
    depths = settings.depth_policy()
    limits = {
        "max_num_seqs": settings.engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
        "max_k": depths.max_k,
        "pinned": dict(settings.depth.by_workload),
        "pinned_default": depths.default_k if settings.depth.policy == "fixed" else None,
    }
    max_ongoing = settings.target.max_ongoing_requests
    ScalingPolicy(scaling, costs, max_ongoing_requests=max_ongoing, passes=passes, **limits)
    return {
        "settings": scaling.model_dump(mode="json"),
        "step_costs": None if costs is None else costs.to_wire(),
        "pass_times": None if passes is None else passes.model_dump(mode="json"),
        "limits": limits,
        "max_ongoing_requests": max_ongoing,
    }


def _config(scaling: AutoscalingSettings, bounds: ReplicaRange, policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "min_replicas": bounds.min,
        "max_replicas": bounds.max,
        "target_ongoing_requests": scaling.target_ongoing_requests,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "policy": policy,
    }


# ====================================================================================================
# The last decision of autoscaling, for `GET /drafting` and `/metrics` of the ingress.
#
# Enters: the board (`deployments.autoscaling`). Leaves: the decision's document, and its numbers as gauges. Tells the
# board too that a request found no target, which is all that wakes a target scaled to zero.

logger = logging.getLogger(__name__)

ASK_INTERVAL_S = 2.0


class ScalingView:
    """What one ingress replica knows of autoscaling."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._asked_s = float("-inf")

    async def document(self) -> dict[str, Any] | None:
        """The newest decision as the target's policy shows it; None before the first, or where none can be read."""
        try:
            return await asyncio.to_thread(self._board.get, DECISION)
        except Exception:
            logger.exception("the decision of autoscaling cannot be read")
            return None

    async def ask(self) -> None:
        """A request found no target replica. Said at most every `ASK_INTERVAL_S`."""
        if time.monotonic() - self._asked_s < ASK_INTERVAL_S:
            return
        self._asked_s = time.monotonic()
        try:
            await asyncio.to_thread(self._board.put, ASKED, {"time_s": time.time()})
        except Exception:
            logger.exception("autoscaling cannot be told of a request")


def scaling_metrics(document: Mapping[str, Any] | None) -> list[Metric]:
    """A decision as gauges. Its reason in words stands in `GET /drafting`: as a label, each text would be a series."""
    if document is None:
        return []
    replicas = GaugeMetricFamily(
        "peagle_autoscaling_replicas", "Replicas; count: running, wanted, min, max.", labels=("deployment", "count")
    )
    for name in ("target", "drafter"):
        for count, value in (document[name] or {}).items():
            if value is not None:
                replicas.add_metric([name, count.removeprefix("num_")], value)
    source = GaugeMetricFamily("peagle_autoscaling_source", "1: what decided.", labels=("source",))
    source.add_metric([document["source"]], 1)
    decisions = GaugeMetricFamily("peagle_autoscaling_decisions", "Decisions since the controller started.")
    decisions.add_metric([], document["num_decisions"])
    found: list[Metric] = [replicas, source, decisions]
    for key, name, text in (
        ("demand_tokens_per_s", "demand_tokens_per_second", "Output tokens per second that are asked for."),
        ("capacity_tokens_per_s", "capacity_tokens_per_second", "Output tokens per second that one replica gives."),
        ("acceptance_length", "acceptance_length", "AL of a replica at the predicted K."),
        ("needed", "needed_replicas", "Target replicas that the demand needs, before dead band and bounds."),
    ):
        if document[key] is not None:
            gauge = GaugeMetricFamily(f"peagle_autoscaling_{name}", text)
            gauge.add_metric([], document[key])
            found.append(gauge)
    return found


# ====================================================================================================
# The classes that Ray Serve calls for the number of replicas: one for the target, one for remote drafters.
#
# Enters: Serve's `AutoscalingContext`, several times a second, with the counters that target replicas export
# (`TargetServer.record_autoscaling_stats`). Leaves: a number of replicas, to which Serve applies its delays and bounds;
# each decision on the board (`deployments.autoscaling`) and as a line of the log. Decides nothing itself: that is
# `cluster.scaling`.
#
# `deployments.app` names these classes as policies of the two deployments. (Serve takes a policy of a whole application
# from its config file only, never from the application's code, and would then need every setting twice.) The target's
# policy decides for both; the drafter's does as the board says.
#
# Both run in Serve's controller, where an exception would stop the scaling of every application: what goes wrong is
# logged, and the count stays. Serve pickles this module by value, so that its imports must be installed on the head node.

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
        settings, step_costs, pass_times, limits, max_ongoing_requests: for `cluster.scaling.ScalingPolicy`, as JSON.
        clock: seconds that never go back.
        board: where to show decisions; by default Ray's key-value store.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        step_costs: Mapping[str, Any] | None,
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
                None if step_costs is None else StepCosts.from_wire(step_costs),
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
        path = Path(str(get_serve_logs_dir())) / LOG_NAME
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
