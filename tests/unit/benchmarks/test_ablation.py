"""A plan of trainings: real runs of the trainer, one of which fails, and the table of all."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.ablation import Plan, ablation_table, collect, environment, finished, run_all
from peagle.train.data import Conversations
from tests.support.small_run import write_small_run


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = write_small_run(tmp_path_factory.mktemp("small"))
    raw = {
        "base": str(folder / "recipe.yaml"),
        "output": str(folder / "ablation"),
        "common": ["schedule.max_steps=4", "log_every_steps=2"],
        "runs": {
            "base": [],
            "broken": ["drafter.aux_layer_ids=[1, 2, 60]", "target=/nowhere"],
            "half": {"overrides": ["drafter.num_layers=1"], "data_share": 0.5},
        },
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(raw))
    return Plan.load(folder / "plan.yaml")


@pytest.mark.long
def test_a_failed_run_is_recorded_and_the_rest_is_finished(plan: Plan) -> None:
    names = list(plan.runs)
    assert run_all(plan, names, [None], max_minutes=0) == dict.fromkeys(names, "waiting")
    expected = {"base": "finished", "broken": "failed", "half": "finished"}
    assert run_all(plan, names, ["2", "3"]) == expected
    document = json.loads(json.dumps(collect(plan)))
    runs = document["runs"]
    assert {name: run["status"] for name, run in runs.items()} == expected
    assert {name: run["gpu"] for name, run in runs.items() if name != "half"} == {"base": "2", "broken": "3"}
    assert any("/nowhere" in line for line in runs["broken"]["log"])
    assert runs["base"]["num_steps"] == 4
    assert runs["base"]["last_logged"]["step"] == 4
    assert set(runs["half"]["groups"]["all"]["acceptance_length"]) == {"1", "2", "3", "4"}
    shared = Conversations.load(plan.data_folder(0.5))
    assert len(shared) == 12
    assert runs["half"]["num_answer_tokens"] == shared.num_answer_tokens < runs["base"]["num_answer_tokens"]
    lines = ablation_table(document).splitlines()
    assert len(lines) == 5
    assert "failed" in lines[3]

    made = Path(plan.folder("base"), "head", "provenance.json")
    before = made.stat().st_mtime_ns
    assert run_all(plan, ["base"], [None]) == {"base": "finished"}
    assert made.stat().st_mtime_ns == before, "a finished run was trained again"
    changed = plan.model_copy(update={"common": ["schedule.max_steps=5"]})
    with pytest.raises(ValueError, match="schedule"):
        finished(changed, "base")


def test_a_run_sees_its_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment("2")["CUDA_VISIBLE_DEVICES"] == "2"
    assert environment(None)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"runs": {"a/b": []}}, "become folders"),
        ({"runs": {"one": {"overides": []}}}, "overides"),
        ({"runs": {"one": {"data_share": 0}}}, "data_share"),
        ({}, "runs"),
    ],
)
def test_wrong_plans_name_the_key(tmp_path: Path, raw: dict, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"base": "recipe.yaml", "output": "out", **raw}))
    with pytest.raises(ValueError, match=message):
        Plan.load(path)


def test_shipped_plan_is_valid() -> None:
    from peagle.train.recipe import Recipe

    plan = Plan.load(Path("configs/train/ablation.yaml"))
    recipes = {name: Recipe.load(plan.base, plan.overrides(name)) for name in plan.runs}
    dumps = {name: recipe.model_dump_json(exclude={"output"}) for name, recipe in recipes.items()}
    assert len(plan.runs) > 20
    same_as_base = [name for name in dumps if dumps[name] == dumps["base"] and name != "base"]
    # The base's own values are listed by name too, so that a changed base does not lose them.
    assert set(same_as_base) <= {"decay-0.9", "reach-1"}
