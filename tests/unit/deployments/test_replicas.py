"""What replicas say of themselves: who runs, whatever becomes of the reports; and drafters, as targets hear of them."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.heads import HeadOrders, HeadRef
from cluster.settings import DrafterSettings
from deployments.drafter import DrafterReplica, LackingHeadError
from deployments.replicas import (
    MAX_MISSED_POLLS,
    DrafterLinks,
    DrafterReport,
    EngineLost,
    LiveHead,
    ReplicaMonitor,
    agreed_heads,
    drafters_of,
    drafters_view,
    link_reports,
)


class Handle:
    """In the place of a deployment handle. `answers` gives, for one broadcast, what each replica does when it is asked;
    it raises where there is no replica."""

    deployment_name = "target"

    def __init__(self, answers: Callable[[], list[Callable[[], Awaitable[Any]]]]) -> None:
        self._answers = answers

    def broadcast(self, method: str) -> Any:
        async def asked() -> list[Any]:
            return [SimpleNamespace(get_async=answer) for answer in self._answers()]

        return SimpleNamespace(_fetch_replica_results_async=asked)


def says(value: Any) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    return answer


async def hangs() -> Any:
    await asyncio.Event().wait()


async def until(is_so: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _polls_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replicas.POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("deployments.replicas.POLL_TIMEOUT_S", 0.05)


def monitor_of(*answers: Any, on_reports: Any = lambda _: None) -> Any:
    return ReplicaMonitor(Handle(lambda: list(answers)), int, on_reports)  # type: ignore[arg-type]


def test_a_replica_that_cannot_report_still_serves(caplog: pytest.LogCaptureFixture) -> None:
    """No report never means that no request is served, and the reason is logged once."""
    monitor = monitor_of(says(RuntimeError("counts are broken")))
    assert monitor.num_ready is None
    for _ in range(3):
        asyncio.run(monitor.refresh())
    assert (monitor.num_ready, list(monitor.reports)) == (1, [])
    assert caplog.text.count("counts are broken") > 0
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_one_hung_replica_does_not_hold_up_the_reports_of_the_others() -> None:
    seen: list[Any] = []
    monitor = monitor_of(hangs, says(1), says(2), on_reports=lambda reports: seen.append(list(reports)))
    asyncio.run(asyncio.wait_for(monitor.refresh(), 2))
    assert (monitor.num_ready, seen) == (3, [[1, 2]])


@pytest.mark.parametrize("lost", [ActorDiedError(), EngineLost("EngineDeadError: EngineCore encountered an issue")])
def test_a_replica_that_is_gone_or_whose_engine_is_dead_does_not_count(lost: Exception) -> None:
    monitor = monitor_of(says(lost), says(1))
    asyncio.run(monitor.refresh())
    assert (monitor.num_ready, list(monitor.reports)) == (1, [1])


def test_what_is_done_with_the_reports_may_fail_too(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> None:
        raise ZeroDivisionError("in the learning")

    monitor = monitor_of(says(1), on_reports=broken)
    asyncio.run(monitor.refresh())
    assert monitor.num_ready == 1
    assert "in the learning" in caplog.text


def test_a_monitor_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    def answers() -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        if num_asked in (2, 3):
            raise RuntimeError("the controller is gone")
        return [says(num_asked)]

    async def run() -> None:
        monitor: Any = ReplicaMonitor(Handle(answers), int, lambda _: None)  # type: ignore[arg-type]
        monitor.start()
        await until(lambda: (num_asked > 3 and monitor.reports[0] > 3) or monitor._task.done())
        assert not monitor._task.done()
        assert monitor.num_ready == 1
        monitor._task.cancel()

    asyncio.run(run())
    assert caplog.text.count("its replicas cannot be asked") == 1


def test_reports_that_were_asked_for_earlier_do_not_replace_later_ones() -> None:
    """A scrape of /metrics asks too. Counters that seem to go back look like a restart, and would count twice."""

    async def run() -> None:
        asked: list[asyncio.Future[int]] = []
        seen: list[Any] = []

        def answers() -> list[Any]:
            asked.append(asyncio.get_running_loop().create_future())
            mine = asked[-1]

            async def answer() -> int:
                return await mine

            return [answer]

        monitor: Any = ReplicaMonitor(Handle(answers), int, seen.append)  # type: ignore[arg-type]
        first, second = (asyncio.ensure_future(monitor.refresh()) for _ in range(2))
        await until(lambda: len(asked) == 2)
        asked[1].set_result(2)
        assert await second == [2]
        asked[0].set_result(1)
        assert await first == [2]
        assert (monitor.reports, seen) == ([2], [[2]])

    asyncio.run(run())


# ---- drafters and links


def drafter_report(replica: str, *digests: str, address: str = "h:1") -> DrafterReport:
    heads = tuple(LiveHead(index, f"head-{digest}", digest) for index, digest in enumerate(digests))
    return DrafterReport(replica, address, heads, counters={"passes": 5.0}, key=f"of {address}")


def links_of(answers: Callable[[], list[Any]], rpc: Any) -> Any:
    return DrafterLinks(Handle(answers), rpc, lambda: True)  # type: ignore[arg-type]


def test_heads_that_changed_in_a_poll_that_failed_are_told_later() -> None:
    num_failures = 0

    async def rpc(method: str, args: Any = ()) -> list[Any]:
        nonlocal num_failures
        if method == "remote_report" and not num_failures:
            num_failures += 1
            raise RuntimeError("the engine did not answer")
        return []

    async def run() -> None:
        told: list[Any] = []
        links = links_of(lambda: [says(drafter_report("r", "digest"))], rpc)
        links.start(told.append)
        await until(lambda: told)
        links._task.cancel()
        assert (told, num_failures) == ([("digest",)], 1)

    asyncio.run(run())


def test_the_engine_is_told_addresses_and_digests() -> None:
    reports = [drafter_report("r2", "a", "b", address="h:2"), drafter_report("r1", "a", "b", address="h:1")]
    drafters = drafters_of(reports)
    assert [drafter["address"] for drafter in drafters] == ["h:1", "h:2"]
    assert drafters[0]["heads"] == {0: "a", 1: "b"}
    assert drafters[0]["key"] == "of h:1"
    assert drafters_of(reversed(reports)) == drafters


def test_a_drafter_is_dropped_when_it_is_missed_for_some_time() -> None:
    links = links_of(list, None)
    stays, goes = drafter_report("r1", "a", address="h:1"), drafter_report("r2", "a", address="h:2")
    assert links.known([stays, goes]) == [stays, goes]
    swapped = drafter_report("r1", "b", address="h:1")
    for _ in range(MAX_MISSED_POLLS):
        assert links.known([swapped]) == [swapped, goes]
    assert links.known([swapped]) == [swapped]
    for _ in range(MAX_MISSED_POLLS):
        assert links.known([]) == [swapped]
    assert links.known([swapped]) == [swapped]
    for _ in range(MAX_MISSED_POLLS):
        assert links.known([]) == [swapped]
    assert links.known([]) == []


def test_heads_change_when_most_drafters_have_changed() -> None:
    old, new = drafter_report("r1", "a"), drafter_report("r2", "b")
    assert agreed_heads([]) == ()
    assert agreed_heads([old]) == ("a",)
    assert agreed_heads([old, new]) == ()
    assert agreed_heads([old, new, new]) == ("b",)


def test_links_are_those_of_the_worker_that_sends() -> None:
    link = {
        "address": "h:1", "state": "late", "path": "tcp", "problem": "late", "average_pass_s": 0.1, "num_steps": 7,
        "num_requests": 2, "sum_wait_s": 0.5, "heads": {"0": "a"},
    }  # fmt: skip
    found = link_reports([{}, {"counts": {}, "pool": {"num_up": 0, "links": [link]}}])
    (shown,) = found
    counters = {"steps": 7.0, "wait_s": 0.5}
    assert shown == {
        "drafter": "h:1", "state": "late", "path": "tcp", "problem": "late", "average_pass_s": 0.1, "counters": counters
    }  # fmt: skip
    assert link_reports([{}, {}]) == ()


# ---- a drafter's heads


class Heads:
    """Heads by their folders, without weights; a broken one raises what nobody foresaw."""

    num_places = 2

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def directory(self, name: str) -> Path:
        if name == "candidate-x":
            raise LackingHeadError("not here")
        return Path(name)

    def load(self, name: str) -> Any:
        if Path(name).name == "broken":
            raise KeyError("fc.weight")
        self.loaded.append(Path(name).name)
        return SimpleNamespace(name=name, digest=Path(name).name, runtime=None, served=None)


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A drafter replica that was built with the heads a, and b for code; what it may have instead is there too."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 9, "num_depths": 7, "hidden_size": 8,
        "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32,
    }  # fmt: skip
    for name in ("a", "b", "c", "d", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "d" / "config.json").write_text(json.dumps({**config, "num_depths": "7"}))
    monkeypatch.setattr("deployments.drafter.head_digest", lambda folder: folder.name)
    a, b = (str(tmp_path / name) for name in "ab")
    replica: Any = type("Quiet", (DrafterReplica,), {"__del__": lambda self: None})
    replica = replica.__new__(replica)
    replica.__dict__ |= {
        "_settings": DrafterSettings(head=a, placement="remote", max_draft_tokens=7, heads_by_workload={"code": b}),
        "_loader": Heads(),
        "_refused": "",
        "_is_configured": False,
        "_swapping": asyncio.Lock(),
        "_swaps": set(),
        "_places": {0: Heads().load(a), 1: Heads().load(b)},
        "_live": (HeadRef(a, "a"), HeadRef(b, "b")),
        "_configured": (HeadRef(a, "a"), HeadRef(b, "b")),
        "_orders": HeadOrders(),
        "_problems": {},
        "_lacking": (),
        "_server": SimpleNamespace(swap=lambda *args: None, stop=lambda: None, report=lambda: {"targets": 0}),
    }
    return replica


def live(replica: Any, *user_configs: Any) -> list[str]:
    """Its heads after these, one after the other."""

    async def run() -> None:
        for user_config in user_configs:
            await replica._swap(user_config)

    asyncio.run(run())
    return digests(replica)


def digests(replica: Any) -> list[str]:
    """Of the heads that draft, by index."""
    return [head.digest for head in replica._live]


def test_the_live_heads_are_those_of_the_last_user_config_whatever_came_before(drafter: Any, tmp_path: Path) -> None:
    """A replica that starts later gets the last one only, and must have the same heads."""
    code = {"heads_by_workload": {"code": str(tmp_path / "c")}}
    assert live(drafter, code) == ["a", "c"]
    assert live(drafter, {"head": str(tmp_path / "c")}) == ["c", "b"]
    assert live(drafter, {}) == ["a", "b"]


@pytest.mark.parametrize(("name", "words"), [("broken", "KeyError('fc.weight')"), ("d", "num_depths")])
def test_a_head_that_fails_in_an_unforeseen_way_is_refused_with_the_reason(
    drafter: Any, tmp_path: Path, name: str, words: str
) -> None:
    assert live(drafter, {"head": str(tmp_path / name)}) == ["a", "b"]
    assert words in drafter._refused
    assert live(drafter, {}) == ["a", "b"]
    assert drafter._refused == ""


def test_a_drafter_that_starts_has_its_new_head_before_it_drafts(drafter: Any, tmp_path: Path) -> None:
    """One that is restarted after a swap would first draft with the head before it."""

    async def run() -> None:
        await drafter.reconfigure({"head": str(tmp_path / "c")})
        assert digests(drafter)[0] == "c"
        await drafter.reconfigure({})
        assert digests(drafter)[0] == "c", "later, Serve does not wait"
        await until(lambda: digests(drafter)[0] == "a")

    asyncio.run(run())


def followed(replica: Any, **orders: Any) -> list[str]:
    """Its heads after the router's orders."""

    async def run() -> None:
        await replica.follow(HeadOrders(**orders))
        await asyncio.gather(*replica._swaps)

    asyncio.run(run())
    return digests(replica)


def test_a_head_that_was_taken_back_is_replaced_until_the_operator_names_another(drafter: Any, tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert live(drafter, {"head": c}) == ["c", "b"]
    assert followed(drafter, instead={"c": HeadRef(a, "a")}) == ["a", "b"]
    assert [head.digest for head in drafter._configured] == ["c", "b"]
    assert live(drafter, {"head": c}) == ["a", "b"], "a replica that starts anew gets the same user_config"
    assert live(drafter, {"head": b, "heads_by_workload": {"code": c}}) == ["b", "a"], "whatever index it has"
    assert live(drafter, {}) == ["a", "b"]
    assert followed(drafter, instead={"a": HeadRef(c, "another")}) == ["a", "b"]
    assert "no longer those of head another" in drafter._problems[c]


def test_a_candidate_takes_a_spare_place_and_the_head_before_it_stays_loaded(drafter: Any, tmp_path: Path) -> None:
    drafter._loader.num_places = 3
    candidate = HeadRef(str(tmp_path / "c"))
    assert followed(drafter, extra=(candidate,)) == ["a", "b", "c"]
    assert followed(drafter, instead={"a": candidate}, extra=(candidate,)) == ["c", "b", "c"]
    assert followed(drafter, extra=(candidate,)) == ["a", "b", "c"]
    assert drafter._loader.loaded == ["c"], "it went back without loading anything"
    assert followed(drafter, extra=(HeadRef(str(tmp_path / "d")),)) == ["a", "b", "d"]
    assert {head.digest for head in drafter._places.values()} == {"a", "b", "d"}


def test_what_is_wrong_with_a_candidate_is_reported_and_the_others_draft_on(drafter: Any, tmp_path: Path) -> None:
    drafter._loader.num_places = 3

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} was trained for 3 depths")

    drafter._loader.load = refuse
    assert followed(drafter, extra=(HeadRef("candidate-x"),)) == ["a", "b"]
    assert (drafter._lacking, drafter._problems) == (("candidate-x",), {})
    assert followed(drafter, extra=(HeadRef(str(tmp_path / "c")),)) == ["a", "b"]
    assert "3 depths" in drafter._problems[str(tmp_path / "c")]
    assert drafter._refused == ""
    assert live(drafter, {"head": "no-such-head"}) == ["a", "b"]
    assert followed(drafter) == ["a", "b"]
    assert "no-such-head" in drafter._refused, "until another user_config"


def test_drafters_agree_before_anything_is_decided() -> None:
    orders = HeadOrders({"x": HeadRef("a", "a")})
    heads = (LiveHead(0, "a", "a"), LiveHead(1, "candidate-c", "c"))
    one = DrafterReport("r1", "h:1", heads, configured=(HeadRef("x", "x"),), orders=orders, problems={"p": "why"})
    view = drafters_view([one], None)
    assert view is not None
    assert (view.configured, view.instead, view.problems) == (one.configured, orders.instead, {"p": "why"})
    other = dataclasses.replace(one, replica="r2", heads=heads[:1])
    view = drafters_view([one, other], orders)
    assert view is not None
    assert view.live == (HeadRef("a", "a"),), "the candidate is not everywhere yet"
    assert drafters_view([], None) is None
    assert drafters_view([one], HeadOrders()) is None
    assert drafters_view([one, dataclasses.replace(other, configured=(HeadRef("z", "z"),))], None) is None
