"""The blocks and requests of the drafter's cache against a plain model, which knows what each row was made of."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from peagle.drafter.kvcache import RequestTable
from tests.support.request_model import BLOCK, DEPTH, Model, Request, ids, make_table


def random_tokens(rng: random.Random, stems: list[list[int]]) -> list[int]:
    """Tokens that begin like others' and then go on by chance."""
    stem = rng.choice(stems)
    return [*stem[: rng.randint(1, len(stem))], *(rng.randint(0, 2) for _ in range(120))]


def random_schedule(table: RequestTable, seed: int, num_steps: int) -> Model:
    rng, model = random.Random(seed), Model(table)
    stems = [[rng.randint(0, 2) for _ in range(60)] for _ in range(3)]
    live: dict[int, dict[int, Request]] = {0: {}, 1: {}}
    for _ in range(num_steps):
        session = rng.choice([0, 1])
        requests = live[session]
        work, prompts = {}, {}
        for slot in rng.sample(range(6), rng.randint(1, 6)):
            request, kind = requests.get(slot), rng.random()
            if request is None or kind < 0.1 or request.num_rows > 100:  # a new request, also where one was
                request = requests[slot] = Request(random_tokens(rng, stems), 0)
                start = rng.choice([0, rng.randint(0, 10) * BLOCK, rng.randint(0, 40)])
                prompts[slot] = np.array(request.tokens[: start + 1], np.int32)
            elif kind < 0.2:  # preempted, or a step repeated, or rows taken back
                start = rng.choice([0, request.num_rows // 2 // BLOCK * BLOCK, rng.randint(0, request.num_rows)])
                if start and rng.random() < 0.5:  # what follows is another text
                    request.tokens[start + 1 :] = random_tokens(rng, stems)
            elif kind < 0.25:
                start = request.num_rows + rng.randint(1, 5)  # a step was lost
            else:
                start = request.num_rows
            work[slot] = (request, start, rng.choice([0, 1, 2, 3, 9]), rng.randint(0, DEPTH))
        model.step(session, work, prompts)
        if rng.random() < 0.1:
            ended = rng.sample(sorted(requests), rng.randint(0, len(requests)))
            table.release(session, [*ended, 77])
            for slot in ended:
                del requests[slot]
        if rng.random() < 0.02:
            table.drop_session(session)
            requests.clear()
        model.check_counts()
    return model


@pytest.mark.parametrize("num_blocks", [3, 12, 40, 400])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_request_reads_its_own_rows(num_blocks: int, seed: int) -> None:
    table = make_table(num_blocks, max_num_requests=8 if num_blocks < 100 else 32)
    model = random_schedule(table, seed, num_steps=500)
    counters = table.counters
    assert counters.cold_starts > 0
    assert model.cold_reads > 0
    if num_blocks >= 40:
        assert counters.prefix_hit_tokens > 0
    if num_blocks <= 40:
        assert counters.evicted_blocks > 0
    assert (counters.refused > 0) == (num_blocks <= 40)


def filled(table: RequestTable, session: int, slot: int, tokens: list[int], num_rows: int) -> tuple[Model, Request]:
    model, request = Model(table), Request(tokens, 0)
    model.step(session, {slot: (request, 0, num_rows, DEPTH)}, {slot: ids(tokens[0])})
    return model, request


def test_a_prefix_is_found_by_its_tokens_up_to_whole_blocks() -> None:
    table, tokens = make_table(50), list(range(30))
    filled(table, 0, 0, tokens, 4 * BLOCK + 1)
    for start, hit in [(4 * BLOCK, True), (BLOCK, True), (5 * BLOCK, False), (BLOCK + 1, False)]:
        before = dataclasses.replace(table.counters)
        row = table.open(1, 0, np.array(tokens[: start + 1], np.int32))
        assert table.end_C[row] == (start if hit else 0)
        assert table.counters.prefix_hit_tokens - before.prefix_hit_tokens == (start if hit else 0)
        table.release(1, [0])


def test_the_requests_that_need_least_get_the_last_blocks() -> None:
    table = make_table(3)
    big, small = (Request(list(range(i, i + 60)), 0) for i in (0, 100))
    model = Model(table)
    assert model.step(0, {0: (big, 0, 3 * BLOCK, 0), 1: (small, 0, 2 * BLOCK, 0)}, {}) == 1
    assert table.num_blocks_C[table.find(0, ids(0, 1))].tolist() == [0, 2]
    assert small.num_rows == 2 * BLOCK


def test_a_context_longer_than_allowed_is_refused() -> None:
    table = make_table(50)
    request = Request([1] * 200, 0)
    assert Model(table).step(0, {0: (request, 0, 40 * BLOCK, 1)}, {}) == 1
    assert Model(table).step(0, {1: (request, 0, 40 * BLOCK, 2)}, {}) == 0
    assert table.counters.refused == 1
