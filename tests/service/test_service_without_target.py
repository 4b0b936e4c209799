"""The service when its target dies: requests are told, and none hangs. The last tests of the shared application."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from deployments import APP_NAME, TARGET_NAME
from tests.support.service_harness import QUESTION, Service, wait_for

pytestmark = pytest.mark.service


def last_event(application: Service, fields: dict[str, Any], has_begun: threading.Event) -> str:
    """Of a stream, read to its end."""
    body = {"model": application.model, "messages": QUESTION, "stream": True, **fields}
    with httpx.stream("POST", f"{application.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        last = next(lines)
        has_begun.set()
        return [last, *(line for line in lines if line)][-1]


def test_without_any_replica_requests_get_503_at_once_and_never_hang(application):
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (replica,) = [name for name in names if name and f"{APP_NAME}#{TARGET_NAME}#" in name]
    long, has_begun = {"max_tokens": 1500, "ignore_eos": True}, threading.Event()
    with ThreadPoolExecutor(2) as pool:
        broken = pool.submit(application.ask, **long)
        broken_stream = pool.submit(last_event, application, long, has_begun)
        assert has_begun.wait(120)
        ray.kill(ray.get_actor(replica, namespace="serve"))
        # The requests that were being answered are told, and what comes next is refused at once.
        # A closed connection is HAProxy's way where its own one to the replica had served other requests before; else
        # it sends what was not answered to another replica, and finds none.
        if not isinstance(broken.exception(timeout=120), httpx.RemoteProtocolError):
            response = broken.result()
            assert response.status_code == 503
            assert response.json()["error"]["code"] in ("server_lost", "model_not_ready")
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            broken_stream.result(timeout=120)
    health = f"{application.url}/health"
    wait_for(lambda: httpx.get(health, timeout=60).status_code == 503, "word of the loss", 30)
    for _ in range(6):  # an engine takes longer to start again
        response = application.ask()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "model_not_ready"), response.text
        assert "retry-after" in response.headers
        assert response.elapsed.total_seconds() < 10, "it was held back"
        assert httpx.get(health, timeout=60).status_code == 503
    (gauge,) = application.metrics()["peagle_target_replicas"].values()
    assert gauge == 0
    assert serve.status().applications[APP_NAME].status != "RUNNING"
