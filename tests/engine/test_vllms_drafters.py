"""Drafters that vLLM alone knows run behind the same scheduler: requests have their K, texts are the target's own.

A CPU runs two of them: n-grams of the text, and a draft model. Here the target is its own draft model, so that its
drafts are accepted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_cases import TEXT, counts_of, engine_settings
from tests.support.engine_harness import Job, RunningEngine, float32_kwargs

K_MAX = 4
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def jobs(tokenizer: Any) -> list[Job]:
    """A repetitive text first, which n-grams can draft for."""
    texts = ["one two three one two three one two three one two", *(TEXT[50 * place :][:80] for place in range(3))]
    return [Job(tokenizer(text)["input_ids"], NUM_TOKENS) for text in texts]


@pytest.fixture(scope="module")
def engine(method: str, jobs: list[Job], target_dir: Path, environment: None) -> Iterator[RunningEngine]:
    drafter = target_dir if method == "draft_model" else None
    with RunningEngine(float32_kwargs(target_dir, drafter, engine_settings(90), K_MAX, method=method)) as running:
        yield running


def test_each_request_has_its_k_and_the_text_is_the_targets(
    engine: RunningEngine, plain_engine: RunningEngine, method: str, jobs: list[Job]
) -> None:
    expected = plain_engine.run(jobs)
    num_verified = num_accepted = 0
    for ks in ([None] * len(jobs), [2, 0, 2, 0]):
        results = engine.run([Job(job.prompt, NUM_TOKENS, k=k) for job, k in zip(jobs, ks, strict=True)])
        for result, reference, k in zip(results, expected, ks, strict=True):
            assert result.tokens == reference.tokens
            assert all(verified <= (K_MAX if k is None else k) for verified, _ in result.steps)
            assert result.drafting.counts == counts_of(result.steps)
            num_verified += sum(verified for verified, _ in result.steps)
            num_accepted += sum(accepted for _, accepted in result.steps)
    assert num_accepted
    if method == "draft_model":  # but for drafts behind an answer's last token
        assert num_verified - num_accepted <= 2 * len(jobs) * K_MAX
