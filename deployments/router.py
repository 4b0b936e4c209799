"""The router, which learns for all targets and speaks for the whole service.

Enters: the targets' reports, once a second. Leaves: a `PolicyUpdate`, which each target takes once a second, so that
all choose K by what the whole cluster has seen; the saved state; and what /metrics and /drafting show. Clients talk to
the targets (`deployments.target`), past this process. It imports neither vLLM nor torch, so it starts in a few seconds.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.counts import Counts, TargetReport
from cluster.heads import CANDIDATE, DesiredHeads, DrafterReport, HeadChange, HeadManager, HeadProposal, HeadRef
from cluster.history import POINT_S, ServiceHistory
from cluster.k_policy import KPolicy, PolicyUpdate
from cluster.learning import LearnerReport
from cluster.request import base_workload
from cluster.settings import ClusterSettings, DrafterSettings
from deployments import DRAFTER_NAME, TARGET_NAME, compat, telemetry
from deployments.autoscaling import Autoscaler, read_pools
from deployments.metrics import Families
from deployments.replicas import POLL_TIMEOUT_S, REPLICA_LOST, PacedCall, ReplicaMonitor, repeat, settings_with
from deployments.state import StateStore
from peagle.heads import candidate_directory, candidate_files, keep_candidate

logger = logging.getLogger(__name__)

FIRST_POLL_S = 2.0
SHOWN_SETTINGS: Any = {
    **dict.fromkeys(("model", "num_draft_tokens", "limits", "autoscaling"), True),
    "target": {"num_replicas", "bundle", "front_ends"},
    "drafter": {"head", "method", "placement", "max_draft_tokens"},
}
"""Those that `GET /drafting` names: no environment, callers, or arguments of others."""

LOST_ROUNDS = 30
"""Rounds in a row, of one a second, after which a head's files are lost: a drafter may be left out of a few."""
SEND_TIMEOUT_S = 120.0
"""For the files of a head to reach drafters on other nodes."""


class Router:
    """What all targets have in common, for one model."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: ClusterSettings,
        drafter: DeploymentHandle[Any] | None = None,
        learner: DeploymentHandle[Any] | None = None,
    ) -> None:
        """`drafter`: the deployment of remote drafters, where there is one. `learner`: of heads."""
        compat.prepare_replica()
        context = serve.get_replica_context()
        self._settings = settings
        # The targets stand before this deployment in the application, so it cannot be bound to them.
        self._target = serve.get_deployment_handle(TARGET_NAME, app_name=context.app_name)
        self._channel = compat.KVChannel(context.app_name)
        on_gpu = settings.target.has_gpu
        self.k_policy = KPolicy(settings.k_rules(), on_gpu=on_gpu, max_num_seqs=settings.max_num_seqs)
        drafting = settings.drafter or DrafterSettings()  # without remote drafters no head is heard of
        self._heads = HeadManager(drafting.spare_heads, drafting.trial_share)
        self._state = StateStore(settings.num_draft_tokens.state, self.k_policy, self._heads, self._channel)
        self._state.restore()
        self._head_counts: dict[str, Counts] = {}
        self._counts_are_new = False
        self._history = ServiceHistory()
        self._history.add_event("router", "the router has started")
        self._monitor = ReplicaMonitor[TargetReport](self._target, self._observe)
        self._drafter = drafter
        self._drafters = None if drafter is None else ReplicaMonitor[DrafterReport](drafter, self._observe_drafters)
        self._handing_out: asyncio.Task[None] | None = None
        self._lost = Counter[str]()  # rounds in a row in which nobody had the files of a head
        self._learner = None if learner is None else ReplicaMonitor[LearnerReport](learner)
        self._autoscaler: Autoscaler | None = None
        if settings.autoscaling is not None:
            self._autoscaler = Autoscaler(settings, self._channel, functools.partial(read_pools, context.app_name))
        compat.warn_of_environment()
        # A replica that takes another's place must know the targets before its first request.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_POLL_S):
                await self._monitor.refresh()
        for monitor in (self._monitor, self._drafters, self._learner):
            if monitor is not None:
                monitor.start()
        self._metrics = PacedCall(self._collect_metrics)
        self._drafting = PacedCall(self._collect_drafting)
        recording = repeat(self._add_point, POINT_S, "the page lacks a point of its history")
        self._recording = asyncio.create_task(recording)

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take other limits, callers, K and aliases while requests run (`cluster.settings.live_config`)."""
        if user_config is not None:
            self._settings = settings_with(self._settings, user_config)
            self.k_policy.rules = self._settings.k_rules()
        if self._settings.callers is None:
            logger.warning(
                "The settings have no section callers: everyone who reaches this port is served, without an API key, "
                "and may set workload tags."
            )

    async def policy_update(self) -> PolicyUpdate:
        """What targets choose K by, and candidates, as of the last reports."""
        update = self.k_policy.make_update(self._monitor.num_ready or 0)
        return dataclasses.replace(update, heads=self._heads.routing, spending=self._state.spending.today)

    # ---- heads

    async def propose(self, proposal: HeadProposal) -> HeadChange:
        """Try a candidate on a share of the requests; `trial` says what becomes of it. Raises ValueError with the
        reason: a damaged head, no room for it, a trial that is under way."""
        files = proposal.files or await asyncio.to_thread(candidate_files, Path(proposal.source))
        digest = hashlib.sha256()
        for file in sorted(files):
            digest.update(files[file])
        name = f"{CANDIDATE}{digest.hexdigest()[:10]}"
        self._heads.check_free()
        await asyncio.to_thread(keep_candidate, name, files, self._heads.names_in_use)
        change = self._heads.propose(name, proposal)
        self._save_head_events()
        return change

    async def trial(self, name: str) -> HeadChange:
        """The newest state of a proposal. Raises ValueError for a name that is not known."""
        return self._heads.get_change(name)

    async def head_back(self) -> HeadChange:
        """End the trial, else roll back the last change of heads. Raises ValueError where there is none."""
        change = self._heads.roll_back()
        self._save_head_events()
        return change

    async def live_head(self) -> HeadRef:
        """`HeadManager.live_head`."""
        return self._heads.live_head

    def _save_head_events(self) -> None:
        """Log what happened to heads, and save the state at once."""
        if self._heads.events:
            for event in self._heads.events:
                logger.warning("%s", event)
                self._history.add_event("head", event)
            self._heads.events.clear()
            self._state.save_soon(is_urgent=True)

    def _observe_drafters(self, drafters: Sequence[DrafterReport]) -> None:
        assert self._drafters is not None
        self._history.observe_replicas(DRAFTER_NAME, drafters, self._drafters.num_ready or 0, time.monotonic())
        self._manage_heads(drafters)

    def _manage_heads(self, drafters: Sequence[DrafterReport]) -> None:
        """Take in what drafters report, and hand the desired heads to all, also to one that has just started."""
        if self._handing_out and not self._handing_out.done():
            return
        self._heads.observe_drafters(drafters)
        missing = {name for drafter in drafters for name in drafter.missing}
        self._lost = Counter({name: self._lost[name] + 1 for name in missing if self._is_lost(name, drafters)})
        for name in (name for name, num_rounds in self._lost.items() if num_rounds >= LOST_ROUNDS):
            self._heads.record_lost(name)
        self._save_head_events()
        desired = self._heads.desired
        if self._heads.is_ready and (missing or any(drafter.desired != desired for drafter in drafters)):
            self._handing_out = asyncio.get_running_loop().create_task(self._hand_out(desired, missing))

    def _is_lost(self, name: str, drafters: Sequence[DrafterReport]) -> bool:
        """Whether neither this router nor any drafter that runs has the files of a head."""
        assert self._drafters is not None
        all_answered = len(drafters) == self._drafters.num_ready
        lacks = all(name in drafter.missing for drafter in drafters)
        return all_answered and lacks and candidate_directory(name) is None

    async def _hand_out(self, desired: DesiredHeads, missing: set[str]) -> None:
        answers: list[Any] = []
        with contextlib.suppress(*REPLICA_LOST, TimeoutError):  # they are asked again
            for name in missing:
                if (directory := candidate_directory(name)) is not None:
                    files = await asyncio.to_thread(candidate_files, directory)
                    answers += await compat.ask_each(self._drafter, "keep_files", SEND_TIMEOUT_S, name, files)
            answers += await compat.ask_each(self._drafter, "apply_desired", POLL_TIMEOUT_S, desired)
        for answer in answers:
            if isinstance(answer, Exception):
                logger.warning("a drafter does not take its heads: %r", answer)

    @staticmethod
    def _num_running(reports: Sequence[TargetReport]) -> Counter[str]:
        """Requests by workload, those of a trial with it."""
        found = Counter[str]()
        for report in reports:
            for name, counts in report.workloads.items():
                found[base_workload(name)] += counts.num_running
        return found

    async def metrics(self) -> bytes:
        """Prometheus text over all replicas. Only counts by head begin anew in a restarted router. It asks every
        replica, so questions share an answer: no client keeps the replicas busy with it."""
        return await self._metrics()

    async def _collect_metrics(self) -> bytes:
        reports = await self._monitor.refresh()
        model = self._settings.model.id
        found = Families()
        telemetry.add_target_metrics(found, reports, self._monitor.num_ready or 0, model)
        telemetry.add_head_metrics(found, self._head_counts)
        telemetry.add_change_metrics(found, self._heads.document())
        telemetry.add_k_metrics(found, self._document(), model)
        telemetry.add_scaling_metrics(found, self._scaling_document())
        for caller, tokens in self._state.spending.today.tokens.items():
            found.add("caller_tokens_today", tokens, caller)
        if self._drafters is not None:
            telemetry.add_drafter_metrics(found, await self._drafters.refresh(), reports)
        if self._learner is not None:
            telemetry.add_learner_metrics(found, self._learner.reports)
        return telemetry.prometheus_text([*found.values(), *await self._replica_families()])

    async def _replica_families(self) -> list[Metric]:
        """What each replica's front end and engine count themselves."""
        families: list[Metric] = []
        with contextlib.suppress(*REPLICA_LOST, TimeoutError):  # what nobody counts is not shown
            for answer in await compat.ask_each(self._target, "front_end_metrics", POLL_TIMEOUT_S):
                if isinstance(answer, tuple):
                    replica, found = answer
                    families += telemetry.labelled(found, replica=replica)
        return families

    async def _add_point(self) -> None:
        families = await self._replica_families()
        samples = [(one.name, one.labels, one.value) for family in families for one in family.samples]
        ks = {row["workload"]: row["k"] for row in self._document()["workloads"]}
        self._history.add_point(samples, ks, time.monotonic())

    async def drafting(self) -> dict[str, Any]:
        """What is known of each workload's acceptance, and the K it gets (`peagle view` shows it); the heads that
        draft, with what was accepted of theirs, remote drafters with the links to them, and how many replicas
        autoscaling wants and why. Questions share an answer, as those for metrics."""
        return await self._drafting()

    async def _collect_drafting(self) -> dict[str, Any]:
        reports = self._monitor.reports
        drafters = () if self._drafters is None else self._drafters.reports
        document = self._document()
        for row in document["workloads"]:
            row |= self._history.times(row["workload"])
        return {
            **document,
            **telemetry.drafting_document(reports, self._head_counts, drafters),
            **self._history.document(time.monotonic()),
            "settings": self._settings.model_dump(mode="json", exclude_none=True, include=SHOWN_SETTINGS),
            "head_changes": self._heads.document(),
            "autoscaling": self._scaling_document(),
            "learner": None if self._learner is None else next(map(dataclasses.asdict, self._learner.reports), None),
        }

    def _scaling_document(self) -> dict[str, Any] | None:
        return None if self._autoscaler is None else self._autoscaler.document

    async def wake_target(self) -> None:
        """A request found no target replica, which alone wakes a target scaled to zero."""
        if self._autoscaler is not None:
            self._autoscaler.wake()

    def _document(self) -> dict[str, Any]:
        return {"model": self._settings.model.id, **self.k_policy.document(time.monotonic())}

    def _observe(self, reports: Sequence[TargetReport]) -> None:
        now_s, policy = time.monotonic(), self.k_policy
        self._history.observe_replicas(TARGET_NAME, reports, self._monitor.num_ready or 0, now_s)
        self._state.spending.observe(reports, time.time())
        deltas = policy.observe(reports, now_s)
        if self._autoscaler is not None:
            self._autoscaler.observe(deltas, reports, self.k_policy)
        if deltas is None:
            return
        self._history.observe(reports, deltas, policy.num_requests, policy.latency, now_s)
        telemetry.add_head_counts(self._head_counts, deltas)
        # The first reports count from the targets' start, and heads may have changed since.
        if self._heads.is_ready and self._counts_are_new:
            weights = "+".join(sorted({report.weights for report in reports} - {""}))
            self._heads.record_counts(deltas, self._num_running(reports), weights)
            self._save_head_events()
        self._counts_are_new = True
        self._state.save_soon()
