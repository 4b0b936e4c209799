"""A drafter serves several targets, refuses what does not fit in words, swaps heads, and outlives whatever connects."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from peagle.drafter.engine import DraftEngine
from peagle.drafter.protocol import PROTOCOL_VERSION, MessageReader
from peagle.drafter.server import DrafterServer, greet
from tests.draft_engine_harness import CONFIG, head_runtime
from tests.transport_harness import (
    ROOT,
    SHAPE,
    DrafterProcess,
    Target,
    entry,
    eventually,
    make_pool,
    make_server,
    mapped_mailboxes,
    named_mailboxes,
    only_link,
    running,
    served_head,
)


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory() -> Iterator[None]:
    before = set(named_mailboxes())
    yield
    assert set(named_mailboxes()) == before


@pytest.mark.parametrize(
    ("settings", "digest", "reason"),
    [
        ({}, "another", "head 0 of the target is another, this drafter has digest0"),
        ({"shape": dataclasses.replace(SHAPE, hidden_size=8)}, "digest0", "hidden_size is 32 at the drafter and 8 at"),
        ({"shape": dataclasses.replace(SHAPE, dtype="float32")}, "digest0", "dtype is float64 at the drafter"),
        ({"aux_layer_ids": (0, 1)}, "digest0", "aux_layer_ids is"),
        ({"shape": dataclasses.replace(SHAPE, max_depth=9)}, "digest0", "up to 9 drafts, this drafter gives 4"),
    ],
)
def test_a_target_that_does_not_fit_learns_why(settings: dict[str, Any], digest: str, reason: str) -> None:
    with running(make_server()) as server:
        pool = make_pool(**settings)
        pool.set_drafters([entry(server.address, {0: digest})])
        eventually(lambda: "refused: " in only_link(pool)["problem"])
        assert reason in only_link(pool)["problem"].replace(f"is {CONFIG.hidden_size} at", "is 32 at")
        assert pool.num_up == 0
        eventually(lambda: server.report()["num_refused"])  # counted after the target was told
        pool.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 100,
        b"PEGL",
        struct.pack("<4sHHIQ", b"PEGL", PROTOCOL_VERSION + 1, 0, 2, 0) + b"{}",
        struct.pack("<4sHHIQ", b"PEGL", PROTOCOL_VERSION, 0, 2, 1 << 50) + b"{}",
        struct.pack("<4sHHIQ", b"PEGL", PROTOCOL_VERSION, 0, 16, 0) + b'{"kind":"hello"}',
        b"",
    ],
    ids=["web", "zeros", "cut short", "another version", "too large", "hello without fields", "nothing"],
)
def test_who_is_no_target_is_sent_away_and_others_are_served_meanwhile(data: bytes) -> None:
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
            target = Target(pool)
            target.check_step()
            with contextlib.suppress(ConnectionError):
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(10_000):
                    pass
        eventually(lambda: server.report()["num_refused"] == 1)
        target.check_step()
        pool.close()


def test_a_target_of_another_version_learns_it() -> None:
    with running(make_server()) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as other:
            other.sendall(struct.pack("<4sHHIQ", b"PEGL", 7, 0, 2, 10_000) + b"{}" + bytes(10_000))
            answer = MessageReader(other, 0, "drafter").read_within(5)
        assert answer.kind == "refused"
        assert f"protocol version 7, this side {PROTOCOL_VERSION}" in answer.field("reason", str)


def test_strangers_that_say_nothing_do_not_keep_targets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.drafter.server.HELLO_TIMEOUT_S", 0.5)
    with running(make_server()) as server:
        host, _, port = server.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(40)]
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        Target(pool).check_step()
        pool.close()
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_two_targets_with_the_same_slots_are_kept_apart(shared: bool) -> None:
    with running(make_server((0, 1))) as server:
        targets = []
        for seed in range(2):
            pool = make_pool(use_shared_memory=shared, name=f"target {seed}")
            pool.set_drafters([entry(server.address, {0: "digest1"} if seed else {3: "digest0"})])
            eventually(lambda pool=pool: pool.num_up)
            targets.append(Target(pool, seed=seed))
        failures: list[Exception] = []

        def run(i: int) -> None:
            target = targets[i]
            try:
                for num_rows in (4, 1, 3, 2, 1, 1, 5):
                    drafts = target.step(num_rows, head=0 if i else 3)
                    assert drafts == [target.expected(slot, head=i) for slot in range(3)]
            except Exception as error:  # noqa: BLE001 - shown by the test
                failures.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert {peer["name"] for peer in server.report()["targets"]} == {"target 0", "target 1"}
        for target in targets:
            target.pool.close()
        eventually(lambda: not server.report()["targets"])
        assert server._engine.num_requests == 0  # type: ignore[attr-defined]


TARGET = """
import sys, time
from tests.transport_harness import Target, eventually, make_pool
pool = make_pool(use_shared_memory=sys.argv[2] == "shared", min_deadline_s=60, max_deadline_s=60)
pool.set_drafters([{"address": sys.argv[1], "heads": {0: "digest0"}}])
eventually(lambda: pool.num_up)
target = Target(pool)
while True:
    target.check_step(1)
    if target.ends[0] == 5:
        print("five steps", flush=True)
    if target.ends[0] == 100:
        [target.restart(slot) for slot in range(3)]
"""


@pytest.mark.parametrize("path", ["shared", "tcp"])
def test_a_killed_target_is_forgotten_and_its_memory_freed(path: str) -> None:
    with DrafterProcess() as drafter:
        command = [sys.executable, "-c", TARGET, drafter.address, path]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            try:
                assert victim.stdout.readline() == "five steps\n"
                assert mapped_mailboxes(drafter.process.pid) == (path == "shared")
            finally:
                victim.send_signal(signal.SIGKILL)
            victim.wait()
        eventually(lambda: mapped_mailboxes(drafter.process.pid) == 0)
        pool = make_pool()
        pool.set_drafters([entry(drafter.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        Target(pool).check_step()
        pool.close()


class FailingEngine(DraftEngine):
    def step(self, steps: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")


def test_an_engine_that_fails_is_reported_and_its_targets_go_on_without_drafts() -> None:
    server = DrafterServer(FailingEngine({0: head_runtime(0)}), {0: served_head(0)})
    with running(server):
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        target = Target(pool)
        assert server.is_healthy()
        while server.is_healthy():
            eventually(lambda: pool.num_up)
            assert target.step(1) == [None] * 3
        eventually(lambda: "illegal memory access" in only_link(pool)["problem"])
        assert server.report()["num_failures"] == 3
        assert "illegal memory access" in server.report()["last_error"]
        pool.close()


def test_a_step_that_no_engine_can_take_ends_its_connection_and_no_other() -> None:
    with running(make_server()) as server:
        pool, other = make_pool(), make_pool()
        for each in (pool, other):
            each.set_drafters([entry(server.address, {0: "digest0"})])
            eventually(lambda each=each: each.num_up)
        target, bad = Target(pool), Target(other)
        target.check_step()
        bad.tokens = [[10_000] * 120] * 3
        assert bad.step() == [None] * 3
        eventually(lambda: server.report()["num_dropped"] == 1)
        target.check_step()
        assert "next_tokens_R holds 10000" in eventually(lambda: only_link(other)["problem"])
        for each in (pool, other):
            each.close()


def test_a_drafter_that_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "peagle.drafter.client.MIN_BACKOFF_S", 60.0
    )  # that nobody is there any more is the next problem
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: server.report()["targets"])  # a link is up before the drafter has taken up the target
    assert "says good-bye: the drafter ends" in eventually(lambda: only_link(pool)["problem"])
    server.stop()
    pool.close()


def test_a_drafter_that_ends_says_so_to_whoever_is_just_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    greeted, is_over = threading.Event(), threading.Event()

    def greet_late(*args: Any) -> Any:
        peer = greet(*args)
        greeted.set()
        is_over.wait(10)
        return peer

    monkeypatch.setattr("peagle.drafter.server.greet", greet_late)
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        assert greeted.wait(10)
    is_over.set()
    eventually(lambda: "says good-bye: the drafter ends" in only_link(pool)["problem"])
    eventually(lambda: pool.num_up == 0)
    pool.close()


def test_a_newcomer_whose_mailbox_is_not_taken_is_counted_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = iter([True])

    def greet_or_fail(connection: socket.socket, *args: Any) -> Any:
        if next(failing, False):
            connection.close()
            raise RuntimeError("CUDA error: out of memory")
        return greet(connection, *args)

    monkeypatch.setattr("peagle.drafter.server.greet", greet_or_fail)
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        assert server.report()["num_refused"] == 1
        Target(pool).check_step()
        pool.close()


def test_bad_settings_are_refused_by_name() -> None:
    engine = DraftEngine({0: head_runtime(0)})
    with pytest.raises(ValueError, match="heads = "):
        DrafterServer(engine, {})
    with pytest.raises(ValueError, match="heads = "):
        DrafterServer(engine, {0: served_head(0), 1: served_head(0)})
    with running(make_server()) as taken, pytest.raises(OSError, match="in use"):
        make_server(port=int(taken.address.rpartition(":")[2]))
