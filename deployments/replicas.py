"""What the replicas of a deployment say of themselves, and a target's links to the drafter replicas: its engine is told
their addresses and heads, and its workers connect by themselves (`peagle.drafter.client`).
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.heads import DrafterReport
from cluster.settings import ClusterSettings, with_live
from deployments.compat import ask_each
from peagle.schema import SettingsError

ReportT = TypeVar("ReportT")

logger = logging.getLogger(__name__)

METRICS_INTERVAL_S = 0.5
"""What `GET /metrics` and `GET /drafting` show is collected at most so often: one client may ask without end."""
POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 5.0
MAX_DRAIN_S = 60.0
"""Time for which a drafter that Serve retires drafts on, for the requests that it has."""
MAX_SMALL_MACHINE_CORES = 4
"""Up to this number the target and the drafter compute on all cores each, else the drafter on half."""


class PacedCall(Generic[ReportT]):
    """A coroutine function that starts at most once in `interval_s`, and when it has ended: all who ask before a start
    get its result."""

    def __init__(self, work: Callable[[], Awaitable[ReportT]], interval_s: float = METRICS_INTERVAL_S) -> None:
        self._work, self._interval_s, self._started_s = work, interval_s, -math.inf
        self._next: asyncio.Task[ReportT] | None = None
        self._lock = asyncio.Lock()

    async def __call__(self) -> ReportT:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._start())
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for it
        return await asyncio.shield(self._next)

    async def _start(self) -> ReportT:
        async with self._lock:
            await asyncio.sleep(self._started_s + self._interval_s - time.monotonic())
            self._next, self._started_s = None, time.monotonic()
            return await self._work()


async def repeat(work: Callable[[], Awaitable[Any]], interval_s: float, problem: str, *, at_once: bool = False) -> None:
    """Run `work` for ever, `interval_s` after it has ended; the first time after `interval_s` too, or `at_once`. An
    error is logged behind `problem`, once until another one or none comes."""
    known = ""
    await asyncio.sleep(0.0 if at_once else interval_s)
    while True:
        try:
            await work()
            known = ""
        except Exception as error:
            if repr(error) != known:
                known = repr(error)
                logger.warning("%s: %s", problem, error, exc_info=error)
        await asyncio.sleep(interval_s)


class EngineLost(RuntimeError):
    """A target's engine has died; its replica goes too."""


REPLICA_LOST = (EngineLost, RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)
"""What a call raises when its replica is gone: try again later, nothing was wrong with the request."""


def is_lost(error: BaseException) -> bool:
    """Whether an error, or what Ray says caused it, means that its replica is gone, or its engine dead."""
    return isinstance(error, REPLICA_LOST) or isinstance(getattr(error, "cause", None), REPLICA_LOST)


def settings_with(settings: ClusterSettings, user_config: Any) -> ClusterSettings:
    """`settings` with a `user_config` of Serve's, for what changes while requests run. One that cannot be is logged and
    left out: Serve ends a replica that raises, and the next one would raise too."""
    try:
        return with_live(settings, user_config)
    except SettingsError as error:
        logger.error("The user_config is refused, and the settings stay as they were. %s", error)
        return settings


class ReplicaMonitor(Generic[ReportT]):
    """Asks every running replica of a deployment for its report, once a second.

    `num_ready` counts the replicas that run, whatever becomes of their reports: one that is slow to answer, or fails to
    report, still serves. Only a replica that is gone, or whose engine is dead, is none.
    """

    def __init__(
        self, handle: DeploymentHandle[Any], on_reports: Callable[[Sequence[ReportT]], Any] = lambda _: None
    ) -> None:
        """`on_reports` gets the reports each time that they have come."""
        self._handle, self._on_reports = handle, on_reports
        self._num_asked, self._newest = 0, 0
        self._problems: set[str] = set()
        self.num_ready: int | None = None
        """None until the replicas were asked for the first time."""
        self.reports: Sequence[ReportT] = ()
        """What the replicas said last."""

    def start(self) -> None:
        """Begin to poll on the running event loop."""
        problem = f"{self._handle.deployment_name}: its reports cannot be read"
        self._task = asyncio.create_task(repeat(self.refresh, POLL_INTERVAL_S, problem, at_once=True))

    async def refresh(self) -> Sequence[ReportT]:
        """The replicas' reports, asked for now. If two calls overlap and the later one has its answers first, the
        answers of the earlier one are dropped: counters would go back."""
        self._num_asked += 1
        asked = self._num_asked
        answers: list[Any] = []
        try:
            answers = await ask_each(self._handle, "report", POLL_TIMEOUT_S)
        except REPLICA_LOST:
            pass
        except Exception as error:  # noqa: BLE001  # nobody could be asked: what is known of the replicas grows old meanwhile
            self._log("its replicas cannot be asked", error)
            return self.reports
        if asked < self._newest:
            return self.reports
        self._newest = asked
        problems = [answer for answer in answers if isinstance(answer, BaseException) and not is_lost(answer)]
        for problem in problems:
            self._log("a replica does not report; it goes on serving", problem)
        if not problems:
            self._problems.clear()
        reports = [answer for answer in answers if not isinstance(answer, BaseException)]
        num_ready = len(problems) + len(reports)
        if num_ready != self.num_ready:
            logger.info("%s: %d replicas ready", self._handle.deployment_name, num_ready)
        self.num_ready, self.reports = num_ready, reports
        try:
            self._on_reports(self.reports)
        except Exception as error:  # noqa: BLE001  # the replicas are up all the same
            self._log("the reports cannot be taken in", error)
        return self.reports

    def _log(self, what: str, error: BaseException) -> None:
        """Each problem is logged once, not once a second, until there is none."""
        if repr(error) not in self._problems:
            self._problems.add(repr(error))
            logger.error("%s: %s", self._handle.deployment_name, what, exc_info=error)


# ---- drafters, as targets see them

MAX_MISSED_POLLS = 3
IDLE_POLLS = 10
"""Polls from one question for the links of an engine without requests to the next: each keeps a core of every worker
spinning for about a second."""


class DrafterLinks:
    """Keeps one engine connected to the drafters that are there, or were a moment ago: Serve leaves a replica out while
    it hands it a `user_config`, and a target that dropped it then would leave its new requests without drafts. Somebody
    must repeat `poll`, every `POLL_INTERVAL_S`.

    rpc: vLLM's `collective_rpc`, a method of every worker by name. is_busy: whether the engine has requests. on_heads:
    gets the digests by index of the heads that draft, each time that drafters agree on them.
    """

    def __init__(
        self,
        drafter: DeploymentHandle[Any],
        rpc: Callable[..., Awaitable[list[Any]]],
        is_busy: Callable[[], bool],
        on_heads: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._drafter, self._rpc, self._is_busy, self._on_heads = drafter, rpc, is_busy, on_heads
        self._known: dict[str, tuple[DrafterReport, int]] = {}  # by address, with the polls that missed it in a row
        self._handed_on: list[dict[str, Any]] | None = None
        self._num_polls, self._awake_until = 0, 0
        self.links: tuple[dict[str, Any], ...] = ()

    async def poll(self) -> None:
        """Ask the drafters who they are, tell the engine what changed, and ask it for its links."""
        try:
            answers = await ask_each(self._drafter, "report", POLL_TIMEOUT_S)
        except REPLICA_LOST:
            answers = []
        reports = self.newest_reports(answer for answer in answers if isinstance(answer, DrafterReport))
        drafters: list[dict[str, Any]] = [
            {"address": one.address, "key": one.key, "heads": {n: head.digest for n, head in enumerate(one.heads)}}
            for one in sorted(reports, key=lambda report: report.address)
        ]
        if drafters != self._handed_on:
            await self._rpc("set_drafters", args=(drafters,))
            self._handed_on, self._awake_until = drafters, self._num_polls + IDLE_POLLS
            logger.info("drafters: %s", ", ".join(drafter["address"] for drafter in drafters) or "none")
        if heads := agreed_heads(reports):
            self._on_heads(heads)
        if self._is_busy():
            self._awake_until = max(self._awake_until, self._num_polls + 2)  # the last counts of a burst
        if self._num_polls < self._awake_until or self._num_polls % IDLE_POLLS == 0:
            self.links = link_reports(await self._rpc("remote_report"))
        self._num_polls += 1

    def newest_reports(self, reports: Iterable[DrafterReport]) -> list[DrafterReport]:
        """The newest report of each drafter that was missed no more than `MAX_MISSED_POLLS` times in a row."""
        kept = {address: (report, n + 1) for address, (report, n) in self._known.items() if n < MAX_MISSED_POLLS}
        self._known = {**kept, **{report.address: (report, 0) for report in reports}}
        return [report for report, _ in self._known.values()]


def agreed_heads(reports: Iterable[DrafterReport]) -> tuple[str, ...]:
    """Digests by index that most drafters have; () without drafters, or while as many have others: in a swap they
    change one after another, and a head is new once."""
    votes = Counter(tuple(head.digest for head in report.heads) for report in reports).most_common(2)
    if not votes or (len(votes) == 2 and votes[0][1] == votes[1][1]):
        return ()
    return votes[0][0]


def link_reports(answers: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """The links of the one worker of an engine that has them, as `GET /drafting` shows them; other workers answer with
    nothing."""
    return tuple(link for answer in answers if answer for link in answer["links"])
