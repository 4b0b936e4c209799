"""What the engine tests ask of an engine: prompts, settings and jobs."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.support.counted import counts_of
from tests.support.engine_harness import Job, Result

K_MAX = 7
MIXED = (0, 2, K_MAX, 5, None)
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 40, 48, 64, 65, 300)
BATCH = (0, 1, 4, 6, 8, 10, 12, 13)
"""Places of the prompts that run together: lengths around a block of 32, and one of two prefill chunks."""
NUM_SHORT, NUM_LONG = 16, 48  # output tokens
MAX_MODEL_LEN = 768
NEARLY_FULL = MAX_MODEL_LEN - 30
NUM_BLOCKS = 30  # of 32 tokens: room for the short outputs of a batch at once, not for the long ones
PREFILL_CHUNK = 256
NUM_SAMPLES = 24
TEXT = (
    "The river rises in the hills above the town and runs for ninety miles before it meets the sea. In spring the "
    "water is high, and the old mill by the bridge, which once ground corn for the whole valley, stands with its feet "
    "in the flood. def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return "
    "total / len(values)\n\nQ: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA: Rome.\n"
    "Dear Ms Harlow, thank you for your letter of the third of May. We have looked into the matter, and we are sorry "
    "to say that the parcel was lost. 1, 1, 2, 3, 5, 8, 13, 21, 34, 55. Water boils at one hundred degrees. "
)

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 20},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "top_p": 0.95},
    {"min_p": 0.05},
    {"logit_bias": {28: 3.0, 30: -100.0}},
    {"bad_words": [" the", "."]},
    {"min_tokens": 12, "stop_token_ids": [28, 30, 260, 198, 29, 284, 314], "ignore_eos": False},
)
"""Of requests with a temperature and a seed. 28: ",", 30: ".", 198: newline."""

SAMPLED_TEXT = "The capital of Italy is Rome. The capital of"


only_sync = pytest.mark.parametrize("engine", ["sync"], indirect=True)
"""For scripted drafts: asynchronous scheduling leaves the drafts in the worker, where no scheduler can replace them."""


def engine_settings(num_blocks: int) -> dict[str, Any]:
    return {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 24,
        "max_num_batched_tokens": PREFILL_CHUNK,
        "num_gpu_blocks_override": num_blocks,
        "block_size": 32,
        "enforce_eager": True,
        "generation_config": "vllm",
        # Of a GPU, where an engine without drafts runs beside the one with drafts.
        **({} if current_platform.is_cpu() else {"gpu_memory_utilization": 0.4}),
    }


def nearly_full_job(text_tokens: list[int], k: int | None) -> Job:
    return Job(text_tokens[:NEARLY_FULL], MAX_MODEL_LEN, k=k)


def grammar_job(prompt: Sequence[int], k: int | None) -> Job:
    colours = r"(red|green|blue)(, (red|green|blue)){3}\."
    return Job(prompt, 40, k=k, sampling={"regex": colours, "ignore_eos": False})


def sampling_jobs(prompt: Sequence[int], **fields: Any) -> list[Job]:
    return [Job(prompt, 3, **fields, sampling={"temperature": 1.0, "seed": seed}) for seed in range(NUM_SAMPLES)]


def varied_jobs(prompts: Sequence[Sequence[int]], max_tokens: int, **fields: Any) -> list[Job]:
    """One job for each of `SAMPLINGS`, each with a prompt and a seed of its own. prompts: those of `BATCH`."""
    return [
        Job(prompts[place], max_tokens, **fields, sampling={"temperature": 0.9, "seed": 40 + place, **sampling})
        for place, sampling in enumerate(SAMPLINGS)
    ]


def check_counts(result: Result, k: int) -> None:
    """Every step verified `k` drafts, and the recorder counted what vLLM's own list of steps says."""
    assert result.drafting is not None
    counts = result.drafting.counts
    assert counts.drafted == [counts.num_steps] * k
    assert result.drafting.num_output_tokens == len(result.tokens[0])
    if result.steps is not None:
        assert {num_verified for num_verified, _ in result.steps} == ({k} if k else set())
        assert counts == counts_of(result.steps)
