"""Whatever targets do, each request's drafts are those of a plain session that has the same rows."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from peagle.checkpoint import save_head
from peagle.config import HeadError
from peagle.drafter import kvcache
from peagle.drafter.engine import DraftEngine
from peagle.drafter.protocol import Int32Array, Step
from peagle.drafter.serving import DrafterLimits, load_runtime_head, load_served_head
from peagle.heads import prepare_head
from tests.support.draft_engine_harness import (
    BLOCK,
    MAX_DEPTH,
    VOCABULARY,
    Request,
    Rows,
    cached_range,
    check_answer,
    expected_drafts,
    head_runtime,
    num_requests,
    target_step,
)
from tests.support.head_factory import CONFIG, REDUCED, head_tensors, reconfigure, write_target
from tests.support.pass_requests import ints


def make_request(seed: int, head: int = 0) -> Request:
    rng = random.Random(seed)
    return Request([rng.randrange(VOCABULARY) for _ in range(160)], head, 10, MAX_DEPTH)


def run(engine: DraftEngine, session: int, step: int, work: dict[int, Rows], **more: Any) -> list[list[int]]:
    """One step, whose answer is compared with what the engine says it holds."""
    [answer_BK] = engine.step([target_step(session, step, work, **more)])
    check_answer(engine, session, work, answer_BK)
    return answer_BK.tolist()


def prompt(request: Request, start: int) -> Int32Array:
    return ints(*request.tokens[: start + 1])


def test_a_target_that_vanished_leaves_its_prefixes_and_its_room() -> None:
    engine, request = DraftEngine({0: head_runtime(0)}), make_request(0)
    free = engine.tables[0].pool.num_available
    run(engine, 1, 7, {slot: Rows(request, 0, 4 * BLOCK + 1, 4) for slot in range(3)}, prompts={0: prompt(request, 0)})
    assert engine.tables[0].pool.num_available < free
    engine.drop_session(1)
    engine.drop_session(1)
    assert (num_requests(engine), engine.tables[0].pool.num_available) == (0, free)
    run(engine, 2, 0, {5: Rows(request, 4 * BLOCK, 2, 4)}, prompts={5: prompt(request, 4 * BLOCK)})
    assert engine.counters.prefix_hit_tokens == 4 * BLOCK


def test_the_table_grows_with_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache, "FIRST_ROWS", 2)
    engine, requests = DraftEngine({0: head_runtime(0)}), {slot: make_request(slot) for slot in range(3)}
    for start in (0, 4):  # the later rows find the earlier ones
        for target in range(3):
            run(engine, target, 0, {slot: Rows(request, start, 4, 3) for slot, request in requests.items()})
    assert (num_requests(engine), engine.counters.refused, engine.counters.cold_starts) == (9, 0, 0)


def test_the_requests_that_need_least_get_the_last_blocks() -> None:
    engine, request = DraftEngine({0: head_runtime(0, num_blocks=3)}), make_request(0)
    run(engine, 1, 0, {0: Rows(request, 0, 3 * BLOCK, 0), 1: Rows(request, 0, 2 * BLOCK, 0)})
    assert [cached_range(engine, 1, slot) for slot in range(2)] == [None, (0, 2 * BLOCK)]


def test_a_context_longer_than_the_heads_gets_no_drafts() -> None:
    engine, request = DraftEngine({0: head_runtime(0)}), Request([1] * 210, 0, 10, MAX_DEPTH)
    run(engine, 1, 0, {0: Rows(request, 0, 200, 1), 1: Rows(request, 0, 200, 2)})
    assert [cached_range(engine, 1, slot) for slot in range(2)] == [(0, 200), None]


def test_a_prefix_is_found_by_its_tokens_up_to_whole_blocks() -> None:
    engine, request = DraftEngine({0: head_runtime(0)}), make_request(0)
    run(engine, 1, 0, {0: Rows(request, 0, 4 * BLOCK + 1, 0)}, prompts={0: prompt(request, 0)})
    for start, is_found in [(4 * BLOCK, True), (BLOCK, True), (5 * BLOCK, False), (BLOCK + 1, False)]:
        run(engine, 2, start, {0: Rows(request, start, 2, 4)}, prompts={0: prompt(request, start)})
        assert cached_range(engine, 2, 0) == (0 if is_found else start, start + 2)


def test_a_swapped_head_drafts_without_the_old_heads_rows() -> None:
    engine, request = DraftEngine({0: head_runtime(0)}), make_request(0)
    run(engine, 1, 0, {0: Rows(request, 0, 2 * BLOCK + 1, 4)}, prompts={0: prompt(request, 0)})
    engine.swap(0, head_runtime(1))
    assert cached_range(engine, 1, 0) is None
    new = dataclasses.replace(request, head=1)
    start = 2 * BLOCK + 1
    [answer_BK] = engine.step([_as_head_zero(target_step(1, 1, {0: Rows(new, start, 2, 4)}))])
    assert answer_BK[0].tolist() == expected_drafts(1, request.tokens, start, start + 2, 4)
    assert engine.counters.cold_starts == 1
    other = _as_head_zero(target_step(2, 0, {0: Rows(new, BLOCK, 2, 4)}, prompts={0: prompt(request, BLOCK)}))
    engine.step([other])
    assert engine.counters.prefix_hit_tokens == 0


def _as_head_zero(step: Step) -> Step:
    descriptor = msgspec.structs.replace(step.descriptor, heads_B=np.zeros_like(step.descriptor.heads_B))
    return dataclasses.replace(step, descriptor=descriptor)


def test_a_request_that_goes_to_another_head_leaves_nothing_behind() -> None:
    engine, request = DraftEngine({head: head_runtime(head) for head in (0, 1)}), make_request(0)
    free = engine.tables[0].pool.num_available
    run(engine, 1, 0, {0: Rows(request, 0, 9, 4)})
    run(engine, 1, 1, {0: Rows(dataclasses.replace(request, head=1), 9, 2, 4)})
    assert num_requests(engine) == 1
    assert engine.tables[0].pool.num_available == free
    run(engine, 1, 2, {0: Rows(request, 11, 2, 4)})
    assert engine.counters.cold_starts == 2


def test_long_prompts_run_in_pieces() -> None:
    engine, chunk, waiting = DraftEngine({0: head_runtime(0, max_num_rows=8)}), make_request(0), make_request(1)
    run(engine, 1, 0, {0: Rows(chunk, 0, 21, 0), 1: Rows(waiting, 0, 5, 4)})
    assert (engine.counters.passes, engine.counters.rows) == (4, 21 + 5 + 3)
    run(engine, 1, 1, {0: Rows(chunk, 21, 18, 4), 1: Rows(waiting, 5, 1, 4)})
    assert cached_range(engine, 1, 0) == (0, 39)


# Random schedules: rejections, chunked prefill, preemption, prefixes in the targets' own caches, requests that end with
# and without a release, lost steps; two targets, two heads, passes too small for a step


MAX_TOKENS = 130


class RandomTarget:
    """A target with up to four requests, whose prompts begin alike."""

    def __init__(self, session: int, heads: list[int], rng: random.Random, stems: list[list[int]]) -> None:
        self.session, self.heads, self.rng, self.stems = session, heads, rng, stems
        self.requests: dict[int, Request] = {}
        self.num_steps = 0
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

    def next_step(self) -> tuple[Step, dict[int, Rows]]:
        rng = self.rng
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
                prompts[slot] = prompt(request, request.num_rows)
            elif rng.random() < 0.05:  # preempted; it may find its own beginning again
                request.num_rows = rng.choice([0, request.num_rows // 2 // BLOCK * BLOCK])
            work[slot] = self.rows(request)
            request.num_rows += work[slot].num_valid
            for length in range(BLOCK, request.num_rows + 1, BLOCK):
                self.known.add(tuple(request.tokens[:length]))
        self.num_steps += rng.choice([1, 1, 1, 2])
        step = target_step(self.session, self.num_steps, work, finished=finished, prompts=prompts, rng=rng)
        return step, work

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
        ([0], {"max_num_rows": MAX_DEPTH, "max_num_requests": 1}),
    ],
)
def test_drafts_equal_those_of_a_session_for_each_request(heads: list[int], limits: dict[str, Any]) -> None:
    engine = DraftEngine({head: head_runtime(head, **limits) for head in heads})
    assert run_schedule(engine, heads, seed=len(limits), num_calls=120) == 0
    counters = engine.counters
    assert counters.drafts > 300
    assert counters.prefix_hit_tokens > 0
    assert counters.refused == 0
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
    engine = DraftEngine({head: head_runtime(head, num_blocks=num_blocks) for head in (0, 1)})
    num_refused = run_schedule(engine, [0, 1], seed=1, num_calls=150)
    assert num_refused == engine.counters.refused
    assert engine.counters.evicted_blocks > 0
    assert engine.counters.cold_starts > 0
    assert engine.counters.refused > 0
    assert engine.counters.drafts > 100


# ---- a drafter's head, loaded with its target's tables


@pytest.mark.parametrize("config", [CONFIG, REDUCED], ids=["whole", "reduced"])
def test_a_shipped_head_takes_the_targets_tables(tmp_path: Path, config: Any) -> None:
    target_dir = write_target(tmp_path / "target", tied=config is CONFIG)
    head_dir = save_head(tmp_path / "head", config, head_tensors(config, shipped=True))
    drafter = load_runtime_head(head_dir, target_dir, "cpu", torch.float32)
    plain = load_runtime_head(prepare_head(head_dir, target_dir, tmp_path / "cache"), target_dir)
    assert torch.equal(drafter.lm_head.weight, plain.lm_head.weight)
    assert torch.equal(drafter.target_ids, plain.target_ids)
    ids = torch.arange(config.vocab_size)
    assert torch.equal(drafter.embed(ids), plain.embed(ids))
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


def test_a_head_of_another_target_or_kind_is_refused(tmp_path: Path) -> None:
    target_dir, eagle3 = write_target(tmp_path / "target"), dataclasses.replace(CONFIG, ptd_token_id=None)
    reconfigure(target_dir, vocab_size=101)
    for config, problem in ((CONFIG, "vocabulary: the head has 100 tokens, the target 101"),
                            (eagle3, "head .* has no mask token .* P-EAGLE heads only")):  # fmt: skip
        with pytest.raises(HeadError, match=problem):
            load_runtime_head(save_head(tmp_path / "head", config, head_tensors(config)), target_dir)


def test_a_cache_that_holds_no_request_is_named(head_dir: Path, target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"cache_gib = 0.0001 holds \d+ blocks .* or a smaller max_context"):
        load_served_head(head_dir, target_dir, DrafterLimits(cache_gib=0.0001))
