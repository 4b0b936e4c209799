"""The real application of a file in configs/ for the tests of the service, and how they talk to it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.common import free_port
from deployments.app import build
from deployments.names import APP_NAME

CONFIGS = Path(__file__).parents[1] / "configs"
CONFIG = CONFIGS / "local.yaml"
COLOCATED = {"placement": "colocated", "replicas": None}
FIXED = {"policy": "fixed", "default": 5, "by_workload": {"code": 7, "chat": 5}}
READY_TIMEOUT_S = 300.0
QUESTION = [{"role": "user", "content": "Write a Python function that returns the sum of a list."}]
PROMPTS = [
    "Count from one to twenty.",
    "What is the capital of France?",
    "Write a short poem about the sea, in four lines.",
    "Explain in two sentences why the sky is blue, and mention how light is scattered by small particles.",
]


@dataclass
class Service:
    """The running application, and what answered while it was not ready yet. `document`: the Serve config that it was
    made of."""

    url: str
    model: str
    document: dict[str, Any]
    early: list[httpx.Response] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": self.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=120)

    def text(self, prompt: str, k: int, max_tokens: int = 32) -> str:
        messages = [{"role": "user", "content": prompt}]
        answer = self.ask(messages=messages, max_tokens=max_tokens, drafting={"k": k}).json()
        assert answer["drafting"]["k"] == k
        return answer["choices"][0]["message"]["content"]

    def deploy(self) -> None:
        """Hand `document` to Serve, changed or not."""
        schema = {"applications": self.document["applications"]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(schema))

    def drafting(self) -> dict[str, Any]:
        """The document of GET /drafting."""
        return httpx.get(f"{self.url}/drafting", timeout=30).json()

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Samples by name, keyed by (workload, depth or outcome), summed over replicas."""
        found: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=30).text):
            for sample in family.samples:
                labels = [sample.labels[name] for name in ("workload", "depth", "outcome") if name in sample.labels]
                found[sample.name][tuple(labels)] += sample.value
        return found


BAD_REQUESTS = {
    "no messages": ({"messages": []}, 400, "messages"),
    "messages missing": ({"messages": None}, 400, "messages"),
    "K below the range": ({"drafting": {"k": -1}}, 400, "drafting.k"),
    "K above the range": ({"drafting": {"k": 99}}, 400, "drafting.k"),
    "K as text": ({"drafting": {"k": "x"}}, 400, "drafting.k"),
    "unknown drafting field": ({"drafting": {"depth": 3}}, 400, "drafting.depth"),
    "drafting as a number": ({"drafting": 3}, 400, "drafting"),
    "workload with a blank": ({"drafting": {"workload": "a b"}}, 400, "drafting.workload"),
    "the server's own argument": ({"vllm_xargs": {"peagle_k": 3}}, 400, "vllm_xargs.peagle_k"),
    "prompt longer than the context": (
        {"messages": [{"role": "user", "content": "word " * 4000}]},
        400,
        "input_tokens",
    ),
    "more output than the context": ({"max_tokens": 100_000}, 400, "max_tokens"),
    "messages of a wrong type": ({"messages": 3}, 400, None),
    "message without a role": ({"messages": [{"content": "Hi"}]}, 400, "messages.0"),
    "temperature as text": ({"temperature": "hot"}, 400, "temperature"),
    "unknown model": ({"model": "gpt-none"}, 404, "model"),
}


@contextmanager
def running_service(
    config: Path = CONFIG, *, from_document: bool = False, **sections: dict[str, Any]
) -> Iterator[Service]:
    """The application of a config in a Ray of its own, on free ports, ready; both are stopped afterwards. `sections`:
    keys to add to sections of its settings. `from_document`: deployed as Serve's REST API and KubeRay do, so that
    another `user_config` can be deployed over it."""
    document = yaml.safe_load(config.read_text())
    (application,) = document["applications"]
    for name, keys in sections.items():
        application["args"][name] = {**application["args"].get(name, {}), **keys}
    # Two logical CPUs, whatever the machine has: what the file asks for must fit the smallest.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="test-service")
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        running = Service(f"http://127.0.0.1:{port}", application["args"]["model"]["id"], document)
        if from_document:
            running.deploy()
        else:
            target = serve.RunTarget(build(application["args"]), name=APP_NAME)
            serve.run_many([target], wait_for_applications_running=False)
        wait_until_ready(running)
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_ready(running: Service) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    while True:
        status = str(serve.status().applications[APP_NAME].status.value)
        if (response := httpx.get(f"{running.url}/health", timeout=60)).status_code == 200:
            break
        assert time.monotonic() < end, serve.status()
        running.early += [response, running.ask()]
        running.statuses.append(status)
        time.sleep(2)
    while serve.status().applications[APP_NAME].status != "RUNNING":
        assert time.monotonic() < end, serve.status()
        time.sleep(0.2)
