"""No request stops the service: each named hostile request beside a canary that must be right, and, in minutes, 1,000
generated ones (`python -m benchmarks.battery`)."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from benchmarks.battery import (
    MAX_S,
    Watch,
    battery,
    hostile_bodies,
    make_document,
    make_inputs,
    problems_of,
    send,
    with_few_tokens,
)
from benchmarks.hostile import NEIGHBOURS, UNFINISHED, hostile_requests, judged
from cluster.settings import LimitSettings

if TYPE_CHECKING:
    from tests.support.service_harness import Service

CONFIG = Path(__file__).parents[2] / "configs" / "local.yaml"
HOSTILE = hostile_requests(num_bytes=2**18)
MAX_GROWTH_MIB = 100.0
"""Growth of a process that one request may cause, beyond the bodies that the limits let one caller hold."""


def test_generated_requests_repeat_and_are_short() -> None:
    first, second = (hostile_bodies("chat", ["stop", "max_tokens", "seed"], 40, number=3) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert len({json.dumps(body) for body in first}) > 30
    assert with_few_tokens({"max_tokens": 2000.0, "min_tokens": 50}) == {"max_tokens": 4, "min_tokens": 4}
    assert with_few_tokens({"max_tokens": 2**31}) == {"max_tokens": 2**31}
    assert with_few_tokens({"max_tokens": None})["max_tokens"] == 4
    assert with_few_tokens([1]) == [1]


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (httpx.Response(200, json={}), ""),
        (httpx.Response(429, json={}), "not in OpenAI's form"),
        (httpx.Response(500, text="Internal Server Error"), "status 500"),
        (httpx.Response(400, json={"error": {"message": "", "type": "", "param": None, "code": None}}), ""),
        (httpx.Response(400, json={"detail": "no"}), "not in OpenAI's form"),
    ],
)
def test_an_answer_is_judged_by_its_status_and_form(response: httpx.Response, problem: str) -> None:
    assert judged(response).problem == problem


@pytest.fixture(scope="module")
def watch(application: "Service") -> Iterator[Watch]:
    """Of an engine that has loaded what all kinds of requests need: that stays, whoever asks first."""
    with httpx.Client(base_url=application.url, timeout=240) as client:
        HOSTILE["all kinds of neighbours"](client)
    with Watch(application.url) as watch:
        yield watch


@pytest.mark.service
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_answered_right_beside_a_canary_that_is_too(
    watch: Watch, application: "Service", name: str
) -> None:
    num_requests = len(NEIGHBOURS) if name == "all kinds of neighbours" else 1
    held_mib = LimitSettings().max_body_bytes_in_flight / 2**21 if name == UNFINISHED else 0.0
    growths = []
    # What a request needs it needs each time. What a process was about to take anyway comes once.
    while len(growths) < 3 and min(growths, default=math.inf) >= MAX_GROWTH_MIB * num_requests + held_mib:
        with httpx.Client(base_url=application.url, timeout=240) as client, ThreadPoolExecutor(1) as pool:
            canary = pool.submit(watch.ask_canary)
            row = send(name, HOSTILE[name], client)
            assert canary.result() == watch.text
        found = watch.report(row["start_s"], row["end_s"])
        assert row["problem"] == "", row["answer"]
        assert found["ended"] == []
        growths.append(found["growth"]["mib"])
    assert min(growths) < MAX_GROWTH_MIB * num_requests + held_mib, (growths, found["growth"])


@pytest.mark.long
@pytest.mark.service
@pytest.mark.timeout(2 * MAX_S)
def test_no_request_of_a_battery_stops_the_service() -> None:
    inputs = make_inputs(make_document(CONFIG), 1000)
    found = battery(CONFIG, inputs, hostile_requests())
    assert found["inputs"]["num_together"] == 1000 + len(hostile_requests())
    assert problems_of(found) == []
