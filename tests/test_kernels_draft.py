"""A pass built from the kernels' functions drafts what DraftSession drafts, request by request, step by step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.draft import DraftSession
from peagle.drafter.attention import paged_attention, write_kv
from peagle.drafter.rows import INTERPRETED, build_rows, place_hidden
from peagle.model import Drafter
from tests.head_factory import CONFIG, random_drafter
from tests.kernel_device import DEVICE

BLOCK_SIZE, NUM_COLUMNS, MAX_DEPTH, NUM_ROWS = 16, 6, 6, 96
#: The kernels multiply no float64.
DTYPE = torch.float32 if INTERPRETED or DEVICE == "cuda" else torch.float64
#: Steps of three requests: (valid rows, drafts wanted). They start at different times, in one or two chunks, and
#: accept 0 to 5 drafts a step; the second is left out once.
STEPS = [
    [(9, 6), (0, 0), (30, 0)],
    [(1, 6), (21, 3), (7, 5)],
    [(6, 6), (1, 3), (1, 5)],
    [(3, 2), (0, 0), (6, 6)],
    [(1, 0), (4, 1), (1, 1)],
    [(2, 6), (2, 6), (2, 6)],
]


class PagedDrafts:
    """The drafter with a paged cache for three requests, whose blocks lie in any order."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, config = drafter, drafter.config
        generator = torch.Generator().manual_seed(3)
        self.table_BN = torch.randperm(3 * NUM_COLUMNS, generator=generator).view(3, -1).int().to(DEVICE)
        sizes = (3 * NUM_COLUMNS, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.caches = [torch.full((2, *sizes), float("nan"), dtype=DTYPE, device=DEVICE) for _ in drafter.layers]

    @torch.no_grad()
    def step(self, start: list[int], valid: list[int], depth: list[int], tokens_R: Tensor, aux_RX: Tensor) -> Tensor:
        """Logits [3, K, V_draft]; those of depths that were not asked for mean nothing."""
        config = self.drafter.config
        payload_RH = self.drafter.reduce(aux_RX)
        shared_H = self.drafter.reduce(self.drafter.mask_hidden.view(1, -1).to(DTYPE))[0]
        offset = [0, valid[0], valid[0] + valid[1]]
        start_B, valid_B, offset_B, depth_B = (
            torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in (start, valid, offset, depth)
        )
        assert config.ptd_token_id is not None
        rows = build_rows(
            start_B, valid_B, offset_B, depth_B, tokens_R.int(), self.table_BN,
            block_size=BLOCK_SIZE, mask_token_id=config.ptd_token_id, max_depth=MAX_DEPTH, num_rows=NUM_ROWS,
        )  # fmt: skip
        hidden_NH = torch.empty(NUM_ROWS, config.hidden_size, dtype=DTYPE, device=DEVICE)
        place_hidden(payload_RH, rows.sources_N, shared_H, hidden_NH)

        def attend(layer_index: int, q_BATD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
            keys, values = self.caches[layer_index]
            write_kv(k_BGTD[0].transpose(0, 1), v_BGTD[0].transpose(0, 1), keys, values, rows.slots_N)
            out_NAD = paged_attention(
                q_BATD[0].transpose(0, 1), keys, values, self.table_BN, rows.first_row_B1, start_B, rows.context_B,
                torch.zeros_like(start_B), block_size=BLOCK_SIZE, scale=config.head_dim**-0.5,
                sliding_window=config.sliding_window,
            )  # fmt: skip
            return out_NAD.transpose(0, 1)[None]

        embeds_BTH = self.drafter.embed(rows.token_ids_N[None])
        normed_BTH, _ = self.drafter(embeds_BTH, hidden_NH[None], rows.positions_N[None], attend)
        return self.drafter.logits(normed_BTH[0][rows.sample_rows_BK])


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_a_paged_pass_drafts_as_the_session_does(sliding_window: int | None) -> None:
    drafter = random_drafter(dataclasses.replace(CONFIG, sliding_window=sliding_window)).to(DEVICE, DTYPE)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 99, (3, 80), generator=generator).to(DEVICE)
    aux = torch.randn(3, 80, CONFIG.fc_input_size, generator=generator).to(DEVICE, DTYPE)
    sessions, paged, start = [DraftSession(drafter) for _ in range(3)], PagedDrafts(drafter), [0, 0, 0]
    for step in STEPS:
        valid, depth = [rows for rows, _ in step], [wanted for _, wanted in step]
        given = [slice(begin, begin + rows) for begin, rows in zip(start, valid, strict=True)]
        next_R = torch.cat([tokens[index, part.start + 1 : part.stop + 1] for index, part in enumerate(given)])
        aux_RX = torch.cat([aux[index, part] for index, part in enumerate(given)])
        logits_BKV = paged.step(start, valid, depth, next_R, aux_RX)
        for index, part in enumerate(given):
            if valid[index]:
                expected = sessions[index].propose(
                    tokens[index, part.start + 1 : part.stop + 1], aux[index, part], max(depth[index], 1)
                )
                found_KV = logits_BKV[index, : depth[index]]
                torch.testing.assert_close(found_KV, expected.logits_KV[: depth[index]], rtol=1e-4, atol=1e-4)
                assert drafter.target_ids[found_KV.argmax(-1)].tolist() == expected.token_ids_K[: depth[index]].tolist()
        start = [begin + rows for begin, rows in zip(start, valid, strict=True)]
    assert start == [session.num_rows for session in sessions]
