"""The address of a client, as the real HAProxy tells it to a replica, controlled by Ray's own code, without Ray."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from benchmarks.common import free_port
from deployments import compat, haproxy
from deployments.up import RAY_ENVIRONMENT, ray_environment


def test_the_last_header_of_the_secret_name_is_the_clients_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = ray_environment(pytest.fail)
    monkeypatch.setenv(compat.ADDRESS_HEADER_ENV, env[compat.ADDRESS_HEADER_ENV])
    name = compat.address_header().lower()
    seen: list[list[tuple[str, str]]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        seen.append([(key.lower(), value.strip()) for key, _, value in (line.partition(":") for line in head[1:])])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def run() -> None:
        http, stats, metrics = (free_port() for _ in range(3))
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = ServerConfig(name="target", host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        config = HAProxyConfig(
            socket_path=str(tmp_path / "admin.sock"), metrics_socket_path=str(tmp_path / "metrics.sock"),
            server_state_base=str(tmp_path), server_state_file=str(tmp_path / "state"), stats_port=stats,
            metrics_port=metrics, http_options=HTTPOptions(host="127.0.0.1", port=http), is_head=True,
        )  # fmt: skip
        api: Any = HAProxyApi(config, config_file_path=str(tmp_path / "haproxy.cfg"))
        haproxy.adopt(api)
        api.set_backend_configs({"app": BackendConfig(name="app", path_prefix="/", app_name="app", servers=[target])})
        await api.start()
        try:
            for address in ("127.0.0.1", "127.0.0.2"):
                transport = httpx.AsyncHTTPTransport(local_address=address)
                async with httpx.AsyncClient(transport=transport) as client:
                    forged = {name: "192.0.2.1", "X-Forwarded-For": "192.0.2.1"}
                    async with asyncio.timeout(30):
                        while not seen or (name, address) not in seen[-1]:
                            await client.get(f"http://127.0.0.1:{http}/", headers=forged)
                assert [value for key, value in seen[-1] if key == name] == ["192.0.2.1", address]
        finally:
            await api.stop()
            server.close()

    asyncio.run(run())


def test_no_two_services_give_the_header_the_same_name() -> None:
    names = {ray_environment(pytest.fail)[compat.ADDRESS_HEADER_ENV] for _ in range(2)}
    assert len(names) == 2
    assert RAY_ENVIRONMENT[compat.ADDRESS_HEADER_ENV] not in names
