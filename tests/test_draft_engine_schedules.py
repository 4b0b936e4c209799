"""Whatever targets do, each request's drafts are those of a plain session that has the same rows.

Random schedules: rejections, chunked prefill, preemption, prefixes that the targets found in their own caches, requests
that end with and without a release, repeated and lost steps; two targets, two heads, passes too small for a step.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from peagle.drafter.engine import DraftEngine
from peagle.drafter.protocol import TargetStep
from tests.draft_engine_harness import (
    BLOCK,
    MAX_DEPTH,
    VOCABULARY,
    Request,
    Rows,
    check_answer,
    head_runtime,
    target_step,
)

MAX_TOKENS = 130


class RandomTarget:
    """A target with up to four requests, whose prompts begin alike."""

    def __init__(self, session: int, heads: list[int], rng: random.Random, stems: list[list[int]]) -> None:
        self.session, self.heads, self.rng, self.stems = session, heads, rng, stems
        self.requests: dict[int, Request] = {}
        self.num_steps = 0
        self.last: tuple[TargetStep, dict[int, Rows]] | None = None
        self.known: set[tuple[int, ...]] = set()  # prefixes that the target's own cache has

    def new_request(self) -> Request:
        stem = self.rng.choice(self.stems)
        tokens = stem[: self.rng.randint(2, len(stem))]
        num_prompt = len(tokens) + self.rng.randint(0, 6)
        tokens = [*tokens, *(self.rng.randrange(VOCABULARY) for _ in range(MAX_TOKENS + 20))]
        return Request(tokens, self.rng.choice(self.heads), num_prompt, self.rng.randint(0, MAX_DEPTH))

    def prefix_hit(self, request: Request) -> int:
        """Tokens of the prompt's beginning that are not computed: the blocks in the target's cache, never the whole
        prompt, less the last of them, as vLLM has it for EAGLE heads."""
        lengths = range((request.num_prompt - 1) // BLOCK * BLOCK, 0, -BLOCK)
        return next((length - BLOCK for length in lengths if tuple(request.tokens[:length]) in self.known), 0)

    def next_step(self) -> tuple[TargetStep, dict[int, Rows]]:
        rng = self.rng
        if self.last is not None and rng.random() < 0.05:
            return self.last
        finished, prompts, work = [], {}, {}
        for slot in range(4):
            request = self.requests.get(slot)
            if request is not None and (request.num_rows > MAX_TOKENS - 20 or rng.random() < 0.03):
                del self.requests[slot]
                if rng.random() < 0.7:  # otherwise the slot is used again without a word
                    finished.append(slot)
                request = None
            if rng.random() < 0.2:
                continue  # not scheduled in this step
            if request is None:
                request = self.requests[slot] = self.new_request()
                request.num_rows = self.prefix_hit(request)
                prompts[slot] = np.array(request.tokens[: request.num_rows + 1], np.int32)
            elif rng.random() < 0.05:  # preempted; it may find its own beginning again
                request.num_rows = rng.choice([0, request.num_rows // 2 // BLOCK * BLOCK])
            work[slot] = self.rows(request)
            request.num_rows += work[slot].num_valid
            for length in range(BLOCK, request.num_rows + 1, BLOCK):
                self.known.add(tuple(request.tokens[:length]))
        self.num_steps += rng.choice([1, 1, 1, 2])
        step = target_step(self.session, self.num_steps, work, finished=finished, prompts=prompts, rng=rng)
        self.last = step, work
        return self.last

    def rows(self, request: Request) -> Rows:
        start, left = request.num_rows, request.num_prompt - request.num_rows
        if left > 0:
            num_valid = min(left, self.rng.choice([1, 5, 30]))
            return Rows(request, start, num_valid, request.depth if num_valid == left else 0)
        return Rows(request, start, self.rng.randint(1, request.depth + 1), request.depth)


def run_schedule(engine: DraftEngine, heads: list[int], seed: int, num_calls: int, loss: float = 0.0) -> int:
    """Returns how often a request got no drafts although it had rows."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCABULARY) for _ in range(50)] for _ in range(2)]
    targets = [RandomTarget(session, heads, rng, stems) for session in (3, 8)]
    num_refused = 0
    for _ in range(num_calls):
        called = rng.sample(targets, rng.choice([1, 2, 2]))
        sent = [target.next_step() for target in called]
        if rng.random() < loss:
            continue
        answers = engine.step([step for step, _ in sent])
        for target, (_, work), answer_BK in zip(called, sent, answers, strict=True):
            num_refused += check_answer(engine, target.session, work, answer_BK)
    return num_refused


@pytest.mark.parametrize(
    ("heads", "limits"),
    [
        ([0], {}),
        ([0, 1], {}),
        ([0, 1], {"max_num_rows": 7, "max_num_requests": 3}),
        ([0], {"max_num_rows": MAX_DEPTH, "max_num_requests": 1, "max_payload_rows": MAX_DEPTH + 1}),
    ],
)
def test_drafts_equal_those_of_a_session_for_each_request(heads: list[int], limits: dict[str, Any]) -> None:
    engine = DraftEngine({head: head_runtime(head, **limits) for head in heads})
    assert run_schedule(engine, heads, seed=len(limits), num_calls=120) == 0
    counters = engine.counters
    assert counters.drafts > 300
    assert counters.prefix_hit_tokens > 0
    assert (counters.refused, counters.evicted_requests, counters.stale_steps) == (0, 0, 0)
    if limits:
        assert counters.passes > 1.5 * 120


def test_with_one_head_and_room_nothing_that_a_target_skips_is_missing() -> None:
    """The drafter has seen all that its targets have, so it finds all that they find. (Not with two heads: a target's
    cache does not ask which head drafted.)"""
    engine = DraftEngine({0: head_runtime(0)})
    run_schedule(engine, [0], seed=5, num_calls=150)
    assert engine.counters.prefix_hit_tokens > 100
    assert engine.counters.cold_starts == 0


def test_lost_steps_start_cold() -> None:
    engine = DraftEngine({0: head_runtime(0)})
    assert run_schedule(engine, [0], seed=7, num_calls=150, loss=0.1) == 0
    assert engine.counters.cold_starts > 0


@pytest.mark.parametrize("num_blocks", [8, 40])
def test_a_tiny_cache_costs_drafts_but_never_a_wrong_one(num_blocks: int) -> None:
    engine = DraftEngine({head: head_runtime(head, num_blocks=num_blocks) for head in (0, 1)}, min_idle_calls=2)
    num_refused = run_schedule(engine, [0, 1], seed=1, num_calls=150)
    assert num_refused == engine.counters.refused
    assert engine.counters.evicted_blocks > 0
    assert engine.counters.cold_starts > 0
    assert engine.counters.refused > 0
    assert engine.counters.drafts > 100
