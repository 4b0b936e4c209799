"""Renders short prompts at once on the event loop of the engine's client, and not in a thread. Long ones that are to be
truncated are cut before they are tokenized.

vLLM runs the chat template and the tokenizer of every request in a thread and awaits each as a task. A template is
Python, which runs no faster there. Each result then waits for all that is ready on the event loop: with 256 streams two
fifths of the time to the first token (`benchmarks.streams`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.renderers import TokenizeParams

MAX_CHARS = 4096
"""Characters of a request's prompts that are rendered at once: about two milliseconds of a slow core, nearly all in the
tokenizer."""

MAX_MESSAGES = 64
"""Messages of a chat that is rendered at once: about half a millisecond in its template."""


_check_text = TokenizeParams._text_len_check


def cut_text(max_model_len: int, params: TokenizeParams, tokenizer: Any, text: str) -> str:
    """`TokenizeParams._text_len_check` for all texts: vLLM's does not cut one that is to be truncated at the side which
    is the tokenizer's default, and does not refuse one of `/tokenize`. To tokenize megabytes takes seconds, in the
    one thread that all prompts share."""
    if params.max_total_tokens is None:
        params = dataclasses.replace(params, max_total_tokens=max_model_len)
    if params.truncate_prompt_tokens is not None and params.truncation_side is None and tokenizer is not None:
        params = dataclasses.replace(params, truncation_side=tokenizer.truncation_side)
    return _check_text(params, tokenizer, text)


def render_at_once(client: Any) -> None:
    """Let `client`, an `AsyncLLM`, render short prompts by vLLM's own synchronous functions, and cut long texts."""
    renderer, max_model_len = client.renderer, client.renderer.model_config.max_model_len

    def check_text(params: TokenizeParams, tokenizer: Any, text: str) -> str:
        return cut_text(max_model_len, params, tokenizer, text)

    TokenizeParams._text_len_check = check_text  # type: ignore[method-assign, assignment]
    render_chat_async, render_cmpl_async = renderer.render_chat_async, renderer.render_cmpl_async

    async def render_chat(conversations: Sequence[Sequence[Any]], chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        messages = [message for conversation in conversations for message in conversation]
        if len(messages) <= MAX_MESSAGES and _num_chars([*messages, chat_params.chat_template_kwargs]) <= MAX_CHARS:
            return renderer.render_chat(conversations, chat_params, *args, **kwargs)
        return await render_chat_async(conversations, chat_params, *args, **kwargs)

    async def render_cmpl(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _num_chars(prompts) <= MAX_CHARS:
            return renderer.render_cmpl(prompts, *args, **kwargs)
        return await render_cmpl_async(prompts, *args, **kwargs)

    renderer.render_chat_async, renderer.render_cmpl_async = render_chat, render_cmpl


def _num_chars(parts: Iterable[Any]) -> float:
    """Characters of messages or prompts and of the template's settings; infinite if they hold more than text and
    flags: images, tools, documents, token ids."""
    values = [value for part in parts for value in (part.values() if isinstance(part, Mapping) else (part,))]
    num_chars = 0
    for value in values:
        if isinstance(value, str):
            num_chars += len(value)
        elif value is not None and not isinstance(value, bool | int | float):
            return float("inf")
    return num_chars
