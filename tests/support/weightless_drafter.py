"""A drafter replica whose heads have no weights, without Ray and without a server: what it does with heads is real."""

import asyncio
from types import SimpleNamespace
from typing import Any

from cluster.heads import HeadOrders, HeadRef
from cluster.settings import DrafterSettings
from deployments.drafter import DrafterReplica
from deployments.replicas import DrafterReport
from peagle.drafter.engine import Counters
from peagle.drafter.server import ServerStats


class WeightlessDrafter(DrafterReplica):
    def __init__(self, settings: DrafterSettings, loader: Any, replica: str = "r0") -> None:
        """loader: in the place of `HeadLoader`."""
        self._replica, self._key, self._settings, self._loader = replica, "", settings, loader
        self._refused, self._is_configured, self._orders = "", False, HeadOrders()
        self._swapping, self._swaps = asyncio.Lock(), set()
        self._problems, self._lacking = {}, ()
        self._places = {place: loader.load(name) for place, name in enumerate(settings.heads)}
        self._live = self._configured = tuple(HeadRef(head.name, head.digest) for head in self._places.values())
        engine: Any = SimpleNamespace(counters=Counters())
        server: Any = SimpleNamespace(swap=lambda *_: None, stats=ServerStats(), address="h:1")
        self._engine, self._server = engine, server

    def __del__(self) -> None: ...  # type: ignore[override]

    async def settle(self) -> DrafterReport:
        """Its report once it has done what it was told."""
        await asyncio.gather(*self._swaps)
        return await self.report()
