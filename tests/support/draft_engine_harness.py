"""Targets without a model, that send a drafter what a real one would, and the drafts that each request must get.

A target's hidden state is a function of the tokens before it, as a real one's is; so every draft can be computed again
from a request's tokens alone, by `peagle.draft.DraftSession`.
"""

import dataclasses
import functools
import random
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from peagle.draft import Drafts, DraftSession
from peagle.drafter.engine import DraftEngine
from peagle.drafter.kvcache import NO_ROW
from peagle.drafter.parallel_pass import ParallelPass, PassLimits
from peagle.drafter.protocol import Int32Array, Step, StepDescriptor, TargetShape, check_sizes, check_step
from peagle.model import Drafter
from tests.support.head_factory import CONFIG, random_drafter
from tests.support.pass_requests import ints

BLOCK = 4
MAX_DEPTH = 4
VOCABULARY = 99


@functools.cache
def drafter_of(head: int) -> Drafter:
    return random_drafter(CONFIG, seed=head)


def head_runtime(head: int, **limits: int) -> ParallelPass:
    sizes = dict(max_num_requests=16, max_num_rows=200, num_blocks=600, block_size=BLOCK, max_draft_tokens=MAX_DEPTH)
    sizes |= limits
    sizes["max_blocks"] = min(sizes["num_blocks"], 200 // BLOCK)
    return ParallelPass(drafter_of(head), limits=PassLimits(**sizes), digest=f"digest{head}")


@functools.lru_cache(maxsize=100_000)
def aux_of(tokens: tuple[int, ...]) -> Tensor:
    """[C * S], what the target's layers say at the last of these tokens."""
    generator = torch.Generator().manual_seed(zlib.crc32(np.array(tokens, np.int32).tobytes()))
    return torch.randn(CONFIG.fc_input_size, generator=generator, dtype=torch.float64)


def aux_rows(tokens: list[int], start: int, end: int) -> Tensor:
    """[end - start, C * S] of the positions start .. end - 1."""
    return torch.stack([aux_of(tuple(tokens[: position + 1])) for position in range(start, end)])


class Reference(DraftSession):
    """`DraftSession` of a request whose rows before `first` are not in the cache."""

    def __init__(self, drafter: Drafter, first: int) -> None:
        super().__init__(drafter)
        self.first = first

    def _forward(self, token_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        positions_BT = self.first + torch.arange(self.num_rows, self.num_rows + len(token_ids_T))[None]
        embeds_BTH = self.drafter.embed(token_ids_T[None])
        normed_BTH, back_BTH = self.drafter(embeds_BTH, hidden_TH[None], positions_BT, self._attend)
        return normed_BTH[0], back_BTH[0]


def proposed(head: int, tokens: list[int], first: int, end: int, depth: int) -> Drafts:
    """After the rows first .. end - 1 of a request."""
    return Reference(drafter_of(head), first).propose(
        torch.tensor(tokens[first + 1 : end + 1]), aux_rows(tokens, first, end), depth
    )


def expected_drafts(head: int, tokens: list[int], first: int, end: int, depth: int) -> list[int]:
    """Drafts after the rows first .. end - 1 of a request."""
    return proposed(head, tokens, first, end, depth).token_ids_K.tolist()


@dataclasses.dataclass
class Request:
    """tokens: all that it will ever have; num_rows: rows that the drafter was given; depth: drafts wanted."""

    tokens: list[int]
    head: int
    num_prompt: int
    depth: int
    num_rows: int = 0


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a request sends in a step."""

    request: Request
    start: int
    num_valid: int
    depth: int


def target_step(
    session: int,
    step: int,
    work: Mapping[int, Rows],
    *,
    finished: list[int] | None = None,
    prompts: Mapping[int, Int32Array] | None = None,
    rng: random.Random | None = None,
) -> Step:
    """The step of these slots; rows of rejected drafts and padding, full of NaN, lie between those of the requests."""
    rng = rng or random.Random(0)
    offsets, num_rows = [], rng.randint(0, 2)
    for rows in work.values():
        offsets.append(num_rows)
        num_rows += rows.num_valid + rng.randint(0, 2)
    tokens_R = np.full(num_rows, 123_456, np.int32)
    hidden_RH = torch.full((num_rows, CONFIG.hidden_size), float("nan"), dtype=torch.float64)
    for rows, offset in zip(work.values(), offsets, strict=True):
        end = rows.start + rows.num_valid
        if rows.num_valid:
            tokens_R[offset : offset + rows.num_valid] = rows.request.tokens[rows.start + 1 : end + 1]
            with torch.no_grad():
                reduced = drafter_of(rows.request.head).project_inputs(aux_rows(rows.request.tokens, rows.start, end))
            hidden_RH[offset : offset + rows.num_valid] = reduced

    descriptor = StepDescriptor(
        slots_B=ints(*work),
        heads_B=ints(*(rows.request.head for rows in work.values())),
        num_drafts_B=ints(*(rows.depth for rows in work.values())),
        row_offset_B=ints(*offsets),
        num_rows=num_rows,
        prompts=dict(prompts or {}),
        finished_slots=tuple(finished or ()),
        number=step,
    )
    made = Step(
        descriptor,
        start_B=ints(*(rows.start for rows in work.values())),
        num_valid_B=ints(*(rows.num_valid for rows in work.values())),
        next_tokens_R=tokens_R,
        hidden_RH=hidden_RH,
        session=session,
    )
    shape = TargetShape(CONFIG.hidden_size, "float64", MAX_DEPTH, 64, 4096, VOCABULARY)
    check_sizes(descriptor, shape)
    check_step(made, shape)
    return made


def cached_range(engine: DraftEngine, session: int, slot: int) -> tuple[int, int] | None:
    """First position that is in the cache of a request, and the one after the last; None without a cache."""
    for table in engine.tables.values():
        if (row := table.row_of.get((session, slot), NO_ROW)) != NO_ROW and table.num_blocks_C[row]:
            return int(table.origin_C[row]), int(table.end_C[row])
    return None


def num_requests(engine: DraftEngine) -> int:
    """Requests with rows in a cache."""
    return sum(int((table.num_blocks_C > 0).sum()) for table in engine.tables.values())


def check_answer(engine: DraftEngine, session: int, work: Mapping[int, Rows], answer_BK: Int32Array) -> int:
    """Every request got the drafts of the rows that the engine says it holds. Returns how many got none."""
    num_refused = 0
    assert answer_BK.shape == (len(work), engine.max_draft_tokens)
    for (slot, rows), drafts_K in zip(work.items(), answer_BK.tolist(), strict=True):
        end, cached = rows.start + rows.num_valid, cached_range(engine, session, slot)
        if cached is None:
            assert drafts_K == [-1] * engine.max_draft_tokens
            num_refused += 1
            continue
        assert cached[1] == end
        wanted = []
        if rows.num_valid and rows.depth:
            wanted = expected_drafts(rows.request.head, rows.request.tokens, cached[0], end, rows.depth)
        assert drafts_K == wanted + [-1] * (engine.max_draft_tokens - len(wanted))
    return num_refused
