"""The service through LangChain and LiteLLM, which are not in the lock (`pip install langchain-openai litellm`), and as
Open WebUI calls it."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.service.test_service_protocols import Weather
from tests.service.test_service_tools import WEATHER
from tests.support.service_harness import QUESTION, Service, wait_for

pytestmark = pytest.mark.service

LIMIT = 12


@pytest.fixture(scope="module")
def text(application: Service) -> str:
    """The service's own answer to the question."""
    return str(application.ask(max_tokens=LIMIT).json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_gets_answers_streams_and_objects(application: Service, text: str, responses: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
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
    litellm = pytest.importorskip("litellm")
    base = application.url if provider == "anthropic" else f"{application.url}/v1"
    asked = {"model": f"{provider}/{application.model}", "api_base": base, "api_key": "none", "messages": QUESTION}
    asked |= {"temperature": 0, "max_tokens": LIMIT}
    assert litellm.completion(**asked).choices[0].message.content == text
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


OPEN_WEBUI = {"Authorization": "Bearer none", "Content-Type": "application/json", "X-OpenWebUI-Chat-Id": "c1"}
OPEN_WEBUI |= {"X-OpenWebUI-User-Name": "Ada", "X-Drafting-Workload": "webui"}  # the last as a header of the connection


def test_open_webui_lists_models_chats_names_the_chat_and_stops(application: Service, text: str) -> None:
    """The requests of Open WebUI 0.12.4 (`routers/openai.py`, `routers/tasks.py`, `utils/headers.py` of its wheel), by
    the client that it uses. A stop is a connection that it closes."""
    asked: dict[str, Any] = {"model": application.model, "messages": QUESTION, "temperature": 0.0}
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}, "tools": [WEATHER]}

    async def talk() -> None:
        async with aiohttp.ClientSession(f"{application.url}/v1/", headers=OPEN_WEBUI) as session:
            async with session.get("models") as answer:
                assert [card["id"] for card in (await answer.json())["data"]] == [application.model]
            async with session.post("chat/completions", data=json.dumps({**streamed, "max_tokens": LIMIT})) as answer:
                assert answer.content_type == "text/event-stream"
                events = (await answer.text()).replace("data: ", "").split("\n\n")
            assert events[-2:] == ["[DONE]", ""]
            *chunks, last = map(json.loads, events[:-2])
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], LIMIT)
            title = {**asked, "stream": False, "max_tokens": LIMIT}
            async with session.post("chat/completions", data=json.dumps(title)) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == text
            async with session.post("chat/completions", data=json.dumps({**streamed, "min_tokens": 900})) as answer:
                assert (await answer.content.readline()).startswith(b"data: {")

    asyncio.run(talk())
    wait_for(lambda: application.metrics()["peagle_requests_total"]["webui", "aborted"] == 1, "stop")
