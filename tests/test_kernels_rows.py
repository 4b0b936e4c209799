"""Rows and hidden states of a pass: kernels against twins, twins against the rows of `peagle.draft` written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.drafter.rows import Rows, build_rows, build_rows_torch, place_hidden, place_hidden_at, place_hidden_at_torch
from tests.kernel_device import DEVICE, needs_kernel

MASK = 999


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a batch; `payload` rows were computed by the target, the first `num_valid` of them count."""

    start: int
    num_valid: int
    depth: int
    payload: int | None = None


DECODE = [Request(7, 3, 4, 5), Request(31, 1, 4, 5), Request(16, 5, 4, 5)]
CASES: dict[str, list[Request]] = {
    "no request": [],
    "one row": [Request(0, 1, 1)],
    "decode": DECODE,
    "all rejected but one": [Request(40, 1, 7, 8), Request(0, 1, 7, 8)],
    "all accepted": [Request(40, 8, 7, 8)],
    "depth 0": [Request(12, 20, 0), Request(3, 1, 0)],
    "chunk beside decode": [Request(64, 70, 0), *DECODE, Request(0, 33, 7)],
    "padding requests": [Request(0, 0, 0), DECODE[0], Request(0, 0, 5), DECODE[1], Request(0, 0, 0)],
    "beyond the block table": [Request(190, 3, 6)],
    "deeper than asked for": [Request(5, 2, 30)],
}


def tensors(requests: list[Request], block_size: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
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
    start_B, num_valid_B, depth_B = (torch.tensor(column, dtype=dtype) for column in columns)
    made = [start_B, num_valid_B, torch.tensor(offsets, dtype=dtype), depth_B, next_tokens_R, table_BN]
    return [tensor.to(DEVICE) for tensor in made]


def by_loop(requests: list[Request], arguments: list[Tensor], block_size: int, max_depth: int, num_rows: int) -> Rows:
    """The definition, request by request and row by row."""
    offsets, next_tokens, table = (arguments[index].tolist() for index in (2, 4, 5))
    found: list[tuple[int, int, int, int]] = []
    first, samples, context = [0], [], []
    for index, request in enumerate(requests):
        depth = min(request.depth, max_depth) if request.num_valid else 0
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
        samples.append(sampled + [-1] * (max_depth - depth))
    found += [(0, 0, -1, -1)] * (num_rows - len(found))
    columns = torch.tensor(found, dtype=torch.int64).view(-1, 4).unbind(1)
    return Rows(
        *columns,
        torch.tensor(samples, dtype=torch.int64).view(-1, max_depth),
        torch.tensor(first),
        torch.tensor(context),
    )


def assert_same(found: Rows, expected: Rows) -> None:
    for field in dataclasses.fields(Rows):
        have, want = getattr(found, field.name), getattr(expected, field.name)
        assert have.tolist() == want.tolist(), field.name


@needs_kernel
@pytest.mark.parametrize("padding", [0, 1, 37])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", CASES)
def test_kernel_lays_rows_out_as_the_definition(name: str, block_size: int, padding: int) -> None:
    requests = CASES[name]
    arguments = tensors(requests, block_size)
    num_rows = len(by_loop(requests, arguments, block_size, 7, 0).token_ids_N) + padding
    found = build_rows(*arguments, block_size=block_size, mask_token_id=MASK, max_depth=7, num_rows=num_rows)
    assert_same(found, by_loop(requests, arguments, block_size, 7, num_rows))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_twin_lays_rows_out_as_the_definition(name: str, dtype: torch.dtype) -> None:
    requests = CASES[name]
    arguments = tensors(requests, 16, dtype)
    num_rows = len(by_loop(requests, arguments, 16, 7, 0).token_ids_N) + 5
    found = Rows.empty(len(requests), num_rows, 7, DEVICE)
    build_rows_torch(*arguments, found, block_size=16, mask_token_id=MASK)
    assert_same(found, by_loop(requests, arguments, 16, 7, num_rows))


@needs_kernel
@pytest.mark.parametrize("num_requests", [1, 2, 63, 130])
def test_kernel_equals_twin_on_random_batches(num_requests: int) -> None:
    generator = torch.Generator().manual_seed(num_requests)
    drawn = torch.randint(0, 9, (num_requests, 3), generator=generator).tolist()
    requests = [Request(start * 17, num_valid, depth, 10) for start, num_valid, depth in drawn]
    arguments = tensors(requests, 16)
    arguments[5][:, 7:] = -1  # blocks that nobody has given out
    options = dict(block_size=16, mask_token_id=MASK)
    # The last size is too small for all rows: those beyond it are left out of everything.
    for num_rows in (16 * num_requests, 3 * num_requests):
        found = build_rows(*arguments, max_depth=5, num_rows=num_rows, **options)
        expected = Rows.empty(num_requests, num_rows, 5, DEVICE)
        build_rows_torch(*arguments, expected, **options)
        assert_same(found, expected)


def test_outputs_are_written_in_place() -> None:
    arguments = tensors(DECODE, 16)
    out = Rows.empty(3, 24, 4, DEVICE)
    kept = build_rows(*arguments, block_size=16, mask_token_id=MASK, max_depth=4, num_rows=24, out=out)
    assert kept is out
    assert_same(out, by_loop(DECODE, arguments, 16, 4, 24))


@pytest.mark.parametrize(
    ("position", "name"), [(1, "num_valid_B"), (2, "row_offset_B"), (3, "depth_B"), (5, "block_table_BN")]
)
def test_shapes_that_do_not_fit_are_named(position: int, name: str) -> None:
    arguments = tensors(DECODE, 16)
    arguments[position] = arguments[position][:2]
    with pytest.raises(ValueError, match=name):
        build_rows(*arguments, block_size=16, mask_token_id=MASK, max_depth=4, num_rows=24)


@needs_kernel
@pytest.mark.parametrize(("hidden_size", "num_rows"), [(3, 3), (104, 7), (4096, 5), (576, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_rows_by_address_equal_their_twin(hidden_size: int, num_rows: int, dtype: torch.dtype) -> None:
    """Rows of two payloads in turn; the address of a row that no source names leads nowhere."""
    generator = torch.Generator().manual_seed(hidden_size)
    payloads = [torch.randn(3, hidden_size, generator=generator).to(dtype) for _ in range(2)]
    payloads = [one.pin_memory() if DEVICE == "cuda" else one for one in payloads]
    addresses = [one[row].data_ptr() for row in range(3) for one in payloads]
    records_R2 = torch.tensor([[address, 0] for address in [*addresses, 8]], device=DEVICE)
    mask_H = torch.randn(hidden_size, generator=generator).to(DEVICE, dtype)
    sources_N = torch.randint(-1, 6, (num_rows,), generator=generator, dtype=torch.int32).to(DEVICE)
    out = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype, device=DEVICE)
    expected = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype)
    assert place_hidden_at(records_R2[:, 0], sources_N, mask_H, out) is out
    place_hidden_at_torch(records_R2[:, 0].cpu(), sources_N.cpu(), mask_H.cpu(), expected)
    assert torch.equal(out.cpu(), expected)
    for row, source in zip(expected, sources_N.tolist(), strict=True):
        assert torch.equal(row, mask_H.cpu() if source < 0 else payloads[source % 2][source // 2])


@pytest.mark.parametrize(
    "wrong", [{"addresses_R": torch.zeros(2, dtype=torch.int32)}, {"out_NH": torch.zeros(8, 3).t()}]
)
def test_hidden_rows_by_address_refuse_what_does_not_fit(wrong: dict[str, Tensor]) -> None:
    fitting = {
        "addresses_R": torch.zeros(2, dtype=torch.int64),
        "sources_N": torch.full((3,), -1, dtype=torch.int32),
        "mask_hidden_H": torch.zeros(8),
        "out_NH": torch.zeros(3, 8),
    }
    with pytest.raises(ValueError, match="addresses_R must be int64"):
        place_hidden_at(**{**fitting, **wrong})
    with pytest.raises(ValueError, match=r"out_NH has shape \[3, 8\]"):
        place_hidden_at(**{**fitting, "mask_hidden_H": torch.zeros(9)})


def test_hidden_rows_of_another_size_are_refused() -> None:
    payload_RH, sources_N, out_NH = torch.zeros(2, 8), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"payload_RH has shape \[2, 8\]"):
        place_hidden(payload_RH, sources_N, torch.zeros(9), out_NH)
    with pytest.raises(ValueError, match=r"out_NH has shape \[2, 8\]"):
        place_hidden(payload_RH, sources_N, torch.zeros(8), out_NH[:2])


def test_hidden_rows_of_a_payload() -> None:
    payload_RH, out_NH = torch.arange(6.0).view(3, 2), torch.zeros(4, 2, dtype=torch.float64)
    sources_N = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    assert place_hidden(payload_RH, sources_N, torch.tensor([-5.0, -6.0]), out_NH) is out_NH
    assert out_NH.tolist() == [[4, 5], [-5, -6], [0, 1], [4, 5]]
    assert place_hidden(payload_RH[:0], sources_N[1:2], torch.ones(2), out_NH[:1]).tolist() == [[1, 1]]


@pytest.mark.gpu
def test_a_captured_launch_follows_batches_that_change_on_the_device() -> None:
    options = dict(block_size=16, mask_token_id=MASK)
    batches = [DECODE, [Request(0, 0, 0), Request(100, 8, 7, 9), Request(5, 1, 0, 6)], [Request(3, 5, 5)] * 3]
    given = tensors(DECODE, 16)
    rows, hidden = Rows.empty(3, 64, 7, DEVICE), torch.empty(64, 576, device=DEVICE)
    payload_RH, mask_H = torch.randn(len(given[4]), 576, device=DEVICE), torch.randn(576, device=DEVICE)
    addresses_R = payload_RH.data_ptr() + 4 * 576 * torch.arange(len(payload_RH), device=DEVICE)

    def run() -> None:
        build_rows(*given, max_depth=7, num_rows=64, out=rows, **options)
        place_hidden_at(addresses_R, rows.sources_N, mask_H, hidden)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for batch in batches:
        for tensor, value in zip(given, tensors(batch, 16), strict=True):
            tensor.copy_(value)
        graph.replay()
        assert_same(rows, by_loop(batch, given, 16, 7, 64))
        expected = torch.empty_like(hidden)
        place_hidden(payload_RH, rows.sources_N, mask_H, expected)
        assert torch.equal(hidden, expected)
