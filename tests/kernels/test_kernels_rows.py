"""What happens to rows outside the matrix products: kernels against twins, twins against the rules written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from peagle.drafter.rows import PassBatch, Rows, build_rows, place_hidden
from tests.support.head_factory import random_drafter
from tests.support.kernel_device import DEVICE, needs_kernel, twin
from tests.support.pass_requests import STEPS, SWITCHES, Requests, run

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
    "one row": [Given(0, 1, 1)],
    "decode": DECODE,
    "all rejected but one": [Given(40, 1, 7, 8), Given(0, 1, 7, 8)],
    "all accepted": [Given(40, 8, 7, 8)],
    "depth 0": [Given(12, 20, 0), Given(3, 1, 0)],
    "chunk beside decode": [Given(64, 70, 0), *DECODE, Given(0, 33, 7)],
    "padding requests": [Given(0, 0, 0), DECODE[0], Given(0, 0, 5), DECODE[1], Given(0, 0, 0)],
}


def tensors(requests: list[Given], block_size: int, dtype: torch.dtype = torch.int32) -> list[Tensor]:
    """Integers of a batch; requests lie in the payload last first, with a gap; 12 columns of 16 positions."""
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


def by_loop(requests: list[Given], arguments: list[Tensor], block_size: int, max_drafts: int, num_rows: int) -> Rows:
    """The definition, request by request and row by row."""
    offsets, next_tokens, table = (arguments[index].tolist() for index in (2, 4, 5))
    found: list[tuple[int, int, int, int]] = []
    first, samples, context = [0], [], []
    for index, request in enumerate(requests):
        depth = request.depth if request.num_valid else 0
        positions = range(request.start, request.start + request.num_valid + max(depth - 1, 0))
        base = len(found)
        for number, position in enumerate(positions):
            source = offsets[index] + number if number < request.num_valid else -1
            column = position // block_size
            slot = table[index][column] * block_size + position % block_size
            found.append((next_tokens[source] if source >= 0 else MASK, position, slot, source))
        first.append(len(found))
        context.append(positions.stop)
        sampled = [base + request.num_valid - 1 + number for number in range(depth)]
        samples.append(sampled + [-1] * (max_drafts - depth))
    found += [(0, 0, -1, -1)] * (num_rows - len(found))
    columns = torch.tensor(found, dtype=torch.int64).view(-1, 4).unbind(1)
    samples_BD = torch.tensor(samples, dtype=torch.int64).view(-1, max_drafts)
    return Rows(*columns, samples_BD, torch.tensor(first), torch.tensor(context))


def batch_of(given: list[Tensor]) -> PassBatch[Tensor]:
    return PassBatch(*given[:5], addresses_R=given[4], block_table_BN=given[5])


def assert_same(found: Rows, expected: Rows) -> None:
    for field in dataclasses.fields(Rows):
        have, want = getattr(found, field.name), getattr(expected, field.name)
        assert have.tolist() == want.tolist(), field.name


@pytest.mark.parametrize(("block_size", "padding"), [(16, 0), (32, 1), (16, 37)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_laid_out_as_the_definition(name: str, dtype: torch.dtype, block_size: int, padding: int) -> None:
    requests = CASES[name]
    arguments = tensors(requests, block_size, dtype)
    num_rows = len(by_loop(requests, arguments, block_size, 7, 0).token_ids_N) + padding
    found = build_rows(batch_of(arguments), block_size=block_size, mask_token_id=MASK, max_drafts=7, num_rows=num_rows)
    assert_same(found, by_loop(requests, arguments, block_size, 7, num_rows))


@needs_kernel
@pytest.mark.parametrize(("hidden_size", "num_rows"), [(3, 3), (104, 7), (4096, 5), (576, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hidden_rows_by_address_equal_their_twin(hidden_size: int, num_rows: int, dtype: torch.dtype) -> None:
    """Rows of two payloads in turn; the address of a row that no source names leads nowhere."""
    generator = torch.Generator().manual_seed(hidden_size)
    payloads = [torch.randn(3, hidden_size, generator=generator).to(dtype) for _ in range(2)]
    payloads = [payload.pin_memory() if DEVICE == "cuda" else payload for payload in payloads]
    addresses = [payload[row].data_ptr() for row in range(3) for payload in payloads]
    addresses_R = torch.tensor([*addresses, 8], device=DEVICE)
    mask_H = torch.randn(hidden_size, generator=generator).to(DEVICE, dtype)
    sources_N = torch.randint(-1, 6, (num_rows,), generator=generator, dtype=torch.int32).to(DEVICE)
    out = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype, device=DEVICE)
    expected = torch.full((num_rows, hidden_size), float("nan"), dtype=dtype)
    assert place_hidden(addresses_R, sources_N, mask_H, out) is out
    twin(place_hidden)(addresses_R.cpu(), sources_N.cpu(), mask_H.cpu(), expected)
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
        rows = build_rows(batch_of(given), max_drafts=7, num_rows=64, **options)
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


@needs_kernel
@pytest.mark.parametrize("name", ["one layer", "every switch"])
def test_a_pass_of_kernels_drafts_as_the_sessions(name: str) -> None:
    """All kernels of a pass together, in float32."""
    switches = dict(num_hidden_layers=2, norm_before_residual=True)
    config = SWITCHES[name] if name in SWITCHES else dataclasses.replace(SWITCHES["qwen3"], **switches)
    requests = Requests(random_drafter(config).float().to(DEVICE), 3)
    parallel_pass = requests.new_pass(DEVICE)
    for steps in STEPS[:3]:
        expected = [requests.expected(step) for step in steps]
        assert run(parallel_pass, requests.batch(steps)).tolist() == expected
