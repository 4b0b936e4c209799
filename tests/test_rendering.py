"""Short prompts are rendered where vLLM's client runs, long ones in its thread, and both are what vLLM alone makes."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config
from vllm.v1.engine.async_llm import AsyncLLM

from peagle.vllm.compat import UnsupportedVLLMError
from peagle.vllm.rendering import MAX_CHARS, MAX_MESSAGES, render_on_event_loop

TEMPLATE = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})


class Counting:
    """A renderer of vLLM's own, and how often it gave work to a thread."""

    def __init__(self, config: Any) -> None:
        self.renderer: Any = renderer_from_config(config)
        self.num_handed_over = 0
        submit = self.renderer._executor.submit

        def count(*args: Any) -> Any:
            self.num_handed_over += 1
            return submit(*args)

        self.renderer._executor.submit = count

    def tokens(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        params = ChatParams(chat_template_kwargs=TEMPLATE.chat_template_kwargs | kwargs)

        async def render() -> Any:
            return await self.renderer.render_chat_async([messages], params, TokenizeParams(max_total_tokens=8192))

        _, (prompt,) = asyncio.run(render())
        return list(prompt["prompt_token_ids"])


@pytest.fixture(scope="module")
def config(target_dir: Path, environment: None) -> Any:
    return EngineArgs(model=str(target_dir), dtype="float32", max_model_len=8192).create_engine_config()


@pytest.fixture
def counting(config: Any) -> Counting:
    found = Counting(config)
    client: Any = SimpleNamespace(input_processor=None, model_config=None, output_processor=None)
    client.renderer = found.renderer
    render_on_event_loop(client)
    return found


def chat(num_messages: int, text: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": f"{index} {text}"} for index in range(num_messages)]


@pytest.mark.parametrize(
    ("messages", "kwargs", "num_handed_over"),
    [
        (chat(1, "What is a prime?"), {}, 0),
        (chat(MAX_MESSAGES, "Yes."), {}, 0),
        (chat(MAX_MESSAGES + 1, "Yes."), {}, 1),
        (chat(1, "Yes."), {"tools": MAX_MESSAGES * [{"type": "function", "function": {"name": "f"}}]}, 1),
        (chat(1, "word " * (MAX_CHARS // 5)), {}, 1),
        (chat(MAX_MESSAGES + 1, "word " * 100), {}, 2),
    ],
)
def test_what_is_short_is_rendered_at_once_and_all_of_it_as_by_vllm(
    config: Any, counting: Counting, messages: list[dict[str, Any]], kwargs: dict[str, Any], num_handed_over: int
) -> None:
    alone = Counting(config)
    assert counting.tokens(messages, **kwargs) == alone.tokens(messages, **kwargs)
    assert (counting.num_handed_over, alone.num_handed_over) == (num_handed_over, 2)


def test_an_error_in_a_template_is_the_callers(counting: Counting) -> None:
    with pytest.raises(Exception, match="no such role"):
        counting.tokens(chat(1, "x"), chat_template="{{ raise_exception('no such role') }}")


def test_another_vllm_is_refused_in_one_line() -> None:
    client: Any = SimpleNamespace(input_processor=None, model_config=None, output_processor=None, renderer=object())
    client.generate = AsyncLLM.generate
    with pytest.raises(UnsupportedVLLMError, match=r"object\._tokenize_prompt_async"):
        render_on_event_loop(client)
