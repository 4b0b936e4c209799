"""No request stops the service: named hostile requests beside a canary that must be right, and, in minutes, 1,000
generated ones (`python -m benchmarks.battery`)."""

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.battery import MAX_S, Watch, battery, make_document, make_inputs, problems_of, send_together
from benchmarks.hostile import hostile_requests, judged

if TYPE_CHECKING:
    from tests.support.service_harness import Service

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
MAX_GROWTH_MIB = 1000.0
"""Growth of a process by all named requests. One that nothing limits takes gigabytes."""


def test_an_answer_is_judged_by_its_status_and_form() -> None:
    for response, problem in (
        (httpx.Response(200, json={}), ""),
        (httpx.Response(429, json={}), "not in OpenAI's form"),
        (httpx.Response(500, text="Internal Server Error"), "status 500"),
        (httpx.Response(400, json={"error": {"message": "", "type": "", "param": None, "code": None}}), ""),
        (httpx.Response(400, json={"detail": "no"}), "not in OpenAI's form"),
    ):
        assert judged(response).problem == problem


@pytest.mark.service
def test_hostile_requests_are_answered_right_beside_a_canary_that_is_too(application: "Service") -> None:
    """All named ones, from several clients at once. They are shuffled, so that the clients do not all wait for
    grammars at the same time: two are compiled at once."""
    named, limits = hostile_requests(num_bytes=2**18), httpx.Limits(max_connections=None, keepalive_expiry=0.5)
    requests = list(named.items())
    random.Random(0).shuffle(requests)
    with httpx.Client(base_url=application.url, timeout=240, limits=limits) as client, Watch(application.url) as watch:
        started_s = time.monotonic()
        rows = send_together(requests, client, started_s + 400)
        watch.wait_until_well()
        found = watch.report(started_s, time.monotonic())
    assert {row["name"]: (row["problem"], row["answer"]) for row in rows if row["problem"]} == {}
    assert len(rows) == len(named)
    assert (found["canary"]["problems"], found["health"]["problems"], found["ended"]) == ({}, {}, [])
    assert found["growth"]["mib"] < MAX_GROWTH_MIB, found["growth"]


@pytest.mark.long
@pytest.mark.service
@pytest.mark.timeout(2 * MAX_S)
def test_no_request_of_a_battery_stops_the_service() -> None:
    inputs = make_inputs(make_document(CONFIG), 1000)
    found = battery(CONFIG, inputs, hostile_requests())
    assert found["inputs"]["num_together"] == 1000 + len(hostile_requests())
    assert problems_of(found) == []
