"""The service through LangChain and LiteLLM, which are not in the lock: `pip install langchain-openai litellm`."""

from typing import Any

import pytest

from tests.service.test_service_protocols import Weather
from tests.support.service_harness import QUESTION, Service

langchain_openai = pytest.importorskip("langchain_openai")
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.service

LIMIT = 12


@pytest.fixture(scope="module")
def text(application: Service) -> str:
    """The service's own answer to the question."""
    return str(application.ask(max_tokens=LIMIT).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_gets_answers_streams_and_objects(application: Service, text: str, responses: bool) -> None:
    address: dict[str, Any] = {"base_url": f"{application.url}/v1", "api_key": "none", "model": application.model}
    model = langchain_openai.ChatOpenAI(**address, temperature=0, max_tokens=LIMIT, use_responses_api=responses)
    question = QUESTION[0]["content"]
    assert model.invoke(question).text == text
    assert "".join(chunk.text for chunk in model.stream(question)) == text
    assert [answer.text for answer in model.batch([question] * 2)] == [text] * 2
    asked = langchain_openai.ChatOpenAI(**address, temperature=0, max_tokens=40, use_responses_api=responses)
    found = asked.with_structured_output(Weather, method="json_schema").invoke("Name a city.")
    assert isinstance(found, Weather)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_gets_answers_and_streams(application: Service, text: str, provider: str) -> None:
    base = application.url if provider == "anthropic" else f"{application.url}/v1"
    asked = {"model": f"{provider}/{application.model}", "api_base": base, "api_key": "none", "messages": QUESTION}
    asked |= {"temperature": 0, "max_tokens": LIMIT}
    assert litellm.completion(**asked).choices[0].message.content == text
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
