"""Another Ray is refused at the start, and what Serve's proxy answers itself is in OpenAI's form."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray._private import services
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

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


async def get(app: Any, path: str = "/", **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.get(path, **options)


def proxied(answer: Any) -> httpx.Response:
    return asyncio.run(get(Starlette(routes=[Route("/", lambda _: answer)], middleware=compat.proxy_middlewares())))


async def test_a_header_that_serve_cannot_read_is_the_clients_fault() -> None:
    async def serves(scope: Any, receive: Any, send: Any) -> None:
        b"".join(value for _, value in scope["headers"]).decode("utf-8")

    response = await get(compat.PlainErrors(serves), headers=[(b"x-request-id", b"\xff")])
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_errors_of_the_proxy_come_in_openais_form() -> None:
    for status, text, ours, code in (
        (500, "The actor died unexpectedly before finishing this task.", 503, "server_lost"),
        (404, "Path '/x' not found.", 404, None),
    ):
        response = proxied(PlainTextResponse(text, status, headers={"x-kept": "1"}))
        assert (response.status_code, response.headers["x-kept"]) == (ours, "1")
        assert response.json()["error"]["code"] == code
        assert int(response.headers["content-length"]) == len(response.content)


def test_what_the_service_answers_passes_as_it_is() -> None:
    async def events() -> Any:
        for number in range(3):
            yield f"data: {number}\n\n"

    assert proxied(StreamingResponse(events(), media_type="text/event-stream")).text.count("data:") == 3
    response = proxied(JSONResponse(refused := {"error": {"message": "no"}}, 500))
    assert (response.status_code, response.json()) == (500, refused)


class Proxy:
    """In the place of Serve's: hands a request to the replica that there is, or waits for one. `seconds`: that the
    replica takes to begin its answer."""

    def __init__(self, num_replicas: int, seconds: float = 0.0, deployment: str = "target") -> None:
        self.replicas = dict.fromkeys(range(num_replicas))
        self.seconds = seconds
        router = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=self.replicas))
        asyncio_router = SimpleNamespace(_asyncio_router=router)
        handle = SimpleNamespace(deployment_name=deployment, app_name="app", _router=asyncio_router)
        self.proxy_router = SimpleNamespace(match_route=lambda path: ("/", handle, False))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            while not self.replicas:
                await asyncio.sleep(0.01)
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            await PlainTextResponse("cancelled", 499)(scope, receive, send)
            raise
        await PlainTextResponse("fine")(scope, receive, send)


async def answered(proxy: Proxy, path: str = "/v1/models", *, gone_s: float, back_s: float = 60.0) -> httpx.Response:
    """Its answer where the replicas go, and one comes, after this time."""
    loop = asyncio.get_running_loop()
    loop.call_later(gone_s, proxy.replicas.clear)
    loop.call_later(back_s, proxy.replicas.setdefault, 1)
    return await get(compat.NoReplica(proxy), path)


async def test_a_replica_may_take_its_time_also_while_it_takes_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MAX_WAIT_S", 15.0)
    response = await answered(Proxy(1, seconds=1.0), gone_s=0.1, back_s=0.8)
    assert (response.status_code, response.text) == (200, "fine")


async def test_one_whose_last_replica_goes_before_its_answer_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "MAX_WAIT_S", 0.05)
    response = await answered(Proxy(1, seconds=60.0), gone_s=0.1)
    assert response.json()["error"]["code"] == "model_not_ready", "and not what the proxy says of the end"


async def test_other_applications_and_probes_of_the_proxy_are_left_alone() -> None:
    for proxy, path in ((Proxy(0, deployment="another"), "/v1/models"), (Proxy(0), "/-/healthz")):
        assert (await answered(proxy, path, gone_s=0.0, back_s=0.8)).status_code == 200
