"""Links give the drafts of their drafters, and no drafts, soon, when something happens to a drafter; requests stay with
the drafter that has their cache. Both ways of the data: shared memory and TCP."""

import collections
import contextlib
import signal
import socket
import threading
import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.common import free_port
from peagle.drafter import protocol
from peagle.drafter.pool import LinkPool
from tests.support.draft_engine_harness import MAX_DEPTH
from tests.support.transport_harness import (
    DrafterProcess,
    Target,
    connected,
    drafting,
    entry,
    eventually,
    make_pool,
    make_server,
    only_link,
    running,
)

NO_DRAFTS = [None] * 3
NOBODY = np.zeros(0, np.int32)
PATHS = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])


def until_up(pool: LinkPool) -> None:
    """Engine steps without requests, until the link is late no more."""
    eventually(lambda: pool.assign(NOBODY, NOBODY) or pool.num_up)


@PATHS
def test_drafts_are_those_of_the_drafter_at_every_step(shared: bool) -> None:
    with drafting(running(make_server()), use_shared_memory=shared) as (_, pool, target):
        assert only_link(pool)["path"] == ("shared memory" if shared else "tcp")
        for num_rows in (1, 4, 2, 1):
            target.check_step(num_rows)
        target.restart(1)
        target.check_step(2)
        assert target.step(1, depth=0) == [[-1] * MAX_DEPTH] * 3
        target.check_step(1)
        assert only_link(pool)["answered"] == 8


@PATHS
def test_a_killed_drafter_costs_drafts_only_and_one_on_the_same_port_is_found(shared: bool) -> None:
    process = DrafterProcess(port=free_port())  # of those that the system gives to nobody meanwhile
    with drafting(process, use_shared_memory=shared) as (first, pool, target):
        first.kill()
        eventually(lambda: pool.num_up == 0)
        assert target.step() == NO_DRAFTS
        eventually(lambda: "nobody listens there" in only_link(pool)["problem"])
        assert only_link(pool)["state"] == "connecting"
        with DrafterProcess(port=first.port):
            eventually(lambda: pool.num_up)
            target.begin_cold()
            target.check_step()
            assert only_link(pool)["connections"] == 2


@PATHS
def test_a_drafter_killed_while_it_drafts_releases_the_target_at_once(shared: bool) -> None:
    with DrafterProcess(delay_s=30.0) as drafter:
        pool = connected(drafter.address, use_shared_memory=shared, max_deadline_s=25.0)
        threading.Timer(0.3, drafter.process.kill).start()
        begin_s = time.monotonic()
        assert Target(pool).step() == NO_DRAFTS
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"


def has_drafts(pool: LinkPool) -> npt.NDArray[np.bool_]:
    """Of the three requests of its one link."""
    (link,) = pool.links.values()
    return link.has_drafts(np.arange(3, dtype=np.int32))


@PATHS
def test_a_stopped_drafter_costs_one_deadline_and_catches_up(shared: bool) -> None:
    with drafting(DrafterProcess(), use_shared_memory=shared, max_deadline_s=2.0) as (drafter, pool, target):
        assert has_drafts(pool).all()
        drafter.signal(signal.SIGSTOP)
        assert target.step() == NO_DRAFTS
        link = only_link(pool)
        assert (link["state"], link["timeouts"]) == ("late", 1)
        assert not has_drafts(pool).any()
        for _ in range(3):
            assert target.step(1) == NO_DRAFTS
        assert only_link(pool)["steps"] == 2, "nothing is sent to a drafter that is late"
        assert only_link(pool)["skipped"] >= 3
        drafter.signal(signal.SIGCONT)
        target.begin_cold()
        until_up(pool)
        target.check_step()
        assert has_drafts(pool).all()
        assert only_link(pool)["connections"] == 1, "its connection held"


def test_a_request_that_the_drafter_has_no_room_for_shows_as_one_without_drafts() -> None:
    """So that a scheduler does not take missing drafts for rejected ones."""
    with running(make_server(num_blocks=8)) as server:  # of four positions each: room for two of the three requests
        pool = connected(server.address)
        drafts = Target(pool).step(9)
        without = [slot for slot, drafts_K in enumerate(drafts) if drafts_K == [-1] * MAX_DEPTH]
        assert len(without) == 1
        assert has_drafts(pool).tolist() == [slot not in without for slot in range(3)]


@PATHS
def test_a_slow_drafter_gives_no_drafts_and_its_late_ones_are_never_taken_for_new_ones(shared: bool) -> None:
    with running(make_server(delay_s=1.0)) as server:
        pool = connected(server.address, use_shared_memory=shared, max_deadline_s=0.05)
        target = Target(pool)
        answers = []
        for _ in range(3):
            answers += [target.step(1), target.step(1)]  # the second finds the link late
            until_up(pool)
        assert answers == [NO_DRAFTS] * 6
        link = only_link(pool)
        assert 3 <= link["timeouts"] == link["steps"]


def test_a_drafter_that_is_late_again_and_again_is_asked_less_and_less() -> None:
    """Else each step would wait for its whole deadline."""
    with running(make_server(delay_s=0.1)) as server:
        target, began_s = Target(pool := connected(server.address, max_deadline_s=0.05)), time.monotonic()
        for _ in range(6):
            assert target.step(1) == NO_DRAFTS
            until_up(pool)
        assert only_link(pool)["timeouts"] == 6
        assert time.monotonic() - began_s > 0.05 * (1 + 3 + 7 + 15 + 31)


def test_requests_of_a_drafter_that_is_late_again_go_to_another_one_and_new_ones_too() -> None:
    with running(make_server(delay_s=0.1)) as slow, running(make_server()) as quick:
        target = Target(pool := connected(slow.address, quick.address, max_deadline_s=0.05), num_requests=4)
        target.step(1)
        assert set(target.homes) == {slow.address, quick.address}
        for _ in range(100):
            if set(target.homes) == {quick.address}:
                break
            target.step(1)
            time.sleep(0.02)
        assert set(target.homes) == {quick.address}
        eventually(lambda: pool.assign(NOBODY, NOBODY) or pool.num_up == 2)
        target.restart(0)
        target.step(1)
        assert target.homes[0] == quick.address  # which has the others


def test_a_drafter_that_is_silent_for_long_is_left_and_its_requests_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEARTBEAT_MS", 500)
    monkeypatch.setattr(protocol, "MAX_SILENCE_MS", 3000)
    with drafting(DrafterProcess(), max_deadline_s=2.0) as (stopped, pool, target), running(make_server()) as other:
        pool.set_drafters([entry(address) for address in (stopped.address, other.address)])
        eventually(lambda: pool.num_up == 2)
        stopped.signal(signal.SIGSTOP)
        assert target.step() == NO_DRAFTS
        eventually(lambda: pool.report()["links"][0]["state"] == "connecting")
        assert "closed the connection, hangs" in pool.report()["links"][0]["problem"]
        target.begin_cold()
        target.check_step()
        assert target.homes == [other.address] * 3


@pytest.mark.parametrize(
    ("said", "problem"),
    [(b"<!DOCTYPE HTML>" + b"x" * 300, "run the same release"), (b"220 mail", "does not speak this protocol")],
    ids=["web", "mail"],
)
def test_a_peer_that_is_no_drafter_is_named(said: bytes, problem: str) -> None:
    def answer() -> None:
        with contextlib.suppress(OSError):  # it has been shut down
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(said)
                    connection.recv(10_000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        pool = make_pool()
        pool.set_drafters([entry(f"127.0.0.1:{listener.getsockname()[1]}")])
        eventually(lambda: problem in only_link(pool)["problem"])
        assert Target(pool).step() == NO_DRAFTS
        assert pool.num_up == 0
        listener.shutdown(socket.SHUT_RDWR)


# Several drafters


def test_new_requests_go_to_the_drafter_with_the_fewest_and_links_of_one_head_share_its_projection() -> None:
    """On a GPU each projection takes memory that nothing set aside."""
    with running(make_server()) as first, running(make_server()) as second:
        pool = connected(first.address, second.address)
        target = Target(pool, num_requests=4)
        target.check_step()
        assert collections.Counter(target.homes) == {first.address: 2, second.address: 2}
        one, other = pool.links.values()
        assert one.projections[0] is other.projections[0]


def test_requests_stay_where_they_are_when_a_drafter_comes_and_leave_a_drained_one_when_they_end() -> None:
    with drafting(running(make_server())) as (first, pool, target), running(make_server()) as second:
        pool.set_drafters([entry(first.address), entry(second.address)])
        eventually(lambda: pool.num_up == 2)
        target.check_step()
        assert target.homes == [first.address] * 3
        pool.set_drafters([entry(second.address)])
        target.check_step()
        assert target.homes == [first.address] * 3, "requests of a drained drafter end there"
        target.restart(0)
        target.check_step()
        assert target.homes == [second.address, first.address, first.address]
        assert [number in pool._draining for number in pool.links] == [True, False]
        for slot in (1, 2):
            target.restart(slot)
        target.check_step()
        assert [link["drafter"] for link in pool.report()["links"]] == [second.address]
        eventually(lambda: not first.targets)


def test_a_drafter_gets_only_requests_of_heads_that_it_serves() -> None:
    with running(make_server((0,))) as first, running(make_server((1, 0))) as second:
        pool = make_pool()
        pool.set_drafters([entry(first.address), entry(second.address, {1: "digest1"})])
        eventually(lambda: pool.num_up == 2)
        target, other = Target(pool), Target(pool)
        target.check_step()
        assert target.homes == [first.address] * 3
        pool.finish_requests(range(3))
        other.check_step(head=1)
        assert other.homes == [second.address] * 3
        pool.finish_requests(range(3))
        assert Target(pool).step(head=2) == NO_DRAFTS


def test_nobody_there_is_no_error_and_requests_find_a_drafter_that_comes() -> None:
    pool = make_pool()
    target = Target(pool)
    assert target.step() == NO_DRAFTS
    with running(make_server()) as server:
        pool.set_drafters([entry(server.address)])
        eventually(lambda: pool.num_up)
        target.begin_cold()
        target.check_step()
        pool.set_drafters([])
        target.check_step()
        pool.finish_requests(range(3))
        assert pool.report()["links"] == []
        pool.close()  # again is no error


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"address": "nowhere"}, "matching regex"),
        ({"heads": {"first": "digest0"}}, "Expected `int`"),
        ({"head": "digest0"}, "unknown field `head`"),
    ],
)
def test_a_drafter_that_cannot_be_is_named_without_its_key(change: dict[str, Any], problem: str) -> None:
    pool = make_pool()
    with pytest.raises(msgspec.ValidationError, match=problem) as raised:
        pool.set_drafters([entry("127.0.0.1:1") | {"key": "secret"} | change])
    assert "secret" not in str(raised.value)
    assert pool.report()["links"] == []
