"""The stored references are what the target says today."""

import json
from pathlib import Path

import pytest

from tests.support.engine_cases import engine_settings
from tests.support.engine_harness import Job, engine_of, reference_document, target_kwargs
from tests.support.references import load

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_the_target_still_says_what_is_stored(target_dir: Path, environment: None) -> None:
    results = load(target_dir)
    if not results:
        pytest.skip("stored for another target or CPU: every test asks an engine")
    jobs = [Job(prompt, num, sampling=sampling) for prompt, num, sampling in map(json.loads, results)]
    with engine_of(target_kwargs(target_dir, engine_settings(200))) as engine:
        found = engine.run(jobs)
    assert [reference_document(result) for result in found] == list(results.values())
