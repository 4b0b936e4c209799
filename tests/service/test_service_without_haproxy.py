"""HTTP through Serve's proxy in Python, where HAProxy is missing, with the real service."""

from collections.abc import Iterator

import httpx
import pytest

from deployments import TARGET_NAME, compat
from tests.support.service_harness import PROMPTS, QUESTION, Service, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]

COLOCATED = {"placement": "colocated", "replicas": None}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "why_no_haproxy", lambda: "there is none on this machine")
        with running_service(drafter=COLOCATED) as running:
            yield running


def events(service: Service, **body: object) -> list[str]:
    body = {"model": service.model, "messages": QUESTION, "temperature": 0, "stream": True, **body}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        return [line for line in response.iter_lines() if line]


def test_a_request_that_comes_while_the_engine_loads_gets_503_and_never_waits(service: Service) -> None:
    refused = [response for response in service.early if response.status_code == 503]
    assert len(refused) >= 4
    assert {response.json()["error"]["code"] for response in refused} == {"model_not_ready"}
    assert all(response.elapsed.total_seconds() < 10 for response in refused[2:])


def test_answers_are_lossless_streamed_and_whole(service: Service) -> None:
    plain = service.texts(PROMPTS, [0] * len(PROMPTS))
    assert service.texts(PROMPTS, [7] * len(PROMPTS)) == plain
    whole = service.ask().json()
    lines = events(service, max_tokens=12)
    assert lines[-1] == "data: [DONE]"
    assert '"drafting"' in lines[-2]
    assert whole["choices"][0]["message"]["content"]


def test_the_whole_service_is_seen(service: Service) -> None:
    wait_for(lambda: service.drafting()["seconds_since_report"] is not None, "report")
    assert service.metrics()["peagle_target_replicas"] == {(): 1}
    assert service.ask(drafting={"k": 99}).status_code == 400


def test_a_client_that_leaves_frees_the_engine(service: Service) -> None:
    body = {"model": service.model, "messages": QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6)]
    wait_for(lambda: service.metrics()["peagle_running_requests"] == {(): 0}, "free engine")
    assert service.processes(TARGET_NAME)
