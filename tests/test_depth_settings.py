"""The settings of the adaptive policy and of CUDA graphs: what is wrong is named with its key."""

import pytest
from pydantic import ValidationError

from cluster.settings import DepthSettings, check_depth
from cluster.step_time import default_step_times
from tests.test_settings import catalog, changed, problems_of  # noqa: F401 - a fixture

K_MAX = 7


@pytest.mark.parametrize(
    ("depth", "words"),
    [
        ({"objectives": {"chat": {"kind": "latency"}}}, ["depth.objectives", "write depth.policy: adaptive"]),
        ({"step_times": "no/such.json"}, ["depth.step_times", "adaptive"]),
        (
            {"policy": "adaptive", "by_workload": {"chat": 3}, "objectives": {"chat": {}}},
            ["depth.by_workload pins K of chat", "depth.objectives.chat"],
        ),
        ({"policy": "adaptive", "objectives": {"a b": {}}}, ["depth.objectives has the tag 'a b'"]),
        ({"policy": "adaptive", "step_times": "no/such.json"}, ["depth.step_times: no/such.json is no file"]),
    ],
)
def test_a_setting_that_cannot_be_meant_is_named(depth: dict, words: list[str]) -> None:
    problems = check_depth(DepthSettings.model_validate(depth), K_MAX)
    assert all(word in " ".join(problems) for word in words), problems


@pytest.mark.parametrize("objective", [{"kind": "fast"}, {"max_tpot_ms": 0.0}, {"weight": -1.0}, {"limit_ms": 3.0}])
def test_an_objective_is_strict(objective: dict) -> None:
    with pytest.raises(ValidationError):
        DepthSettings.model_validate({"policy": "adaptive", "objectives": {"x": objective}})


def test_step_times_of_another_k_max_are_refused(tmp_path) -> None:
    path = tmp_path / "times.json"
    depth = DepthSettings(policy="adaptive", step_times=str(path))
    default_step_times(5).save(path)
    (problem,) = check_depth(depth, K_MAX)
    assert "max_draft_tokens = 5, the drafter has 7" in problem
    default_step_times(K_MAX).save(path)
    assert check_depth(depth, K_MAX) == []
    path.write_text("{}")
    assert "depth.step_times" in check_depth(depth, K_MAX)[0]


def test_limits_of_time_become_seconds() -> None:
    depth = DepthSettings.model_validate({"objectives": {"x": {"kind": "latency", "max_tpot_ms": 40.0}}})
    assert depth.objectives["x"].objective().max_tpot_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target__full_graph_depths": [3]}, "a CPU has no CUDA graphs"),
        ({"target__bundle": {"GPU": 1.0}, "target__full_graph_depths": [3, 8]}, "has 8, outside 0..7"),
        ({"target__bundle": {"GPU": 1.0}, "target__full_graph_depths": []}, "is empty"),
        ({"drafter": ..., "depth": ..., "target__full_graph_depths": [3]}, "without a drafter"),
    ],
)
def test_graphs_that_cannot_be(settings: dict, words: str, catalog) -> None:  # noqa: F811 - the fixture
    (problem,) = problems_of(changed(**settings), catalog)
    assert problem.startswith("target.full_graph_depths")
    assert words in problem
