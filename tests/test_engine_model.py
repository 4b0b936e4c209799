"""The model of an engine: the steps it takes are decoding's, and its batches vLLM's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.baselines import BatchWide, NoSpeculation
from benchmarks.simulation.engine_model import Active, Engine, Run, Simulation, Times, Traffic
from benchmarks.simulation.traces import Answer, Traces, acceptance_length, num_steps
from cluster.step_time import StepShape

REAL = Path(__file__).resolve().parents[1] / "results" / "2026-11-21-traces-smollm2-135m.npz"
STILL = Engine(jitter=0.0, prompt_tokens=10)


class Clock:
    """Step times that keep the shapes they are asked for: `seconds_per_step`, and so much for each token."""

    def __init__(self, seconds_per_step: float = 0.01, per_token: float = 0.0) -> None:
        self.shapes: list[StepShape] = []
        self._fixed, self._per_token = seconds_per_step, per_token

    def seconds(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return self._fixed + self._per_token * shape.num_tokens


class Watched(BatchWide):
    """A fixed K that counts what it is shown."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.num_steps = 0
        self.most_requests = 0
        self.ends_s: list[float] = []

    def observe(
        self, requests: Sequence[Active], depths: Sequence[int], accepted: Sequence[int], seconds: float, now_s: float
    ) -> None:
        self.num_steps += len(requests)
        self.most_requests = max(self.most_requests, len(requests))
        self.ends_s.append(now_s)
        assert all(0 <= j <= k for j, k in zip(accepted, depths, strict=True))


def answer(*accepted: int) -> Answer:
    return Answer("qa", 0.0, 1.0, bytes(accepted))


def simulate(policy: NoSpeculation, traffic: Traffic, times: Times, engine: Engine = STILL, warmup: float = 0) -> Run:
    return Simulation(engine, times, policy, traffic, np.random.default_rng(0), warmup).finish()


@pytest.mark.parametrize("k", [0, 3, 5, 7, 8])
def test_the_steps_are_those_of_decoding(k: int) -> None:
    """Batching, prompts and order of arrival change nothing in how many steps an answer takes."""
    answers = Traces.load(REAL).answers[:160:4]
    policy = Watched(k)
    traffic = Traffic(answers, ["all"] * len(answers), concurrency=6)
    run = simulate(policy, traffic, Clock(), warmup=0)
    assert policy.num_steps == sum(num_steps(one.accepted, k) for one in answers)
    assert policy.most_requests == 6
    # The measured part leaves the first and the last requests out, so it is only near.
    assert run.acceptance_length == pytest.approx(acceptance_length(answers, k), rel=0.15)
    assert run.mean_depth == k


def test_one_request_takes_the_time_of_its_steps() -> None:
    # 6 tokens after the first in 3 steps at K = 3 (see tests/test_traces.py), and a prompt of one step.
    traffic = Traffic([answer(2, 3, 0, 1, 3, 0)] * 3, ["all"] * 3, arrivals_s=[0.0, 1.0, 2.0])
    run = simulate(BatchWide(3), traffic, Clock(0.01))
    assert run.tpot_s == pytest.approx([0.03 / 6] * 3)
    assert run.ttft_s == pytest.approx([0.01] * 3)
    assert simulate(BatchWide(0), traffic, Clock(0.01)).tpot_s == pytest.approx([0.06 / 6] * 3)


def test_a_step_past_the_end_emits_no_more_than_the_answer_has() -> None:
    # The second step's two drafts end the answer, so no token follows them.
    run = simulate(BatchWide(2), Traffic([answer(0, 2, 1)] * 3, ["all"] * 3, concurrency=1), Clock())
    assert (run.num_decoded, run.num_request_steps) == (6, 4), "the last of three answers is not measured"
    assert run.tpot_s == pytest.approx([0.02 / 3] * 2)


def test_context_grows_by_what_is_emitted() -> None:
    times = Clock()
    simulate(BatchWide(2), Traffic([answer(2, 1, 0, 2, 1, 0, 0)] * 2, ["all"] * 2, concurrency=1), times)
    # The prompt's 10 tokens and the first token; then steps that emit 3, 3 and 1.
    assert [shape.context_tokens for shape in times.shapes[:4]] == [0.0, 11.0, 14.0, 17.0]


def test_a_batch_with_a_prompt_is_not_uniform() -> None:
    times = Clock()
    traffic = Traffic([answer(*[0] * 9)] * 2, ["all"] * 2, arrivals_s=[0.0, 0.025])
    simulate(BatchWide(2), traffic, times)
    assert [(shape.num_requests, shape.num_tokens, shape.uniform_depth) for shape in times.shapes[:6]] == [
        (1, 10, None),
        (1, 3, 2),
        (1, 3, 2),
        (2, 13, None),
        (2, 6, 2),
        (2, 6, 2),
    ]


def test_long_prompts_go_in_chunks_beside_decoding() -> None:
    times = Clock()
    engine = Engine(jitter=0.0, prompt_tokens=100, max_step_tokens=40)
    policy = Watched(3)
    run = simulate(policy, Traffic([answer(*[1] * 60)] * 8, ["all"] * 8, concurrency=4), times, engine)
    assert policy.num_steps == 8 * 30, "every request is decoded once"
    assert run.ttft_s == sorted(run.ttft_s), "first come, first served"
    assert max(shape.num_tokens for shape in times.shapes) == 40
    assert run.ttft_s[0] >= 0.03
    assert all(shape.num_tokens >= shape.num_requests for shape in times.shapes)


def test_requests_wait_for_their_arrival_and_for_a_slot() -> None:
    policy = Watched(0)
    engine = Engine(jitter=0.0, prompt_tokens=1, max_num_seqs=2)
    traffic = Traffic([answer(0, 0)] * 4, ["all"] * 4, arrivals_s=[5.0, 5.0, 5.0, 9.0])
    run = simulate(policy, traffic, Clock(1.0), engine)
    assert policy.ends_s == pytest.approx([7.0, 8.0, 10.0, 11.0, 12.0])
    assert policy.most_requests == 2
    assert run.ttft_s[:2] == pytest.approx([1.0, 1.0])
    assert run.ttft_s[2] == pytest.approx(4.0), "the third waits until the first two have ended"


def test_throughput_is_tokens_over_the_steady_time() -> None:
    traffic = Traffic([answer(*[1] * 40)] * 60, ["all"] * 60, concurrency=4)
    run = simulate(BatchWide(1), traffic, Clock(0.01), warmup=0.25)
    # 4 requests, 2 tokens a step each; one step in 21 of a request is its prompt's, which gives one token.
    assert run.tokens_per_s == pytest.approx(4 * 41 / (21 * 0.01), rel=0.02)
    assert run.acceptance_length == 2.0


def test_a_policy_is_told_of_prompts_and_no_graph_holds_them() -> None:
    told: list[int] = []

    class Told(BatchWide):
        def depths(self, requests: Sequence[Active], context_tokens: float, prompt_tokens: int = 0) -> list[int]:
            told.append(prompt_tokens)
            return super().depths(requests, context_tokens, prompt_tokens)

    times = Clock()
    traffic = Traffic([answer(*[0] * 6)] * 3, ["all"] * 3, arrivals_s=[0.0, 0.015, 0.035])
    simulate(Told(3), traffic, times)
    assert told[:5] == [0, 10, 0, 10, 0]
    assert [shape.longest_tokens for shape in times.shapes[:6]] == [10, 4, 10, 4, 10, 4]


def test_an_engine_without_a_drafter_asks_for_no_drafts() -> None:
    times = Clock()
    run = simulate(NoSpeculation(), Traffic([answer(3, 2, 1, 0)] * 4, ["all"] * 4, concurrency=1), times)
    assert {shape.uniform_depth for shape in times.shapes} == {0, None}
    assert (run.acceptance_length, run.num_drafted) == (1.0, 0)


def test_jitter_keeps_the_mean_and_follows_the_generator() -> None:
    traffic = Traffic([answer(*[0] * 200)] * 4, ["all"] * 4, concurrency=1)
    engine = Engine(jitter=0.1, prompt_tokens=1)
    runs = [Simulation(engine, Clock(), BatchWide(0), traffic, np.random.default_rng(s), 0).finish() for s in (1, 1, 2)]
    assert runs[0].seconds == runs[1].seconds != runs[2].seconds
    assert runs[0].tokens_per_s == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_step_tokens", "prompt_tokens"])
def test_limits_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        Engine(**{field: 0})


def test_traffic_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="leave nothing to measure"):
        simulate(BatchWide(1), Traffic([answer(0)] * 8, ["all"] * 8, concurrency=8), Clock())
    with pytest.raises(ValueError, match="either arrivals_s or concurrency"):
        simulate(BatchWide(1), Traffic([answer(0)], ["all"]), Clock())
    with pytest.raises(ValueError, match="jitter"):
        Engine(jitter=-1.0)
