"""The service when its target dies: requests are told, and none hangs. The last tests of the shared application."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import ray
from ray import serve

from deployments import APP_NAME, TARGET_NAME

pytestmark = pytest.mark.service


def test_without_any_replica_requests_get_503_at_once_and_never_hang(application):
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (replica,) = [name for name in names if name and f"{APP_NAME}#{TARGET_NAME}#" in name]
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(application.ask, max_tokens=1500, ignore_eos=True)
        time.sleep(2)
        ray.kill(ray.get_actor(replica, namespace="serve"))
        killed = time.monotonic()
        # The request that was being answered is told, and what comes next is refused at once.
        assert broken.result(timeout=20).status_code == 503
    while time.monotonic() < killed + 10:
        response = application.ask()
        assert response.status_code == 503, response.text
        assert response.json()["error"]["code"] == "model_not_ready"
        assert "retry-after" in response.headers
        assert response.elapsed.total_seconds() < 5
        assert httpx.get(f"{application.url}/health").status_code == 503 or time.monotonic() < killed + 5
        time.sleep(0.5)
    (gauge,) = application.metrics()["peagle_target_replicas"].values()
    assert gauge == 0
    assert serve.status().applications[APP_NAME].status != "RUNNING"
