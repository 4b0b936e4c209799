"""The asynchronous scheduler where the worker chooses a step's drafts: what it plans, and what it counts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler

from cluster.step_allocation import WORTH_LEVELS, best_total
from cluster.step_latency import StepLatencyModel
from peagle.vllm import compat
from peagle.vllm.engine import REMOTE_KEY
from peagle.vllm.rejections import Rejections
from peagle.vllm.scheduler import VERIFY_ALL_INTERVAL_STEPS, PerRequestDepthAsyncScheduler
from peagle.vllm.step_notes import VerifiedStep, read_plan, update_plan, update_result
from peagle.vllm.trimming import Trimmer, timed_step

K_MAX = 7


def request(name: str, max_k: int = K_MAX, logprobs: int | None = None, has_grammar: bool = False) -> Any:
    params = SimpleNamespace(extra_args={"peagle_k": max_k}, logprobs=logprobs, logit_bias=None, min_p=0.0)
    return SimpleNamespace(
        request_id=name,
        sampling_params=params,
        use_structured_output=has_grammar,
        is_prefill_chunk=False,
        spec_token_ids=[],
    )


def scheduled(requests: list[Any]) -> Any:
    drafts = {one.request_id: list(one.spec_token_ids) for one in requests if one.spec_token_ids}
    return SimpleNamespace(
        num_scheduled_tokens={one.request_id: 1 + len(one.spec_token_ids) for one in requests},
        total_num_scheduled_tokens=sum(1 + len(one.spec_token_ids) for one in requests),
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), num_computed_tokens=[100] * len(requests)),
        num_invalid_spec_tokens=None,
    )


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = object.__new__(PerRequestDepthAsyncScheduler)
    found.num_spec_tokens, found.requests, found._without_drafts = K_MAX, {}, set()
    found._rejections, found._is_choice, found._chosen_step, found._steps = Rejections(K_MAX), False, None, {}
    found._chosen_share, found.waiting = 0.0, FCFSRequestQueue()
    found._trimmer = SimpleNamespace(
        chooses=True,
        num_chosen=None,
        wants_worth=False,
        depths=lambda requests, max_ks, prompt_tokens: found.wanted(max_ks),
    )

    def placeholders(self: Any, output: Any) -> None:
        for name in output.num_scheduled_tokens:
            self.requests[name].spec_token_ids = [-1] * K_MAX

    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", placeholders)
    return found


def step(one: Any, requests: list[Any], depths: list[int], num_chosen: int | None) -> Any:
    """A step of these requests, after which the next one is trimmed to the depths, or so many drafts are chosen."""
    one.requests = {each.request_id: each for each in requests}
    one.wanted, one._trimmer.num_chosen = lambda max_ks: depths, num_chosen
    output = scheduled(requests)
    one._update_after_schedule(output)
    return output


def test_the_worker_chooses_as_many_drafts_as_pay(one: Any) -> None:
    requests = [request("a"), request("b"), request("c", max_k=3)]
    first = step(one, requests, [2, 2, 1], 5)
    assert read_plan(first).draft_budget is None, "it has no drafts"
    assert [len(each.spec_token_ids) for each in requests] == [5, 5, 3], "three more than the mean"
    assert read_plan(first).num_drafts_ahead == 5
    assert read_plan(first).ranks_drafts
    second = step(one, requests[:2], [2, 2], 20)
    assert read_plan(second).draft_budget == 3, "five of three requests are three of two"
    assert [len(each.spec_token_ids) for each in requests[:2]] == [7, 7]
    assert not read_plan(second).ranks_drafts, "all are verified next"
    third = step(one, requests, [7, 7, 3], None)
    assert read_plan(third).draft_budget is None
    assert not read_plan(third).ranks_drafts
    assert [len(each.spec_token_ids) for each in requests] == [7, 7, 3]
    one._trimmer.wants_worth = True
    assert read_plan(step(one, requests, [7, 7, 3], None)).ranks_drafts, "what they are worth is to be known"


@pytest.mark.parametrize("other", [request("b", logprobs=2), request("b", has_grammar=True), request("b", max_k=0)])
def test_where_the_host_looks_at_drafts_nobody_chooses(one: Any, other: Any) -> None:
    requests = [request("a"), other, request("c")]
    first = step(one, requests, [2, 0, 1], 3)
    assert [len(each.spec_token_ids) for each in requests] == [2, 0, 1]
    assert not read_plan(first).ranks_drafts
    assert read_plan(step(one, requests, [2, 0, 1], 3)).draft_budget is None


@pytest.mark.parametrize(
    ("newcomer", "expected"),
    [(request("n"), 2), (request("n", logprobs=0), None), (request("n", has_grammar=True), None)],
)
def test_nor_where_such_a_request_comes_into_the_step(one: Any, newcomer: Any, expected: int | None) -> None:
    """Of a prompt beside chosen drafts vLLM would take the log probabilities, or the grammar's mask, at another row."""
    requests = [request("a"), request("b")]
    step(one, requests, [2, 2], 2)
    second = step(one, [*requests, newcomer], [2, 2, 2], 2)
    assert read_plan(second).draft_budget == expected
    assert {len(ids) for ids in second.scheduled_spec_decode_tokens.values()} == {4}


@pytest.mark.parametrize(
    "change",
    [
        {"lora_config": object()},
        {"world_size_across_dp": 2},
        {"additional_config": {compat.CHOICE_KEY: False}},
        {"rejection_sample_method": "synthetic"},
        {"enable_adaptive_verification": True},
        {"speculative_config": None},
    ],
)
def test_an_engine_chooses_where_nothing_is_laid_out_by_the_host(change: dict[str, Any]) -> None:
    def config(**given: Any) -> Any:
        parallel = SimpleNamespace(world_size_across_dp=given.pop("world_size_across_dp", 1))
        speculative = SimpleNamespace(
            rejection_sample_method=given.pop("rejection_sample_method", "standard"),
            enable_adaptive_verification=given.pop("enable_adaptive_verification", False),
        )
        values = {"lora_config": None, "additional_config": {}, "speculative_config": speculative, **given}
        return SimpleNamespace(parallel_config=parallel, **values)

    assert compat.chooses(config())
    assert compat.chooses(config(additional_config={REMOTE_KEY: {}}))
    assert not compat.chooses(config(**change))


def test_prompts_beside_trim_what_is_chosen(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a"), request("b")]
    step(one, requests, [3, 3], 6)
    one.running, one._trimmer.num_chosen = requests, 1
    monkeypatch.setattr(one, "_prompt_tokens_ahead", lambda: 50)
    one._is_stuck = False
    monkeypatch.setattr(Scheduler, "schedule", lambda self: scheduled(requests))
    output = one.schedule()
    assert [len(ids) for ids in output.scheduled_spec_decode_tokens.values()] == [4, 4]
    one._choose(output)
    assert read_plan(output).draft_budget == 1


def test_a_step_takes_the_time_of_what_was_verified() -> None:
    requests = [request("a"), request("b")]
    for each in requests:
        each.spec_token_ids = [-1] * 4
    output = scheduled(requests)
    whole = timed_step(0.01, output)
    update_plan(output, draft_budget=3)
    chosen = timed_step(0.01, output)
    assert whole is not None
    assert chosen is not None
    assert (whole.num_tokens, chosen.num_tokens) == (10, 5)
    assert chosen.prompt_tokens == whole.prompt_tokens == 0


def test_what_was_chosen_counts_in_vllm_s_figures_and_not_as_survival(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request("a"), request("b")]
    for each in requests:
        each.spec_token_ids = [-1] * 4
    one.requests = {each.request_id: each for each in requests}
    output, counted = scheduled(requests), []

    def update(self: Any, planned: Any, result: Any) -> dict[int, Any]:
        for each, num_accepted in zip(requests, (3, 0), strict=True):
            invalid = planned.num_invalid_spec_tokens
            self.make_spec_decoding_stats(None, len(each.spec_token_ids), num_accepted, invalid, each.request_id)
        return {}

    def stats(self: Any, so_far: Any, drafts: int, accepted: int, invalid: dict[str, int] | None, name: str) -> None:
        counted.append((drafts - (invalid or {}).get(name, 0), accepted))

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(Scheduler, "make_spec_decoding_stats", stats)
    one._trimmer = None
    result = SimpleNamespace(req_ids=["a", "b"])
    update_result(result, num_admitted=[4, 1])
    one.update_from_output(output, result)
    assert counted == [(4, 3), (1, 0)]
    assert one._steps == {"a": [VerifiedStep(4, 3, is_chosen=True)], "b": [VerifiedStep(1, 0, is_chosen=True)]}
    assert one._rejections.expected_of_chosen(100) == 20, "two of five, less a bound of what it varies by"
    one.update_from_output(scheduled(requests), SimpleNamespace(req_ids=["a", "b"]))
    assert [steps[1] for steps in one._steps.values()] == [VerifiedStep(4, 3), VerifiedStep(4, 0)]


def test_vllm_s_own_choice_is_counted_and_keeps_the_pass_as_deep_as_it_pays(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM admitted all drafts nothing was chosen; one step in many verifies all."""
    requests = [request("a"), request("b", max_k=3)]
    one._is_adaptive, one._mean_admitted, one._num_planned = True, float(K_MAX), 0
    one._trimmer.chooses, one._trimmer.arrived = False, lambda now_s, output: None
    one._trimmer.report, one.has_requests = (lambda now_s: None), lambda: True
    counted: list[tuple[int, int]] = []

    def update(self: Any, planned: Any, result: Any) -> dict[int, Any]:
        for name, drafts in planned.scheduled_spec_decode_tokens.items():
            self.make_spec_decoding_stats(None, len(drafts), 0, planned.num_invalid_spec_tokens, name)
        return {}

    def stats(self: Any, so_far: Any, drafts: int, accepted: int, invalid: dict[str, int] | None, name: str) -> None:
        counted.append((drafts - (invalid or {}).get(name, 0), accepted))

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(Scheduler, "make_spec_decoding_stats", stats)
    output = step(one, requests, [], None)
    assert [len(each.spec_token_ids) for each in requests] == [7, 3]
    found = []
    for number in range(VERIFY_ALL_INTERVAL_STEPS + 1):
        output = step(one, requests, [], None)
        found.append(([len(each.spec_token_ids) for each in requests], read_plan(output).num_drafts_ahead))
        counted.clear()
        one._steps.clear()
        result = SimpleNamespace(req_ids=["a", "b"])
        if not read_plan(output).verifies_all:
            update_result(result, num_admitted=[1, 1])
        one.update_from_output(output, result)
        is_chosen = number != VERIFY_ALL_INTERVAL_STEPS - 1
        assert read_plan(output).verifies_all is not is_chosen
        assert counted == ([(1, 0), (1, 0)] if is_chosen else [(7, 0), (3, 0)])
        assert [steps[0].is_chosen for steps in one._steps.values()] == [is_chosen] * 2
    assert found[0] == ([7, 3], 7)
    assert found[-4] == ([5, 3], 5), "the mean of 1, a little above it, and three more"
    assert found[-3] == ([7, 3], 7)
    assert found[-2] == found[-1] == found[-4]
    update_result(result, num_admitted=[5, 3])
    output = scheduled(requests)
    one._steps.clear()
    one.update_from_output(output, result)
    assert [steps[0].is_chosen for steps in one._steps.values()] == [False] * 2


@pytest.mark.parametrize(("ready", "counted"), [(0, []), (3, [(1, 0)])])
def test_of_what_was_chosen_only_drafts_that_a_remote_drafter_had_count(
    one: Any, monkeypatch: pytest.MonkeyPatch, ready: int, counted: list[tuple[int, int]]
) -> None:
    """Where it had fewer than are to be verified, some are chosen that were not there. For the second request it was
    asked for none."""
    requests = [request("a"), request("b")]
    for each in requests:
        each.spec_token_ids = [-1] * 4
    one.requests = {each.request_id: each for each in requests}
    output, found = scheduled(requests), []

    def update(self: Any, planned: Any, result: Any) -> dict[int, Any]:
        for each, num_accepted in zip(requests, (0, 2), strict=True):
            invalid = planned.num_invalid_spec_tokens
            self.make_spec_decoding_stats(None, len(each.spec_token_ids), num_accepted, invalid, each.request_id)
        return {}

    def stats(self: Any, so_far: Any, drafts: int, accepted: int, invalid: dict[str, int] | None, name: str) -> None:
        found.append((drafts - (invalid or {}).get(name, 0), accepted))

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(Scheduler, "make_spec_decoding_stats", stats)
    one._trimmer = None
    result = SimpleNamespace(req_ids=["a", "b"])
    update_result(result, num_ready=[ready, -1])
    update_result(result, num_admitted=[1, 3])
    one.update_from_output(output, result)
    assert found == [(1 if ready else 0, 0), (3, 2)]
    assert one._steps.get("a", []) == [VerifiedStep(*step, is_chosen=True) for step in counted]
    assert one._steps["b"] == [VerifiedStep(3, 2, is_chosen=True)]
    assert one._without_drafts == (set() if ready else {"a"})


def test_fewer_of_the_chosen_drafts_are_expected_to_fail(one: Any) -> None:
    requests = [request("a"), request("b")]
    step(one, requests, [2, 2], 4)
    one._rejections.add_chosen(1000, 200)
    assert read_plan(step(one, requests, [2, 2], 4)).num_rejected == 0, "of four, 3.2 less 4"


def test_the_best_number_of_drafts_is_that_of_the_most_tokens_per_second() -> None:
    """Against every number, with each draft known for itself."""
    rng = np.random.default_rng(0)
    worth = np.sort((rng.random((40, K_MAX)) ** 0.4).cumprod(axis=1).ravel())[::-1]
    counts = [int((worth >= level).sum()) for level in WORTH_LEVELS]
    for per_row in (1e-5, 1e-4, 3e-4, 1e-3):
        seconds = 0.01 + per_row * np.arange(40, 40 + len(worth) + 1)
        rates = (40 + np.concatenate([[0.0], np.cumsum(worth)])) / seconds
        found, rate = best_total(counts, 40, len(worth), seconds)
        assert rates[found] > 0.998 * rates.max()
        assert rate == pytest.approx(rates[found], rel=0.01)
        assert best_total(counts, 40, 10, seconds[:11])[0] <= 10
    assert best_total([0] * len(WORTH_LEVELS), 40, 10, seconds[:11])[0] == 0


def test_worth_is_a_mean_over_steps_by_request() -> None:
    trimmer = Trimmer(StepLatencyModel(on_gpu=True), chooses=True)
    trimmer.hear_worth([40] * len(WORTH_LEVELS), 10)
    trimmer.hear_worth([0] * len(WORTH_LEVELS), 20)
    np.testing.assert_allclose(trimmer._worth, 3.6)
