"""The adapters of Ray Serve without Serve: what they do when a report fails, is late, or never comes."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster.request import Caller, Drafting, DraftingError, Workloads, resolve
from cluster.settings import DrafterSettings
from deployments.drafter import DrafterReplica
from deployments.links import DrafterLinks
from deployments.readiness import ReplicaMonitor
from deployments.requests import ApiError, ChatBody, add_error_handlers
from deployments.target import TargetServer
from deployments.telemetry import DrafterReport, LiveHead
from peagle.drafter.kvcache import Counters
from peagle.drafter.server import ServerStats
from peagle.vllm.acceptance import DEPTH_KEY
from tests.test_control import POLICY, control, observation
from tests.test_settings import HEAD


class Handle:
    """In the place of a deployment handle: `answers` gives what all replicas say to one broadcast."""

    deployment_name = "target"

    def __init__(self, answers: Callable[[], Awaitable[list[Any]]]) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> "Handle":
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        return await self._answers()


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _polls_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("links", "readiness"):
        monkeypatch.setattr(f"deployments.{module}.POLL_INTERVAL_S", 0.0)


def test_a_monitor_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    async def answers() -> list[int]:
        nonlocal num_asked
        num_asked += 1
        if num_asked in (2, 3):
            raise RuntimeError("the controller is gone")
        return [num_asked]

    async def run() -> None:
        monitor: Any = ReplicaMonitor(Handle(answers), int)  # type: ignore[arg-type]
        monitor.start()
        await until(lambda: num_asked > 3 or monitor._task.done())
        await until(lambda: monitor.reports[0] > 3 or monitor._task.done())
        assert not monitor._task.done()
        monitor._task.cancel()

    asyncio.run(run())
    assert caplog.text.count("its replicas cannot be asked") == 1


def test_reports_that_were_asked_for_earlier_do_not_replace_later_ones() -> None:
    """A scrape of /metrics asks too. Counters that seem to go back look like a restart, and would count twice."""

    async def run() -> None:
        asked: list[asyncio.Future[list[Any]]] = []
        seen: list[Any] = []

        def answers() -> Awaitable[list[Any]]:
            asked.append(asyncio.get_running_loop().create_future())
            return asked[-1]

        monitor: Any = ReplicaMonitor(Handle(answers), int, seen.append)  # type: ignore[arg-type]
        first, second = (asyncio.ensure_future(monitor.refresh()) for _ in range(2))
        await until(lambda: len(asked) == 2)
        asked[1].set_result([2])
        assert await second == [2]
        asked[0].set_result([1])
        assert await first == [2]
        assert (monitor.reports, seen) == ([2], [[2]])

    asyncio.run(run())


def test_heads_that_changed_in_a_poll_that_failed_are_told_later() -> None:
    async def answers() -> list[Any]:
        return [DrafterReport("r", "h:1", (LiveHead(0, "name", "digest"),))]

    num_failures = 0

    async def rpc(method: str, args: Any = ()) -> list[Any]:
        nonlocal num_failures
        if method == "remote_report" and not num_failures:
            num_failures += 1
            raise RuntimeError("the engine did not answer")
        return []

    async def run() -> None:
        told: list[Any] = []
        settings: Any = SimpleNamespace(heads_by_workload={})
        links: Any = DrafterLinks(Handle(answers), rpc, settings, lambda: True)  # type: ignore[arg-type]
        links.start(lambda default, by_workload: told.append((default, by_workload)))
        await until(lambda: told)
        links._task.cancel()
        assert (told, num_failures) == ([("digest", {})], 1)

    asyncio.run(run())


class Heads:
    """Heads by their folders, without weights; a broken one raises what nobody foresaw."""

    def directory(self, name: str) -> Path:
        return Path(name)

    def load(self, name: str, like: Any = None) -> Any:
        if Path(name).name == "broken":
            raise KeyError("fc.weight")
        return SimpleNamespace(name=name, digest=Path(name).name, config=None, runtime=None, served=None)


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A drafter replica that was built with the heads a, and b for code; what it may have instead is there too."""
    config = HEAD
    for name in ("a", "b", "c", "d", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "num_depths": "7"}))
    monkeypatch.setattr("deployments.drafter.head_digest", lambda folder: folder.name)
    a, b = (str(tmp_path / name) for name in "ab")
    replica: Any = SimpleNamespace(
        _settings=DrafterSettings(head=a, placement="remote", max_draft_tokens=7, heads_by_workload={"code": b}),
        _loader=Heads(),
        _refused="",
        _swapping=asyncio.Lock(),
        _heads={0: Heads().load(a), 1: Heads().load(b)},
        _server=SimpleNamespace(swap=lambda *args: None),
    )
    replica._load_changed = lambda asked: DrafterReplica._load_changed(replica, asked)
    return replica


def live(replica: Any, *user_configs: Any) -> list[str]:
    """Its heads after these, one after the other."""

    async def run() -> None:
        for user_config in user_configs:
            await DrafterReplica._swap(replica, user_config)

    asyncio.run(run())
    return [head.digest for _, head in sorted(replica._heads.items())]


def test_the_live_heads_are_those_of_the_last_user_config_whatever_came_before(drafter: Any, tmp_path: Path) -> None:
    """A replica that starts later gets the last one only, and must have the same heads."""
    code = {"heads_by_workload": {"code": str(tmp_path / "c")}}
    assert live(drafter, code) == ["a", "c"]
    assert live(drafter, {"head": str(tmp_path / "c")}) == ["c", "b"]
    assert live(drafter, {}) == ["a", "b"]


def test_a_drafter_that_starts_is_ready_with_the_heads_of_its_user_config(drafter: Any, tmp_path: Path) -> None:
    """Serve calls `reconfigure` before a new replica counts as ready: a restarted one must not draft with the heads of
    the settings first. Later ones return before the head is loaded, so that targets keep their drafter meanwhile."""
    drafter._is_ready, drafter._swaps = False, set()
    drafter._swap = lambda user_config: DrafterReplica._swap(drafter, user_config)

    def digests() -> list[str]:
        return [head.digest for _, head in sorted(drafter._heads.items())]

    async def run() -> None:
        await DrafterReplica.reconfigure(drafter, {"head": str(tmp_path / "c")})
        assert digests() == ["c", "b"]
        await DrafterReplica.reconfigure(drafter, {})
        assert digests() == ["c", "b"]
        await DrafterReplica.heads_settled(drafter)
        assert digests() == ["a", "b"]

    asyncio.run(run())


def test_a_drafter_counts_refused_requests_apart_from_refused_connections(drafter: Any) -> None:
    drafter._replica, drafter._key, drafter._heads = "r", "", {}
    drafter._engine = SimpleNamespace(counters=Counters(refused=3))
    drafter._server = SimpleNamespace(stats=ServerStats(num_refused=2), address="h:1")
    counters = asyncio.run(DrafterReplica.report(drafter)).counters
    assert (counters["refused"], counters["refused_connections"]) == (3, 2)
    assert len(counters) == len(dataclasses.fields(Counters)) + len(dataclasses.fields(ServerStats))


@pytest.mark.parametrize(("name", "words"), [("broken", "KeyError('fc.weight')"), ("d", "num_depths")])
def test_a_head_that_fails_in_an_unforeseen_way_is_refused_with_the_reason(
    drafter: Any, tmp_path: Path, name: str, words: str
) -> None:
    assert live(drafter, {"head": str(tmp_path / name)}) == ["a", "b"]
    assert words in drafter._refused
    assert live(drafter, {}) == ["a", "b"]
    assert drafter._refused == ""


def admitted(control: Any, drafting: Any) -> Any:
    """The decision of a target replica on a chat with this `drafting` field."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], "drafting": drafting})
    replica: Any = SimpleNamespace(
        _policy=POLICY, _aliases={}, _workloads=Workloads(), _control=control, _remote=None, _model_id="m"
    )
    decided = TargetServer._admit(replica, body)
    assert body.vllm_xargs[DEPTH_KEY] == decided.max_k, "what the engine's scheduler reads"
    return decided


def test_a_target_leaves_the_decision_of_the_ingress_and_so_the_limit_of_a_caller() -> None:
    ingress, target = control(per_token_s=0.0), control(per_token_s=0.0)
    target.observe([observation()], 0.0)
    target.settle = lambda drafting, now_s, settle=target.settle: settle(drafting, 0.0)  # type: ignore[method-assign]
    assert admitted(target, None).k > 1, "a request past the ingress gets what the target has learned"
    asked = resolve(POLICY, caller=Caller("web", max_k=1))
    unknown = ingress.settle(asked, 1.0, 1)
    ingress.observe([observation(num_steps=0)], 1.0)
    cold = ingress.settle(asked, 1.0, 1)
    for decided in (unknown, cold):
        assert (decided.k, decided.source) == (1, "default")
        assert admitted(target, decided.to_wire()).k == 1
    assert admitted(target, Drafting("web", 1, "learned", survival=(0.5,) * 5, max_k=5).to_wire()).max_k == 5


def test_an_error_can_be_told_whatever_characters_the_client_sent() -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/")
    async def ask(body: dict[str, Any]) -> None:
        try:
            resolve(POLICY, body)
        except DraftingError as error:
            raise ApiError(400, error.message, param=error.field) from error

    client = TestClient(app, raise_server_exceptions=False, headers={"content-type": "application/json"})
    answer = client.post("/", content='{"\\ud800": 3}')
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "drafting.\\ud800"
