"""The model of step times: points, first steps, outliers, and engines unlike its guess."""

import json
import math
from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate_depths import ENGINES, TableEngine, points_of
from cluster.step_time import FIRST_STEPS, Curve, StepCostModel, StepCosts, TimedStep, average_costs, guessed_costs

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


def run(model: StepCostModel, engine, num_steps: int, sizes=range(1, 33), depths=range(8), noise=0.05, seed=0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        num_requests = int(rng.choice(sizes))
        num_tokens = num_requests * (1 + int(rng.choice(depths)))
        seconds = engine(num_requests, num_tokens) * float(np.exp(noise * rng.standard_normal()))
        model.observe(TimedStep(seconds, num_requests, num_tokens, 300.0))


def errors(costs: StepCosts, engine, sizes=(1, 4, 16, 32), depths=range(8)) -> np.ndarray:
    """By how much the costs are off, as shares."""
    cells = [(size, size * (1 + k)) for size in sizes for k in depths]
    return np.array([costs.seconds(*cell, 300.0) / engine(*cell) - 1 for cell in cells])


@pytest.mark.parametrize(("engine", "on_gpu"), [(gpu, True), (cpu, False)])
def test_a_few_steps_teach_what_the_guess_did_not_know(engine, on_gpu):
    model = StepCostModel(on_gpu)
    run(model, engine, 50)
    assert np.abs(errors(model.costs, engine)).mean() < 0.1
    run(model, engine, 2000, seed=1)
    assert np.abs(errors(model.costs, engine)).mean() < 0.03
    assert np.abs(errors(model.costs, engine)).max() < 0.12


def test_a_pass_that_grows_with_requests_is_told_from_the_rest_of_a_step():
    """Few steps without it are enough."""
    model, rng = StepCostModel(on_gpu=False), np.random.default_rng(0)
    for number in range(400):
        num_requests, k = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 8))
        cell = (num_requests, num_requests * (1 + k), 0, bool(number % 20))
        seconds = dear_drafter(*cell) * float(np.exp(0.03 * rng.standard_normal()))
        model.observe(TimedStep(seconds, *cell[:2], 300.0, *cell[2:]))
    for cell in ((1, 1), (2, 2), (4, 4), (8, 8), (8, 32)):
        assert model.costs.seconds(*cell, 300.0) == pytest.approx(dear_drafter(*cell), rel=0.1)


def test_the_guess_has_the_proportions_of_a_measured_cpu():
    """SmolLM2-135M on two cores, measured when the drafter's pass ran at K = 0 too."""
    engine = TableEngine.load(ENGINES["cpu"])
    off = errors(guessed_costs(on_gpu=False), engine, sizes=(1, 2, 4, 8), depths=range(1, 8))
    assert np.abs(np.log1p(off) - np.log1p(off).mean()).max() < 0.3


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_points_measured_at_the_start_are_kept(name):
    engine = TableEngine.load(ENGINES[name])
    document = points_of(engine, 128)
    model = StepCostModel(name != "cpu", document)
    off = [
        model.costs.seconds(point["num_requests"], point["num_tokens"], 300.0) / point["step_s"] - 1
        for point in document["points"]
    ]
    assert np.mean(np.abs(off)) < 0.05
    assert model.costs.has_points
    # Steps at one place say nothing against the points elsewhere.
    run(model, engine, 2000, sizes=[8], depths=[3])
    after = errors(model.costs, engine, sizes=(64,), depths=(0, 3, 7))
    assert np.abs(after).max() < 0.1


def test_a_first_step_that_compiled_and_a_pause_hardly_matter():
    model = StepCostModel(on_gpu=False)
    model.observe(TimedStep(37.0, 1, 8, 100.0))
    run(model, cpu, FIRST_STEPS + 20)
    assert np.abs(errors(model.costs, cpu)).mean() < 0.12
    before = model.costs.seconds(8, 32)
    model.observe(TimedStep(60.0, 8, 32, 300.0))
    assert model.costs.seconds(8, 32) == pytest.approx(before, rel=0.1)


def test_what_was_not_visited_is_uncertain_until_it_is():
    model = StepCostModel(on_gpu=True)
    run(model, gpu, 300, sizes=[8], depths=[2, 3])
    assert model.error(8, 32, 300.0) < 0.06 < model.error(32, 256, 300.0)
    run(model, gpu, 10, sizes=[32], depths=[7])
    assert model.error(32, 256, 300.0) < 0.06


def test_prompts_and_context_are_learned_from_steps():
    model, rng = StepCostModel(on_gpu=False), np.random.default_rng(0)

    def engine(num_requests, num_tokens, context, prompts):
        rows = num_tokens + prompts
        return 0.05 * (
            1 + rows / 32 + num_requests / 16 + 0.1 * (num_tokens > num_requests) + 0.01 * rows * context / 1000
        )

    for _ in range(3000):
        num_requests, k = int(rng.integers(1, 17)), int(rng.integers(0, 8))
        context, prompts = float(rng.choice([100, 2000, 8000])), int(rng.choice([0, 0, 64, 256]))
        cell = (num_requests, num_requests * (1 + k), context, prompts)
        model.observe(TimedStep(engine(*cell) * float(np.exp(0.03 * rng.standard_normal())), *cell))
    for cell in ((8, 32, 100.0, 0), (8, 32, 8000.0, 0), (8, 32, 100.0, 256), (16, 128, 2000.0, 64)):
        assert model.costs.seconds(*cell) == pytest.approx(engine(*cell), rel=0.06)


def long_contexts(num_requests: int, num_tokens: int, prompt_tokens: int, context: float) -> float:
    """A small target on a GPU: prompts of 8,192 rows take what their own contexts ask for, which no step says."""
    rows, is_drafted = num_tokens + prompt_tokens, num_tokens > num_requests
    seconds = 1.9e-3 + 4e-6 * min(rows, 600) + 5.2e-6 * max(rows - 600, 0) + 18e-6 * num_requests
    return seconds + (0.6e-3 + 12e-6 * num_requests) * is_drafted + context * (6e-8 * num_requests + 3.5e-10 * rows)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("traffic", ["long prompts", "bursts"])
def test_what_is_unknown_of_large_steps_makes_no_small_ones_free(traffic, seed):
    """Of steps with 8,192 rows of prompts too few are seen to tell rows from contexts; or the host, late after a burst,
    finds the results of two such steps at once. Their rows may then be believed to take less than nothing; that is not
    known."""
    points = [
        {"num_requests": size, "num_tokens": size * (1 + k), "step_s": long_contexts(size, size * (1 + k), 0, 512.0)}
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for k in (0, 1, 3, 7)
    ]
    model, rng = StepCostModel(True, {"points": points, "context_tokens": 512}), np.random.default_rng(seed)

    def step(decoding: int, prompts: int, context: float, seconds: float | None = None) -> None:
        if seconds is None:
            seconds = long_contexts(decoding, 8 * decoding, prompts, context) + prompts * context * 2e-9
            seconds *= float(np.exp(0.06 * rng.standard_normal())) * (rng.uniform(2, 6) if rng.random() < 0.01 else 1)
        model.observe(TimedStep(seconds, decoding, 8 * decoding, context, prompts, True))

    def serve(num_requests: int, prompt: int, context: float, num_steps: int) -> None:
        for _ in range(num_steps):
            prompts = min(8192, prompt * rng.poisson(num_requests / 60))
            step(max(1, num_requests - (prompts > 0)), prompts, context)

    for _ in range(3):
        serve(8, 150, 300.0, 1000)
        if traffic == "bursts":
            for decoding in (54, 108, 54, 108):
                step(decoding, 8192, 150.0, rng.uniform(5e-4, 3e-3) if rng.random() < 0.4 else None)
            serve(128, 150, 300.0, 600)
        else:
            serve(4, 12_000, 12_000.0, 800)
        serve(16, 150, 300.0, 1000)
        for size in (1, 2, 4, 8, 16):
            for k in (0, 7):
                believed = model.costs.curve(size, size * k, 300.0)[-1]
                assert believed == pytest.approx(long_contexts(size, size * (1 + k), 0, 300.0), rel=0.3)


def test_prompts_do_not_make_drafts_look_cheaper_than_their_rows():
    """Beside prompts a curve starts at what the step takes without them, and rises by what a row then costs."""
    costs = StepCosts(Curve((1.0, 64.0, 128.0), (0.01, 0.01, 0.02)), Curve((1.0, 2.0), (0.0, 0.0)), drafting_s=0.001)
    alone, beside = costs.curve(4, 12), costs.curve(4, 12, prompt_tokens=128)
    assert beside[0] == pytest.approx(alone[0])
    assert beside[12] - beside[1] == pytest.approx(11 * 0.01 / 64)
    assert alone[12] - alone[1] == 0
    assert alone[1] - alone[0] == pytest.approx(0.001)
    anyway = costs.curve(4, 12, is_drafted=True)
    assert anyway[0] == anyway[1] == alone[1], "the drafter's pass runs whatever is verified"


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(0, 7), st.sampled_from([0.0, 500.0]), st.booleans())
def test_a_curve_says_what_single_steps_say(num_requests, k, context, on_gpu):
    costs = guessed_costs(on_gpu)
    curve = costs.curve(num_requests, num_requests * 7, context)
    assert len(curve) == num_requests * 7 + 1
    assert (np.diff(curve) >= 0).all()
    assert curve[num_requests * k] == pytest.approx(costs.seconds(num_requests, num_requests * (1 + k), context))


def test_costs_travel_as_flat_numbers_and_as_text():
    model = StepCostModel(True, points_of(gpu, 32))
    run(model, gpu, 30)
    wire = json.loads(json.dumps(model.costs.to_wire()))
    assert StepCosts.from_wire(wire) == StepCosts.from_wire(json.dumps(wire)) == model.costs


@pytest.mark.parametrize(
    "wire", [None, 7, "nonsense", "[[1]]", {}, {"forward_s:1": 1.0}, {"forward_s:1": -1.0}, {"forward_s:x": 1.0}]
)
def test_what_is_no_costs_is_refused(wire):
    with pytest.raises(ValueError, match="step costs"):
        StepCosts.from_wire(wire)
    falling = {**guessed_costs(True).to_wire(), "forward_s:8192": 0.0}
    with pytest.raises(ValueError, match="never falling"):
        StepCosts.from_wire(falling)


def test_engines_are_averaged_by_their_steps():
    slow, fast = StepCostModel(False), StepCostModel(False)
    run(slow, lambda *cell: 2 * cpu(*cell), 1000)
    run(fast, cpu, 1000)
    both = average_costs([slow.costs, fast.costs])
    assert both.seconds(8, 32) == pytest.approx((slow.costs.seconds(8, 32) + fast.costs.seconds(8, 32)) / 2)
    assert both.num_steps == 2000
    new = average_costs([slow.costs, guessed_costs(False)])
    assert new.seconds(8, 32) == pytest.approx(slow.costs.seconds(8, 32), rel=0.01)
    with pytest.raises(ValueError, match="no step costs"):
        average_costs([])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "points must be a list"),
        ({"points": []}, "points must be a list"),
        ({"points": [{"num_requests": 1, "num_tokens": 1}]}, r"points\[0\] cannot be read: KeyError\('step_s'\)"),
        ({"points": [{"num_requests": 2, "num_tokens": 1, "step_s": 1.0}]}, r"points\[0\] cannot be: "),
        ({"points": [{"num_requests": 1, "num_tokens": 1, "step_s": math.nan}]}, r"points\[0\] cannot be: "),
    ],
)
def test_a_start_document_that_cannot_be_is_named(document, message):
    with pytest.raises(ValueError, match=message):
        StepCostModel(True, document)


def test_a_step_that_cannot_be_changes_nothing():
    model = StepCostModel(True, points_of(gpu, 32))
    before = model.costs
    for step in (TimedStep(math.nan, 1, 1), TimedStep(0.0, 1, 1), TimedStep(1.0, 2, 1), TimedStep(1.0, 1, 1, math.inf)):
        model.observe(step)
    assert model.costs == before


def test_what_choosing_takes_is_learned_from_steps_with_and_without():
    """Of an engine that measured itself, whose chosen steps take 0.3 ms more at every size."""
    model = StepCostModel(True, points_of(gpu, 64))
    rng = np.random.default_rng(0)
    first_error_s = model.choosing_error_s
    for _ in range(400):
        num_requests, is_chosen = int(rng.choice([16, 32, 48])), bool(rng.random() < 0.5)
        num_tokens = num_requests * int(rng.integers(4, 9))
        seconds = (gpu(num_requests, num_tokens) + 3e-4 * is_chosen) * float(np.exp(0.05 * rng.standard_normal()))
        model.observe(TimedStep(seconds, num_requests, num_tokens, 300.0, is_chosen=is_chosen))
    assert model.costs.choosing_s == pytest.approx(3e-4, abs=1e-4)
    assert model.choosing_error_s < 0.5 * first_error_s
    assert StepCosts.from_wire(model.costs.to_wire()) == model.costs
