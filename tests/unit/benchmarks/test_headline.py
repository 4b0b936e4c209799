"""The headline's arms and counters, on figures small enough to check by hand."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.headline import Counts, command, parse_arm, parse_counters, prepare, speculative_config, verification
from benchmarks.humaneval import pass_at_1
from benchmarks.prompts import COMPLETE, human_eval_problems
from deployments.serve_config import read_config
from peagle.heads import prepare_head

HEADS = {"peagle_head": ["smollm2-135m-instruct"], "eagle3_head": ["smollm2-135m-instruct-eagle3"]}


def test_every_arm_becomes_one_of_vllms_settings_or_a_service(tmp_path: Path, target_dir: Path) -> None:
    engine = '{"dtype": "float32"}'
    given = argparse.Namespace(**HEADS, shape=None, gpus=[], engine=engine, folder=tmp_path, model=target_dir)
    found = {text: parse_arm(text, given) for text in ("none", "eagle3-3", "stock-7", "ngram-5", "eagle3-3x4")}
    settings = {text: speculative_config(arm, "/x") for text, arm in found.items()}
    assert settings["none"] == {}
    one_by_one = {"method": "eagle3", "model": "/x", "num_speculative_tokens": 3, "parallel_drafting": False}
    assert settings["eagle3-3"] == one_by_one
    assert settings["stock-7"]["parallel_drafting"]
    assert settings["ngram-5"]["prompt_lookup_max"] >= settings["ngram-5"]["prompt_lookup_min"]
    line = command(given, found["stock-7"], 8000)
    head = prepare_head(HEADS["peagle_head"][0], target_dir)
    assert json.loads(line[line.index("--speculative-config") + 1]) == {**settings["stock-7"], "model": str(head)}
    line = command(given, found["eagle3-3x4"], 8000)
    assert line[line.index("--api-server-count") + 1] == "4"
    line = command(given, parse_arm("eagle3-3r4", given), 8000)
    assert line[line.index("--data-parallel-size") + 1] == "4"
    for text in ("ours-7", "ours-0", "remote-7r3", "ours-7sx4"):
        arm = parse_arm(text, given)
        assert str(arm) == text
        _, checked = read_config(Path(command(given, arm, 8000)[-1]))
        assert checked.target.front_ends == (4 if text.endswith("x4") else 1)
        assert (checked.drafter is None) == (text == "ours-0")
        assert checked.drafter is None or checked.drafter.is_remote == (text == "remote-7r3")
        assert checked.target.num_replicas == (3 if text == "remote-7r3" else 1)
    given.peagle_head.append(given.eagle3_head[0])
    assert prepare(given, parse_arm("ours-7h2", given))[1] == prepare(given, parse_arm("eagle3-7", given))[1]
    block = tmp_path / "block"
    block.mkdir()
    (block / "config.json").write_text('{"speculators_model_type": "dflash"}')
    given.peagle_head[1] = str(block)
    line = command(given, parse_arm("stock-7h2", given), 8000)
    expected = {"num_speculative_tokens": 7, "method": "dflash", "model": str(block)}
    assert json.loads(line[line.index("--speculative-config") + 1]) == expected
    _, checked = read_config(Path(command(given, parse_arm("ours-7h2", given), 8000)[-1]))
    assert checked.drafter is not None
    assert checked.drafter.method == "dflash"
    with pytest.raises(ValueError, match="ours-7h3 needs --peagle-head, 3 of them"):
        parse_arm("ours-7h3", given)
    with pytest.raises(ValueError, match="ngram-5h2"):
        parse_arm("ngram-5h2", given)


def test_acceptance_by_vllms_counters_and_by_ours() -> None:
    theirs = """vllm:spec_decode_num_drafts_total{engine="0"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 14.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 2.0
"""
    expected = {"accepted_length": 2.4, "drafts_a_step": 3.0, "acceptance_rates": [0.8, 0.4, 0.2]}
    assert verification(parse_counters(theirs)) == expected
    # Of 10 steps 4 verify one draft: 6 of 10, then 3 of the 5 that had a second one behind an accepted first.
    ours = """peagle_verification_steps_total{workload="a"} 10.0
peagle_draft_tokens_total{workload="a",draft_position="1"} 10.0
peagle_draft_tokens_total{workload="a",draft_position="2"} 6.0
peagle_reached_draft_tokens_total{workload="a",draft_position="1"} 10.0
peagle_reached_draft_tokens_total{workload="a",draft_position="2"} 5.0
peagle_accepted_tokens_total{workload="a",draft_position="1"} 6.0
peagle_accepted_tokens_total{workload="a",draft_position="2"} 3.0
"""
    found = verification(parse_counters(ours) - Counts())
    assert found == {"accepted_length": 1.9, "drafts_a_step": 1.6, "acceptance_rates": [0.6, 0.36]}
    assert verification(parse_counters("")) == {}


def test_pass_at_1_runs_the_problems_own_tests() -> None:
    first, second, *_ = human_eval_problems()
    prompts = [COMPLETE + problem["prompt"] for problem in (first, second, first, second)]
    block = f"Here it is:\n\n```python\n{first['prompt']}{first['canonical_solution']}```\nIt compares all pairs."
    wrong = f"```python\ndef {second['entry_point']}(text):\n    return []\n```"
    answers = [block, second["canonical_solution"], "while True: pass\0", wrong]
    assert pass_at_1([*prompts, "Hello"], [*answers, "Hi"]) == 0.5
    assert pass_at_1(["Hello"], ["Hi"]) is None
