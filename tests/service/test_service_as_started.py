"""The real service as it may be started: a target that goes to zero, no HAProxy, two models behind a gateway."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from deployments import TARGET_NAME, compat
from tests.support.service_harness import CONFIGS, PROMPTS, QUESTION, Service, running_service, wait_for

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


# ---- HTTP through Serve's proxy in Python, where Ray was started without HAProxy


def test_requests_are_refused_answered_streamed_and_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.RAY_ENVIRONMENT, "RAY_SERVE_ENABLE_HA_PROXY", "0")
    with running_service(drafter={"placement": "colocated", "replicas": None}) as service:
        refused = [response for response in service.early if response.status_code == 503]
        assert len(refused) >= 4
        assert {response.json()["error"]["code"] for response in refused} == {"model_not_ready"}
        assert all(response.elapsed.total_seconds() < 10 for response in refused[2:])
        assert service.texts(PROMPTS, [7] * len(PROMPTS)) == service.texts(PROMPTS, [0] * len(PROMPTS))
        assert service.ask(drafting={"k": 99}).status_code == 400
        lines = [line for line in service.ask(stream=True).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert '"drafting"' in lines[-2]
        body = {"model": service.model, "messages": QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as response:
            assert [line for line, _ in zip(response.iter_lines(), range(6), strict=False)]
        wait_for(lambda: service.metrics()["peagle_running_requests"] == {(): 0}, "free engine")
        assert service.metrics()["peagle_target_replicas"] == {(): 1}


# ---- two models behind one address, with the real gateway and two real engines


PLAIN = "smollm2-plain"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    small = {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    with running_service(CONFIGS / "two-models.yaml", target=small, engine={"max_model_len": 512}) as running:
        yield running


def test_each_model_answers_to_its_name(service: Service) -> None:
    assert [card.id for card in service.client().models.list()] == [service.model, PLAIN]
    fast, plain = (service.ask(model=name).json() for name in (service.model, PLAIN))
    assert [fast["model"], plain["model"]] == [service.model, PLAIN]
    assert fast["choices"] == plain["choices"], "the same target"
    assert (fast["drafting"]["num_draft_tokens"] > 0, plain["drafting"]["num_draft_tokens"]) == (True, 0)
    assert f'"model":"{PLAIN}"' in service.ask(model=PLAIN, stream=True).text


def test_a_model_that_is_killed_is_refused_by_name_and_comes_back_while_the_other_answers(service: Service) -> None:
    text = service.ask().json()["choices"][0]["message"]["content"]
    (target,) = service.processes(TARGET_NAME, "plain")
    os.kill(target, signal.SIGKILL)
    wait_for(lambda: service.ask(model=PLAIN).status_code == 503, "refusal")
    refused, answered = service.ask(model=PLAIN), service.ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
    assert PLAIN in refused.json()["error"]["message"]
    assert answered.json()["choices"][0]["message"]["content"] == text
    states = httpx.get(f"{service.url}/health", timeout=30).json()["models"]
    assert states == {service.model: "ready", PLAIN: "not ready"}
    wait_for(lambda: service.ask(model=PLAIN).status_code == 200, "new replica", 300)
