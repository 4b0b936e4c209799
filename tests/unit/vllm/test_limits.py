"""Requests that vLLM's engine does not survive are refused with the field's name."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1 import structured_output
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output.request import StructuredOutputRequest

from peagle.vllm.engine_settings import engine_kwargs
from peagle.vllm.grammar_checker import GrammarChecker, GrammarLimits
from peagle.vllm.limits import guard, use_own_backends
from peagle.vllm.request_args import MAX_K_KEY, read_max_k, undraftable_field

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def config(target_dir: Path, head_dir: Path, environment: None) -> Any:
    extra = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True}
    kwargs = engine_kwargs(target_dir, head_dir, dtype="float32", on_cpu=True, extra=extra)
    return EngineArgs(**kwargs).create_engine_config()


@pytest.fixture(scope="module")
def processor(config: Any) -> InputProcessor:
    """vLLM's own, as a guarded client has it."""
    unused = dict.fromkeys(["input_processor", "output_processor", "renderer", "generate", "shutdown"])
    client = SimpleNamespace(vllm_config=config, model_config=config.model_config, **unused)
    guard(client, GrammarChecker(config, GrammarLimits()))
    return client.input_processor


def send(processor: InputProcessor, prompt: list[int], **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=4, **sampling)
    return processor.process_inputs("r", {"type": "token", "prompt_token_ids": prompt}, params, ("generate",))


def test_a_token_id_beyond_the_vocabulary_is_refused(processor: InputProcessor) -> None:
    with pytest.raises(VLLMValidationError, match="token id 49152 is none of the model's, which are 0 to 49151"):
        send(processor, [1, VOCAB_SIZE, 2])
    send(processor, [VOCAB_SIZE - 1])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids: 1025 token ids were given, at most 1024"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias: 1025 token ids"),
        ({"min_tokens": 2, "stop_token_ids": list(range(200, 329))}, "stop_token_ids with min_tokens: 1"),
        ({"bad_words": [f"{n} and more words " * 30 for n in range(20)]}, r"bad_words: \d+ token ids"),
        ({"bad_words": [f"w{n}" for n in range(200)]}, "Too many bad words after tokenization"),
        ({"bad_words": ["a" * 10**7]}, "bad_words: the words are about 625000 tokens"),
        (
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1000, min_pattern_size=1, min_count=2)},
            "repetition_detection: .* is 2000 tokens, at most 1024",
        ),
        ({"seed": 2**63 - 2, "n": 3}, "seed: the 3 sequences have the seeds .* the largest is 9223372036854775807"),
        ({"seed": -2, "n": 2}, "seed: the 2 sequences have the seeds -2 to -1"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprob_token_ids": [[4]]}, "prompt_logprob_token_ids"),
        ({"thinking_token_budget": 1}, "thinking_token_budget"),
        ({"logprobs": 3, "logprob_token_ids": [1, 2, 3]}, "logprob_token_ids: not possible here"),
    ],
)
def test_a_list_that_ends_a_worker_is_refused(processor: InputProcessor, sampling: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        send(processor, [1], **sampling)


def test_a_grammar_that_was_not_checked_reaches_neither_vllms_validation_nor_the_engine(processor: Any) -> None:
    with pytest.raises(VLLMValidationError, match="structured_outputs: not checked"):
        send(processor, [1], structured_outputs=StructuredOutputsParams(regex="a"))


def test_lists_as_long_as_the_workers_tables_are_served(processor: InputProcessor) -> None:
    send(processor, [1], allowed_token_ids=list(range(1024)), logit_bias=dict.fromkeys(range(1024), 1.0))
    for seed in (2**63 - 3, -4):
        send(processor, [1], seed=seed, n=3)
    send(processor, [1], min_tokens=2, stop_token_ids=list(range(200, 320)), bad_words=["w"] * 3)


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"logit_bias": {5: 2.0}}, {"thinking_token_budget": 5}, {}])
def test_some_fields_go_without_drafts(sampling: dict[str, Any]) -> None:
    params = SamplingParams(extra_args={MAX_K_KEY: 3}, **sampling)
    assert undraftable_field(params) == "".join(sampling)
    assert read_max_k(params, 5) == (0 if sampling else 3)


def grammar_of(manager: Any, backend: str, **fields: Any) -> Any:
    """As the engine compiles it."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    params.structured_outputs._backend = backend
    asked = StructuredOutputRequest(params.structured_outputs)
    manager.grammar_init(SimpleNamespace(request_id="r", structured_output_request=asked, sampling_params=params))
    return asked._grammar.result()


def test_a_grammar_that_takes_too_long_is_followed_no_further(config: Any) -> None:
    """Of texts that begin with z this one is ambiguous: each letter takes longer than the one before. The text that the
    checker writes hardly ever begins so."""
    grammar = 'root ::= [a-y] [a-z ]* | "z" s+\ns ::= a b | b a | [a-z]+\na ::= [a-z ]* b?\nb ::= [a-z ]+ a?\n'
    manager = structured_output.StructuredOutputManager(config)
    use_own_backends(manager)
    found, mask = grammar_of(manager, "xgrammar", grammar=grammar), manager.backend.allocate_token_bitmask(2)
    first, later = (manager.tokenizer.encode(letter)[0] for letter in "zo")
    num_accepted, began_s = 0, time.thread_time()
    while found.accept_tokens("r", [later if num_accepted else first]):
        num_accepted += 1
        assert num_accepted < 200
        found.fill_bitmask(mask, 1)
    assert num_accepted > 5
    assert time.thread_time() - began_s < 30
    found.rollback(1000)
    assert found.validate_tokens([0, 1]) == []
    assert not found.is_terminated()
    mask.zero_()
    found.fill_bitmask(mask, 1)
    assert (mask[1] == -1).all()
    assert not mask[0].any()


def test_a_second_grammar_backend_is_made_beside_the_first(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes it in the thread that takes requests in, while a step may use the first one."""
    manager, at_the_time = structured_output.StructuredOutputManager(config), []
    made = structured_output.GuidanceBackend

    def make(*args: Any, **kwargs: Any) -> Any:
        at_the_time.append(manager.backend)
        return made(*args, **kwargs)

    monkeypatch.setattr(structured_output, "GuidanceBackend", make)
    use_own_backends(manager)
    grammars = [grammar_of(manager, name, regex="a+") for name in ("xgrammar", "guidance")]
    assert [type(found._grammar).__name__ for found in grammars] == ["XgrammarGrammar", "GuidanceGrammar"]
    assert [type(found).__name__ for found in at_the_time] == ["XgrammarBackend"]
