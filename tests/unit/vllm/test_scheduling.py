"""The product's schedulers over vLLM's own, step by step: what is planned, what is counted, what goes out."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from peagle.vllm import draft_budget
from peagle.vllm.limits import TimedGrammar
from peagle.vllm.request_args import ALL_OF_CLIENT, GROUP_KEY
from peagle.vllm.turns import MAX_OVERTAKEN, count_overtaken, order_by_turns
from tests.support.scheduler_run import ANY_TEXT, SchedulerRun, scheduler_config, steps_of

K_MAX = 7
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def shared_config(target_dir: Path, head_dir: Path, environment: None) -> Any:
    return scheduler_config(target_dir, head_dir, K_MAX)


@pytest.fixture
def config(shared_config: Any) -> Any:
    return copy.deepcopy(shared_config)


def test_all_requests_of_a_client_that_has_ended_are_aborted_at_once(config: Any) -> None:
    run = SchedulerRun(config, is_async=True)
    for name in ("a", "b", "c"):
        run.add(name)
    for name, client in (("a", 1), ("b", 2), ("c", 1)):
        run.scheduler.requests[name].client_index = client
    run.step()
    run.scheduler.finish_requests([f"{ALL_OF_CLIENT}1"], RequestStatus.FINISHED_ABORTED)
    assert run.scheduler.requests.keys() == {"b"}
    run.scheduler.finish_requests([f"{ALL_OF_CLIENT}1"], RequestStatus.FINISHED_ABORTED)
    assert run.step().drafts.keys() == {"b"}


@BOTH
@pytest.mark.parametrize("max_tokens", [2, 900])
def test_a_request_whose_grammar_takes_too_long_ends_alone(config: Any, is_async: bool, max_tokens: int) -> None:
    """Also where that step would have been its last."""
    run = SchedulerRun(config, is_async=is_async)
    run.add("slow", has_grammar=True, max_tokens=max_tokens)
    run.add("other", has_grammar=True)
    run.step()
    late = TimedGrammar(ANY_TEXT, "slow")
    late._left_s = -1.0
    run.scheduler.requests["slow"].structured_output_request.grammar = late
    assert run.finish(run.schedule())["slow"].finish_reason == FinishReason.ERROR
    assert run.step().rows.keys() == {"other"}


@BOTH
def test_each_request_has_its_k(config: Any, is_async: bool) -> None:
    run = SchedulerRun(config, is_async=is_async)
    given = {"two": (2, 2), "none": (None, 7), "zero": (0, 0), "less": (-1, 0), "more": (99, 7), "text": ("3", 7)}
    for name, (k, _) in given.items():
        run.add(name, k)
    run.add("bias", 5, logit_bias={3: 1.0})
    assert set(run.step().drafts.values()) == {0}
    for _ in range(3):
        assert run.step().drafts == {"bias": 0} | {name: num_drafts for name, (_, num_drafts) in given.items()}


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


def test_only_the_first_drafts_that_pay_are_verified(config: Any) -> None:
    run = SchedulerRun(config, is_async=True)
    names = [str(n) for n in range(16)]
    for name in names:
        run.add(name, rates=[0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1])
    run.step()
    steps = [run.step(dict.fromkeys(names, 1)) for _ in range(2)]
    num_drafts = max(steps[1].drafts.values())
    assert 0 < num_drafts < K_MAX
    assert steps[0].plan.num_drafts_ahead == num_drafts, "the drafter's pass makes no more"
    outputs = run.finish(run.schedule())
    assert all(steps_of(outputs[name]) == f"{steps[1].drafts[name]},0" for name in names), "every step counts"


@BOTH
@pytest.mark.parametrize("explored_without", [1, 1000], ids=["none", "all"])
def test_prompts_come_in_while_a_step_explores(
    config: Any, is_async: bool, explored_without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step verifies none of its drafts, or all; requests come and go between them."""
    monkeypatch.setattr(draft_budget, "EXPLORE_INTERVAL_STEPS", 0)
    monkeypatch.setattr(draft_budget, "EXPLORED_WITHOUT", explored_without)
    run, verified = SchedulerRun(config, is_async=is_async), set()
    for number in range(12):
        run.add(str(number), rates=[0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1])
        verified |= set(run.step().drafts.values())
        if number > 3:
            run.scheduler.finish_requests([str(number - 3)], RequestStatus.FINISHED_ABORTED)
    assert verified == ({0} if explored_without == 1 else {0, K_MAX})


# ---- the order in which sequences are admitted of requests that have one or many


def sequence(name: str, group: str | None = None, status: Any = RequestStatus.WAITING, arrival: float = 0.0) -> Any:
    extra_args = None if group is None else {GROUP_KEY: group}
    params = SimpleNamespace(extra_args=extra_args)
    return SimpleNamespace(request_id=name, sampling_params=params, status=status, arrival_time=arrival)


def ids_of(requests: list[Any]) -> list[str]:
    return [request.request_id for request in requests]


def test_a_request_of_one_sequence_waits_for_one_of_each_other_request() -> None:
    wide = [sequence(f"a{number}", "a") for number in range(3)] + [sequence(f"b{number}", "b") for number in range(3)]
    waiting = [*wide, sequence("plain"), sequence("plain too")]
    assert ids_of(order_by_turns(waiting, [])) == ["a0", "b0", "plain", "plain too", "a1", "b1", "a2", "b2"]
    running = [sequence(f"a-{number}", "a") for number in range(2)]
    assert ids_of(order_by_turns(waiting, running)) == ["b0", "plain", "plain too", "b1", "a0", "b2", "a1", "a2"]


def test_a_preempted_sequence_stays_first() -> None:
    preempted = sequence("a9", "a", RequestStatus.PREEMPTED)
    waiting = [preempted, sequence("plain")]
    assert order_by_turns(waiting, [sequence("a0", "a")]) == waiting


def test_no_sequence_is_overtaken_without_end() -> None:
    last = sequence("a1", "a", arrival=1.0)
    running = [sequence("a0", "a")]
    for number in range(MAX_OVERTAKEN):
        later = sequence(str(number), arrival=2.0 + number)
        assert order_by_turns([last, later], running) == [later, last]
        count_overtaken([last], [later])
    count_overtaken([last], [sequence("earlier", arrival=0.5)])
    later = sequence("later", arrival=1e6)
    assert order_by_turns([last, later], running) == [last, later]
