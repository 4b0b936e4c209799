"""A drafter replica whose heads have no weights, without Ray and without a server: what it does with heads is real."""

import asyncio
from types import SimpleNamespace
from typing import Any

from cluster.heads import DrafterReport
from cluster.settings import DrafterSettings
from deployments.drafter import DrafterReplica, HeadSlots
from peagle.drafter.engine import Counters
from peagle.drafter.server import ServerStats


class WeightlessDrafter(DrafterReplica):
    def __init__(self, settings: DrafterSettings, loader: Any, replica: str = "r0") -> None:
        """loader: in the place of `HeadLoader`."""
        server: Any = SimpleNamespace(swap=lambda *_: None, stats=ServerStats(), address="h:1")
        engine: Any = SimpleNamespace(counters=Counters())
        self._replica, self._key, self._is_configured, self._swaps = replica, "", False, set()
        self._heads, self._engine, self._server = HeadSlots(settings, loader), engine, server
        self._heads.server = server

    def __del__(self) -> None: ...  # type: ignore[override]

    async def settle(self) -> DrafterReport:
        """Its report once it has done what it was told."""
        await asyncio.gather(*self._swaps)
        return await self.report()
