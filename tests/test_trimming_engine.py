"""A real engine that knows its step times trims drafts by the step at hand, prompts beside them included, and tells its
client what its steps turn out to take; its text is the target's own."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.step_time import Corrections, StepPoint, StepShape, StepTimes
from peagle.vllm.acceptance import STEP_TIMES_KEY
from tests.engine_cases import K_MAX, TEXT, engine_settings
from tests.engine_harness import Job, Result, RunningEngine, drafted_kwargs, reference_results
from tests.noted_schedulers import NOTES

pytestmark = pytest.mark.engine

NUM_RUNNING = 3
SETTINGS: dict[str, Any] = {**engine_settings(90), "max_num_seqs": NUM_RUNNING}
SURVIVAL = tuple(0.7**depth for depth in range(1, K_MAX + 1))
"""Worth verifying to the end on the full graph, and hardly at all where a draft costs what a third of a step costs."""


def step_times() -> dict[str, Any]:
    """K_max everywhere has a full graph, whose steps take 10 ms; off it every token beyond one a request takes 5 ms."""
    points = []
    for num_requests in (1, 2, NUM_RUNNING, 8):
        for depth in range(K_MAX + 1):
            for uniform in (depth, None):
                seconds = 0.010 if uniform == K_MAX else 0.012 + 0.005 * num_requests * depth
                shape = StepShape(num_requests, num_requests * (1 + depth), uniform)
                points.append(StepPoint(shape, seconds, seconds, 1))
    return StepTimes(points, max_draft_tokens=K_MAX, full_graph_depths=(K_MAX,), measured=False).to_document()


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
    """`steps`: what each step was made of; `corrections`: what the client was told of their times at last."""

    steps: list[dict[str, Any]]
    corrections: str


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
    kwargs["additional_config"] = {**kwargs.get("additional_config", {}), STEP_TIMES_KEY: step_times()}
    kwargs["scheduler_cls"] = "tests.noted_schedulers.NotedScheduler"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES, str(notes))
        engine = RunningEngine(
            kwargs, is_async=request.param == "async", async_scheduler="tests.noted_schedulers.NotedAsyncScheduler"
        )
        try:
            for found, expected in zip(engine.run(jobs), reference, strict=True):
                assert found.tokens == expected.tokens
            corrections = engine.recorder.corrections
        finally:
            engine.shutdown()
    return Seen([json.loads(line) for line in notes.read_text().splitlines()], corrections)


def test_drafts_beside_a_prompt_are_trimmed_and_the_others_are_not(seen: Seen) -> None:
    steps = seen.steps
    beside = [one["drafts"] for one in steps if one["prompt_tokens"] and one["drafts"]]
    alone = [one["drafts"] for one in steps if not one["prompt_tokens"] and len(one["drafts"]) == NUM_RUNNING]
    assert len(beside) >= 4
    assert max(max(drafts) for drafts in beside) <= 1
    assert sum(drafts == [K_MAX] * NUM_RUNNING for drafts in alone) >= 4


def test_the_client_hears_what_steps_take(seen: Seen) -> None:
    """The table is of no engine, so only that something was measured is known, and where."""
    found = Corrections.decode(seen.corrections)
    assert 0 < found.num_steps <= len(seen.steps)
    assert any(depth == K_MAX for _, depth in found.kinds)
    assert all(1 << bucket <= 4 for bucket, _ in found.kinds)
