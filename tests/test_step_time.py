"""Step times: the fit's properties on tables whose truth is known, files, refusals, and what held-out points say."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.step_time import HeldOut, StepPoint, StepShape, StepTimes

K_MAX = 7
SIZES = (8, 16, 24, 32, 64, 128)
CONDITIONS = {
    "gpu": "NVIDIA H200",
    "model": "Qwen3MoeForCausalLM",
    "head": "LlamaForCausalLMEagle3",
    "dtype": "bfloat16",
    "tensor_parallel_size": 1,
    "vllm": "0.26.0",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "compile": True,
    "async_scheduling": True,
}


def truth(shape: StepShape, full: bool = False) -> float:
    """An engine with captured sizes, a drafter that costs 0.2 ms a request, and a price on context."""
    size = next((size for size in SIZES if size >= shape.num_tokens), shape.num_tokens)
    more = max(0.0, shape.context_tokens - 1000)
    drafter = 0.0 if full else 2e-4 * shape.num_requests
    return (4e-3 if full else 6e-3) + 5e-5 * size + drafter + 1e-9 * shape.num_requests * more


def point(shape: StepShape, seconds: float) -> StepPoint:
    return StepPoint(shape, seconds, seconds * 1.1, 100)


def table(noise: float = 0.0, seed: int = 0, contexts: tuple[float, ...] = (1000.0,)) -> StepTimes:
    """Uniform depths and two mixed batches at batches 1..16; K_max everywhere runs on a full graph."""
    chance = random.Random(seed)
    shapes = []
    for num in (1, 2, 4, 8, 16):
        for context in contexts:
            shapes += [StepShape.uniform(num, depth, context) for depth in (0, 1, 3, 5, 7)]
            shapes += [StepShape(num, num * 8 - 1, None, context)] if num > 1 else []
    points = [
        point(shape, truth(shape, shape.uniform_depth == K_MAX) * chance.uniform(1 - noise, 1 + noise))
        for shape in shapes
    ]
    sizes = {None: SIZES, K_MAX: SIZES}
    return StepTimes(
        points, max_draft_tokens=K_MAX, full_graph_depths={K_MAX}, capture_sizes=sizes, conditions=CONDITIONS
    )


def uniform_seconds(times: StepTimes, num: int, depth: int) -> float:
    return times.seconds(StepShape.uniform(num, depth))


def test_measured_and_unmeasured_shapes_of_a_known_engine_come_out_exactly():
    times = table()
    for num in (1, 2, 3, 5, 8, 13, 16):
        for depth in range(K_MAX + 1):
            shape = StepShape.uniform(num, depth)
            assert times.seconds(shape) == pytest.approx(truth(shape, depth == K_MAX), rel=2e-3), shape


def test_a_uniform_batch_at_full_graph_depth_is_another_family_than_the_same_tokens_ragged():
    times = table()
    assert uniform_seconds(times, 8, 7) == pytest.approx(4e-3 + 5e-5 * 64, rel=1e-6)
    assert times.seconds(StepShape(8, 64, None)) == pytest.approx(6e-3 + 5e-5 * 64 + 2e-4 * 8, rel=1e-3)
    assert times.full_graph_depths == {K_MAX}


def test_tokens_between_two_captured_sizes_cost_the_upper_size():
    times = table()
    seconds = [times.seconds(StepShape(4, tokens, None)) for tokens in range(4, 33)]
    assert len({round(one, 9) for one in seconds}) == 4  # 8, 16, 24, 32
    assert seconds[8 - 4] < seconds[9 - 4] == pytest.approx(seconds[16 - 4])


def test_beyond_the_last_point_time_goes_on_in_a_straight_line():
    times = table()
    assert uniform_seconds(times, 64, 7) == pytest.approx(4e-3 + 5e-5 * 512, rel=1e-3)
    at = [times.seconds(StepShape(64, tokens, None)) for tokens in (200, 300, 400)]
    assert at[2] - at[1] == pytest.approx(at[1] - at[0])
    assert at[1] > at[0]


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_no_step_cheaper_than_a_smaller_one(seed):
    times = table(noise=0.15, seed=seed)
    for num in (1, 3, 8, 16, 40):
        ragged = [times.seconds(StepShape(num, tokens, None)) for tokens in range(num, 8 * num + 1)]
        assert ragged == sorted(ragged)
    for tokens in (40, 64, 100):
        wider = [times.seconds(StepShape(num, tokens, None)) for num in range(5, 41)]
        assert wider == sorted(wider)
    full = [uniform_seconds(times, num, K_MAX) for num in range(1, 60)]
    assert full == sorted(full)


def test_context_is_a_measured_correction_and_unknown_context_is_that_of_most_points():
    times = table(contexts=(1000.0, 1000.0, 9000.0, 33000.0))
    for context in (1000.0, 4000.0, 33000.0, 60000.0):
        shape = StepShape.uniform(8, 3, context)
        assert times.seconds(shape) == pytest.approx(truth(shape), rel=5e-3)
    assert table().seconds(StepShape.uniform(8, 3, 60000.0)) == uniform_seconds(table(), 8, 3), "one context: no slope"
    usual = times.context_tokens
    assert uniform_seconds(times, 8, 3) == pytest.approx(times.seconds(StepShape.uniform(8, 3, usual)))


def test_a_batch_that_the_engine_pads_to_a_full_graph_costs_what_that_graph_costs():
    points = [point(StepShape.uniform(num, depth), 0.001 * num * (1 + depth)) for num in (1, 4, 16) for depth in (3, 7)]
    points += [point(StepShape.uniform(num, 1), 1.0 + num) for num in (8, 16)]
    times = StepTimes(points, max_draft_tokens=K_MAX, full_graph_depths={3, 7}, padding_tokens=8)
    assert uniform_seconds(times, 1, 2) == pytest.approx(uniform_seconds(times, 1, 3))
    assert uniform_seconds(times, 4, 1) == pytest.approx(0.016), "8 tokens of padding to depth 3"
    assert uniform_seconds(times, 2, 5) == pytest.approx(0.016), "4 tokens of padding to depth 7"
    assert uniform_seconds(times, 5, 1) > 1.0, "10 tokens of padding are too many"
    assert times.seconds(StepShape(4, 24, None)) == pytest.approx(0.032)
    assert times.seconds(StepShape(4, 23, None)) > 1.0
    assert times.seconds(StepShape(4, 12, None, longest_tokens=4)) == pytest.approx(0.016), "none is deeper than 3"
    assert times.seconds(StepShape(4, 12, None, longest_tokens=5)) > 1.0, "one is: 20 tokens of padding to depth 7"
    assert times.seconds(StepShape(4, 30, None, longest_tokens=9)) > 1.0, "a prompt's 9 tokens fit no graph"
    assert times.seconds(StepShape(4, 33, None)) > 1.0, "more tokens than the graph has"
    assert uniform_seconds(times, 16, 3) == pytest.approx(0.064), "its own graph"


def test_a_fractional_batch_lies_between_its_neighbours():
    times = StepTimes([point(StepShape.uniform(num, 1), 0.01 * num) for num in (1, 2, 4)], max_draft_tokens=K_MAX)
    assert times.seconds(StepShape.uniform(1.5, 1)) == pytest.approx(0.015)
    assert times.seconds(StepShape(2.2, 6.0, None)) == pytest.approx(0.03, rel=0.02)


def test_held_out_points_are_predicted_by_the_others_and_a_wrong_one_stands_out():
    good = table().held_out()
    assert len(good) == 29
    assert max(one.error for one in good if one.is_inside) < 0.05
    points = list(table().points)
    index = next(i for i, one in enumerate(points) if one.shape == StepShape.uniform(4, 3, 1000.0))
    points[index] = point(points[index].shape, 3 * points[index].median_s)
    spoilt = StepTimes(
        points, max_draft_tokens=K_MAX, full_graph_depths={K_MAX}, capture_sizes={None: SIZES, K_MAX: SIZES}
    ).held_out()
    worst = max(spoilt, key=lambda one: abs(one.predicted_s - one.point.median_s))
    assert worst.point.shape == points[index].shape
    assert worst.error == pytest.approx(2 / 3, abs=0.05)
    assert not next(
        one for one in good if one.point.shape.num_requests == 1 and one.point.shape.num_tokens == 1
    ).is_inside


def test_error_of_a_held_out_point_is_relative_to_the_measurement():
    assert HeldOut(point(StepShape.uniform(1, 0), 0.02), 0.03, True).error == pytest.approx(0.5)


def test_a_saved_table_loads_to_the_same_times(tmp_path: Path):
    times = table(noise=0.1, contexts=(1000.0, 8000.0))
    times.save(tmp_path / "t.json")
    again = StepTimes.load(tmp_path / "t.json")
    assert again.conditions == {**CONDITIONS, "max_draft_tokens": K_MAX, "full_graph_depths": [K_MAX]}
    assert (again.full_graph_depths, again.measured) == ({K_MAX}, True)
    assert (again.capture_sizes, again.max_draft_tokens) == (times.capture_sizes, K_MAX)
    for num in (1, 5, 20):
        for depth in range(K_MAX + 1):
            shape = StepShape.uniform(num, depth, 3000.0)
            assert again.seconds(shape) == pytest.approx(times.seconds(shape), rel=1e-4)


def _set_point(raw: dict[str, Any], **fields: Any) -> None:
    raw["points"][3].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(format="other"), "format must be"),
        (lambda raw: raw.update(gpu="x"), "unknown key 'gpu'"),
        (lambda raw: raw.pop("conditions"), "missing key 'conditions'"),
        (lambda raw: raw.update(max_draft_tokens=2.5), "max_draft_tokens must be a whole number"),
        (lambda raw: raw.update(max_draft_tokens=8), "max_draft_tokens is 8, but 7 in conditions"),
        (lambda raw: raw.update(full_graph_depths=[9]), "full_graph_depths has 9, outside 0..7"),
        (lambda raw: raw.update(full_graph_depths=[2]), "full_graph_depths has 2, but no point was measured"),
        (lambda raw: raw["capture_sizes"].update(ragged=[8, -1]), "capture_sizes.ragged must be a whole number"),
        (lambda raw: raw["capture_sizes"].update(mixed=[8]), "capture_sizes must be a whole number"),
        (lambda raw: raw.update(points=[]), "there is no measured point"),
        (lambda raw: raw["points"][3].pop("p95_s"), r"points\[3\] must have the keys num_requests"),
        (lambda raw: _set_point(raw, median_s=0.0), r"points\[3\].median_s must be above 0"),
        (lambda raw: _set_point(raw, median_s=float("nan")), r"points\[3\].median_s must be a number"),
        (lambda raw: _set_point(raw, p95_s="fast"), r"points\[3\].p95_s must be a number"),
        (
            lambda raw: _set_point(raw, num_requests=0, num_tokens=0),
            r"points\[3\]: StepShape.num_requests must be above 0",
        ),
        (lambda raw: _set_point(raw, uniform_depth=2), r"points\[3\]: StepShape.uniform_depth is 2"),
        (lambda raw: _set_point(raw, num_tokens=9, uniform_depth=None), r"points\[3\].num_tokens is 9: more than"),
        (lambda raw: _set_point(raw, num_steps=True), r"points\[3\].num_steps must be a whole number"),
    ],
)
def test_a_file_that_is_no_table_is_refused_by_file_and_field(tmp_path: Path, change: Any, said: str):
    path = tmp_path / "bad.json"
    table().save(path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"bad.json: .*{said}"):
        StepTimes.load(path)


def test_a_missing_or_broken_file_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere.json: cannot be read"):
        StepTimes.load(tmp_path / "nowhere.json")
    (tmp_path / "half.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="half.json: cannot be read"):
        StepTimes.load(tmp_path / "half.json")


def test_a_table_of_another_engine_is_refused_by_the_fields_that_differ():
    times = table()
    here = {
        **CONDITIONS,
        "max_draft_tokens": K_MAX,
        "full_graph_depths": [K_MAX],
        "vllm": "0.26.3",
        "date": "whenever",
    }
    times.check_fits(here)
    with pytest.raises(
        ValueError, match="h200.json .*gpu is 'NVIDIA L4' here and 'NVIDIA H200' in the table.*calibrate"
    ):
        times.check_fits({**here, "gpu": "NVIDIA L4"}, "h200.json")
    with pytest.raises(ValueError, match="max_draft_tokens is 5 here and 7 in the table"):
        times.check_fits({**here, "max_draft_tokens": 5})
    with pytest.raises(ValueError, match="vllm is '0.29.0' here and '0.26' in the table"):
        times.check_fits({**here, "vllm": "0.29.0"})
    with pytest.raises(ValueError, match="model is 'not stated' here"):
        times.check_fits({key: value for key, value in here.items() if key != "model"})


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, 1, None), "num_requests must be above 0"),
        ((float("nan"), 1, None), "num_requests must be above 0"),
        ((4, 3, None), "num_tokens must be at least num_requests"),
        ((4, float("inf"), None), "num_tokens must be at least"),
        ((4, 9, 1), "uniform_depth is 1, so num_tokens must be 8"),
        ((4, 8, 1, -1.0), "context_tokens must be 0 or more"),
    ],
)
def test_impossible_shapes_are_refused(shape: Any, said: str):
    with pytest.raises(ValueError, match=said):
        StepShape(*shape)


def test_shapes_of_depths():
    assert StepShape.of_depths([3, 3]) == StepShape.uniform(2, 3) == StepShape(2, 8, 3)
    assert StepShape.of_depths([0, 7, 7], 50.0) == StepShape(3, 17, None, 50.0)


def test_only_what_was_measured_has_a_time():
    only_full = StepTimes([point(StepShape.uniform(2, 7), 0.01)], max_draft_tokens=7, full_graph_depths={7})
    assert only_full.seconds(StepShape.uniform(4, 7)) == pytest.approx(0.02), "one point: proportional beyond it"
    with pytest.raises(ValueError, match="no point was measured of the kind of StepShape"):
        only_full.seconds(StepShape.uniform(2, 3))
