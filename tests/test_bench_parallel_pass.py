"""The measurement of the pass: both layouts of the same requests, and a file with its conditions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import parallel_pass
from benchmarks.parallel_pass import SHAPES, Load, make_batch, random_drafter
from cluster.capacity import PassTimes

LOAD = Load(depth=3, accepted=1.0, context=20)


def test_layouts_differ_in_rejected_rows_only() -> None:
    drafter = random_drafter("135m", LOAD.depth, "cpu", torch.float32)
    dropped, padded = (make_batch(drafter.config, LOAD, 16, name, torch.float32) for name in ("dropped", "padded"))
    assert int(padded.rows_B().sum()) == 16 * (4 + 2)
    assert 16 * (1 + 2) < int(dropped.rows_B().sum()) < 16 * (4 + 2)
    assert len(dropped.next_tokens_R) == len(padded.next_tokens_R) == 16 * 4


def test_shapes_are_those_of_the_targets() -> None:
    configs = {name: random_drafter(name, 3, "meta", torch.bfloat16).config for name in SHAPES}
    assert configs["8b"].num_attention_heads * configs["8b"].head_dim == configs["8b"].hidden_size
    assert {name: config.draft_vocab_size for name, config in configs.items()} == dict.fromkeys(SHAPES, 32_000)


@pytest.mark.timeout(120)
def test_the_file_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pass.json"
    command = f"pass --out {out} --device cpu --shapes 135m --batches 1 --depth 2 --context 8 --calls 1"
    monkeypatch.setattr(sys, "argv", command.split())
    parallel_pass.main()
    written = json.loads(out.read_text())
    assert written["settings"]["context"] == 8
    assert written["conditions"]["versions"]["torch"] == torch.__version__
    assert [row["layout"] for row in written["passes"]["135m"]] == ["dropped", "padded"]
    assert all(row["pass_ms"] > 0 for row in written["passes"]["135m"])


@pytest.mark.timeout(120)
def test_a_heads_pass_times_are_what_autoscaling_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, times = Path("peagle/heads/smollm2-135m-instruct"), tmp_path / "times.json"
    command = f"pass --out {tmp_path / 'o.json'} --head {head} --pass-times-out {times} --device cpu --batches 1 2"
    monkeypatch.setattr(sys, "argv", f"{command} --depth 2 --context 8 --calls 1".split())
    parallel_pass.main()
    found = PassTimes.load(times)
    rows = json.loads((tmp_path / "o.json").read_text())["passes"][str(head)]
    dropped = [row["pass_ms"] for row in rows if row["layout"] == "dropped"]
    assert [(point.num_requests, point.median_s) for point in found.points] == [
        (num, pytest.approx(ms / 1e3)) for num, ms in zip((1, 2), dropped, strict=True)
    ]
    assert found.conditions["head"] == str(head)
    assert found.measured
    assert found.passes_per_s() > 0


@pytest.mark.parametrize("more", ["--pass-times-out t.json", "--head nowhere"])
def test_pass_times_need_a_head_that_is_there(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", f"pass --out o.json --device cpu {more}".split())
    with pytest.raises(SystemExit, match="nowhere|2"):
        parallel_pass.main()
