"""A step whose pass waits for it gets the drafts that it gets otherwise, whatever comes and whenever; and nothing of it
is left behind, in the engine or in a server.

On a CPU the pass runs when the host looks for its outcome; what it reads, checks and answers is the same.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from peagle.drafter import armed
from peagle.drafter.armed import ANSWERED, CANCELLED, REJECTED, ArmedPass, armed_words
from peagle.drafter.engine import DraftEngine
from peagle.drafter.mailbox import TIMED_OUT, Mailbox
from peagle.drafter.protocol import NO_DRAFT, Int32Array, TargetShape, TargetStep
from peagle.drafter.server import DrafterServer
from tests.support.draft_engine_harness import (
    CONFIG,
    MAX_DEPTH,
    VOCABULARY,
    Request,
    Rows,
    cached_range,
    check_answer,
    head_runtime,
    target_step,
)
from tests.support.transport_harness import SHAPE as TARGET_SHAPE
from tests.support.transport_harness import (
    Target,
    entry,
    eventually,
    make_pool,
    make_server,
    only_link,
    plan_of,
    running,
    served_head,
)
from tests.unit.drafter.test_drafter_engine import RandomTarget
from tests.unit.drafter.test_drafter_prepared import begin, new_engine

SHAPE = TargetShape(CONFIG.hidden_size, "float64", MAX_DEPTH + 2, 8, 256, VOCABULARY)


class Waiting:
    """A step whose host part is in a mailbox, prepared and, where that can be, armed."""

    def __init__(self, engine: DraftEngine, mailbox: Mailbox, step: TargetStep) -> None:
        self.engine, self.mailbox, self.step = engine, mailbox, step
        mailbox.write_host_part(plan_of(step))
        self.host_part = mailbox.read_host_part(step.number, step.session)
        self.prepared = engine.prepare(self.host_part)
        words = armed_words(mailbox, step.number, step.num_requests)
        self.armed = engine.arm(self.host_part, self.prepared, words)

    def come(self) -> None:
        """The device part, and `ready`."""
        step = self.step
        integers = [torch.from_numpy(values) for values in (step.start_B, step.num_valid_B, step.next_tokens_R)]
        self.mailbox.write_device_part(step.number, *integers, step.hidden_RH)

    def drafts(self, outcome: int) -> Int32Array:
        """[B, K] as they are in the mailbox, by the pass itself or by the engine."""
        number = self.step.number
        assert self.mailbox.is_done(number) == (outcome == ANSWERED)
        if outcome == ANSWERED:
            self.engine.finish_armed(self.mailbox.read_device_part(self.host_part), self.prepared)
        else:
            step = self.mailbox.read_device_part(self.host_part)
            [drafts_BK] = self.engine.step([step], [self.prepared])
            wide_BK = np.full((self.step.num_requests, SHAPE.max_depth), NO_DRAFT, np.int32)
            wide_BK[:, : drafts_BK.shape[1]] = drafts_BK
            self.mailbox.answer(number, wide_BK, 0)
        drafts_BK = self.mailbox.read_drafts(number, self.step.num_requests)
        assert (drafts_BK[:, MAX_DEPTH:] == NO_DRAFT).all()
        return drafts_BK[:, :MAX_DEPTH]

    def arrive(self) -> Int32Array:
        """Drafts of a step that is armed and comes."""
        assert self.armed is not None
        assert self.armed.poll() == 0, "it was not there yet"
        self.come()
        assert self.armed.poll() == ANSWERED
        return self.drafts(ANSWERED)


def work_of(requests: dict[int, Request], start: int = 9, num_valid: int = 2) -> dict[int, Rows]:
    return {slot: Rows(request, start, num_valid, MAX_DEPTH) for slot, request in requests.items()}


def waiting_step(engine: DraftEngine, work: dict[int, Rows], number: int = 1, **more: Any) -> Waiting:
    return Waiting(engine, Mailbox.private(SHAPE), target_step(1, number, work, **more))


@pytest.mark.parametrize("how", ["swapped", "dropped"])
def test_what_holds_no_more_is_not_armed(how: str) -> None:
    engine = new_engine()
    waiting = waiting_step(engine, work_of(begin(engine)))
    words = armed_words(waiting.mailbox, 1, 3)
    assert engine.arm(waiting.host_part, waiting.prepared, words) is not None
    if how == "swapped":
        engine.swap(0, head_runtime(0))
    else:
        engine.drop_session(1)
    assert engine.arm(waiting.host_part, waiting.prepared, words) is None


def test_a_step_written_over_after_its_answer_is_not_taken_into_the_cache() -> None:
    engine = new_engine()
    waiting = waiting_step(engine, work_of(begin(engine)))
    waiting.arrive()
    before = cached_range(engine, 1, 0)
    waiting.mailbox.area(1).device_part[0] += 1
    with pytest.raises(ValueError, match="step 1 is not the one that was answered"):
        waiting.drafts(ANSWERED)
    assert cached_range(engine, 1, 0) == before


def test_all_is_drafted_and_counted_as_without() -> None:
    """A random schedule in one engine that arms, some of whose passes are called off, and in one that does not."""
    engine, other, rng, mailbox = new_engine(), new_engine(), random.Random(5), Mailbox.private(SHAPE)
    target = RandomTarget(3, [0], rng, [[rng.randrange(VOCABULARY) for _ in range(50)] for _ in range(2)])
    outcomes = []
    for number in range(1, 200):
        step, work = target.next_step()
        waiting = Waiting(engine, mailbox, dataclasses.replace(step, number=number))
        outcome = REJECTED
        if waiting.armed is not None:
            outcome = waiting.armed.settle() if rng.random() < 0.2 else waiting.armed.poll()
            waiting.come()
            outcome = outcome or waiting.armed.poll()
        else:
            waiting.come()
        outcomes.append(outcome)
        drafts_BK, [expected_BK] = waiting.drafts(outcome), other.step([step])
        assert drafts_BK.tolist() == expected_BK.tolist()
        assert check_answer(engine, 3, work, drafts_BK) == 0
    found, counters = engine.counters, other.counters
    assert found.armed_passes == outcomes.count(ANSWERED) > 80
    assert outcomes.count(CANCELLED) > 10
    assert outcomes.count(REJECTED) > 10
    assert found == dataclasses.replace(
        counters, prepared_passes=found.prepared_passes, armed_passes=found.armed_passes
    )
    engine.drop_session(3)
    assert engine.tables[0].pool.num_available == engine.tables[0].pool.num_blocks


# Through a mailbox and a server


class Served:
    """A target of a server, whose steps come as late as a test says, and how its armed passes ended."""

    def __init__(self, server: DrafterServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.engine = server, server.engine
        self.outcomes: list[int] = []
        self.before_ready: Callable[[], Any] = lambda: None
        settle, write = ArmedPass.settle, Mailbox.write_device_part

        def noted(one: ArmedPass) -> int:
            self.outcomes.append(outcome := settle(one))
            return outcome

        def write_late(mailbox: Mailbox, number: int, *rest: Any) -> None:
            before, self.before_ready = self.before_ready, lambda: None
            before()
            write(mailbox, number, *rest)

        monkeypatch.setattr(armed, "TIMEOUT_S", 60.0)  # a busy machine may hold up a step
        monkeypatch.setattr(ArmedPass, "settle", noted)
        monkeypatch.setattr(Mailbox, "write_device_part", write_late)
        self.pool = self.new_pool()
        self.target = Target(self.pool)
        self.target.check_step()
        eventually(lambda: server.stats.num_steps == 1)  # counted behind its answer
        self.outcomes.clear()

    def new_pool(self) -> Any:
        pool = make_pool()
        pool.set_drafters([entry(self.server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        return pool

    def connects_again(self) -> None:
        """The target, after its connection ended."""
        eventually(lambda: only_link(self.pool)["num_connections"] == 2 and self.pool.num_up)
        self.target.begin_cold()

    @property
    def is_armed(self) -> bool:
        return any(peer.armed is not None for peer in list(self.server._peers.values()))

    def when_armed(self, act: Callable[[], Any] = lambda: None) -> None:
        """Of the next step, before it is ready."""
        eventually(lambda: not self.is_armed)  # that of the step before has answered; the server may not know

        def wait_and_act() -> None:
            eventually(lambda: self.is_armed)
            act()

        self.before_ready = wait_and_act


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    with running(make_server()) as server:
        one = Served(server, monkeypatch)
        yield one
        one.pool.close()


def test_the_only_target_is_answered_by_armed_passes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before, stats = dataclasses.replace(served.engine.counters), dataclasses.replace(served.server.stats)
    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "step", None)
        for num_rows in (1, 3, 2, 1, 2):
            served.when_armed()
            if num_rows == 2:
                served.target.restart(1)
            served.target.check_step(num_rows)
    eventually(lambda: served.outcomes == [ANSWERED] * 5)
    served.target.check_step()
    after = served.server.stats
    assert served.engine.counters.armed_passes - before.armed_passes >= 5
    eventually(lambda: after.num_steps - stats.num_steps == 6)
    assert (after.num_failures, after.num_dropped) == (0, 0)
    assert after.busy_s > stats.busy_s
    eventually(lambda: served.server.report()["targets"][0]["num_steps"] == 7)


def test_a_second_target_is_served_while_a_pass_waits_and_none_is_armed_beside_it(served: Served) -> None:
    pool = served.new_pool()
    other = Target(pool, seed=1)
    armed_before = served.engine.counters.armed_passes
    for _ in range(3):
        other.check_step()
        served.target.check_step()
    assert served.engine.counters.armed_passes == armed_before
    assert not served.outcomes
    pool.close()
    eventually(lambda: len(served.server._peers) == 1)
    pools = []

    def join() -> None:
        assert served.outcomes == []
        pools.append(served.new_pool())
        assert served.is_armed, "who arrives takes nothing back"
        served.before_ready = lambda: eventually(lambda: served.outcomes)  # its step is prepared for, too
        Target(pools[0], seed=2).check_step()
        assert served.outcomes == [CANCELLED]

    served.when_armed(join)
    served.target.check_step()
    served.target.check_step()
    assert served.outcomes == [CANCELLED]
    assert served.engine.counters.armed_passes == armed_before
    pools[0].close()


def test_a_step_that_does_not_come_in_time_is_served_when_it_comes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(armed, "TIMEOUT_S", 0.05)
    served.when_armed(lambda: eventually(lambda: served.outcomes))
    served.target.check_step()
    assert served.outcomes == [TIMED_OUT]
    monkeypatch.undo()
    served.target.check_step()


def test_a_head_swapped_while_a_pass_waits_does_not_draft(served: Served) -> None:
    served.when_armed(lambda: served.server.swap(0, head_runtime(2), served_head(2)))
    assert served.target.step() == [None] * 3
    assert served.outcomes == [CANCELLED]
    served.connects_again()
    assert served.target.step() == [served.target.expected(slot, head=2) for slot in range(3)]


def test_a_drafter_that_ends_while_a_pass_waits(served: Served) -> None:
    served.when_armed(served.server.stop)
    assert served.target.step() == [None] * 3
    assert served.outcomes == [CANCELLED]
    assert not served.server._serving.is_alive()


def test_a_target_that_goes_away_while_a_pass_waits(served: Served) -> None:
    """Its mailbox goes only after the pass."""
    served.target._hand_over = lambda link, step: False  # type: ignore[method-assign]
    served.target.step()
    eventually(lambda: served.is_armed)
    (peer,) = served.server._peers.values()
    assert peer.mailbox is not None
    served.pool.close()
    eventually(lambda: not served.server._peers)
    eventually(lambda: peer.mailbox is None)
    assert served.outcomes == [CANCELLED]
    pool = served.new_pool()
    Target(pool).check_step()
    pool.close()


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [(1, 1000, "num_valid_B holds"), (2, TARGET_SHAPE.vocab_size, "next_tokens_R holds")],
    ids=["too many rows", "a token beyond the vocabulary"],
)
def test_a_step_that_does_not_fit_ends_its_connection_as_without(
    served: Served, monkeypatch: pytest.MonkeyPatch, part: int, value: int, problem: str
) -> None:
    write = Mailbox.write_device_part

    def write_damaged(mailbox: Mailbox, number: int, *parts: Any) -> None:
        parts[part][1] = value
        write(mailbox, number, *parts)

    monkeypatch.setattr(Mailbox, "write_device_part", write_damaged)
    served.when_armed()
    assert served.target.step() == [None] * 3
    assert served.outcomes == [REJECTED]
    assert eventually(lambda: served.server.stats.num_dropped) == 1
    assert problem in eventually(lambda: only_link(served.pool)["problem"])


@pytest.mark.parametrize("where", ["poll", "finish"])
def test_a_pass_that_fails_ends_its_connection_and_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError("CUDA error: an illegal memory access")

    if where == "poll":
        monkeypatch.setattr(ArmedPass, "poll", fail)
    else:
        monkeypatch.setattr(served.engine, "finish_armed", fail)
    served.before_ready = lambda: eventually(lambda: served.is_armed or served.server.stats.num_failures)
    served.target.step()
    eventually(lambda: served.server.stats.num_failures)
    assert "illegal memory access" in served.server.report()["last_error"]
    monkeypatch.undo()
    served.connects_again()
    served.target.check_step()


def test_no_pass_waits_on_a_shared_gpu(served: Served) -> None:
    served.server._shares_gpu = True
    prepared, prepare = threading.Event(), served.engine.prepare
    served.engine.prepare = lambda step: (prepare(step), prepared.set())[0]  # type: ignore[method-assign]
    served.before_ready = lambda: eventually(prepared.is_set)
    served.target.check_step()
    assert prepared.is_set()
    assert served.outcomes == []
