"""Two models behind one address, with the real gateway and two real engines: each answers to its name, and one that is
killed refuses its own requests alone."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from deployments import TARGET_NAME
from tests.support.service_harness import CONFIGS, Service, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]

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
