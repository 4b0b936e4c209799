"""A real engine learns what its steps take, trims drafts by it and tells its client; its text is the target's own."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.counts import Counts
from cluster.step_latency import StepLatency
from tests.support.engine_cases import K_MAX, TEXT, engine_settings
from tests.support.engine_harness import Job, Result, RunningEngine, drafted_kwargs, reference_results
from tests.support.noted_schedulers import NOTES

pytestmark = [pytest.mark.engine, pytest.mark.long]

NUM_RUNNING = 3
SETTINGS: dict[str, Any] = {**engine_settings(90), "max_num_seqs": NUM_RUNNING}
SURVIVAL = tuple(0.7**depth for depth in range(1, K_MAX + 1))


@pytest.fixture(scope="module")
def jobs(target_dir: Path) -> list[Job]:
    """More than run at a time, of unlike lengths: prompts come beside decodes. All are long enough for a step with one
    to be outside the table's small batches, whatever the engine takes in first."""
    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT)["input_ids"]
    return [
        Job(tokens[9 * place : 9 * place + 26 + 4 * place], 14 + 5 * (place % 4), survival=SURVIVAL)
        for place in range(9)
    ]


@pytest.fixture(scope="module")
def reference(target_dir: Path, jobs: list[Job], environment: None) -> list[Result]:
    return reference_results(target_dir, SETTINGS, jobs)


@dataclass(frozen=True)
class Seen:
    """`steps`: what each was made of; `step_costs`: what the client was told of their times at last; `num_rejected`:
    drafts that were verified and not accepted."""

    steps: list[dict[str, Any]]
    num_rejected: int
    step_costs: str
    is_async: bool


@pytest.fixture(scope="module", params=["sync", "async"])
def seen(
    request: pytest.FixtureRequest,
    reference: list[Result],
    jobs: list[Job],
    target_dir: Path,
    head_dir: Path,
    environment: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Seen:
    """What was seen while the jobs ran and said what the target says."""
    notes = tmp_path_factory.mktemp("notes") / "steps.jsonl"
    kwargs = drafted_kwargs(target_dir, head_dir, K_MAX, SETTINGS)
    kwargs["scheduler_cls"] = "tests.support.noted_schedulers.NotedScheduler"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES, str(notes))
        engine = RunningEngine(
            kwargs,
            is_async=request.param == "async",
            async_scheduler="tests.support.noted_schedulers.NotedAsyncScheduler",
        )
        try:
            for found, expected in zip(engine.run(jobs), reference, strict=True):
                assert found.tokens == expected.tokens
            step_costs = engine.recorder.step_costs
            counts = sum((one.counts for one in engine.recorder.workloads().values()), Counts())
        finally:
            engine.shutdown()
    steps = [json.loads(line) for line in notes.read_text().splitlines()]
    return Seen(steps, counts.num_draft_tokens - counts.num_accepted_tokens, step_costs, request.param == "async")


def test_no_step_verifies_more_than_k_and_none_leaves_a_request_out(seen: Seen) -> None:
    drafts = [drafts for step in seen.steps for drafts in step["drafts"]]
    assert max(drafts) <= K_MAX
    assert sum(drafts) > len(drafts), "on this engine most drafts are worth their time"


def test_a_step_verifies_what_the_step_before_was_told_to_draft(seen: Seen) -> None:
    """The GPU worker drafts no deeper than that. With synchronous scheduling the pass is left out, or makes K_max."""
    told = [(before["ahead"], max(after["drafts"], default=0)) for before, after in pairwise(seen.steps)]
    assert all(deepest <= ahead for ahead, deepest in told)
    aheads = {ahead for ahead, _ in told}
    assert len(aheads) > 1 if seen.is_async else aheads <= {0, K_MAX}


def test_rejections_are_expected_as_they_come(seen: Seen) -> None:
    """In small batches as in these the margin is wide; more than there were drafts is never expected."""
    assert all(0 <= step["num_rejected"] <= sum(step["drafts"]) for step in seen.steps)
    assert seen.num_rejected
    assert 0.1 < sum(step["num_rejected"] for step in seen.steps) / seen.num_rejected < 1.1


def test_the_client_hears_what_steps_take(seen: Seen) -> None:
    """From the first steps on, though nothing was measured at the engine's start."""
    latency = StepLatency.from_wire(seen.step_costs)
    assert 0 < latency.num_steps <= len(seen.steps)
    assert not latency.is_measured
    assert 0.002 < latency.seconds(NUM_RUNNING, NUM_RUNNING * (1 + K_MAX)) < 5.0
