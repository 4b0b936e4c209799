"""The model of step latency: first steps, outliers, and engines unlike its guess."""

import math
from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate_depths import ENGINES, TableEngine
from cluster.k_policy import Demand, best_ks
from cluster.step_latency import FIRST_STEPS, StepLatency, StepLatencyModel, TimedStep, average_latency, guessed_latency
from tests.support.step_tables import latency_of

SIZES = [1, 2, 4, *range(8, 257, 8), *range(272, 2049, 16)]


def gpu(num_requests: int, num_tokens: int, prompt_tokens: int = 0, is_drafted: bool | None = None) -> float:
    """A staircase of captured graphs, with room for 200 rows."""
    is_drafted = num_tokens > num_requests if is_drafted is None else is_drafted
    rows = SIZES[bisect_left(SIZES, num_tokens)] if not prompt_tokens else num_tokens + prompt_tokens
    units = 1 + max(0, rows - 200) / 400 + num_requests / 300 + 0.25 * is_drafted
    return 0.0038 * units * (1.2 if prompt_tokens else 1.0)


def cpu(num_requests: int, num_tokens: int, prompt_tokens: int = 0, is_drafted: bool | None = None) -> float:
    """Each row costs from the first on; ten times slower than the guess."""
    is_drafted = num_tokens > num_requests if is_drafted is None else is_drafted
    return 0.3 * (1 + (num_tokens + prompt_tokens) / 20 + num_requests / 10 + 0.15 * is_drafted)


def dear_drafter(num_requests: int, num_tokens: int, prompt_tokens: int = 0, is_drafted: bool | None = None) -> float:
    """A pass that grows with requests: at 8 it is half of a step, and no drafts at all are best."""
    is_drafted = num_tokens > num_requests if is_drafted is None else is_drafted
    return 0.06 * (1 + (num_tokens + prompt_tokens) / 32 + (0.1 + 0.2 * num_requests) * is_drafted)


def run(model: StepLatencyModel, engine, num_steps: int, sizes=range(1, 33), depths=range(8), noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_requests = int(rng.choice(sizes))
        num_tokens = num_requests * (1 + int(rng.choice(depths)))
        seconds = engine(num_requests, num_tokens) * float(np.exp(noise * rng.standard_normal()))
        model.observe(TimedStep(seconds, num_requests, num_tokens))


def errors(latency: StepLatency, engine, sizes=(1, 4, 16, 32), depths=range(8)) -> np.ndarray:
    """By how much the latency is off, as shares."""
    cells = [(size, size * (1 + k)) for size in sizes for k in depths]
    return np.array([latency.seconds(*cell) / engine(*cell) - 1 for cell in cells])


@pytest.mark.parametrize(("engine", "on_gpu"), [(gpu, True), (cpu, False)])
def test_a_few_steps_teach_what_the_guess_did_not_know(engine, on_gpu):
    model = StepLatencyModel(on_gpu)
    run(model, engine, 100)
    assert np.abs(errors(model.latency, engine)).mean() < 0.1
    run(model, engine, 2000, seed=1)
    assert np.abs(errors(model.latency, engine)).mean() < 0.07
    assert np.abs(errors(model.latency, engine)).max() < 0.25


RATES = (0.80, 0.61, 0.46, 0.34, 0.24, 0.17, 0.12)


def shares_of_best(model: StepLatencyModel, engine, loads, num_steps=400) -> list[float]:
    """Steps with the K that the model's latency makes best, at each load in turn; tokens per second of the last one,
    relative to the best K's. Requests come and go, and now and then a step verifies all drafts."""
    rng, found = np.random.default_rng(0), []
    for load in loads:
        for step in range(num_steps):
            if step % 8 == 0:
                k = best_ks([Demand("load", load, RATES, 7, 0)], model.latency).ks["load"]
            num_requests = int(rng.integers(load * 3 // 4, load + 1))
            num_tokens = num_requests * (1 + (k if step % 200 else 7))
            seconds = engine(num_requests, num_tokens) * float(np.exp(0.05 * rng.standard_normal()))
            model.observe(TimedStep(seconds, num_requests, num_tokens, 0, True))
        tokens_per_s = [(1 + sum(RATES[:k])) / engine(load, load * (1 + k)) for k in range(8)]
        found.append(tokens_per_s[k] / max(tokens_per_s))
    return found


@pytest.mark.parametrize("name", ["h200", "8b", "coder"])
def test_measured_engines_are_learned_and_each_load_gets_its_k(name):
    """A GPU has room for some rows; one with many experts has none for the first ones."""
    engine, model = TableEngine.load(ENGINES[name]), StepLatencyModel(on_gpu=True)
    sizes, depths = (1, 4, 16, 64, 128), range(1, 8)
    run(model, engine, 3000, sizes, depths)
    assert np.abs(errors(model.latency, engine, sizes, depths)).mean() < 0.08
    assert min(shares_of_best(StepLatencyModel(on_gpu=True), engine, (8, 64, 256, 32, 128, 64))) > 0.95
    misled = StepLatencyModel(on_gpu=True)  # other programs used its GPU, and all its steps were equally long
    run(misled, lambda *_: engine(256, 2048), 500)
    assert min(shares_of_best(misled, engine, (64, 128, 256, 32, 64, 128, 256, 64))[4:]) > 0.9


def test_what_the_host_adds_makes_no_draft_dearer():
    engine, model = TableEngine.load(ENGINES["8b"]), StepLatencyModel(on_gpu=True)
    shares_of_best(model, engine, (64, 128))

    def waiting(num_requests, num_tokens):
        return engine(num_requests, num_tokens) + 0.004 + 1e-5 * num_requests

    assert min(shares_of_best(model, waiting, (64, 128, 64))) > 0.95
    rng = np.random.default_rng(0)
    for _ in range(300):  # beside prompts, which bring work to it too
        num_requests, prompts = int(rng.integers(32, 65)), int(rng.choice([0, 256, 512]))
        num_tokens = num_requests * int(rng.integers(2, 5))
        seconds = waiting(num_requests, num_tokens) + 2e-5 * prompts + 0.0005 * (prompts > 0)
        model.observe(TimedStep(seconds, num_requests, num_tokens, prompts, True))
    assert model.latency.seconds(64, 4 * 64) == pytest.approx(waiting(64, 4 * 64), rel=0.05)
    assert model.latency.seconds(64, 8 * 64) == pytest.approx(waiting(64, 8 * 64), rel=0.3)


def test_a_first_step_that_compiled_and_a_pause_hardly_matter():
    model = StepLatencyModel(on_gpu=False)
    model.observe(TimedStep(37.0, 1, 8))
    run(model, cpu, FIRST_STEPS + 20)
    assert np.abs(errors(model.latency, cpu)).mean() < 0.12
    run(model, cpu, 30, sizes=[8], depths=[3])
    before = model.latency.seconds(8, 32)
    model.observe(TimedStep(60.0, 8, 32))
    assert model.latency.seconds(8, 32) == pytest.approx(before, rel=0.1)


def test_an_engine_that_becomes_slower_is_followed():
    model = StepLatencyModel(on_gpu=False)
    run(model, cpu, 500, sizes=[4], depths=[3])
    run(model, lambda *cell: 1.5 * cpu(*cell), 1500, sizes=[4], depths=[3])
    assert model.latency.seconds(4, 16) == pytest.approx(1.5 * cpu(4, 16), rel=0.05)


def test_large_prompts_make_no_small_steps_free():
    model, rng = StepLatencyModel(on_gpu=True), np.random.default_rng(0)
    run(model, gpu, 500)
    before = model.latency.seconds(8, 64)
    for _ in range(200):
        model.observe(TimedStep(float(rng.uniform(1e-4, 0.2)), 8, 64, 8192, True))
    assert model.latency.seconds(8, 64) > 0.3 * before
    assert model.latency.coefficients[-1] > 0


def test_beside_prompts_each_draft_takes_a_row():
    latency = latency_of(0.01, pass_s=0.001, prompt_row_s=0.0002)
    alone, beside = latency.curve(4, 12), latency.curve(4, 12, prompt_tokens=128)
    assert beside[0] == pytest.approx(alone[0]) == pytest.approx(0.010)
    assert beside[12] - beside[1] == pytest.approx(11 * 0.0002)
    assert alone[12] == alone[1] == pytest.approx(0.011)
    anyway = latency.curve(4, 12, is_drafted=True)
    assert anyway[0] == anyway[1] == alone[1], "the drafter's pass runs whatever is verified"


@settings(max_examples=50)
@given(st.integers(1, 2000), st.integers(0, 20), st.booleans())
def test_a_curve_says_what_single_steps_say(num_requests, k, on_gpu):
    latency = guessed_latency(on_gpu)
    curve = latency.curve(num_requests, num_requests * 20)
    assert len(curve) == num_requests * 20 + 1
    assert curve[num_requests * k] == pytest.approx(latency.seconds(num_requests, num_requests * (1 + k)))
    assert (np.diff(curve[1:]) >= 0).all()


def test_engines_are_averaged_by_their_steps():
    slow, fast = StepLatencyModel(False), StepLatencyModel(False)
    run(slow, lambda *cell: 2 * cpu(*cell), 1000)
    run(fast, cpu, 1000)
    both = average_latency([slow.latency, fast.latency])
    assert both.seconds(8, 32) == pytest.approx((slow.latency.seconds(8, 32) + fast.latency.seconds(8, 32)) / 2)
    assert both.num_steps == 2000
    new = average_latency([slow.latency, guessed_latency(False)])
    assert new.seconds(8, 32) == pytest.approx(slow.latency.seconds(8, 32), rel=0.01)


def test_a_step_that_cannot_be_changes_nothing():
    model = StepLatencyModel(on_gpu=True)
    run(model, gpu, 30)
    before = model.latency
    for step in (TimedStep(math.nan, 1, 1), TimedStep(0.0, 1, 1), TimedStep(1.0, 2, 1), TimedStep(1.0, 1, 1, -1)):
        model.observe(step)
    assert model.latency == before
