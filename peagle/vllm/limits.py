"""Refuses requests that vLLM lets through and that would end its engine or fill its memory.

`guard` changes the engine's client, through which every request goes, over HTTP or by a handle. A bad request gets a
`VLLMValidationError` (400) that names the field. `peagle.vllm.grammar_checker` checks a grammar before vLLM's input
processor and the engine get it. In the engine's process `use_own_backends` compiles it with the checked backend, and
`TimedGrammar` limits the time that following it takes.

Requests with min_p or logit_bias, which vLLM refuses beside speculation, run with K = 0. logprob_token_ids are refused
beside drafts: vLLM returns them in one table for the whole batch, and drafts' log probabilities in one of another size.
"""

import copy
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import vllm.envs as envs
from torch import Tensor
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from peagle.vllm.grammar_checker import CheckedGrammar, GrammarChecker
from peagle.vllm.request_args import undraftable_field

logger = logging.getLogger(__name__)

GRAMMAR_BURST_S, GRAMMAR_CALL_S = 1.0, 0.005
"""CPU time that following a request's grammar may take in the engine: a bucket that holds the first, from which each
call takes its time, and into which it puts the second. With K drafts a step makes some 2 K + 4 calls."""
MAX_PATTERN_TOKENS = 1024
"""Largest max_pattern_size times min_count of repetition_detection: tokens that the scheduler compares in each step, in
Python."""
MAX_SEED, NO_SEED = 2**63 - 1, -1
"""vLLM holds seeds as int64, and takes this number for none. The sequences of a request count up from its seed."""
MAX_CHARS_PER_TOKEN = 16
"""Characters of a token; few tokens have more."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check a request's parameters as the engine will get them, for what vLLM lets through to its worker.

    The tables of the V2 model runner hold a fixed number of token ids, and its worker ends at a longer list.

    Raises:
        VLLMValidationError: names the field.
    """
    if params.seed is not None:
        last = params.seed + params.n - 1
        if last > MAX_SEED or params.seed < NO_SEED <= last:
            problem = f"the {params.n} sequences have the seeds {params.seed} to {last}, but {NO_SEED} is none"
            raise _refusal("seed", f"{problem}, and the largest is {MAX_SEED}")
    bad_words = params.bad_words_token_ids or ()
    stop_ids = params.all_stop_token_ids if params.min_tokens else ()
    for field, num_tokens, most in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", len(stop_ids), MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words", sum(map(len, bad_words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if num_tokens > most:
            raise _refusal(field, f"{num_tokens} token ids were given, at most {most} are possible")
    if any(token >= vocab_size for word in bad_words for token in word):
        raise _refusal("bad_words", "a word has a token that the model does not have")
    repeated = params.repetition_detection
    if repeated is not None and (num := repeated.max_pattern_size * repeated.min_count) > MAX_PATTERN_TOKENS:
        problem = f"max_pattern_size times min_count is {num} tokens, at most {MAX_PATTERN_TOKENS} are possible"
        raise _refusal("repetition_detection", problem)


def _refusal(field: str, problem: str) -> VLLMValidationError:
    return VLLMValidationError(f"{field}: {problem}.", parameter=field.split()[0])


class CheckedInputProcessor(InputProcessor):
    """vLLM's, with the checks of this module.

    Attributes:
        samples_without_drafts: whether the model runner applies min_p and logit_bias to requests without drafts.
        returns_chosen_logprobs: whether logprob_token_ids of a request change no other request of its batch: on vLLM's
            V2 model runner without drafts.
    """

    def __init__(self, config: VllmConfig, renderer: BaseRenderer) -> None:
        super().__init__(config, renderer)
        is_our_cpu_worker = str(config.parallel_config.worker_cls).startswith("peagle.vllm.workers.")
        self.samples_without_drafts = config.use_v2_model_runner or is_our_cpu_worker
        self.returns_chosen_logprobs = config.use_v2_model_runner and config.speculative_config is None

    def _validate_params(self, params: Any, supported_tasks: Any) -> Any:
        if not isinstance(params, SamplingParams):
            return super()._validate_params(params, supported_tasks)
        # vLLM counts the words only after it has tokenized them, on the event loop.
        num, most = sum(map(len, params.bad_words or ())) // MAX_CHARS_PER_TOKEN, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        if num > most:
            raise _refusal("bad_words", f"the words are about {num} tokens, at most {most} are possible")
        if params.logprob_token_ids and not self.returns_chosen_logprobs:
            problem = "not possible here: ask for logprobs, the most likely tokens of each position"
            raise _refusal("logprob_token_ids", problem)
        checker = copy.copy(self)
        if params.structured_outputs is not None:
            if not isinstance(params.structured_outputs, CheckedGrammar):
                raise _refusal("structured_outputs", "not checked: send the request through generate()")
            # vLLM's validation has run in the checker's process.
            checker.structured_outputs_config = None  # type: ignore[assignment]
        if self.samples_without_drafts and undraftable_field(params):
            checker.speculative_config = None
        return InputProcessor._validate_params(checker, params, supported_tasks)

    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request: EngineCoreRequest = super().process_inputs(*args, **kwargs)
        if request.sampling_params is not None:
            check_sampling(request.sampling_params, self.model_config.get_vocab_size())
        return request

    def _validate_model_input(self, prompt_input: Any, prompt_type: Any) -> None:
        vocab_size = self.model_config.get_vocab_size()
        # vLLM lets through what the tokenizer has and the model does not. Placeholders of images may lie beyond the
        # vocabulary, so only a prompt of text is checked.
        if (
            prompt_input["type"] == "token"
            and (found := max(prompt_input["prompt_token_ids"], default=0)) >= vocab_size
        ):
            raise _refusal("prompt", f"token id {found} is none of the model's, which are 0 to {vocab_size - 1}")
        super()._validate_model_input(prompt_input, prompt_type)


def guard(client: Any, grammars: GrammarChecker) -> None:
    """Let `client`, an `AsyncLLM` before its first request, check its requests.

    Args:
        grammars: checks its grammars, and stops with the client.
    """
    client.input_processor = CheckedInputProcessor(client.vllm_config, client.renderer)
    generate: Callable[..., AsyncGenerator[Any, None]] = client.generate
    shutdown = client.shutdown

    async def generate_checked(
        prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        structured = sampling_params.structured_outputs
        if structured is not None and not structured.all_constraints_none():
            sampling_params = copy.copy(sampling_params)
            sampling_params.structured_outputs = await grammars.check(structured)
        async with aclosing(generate(prompt, sampling_params, *args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    def shut_down(*args: Any, **kwargs: Any) -> None:
        grammars.stop()
        shutdown(*args, **kwargs)

    client.generate, client.shutdown = generate_checked, shut_down


# ---- in the engine's process


class TimedGrammar(StructuredOutputGrammar):
    """A request's grammar that the engine's thread follows within `GRAMMAR_BURST_S` and `GRAMMAR_CALL_S`, as all
    requests wait for that. The text that `GrammarChecker` has written tells little of others that the grammar allows.

    A grammar that takes longer is late: its masks allow everything from then on, and it accepts nothing. So vLLM ends
    the request with an error in the output that has the tokens of that step.
    """

    def __init__(self, grammar: StructuredOutputGrammar, request_id: str) -> None:
        self._grammar, self._request_id, self._left_s = grammar, request_id, GRAMMAR_BURST_S

    @property
    def is_late(self) -> bool:
        return self._left_s < 0

    def _follow(self, call: Callable[..., Any], *args: Any) -> Any:
        began_s = time.thread_time()
        result = call(*args)
        self._left_s = min(GRAMMAR_BURST_S, self._left_s + GRAMMAR_CALL_S - (time.thread_time() - began_s))
        if self.is_late:
            logger.warning("%s ends: to follow its grammar takes too long", self._request_id)
        return result

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return not self.is_late and bool(self._follow(self._grammar.accept_tokens, request_id, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [] if self.is_late else list(self._follow(self._grammar.validate_tokens, tokens))

    def rollback(self, num_tokens: int) -> None:
        if not self.is_late:  # else not all of them were accepted
            self._follow(self._grammar.rollback, num_tokens)

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        if self.is_late:
            bitmask[batch_index].fill_(-1)
        else:
            self._follow(self._grammar.fill_bitmask, bitmask, batch_index)

    def is_terminated(self) -> bool:
        return not self.is_late and self._grammar.is_terminated()

    def reset(self) -> None:
        self._grammar.reset()


def use_own_backends(manager: Any) -> None:
    """Let vLLM's `StructuredOutputManager` compile each grammar with the backend that its check has chosen, as a
    `TimedGrammar`. vLLM compiles every grammar with the backend of the first one."""
    backends: dict[str, Any] = {}
    lock = threading.RLock()  # vLLM makes a backend and starts to compile in a thread before it can be kept

    def init_with_backend(request: Any) -> None:
        if request.structured_output_request is None:
            return
        name = request.sampling_params.structured_outputs._backend
        with lock:
            one = copy.copy(manager)  # the engine's thread uses the manager's own backend meanwhile
            one.backend = backends.get(name)
            StructuredOutputManager.grammar_init(one, request)
            backends[name] = one.backend
            manager.backend = manager.backend or one.backend

    def compile_with_backend(request: Any) -> Any:
        one = copy.copy(manager)
        with lock:
            backend = backends.get(request.sampling_params.structured_outputs._backend, manager.backend)
        one.backend = copy.copy(backend)  # guidance keeps the current grammar in its backend, and threads share that
        return TimedGrammar(StructuredOutputManager._create_grammar(one, request), request.request_id)

    manager.grammar_init, manager._create_grammar = init_with_backend, compile_with_backend
