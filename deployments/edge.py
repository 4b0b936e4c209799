"""The edge: all that happens to a request before the engine, and to its answer on the way out.

Enters: the body of an HTTP request, or a dictionary by deployment handle, with its caller and headers. Leaves: an
`Admitted` request that the engine can take as it is (checked, within the limits, with its workload and K), and the
engine's answer with a `drafting` field, or an `ApiError` in OpenAI's form. The same code runs in a target replica and,
where there are any, in ingress replicas: nothing here knows Ray, or where the engine is.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import ipaddress
import itertools
import json
import logging
import math
import random
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.exceptions import VLLMClientError

from cluster.admission import Admission, BodyBudget, BusyError, HeldBody
from cluster.heads import TRIAL_SUFFIX, HeadRouting, base_workload
from cluster.k_policy import KPolicy
from cluster.request import (
    ANYONE,
    DEFAULT_WORKLOAD,
    Caller,
    Drafting,
    DraftingError,
    ForbiddenTagError,
    UnknownCallerError,
    Workloads,
    network_of,
    resolve,
    system_prompt,
)
from cluster.settings import ClusterSettings, IngressSettings, LimitSettings
from deployments import openapi
from deployments.compat import NOT_READY, NOT_READY_CODE, RETRY_AFTER_S, address_header, listening_host
from deployments.metrics import FAMILIES, PREFIX
from peagle.schema import nearest
from peagle.vllm.compat import chat_part_kinds
from peagle.vllm.grammar_bounds import GrammarError, GrammarLimits, check_grammar, check_structured_outputs
from peagle.vllm.request_args import DEPTH_KEY, GROUP_KEY, HEAD_KEY, LEARN_KEY, SURVIVAL_KEY, WORKLOAD_KEY
from peagle.vllm.setting_types import SettingTypes

logger = logging.getLogger(__name__)

QUEUED_PER_RUNNING = 2
"""Sequences that an edge hands to an engine, for each that the engine runs at a time: it must never wait for work."""

Call = Literal["chat", "completions"]
Body = ChatCompletionRequest | CompletionRequest

BODIES: dict[Call, type[Body]] = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
ANSWERS: dict[type[BaseModel], type[BaseModel]] = {
    ChatCompletionRequest: ChatCompletionResponse,
    CompletionRequest: CompletionResponse,
}
UNUSED_FIELDS = frozenset(
    {
        "best_of",
        "metadata",
        "modalities",
        "moderation",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of OpenAI's API that clients send and that change no answer here, except for values that `drop_unused`
refuses."""

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

SERVER_KEYS = (DEPTH_KEY, GROUP_KEY, HEAD_KEY, LEARN_KEY, SURVIVAL_KEY, WORKLOAD_KEY)
"""Keys of `vllm_xargs` that the edge sets."""

BODY_TIMEOUT_S = 120.0
MAX_NESTING = 64
MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 2000, 200
"""Of an error: a client must not get back the megabytes that it sent."""
MAX_INTEGER = 2**63 - 1
JSON_MEDIA_TYPE = "application/json"
PROBE_PATHS = ("/health", "/ping")
"""Load balancers ask these, with any Host header."""

OPEN_PATHS = ("/", "/metrics", *PROBE_PATHS)
"""For probes and Prometheus, and the page, which asks for a key itself: they need no key."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C's trace context."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


# ---- errors in OpenAI's form


class ApiError(Exception):
    """An answer other than success. `param` names the request's field, where one is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = code or {400: "invalid_value", 404: "not_found"}.get(status)
        self.retry_after_s = RETRY_AFTER_S if status in (502, 503) and retry_after_s is None else retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        kwargs: dict[str, Any] = {"param": self.param, "code": self.code, "retry_after_s": self.retry_after_s}
        return functools.partial(ApiError, **kwargs), (self.status, self.message)

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`, which can be encoded whatever the client sent."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {
                "message": _encodable(f"{self.message:.{MAX_MESSAGE_CHARS}}"),
                "type": kind,
                "param": None if self.param is None else _encodable(f"{self.param:.{MAX_PARAM_CHARS}}"),
                "code": self.code,
            }
        }

    def event(self) -> str:
        """The error as the last server-sent event of a stream that has begun."""
        return f"data: {json.dumps(self.body())}\n\n"

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def not_ready(model: str) -> ApiError:
    """No replica of the target can answer: at the start until the engine has loaded, later when all are gone."""
    return ApiError(503, NOT_READY.format(f"The model {model!r}"), code=NOT_READY_CODE)


def engine_lost() -> ApiError:
    """The engine that worked on a request is gone. HAProxy sends a request with this status to another replica, but not
    one with 503, which is what a whole service says that is not ready."""
    return ApiError(
        502,
        "The engine that worked on this request has stopped, so the answer is not complete. Send the request again.",
        code="engine_lost",
    )


def internal_error() -> ApiError:
    return ApiError(500, "The server failed on this request; its log says why.")


def busy_error(error: BusyError) -> ApiError:
    return ApiError(429, error.message, code="rate_limit_exceeded", retry_after_s=error.retry_after_s)


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
    message = _name_keys(message)
    first = message.partition(" ")[0]  # of many refusals the name of the field, without `param`
    is_field = any(first in known_fields(call) for call in BODIES)
    return ApiError(status, message, param=found.get("param") or (first if is_field else None))


def _name_keys(message: str) -> str:
    """vLLM's words with the keys of the settings in place of the flags of `vllm serve`: `--max-model-len` is
    `engine.max_model_len`."""

    def key(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return f"engine.{name}" if name in _engine_keys() else found[0]

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", key, message)


@functools.cache
def _engine_keys() -> frozenset[str]:
    found = SettingTypes.read("engine/arg_utils:AsyncEngineArgs", "entrypoints/launchers/cli_args:FrontendArgs")
    return frozenset(found or ())


# ---- a body, from its bytes to vLLM's record


def read_json(raw: bytes, limits: LimitSettings) -> Any:
    """The document in a request's body. Raises ApiError (413, 400)."""
    if len(raw) > limits.max_body_bytes:
        text = f"The request body has {len(raw)} bytes, above the limit of {limits.max_body_bytes}."
        raise ApiError(413, text, code="too_large")
    if _has_more_values(raw, limits.max_body_values):
        raise _too_many_values(limits)
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ApiError(400, f"The request body is not valid JSON: {reason!s:.500}.", code="invalid_json") from error


_BEFORE_A_VALUE = re.compile(rb'(?:[^",\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+(?:[,\[{]|\Z)', re.DOTALL)


def _has_more_values(raw: bytes, most: int) -> bool:
    """Whether JSON has more commas and opening brackets than `most`, those in texts left out. Nothing is parsed: lists
    of nothing take 20 times the memory of their text."""
    if sum(map(raw.count, (b",", b"[", b"{"))) <= most:
        return False
    return next(itertools.islice(_BEFORE_A_VALUE.finditer(raw), most + 1, None), None) is not None


def _too_many_values(limits: LimitSettings) -> ApiError:
    text = f"The request body has more values (numbers, texts, objects, lists) than {limits.max_body_values}"
    return ApiError(413, f"{text}, this service's limit (limits.max_body_values).", code="too_large")


def call_of(document: Any) -> Call:
    """Chat or completion, as vLLM tells requests to SageMaker's /invocations apart. Raises ApiError for neither."""
    if not isinstance(document, dict):
        check_document(document)
    elif document.get("messages") is not None:
        return "chat"
    elif document.get("prompt") is not None:
        return "completions"
    raise ApiError(400, "the request has neither messages, for a chat, nor prompt, for a completion", param="messages")


def check_document(document: Any, max_values: int = LimitSettings().max_body_values) -> dict[str, Any]:
    """`document` where every value in it can be handled: a JSON object of at most `max_values`, not deeper than
    `MAX_NESTING`, whose texts have a UTF-8 form (JSON can hold lone surrogates) and whose numbers fit 64 bits. Raises
    ApiError naming the field."""
    if not isinstance(document, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    level: list[tuple[tuple[Any, ...], Any]] = [((), document)]
    num_values = 0
    for _ in range(MAX_NESTING):
        below = []
        for path, value in level:
            num_values += len(value)
            if num_values > max_values:
                text = f"the request has more than {max_values} values in all"
                raise ApiError(413, text, param=_at(path[:1]) or None, code="too_large")
            if isinstance(value, list) and set(map(type, value)) == {int}:  # token ids: no step of Python for each
                if not -MAX_INTEGER <= min(value) <= max(value) <= MAX_INTEGER:
                    raise ApiError(400, "the number does not fit 64 bits", param=_at(path))
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(key, str) and not _is_text(key):
                    raise ApiError(400, "a name is no valid text: it has a lone surrogate", param=_at(path, key))
                if isinstance(item, dict | list):
                    below.append(((*path, key), item))
                elif isinstance(item, str):
                    if not _is_text(item):
                        raise ApiError(400, "the text is not valid: it has a lone surrogate", param=_at(path, key))
                elif isinstance(item, int):
                    if not -MAX_INTEGER <= item <= MAX_INTEGER:
                        raise ApiError(400, "the number does not fit 64 bits", param=_at(path, key))
                elif isinstance(item, float) and not math.isfinite(item):
                    raise ApiError(400, "the number is not finite", param=_at(path, key))
        if not below:
            return document
        level = below
    raise ApiError(400, f"the value is nested more than {MAX_NESTING} deep", param=str(level[0][0][0]))


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _at(path: tuple[Any, ...], *key: Any) -> str:
    return ".".join(str(step) for step in (*path, *key))


@functools.cache
def known_fields(call: Call) -> frozenset[str]:
    """Top-level fields of a request that vLLM knows."""
    fields = BODIES[call].model_fields
    return frozenset({*fields, *(info.alias for info in fields.values() if info.alias)})


@functools.cache
def _validator(call: Call) -> SchemaValidator:
    """vLLM's record of a request, whose lists end at their first wrong element. pydantic else collects an error for
    each element and each form that it might have: megabytes of them for kilobytes of a body."""

    def end_early(part: Any) -> Any:
        if isinstance(part, dict):
            changed = {key: end_early(value) for key, value in part.items()}
            return {**changed, "fail_fast": True} if part.get("type") == "list" else changed
        return type(part)(map(end_early, part)) if type(part) in (list, tuple) else part

    return SchemaValidator(end_early(BODIES[call].__pydantic_core_schema__), _use_prebuilt=False)


def drop_unused(call: Call, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without those that are null, which stand for missing ones, and without `UNUSED_FIELDS`. Raises ApiError
    for a value that would change the answer where OpenAI serves it."""
    given = {name: item for name, item in fields.items() if item is not None}
    if given.get("modalities", ["text"]) != ["text"]:
        raise ApiError(400, 'modalities must be ["text"]: only text is served here', param="modalities")
    policy = given["moderation"].get("policy") if isinstance(given.get("moderation"), dict) else None
    for side, rule in policy.items() if isinstance(policy, dict) else ():
        if isinstance(rule, dict) and rule.get("mode") == "block":
            name = f"moderation.policy.{side}"
            raise ApiError(400, f"{name} asks to block, but nothing is moderated here: leave it out", param=name)
    if given.get("audio") is not None:
        raise ApiError(400, "audio asks for spoken answers: only text is served here", param="audio")
    best_of = given.get("best_of", given.get("n", 1))
    if call == "chat" and "best_of" in given:
        raise ApiError(400, "best_of is a field of completions: send n", param="best_of", code="unknown_field")
    if best_of != given.get("n", 1):
        raise ApiError(
            400, f"best_of is {best_of!r:.80}, but as many are returned as made: send n alone", param="best_of"
        )
    return {name: item for name, item in given.items() if name not in UNUSED_FIELDS}


def _hint(call: Call, name: str) -> str:
    """What an unknown field is called here, or `nearest`."""
    other = RENAMED_FIELDS.get(name)
    return f"; it is called {other} here" if other else nearest(f"{name:.80}", {*known_fields(call), "drafting"})


def parse_body(call: Call, fields: dict[str, Any]) -> Body:
    """vLLM's record of a request. Raises ApiError naming the field."""
    for name in fields:
        if name not in known_fields(call):
            hint = _hint(call, name)
            raise ApiError(400, f"unknown field {name:.80}{hint}", param=f"{name:.80}", code="unknown_field")
    if call == "chat":
        _check_messages(fields.get("messages"))
    try:
        body: Body = _validator(call).validate_python(fields)
        return body
    except ValidationError as error:
        raise _from_validation(error) from error
    except VLLMClientError as error:
        param = getattr(error, "parameter", None) or _to_blame(call, fields)
        raise ApiError(400, f"{error.args[0]!s:.500}", param=param) from error
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        # vLLM's own validators run before the types are checked, and trip over values of a type they do not expect.
        blamed = _to_blame(call, fields)
        raise ApiError(
            400, f"{blamed or 'a field'} has a value of the wrong type ({error!s:.200})", param=blamed
        ) from error


def _to_blame(call: Call, fields: Mapping[str, Any]) -> str | None:
    """The field by which alone vLLM's validators fail."""
    least = {name: fields[name] for name in ("messages", "prompt") if name in fields}
    for name, value in fields.items():
        try:
            _validator(call).validate_python({**least, name: value})
        except ValidationError:
            continue
        except (VLLMClientError, TypeError, AttributeError, KeyError, ValueError):
            return name
    return None


def _from_validation(error: ValidationError) -> ApiError:
    """The first problem. Of a field that may have several forms: of the form that was most likely meant."""
    details = error.errors(include_url=False, include_input=False)
    forms: dict[tuple[Any, ...], list[Any]] = {}
    for detail in details:
        if detail["loc"][:1] == details[0]["loc"][:1]:
            is_a_form = (not isinstance(step, int) and not _is_field(step) for step in detail["loc"])
            end = next((index for index, is_form in enumerate(is_a_form) if is_form), -1) + 1
            forms.setdefault(detail["loc"][:end], []).append(detail)

    def unlikeliness(form: list[Any]) -> tuple[bool, bool, int, bool]:
        kinds = [detail["type"] for detail in form]
        is_other_type = all(kind.endswith("_type") for kind in kinds)
        return "literal_error" in kinds, "missing" in kinds, len(kinds), is_other_type

    detail = min(forms.values(), key=unlikeliness)[0]
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
    if messages is None or messages == []:
        raise ApiError(400, "messages must hold at least one message", param="messages")
    if not isinstance(messages, list):
        raise ApiError(400, f"messages must be a list of messages, not {messages!r:.80}", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            name = f"messages.{index}"
            raise ApiError(400, f"{name} must be an object with role and content, not {message!r:.80}", param=name)
        if not isinstance(message.get("role"), str):  # vLLM's record also takes messages in Harmony's form
            name = f"messages.{index}.role"
            raise ApiError(400, f"{name} must be a text: system, user, assistant, ...", param=name)
        name, content = f"messages.{index}.content", message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise ApiError(400, f"{name} must be a text or a list of parts, not {content!r:.80}", param=name)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            where = f"{name}.{number}"
            if isinstance(part, str):
                continue
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in chat_part_kinds():
                known = ", ".join(sorted(chat_part_kinds()))
                raise ApiError(400, f"{where} must be an object whose type is one of {known}", param=where)
            if "text" in kind and not isinstance(part.get("text"), str):
                raise ApiError(400, f"{where}.text must be a text", param=f"{where}.text")
            link = part.get(kind)
            if kind.endswith("_url") and not (isinstance(link, dict) and isinstance(link.get("url"), str)):
                raise ApiError(400, f"{where}.{kind} must be an object with the text url", param=f"{where}.{kind}")


# ---- limits of one request


def check_counts(fields: Mapping[str, Any], limits: LimitSettings) -> None:
    """Raises ApiError for a field with more entries than it may have, before anything looks at each of them. Token ids
    of prompts are limited by `max_body_values` and the model's context alone."""
    for name, value in fields.items():
        if isinstance(value, dict | list) and name != "prompt":
            _at_most(name, f"the number of entries of {name}", len(value), limits.max_list_entries)
    for name in ("stop", "stop_token_ids"):
        if isinstance(listed := fields.get(name), list):
            _at_most(name, f"the number of entries of {name}", len(listed), limits.max_num_stop)
    prompts = fields.get("prompt")
    if isinstance(prompts, list) and prompts and type(prompts[0]) is not int:
        _at_most("n", "n times the number of prompts", len(prompts), limits.max_num_sequences)
    if isinstance(messages := fields.get("messages"), list):
        values = (value for message in messages if isinstance(message, dict) for value in message.values())
        num = sum(len(value) for value in values if isinstance(value, dict | list))
        _at_most("messages", "the number of parts and calls in messages", num, limits.max_list_entries)
    for name, grammar in grammars(fields).items():
        choices = grammar.get("choice") if isinstance(grammar, dict) else None
        if isinstance(choices, list):
            where = f"{name}.choice"
            _at_most(where, f"the number of choices in {where}", len(choices), limits.max_grammar_choices)
        try:
            if name == "structured_outputs" and isinstance(grammar, dict):
                check_structured_outputs(name, grammar, grammar_limits(limits))
            elif isinstance(grammar, dict | list):
                check_grammar(name, grammar, grammar_limits(limits))
        except GrammarError as error:
            raise ApiError(400, str(error), param=error.field, code="limit") from error


def grammar_limits(limits: LimitSettings) -> GrammarLimits:
    return GrammarLimits(
        max_chars=limits.max_grammar_bytes,
        max_choices=limits.max_grammar_choices,
        max_depth=MAX_NESTING,
        max_repeats=limits.max_grammar_repeats,
        max_product=limits.max_grammar_product,
        max_cpu_s=limits.grammar_timeout_s,
        max_memory_bytes=limits.max_grammar_mib * 2**20,
    )


def check_limits(body: Body, limits: LimitSettings) -> int:
    """The number of sequences that a request asks for. Raises ApiError for one that asks more than it may."""
    if body.n is not None and body.n < 1:
        raise ApiError(400, f"n must be at least 1, not {body.n}", param="n")
    num_sequences = (1 if body.n is None else body.n) * num_prompts(body)
    _at_most("n", "n times the number of prompts", num_sequences, limits.max_num_sequences)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        wanted = getattr(body, name, None)
        if type(wanted) is int:
            _at_most(name, name, math.inf if wanted < 0 else wanted, limits.max_num_logprobs)
    return num_sequences


def check_prompt_logprobs(body: Body, limits: LimitSettings) -> None:
    """Raises ApiError for more log probabilities of prompts than an answer may have: each sequence has its own, which
    the engine computes anew and this process puts into words."""
    per_token = body.prompt_logprobs
    if per_token is None and isinstance(body, CompletionRequest) and body.echo:
        per_token = body.logprobs
    if per_token is None:
        return
    name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    num = (1 if body.n is None else body.n) * _prompt_tokens(body) * (1 + per_token)
    what = f"the number of log probabilities of the prompt, n times its tokens times 1 + {name},"
    _at_most(name, what, num, limits.max_num_prompt_logprobs)


def _prompt_tokens(body: Body) -> int:
    """Tokens of all prompts of a request, of a text one for each four bytes."""
    if isinstance(body, ChatCompletionRequest):
        return len(json.dumps(body.messages, default=str)) // 4
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    if prompts and isinstance(prompts[0], int):
        return len(prompts)
    return sum(-(-len(one.encode()) // 4) if isinstance(one, str) else len(one) for one in prompts)


def _at_most(param: str, what: str, value: float, limit: int) -> None:
    if value > limit:
        shown = "all" if math.isinf(value) else f"{value:g}"
        raise ApiError(400, f"{what} is {shown}, above this service's limit of {limit}", param=param, code="limit")


def num_prompts(body: Body) -> int:
    """Prompts of a completion request (a list of strings or of token lists), 1 for a chat request."""
    prompt = getattr(body, "prompt", None)
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def grammars(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request from which the engine makes a grammar; of several it obeys the first."""
    is_call = fields.get("tools") and fields.get("tool_choice", "none") not in ("none", "auto")
    names = (*(("tools",) if is_call else ()), "structured_outputs", "response_format")
    return {name: fields[name] for name in names if fields.get(name)}


# ---- what is admitted


@dataclass
class Admitted:
    """A request as the engine gets it. May travel from an ingress replica to a target replica.

    `fields`: vLLM's fields of the body, with what the edge decided in `vllm_xargs`. `num_sequences`: its weight.
    `trace`: headers by which the engine's span becomes part of its client's trace. `caller`: name of who asked."""

    call: Call
    fields: dict[str, Any]
    drafting: Drafting
    num_sequences: int = 1
    trace: Mapping[str, str] = field(default_factory=dict)
    caller: str = ""

    @functools.cached_property
    def body(self) -> Body:
        """vLLM's record, made anew where the request has travelled: its message parts cannot be pickled."""
        return parse_body(self.call, self.fields)

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "body"}


class Usage(NamedTuple):
    """Tokens of an answer: the last item of a complete one."""

    num_prompt_tokens: int
    num_output_tokens: int


Answer = AsyncGenerator["str | ApiError | Usage", None]
"""The answer to an `Admitted` request: one JSON text, or server-sent events where it streams; an `ApiError` in place of
what cannot be answered (an exception would be logged as Ray's); last its `Usage`."""

Generate = Callable[[Admitted], Answer]


LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
TPOT_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class EdgeMetrics:
    """What clients see of the service: times by workload, and answers by status."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
            text = FAMILIES[name].text
            return Histogram(PREFIX + name, text, ["workload"], buckets=buckets, registry=self._registry)

        self.first_token = histogram("time_to_first_token_seconds", LATENCY_BUCKETS_S)
        self.per_token = histogram("time_per_output_token_seconds", TPOT_BUCKETS_S)
        self.latency = histogram("request_latency_seconds", LATENCY_BUCKETS_S)
        self._statuses: dict[str, set[str]] = {}  # of the answers counted, by workload
        answers, queued = FAMILIES["answers"].text, FAMILIES["queued_requests"].text
        self._answers = Counter(PREFIX + "answers", answers, ["workload", "status"], registry=self._registry)
        self.queued = Gauge(PREFIX + "queued_requests", queued, registry=self._registry)

    def count_answer(self, workload: str, status: int) -> None:
        """workload: "" where the request was refused before it had one."""
        self._statuses.setdefault(workload, set()).add(str(status))
        self._answers.labels(workload, str(status)).inc()

    def families(self, workloads: Iterable[str]) -> list[Metric]:
        """Plain values, which can travel, of these workloads; what was kept of others is dropped."""
        for gone in self._statuses.keys() - {*workloads, ""}:
            for status in self._statuses.pop(gone):
                self._answers.remove(gone, status)
            for histogram in (self.first_token, self.per_token, self.latency):
                histogram.remove(gone)
        found = list(self._registry.collect())
        for family in found:
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        return found


class Edge:
    """The edge of one replica.

    Args:
        k_policy: chooses K where neither the request nor the operator did.
        max_running: sequences that the engines behind this edge run well at a time, at most `limits`'.
    """

    def __init__(
        self, settings: ClusterSettings, k_policy: KPolicy | None = None, max_running: int | None = None
    ) -> None:
        self.metrics = EdgeMetrics()
        self._max_running = max_running
        self.admission = Admission(1, 0)
        self.bodies = BodyBudget(1)
        self.metrics.queued.set_function(lambda: self.admission.num_queued)
        self._settings = settings
        self._workloads = Workloads(known=settings.named_workloads(), aliases=settings.model.aliases)
        self.heads: tuple[str, ...] = ()
        """Digests of the heads that draft: those of `drafter.heads`, then those that only the router names."""
        self.routing = HeadRouting()
        self.use(settings, k_policy)

    def use(self, settings: ClusterSettings, k_policy: KPolicy | None) -> None:
        """Go on with other limits, callers, depths and aliases; requests that run keep theirs."""
        self.k_policy = k_policy
        names, aliases = settings.named_workloads(), settings.model.aliases
        if (names, aliases) != (self._settings.named_workloads(), self._settings.model.aliases):
            self._workloads = Workloads(known=names, aliases=aliases)
        self._settings = settings
        self._policy = settings.depth_policy()
        self._callers = settings.caller_table()
        self.set_max_running(self._max_running)

    def set_max_running(self, max_running: int | None) -> None:
        """More than this wait here, where the queue is fair, and not in the engine."""
        self._max_running = max_running
        limits = self._settings.limits
        self.admission.max_queued = limits.max_queued_requests
        self.bodies.max_bytes = limits.max_body_bytes_in_flight
        places = self.admission.max_running = min(
            limits.max_running_requests, max_running or limits.max_running_requests
        )
        # Half of the places beyond what the engines run at a time: one caller alone keeps them busy with the others.
        running = places if max_running is None else max_running // QUEUED_PER_RUNNING
        self.admission.num_reserved = max(0, places - running) // 2

    @property
    def model(self) -> str:
        return self._settings.model.id

    @property
    def limits(self) -> LimitSettings:
        return self._settings.limits

    def models(self) -> dict[str, dict[str, Any]]:
        """Model cards by id, the served model first."""
        card = {"object": "model", "created": 0, "owned_by": "peagle", "permission": []}
        names = (self.model, *self._settings.model.aliases)
        return {name: {"id": name, **card} for name in names}

    @property
    def needs_key(self) -> bool:
        return self._callers is not None

    def caller_of(self, authorization: str | None, address: str = "") -> Caller:
        """Who sends a request with this Authorization header from this address ("": not known). Raises ApiError
        (401)."""
        if self._callers is None:
            return replace(ANYONE, address=network_of(address))
        try:
            return self._callers.identify(authorization)
        except UnknownCallerError as error:
            raise ApiError(401, str(error), code="invalid_api_key") from error

    def admit(
        self, call: Call, document: Any, caller: Caller = ANYONE, headers: Mapping[str, str] | None = None
    ) -> Admitted:
        """Check a request and decide its workload and K. Raises ApiError."""
        given = check_document(document, self.limits.max_body_values)
        fields = drop_unused(call, given)
        asked = fields.pop("drafting", None)
        model = fields.get("model", self.model)
        if not isinstance(model, str) or model not in (self.model, *self._settings.model.aliases):
            raise ApiError(
                404, f"the model {model!r:.80} is not served here, but {self.model!r} is", param="model",
                code="model_not_found",
            )  # fmt: skip
        fields["model"] = self.model
        check_counts(fields, self.limits)
        body = parse_body(call, fields)
        num_sequences = check_limits(body, self.limits)
        check_prompt_logprobs(body, self.limits)
        own = fields.get("vllm_xargs") or {}
        if taken := [key for key in SERVER_KEYS if key in own]:
            name = f"vllm_xargs.{taken[0]}"
            raise ApiError(400, f"{name} is set by the server: send the field drafting", param=name)
        drafting = self._assign_trial(self._decide(asked, model, body, caller, headers))
        decided: dict[str, Any] = {DEPTH_KEY: drafting.max_k, WORKLOAD_KEY: drafting.workload}
        if drafting.survival:
            decided[SURVIVAL_KEY] = list(drafting.survival)
        if (drafter := self._settings.drafter) is not None and drafter.is_remote:
            decided[HEAD_KEY] = self._head_index(drafting.workload)
        if num_sequences > 1:
            decided[GROUP_KEY] = secrets.token_hex(8)
        if self._settings.learns_from(caller, base_workload(drafting.workload)):
            decided[LEARN_KEY] = caller.name
        fields["vllm_xargs"] = body.vllm_xargs = {**own, **decided}
        if "request_id" in fields and not _REQUEST_ID.fullmatch(body.request_id):
            rule = "1 to 128 letters, digits or . _ : -"  # every chunk of a stream carries it
            raise ApiError(400, f"request_id must be {rule}, not {body.request_id!r:.80}", param="request_id")
        request_id = (headers or {}).get("x-request-id", "")
        if "request_id" not in fields and _REQUEST_ID.fullmatch(request_id):
            fields["request_id"] = body.request_id = request_id
        trace = {name: headers[name] for name in TRACE_HEADERS if name in headers} if headers else {}
        admitted = Admitted(call, fields, drafting, num_sequences, trace, caller.name)
        admitted.__dict__["body"] = body
        return admitted

    def _decide(
        self, asked: Any, model: str, body: Body, caller: Caller, headers: Mapping[str, str] | None
    ) -> Drafting:
        prompt = system_prompt(body.messages) if isinstance(body, ChatCompletionRequest) else ""
        try:
            drafting = resolve(self._policy, asked, headers, caller, lambda tag: self._workloads.of(tag, model, prompt))
        except ForbiddenTagError as error:
            raise ApiError(403, error.message, param=error.field, code="tag_not_allowed") from error
        except DraftingError as error:
            raise ApiError(400, error.message, param=error.field) from error
        if self.k_policy is not None:
            drafting = self.k_policy.resolve(drafting, time.monotonic(), caller.max_k)
        return drafting

    def _assign_trial(self, drafting: Drafting) -> Drafting:
        """The request, now and then with the head that its workload tries. K stays: both heads get the same."""
        workload, routing = drafting.workload, self.routing
        is_asked = workload in routing.workloads if routing.workloads else self._head_index(workload) == 0
        if routing.trial not in self.heads or not is_asked or random.random() >= routing.share:
            return drafting
        return replace(drafting, workload=workload + TRIAL_SUFFIX)

    def _head_index(self, workload: str) -> int:
        """The place in `heads` of the head that drafts for a workload."""
        if (head := self.routing.head_of(workload)) in self.heads:
            return self.heads.index(head)
        drafter = self._settings.drafter
        return 0 if drafter is None else drafter.head_index(base_workload(workload))

    def head_of(self, workload: str = DEFAULT_WORKLOAD) -> str:
        """Digest of the head that drafts for a workload, "" where none does, or it is not known yet."""
        index = self._head_index(workload)
        return self.heads[index] if index < len(self.heads) else ""

    def own_heads(self, workloads: Iterable[str]) -> dict[str, str]:
        """Digests of those of these workloads, and of the settings', that have a head of their own."""
        named = () if self._settings.drafter is None else self._settings.drafter.heads_by_workload
        return {name: self.head_of(name) for name in (*workloads, *named) if self._head_index(name)}

    def know(self, workload: str) -> None:
        """Tell `workload`, which another edge has found, apart from now on."""
        self._workloads.remember(base_workload(workload))

    async def answer(
        self,
        call: Call,
        document: Any,
        generate: Generate,
        caller: Caller = ANYONE,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[str]:
        """The answer to a request, from its admission to its end: one JSON text, or server-sent events.

        Raises:
            ApiError: instead of an answer, or in the midst of a stream.
        """
        started_s, first_s = time.perf_counter(), None
        workload, status, usage = "", 499, None
        try:
            admitted = self.admit(call, document, caller, headers)
            workload = base_workload(admitted.drafting.workload)
            async with (
                self.admission.place(caller, admitted.num_sequences),
                contextlib.aclosing(generate(admitted)) as items,
            ):
                async for item in items:
                    if isinstance(item, str):
                        first_s = first_s or time.perf_counter()
                        yield item
                    elif isinstance(item, Usage):
                        usage = item
                    else:
                        raise item
            status = 200
            self._measure(workload, admitted.streams, usage, started_s, first_s)
        except BusyError as error:
            status = 429
            raise busy_error(error) from error
        except ApiError as error:
            status = error.status
            raise
        except Exception as error:
            status = 500
            logger.exception("a %s request failed", call)
            raise internal_error() from error
        finally:
            self.metrics.count_answer(workload, status)
            if usage is not None:
                self.admission.charge_tokens(caller.name, usage.num_prompt_tokens + usage.num_output_tokens)

    def families(self) -> list[Metric]:
        """`EdgeMetrics.families` of the workloads that are told apart now."""
        return self.metrics.families(self._workloads.names())

    def _measure(
        self, workload: str, streams: bool, usage: Usage | None, started_s: float, first_s: float | None
    ) -> None:
        ended_s = time.perf_counter()
        self.metrics.latency.labels(workload).observe(ended_s - started_s)
        if not streams or first_s is None:
            return
        self.metrics.first_token.labels(workload).observe(first_s - started_s)
        if usage is not None and usage.num_output_tokens > 1:
            self.metrics.per_token.labels(workload).observe((ended_s - first_s) / (usage.num_output_tokens - 1))


# ---- the engine's answer


def drafting_field(drafting: Drafting, head: str, counts: Any) -> dict[str, Any]:
    """The answer's `drafting` field: the decision, and what came of it summed over the request's sequences.

    `head`: digest of the head that drafts for the workload, "" where none does. `num_steps` counts steps that verified
    drafts; `acceptance_length` is 1 + accepted / steps, 1.0 without steps.
    """
    return {
        **drafting.to_wire(),
        "workload": base_workload(drafting.workload),
        "head": head,
        "num_steps": counts.num_steps,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "acceptance_length": round(counts.acceptance_length, 4),
    }


def whole_answer(response: Any, drafting: Mapping[str, Any]) -> str:
    """The JSON text of vLLM's response object with its `drafting`."""
    return json.dumps({**response.model_dump(), "drafting": drafting}, ensure_ascii=False, separators=(",", ":"))


def num_finished_choices(event: str) -> int:
    """How many choices a server-sent event finishes. Most finish none, and are not parsed for it."""
    if '"finish_reason":' not in event or '"finish_reason":null' in event:
        return 0
    return sum(choice.get("finish_reason") is not None for choice in event_document(event).get("choices", ()))


def event_document(event: str) -> dict[str, Any]:
    """The JSON object of a server-sent event, {} for `[DONE]`."""
    data = event.removeprefix("data: ").strip()
    return dict(json.loads(data)) if data.startswith("{") else {}


def event_with(event: str, **fields: Any) -> str:
    """A server-sent event with further fields in its object."""
    document = json.dumps({**event_document(event), **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"data: {document}\n\n"


def is_error_event(event: str) -> bool:
    return event.startswith('data: {"error"')


# ---- HTTP


class Backend(Protocol):
    """What answers behind the HTTP API."""

    edge: Edge

    def generate(self, admitted: Admitted) -> Answer: ...

    async def health(self) -> dict[str, Any]:
        """Raises ApiError (503) where a request would not be served."""

    async def metrics(self) -> bytes: ...

    async def drafting(self) -> dict[str, Any]: ...


METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Entrance:
    """Where requests come in. `host`: the address that the service listens on, "" where it is not known;
    `address_header`: of the client's address, as HAProxy of this service writes it, "" without one; and what the
    settings' `ingress` allows."""

    host: str = ""
    address_header: str = ""
    allowed_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()

    @classmethod
    def read_from_serve(cls, ingress: IngressSettings) -> "Entrance":
        """The entrance of the replica that runs this. Waits for Serve's controller."""
        return cls(listening_host(), address_header(), ingress.allowed_hosts, ingress.allow_origins)

    @property
    def checks_hosts(self) -> bool:
        """Whether the service relies on the browser's user being the only one who reaches it."""
        return bool(self.allowed_hosts) or _is_loopback(self.host)

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError (403) for what a web page of another site sends: by its Origin, or, where its name has been
        made to lead to this machine, by that name in Host."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        name = _host_name(host)
        hosts = {self.host.lower(), *(_host_name(allowed) for allowed in self.allowed_hosts)}
        if host and not (_is_loopback(name) or name in hosts or "*" in hosts):
            raise ApiError(
                403,
                f"the Host {host!r:.80} is not one of this service, which has no API keys: write it into "
                "ingress.allowed_hosts",
                code="host_not_allowed",
            )
        is_own = host and origin.partition("://")[2].lower() == host.lower()
        if origin and not (is_own or origin in self.allow_origins or "*" in self.allow_origins):
            raise ApiError(
                403,
                f"web pages of {origin!r:.80} may not call this service: write it into ingress.allow_origins",
                code="origin_not_allowed",
            )


def _host_name(host: str) -> str:
    """The name or address in a Host header, without its port."""
    name = host.lower().strip()
    return name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0].rstrip(".")


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_app(backend: Backend, entrance: Entrance) -> FastAPI:
    """The HTTP API: OpenAI's, SageMaker's, and GET /health, /metrics, /drafting and the page at /."""
    _engine_keys()  # takes a part of a second
    app = FastAPI(title="peagle-serve", docs_url=None, redoc_url=None, redirect_slashes=False)

    async def ask(call: Call | None, request: Request) -> Response:
        return await _answer(backend, call, request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await ask("chat", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await ask("completions", request)

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        return await ask(None, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": list(backend.edge.models().values())})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if (card := backend.edge.models().get(model)) is None:
            raise ApiError(404, f"the model {model!r:.80} is not served here", param="model", code="model_not_found")
        return JSONResponse(card)

    @app.api_route("/ping", methods=["GET", "POST"])
    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(await backend.health())

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await backend.metrics(), media_type=METRICS_CONTENT_TYPE)

    @app.get("/drafting")
    async def drafting() -> Response:
        return JSONResponse(await backend.drafting())

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        text, headers = live_page()
        return HTMLResponse(text, headers=headers)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("a request to %s failed", request.url.path, exc_info=error)
        return internal_error().response()

    def described() -> dict[str, Any]:
        bodies: dict[str, list[type[BaseModel]]] = {"/invocations": list(ANSWERS)}
        bodies |= {"/v1/chat/completions": [ChatCompletionRequest], "/v1/completions": [CompletionRequest]}
        made = openapi.document(app, bodies, ANSWERS, UNUSED_FIELDS)
        return dict(json.loads(_name_keys(json.dumps(made))))

    app.openapi = functools.cache(described)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unexpected)
    app.add_middleware(GateMiddleware, edge=backend.edge, entrance=entrance)
    # Added last and thereby outermost: a browser asks whether it may call before it sends a key.
    if origins := entrance.allow_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


@functools.cache
def live_page() -> tuple[str, dict[str, str]]:
    """The page at / and its headers, by which a browser runs and loads nothing but what the file itself holds."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    def source(tag: str) -> str:
        inside = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


async def _answer(backend: Backend, call: Call | None, request: Request) -> Response:
    """The HTTP response to a request for an answer; its status waits for the first piece of it. `call` None: its fields
    say what it asks for."""
    edge, caller = backend.edge, getattr(request.state, "caller", ANYONE)
    with contextlib.ExitStack() as until_sent:
        try:
            edge.admission.count_request(caller)
            _check_media_type(request.headers.get("content-type", ""))
            body = until_sent.enter_context(edge.bodies.hold_body(caller))
            document = read_json(await _body(request, body, edge.limits.max_body_bytes), edge.limits)
            call = call or call_of(document)
        except (ApiError, BusyError) as error:
            refusal = busy_error(error) if isinstance(error, BusyError) else error
            edge.metrics.count_answer("", refusal.status)
            raise refusal from error
        pieces = edge.answer(call, document, backend.generate, caller, request.headers)
        first = await _unless_disconnected(request, anext(pieces, ""))
        if first.startswith("data: "):
            return EventStream(_events(first, pieces), until_sent.pop_all())
        return Response("".join([first, *[piece async for piece in pieces]]), media_type="application/json")


def _check_media_type(content_type: str) -> None:
    """Raises ApiError (415) for what is not said to be JSON: a browser lets any web page send other media types, and
    none, to any address without asking."""
    if content_type.partition(";")[0].strip().lower() != JSON_MEDIA_TYPE:
        said = f"Content-Type {content_type!r:.80}" if content_type else "no Content-Type"
        raise ApiError(
            415,
            f"The request has {said}: send the header Content-Type: {JSON_MEDIA_TYPE}.",
            code="unsupported_media_type",
        )


class EventStream(StreamingResponse):
    """Ends its source with the response, and closes `until_sent`. A source that is left to the garbage collector goes
    on for a while, and with it the request in the engine."""

    def __init__(self, source: AsyncIterator[str], until_sent: contextlib.ExitStack) -> None:
        super().__init__(source, media_type="text/event-stream")
        self._until_sent = until_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        source: Any = self.body_iterator
        with self._until_sent:
            async with contextlib.aclosing(source):
                await super().__call__(scope, receive, send)


async def _body(request: Request, body: HeldBody, max_bytes: int) -> bytes:
    """The body, of which no more is read than may be sent. Raises BusyError where others fill the memory for bodies."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body.add(len(part))
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    break
    except TimeoutError as error:
        text = f"The request body was not complete after {BODY_TIMEOUT_S:.0f} s, with {size} bytes of it."
        raise ApiError(408, text, code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has gone") from error
    return b"".join(parts)


async def _events(first: str, pieces: AsyncIterator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        yield first
        try:
            async for piece in pieces:
                yield piece
        except ApiError as error:
            yield error.event()  # the status line is out: the stream itself says that it broke off


async def _unless_disconnected(request: Request, work: Awaitable[str]) -> str:
    """The result of `work`, which is cancelled when the client goes away first: the engine then drops the request."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
            # vLLM answers a cancelled request with an error, which nobody waits for any more.
            unfinished.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class GateMiddleware:
    """Looks at every request before anything else does: refuses those of foreign web pages where no key protects the
    service, finds the caller by API key or address, and takes the key away. HEAD is answered as GET, whose body the
    HTTP server leaves out, and a path with a slash at its end as the one without."""

    def __init__(self, app: ASGIApp, edge: Edge, entrance: Entrance) -> None:
        self._app, self._edge, self._entrance = app, edge, entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = str(scope.get("root_path", ""))
        path = str(scope.get("path", "")).removeprefix(root).rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        # A copy: the HTTP server has to see that it was HEAD.
        scope = {**scope, "method": method, "path": root + path}
        headers = Headers(scope=scope)
        try:
            if path not in PROBE_PATHS and not self._edge.needs_key and self._entrance.checks_hosts:
                self._entrance.check_site(headers)
            if path not in OPEN_PATHS:
                caller = self._edge.caller_of(headers.get("authorization"), self._read_address(scope))
                scope["state"] = {**scope.get("state", {}), "caller": caller}
                scope["headers"] = [header for header in scope["headers"] if header[0].lower() != b"authorization"]
        except ApiError as error:
            self._edge.metrics.count_answer("", error.status)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _read_address(self, scope: Scope) -> str:
        """What HAProxy wrote: it appends its header below those that the client may have sent under the same name."""
        found = Headers(scope=scope).getlist(self._entrance.address_header) if self._entrance.address_header else []
        return found[-1] if found else ""
