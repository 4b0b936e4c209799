"""Another Ray is refused at the start, and Serve's proxy refuses what it has no replica for."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray._private import services
from starlette.responses import PlainTextResponse

from deployments import compat


def test_another_ray_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.61.0")
    with pytest.raises(compat.CompatError, match=r"^Ray 2\.61\.0 is not supported, 2\.60 is: .*$"):
        compat.check()


def test_a_killed_cluster_of_which_ray_keeps_a_note_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", set)  # others may run Ray on this machine
    assert compat.local_cluster() is None
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        note.write_text(f"127.0.0.1:{port}")
        assert str(compat.local_cluster()).endswith(f":{port}")
    assert compat.local_cluster() is None


class Proxy:
    """In the place of Serve's: hands a request to the replica that there is, or waits for one."""

    def __init__(self, num_replicas: int, deployment: str = "target") -> None:
        self.replicas = dict.fromkeys(range(num_replicas))
        router = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=self.replicas))
        handle = SimpleNamespace(
            deployment_name=deployment, app_name="app", _router=SimpleNamespace(_asyncio_router=router)
        )
        self.proxy_router = SimpleNamespace(match_route=lambda path: ("/", handle, False))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while not self.replicas:
            await asyncio.sleep(0.01)
        await PlainTextResponse("fine")(scope, receive, send)


async def through(proxy: Proxy, path: str = "/v1/models") -> httpx.Response:
    transport = httpx.ASGITransport(compat.NoReplica(proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get(path)


async def test_a_request_waits_for_a_replica_for_a_moment_only() -> None:
    proxy = Proxy(0)
    asyncio.get_running_loop().call_later(0.1, proxy.replicas.setdefault, 1)
    assert (await through(proxy)).text == "fine"
    proxy.replicas.clear()
    refused = await through(proxy)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
    assert "retry-after" in refused.headers


def test_other_applications_and_probes_of_the_proxy_are_left_alone() -> None:
    async def run(proxy: Proxy, path: str) -> int:
        asyncio.get_running_loop().call_later(0.8, proxy.replicas.setdefault, 1)
        return (await through(proxy, path)).status_code

    assert asyncio.run(run(Proxy(0, deployment="another"), "/v1/models")) == 200
    assert asyncio.run(run(Proxy(0), "/-/healthz")) == 200
