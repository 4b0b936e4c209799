"""Requests stay with the drafter that has their cache, and find another one when it goes."""

from __future__ import annotations

import collections
import threading
from typing import Any

import numpy as np
import pytest

from peagle.drafter.client import KnownDrafter, PassTimes, Session, _rank, connect, read_drafters
from tests.draft_engine_harness import head_runtime
from tests.transport_harness import (
    DrafterProcess,
    Target,
    eventually,
    make_pool,
    make_server,
    running,
    served_head,
)

HEADS = {0: "digest0"}


def entry(address: str, heads: dict[int, str] | None = None) -> dict[str, object]:
    return {"address": address, "heads": heads or HEADS}


@pytest.mark.parametrize(
    ("drafters", "problem"),
    [
        ("127.0.0.1:1", "drafters is a str, not a list"),
        ([{"address": "h:1"}], r"drafters\[0\] must have the fields address, heads"),
        ([{"address": "h:1", "heads": HEADS, "key": 3}], r"drafters\[0\].key is a int, not text"),
        ([{"address": "h:1", "heads": HEADS, "weight": 2}], r"drafters\[0\]"),
        ([entry("h")], r"drafters\[0\].address = 'h' must be host:port"),
        ([entry("h:0")], r"must be host:port"),
        ([entry("h:99999")], r"must be host:port"),
        ([entry("h:1"), entry("h:1")], r"drafters\[1\].address = h:1 is there twice"),
        ([{"address": "h:1", "heads": {}}], r"drafters\[0\].heads = \{\}"),
        ([entry("h:1", {0: ""})], r"drafters\[0\].heads: 0: ''"),
        ([entry("h:1", {63: "d"})], r"drafters\[0\].heads: 63: 'd' must be a head's number, 0 .. 62, and its digest"),
        ([entry("h:1", {"²": "d"})], r"drafters\[0\].heads: '²': 'd' must be a head's number"),  # type: ignore[dict-item]
    ],
)
def test_a_bad_list_of_drafters_is_refused_by_entry_and_changes_nothing(drafters: object, problem: str) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match=problem):
        pool.set_drafters(drafters)
    assert pool.report()["links"] == []


def test_numbers_of_heads_may_come_as_text_as_json_has_them() -> None:
    assert read_drafters([{"address": "[::1]:80", "heads": {"1": "d"}}]) == {"[::1]:80": KnownDrafter({1: "d"})}


def test_losing_one_of_three_moves_only_its_own_requests() -> None:
    addresses = [f"10.0.0.{i}:7000" for i in range(3)]
    keys = [f"request {i}" for i in range(3000)]
    before = {key: max(addresses, key=lambda address: _rank(key, address)) for key in keys}
    after = {key: max(addresses[:2], key=lambda address: _rank(key, address)) for key in keys}
    assert all(after[key] == home for key, home in before.items() if home != addresses[2])
    assert min(collections.Counter(before.values()).values()) > 850
    assert min(collections.Counter(after.values()).values()) > 1350


def test_requests_stay_where_they_are_when_a_drafter_comes_and_leave_a_drained_one_when_they_end() -> None:
    with running(make_server()) as first, running(make_server()) as second:
        pool = make_pool()
        pool.set_drafters([entry(first.address)])
        eventually(lambda: pool.num_up)
        target = Target(pool)
        target.check_step()
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
        assert [link["draining"] for link in pool.report()["links"]] == [True, False]
        for slot in (1, 2):
            target.restart(slot)
        target.check_step()
        assert [link["address"] for link in pool.report()["links"]] == [second.address]
        eventually(lambda: not first.report()["targets"])
        pool.close()


def test_one_of_two_drafters_lost_its_requests_begin_cold_at_the_other() -> None:
    with DrafterProcess() as lost, running(make_server()) as other:
        pool = make_pool()
        pool.set_drafters([entry(lost.address)])
        eventually(lambda: pool.num_up)
        target = Target(pool)
        target.check_step()
        pool.set_drafters([entry(lost.address), entry(other.address)])
        eventually(lambda: pool.num_up == 2)
        target.restart(0)
        target.check_step()
        was_there = [slot for slot, home in enumerate(target.homes) if home == lost.address]
        assert {1, 2} <= set(was_there)
        lost.kill()
        eventually(lambda: pool.num_up == 1)
        for slot in was_there:
            target.firsts[slot] = target.ends[slot]
        target.check_step()
        assert target.homes == [other.address] * 3
        target.check_step()
        pool.close()


def test_a_drafter_gets_only_requests_of_heads_that_it_serves() -> None:
    with running(make_server((0,))) as first, running(make_server((1, 0))) as second:
        pool = make_pool()
        pool.set_drafters([entry(first.address), entry(second.address, {1: "digest1"})])
        eventually(lambda: pool.num_up == 2)
        target, other = Target(pool), Target(pool)
        target.check_step()
        assert target.homes == [first.address] * 3
        pool.finish(range(3))
        other.check_step(head=1)
        assert other.homes == [second.address] * 3
        pool.finish(range(3))
        assert Target(pool).step(head=2) == [None] * 3
        pool.close()


def test_a_drafter_may_be_asked_for_other_heads_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    may_connect = threading.Event()
    may_connect.set()

    def connected(*args: Any) -> Session:
        assert may_connect.wait(60)
        return connect(*args)

    monkeypatch.setattr("peagle.drafter.client.connect", connected)
    with running(make_server((0, 1))) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address)])
        eventually(lambda: pool.num_up)
        target = Target(pool)
        target.check_step()
        may_connect.clear()
        pool.set_drafters([entry(server.address, {1: "digest1"})])
        assert target.step(head=1) == [None] * 3
        may_connect.set()
        eventually(lambda: pool.report()["links"][0]["num_connections"] == 2 and pool.num_up)
        target.begin_cold()
        target.check_step(head=1)
        pool.set_drafters([entry(server.address, {1: "digest1"})])
        target.check_step(head=1)
        assert pool.report()["links"][0]["num_connections"] == 2
        pool.close()


def test_heads_asked_for_in_the_moment_of_connecting_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a new connection's heads and its being taken up, other heads are asked for."""
    with running(make_server((0, 1))) as server:
        pool = make_pool()
        heads = {1: "digest1"}
        asking = threading.Thread(target=pool.set_drafters, args=([entry(server.address, heads)],))

        class Looked(dict[int, str]):
            def __eq__(self, other: object) -> bool:
                if asking.ident is None:
                    asking.start()
                    asking.join(0.2)  # who asks may have to wait until the connection is taken up
                return dict.__eq__(self, other)

            def __ne__(self, other: object) -> bool:
                return not self == other

        def connected(*args: Any) -> Session:
            made = connect(*args)
            made.heads = Looked(made.heads)
            return made

        monkeypatch.setattr("peagle.drafter.client.connect", connected)
        pool.set_drafters([entry(server.address)])
        eventually(lambda: pool.num_up and asking.ident)
        asking.join()
        eventually(lambda: Target(pool).step(head=1) != [None] * 3)
        pool.close()


def test_a_target_keeps_no_reducer_of_heads_that_were_swapped_for_others() -> None:
    """They are large, on a GPU, and a head may be swapped every hour. One that comes back is drafted with again."""
    with running(make_server((0, 1))) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address)])
        eventually(lambda: pool.num_up)
        target = Target(pool)
        target.check_step()
        for head in (2, 3, 0):
            server.swap(0, head_runtime(head), served_head(head))
            eventually(lambda head=head: pool.report()["links"][0]["heads"] == {"0": f"digest{head}"} and pool.num_up)
            target.begin_cold()
            assert target.step() == [target.expected(slot, head=head) for slot in range(3)]
            assert target.step() == [target.expected(slot, head=head) for slot in range(3)]
            assert set(pool._reducers) == {f"digest{head}"}
        pool.close()


def test_nobody_there_is_no_error_and_requests_find_a_drafter_that_comes() -> None:
    pool = make_pool()
    target = Target(pool)
    assert target.step() == [None] * 3
    with running(make_server()) as server:
        pool.set_drafters([entry(server.address)])
        eventually(lambda: pool.num_up)
        target.begin_cold()
        target.check_step()
        pool.set_drafters([])
        target.check_step()
        pool.finish(range(3))
        assert pool.report()["links"] == []
        pool.close()
        pool.close()


def test_the_deadline_is_three_expected_passes_within_its_bounds() -> None:
    times = PassTimes(0.01, 1.0)
    assert times.deadline_s(8) == 1.0, "nothing is known yet"
    for _ in range(200):
        times.add(0.02, 8)
    assert times.deadline_s(8) == pytest.approx(0.06)
    assert times.deadline_s(1) == pytest.approx(0.06), "a pass has a fixed part: fewer rows are not faster"
    assert times.deadline_s(80) == pytest.approx(0.6), "a chunk of a long prompt takes longer"
    assert times.deadline_s(8000) == 1.0
    for _ in range(200):
        times.add(0.0001, 8)
    assert times.deadline_s(8) == 0.01
    for bounds in ((0.0, 1.0), (2.0, 1.0), (0.1, np.inf)):
        with pytest.raises(ValueError, match="min_deadline_s"):
            PassTimes(*bounds)


def test_a_drafter_that_asks_for_a_key_drafts_once_it_is_named() -> None:
    with running(make_server(key="of today")) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address) | {"key": "of yesterday"}])
        eventually(lambda: "key is missing or another one" in pool.report()["links"][0]["problem"])
        assert pool.num_up == 0
        pool.set_drafters([entry(server.address) | {"key": "of today"}])
        eventually(lambda: pool.num_up)
        Target(pool).check_step()
        pool.close()
