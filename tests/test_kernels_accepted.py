"""What a step leaves of each request: the kernel against its twin, the twin against the rule written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.drafter.rows import BLOCK_ROWS, accepted_rows, accepted_rows_torch
from tests.kernel_device import DEVICE, needs_kernel


@dataclasses.dataclass(frozen=True)
class Case:
    """Of each request: its rows, how many of them verify drafts, and the tokens it sampled."""

    num_rows: tuple[int, ...]
    num_drafts: tuple[int, ...] | None
    num_sampled: tuple[int, ...]

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        first = [sum(self.num_rows[:i]) for i in range(len(self.num_rows) + 1)]
        drafts = self.num_drafts
        up_to = None if drafts is None else column([sum(drafts[: i + 1]) for i in range(len(drafts))])
        next_tokens = [10_000 + i for i in range(len(self.num_rows))]
        return (
            column(first),
            up_to,
            column(list(self.num_sampled)),
            column(next_tokens),
            column([*range(1, first[-1] + 1)]),
        )

    def expected(self) -> tuple[list[int], dict[int, int]]:
        """Valid rows by request, and the next token of every valid row."""
        drafts = self.num_drafts or (0,) * len(self.num_rows)
        valid = [
            rows - (1 + num_drafts - sampled if num_drafts else 0)
            for rows, num_drafts, sampled in zip(self.num_rows, drafts, self.num_sampled, strict=True)
        ]
        tokens: dict[int, int] = {}
        first = 0
        for request, (rows, num_valid) in enumerate(zip(self.num_rows, valid, strict=True)):
            for row in range(first, first + num_valid):
                tokens[row] = 10_000 + request if row == first + num_valid - 1 else row + 2
            first += rows
        return valid, tokens


CASES = {
    "decoding": Case((4, 1, 4, 4), (3, 0, 3, 3), (3, 1, 1, 4)),
    "no drafts": Case((1, 1, 1), None, (1, 1, 1)),
    "prompts beside drafts": Case((9, 8, 40, 2), (0, 7, 0, 1), (1, 8, 0, 1)),
    "a long chunk": Case((2 * BLOCK_ROWS + 5, 3), (0, 2), (0, 2)),
    "a chunk of whole blocks, alone": Case((BLOCK_ROWS,), None, (1,)),
    "one row": Case((1,), (0,), (1,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_twin_follows_the_rule(name: str, dtype: torch.dtype) -> None:
    first, up_to, sampled, after, inputs = CASES[name].tensors(dtype)
    num_valid_B, next_tokens_R = (torch.full((size,), -9, dtype=torch.int32) for size in (len(after), len(inputs)))
    host = [one if one is None else one.cpu() for one in (first, up_to, sampled, after, inputs)]
    accepted_rows_torch(*host, num_valid_B, next_tokens_R)  # type: ignore[arg-type]
    valid, tokens = CASES[name].expected()
    assert num_valid_B.tolist() == valid
    assert {row: int(next_tokens_R[row]) for row in tokens} == tokens


@needs_kernel
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernel_follows_the_rule_and_its_tokens_are_tokens(name: str, dtype: torch.dtype) -> None:
    num_valid_B, next_tokens_R = accepted_rows(*CASES[name].tensors(dtype))
    valid, tokens = CASES[name].expected()
    assert num_valid_B.tolist() == valid
    assert {row: int(next_tokens_R[row]) for row in tokens} == tokens
    assert int(next_tokens_R.min()) >= 0, "a rejected row's token is none"


def test_what_does_not_fit_is_refused() -> None:
    first, up_to, sampled, after, inputs = CASES["decoding"].tensors(torch.int32)
    with pytest.raises(ValueError, match="first_row_B1 has shape"):
        accepted_rows(first[1:], up_to, sampled, after, inputs)
    with pytest.raises(ValueError, match="num_drafts_up_to_B has shape"):
        accepted_rows(first, sampled[1:], sampled, after, inputs)
