"""The ingress, a router that answers HTTP itself: with `ingress.num_replicas` its replicas stand before the targets.

What their edges admit goes to a target by handle. Ready means ready: while no target replica runs, a request gets 503
with Retry-After and does not wait.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.counts import TargetReport
from cluster.settings import ClusterSettings
from deployments import INGRESS_NAME
from deployments.errors import engine_lost, not_ready
from deployments.front_end import QUEUED_PER_RUNNING, Admitted, Answer, FrontEnd
from deployments.replicas import is_lost
from deployments.router import Router
from deployments.routes import Entrance, make_app

WATCH_INTERVAL_S = 1.0


class Ingress(Router):
    """One of the replicas that answer HTTP in the targets' place."""

    async def __init__(  # type: ignore[misc]
        self, settings: ClusterSettings, drafter: DeploymentHandle[Any] | None, target: DeploymentHandle[Any]
    ) -> None:
        self.front_end = FrontEnd(settings)
        await super().__init__(settings, drafter, target)
        self.front_end.k_policy = self.k_policy
        own = serve.get_deployment_handle(INGRESS_NAME, app_name=serve.get_replica_context().app_name)
        self._edges = {"ingress": own, **self._edges}

    async def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self, await asyncio.to_thread(Entrance.read_from_serve, self._settings.ingress))

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        await super().reconfigure(user_config)
        self.front_end.use(self._settings, self.k_policy)

    async def health(self) -> dict[str, Any]:
        if not self._monitor.num_ready:
            raise not_ready(self.front_end.model)
        return {"status": "ready", "model": self.front_end.model, "num_target_replicas": self._monitor.num_ready}

    async def edge_metrics(self) -> tuple[str, list[Any]]:
        """This replica, and what its clients saw, as `EdgeMetrics.families`."""
        return self._replica, self.front_end.families()

    def _observe(self, reports: Sequence[TargetReport]) -> None:
        super()._observe(reports)
        num_targets = max(1, self._monitor.num_ready or 0)
        self.front_end.set_max_running(QUEUED_PER_RUNNING * num_targets * self._settings.max_num_seqs)

    async def generate(self, admitted: Admitted) -> Answer:
        """A target replica's answer to what the front end has admitted."""
        if self._monitor.num_ready == 0:
            if self._scaling is not None:
                await self._scaling.ask()
            yield not_ready(self.front_end.model)
            return
        answer: Any = self._target.options(stream=True).generate.remote(admitted)
        has_begun = is_complete = False
        try:
            item = await self._first(answer)
            if item is None:
                yield not_ready(self.front_end.model)
                return
            has_begun = True
            yield item
            async for item in answer:
                yield item
            is_complete = True
        except Exception as error:
            if not is_lost(error):
                raise
            is_complete = True
            yield engine_lost() if has_begun else not_ready(self.front_end.model)
        finally:
            if not is_complete:
                answer.cancel()

    async def _first(self, answer: Any) -> Any:
        """The first item of `answer`; None where every replica goes away while it waits to be routed to one."""
        task = asyncio.ensure_future(anext(answer))
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_INTERVAL_S))[0]:
                if self._monitor.num_ready == 0:
                    return None
            return task.result()
        finally:
            task.cancel()


HttpIngress = serve.ingress(None)(Ingress)
