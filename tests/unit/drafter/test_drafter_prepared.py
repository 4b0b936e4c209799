"""A step that was prepared from its host part gets the drafts that it gets without, whatever happened meanwhile.

Every answer is compared with a plain session's of the rows that the engine says it holds, as in `test_drafter_engine`.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from peagle.drafter.engine import DraftEngine, PreparedStep
from peagle.drafter.mailbox import Mailbox
from peagle.drafter.protocol import TargetStep
from tests.support.draft_engine_harness import (
    BLOCK,
    MAX_DEPTH,
    Rows,
    cached_range,
    check_answer,
    head_runtime,
    target_step,
)
from tests.support.transport_harness import (
    SHAPE,
    Target,
    entry,
    eventually,
    make_pool,
    make_server,
    running,
)
from tests.unit.drafter.test_drafter_engine import RandomTarget, make_request, prompt


def host_part_of(step: TargetStep) -> TargetStep:
    """What of a step is there before it is ready; where the rest will be lies rubbish."""
    return dataclasses.replace(
        step,
        start_B=np.full_like(step.start_B, -99),
        num_valid_B=np.full_like(step.num_valid_B, 77),
        next_tokens_R=np.full_like(step.next_tokens_R, -99),
        hidden_RH=torch.full_like(step.hidden_RH, float("nan")),
    )


class Ahead:
    """A step that was prepared, as far as it can be, and arrives later, its hidden rows where they were expected."""

    def __init__(
        self, engine: DraftEngine, session: int, number: int, work: dict[int, Rows], step: TargetStep | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        self.engine, self.session, self.work = engine, session, work
        self.step = target_step(session, number, work, **more) if step is None else step
        host_part = host_part_of(self.step)
        self.prepared: PreparedStep = engine.prepare(host_part)
        self.hidden_RH = host_part.hidden_RH

    @property
    def has_pass(self) -> bool:
        return self.prepared.one_pass is not None

    def ready_step(self) -> TargetStep:
        self.hidden_RH.copy_(self.step.hidden_RH)
        return dataclasses.replace(self.step, hidden_RH=self.hidden_RH)

    def arrive(self) -> int:
        """Returns how many requests got no drafts although they have rows."""
        [answer_BK] = self.engine.step([self.ready_step()], [self.prepared])
        return check_answer(self.engine, self.session, self.work, answer_BK)


def new_engine(**limits: int) -> DraftEngine:
    return DraftEngine({0: head_runtime(0, **limits)}, min_idle_calls=2)


def begin(
    engine: DraftEngine, session: int = 1, num_rows: int = 9, slots: tuple[int, ...] = (0, 1, 2)
) -> dict[int, Any]:
    """Requests by slot, of which the engine has the first rows."""
    requests = {slot: make_request(10 * session + slot) for slot in slots}
    work = {slot: Rows(request, 0, num_rows, MAX_DEPTH) for slot, request in requests.items()}
    prompts = {slot: prompt(request, 0) for slot, request in requests.items()}
    engine.step([target_step(session, 0, work, prompts=prompts)])
    return requests


def new_beside_old(engine: DraftEngine, requests: dict[int, Any], old_start: int = 9, session: int = 1) -> Ahead:
    """Slot 1 is a new request's, which goes on after two cached blocks; the others have rows from `old_start` on."""
    work = {slot: Rows(request, old_start, 2, MAX_DEPTH) for slot, request in requests.items()}
    work[1] = Rows(requests[2], 2 * BLOCK, 7, MAX_DEPTH)
    return Ahead(engine, session, 1, work, prompts={1: prompt(requests[2], 2 * BLOCK)})


@pytest.mark.parametrize("num_blocks", [16, 17])
def test_a_new_request_for_which_there_are_no_blocks(num_blocks: int) -> None:
    """None is taken from others for rows that may not come; the step itself begins it, once, or refuses it."""
    engine = new_engine(num_blocks=num_blocks)  # of which 12 rows of three requests take 9
    requests = begin(engine)
    requests[3] = make_request(50)
    work = {slot: Rows(requests[slot], 9, 1, 1) for slot in range(3)}
    work[3] = Rows(requests[3], 2 * BLOCK + 1, 27, MAX_DEPTH)  # cold, with mask rows up to 39: 8 blocks
    ahead = Ahead(engine, 1, 1, work, prompts={3: prompt(requests[3], 2 * BLOCK + 1)}, num_rejected=0)
    assert ahead.has_pass == (num_blocks == 17)
    assert engine.tables[0].pool.num_available == (0 if ahead.has_pass else 7)
    assert ahead.arrive() == (not ahead.has_pass)
    counters = engine.counters
    assert (counters.evicted_requests, counters.refused, counters.cold_starts) == (0, int(not ahead.has_pass), 1)


def test_a_request_evicted_meanwhile_starts_cold() -> None:
    """Also where another has its place in the table by then."""
    engine = new_engine(num_blocks=25)
    requests = begin(engine, slots=(0, 1))
    ahead = Ahead(engine, 1, 1, {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()})
    assert ahead.has_pass
    for number in range(13):  # up to 68 rows: 17 blocks, where the two have 10
        work = {3: Rows(make_request(50), 5 * number, 5, MAX_DEPTH)}
        check_answer(engine, 2, work, engine.step([target_step(2, number, work)])[0])
    engine.step([target_step(2, 13, {4: Rows(make_request(51), 0, 1, 1)})])
    assert engine.counters.evicted_requests == 1
    assert ahead.arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (0, 1)


def test_a_head_swapped_meanwhile_does_not_draft() -> None:
    engine = new_engine()
    ahead = new_beside_old(engine, begin(engine))
    assert ahead.has_pass
    engine.swap(0, head_runtime(0))
    assert ahead.arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (0, 3)


def test_a_session_dropped_meanwhile_has_no_rows() -> None:
    engine = new_engine()
    ahead = new_beside_old(engine, begin(engine))
    engine.drop_session(1)
    begin(engine, session=2)  # in the table rows of the others
    assert ahead.arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (0, 2)
    assert cached_range(engine, 1, 1) == (0, 2 * BLOCK + 7)  # its prefix is still cached


def test_without_room_for_all_that_might_come_nothing_is_prepared() -> None:
    """Rather than take from others, or refuse, what the step itself would not."""
    engine = new_engine(num_blocks=13)  # of which 12 rows of three requests take 9
    requests = begin(engine)
    assert engine.tables[0].pool.num_available == 13 - 9
    work = {slot: Rows(request, 9, 1, 1 + slot) for slot, request in requests.items()}
    ahead = Ahead(engine, 1, 1, work, num_rejected=MAX_DEPTH)
    assert ahead.has_pass  # up to 9 + 5 + 2 rows: a block more each
    ahead.arrive()
    work = {slot: Rows(request, 10, 1, MAX_DEPTH) for slot, request in requests.items()}
    ahead = Ahead(
        engine, 1, 2, work, num_rejected=MAX_DEPTH
    )  # up to 10 + 5 + 3 rows: another one each, and one is left
    assert not ahead.has_pass
    assert engine.tables[0].pool.num_available == 1
    assert ahead.arrive() == 0
    assert engine.counters.refused == 0


def test_a_request_that_may_reach_its_longest_context_is_not_prepared() -> None:
    engine, request = new_engine(), dataclasses.replace(make_request(0), tokens=list(range(90)) * 3)
    longest = engine.tables[0].max_num_positions
    end = longest - 2 * MAX_DEPTH  # as many rows may come, those of the mask token included
    engine.step([target_step(1, 0, {0: Rows(request, 0, end, 0)})])
    for number, fits in enumerate([True, False, False]):
        ahead = Ahead(engine, 1, number, {0: Rows(request, end + number, 1, MAX_DEPTH)}, num_rejected=MAX_DEPTH)
        assert ahead.has_pass == fits
        assert ahead.arrive() == 0


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 40, "max_num_rows": 12}])
def test_drafts_are_those_of_a_session_for_each_request(settings: dict[str, int]) -> None:
    """Two targets' random steps, some prepared ahead of the other's step, some sharing a pass and some never sent."""
    engine, rng = new_engine(**settings), random.Random(3)
    stems = [[rng.randrange(99) for _ in range(50)] for _ in range(2)]
    targets = [RandomTarget(session, [0], rng, stems) for session in (3, 8)]
    for _ in range(200):
        waiting = waiting_steps(engine, targets, rng)
        if rng.random() < 0.05:
            continue
        for ahead in waiting:
            ahead.arrive()
    counters = engine.counters
    assert counters.prepared_passes > (10 if settings else 100)
    assert counters.drafts > 300
    assert (counters.evicted_blocks > 0) == ("num_blocks" in settings)


def waiting_steps(engine: DraftEngine, targets: list[RandomTarget], rng: random.Random) -> list[Ahead]:
    """The next steps of one or both targets, as they arrive."""
    waiting = []
    for target in rng.sample(targets, rng.choice([1, 2, 2])):
        step, work = target.next_step()
        waiting.append(Ahead(engine, target.session, 0, work, step))
    return rng.sample(waiting, len(waiting))


def arrive_together(engine: DraftEngine, aheads: list[Ahead]) -> list[Any]:
    """The steps are ready in one call of the engine."""
    answers = engine.step([ahead.ready_step() for ahead in aheads], [ahead.prepared for ahead in aheads])
    for ahead, answer_BK in zip(aheads, answers, strict=True):
        assert check_answer(engine, ahead.session, ahead.work, answer_BK) == 0
    return answers


def test_all_is_counted_once_whether_or_not_it_was_prepared() -> None:
    """A random schedule in one engine that prepares and one that does not; some steps share a pass."""
    engine, other, rng = new_engine(), new_engine(), random.Random(5)
    stems = [[rng.randrange(99) for _ in range(50)] for _ in range(2)]
    targets = [RandomTarget(session, [0], rng, stems) for session in (3, 8)]
    for _ in range(150):
        waiting = waiting_steps(engine, targets, rng)
        for aheads in [waiting] if rng.random() < 0.3 else [[ahead] for ahead in waiting]:
            expected = other.step([ahead.step for ahead in aheads])
            for found_BK, expected_BK in zip(arrive_together(engine, aheads), expected, strict=True):
                assert found_BK.tolist() == expected_BK.tolist()
    prepared, counters = engine.counters, other.counters
    assert prepared.prepared_passes > 80
    assert counters.prefix_hit_tokens > 100
    assert prepared == dataclasses.replace(counters, prepared_passes=prepared.prepared_passes)
    assert engine.tables[0].pool.num_available <= other.tables[0].pool.num_available
    for session in (3, 8):
        engine.drop_session(session)
    assert engine.tables[0].pool.num_available == engine.tables[0].pool.num_blocks


# Through a mailbox and a server


@pytest.mark.parametrize(
    "damage",
    [
        {"depth_B": np.full(3, SHAPE.max_depth + 1, np.int32)},
        {"prompts": {3: np.ones(1, np.int32)}},
        {"prompts": {1: np.full(1, SHAPE.vocab_size, np.int32)}},
    ],
    ids=["too many drafts", "a prompt without rows", "a token beyond the vocabulary"],
)
def test_a_host_part_that_does_not_fit_ends_its_connection_before_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any]
) -> None:
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        target, write = Target(pool), Mailbox.write_host_part
        target.check_step()

        def write_damaged(mailbox: Mailbox, step: Any) -> int:
            return write(mailbox, dataclasses.replace(step, **damage))

        def wait(*_: Any) -> None:
            eventually(lambda: server.report()["num_dropped"])

        monkeypatch.setattr(Mailbox, "write_host_part", write_damaged)
        monkeypatch.setattr(Mailbox, "write_device_part", wait)
        assert target.step() == [None] * 3
        monkeypatch.undo()
        pool.close()


def test_an_engine_that_fails_to_prepare_counts_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(make_server()) as server:
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)

        def fail(step: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(server.engine, "prepare", fail)
        monkeypatch.setattr(
            Mailbox, "write_device_part", lambda *_: eventually(lambda: server.report()["num_failures"])
        )
        assert Target(pool).step() == [None] * 3
        assert "illegal memory access" in server.report()["last_error"]
        monkeypatch.undo()
        pool.close()
