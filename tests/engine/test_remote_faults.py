"""Drafters die, hang and come back while a real engine serves: no request fails and the text is the target's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from peagle.vllm.engine import RemoteSettings
from tests.support.drafter_process import DrafterProcess
from tests.support.engine_cases import K_MAX, TEXT, engine_settings
from tests.support.engine_harness import Job, Result, RunningEngine
from tests.support.remote_harness import RemoteEngine, check_text, num_verified

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="the drafter process of the tests is a CPU process"),
]

IMPATIENT = RemoteSettings(min_deadline_s=0.5, max_deadline_s=3.0)
NUM_TOKENS, AFTER_TOKENS = 40, 8


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT)["input_ids"]
    return [tokens[11 * place : 11 * place + 12 + 8 * place] for place in range(4)]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]], plain_engine: RunningEngine) -> list[Result]:
    return plain_engine.run([Job(prompt, NUM_TOKENS) for prompt in prompts])


@pytest.fixture(scope="module", params=["sync", "async"])
def engine(
    request: pytest.FixtureRequest, reference: list[Result], target_dir: Path, head_dir: Path, environment: None
) -> Iterator[RemoteEngine]:
    running = RemoteEngine.start(
        target_dir, head_dir, IMPATIENT, k_max=K_MAX, is_async=request.param == "async", extra=engine_settings(90)
    )
    yield running
    running.shutdown()


@pytest.fixture
def drafters(target_dir: Path, head_dir: Path, environment: None) -> Iterator[list[DrafterProcess]]:
    """One, and those that a test adds."""
    started = [DrafterProcess([head_dir], target_dir)]
    yield started
    for drafter in started:
        drafter.kill()


def test_killed_and_restarted(
    engine: RemoteEngine,
    drafters: list[DrafterProcess],
    prompts: list[list[int]],
    reference: list[Result],
    target_dir: Path,
    head_dir: Path,
) -> None:
    first = drafters[0]
    engine.connect(first)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    check_text(results := engine.run_while(jobs, AFTER_TOKENS, first.kill), reference)
    assert num_verified(results) > 0
    engine.wait_for(lambda links: links[first.entry["address"]]["state"] == "connecting")
    engine.run(jobs[:1])  # a step in which the worker notices
    check_text(results := engine.run(jobs), reference)
    assert num_verified(results) == 0
    drafters.append(DrafterProcess([head_dir], target_dir, port=first.port))
    engine.wait_for(lambda links: links[first.entry["address"]]["state"] == "up")
    check_text(results := engine.run(jobs), reference)
    assert num_verified(results) > 0
    assert engine.links()[first.entry["address"]]["num_connections"] == 2


def test_hung_and_resumed(
    engine: RemoteEngine, drafters: list[DrafterProcess], prompts: list[list[int]], reference: list[Result]
) -> None:
    drafter = drafters[0]
    address = drafter.entry["address"]
    engine.connect(drafter)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    num_timeouts = engine.links()[address]["num_timeouts"]
    try:
        check_text(results := engine.run_while(jobs, AFTER_TOKENS, drafter.freeze), reference)
        assert engine.links()[address]["num_timeouts"] == num_timeouts + 1  # one step waited, the others did not
        check_text(silent := engine.run(jobs), reference)
        assert num_verified(silent) == 0
        assert num_verified(results) > 0
    finally:
        drafter.thaw()
    for _ in range(5):  # its answers are looked for at the start of a step; a busy machine may make it late again
        check_text(results := engine.run(jobs), reference)
        if num_verified(results):
            return
    raise AssertionError("a drafter that goes on never drafts again")
