"""The process that stands for the engine core in `benchmarks.streams`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from benchmarks.streams import PACE, EngineProcess
from peagle.vllm.step_notes import STEPS_HEADER


@pytest.mark.parametrize(("arm", "told"), [("each-step", ["7,3", "7,3", "7,3"]), ("vllm", [None, None, None])])
def test_tokens_of_a_step_are_told_as_an_engine_with_drafts_tells_them(
    arm: str, told: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PACE, json.dumps({"step_ms": 1, "tokens": 4, "arm": arm}))
    engine = EngineProcess(tmp_path)
    engine._requests["a"] = SimpleNamespace(request_id="a", sampling_params=SamplingParams(max_tokens=10))
    engine._left["a"] = 10
    outputs = [output for _ in range(4) for output in engine._step()]
    assert [len(output.new_token_ids) for output in outputs] == [4, 4, 2]
    assert [output.finished for output in outputs] == [False, False, True]
    assert [(output.trace_headers or {}).get(STEPS_HEADER) for output in outputs] == told
