"""The live page without a browser: how it is sent, and that what it reads is what the service says."""

import base64
import hashlib
import re
import typing
from types import SimpleNamespace
from typing import Any

import torch

from cluster.counts import Counts
from cluster.history import ServiceHistory
from cluster.k_policy import KPolicy
from cluster.request import Drafting, KRules, Source
from deployments.answers import drafting_field
from deployments.routes import live_page
from deployments.telemetry import drafting_document
from peagle.vllm.device import describe_device
from tests.support.autoscaling_harness import Controller
from tests.support.counted import counts_of
from tests.support.scaling_cases import GOOD
from tests.unit.cluster.test_heads import swapped
from tests.unit.deployments.test_front_end import Echo, request
from tests.unit.deployments.test_replicas import drafter_report
from tests.unit.deployments.test_telemetry import link, report

PAGE = live_page()[0]


def policy_of(headers: Any) -> dict[str, str]:
    rules = (rule.strip().partition(" ") for rule in headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in rules}


def test_a_browser_may_run_and_load_nothing_but_the_file_itself() -> None:
    response = request(Echo(), "GET", "/")
    assert (response.text, response.headers["content-type"]) == (PAGE, "text/html; charset=utf-8")
    rules = policy_of(response.headers)
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", PAGE, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert rules["require-trusted-types-for"] == "'script'"
    assert set(re.findall(r"https?://[\w./]+", PAGE)) == {"http://www.w3.org/2000/svg"}, "a name, which nobody loads"


def test_what_the_service_says_is_only_ever_text() -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "localStorage"):
        assert way not in PAGE
    assert not re.search(r"""\bon\w+ ?= ?["']""", PAGE), "a handler in an attribute"


def documents() -> dict[str, Any]:
    """By the name that the page's script gives it, an example of each part of what it reads, made by the real code."""
    control, history = KPolicy(KRules(3, 3, 3)), ServiceHistory()
    reports = [report("a", "t1", [link("h:1", "up", {})], code=counts_of([(3, 2)]))]
    control.observe(reports, 0.0)
    history.observe_replicas("target", reports, 1, 0.0)
    history.add_point((), {}, 15.0)
    for row in (document := control.document(1.0))["workloads"]:
        row |= history.times(row["workload"])
    scaled = Controller()
    scaled.serve(60, 1.0, GOOD)
    decision = scaled.router.document
    service = {
        "model": "m",
        **document,
        **history.document(15.0),
        **drafting_document(reports, {"a": counts_of([(3, 2)])}, [drafter_report("r1", "a")]),
        "autoscaling": decision,
        "head_changes": swapped(0, 0.5, 120).manager.document(),
        "settings": {},
    }
    return {
        "service": service,
        "row": service["workloads"][0],
        "head": service["heads"][0],
        "changed": service["head_changes"][0],
        "drafter": service["drafters"][0],
        "link": service["links"][0],
        "speed": service["speed"],
        "past": service["history"],
        "replica": service["replicas"][0],
        "happened": service["events"][0],
        "device": describe_device(SimpleNamespace(device=torch.device("cpu"))),
        "scaling": decision,
        "pool": decision["target"],
        "field": {**drafting_field(Drafting("code", 3, "learned", "why"), "a", Counts()), "reason": "why"},
    }


def test_every_field_that_the_page_reads_is_one_that_the_service_sends() -> None:
    found = documents()
    read = re.findall(rf"(?<![\w.])({'|'.join(found)})\.(\w+)", PAGE)
    assert {name for name, _ in read} == found.keys(), "a name that the script no longer uses"
    assert not [f"{name}.{field}" for name, field in read if field not in found[name]]
    assert set(found["row"]["acceptance_rates"]) >= {"mean", "low", "high"}
    tiles = re.findall(r'^  \["[^"]+", "(\w+)", \w+, "\w+"\],$', PAGE, flags=re.MULTILINE)
    assert len(tiles) == 6
    assert set(tiles) <= found["past"].keys()
    assert found["speed"]["p50"].keys() == found["speed"]["p95"].keys() == {"ttft_s", "tpot_s"}
    sources = re.search(r"SOURCES = \{(.*?)\}", PAGE)
    assert set(re.findall(r"(\w+):", sources[1])) == set(typing.get_args(Source))
