"""Requests that vLLM's engine does not survive are refused with the field's name; grammars cost what they may."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import StructuredOutputManager

from peagle.vllm.acceptance import DEPTH_KEY, drafts_wanted
from peagle.vllm.engine import engine_kwargs
from peagle.vllm.limits import MAX_TOKEN_IDS, bound_grammars, guard, max_grammar_s, try_in_child

VOCAB_SIZE = 49152


@pytest.fixture(scope="module")
def config(target_dir: Path, head_dir: Path, environment: None) -> Any:
    extra = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True}
    kwargs = engine_kwargs(target_dir, head_dir, dtype="float32", on_cpu=True, extra=extra)
    return EngineArgs(**kwargs).create_engine_config()


@pytest.fixture(scope="module")
def processor(config: Any) -> InputProcessor:
    """vLLM's own, as a guarded client has it."""
    client = SimpleNamespace(
        input_processor=InputProcessor(config),
        vllm_config=config,
        model_config=config.model_config,
        output_processor=None,
        renderer=None,
        generate=None,
    )
    guard(client)
    return client.input_processor


def send(processor: InputProcessor, prompt: list[int], **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=4, **sampling)
    return processor.process_inputs("r", {"type": "token", "prompt_token_ids": prompt}, params, ("generate",))


@pytest.mark.parametrize("prompt", [[VOCAB_SIZE], [1, VOCAB_SIZE, 2], [10**9]])
def test_a_token_id_beyond_the_vocabulary_is_refused(processor: InputProcessor, prompt: list[int]) -> None:
    with pytest.raises(VLLMValidationError, match=r"prompt holds token id \d+, the model's ids are 0 to 49151|vocab"):
        send(processor, prompt)
    send(processor, [VOCAB_SIZE - 1])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"allowed_token_ids": list(range(MAX_TOKEN_IDS + 1))}, "allowed_token_ids holds 1025 token ids, at most 1024"),
        ({"logit_bias": dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1.0)}, "logit_bias holds 1025"),
        ({"min_tokens": 2, "stop_token_ids": list(range(121))}, "stop_token_ids holds 121"),
        ({"bad_words": ["many words " * 60] * 1 + [f"{n} and more words " * 30 for n in range(20)]}, "bad_words are"),
        ({"bad_words": [f"w{n}" for n in range(1025)]}, "bad_words are about 1025 tokens, at most 1024"),
        ({"bad_words": ["a" * 10**7]}, "bad_words are about 625000 tokens"),
        (
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1000, min_pattern_size=1, min_count=2)},
            "repetition_detection looks 2000 tokens back .*at most 1024",
        ),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logprobs": 3, "logprob_token_ids": [1, 2, 3]}, "logprob_token_ids is not possible here"),
    ],
)
def test_a_list_that_ends_a_worker_is_refused(
    processor: InputProcessor, sampling: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        send(processor, [1], **sampling)


def nested(num_objects: int) -> dict[str, Any]:
    """A schema of 12 kB, with which vLLM's own check holds the event loop for half a minute."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num_objects):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"choice": [str(number) for number in range(1001)]}, "structured_outputs.choice has 1001 choices"),
        ({"choice": ["a" * 70_000]}, "structured_outputs.choice has 70004 characters, at most 65536"),
        ({"json": {"enum": ["a" * 70_000]}}, "structured_outputs.json has 70"),
        ({"grammar": "root ::= " + '"a" ' * 20_000}, "structured_outputs.grammar has"),
        ({"json": nested(300)}, "structured_outputs.json is nested 601 levels deep, at most 64 are possible"),
        ({"json": json.dumps(nested(300))}, "structured_outputs.json is nested 601 levels"),
        ({"json": "{"}, "structured_outputs.json is no JSON"),
        ({"regex": "("}, "regex"),
    ],
)
def test_a_grammar_that_is_too_large_or_none_is_refused(
    processor: InputProcessor, structured: dict[str, Any], message: str
) -> None:
    started_s = time.monotonic()
    with pytest.raises((VLLMValidationError, ValueError), match=message):
        send(processor, [1], structured_outputs=StructuredOutputsParams(**structured))
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"logit_bias": {5: 2.0}}])
def test_min_p_and_logit_bias_go_without_drafts(processor: InputProcessor, sampling: dict[str, Any]) -> None:
    request = send(processor, [1], extra_args={DEPTH_KEY: 3}, **sampling)
    assert drafts_wanted(request.sampling_params, 5) == 0
    plain = send(processor, [1], extra_args={DEPTH_KEY: 3})
    assert drafts_wanted(plain.sampling_params, 5) == 3


def test_a_child_that_costs_too_much_or_dies_ends_alone() -> None:
    try_in_child(lambda: None, 1.0)
    try_in_child(lambda: 1 / 0, 1.0)  # what it raises is the caller's to find
    with pytest.raises(ValueError, match="takes more than 1 s to compile"):
        try_in_child(lambda: [None for _ in iter(int, 1)], 1.0)
    with pytest.raises(ValueError, match="crashes its compiler"):
        try_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), 1.0)


def asked(request_id: str, **structured: Any) -> Any:
    """The part of vLLM's `Request` that compiling a grammar reads."""
    from vllm.v1.structured_output.request import StructuredOutputRequest

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**structured))
    assert params.structured_outputs is not None
    params.structured_outputs._backend = "xgrammar"
    request = StructuredOutputRequest.from_sampling_params(params)
    return SimpleNamespace(request_id=request_id, sampling_params=params, structured_output_request=request)


def test_a_grammar_that_takes_long_is_given_up_and_others_go_on(config: Any) -> None:
    """A string of bounded length takes a second or more to compile; many of different lengths take minutes."""
    manager = StructuredOutputManager(config)
    refused = bound_grammars(manager, max_cpu_s=1.0)
    lengths = {f"p{length}": {"type": "string", "maxLength": length} for length in range(1000, 1030)}
    wrong = asked("wrong", grammar="root ::= ")
    slow = asked("slow", json={"type": "object", "properties": lengths})
    quick = [
        asked(f"quick{number}", json={"type": "object", "properties": {"a": {"type": "integer"}}}) for number in (0, 1)
    ]
    for request in (slow, wrong, *quick):
        manager.grammar_init(request)
    for request in quick:
        assert request.structured_output_request._grammar.result(timeout=60) is not None
    with pytest.raises(ValueError, match="the grammar takes more than 1 s to compile"):
        slow.structured_output_request._grammar.result(timeout=60)
    assert wrong.structured_output_request._grammar.exception(timeout=60) is not None
    assert refused["slow"] == "structured_outputs: the grammar takes more than 1 s to compile"
    assert refused.keys() == {"slow", "wrong"}


def test_the_time_of_a_grammar_is_a_setting() -> None:
    assert [max_grammar_s(found) for found in (None, {}, {"peagle_grammar_s": 3})] == [10.0, 10.0, 3.0]
    with pytest.raises(ValueError, match="peagle_grammar_s.*seconds above 0, not '3'"):
        max_grammar_s({"peagle_grammar_s": "3"})
