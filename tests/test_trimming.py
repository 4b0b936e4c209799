"""The scheduler's trimming by load: never deeper than K, least where least is lost, and not for those that keep K."""

import logging
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from cluster.step_time import Corrections, StepPoint, StepShape, StepTimes
from peagle.vllm.acceptance import CORRECTIONS_HEADER, SURVIVAL_KEY, WORKLOAD_KEY
from peagle.vllm.scheduler import PerRequestDepthScheduler
from peagle.vllm.trimming import NUM_STEPS_BETWEEN_CORRECTIONS, TELL_INTERVAL_S, TimedStep, Trimmer

K_MAX = 5
SURE = [0.99, 0.98, 0.97, 0.96, 0.95]
DOUBTFUL = [0.3, 0.1, 0.03, 0.01, 0.0]


def times(base_s: float = 0.010, per_token_s: float = 0.001) -> StepTimes:
    points = []
    for num_requests in (1, 4, 16):
        for k in range(K_MAX + 1):
            shape = StepShape(num_requests, num_requests * (1 + k), k)
            seconds = base_s + per_token_s * shape.num_tokens
            points.append(StepPoint(shape, seconds, seconds, 100))
    return StepTimes(points, max_draft_tokens=K_MAX)


NUMBERS = count()


def request(survival: Any = None, name: str = "", workload: str = "") -> Any:
    """Of a workload for each survival, unless it is named."""
    extra = {} if survival is None else {SURVIVAL_KEY: survival, WORKLOAD_KEY: workload or str(survival)}
    name = name or str(next(NUMBERS))
    return SimpleNamespace(request_id=name, num_computed_tokens=100, sampling_params=SimpleNamespace(extra_args=extra))


def test_a_deep_draft_of_a_sure_request_outranks_the_first_of_a_doubtful_one() -> None:
    sure, doubtful = Trimmer(times(), K_MAX).depths([request(SURE), request(DOUBTFUL)], [5, 5])
    assert sure == 5
    assert doubtful <= 1


def test_what_was_said_last_of_a_workload_counts_for_all_its_requests() -> None:
    trimmer = Trimmer(times(), K_MAX)
    early = [request(SURE, workload="chat") for _ in range(15)]
    assert min(trimmer.depths(early, [5] * 15)) == 5
    late = request(DOUBTFUL, workload="chat")
    assert max(trimmer.depths([*early, late], [5] * 16)) <= 1
    assert trimmer.depths([*early, late, request(workload="chat")], [5] * 17)[-1] == 5, "a probe keeps its K"


def test_requests_that_name_no_workload_speak_for_themselves() -> None:
    """Whichever came last."""
    sure, doubtful = request(SURE), request(DOUBTFUL)
    for one in (sure, doubtful):
        del one.sampling_params.extra_args[WORKLOAD_KEY]
    for batch in ([sure, doubtful], [doubtful, sure]):
        depths = dict(zip(map(id, batch), Trimmer(times(), K_MAX).depths(batch, [5, 5]), strict=True))
        assert depths[id(sure)] == 5
        assert depths[id(doubtful)] <= 1


def test_load_trims_and_never_deepens() -> None:
    trimmer = Trimmer(times(), K_MAX)
    usual = [0.7, 0.5, 0.35, 0.25, 0.18]
    alone, many = (trimmer.depths([request(usual)] * n, [3] * n) for n in (1, 16))
    assert alone == [3]
    assert max(many) < 3
    assert Trimmer(times(per_token_s=0.0), K_MAX).depths([request(usual)] * 4, [3, 0, 2, 1]) == [3, 0, 2, 1]


def test_prompts_in_the_step_are_seen() -> None:
    """A full graph makes all drafts worth their time; no graph holds a prompt."""
    points = [StepPoint(StepShape.uniform(4, k), *[0.010 + (0.005 * k if k < K_MAX else 0.0)] * 2, 9) for k in range(6)]
    trimmer = Trimmer(StepTimes(points, max_draft_tokens=K_MAX, full_graph_depths=[K_MAX]), K_MAX)
    batch = [request([0.5, 0.25, 0.1, 0.05, 0.02]) for _ in range(4)]
    assert trimmer.depths(batch, [5] * 4) == [5] * 4
    assert max(trimmer.depths(batch, [5] * 4, prompt_tokens=100)) <= 1


def test_requests_without_a_survival_keep_their_k() -> None:
    trimmer = Trimmer(times(), K_MAX)
    assert trimmer.depths([request()] * 16, [4] * 16) == [4] * 16
    found = trimmer.depths([request(), *[request(DOUBTFUL)] * 15], [5] * 16)
    assert found[0] == 5
    assert max(found[1:]) <= 1


@pytest.mark.parametrize("survival", [[0.5, 0.9], [float("nan")], "no numbers", [2.0], 7])
def test_an_unusable_survival_is_logged_and_k_obeyed(survival: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trimmer, odd = Trimmer(times(), K_MAX), request(survival, "odd")
        assert [trimmer.depths([odd], [2]) for _ in range(3)] == [[2]] * 3
    assert "request odd" in caplog.text
    assert len(caplog.records) == 1, "once a request, not once a step"


def test_what_steps_really_take_corrects_the_table(caplog: pytest.LogCaptureFixture) -> None:
    """A table of a machine that is four times slower, for 16 requests only."""
    table = times()
    trimmer = Trimmer(table, K_MAX)
    shapes = [StepShape(16, 96, 5), StepShape(1, 1, 0)]
    with caplog.at_level(logging.WARNING):
        for n in range(2 * NUM_STEPS_BETWEEN_CORRECTIONS):
            shape = shapes[n % 2]
            seconds = table.seconds(shape) / (4 if shape.num_requests == 16 else 1)
            trimmer.observe(TimedStep(seconds, shape.num_requests, shape.num_tokens, shape.uniform_depth, 0.0))
    corrected = trimmer._residuals.corrected(table)
    assert corrected.seconds(shapes[0]) == pytest.approx(table.seconds(shapes[0]) / 4, rel=0.25)
    assert corrected.seconds(shapes[1]) == pytest.approx(table.seconds(shapes[1]), rel=0.25)
    assert trimmer._curves.curve(16, 0.0).uniform[5] < 0.4 * table.seconds(shapes[0])
    before = corrected.seconds(shapes[0])
    trimmer.observe(TimedStep(9.0, 16, 96, 5, 0.0))
    assert corrected.seconds(shapes[0]) == before


def test_corrections_are_told_when_new_and_not_more_often_than_they_are_read() -> None:
    trimmer = Trimmer(times(), K_MAX)

    def timed(seconds: float) -> None:
        trimmer.observe(TimedStep(seconds, 1, 6, K_MAX, 100.0))

    assert trimmer.untold(100.0) is None, "no step, nothing to tell"
    timed(0.032)
    first = Corrections.decode(trimmer.untold(100.0) or "")
    assert first.num_steps == 1
    assert first.common > 0
    told = 0
    for n in range(1, 1001):  # ten seconds of steps of 10 ms
        timed(0.032)
        told += trimmer.untold(100.0 + n / 100) is not None
    assert 0.8 * 10 / TELL_INTERVAL_S < told <= 10 / TELL_INTERVAL_S
    timed(0.032)
    assert trimmer.untold(200.0) is not None
    assert trimmer.untold(300.0) is None, "an engine without work has nothing new"
    timed(0.032)
    assert trimmer.untold(150.0) is not None, "the clock went back"
    timed(0.032)
    assert trimmer.untold(150.1) is None


def test_the_scheduler_tells_each_client_on_its_first_output() -> None:
    trimmer = Trimmer(times(), K_MAX)
    trimmer.observe(TimedStep(0.032, 1, 6, K_MAX, 100.0))
    nobody = {0: EngineCoreOutputs()}
    PerRequestDepthScheduler._tell_corrections(trimmer, nobody)  # waits for an output to travel on
    outputs = [EngineCoreOutput(str(n), [5], trace_headers={"traceparent": "00-1"} if n == 0 else None) for n in (0, 1)]
    PerRequestDepthScheduler._tell_corrections(trimmer, {0: EngineCoreOutputs(outputs=outputs)})
    assert outputs[0].trace_headers is not None
    assert outputs[0].trace_headers["traceparent"] == "00-1"
    assert Corrections.decode(outputs[0].trace_headers[CORRECTIONS_HEADER]).num_steps == 1
    assert outputs[1].trace_headers is None


def test_a_survival_shorter_than_k_is_not_used() -> None:
    assert Trimmer(times(), K_MAX).depths([request([0.01])] * 16, [3] * 16) == [3] * 16
