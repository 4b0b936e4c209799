"""A target that may go to zero, with the real service: it goes when nobody asks, and the next request wakes it."""

import httpx
import pytest

from tests.support.service_harness import CONFIGS, Service, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]

WAIT_S = 200
SCALING = {
    "target": {"min": 0, "max": 1},
    "idle_s": 15.0,
    "start_time_s": 5.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 31.0,
}


def health(service: Service) -> int:
    return httpx.get(f"{service.url}/health", timeout=30).status_code


def test_an_idle_target_ends_and_a_request_that_finds_none_wakes_it() -> None:
    with running_service(CONFIGS / "local-autoscale.yaml", autoscaling=SCALING) as service:
        assert service.ask(max_tokens=4).status_code == 200
        wait_for(lambda: health(service) == 503, "end of the idle target", WAIT_S)
        assert service.metrics()["peagle_target_replicas"] == {(): 0}
        refused = service.ask(max_tokens=4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
        wait_for(lambda: health(service) == 200, "target that a request woke", WAIT_S)
        assert service.ask(max_tokens=4).status_code == 200
