"""HTTP through Serve's proxy in Python, where Ray was started without HAProxy, with the real service."""

import httpx
import pytest

from deployments import compat
from tests.support.service_harness import PROMPTS, QUESTION, running_service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.long]


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
