"""Short prompts are rendered at once, others in vLLM's thread, and all of them to what vLLM alone makes of them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config

from peagle.vllm.rendering import MAX_CHARS, MAX_MESSAGES, cut_text, render_at_once

TOKENIZE = TokenizeParams(max_total_tokens=8192)
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "word " * (MAX_CHARS // 5)


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

    def chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False, **kwargs})
        return self._run(self.renderer.render_chat_async([messages], params, TOKENIZE))

    def completion(self, prompts: list[dict[str, Any]]) -> Any:
        return self._run(self.renderer.render_cmpl_async(prompts, TOKENIZE, prompt_extras={"cache_salt": "s"}))

    @staticmethod
    def _run(rendering: Any) -> Any:
        found = asyncio.run(rendering)
        for prompt in found[-1] if isinstance(found, tuple) else found:
            assert prompt.pop("arrival_time") > 0
        return found


@pytest.fixture(scope="module")
def config(target_dir: Path, environment: None) -> Any:
    return EngineArgs(model=str(target_dir), dtype="float32", max_model_len=8192).create_engine_config()


@pytest.fixture
def counting(config: Any) -> Counting:
    found = Counting(config)
    client: Any = SimpleNamespace(input_processor=None, model_config=None, output_processor=None, vllm_config=None)
    client.renderer = found.renderer
    render_at_once(client)
    return found


def chat(num_messages: int, text: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index in range(num_messages)]


@pytest.mark.parametrize(
    ("messages", "kwargs", "is_short"),
    [
        (chat(1, "What is a prime?"), {}, True),
        (chat(1, "What is a prime?"), {"tools": None, "enable_thinking": False, "effort": "low"}, True),
        (chat(MAX_MESSAGES, "Yes."), {}, True),
        (chat(MAX_MESSAGES + 1, "Yes."), {}, False),
        (chat(1, LONG), {}, False),
        (chat(1, [{"type": "text", "text": "Yes."}]), {}, False),
        (chat(1, "Yes."), {"tools": [TOOL]}, False),
        (chat(1, "Yes."), {"documents": [{"text": LONG}]}, False),
        (chat(1, "Yes."), {"more": LONG}, False),
    ],
)
def test_a_chat(config: Any, counting: Counting, messages: Any, kwargs: dict[str, Any], is_short: bool) -> None:
    alone = Counting(config)
    assert counting.chat(messages, **kwargs) == alone.chat(messages, **kwargs)
    assert (counting.num_handed_over, alone.num_handed_over) == (0 if is_short else 2, 2)


@pytest.mark.parametrize(
    ("prompts", "is_short"),
    [
        ([{"prompt": "A prime is"}], True),
        ([{"prompt": "A prime is"}, {"prompt": "A word is"}], True),
        ([{"prompt": "A prime is"}, {"prompt": LONG}], False),
    ],
)
def test_prompts_of_a_completion(config: Any, counting: Counting, prompts: Any, is_short: bool) -> None:
    alone = Counting(config)
    copies = [dict(prompt) for prompt in prompts]
    assert counting.completion(prompts) == alone.completion(copies)
    assert (counting.num_handed_over, alone.num_handed_over) == (0 if is_short else len(prompts), len(prompts))


def test_a_long_text_is_cut_before_it_is_tokenized_and_gives_the_same_tokens(counting: Counting) -> None:
    tokenizer, params = counting.renderer.get_tokenizer(), TokenizeParams(max_total_tokens=8, truncate_prompt_tokens=4)
    text, most = f"first {LONG} last", 8 * tokenizer.max_chars_per_token
    prompt = counting._run(counting.renderer.render_cmpl_async([{"prompt": text}], params))[0]
    assert prompt["prompt_token_ids"] == tokenizer.encode(text)[-4:]
    assert cut_text(9, params, tokenizer, text) == text[-most:]
    tokenizer = SimpleNamespace(truncation_side="right", max_chars_per_token=tokenizer.max_chars_per_token)
    assert cut_text(9, params, tokenizer, text) == text[:most]
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        cut_text(9, TokenizeParams(max_total_tokens=8), tokenizer, text)


def test_a_text_to_tokenize_is_no_longer_than_a_prompt_may_be(counting: Counting) -> None:
    text = "7" * (8192 * counting.renderer.get_tokenizer().max_chars_per_token + 1)
    unlimited = TokenizeParams(max_total_tokens=None)
    assert counting._run(counting.renderer.render_cmpl_async([{"prompt": text[:9000]}], unlimited))
    with pytest.raises(VLLMValidationError, match="maximum context length is 8192 tokens"):
        counting._run(counting.renderer.render_cmpl_async([{"prompt": text}], unlimited))


def test_an_error_in_a_template_reaches_the_caller(counting: Counting) -> None:
    with pytest.raises(Exception, match="no such role"):
        counting.chat(chat(1, "x"), chat_template="{{ raise_exception('no such role') }}")
