"""The running service as it is watched: the table of metrics, and the page in a real browser."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.pages import engine_families
from cluster.request import hash_key
from tests.support.browser import browser
from tests.support.metric_names import documented, exported
from tests.support.service_harness import PROMPTS, wait_for

pytestmark = pytest.mark.service

KEY = "sk-page"


@pytest.fixture(scope="module")
def service(application):
    def ask(workload: str) -> None:
        application.ask(stream=True, drafting={"workload": workload})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, ("code", "chat")))
    wait_for(lambda: len(application.drafting()["workloads"]) > 1, "workloads")
    return application


def test_the_table_of_metrics_is_what_the_service_exports(service):
    elsewhere = (  # test_telemetry.py, test_service_front_ends.py
        "peagle_autoscaling_", "peagle_learner_", "peagle_head_change", "peagle_head_gain", "peagle_front_end_",
        "vllm:",
    )  # fmt: skip
    wanted = {name: labels for name, labels in documented().items() if not name.startswith(elsewhere)}

    def difference() -> dict[str, Any]:
        service.ask(max_tokens=4)  # a step's expected time is there while a request runs, or did a moment ago
        found = exported(httpx.get(f"{service.url}/metrics", timeout=30).text)
        return {
            name: (found.get(name), wanted.get(name))
            for name in {*found, *wanted}
            if found.get(name) != wanted.get(name) and not name.startswith(elsewhere)
        }

    wait_for(lambda: not difference(), f"agreement: {difference()}")


def test_vllms_own_metrics_stand_beside_with_the_replica(service):
    found, table = exported(httpx.get(f"{service.url}/metrics", timeout=30).text), engine_families()
    for name in ("vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
                 "vllm:num_requests_waiting", "vllm:e2e_request_latency_seconds"):  # fmt: skip
        assert found[name] == set(table[name][1].split())
    assert sum(service.metrics()["vllm:generation_tokens_total"].values()) > 0


@pytest.mark.long
def test_the_page_in_a_browser_shows_the_service_and_which_tokens_were_drafted(service):
    with browser() as tab:
        for width in (1200, 390):
            tab.open(f"{service.url}/", width)
            tab.wait_for("document.getElementById('state').textContent === 'ready'")
            assert tab.text("model") == service.model
            tab.wait_for("document.querySelectorAll('#workloads svg polyline').length >= 2")
            tab.wait_for("document.getElementById('ttft').textContent !== '-'")
            names = "[...document.querySelectorAll('#workloads tbody button')].map(one => one.textContent)"
            assert {"code", "chat"} <= set(tab.run(names))
            assert "7 pinned" in tab.run("document.getElementById('workloads').innerText")
            assert "CPU" in tab.text("replicas")
            assert "target" in tab.text("events")
            assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "it needs no sideways scrolling"
        question = PROMPTS[0]
        tab.fill("prompt", question)
        tab.fill("max-tokens", "12")
        tab.fill("k", "5")
        tab.press("send")
        tab.wait_for("document.getElementById('outcome').textContent !== ''")
        answer = service.ask(messages=[{"role": "user", "content": question}], drafting={"k": 5}).json()
        assert tab.run("document.getElementById('answer').textContent") == answer["choices"][0]["message"]["content"]
        drafted = tab.run("document.querySelectorAll('#answer .drafted').length")
        # Of the last step, what lies beyond the end of the answer is accepted and not shown.
        assert 0 < drafted <= answer["drafting"]["num_accepted_tokens"] <= drafted + 5
        assert "K = 5 (asked for)" in tab.text("outcome")
        # The token that ends a turn is no text, and what stands before it in its step was drafted all the same.
        last = [{"token": text, "bytes": list(text.encode())} for text in ("a", "é", "<end>")]
        choice = {"delta": {"content": "aé"}, "logprobs": {"content": last}, "finish_reason": "stop"}
        tab.run("document.getElementById('answer').replaceChildren()")
        answer = "{place: $('answer'), tokens: 0, drafted: 0, steps: 0, decoder: new TextDecoder()}"
        tab.run(f"take({json.dumps({'choices': [choice]})}, {answer})")
        assert tab.run("[...document.querySelectorAll('#answer .drafted')].map(one => one.textContent)") == ["a", "é"]
        tab.press("compare")
        tab.wait_for("document.getElementById('compared').textContent !== ''")
        assert tab.run("document.querySelectorAll('#plain .drafted').length") == 0
        assert "tokens/s with drafts" in tab.text("compared")
        # Rows stay the same nodes when they are sorted, and a page that has no answer greys its numbers.
        tab.run("window.row = document.querySelector('#workloads tbody tr')")
        tab.run("[...document.querySelectorAll('#workloads th button')].slice(0, 2).forEach(one => one.click())")
        assert tab.run("window.row.isConnected && document.querySelectorAll('#workloads svg').length > 0")
        tab.run("window.fetch = () => Promise.reject(new TypeError('no network'))")
        tab.wait_for("document.body.classList.contains('stale')")
        assert tab.text("state").startswith("no answer; numbers are")
        assert tab.problems == []


@pytest.mark.long
def test_with_keys_the_page_asks_for_one_and_forgets_it_with_the_tab(service):
    service.change_live(callers={"page": {"key_sha256": hash_key(KEY), "tags": "allow"}})
    wait_for(lambda: service.ask(max_tokens=1).status_code == 401, "callers")
    try:
        with browser() as tab:
            tab.open(f"{service.url}/")
            tab.wait_for("!document.getElementById('key-box').hidden")
            assert tab.text("state") == "needs a key"
            for key, is_known in (("sk-wrong", False), (KEY, True)):
                tab.fill("key", key)
                tab.run("document.getElementById('key-form').requestSubmit()")
                state = "ready" if is_known else "needs a key"
                tab.wait_for(f"document.getElementById('state').textContent === '{state}'")
                tab.wait_for(f"document.getElementById('key-box').hidden === {json.dumps(is_known)}")
            tab.fill("max-tokens", "4")
            tab.press("send")
            tab.wait_for("document.getElementById('outcome').textContent !== ''")
            assert tab.run("localStorage.length === 0 && document.cookie === '' && sessionStorage.length === 1")
            assert KEY not in tab.run("document.documentElement.outerHTML")
    finally:
        service.change_live()
        wait_for(lambda: service.ask(max_tokens=1).status_code == 200, "service for anyone")
