"""Ask the served target from Python inside the Ray cluster (a Ray job, a task, another deployment), past HTTP.

    from deployments.client import TargetClient

    client = TargetClient()                                   # the application of configs/local.yaml
    answer = client.chat([{"role": "user", "content": "Hi"}], max_tokens=32, drafting={"k": 3, "workload": "chat"})
    print(answer["choices"][0]["message"]["content"], answer["drafting"])

    for chunk in client.stream_chat([{"role": "user", "content": "Hi"}], max_tokens=32):    # or: async for
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

Requests, answers, chunks and the `drafting` field are those of the HTTP API, as dictionaries; K and workload get the
same defaults and the same checks. Inside a running event loop use `achat`, `acomplete` and `async for`.
The process needs Ray and this package, not vLLM. Where it has not called `ray.init`, it joins the Ray cluster that
RAY_ADDRESS names, else the one of this machine.
"""

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatusOverview

from cluster.heads import HeadChange, HeadProposal
from deployments import APP_NAME, ROUTER_NAME, TARGET_NAME, compat
from peagle.heads import candidate_files

Json = dict[str, Any]


class TargetError(RuntimeError):
    """The target refused a request, or is not there. `status` and `param` are those of the HTTP API's error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Chunks:
    """The chunks of one streamed answer, to be read once by `for` or `async for`. `cancel()` stops the generation."""

    def __init__(self, source: DeploymentResponseGenerator[Any]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Json]:
        for item in self._source:
            yield _checked(item)

    async def __aiter__(self) -> AsyncIterator[Json]:
        async for item in self._source:
            yield _checked(item)

    def cancel(self) -> None:
        """Stop: the engine drops the request and frees its place."""
        self._source.cancel()  # type: ignore[no-untyped-call]


class TargetClient:
    """Asks the target of the application `app`. Calls are spread over the target's replicas by Ray Serve.

    Raises:
        TargetError: no such application, or none of its target replicas is up yet.
        ConnectionError: no Ray cluster.
    """

    def __init__(self, app: str = APP_NAME) -> None:
        found = applications()
        if (status := found.get(app)) is None:
            known = ", ".join(found) or "none"
            raise TargetError(404, f"no application {app!r} is deployed on this Ray cluster (deployed: {known})")
        target = status.deployments.get(TARGET_NAME)
        if target is None or not any(state == "RUNNING" and num for state, num in target.replica_states.items()):
            raise TargetError(503, f"the target of {app!r} is not ready: the application is {status.status}")
        handle: DeploymentHandle[Any] = serve.get_deployment_handle(TARGET_NAME, app_name=app)
        self._ask = handle.options(stream=True, method_name="ask")

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Json:
        """The answer to a chat. `fields`: those of /v1/chat/completions (`max_tokens`, `temperature`, `drafting`...).
        Raises TargetError for a refused request, with the status and the field that HTTP would name."""
        (answer,) = self._start("chat", fields, messages=list(messages))
        return answer

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Json:
        """The continuation of a prompt, like `chat`, with the fields of /v1/completions."""
        (answer,) = self._start("completions", fields, prompt=prompt)
        return answer

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Chunks:
        """The chunks of a chat's answer, as they come; the last one that finishes a choice has `drafting`."""
        return self._start("chat", fields, messages=list(messages), stream=True)

    def stream_complete(self, prompt: str | Sequence[int], **fields: Any) -> Chunks:
        """The chunks of a prompt's continuation, as they come."""
        return self._start("completions", fields, prompt=prompt, stream=True)

    async def achat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Json:
        """`chat` inside an event loop."""
        (answer,) = [answer async for answer in self._start("chat", fields, messages=list(messages))]
        return answer

    async def acomplete(self, prompt: str | Sequence[int], **fields: Any) -> Json:
        """`complete` inside an event loop."""
        (answer,) = [answer async for answer in self._start("completions", fields, prompt=prompt)]
        return answer

    def _start(self, method: str, fields: Json, *, stream: bool = False, **asked: Any) -> Chunks:
        answer = self._ask.remote(method, {**fields, **asked, "stream": stream})
        assert isinstance(answer, DeploymentResponseGenerator)
        return Chunks(answer)


def _checked(item: Json) -> Json:
    if "error" in item:
        error = item["error"]
        raise TargetError(int(item.get("status", 500)), str(error["message"]), error.get("param"))
    return item


def applications() -> dict[str, ApplicationStatusOverview]:
    """What Serve runs, by name, in the Ray cluster of this process. Raises ConnectionError where there is none."""
    if not ray.is_initialized():
        if (address := os.environ.get("RAY_ADDRESS") or compat.local_cluster()) is None:
            raise ConnectionError("no Ray cluster runs on this machine; RAY_ADDRESS names one of another")
        compat.use_token()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return serve.status().applications


def change_heads(propose: Path | None = None, app: str = APP_NAME) -> HeadChange:
    """Propose a head, else end the trial or roll back the last change of heads. Raises ValueError where there is no
    such application or the head is not taken, and ConnectionError without a Ray cluster."""
    status = applications().get(app)
    if status is None or ROUTER_NAME not in status.deployments:
        raise ValueError(f"no application {app!r} with a router runs on this Ray cluster")
    router: DeploymentHandle[Any] = serve.get_deployment_handle(ROUTER_NAME, app_name=app)
    # With the files: the router may be on another node.
    given = [] if propose is None else [HeadProposal(str(propose), candidate_files(propose))]
    try:
        change: HeadChange = (router.propose if given else router.head_back).remote(*given).result()
        return change
    except ray.exceptions.RayTaskError as error:
        raise ValueError(str(error.cause)) from error
