"""What the engine tests ask of an engine: prompts, settings, jobs, and the comparison of two samples."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.counted import counts_of
from tests.engine_harness import Job, Result

K_MAX = 7
MIXED = (0, 2, K_MAX, 5, None)
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 40, 48, 64, 65, 300)
BATCH = (0, 1, 4, 6, 8, 10, 12, 13)
"""Places of the prompts that run together: lengths around a block of 32, and one of two prefill chunks."""
NUM_SHORT, NUM_LONG = 16, 64  # output tokens
MAX_MODEL_LEN = 768
NEARLY_FULL = MAX_MODEL_LEN - 30
NUM_BLOCKS = 30  # of 32 tokens: room for the short outputs of a batch at once, not for the long ones
PREFILL_CHUNK = 256
NUM_SAMPLES = 128
TEXT = (
    "The river rises in the hills above the town and runs for ninety miles before it meets the sea. In spring the "
    "water is high, and the old mill by the bridge, which once ground corn for the whole valley, stands with its feet "
    "in the flood. def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return "
    "total / len(values)\n\nQ: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA: Rome.\n"
    "Dear Ms Harlow, thank you for your letter of the third of May. We have looked into the matter, and we are sorry "
    "to say that the parcel was lost. 1, 1, 2, 3, 5, 8, 13, 21, 34, 55. Water boils at one hundred degrees. "
)

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
    }


def nearly_full_job(text_tokens: list[int], k: int | None) -> Job:
    return Job(text_tokens[:NEARLY_FULL], MAX_MODEL_LEN, k=k)


def grammar_job(prompt: Sequence[int], k: int | None) -> Job:
    colours = r"(red|green|blue)(, (red|green|blue)){5}\."
    return Job(prompt, 60, k=k, sampling={"regex": colours, "ignore_eos": False})


def sampling_jobs(prompt: Sequence[int], first_seed: int, **fields: Any) -> list[Job]:
    seeds = range(first_seed, first_seed + NUM_SAMPLES)
    return [Job(prompt, 3, **fields, sampling={"temperature": 1.0, "seed": seed}) for seed in seeds]


def check_counts(result: Result, k: int) -> None:
    """Every step verified `k` drafts, and the recorder counted what vLLM's own list of steps says."""
    assert result.drafting is not None
    counts = result.drafting.counts
    assert counts.drafted == [counts.num_steps] * k
    assert result.drafting.num_output_tokens == len(result.tokens[0])
    if result.steps is not None:
        assert {num_verified for num_verified, _ in result.steps} == ({k} if k else set())
        assert counts == counts_of(result.steps)


def chi_square_p_value(first: Sequence[int], second: Sequence[int], min_count: int = 10) -> float:
    """Probability that two samples of one distribution, equally large, differ so much.

    Values seen fewer than `min_count` times in both together share a bin.
    """
    assert len(first) == len(second)
    counts, other = Counter(first), Counter(second)
    bins = [(counts[value], other[value]) for value in counts | other if counts[value] + other[value] >= min_count]
    rest = (len(first) - sum(mine for mine, _ in bins), len(second) - sum(theirs for _, theirs in bins))
    if sum(rest):
        bins.append(rest)
    assert len(bins) >= 4, "too few values: the comparison would see nothing"
    statistic = sum((mine - theirs) ** 2 / (mine + theirs) for mine, theirs in bins)
    degrees = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))
