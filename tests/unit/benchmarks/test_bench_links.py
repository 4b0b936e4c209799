"""The benchmark of links measures real links to a drafter's process, with and without its bookkeeping."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import links

FEW = ["--requests", "1", "3", "--steps", "6", "--warmup", "2", "--hidden-size", "8", "--device", "cpu"]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [pytest.param([], marks=pytest.mark.long), ["--bookkeeping"]], ids=["copying", "bookkeeping"]
)
def test_every_path_and_load_has_its_round_trip(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["links", *FEW, *flags, "--out", str(tmp_path / "out.json")])
    links.main()
    rows = json.loads((tmp_path / "out.json").read_text())["round_trips"]
    found = [(row["path"], row["num_requests"]) for row in rows]
    assert found == [(path, num) for path in ("shared memory", "tcp") for num in (1, 3)]
    assert all(row["service_mean_ms"] > 0 and 0 < row["host_median_ms"] < row["median_ms"] for row in rows)


def test_steps_beyond_the_context_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["links", "--steps", "2000"])
    with pytest.raises(SystemExit):
        links.main()
    assert "beyond a context of 2048 tokens" in capsys.readouterr().err
