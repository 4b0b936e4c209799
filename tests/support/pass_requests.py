"""Requests that a parallel pass and `DraftSession`s of the same drafter are given step by step."""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.config import DrafterConfig, Llama3Rope
from peagle.draft import DraftSession
from peagle.drafter.parallel_pass import ParallelPass, PassLimits, row_addresses
from peagle.drafter.protocol import NO_DRAFT, Int32Array
from peagle.drafter.rows import PassBatch
from peagle.drafter.serving import input_projection
from peagle.model import Drafter
from tests.support.head_factory import CONFIG

BLOCK_SIZE = 4
MAX_DEPTH = 5
BLOCKS_PER_REQUEST = 20

SWITCHES: dict[str, DrafterConfig] = {
    "plain": CONFIG,
    "one layer": dataclasses.replace(CONFIG, num_hidden_layers=1),
    "norms": dataclasses.replace(CONFIG, norm_before_residual=True, fc_norm=True, attention_bias=True),
    "qwen3": dataclasses.replace(
        CONFIG, qk_norm=True, norm_before_fc=True, attention_bias=True, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 16)
    ),
    "multi-head": dataclasses.replace(CONFIG, num_key_value_heads=4),
}


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one request gives in a step: rows at `start` and later, and the drafts it wants."""

    request: int
    start: int
    num_valid: int
    depth: int


class Requests:
    """Some requests with random tokens and hidden states, and the blocks that each has of a shuffled cache."""

    def __init__(self, drafter: Drafter, num_requests: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = drafter.fc.weight
        num_positions = BLOCK_SIZE * BLOCKS_PER_REQUEST
        # Row p's token is the one after position p.
        self.tokens = torch.randint(0, 99, (num_requests, num_positions), generator=generator).to(weight.device)
        shape = (num_requests, num_positions, drafter.config.fc_input_size)
        self.aux = torch.randn(shape, generator=generator).to(weight)
        self.num_blocks = num_requests * BLOCKS_PER_REQUEST + 3
        self.blocks = torch.randperm(self.num_blocks, generator=generator)[:-3].view(num_requests, -1).int().numpy()
        self.sessions = [DraftSession(drafter) for _ in range(num_requests)]
        self.drafter, self.projection = drafter, input_projection(drafter)
        self.payloads: list[Tensor] = []  # a batch names addresses in them

    def new_pass(
        self, device: str = "cpu", dtype: torch.dtype | None = None, max_num_requests: int = 0, **settings: Any
    ) -> ParallelPass:
        limits = PassLimits(
            max_num_requests=max_num_requests or len(self.tokens), max_num_rows=256, max_draft_tokens=MAX_DEPTH,
            max_blocks=min(self.num_blocks, BLOCKS_PER_REQUEST), num_blocks=self.num_blocks, block_size=BLOCK_SIZE,
        )  # fmt: skip
        drafter = copy.deepcopy(self.drafter).to(device, dtype or self.drafter.fc.weight.dtype)
        return ParallelPass(drafter, limits=limits, digest="", **settings)

    def rows(self, step: Step) -> tuple[Tensor, Tensor]:
        """Next tokens [n] and auxiliary hidden states [n, C * S] of a step."""
        end = step.start + step.num_valid
        return self.tokens[step.request, step.start : end], self.aux[step.request, step.start : end]

    def expected(self, step: Step) -> list[int]:
        """What a session of this request's own proposes."""
        session = self.sessions[step.request]
        session.cache.truncate(step.start)
        drafts = session.propose(*self.rows(step), max(step.depth, 1)).token_ids_K.tolist()
        return (drafts if step.depth else []) + [-1] * (MAX_DEPTH - step.depth)

    def batch(
        self, steps: list[Step], *, num_rejected: int = 2, dtype: torch.dtype | None = None
    ) -> PassBatch[np.ndarray[Any, Any]]:
        """The steps in one batch, each followed by rejected rows that must not matter. dtype: of the pass."""
        tokens: list[Tensor] = []
        hidden: list[Tensor] = []
        offsets: list[int] = []
        for step in steps:
            offsets.append(sum(len(part) for part in tokens))
            next_tokens, aux = self.rows(step)
            tokens += [next_tokens.cpu(), torch.full((num_rejected,), -7)]
            hidden += [self.projection.project(aux).cpu(), torch.full((num_rejected, self.projection.hidden_size), 1e4)]
        hidden_RH = torch.cat([part.to(dtype or self.projection.fc_HX.dtype) for part in hidden])
        if self.aux.is_cuda:
            hidden_RH = hidden_RH.pin_memory()
        self.payloads.append(hidden_RH)
        requests = [step.request for step in steps]
        used = max(-(-(step.start + step.num_valid + MAX_DEPTH) // BLOCK_SIZE) for step in steps)
        return PassBatch(
            start_B=np.array([step.start for step in steps], np.int32),
            num_valid_B=np.array([step.num_valid for step in steps], np.int32),
            row_offset_B=np.array(offsets, np.int32),
            num_drafts_B=np.array([step.depth for step in steps], np.int32),
            next_tokens_R=torch.cat(tokens).long().numpy(),
            addresses_R=row_addresses(hidden_RH),
            block_table_BN=np.ascontiguousarray(self.blocks[requests, :used]),
        )


def run(parallel_pass: ParallelPass, batch: PassBatch[np.ndarray[Any, Any]]) -> Int32Array:
    """Drafts [B, MAX_DEPTH]."""
    drafts_BD = parallel_pass.launch(batch)()
    return np.pad(drafts_BD, ((0, 0), (0, MAX_DEPTH - drafts_BD.shape[1])), constant_values=NO_DRAFT)


#: Batches of three requests: prompts of one and of two chunks, other depths and orders, and steps back.
STEPS = [
    [Step(0, 0, 9, 0), Step(1, 0, 3, 5)],
    [Step(0, 9, 4, 3), Step(2, 0, 17, 1), Step(1, 3, 1, 5)],
    [Step(1, 4, 6, 0), Step(0, 13, 2, 5)],
    [Step(2, 17, 1, 2), Step(1, 10, 3, 4), Step(0, 15, 1, 5)],
    [Step(0, 11, 5, 4), Step(1, 2, 1, 5)],
    [Step(1, 3, 12, 3), Step(2, 18, 22, 0), Step(0, 16, 6, 1)],
    [Step(2, 40, 2, 5)],
]
