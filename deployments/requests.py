"""The request bodies of the API, and the checks that their schema and the engine leave out."""

from typing import Any, Self, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

# The records that the ingress parses and the engine answers with. Those of `ray.serve.llm.openai_api_models` are
# subclasses of them, which neither uses.
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest, CompletionRequest

from cluster.drafting import DraftingError
from cluster.workloads import system_prompt
from peagle.vllm.channel import DEPTH_KEY, HEAD_KEY, SURVIVAL_KEY, WORKLOAD_KEY


class ChatBody(ChatCompletionRequest):
    """Body of /v1/chat/completions: OpenAI's and vLLM's fields, and `drafting`."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_odd_shapes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return _parsed(data, handler)


class CompletionBody(CompletionRequest):
    """Body of /v1/completions, with `drafting` too."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_odd_shapes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return _parsed(data, handler)


T = TypeVar("T")
Body = ChatCompletionRequest | CompletionRequest


def _parsed(data: Any, handler: ModelWrapValidatorHandler[T]) -> T:
    """The record of `data`. vLLM's own validators run before the types are checked and trip over values of a type that
    they do not expect, which must be an error of the request and not of the server."""
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    try:
        # A field that is null is a field that is missing.
        return handler({key: value for key, value in data.items() if value is not None})
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"a field has a value of the wrong type ({error})") from error


def refusal_of(error: Exception) -> tuple[str, str | None]:
    """What a parsing error says to the client, and the request's field that it is about, where it names one."""
    if not isinstance(error, ValidationError | RequestValidationError):
        return str(error), getattr(error, "parameter", None)
    detail = error.errors()[0]
    steps = [str(step) for step in detail["loc"] if step != "body"]
    # Behind a field's name and index stand the names of the types that were tried.
    field = ".".join(steps[: 2 if len(steps) > 1 and steps[1].isdigit() else 1])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{field}: {message}" if field else message, field or None


def check_body(body: Body) -> None:
    """What neither the schema nor the engine says clearly.

    Raises:
        DraftingError: no messages, or the engine's own request arguments set from outside.
    """
    if isinstance(body, ChatCompletionRequest) and not body.messages:
        raise DraftingError("messages", "messages must hold at least one message")
    for key in body.vllm_xargs or {}:
        if key in (DEPTH_KEY, HEAD_KEY, SURVIVAL_KEY, WORKLOAD_KEY):
            raise DraftingError(f"vllm_xargs.{key}", f"vllm_xargs.{key} is set by the server: send the field drafting")


def num_prompts(body: Body) -> int:
    """Prompts of a completion request (a list of strings or of token lists), 1 for a chat request."""
    prompt = getattr(body, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def prompt_of_application(body: Body) -> str:
    """The system prompt of a chat request, "" for a completion request."""
    return system_prompt(body.messages) if isinstance(body, ChatCompletionRequest) else ""
