"""The service with two front-end processes: the same answers, one record of limits and counts, and one process that is
killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from cluster.request import hash_key
from deployments import APP_NAME, TARGET_NAME
from deployments.client import TargetClient
from tests.support.service_harness import FIXED, PROMPTS, QUESTION, Service, assert_refused, running_service, wait_for

pytestmark = pytest.mark.service

KS = (7, 3, 1, 0)
LONG = {"stream": True, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    drafter = {"placement": "colocated", "replicas": None}
    with running_service(target={"front_ends": 2}, drafter=drafter, num_draft_tokens=FIXED) as running:
        yield running


def front_ends(service: Service) -> list[psutil.Process]:
    (replica,) = service.processes(TARGET_NAME)
    children = psutil.Process(replica).children()
    return [child for child in children if "deployments.front_end_processes" in child.cmdline()]


def counts(service: Service, name: str) -> dict[str, float]:
    """Samples of a family by its label `front_end`."""
    lines = httpx.get(f"{service.url}/metrics", timeout=30).text.splitlines()
    rows = [line for line in lines if line.startswith(f"peagle_front_end_{name}_total{{")]
    return {row.split('front_end="')[-1].split('"')[0]: float(row.rsplit(" ", 1)[1]) for row in rows}


def stream(service: Service, begun: Event, key: str = "none", **body: Any) -> tuple[float, float, list[str]]:
    """When the events of a stream began and ended, and these. `begun` is set by the third one."""
    sent = {"model": service.model, "messages": QUESTION, "temperature": 0, "stream": True, **body}
    headers, url, times, events = {"Authorization": f"Bearer {key}"}, f"{service.url}/v1/chat/completions", [], []
    with httpx.stream("POST", url, json=sent, headers=headers, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                times.append(time.monotonic())
                if len(events) == 3:
                    begun.set()
    return times[0], times[-1], events


def test_answers_are_the_targets_and_refusals_those_of_one_process(service: Service) -> None:
    assert len(front_ends(service)) == 2
    texts = service.texts(PROMPTS * 2, [*KS, *[0] * len(KS)], 12)
    assert texts[: len(KS)] == texts[len(KS) :]
    assert_refused(service, "K above the range", stream=False)  # by a front end; the others by the engine's client
    assert_refused(service, "a pattern that is none", stream=True)
    assert_refused(service, "an unknown token to stop at", stream=False)
    body = {"model": service.model, "messages": QUESTION}
    asked = ("v1/messages", {**body, "max_tokens": 12, "temperature": 0}), ("tokenize", body)
    message, tokens = (httpx.post(f"{service.url}/{path}", json=sent, timeout=60).json() for path, sent in asked)
    assert message["content"][0]["text"] == service.ask().json()["choices"][0]["message"]["content"]
    assert tokens["count"] == message["usage"]["input_tokens"]
    missing = service.ask(thinking_token_budget=3).json()["error"]["message"]
    assert ("engine.reasoning_parser" in missing, "--" in missing) == (True, False), "an option by its key"
    chosen = service.ask(structured_outputs={"choice": ["north", "south"]})
    assert chosen.json()["choices"][0]["message"]["content"] in ("north", "south")


def test_both_processes_answer_and_the_counts_are_their_sums(service: Service) -> None:
    before, requests, sums = service.metrics(), counts(service, "requests"), {"workload": "sums"}
    answers = service.ask_all([
        {"messages": [{"role": "user", "content": prompt}], "n": n, "temperature": 1, "drafting": {**sums, "k": k}}
        for prompt, k, n in zip(PROMPTS, (7, 3, 1, 0), (1, 3, 1, 1), strict=True)
    ])  # fmt: skip
    after = service.metrics()
    assert [len(answer["choices"]) for answer in answers] == [1, 3, 1, 1]
    assert all(number > requests[place] for place, number in counts(service, "requests").items())

    def growth(name: str, *labels: str) -> float:
        return after[f"peagle_{name}_total"]["sums", *labels] - before[f"peagle_{name}_total"]["sums", *labels]

    assert growth("requests", "finished") == 6
    assert growth("output_tokens") == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert growth("verification_steps") == sum(answer["drafting"]["num_steps"] for answer in answers)
    assert after["peagle_running_requests"][()] == 0


def test_a_call_by_handle_and_a_client_that_leaves(service: Service) -> None:
    client = TargetClient()
    answer = client.chat(QUESTION, max_tokens=8, temperature=0)
    assert answer["choices"][0]["message"] == service.ask(max_tokens=8).json()["choices"][0]["message"]
    chunks = client.stream_chat(QUESTION, max_tokens=8, temperature=0)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == answer["choices"][0]["message"]["content"]
    body = {"model": service.model, "messages": QUESTION, "n": 3, "drafting": {"workload": "leaving"}, **LONG}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert len([line for line, _ in zip(response.iter_lines(), range(6), strict=False)]) == 6
    wait_for(lambda: service.metrics()["peagle_requests_total"]["leaving", "aborted"] == 3, "abort", 20)


def test_a_callers_limit_holds_across_both_processes(service: Service) -> None:
    service.change_live(callers={"web": {"key_sha256": hash_key("web"), "max_running_requests": 2}})
    wait_for(lambda: service.ask(max_tokens=1).status_code == 401, "callers")
    requests = counts(service, "requests")
    try:
        with ThreadPoolExecutor(5) as pool:
            asked = [pool.submit(stream, service, Event(), "web", max_tokens=24, ignore_eos=True) for _ in range(5)]
            times = sorted(one.result()[:2] for one in asked)
    finally:
        service.change_live()
        wait_for(lambda: service.ask(max_tokens=1).status_code == 200, "service for anyone")
    together = [sum(start <= moment < end for start, end in times) for moment, _ in times]
    assert max(together) == 2, times
    assert all(number > requests[place] for place, number in counts(service, "requests").items())


def test_a_killed_process_ends_its_own_streams_only_and_comes_back(service: Service) -> None:
    killed, other = front_ends(service)
    aborted = service.metrics()["peagle_requests_total"]["default", "aborted"]  # by the tests before
    started = psutil.Process(killed.ppid()).children(recursive=True)
    (engine,) = [one for one in started if "EngineCore" in " ".join(one.cmdline())]
    begun = [Event(), Event()]
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, service, one, **LONG | {"max_tokens": 80}) for one in begun]
        assert all(one.wait(60) for one in begun)
        os.kill(killed.pid, signal.SIGKILL)
        ends = [one.result()[2] for one in streams]
    lost, whole = sorted(ends, key=lambda events: events[-1] == "[DONE]")
    assert json.loads(lost[-1])["error"]["code"] == "engine_lost"
    assert whole[-1] == "[DONE]"
    engine.cpu_percent()
    wait_for(lambda: engine.cpu_percent(0.5) < 20, "end of the lost stream's work in the engine", 20)
    found = service.metrics()
    assert found["peagle_running_requests"][()] == 0
    assert found["peagle_requests_total"]["default", "aborted"] == aborted + 1
    wait_for(lambda: len(front_ends(service)) == 2 and counts(service, "restarts") != {}, "another process")
    requests = counts(service, "requests")

    def both_answer() -> bool:
        service.texts(PROMPTS, KS, 2)
        return all(number > requests[place] for place, number in counts(service, "requests").items())

    wait_for(both_answer, "answer of the new process")
    assert other.pid in {process.pid for process in front_ends(service)}


def test_a_replica_that_goes_finishes_its_streams_and_takes_its_processes_along(service: Service) -> None:
    processes, begun = front_ends(service), Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, service, begun, max_tokens=40, ignore_eos=True)
        assert begun.wait(60)
        serve.delete(APP_NAME, _blocking=False)
        assert running.result()[2][-1] == "[DONE]"
    wait_for(lambda: not any(process.is_running() for process in processes), "end of the processes")
