"""The measurement of the pass: both layouts of the same requests, and a file with its conditions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import parallel_pass
from benchmarks.parallel_pass import SHAPES, Load, make_batch, random_drafter

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


def test_a_head_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pass", "--out", "o.json", "--device", "cpu", "--head", "nowhere"])
    with pytest.raises(SystemExit, match="nowhere"):
        parallel_pass.main()
