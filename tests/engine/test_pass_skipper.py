"""A colocated engine runs no drafter pass in decode steps that verify nothing; its text is the target's own.

In a real CPU engine, with vLLM's synchronous and asynchronous scheduler. A worker of the tests counts the passes where
the drafter runs them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from tests.support.engine_cases import K_MAX, TEXT, check_counts, engine_settings
from tests.support.engine_harness import Job, Result, RunningEngine, drafted_kwargs

NUM_TOKENS = 20
NUM_PROMPTS = 4


class CountingEngine(RunningEngine):
    """An engine that says what its drafter did."""

    def passes(self) -> list[int]:
        (passes,) = self._run(self._client.collective_rpc("passes"))
        return list(passes)


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT)["input_ids"]
    return [tokens[9 * place : 9 * place + 6 + 3 * place] for place in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]], plain_engine: RunningEngine) -> list[Result]:
    """Output of the target without a head."""
    return plain_engine.run([Job(prompt, NUM_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module", params=["sync", "async"])
def engine(
    request: pytest.FixtureRequest, reference: list[Result], target_dir: Path, head_dir: Path, environment: None
) -> Iterator[CountingEngine]:
    kwargs = drafted_kwargs(target_dir, head_dir, K_MAX, engine_settings(90))
    kwargs["worker_cls"] = "tests.support.counting_cpu_worker.CountingCPUWorker"
    if "." in request.param:
        kwargs["scheduler_cls"] = request.param
    running = CountingEngine(kwargs, is_async=request.param == "async")
    yield running
    running.shutdown()


only_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="the counting worker is a CPU worker")


def check_text(results: list[Result], reference: list[Result], ks: list[int]) -> None:
    for result, expected, k in zip(results, reference, ks, strict=True):
        assert result.tokens == expected.tokens
        check_counts(result, k)


@pytest.mark.engine
@pytest.mark.long
@only_cpu
def test_without_drafts_only_prompts_go_through_the_pass(
    engine: CountingEngine, prompts: list[list[int]], reference: list[Result]
) -> None:
    before = engine.passes()
    results = engine.run([Job(prompt, NUM_TOKENS, k=0) for prompt in prompts])
    check_text(results, reference, [0] * NUM_PROMPTS)
    passes = engine.passes()[len(before) :]
    assert 1 <= len(passes) <= NUM_PROMPTS  # steps that hold a prompt; the four may come in one or in several


@pytest.mark.engine
@pytest.mark.long
@only_cpu
def test_one_request_with_drafts_brings_the_pass_back_for_all(
    engine: CountingEngine, prompts: list[list[int]], reference: list[Result]
) -> None:
    before = engine.passes()
    ks = [0, 3, 0, K_MAX]
    results = engine.run([Job(prompt, NUM_TOKENS, k=k) for prompt, k in zip(prompts, ks, strict=True)])
    check_text(results, reference, ks)
    drafting = [result.drafting for result in results]
    num_steps = max(one.counts.num_steps for one in drafting if one is not None)
    passes = engine.passes()[len(before) :]
    assert len(passes) >= num_steps
    assert max(passes) == NUM_PROMPTS
