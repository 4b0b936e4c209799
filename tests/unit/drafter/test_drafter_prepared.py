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
    num_requests,
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


def test_while_drafting_every_step_runs_as_it_was_prepared() -> None:
    """With rejections, requests that want fewer drafts or none, or have no new row, across blocks."""
    engine, rng = new_engine(), random.Random(0)
    requests, ends = begin(engine), [9, 9, 9]
    for number in range(1, 25):
        num_valid = [rng.randint(1, MAX_DEPTH + 1), rng.randint(0, 2), 1]
        work = {
            slot: Rows(request, ends[slot], num_valid[slot], (MAX_DEPTH, number % 3, 0)[slot])
            for slot, request in requests.items()
        }
        assert Ahead(engine, 1, number, work, rng=rng).arrive() == 0
        ends = [end + num for end, num in zip(ends, num_valid, strict=True)]
    assert (engine.counters.prepared_passes, engine.counters.passes) == (24, 25)
    assert ends[0] > 9 + 8 * BLOCK
    assert (engine.counters.cold_starts, engine.counters.refused) == (0, 0)


@pytest.mark.parametrize(
    ("start", "num_valid"),
    [(0, 9), (7, 2), (2 * BLOCK, 3), (9, 0)],
    ids=["begins anew", "goes back", "to the begin of a block", "nothing new"],
)
def test_what_was_not_expected_takes_the_usual_way(start: int, num_valid: int) -> None:
    engine = new_engine()
    requests = begin(engine)
    ends = {0: start, 1: 9 if num_valid else start, 2: 9 if num_valid else start}
    work = {slot: Rows(request, ends[slot], num_valid, MAX_DEPTH) for slot, request in requests.items()}
    ahead = Ahead(engine, 1, 1, work)
    assert ahead.has_pass
    assert ahead.arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (0, 0)
    more = {slot: Rows(request, ends[slot] + num_valid, 1, MAX_DEPTH) for slot, request in requests.items()}
    Ahead(engine, 1, 2, more).arrive()
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (1, 0)


def test_a_request_in_the_middle_of_its_prompt_is_prepared_beside_those_that_draft() -> None:
    """More rows than drafts, in chunks that want none and a last one that does."""
    engine = new_engine()
    requests = begin(engine)
    for number, (start, num_valid, depth) in enumerate([(9, 30, 0), (39, BLOCK, 0), (43, 7, MAX_DEPTH), (50, 2, 2)]):
        work = {slot: Rows(request, 9 + number, 1, MAX_DEPTH) for slot, request in requests.items()}
        work[1] = Rows(requests[1], start, num_valid, depth)
        assert Ahead(engine, 1, number, work).arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (4, 0)


@pytest.mark.parametrize("finished", [[1], []])
@pytest.mark.parametrize(
    ("start", "is_cached"),
    [(0, True), (2 * BLOCK, True), (3 * BLOCK, False), (2 * BLOCK + 1, False)],
    ids=["whole prompt", "cached prefix", "longer prefix", "within a block"],
)
def test_a_request_that_takes_over_a_slot_is_prepared(start: int, is_cached: bool, finished: list[int]) -> None:
    """From its prompt's cached beginning on, cold where not all of that is cached; also where the request before ended
    without a word."""
    engine = new_engine()
    requests = begin(engine)
    requests[1] = dataclasses.replace(requests[2])
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    work[1] = Rows(requests[1], start, 7, MAX_DEPTH)
    ahead = Ahead(engine, 1, 1, work, finished=finished, prompts={1: prompt(requests[1], start)})
    assert ahead.arrive() == 0
    assert cached_range(engine, 1, 1) == (0 if is_cached else start, start + 7)
    counters = engine.counters
    assert (counters.prepared_passes, counters.cold_starts) == (1, int(not is_cached))
    assert counters.prefix_hit_tokens == (start if is_cached else 0)
    work = {slot: Rows(request, 11, 1, MAX_DEPTH) for slot, request in requests.items()}
    work[1] = Rows(requests[1], start + 7, 1, MAX_DEPTH)
    assert Ahead(engine, 1, 2, work).arrive() == 0
    assert (num_requests(engine), counters.prepared_passes) == (3, 2)


def test_a_request_that_begins_at_the_end_of_the_one_before_has_none_of_its_rows() -> None:
    engine = new_engine()
    requests = begin(engine)
    requests[1] = make_request(77)
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    assert Ahead(engine, 1, 1, work, prompts={1: prompt(requests[1], 9)}).arrive() == 0
    assert cached_range(engine, 1, 1) == (9, 11)
    assert (engine.counters.prepared_passes, num_requests(engine)) == (1, 3)


def test_new_requests_of_one_prompt_publish_it_once() -> None:
    engine, request = new_engine(), make_request(0)
    for number in range(2):
        slots = (2 * number, 2 * number + 1)
        work = {slot: Rows(request, number * 2 * BLOCK, 9, MAX_DEPTH) for slot in slots}
        prompts = {slot: prompt(request, number * 2 * BLOCK) for slot in slots}
        assert Ahead(engine, 1, number, work, prompts=prompts).arrive() == 0
    assert (engine.counters.prepared_passes, engine.counters.prefix_hit_tokens) == (2, 2 * 2 * BLOCK)


@pytest.mark.parametrize("prompts", [{}, {1: np.empty(0, np.int32)}])
def test_a_request_whose_start_is_not_known_is_not_prepared(prompts: dict[int, Any]) -> None:
    """Although it begins where the slot's last request would have gone on."""
    engine = new_engine()
    requests = begin(engine)
    requests[1] = make_request(77)
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    ahead = Ahead(engine, 1, 1, work, finished=[1], prompts=prompts)
    assert not ahead.has_pass
    assert ahead.arrive() == 0
    assert num_requests(engine) == 3
    assert cached_range(engine, 1, 1) == (9, 11)


def new_beside_old(engine: DraftEngine, requests: dict[int, Any], old_start: int = 9, session: int = 1) -> Ahead:
    """Slot 1 is a new request's, which goes on after two cached blocks; the others have rows from `old_start` on."""
    work = {slot: Rows(request, old_start, 2, MAX_DEPTH) for slot, request in requests.items()}
    work[1] = Rows(requests[2], 2 * BLOCK, 7, MAX_DEPTH)
    return Ahead(engine, session, 1, work, prompts={1: prompt(requests[2], 2 * BLOCK)})


@pytest.mark.parametrize("old_start", [0, 7])
def test_a_new_request_beside_one_that_jumps_begins_once(old_start: int) -> None:
    """One that goes back into a block which the new one now shares starts cold, as without preparing."""
    engine = new_engine()
    requests = begin(engine)
    ahead = new_beside_old(engine, requests, old_start)
    assert ahead.has_pass
    assert ahead.arrive() == 0
    assert cached_range(engine, 1, 1) == (0, 2 * BLOCK + 7)
    counters = engine.counters
    assert (counters.prepared_passes, counters.prefix_hit_tokens) == (0, 2 * BLOCK)
    assert counters.cold_starts == (old_start == 7)


def test_steps_of_two_targets_that_share_a_pass_begin_their_requests_once() -> None:
    engine = new_engine()
    sessions = {session: begin(engine, session) for session in (1, 2)}
    aheads = [new_beside_old(engine, requests, session=session) for session, requests in sessions.items()]
    assert all(ahead.has_pass for ahead in aheads)
    passes = engine.counters.passes
    arrive_together(engine, aheads)
    counters = engine.counters
    assert (counters.passes - passes, counters.prepared_passes) == (1, 0)
    assert (counters.prefix_hit_tokens, counters.cold_starts) == (2 * 2 * BLOCK, 0)


def test_a_new_request_for_which_there_is_no_table_row() -> None:
    """One that is idle is evicted for it, also while it is prepared for; those in use are not."""
    engine = DraftEngine({0: head_runtime(0)}, max_num_requests=3, min_idle_calls=2)
    requests, new = begin(engine), make_request(50)
    for number, comes, has_pass in [(1, True, False), (2, False, True), (3, True, True)]:
        work = {slot: Rows(requests[slot], 7 + 2 * number, 2, MAX_DEPTH) for slot in (0, 1)}
        work |= {3: Rows(new, 0, 9, MAX_DEPTH)} if comes else {}
        ahead = Ahead(engine, 1, number, work, prompts={3: prompt(new, 0)} if comes else {})
        assert ahead.has_pass == has_pass
        assert ahead.arrive() == (not has_pass)
        assert (engine.counters.evicted_requests, engine.counters.refused) == (number == 3, 1)


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


def test_a_request_whose_blocks_a_new_one_needs_is_evicted_by_the_step_itself() -> None:
    engine = new_engine(num_blocks=19)
    begin(engine, session=2, slots=(7,))  # 12 rows: 3 blocks
    requests = begin(engine)  # 9 blocks
    engine.step([target_step(1, 1, {slot: Rows(request, 9, 1, 1) for slot, request in requests.items()})])
    requests[3] = make_request(50)
    work = {slot: Rows(requests[slot], 10, 1, 1) for slot in range(3)}
    work[3] = Rows(requests[3], 0, 29, MAX_DEPTH)  # 8 blocks
    ahead = Ahead(engine, 1, 2, work, prompts={3: prompt(requests[3], 0)}, num_rejected=0)
    assert not ahead.has_pass
    assert engine.counters.evicted_requests == 0
    assert ahead.arrive() == 0
    assert engine.counters.evicted_requests == 1
    assert cached_range(engine, 2, 7) is None


def test_of_two_steps_of_a_target_in_one_call_the_first_may_be_prepared() -> None:
    engine = new_engine()
    requests = begin(engine)
    first = new_beside_old(engine, requests)
    second = target_step(
        1, 2, work := {slot: Rows(request, 11, 1, 2) for slot, request in requests.items() if slot != 1}
    )
    _, answer_BK = engine.step([first.ready_step(), second], [first.prepared, None])
    assert check_answer(engine, 1, work, answer_BK) == 0
    assert (engine.counters.prepared_passes, engine.counters.prefix_hit_tokens) == (1, 2 * BLOCK)


@pytest.mark.parametrize("offsets", [(0, 0, 2), (4, 2, 0)], ids=["shared", "descending"])
def test_rows_that_do_not_follow_each_other_take_the_usual_way(offsets: tuple[int, ...]) -> None:
    engine = new_engine()
    requests = begin(engine)
    requests[1] = requests[0]
    engine.step([target_step(1, 1, {1: Rows(requests[1], 0, 9, MAX_DEPTH)}, prompts={1: prompt(requests[1], 0)})])
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    step = target_step(1, 2, work, num_rejected=0)
    hidden_RH, tokens_R = step.hidden_RH.clone(), step.next_tokens_R.copy()
    for slot, offset in enumerate(offsets):
        hidden_RH[offset : offset + 2] = step.hidden_RH[2 * slot : 2 * slot + 2]
        tokens_R[offset : offset + 2] = step.next_tokens_R[2 * slot : 2 * slot + 2]
    step = dataclasses.replace(
        step, row_offset_B=np.array(offsets, np.int32), hidden_RH=hidden_RH, next_tokens_R=tokens_R
    )
    ahead = Ahead(engine, 1, 2, work, step)
    assert ahead.has_pass == (offsets[0] == 0)
    assert ahead.arrive() == 0
    assert engine.counters.prepared_passes == 0


def test_requests_that_ended_make_room_whether_or_not_the_rest_goes_as_prepared() -> None:
    engine = new_engine()
    free = engine.tables[0].pool.num_available
    requests = begin(engine)
    for number, (slot, start) in enumerate([(1, 9), (2, 0)], 1):
        ahead = Ahead(engine, 1, number, {0: Rows(requests[0], start, 2, MAX_DEPTH)}, finished=[slot])
        assert ahead.has_pass
        assert cached_range(engine, 1, slot) is None
        assert ahead.arrive() == 0
    assert engine.counters.prepared_passes == 1
    assert num_requests(engine) == 1
    assert not Ahead(engine, 1, 3, {}, finished=[0]).has_pass
    assert engine.tables[0].pool.num_available == free


def test_requests_of_two_heads_are_not_prepared() -> None:
    engine = DraftEngine({head: head_runtime(head) for head in (0, 1)})
    requests = begin(engine)
    requests[2] = dataclasses.replace(requests[2], head=1)
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    ahead = Ahead(engine, 1, 1, work, prompts={1: prompt(requests[1], 9)})
    assert not ahead.has_pass
    assert ahead.arrive() == 0


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


def test_a_new_request_evicted_meanwhile_begins_again() -> None:
    """Where its prefix is still cached."""
    engine = new_engine()
    requests = begin(engine, slots=(2,))
    work = {1: Rows(requests[2], 2 * BLOCK, 7, MAX_DEPTH)}
    ahead = Ahead(engine, 1, 1, work, prompts={1: prompt(requests[2], 2 * BLOCK)})
    assert ahead.has_pass
    table = engine.tables[0]
    table.call += 2
    table._evict(lambda: False)
    assert num_requests(engine) == 0
    assert ahead.arrive() == 0
    assert cached_range(engine, 1, 1) == (0, 2 * BLOCK + 7)
    assert (engine.counters.prepared_passes, engine.counters.cold_starts) == (0, 0)


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


def test_two_targets_prepared_at_a_time() -> None:
    engine = new_engine()
    sessions = {session: begin(engine, session) for session in (1, 2)}
    for number in range(1, 9):
        waiting = [
            Ahead(
                engine, session, number,
                {slot: Rows(request, 7 + 2 * number, 2, MAX_DEPTH) for slot, request in requests.items()},
            )
            for session, requests in sessions.items()
        ]  # fmt: skip
        for ahead in waiting[:: 1 if number % 2 else -1]:
            assert ahead.arrive() == 0
    assert engine.counters.prepared_passes == 16


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


@pytest.mark.parametrize(("limit", "least"), [("max_num_rows", 3 * 2 * MAX_DEPTH), ("max_num_requests", 3)])
def test_a_step_that_may_take_several_passes_is_not_prepared(limit: str, least: int) -> None:
    for value, fits in ((least, True), (least - 1, False)):
        engine = new_engine(**{limit: value})
        requests = begin(engine)
        work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
        ahead = Ahead(engine, 1, 1, work, num_rejected=MAX_DEPTH - 1)
        assert ahead.has_pass == fits
        assert ahead.arrive() == 0


@pytest.mark.parametrize("num_rows", [30, 31])
def test_a_payload_with_more_rows_than_a_pass_takes_is_not_prepared(num_rows: int) -> None:
    engine = new_engine(max_payload_rows=30)
    requests = begin(engine)
    work = {slot: Rows(request, 9, 2, MAX_DEPTH) for slot, request in requests.items()}
    step = target_step(1, 1, work)
    padding = num_rows - len(step.next_tokens_R)
    hidden = torch.cat([step.hidden_RH, torch.zeros(padding, step.hidden_RH.shape[1], dtype=torch.float64)])
    step = dataclasses.replace(step, hidden_RH=hidden, next_tokens_R=np.pad(step.next_tokens_R, (0, padding)))
    ahead = Ahead(engine, 1, 1, work, step)
    assert ahead.has_pass == (num_rows == 30)
    assert ahead.arrive() == 0


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 40}, {"max_num_rows": 12}, {"max_num_requests": 3}])
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


def test_a_server_prepares_what_comes_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host part is there long before the rest: as a target on a GPU has it. Passes that are armed are another
    test's."""
    with running(make_server()) as server:
        engine, write = server._engine, Mailbox.write_device_part
        pool = make_pool()
        pool.set_drafters([entry(server.address, {0: "digest0"})])
        eventually(lambda: pool.num_up)
        target, calls, given = Target(pool), [], []
        target.check_step()
        monkeypatch.setattr(engine, "arm", lambda *_: None)
        prepare, run, before = engine.prepare, engine.step, engine.counters.prepared_passes
        monkeypatch.setattr(engine, "prepare", lambda step: calls.append(step.number) or prepare(step))
        monkeypatch.setattr(engine, "step", lambda steps, prepared: given.append(prepared) or run(steps, prepared))

        def write_late(mailbox: Mailbox, number: int, *rest: Any) -> None:
            eventually(lambda: calls and calls[-1] == number)
            write(mailbox, number, *rest)

        monkeypatch.setattr(Mailbox, "write_device_part", write_late)
        for num_rows in (1, 3, 2, 1):
            if num_rows == 2:
                target.restart(1)
            target.check_step(num_rows)
        assert calls == [2, 3, 4, 5]
        assert engine.counters.prepared_passes - before == 4
        monkeypatch.setattr(Mailbox, "write_device_part", write)
        monkeypatch.setattr(engine, "prepare", lambda step: None)
        target.check_step(2)  # both parts at once, as from a host
        assert [prepared is not None for (prepared,) in given] == [True] * 4 + [False]
        pool.close()


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

        monkeypatch.setattr(server._engine, "prepare", fail)
        monkeypatch.setattr(
            Mailbox, "write_device_part", lambda *_: eventually(lambda: server.report()["num_failures"])
        )
        assert Target(pool).step() == [None] * 3
        assert "illegal memory access" in server.report()["last_error"]
        monkeypatch.undo()
        pool.close()
