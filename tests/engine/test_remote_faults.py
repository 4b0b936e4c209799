"""Drafters die, hang and come back while a real engine serves: no request fails and the text is the target's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.platforms import current_platform

from cluster.counts import Counts
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
NUM_TOKENS, NUM_LONG, AFTER_TOKENS = 40, 72, 8
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def prompts(target_dir: Path) -> list[list[int]]:
    tokens = AutoTokenizer.from_pretrained(target_dir)(TEXT)["input_ids"]
    return [tokens[11 * place : 11 * place + 12 + 8 * place] for place in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]], plain_engine: RunningEngine) -> list[Result]:
    return plain_engine.run([Job(prompt, NUM_LONG) for prompt in prompts])


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
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts[:4]]
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


def test_restarted_under_load(
    engine: RemoteEngine,
    drafters: list[DrafterProcess],
    prompts: list[list[int]],
    reference: list[Result],
    target_dir: Path,
    head_dir: Path,
) -> None:
    """Killed in mid generation; requests under way go on with the other drafter, from a cold start."""
    drafters.append(DrafterProcess([head_dir], target_dir))
    engine.connect(*drafters)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts[:4]]
    answered = {address: link["num_answered"] for address, link in engine.links().items()}
    check_text(engine.run_while(jobs, AFTER_TOKENS, drafters[0].kill), reference)
    links = engine.links()
    other = drafters[1].entry["address"]
    assert links[other]["num_answered"] > answered[other]
    assert links[other]["state"] == "up"
    assert links[drafters[0].entry["address"]]["state"] == "connecting"


def test_hung_and_resumed(
    engine: RemoteEngine, drafters: list[DrafterProcess], prompts: list[list[int]], reference: list[Result]
) -> None:
    drafter = drafters[0]
    address = drafter.entry["address"]
    engine.connect(drafter)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts[:4]]
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


def test_requests_without_drafts_do_not_look_like_rejected_ones(
    engine: RemoteEngine,
    drafters: list[DrafterProcess],
    prompts: list[list[int]],
    reference: list[Result],
    target_dir: Path,
    head_dir: Path,
) -> None:
    """A drafter refuses requests, here those that have outgrown it. Their steps count neither as verified nor as
    rejected, so what is measured of acceptance stays about what it is with drafts for all."""
    jobs = [Job(prompt, NUM_LONG) for prompt in prompts]
    engine.connect(drafters[0])
    check_text(all_drafted := engine.run(jobs), reference)
    drafters.append(DrafterProcess([head_dir], target_dir, "--max-context", "64"))
    engine.set_drafters([])
    engine.run(jobs[:1])  # a step in which the worker lets the first one go
    engine.connect(drafters[-1])
    check_text(some_drafted := engine.run(jobs), reference)
    counts = [
        sum((one.drafting.counts for one in results if one.drafting), Counts())
        for results in (all_drafted, some_drafted)
    ]
    num_tokens = NUM_PROMPTS * (NUM_LONG - 1)  # the first token comes out of the prompt
    num_undrafted = [num_tokens - found.num_steps - found.num_accepted_tokens for found in counts]
    assert num_undrafted[1] > num_tokens / 3 > num_undrafted[0]
    accepted = [found.num_accepted_tokens / found.num_steps for found in counts]
    assert accepted[1] > 0.6 * accepted[0] > 0.1
