"""The real service with callers and model aliases: who is served, and which workload each request is counted under."""

from typing import Any

import openai
import pytest

from cluster.request import fingerprint, hash_key
from deployments import TARGET_NAME
from deployments.client import TargetClient
from tests.support.service_harness import QUESTION, WEB_KEY, wait_for

pytestmark = pytest.mark.service

WEB, JOB, OLD = WEB_KEY, "sk-job", "sk-old"
CALLERS = {
    "web": {"key_env": "TEST_WEB_KEY", "max_k": 3},
    "job": {"key_sha256": hash_key(JOB), "tags": "allow"},
    "old": {"key_sha256": hash_key(OLD), "tags": "ignore", "workload": "chat"},
}
ALIAS = "small-coder"
SYSTEM = {"role": "system", "content": "You answer in one short sentence."}


@pytest.fixture(scope="module")
def service(application):
    engine = application.processes(TARGET_NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_WEB_KEY", WEB)
        application.change_live(callers=CALLERS, model={"aliases": {ALIAS: "code"}})
    wait_for(lambda: application.ask(max_tokens=1).status_code == 401, "callers")
    yield application
    assert application.processes(TARGET_NAME) == engine, "live settings need no new engine"
    application.change_live()
    wait_for(lambda: application.ask(max_tokens=1).status_code == 200, "service for anyone")


def drafting(service, key: str, **body: Any) -> tuple[str, int, str]:
    response = service.ask(headers={"Authorization": f"Bearer {key}"}, max_tokens=4, **body)
    assert response.status_code == 200, response.text
    field = response.json()["drafting"]
    return field["workload"], field["k"], field["source"]


def test_only_known_keys_are_served(service):
    for key in ("none", hash_key(JOB), WEB + "x"):
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as raised:
            client.completions.create(model=service.model, prompt="One", stream=True)
        assert raised.value.code == "invalid_api_key"
    assert drafting(service, WEB) == ("default", 3, "default")


def test_tags_are_taken_refused_or_ignored_by_caller(service):
    tag = {"drafting": {"workload": "mine", "k": 2}}
    assert drafting(service, JOB, **tag) == ("mine", 2, "request")
    assert drafting(service, OLD, **tag) == ("chat", 2, "request")
    assert drafting(service, OLD) == ("chat", 5, "workload")
    for body, header, field in (
        (tag, {}, "drafting.workload"),
        ({}, {"X-Drafting-Workload": "a"}, "X-Drafting-Workload"),
    ):
        response = service.ask(headers={"Authorization": f"Bearer {WEB}", **header}, **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (403, field, "tag_not_allowed")
    assert drafting(service, WEB, drafting={"k": 7}) == ("default", 3, "request")


def test_requests_with_one_system_prompt_become_a_workload_of_their_own(service):
    name = fingerprint(SYSTEM["content"])
    parts = {"role": "developer", "content": [{"type": "text", "text": SYSTEM["content"]}]}
    told = [drafting(service, WEB, messages=[first, *QUESTION])[0] for first in (SYSTEM, parts, SYSTEM, parts)]
    assert told == ["default", "default", name, name]
    assert drafting(service, JOB, messages=[SYSTEM, *QUESTION], drafting={"workload": "mine"})[0] == "mine"
    assert service.metrics()["peagle_requests_total"][name, "finished"] == 2


def test_a_call_by_handle_finds_the_same_workloads(service):
    client = TargetClient()
    assert client.chat(QUESTION, max_tokens=4, model=ALIAS)["drafting"]["workload"] == "code"
    with_prompt = client.chat([SYSTEM, *QUESTION], max_tokens=4)["drafting"]["workload"]
    assert with_prompt == fingerprint(SYSTEM["content"])
