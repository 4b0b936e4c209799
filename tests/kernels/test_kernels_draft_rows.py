"""Tests of `peagle.vllm.draft_rows`: the kernel, on a GPU or interpreted, against a loop over requests and rows."""

import dataclasses
import random

import pytest
import torch

from peagle.vllm.draft_rows import DraftRows, TargetRows, accepted_rows, write_rows
from tests.support.kernel_device import DEVICE, needs_kernel

pytestmark = needs_kernel

MASK, BLOCK_SIZE, MAX_MODEL_LEN, MAX_REQUESTS, NUM_PLACES = 999, 4, 200, 9, 12
MOST_DRAFTS = 8
LONGEST = 150
"""Rows of a prompt: several programs of the kernel."""


@dataclasses.dataclass
class Request:
    """One request of a batch: `tokens` are the target's input ids, from position `context` on."""

    context: int
    tokens: list[int]
    num_rejected: int
    is_prompt: bool
    newest: int
    next_prompt: int
    place: int
    blocks: list[int]


def make_requests(seed: int, num_requests: int, num_drafts: int, longest: int) -> list[Request]:
    generator = random.Random(seed)
    places = generator.sample(range(NUM_PLACES), num_requests)
    found = []
    for place in places:
        is_prompt = generator.random() < 0.3 and longest > num_drafts + 1
        query = generator.randint(1, longest if is_prompt else num_drafts + 1)
        context = generator.choice([0, 3, MAX_MODEL_LEN - query, generator.randint(0, MAX_MODEL_LEN - query)])
        rejected = 0 if is_prompt else generator.randint(0, query - 1)
        blocks = [generator.randint(1, 500) for _ in range(MAX_MODEL_LEN // BLOCK_SIZE)]
        if generator.random() < 0.2:
            blocks[0] = 0
        tokens = [generator.randint(0, 900) for _ in range(query)]
        newest = generator.randint(0, 900)
        found.append(Request(context, tokens, rejected, is_prompt, newest, 900 - place, place, blocks))
    return found


def plain_rows(
    requests: list[Request], num_drafts: int, stride: int, num_packed: int | None = None
) -> tuple[list[tuple[int, ...]], list[int], list[int], list[int]]:
    """Rows (token, position, slot, source), keys of each request, sampled rows, first rows: by the table in the module.

    num_packed: rows of the packed layout at most; None: another layout.
    """
    rows: list[tuple[int, ...]] = []
    contexts, sampled, firsts, target_row = [], [], [], 0
    masks = [num_drafts - 1] * len(requests)
    if num_packed is not None:
        num_valid = sum(len(one.tokens) - one.num_rejected for one in requests)
        turn = 0
        while num_valid + sum(masks) > num_packed:
            masks[turn % len(masks)] -= 1
            turn += 1
    for one, num_masks in zip(requests, masks, strict=True):
        valid = len(one.tokens) - one.num_rejected
        used: list[tuple[int, ...]] = []
        for i in range(valid + num_masks):
            position = one.context + i
            if position >= MAX_MODEL_LEN:
                break
            newest = one.next_prompt if one.is_prompt else one.newest
            real = newest if i == valid - 1 else one.tokens[i + 1] if i < valid else MASK
            block = one.blocks[position // BLOCK_SIZE]
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE if block else -1
            used.append((real, position, slot, 1 + target_row + i if i < valid else 0))
        total = stride or (len(one.tokens) if num_packed is None else valid) + num_masks
        firsts.append(len(rows))
        rows += [(0, 0, -1, 0)] * (total - len(used))
        sampled += [len(rows) + min(valid - 1 + depth, len(used) - 1) for depth in range(num_drafts)]
        rows += used
        contexts.append(one.context + len(used))
        target_row += len(one.tokens)
    return rows, contexts, sampled, [*firsts, len(rows)]


def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def target_rows(requests: list[Request]) -> TargetRows:
    """Of a batch, as the runner knows them."""
    lengths = [len(one.tokens) for one in requests]
    last, prefill = [0] * NUM_PLACES, [0] * NUM_PLACES
    for one in requests:
        last[one.place], prefill[one.place] = one.newest, one.next_prompt
    return TargetRows(
        first_row_B1=tensor([sum(lengths[:i]) for i in range(len(requests) + 1)] + [sum(lengths)] * 2),
        input_ids_N=tensor([token for one in requests for token in one.tokens]),
        positions_N=tensor([one.context + i for one in requests for i in range(len(one.tokens))], torch.int64),
        place_B=tensor([one.place for one in requests], torch.int64),
        num_sampled_B=tensor([0 if one.is_prompt else 1 for one in requests]),
        num_rejected_B=tensor([one.num_rejected for one in requests]),
        last_sampled_S=tensor(last, torch.int64).view(-1, 1),
        next_prefill_S=tensor(prefill),
    )


def laid_out(
    requests: list[Request], num_drafts: int, stride: int, num_rows: int, is_packed: bool = False
) -> DraftRows:
    """What the kernel writes, into buffers full of -7, second cache group; `num_rows` with the padding."""
    out = DraftRows.empty(MAX_REQUESTS, num_rows, MOST_DRAFTS, 2, torch.device(DEVICE))
    for buffer in (out.token_ids_R, out.positions_R, out.slots_GR, out.sources_R, out.sample_rows_BD, out.context_B):
        buffer.fill_(-7)
    write_rows(
        target_rows(requests),
        tensor([block for one in requests for block in one.blocks]).view(len(requests), -1),
        out,
        group=1,
        num_drafts=num_drafts,
        stride=stride,
        is_packed=is_packed,
        max_query_len=max(len(one.tokens) for one in requests),
        num_rows=num_rows,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK,
        max_model_len=MAX_MODEL_LEN,
    )
    return out


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(1, 7), (4, 2), (6, 1), (MAX_REQUESTS, 7)])
@pytest.mark.parametrize("layout", ["uniform", "ragged", "packed", "packed, short of 1", "packed, short of many"])
def test_rows_are_those_of_the_loop(num_requests: int, num_drafts: int, layout: str) -> None:
    is_packed, stride = layout.startswith("packed"), 2 * num_drafts if layout == "uniform" else 0
    requests = make_requests(num_requests, num_requests, num_drafts, num_drafts + 1 if stride else LONGEST)
    num_targets = sum(len(one.tokens) - one.num_rejected for one in requests)
    num_rows = num_targets + num_requests * (num_drafts - 1)
    if layout == "packed, short of 1":
        num_rows = max(num_targets, num_rows - 1)
    if layout == "packed, short of many":
        num_rows = max(num_targets, num_rows - num_requests * 2 - 1)
    rows, contexts, sampled, firsts = plain_rows(requests, num_drafts, stride, num_rows if is_packed else None)
    padding = 0 if "short" in layout else 5
    assert not is_packed or len(rows) == num_rows
    out = laid_out(requests, num_drafts, stride, len(rows) + padding, is_packed)
    columns = (out.token_ids_R, out.positions_R, out.slots_GR[1], out.sources_R)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == rows + [(0, 0, -1, 0)] * padding
    assert out.context_B.tolist() == contexts + [0] * (MAX_REQUESTS - num_requests)
    assert out.sample_rows_BD.tolist() == sampled + [0] * (MOST_DRAFTS * MAX_REQUESTS - len(sampled))
    assert out.first_row_B1.tolist() == firsts + [len(rows)] * (MAX_REQUESTS - num_requests)
    assert out.slots_GR[0].eq(-7).all()


@pytest.mark.parametrize(("num_requests", "longest"), [(1, 1), (3, 8), (1, LONGEST), (MAX_REQUESTS, LONGEST)])
def test_a_remote_drafter_hears_of_the_rows_that_stay(num_requests: int, longest: int) -> None:
    requests = make_requests(num_requests, num_requests, 7, longest)
    lengths = [len(one.tokens) for one in requests]
    start_B, num_valid_B, next_tokens_N = accepted_rows(target_rows(requests), max(lengths))
    assert start_B.tolist() == [one.context for one in requests]
    assert num_valid_B.tolist() == [len(one.tokens) - one.num_rejected for one in requests]
    columns = zip(requests, num_valid_B.tolist(), next_tokens_N.split(lengths), strict=True)
    for one, num_valid, tokens in columns:
        newest = one.next_prompt if one.is_prompt else one.newest
        assert tokens[:num_valid].tolist() == [*one.tokens[1:num_valid], newest]
        assert int(tokens.min()) >= 0, "a rejected row's token is none"
