"""What replicas say of themselves: who runs, whatever becomes of the reports; and drafters, as targets hear of them."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.heads import DrafterReport, HeadRef
from deployments.replicas import MAX_MISSED_POLLS, DrafterLinks, EngineLost, PacedCall, ReplicaMonitor, agreed_heads


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
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _polls_follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replicas.POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("deployments.replicas.POLL_TIMEOUT_S", 0.5)


def test_only_replicas_that_are_gone_or_whose_engine_is_dead_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    """No report never means that no request is served. A hung replica holds up nobody; each reason is logged once."""
    seen: list[Any] = []
    answers = [hangs, hangs, says(RuntimeError("counts are broken")), says(1), says(2)]
    answers += says(ActorDiedError()), says(EngineLost("EngineDeadError: EngineCore encountered an issue"))
    monitor: Any = ReplicaMonitor(Handle(lambda: answers), lambda reports: seen.append(list(reports)))
    assert monitor.num_ready is None
    for _ in range(2):
        asyncio.run(asyncio.wait_for(monitor.refresh(), 60))
    assert (monitor.num_ready, seen, monitor.reports) == (5, [[1, 2]] * 2, [1, 2])
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert "counts are broken" in caplog.text


async def test_a_monitor_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    num_asked = 0

    def answers() -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        if num_asked in (2, 3):
            raise RuntimeError("the controller is gone")
        return [says(num_asked)]

    monitor: Any = ReplicaMonitor(Handle(answers))
    monitor.start()
    await until(lambda: (num_asked > 3 and monitor.reports[0] > 3) or monitor._task.done())
    assert not monitor._task.done()
    assert monitor.num_ready == 1
    monitor._task.cancel()
    assert caplog.text.count("its replicas cannot be asked") == 1


# ---- drafters and links


def drafter_report(replica: str, *digests: str, address: str = "h:1", **said: Any) -> DrafterReport:
    heads = tuple(HeadRef(f"head-{digest}", digest) for digest in digests)
    return DrafterReport(replica, address, heads, counters={"passes": 5.0}, key=f"of {address}", **said)


def test_a_drafter_is_dropped_when_it_is_missed_for_some_time() -> None:
    links: Any = DrafterLinks(Handle(list), None, lambda: True, lambda heads: None)
    stays, goes = drafter_report("r1", "a", address="h:1"), drafter_report("r2", "a", address="h:2")
    assert links.newest_reports([stays, goes]) == [stays, goes]
    swapped = drafter_report("r1", "b", address="h:1")
    for _ in range(MAX_MISSED_POLLS):
        assert links.newest_reports([swapped]) == [swapped, goes]
    for _ in range(2):  # one that comes back in time is missed anew
        assert links.newest_reports([swapped]) == [swapped]
        for _ in range(MAX_MISSED_POLLS):
            assert links.newest_reports([]) == [swapped]
    assert links.newest_reports([]) == []


def test_heads_change_when_most_drafters_have_changed() -> None:
    old, new = drafter_report("r1", "a"), drafter_report("r2", "b")
    assert agreed_heads([]) == ()
    assert agreed_heads([old]) == ("a",)
    assert agreed_heads([old, new]) == ()
    assert agreed_heads([old, new, new]) == ("b",)


async def test_those_who_ask_often_share_answers_that_are_not_older_than_their_question() -> None:
    starts: list[float] = []

    async def work() -> int:
        starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
        return len(starts)

    ask = PacedCall(work, 0.1)
    assert await ask() == 1
    assert await asyncio.gather(*(ask() for _ in range(50))) == [2] * 50
    first = asyncio.create_task(ask())
    await asyncio.sleep(0)
    first.cancel()  # its client leaves, and nobody else's answer with it
    assert await ask() == 3
    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(starts))
