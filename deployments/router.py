"""The router, which learns for all targets and speaks for the whole service.

Enters: the targets' reports, once a second. Leaves: a `PolicyUpdate`, which each target takes once a second, so that
all choose K by what the whole cluster has seen; the saved state; and what /metrics and /drafting show. Clients talk to
the targets, past this process (`deployments.target`), which imports neither vLLM nor torch: it starts in a few seconds.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.counts import TargetReport
from cluster.heads import CANDIDATE, HeadKeeper, HeadProposal, HeadTrial, base_workload
from cluster.k_policy import PolicyUpdate
from cluster.learning import LearnerReport
from cluster.settings import ClusterSettings, live_config
from deployments import TARGET_NAME, compat
from deployments.autoscaling import ClusterBoard, ScalingView
from deployments.replicas import (
    POLL_TIMEOUT_S,
    REPLICA_LOST,
    DrafterReport,
    ReplicaMonitor,
    drafters_view,
    settings_with,
)
from deployments.telemetry import (
    HeadCounts,
    StateStore,
    change_metrics,
    depth_metrics,
    drafter_metrics,
    drafting_document,
    head_metrics,
    labelled,
    learner_document,
    learner_metrics,
    live_heads,
    make_k_policy,
    prometheus_text,
    scaling_metrics,
    target_metrics,
)
from peagle.heads import candidate_directory, candidate_files, keep_candidate

logger = logging.getLogger(__name__)

FIRST_POLL_S = 2.0
SEND_TIMEOUT_S = 120.0
"""For the files of a head to reach drafters on other nodes."""


def make_keeper(settings: ClusterSettings) -> HeadKeeper | None:
    """None where several ingress replicas would decide side by side."""
    drafter = settings.drafter
    if drafter is None or settings.ingress.num_replicas > 1:
        return None
    index_of = {workload: drafter.head_index(workload) for workload in drafter.heads_by_workload}
    num_spare = 0 if settings.ingress.num_replicas else drafter.spare_heads
    return HeadKeeper(index_of, num_spare, drafter.trial_share)


class Router:
    """What all targets have in common, for one model."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
        target: DeploymentHandle[Any] | None = None,
        learner: DeploymentHandle[Any] | None = None,
    ) -> None:
        """`drafter`: the deployment of remote drafters, where there is one. `target`: of the targets; None where they
        stand before this deployment in the application, which then cannot be bound to them. `learner`: of heads."""
        compat.prepare_replica()
        context = serve.get_replica_context()
        self._settings = settings
        self._replica = context.replica_id.unique_id
        self._target = target or serve.get_deployment_handle(TARGET_NAME, app_name=context.app_name)
        self._edges = {"target": self._target}
        self._board = ClusterBoard(context.app_name)
        self._state = StateStore(settings.depth.state, self._board)
        self.k_policy = make_k_policy(settings)
        self._keeper = None if drafter is None else make_keeper(settings)
        self._state.restore(self.k_policy, self._keeper)
        self._head_counts, self._counts_are_new = HeadCounts(), False
        self._monitor = ReplicaMonitor(self._target, TargetReport, self._observe)
        self._drafter = drafter
        self._drafters = None if drafter is None else ReplicaMonitor(drafter, DrafterReport, self._steer)
        self._steering: asyncio.Task[None] | None = None
        self._learner = None if learner is None else ReplicaMonitor(learner, LearnerReport, lambda _: None)
        self._scaling = None if settings.autoscaling is None else ScalingView(self._board)
        self._warn_without_callers()
        compat.warn_without_haproxy()
        # A replica that takes another's place must know the targets before its first request.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_POLL_S):
                await self._monitor.refresh()
        for monitor in (self._monitor, self._drafters, self._learner):
            if monitor is not None:
                monitor.start()

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take other limits, callers, depths and aliases while requests run (`cluster.settings.live_config`)."""
        if user_config is None or user_config == live_config(self._settings):
            return
        self._settings = settings_with(self._settings, user_config)
        self.k_policy = make_k_policy(self._settings, self.k_policy)
        self._state = StateStore(self._settings.depth.state, self._board)
        self._warn_without_callers()

    def _warn_without_callers(self) -> None:
        if self._settings.callers is None:
            logger.warning(
                "The settings have no section callers: everyone who reaches this port is served, without an API key, "
                "and may set workload tags."
            )

    async def policy_update(self) -> PolicyUpdate:
        """What targets choose K by, and candidates, as of the last reports."""
        update = self.k_policy.make_update(self._monitor.num_ready or 0, time.monotonic())
        return update if self._keeper is None else dataclasses.replace(update, heads=self._keeper.routing)

    # ---- heads

    async def propose(self, proposal: HeadProposal) -> HeadTrial:
        """Try a candidate on a share of the requests; `trial` says what becomes of it.

        Raises:
            ValueError: with the reason: a damaged head, no room for it, a trial that is under way.
        """
        if self._keeper is None:
            raise ValueError("heads are tried where drafter.placement is remote and one router decides")
        files = proposal.files or await asyncio.to_thread(candidate_files, Path(proposal.source))
        digest = hashlib.sha256()
        for file in sorted(files):
            digest.update(files[file])
        name = f"{CANDIDATE}{digest.hexdigest()[:10]}"
        await asyncio.to_thread(keep_candidate, name, files, self._keeper.names_in_use)
        trial = self._keeper.propose(name, proposal)
        self._heads_changed()
        return trial

    async def trial(self, name: str) -> HeadTrial:
        """The newest state of a proposal. Raises ValueError for a name that is not known."""
        if self._keeper is None:
            raise ValueError("there are no trials of heads here")
        return self._keeper.trial(name)

    async def head_back(self) -> HeadTrial:
        """End the trial, else take back the last change of heads. Raises ValueError where there is none."""
        if self._keeper is None:
            raise ValueError("there are no changes of heads here")
        trial = self._keeper.back()
        self._heads_changed()
        return trial

    def _heads_changed(self) -> None:
        """Log what happened, and save it at once."""
        if self._keeper is not None and self._keeper.events:
            for event in self._keeper.events:
                logger.warning("%s", event)
            self._keeper.events.clear()
            self._state.save_soon(self.k_policy, self._keeper, is_urgent=True)

    def _steer(self, drafters: Sequence[DrafterReport]) -> None:
        """Let every drafter follow the keeper's orders, also one that has just started."""
        if self._keeper is None or self._drafter is None or (self._steering and not self._steering.done()):
            return
        orders = self._keeper.orders if self._keeper.has_begun else None
        if (view := drafters_view(drafters, orders)) is not None:
            self._keeper.see(view, self._num_running())
            self._heads_changed()
        orders = self._keeper.orders
        lacking = {name for drafter in drafters for name in drafter.lacking}
        if self._keeper.has_begun and (lacking or any(drafter.orders != orders for drafter in drafters)):
            self._steering = asyncio.get_running_loop().create_task(self._order(self._drafter, lacking))

    async def _order(self, drafter: DeploymentHandle[Any], lacking: set[str]) -> None:
        assert self._keeper is not None
        answers: list[Any] = []
        with contextlib.suppress(*REPLICA_LOST, TimeoutError):  # they are asked again
            for name in lacking:
                if (directory := candidate_directory(name)) is not None:
                    files = await asyncio.to_thread(candidate_files, directory)
                    answers += await compat.ask_each(drafter, "take_candidate", SEND_TIMEOUT_S, name, files)
            answers += await compat.ask_each(drafter, "follow", POLL_TIMEOUT_S, self._keeper.orders)
        for answer in answers:
            if isinstance(answer, Exception):
                logger.warning("a drafter does not follow: %r", answer)

    def _num_running(self) -> Counter[str]:
        """Requests by workload."""
        found = Counter[str]()
        for report in self._monitor.reports:
            found.update({base_workload(name): counts.num_running for name, counts in report.workloads.items()})
        return found

    async def metrics(self) -> bytes:
        """Prometheus text over all replicas. Whoever asks, it says the same, but for counts by head."""
        reports = await self._monitor.refresh()
        families = target_metrics(reports, self._monitor.num_ready or 0)
        families += head_metrics(self._head_counts.by_head(), self._replica)
        families += [] if self._keeper is None else change_metrics(self._keeper.document())
        families += depth_metrics(self._document(), self._settings.model.id)
        families += scaling_metrics(await self._scaled())
        if self._drafters is not None:
            families += drafter_metrics(await self._drafters.refresh(), reports)
        if self._learner is not None:
            families += learner_metrics(self._learner.reports)
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
            "head_changes": [] if self._keeper is None else self._keeper.document(),
            "autoscaling": await self._scaled(),
            "learner": None if self._learner is None else learner_document(self._learner.reports),
        }

    async def _scaled(self) -> dict[str, Any] | None:
        return None if self._scaling is None else await self._scaling.document()

    def _document(self) -> dict[str, Any]:
        return {"model": self._settings.model.id, **self.k_policy.document(time.monotonic())}

    def _observe(self, reports: Sequence[TargetReport]) -> None:
        if reports:
            if self._scaling is not None:
                self._scaling.report(reports)
            deltas = self.k_policy.observe(reports, time.monotonic())
            if deltas is None:
                return
            self._head_counts.add(deltas)
            # The first reports count from the targets' start, and heads may have changed since.
            if self._keeper is not None and self._counts_are_new:
                weights = "+".join(sorted({report.weights for report in reports} - {""}))
                self._keeper.follow(weights, self._num_running())
                self._keeper.take(deltas, self._num_running())
                self._heads_changed()
            self._counts_are_new = True
            self._state.save_soon(self.k_policy, self._keeper)
