"""The real service with autoscaling from acceptance: traffic whose drafts are rejected brings a second engine while
nothing queues; traffic that drafts well takes it away again; every request is answered, streams included.

Two engines share two cores here, so the second adds no speed, and each gives less. The share of a replica's capacity
that is planned for is set so low that the machine bears the traffic either way, and the traffic that drafts well asks
for a fixed part of it, as the service measures it on this machine: what is shown is that the number follows acceptance.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deployments import view
from tests.support.service_harness import CONFIGS, PROMPTS, Service, running_service

pytestmark = [pytest.mark.service, pytest.mark.long, pytest.mark.timeout(1200)]

MAX_TOKENS = 16
NEEDED = 0.6
"""Replicas that the traffic asks for while it drafts well; a replica that runs one request at a time gives half as much
again then. On two cores a batch of eight gains little from drafts, so its capacity hardly follows acceptance."""

WAIT_S = 240.0
SCALING: dict[str, Any] = {
    "policy": "acceptance",
    "target": {"min": 1, "max": 2},
    "utilisation": 0.3,
    "start_time_s": 0.0,
    "upscale_delay_s": 2.0,
    "downscale_delay_s": 31.0,
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service(CONFIGS / "local-autoscale.yaml", autoscaling=SCALING, engine={"max_num_seqs": 1}) as running:
        yield running


def decision(service: Service) -> dict[str, Any]:
    return service.drafting()["autoscaling"] or {"source": None, "target": {"num_wanted": 0}}


def wait_for(is_so: Callable[[], bool], service: Service, what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, f"no {what} after {WAIT_S:.0f} s: {decision(service)}"
        time.sleep(0.5)


def num_ready(service: Service) -> int:
    return int(httpx.get(f"{service.url}/health", timeout=30).json()["num_target_replicas"])


@contextmanager
def traffic(service: Service) -> Iterator[dict[str, float]]:
    """Requests, whatever becomes of those before; each must be answered in full. What it yields says how often to ask
    and at what temperature: at 0 the head drafts that answer well, at 2 the target takes almost any token."""
    kind = {"temperature": 0.0, "every_s": 1.5}
    stop = threading.Event()
    sent: list[Future[tuple[int, str]]] = []

    def ask(temperature: float) -> tuple[int, str]:
        tag = {"workload": "greedy" if temperature == 0 else "hot"}
        answer = service.ask(max_tokens=MAX_TOKENS, temperature=temperature, drafting=tag)
        return answer.status_code, answer.json()["choices"][0]["finish_reason"] if answer.is_success else answer.text

    def send(pool: ThreadPoolExecutor) -> None:
        while not stop.wait(kind["every_s"]):
            sent.append(pool.submit(ask, kind["temperature"]))

    with ThreadPoolExecutor(32) as pool:
        sender = threading.Thread(target=send, args=(pool,))
        sender.start()
        try:
            yield kind
        finally:
            stop.set()
            sender.join()
    answers = [one.result() for one in sent]
    assert [one for one in answers if one not in ((200, "length"), (200, "stop"))] == []


def stream(service: Service) -> list[str | None]:
    """The finish reasons of a long stream, and the words that end it."""
    body = {
        "model": service.model,
        "messages": [{"role": "user", "content": PROMPTS[3]}],
        "max_tokens": 400,
        "stream": True,
    }
    body |= {"temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=200) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return [*(choice["finish_reason"] for choice in choices if choice["finish_reason"]), events[-1]]


def test_the_number_of_replicas_follows_acceptance_and_no_request_fails(service: Service) -> None:
    with traffic(service) as kind, ThreadPoolExecutor(2) as streams:

        def is_for_one(least_length: float) -> bool:
            """And the traffic, once it drafts well, asks for `NEEDED` of what a replica gives on this machine."""
            now = decision(service)
            if now["source"] != "acceptance" or now["acceptance_length"] < least_length:
                return False
            tokens_per_s = NEEDED * SCALING["utilisation"] * now["capacity_tokens_per_s"]
            kind["every_s"] = min(max(MAX_TOKENS / tokens_per_s, 0.5), 10.0)
            return now["target"]["num_wanted"] == 1 and now["needed"] > NEEDED / 2

        wait_for(lambda: is_for_one(2.0) and num_ready(service) == 1, service, "one replica, by acceptance")
        good = decision(service)

        kind["temperature"] = 2.0

        def is_for_acceptance() -> bool:
            now = decision(service)
            has_less = now["source"] == "acceptance" and now["capacity_tokens_per_s"] < good["capacity_tokens_per_s"]
            return has_less and now["target"]["num_wanted"] == 2

        wait_for(is_for_acceptance, service, "second replica wanted for want of acceptance")
        bad = decision(service)
        assert bad["acceptance_length"] < good["acceptance_length"]
        assert bad["ongoing_requests"] < 16  # target_ongoing_requests: by queue length, one replica is enough
        wait_for(lambda: num_ready(service) == 2, service, "second replica")

        kind["temperature"] = 0.0
        wait_for(
            lambda: is_for_one((good["acceptance_length"] + bad["acceptance_length"]) / 2),
            service,
            "second replica given up",
        )
        longest = [streams.submit(stream, service) for _ in range(2)]  # they outlast the delay of `downscale_delay_s`
        metrics = httpx.get(f"{service.url}/metrics", timeout=30).text
        assert 'peagle_autoscaling_replicas{count="wanted",deployment="target"}' in metrics
        assert "autoscaling (acceptance): " in view.as_text(view.fetch(service.url))
        wait_for(lambda: num_ready(service) == 1, service, "second replica gone")
        assert [one.result(timeout=200) for one in longest] == [["length", "[DONE]"]] * 2
