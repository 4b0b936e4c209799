"""HAProxy as this service configures it, the real one, controlled by Ray's own code without Ray. Serve's own proxy."""

import asyncio
import contextlib
import os
import signal
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray._private import services
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from benchmarks.common import free_port
from deployments import compat, errors, haproxy
from deployments.up import ray_environment


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A started HAProxy; a parameter is how it balances."""
    monkeypatch.setenv(compat.ADDRESS_HEADER_ENV, ray_environment()[compat.ADDRESS_HEADER_ENV])
    http, stats, metrics = (free_port() for _ in range(3))
    started = HAProxyApi(
        HAProxyConfig(
            socket_path=str(tmp_path / "admin.sock"),
            metrics_socket_path=str(tmp_path / "metrics.sock"),
            server_state_base=str(tmp_path),
            server_state_file=str(tmp_path / "server-state"),
            stats_port=stats,
            metrics_port=metrics,
            balance_algorithm=getattr(request, "param", "leastconn"),
            http_options=HTTPOptions(host="127.0.0.1", port=http),
            is_head=True,
        ),
        config_file_path=str(tmp_path / "haproxy.cfg"),
    )
    haproxy.adopt(started)
    await started.start()
    yield started
    await started.stop()
    assert started.count_haproxy_processes() == 0


@pytest.fixture
async def client(api: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.cfg.http_options.port}") as found:
        yield found


async def put_behind(api: Any, *servers: ServerConfig) -> None:
    app = BackendConfig(name="app", path_prefix="/", app_name="app", servers=list(servers))
    api.set_backend_configs({"app": app})
    await api.reload()


async def start_servers(
    api: Any, names: str, heads: list[list[str]] | None = None, until: asyncio.Event | None = None
) -> list[ServerConfig]:
    """Put servers behind this HAProxy, each of which answers its name, a letter, when `until` is set. `heads` gets the
    lines of each request's head."""

    async def start(name: str) -> ServerConfig:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if heads is not None:
                heads.append(head.decode().lower().splitlines())
            if until is not None:
                await until.wait()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\n" + name.encode())
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        return ServerConfig(name=name, host="127.0.0.1", port=server.sockets[0].getsockname()[1])

    servers = [await start(name) for name in names]
    await put_behind(api, *servers)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{api.cfg.http_options.port}") as client:
        await wait_for_answer(client)
    return servers


async def wait_for_answer(client: httpx.AsyncClient) -> list[Any]:
    """Statuses, or kinds of error, until the first 200."""
    seen: list[Any] = []
    async with asyncio.timeout(30):
        while not seen or seen[-1] != 200:
            try:
                seen.append((await client.get("/v1/models")).status_code)
            except httpx.TransportError as error:
                seen.append(type(error))
            await asyncio.sleep(0.02)
    return seen


async def test_nothing_but_the_service_listens_and_other_users_cannot_control_it(api: Any) -> None:
    for port in (api.cfg.stats_port, api.cfg.metrics_port):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    assert stat.S_IMODE(Path(api.cfg.socket_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(api.cfg.socket_path).parent.stat().st_mode) == 0o700


async def test_a_killed_haproxy_starts_again_with_its_servers_and_takes_later_changes(api: Any, client: Any) -> None:
    await start_servers(api, "a")
    killed = api._proc.pid
    os.kill(killed, signal.SIGKILL)
    seen = await wait_for_answer(client)
    assert 404 not in seen
    await api.reload()
    assert await api._get_running_pid() not in (None, killed)
    await wait_for_answer(client)


async def test_a_server_that_died_gives_503_with_retry_after(api: Any, client: httpx.AsyncClient) -> None:
    await put_behind(api, ServerConfig(name="target", host="127.0.0.1", port=free_port()))
    answer = await client.get("/v1/models")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, str(errors.RETRY_AFTER_S))
    assert answer.json()["error"]["code"] == errors.LOST_CODE


def test_a_path_outside_of_the_application_is_not_found() -> None:
    text = "backend b\n    use_backend a if is_a\n    http-request return status 404 content-type text/plain\n"
    assert haproxy.own_config(text, Path("503.http")) == text


async def test_the_last_header_of_the_secret_name_is_the_clients_address(api: Any, client: httpx.AsyncClient) -> None:
    name = compat.address_header().lower()
    assert ray_environment()[compat.ADDRESS_HEADER_ENV].lower() != name, "no two services have the same"
    heads: list[list[str]] = []
    await start_servers(api, "a", heads)
    for address in ("127.0.0.1", "127.0.0.2"):
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(transport=transport, base_url=client.base_url) as other:
            await other.get("/", headers={name: "192.0.2.1", "X-Forwarded-For": "192.0.2.1"})
        found = [line.partition(": ")[2] for line in heads[-1] if line.startswith(f"{name}:")]
        assert found == ["192.0.2.1", address]


by_conversation = pytest.mark.parametrize("api", [haproxy.BALANCE], indirect=True, ids=["by conversation"])


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@by_conversation
@pytest.mark.parametrize(
    "begin",
    [
        lambda text: [message("user", text)],
        lambda text: [message("system", "Be brief. " * 400), message("user", text)],
        lambda text: [message("developer", "Be brief."), message("user", [{"type": "text", "text": text}])],
        lambda text: [message("user", text * 2000)],
    ],
    ids=["user", "system prompt", "parts", "longer than a buffer"],
)
async def test_the_turns_of_a_conversation_go_to_one_server(api: Any, client: httpx.AsyncClient, begin: Any) -> None:
    await start_servers(api, "abc")
    seen = set()
    for number in range(20):
        messages, servers = begin(f"question {number}"), set()
        for turn in range(3):
            body = {"model": "m", "messages": messages, "seed": turn}
            servers.add((await client.post("/v1/chat/completions", json=body)).text)
            messages = [*messages, message("assistant", "answer" * 50), message("user", f"and {turn}?")]
        assert len(servers) == 1, number
        seen |= servers
    assert seen == set("abc")


@by_conversation
async def test_completions_with_the_same_beginning_go_to_one_server(api: Any, client: httpx.AsyncClient) -> None:
    await start_servers(api, "abc")
    seen = set()
    for number in range(10):
        prompts = [str(number) * 3000 + end for end in ("", " one", " two" * 1000)]
        servers = {(await client.post("/v1/completions", json={"prompt": prompt})).text for prompt in prompts}
        assert len(servers) == 1, number
        seen |= servers
    assert len(seen) > 1


@by_conversation
async def test_only_conversations_of_a_server_that_goes_move(api: Any, client: httpx.AsyncClient) -> None:
    servers = await start_servers(api, "abc")

    async def ask() -> list[str]:
        bodies = [{"messages": [message("user", f"question {number}")]} for number in range(30)]
        return [(await client.post("/v1/chat/completions", json=body)).text for body in bodies]

    before = await ask()
    await put_behind(api, *servers[1:])
    after = await ask()
    assert set(before) == set("abc")
    assert all(now == then for then, now in zip(before, after, strict=True) if then != "a")


@by_conversation
async def test_a_server_with_many_requests_passes_those_of_the_same_conversation_on(api: Any, client: Any) -> None:
    until = asyncio.Event()
    until.set()
    await start_servers(api, "abc", until=until)
    until.clear()
    body = {"messages": [message("user", "hello")]}
    asked = [asyncio.ensure_future(client.post("/v1/chat/completions", json=body)) for _ in range(12)]
    await asyncio.sleep(0.5)
    until.set()
    counts = Counter([(await answer).text for answer in asked])
    assert set(counts) == set("abc")
    assert max(counts.values()) <= 6  # 1.25 times the mean of 4, and one


async def test_one_client_cannot_hold_all_connections(api: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "CONNECTIONS", haproxy.CONNECTIONS.replace(str(haproxy.MAX_CONNECTIONS), "2"))
    await start_servers(api, "a")
    port, held = api.cfg.http_options.port, []
    for _ in range(4):
        with contextlib.suppress(ConnectionResetError):
            held.append(await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)))
    await asyncio.sleep(0.2)
    assert sum(not (reader.at_eof() or reader.exception()) for reader, _ in held) == 2
    assert (await client.get("/v1/models")).status_code == 200, "from another address"
    for _, writer in held:
        writer.close()


# ---- another Ray is refused at the start, and what Serve's own proxy answers is in OpenAI's form


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


async def test_a_connection_has_one_request_at_a_time(api: Any) -> None:
    """HTTP/2 has a hundred, which `MAX_CONNECTIONS` would not bound."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.cfg.http_options.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
    assert (await asyncio.wait_for(reader.read(100), 10)).startswith(b"HTTP/1.1 400 ")
    writer.close()
