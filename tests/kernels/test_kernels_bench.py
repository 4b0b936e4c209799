"""The kernels' measuring program: its cases are what they are called, and it writes only what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import Attention, Preparation
from peagle.drafter.rows import build_rows


def test_without_a_gpu_only_twins_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--device", "cpu", "--quick", "--out", str(tmp_path / "kernels.json")])
    document = json.loads((tmp_path / "kernels.json").read_text())
    rows = [*document["preparation"], *document["attention"], *document["choice"]]
    assert [row["twin"]["call_us"] > 0 for row in rows] == [True] * 4
    assert not any("kernel" in row or "device_us" in row["twin"] for row in rows)
    assert document["conditions"]["hardware"]["num_cpus"] > 0
    assert capsys.readouterr().out.count("| decode B=1 | - | - |") == 1


@pytest.mark.parametrize("kind", ["decode", "chunk", "mixed"])
def test_preparations_have_the_rows_that_they_say(kind: str) -> None:
    case = Preparation.of(5, kind)
    given = case.tensors("cpu")
    del given["payload_RH"], given["mask_hidden_H"]
    rows = build_rows(
        **given, block_size=kernels.BLOCK_SIZE, mask_token_id=kernels.MASK_TOKEN, max_depth=kernels.MAX_DEPTH,
        num_rows=case.num_rows,
    )  # fmt: skip
    assert int(rows.first_row_B1[-1]) == case.num_rows
    assert bool((rows.slots_N >= 0).all()), "the block table is too short"
    assert bool((rows.sample_rows_BK >= 0).all())


def test_attention_reads_the_context_that_it_says() -> None:
    (q_NAD, k_cache, v_cache, table_BN, first_row, start, context, _), *others = Attention(3, 4, 64).tensors("cpu")
    assert not others
    assert q_NAD.shape[0] == int(first_row[-1]) == 12
    assert (context - start).tolist() == [4, 4, 4]
    assert k_cache.nbytes + v_cache.nbytes == Attention(3, 4, 64).kv_bytes
    assert table_BN.flatten().sort().values.tolist() == list(range(12))


@pytest.mark.gpu
def test_on_a_gpu_kernels_and_other_plans_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SWEPT_CONTEXT", 64)
    kernels.main(["--device", "cuda", "--quick", "--sweep", "--out", str(tmp_path / "kernels.json")])
    document = json.loads((tmp_path / "kernels.json").read_text())
    rows = [*document["preparation"], *document["attention"], *document["choice"]]
    assert all(row["kernel"]["device_us"] > 0 for row in rows)
    assert len(document["attention"][0]["sweep"]) >= 5
    assert torch.cuda.is_available()
