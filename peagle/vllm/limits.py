"""What vLLM lets through and its engine does not survive is refused: token ids, lists that are too long, grammars.

In the process of the engine client, `guard` hangs on the client's input processor, which every request passes, over
HTTP or by a handle: a bad one gets a `VLLMValidationError` (400) that names the field. In the engine's process
`bound_grammars` limits what compiling a grammar may cost: vLLM compiles in threads that nobody can stop (100,000
choices took nine minutes of two cores, after their client had left, and every other grammar waited behind them).

min_p and logit_bias, which vLLM refuses beside speculation, work without drafts: such requests have K = 0.
logprob_token_ids are refused: vLLM returns them for a whole batch in one table, beside drafts in one of another size.
"""

import copy
import dataclasses
import gc
import json
import logging
import os
import resource
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import vllm.envs as envs
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor

from peagle.vllm import compat
from peagle.vllm.acceptance import undraftable_field

logger = logging.getLogger(__name__)

MAX_TOKEN_IDS = 1024
"""Of allowed_token_ids and of logit_bias: the tables of vLLM's V2 model runner hold so many, and a longer list ends its
worker."""
MAX_PATTERN_TOKENS = 1024
"""Of repetition_detection, pattern times count: what the scheduler may compare in every step, in Python."""
MAX_STOP_TOKEN_IDS = 120
"""Of stop_token_ids with min_tokens; there the table has 128 places, some of which are the model's own."""

REFUSED = "structured_outputs: "
"""Begins the `stop_reason` of a request whose grammar was refused in the engine's process."""


@dataclasses.dataclass(frozen=True)
class GrammarLimits:
    """Of one grammar, schema, pattern or list of choices: characters, choices, and how deep its JSON may be nested: to
    read 300 objects in one another takes the client's event loop half a minute."""

    max_chars: int = 64 * 1024
    max_choices: int = 1000
    max_depth: int = 64


def check_sampling(params: SamplingParams, vocab_size: int, limits: GrammarLimits | None = None) -> None:
    """Raises VLLMValidationError naming the field for what vLLM's own checks let through."""
    for name, ids in (("allowed_token_ids", params.allowed_token_ids), ("logit_bias", params.logit_bias)):
        if ids is not None and len(ids) > MAX_TOKEN_IDS:
            raise _refusal(name, f"holds {len(ids)} token ids, at most {MAX_TOKEN_IDS} are possible")
    if params.min_tokens and len(params.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        raise _refusal(
            "stop_token_ids",
            f"holds {len(params.stop_token_ids or ())} token ids, at most {MAX_STOP_TOKEN_IDS} go with min_tokens",
        )
    repeated = params.repetition_detection
    if repeated is not None and (most := repeated.max_pattern_size * repeated.min_count) > MAX_PATTERN_TOKENS:
        problem = (
            f"looks {most} tokens back (max_pattern_size times min_count), at most {MAX_PATTERN_TOKENS} are possible"
        )
        raise _refusal("repetition_detection", problem)
    words = params.bad_words_token_ids or ()
    if (num_tokens := sum(map(len, words))) > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
        most = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        raise _refusal("bad_words", f"are {num_tokens} tokens in all, at most {most} are possible")
    if any(token >= vocab_size for word in words for token in word):
        raise _refusal("bad_words", "hold a token that the model does not have")
    if params.structured_outputs is not None:
        _check_grammar(params.structured_outputs, limits or GrammarLimits())


def _check_grammar(structured: StructuredOutputsParams, limits: GrammarLimits) -> None:
    choices = structured.choice
    if choices is not None and len(choices) > limits.max_choices:
        raise _refusal(
            "structured_outputs.choice", f"has {len(choices)} choices, at most {limits.max_choices} are possible"
        )
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        value = getattr(structured, name)
        if value is None:
            continue
        try:
            num_chars = len(value) if isinstance(value, str) else len(json.dumps(value))
            if num_chars > limits.max_chars:
                problem = f"has {num_chars} characters, at most {limits.max_chars} are possible"
                raise _refusal(f"structured_outputs.{name}", problem)
            is_text = isinstance(value, str) and name in ("json", "structural_tag")
            depth = _depth(json.loads(value) if is_text else value)
        except (RecursionError, TypeError, ValueError) as error:
            raise _refusal(f"structured_outputs.{name}", f"is no JSON: {error}") from None
        if depth > limits.max_depth:
            problem = f"is nested {depth} levels deep, at most {limits.max_depth} are possible"
            raise _refusal(f"structured_outputs.{name}", problem)


def _depth(value: object) -> int:
    """How many lists and mappings of a JSON value are in one another at most."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
    return depth


def _refusal(field: str, problem: str) -> VLLMValidationError:
    return VLLMValidationError(f"{field} {problem}.", parameter=field)


class CheckedInputProcessor(InputProcessor):
    """vLLM's, with the checks of this module; a client's own is made one by `guard`."""

    grammar_limits: GrammarLimits
    samples_without_drafts: bool
    """Whether the model runner applies min_p and logit_bias to requests without drafts."""
    returns_chosen_logprobs: bool
    """Whether logprob_token_ids of one request leave the others of its batch alone: on vLLM's V2 model runner without
    drafts."""

    def _validate_params(self, params: Any, supported_tasks: Any) -> Any:
        if not isinstance(params, SamplingParams):
            return super()._validate_params(params, supported_tasks)
        if params.bad_words and self.tokenizer is not None:
            # Each is at least one token, and hardly more than 16 characters: so much is not even tokenized.
            num = max(len(params.bad_words), sum(map(len, params.bad_words)) // 16)
            if num > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
                raise _refusal(
                    "bad_words", f"are about {num} tokens, at most {envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS} are possible"
                )
            params.update_from_tokenizer(self.tokenizer)
        check_sampling(params, self.model_config.get_vocab_size(), self.grammar_limits)
        if params.logprob_token_ids and not self.returns_chosen_logprobs:
            problem = "is not possible here: ask for logprobs, the most likely tokens of each position"
            raise _refusal("logprob_token_ids", problem)
        checker = self
        if self.samples_without_drafts and undraftable_field(params):
            checker = copy.copy(self)
            checker.speculative_config = None
        try:
            return InputProcessor._validate_params(checker, params, supported_tasks)
        except (VLLMClientError, ValueError):
            raise
        except Exception as error:  # such as a grammar's recursion: the field is the client's
            if params.structured_outputs is None:
                raise
            raise _refusal("structured_outputs", f"cannot be used: {type(error).__name__}: {error}") from error

    def _validate_model_input(self, prompt_input: Any, prompt_type: Any) -> None:
        super()._validate_model_input(prompt_input, prompt_type)
        vocab_size = self.model_config.get_vocab_size()
        # Placeholders of images may lie beyond the vocabulary, so only a prompt of text is checked.
        if (
            prompt_input["type"] == "token"
            and (found := max(prompt_input["prompt_token_ids"], default=0)) >= vocab_size
        ):
            raise _refusal("prompt", f"holds token id {found}, the model's ids are 0 to {vocab_size - 1}")


def guard(client: Any, grammar_limits: GrammarLimits | None = None) -> None:
    """Let `client`, an `AsyncLLM`, check its requests; before its first request.

    Raises:
        UnsupportedVLLMError: this vLLM's client has not what the checks hang on.
    """
    compat.check("client", client)
    processor, config = client.input_processor, client.vllm_config
    processor.__class__ = CheckedInputProcessor
    processor.grammar_limits = grammar_limits or GrammarLimits()
    processor.returns_chosen_logprobs = config.use_v2_model_runner and config.speculative_config is None
    worker = config.parallel_config.worker_cls
    processor.samples_without_drafts = config.use_v2_model_runner or str(worker).startswith("peagle.vllm.workers.")
    generate: Callable[..., AsyncGenerator[Any, None]] = client.generate

    async def generate_or_refuse(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                for choice in output.outputs if output.finished else ():
                    if choice.finish_reason == "error" and str(choice.stop_reason).startswith(REFUSED):
                        raise VLLMValidationError(str(choice.stop_reason), parameter="structured_outputs")
                yield output

    client.generate = generate_or_refuse


# ---- in the engine's process

GRAMMAR_KEY = "peagle_grammar_s"
"""Key of vLLM's `additional_config`: seconds of CPU time that a grammar may take to compile."""

DEFAULT_GRAMMAR_S = 10.0
WALL_FACTOR = 6
"""On a busy machine a grammar gets so many times its CPU time by the clock."""
MAX_GRAMMAR_BYTES = 2 * 2**30
NUM_COMPILERS = 4
"""Grammars that are compiled at the same time; vLLM alone has one thread on two cores."""
MAX_PASSED = 1024
_NICENESS = 10
_POLL_S = 0.005


def bound_grammars(manager: Any, max_cpu_s: float) -> dict[str, str]:
    """Let vLLM's `StructuredOutputManager` compile a grammar only after a forked child of this process has, within
    `max_cpu_s` of CPU time and `MAX_GRAMMAR_BYTES`: the kernel ends a child that takes more.

    Returns a table that fills with the ids of requests whose grammar failed, and why.
    """
    compile_grammar = manager._create_grammar
    refused: dict[str, str] = {}
    passed: OrderedDict[Any, None] = OrderedDict()
    locks: dict[Any, threading.Lock] = {}

    def compile_within_bounds(request: Any) -> Any:
        key = request.structured_output_request.structured_output_key
        lock = locks.setdefault(key, threading.Lock())
        try:
            # One at a time of a kind: a child does not have the thread that it would wait for.
            with lock:
                if key not in passed:
                    try_in_child(lambda: manager.backend.compile_grammar(*key), max_cpu_s)
                    passed[key] = None
                    if len(passed) > MAX_PASSED:
                        passed.popitem(last=False)
                return compile_grammar(request)
        except Exception as error:
            refused[request.request_id] = f"{REFUSED}{error}"
            raise
        finally:
            locks.pop(key, None)

    manager._create_grammar = compile_within_bounds
    if hasattr(manager, "executor"):
        manager.executor = ThreadPoolExecutor(NUM_COMPILERS, "grammar")
    return refused


def max_grammar_s(additional_config: object) -> float:
    """What an engine's `additional_config[GRAMMAR_KEY]` says. Raises ValueError where that is no time."""
    found = additional_config.get(GRAMMAR_KEY) if isinstance(additional_config, Mapping) else None
    if found is None:
        return DEFAULT_GRAMMAR_S
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e6:
        raise ValueError(f"additional_config[{GRAMMAR_KEY!r}] must be seconds above 0, not {found!r}")
    return float(found)


def try_in_child(work: Callable[[], object], max_cpu_s: float) -> None:
    """Run `work` in a forked child, for what it costs: its result is lost, and what it raises is left to the caller.

    Raises:
        ValueError: the child took more than `max_cpu_s` of CPU time, or `WALL_FACTOR` times that by the clock, more
            than `MAX_GRAMMAR_BYTES`, or crashed.
    """
    pid = os.fork()
    if pid == 0:
        _work_within_limits(work, max_cpu_s)
    end_s = time.monotonic() + WALL_FACTOR * max_cpu_s
    is_late = False
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if not is_late and time.monotonic() > end_s:
            is_late = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    if os.WIFSIGNALED(found[1]):
        died_of = signal.Signals(os.WTERMSIG(found[1]))
        took_too_long = is_late or died_of == signal.SIGXCPU
        problem = f"takes more than {max_cpu_s:g} s to compile" if took_too_long else "crashes its compiler"
        logger.warning("a grammar was refused: its compilation ended by %s", died_of.name)
        raise ValueError(f"the grammar {problem}")


def _work_within_limits(work: Callable[[], object], max_cpu_s: float) -> None:
    """The child's life. It shares the parent's memory and files, and must leave them as they are."""
    try:
        gc.disable()
        os.nice(_NICENESS)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, max(1, round(max_cpu_s))),
            (resource.RLIMIT_AS, num_pages * resource.getpagesize() + MAX_GRAMMAR_BYTES),
        ):
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        work()
    finally:
        os._exit(0)
