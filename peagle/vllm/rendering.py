"""Short prompts become tokens on the event loop of the engine's client, not in a thread.

vLLM hands the chat template and the tokenizer of every request to a thread. Templates are Python, which runs no faster
there; and each hand-over waits first for the interpreter's lock and then, on the way back, for everything that is ready
on the event loop. With hundreds of streams that is most of the time to the first token (`benchmarks.streams`).
"""

from typing import Any

from vllm.renderers.hf import HfRenderer, safe_apply_chat_template

from peagle.vllm import compat

MAX_MESSAGES = 64
"""Of a conversation, tools counted too, whose template is applied on the event loop: some half a millisecond."""

MAX_CHARS = 4096
"""Of a prompt that is tokenized on the event loop: some two milliseconds."""


def render_on_event_loop(client: Any) -> None:
    """Let `client`, an `AsyncLLM`, render and tokenize short prompts where it runs; longer ones stay in the thread.
    Renderers of models with templates of their own in Python (DeepSeek, Mistral, Kimi) keep those in the thread.

    Raises:
        UnsupportedVLLMError: this vLLM's renderer has not what is replaced.
    """
    compat.check("client", client)
    renderer = client.renderer
    compat.check("renderer", renderer)
    tokenize_in_thread = renderer._tokenize_prompt_async

    async def tokenize(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) > MAX_CHARS:
            return await tokenize_in_thread(prompt, params)
        return renderer._tokenize_prompt(prompt, params)

    renderer._tokenize_prompt_async = tokenize
    if not isinstance(renderer, HfRenderer):
        return
    apply_in_thread = renderer._apply_chat_template_async

    async def apply_chat_template(model_config: Any, tokenizer: Any, conversation: list[Any], **kwargs: Any) -> Any:
        # Where the template's own call tokenizes, its time grows with the text.
        if kwargs.get("tokenize", True) or len(conversation) + len(kwargs.get("tools") or ()) > MAX_MESSAGES:
            return await apply_in_thread(model_config, tokenizer, conversation, **kwargs)
        return safe_apply_chat_template(model_config, tokenizer, conversation, **kwargs)

    renderer._apply_chat_template_async = apply_chat_template
