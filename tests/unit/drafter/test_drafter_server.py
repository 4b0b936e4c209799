"""A drafter serves several targets, refuses what does not fit in words, swaps heads, and outlives whatever connects."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from peagle.drafter import client
from peagle.drafter import server as of_servers
from peagle.drafter.engine import DraftEngine
from peagle.drafter.protocol import (
    FROM_DRAFTER,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Bye,
    Hello,
    StepDescriptor,
    message_frames,
    read_message,
)
from peagle.drafter.server import DrafterServer
from peagle.drafter.shared_memory import Ring
from tests.support.draft_engine_harness import CONFIG, head_runtime, num_requests
from tests.support.transport_harness import (
    ROOT,
    SHAPE,
    DrafterProcess,
    Target,
    connected,
    drafting,
    entry,
    eventually,
    make_pool,
    make_server,
    mapped_rings,
    only_link,
    running,
    served_head,
)


@contextlib.contextmanager
def stranger(server: DrafterServer) -> Iterator[zmq.Socket[bytes]]:
    """A socket that speaks zmq with the drafter, and what it likes in it."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        socket_.linger = 0
        socket_.connect(f"tcp://{server.address}")
        yield socket_


def test_a_target_that_does_not_fit_learns_why() -> None:
    with running(make_server()) as server:
        pool = make_pool(shape=dataclasses.replace(SHAPE, hidden_size=8))
        pool.set_drafters([entry(server.address)])
        eventually(lambda: "refused: " in only_link(pool)["problem"])
        assert f"hidden_size is {CONFIG.hidden_size} at the drafter and 8 at" in only_link(pool)["problem"]
        assert pool.num_up == 0
        eventually(lambda: server.stats.refused_connections)  # counted after the target was told


STEP = StepDescriptor(*[np.zeros(1, np.int32)] * 4, num_rows=1, number=1)
HELLO = Hello("target", SHAPE, CONFIG.aux_layer_ids, {0: "digest0"}, "another host")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"hello"], "it speaks b'hello', this side b'peagle/8': run the same release"),
        ([PROTOCOL], "it speaks"),
        ([PROTOCOL, b"\xff" * 50], "a message that does not fit"),
        ([PROTOCOL, msgspec.msgpack.encode({"type": "Hello"})], "missing required field `name`"),
        (message_frames(STEP), "StepDescriptor came where a hello was due"),
    ],
)
def test_a_message_that_does_not_fit_is_refused_in_words_and_others_are_served(frames: list[Any], reason: str) -> None:
    with drafting(running(make_server())) as (server, _, target), stranger(server) as socket_:
        socket_.send_multipart(frames)
        target.check_step()
        assert socket_.poll(60_000)
        answer, _ = read_message(socket_.recv_multipart(copy=False), FROM_DRAFTER)
        assert isinstance(answer, Bye)
        assert reason in answer.reason
        assert server.stats.refused_connections == 1
        target.check_step()


def test_a_welcomed_target_that_speaks_out_of_turn_is_let_go() -> None:
    with running(make_server()) as server, stranger(server) as socket_:
        socket_.send_multipart(message_frames(HELLO))
        eventually(lambda: server.targets)
        socket_.send_multipart(message_frames(HELLO))
        eventually(lambda: not server.targets)
        assert server.stats.dropped == 1


def test_the_requests_of_an_idle_target_hold_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end comes with the next step, and there may be none."""
    with drafting(running(make_server())) as (server, _, target):
        (table,) = server.engine.tables.values()
        assert table.row_of
        monkeypatch.setattr(of_servers, "_IDLE_S", 0.2)
        eventually(lambda: not table.row_of)
        target.begin_cold()
        target.check_step()


def test_a_drafter_with_a_key_reads_nothing_of_a_stranger() -> None:
    """Who does not know the key gets no message through, and so makes the drafter keep nothing."""
    with running(make_server(key="secret")) as server, stranger(server) as socket_:
        socket_.sndtimeo = 1000
        with contextlib.suppress(zmq.Again):  # refused between two frames it can send no further
            socket_.send_multipart([*message_frames(HELLO), bytes(1 << 20)])
        pool = make_pool()
        pool.set_drafters([entry(server.address) | {"key": "of yesterday"}])
        eventually(lambda: "key is missing or another one" in only_link(pool)["problem"])
        assert pool.num_up == 0
        pool.set_drafters([entry(server.address) | {"key": "secret"}])
        eventually(lambda: pool.num_up)
        Target(pool).check_step()
        assert not socket_.poll(500), "it was answered"
        assert server.stats.connections == 1
        assert server.stats.refused_connections == 0


def test_a_frame_that_no_target_sends_ends_its_connection_unread() -> None:
    with running(make_server()) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=120) as other:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
            other.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            other.sendall(b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"))  # a long frame's head, and no more
            while other.recv(4096):
                pass
        assert server.is_healthy()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_two_targets_with_the_same_slots_are_kept_apart(shared: bool) -> None:
    with running(make_server((0, 1))) as server:
        targets = []
        for seed in range(2):
            heads = {0: "digest1"} if seed else {3: "digest0"}
            pool = connected(server.address, heads=heads, use_shared_memory=shared, name=f"target {seed}")
            targets.append(Target(pool, seed=seed))

        def run(i: int) -> None:
            for num_rows in (4, 1, 3, 2, 1, 1, 5):
                drafts = targets[i].step(num_rows, head=0 if i else 3)
                assert drafts == [targets[i].expected(slot, head=i) for slot in range(3)]

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, range(2))) == [None, None]
        assert {*server.targets} == {"target 0", "target 1"}
        for target in targets:
            target.pool.close()
        eventually(lambda: not server.targets)
        assert num_requests(server.engine) == 0  # type: ignore[attr-defined]


TARGET = """
import sys, time
from tests.support.transport_harness import Target, connected
target = Target(connected(sys.argv[1], use_shared_memory=sys.argv[2] == "shared", max_deadline_s=60))
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
            try:
                assert victim.stdout.readline() == "five steps\n"
                assert mapped_rings(drafter.process.pid) == 1
            finally:
                victim.send_signal(signal.SIGKILL)
            victim.wait()
        eventually(lambda: mapped_rings(drafter.process.pid) == 0)
        pool = connected(drafter.address)
        Target(pool).check_step()


class FailingEngine(DraftEngine):
    def step(self, steps: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")


def test_an_engine_that_fails_is_reported_and_its_targets_go_on_without_drafts() -> None:
    server = DrafterServer(FailingEngine({0: head_runtime(0)}), {0: served_head(0)})
    with running(server):
        pool = make_pool()
        pool.set_drafters([entry(server.address)])
        target = Target(pool)
        assert server.is_healthy()
        while server.is_healthy():
            eventually(lambda: pool.num_up)
            assert target.step(1) == [None] * 3
        eventually(lambda: "illegal memory access" in only_link(pool)["problem"])
        assert server.stats.failures == 3
        assert "illegal memory access" in server.last_error


def test_a_step_that_no_engine_can_take_ends_its_connection_and_no_other() -> None:
    with drafting(running(make_server())) as (server, _, target):
        other = connected(server.address)
        bad = Target(other)
        bad.tokens = [[10_000] * 120] * 3
        assert bad.step() == [None] * 3
        eventually(lambda: server.stats.dropped == 1)
        target.check_step()
        assert "next_tokens_R holds 10000" in eventually(lambda: only_link(other)["problem"])


def test_a_drafter_that_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # That nobody is there any more is the next problem.
    monkeypatch.setattr(client, "MIN_BACKOFF_S", 60.0)
    with running(make_server()) as server:
        pool = connected(server.address)
    assert "says good-bye: the drafter ends" in eventually(lambda: only_link(pool)["problem"])
    server.stop()


def test_a_target_that_cannot_attach_its_ring_is_served_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(name: str, shape: Any) -> Ring:
        raise OSError("not mounted here")

    monkeypatch.setattr(Ring, "attach", attach)
    with running(make_server()) as server:
        pool = connected(server.address)
        Target(pool).check_step()
        assert (only_link(pool)["problem"], only_link(pool)["path"]) == ("not mounted here", "tcp")


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "tcp"])
def test_a_swapped_head_drafts_after_the_targets_have_its_projection(shared: bool) -> None:
    with drafting(running(make_server((0, 1))), use_shared_memory=shared) as (server, pool, target):
        other = connected(server.address, heads={0: "digest1"}, use_shared_memory=shared)
        untouched = Target(other)
        server.swap(0, head_runtime(2), served_head(2))
        assert {index: head.digest for index, head in server._heads.items()} == {0: "digest2", 1: "digest1"}
        eventually(lambda: pool.num_up == 0)
        assert target.step() == [None] * 3
        pool.set_drafters([entry(server.address, {0: "digest2"})])
        eventually(lambda: pool.num_up)
        target.begin_cold()
        assert target.step() == [target.expected(slot, head=2) for slot in range(3)]
        assert untouched.step() == [untouched.expected(slot, head=1) for slot in range(3)]
        assert only_link(other)["connections"] == 1


def test_a_swap_that_nobody_waits_for_any_more_is_not_made() -> None:
    server = make_server()
    with pytest.raises(TimeoutError):
        server.swap(1, head_runtime(2), served_head(2), timeout_s=0.01)
    with running(server):
        server.swap(0, head_runtime(2), served_head(2))
        assert {index: head.digest for index, head in server._heads.items()} == {0: "digest2"}


def test_a_head_in_a_new_place_drafts_beside_the_others() -> None:
    with drafting(running(make_server((0, 1)))) as (server, pool, target):
        server.swap(2, head_runtime(2), served_head(2))
        target.check_step()
        assert only_link(pool)["connections"] == 1
        pool.set_drafters([entry(server.address, {0: "digest2", 1: "digest0"})])
        eventually(lambda: pool.num_up)
        target.begin_cold()
        assert target.step() == [target.expected(slot, head=2) for slot in range(3)]


def test_a_head_that_does_not_fit_is_refused_and_the_old_one_goes_on() -> None:
    with drafting(running(make_server((0, 1)))) as (server, pool, target):
        with pytest.raises(ValueError, match="head digest1 is served under another number already"):
            server.swap(5, head_runtime(2), served_head(1))
        target.check_step()
        with pytest.raises(ValueError, match="head digest2 does not fit the targets: its hidden_size is 8, that of"):
            server.swap(0, head_runtime(2), served_head(2, hidden_size=8))
        target.check_step()
        assert only_link(pool)["connections"] == 1


def test_bad_settings_are_refused_by_name() -> None:
    engine = DraftEngine({0: head_runtime(0)})
    with pytest.raises(ValueError, match="heads = "):
        DrafterServer(engine, {})
    with pytest.raises(ValueError, match="heads = "):
        DrafterServer(engine, {0: served_head(0), 1: served_head(0)})
    with running(make_server()) as taken, pytest.raises(OSError, match="in use"):
        make_server(port=int(taken.address.rpartition(":")[2]))
