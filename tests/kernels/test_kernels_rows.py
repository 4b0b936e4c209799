"""What happens to rows outside the matrix products: kernels against twins, twins against the rules written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafter.drafts import token_ids
from peagle.drafter.rows import (
    Rows,
    accepted_rows,
    add_norm,
    build_rows,
    first_rows,
    place_hidden,
    rotate_heads,
    silu_mul,
)
from peagle.model import RMSNorm, rotary_tables, rotate
from tests.support.head_factory import random_drafter
from tests.support.kernel_device import DEVICE, needs_kernel, twin
from tests.support.pass_requests import STEPS, SWITCHES, Requests

MASK = 999


@dataclasses.dataclass(frozen=True)
class Given:
    """One request of a batch; `payload` rows were computed by the target, the first `num_valid` of them count."""

    start: int
    num_valid: int
    depth: int
    payload: int | None = None


DECODE = [Given(7, 3, 4, 5), Given(31, 1, 4, 5), Given(16, 5, 4, 5)]
CASES: dict[str, list[Given]] = {
    "no request": [],
    "one row": [Given(0, 1, 1)],
    "decode": DECODE,
    "all rejected but one": [Given(40, 1, 7, 8), Given(0, 1, 7, 8)],
    "all accepted": [Given(40, 8, 7, 8)],
    "depth 0": [Given(12, 20, 0), Given(3, 1, 0)],
    "chunk beside decode": [Given(64, 70, 0), *DECODE, Given(0, 33, 7)],
    "padding requests": [Given(0, 0, 0), DECODE[0], Given(0, 0, 5), DECODE[1], Given(0, 0, 0)],
    "beyond the block table": [Given(190, 3, 6)],
    "deeper than asked for": [Given(5, 2, 30)],
}


def tensors(requests: list[Given], block_size: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
    """Arguments of `build_rows`; requests lie in the payload last first, with a gap; 12 columns of 16 positions."""
    generator = torch.Generator().manual_seed(1)
    offsets, end = [0] * len(requests), 3
    for index in reversed(range(len(requests))):
        offsets[index] = end
        end += requests[index].payload or requests[index].num_valid
    next_tokens_R = torch.randint(0, 900, (end,), generator=generator, dtype=dtype)
    num_blocks = 192 // block_size
    table_BN = torch.randperm(len(requests) * num_blocks, generator=generator).view(-1, num_blocks).to(dtype)
    columns = [[getattr(request, name) for request in requests] for name in ("start", "num_valid", "depth")]
    start_B, num_valid_B, num_drafts_B = (torch.tensor(column, dtype=dtype) for column in columns)
    made = [start_B, num_valid_B, torch.tensor(offsets, dtype=dtype), num_drafts_B, next_tokens_R, table_BN]
    return [tensor.to(DEVICE) for tensor in made]


def by_loop(
    requests: list[Given], arguments: list[Tensor], block_size: int, max_draft_tokens: int, num_rows: int
) -> Rows:
    """The definition, request by request and row by row."""
    offsets, next_tokens, table = (arguments[index].tolist() for index in (2, 4, 5))
    found: list[tuple[int, int, int, int]] = []
    first, samples, context = [0], [], []
    for index, request in enumerate(requests):
        depth = min(request.depth, max_draft_tokens) if request.num_valid else 0
        positions = range(request.start, request.start + request.num_valid + max(depth - 1, 0))
        base = len(found)
        for number, position in enumerate(positions):
            source = offsets[index] + number if number < request.num_valid else -1
            column = position // block_size
            block = table[index][column] if column < len(table[index]) else -1
            slot = block * block_size + position % block_size if block >= 0 else -1
            found.append((next_tokens[source] if source >= 0 else MASK, position, slot, source))
        first.append(len(found))
        context.append(positions.stop)
        sampled = [base + request.num_valid - 1 + number for number in range(depth)]
        samples.append(sampled + [-1] * (max_draft_tokens - depth))
    found += [(0, 0, -1, -1)] * (num_rows - len(found))
    columns = torch.tensor(found, dtype=torch.int64).view(-1, 4).unbind(1)
    return Rows(
        *columns,
        torch.tensor(samples, dtype=torch.int64).view(-1, max_draft_tokens),
        torch.tensor(first),
        torch.tensor(context),
    )


def assert_same(found: Rows, expected: Rows) -> None:
    for field in dataclasses.fields(Rows):
        have, want = getattr(found, field.name), getattr(expected, field.name)
        assert have.tolist() == want.tolist(), field.name


@needs_kernel
@pytest.mark.parametrize(("block_size", "padding"), [(16, 0), (32, 1), (16, 37)])
@pytest.mark.parametrize("name", CASES)
def test_kernel_lays_rows_out_as_the_definition(name: str, block_size: int, padding: int) -> None:
    requests = CASES[name]
    arguments = tensors(requests, block_size)
    num_rows = len(by_loop(requests, arguments, block_size, 7, 0).token_ids_N) + padding
    found = build_rows(*arguments, block_size=block_size, mask_token_id=MASK, max_draft_tokens=7, num_rows=num_rows)
    assert_same(found, by_loop(requests, arguments, block_size, 7, num_rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_twin_lays_rows_out_as_the_definition(name: str, dtype: torch.dtype) -> None:
    requests = CASES[name]
    arguments = tensors(requests, 16, dtype)
    num_rows = len(by_loop(requests, arguments, 16, 7, 0).token_ids_N) + 5
    found = twin(build_rows)(*arguments, block_size=16, mask_token_id=MASK, max_draft_tokens=7, num_rows=num_rows)
    assert_same(found, by_loop(requests, arguments, 16, 7, num_rows))


@needs_kernel
@pytest.mark.parametrize("num_requests", [1, 63, 130])
def test_kernel_equals_twin_on_random_batches(num_requests: int) -> None:
    generator = torch.Generator().manual_seed(num_requests)
    drawn = torch.randint(0, 6, (num_requests, 3), generator=generator).tolist()
    requests = [Given(start * 17, num_valid, depth, 10) for start, num_valid, depth in drawn]
    arguments = tensors(requests, 16)
    arguments[5][:, 7:] = -1  # blocks that nobody has given out
    options = dict(block_size=16, mask_token_id=MASK)
    # The last size is too small for all rows: those beyond it are left out of everything.
    for num_rows in (10 * num_requests, 2 * num_requests):
        found = build_rows(*arguments, max_draft_tokens=5, num_rows=num_rows, **options)
        assert_same(found, twin(build_rows)(*arguments, max_draft_tokens=5, num_rows=num_rows, **options))


@needs_kernel
@pytest.mark.parametrize(("hidden_size", "num_rows"), [(3, 3), (104, 7), (4096, 5), (576, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_rows_by_address_equal_their_twin(hidden_size: int, num_rows: int, dtype: torch.dtype) -> None:
    """Rows of two payloads in turn; the address of a row that no source names leads nowhere."""
    generator = torch.Generator().manual_seed(hidden_size)
    payloads = [torch.randn(3, hidden_size, generator=generator).to(dtype) for _ in range(2)]
    payloads = [payload.pin_memory() if DEVICE == "cuda" else payload for payload in payloads]
    addresses = [payload[row].data_ptr() for row in range(3) for payload in payloads]
    records_R2 = torch.tensor([[address, 0] for address in [*addresses, 8]], device=DEVICE)
    mask_H = torch.randn(hidden_size, generator=generator).to(DEVICE, dtype)
    sources_N = torch.randint(-1, 6, (num_rows,), generator=generator, dtype=torch.int32).to(DEVICE)
    out = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype, device=DEVICE)
    expected = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype)
    assert place_hidden(records_R2[:, 0], sources_N, mask_H, out) is out
    twin(place_hidden)(records_R2[:, 0].cpu(), sources_N.cpu(), mask_H.cpu(), expected)
    assert torch.equal(out.cpu(), expected)
    for row, source in zip(expected, sources_N.tolist(), strict=True):
        assert torch.equal(row, mask_H.cpu() if source < 0 else payloads[source % 2][source // 2])


@pytest.mark.gpu
def test_a_captured_launch_follows_batches_that_change_on_the_device() -> None:
    options = dict(block_size=16, mask_token_id=MASK)
    batches = [DECODE, [Given(0, 0, 0), Given(100, 8, 7, 9), Given(5, 1, 0, 6)], [Given(3, 5, 5)] * 3]
    given = tensors(DECODE, 16)
    hidden = torch.empty(64, 576, device=DEVICE)
    payload_RH, mask_H = torch.randn(len(given[4]), 576, device=DEVICE), torch.randn(576, device=DEVICE)
    addresses_R = payload_RH.data_ptr() + 4 * 576 * torch.arange(len(payload_RH), device=DEVICE)

    def run() -> Rows:
        rows = build_rows(*given, max_draft_tokens=7, num_rows=64, **options)
        place_hidden(addresses_R, rows.sources_N, mask_H, hidden)
        return rows

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = run()
    for batch in batches:
        for tensor, value in zip(given, tensors(batch, 16), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert_same(rows, by_loop(batch, given, 16, 7, 64))
        assert torch.equal(hidden, torch.cat([payload_RH, mask_H[None]])[rows.sources_N.long()])


# What a target's step leaves of each request


@dataclasses.dataclass(frozen=True)
class Accepted:
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


ACCEPTED = {
    "decoding": Accepted((4, 1, 4, 4), (3, 0, 3, 3), (3, 1, 1, 4)),
    "no drafts": Accepted((1, 1, 1), None, (1, 1, 1)),
    "prompts beside drafts": Accepted((9, 8, 40, 2), (0, 7, 0, 1), (1, 8, 0, 1)),
    "a long chunk": Accepted((205, 3), (0, 2), (0, 2)),
    "one row": Accepted((1,), (0,), (1,)),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_accepted_rows_follow_the_rule_and_their_tokens_are_tokens(name: str, dtype: torch.dtype) -> None:
    num_valid_B, next_tokens_R = accepted_rows(*ACCEPTED[name].tensors(dtype))
    valid, tokens = ACCEPTED[name].expected()
    assert num_valid_B.tolist() == valid
    assert {row: int(next_tokens_R[row]) for row in tokens} == tokens
    assert int(next_tokens_R.min()) >= 0, "a rejected row's token is none"


# Between the matrix products


EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 32), (5, 96), (3, 1000))  # rows, numbers of a row


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def equal(found: Tensor, expected: Tensor) -> None:
    """To one rounding of the type: kernels sum in another order."""
    tolerance = 2e-2 if expected.dtype == torch.bfloat16 else 2e-6
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
@pytest.mark.parametrize("keeps_normed", [False, True])
def test_first_rows(num_rows: int, size: int, dtype: torch.dtype, keeps_normed: bool) -> None:
    ids_N = torch.randint(0, 7, (num_rows,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids_N[-1] = 6  # the mask token
    weights = [normal(size, dtype=dtype, seed=seed) for seed in (1, 2, 3)]
    arguments = (ids_N, normal(num_rows, size, dtype=dtype), normal(7, size, dtype=dtype, seed=4), 6, *weights, EPS)
    found = first_rows(*arguments, keeps_normed)
    for have, expected in zip(found, twin(first_rows)(*arguments, keeps_normed), strict=True):
        equal(have, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), SIZES)
def test_add_norm(num_rows: int, size: int, dtype: torch.dtype) -> None:
    stream, added = (normal(num_rows, size, dtype=dtype, seed=seed) for seed in (0, 1))
    arguments = (stream, added, normal(size, dtype=dtype, seed=2), EPS)
    for found, expected in zip(add_norm(*arguments), twin(add_norm)(*arguments), strict=True):
        equal(found, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_queries", "num_groups", "head_size"), [(4, 2, 8), (9, 3, 64), (2, 2, 6), (32, 4, 128)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rotate_heads(num_queries: int, num_groups: int, head_size: int, dtype: torch.dtype, is_normed: bool) -> None:
    heads_NHD = normal(3, num_queries + 2 * num_groups, head_size, dtype=dtype)
    norms = (normal(head_size, dtype=dtype, seed=1), normal(head_size, dtype=dtype, seed=2)) if is_normed else None
    cos_PF, sin_PF = tables(50, head_size)
    positions_N = torch.tensor([0, 49, 17], device=DEVICE)
    arguments = (heads_NHD, num_queries, num_groups, positions_N, cos_PF, sin_PF, norms, EPS)
    found = rotate_heads(*arguments)
    for have, expected in zip(found, twin(rotate_heads)(*arguments), strict=True):
        equal(have, expected)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 48), (4, 1536)])
def test_silu_mul(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_rows, 2 * size, dtype=dtype) * 4
    equal(silu_mul(gate_up), twin(silu_mul)(gate_up))


@needs_kernel
@pytest.mark.parametrize("name", ["one layer", "every switch"])
def test_a_pass_of_kernels_drafts_as_the_sessions(name: str) -> None:
    """All kernels of a pass together, in float32."""
    switches = dict(num_hidden_layers=2, norm_before_residual=True, sliding_window=6)
    config = SWITCHES[name] if name in SWITCHES else dataclasses.replace(SWITCHES["qwen3"], **switches)
    requests = Requests(random_drafter(config).float().to(DEVICE), 3)
    parallel_pass = requests.new_pass(DEVICE)
    for steps in STEPS[:3]:
        expected = [requests.expected(step) for step in steps]
        assert token_ids(parallel_pass.run(requests.batch(steps))).tolist() == expected


def tables(num_positions: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, D / 2] of the drafter's rotation."""
    cos, sin = rotary_tables(torch.arange(num_positions, device=DEVICE)[None], head_size, 10000.0)
    return cos[0, 0, :, : head_size // 2].contiguous(), sin[0, 0, :, : head_size // 2].contiguous()


def test_the_twins_are_the_drafters_formulas() -> None:
    x = normal(4, 32)
    norm = RMSNorm(32, EPS).to(DEVICE)
    norm.weight.data.copy_(normal(32, seed=1))
    added, normed = twin(add_norm)(x, x, norm.weight.detach(), EPS)
    equal(normed, norm(added).detach())
    gate_up = normal(4, 20)
    equal(twin(silu_mul)(gate_up), F.silu(gate_up[:, :10]) * gate_up[:, 10:])
    heads_NHD, positions_N = normal(4, 8, 16), torch.tensor([3, 0, 9, 40], device=DEVICE)
    q_NAD, k_NGD = twin(rotate_heads)(heads_NHD, 4, 2, positions_N, *tables(50, 16), None, EPS)
    rotated = rotate(heads_NHD.transpose(0, 1)[None], *rotary_tables(positions_N[None], 16, 10000.0))[0].transpose(0, 1)
    equal(q_NAD, rotated[:, :4])
    equal(k_NGD, rotated[:, 4:6])
