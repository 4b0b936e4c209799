"""The product's schedulers over vLLM's own, step by step: what is planned, what is counted, what goes out."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from cluster.step_allocation import PROBABILITY_LEVELS, best_total
from peagle.vllm.draft_budget import SPARE_DRAFTS, timed_step
from peagle.vllm.step_notes import update_plan
from tests.support.scheduler_run import (
    SURVIVAL,
    SchedulerRun,
    decode,
    measured_at_start,
    scheduler_config,
    steps_of,
)

K_MAX = 7
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def shared_config(target_dir: Path, head_dir: Path, environment: None) -> Any:
    return scheduler_config(target_dir, head_dir, K_MAX)


@pytest.fixture
def config(shared_config: Any) -> Any:
    return copy.deepcopy(shared_config)


@pytest.fixture
def choosing(config: Any) -> Iterator[SchedulerRun]:
    """An engine whose worker can choose drafts, and whose requests are decoding."""
    with measured_at_start(config):
        yield SchedulerRun(config, is_async=True)


@BOTH
def test_each_request_has_its_k(config: Any, is_async: bool) -> None:
    """A wrong K is clamped or absent."""
    run = SchedulerRun(config, is_async=is_async)
    given = {"none": None, "two": 2, "zero": 0, "less": -1, "more": 99, "text": "3", "bias": 5}
    for name, k in given.items():
        run.add(name, k, logit_bias={3: 1.0} if name == "bias" else None)
    assert set(run.step().drafts.values()) == {0}
    for _ in range(3):
        assert run.step().drafts == {
            "none": 7, "two": 2, "zero": 0, "less": 0, "more": 7, "text": 7, "bias": 0,
        }  # fmt: skip


@BOTH
def test_a_decode_that_is_admitted_has_no_drafts_yet(config: Any, is_async: bool) -> None:
    """vLLM widens a request with one token left to compute to the shape of a full graph."""
    run = SchedulerRun(config, is_async=is_async)
    run.add("first", 2)
    for _ in range(3):
        run.step()
    run.add("one token", 3, prompt=1)
    step = run.step()
    assert (step.rows, step.drafts) == ({"first": 3, "one token": 1}, {"first": 2, "one token": 0})
    assert step.output.total_num_scheduled_tokens == 4
    assert run.step().drafts == {"first": 2, "one token": 3}


@BOTH
def test_verified_steps_are_reported_with_the_next_output(config: Any, is_async: bool) -> None:
    run = SchedulerRun(config, is_async=is_async)
    run.add("plain", 3)
    run.add("whole", 2, stream_interval=6)
    first = run.finish(run.schedule())
    assert {name: output.new_token_ids for name, output in first.items()} == {"plain": [5], "whole": [5]}
    found = [run.finish(run.schedule(), {"plain": n % 3, "whole": 2}) for n in range(4)]
    assert [steps_of(outputs["plain"]) for outputs in found] == ["3,0", "3,1", "3,2", "3,0"]
    assert ["whole" in outputs for outputs in found] == [False, True, False, True]
    assert steps_of(found[1]["whole"]) == "2,2 2,2"
    assert [stats.num_accepted_tokens for stats in run.stats] == [2, 3, 4, 2]


@BOTH
@pytest.mark.parametrize(
    ("status", "tokens"), [(RequestStatus.FINISHED_ABORTED, [5]), (RequestStatus.FINISHED_ERROR, [5] * 4)]
)
def test_only_an_abort_drops_buffered_tokens(config: Any, is_async: bool, status: Any, tokens: list[int]) -> None:
    """What is left of a request comes with the next output of its name."""
    run = SchedulerRun(config, is_async=is_async)
    run.add("a", 2, stream_interval=6)
    run.step()
    assert "a" not in run.finish(run.schedule(), {"a": 2})
    run.abort("a", status)
    run.add("a", max_tokens=1)
    assert run.finish(run.schedule())["a"].new_token_ids == tokens


def test_the_forecast_of_rejections_follows_the_last_steps(config: Any) -> None:
    run = SchedulerRun(config, is_async=True)
    names = [str(n) for n in range(16)]
    for name in names:
        run.add(name)
    run.step()
    plans = [run.step(accepted=dict.fromkeys(names, 3)).plan.num_rejected for _ in range(30)]
    assert plans[0] == 0, "nothing is known"
    assert plans[-1] == 16 * 4 - 4 * 3.5, "four of each, less a standard deviation"
    for _ in range(60):
        last = run.step(accepted=dict.fromkeys(names, 7))
    assert last.plan.num_rejected == 0


def test_drafts_that_a_remote_drafter_did_not_have_count_nowhere(config: Any) -> None:
    """While it has none for a request, none are planned. -1: it was not asked."""
    run = SchedulerRun(config, is_async=True)
    for name in "abc":
        run.add(name, 4)
    run.step()
    outputs = run.finish(run.schedule(), {"b": 1, "c": 2}, num_ready=[0, 3, -1])
    assert [steps_of(outputs[name]) for name in "abc"] == ["", "3,1", "4,2"]
    assert run.stats[-1].num_draft_tokens == 7
    assert run.step().drafts == {"a": 4, "b": 4, "c": 4}, "planned before the answer came"
    assert run.step(num_ready=[4, 4, 4]).drafts == {"a": 0, "b": 4, "c": 4}
    run.step()
    assert run.step().drafts == {"a": 4, "b": 4, "c": 4}


def test_the_worker_chooses_as_many_drafts_as_pay(choosing: SchedulerRun) -> None:
    decode(choosing, 2.5, "a", "b")
    choosing.add("short", 1, survival=SURVIVAL)
    step = choosing.schedule()
    most = 3 + SPARE_DRAFTS  # five drafts of two requests are three of one
    assert step.drafts == {"a": most, "b": most, "short": 0}
    assert step.plan.draft_budget == 5
    outputs = choosing.finish(step, {"a": 4}, num_admitted=np.array([4, 1, 0]))
    assert [steps_of(outputs[name]) for name in ("a", "b")] == ["4,4c", "1,0c"]
    assert (choosing.stats[-1].num_draft_tokens, choosing.stats[-1].num_accepted_tokens) == (5, 4)
    step = choosing.step()
    assert step.plan.ranks_drafts
    assert step.plan.num_drafts_ahead == max(choosing.schedule().drafts.values())


@pytest.mark.parametrize(
    "other",
    [{"logprobs": 2}, {"has_grammar": True}, {"k": 0}, {"logit_bias": {3: 1.0}}],
    ids=lambda other: next(iter(other)),
)
def test_where_the_host_reads_rows_of_logits_nothing_is_chosen(choosing: SchedulerRun, other: dict[str, Any]) -> None:
    """Of a prompt beside chosen drafts vLLM would read log probabilities, or apply the mask, at another row."""
    decode(choosing, 2, "a", "b")
    assert choosing.step().plan.draft_budget is not None
    choosing.add("other", survival=SURVIVAL, **other)
    for _ in range(3):
        step = choosing.step()
        assert "other" in step.rows
        assert step.plan.draft_budget is None
        assert not step.plan.ranks_drafts
    choosing.abort("other")
    choosing.step()
    assert choosing.step().plan.draft_budget is not None


def test_a_chosen_step_takes_the_time_of_its_verified_rows(choosing: SchedulerRun) -> None:
    decode(choosing, 2.5, "a", "b")
    output = choosing.schedule().output
    chosen = timed_step(0.01, output)
    update_plan(output, draft_budget=None)
    whole = timed_step(0.01, output)
    assert chosen is not None
    assert whole is not None
    assert (chosen.num_tokens, whole.num_tokens) == (2 + 5, 2 + 12)
    assert chosen.prompt_tokens == whole.prompt_tokens == 0


def test_the_best_number_of_drafts_gives_the_most_tokens_per_second() -> None:
    """Against every number, with each draft known for itself."""
    rng = np.random.default_rng(0)
    cumulative = np.sort((rng.random((40, K_MAX)) ** 0.4).cumprod(axis=1).ravel())[::-1]
    counts = [int((cumulative >= level).sum()) for level in PROBABILITY_LEVELS]
    for per_row in (1e-5, 1e-4, 3e-4, 1e-3):
        seconds = 0.01 + per_row * np.arange(40, 40 + len(cumulative) + 1)
        rates = (40 + np.concatenate([[0.0], np.cumsum(cumulative)])) / seconds
        found, rate = best_total(counts, 40, len(cumulative), seconds)
        assert rates[found] > 0.998 * rates.max()
        assert rate == pytest.approx(rates[found], rel=0.01)
        assert best_total(counts, 40, 10, seconds[:11])[0] <= 10
    assert best_total([0] * len(PROBABILITY_LEVELS), 40, 10, seconds[:11])[0] == 0
