"""A real engine with its drafter in another process: the text is the target's own whatever happens to the drafter.

Tests run on vLLM's asynchronous scheduler, as on a GPU, and in `make test-all` on the synchronous one too. The same
target without drafts wrote the reference, in float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from peagle.vllm.request_args import undraftable_field
from tests.support.engine_cases import (
    BATCH,
    K_MAX,
    MIXED,
    NUM_BLOCKS,
    NUM_LONG,
    NUM_SHORT,
    check_counts,
    engine_settings,
    varied_jobs,
)
from tests.support.engine_harness import Job, Result, RunningEngine
from tests.support.remote_harness import RemoteEngine, check_text, drafter_process, num_verified
from tests.support.transport_harness import only_link

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="the drafter process of the tests is a CPU process"),
]


@pytest.fixture(scope="module")
def prompts(prompts: list[list[int]]) -> list[list[int]]:
    """Those of a batch."""
    return [prompts[place] for place in BATCH]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]], plain_engine: RunningEngine) -> tuple[list[Result], list[Result]]:
    """Output of the target without speculation: greedy, and sampled."""
    jobs = [*(Job(prompt, NUM_LONG + K_MAX) for prompt in prompts), *varied_jobs(prompts, NUM_SHORT)]
    results = plain_engine.run(jobs)
    return results[: len(prompts)], results[len(prompts) :]


@pytest.fixture(scope="module")
def reference(references: tuple[list[Result], list[Result]]) -> list[Result]:
    return references[0]


@pytest.fixture(scope="module")
def drafter(target_dir: Path, head_dir: Path, environment: None) -> Iterator[dict[str, Any]]:
    with drafter_process(head_dir, target_dir) as running:
        yield running


@pytest.fixture(scope="module", params=[pytest.param("sync", marks=pytest.mark.long), "async"])
def engine(
    request: pytest.FixtureRequest, reference: list[Result], drafter: dict[str, Any], target_dir: Path, head_dir: Path
) -> Iterator[RemoteEngine]:
    is_async, extra = request.param == "async", engine_settings(NUM_BLOCKS)
    with RemoteEngine(target_dir, head_dir, k_max=K_MAX, is_async=is_async, extra=extra) as running:
        running.connect(drafter)
        yield running


@pytest.mark.parametrize("ks", [MIXED, (0,)], ids=["mixed", "none"])
def test_each_request_verifies_its_own_k(
    engine: RemoteEngine, prompts: list[list[int]], reference: list[Result], ks: tuple[int | None, ...]
) -> None:
    depths = [ks[place % len(ks)] for place in range(len(prompts))]
    before = only_link(engine)
    results = engine.run([Job(prompt, NUM_SHORT, k=k) for prompt, k in zip(prompts, depths, strict=True)])
    check_text(results, reference)
    for result, k in zip(results, depths, strict=True):
        check_counts(result, K_MAX if k is None else k)
    link = only_link(engine)
    assert link["steps"] > before["steps"]  # with K = 0 too: prompts fill the drafter's cache
    assert link["timeouts"] == 0
    if ks == (0,):  # what follows the prompts stays here: these requests never draft
        assert link["steps"] - before["steps"] < NUM_SHORT
    else:
        assert sum(one.drafting.counts.num_accepted_tokens for one in results if one.drafting is not None) > 20


def test_sampled_output_is_the_same_without_drafts(
    engine: RemoteEngine, prompts: list[list[int]], references: tuple[list[Result], list[Result]]
) -> None:
    """Token for token, with K = 0 and 7 in one batch, whatever the sampling but what vLLM refuses with this
    worker of the tests, and min_tokens: V1 takes placeholders of asynchronous scheduling for tokens there."""
    cases = [
        (job, expected.tokens[0][:NUM_SHORT])
        for k in (0, K_MAX)
        for job, expected in zip(varied_jobs(prompts, NUM_SHORT, k=k), references[1], strict=True)
        if not undraftable_field(job.params()) and not job.params().min_tokens
    ]
    results = engine.run([job for job, _ in cases])
    for (job, tokens), result in zip(cases, results, strict=True):
        assert result.tokens[0] == tokens, (job.k, job.sampling)
    assert num_verified(results) > 0


@pytest.mark.long
def test_aborted_requests_leave_the_drafter(
    engine: RemoteEngine, prompts: list[list[int]], reference: list[Result]
) -> None:
    gone = [Job(prompts[place], NUM_LONG, k=3, abort_after=4) for place in (4, 5, 6)]
    stays = Job(prompts[3], 40, k=3)  # until the others are gone
    results = engine.run([*gone, stays])
    check_text(results[3:], reference[3:4])
    assert engine.report()["num_requests"] in ([0], [1])
    (again,) = engine.run([Job(prompts[4], NUM_SHORT, k=3)])
    check_text([again], reference[4:5])
    assert engine.report()["num_requests"] == [1]


def test_without_a_drafter_nothing_is_verified(
    engine: RemoteEngine, drafter: dict[str, Any], prompts: list[list[int]], reference: list[Result]
) -> None:
    """None is named: no drafts, and in asynchronous scheduling no placeholders for them either."""
    engine.call_workers("set_drafters", [])
    engine.run([Job(prompts[0], 2)])  # a step in which the worker notices
    jobs = [Job(prompt, 8) for prompt in prompts[:4]]
    results = engine.run(jobs)
    check_text(results, reference[:4])
    assert num_verified(results) == 0
    engine.connect(drafter)
    results = engine.run(jobs)
    check_text(results, reference[:4])
    assert num_verified(results) > 0
