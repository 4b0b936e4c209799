"""A link gives the drafts of its drafter, and no drafts, soon, when something happens to the drafter. Both ways of the
data: shared memory and TCP."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from peagle.drafter.client import LinkPool
from tests.draft_engine_harness import MAX_DEPTH
from tests.transport_harness import (
    SHAPE,
    DrafterProcess,
    SlowEngine,
    Target,
    eventually,
    make_pool,
    make_server,
    named_mailboxes,
    running,
)

NO_DRAFTS = [None] * 3
PATHS = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])


def connected(address: str, **settings: object) -> LinkPool:
    pool = make_pool(**settings)
    pool.set_drafters([{"address": address, "heads": {0: "digest0"}}])
    eventually(lambda: pool.num_up)
    return pool


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(named_mailboxes())
    yield
    assert set(named_mailboxes()) == before


@PATHS
def test_drafts_are_those_of_the_drafter_at_every_step(shared: bool) -> None:
    with running(make_server()) as server:
        pool = connected(server.address, use_shared_memory=shared)
        assert pool.report()["links"][0]["path"] == ("shared memory" if shared else "tcp")
        target = Target(pool)
        for num_rows in (5, 1, 4, 2, 1):
            target.check_step(num_rows)
        target.restart(1)
        target.ends = [target.ends[0], 0, target.ends[2]]
        target.check_step(2)
        assert target.step(1, depth=0) == [[-1] * MAX_DEPTH] * 3
        target.check_step(1)
        pool.close()


@PATHS
def test_service_and_wait_are_summed_over_the_answers(shared: bool) -> None:
    """Lower bounds from a drafter that sleeps; the wait holds the service, since the target has nothing else to do."""
    delay_s, num_steps = 0.05, 3
    with running(make_server(delay_s=delay_s)) as server:
        pool = connected(server.address, use_shared_memory=shared)
        target = Target(pool)
        for _ in range(num_steps):
            target.check_step()
        link = pool.report()["links"][0]
        assert link["num_answered"] == num_steps
        assert link["sum_service_s"] >= num_steps * delay_s
        assert link["sum_wait_s"] >= num_steps * delay_s * 0.9  # `send` returns before the wait begins
        assert delay_s <= link["last_service_s"] <= link["sum_service_s"]
        pool.close()


@PATHS
def test_a_killed_drafter_costs_drafts_only_and_one_on_the_same_port_is_found(shared: bool) -> None:
    with DrafterProcess() as first:
        pool = connected(first.address, use_shared_memory=shared)
        target = Target(pool)
        target.check_step()
        first.kill()
        eventually(lambda: pool.num_up == 0)
        assert target.step() == NO_DRAFTS
        assert pool.report()["links"][0]["state"] == "connecting"
        with DrafterProcess(port=first.port):
            eventually(lambda: pool.num_up)
            target.begin_cold()
            target.check_step()
            assert pool.report()["links"][0]["num_connections"] == 2
            pool.close()


@PATHS
def test_a_drafter_killed_while_it_drafts_releases_the_target_at_once(shared: bool) -> None:
    with DrafterProcess(delay_s=30.0) as drafter:
        pool = connected(drafter.address, use_shared_memory=shared, min_deadline_s=25.0, max_deadline_s=25.0)
        threading.Timer(0.3, drafter.process.kill).start()
        begin_s = time.monotonic()
        assert Target(pool).step() == NO_DRAFTS
        assert time.monotonic() - begin_s < 12, "the deadline ended the wait, not the drafter's death"
        pool.close()


@PATHS
def test_a_stopped_drafter_costs_one_deadline_and_catches_up(shared: bool) -> None:
    with DrafterProcess() as drafter:
        pool = connected(drafter.address, use_shared_memory=shared, min_deadline_s=0.5, max_deadline_s=5.0)
        target = Target(pool)
        target.check_step()
        drafter.signal(signal.SIGSTOP)
        assert target.step() == NO_DRAFTS
        link = pool.report()["links"][0]
        assert (link["state"], link["num_timeouts"]) == ("late", 1)
        for _ in range(3):
            assert target.step(1) == NO_DRAFTS
        assert pool.report()["links"][0]["num_steps"] == 2, "nothing is sent to a drafter that is late"
        drafter.signal(signal.SIGCONT)
        target.begin_cold()
        eventually(lambda: target.pool.assign(*_nobody()) or pool.num_up)
        target.check_step()
        assert pool.report()["links"][0]["num_connections"] == 1, "its connection held"
        pool.close()


def _nobody() -> tuple[object, object]:
    import numpy as np

    return np.zeros(0, np.int32), np.zeros(0, np.int32)


@PATHS
def test_a_slow_drafter_gives_no_drafts_and_its_late_ones_are_never_taken_for_new_ones(shared: bool) -> None:
    with running(make_server(delay_s=0.4)) as server:
        pool = connected(server.address, use_shared_memory=shared, min_deadline_s=0.05, max_deadline_s=0.05)
        target = Target(pool)
        answers = []
        for _ in range(4):
            answers += [target.step(1), target.step(1)]  # the second finds the link late
            eventually(lambda: target.pool.assign(*_nobody()) or pool.num_up)  # the late answer has come
        assert answers == [NO_DRAFTS] * 8
        link = pool.report()["links"][0]
        assert 4 <= link["num_timeouts"] == link["num_steps"]
        pool.close()


@PATHS
def test_a_drafter_that_has_become_slower_is_waited_for_longer(shared: bool) -> None:
    """More targets share it, say. If only answers in time counted, none would ever be in time again."""
    with running(make_server()) as server:
        pool = connected(server.address, use_shared_memory=shared, min_deadline_s=0.05, max_deadline_s=5.0)
        target = Target(pool)
        target.step(1)
        assert isinstance(server._engine, SlowEngine)
        server._engine.delay_s = 0.15
        (link,) = pool._links.values()
        link._times.average_s = 0.001  # so it was so far, however slow this machine is
        deadline_s = time.monotonic() + 15
        while target.step(1) == NO_DRAFTS:
            target.restart(0)  # positions do not run out
            target.restart(1)
            target.restart(2)
            eventually(lambda: pool.assign(*_nobody()) or pool.num_up)
            assert time.monotonic() < deadline_s, "it is given up at every step"
        assert link.stats.num_timeouts >= 1
        assert (link.report()["average_pass_s"] or 0.0) > 0.05
        pool.close()


def test_a_drafter_that_is_silent_for_long_is_left_and_its_requests_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.drafter.client.MAX_SILENCE_S", 1.0)
    with DrafterProcess() as stopped, running(make_server()) as other:
        pool = connected(stopped.address, min_deadline_s=0.3, max_deadline_s=2.0)
        target = Target(pool)
        target.check_step()
        pool.set_drafters([{"address": a, "heads": {0: "digest0"}} for a in (stopped.address, other.address)])
        eventually(lambda: pool.num_up == 2)
        stopped.signal(signal.SIGSTOP)
        assert target.step() == NO_DRAFTS
        eventually(lambda: pool.report()["links"][0]["state"] == "connecting")
        assert "no sign of life" in pool.report()["links"][0]["problem"]
        target.begin_cold()
        target.check_step()
        assert target.homes == [other.address] * 3
        pool.close()


def test_a_step_that_begins_while_the_connection_ends_is_let_go_at_once() -> None:
    """The engine's thread takes up a drafter that has caught up, and sends, just as the link's thread finds it gone."""
    with running(make_server()) as server:
        pool = connected(server.address)
        eventually(lambda: server.report()["targets"])  # a link is up before the drafter has taken up the target
        (link,) = pool._links.values()
        session = link._session
        assert session is not None
        link.begin_step()
        session.late, lock = True, session.lock

        class Ending:
            """The session's lock; before the link's thread gets it, a step begins."""

            def __enter__(self) -> None:
                session.lock = lock
                assert link.begin_step(), "it is late no more, so a step may go out now"
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        session.lock = Ending()  # type: ignore[assignment]
        server.stop()
        eventually(lambda: session.closed)
        assert session.mailbox.is_aborted(), "whoever waits would wait until the deadline"
        pool.close()


class _Web(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("what", ["web", "garbage", "cut short", "silence", "nobody"])
def test_a_peer_that_is_no_drafter_is_named_and_tried_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.drafter.client.HELLO_TIMEOUT_S", 0.5)
    problems = {
        "web": "does not speak this protocol: it sent b'<!DOCTYPE HTML>",
        "garbage": "does not speak this protocol: it sent b'220 mail'",
        "cut short": "in the middle of a message: 6 of 20 bytes",
        "silence": "sent no whole message within 0.5 s",
        "nobody": "refused",
    }
    server = HTTPServer(("127.0.0.1", 0), _Web) if what == "web" else None
    listener = server.socket if server else socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if what != "silence":
                connection.sendall(b"220 mail" if what == "garbage" else b"PEGL\x01\x00")
                connection.recv(10_000)
                connection.close()

    if what == "nobody":
        listener.close()
    else:
        threading.Thread(target=server.serve_forever if server else answer, daemon=True).start()
    pool = make_pool()
    pool.set_drafters([{"address": f"127.0.0.1:{port}", "heads": {0: "digest0"}}])
    eventually(lambda: problems[what] in pool.report()["links"][0]["problem"])
    assert Target(pool).step() == NO_DRAFTS
    assert pool.num_up == 0
    pool.close()
    if server:
        server.shutdown()
        server.server_close()
    elif what != "nobody":
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_step_beyond_the_agreed_sizes_is_the_callers_mistake() -> None:
    with running(make_server()) as server:
        pool = connected(server.address)
        with pytest.raises(ValueError, match=f"3 requests, .* rows; agreed were 4, {SHAPE.max_num_rows}"):
            Target(pool).step(num_rows=30)
        pool.close()
