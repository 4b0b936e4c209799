"""schemathesis asks the running service by its own OpenAPI document, with what fits it and what does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service_harness import running_service

MAX_TIME_S = 240
SHORT = {"override_generation_config": {"max_new_tokens": 8}}
"""Answers of a few tokens: by default one has as many as the context holds."""
EXCLUDED = (
    "positive_data_acceptance",  # no schema says what fits the context, the vocabulary, or a grammar
    "negative_data_rejection",  # pydantic takes "1" for 1
)


@pytest.mark.long
@pytest.mark.service
def test_no_request_gets_what_the_document_does_not_say(tmp_path: Path) -> None:
    with running_service(engine=SHORT) as service:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{service.url}/openapi.json"]
        command += ["--max-time", str(MAX_TIME_S), "--request-timeout", "60", "--seed", "1", "--continue-on-failure"]
        command += ["--exclude-checks", ",".join(EXCLUDED), "--warnings", "off", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * MAX_TIME_S)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert service.ask(max_tokens=1).status_code == 200
