"""Data generation: which GPU a worker gets, what is counted, given prompts, and a killed run that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from peagle.embedded import prepare_target
from peagle.train.data import Conversations, check_data_fits, tokenizer_hash
from peagle.train.evaluate import load_answers
from peagle.train.recipe import Recipe
from peagle.vllm.generate import check_parts, collect, settings_hash, worker_environment


def test_workers_are_dealt_out_evenly() -> None:
    gpus = ["0", "1", "2", "3"]
    dealt = [worker_environment(worker, gpus)["CUDA_VISIBLE_DEVICES"] for worker in range(16)]
    assert dealt[:5] == ["0", "1", "2", "3", "0"]
    assert Counter(dealt) == dict.fromkeys(gpus, 4)
    assert worker_environment(0, gpus)["PATH"] == os.environ["PATH"]


def recipe(folder: Path, **generate: object) -> Recipe:
    """A recipe as a user writes it, of the embedded target."""
    path = folder / "recipe.yaml"
    settings = {
        "target": str(prepare_target()),
        "data": str(folder / "data"),
        "output": str(folder / "run"),
        "drafter": {"ptd_token_id": 16},
        "generate": generate,
    }
    path.write_text(yaml.safe_dump(settings))
    return Recipe.load(path)


def write_part(folder: Path, name: str, prompts: list[list[int]], **record: object) -> None:
    Conversations.from_lists(prompts, [[7, 8]] * len(prompts)).save_part(folder, name)
    if record:
        (folder / f"round-{name}.json").write_text(json.dumps(record))


def test_parts_of_other_settings_are_refused(tmp_path) -> None:
    first = settings_hash(recipe(tmp_path, num_workers=2))
    assert first == settings_hash(recipe(tmp_path, num_workers=4, num_rounds=3)), "more of the same may be added"
    second = settings_hash(recipe(tmp_path, temperature=1.3))
    assert first != second
    write_part(tmp_path, "00-000", [[1]], num_asked=3)
    write_part(tmp_path, "00-001", [[1]], num_asked=3, settings=first)
    check_parts(tmp_path, first)
    with pytest.raises(ValueError, match="part-00-001.npz was made with other settings"):
        check_parts(tmp_path, second)


def test_totals_are_those_of_the_parts_that_exist(tmp_path) -> None:
    write_part(tmp_path, "00-000", [[1, 2], [3]], num_asked=5, num_unfinished=1, worker=0)
    write_part(tmp_path, "01-000", [[3], [4], [3]], num_asked=6, worker=1)
    (tmp_path / "round-01-001.json").write_text('{"num_asked": 1000}')
    totals, rounds = collect(tmp_path)
    assert totals == {"num_asked": 11, "num_repeated_prompts": 2}, "a count that a part lacks has no total"
    assert len(rounds) == 2


@pytest.mark.engine
@pytest.mark.long
def test_a_killed_run_goes_on_where_it_was(tmp_path) -> None:
    """Two rounds of own user turns; killed after the first, a second start makes only the other. Then given prompts."""
    from tests.support.warm_engine import engine_environment

    environment = {**os.environ, **engine_environment(), "CI": "1"}
    file = tmp_path / "prompts.jsonl"
    conversation = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    file.write_text('{"prompt": "Count to ten."}\n' + json.dumps({"messages": conversation}) + "\n")
    engine = {"dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 16, "enforce_eager": True}
    engine["gpu_memory_utilization"] = 0.2  # of the machine's memory, on a CPU
    sizes = {"num_conversations": 12, "max_user_tokens": 40, "max_answer_tokens": 12}
    made = recipe(tmp_path, engine=engine, num_rounds=2, **sizes)
    command = [sys.executable, "-m", "deployments.cli", "generate", str(tmp_path / "recipe.yaml")]
    run = subprocess.Popen(command, start_new_session=True, env=environment)
    parts = [Path(made.data) / f"part-00-{number:03d}.npz" for number in range(2)]
    deadline = time.monotonic() + 300
    while not parts[0].exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert parts[0].exists()
    assert not parts[1].exists(), "the run was over before it was killed: nothing is tested"
    first = parts[0].read_bytes()
    subprocess.run(command, check=True, env=environment, timeout=300)
    assert parts[0].read_bytes() == first
    manifest = json.loads((Path(made.data) / "manifest.json").read_text())
    totals = manifest["totals"]
    data = Conversations.load(made.data)
    assert len(data) == totals["num_conversations"]
    assert data.num_answer_tokens == totals["num_answer_tokens"]
    dropped = sum(value for key, value in totals.items() if key.startswith("num_turns_"))
    assert totals["num_asked"] == 24
    assert totals["num_asked"] - dropped == totals["num_conversations"]
    assert totals["num_repeated_prompts"] == 0, "the second start wrote the user turns of the first again"
    ended = sum(int(tokens[-1]) == 2 for tokens, _ in data.documents())
    assert totals["num_unfinished"] == len(data) - ended
    check_data_fits(made.data, made.target_dir())
    assert manifest["tokenizer"] == tokenizer_hash(made.target_dir())
    out = tmp_path / "answers"
    subprocess.run([*command, "--prompts", str(file), "--out", str(out)], check=True, env=environment, timeout=300)
    answers = load_answers(out)
    assert (len(answers.data), answers.temperature) == (2, 0.0)
