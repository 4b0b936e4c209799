"""The router, which learns for all targets and speaks for the whole service.

Enters: the targets' reports, once a second. Leaves: `Guidance`, which each target takes once a second, so that all
choose K by what the whole cluster has seen; the saved state; and what /metrics and /drafting show. Clients talk to the
targets, past this process (`deployments.target`), which imports neither vLLM nor torch: it starts in a few seconds.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.control import Guidance
from cluster.counts import TargetReport
from cluster.settings import ClusterSettings, live_config
from deployments import TARGET_NAME, compat
from deployments.autoscaling import ClusterBoard, ScalingView, scaling_metrics
from deployments.replicas import POLL_TIMEOUT_S, REPLICA_LOST, DrafterReport, ReplicaMonitor, settings_with
from deployments.telemetry import (
    HeadCounts,
    StateFile,
    depth_metrics,
    drafter_metrics,
    drafting_document,
    head_metrics,
    labelled,
    live_heads,
    make_control,
    prometheus_text,
    target_metrics,
)

logger = logging.getLogger(__name__)

FIRST_POLL_S = 2.0


class Router:
    """What all targets have in common, for one model."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
        target: DeploymentHandle[Any] | None = None,
    ) -> None:
        """`drafter`: the deployment of remote drafters, where there is one. `target`: of the targets; None where they
        stand before this deployment in the application, which then cannot be bound to them."""
        context = serve.get_replica_context()
        self._settings = settings
        self._replica = context.replica_id.unique_id
        self._target = target or serve.get_deployment_handle(TARGET_NAME, app_name=context.app_name)
        self._edges = {"target": self._target}
        self._state = StateFile(settings.depth.state)
        self.control = make_control(settings)
        self._state.restore(self.control)
        self._head_counts = HeadCounts()
        self._monitor = ReplicaMonitor(self._target, TargetReport, self._observe)
        self._drafters = None if drafter is None else ReplicaMonitor(drafter, DrafterReport, lambda _: None)
        self._scaling = None if settings.autoscaling is None else ScalingView(ClusterBoard(context.app_name))
        self._warn_without_callers()
        compat.warn_without_haproxy()
        # A replica that takes another's place must know the targets before its first request.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_POLL_S):
                await self._monitor.refresh()
        for monitor in (self._monitor, self._drafters):
            if monitor is not None:
                monitor.start()

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take other limits, callers, depths and aliases while requests run (`cluster.settings.live_config`)."""
        if user_config is None or user_config == live_config(self._settings):
            return
        self._settings = settings_with(self._settings, user_config)
        self.control = make_control(self._settings, self.control)
        self._state = StateFile(self._settings.depth.state)
        self._warn_without_callers()

    def _warn_without_callers(self) -> None:
        if self._settings.callers is None:
            logger.warning(
                "The settings have no section callers: everyone who reaches this port is served, without an API key, "
                "and may set workload tags."
            )

    async def guidance(self) -> Guidance:
        """What targets choose K by, as of the last reports."""
        return self.control.guidance(self._monitor.num_ready or 0, time.monotonic())

    async def metrics(self) -> bytes:
        """Prometheus text over all replicas. Whoever asks, it says the same, but for counts by head."""
        reports = await self._monitor.refresh()
        families = target_metrics(reports, self._monitor.num_ready or 0)
        families += head_metrics(self._head_counts.by_head(), self._replica)
        families += depth_metrics(self._document(), self._settings.model.id)
        families += scaling_metrics(await self._scaled())
        if self._drafters is not None:
            families += drafter_metrics(await self._drafters.refresh(), reports)
        for where, handle in self._edges.items():
            with contextlib.suppress(*REPLICA_LOST, TimeoutError):  # what nobody counts is not shown
                for answer in await compat.ask_each(handle, "edge_metrics", POLL_TIMEOUT_S):
                    if isinstance(answer, tuple):
                        replica, found = answer
                        families += labelled(found, edge=where, replica=replica)
        return prometheus_text(families)

    async def drafting(self) -> dict[str, Any]:
        """What is known of each workload's acceptance, and the K it gets (`peagle view` shows it); the heads that
        draft, with what was accepted of theirs, remote drafters with the links to them, and how many replicas
        autoscaling wants and why."""
        reports = self._monitor.reports
        drafters = () if self._drafters is None else self._drafters.reports
        by_head = self._head_counts.by_head(live_heads(reports))
        return {
            **self._document(),
            **drafting_document(reports, by_head, drafters),
            "autoscaling": await self._scaled(),
        }

    async def _scaled(self) -> dict[str, Any] | None:
        return None if self._scaling is None else await self._scaling.document()

    def _document(self) -> dict[str, Any]:
        return {"model": self._settings.model.id, **self.control.document(time.monotonic())}

    def _observe(self, reports: Sequence[TargetReport]) -> None:
        if reports:
            self._head_counts.take(reports)
            self.control.observe(reports, time.monotonic())
            self._state.save_soon(self.control)
