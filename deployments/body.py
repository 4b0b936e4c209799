"""A request's body, from its bytes to vLLM's record, with the limits of one request; and vLLM's refusals in OpenAI's
form. Nothing here knows Ray, or which replica asks."""

import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator
from vllm.entrypoints.anthropic.protocol import AnthropicContentBlock, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.exceptions import VLLMClientError

from cluster.errors import ApiError
from cluster.settings import LimitSettings
from deployments.errors import internal_error
from peagle.schema import nearest
from peagle.vllm.compat import chat_part_kinds
from peagle.vllm.setting_types import SettingTypes

Call = Literal["chat", "completions", "responses", "messages"]
"""OpenAI's Chat Completions, Completions and Responses, and Anthropic's Messages."""

Body = ChatCompletionRequest | CompletionRequest | ResponsesRequest | AnthropicMessagesRequest

BODIES: dict[Call, type[Body]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
}

_OPENAIS = {"moderation", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
_OF_TEXT = {
    "metadata", "prediction", "prompt_cache_key", "service_tier", "store", "verbosity", "web_search_options",
}  # fmt: skip
UNUSED_FIELDS: dict[Call, frozenset[str]] = {
    "chat": frozenset(_OPENAIS | _OF_TEXT),
    "completions": frozenset(_OPENAIS | _OF_TEXT),
    "responses": frozenset({*_OPENAIS, "stream_options"}),
    "messages": frozenset(
        {"anthropic_version", "cache_control", "context_management", "inference_geo", "metadata", "service_tier"}
    ),
}
"""Fields of each API that clients send and that change no answer here."""

TURNS: dict[Call, tuple[str, Sequence[str]]] = {
    "responses": ("input", ("input_text", "input_image", "output_text")),
    "messages": ("messages", get_args(AnthropicContentBlock.model_fields["type"].annotation)),
}
"""The field with the messages, and kinds of their parts."""

TOOLS: dict[Call, Sequence[str]] = {"responses": ("function", "custom", "namespace"), "messages": ("custom",)}
"""Kinds of tools, the default one first. The provider of the API runs the others itself."""

NOT_SERVED = "background", "conversation", "previous_input_messages", "previous_response_id", "prompt"
"""Fields of the Responses API that need a store, or messages in Harmony's form."""

RENAMED_FIELDS = {
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
}
"""What a field of another name is called here: OpenAI's deprecated ones, vLLM's former ones, and other APIs'."""

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields for transfers between vLLM's engines. No service here has such transfers."""

MAX_NESTING = 64

MAX_INTEGER = 2**63 - 1


def read_json(raw: bytes, limits: LimitSettings) -> dict[str, Any]:
    """The object in a request's body. Every value in it can be handled: none is nested deeper than `MAX_NESTING`, texts
    have a UTF-8 form, and numbers are finite and fit 64 bits. Raises ApiError (413, 400)."""
    if len(raw) > limits.max_body_bytes:
        text = f"The request body has more than {limits.max_body_bytes} bytes"
        raise ApiError(413, f"{text}, this service's limit (limits.max_body_bytes).", code="too_large")
    if _has_more_values(raw, limits.max_body_values):
        text = f"The request body has more values (numbers, texts, objects, lists) than {limits.max_body_values}"
        raise ApiError(413, f"{text}, this service's limit (limits.max_body_values).", code="too_large")
    try:
        document = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error!s:.500}.", code="invalid_json") from error
    if not isinstance(document, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    for name, value in document.items():
        _check_value(name, value)
    return document


_BEFORE_A_VALUE = re.compile(rb'(?:[^",\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+(?:[,\[{]|\Z)', re.DOTALL)


def _has_more_values(raw: bytes, most: int) -> bool:
    """Whether JSON has more commas and opening brackets than `most`, those in texts left out. Nothing is parsed: lists
    of nothing take 20 times the memory of their text."""
    if sum(map(raw.count, (b",", b"[", b"{"))) <= most:
        return False
    # Besides one for each, there is a match for what follows the last, and an empty one at the end.
    return next(itertools.islice(_BEFORE_A_VALUE.finditer(raw), most + 2, None), None) is not None


def read_document(document: Any, limits: LimitSettings) -> dict[str, Any]:
    """A request by deployment handle, checked as one by HTTP. Raises ApiError."""
    try:
        raw = json.dumps(document).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError(400, f"The request cannot be written as JSON: {error!s:.500}.", code="invalid_json") from error
    return read_json(raw, limits)


def _check_value(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        numbers = [item for item in level if isinstance(item, int)]
        if numbers and not -MAX_INTEGER <= min(numbers) <= max(numbers) <= MAX_INTEGER:
            raise ApiError(400, f"{name:.80} holds a number that does not fit 64 bits", param=name)
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not (level := list(itertools.chain.from_iterable(parts))):
            return
    raise ApiError(400, f"{name:.80} is nested more than {MAX_NESTING} deep", param=name)


def detect_call(fields: Mapping[str, Any]) -> Call:
    """Chat or completion, as vLLM tells requests to SageMaker's /invocations apart. Raises ApiError for neither."""
    if fields.get("messages") is not None:
        return "chat"
    if fields.get("prompt") is not None:
        return "completions"
    raise ApiError(400, "the request has neither messages, for a chat, nor prompt, for a completion", param="messages")


@functools.cache
def known_fields(record: type[BaseModel]) -> frozenset[str]:
    """Top-level fields of a request that vLLM knows."""
    fields = record.model_fields
    return frozenset({*fields, *(info.alias for info in fields.values() if info.alias)})


@functools.cache
def _validator(record: type[BaseModel]) -> SchemaValidator:
    """vLLM's record of a request, whose lists end at their first wrong element. pydantic else collects an error for
    each element and each form that it might have: megabytes of them for kilobytes of a body."""

    def end_early(part: Any) -> Any:
        if isinstance(part, dict):
            changed = {key: end_early(value) for key, value in part.items()}
            return {**changed, "fail_fast": True} if part.get("type") == "list" else changed
        return type(part)(map(end_early, part)) if type(part) in (list, tuple) else part

    return SchemaValidator(end_early(record.__pydantic_core_schema__), _use_prebuilt=False)


def drop_unused(fields: Mapping[str, Any], unused: Collection[str]) -> dict[str, Any]:
    """`fields` without those that are null, which stand for missing ones, and without `unused`. Raises ApiError for a
    value that would change the answer where OpenAI serves it."""
    given = {name: item for name, item in fields.items() if item is not None and name not in unused}
    if isinstance(moderation := fields.get("moderation"), dict) and moderation.get("policy"):
        raise ApiError(400, "moderation.policy is not served here: nothing is moderated", param="moderation.policy")
    served_values = {"modalities": ["text"], "use_beam_search": False, "best_of": given.get("n", 1)}
    served_values |= {name: {} for name in TRANSFER_FIELDS}
    for name, served in served_values.items():
        if (asked := given.pop(name, served)) != served:
            remedy = ": send n alone" if name == "best_of" else ""
            raise ApiError(400, f"{name} is {asked!r:.80}, but only {served!r:.80} is served here{remedy}", param=name)
    return given


def parse_record(record: type[BaseModel], fields: dict[str, Any]) -> Any:
    """The request as vLLM's record of this type. Raises ApiError naming the field."""
    known = known_fields(record)
    for name in fields:
        if name in known:
            continue
        other, shown = RENAMED_FIELDS.get(name, ""), f"{name:.80}"
        is_renamed = other.partition(".")[0] in known
        hint = f"; it is called {other} here" if is_renamed else nearest(shown, {*known, "drafting"})
        raise ApiError(400, f"unknown field {shown}{hint}", param=shown, code="unknown_field")
    if record in (ChatCompletionRequest, TokenizeChatRequest):
        _check_messages(fields.get("messages"))
    try:
        return _validator(record).validate_python({**fields})  # vLLM's validators change what they get
    except ValidationError as error:
        raise from_validation(error) from error
    except VLLMClientError as error:
        param = getattr(error, "parameter", None) or _to_blame(record, fields, error)
        raise ApiError(400, f"{error.args[0]!s:.500}", param=param) from error
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        # vLLM's own validators run before the types are checked, and trip over values of a type they do not expect.
        blamed = _to_blame(record, fields, error)
        raise ApiError(
            400, f"{blamed or 'a field'} has a value of the wrong type ({error!s:.200})", param=blamed
        ) from error


def _to_blame(record: type[BaseModel], fields: Mapping[str, Any], error: Exception) -> str | None:
    """The field by which alone vLLM's validators raise this error, beside a short prompt: each field is tried."""
    short = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    least = {name: short[name] for name in short if name in fields}
    for name, value in fields.items():
        try:
            _validator(record).validate_python({**least, name: value})
        except ValidationError:
            continue
        except (VLLMClientError, TypeError, AttributeError, KeyError, ValueError) as found:
            if (type(found), str(found)) == (type(error), str(error)):
                return name
    return None


def from_validation(error: ValidationError) -> ApiError:
    """The first problem. If a field may have several forms, that of the form that fits most deeply: what is another
    literal, or lacks a field, was meant as another form."""
    details = error.errors(include_url=False, include_input=False)
    first = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    likely = [detail for detail in first if detail["type"] not in ("literal_error", "missing")]
    detail = max(likely or first, key=lambda detail: len(detail["loc"]))
    steps = [str(step) for step in detail["loc"] if isinstance(step, int) or _is_field(step)]
    if steps and steps[0].isdigit():  # vLLM reads the calls of a message on their own
        steps = ["tool_calls", *steps]
    name, message = ".".join(steps), str(detail["msg"]).removeprefix("Value error, ")
    message = f"{message:.500}"
    return ApiError(400, f"{name}: {message}" if name else message, param=name or None)


def _is_field(step: Any) -> bool:
    """Whether a step of pydantic's path is a field's name, and not a form of it (`str`, `list[int]`, a class)."""
    is_name = isinstance(step, str) and re.fullmatch("[a-z][a-z0-9_]*", step) is not None
    return is_name and step not in ("str", "int", "float", "bool", "dict", "list")


def _check_messages(messages: Any) -> None:
    """What vLLM's record takes but its chat templates cannot render."""

    def check(is_so: bool, name: str, rule: str) -> None:
        if not is_so:
            raise ApiError(400, f"{name} must be {rule}", param=name)

    check(isinstance(messages, list) and bool(messages), "messages", "a list of at least one message")
    for index, message in enumerate(messages):
        name = f"messages.{index}"
        check(isinstance(message, dict), name, "an object with role and content")
        # vLLM's record also takes messages in Harmony's form.
        check(isinstance(message.get("role"), str), f"{name}.role", "a text: system, user, assistant, ...")
        content = message.get("content")
        check(content is None or isinstance(content, str | list), f"{name}.content", "a text or a list of parts")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, str):
                continue
            where, kinds = f"{name}.content.{number}", chat_part_kinds()
            kind = str(part.get("type")) if isinstance(part, dict) else ""
            check(kind in kinds, where, f"an object whose type is one of {', '.join(sorted(kinds))}")
            check("text" not in kind or isinstance(part.get("text"), str), f"{where}.text", "a text")
            link = part.get(kind)
            is_link = isinstance(link, dict) and isinstance(link.get("url"), str)
            check(is_link or not kind.endswith("_url"), f"{where}.{kind}", "an object with the text url")


def check_protocol(call: Call, fields: Mapping[str, Any]) -> None:
    """Raises ApiError for what vLLM's record of a call takes, but no answer here can follow."""
    for name in (name for name in (NOT_SERVED if call == "responses" else ()) if fields.get(name)):
        text = f"{name} is not served here: nothing is stored, so send the whole conversation in input"
        raise ApiError(400, text, param=name, code="not_served")
    if call not in TURNS:
        return
    _check_kinds("tools", fields.get("tools"), TOOLS[call], TOOLS[call][0])
    name, kinds = TURNS[call]
    for index, message in enumerate(_items(fields.get(name))):
        if isinstance(message, dict) and "role" in message:
            _check_kinds(f"{name}.{index}.content", message.get("content"), kinds)
        elif isinstance(message, dict) and message.get("type") == "item_reference":
            text = f"{name}.{index} refers to what was said before: nothing is stored, so send it again"
            raise ApiError(400, text, param=name, code="not_served")


def turns(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The messages of a request whose record is made, those of the system first."""
    system = fields.get("system") or fields.get("instructions")
    # Claude Code begins with a line that differs in each request; vLLM leaves it out too.
    parts = (part for part in _items(system) if not str(part.get("text")).startswith("x-anthropic-billing-header"))
    yield {"role": "system", "content": list(parts) if isinstance(system, list) else system}
    yield from (turn for name in ("messages", "input") for turn in _items(fields.get(name)))


def _check_kinds(name: str, parts: Any, kinds: Sequence[str], default: str | None = None) -> None:
    """Raises ApiError (400) for a part of a list whose type is none of `kinds`. `default`: the type without one."""
    for index, part in enumerate(_items(parts)):
        if not isinstance(part, dict) or part.get("type", default) not in kinds:
            text = f"{name}.{index} must be an object whose type is one of {', '.join(kinds)}: no other is served here"
            raise ApiError(400, text, param=f"{name}.{index}")


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# ---- limits of one request

MAX_NUM_STOP = 16
"""Stop strings of a request: each is looked for in every new text."""


def check_counts(fields: Mapping[str, Any], limits: LimitSettings) -> None:
    """Raises ApiError for a field with more entries than it may have, before anything looks at each of them. Token ids
    of prompts are limited by `max_body_values` and the model's context alone."""
    for name, value in fields.items():
        if isinstance(value, dict | list) and name not in ("prompt", "tokens"):
            _at_most(name, f"the number of entries of {name}", len(value), limits, "max_list_entries")
    for name in ("stop", "stop_sequences", "stop_token_ids"):
        if isinstance(listed := fields.get(name), list):
            _at_most(name, f"the number of entries of {name}", len(listed), MAX_NUM_STOP, "")
    prompts = fields.get("prompt")
    if isinstance(prompts, list) and prompts and type(prompts[0]) is not int:
        _at_most("n", "n times the number of prompts", len(prompts), limits, "max_num_sequences")
    for name in ("messages", "input"):
        values = (value for turn in _items(fields.get(name)) if isinstance(turn, dict) for value in turn.values())
        num = sum(len(value) for value in values if isinstance(value, dict | list))
        _at_most(name, f"the number of parts and calls in {name}", num, limits, "max_list_entries")
    structured = fields.get("structured_outputs")
    if isinstance(structured, dict) and isinstance(choices := structured.get("choice"), list):
        name = "structured_outputs.choice"
        _at_most(name, f"the number of entries of {name}", len(choices), limits, "max_list_entries")
    for name, grammar in grammars(fields).items():
        text = json.dumps(grammar, ensure_ascii=False, separators=(",", ":"), default=str)
        num = len(text.encode("utf-8", "surrogatepass"))
        _at_most(name, f"the number of bytes of {name}", num, limits, "max_grammar_bytes")


def check_limits(body: Body, limits: LimitSettings) -> int:
    """The number of sequences that a request asks for. Raises ApiError for one that asks more than it may."""
    num = getattr(body, "n", None)
    if num is not None and num < 1:
        raise ApiError(400, f"n must be at least 1, not {num}", param="n")
    num_sequences: int = (num or 1) * num_prompts(body)
    _at_most("n", "n times the number of prompts", num_sequences, limits, "max_num_sequences")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        wanted = getattr(body, name, None)
        if type(wanted) is int:
            _at_most(name, name, math.inf if wanted < 0 else wanted, limits, "max_num_logprobs")
    if isinstance(body, ChatCompletionRequest | CompletionRequest):
        _check_prompt_logprobs(body, limits)
    return num_sequences


def _check_prompt_logprobs(body: ChatCompletionRequest | CompletionRequest, limits: LimitSettings) -> None:
    """Each sequence has log probabilities of its own, which the engine computes anew and this process puts into
    words."""
    name = "prompt_logprobs"
    if body.prompt_logprobs is None and body.echo:
        name = "logprobs" if isinstance(body, CompletionRequest) else "top_logprobs"
    per_token: int | None = getattr(body, name)
    if per_token is None:
        return
    num = (body.n or 1) * _prompt_tokens(body) * (1 + per_token)
    what = f"the number of log probabilities of the prompt, n times its tokens times 1 + {name},"
    _at_most(name, what, num, limits, "max_num_prompt_logprobs")


def _prompt_tokens(body: ChatCompletionRequest | CompletionRequest) -> int:
    """Tokens of all prompts of a request, of a text one for each four bytes."""
    if isinstance(body, ChatCompletionRequest):
        parts = [body.messages, body.tools, body.documents, body.chat_template_kwargs]
        return len(json.dumps(parts, default=str)) // 4
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    return sum(-(-len(one.encode()) // 4) if isinstance(one, str) else len(one) for one in prompts)


def _at_most(param: str, what: str, value: float, limits: LimitSettings | int, setting: str) -> None:
    """Raises ApiError for a value above the `setting` of these limits, or above a number that is none."""
    limit = limits if isinstance(limits, int) else int(getattr(limits, setting))
    if value > limit:
        shown, named = "all" if math.isinf(value) else f"{value:g}", f" (limits.{setting})" * bool(setting)
        raise ApiError(
            400, f"{what} is {shown}, above this service's limit of {limit}{named}", param=param, code="limit"
        )


def num_prompts(body: Body) -> int:
    """Prompts of a completion request (a list of strings or of token lists), 1 for another one."""
    prompt = getattr(body, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def grammars(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request from which the engine makes a grammar; of several it obeys the first."""
    choice, tools = fields.get("tool_choice") or "auto", fields.get("tools")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    is_bound = kind not in ("none", "auto") or (kind == "auto" and any(map(_is_strict, _items(tools))))
    forms = {"response_format": fields.get("response_format")}
    for name in ("text", "output_config"):  # of a response, of a message
        if isinstance(part := fields.get(name), dict):
            forms[f"{name}.format"] = part.get("format")
    found = {"tools": tools if is_bound else None, "structured_outputs": fields.get("structured_outputs")}
    found |= {name: form for name, form in forms.items() if isinstance(form, dict) and form.get("type") != "text"}
    return {name: grammar for name, grammar in found.items() if grammar}


def _is_strict(tool: Any) -> bool:
    """Whether a call of this tool must follow its schema. The model decides whether to call it."""
    parts = (tool, tool.get("function")) if isinstance(tool, dict) else ()
    return any(isinstance(part, dict) and part.get("strict") for part in parts)


def from_engine(error: Any) -> ApiError:
    """The `error` object (or its dictionary) of vLLM's answer. What is not the client's fault keeps its details in the
    log."""
    found = error if isinstance(error, Mapping) else error.model_dump()
    status = found.get("code")
    if not isinstance(status, int) or not 400 <= status < 500:
        return internal_error()
    message = str(found.get("message"))
    if message == "Client disconnected":
        return ApiError(499, "the client has gone")
    message = name_keys(message)
    first = message.partition(" ")[0]  # of many refusals the name of the field, without `param`
    is_field = any(first in known_fields(record) for record in BODIES.values())
    return ApiError(status, message, param=found.get("param") or (first if is_field else None))


def name_keys(message: str) -> str:
    """vLLM's words with the keys of the settings in place of the flags of `vllm serve`: `--max-model-len` is
    `engine.max_model_len`."""

    def key(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return f"engine.{name}" if name in engine_keys() else found[0]

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", key, message)


@functools.cache
def engine_keys() -> frozenset[str]:
    found = SettingTypes.read("engine/arg_utils:AsyncEngineArgs", "entrypoints/launchers/cli_args:BaseFrontendArgs")
    return frozenset(found or ())
