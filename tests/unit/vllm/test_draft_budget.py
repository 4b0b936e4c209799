"""The scheduler's draft budget by load: never above K, least where least is lost, and what it learns from steps."""

import logging
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cluster.step_latency import STEPS_PER_UPDATE, StepLatency, StepLatencyModel, TimedStep
from peagle.vllm.draft_budget import EXPLORE_INTERVAL_STEPS, MIN_DRAFTED, REPORT_INTERVAL_S, DraftBudget, timed_step
from peagle.vllm.request_args import ACCEPTANCE_RATES_KEY, WORKLOAD_KEY
from peagle.vllm.step_notes import SchedulerPlan, write_plan
from tests.support.step_tables import model_of
from tests.unit.cluster.test_step_latency import cpu, dear_drafter

K_MAX = 5
SURE = [0.99, 0.98, 0.97, 0.96, 0.95]
USUAL = [0.7, 0.5, 0.35, 0.25, 0.18]
DOUBTFUL = [0.3, 0.1, 0.03, 0.01, 0.0]
NUMBERS = count()


def draft_budget(base_s: float = 0.010, per_token_s: float = 0.001) -> DraftBudget:
    """Of an engine that has learned what its steps take."""
    return DraftBudget(model_of(lambda _, num_tokens: base_s + per_token_s * num_tokens))


def request(rates: Any = None, name: str = "", workload: str = "") -> Any:
    """Of a workload of its rates, unless it is named."""
    extra = {} if rates is None else {ACCEPTANCE_RATES_KEY: rates, WORKLOAD_KEY: workload or str(rates)}
    name = name or str(next(NUMBERS))
    return SimpleNamespace(request_id=name, num_computed_tokens=100, sampling_params=SimpleNamespace(extra_args=extra))


def test_what_was_said_last_of_a_workload_counts_for_all_its_requests() -> None:
    found = draft_budget()
    early = [request(SURE, workload="chat") for _ in range(15)]
    assert min(found.allocate_drafts(early, [5] * 15)) == 5
    late = request(DOUBTFUL, workload="chat")
    assert max(found.allocate_drafts([*early, late], [5] * 16)) <= 1
    assert found.allocate_drafts([*early, late, request(workload="chat")], [5] * 17)[-1] == 5, (
        "an exploration request keeps its K"
    )


def test_requests_that_name_no_workload_speak_for_themselves() -> None:
    """A deep draft of a sure one outranks the first of a doubtful one, whichever came last."""
    for several in ([SURE, DOUBTFUL], [DOUBTFUL, SURE]):
        batch = [request(rates) for rates in several]
        for each in batch:
            del each.sampling_params.extra_args[WORKLOAD_KEY]
        depths = draft_budget().allocate_drafts(batch, [5, 5])
        assert depths[several.index(SURE)] == 5
        assert depths[several.index(DOUBTFUL)] <= 2


def test_load_lowers_k_and_never_raises_it() -> None:
    alone, many = (draft_budget().allocate_drafts([request(USUAL) for _ in range(n)], [3] * n) for n in (1, 16))
    assert alone == [3]
    assert max(many) < 3
    free = draft_budget(per_token_s=0.0)
    assert free.allocate_drafts([request(USUAL) for _ in range(4)], [3, 0, 2, 1]) == [3, 0, 2, 1]


def test_drafts_that_are_verified_anyway_count_for_the_others() -> None:
    """A step that is long by requests with a K of their own gets less longer by one more draft."""
    free, *_ = draft_budget().allocate_drafts([request(USUAL) for _ in range(17)], [5] * 17)
    beside_fixed, *fixed = draft_budget().allocate_drafts([request(USUAL), *(request() for _ in range(16))], [5] * 17)
    assert (free, beside_fixed, fixed) == (1, 2, [5] * 16)


def test_now_and_then_a_step_verifies_all_its_drafts_or_none_also_beside_prompts() -> None:
    """So that acceptance beyond what pays stays known, and what drafts cost; in all requests of a step at once, within
    their limits. An exploration request keeps its K."""
    found = draft_budget()
    batch, limits = [*(request(USUAL) for _ in range(16)), request()], [5, 3] * 8 + [5]
    none, explored = [0] * 16 + [5], {}
    assert sum(none) < sum(found.allocate_drafts(batch, limits)) < sum(limits)
    for step in range(5 * EXPLORE_INTERVAL_STEPS):
        depths = found.allocate_drafts(batch, limits)
        if depths in (limits, none):
            explored[step] = depths
            left = [index for index, depth in enumerate(depths) if depth]  # as the scheduler asks then
            asked = [batch[index] for index in left], [limits[index] for index in left]
            kept = found.allocate_drafts(*asked, prompt_tokens=500)
            assert kept == [depths[index] for index in left], "what was planned is kept"
        else:
            assert sum(found.allocate_drafts(batch, limits, prompt_tokens=500)) < sum(limits)
        num_tokens = len(batch) + sum(depths)
        found.model.observe(TimedStep(0.010 + 0.001 * num_tokens, len(batch), num_tokens))
    assert list(explored.values()) == [limits, limits, limits, none]
    assert all(step % EXPLORE_INTERVAL_STEPS <= 4 * STEPS_PER_UPDATE for step in explored)


def test_a_request_alone_whose_drafts_all_pay_still_says_what_they_cost() -> None:
    """A GPU's engine whose pass runs in every step, and which would otherwise verify five drafts in each."""
    found, batch = DraftBudget(StepLatencyModel(on_gpu=True)), [request(SURE)]

    def seconds(num_tokens: int) -> float:
        return 0.004 + 0.001 * (num_tokens > 1) + 0.0001 * num_tokens

    for _ in range(2000):
        num_tokens = 1 + sum(found.allocate_drafts(batch, [5]))
        found.model.observe(TimedStep(seconds(num_tokens), 1, num_tokens, 0, True))
    latency = found.model.latency
    assert latency.seconds(1, 6) == pytest.approx(seconds(6), rel=0.02)
    assert latency.curve(1, 5, is_drafted=True)[0] == pytest.approx(seconds(1), rel=0.15)


def test_prompts_in_the_step_are_seen() -> None:
    """Few rows are free on a GPU; beside a prompt each costs."""
    found = DraftBudget(model_of(lambda _, num_tokens: 0.010 + max(0, num_tokens - 64) * 0.0005, (4, 64)))
    batch = [request([0.5, 0.25, 0.1, 0.05, 0.02]) for _ in range(4)]
    alone, beside = (sum(found.allocate_drafts(batch, [5] * 4, prompt_tokens=tokens)) for tokens in (0, 1000))
    assert alone > beside


def test_steps_go_no_deeper_than_the_rates_say() -> None:
    batch = [request(SURE[:2]) for _ in range(4)]
    assert draft_budget(per_token_s=0.0).allocate_drafts([*batch, request()], [5] * 5) == [2, 2, 2, 2, 5]


@pytest.mark.parametrize("rates", [[0.5, 0.9], [float("nan")], "no numbers", [2.0], 7])
def test_unusable_rates_are_logged_and_k_obeyed(rates: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found, odd = draft_budget(), request(rates, "odd")
        assert [found.allocate_drafts([odd], [2]) for _ in range(3)] == [[2]] * 3
    assert "request odd" in caplog.text
    assert len(caplog.records) == 1, "once a request, not once a step"


def scheduled(tokens: dict[str, int], drafts: dict[str, int], new: tuple[str, ...] = (), resumed: tuple[str, ...] = ()):
    cached = [name for name in tokens if name not in new]
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed), num_computed_tokens=[100] * len(cached)),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={name: [1] * num for name, num in drafts.items() if num},
    )


def test_a_step_says_what_decoded_and_what_was_prompt() -> None:
    def step(*numbers: Any) -> TimedStep:
        return TimedStep(0.5, *numbers, is_drafted=True)

    assert timed_step(0.5, scheduled({"a": 4, "b": 1}, {"a": 3})) == step(2, 5, 0)
    assert timed_step(0.5, scheduled({"a": 4, "p": 64}, {"a": 3}, new=("p",))) == step(1, 4, 64)
    assert timed_step(0.5, scheduled({"a": 4, "p": 64}, {"a": 3})) == step(1, 4, 64), "a later chunk"
    assert timed_step(0.5, scheduled({"a": 4, "r": 1}, {"a": 3}, resumed=("r",))) == step(1, 4, 1)
    assert timed_step(0.5, scheduled({"p": 64}, {}, new=("p",))) is None


def test_a_step_pays_the_pass_that_makes_the_drafts_of_the_next() -> None:
    last, first = scheduled({"a": 4}, {"a": 3}), scheduled({"a": 1}, {})
    write_plan(last, SchedulerPlan(0))
    write_plan(first, SchedulerPlan(K_MAX))
    assert timed_step(0.5, last) == TimedStep(0.5, 1, 4, 0, False)
    assert timed_step(0.5, first) == TimedStep(0.5, 1, 1, 0, True)


def left_out(found: DraftBudget, batch: list[Any], num_steps: int, engine: Any) -> list[bool]:
    """Whether the pass was left out, of steps of one batch on an engine."""
    seen, has_drafts = [], False
    for _ in range(num_steps):
        drafts = sum(found.allocate_drafts(batch, [K_MAX] * len(batch))) if has_drafts else 0
        has_drafts = found.makes_drafts(batch, [K_MAX] * len(batch), 0)
        cell = (len(batch), len(batch) + drafts, 0, has_drafts)
        found.model.observe(TimedStep(engine(*cell), *cell[:2], 0, has_drafts))
        seen.append(not has_drafts)
    return seen


def test_passes_are_left_out_where_steps_without_are_faster_and_run_now_and_then() -> None:
    """8 requests give more tokens without drafts."""
    found, batch = DraftBudget(StepLatencyModel(on_gpu=False)), [request(USUAL) for _ in range(8)]
    seen = left_out(found, batch, 2000, dear_drafter)
    assert not any(seen[: MIN_DRAFTED // 8]), "acceptance is measured first"
    assert sum(seen[200:400]) > 150
    assert 5 <= seen[1000:].count(False) <= 15, "acceptance stays known"
    alone = left_out(found, batch[:1], 100, dear_drafter)
    assert sum(alone) < 10, "at another load drafts pay"


def test_a_pass_that_pays_is_never_left_out() -> None:
    found, batch = DraftBudget(StepLatencyModel(on_gpu=False)), [request(SURE) for _ in range(8)]
    assert not any(left_out(found, batch, 500, cpu))


def test_a_k_that_is_to_be_obeyed_and_prompts_need_the_pass() -> None:
    found = DraftBudget(StepLatencyModel(on_gpu=False))
    batch = [request(DOUBTFUL) for _ in range(8)]
    assert all(left_out(found, batch, 300, dear_drafter)[290:])
    assert not any(left_out(found, [*batch, request()], 50, dear_drafter))
    assert found.makes_drafts(batch, [5] * 8, 10)
    assert not found.makes_drafts(batch, [5] * 8, 0)
    assert not found.makes_drafts([*batch, request()], [5] * 8 + [0], 0), "K = 0 needs none"
    assert not found.makes_drafts(batch, [0] * 8, 10)


def test_times_are_the_intervals_between_results_and_end_at_a_pause() -> None:
    found, step = draft_budget(), scheduled({"a": 4}, {"a": 3})
    for now_s in (10.0, 10.02, 10.04):
        found.record_result(now_s, step)
    assert found.model.num_steps == 2
    found.record_pause()
    found.record_result(20.0, step)
    assert found.model.num_steps == 2


def test_the_latency_is_reported_when_new_and_not_more_often_than_it_is_read() -> None:
    found = DraftBudget(StepLatencyModel(on_gpu=True))

    def reported(now_s: float) -> bool:
        return found.report(now_s) is not None

    first = msgspec.json.decode(found.report(100.0) or "", type=StepLatency)
    assert first.num_steps == 0, "reported before the first step"
    assert not reported(200.0), "nothing new"
    num_reports = 0
    for n in range(1, 1001):  # ten seconds of steps of 10 ms
        found.model.observe(TimedStep(0.010, 1, 6))
        num_reports += reported(300.0 + n / 100)
    assert 0.8 * 10 / REPORT_INTERVAL_S < num_reports <= 10 / REPORT_INTERVAL_S + 1
