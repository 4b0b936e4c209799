"""Calibration: what counts as a step's time, the grid, the sources of an engine, and a table of a real one."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs

from cluster.step_time import StepPoint, StepShape, StepTimes
from peagle.vllm import calibrate
from peagle.vllm import calibrate as step_bench
from peagle.vllm.calibrate import Cell, Source, grid, read_config, report, source_of, to_point
from peagle.vllm.engine import GRAPHS_KEY, capture_sizes, cpu_environment, intel_openmp, openmp_preload
from peagle.vllm.trimming import StepClock, TimedStep

ROOT = Path(__file__).resolve().parents[1]


def scheduled(depths: dict[str, int], context: int = 100, new: int = 0, extra_tokens: int = 0) -> Any:
    """A step as vLLM's scheduler describes it: a request has its drafts and one token more."""
    tokens = {name: 1 + depth for name, depth in depths.items()}
    tokens[next(iter(tokens))] += extra_tokens
    return SimpleNamespace(
        scheduled_new_reqs=[object()] * new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), num_computed_tokens=[context] * len(depths)),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={name: [-1] * depth for name, depth in depths.items() if depth},
    )


def test_a_steps_time_is_the_interval_between_its_result_and_the_one_before():
    clock = StepClock()
    assert clock.arrived(10.0, scheduled({"a": 3, "b": 3})) is None, "nothing came before"
    assert clock.arrived(10.5, scheduled({"a": 3, "b": 3}, 64)) == TimedStep(0.5, 2, 8, 3, 64.0)
    assert clock.arrived(10.75, scheduled({"a": 3, "b": 0}, 65)) == TimedStep(0.25, 2, 5, None, 65.0)
    assert clock.arrived(11.0, scheduled({"a": 0, "b": 0}, 65)) == TimedStep(0.25, 2, 2, 0, 65.0)


def test_prompts_pauses_and_clocks_that_jump_give_no_time():
    clock = StepClock()
    clock.arrived(1.0, scheduled({"a": 3}))
    assert clock.arrived(2.0, scheduled({"a": 3}, new=1)) is None, "a new request"
    assert clock.arrived(3.0, scheduled({"a": 0, "b": 3}, extra_tokens=200)) is None, "a chunk of a prompt"
    assert clock.arrived(4.0, scheduled({"a": 3})) is not None
    clock.pause()
    assert clock.arrived(64.0, scheduled({"a": 3})) is None
    assert clock.arrived(63.0, scheduled({"a": 3})) is None, "a clock that went back"
    assert clock.arrived(63.0, scheduled({"a": 3})) is None, "a clock that stood still"
    assert clock.arrived(63.5, scheduled({"a": 3})) == TimedStep(0.5, 1, 4, 3, 100.0)


@pytest.mark.parametrize("step", [TimedStep(0.0067123, 8, 32, 3, 512.5), TimedStep(1.5, 2, 9, None, 0.0)])
def test_a_timed_step_travels_as_text(step):
    assert TimedStep.decode(step.encode()) == step


@pytest.mark.parametrize("text", ["", "0.1 2 3", "0.1 2 x 3 4", "0.1 2 3 4 5 6"])
def test_other_text_is_no_timed_step(text):
    with pytest.raises(ValueError):
        TimedStep.decode(text)


def test_grid_has_every_batch_and_depth_some_mixed_and_a_few_contexts():
    cells = grid([4, 1, 2], [0, 3, 7], [128, 1024])
    first = [cell for cell in cells if cell.context_tokens == 128]
    assert {cell.depths for cell in first if len(set(cell.depths)) == 1} == {
        (depth,) * size for depth in (0, 3, 7) for size in (1, 2, 4)
    }
    assert {cell.depths for cell in first if len(set(cell.depths)) > 1} == {
        (7, 0),
        (7, 6),
        (7, 7, 0, 0),
        (7, 7, 7, 6),
    }
    assert {cell.depths for cell in cells if cell.context_tokens == 1024} == {
        (depth,) * size for depth in (0, 7) for size in (1, 2, 4)
    }
    assert len(cells) == len(set(cells)) == 9 + 4 + 6
    assert len(grid([1, 2], [0, 7], [64], mixed="none")) == 4
    halves = {cell.depths for cell in grid([4], [0, 3, 7], [64], mixed="many")}
    assert {(7, 7, 0, 0), (7, 7, 3, 3), (3, 3, 0, 0), (7, 7, 7, 6)} <= halves
    assert grid([1, 2], [0], [64]) == [Cell((0,), 64), Cell((0, 0), 64)], "an engine without drafts"


def test_a_cell_takes_only_steps_of_its_shape():
    cell = Cell((7, 7, 6), 128)
    assert cell.matches(TimedStep(0.1, 3, 23, None, 150.0))
    assert not cell.matches(TimedStep(0.1, 3, 24, 7, 150.0))
    assert not cell.matches(TimedStep(0.1, 2, 23, None, 150.0))
    assert Cell((3, 3), 128).matches(TimedStep(0.1, 2, 8, 3, 150.0))


def test_a_point_is_median_p95_and_mean_context():
    steps = [TimedStep(0.01 * number, 2, 8, 3, 100.0 + number) for number in range(1, 102)]
    point = to_point(Cell((3, 3), 100), [steps])
    assert point == StepPoint(StepShape(2, 8, 3, 151.0), pytest.approx(0.51), pytest.approx(0.96), 101)
    with pytest.raises(ValueError, match="2 requests at K = 3, context 100: 4 timed steps"):
        to_point(Cell((3, 3), 100), [steps[:2], steps[2:4]])


def test_a_slow_round_does_not_count():
    """Together the rounds would have a median of 0.03, which no step took."""
    fast = [TimedStep(0.02, 2, 8, 3, 100.0)] * 8
    slow = [TimedStep(0.04, 2, 8, 3, 300.0)] * 8
    point = to_point(Cell((3, 3), 100), [slow, fast, slow[:4]])
    assert point == StepPoint(StepShape(2, 8, 3, 100.0), 0.02, 0.04, 20)
    # Steps that are too few in every round count together.
    assert to_point(Cell((3, 3), 100), [fast[:3], slow[:4]]).median_s == 0.04


def flags(*words: str) -> argparse.Namespace:
    return calibrate._parser().parse_args([*words, "--out", "x.json"])


def test_an_engine_comes_from_a_services_yaml_and_flags_win():
    source = source_of(flags(str(ROOT / "configs/local-colocated.yaml")))
    assert (source.target, source.head) == ("smollm2-135m-instruct", "smollm2-135m-instruct")
    assert source.max_draft_tokens == 7
    assert source.engine["dtype"] == "float32"
    assert source.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    words = ["--head", "/other", "--engine", "max_num_seqs=4", "load_format=dummy", "--synthetic-acceptance", "0.8"]
    other = source_of(flags(str(ROOT / "configs/local-colocated.yaml"), *words))
    assert (other.head, other.engine["max_num_seqs"], other.engine["load_format"]) == ("/other", 4, "dummy")
    assert other.speculative == {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8]}


def test_an_engine_without_speculation():
    expected = Source("t", None, engine={})
    assert source_of(flags("--target", "t", "--head", "none", "--max-draft-tokens", "7")) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a config, or --target and --head"),
        (["--target", "t"], "give a config, or --target and --head"),
        (["--target", "t", "--head", "h", "--engine", "max_num_seqs"], "--engine 'max_num_seqs': write KEY=VALUE"),
        (["/nowhere.yaml"], "config /nowhere.yaml: cannot be read"),
        ([str(ROOT / "configs/local.yaml")], "drafter.placement is remote"),
    ],
)
def test_flags_that_name_no_engine_are_refused(words, said):
    with pytest.raises(ValueError, match=said):
        source_of(flags(*words))


def test_too_few_steps_for_a_point_are_refused_before_an_engine_starts(monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: pytest.fail("an engine was started"))
    few = ["--steps", "2", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["calibrate", "--target", "t", "--head", "h", *few, "--out", "x.json"])
    monkeypatch.setattr(calibrate, "cpu_environment", dict)
    with pytest.raises(SystemExit):
        calibrate.main()
    assert "--steps 2 in --rounds 2: a batch needs 5 timed steps or more" in capsys.readouterr().err


def test_synthetic_acceptance_on_a_cpu_is_refused_before_an_engine_starts():
    source = source_of(flags("--target", "t", "--head", "h", "--synthetic-acceptance", "0.8", "0.6"))
    with pytest.raises(ValueError, match="--synthetic-acceptance: vLLM has it on GPUs only"):
        calibrate.start(source, on_cpu=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("applications: {", "cannot be read as YAML"),
        ("- 1", r"there is no applications\[0\].args"),
        ("applications: []", r"there is no applications\[0\].args"),
        ("applications: [{args: {model: {}}}]", "model.source is missing"),
        ("applications: [{args: {model: x}}]", "model must be a mapping"),
        ("applications: [{args: {model: {source: x}, drafter: {max_draft_tokens: 3}}}]", "drafter.head is missing"),
    ],
)
def test_a_yaml_without_an_engine_is_refused_by_key(tmp_path: Path, text: str, said: str):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"service.yaml: .*{said}"):
        read_config(path)


def test_cpu_environment_keeps_what_is_set():
    assert cpu_environment({})["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    kept = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "0", "LD_PRELOAD": "/x/libiomp5.so"}
    assert cpu_environment(kept) == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.mark.skipif(intel_openmp() is None, reason="intel-openmp is not installed")
def test_one_openmp_runtime_alone_is_loaded():
    library = str(intel_openmp())
    assert openmp_preload("") == library
    assert openmp_preload("/x/torch.libs/libgomp-947d5fa1.so.1.0.0:/x/libtcmalloc.so") == f"{library}:/x/libtcmalloc.so"
    assert openmp_preload("/x/libiomp5.so /x/libgomp.so.1") == "/x/libiomp5.so"
    assert cpu_environment({"LD_PRELOAD": "/x/libgomp.so.1"})["LD_PRELOAD"] == library


def engine_config(max_num_seqs: int, max_draft_tokens: int, tiers: tuple[int, ...] = ()) -> Any:
    """The fields of vLLM's configuration that say which graphs are captured."""
    return SimpleNamespace(
        num_speculative_tokens=max_draft_tokens,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        compilation_config=CompilationConfig(),
        additional_config={GRAPHS_KEY: {"depths": list(tiers)}} if tiers else {},
    )


def test_captured_sizes_are_whole_requests_of_the_deepest_k():
    raw = (1, 2, 4, 8, 16, 24, 32, 40, 48)
    sizes = capture_sizes(engine_config(3, 5), raw, "FULL_AND_PIECEWISE")
    assert sizes == {None: [6, 12, 18, 24, 36, 42, 48], 5: [6, 12, 18]}
    assert capture_sizes(engine_config(3, 5), raw, "PIECEWISE") == {None: list(raw)}
    assert capture_sizes(engine_config(3, 5), raw, "NONE") == {}
    assert capture_sizes(engine_config(3, 5), (), "FULL_AND_PIECEWISE") == {}
    assert capture_sizes(engine_config(16, 0), raw, "FULL_AND_PIECEWISE") == {None: list(raw), 0: [1, 2, 4, 8, 16]}


def test_tiers_have_sizes_of_their_own():
    sizes = capture_sizes(engine_config(10, 7, tiers=(3, 7)), (1, 2, 4, 8, 16, 24, 32, 40), "FULL_AND_PIECEWISE")
    assert sizes[3] == [4, 8, 12, 16, 20, 24, 28, 32, 40]
    assert sizes[7] == [8, 16, 24, 32, 40]


def test_report_shows_the_fit_and_what_it_says_of_points_left_out():
    points = [
        StepPoint(StepShape.uniform(size, depth, 64.0), 0.001 * size * (1 + depth), 0.01 * size * (1 + depth), 30)
        for size in (1, 2, 4)
        for depth in (0, 3, 7)
    ]
    text = report(StepTimes(points, max_draft_tokens=7))
    assert "       4      32  7        64      32.00   320.00      32.00" in text
    assert "left out, inside: " in text


class AsyncArgs(EngineArgs):
    """Asynchronous scheduling, which vLLM turns off on a CPU as not worth it. It works there all the same."""

    def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
        config = super().create_engine_config(*args, **kwargs)
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = step_bench.TIMED_ASYNC_SCHEDULER
        return config


@pytest.mark.engine
@pytest.mark.parametrize("is_async", [False, True])
def test_a_real_engine_is_measured_and_its_table_fits_it_and_no_other(tmp_path: Path, monkeypatch: Any, is_async: bool):
    out = tmp_path / "made" / "table.json"
    words = ["--batch-sizes", "1", "2", "--depths", "0", "3", "--contexts", "16", "--steps", "6", "--warmup", "2"]
    config = str(ROOT / "configs/local-colocated.yaml")
    monkeypatch.setattr(sys, "argv", ["calibrate", config, *words, "--out", str(out)])
    if is_async:
        monkeypatch.setattr(step_bench, "EngineArgs", AsyncArgs)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"):
        monkeypatch.setenv(name, os.environ.get(name, cpu_environment({}).get(name, "")))  # main() sets them: undone
    calibrate.main()
    times = StepTimes.load(out)
    shapes = {(p.shape.num_requests, p.shape.num_tokens, p.shape.uniform_depth) for p in times.points}
    assert shapes == {(1, 1, 0), (1, 4, 3), (1, 8, 7), (2, 2, 0), (2, 8, 3), (2, 16, 7), (2, 9, None), (2, 15, None)}
    assert all(point.num_steps == 12 and point.shape.context_tokens >= 16 for point in times.points)
    conditions = json.loads(out.read_text())["conditions"]
    assert (conditions["gpu"], conditions["async_scheduling"]) == ("cpu", is_async)
    assert "hidden_size=576" in conditions["model"]
    assert "in one pass" in conditions["head"]
    times.check_fits(conditions)
    with pytest.raises(ValueError, match="head is None here"):
        times.check_fits({**conditions, "head": None})
