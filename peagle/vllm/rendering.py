"""Short prompts become tokens at once on the event loop of the engine's client, and not in a thread.

vLLM gives the chat template and the tokenizer of every request to a thread, and awaits its steps as tasks of their own.
Templates are Python, which runs no faster there; and each step waits, on its way back, for everything that is ready on
the event loop: with 256 streams two fifths of the time to the first token (`benchmarks.streams`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peagle.vllm import compat

MAX_CHARS = 4096
"""Of a request's prompts that are rendered at once: some two milliseconds of a slow core, nearly all of it the
tokenizer's."""

MAX_MESSAGES = 64
"""Of a chat, likewise: half a millisecond of its template."""


def render_at_once(client: Any) -> None:
    """Let `client`, an `AsyncLLM`, render what is short by vLLM's own functions for callers that do not await.

    Raises:
        UnsupportedVLLMError: this vLLM's renderer has not what is called.
    """
    compat.check("client", client)
    renderer = client.renderer
    render_chat_async, render_cmpl_async = renderer.render_chat_async, renderer.render_cmpl_async

    async def render_chat(conversations: Sequence[Sequence[Any]], chat_params: Any, *args: Any, **kwargs: Any) -> Any:
        messages = [message for conversation in conversations for message in conversation]
        settings = chat_params.chat_template_kwargs.values()
        if len(messages) <= MAX_MESSAGES and _num_chars(messages, settings) <= MAX_CHARS:
            return renderer.render_chat(conversations, chat_params, *args, **kwargs)
        return await render_chat_async(conversations, chat_params, *args, **kwargs)

    async def render_cmpl(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _num_chars(prompts) <= MAX_CHARS:
            return renderer.render_cmpl(prompts, *args, **kwargs)
        return await render_cmpl_async(prompts, *args, **kwargs)

    renderer.render_chat_async, renderer.render_cmpl_async = render_chat, render_cmpl


def _num_chars(parts: Iterable[Any], settings: Iterable[Any] = ()) -> float:
    """Of messages or prompts, with the values that a template gets beside them; infinite where there is more in them
    than text and flags: images, tools, documents, token ids."""
    values = [value for part in parts for value in (part.values() if isinstance(part, Mapping) else (part,))]
    num_chars = 0
    for value in (*values, *settings):
        if isinstance(value, str):
            num_chars += len(value)
        elif value is not None and not isinstance(value, bool | int | float):
            return float("inf")
    return num_chars
