"""The real application of a file in configs/ for the tests of the service, and how they talk to it."""

import copy
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.common import free_port
from cluster.settings import load_settings
from deployments import APP_NAME
from deployments.app import catalog
from deployments.serve_config import live_form, model_applications
from deployments.up import ray_environment
from tests.support.warm_engine import ONE_THREAD

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = CONFIGS / "local.yaml"
FIXED = {"policy": "fixed", "default": 5, "by_workload": {"code": 7, "chat": 5}}
PATIENT = {"max_deadline_ms": 60_000.0}
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "default_chat_template_kwargs": {"enable_thinking": False},  # a request turns the parser of reasoning on
}
READY_TIMEOUT_S = 600.0
WEB_KEY = "sk-web"
QUESTION = [{"role": "user", "content": "Write a Python function that returns the sum of a list."}]
PROMPTS = [
    "Count from one to twenty.",
    "What is the capital of France?",
    "Write a short poem about the sea, in four lines.",
    "Explain in two sentences why the sky is blue, and mention how light is scattered by small particles.",
]


@dataclass
class Service:
    """The running application, and what answered while it was not ready yet. `written`: the config as a user writes it,
    `document`: as Serve has it."""

    url: str
    model: str
    written: dict[str, Any]
    document: dict[str, Any]
    early: list[httpx.Response] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)

    @property
    def num_early_answers(self) -> int:
        """Requests answered before this machine saw that the service is ready: it may become so between two looks."""
        return sum(response.status_code == 200 for response in self.early)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": self.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=120)

    def ask_all(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers to requests that are sent at once."""

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            response = self.ask(**body)
            assert response.status_code == 200, response.text
            return dict(response.json())

        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(ask, bodies))

    def texts(self, prompts: Sequence[str], ks: Sequence[int], max_tokens: int = 16) -> list[str]:
        """What is answered to prompts that are sent at once, each with its K."""
        answers = self.ask_all([
            {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "drafting": {"k": k}}
            for prompt, k in zip(prompts, ks, strict=True)
        ])  # fmt: skip
        assert [answer["drafting"]["k"] for answer in answers] == list(ks)
        return [answer["choices"][0]["message"]["content"] for answer in answers]

    def deploy(self) -> None:
        """Hand `document` to Serve, changed or not."""
        schema = {"applications": self.document["applications"]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(schema))

    def change_live(self, *deployments: dict[str, Any], **sections: dict[str, Any]) -> None:
        """Deploy the config with other settings that need no new engine, as `peagle serve` does; without any, as it
        was at the start. `deployments`: entries of that list of Serve's config."""
        changed = copy.deepcopy(self.written)
        args = changed["applications"][0]["args"]
        for name, keys in sections.items():
            args[name] = {**args.get(name, {}), **keys}
        changed["applications"][0]["deployments"] = list(deployments)
        self.document = live_form(changed, load_settings(args, catalog(), os.environ))
        self.deploy()

    def processes(self, deployment: str, application: str = APP_NAME) -> set[int]:
        details = ray.get(_get_global_client()._controller.get_serve_instance_details.remote())
        replicas = details["applications"][application]["deployments"][deployment]["replicas"]
        return {int(replica["pid"]) for replica in replicas}

    def drafting(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/drafting", timeout=30).json()

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Samples by name, keyed by (workload, draft position or outcome), summed over replicas."""
        found: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text):
            for sample in family.samples:
                labels = [
                    sample.labels[name] for name in ("workload", "draft_position", "outcome") if name in sample.labels
                ]
                found[sample.name][tuple(labels)] += sample.value
        return found


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "prompt longer than the context": (
        "chat", {"messages": [{"role": "user", "content": "word " * 4000}]}, "input_tokens",
    ),
    "more output than the context": ("chat", {"max_tokens": 100_000}, "max_tokens"),
    "a schema of itself": (
        "chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        "response_format",
    ),
    "a grammar that is none": ("chat", {"structured_outputs": {"grammar": "?"}}, None),
    "a pattern that is none": ("chat", {"structured_outputs": {"regex": "("}}, None),
    "a token id that the model does not have": ("completions", {"prompt": [49152]}, "prompt"),
    "one of several prompts": ("completions", {"prompt": [[1], [49152]]}, "prompt"),
    "an unknown token to stop at": ("chat", {"stop_token_ids": [49152]}, "stop_token_ids"),
    "embeddings for a prompt": ("completions", {"prompt": None, "prompt_embeds": "AAAA"}, None),
    "an image for a model of text": ("chat", {"messages": [{"role": "user", "content": [IMAGE]}]}, None),
    "a template of the client's": ("chat", {"chat_template": "{% for i in range(10**9) %}a{% endfor %}"}, None),
    "3,000 bad words": ("chat", {"bad_words": [f"w{number}" for number in range(3000)]}, "bad_words"),
    "K above the range": ("chat", {"drafting": {"k": 99}}, "drafting.k"),
}  # fmt: skip
"""What the engine's input processing refuses, one of each kind (`test_limits.py`, `test_front_end.py`)."""


def assert_refused(service: Service, name: str, stream: bool) -> None:
    """That one of `BAD_REQUESTS` is answered as an error of the request."""
    call, body, param = BAD_REQUESTS[name]
    path = {"chat": "chat/completions", "completions": "completions"}[call]
    request: dict[str, Any] = {"messages": QUESTION} if call == "chat" else {"prompt": "One,"}
    document = {"max_tokens": 4, **request, **body, "stream": stream}
    response = httpx.post(f"{service.url}/v1/{path}", json=document, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param in (None, error["param"]), error


@contextmanager
def running_service(config: Path = CONFIG, **sections: dict[str, Any]) -> Iterator[Service]:
    """The application of a config in a Ray of its own, on free ports, deployed and ready as by `peagle serve`; both are
    stopped afterwards. `sections`: keys to add to sections of the settings of each model."""
    written = yaml.safe_load(config.read_text())
    models = [application["args"] for application in model_applications(written)]
    for args, (name, keys) in itertools.product(models, sections.items()):
        args[name] = {**args.get(name, {}), **keys}
    for args in models:
        args["target"]["env"] = ONE_THREAD | args["target"].get("env", {})
    document = live_form(written, *(load_settings(args, catalog(), os.environ) for args in models))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_environment().items():
            patch.setenv(name, value)
        # Two logical CPUs, whatever the machine has: what the file asks for must fit the smallest.
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="test-service")
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        running = Service(f"http://127.0.0.1:{port}", models[0]["model"]["id"], written, document)
        running.deploy()
        wait_until_ready(running)
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_ready(running: Service) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while True:
        found = serve.status().applications.get(APP_NAME)
        status = "DEPLOYING" if found is None else str(found.status.value)
        if (response := httpx.get(f"{running.url}/health", timeout=60)).status_code == 200:
            break
        assert time.monotonic() < end, serve.status()
        running.early += [response, running.ask()]
        running.statuses.append(status)
        time.sleep(2)
    while any(application.status != "RUNNING" for application in serve.status().applications.values()):
        assert time.monotonic() < end, serve.status()
        time.sleep(0.2)


class SharedApplication:
    """The application of configs/local.yaml, started by the first test that asks for it and stopped when another needs
    the machine or Ray: K is fixed, drafts come from another process with the shipped head. The target waits for drafts
    however busy the machine is, so every step has some. What a module changes live it takes back. A grammar is refused
    after 1 s of CPU time and not after the default of 10 s, because hostile ones take all of it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: Service | None = None

    def start(self) -> Service:
        if self._running is None:
            self._stack.enter_context(pytest.MonkeyPatch.context()).setenv("TEST_WEB_KEY", WEB_KEY)
            limits = {"grammar_timeout_s": 1.0}
            running = running_service(drafter={"links": PATIENT}, num_draft_tokens=FIXED, engine=PARSERS, limits=limits)
            self._running = self._stack.enter_context(running)
        return self._running

    def stop(self) -> None:
        self._running = None
        self._stack.close()


APPLICATION = SharedApplication()


def run_together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return. They are made at the same time, so that their requests share the engine's steps."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result() for made in [pool.submit(call) for call in calls]]


def wait_for(
    is_so: Callable[[], bool], what: str, timeout_s: float = 90.0, find: Callable[[], object] = lambda: ""
) -> None:
    """`find`: what to show where it never comes."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, f"no {what} after {timeout_s:.0f} s {find()}"
        time.sleep(0.5)
