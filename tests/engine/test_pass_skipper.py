"""A colocated engine runs no drafter pass in decode steps that verify nothing; its text is the target's own.

In a real CPU engine, with vLLM's synchronous and asynchronous scheduler. A worker of the tests counts the passes where
the drafter runs them.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.platforms import current_platform

from peagle.vllm.remote import ChunkedProposer, PassSkipper
from peagle.vllm.request_args import DEPTH_KEY, drafts_wanted
from peagle.vllm.step_notes import update_plan
from tests.support.engine_cases import K_MAX, TEXT, check_counts, engine_settings
from tests.support.engine_harness import Job, Result, RunningEngine, drafted_kwargs, reference_results

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
def reference(prompts: list[list[int]], target_dir: Path, environment: None) -> list[Result]:
    """Output of the target without a head."""
    return reference_results(target_dir, engine_settings(90), [Job(prompt, NUM_TOKENS) for prompt in prompts])


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


@pytest.mark.engine
@pytest.mark.long
@only_cpu
@pytest.mark.parametrize("engine", ["tests.support.noted_schedulers.SkippingScheduler"], indirect=True)
def test_passes_may_be_left_out_and_come_back(
    engine: CountingEngine, prompts: list[list[int]], reference: list[Result]
) -> None:
    """No drafts follow a step without a pass, some the others, and the text is the target's own."""
    before = engine.passes()
    results = engine.run([Job(prompt, NUM_TOKENS, k=5) for prompt in prompts])
    assert [result.tokens for result in results] == [expected.tokens for expected in reference]
    num_steps = [result.drafting.counts.num_steps for result in results if result.drafting is not None]
    assert 2 <= max(num_steps) <= NUM_TOKENS / 2
    assert max(num_steps) <= len(engine.passes()) - len(before) <= max(num_steps) + NUM_PROMPTS


def step(num_computed: list[int], **changes: Any) -> Any:
    """What deciding reads of a model runner, four prompt tokens a request."""
    return SimpleNamespace(
        **{
            "drafter": object.__new__(ChunkedProposer),
            "num_spec_tokens": 5,
            "speculative_config": SimpleNamespace(disable_padded_drafter_batch=False),
            "parallel_config": SimpleNamespace(data_parallel_size=1),
            "input_batch": SimpleNamespace(
                num_reqs=len(num_computed),
                num_computed_tokens_cpu=np.array([*num_computed, 0]),
                num_prompt_tokens=np.array([4] * len(num_computed) + [9]),
            ),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("made", "num_ahead", "skips"),
    [
        (step([4, 9]), 0, True),
        (step([3, 9]), 0, False),  # a prompt is not done
        (step([4, 9]), 1, False),
        (step([4, 9]), None, False),  # nothing was planned
        (step([4], parallel_config=SimpleNamespace(data_parallel_size=2)), 0, False),
        (step([4], drafter=object()), 0, False),
    ],
)
def test_which_steps_are_skipped(made: Any, num_ahead: int | None, skips: bool) -> None:
    scheduled = SimpleNamespace()
    if num_ahead is not None:
        update_plan(scheduled, num_drafts_ahead=num_ahead)
    assert PassSkipper._skips(made, scheduled) is skips


@pytest.mark.parametrize(("k", "depth"), [(None, 5), (0, 0), (3, 3), (9, 5), (-1, 0), ("2", 5), (True, 5), (2.5, 5)])
def test_what_counts_as_k(k: Any, depth: int) -> None:
    extra_args = None if k is None else {DEPTH_KEY: k}
    assert drafts_wanted(SamplingParams(extra_args=extra_args), 5) == depth
    assert drafts_wanted(None, 5) == 5
