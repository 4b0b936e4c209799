"""Many streams at a time, and readers that do not read, on the shared application."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from tests.support.service_harness import QUESTION, Service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]

NUM_STREAMS = 1000


@pytest.fixture(scope="module")
def service(application: Service):
    application.change_live(limits={"max_queued_requests": 2 * NUM_STREAMS})
    # While requests may not wait, one of more sequences than run at a time is all that fits.
    wait_for(lambda: sum(asyncio.run(finished(application, 300))) == 300, "longer queue", 200)
    yield application
    application.change_live()


async def finished(service: Service, number: int) -> list[bool]:
    """Whether each of so many streams that are opened at once came to its end."""
    body = {"model": service.model, "messages": QUESTION, "max_tokens": 2, "temperature": 0, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def read() -> bool:
            async with client.stream("POST", f"{service.url}/v1/chat/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
                return response.status_code == 200 and lines[-1] == "data: [DONE]" and '"drafting"' in lines[-2]

        return await asyncio.gather(*(read() for _ in range(number)))


def test_a_thousand_open_streams_are_all_answered(service: Service) -> None:
    assert sum(asyncio.run(finished(service, NUM_STREAMS))) == NUM_STREAMS
    assert service.metrics()["peagle_running_requests"] == {(): 0}


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing(service: Service) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    body = {
        "model": service.model, "messages": QUESTION, "max_tokens": 200, "temperature": 0, "ignore_eos": True,
        "stream": True, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    text = json.dumps(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(f"{head}Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        time.sleep(2)
        for _ in range(3):
            assert service.ask(max_tokens=16).status_code == 200
        wait_for(lambda: service.metrics()["peagle_running_requests"] == {(): 0}, "end of the request", 200)
        slow.settimeout(60)
        received = b"".join(iter(lambda: slow.recv(1 << 16), b""))
    assert received.endswith(b"0\r\n\r\n")
    assert received.count(b"data: ") > 50
    assert b"data: [DONE]" in received
