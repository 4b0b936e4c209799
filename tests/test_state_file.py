"""What is learned is kept in a file; a damaged one is put aside, and never stops the service."""

import json
import logging

import pytest

from cluster.control import DepthControl
from deployments.telemetry import StateFile
from tests.test_control import POLICY, control, report


def test_state_is_saved_and_found_again(tmp_path) -> None:
    path = tmp_path / "new" / "state.json"
    first, second = control(), control()
    first.observe([report()], 0.0)
    file = StateFile(str(path))
    file.save(first)
    assert not path.exists(), "not due yet"
    file.save(first, at_once=True)
    StateFile(str(path)).restore(second)
    assert second.book.survival("code").mean == pytest.approx(first.book.survival("code").mean)
    assert [one.name for one in path.parent.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": "other"})])
def test_a_damaged_file_is_put_aside(tmp_path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    found = control()
    with caplog.at_level(logging.WARNING):
        StateFile(str(path)).restore(found)
    assert found.book.workloads() == ()
    assert (tmp_path / "state.unusable").read_text() == text
    assert "depth.state" in caplog.text


def test_a_damaged_file_that_another_replica_puts_aside_first_stops_nothing(tmp_path) -> None:
    path = tmp_path / "state.json"
    path.write_text("[]")

    class Slow(DepthControl):
        def restore(self, snapshot: object) -> None:
            StateFile(str(path)).restore(control())  # the other replica, meanwhile
            super().restore(snapshot)

    StateFile(str(path)).restore(Slow(POLICY))
    assert [one.name for one in tmp_path.iterdir()] == ["state.unusable"]


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = StateFile(None)
    file.restore(control())
    file.save(control(), at_once=True)
    assert list(tmp_path.iterdir()) == []
