"""Tests of `peagle.vllm.remote_speculator` without vLLM's engine: a small runner of our own calls it as vLLM's V2
runner does, and a drafter in a process of its own answers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peagle.vllm.step_notes import SchedulerPlan
from tests.support.draft_engine_harness import CONFIG, MAX_DEPTH, aux_rows, proposed
from tests.support.kernel_device import DEVICE, needs_kernel
from tests.support.transport_harness import SHAPE, DrafterProcess, connected

pytestmark = [needs_kernel, pytest.mark.skipif(DEVICE != "cpu", reason="its links are the host's")]
if DEVICE == "cpu":
    pytest.importorskip("vllm")
    from peagle.vllm import remote_speculator

NUM_PLACES, PROMPT_TOKENS, LONGEST = SHAPE.max_num_requests, (1, 14), 60


def make_speculator(pool: Any) -> Any:
    sender = remote_speculator.StepSender(pool, SHAPE, cpu := torch.device("cpu"))
    return remote_speculator.RemoteSpeculator(sender, MAX_DEPTH, cpu)


class Request:
    """tokens: all that it will ever have, its prompt first. computed: rows that stay so far."""

    def __init__(self, number: int, place: int, draw: random.Random) -> None:
        self.id, self.place, self.computed = f"request {number}", place, 0
        self.num_prompt, self.max_k = draw.randint(*PROMPT_TOKENS), draw.choice([0, *[2, MAX_DEPTH, MAX_DEPTH] * 2])
        self.tokens = [draw.randrange(CONFIG.vocab_size - 1) for _ in range(LONGEST + MAX_DEPTH)]

    def as_new(self) -> Any:
        params = SimpleNamespace(extra_args={"peagle_k": self.max_k}, logit_bias=None, min_p=0.0)
        return SimpleNamespace(req_id=self.id, sampling_params=params, prefill_token_ids=self.tokens[: self.num_prompt])


def step(one: Any, requests: list[Request], ahead: int, draw: random.Random) -> list[tuple[Request, int, list[int]]]:
    """One step of these requests: each with what it wanted of drafts, and what came."""
    ids, positions, first, taps, rejected = [], [], [0], [], []
    last, prefill = torch.zeros(NUM_PLACES, 1, dtype=torch.int64), torch.zeros(1, NUM_PLACES, dtype=torch.int32)
    starts, is_prefilling = [request.computed for request in requests], []
    for request in requests:
        start, left = request.computed, request.num_prompt - request.computed
        is_prefilling.append(left > 0)
        query = min(left, draw.choice([4, 9])) if left > 0 else 1 + draw.randint(0, request.max_k)
        rejected.append(0 if left > 0 else draw.randint(0, query - 1))
        valid = query - rejected[-1]
        wrong = [draw.randrange(CONFIG.vocab_size - 1) for _ in range(rejected[-1])]
        ids += request.tokens[start : start + valid] + wrong
        positions += range(start, start + query)
        of_wrong = torch.randn(rejected[-1], CONFIG.fc_input_size).double()
        taps += [aux_rows(request.tokens, start, start + valid), of_wrong]
        first.append(first[-1] + query)
        request.computed += valid
        if request.computed < request.num_prompt:
            prefill[0, request.place] = request.tokens[request.computed]
        else:
            last[request.place] = request.tokens[request.computed]
    is_unfinished = [request.computed < request.num_prompt for request in requests]
    batch = SimpleNamespace(
        num_reqs=len(requests),
        req_ids=[request.id for request in requests],
        num_tokens=first[-1],
        input_ids=torch.tensor([*ids, 0, 0], dtype=torch.int32),  # padding after the batch
        positions=torch.tensor([*positions, 0, 0]),
        query_start_loc=torch.tensor([*first, first[-1]], dtype=torch.int32),
        idx_mapping=torch.tensor([request.place for request in requests], dtype=torch.int32),
        num_scheduled_tokens=np.diff(first).astype(np.int32),
        num_computed_tokens_np=np.array(starts, np.int32),
        prefill_len_np=np.array([request.num_prompt for request in requests], np.int32),
        is_prefilling_np=np.array(is_prefilling),
    )
    num_sampled = torch.tensor([0 if unfinished else 1 for unfinished in is_unfinished], dtype=torch.int32)
    num_rejected, aux = torch.tensor(rejected, dtype=torch.int32), list(torch.cat(taps).chunk(3, dim=-1))
    found = one.propose(batch, None, None, aux[0], aux, num_sampled, num_rejected, last, prefill, None, None)
    wanted = [0 if no_draft else min(r.max_k, ahead) for r, no_draft in zip(requests, is_unfinished, strict=True)]
    assert set(one.num_drafts) == {r.id for r, depth in zip(requests, wanted, strict=True) if depth}
    return list(zip(requests, wanted, found.tolist(), strict=True))


def test_drafts_are_the_reference_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding, rejections, requests that come and go, some with K = 0, and fewer drafts than
    K_max ahead."""
    monkeypatch.setattr(remote_speculator, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    draw, num_compared, number = random.Random(0), 0, 0
    places, live = list(range(NUM_PLACES)), []
    with monkeypatch.context() as environment:
        environment.delenv("TRITON_INTERPRET")
        drafter = DrafterProcess()
    with drafter:
        pool = connected(drafter.address)
        one = make_speculator(pool)
        for _ in range(25):
            new = [Request(number := number + 1, places.pop(), draw) for _ in range(draw.randint(0, len(places)))]
            live += new
            ahead = draw.choice([1, MAX_DEPTH, MAX_DEPTH])
            plan = SchedulerPlan(num_drafts_ahead=ahead)
            one.begin_step(SimpleNamespace(scheduled_new_reqs=[r.as_new() for r in new], peagle_plan=plan))
            draw.shuffle(live)
            if not live:
                continue
            for request, depth, drafts in step(one, live, ahead, draw):
                if depth:
                    expected = proposed(0, request.tokens, 0, request.computed, depth)
                    assert drafts[:depth] == expected.token_ids_K.tolist()
                    num_compared += depth
            for request in [r for r in live if r.computed >= LONGEST - MAX_DEPTH or draw.random() < 0.1]:
                live.remove(request)
                places.append(request.place)
                one.drop_requests([request.id])
        pool.close()
    assert num_compared > 60
