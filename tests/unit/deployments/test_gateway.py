"""The gateway in front of several models: a real server before real servers, without Ray."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from benchmarks.common import free_port
from deployments import compat, gateway
from deployments.errors import json_response, not_ready
from deployments.gateway import Forwarder, GatewaySettings
from peagle.schema import SettingsError

MODELS = {"org/coder": "/coder", "small-coder": "/coder", "chat": "/chat"}


class Model:
    """One application, which says what it got."""

    def __init__(self, name: str) -> None:
        self.name, self.is_ready = name, True
        self.pause = asyncio.Event()
        self.has_left = asyncio.Event()

    async def answer(self, request: Request) -> Response:
        if not self.is_ready:
            return json_response(not_ready("The service"))
        body = await request.body()
        if body and json.loads(body).get("stream"):
            return StreamingResponse(self.stream(), media_type="text/event-stream", headers={"x-own": "1"})
        if body and json.loads(body).get("waits"):
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.has_left.set()
        path = request.url.path
        if path.endswith("/models"):
            if request.headers.get("authorization") == "Bearer wrong":
                return JSONResponse({"error": {}}, 401)
            return JSONResponse({"data": [{"id": self.name, "max_model_len": 7}]})
        if path.endswith(("/health", "/ping")):
            return JSONResponse({})
        if path.endswith("/metrics"):
            return PlainTextResponse(f'# TYPE a_total counter\na_total{{x="{self.name}"}} 1\n')
        sent = [[name.decode(), value.decode()] for name, value in request.headers.raw]
        return JSONResponse({"model": self.name, "path": path, "headers": sent, "body": body.decode()}, 201)

    async def stream(self) -> AsyncIterator[str]:
        try:
            yield "data: 1\n\n"
            await self.pause.wait()
            yield "data: 2\n\n"
        finally:
            self.has_left.set()


@contextlib.asynccontextmanager
async def server(app: Any) -> AsyncIterator[str]:
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = running.force_exit = True
        await task


@pytest.fixture
def coder() -> Model:
    return Model("org/coder")


@pytest.fixture
def chat() -> Model:
    return Model("chat")


@pytest.fixture
async def client(coder: Model, chat: Model, request: Any, monkeypatch: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of the gateway in front of the two models. A parameter is its own prefix, and how many requests it forwards."""
    own_prefix, num_forwarded = getattr(request, "param", ("", gateway.MAX_FORWARDED))
    monkeypatch.setattr(gateway, "MAX_FORWARDED", num_forwarded)
    every = ["GET", "POST", "HEAD"]
    mounts = [
        Mount(prefix, Starlette(routes=[Route("/{path:path}", model.answer, methods=every)]))
        for prefix, model in (("/coder", coder), ("/chat", chat))
    ]
    settings = GatewaySettings(models=MODELS, max_body_bytes=1000)
    async with server(Starlette(routes=mounts)) as url:
        forwarder = Forwarder(settings, url, "X-Secret", "token")
        app = Starlette(routes=[Mount(own_prefix, forwarder.app())]) if own_prefix else forwarder.app()
        async with server(app) as own, httpx.AsyncClient(base_url=own + own_prefix, timeout=30) as client:
            yield client
        await forwarder.session.close()


async def test_a_request_goes_unchanged_to_the_application_of_its_model(client: httpx.AsyncClient) -> None:
    for name, served in (("org/coder", "org/coder"), ("small-coder", "org/coder"), ("chat", "chat")):
        body = json.dumps({"model": name, "messages": []}, indent=3)
        headers = {"Authorization": "Bearer k", "X-Drafting-K": "3", "Content-Type": "application/json"}
        answer = await client.post("/v1/chat%20x?a=%2F", content=body, headers=headers)
        got = answer.json()
        assert (answer.status_code, got["model"], got["body"]) == (201, served, body)
        assert got["path"] == f"{MODELS[name]}/v1/chat x"
        sent = {key: value for key, value in answer.request.headers.items() if key != "connection"}
        assert {key: value for key, value in got["headers"] if key != "connection"} == sent
    first = await client.get("/version")
    assert (first.json()["path"], first.json()["body"]) == ("/coder/version", "")


async def test_the_clients_address_comes_with_a_proof_and_none_of_the_clients_own_making(client: Any) -> None:
    forged = [(compat.GATEWAY_HEADER, "token 10.0.0.1"), ("X-Secret", "10.0.0.2"), ("X-Secret", "192.0.2.7")]
    got = (await client.post("/v1/x", json={"model": "chat"}, headers=forged)).json()["headers"]
    assert [value for name, value in got if name in (compat.GATEWAY_HEADER, "x-secret")] == ["token 192.0.2.7"]


async def test_streams_come_piece_by_piece_and_end_when_their_client_leaves(client: Any, coder: Any, chat: Any) -> None:
    async with client.stream("POST", "/v1/x", json={"model": "org/coder", "stream": True}) as answer:
        assert (answer.status_code, answer.headers["x-own"]) == (200, "1")
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.aiter_text()
        assert await anext(pieces) == "data: 1\n\n"
        coder.pause.set()
        assert await anext(pieces) == "data: 2\n\n"
    async with client.stream("POST", "/v1/x", json={"model": "chat", "stream": True}) as answer:
        assert await anext(answer.aiter_text()) == "data: 1\n\n"
    await chat.has_left.wait()
    chat.has_left.clear()
    waiting = asyncio.create_task(client.post("/v1/x", json={"model": "chat", "waits": True}))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await chat.has_left.wait()


async def test_a_model_that_is_not_ready_refuses_its_own_requests_only(client: Any, coder: Model, chat: Model) -> None:
    chat.is_ready = False
    refused = await client.post("/v1/x", json={"model": "chat"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (503, "model_not_ready", "5")
    assert "'chat'" in error["message"]
    assert (await client.post("/v1/x", json={"model": "org/coder"})).status_code == 201
    listed = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == list(MODELS)
    assert [card.get("max_model_len") for card in listed] == [7, None, None]
    assert (await client.get("/v1/models/chat/")).json()["id"] == "chat"
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    assert (await client.post("/v1/messages", json={"model": "chat"})).json()["type"] == "error"
    assert (await client.get("/health")).json()["models"]["chat"] == "not ready"
    # HAProxy sends what belongs to an application that is not deployed yet to the one at /.
    assert (await client.post("/chat/v1/x", json={"model": "org/coder"})).json()["error"]["code"] == "model_not_ready"
    coder.is_ready = False
    assert (await client.get("/health")).status_code == 503


async def test_what_belongs_to_no_model_is_refused_here(client: httpx.AsyncClient) -> None:
    for sent, status, param, code in (
        ({"json": {"model": "other"}}, 404, "model", "model_not_found"),
        ({"json": {"messages": []}}, 400, "model", "invalid_value"),
        ({"json": {"model": ["chat"]}}, 404, "model", "model_not_found"),
        ({"content": b"{"}, 400, None, "invalid_json"),
        ({"content": b"[]"}, 400, None, "invalid_value"),
        ({"content": b'{"x": ' + b"[" * 900}, 400, None, "invalid_json"),
        ({"content": b'{"model": "\xff"}'}, 400, None, "invalid_json"),
        ({"content": b"x" * 1001}, 413, None, "too_large"),
    ):
        answer = await client.post("/v1/x", **sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code), sent


async def test_what_is_asked_with_another_method_is_the_applications_to_refuse(client: httpx.AsyncClient) -> None:
    """As at a replica, GET alone has an answer but at /ping, where SageMaker may ask either way."""
    for path, answer in ("/v1/models", {"data": [{"id": "chat", "max_model_len": 7}]}), ("/health", {}):
        assert (await client.get(path)).json() != answer
        assert (await client.post(path, json={"model": "chat"})).json() == answer
    assert (await client.post("/ping")).json()["status"] == "ready"


@pytest.mark.parametrize("client", [("/front", 1)], indirect=True)
async def test_more_requests_than_it_forwards_are_refused_and_its_prefix_is_its_own(client: Any, coder: Model) -> None:
    assert (await client.get("/health")).status_code == 200
    body = {"model": "org/coder", "stream": True}
    async with client.stream("POST", "/v1/x", json=body) as answer:
        assert await anext(answer.aiter_text()) == "data: 1\n\n"
        refused = await client.post("/v1/x", json=body)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    await coder.has_left.wait()
    got = await client.post("/v1/x", json={"model": "org/coder"})
    assert (got.status_code, got.json()["path"]) == (201, "/coder/v1/x")


@pytest.mark.parametrize("client", [("", 4)], indirect=True)
async def test_one_client_leaves_places_for_others(client: httpx.AsyncClient) -> None:
    body = {"model": "org/coder", "stream": True}

    async def ask(address: str) -> int:
        sent = client.build_request("POST", "/v1/x", json=body, headers={"X-Secret": address})
        answer = await client.send(sent, stream=True)
        held.push_async_callback(answer.aclose)
        return answer.status_code

    async with contextlib.AsyncExitStack() as held:
        assert [await ask("192.0.2.1") for _ in range(4)] == [200, 200, 200, 429]
        assert [await ask("192.0.2.2") for _ in range(2)] == [200, 429]


async def test_metrics_of_all_models_stand_side_by_side_and_keys_are_asked_for(client: httpx.AsyncClient) -> None:
    lines = (await client.get("/metrics")).text.splitlines()
    assert lines[1:] == [
        "# TYPE a_total counter",
        'a_total{application="/coder",x="org/coder"} 1.0',
        'a_total{application="/chat",x="chat"} 1.0',
    ]
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})).status_code == 401


def test_wrong_settings_are_named() -> None:
    for raw, text in (
        ({}, "missing key models"),
        ({"models": {}}, "models is empty"),
        ({"models": {"a": "/"}}, "models.a is '/'"),
        ({"models": {"a": "/a"}, "model": 1}, "unknown key model"),
    ):
        with pytest.raises(SettingsError, match=text):
            GatewaySettings.read(raw)
