"""Which replicas of a deployment answer right now, as one ingress replica sees them, and what they report."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ray.serve.handle import DeploymentHandle

from deployments.requests import REPLICA_LOST

ReportT = TypeVar("ReportT")

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 5.0


class ReplicaMonitor(Generic[ReportT]):
    """Asks every running replica of a deployment for its report, once a second.

    A target replica runs when its engine has loaded, and leaves when it dies or its engine does. A replica that is
    only slow to answer stays what it was: being busy is no reason to turn requests away.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        kind: type[ReportT],
        on_reports: Callable[[Sequence[ReportT]], None] | None = None,
    ) -> None:
        """`kind`: what a report is. `on_reports` gets the reports each time they have come; it must not raise."""
        self._handle = handle
        self._kind = kind
        self._on_reports = on_reports
        self._reports: list[ReportT] = []
        self._num_asked, self._newest = 0, 0
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def num_ready(self) -> int:
        """Replicas that answered last."""
        return len(self._reports)

    def start(self) -> None:
        """Begin to poll on the running event loop, once."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll_forever())

    @property
    def reports(self) -> Sequence[ReportT]:
        """What the replicas said last."""
        return self._reports

    async def refresh(self) -> Sequence[ReportT]:
        """The replicas' reports, asked for now; the last known ones when they are slow to answer. Of two calls at a
        time, the one that asked first counts for nothing once the other has its answers: counters would go back."""
        self._num_asked += 1
        asked = self._num_asked
        try:
            answers = await self._handle.broadcast("report").results_async(
                timeout_s=POLL_TIMEOUT_S, return_exceptions=True
            )
        except TimeoutError:
            return self._reports
        except REPLICA_LOST:
            answers = []
        if asked < self._newest:
            return self._reports
        self._newest = asked
        self._reports = [answer for answer in answers if isinstance(answer, self._kind)]
        if self._on_reports is not None:
            self._on_reports(self._reports)
        return self._reports

    async def _poll_forever(self) -> None:
        while True:
            num_before = self.num_ready
            try:
                await self.refresh()
                self._problem = ""
            except Exception as error:  # what is known grows old meanwhile, and this goes on asking
                if repr(error) != self._problem:
                    self._problem = repr(error)
                    logger.exception("%s: its replicas cannot be asked", self._handle.deployment_name)
            if self.num_ready != num_before:
                logger.info("%s: %d replicas ready", self._handle.deployment_name, self.num_ready)
            await asyncio.sleep(POLL_INTERVAL_S)
