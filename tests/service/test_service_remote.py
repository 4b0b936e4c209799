"""The real service with `placement: remote`: drafts come from another process, which may die."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from deployments import DRAFTER_NAME
from tests.support.service_harness import PROMPTS, Service, wait_for

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def service(application: Service) -> Service:
    wait_for(lambda: links(application) == ["up"], "a link to the drafter")
    return application


def links(service: Service) -> list[str]:
    return [link["state"] for link in service.drafting()["links"]]


def heads(service: Service) -> list[str]:
    """Digests of the one drafter's heads, the live one first."""
    return [head["head"] for head in drafter_of(service)["heads"]]


def drafter_of(service: Service) -> dict[str, Any]:
    """The one drafter. Serve leaves it out for a moment when it has a new `user_config`."""
    wait_for(lambda: len(service.drafting()["drafters"]) == 1, "drafter")
    drafters = service.drafting()["drafters"]
    return dict(drafters[0]) if drafters else drafter_of(service)


def answers(service: Service, workload: str, **drafting: Any) -> list[dict[str, Any]]:
    fields = {"max_tokens": 16, "drafting": {"workload": workload, **drafting}}
    return service.ask_all([{"messages": [{"role": "user", "content": prompt}], **fields} for prompt in PROMPTS])


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [one["choices"][0]["message"]["content"] for one in found]


def acceptance_length(found: list[dict[str, Any]]) -> float:
    """AL of all answers together; 1.0 where nothing was drafted."""
    num_steps = sum(one["drafting"]["num_steps"] for one in found)
    return 1 + sum(one["drafting"]["num_accepted_tokens"] for one in found) / max(1, num_steps)


@pytest.fixture(scope="module")
def plain(service: Service) -> list[str]:
    found = answers(service, "plain", k=0)
    assert all(one["drafting"]["num_steps"] == 0 for one in found)
    return texts(found)


@contextmanager
def load(service: Service, plain: list[str]) -> Iterator[list[float]]:
    """Requests all the time; each must be answered, with the right text. Gives the AL of each round. Between rounds the
    machine is for the drafter that starts or loads."""
    lengths: list[float] = []
    wrong: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            found = answers(service, "load")
            wrong.extend(text for text in texts(found) if text not in plain)
            lengths.append(acceptance_length(found))
            stop.wait(0.5)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask)
        try:
            yield lengths
        finally:
            stop.set()
            running.result(timeout=120)
    assert wrong == []


def test_drafts_of_another_process_are_accepted_and_change_no_answer(service: Service, plain: list[str]) -> None:
    found = answers(service, "remote")
    assert texts(found) == plain
    assert acceptance_length(found) > 1.5, "a head that is broken or fed wrongly falls to nearly 1"
    num_verified = sum(one["drafting"]["num_draft_tokens"] for one in found)
    wait_for(lambda: drafter_of(service)["counters"]["drafts"] >= num_verified, "report of drafts")
    document = service.drafting()
    (link,) = document["links"]
    assert (link["state"], link["path"]) == ("up", "shared memory")
    assert link["counters"]["answered"] > 0
    drafter = drafter_of(service)
    assert link["drafter"] == drafter["address"]
    assert {one["drafting"]["head"] for one in found} == {drafter["heads"][0]["head"]}
    metrics = service.metrics()
    assert metrics["peagle_drafter_replicas"] == {(): 1}
    assert sum(metrics["peagle_head_accepted_tokens_total"].values()) > 0


def test_a_killed_drafter_costs_drafts_and_no_request(service: Service, plain: list[str]) -> None:
    before = drafter_of(service)
    with load(service, plain) as lengths:
        wait_for(lambda: len(lengths) > 0, "answer")
        (pid,) = service.processes(DRAFTER_NAME)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: links(service) != ["up"], "lost link")
        wait_for(lambda: links(service) == ["up"], "new link")
        num_before = len(lengths)
        wait_for(lambda: max(lengths[num_before + 1 :], default=1.0) > 1.5, "accepted drafts of the new drafter")
    assert drafter_of(service)["replica"] != before["replica"]


def swap(service: Service, **user_config: Any) -> None:
    service.change_live({"name": DRAFTER_NAME, "user_config": user_config})
