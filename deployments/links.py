"""A target replica's links to the drafter replicas: who is there, handed on to the engine, and what the links say.

Enters: the reports of the drafter replicas, once a second, through Ray Serve. Leaves: their addresses and heads, given
to the engine's workers, which connect by themselves (`peagle.drafter.client`); and `LinkReport`s. No draft passes here.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.settings import DrafterSettings
from deployments.readiness import POLL_INTERVAL_S, ReplicaMonitor
from deployments.telemetry import DrafterReport, LinkReport

logger = logging.getLogger(__name__)

Rpc = Callable[..., Awaitable[list[Any]]]
"""vLLM's `collective_rpc`: a method of every worker, by name."""


MAX_MISSED_POLLS = 3
IDLE_POLLS = 10
"""An engine without requests is asked for its links once in so many polls: each call keeps a core of every worker of it
spinning for about a second."""


class Roster:
    """The drafters that are there, or were a moment ago: Serve leaves a replica out while it hands it a `user_config`,
    and a target that dropped it then would leave its new requests without drafts."""

    def __init__(self) -> None:
        self._reports: dict[str, DrafterReport] = {}
        self._num_missed: dict[str, int] = {}

    def update(self, reports: Iterable[DrafterReport]) -> list[DrafterReport]:
        """The newest report of each drafter that was missed no more than `MAX_MISSED_POLLS` times in a row."""
        present = {one.address: one for one in reports}
        self._num_missed = {
            address: 0 if address in present else self._num_missed.get(address, 0) + 1
            for address in {**self._reports, **present}
        }
        known = {**self._reports, **present}
        self._reports = {address: known[address] for address, n in self._num_missed.items() if n <= MAX_MISSED_POLLS}
        return list(self._reports.values())


class DrafterLinks:
    """Keeps one engine connected. `heads`: digests by index of the heads that draft, () before any drafter answers."""

    def __init__(
        self, drafter: DeploymentHandle[Any], rpc: Rpc, settings: DrafterSettings, is_busy: Callable[[], bool]
    ) -> None:
        """`is_busy`: whether the engine has requests."""
        self._monitor = ReplicaMonitor(drafter, DrafterReport)
        self._rpc = rpc
        self._settings = settings
        self._roster = Roster()
        self._told: list[dict[str, Any]] | None = None
        self._problem = ""
        self._is_busy = is_busy
        self._num_polls, self._awake_until = 0, 0
        self._task: asyncio.Task[None] | None = None
        self.heads: tuple[str, ...] = ()
        self.links: tuple[LinkReport, ...] = ()

    def start(self, on_change: Callable[[str, Mapping[str, str]], None]) -> None:
        """Begin on the running event loop. `on_change` gets the digests of the default head and of workloads' heads
        each time they change."""
        self._task = asyncio.get_running_loop().create_task(self._keep(on_change))

    async def _keep(self, on_change: Callable[[str, Mapping[str, str]], None]) -> None:
        told = self.heads  # a poll may fail after the heads changed: the next one tells it then
        while True:
            try:
                await self.poll()
                if self.heads != told:
                    on_change(*self.by_workload())
                    told = self.heads
                self._problem = ""
            except Exception as error:  # without drafters the engine serves on, and this goes on trying
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    logger.exception("the drafters cannot be handed to the engine; it serves without them meanwhile")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> None:
        """Ask the drafters who they are, tell the engine what changed, and ask it for its links."""
        reports = self._roster.update(await self._monitor.refresh())
        drafters = drafters_of(reports)
        if drafters != self._told:
            await self._rpc("set_drafters", args=(drafters,))
            self._told, self._awake_until = drafters, self._num_polls + IDLE_POLLS
            logger.info("drafters: %s", ", ".join(one["address"] for one in drafters) or "none")
        self.heads = agreed_heads(reports) or self.heads
        if self._is_busy():
            self._awake_until = max(self._awake_until, self._num_polls + 2)  # the last counts of a burst
        if self._num_polls < self._awake_until or self._num_polls % IDLE_POLLS == 0:
            self.links = link_reports(await self._rpc("remote_report"))
        self._num_polls += 1

    def by_workload(self) -> tuple[str, dict[str, str]]:
        """The default head's digest, and those of the workloads that have heads of their own."""
        settings = self._settings
        own = {workload: self.heads[settings.head_index(workload)] for workload in settings.heads_by_workload}
        return self.heads[0], own


def drafters_of(reports: Iterable[DrafterReport]) -> list[dict[str, Any]]:
    """What the engine's `set_drafters` takes: each drafter's address and key, and the digests of its heads by index."""
    found = [
        {"address": one.address, "key": one.key, "heads": {head.index: head.digest for head in one.heads}}
        for one in reports
    ]
    return sorted(found, key=lambda one: str(one["address"]))


def agreed_heads(reports: Iterable[DrafterReport]) -> tuple[str, ...]:
    """Digests by index that most drafters have; () without drafters, or while as many have others: in a swap they
    change one after another, and a head is new once."""
    votes = Counter(tuple(head.digest for head in one.heads) for one in reports).most_common(2)
    if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
        return ()
    return votes[0][0]


def link_reports(answers: Iterable[Any]) -> tuple[LinkReport, ...]:
    """The links of the one worker of an engine that has them; the others answer with nothing."""
    return tuple(
        LinkReport(
            link["address"],
            link["state"],
            link["path"],
            link["problem"],
            link["average_pass_s"],
            {
                name[4:]: float(value)
                for name, value in link.items()
                if name[:4] in ("num_", "sum_") and name != "num_requests"
            },
        )
        for answer in answers
        if answer
        for link in answer["pool"]["links"]
    )
