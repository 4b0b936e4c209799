"""The measurement of partitioning, on a tiny shape: all cases are there, agree, and one without memory is recorded."""

import json
import sys

import pytest
import torch

from benchmarks.algorithm_1 import PublishedPartition
from benchmarks.partition import main, table


def run(monkeypatch: pytest.MonkeyPatch, path, *options: str) -> dict:
    command = ["--shape", "tiny", "--device", "cpu", "--layers", "2", "--depths", "4", "--repeats", "1"]
    command += ["--chunk", "64", "--check-tokens", "40", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["partition", *command, *options])
    main()
    return json.loads(path.read_text())


@pytest.mark.long
def test_all_cases_agree(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    found = run(monkeypatch, tmp_path / "found.json", "--tokens", "48", "64", "--segments", "1", "2", "4")
    cases = {(case["num_tokens"], case["num_segments"], case["method"]): case for case in found["cases"]}
    names = [(1, "whole"), *((s, method) for method in ("kept", "recomputed") for s in (2, 4))]
    assert list(cases) == [(num_tokens, *name) for num_tokens in (48, 64) for name in names]
    for (num_tokens, num_segments, method), case in cases.items():
        assert case["tokens_per_s"] == pytest.approx(num_tokens / case["seconds"])
        assert (method == "whole") == ("difference" not in case)
        assert 0 < case.get("difference", 1e-7) < 1e-5
        # Algorithm 1 computes 0 + 1/4 + 2/4 + 3/4 of the offset-0 rows once more.
        extra = num_tokens * (num_segments - 1) // 2 if method == "recomputed" else 0
        assert case["rows_computed"] == case["num_rows"] + extra
    assert 0 < found["check"]["float32_kept"] < 1e-5
    assert found["made"]["versions"]["torch"] == torch.__version__
    assert len(table(found).splitlines()) == 2 + len(cases)


def test_case_without_memory_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    backward = PublishedPartition.backward

    def scarce(self: PublishedPartition, *args: object) -> None:
        if args[1].rows.num_tokens == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        backward(self, *args)

    monkeypatch.setattr(PublishedPartition, "backward", scarce)
    found = run(monkeypatch, tmp_path / "found.json", "--tokens", "64", "--segments", "1", "4", "--method", "kept")
    whole, kept = found["cases"]
    assert whole["out_of_memory"]
    assert "seconds" not in whole
    assert kept["seconds"] > 0
    assert "out of memory" in table(found)


def test_segments_beyond_the_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--segments: \[65\] must be in 1..64"):
        run(monkeypatch, tmp_path / "found.json", "--tokens", "64", "128", "--segments", "65")
